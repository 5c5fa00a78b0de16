// Chunks for the update in a slot, what it gives by the book, and the same on the device.
#pragma once

#include <simt/prove.h>

#include <cmath>

#include "offload/slot_plan.h"

using namespace fastimpl;
using namespace fastimpl::offload;
using simt::prover::Array;
using simt::prover::Trial;

namespace slot_cases {

// By the book: each operation of torch stores its result in the parameter's dtype.
template <Float kType>
float stored(double value) {
  const auto number = static_cast<float>(value);
  if (kType == Float::kBFloat16) return from_bfloat16(to_bfloat16(number));
  if (kType == Float::kFloat16) return from_float16(to_float16(number));
  return number;
}

template <Float kType>
void step_by_the_book(SlotKind kind, float* param, float grad, float* states, const SlotHyper& h) {
  const auto keep = [](float value) { return stored<kType>(value); };
  if (h.flags & kMaximize) grad = -grad;
  if (h.flags & kDecoupled) *param = keep(*param * h.keep);
  if (h.flags & kCoupled) grad = keep(__builtin_fmaf(h.decay, *param, grad));
  switch (kind) {
    case SlotKind::kSgd: *param = keep(__builtin_fmaf(h.step, grad, *param)); return;
    case SlotKind::kMomentum: {
      states[0] = keep(states[0] * h.kept);
      states[0] = keep(__builtin_fmaf(h.added, grad, states[0]));
      if (h.flags & kNesterov) {
        grad = keep(__builtin_fmaf(h.kept, states[0], grad));
      } else {
        grad = states[0];
      }
      *param = keep(__builtin_fmaf(h.step, grad, *param));
      return;
    }
    case SlotKind::kAdagrad: {
      states[0] = keep(__builtin_fmaf(grad, grad, states[0]));
      float root = keep(std::sqrt(states[0]));
      root = keep(root + h.eps);
      grad = keep(grad * h.step);
      *param = keep(*param + grad / root);
      return;
    }
    case SlotKind::kAdam:
    case SlotKind::kAmsgrad: break;
  }
  const float weight = h.lerp, gap = grad - states[0];
  states[0] =
      weight < 0.5F ? keep(__builtin_fmaf(weight, gap, states[0])) : keep(__builtin_fmaf(weight - 1, gap, grad));
  states[1] = keep(states[1] * h.kept);
  const float product = grad * grad;
  states[1] = keep(h.added == 1 ? __builtin_fmaf(grad, grad, states[1]) : __builtin_fmaf(h.added, product, states[1]));
  float square = states[1];
  if (kind == SlotKind::kAmsgrad) square = states[2] = states[2] > states[1] ? states[2] : states[1];
  float root = keep(std::sqrt(square));
  root = keep(root / h.root);
  root = keep(root + h.eps);
  *param = keep(__builtin_fmaf(h.step, states[0] / root, *param));
}

inline SlotHyper any_hyper(Trial& trial) {
  const auto fraction = [&] { return static_cast<float>(1 + trial.random.below(1000)) / 1009; };
  SlotHyper h{fraction(), fraction(), fraction(), fraction(), fraction(), fraction(), -fraction(), 1e-3F, 0};
  if (trial.random.below(4) == 0) h.added = 1;
  h.flags = static_cast<int32_t>(trial.random.below(kSlotFlags + 1));
  return h;
}

template <SlotKind kKind, Float kType>
struct Case {
  using T = Stored<kType>;
  using Bits = typename T::Bits;
  static constexpr size_t kLists = 2 + static_cast<size_t>(slot_state_count(kKind));

  Trial& trial;
  std::vector<SlotHyper> hypers;
  // Of each parameter: itself, its gradient, its states.
  std::vector<std::vector<std::vector<Bits>>> values, expected;
  std::vector<int64_t> hyper_of;

