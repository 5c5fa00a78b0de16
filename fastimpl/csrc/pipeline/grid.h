// The pipeline's kernels for a grid, but for pooling: what one thread does, of any order of threads. Sums go in order
// of position and every operation is rounded by itself, so that a device has the bits of the host; compile without
// contraction.
#pragma once

#include <type_traits>

#include "common/floats.h"
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

// What one position adds to: its row, counted through all tables, by which positions are sorted, stably; where its
// gradient begins, and what that is divided by.
template <typename Id>
struct PlaceOfPosition {
  GridBatch<Id> batch;
  int64_t *rows, *positions, *begins;
  float* lengths;

  FASTIMPL_BOTH void operator()(int64_t at) const {
    const int64_t bag = batch.bag_of(at), feature = bag / batch.bag_count;
    const GridTable& table = batch.table_of(bag);
    rows[at] = table.base + static_cast<int64_t>(batch.ids[at]);
    positions[at] = at;
    begins[at] = (bag - feature * batch.bag_count) * batch.width + batch.features[feature].column;
    lengths[at] = table.mean ? static_cast<float>(batch.offsets[bag + 1] - batch.offsets[bag]) : 1;
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
