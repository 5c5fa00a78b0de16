// One fault each; the tests say what the prover has to report.
#include <simt/prove.h>

#include <set>

#include "kernels.h"

using namespace cases;
using simt::prover::Trial;

template <Bug kBug>
static void insert(Trial& trial) {
  std::vector<uint64_t> ids(24);
  for (auto& id : ids) id = static_cast<uint64_t>(trial.random.below(9));
  const auto table = trial.array<uint64_t>("table", std::vector<uint64_t>(64)),
             total = trial.array<uint64_t>("total", {0});
  const auto counts = trial.array<uint32_t>("counts", std::vector<uint32_t>(64));
  trial.may_differ(table);
  trial.may_differ(counts);
  trial.launch(Insert<kBug>{table, total, trial.array<uint64_t>("ids", ids), counts, 2}, {2, 64, 8});
  std::set<uint64_t> keys;
  for (const uint64_t key : table.values()) trial.expect(key == 0 || keys.insert(key).second, "an id has one slot");
  trial.expect(keys.size() == std::set<uint64_t>(ids.begin(), ids.end()).size(), "each id has a slot");
}
SIMT_PROOF("lost insert") { insert<Bug::kLostInsert>(trial); }
SIMT_PROOF("no barrier") { insert<Bug::kNoBarrier>(trial); }
SIMT_PROOF("plain load of slots") { insert<Bug::kPlainLoad>(trial); }

SIMT_PROOF("no second barrier") { trial.launch(Rounds{trial.uninitialized<uint32_t>("out", 64), false}, {1, 64, 256}); }
SIMT_PROOF("vote instead of sync_warp") {
  trial.launch(Neighbours{trial.uninitialized<uint32_t>("out", 32), false}, {1, 32, 128});
}

template <Publish kHow>
static void message(Trial& trial) {
  const auto flag = trial.array<uint32_t>("flag", {0}), payload = trial.array<uint32_t>("payload", {0}),
             out = trial.uninitialized<uint32_t>("out", 1);
  trial.may_differ(out);
  trial.launch(Message<kHow>{flag, payload, out}, {2, 32});
  trial.expect(out.values()[0] == 7, "the payload that was published");
}
SIMT_PROOF("missing fence") { message<Publish::kRelaxed>(trial); }
SIMT_PROOF("block scope for another block") { message<Publish::kBlockScope>(trial); }
SIMT_PROOF("plain payload without release") { message<Publish::kPlainPayload>(trial); }
SIMT_PROOF("last block without release") {
  const auto parts = trial.uninitialized<uint32_t>("parts", 4), counter = trial.array<uint32_t>("counter", {0});
  trial.launch(LastBlock<Order::kRelaxed>{parts, counter, trial.uninitialized<uint32_t>("out", 1)}, {4, 32});
}

template <Ring kHow>
static void ring(Trial& trial) {
  const std::vector<float> in(96, 1);
  trial.launch(Pipeline<kHow>{trial.array<float>("in", in), trial.uninitialized<float>("out", 32)}, {1, 32, 256});
}
SIMT_PROOF("copies not waited for") { ring<Ring::kNoWait>(trial); }
SIMT_PROOF("one group too few") { ring<Ring::kOneTooFew>(trial); }
SIMT_PROOF("copies without a barrier") { ring<Ring::kNoBarrier>(trial); }

SIMT_PROOF("flags by stores") {
  const auto flags = trial.array<uint32_t>("flags", {0, 0}), missed = trial.uninitialized<uint32_t>("missed", 2);
  trial.may_differ(missed);
  trial.launch(Flags<false>{flags, missed}, {1, 2});
  trial.expect(missed.values()[0] + missed.values()[1] <= 1, "one of two sees the other");
}

// A fault for each outcome: an exhaustive search has to meet every one that can be, and none that cannot.
template <bool kWithChanges>
static void outcome(Trial& trial, uint32_t first, uint32_t second) {
  const auto flags = trial.array<uint32_t>("flags", {0, 0}), missed = trial.uninitialized<uint32_t>("missed", 2);
  trial.may_differ(missed);
  trial.launch(Flags<kWithChanges>{flags, missed}, {1, 2});
  trial.expect(missed.values() != std::vector<uint32_t>{first, second}, "this outcome");
}
SIMT_PROOF("stores 0 0") { outcome<false>(trial, 0, 0); }
SIMT_PROOF("stores 0 1") { outcome<false>(trial, 0, 1); }
SIMT_PROOF("stores 1 0") { outcome<false>(trial, 1, 0); }
SIMT_PROOF("stores 1 1") { outcome<false>(trial, 1, 1); }
SIMT_PROOF("changes 0 0") { outcome<true>(trial, 0, 0); }
SIMT_PROOF("changes 0 1") { outcome<true>(trial, 0, 1); }
SIMT_PROOF("changes 1 0") { outcome<true>(trial, 1, 0); }
SIMT_PROOF("changes 1 1") { outcome<true>(trial, 1, 1); }