  Case(Trial& given, int64_t count, int64_t elements_max, int64_t hyper_count) : trial(given) {
    for (int64_t i = 0; i < hyper_count; ++i) hypers.push_back(any_hyper(trial));
    for (int64_t p = 0; p < count; ++p) {
      const auto elements = static_cast<size_t>(trial.random.between(0, elements_max));
      std::vector<std::vector<Bits>> lists(kLists);
      for (size_t k = 0; k < kLists; ++k) {
        for (size_t i = 0; i < elements; ++i) {
          const float value = static_cast<float>(trial.random.between(k < 3 ? -5000 : 0, 5000)) / 1013;
          lists[k].push_back(T::narrow(k == 2 && kKind == SlotKind::kAdagrad ? std::fabs(value) : value));
        }
      }
      hyper_of.push_back(trial.random.below(static_cast<int>(hyper_count)));
      values.push_back(lists);
      step(lists, hypers[static_cast<size_t>(hyper_of.back())]);
      expected.push_back(lists);
    }
  }

  static void step(std::vector<std::vector<Bits>>& lists, const SlotHyper& h) {
    for (size_t i = 0; i < lists[0].size(); ++i) {
      float numbers[4] = {}, param = T::widen(lists[0][i]);
      for (size_t k = 2; k < kLists; ++k) numbers[k - 2] = T::widen(lists[k][i]);
      step_by_the_book<kType>(kKind, &param, T::widen(lists[1][i]), numbers, h);
      lists[0][i] = T::narrow(param);
      for (size_t k = 2; k < kLists; ++k) lists[k][i] = T::narrow(numbers[k - 2]);
    }
  }

  // All lists of all parameters lie in one array each, as in a slot, with what must not be touched between them.
  void prove(int64_t threads) {
    constexpr int64_t kAlign = 16 / static_cast<int64_t>(sizeof(Bits));
    std::vector<Bits> memory[kLists], wanted[kLists];
    std::vector<int64_t> begins[kLists];
    const Bits guard = T::narrow(77);
    for (size_t p = 0; p < values.size(); ++p) {
      for (size_t k = 0; k < kLists; ++k) {
        const auto place = static_cast<int64_t>(memory[k].size());
        // Where one of them does not begin at 16 bytes no vector may be used.
        const int64_t shift = trial.random.below(8) == 0 ? 1 : 0;
        const int64_t begin = (place + kAlign - 1) / kAlign * kAlign + shift;
        memory[k].resize(static_cast<size_t>(begin), guard);
        wanted[k].resize(static_cast<size_t>(begin), guard);
        begins[k].push_back(begin);
        memory[k].insert(memory[k].end(), values[p][k].begin(), values[p][k].end());
        wanted[k].insert(wanted[k].end(), expected[p][k].begin(), expected[p][k].end());
      }
    }
    static const char* const names[] = {"params", "grads", "first", "second", "third"};
    std::vector<Array<Bits>> arrays;
    for (size_t k = 0; k < kLists; ++k) {
      memory[k].push_back(guard);
      wanted[k].push_back(guard);
      arrays.push_back(trial.array(names[k], memory[k]));
    }
    std::vector<SlotTensors> list;
    for (size_t p = 0; p < values.size(); ++p) {
      const auto at = [&](size_t k) -> void* {
        return k < kLists ? arrays[k].global().data() + begins[k][p] : nullptr;
      };
      list.push_back({at(0), at(1), {at(2), at(3), at(4)}, static_cast<int64_t>(values[p][0].size()), hyper_of[p]});
    }
    launch_slots<kKind, kType>(list, hypers, threads,
                               [&](const auto& kernel, int64_t blocks) { trial.launch(kernel, {blocks, threads, 0}); });
    for (size_t k = 0; k < kLists; ++k) trial.expect_same(arrays[k].values(), wanted[k], names[k]);
  }
};

template <SlotKind kKind>
void prove_all(Trial& trial) {
  const int64_t threads = trial.random.below(2) == 0 ? 32 : 64;
  with_slot(kKind, static_cast<Float>(trial.random.below(3)), [&](auto, auto type) {
    // One launch, and more than one for the parameters, for their numbers.
    const int64_t shape = trial.random.below(3);
    if (shape == 0) Case<kKind, decltype(type)::value>(trial, 2, 700, 2).prove(threads);
    if (shape == 1) Case<kKind, decltype(type)::value>(trial, kSlotEntries + 5, 9, 2).prove(threads);
    if (shape == 2) Case<kKind, decltype(type)::value>(trial, 14, 20, kSlotHypers + 4).prove(threads);
  });
}

}  // namespace slot_cases
