// Rows as they lie in memory of the caller or come from a file: their keys, and whether they are what was saved.
#pragma once

#include "common/regimes.h"
#include "common/sort.h"
#include "kvstore/batch.h"

namespace fastimpl::kvstore {

constexpr int64_t kKeyGrain = regime(4096, 3);

// The keys of rows [count, row_bytes].
inline void read_keys(const Parallel& parallel, const uint8_t* rows, int64_t count, int64_t row_bytes, int64_t* keys) {
  parallel.run_ranges(count, kKeyGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kValuesDistance < end) fetch_line(rows + (i + kValuesDistance) * row_bytes);
      keys[i] = RowPool::key(rows + i * row_bytes);
    }
  });
}

// Where saved rows stand: behind the last of bucket b there are `ends[b]` rows.
struct SavedOrder {
  BucketRule rule;
  const int64_t* ends;
  int64_t bucket_count;
};

// Whether ids from position `start` on stand in bucket order, ascending inside a bucket.
inline bool ids_stand_in_order(const Parallel& parallel, const int64_t* ids, int64_t count, int64_t start,
                               SavedOrder order) {
  std::atomic<bool> right{true};
  parallel.run_ranges(count, kKeyGrain, [&](int64_t begin, int64_t end) {
    int64_t bucket = std::upper_bound(order.ends, order.ends + order.bucket_count, start + begin) - order.ends;
    bool fit = true;
    for (int64_t i = begin; i < end; ++i) {
      fetch_ahead(ids + i);
      const bool first = bucket < order.bucket_count && start + i >= order.ends[bucket];
      while (bucket < order.bucket_count && start + i >= order.ends[bucket]) ++bucket;
      fit &= order.rule(ids[i]) == bucket;
      // A range may begin anywhere in a bucket; what begins one has nothing before it.
      const bool begins = first || (i == begin && bucket > 0 && order.ends[bucket - 1] == start + i);
      fit &= i == 0 || begins || ids[i - 1] < ids[i];
    }
    if (!fit) right = false;
  });
  return right;
}

// Whether a row has this key and is in use.
inline bool is_row_of(const uint8_t* row, int64_t id) {
  return RowPool::key(row) == id && (metadata(row) & kUsed) != 0;
}

// Whether rows [count, row_bytes] from position `start` on are those of `ids`, which stand in order.
inline bool fits(const Parallel& parallel, const uint8_t* rows, const int64_t* ids, int64_t count, int64_t row_bytes,
                 int64_t start, SavedOrder order) {
  std::atomic<bool> right{ids_stand_in_order(parallel, ids, count, start, order)};
  parallel.run_ranges(count, kKeyGrain, [&](int64_t begin, int64_t end) {
    bool fit = true;
    for (int64_t i = begin; i < end; ++i) {
      const uint8_t* const row = rows + i * row_bytes;
      if (i + kValuesDistance < end) fetch_line(row + kValuesDistance * row_bytes);
      fit &= is_row_of(row, ids[i]);
    }
    if (!fit) right = false;
  });
  return right;
}

}  // namespace fastimpl::kvstore
