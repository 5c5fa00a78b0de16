// Properties of the offload kernels: every unit and every cut has the same bits, packing moves its bytes and no other.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "offload/adam.h"
#include "offload/pack.h"
#include "offload/slot.h"
#include "offload_tests.h"

namespace {

using namespace fastimpl;
using namespace fastimpl::offload;

std::mt19937_64 random_bits(20251122);

int64_t uniform(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_bits); }

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "offload_tests: %s\n", what);
  std::exit(1);
}

// Normal values, and every kind that is not.
float value() {
  constexpr float kOdd[] = {0.0F,
                            -0.0F,
                            std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN(),
                            1e-42F,
                            -3e-41F,
                            3.3e38F};
  if (uniform(0, 9) == 0) return kOdd[uniform(0, 7)];
  return std::normal_distribution<float>()(random_bits);
}

std::vector<float> floats(int64_t count, bool positive = false) {
  std::vector<float> made(static_cast<size_t>(count));
  for (float& f : made) f = positive ? std::fabs(value()) : value();
  return made;
}

// One parameter of any types. Gradients of two bytes are random halves: all bit patterns are values.
struct Parameter {
  int64_t count;
  Float grad_type, weight_type;
  std::vector<uint8_t> grad, weight;
  std::vector<float> master, average, square, square_max;
  bool has_max, has_weight;

  AdamSlice slice() {
    return {grad.data(),
            master.data(),
            average.data(),
            square.data(),
            has_max ? square_max.data() : nullptr,
            has_weight ? weight.data() : nullptr};
  }
};

Parameter random_parameter() {
  const int64_t count = uniform(1, 200);
  const auto grad_type = static_cast<Float>(uniform(0, 2)), weight_type = static_cast<Float>(uniform(0, 2));
  Parameter p{count,
              grad_type,
              weight_type,
              std::vector<uint8_t>(static_cast<size_t>(count * fastimpl::float_bytes(grad_type))),
              std::vector<uint8_t>(static_cast<size_t>(count * fastimpl::float_bytes(weight_type)), 0xEE),
              floats(count),
              floats(count),
              floats(count, true),
              floats(count, true),
              uniform(0, 1) == 1,
              uniform(0, 1) == 1};
  if (grad_type == Float::kFloat32) {
    const std::vector<float> values = floats(count);
    std::memcpy(p.grad.data(), values.data(), p.grad.size());
  } else {
    for (uint8_t& byte : p.grad) byte = static_cast<uint8_t>(uniform(0, 255));
  }
  return p;
}

AdamHyper random_hyper() {
  const float decay = uniform(0, 1) ? 0.1F : 0.0F;
  return {uniform(0, 1) ? 0.99F : 1.0F, decay, 0.9F, 0.1F, 0.999F, 0.001F, 0.02F, 0.3F, 1e-8F};
}

// Numbers by their bits; one NaN is as good as another, for compilers may swap the operands of a sum.
bool same(const std::vector<float>& a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) ? !std::isnan(b[i]) : fastimpl::bits_of(a[i]) != fastimpl::bits_of(b[i])) return false;
  }
  return true;
}

bool same_weights(const Parameter& a, const Parameter& b) {
  if (a.weight_type != Float::kFloat32 || !a.has_weight) return a.weight == b.weight;
  std::vector<float> x(static_cast<size_t>(a.count)), y(x.size());
  std::memcpy(x.data(), a.weight.data(), a.weight.size());
  std::memcpy(y.data(), b.weight.data(), b.weight.size());
  return same(x, y);
}

void check_same(const Parameter& got, const Parameter& expected, const char* what) {
  require(same(got.master, expected.master) && same(got.average, expected.average) && same(got.square, expected.square),
          what);
  require(same(got.square_max, expected.square_max) && same_weights(got, expected), what);
  require(got.grad == expected.grad, "a gradient was written");
}

