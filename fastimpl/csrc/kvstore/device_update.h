// One step of an optimizer on rows where they are, on a grid: a warp a row. The formulas are those of
// common/optimizers.h, the order of every sum is that of the host. Compile without contraction.
#pragma once

#include "common/simt.h"
#include "kvstore/device_rows.h"

namespace fastimpl::kvstore::device {

struct StatePlaces {
  int64_t dim;
  Float weight_type;
  StateSlot first, second;  // Momenta; count 0 where the optimizer has none.
};

SIMT float load_float(const Global<uint8_t>& row, Float type, int64_t offset_bytes, int64_t element) {
  if (type == Float::kFloat32) return row.as<const float>().load(offset_bytes / 4 + element);
  const uint16_t bits = row.as<const uint16_t>().load(offset_bytes / 2 + element);
  return type == Float::kFloat16 ? from_float16(bits) : from_bfloat16(bits);
}
SIMT void store_float(const Global<uint8_t>& row, Float type, int64_t offset_bytes, int64_t element, float value) {
  if (type == Float::kFloat32) return row.as<float>().store(offset_bytes / 4 + element, value);
  const uint16_t bits = type == Float::kFloat16 ? to_float16(value) : to_bfloat16(value);
  row.as<uint16_t>().store(offset_bytes / 2 + element, bits);
}

// Sums gradients [batch, dim] of an id in ascending position, from +0, and steps its row.
template <Optimizer kOptimizer>
struct UpdateRows {
  static constexpr int kThreads = 256;
  static constexpr int kLoads = 4;
  RowStore rows;
  InitialRow initial;
  StatePlaces places;
  RunList runs;
  Global<const int64_t> slots;
  Global<const float> grads;
  Hyper h;
  Visit visit;

  FASTIMPL_BOTH static int64_t shared_bytes(int64_t dim) { return (dim + 3) / 4 * 16; }

  SIMT void operator()() const {
    const int64_t warps = simt::threads() / simt::kLanes;
    const auto grad = simt::shared<float>(simt::warp() * shared_bytes(places.dim), places.dim);
    const int64_t end = runs.size();
    for (int64_t at = static_cast<int64_t>(simt::block()) * warps + simt::warp(); at < end;
         at += static_cast<int64_t>(simt::blocks()) * warps)
      step(at, grad);
  }

  SIMT void step(int64_t at, const simt::Shared<float>& grad) const {
    const int64_t slot = slots.load(at);
    const bool is_new = visit.is_new(slot);
    const auto row = rows.row(slot);
    if (is_new) initial.open(simt::lane(), simt::kLanes, row, runs.wanted.load(at), rows.stride);
    sum(runs.begins.load(at), runs.begins.load(at + 1), grad);
    // The sums and the new row are seen by all lanes.
    simt::sync_warp(simt::kAllLanes);
    const float shared = share(row, grad);
    if constexpr (is_scaled(kOptimizer)) simt::sync_warp(simt::kAllLanes);
    for (int64_t e = simt::lane(); e < places.dim; e += simt::kLanes) step_element(row, e, grad.load(e), shared);
    if (simt::lane() == 0) {
      set_word(row, visit.word(is_new ? 0 : word_in(row), is_new, runs.length(at)));
      rows.set_version(row, visit.version);
    }
    // Nobody still reads the sums when the next row's are written.
    simt::sync_warp(simt::kAllLanes);
  }

  SIMT void sum(int64_t begin, int64_t end, const simt::Shared<float>& grad) const {
    for (int64_t e = simt::lane(); e < places.dim; e += simt::kLanes) {
      float total = 0;
      for (int64_t some = begin; some < end; some += kLoads) {
        float loaded[kLoads] = {};
        SIMT_UNROLL
        for (int i = 0; i < kLoads; ++i) {
          if (some + i < end) loaded[i] = grads.load(runs.positions.load(some + i) * places.dim + e);
        }
        SIMT_UNROLL
        for (int i = 0; i < kLoads; ++i) {
          if (some + i < end) total += loaded[i];
        }
      }
      grad.store(e, total);
    }
  }

  SIMT float first_of(const Global<uint8_t>& row, int64_t e) const {
    return load_float(row, places.first.type, places.first.offset_bytes, e);
  }
  SIMT float second_of(const Global<uint8_t>& row, int64_t e) const {
    return load_float(row, places.second.type, places.second.offset_bytes, e);
  }

  // Eight running sums, of the first eight lanes, folded as fold_lanes does; lane 0 has the result.
  SIMT static float fold(float sum) {
    sum += simt::shuffle_down(simt::kAllLanes, sum, 4);
    sum += simt::shuffle_down(simt::kAllLanes, sum, 2);
    return sum + simt::shuffle_down(simt::kAllLanes, sum, 1);
  }

  // What the elements of the row share.
  SIMT float share(const Global<uint8_t>& row, const simt::Shared<float>& grad) const {
    float result = 0;
    if constexpr (is_row_wise(kOptimizer)) {
      float sum = 0;
      for (int64_t e = simt::lane(); simt::lane() < 8 && e < places.dim; e += 8) sum += grad.load(e) * grad.load(e);
      const float mean_square = fold(sum) / static_cast<float>(places.dim);
      if (simt::lane() == 0) {
        const StateSlot& slot = kOptimizer == Optimizer::kRowwiseAdagrad ? places.first : places.second;
        float momentum = load_float(row, slot.type, slot.offset_bytes, 0);
        result = row_share(kOptimizer, mean_square, &momentum, &momentum, h);
        store_float(row, slot.type, slot.offset_bytes, 0, momentum);
      }
    } else if constexpr (is_scaled(kOptimizer)) {
      float weights = 0, steps = 0;
      for (int64_t e = simt::lane(); simt::lane() < 8 && e < places.dim; e += 8) {
        float average = first_of(row, e), square = second_of(row, e);
        advance_adam(grad.load(e), &average, &square, h);
        const float value = load_float(row, places.weight_type, kHeaderBytes, e),
                    step = adam_change(average, square, h);
        weights += value * value;
        steps += step * step;
      }
      const float norm = std::sqrt(fold(weights)), length = std::sqrt(fold(steps));
      result = norm > 0 && length > 0 ? (h.lr * norm) / length : 1.0F;
    } else {
      return 0;
    }
    return simt::shuffle(simt::kAllLanes, result, 0);
  }

  SIMT void step_element(const Global<uint8_t>& row, int64_t e, float grad, float shared) const {
    constexpr bool kHasFirst = momentum1_width(kOptimizer, 2) == 2, kHasSecond = momentum2_width(kOptimizer, 2) == 2;
    float first = 0, second = 0, weight = load_float(row, places.weight_type, kHeaderBytes, e);
    if constexpr (kHasFirst) first = first_of(row, e);
    if constexpr (kHasSecond) second = second_of(row, e);
    if constexpr (is_scaled(kOptimizer)) advance_adam(grad, &first, &second, h);
    weight -= element_step(kOptimizer, grad, shared, &first, &second, h);
    if constexpr (kHasFirst) store_float(row, places.first.type, places.first.offset_bytes, e, first);
    if constexpr (kHasSecond) store_float(row, places.second.type, places.second.offset_bytes, e, second);
    store_float(row, places.weight_type, kHeaderBytes, e, weight);
  }
};

}  // namespace fastimpl::kvstore::device
