// What Python's messages say, as the kernels have it.
#pragma once

#include <cstring>

#include "kvstore/messages.h"
#include "kvstore/policy.h"
#include "kvstore/row.h"

namespace fastimpl::kvstore {

inline double double_word(int64_t word) {
  double value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

inline RowFormat format_of(const TableMessage& m) {
  RowFormat format{};
  format.row_bytes = m.row_bytes;
  format.dim = m.embedding_dim;
  format.weight_type = static_cast<Float>(m.weight_type);
  format.optimizer = static_cast<Optimizer>(m.optimizer);
  format.momentum1 = {m.momentum1_offset_bytes, m.momentum1_count, static_cast<Float>(m.momentum1_type)};
  format.momentum2 = {m.momentum2_offset_bytes, m.momentum2_count, static_cast<Float>(m.momentum2_type)};
  format.uniform = m.is_uniform != 0;
  format.low = float_of(static_cast<uint32_t>(m.low_bits));
  format.span = float_of(static_cast<uint32_t>(m.span_bits));
  // Unsigned: the sum wraps.
  format.table_word = mix(static_cast<uint64_t>(m.seed) + kGolden * static_cast<uint64_t>(m.table_index + 1));
  format.counts_visits = m.counts_visits != 0;
  format.logs_removals = m.logs_removals != 0;
  format.capacity = m.capacity;
  format.ranks_by_count = m.ranks_by_count != 0;
  format.is_on_host = m.is_on_host != 0;
  format.cache_rows = m.cache_rows;
  return format;
}

inline bool holds(const RowFormat& format, const StateSlot& slot) {
  return slot.count == 0 ||
         ((slot.count == 1 || slot.count == format.dim) && slot.offset_bytes >= format.weight_end() &&
          static_cast<int64_t>(slot.type) >= 0 && static_cast<int64_t>(slot.type) <= 2 &&
          slot.offset_bytes <= format.row_bytes - slot.count * float_bytes(slot.type));
}

// Whether every slot lies in the row, and every code means something.
inline bool is_sound(const RowFormat& format) {
  return format.dim >= 1 && format.cache_rows >= 0 && format.cache_rows < int64_t{1} << 32 &&
         format.row_bytes >= kHeaderBytes && format.row_bytes < int64_t{1} << 40 && format.dim < format.row_bytes &&
         static_cast<int64_t>(format.weight_type) >= 0 && static_cast<int64_t>(format.weight_type) <= 2 &&
         static_cast<int64_t>(format.optimizer) >= 0 && static_cast<int64_t>(format.optimizer) < kOptimizerCount &&
         format.weight_end() <= format.row_bytes && holds(format, format.momentum1) && holds(format, format.momentum2);
}

inline bool is_policy(int64_t code) { return code >= 0 && code <= static_cast<int64_t>(Policy::kScore); }

inline EvictionPlan plan_of(const EvictionMessage& m) {
  return {static_cast<Policy>(m.policy),
          m.ttl_seconds,
          m.count_threshold,
          m.timestamp_threshold,
          double_word(m.decay_bits),
          double_word(m.l2_threshold_bits),
          m.now,
          static_cast<uint64_t>(m.mark),
          m.has_cutoff != 0,
          static_cast<uint64_t>(m.cutoff_score),
          m.cutoff_key};
}

// Eight values in the order of Hyper, rounded once.
inline Hyper hyper_of(const double* values) {
  const auto rounded = [values](int at) { return static_cast<float>(values[at]); };
  return {rounded(0), rounded(1), rounded(2), rounded(3), rounded(4), rounded(5), rounded(6), rounded(7)};
}

}  // namespace fastimpl::kvstore