// The definition, element by element, with nothing for a vector unit to do.
void expect(Parameter* p, const AdamHyper& h, const AdamFlags& flags) {
  for (int64_t i = 0; i < p->count; ++i) {
    const auto at = static_cast<size_t>(i);
    float g = 0.0F;
    fastimpl::widen(p->grad_type, p->grad.data() + i * fastimpl::float_bytes(p->grad_type), &g, 1);
    if (flags.maximize) g = -g;
    const float w = p->master[at] * h.keep;
    if (flags.coupled) g = g + h.coupled_decay * w;
    p->average[at] = h.beta1 * p->average[at] + h.one_minus_beta1 * g;
    p->square[at] = h.beta2 * p->square[at] + h.one_minus_beta2 * (g * g);
    float root = p->square[at];
    if (p->has_max) {
      const float before = p->square_max[at];
      if (std::isnan(before) || before > root) root = before;
      p->square_max[at] = root;
    }
    p->master[at] = w - (h.step_size * p->average[at]) / (std::sqrt(root) / h.root_correction + h.eps);
    // A NaN of float16 keeps its payload there; the kernel has one for all.
    const float rounded = std::isnan(p->master[at]) ? std::numeric_limits<float>::quiet_NaN() : p->master[at];
    if (p->has_weight)
      fastimpl::narrow(p->weight_type, &rounded, p->weight.data() + i * fastimpl::float_bytes(p->weight_type), 1);
  }
}

void adam_has_one_meaning_on_every_unit() {
  for (int i = 0; i < 2000; ++i) {
    const Parameter start = random_parameter();
    const AdamHyper hyper = random_hyper();
    const AdamFlags flags{uniform(0, 1) == 1, uniform(0, 1) == 1};
    Parameter expected = start;
    expect(&expected, hyper, flags);
    for (int64_t isa = 0; isa <= static_cast<int64_t>(best_isa()); ++isa) {
      Parameter got = start;
      const AdamSlice slice = got.slice();
      const int64_t cut = uniform(0, got.count);
      adam_step(got.grad_type, got.weight_type, static_cast<Isa>(isa), slice, 0, cut, hyper, flags);
      adam_step(got.grad_type, got.weight_type, static_cast<Isa>(isa), slice, cut, got.count - cut, hyper, flags);
      check_same(got, expected, "a unit, or a cut, changed a bit");
    }
  }
}

void blocks_of_adam_may_run_at_once() {
  Parameter start = random_parameter();
  while (start.count < 64) start = random_parameter();
  const AdamHyper hyper = random_hyper();
  Parameter expected = start, got = start;
  expect(&expected, hyper, {});
  const AdamSlice slice = got.slice();
  std::vector<std::thread> threads;
  for (int64_t part = 0; part < 4; ++part) {
    const int64_t begin = got.count * part / 4, end = got.count * (part + 1) / 4;
    threads.emplace_back([&, begin, end] {
      adam_step(got.grad_type, got.weight_type, best_isa(), slice, begin, end - begin, hyper, {});
    });
  }
  for (auto& thread : threads) thread.join();
  check_same(got, expected, "parallel blocks");
}

struct Packing {
  std::vector<std::vector<uint8_t>> tensors;
  std::vector<PackEntry> entries;
  std::vector<uint8_t> slab, expected;
};

// Random tensors at random places; every second one is not aligned.
void random_packing(Packing* p, int64_t count, int64_t size_max) {
  int64_t end = 0;
  for (int64_t i = 0; i < count; ++i) {
    p->tensors.emplace_back(static_cast<size_t>(uniform(0, size_max)));
    for (uint8_t& byte : p->tensors.back()) byte = static_cast<uint8_t>(uniform(0, 200));
    const int64_t begin = uniform(0, 1) ? (end + 15) / 16 * 16 : end + uniform(0, 20);
    p->entries.push_back({p->tensors.back().data(), begin, static_cast<int64_t>(p->tensors.back().size())});
    end = begin + p->entries.back().size;
  }
  p->slab.assign(static_cast<size_t>(end + uniform(0, 40)), 0xEE);
  p->expected = p->slab;
  for (int64_t i = 0; i < count; ++i) {
    std::copy(p->tensors[static_cast<size_t>(i)].begin(), p->tensors[static_cast<size_t>(i)].end(),
              p->expected.begin() + p->entries[static_cast<size_t>(i)].offset);
  }
}

void clear(Packing* p) {
  for (auto& tensor : p->tensors) std::fill(tensor.begin(), tensor.end(), uint8_t{0});
}

