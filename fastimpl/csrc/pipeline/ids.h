// Movement of ids and of blocks of values: mending, jagged permutation, bucketizing. Bits are moved, nothing is
// computed.
#pragma once

#include "common/regimes.h"
#include "pipeline/bags.h"

namespace fastimpl::pipeline {

// So many bytes are worth another thread.
constexpr int64_t kCopiedBytes = regime(65536, 24);

// A copy in which every id outside [0, row_counts[feature]) is 0; of -1 rows every id is one.
template <typename Id>
void mend_bag_ids(const Parallel& parallel, const Id* ids, const int64_t* offsets, const int64_t* row_counts,
                  int64_t feature_count, int64_t bag_count, Id* out) {
  for_bags(parallel, offsets, feature_count, bag_count, [&](int64_t feature, int64_t first_bag, int64_t last_bag) {
    const int64_t begin = offsets[feature * bag_count + first_bag], end = offsets[feature * bag_count + last_bag];
    const auto limit = static_cast<uint64_t>(row_counts[feature]);
    const bool takes_any = row_counts[feature] < 0;
    for (int64_t at = begin; at < end; ++at)
      out[at] = takes_any || static_cast<uint64_t>(static_cast<int64_t>(ids[at])) < limit ? ids[at] : 0;
  });
}

// Places of blocks in the output: `starts` has block_count + 1 entries. Returns the first block that does not lie in
// [0, data_count), or -1.
inline int64_t place_blocks(const int64_t* begins, const int64_t* sizes, int64_t block_count, int64_t data_count,
                            int64_t* starts) {
  starts[0] = 0;
  for (int64_t k = 0; k < block_count; ++k) {
    if (sizes[k] < 0 || begins[k] < 0 || sizes[k] > data_count || begins[k] > data_count - sizes[k]) return k;
    if (__builtin_add_overflow(starts[k], sizes[k], &starts[k + 1])) return k;
  }
  return -1;
}

// Blocks one after the other; elements of `element_bytes`. Threads take equal shares of the output's bytes.
inline void gather_blocks(const Parallel& parallel, const uint8_t* data, const int64_t* begins, const int64_t* starts,
                          int64_t block_count, int64_t element_bytes, uint8_t* out) {
  parallel.run_ranges(starts[block_count], kCopiedBytes / element_bytes, [&](int64_t first, int64_t last) {
    int64_t k = std::upper_bound(starts, starts + block_count + 1, first) - starts - 1;
    for (int64_t at = first; at < last; ++k) {
      const int64_t end = std::min(last, starts[k + 1]);
      if (end > at)
        std::memcpy(out + at * element_bytes, data + (begins[k] + at - starts[k]) * element_bytes,
                    static_cast<size_t>((end - at) * element_bytes));
      at = std::max(at, end);
    }
  });
}

// Ids by bucket, then feature, bag and position. Either destinations come from blocks of ids, and ids become local to
// their block, or the caller knows them (`block_sizes` is null), and ids stay as they are. A feature with blocks of 0
// is not cut: its ids stay in the first bucket as they are.
template <typename Id>
struct Bucketing {
  const Id* ids;
  const int64_t* offsets;
  const int64_t *block_sizes, *destinations;
  const float* weights;
  int64_t feature_count, bag_count, bucket_count;

  int64_t all_bags() const { return feature_count * bag_count; }
};

// The bucket of each position; ids or destinations that have none are counted.
template <typename Id>
BadIds find_buckets(const Parallel& parallel, const Bucketing<Id>& job, uint32_t* buckets) {
  std::atomic<int64_t> count{0}, first{INT64_MAX};
  for_bags(parallel, job.offsets, job.feature_count, job.bag_count,
           [&](int64_t feature, int64_t first_bag, int64_t last_bag) {
             const int64_t begin = job.offsets[feature * job.bag_count + first_bag],
                           end = job.offsets[feature * job.bag_count + last_bag];
             const int64_t size = job.block_sizes == nullptr ? 1 : job.block_sizes[feature];
             if (size == 0) {
               std::fill(buckets + begin, buckets + end, 0);
               return;
             }
             const __int128 all = static_cast<__int128>(size) * job.bucket_count;
             const int64_t limit = all > INT64_MAX ? INT64_MAX : static_cast<int64_t>(all);
             // A quotient below 2**32 by one multiplication: at most one off, which the remainder shows. Divisions are
             // dear.
             const double inverse = 1.0 / static_cast<double>(size);
             int64_t wrong = 0, first_wrong = INT64_MAX;
             for (int64_t at = begin; at < end; ++at) {
               const int64_t id = job.block_sizes == nullptr ? job.destinations[at] : static_cast<int64_t>(job.ids[at]);
               if (id < 0 || (id >= limit && !(all > INT64_MAX))) {
                 ++wrong;
                 first_wrong = std::min(first_wrong, at);
                 continue;
               }
               auto bucket = static_cast<int64_t>(static_cast<double>(id) * inverse);
               bucket -= static_cast<__int128>(bucket) * size > id;
               bucket += static_cast<__int128>(bucket + 1) * size <= id;
               buckets[at] = static_cast<uint32_t>(bucket);
             }
             if (wrong == 0) return;
             count += wrong;
             for (int64_t known = first; first_wrong < known && !first.compare_exchange_weak(known, first_wrong);) {
             }
           });
  return {count, count == 0 ? -1 : first.load()};
}

// `lengths` is [bucket_count * features * bags]; of each output also the position that it had. `out_weights` is null
// without weights.
template <typename Id>
void bucketize(const Parallel& parallel, const Bucketing<Id>& job, const uint32_t* buckets, int64_t* lengths,
               Id* out_ids, float* out_weights, int64_t* positions) {
  const int64_t all = job.all_bags();
  std::vector<int64_t> next(static_cast<size_t>(all * job.bucket_count));
  const auto for_all = [&](const auto& visit) {
    for_bags(parallel, job.offsets, job.feature_count, job.bag_count,
             [&](int64_t feature, int64_t first, int64_t last) {
               for (int64_t bag = feature * job.bag_count + first; bag < feature * job.bag_count + last; ++bag) {
                 for (int64_t at = job.offsets[bag]; at < job.offsets[bag + 1]; ++at)
                   visit(feature, buckets[at] * all + bag, at);
               }
             });
  };
  std::fill_n(lengths, all * job.bucket_count, 0);
  for_all([lengths](int64_t, int64_t place, int64_t) { ++lengths[place]; });
  int64_t total = 0;
  for (int64_t place = 0; place < all * job.bucket_count; ++place) {
    next[static_cast<size_t>(place)] = total;
    total += lengths[place];
  }
  for_all([&](int64_t feature, int64_t place, int64_t at) {
    const int64_t to = next[static_cast<size_t>(place)]++;
    const int64_t start = job.block_sizes == nullptr ? 0 : static_cast<int64_t>(buckets[at]) * job.block_sizes[feature];
    out_ids[to] = static_cast<Id>(job.ids[at] - start);
    if (out_weights != nullptr) out_weights[to] = job.weights[at];
    positions[to] = at;
  });
}

}  // namespace fastimpl::pipeline
