// The formula of foreach.h over a range of host memory.
#pragma once

#include "common/vectors.h"
#include "offload/foreach.h"

namespace fastimpl::offload {

template <SlotKind kKind, Float kType>
FASTIMPL_INLINE void slot_loop(const SlotTensors& s, const SlotHyper& given, int64_t begin, int64_t count) {
  using T = Stored<kType>;
  using Bits = typename T::Bits;
  constexpr int64_t kStates = slot_state_count(kKind);
  const SlotHyper h = given;
  Bits* const __restrict__ param = static_cast<Bits*>(s.param) + begin;
  const Bits* const __restrict__ grad = static_cast<const Bits*>(s.grad) + begin;
  Bits* const __restrict__ first = kStates > 0 ? static_cast<Bits*>(s.states[0]) + begin : nullptr;
  Bits* const __restrict__ second = kStates > 1 ? static_cast<Bits*>(s.states[1]) + begin : nullptr;
  Bits* const __restrict__ third = kStates > 2 ? static_cast<Bits*>(s.states[2]) + begin : nullptr;
  for (int64_t i = 0; i < count; ++i) {
    float weight = T::widen(param[i]), one = 0, two = 0, three = 0;
    if constexpr (kStates > 0) one = T::widen(first[i]);
    if constexpr (kStates > 1) two = T::widen(second[i]);
    if constexpr (kStates > 2) three = T::widen(third[i]);
    slot_element<kKind, kType>(weight, T::widen(grad[i]), one, two, three, h);
    param[i] = T::narrow(weight);
    if constexpr (kStates > 0) first[i] = T::narrow(one);
    if constexpr (kStates > 1) second[i] = T::narrow(two);
    if constexpr (kStates > 2) third[i] = T::narrow(three);
  }
}

#if defined(__x86_64__)
template <SlotKind kKind, Float kType>
__attribute__((target("avx2,fma"))) void slot_avx2(const SlotTensors& s, const SlotHyper& h, int64_t begin,
                                                   int64_t count) {
  slot_loop<kKind, kType>(s, h, begin, count);
}
#endif

// One step of elements [begin, begin + count) of a parameter. A fused multiply-add is exact with and without the unit.
inline void slot_step(SlotKind kind, Float type, const SlotTensors& s, const SlotHyper& h, int64_t begin,
                      int64_t count) {
#if defined(__x86_64__)
  const bool has_unit = best_isa() >= Isa::kAvx2 && __builtin_cpu_supports("fma") != 0;
#endif
  with_slot(kind, type, [&](auto chosen, auto given) {
#if defined(__x86_64__)
    if (has_unit) return slot_avx2<decltype(chosen)::value, decltype(given)::value>(s, h, begin, count);
#endif
    slot_loop<decltype(chosen)::value, decltype(given)::value>(s, h, begin, count);
  });
}

}  // namespace fastimpl::offload
