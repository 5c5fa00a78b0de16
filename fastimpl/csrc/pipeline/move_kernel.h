// Movement of ids on a grid: jagged permutation, bucketizing. Nothing is waited for: what does not lie in the data is
// 0, and what no bucket has goes to the first, so that nothing outside of memory is touched.
#pragma once

#include "common/simt.h"
#include "pipeline/bag_kernel.h"

namespace fastimpl::pipeline {

// Blocks of `data` one after the other. `starts` are where they begin in `out`, and the end.
template <typename Value>
struct GatherBlocks {
  static constexpr int kThreads = 256;
  Global<const Value> data;
  Global<const int64_t> begins, starts;
  Global<Value> out;

  SIMT void operator()() const {
    for_places(starts, begins.size(), out.size(), simt::lane(), simt::kLanes, [&](int64_t at, int64_t block) {
      const int64_t from = begins.load(block) + (at - starts.load(block));
      const bool is_inside = at < starts.load(block + 1) && from >= 0 && from < data.size();
      out.store(at, is_inside ? data.load(from) : Value{0});
    });
  }
};

// The bucket of each position and its id there, see Bucketing of ids.h; positions are sorted by bucket afterwards,
// stably. `lengths` of bags by bucket are 0 before; counts are integers, so that no order of threads shows.
template <typename Id>
struct FindBuckets {
  static constexpr int kThreads = 256;
  Global<const Id> ids;
  Global<const int64_t> offsets, block_sizes, destinations;  // One of the last two is empty, or there is nothing to do.
  int64_t feature_count, bag_count, bucket_count;
  Integers buckets, positions;
  Global<Id> local_ids;
  Global<int64_t> lengths;

  SIMT void operator()() const {
    const int64_t bags = feature_count * bag_count;
    for_places(offsets, bags, ids.size(), simt::lane(), simt::kLanes, [&](int64_t at, int64_t bag) {
      const Id id = ids.load(at);
      const bool is_cut = block_sizes.size() > 0;
      const int64_t size = is_cut ? block_sizes.load(bag / bag_count) : 1;
      const int64_t value = is_cut ? static_cast<int64_t>(id) : destinations.load(at);
      const int64_t wanted = size < 1 || value < 0 ? -1 : value / size;
      const int64_t bucket = wanted >= 0 && wanted < bucket_count ? wanted : 0;
      buckets.store(at, bucket);
      positions.store(at, at);
      local_ids.store(at, is_cut ? static_cast<Id>(id - static_cast<Id>(bucket * size)) : id);
      lengths.atomic_add(bucket * bags + bag, 1);
    });
  }
};

// Of one place of the output: its id, its weight, and the position that both had.
template <typename Id>
struct MoveToBuckets {
  static constexpr int kThreads = 256;
  Integers positions;  // Sorted.
  Global<const Id> local_ids;
  Global<const float> weights;  // Or empty.
  Global<Id> out_ids;
  Global<float> out_weights;
  Global<int64_t> out_positions;

  SIMT void operator()() const {
    const int64_t step = static_cast<int64_t>(simt::blocks()) * simt::threads();
    for (int64_t to = static_cast<int64_t>(simt::block()) * simt::threads() + simt::thread(); to < out_ids.size();
         to += step) {
      const int64_t from = positions.load(to);
      out_ids.store(to, local_ids.load(from));
      if (weights.size() > 0) out_weights.store(to, weights.load(from));
      out_positions.store(to, from);
    }
  }
};

}  // namespace fastimpl::pipeline
