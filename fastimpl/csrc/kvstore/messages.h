// What Python says about a table and about an eviction round: structs of 64-bit words, field by field those of
// fastimpl/kvstore/native.py, each with a version that both sides compare.
#pragma once

#include <cstdint>

namespace fastimpl::kvstore {

// Floats travel as their bits, flags as 0 or 1, dtypes and optimizers as their codes.
struct TableMessage {
  static constexpr int64_t kVersion = 2;
  int64_t version;
  int64_t row_bytes;
  int64_t embedding_dim;
  int64_t weight_type;
  int64_t optimizer;
  int64_t momentum1_offset_bytes;
  int64_t momentum1_count;
  int64_t momentum1_type;
  int64_t momentum2_offset_bytes;
  int64_t momentum2_count;
  int64_t momentum2_type;
  int64_t is_uniform;
  int64_t low_bits;
  int64_t span_bits;
  int64_t seed;
  int64_t table_index;
  int64_t counts_visits;
  int64_t logs_removals;
  int64_t capacity;  // -1 is any number.
  int64_t is_on_host;
  int64_t cache_rows;
  int64_t ranks_by_count;
};

struct EvictionMessage {
  static constexpr int64_t kVersion = 1;
  int64_t version;
  int64_t policy;
  int64_t ttl_seconds;
  int64_t count_threshold;
  int64_t timestamp_threshold;
  int64_t decay_bits;
  int64_t l2_threshold_bits;
  int64_t now;
  int64_t mark;
  int64_t has_cutoff;
  int64_t cutoff_score;
  int64_t cutoff_key;
};

}  // namespace fastimpl::kvstore
