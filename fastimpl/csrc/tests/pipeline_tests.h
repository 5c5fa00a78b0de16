#pragma once

#include <algorithm>

#include "kvstore_tests.h"

// Pooling, the fused step and the movement of ids.
void pipeline_tests();
// The movement of ids through a serial grid, against the host's kernels.
void pipeline_grid_tests();

namespace pipeline_cases {

// The device's functors through a serial grid, its threads in random order.
template <typename Body>
void run_grid(int64_t count, const Body& body) {
  std::vector<int64_t> order(static_cast<size_t>(count));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  std::shuffle(order.begin(), order.end(), kvstore_tests::random_bits);
  for (const int64_t i : order) body(i);
}

}  // namespace pipeline_cases
