// One row's step on the host, for any vector unit.
#pragma once

#include "common/optimizers.h"
#include "common/vectors.h"

namespace fastimpl {

// `weight` is the row in float32; momenta are those of the row. `from` is the sum of the row's gradients or, where
// there is one only, that: added to the +0 at which sums start.
template <Optimizer kOptimizer, Isa kIsa>
FASTIMPL_INLINE void step_row(float* weight, const float* from, float* momentum1, float* momentum2, int64_t dim,
                              const Hyper& given) {
  // A copy: what is written to the row could otherwise be one of these, and no loop would be vectorised.
  const Hyper h = given;
  float shared = 0;
  if constexpr (is_row_wise(kOptimizer)) {
    shared = row_share(kOptimizer, dot_row(from, from, dim) / static_cast<float>(dim), momentum1, momentum2, h);
  }
  if constexpr (is_scaled(kOptimizer)) {
    const auto value = [weight](int64_t e) FASTIMPL_INLINED { return weight[e]; };
    const auto grad = [from](int64_t e) FASTIMPL_INLINED { return 0.0F + from[e]; };
    shared = row_scale(dim, value, grad, momentum1, momentum2, h);
  }
  constexpr bool kHasFirst = momentum1_width(kOptimizer, 2) == 2, kHasSecond = momentum2_width(kOptimizer, 2) == 2;
  for_elements(dim, [=](int64_t e) FASTIMPL_INLINED {
    weight[e] -= element_step(kOptimizer, 0.0F + from[e], shared, kHasFirst ? momentum1 + e : nullptr,
                              kHasSecond ? momentum2 + e : nullptr, h);
  });
}

}  // namespace fastimpl
