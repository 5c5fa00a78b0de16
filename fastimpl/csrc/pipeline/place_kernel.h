// What each position of a batch adds to, and the gradient of its weight. Ids that no table has are skipped, so that
// nothing outside of memory is touched whatever was given. Every operation is rounded by itself and in the order of the
// host's kernels; compile without contraction.
#pragma once

#include "common/floats.h"
#include "common/simt.h"
#include "pipeline/bag_kernel.h"

namespace fastimpl::pipeline {

// A feature on the device: its table's rows, what they are counted from through all tables, its columns.
struct PlacedFeature {
  Global<const uint8_t> rows;
  int64_t row_count, base, dim, column;
  Float type;
  bool mean;
};

template <typename Id>
struct PlacedBatch {
  Global<const PlacedFeature> features;  // One at least.
  Global<const Id> ids;
  Global<const int64_t> offsets;
  int64_t bag_count, width;

  SIMT float length_of(int64_t bag) const { return static_cast<float>(offsets.load(bag + 1) - offsets.load(bag)); }
  SIMT static bool has(const PlacedFeature& feature, Id id) {
    return static_cast<uint64_t>(static_cast<int64_t>(id)) < static_cast<uint64_t>(feature.row_count);
  }
  // Calls `body(position, bag)`, see for_places.
  template <typename Body>
  SIMT void for_positions(unsigned own, unsigned groups, const Body& body) const {
    for_places(offsets, features.size() * bag_count, ids.size(), own, groups, body);
  }
};

// What one position adds to: its row, counted through all tables, by which positions are sorted, stably; where its
// gradient begins, and what that is divided by. An id that no table has is row `row_count`, behind all rows.
template <typename Id>
struct PlacePositions {
  static constexpr int kThreads = 256;
  PlacedBatch<Id> batch;
  int64_t row_count;
  Integers rows, positions;
  Global<int64_t> begins;
  Global<float> lengths;

  SIMT void operator()() const {
    batch.for_positions(simt::lane(), simt::kLanes, [&](int64_t at, int64_t bag) {
      const int64_t number = bag / batch.bag_count;
      const PlacedFeature feature = batch.features.load(number);
      const Id id = batch.ids.load(at);
      rows.store(at, batch.has(feature, id) ? feature.base + static_cast<int64_t>(id) : row_count);
      positions.store(at, at);
      begins.store(at, (bag - number * batch.bag_count) * batch.width + feature.column);
      lengths.store(at, feature.mean ? batch.length_of(bag) : 1);
    });
  }
};

// The gradient of the weight of each position: eight lanes have the running sums of `lane_sum`, one each. Of an id that
// no table has it is 0.
template <typename Id>
struct WeightGradients {
  static constexpr int kThreads = 256;
  static constexpr unsigned kSums = 8;
  PlacedBatch<Id> batch;
  Global<const float> grad;
  Global<float> out;

  SIMT void operator()() const {
    const unsigned own = simt::lane() % kSums, group = simt::lane() / kSums,
                   mask = ((1U << kSums) - 1) << (group * kSums);
    batch.for_positions(group, simt::kLanes / kSums, [&](int64_t at, int64_t bag) {
      const int64_t number = bag / batch.bag_count;
      const PlacedFeature feature = batch.features.load(number);
      const Id id = batch.ids.load(at);
      float sum = 0;
      if (batch.has(feature, id)) {
        const float length = feature.mean ? batch.length_of(bag) : 1;
        const int64_t from = (bag - number * batch.bag_count) * batch.width + feature.column,
                      first = static_cast<int64_t>(id) * feature.dim;
        for (int64_t e = own; e < feature.dim; e += kSums) {
          const float value = grad.load(from + e);
          // A division by 1 gives the same bits.
          sum += (feature.mean ? value / length : value) * element(feature, first + e);
        }
      }
      for (unsigned half = kSums / 2; half > 0; half /= 2) sum += simt::shuffle_down(mask, sum, half, kSums);
      if (own == 0) out.store(at, sum);
    });
  }

  SIMT static float element(const PlacedFeature& feature, int64_t at) {
    if (feature.type == Float::kFloat32) return feature.rows.template as<const float>().load(at);
    const uint16_t bits = feature.rows.template as<const uint16_t>().load(at);
    return feature.type == Float::kFloat16 ? from_float16(bits) : from_bfloat16(bits);
  }
};

}  // namespace fastimpl::pipeline
