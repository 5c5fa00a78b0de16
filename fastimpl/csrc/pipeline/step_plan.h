// How positions are sorted by row: with four bytes for each row and position where they fit, else with eight.
#pragma once

#include "pipeline/bag_kernel.h"

namespace fastimpl::pipeline {

constexpr int64_t kNarrowMax = UINT32_MAX;  // The largest row, and the largest position, of four bytes.

struct SortPlan {
  bool is_narrow;
  int bits;  // Of the rows, from the lowest.
};

// Rows are 0 to `row_count`: that one is of ids that no table has.
inline SortPlan plan_sort(int64_t row_count, int64_t id_count, int64_t narrow_max = kNarrowMax) {
  SortPlan plan{row_count <= narrow_max && id_count - 1 <= narrow_max, 1};
  while (plan.bits < 63 && (int64_t{1} << plan.bits) <= row_count) ++plan.bits;
  return plan;
}

// A list of such words as kernels have it.
template <typename Word>
Integers integers(const Word* words, int64_t count) {
  auto* const there = const_cast<Word*>(words);
  if constexpr (sizeof(Word) == 4) {
    return {{there, count}, {}, true};
  } else {
    return {{}, {there, count}, false};
  }
}

}  // namespace fastimpl::pipeline
