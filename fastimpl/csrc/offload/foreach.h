// One element's step of torch's own optimizers, with every rounding of their foreach path on CUDA: a state that is
// stepped in its staging slot ends with the bits of `optimizer.step()`. adam.h rounds otherwise on purpose: that is the
// formula of refimpl.optimizers, where a step runs on the CPU.
//
// The order of operations is that of `_multi_tensor_adam`, `_multi_tensor_sgd` and `_multi_tensor_adagrad`
// (torch 2.11.0 and 2.13.0: torch/optim/adam.py, sgd.py, adagrad.py; neither capturable nor differentiable, numbers for
// options). Each `_foreach_*` call computes in float32 and stores in the tensors' own dtype, which rounds. Within a
// call:
//   _foreach_add(a, b, alpha): a + alpha * b, one rounding (ATen/native/cuda/ForeachFunctors.cuh,
//     BinaryOpListAlphaFunctor, which nvcc contracts: one FFMA an element in 2.11.0+cu130 for sm_90);
//   _foreach_addcmul, _foreach_addcdiv: fma(alpha, op(b, c), a), and fma(b, c, a) where alpha is 1
//     (ATen/native/cuda/DeviceAddCmulCdiv.cuh, pointwise_op_impl; the same text in both versions);
//   _foreach_lerp: fma(w, b - a, a) below 0.5, else fma(-(1 - w), b - a, b) (ATen/native/Lerp.h, contracted likewise);
//   _foreach_mul, _div, _sqrt, _maximum: one correctly rounded operation.
// Compile without contraction: what is fused here says so.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/floats.h"

namespace fastimpl::offload {

// Codes of fastimpl/offload/slot_step.py.
enum class SlotKind : int64_t { kSgd = 0, kMomentum, kAdam, kAmsgrad, kAdagrad };
constexpr int64_t kSlotKindCount = 5;

constexpr int64_t slot_state_count(SlotKind kind) {
  return kind == SlotKind::kSgd ? 0 : kind == SlotKind::kAdam ? 2 : kind == SlotKind::kAmsgrad ? 3 : 1;
}

// Rounded to float32 once, as torch hands its numbers to a kernel. `step` has torch's sign: it is added.
struct SlotHyper {
  float keep;   // What decoupled decay leaves of a weight.
  float decay;  // Coupled decay.
  float lerp;   // 1 - beta1.
  float kept;   // beta2, or momentum.
  float added;  // 1 - beta2, or 1 - dampening.
  float root;   // Square root of the second bias correction.
  float step, eps;
  int32_t flags;
};
constexpr int64_t kSlotHyperWords = 9;
constexpr int32_t kMaximize = 1, kDecoupled = 2, kCoupled = 4, kNesterov = 8, kSlotFlags = 15;

// Addresses of one parameter, its gradient and its states; null where a kind has none.
struct SlotTensors {
  void* param;
  const void* grad;
  void* states[3];
  int64_t count;
  int64_t hyper;
};

// What a dtype keeps of a number between two operations.
template <Float kType>
struct Stored {
  using Bits = std::conditional_t<kType == Float::kFloat32, float, uint16_t>;

  FASTIMPL_BOTH FASTIMPL_INLINE static float widen(Bits bits) {
    if constexpr (kType == Float::kFloat32) return bits;
    if constexpr (kType == Float::kBFloat16) return from_bfloat16(bits);
    if constexpr (kType == Float::kFloat16) return value_of_float16(bits);
  }
  FASTIMPL_BOTH FASTIMPL_INLINE static Bits narrow(float value) {
    if constexpr (kType == Float::kFloat32) return value;
    if constexpr (kType == Float::kBFloat16) return to_bfloat16(value);
    if constexpr (kType == Float::kFloat16) return float16_of_value(value);
  }
  FASTIMPL_BOTH FASTIMPL_INLINE static float round(float value) { return widen(narrow(value)); }
};

FASTIMPL_BOTH FASTIMPL_INLINE float foreach_lerp(float from, float to, float weight) {
  return std::fabs(weight) < 0.5F ? std::fma(weight, to - from, from) : std::fma(-(1.0F - weight), to - from, to);
}

FASTIMPL_BOTH FASTIMPL_INLINE float foreach_addcmul(float sum, float a, float b, float alpha) {
  return alpha == 1.0F ? std::fma(a, b, sum) : std::fma(alpha, a * b, sum);
}

// `first`, `second` and `third` are the states in torch's order: exp_avg, exp_avg_sq, max_exp_avg_sq; momentum_buffer;
// sum. Those that a kind lacks are left alone.
template <SlotKind kKind, Float kType>
FASTIMPL_BOTH FASTIMPL_INLINE void slot_element(float& param, float grad, float& first, float& second, float& third,
                                                const SlotHyper& h) {
  using T = Stored<kType>;
  if ((h.flags & kMaximize) != 0) grad = -grad;
  if ((h.flags & kDecoupled) != 0) param = T::round(param * h.keep);
  if ((h.flags & kCoupled) != 0) grad = T::round(std::fma(h.decay, param, grad));
  if constexpr (kKind == SlotKind::kSgd) {
    param = T::round(std::fma(h.step, grad, param));
  } else if constexpr (kKind == SlotKind::kMomentum) {
    first = T::round(std::fma(h.added, grad, T::round(first * h.kept)));
    const float ahead = T::round(std::fma(h.kept, first, grad));
    param = T::round(std::fma(h.step, (h.flags & kNesterov) != 0 ? ahead : first, param));
  } else if constexpr (kKind == SlotKind::kAdagrad) {
    first = T::round(std::fma(grad, grad, first));
    const float root = T::round(T::round(std::sqrt(first)) + h.eps);
    param = T::round(param + T::round(grad * h.step) / root);
  } else {
    first = T::round(foreach_lerp(first, grad, h.lerp));
    second = T::round(foreach_addcmul(T::round(second * h.kept), grad, grad, h.added));
    float square = second;
    if constexpr (kKind == SlotKind::kAmsgrad) {
      // The larger one, or the one that is not a number.
      third = (third > second || third != third) ? third : second;
      square = third;
    }
    const float root = T::round(T::round(T::round(std::sqrt(square)) / h.root) + h.eps);
    param = T::round(std::fma(h.step, first / root, param));
  }
}

template <SlotKind kValue>
using SlotKindConstant = std::integral_constant<SlotKind, kValue>;
template <Float kValue>
using FloatConstant = std::integral_constant<Float, kValue>;

// Calls `body` with kind and dtype as constants.
template <typename Body>
void with_slot(SlotKind kind, Float type, const Body& body) {
  const auto with_type = [&](auto chosen) {
    switch (type) {
      case Float::kFloat32: return body(chosen, FloatConstant<Float::kFloat32>());
      case Float::kFloat16: return body(chosen, FloatConstant<Float::kFloat16>());
      case Float::kBFloat16: return body(chosen, FloatConstant<Float::kBFloat16>());
    }
  };
  switch (kind) {
    case SlotKind::kSgd: return with_type(SlotKindConstant<SlotKind::kSgd>());
    case SlotKind::kMomentum: return with_type(SlotKindConstant<SlotKind::kMomentum>());
    case SlotKind::kAdam: return with_type(SlotKindConstant<SlotKind::kAdam>());
    case SlotKind::kAmsgrad: return with_type(SlotKindConstant<SlotKind::kAmsgrad>());
    case SlotKind::kAdagrad: return with_type(SlotKindConstant<SlotKind::kAdagrad>());
  }
}

}  // namespace fastimpl::offload
