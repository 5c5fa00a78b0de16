// The fused optimizers, once, for the rows of a store, for table-batched embeddings and for a grid: the formulas of
// refimpl.optimizers, with the order of every rounding. Codes and states are those of twinproof.optimizers. Compile
// without contraction.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/floats.h"

namespace fastimpl {

enum class Optimizer : int64_t { kNone = 0, kSgd, kAdagrad, kRowwiseAdagrad, kAdam, kPartialRowwiseAdam };
constexpr int64_t kOptimizerCount = 6;

struct Hyper {
  float lr, eps, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, root_correction;
};

// Floats of each momentum that a row has.
FASTIMPL_BOTH constexpr int64_t momentum1_width(Optimizer optimizer, int64_t dim) {
  switch (optimizer) {
    case Optimizer::kAdagrad:
    case Optimizer::kAdam:
    case Optimizer::kPartialRowwiseAdam: return dim;
    case Optimizer::kRowwiseAdagrad: return 1;
    default: return 0;
  }
}
FASTIMPL_BOTH constexpr int64_t momentum2_width(Optimizer optimizer, int64_t dim) {
  return optimizer == Optimizer::kAdam ? dim : optimizer == Optimizer::kPartialRowwiseAdam ? 1 : 0;
}

// Whether the elements of a row share a denominator, which `row_denominator` gives.
FASTIMPL_BOTH constexpr bool is_row_wise(Optimizer optimizer) {
  return optimizer == Optimizer::kRowwiseAdagrad || optimizer == Optimizer::kPartialRowwiseAdam;
}

// Advances the momentum that a row has once by the mean of its squared gradients.
FASTIMPL_BOTH FASTIMPL_INLINE float row_denominator(Optimizer optimizer, float mean_square, float* momentum1,
                                                    float* momentum2, const Hyper& h) {
  if (optimizer == Optimizer::kRowwiseAdagrad) {
    *momentum1 += mean_square;
    return std::sqrt(*momentum1) + h.eps;
  }
  *momentum2 = h.beta2 * *momentum2 + h.one_minus_beta2 * mean_square;
  return std::sqrt(*momentum2) / h.root_correction + h.eps;
}

// What one element of the weight loses. Advances the element's momenta; those of a row-wise optimizer that belong to
// the row are not looked at. `denominator`: see `row_denominator`.
FASTIMPL_BOTH FASTIMPL_INLINE float element_step(Optimizer optimizer, float grad, float denominator, float* momentum1,
                                                 float* momentum2, const Hyper& h) {
  switch (optimizer) {
    case Optimizer::kNone: return 0;
    case Optimizer::kSgd: return h.lr * grad;
    case Optimizer::kAdagrad: {
      const float sum = *momentum1 + grad * grad;
      *momentum1 = sum;
      return (h.lr * grad) / (std::sqrt(sum) + h.eps);
    }
    case Optimizer::kRowwiseAdagrad: return (h.lr * grad) / denominator;
    case Optimizer::kAdam: {
      const float average = h.beta1 * *momentum1 + h.one_minus_beta1 * grad;
      const float square = h.beta2 * *momentum2 + h.one_minus_beta2 * (grad * grad);
      *momentum1 = average;
      *momentum2 = square;
      return (h.step_size * average) / (std::sqrt(square) / h.root_correction + h.eps);
    }
    case Optimizer::kPartialRowwiseAdam: {
      const float average = h.beta1 * *momentum1 + h.one_minus_beta1 * grad;
      *momentum1 = average;
      return (h.step_size * average) / denominator;
    }
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
  }
}

}  // namespace fastimpl
