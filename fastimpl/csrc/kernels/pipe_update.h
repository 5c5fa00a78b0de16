// One row's step, by the formulas of refimpl.optimizers and with each of their roundings.
#pragma once

#include "kv_update.h"
#include "pipe_rows.h"

namespace fastimpl::pipe {

using kv::Hyper;
using kv::Optimizer;

template <Optimizer kValue>
using Formula = std::integral_constant<Optimizer, kValue>;

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

// Floats of each momentum that a row has.
constexpr int64_t momentum1_width(Optimizer optimizer, int64_t dim) {
  switch (optimizer) {
    case Optimizer::kAdagrad:
    case Optimizer::kAdam:
    case Optimizer::kPartialRowwiseAdam: return dim;
    case Optimizer::kRowwiseAdagrad: return 1;
    default: return 0;
  }
}
constexpr int64_t momentum2_width(Optimizer optimizer, int64_t dim) {
  return optimizer == Optimizer::kAdam ? dim : optimizer == Optimizer::kPartialRowwiseAdam ? 1 : 0;
}

// `weight` is the row in float32; momenta are those of the row. `from` is the sum of the row's gradients or, where there
// is one only, that: added to the +0 at which sums start.
template <Optimizer kOptimizer, Isa kIsa>
FASTIMPL_INLINE void step_row(float* weight, const float* from, float* momentum1, float* momentum2, int64_t dim, const Hyper& h) {
  const float lr = h.lr, eps = h.eps, beta1 = h.beta1, rest1 = h.one_minus_beta1, beta2 = h.beta2, rest2 = h.one_minus_beta2;
  const float step_size = h.step_size, correction = h.root_correction;
  const auto grad = [from](int64_t e) FASTIMPL_INLINED { return 0.0F + from[e]; };
  if constexpr (kOptimizer == Optimizer::kSgd) {
    for_elements(dim, [=](int64_t e) FASTIMPL_INLINED { weight[e] -= lr * grad(e); });
  } else if constexpr (kOptimizer == Optimizer::kAdagrad) {
    for_elements(dim, [=](int64_t e) FASTIMPL_INLINED {
      const float square = momentum1[e] + grad(e) * grad(e);
      momentum1[e] = square;
      weight[e] -= (lr * grad(e)) / (std::sqrt(square) + eps);
    });
  } else if constexpr (kOptimizer == Optimizer::kRowwiseAdagrad) {
    momentum1[0] += dot_row<kIsa>(from, from, dim) / static_cast<float>(dim);
    const float denominator = std::sqrt(momentum1[0]) + eps;
    for_elements(dim, [=](int64_t e) FASTIMPL_INLINED { weight[e] -= (lr * grad(e)) / denominator; });
  } else if constexpr (kOptimizer == Optimizer::kAdam) {
    for_elements(dim, [=](int64_t e) FASTIMPL_INLINED {
      const float average = beta1 * momentum1[e] + rest1 * grad(e);
      const float square = beta2 * momentum2[e] + rest2 * (grad(e) * grad(e));
      momentum1[e] = average;
      momentum2[e] = square;
      weight[e] -= (step_size * average) / (std::sqrt(square) / correction + eps);
    });
  } else {
    momentum2[0] = beta2 * momentum2[0] + rest2 * (dot_row<kIsa>(from, from, dim) / static_cast<float>(dim));
    const float denominator = std::sqrt(momentum2[0]) / correction + eps;
    for_elements(dim, [=](int64_t e) FASTIMPL_INLINED {
      const float average = beta1 * momentum1[e] + rest1 * grad(e);
      momentum1[e] = average;
      weight[e] -= (step_size * average) / denominator;
    });
  }
}

}  // namespace fastimpl::pipe
