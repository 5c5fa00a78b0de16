// The fused optimizers, once, for the rows of a store, for table-batched embeddings and for a grid: the formulas of
// refimpl.optimizers, with the order of every rounding. Codes and states are those of twinproof.optimizers. Compile
// without contraction.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/floats.h"
#include "common/sums.h"

namespace fastimpl {

enum class Optimizer : int64_t { kNone = 0, kSgd, kAdagrad, kRowwiseAdagrad, kAdam, kPartialRowwiseAdam, kLamb };
constexpr int64_t kOptimizerCount = 7;
constexpr const char* kOptimizerNames[kOptimizerCount] = {
    "none", "sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam", "lamb"};

struct Hyper {
  float lr, eps, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, root_correction;
};

// Floats of each momentum that a row has.
FASTIMPL_BOTH constexpr int64_t momentum1_width(Optimizer optimizer, int64_t dim) {
  switch (optimizer) {
    case Optimizer::kAdagrad:
    case Optimizer::kAdam:
    case Optimizer::kPartialRowwiseAdam:
    case Optimizer::kLamb: return dim;
    case Optimizer::kRowwiseAdagrad: return 1;
    default: return 0;
  }
}
FASTIMPL_BOTH constexpr int64_t momentum2_width(Optimizer optimizer, int64_t dim) {
  if (optimizer == Optimizer::kPartialRowwiseAdam) return 1;
  return optimizer == Optimizer::kAdam || optimizer == Optimizer::kLamb ? dim : 0;
}

// Whether the elements of a row share a factor or a denominator, which `row_share` gives; or a scale, see `row_scale`.
FASTIMPL_BOTH constexpr bool is_row_wise(Optimizer optimizer) {
  return optimizer == Optimizer::kRowwiseAdagrad || optimizer == Optimizer::kPartialRowwiseAdam;
}

FASTIMPL_BOTH constexpr bool is_scaled(Optimizer optimizer) { return optimizer == Optimizer::kLamb; }

// Advances the momentum that a row has once by the mean of its squared gradients. Adagrad's elements share the factor
// of their gradients, as FBGEMM's do; Adam's a denominator.
FASTIMPL_BOTH FASTIMPL_INLINE float row_share(Optimizer optimizer, float mean_square, float* momentum1,
                                              float* momentum2, const Hyper& h) {
  if (optimizer == Optimizer::kRowwiseAdagrad) {
    *momentum1 += mean_square;
    return h.lr / (std::sqrt(*momentum1) + h.eps);
  }
  *momentum2 = h.beta2 * *momentum2 + h.one_minus_beta2 * mean_square;
  return std::sqrt(*momentum2) / h.root_correction + h.eps;
}

FASTIMPL_BOTH FASTIMPL_INLINE void advance_adam(float grad, float* momentum1, float* momentum2, const Hyper& h) {
  *momentum1 = h.beta1 * *momentum1 + h.one_minus_beta1 * grad;
  *momentum2 = h.beta2 * *momentum2 + h.one_minus_beta2 * (grad * grad);
}

FASTIMPL_BOTH FASTIMPL_INLINE float adam_change(float momentum1, float momentum2, const Hyper& h) {
  return (h.step_size * momentum1) / (std::sqrt(momentum2) / h.root_correction + h.eps);
}

// LAMB: advances all momenta of a row, and gives the factor of its steps, from the norms of weights and of steps.
template <typename Weight, typename Grad>
FASTIMPL_BOTH inline float row_scale(int64_t dim, const Weight& weight, const Grad& grad, float* momentum1,
                                     float* momentum2, const Hyper& h) {
  float weights[8] = {}, steps[8] = {};
  for (int64_t e = 0; e < dim; ++e) {
    advance_adam(grad(e), momentum1 + e, momentum2 + e, h);
    const float value = weight(e), step = adam_change(momentum1[e], momentum2[e], h);
    weights[e % 8] += value * value;
    steps[e % 8] += step * step;
  }
  const float norm = std::sqrt(fold_lanes(weights)), length = std::sqrt(fold_lanes(steps));
  return norm > 0 && length > 0 ? (h.lr * norm) / length : 1.0F;
}

// What one element of the weight loses. Advances the element's momenta, but for those that belong to the row or that
// `row_scale` advanced. `shared`: what `row_share` or `row_scale` gave.
FASTIMPL_BOTH FASTIMPL_INLINE float element_step(Optimizer optimizer, float grad, float shared, float* momentum1,
                                                 float* momentum2, const Hyper& h) {
  switch (optimizer) {
    case Optimizer::kNone: return 0;
    case Optimizer::kSgd: return h.lr * grad;
    case Optimizer::kAdagrad: {
      const float sum = *momentum1 + grad * grad;
      *momentum1 = sum;
      return (h.lr * grad) / (std::sqrt(sum) + h.eps);
    }
    case Optimizer::kRowwiseAdagrad: return shared * grad;
    case Optimizer::kAdam: {
      float average = *momentum1, square = *momentum2;
      advance_adam(grad, &average, &square, h);
      *momentum1 = average;
      *momentum2 = square;
      return adam_change(average, square, h);
    }
    case Optimizer::kPartialRowwiseAdam: {
      const float average = h.beta1 * *momentum1 + h.one_minus_beta1 * grad;
      *momentum1 = average;
      return (h.step_size * average) / shared;
    }
    case Optimizer::kLamb: return shared * adam_change(*momentum1, *momentum2, h);
  }
  return 0;
}

template <Optimizer kValue>
using Formula = std::integral_constant<Optimizer, kValue>;

// Calls `body` with the optimizer as a constant.
template <typename Body>
FASTIMPL_INLINE void with_formula(Optimizer optimizer, const Body& body) {
  switch (optimizer) {
    case Optimizer::kNone: return;
    case Optimizer::kSgd: return body(Formula<Optimizer::kSgd>());
    case Optimizer::kAdagrad: return body(Formula<Optimizer::kAdagrad>());
    case Optimizer::kRowwiseAdagrad: return body(Formula<Optimizer::kRowwiseAdagrad>());
    case Optimizer::kAdam: return body(Formula<Optimizer::kAdam>());
    case Optimizer::kPartialRowwiseAdam: return body(Formula<Optimizer::kPartialRowwiseAdam>());
    case Optimizer::kLamb: return body(Formula<Optimizer::kLamb>());
  }
}

}  // namespace fastimpl
