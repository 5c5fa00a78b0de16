// refimpl.optimizers.row_sum: eight running sums, element e into sum e mod 8 in ascending order, then halves added.
// Every kernel that sums a row does it in this order, so that all have the same bits.
#pragma once

#include <cstdint>

#include "common/floats.h"

namespace fastimpl {

template <typename T>
FASTIMPL_BOTH inline T fold_lanes(T* lanes) {
  for (int half = 4; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

// Of `at(e) * with(e)`, on the host and on the device.
template <typename At, typename With>
FASTIMPL_BOTH inline float lane_sum(int64_t dim, const At& at, const With& with) {
  float lanes[8] = {};
  for (int64_t e = 0; e < dim; ++e) lanes[e % 8] += at(e) * with(e);
  return fold_lanes(lanes);
}

}  // namespace fastimpl
