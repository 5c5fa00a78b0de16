// The pipeline's kernels for a grid, but for pooling: what one thread does, of any order of threads. Sums go in order
// of position and every operation is rounded by itself, so that a device has the bits of the host; compile without
// contraction.
#pragma once

#include <type_traits>

#include "common/optimizers.h"
#include "common/sums.h"

namespace fastimpl::pipeline {

struct GridTable {
  uint8_t* rows;
  int64_t row_count, dim;
  Float type;
  bool mean;
  float *momentum1, *momentum2;
  int64_t base;  // The number of its first row, counted through all tables.

  FASTIMPL_BOTH float load(int64_t element) const {
    if (type == Float::kFloat32) return reinterpret_cast<const float*>(rows)[element];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(rows)[element];
    return type == Float::kFloat16 ? from_float16(bits) : from_bfloat16(bits);
  }
  FASTIMPL_BOTH void store(int64_t element, float value) const {
    if (type == Float::kFloat32) {
      reinterpret_cast<float*>(rows)[element] = value;
    } else {
      reinterpret_cast<uint16_t*>(rows)[element] = type == Float::kFloat16 ? to_float16(value) : to_bfloat16(value);
    }
  }
};

struct GridFeature {
  int64_t table, column;
};

// The last of `count` ascending values that is not above `value`; the first is not.
template <typename At>
FASTIMPL_BOTH inline int64_t last_not_above(int64_t count, int64_t value, const At& at) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (at(middle) <= value) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <typename Id>
struct GridBatch {
  const GridTable* tables;
  const GridFeature* features;
  int64_t feature_count, bag_count, width;
  const Id* ids;
  const int64_t* offsets;
  const float* weights;
  int64_t id_count;

  FASTIMPL_BOTH int64_t feature_of(int64_t column) const {
    const GridFeature* const all = features;
    return last_not_above(feature_count, column, [all](int64_t f) { return all[f].column; });
  }
  // Counted through all features; of bags that begin at one position the last, which is the only one with ids.
  FASTIMPL_BOTH int64_t bag_of(int64_t position) const {
    const int64_t* const begins = offsets;
    return last_not_above(feature_count * bag_count, position, [begins](int64_t bag) { return begins[bag]; });
  }
  FASTIMPL_BOTH const GridTable& table_of(int64_t bag) const { return tables[features[bag / bag_count].table]; }
};

// The gradient of the weight of one position.
template <typename Id>
struct WeightGradient {
  GridBatch<Id> batch;
  const float* grad;
  float* out;

  FASTIMPL_BOTH void operator()(int64_t at) const {
    const int64_t bag = batch.bag_of(at), feature = bag / batch.bag_count;
    const GridTable& table = batch.table_of(bag);
    const float* const from = grad + (bag - feature * batch.bag_count) * batch.width + batch.features[feature].column;
    const auto length = static_cast<float>(batch.offsets[bag + 1] - batch.offsets[bag]);
    const int64_t first = static_cast<int64_t>(batch.ids[at]) * table.dim;
    out[at] = lane_sum(
        table.dim, [&](int64_t e) { return table.mean ? from[e] / length : from[e]; },
        [&](int64_t e) { return table.load(first + e); });
  }
};

// The row of one position, counted through all tables: what positions are sorted by, stably.
template <typename Id>
struct RowOfPosition {
  GridBatch<Id> batch;
  int64_t *rows, *bags, *positions;

  FASTIMPL_BOTH void operator()(int64_t at) const {
    bags[at] = batch.bag_of(at);
    rows[at] = batch.table_of(bags[at]).base + static_cast<int64_t>(batch.ids[at]);
    positions[at] = at;
  }
};

// Steps of rows whose first occurrence is one of a window of the sorted ones. Three launches, each over the whole
// window: sums by element, what a row shares by row, the update by element. `sums` is [window, dim_max], `shared`
// [window].
template <typename Id>
struct StepGrid {
  GridBatch<Id> batch;
  const int64_t *rows, *positions;  // Sorted.
  const int64_t* bags;              // By position.
  const float* grad;
  int64_t window_begin, dim_max;
  float *sums, *shared;
  Optimizer optimizer;
  Hyper h;