static void slip(Trial& trial, Slip which, simt::Shape shape = {1, 64, 256}) {
  const auto a = trial.array<uint32_t>("a", std::vector<uint32_t>(64));
  const auto b = which == Slip::kScratchUnwritten ? trial.uninitialized<uint32_t>("b", 64)
                                                  : trial.array<uint32_t>("b", std::vector<uint32_t>(64));
  auto span = a.global();
  if (which == Slip::kPastArray) span = {span.data(), 100};
  trial.launch(Slips{span, b, which}, shape);
}
SIMT_PROOF("outside of a span") { slip(trial, Slip::kOutside); }
SIMT_PROOF("span past its array") { slip(trial, Slip::kPastArray); }
SIMT_PROOF("past shared memory") { slip(trial, Slip::kPastShared); }
SIMT_PROOF("vector at an odd element") { slip(trial, Slip::kVectorOffset); }
SIMT_PROOF("vector of a shifted array") {
  const auto a = trial.array<uint32_t>("a", std::vector<uint32_t>(64), 1);
  trial.launch(Slips{a, a, Slip::kVector}, {1, 8});
}
SIMT_PROOF("shared memory that nobody wrote") { slip(trial, Slip::kSharedUnwritten); }
SIMT_PROOF("scratch that nobody wrote") { slip(trial, Slip::kScratchUnwritten); }
SIMT_PROOF("lane not in its mask") { slip(trial, Slip::kNotInMask, {1, 32}); }
SIMT_PROOF("masks that differ") { slip(trial, Slip::kOtherMask, {1, 32}); }
SIMT_PROOF("part that votes apart") { slip(trial, Slip::kOtherPart, {1, 32}); }
SIMT_PROOF("collectives that differ") { slip(trial, Slip::kOtherKind, {1, 32}); }
SIMT_PROOF("shuffle from outside") { slip(trial, Slip::kFromOutside, {1, 32}); }
SIMT_PROOF("returned lane in a mask") { slip(trial, Slip::kReturned, {1, 32}); }
SIMT_PROOF("lane that is not there") { slip(trial, Slip::kNoSuchLane, {1, 40}); }
SIMT_PROOF("width that is none") { slip(trial, Slip::kWidth, {1, 32}); }
SIMT_PROOF("return before a barrier") { slip(trial, Slip::kReturnBeforeBarrier); }
SIMT_PROOF("two barriers") { slip(trial, Slip::kTwoBarriers); }
SIMT_PROOF("deadlock") { slip(trial, Slip::kDeadlock); }
SIMT_PROOF("first come") { slip(trial, Slip::kFirstCome); }
SIMT_PROOF("sum of floats by atomics") { slip(trial, Slip::kFloatSum, {1, 32}); }
SIMT_PROOF("wait for another block") { slip(trial, Slip::kSpin, {2, 32}); }
SIMT_PROOF("atomics of two sizes") { slip(trial, Slip::kMixedSizes, {1, 32}); }
SIMT_PROOF("too many threads") { slip(trial, Slip::kFirstCome, {1, 1025}); }
SIMT_PROOF("more than the kernel's threads") { slip(trial, Slip::kFirstCome, {1, 96}); }
SIMT_PROOF("no block") { slip(trial, Slip::kFirstCome, {0, 32}); }
SIMT_PROOF("too much shared memory") { slip(trial, Slip::kFirstCome, {1, 32, 200000}); }
SIMT_PROOF("pointer of the host") {
  static uint32_t on_the_host[64];
  const auto b = trial.array<uint32_t>("b", std::vector<uint32_t>(64));
  trial.launch(Slips{simt::Global<uint32_t>(on_the_host, 64), b, Slip::kScratchUnwritten}, {1, 32});
}

int main(int count, char** arguments) { return simt::prover::main(count, arguments); }
