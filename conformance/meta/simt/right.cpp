// Right kernels: no schedule may give a fault.
#include <simt/prove.h>

#include <map>

#include "kernels.h"

using namespace cases;
using simt::prover::Trial;

SIMT_PROOF("insert") {
  std::vector<uint64_t> ids(24);
  for (auto& id : ids) id = static_cast<uint64_t>(trial.random.below(9));
  const auto table = trial.array<uint64_t>("table", std::vector<uint64_t>(64)),
             total = trial.array<uint64_t>("total", {0});
  const auto counts = trial.array<uint32_t>("counts", std::vector<uint32_t>(64));
  // Which slot an id has is up to who comes first.
  trial.may_differ(table);
  trial.may_differ(counts);
  trial.launch(Insert<Bug::kNone>{table, total, trial.array<uint64_t>("ids", ids), counts, 2}, {2, 64, 8});
  std::map<uint64_t, uint32_t> wanted, got;
  for (const uint64_t id : ids) ++wanted[id + 1];
  for (size_t slot = 0; slot < 64; ++slot) {
    const uint64_t key = table.values()[slot];
    trial.expect(key == 0 || got.count(key) == 0, "an id has one slot");
    if (key != 0) got[key] = counts.values()[slot];
  }
  trial.expect(got == wanted && total.values()[0] == 24, "how often each id occurs");
}

SIMT_PROOF("rounds") {
  const auto out = trial.uninitialized<uint32_t>("out", 128);
  trial.launch(Rounds{out, true}, {2, 64, 256});
  for (uint32_t i = 0; i < 128; ++i) trial.expect(out.values()[i] == 3 + 3 * ((i + 1) % 64), "a sum of neighbours");
}

SIMT_PROOF("neighbours") {
  const auto out = trial.uninitialized<uint32_t>("out", 32);
  trial.launch(Neighbours{out, true}, {1, 32, 128});
  for (uint32_t i = 0; i < 32; ++i) trial.expect(out.values()[i] == (i ^ 1), "the neighbour's number");
}

SIMT_PROOF("warp sums with a tail") {
  const int64_t threads = trial.random.between(33, 100), count = trial.random.between(1, threads);
  const auto out = trial.uninitialized<float>("out", 4);
  trial.launch(WarpSums{trial.array<float>("in", std::vector<float>(static_cast<size_t>(count), 1)), out},
               {1, threads});
  if (count >= 32) trial.expect(out.values()[0] == 32, "the sum of the first warp");
}

SIMT_PROOF("message by release") {
  const auto flag = trial.array<uint32_t>("flag", {0}), payload = trial.array<uint32_t>("payload", {0}),
             out = trial.uninitialized<uint32_t>("out", 1);
  trial.launch(Message<Publish::kRelease>{flag, payload, out}, {2, 32});
  trial.expect(out.values()[0] == 7, "the payload that was published");
}

SIMT_PROOF("message by fence") {
  const auto flag = trial.array<uint32_t>("flag", {0}), payload = trial.array<uint32_t>("payload", {0}),
             out = trial.uninitialized<uint32_t>("out", 1);
  trial.launch(Message<Publish::kFence>{flag, payload, out}, {2, 32});
  trial.expect(out.values()[0] == 7, "the payload that was published");
}

SIMT_PROOF("last block") {
  const auto parts = trial.uninitialized<uint32_t>("parts", 4), counter = trial.array<uint32_t>("counter", {0}),
             out = trial.uninitialized<uint32_t>("out", 1);
  trial.launch(LastBlock<Order::kAcqRel>{parts, counter, out}, {4, 32});
  trial.expect(out.values()[0] == 10, "the sum of all blocks");
}

SIMT_PROOF("asynchronous ring") {
  std::vector<float> in(96);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i);
  const auto out = trial.uninitialized<float>("out", 32);
  trial.launch(Pipeline<Ring::kRight>{trial.array<float>("in", in), out}, {1, 32, 256});
  for (size_t l = 0; l < 32; ++l) trial.expect(out.values()[l] == 3 * static_cast<float>((l + 1) % 32) + 96, "a sum");
}

SIMT_PROOF("halves of a warp") {
  const auto out = trial.uninitialized<uint32_t>("out", 32);
  trial.launch(Halves{out}, {1, 32});
  for (uint32_t i = 0; i < 32; ++i)
    trial.expect(out.values()[i] == (i < 16 ? 15U : 93U), "rounds of its half, then all");
}

SIMT_PROOF("histogram") {
  std::vector<uint32_t> in(64), wanted(4);
  for (auto& value : in) ++wanted[value = static_cast<uint32_t>(trial.random.below(4))];
  const auto counts = trial.array<uint32_t>("counts", {0, 0, 0, 0});
  trial.launch(Histogram{trial.array<uint32_t>("in", in), counts}, {1, 64});
  trial.expect_same(counts.values(), wanted, "counts");
}

SIMT_PROOF("bytes") {
  const auto out = trial.uninitialized<uint8_t>("out", 128);
  const auto counts = trial.uninitialized<uint32_t>("counts", 2);
  trial.launch(Bytes{out, counts}, {2, 64, 4});
  for (uint32_t i = 0; i < 128; ++i) trial.expect(out.values()[i] == i % 64, "a byte for each thread");
  trial.expect_same(counts.values(), {64, 64}, "threads of each block");
}

// For the exhaustive policy.
SIMT_PROOF("flags by changes") {
  const auto flags = trial.array<uint32_t>("flags", {0}), missed = trial.uninitialized<uint32_t>("missed", 2);
  trial.may_differ(missed);
  trial.launch(Flags<true>{flags, missed}, {1, 2});
  trial.expect(missed.values()[0] + missed.values()[1] <= 1, "one of two sees the other");
}

int main(int count, char** arguments) { return simt::prover::main(count, arguments); }