void packing_moves_its_bytes_and_no_other() {
  for (int i = 0; i < 300; ++i) {
    Packing p;
    random_packing(&p, uniform(0, 40), uniform(0, 9) == 0 ? 3 * kTaskBytes : 400);
    const auto before = p.tensors;
    const PackPlan plan = plan_pack(p.entries.data(), static_cast<int64_t>(p.entries.size()));
    std::vector<std::thread> threads;
    for (const PackTask& task : plan.tasks)
      threads.emplace_back([&plan, task, &p] { run_task<true>(plan, task, p.slab.data()); });
    for (auto& thread : threads) thread.join();
    require(p.slab == p.expected, "pack");
    clear(&p);
    for (const PackTask& task : plan.tasks) run_task<false>(plan, task, p.slab.data());
    require(p.tensors == before && p.slab == p.expected, "unpack");
    clear(&p);
    move_pieces<false>(p.entries.data(), 0, static_cast<int64_t>(p.entries.size()), p.slab.data());
    require(p.tensors == before && p.slab == p.expected, "unpack by one thread");
  }
}

// The device's functor through a serial grid, its threads in random order.
template <bool kGather>
void run_grid(const Packing& p, uint8_t* slab) {
  const auto batch = std::make_unique<PackBatch<kGather>>();
  std::copy(p.entries.begin(), p.entries.end(), batch->entries);
  batch->slab = slab;
  std::vector<std::pair<int, int64_t>> threads;
  for (int entry = 0; entry < static_cast<int>(p.entries.size()); ++entry) {
    for (int64_t word = 0; word < batch->word_count(entry); ++word) threads.emplace_back(entry, word);
  }
  std::shuffle(threads.begin(), threads.end(), random_bits);
  for (const auto& [entry, word] : threads) (*batch)(entry, word);
}

void grids_pack_as_the_host_does() {
  for (int i = 0; i < 300; ++i) {
    Packing p;
    random_packing(&p, uniform(0, kPackBatch), 300);
    const auto before = p.tensors;
    run_grid<true>(p, p.slab.data());
    require(p.slab == p.expected, "pack on a grid");
    clear(&p);
    run_grid<false>(p, p.slab.data());
    require(p.tensors == before && p.slab == p.expected, "unpack on a grid");
  }
}

// Any cut of a parameter, at any address, has the bits of its elements one by one.
template <SlotKind kKind, Float kType>
void slot_cuts() {
  using T = Stored<kType>;
  using Bits = typename T::Bits;
  const int64_t count = uniform(1, 70), cut = uniform(0, count);
  const SlotHyper h{0.9F, 0.1F, 0.3F, 0.8F, 0.2F, 0.7F, -0.1F, 1e-3F, static_cast<int32_t>(uniform(0, kSlotFlags))};
  std::vector<std::vector<Bits>> lists(5, std::vector<Bits>(static_cast<size_t>(count)));
  for (size_t k = 0; k < lists.size(); ++k) {
    for (Bits& bits : lists[k]) bits = T::narrow(k < 3 ? value() : std::fabs(value()));
  }
  auto expected = lists;
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    float numbers[5];
    for (size_t k = 0; k < 5; ++k) numbers[k] = T::widen(expected[k][i]);
    slot_element<kKind, kType>(numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], h);
    for (size_t k = 0; k < 5; ++k) {
      const bool is_written = k == 0 || (k > 1 && static_cast<int64_t>(k) - 2 < slot_state_count(kKind));
      if (is_written) expected[k][i] = T::narrow(numbers[k]);
    }
  }
  const SlotTensors tensors{
      lists[0].data(), lists[1].data(), {lists[2].data(), lists[3].data(), lists[4].data()}, count, 0};
  slot_step(kKind, kType, tensors, h, 0, cut);
  slot_step(kKind, kType, tensors, h, cut, count - cut);
  for (size_t k = 0; k < 5; ++k) {
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
      const float a = T::widen(lists[k][i]), b = T::widen(expected[k][i]);
      require(a != a ? b != b : bits_of(a) == bits_of(b), "an update in a slot depends on how it is cut");
    }
  }
}

void slot_steps() {
  for (int round = 0; round < 40; ++round) {
    for (int64_t kind = 0; kind < kSlotKindCount; ++kind) {
      with_slot(static_cast<SlotKind>(kind), static_cast<Float>(uniform(0, 2)),
                [](auto chosen, auto type) { slot_cuts<decltype(chosen)::value, decltype(type)::value>(); });
    }
  }
}

}  // namespace

void offload_tests() {
  slot_steps();
  adam_has_one_meaning_on_every_unit();
  blocks_of_adam_may_run_at_once();
  packing_moves_its_bytes_and_no_other();
  grids_pack_as_the_host_does();
}
