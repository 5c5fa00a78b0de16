// One pass of Adam or AdamW over host memory: gradient, float32 master and moments in, all of them and a half-precision
// weight out. Every operation is a single float32 operation in the order of refimpl.optimizers; compile without
// contraction. Elements are independent and every path rounds the same, so that neither the vector unit nor the cut
// between threads changes a bit.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/vectors.h"

namespace fastimpl::offload {

// Rounded to float32 once, by the caller. `keep` is what decoupled decay leaves of a weight, 1 without it.
struct AdamHyper {
  float keep, coupled_decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, root_correction, eps;
};

struct AdamFlags {
  bool maximize, coupled;
};

// Elements of one parameter. `square_max` is null without amsgrad, `weight` where the master is the weight.
struct AdamSlice {
  const void* grad;
  float* master;
  float* average;
  float* square;
  float* square_max;
  void* weight;
};

// No weight beside the master.
struct Unwritten {
  using Bits = uint8_t;
};

template <typename Grad, typename Weight, bool kMax>
FASTIMPL_INLINE void adam_loop(const typename Grad::Bits* __restrict__ grad, float* __restrict__ master,
                               float* __restrict__ average, float* __restrict__ square, float* __restrict__ square_max,
                               typename Weight::Bits* __restrict__ weight, int64_t count, const AdamHyper& given,
                               const AdamFlags& flags) {
  const AdamHyper h = given;
  const float sign = flags.maximize ? -1.0F : 1.0F;
  const bool coupled = flags.coupled;
  for (int64_t i = 0; i < count; ++i) {
    const float w = master[i] * h.keep;
    float g = Grad::widen(grad[i]) * sign;
    const float decayed = g + h.coupled_decay * w;
    g = coupled ? decayed : g;
    const float m = h.beta1 * average[i] + h.one_minus_beta1 * g;
    const float v = h.beta2 * square[i] + h.one_minus_beta2 * (g * g);
    average[i] = m;
    square[i] = v;
    float root = v;
    if constexpr (kMax) {
      // The larger one, or the one that is not a number.
      const float before = square_max[i];
      root = (before > v || before != before) ? before : v;
      square_max[i] = root;
    }
    const float next = w - (h.step_size * m) / (std::sqrt(root) / h.root_correction + h.eps);
    master[i] = next;
    if constexpr (!std::is_same_v<Weight, Unwritten>) weight[i] = Weight::narrow(next);
  }
}

template <typename Grad, typename Weight, bool kMax>
FASTIMPL_INLINE void adam_slice(const AdamSlice& s, int64_t begin, int64_t count, const AdamHyper& hyper,
                                const AdamFlags& flags) {
  auto* const weight = static_cast<typename Weight::Bits*>(s.weight);
  adam_loop<Grad, Weight, kMax>(static_cast<const typename Grad::Bits*>(s.grad) + begin, s.master + begin,
                                s.average + begin, s.square + begin, kMax ? s.square_max + begin : nullptr,
                                weight == nullptr ? nullptr : weight + begin, count, hyper, flags);
}

#if defined(__x86_64__)
template <typename Grad, typename Weight, bool kMax>
__attribute__((target("avx2"))) void adam_avx2(const AdamSlice& s, int64_t begin, int64_t count, const AdamHyper& hyper,
                                               const AdamFlags& flags) {
  adam_slice<Grad, Weight, kMax>(s, begin, count, hyper, flags);
}

template <typename Grad, typename Weight, bool kMax>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) void adam_avx512(
    const AdamSlice& s, int64_t begin, int64_t count, const AdamHyper& hyper, const AdamFlags& flags) {
  adam_slice<Grad, Weight, kMax>(s, begin, count, hyper, flags);
}

#endif

template <typename Grad, typename Weight, bool kMax>
inline void adam_on(Isa isa, const AdamSlice& s, int64_t begin, int64_t count, const AdamHyper& hyper,
                    const AdamFlags& flags) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return adam_avx512<Grad, Weight, kMax>(s, begin, count, hyper, flags);
  if (isa == Isa::kAvx2) return adam_avx2<Grad, Weight, kMax>(s, begin, count, hyper, flags);
#endif
  (void)isa;
  adam_slice<Grad, Weight, kMax>(s, begin, count, hyper, flags);
}

template <typename Grad, typename Weight>
inline void adam_dispatch_max(Isa isa, const AdamSlice& s, int64_t begin, int64_t count, const AdamHyper& hyper,
                              const AdamFlags& flags) {
  if (s.square_max != nullptr) return adam_on<Grad, Weight, true>(isa, s, begin, count, hyper, flags);
  adam_on<Grad, Weight, false>(isa, s, begin, count, hyper, flags);
}

template <typename Grad>
inline void adam_dispatch_weight(Float weight, Isa isa, const AdamSlice& s, int64_t begin, int64_t count,
                                 const AdamHyper& hyper, const AdamFlags& flags) {
  if (s.weight == nullptr) return adam_dispatch_max<Grad, Unwritten>(isa, s, begin, count, hyper, flags);
  if (weight == Float::kBFloat16) return adam_dispatch_max<Grad, Bf16>(isa, s, begin, count, hyper, flags);
  if (weight == Float::kFloat16) return adam_dispatch_max<Grad, Fp16>(isa, s, begin, count, hyper, flags);
  adam_dispatch_max<Grad, Fp32>(isa, s, begin, count, hyper, flags);
}

// One step of elements [begin, begin + count) of a slice.
inline void adam_step(Float grad, Float weight, Isa isa, const AdamSlice& s, int64_t begin, int64_t count,
                      const AdamHyper& hyper, const AdamFlags& flags) {
  switch (grad) {
    case Float::kBFloat16: return adam_dispatch_weight<Bf16>(weight, isa, s, begin, count, hyper, flags);
    case Float::kFloat16: return adam_dispatch_weight<Fp16>(weight, isa, s, begin, count, hyper, flags);
    case Float::kFloat32: return adam_dispatch_weight<Fp32>(weight, isa, s, begin, count, hyper, flags);
  }
}

}  // namespace fastimpl::offload
