// A proof for each fused optimizer, so that a new one is proven without a line here.
#pragma once

#include <simt/prove.h>

#include <cstddef>
#include <utility>

#include "common/optimizers.h"

// `body` takes the optimizer as a template argument, and the trial.
template <typename Body>
void prove_each_optimizer(const Body& body) {
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    (simt::prover::proofs().push_back({fastimpl::kOptimizerNames[kIndex + 1],
                                       [=](simt::prover::Trial& trial) {
                                         body.template operator()<static_cast<fastimpl::Optimizer>(kIndex + 1)>(trial);
                                       }}),
     ...);
  }(std::make_index_sequence<fastimpl::kOptimizerCount - 1>());
}
