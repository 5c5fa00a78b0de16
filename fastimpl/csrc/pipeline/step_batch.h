// What the kernels of the fused step are given: tables, positions sorted by row, and who does a row together.
#pragma once

#include "common/optimizers.h"
#include "common/simt.h"
#include "pipeline/place_kernel.h"

namespace fastimpl::pipeline {

using simt::Shared;

// A table on the device. Momenta as wide as the optimizer has them; `base` counts rows through all tables.
struct StepTable {
  Global<uint8_t> rows;
  Global<float> momentum1, momentum2;
  int64_t dim, base;
  Float type;
};

// What one position adds to its row: the place of its gradient, and by what that is divided and multiplied.
struct Occurrence {
  int64_t begin;
  float length, weight;
};

// Positions sorted by row, stably, and what lies at each of them.
struct StepBatch {
  Global<const StepTable> tables;
  Integers rows, positions;      // Sorted, `count` of each.
  int64_t count, row_count;      // Row `row_count` is of ids that no table has: nothing is stepped.
  Global<const int64_t> begins;  // Of the gradient, by position.
  Global<const float> lengths;   // By position: of the bag where the table takes means, else 1.
  Global<const float> weights;   // By position; none where there are none.
  Global<const float> grad;
  bool has_factors;  // Whether there are lengths and weights; without, gradients are added as they are.

  SIMT bool is_first(int64_t at) const { return at == 0 || rows.load(at) != rows.load(at - 1); }
  SIMT Occurrence occurrence(int64_t at) const { return occurrence_of(positions.load(at)); }
  SIMT Occurrence occurrence_of(int64_t position) const {
    if (!has_factors) return {begins.load(position), 1, 1};
    return {begins.load(position), lengths.load(position), weights.size() == 0 ? 1 : weights.load(position)};
  }
  // The number of the table that has a row; of tables without rows the last begins where the next does.
  SIMT int64_t table_number(int64_t row) const {
    int64_t low = 0, high = tables.size();
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      if (tables.load(middle).base <= row) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
  SIMT StepTable table_of(int64_t row) const { return tables.load(table_number(row)); }
  SIMT float scaled(float value, const Occurrence& from) const {
    // A division by 1 gives the same bits.
    if (from.length != 1) value = value / from.length;
    return weights.size() == 0 ? value : from.weight * value;
  }
};

// The lanes of a warp, or the threads of a block, that do one row together.
template <unsigned kLanesOfGroup>
struct LaneGroup {
  SIMT unsigned rank() const { return simt::lane() % kLanesOfGroup; }
  SIMT unsigned size() const { return kLanesOfGroup; }
  SIMT unsigned mask() const {
    if constexpr (kLanesOfGroup == simt::kLanes) {
      return simt::kAllLanes;
    } else {
      return ((1U << kLanesOfGroup) - 1) << (simt::lane() / kLanesOfGroup * kLanesOfGroup);
    }
  }
  SIMT void sync() const { simt::sync_warp(mask()); }
};
struct BlockGroup {
  SIMT unsigned rank() const { return simt::thread(); }
  SIMT unsigned size() const { return simt::threads(); }
  SIMT void sync() const { simt::sync_block(); }
};

}  // namespace fastimpl::pipeline