  FASTIMPL_BOTH bool is_first(int64_t at) const { return at == 0 || rows[at] != rows[at - 1]; }
  FASTIMPL_BOTH const GridTable& table_at(int64_t at) const { return batch.table_of(bags[positions[at]]); }

  FASTIMPL_BOTH void sum(int64_t index) const {
    const int64_t at = window_begin + index / dim_max, element = index % dim_max;
    if (!is_first(at) || element >= table_at(at).dim) return;
    float total = 0;
    for (int64_t i = at; i < batch.id_count && rows[i] == rows[at]; ++i) {
      const int64_t position = positions[i], bag = bags[position], feature = bag / batch.bag_count;
      float g = grad[(bag - feature * batch.bag_count) * batch.width + batch.features[feature].column + element];
      if (batch.table_of(bag).mean) g = g / static_cast<float>(batch.offsets[bag + 1] - batch.offsets[bag]);
      if (batch.weights != nullptr) g = batch.weights[position] * g;
      total += g;
    }
    sums[index] = total;
  }

  // What the elements of a row share: the row's momentum and a denominator, or a scale.
  FASTIMPL_BOTH void share(int64_t index) const {
    const int64_t at = window_begin + index;
    if (!is_first(at) || !(is_row_wise(optimizer) || is_scaled(optimizer))) return;
    const GridTable& table = table_at(at);
    const float* const g = sums + index * dim_max;
    const int64_t row = rows[at] - table.base;
    float* const first = table.momentum1 + row * momentum1_width(optimizer, table.dim);
    float* const second = table.momentum2 + row * momentum2_width(optimizer, table.dim);
    const auto grad = [g](int64_t e) { return g[e]; };
    if (is_scaled(optimizer)) {
      const auto weight = [&table, row](int64_t e) { return table.load(row * table.dim + e); };
      shared[index] = row_scale(table.dim, weight, grad, first, second, h);
    } else {
      shared[index] =
          row_denominator(optimizer, lane_sum(table.dim, grad, grad) / static_cast<float>(table.dim), first, second, h);
    }
  }

  FASTIMPL_BOTH void update(int64_t index) const {
    const int64_t slot = index / dim_max, at = window_begin + slot, element = index % dim_max;
    if (!is_first(at)) return;
    const GridTable& table = table_at(at);
    if (element >= table.dim) return;
    const int64_t place = (rows[at] - table.base) * table.dim + element;
    const float step =
        element_step(optimizer, sums[index], is_row_wise(optimizer) || is_scaled(optimizer) ? shared[slot] : 0,
                     table.momentum1 + place, table.momentum2 + place, h);
    table.store(place, table.load(place) - step);
  }
};

// flags[0]: offsets are none; flags[1]: an id lies outside of its table. All that write, write the same.
struct OffsetCheck {
  const int64_t* offsets;
  int64_t bag_count, id_count;
  int64_t* flags;

  FASTIMPL_BOTH void operator()(int64_t bag) const {
    const bool is_wrong = (bag == 0 && offsets[0] != 0) || (bag == bag_count && offsets[bag] != id_count) ||
                          (bag > 0 && offsets[bag] < offsets[bag - 1]);
    if (is_wrong) flags[0] = 1;
  }
};

template <typename Id>
struct IdCheck {
  GridBatch<Id> batch;
  int64_t* flags;

  FASTIMPL_BOTH void operator()(int64_t at) const {
    const auto id = static_cast<int64_t>(batch.ids[at]);
    if (id < 0 || id >= batch.table_of(batch.bag_of(at)).row_count) flags[1] = 1;
  }
};

}  // namespace fastimpl::pipeline
