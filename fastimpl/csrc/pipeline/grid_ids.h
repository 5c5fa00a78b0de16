// Movement of ids for a grid: mending, jagged permutation, bucketizing. What one thread does, of any order of threads;
// what more than one thread adds to is an integer, so that no order shows. Runs of 16 bytes are loaded and stored
// whole.
#pragma once

#include "pipeline/grid.h"

namespace fastimpl::pipeline {

FASTIMPL_BOTH inline void add_shared(int64_t* to, int64_t value) {
#ifdef __CUDA_ARCH__
  atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
#else
  *to += value;
#endif
}

FASTIMPL_BOTH inline void lower_shared(int64_t* to, int64_t value) {
#ifdef __CUDA_ARCH__
  atomicMin(reinterpret_cast<long long*>(to), static_cast<long long>(value));
#else
  *to = *to < value ? *to : value;
#endif
}

constexpr int64_t kRunBytes = 16;

template <typename T>
struct alignas(kRunBytes) Run {
  static constexpr int64_t kCount = kRunBytes / static_cast<int64_t>(sizeof(T));
  T values[static_cast<size_t>(kCount)];
};

FASTIMPL_BOTH inline bool is_aligned(const void* at) {
  return reinterpret_cast<uintptr_t>(at) % static_cast<uintptr_t>(kRunBytes) == 0;
}

// `count` values, at most a run, from any place; whole where a whole run lies there.
template <typename T>
FASTIMPL_BOTH inline Run<T> load_run(const T* from, int64_t count) {
  if (count == Run<T>::kCount && is_aligned(from)) return *reinterpret_cast<const Run<T>*>(from);
  Run<T> run{};
  for (int64_t i = 0; i < count; ++i) run.values[i] = from[i];
  return run;
}

template <typename T>
FASTIMPL_BOTH inline void store_run(const Run<T>& run, T* to, int64_t count) {
  if (count == Run<T>::kCount && is_aligned(to)) {
    *reinterpret_cast<Run<T>*>(to) = run;
    return;
  }
  for (int64_t i = 0; i < count; ++i) to[i] = run.values[i];
}

FASTIMPL_BOTH inline int64_t run_count(int64_t count, int64_t of_run) { return (count + of_run - 1) / of_run; }

// Ids by feature. Only the offsets at which features begin are read, one or more bags a feature: they lie in memory
// even where they are none, so that ids may be looked at before offsets are known to be right.
template <typename Id>
struct GridIds {
  const Id* ids;
  const int64_t* offsets;
  int64_t feature_count, bag_count, id_count;

  FASTIMPL_BOTH int64_t begin_of(int64_t feature) const { return offsets[feature * bag_count]; }
  FASTIMPL_BOTH int64_t feature_of(int64_t position) const {
    const GridIds* const self = this;
    return last_not_above(feature_count, position, [self](int64_t f) { return self->begin_of(f); });
  }
  // Calls `visit(feature, position, id)` for the run `index`, and returns its ids.
  template <typename Visit>
  FASTIMPL_BOTH Run<Id> for_run(int64_t index, const Visit& visit) const {
    const int64_t first = index * Run<Id>::kCount, left = id_count - first,
                  count = left < Run<Id>::kCount ? left : Run<Id>::kCount;
    const Run<Id> run = load_run(ids + first, count);
    int64_t feature = feature_of(first);
    for (int64_t i = 0; i < count; ++i) {
      while (feature + 1 < feature_count && begin_of(feature + 1) <= first + i) ++feature;
      visit(feature, first + i, run.values[i]);
    }
    return run;
  }
};

// Of a run: found[0] counts ids outside [0, row_counts[feature]), found[1] is the least position of one.
template <typename Id>
struct CountBadIds {
  GridIds<Id> batch;
  const int64_t* row_counts;
  int64_t* found;

  FASTIMPL_BOTH void operator()(int64_t index) const {
    int64_t count = 0, least = INT64_MAX;
    batch.for_run(index, [&](int64_t feature, int64_t position, Id id) {
      if (static_cast<uint64_t>(static_cast<int64_t>(id)) < static_cast<uint64_t>(row_counts[feature])) return;
      ++count;
      least = least < position ? least : position;
    });
    if (count == 0) return;
    add_shared(found, count);
    lower_shared(found + 1, least);
  }
};

// A position that nobody lowered is none.
struct EndBadIds {
  int64_t* found;
  FASTIMPL_BOTH void operator()(int64_t) const {
    if (found[0] == 0) found[1] = -1;
  }
};

// Of a run: ids outside are 0.
template <typename Id>
struct MendBadIds {
  GridIds<Id> batch;
  const int64_t* row_counts;
  Id* out;

  FASTIMPL_BOTH void operator()(int64_t index) const {
    const int64_t first = index * Run<Id>::kCount, left = batch.id_count - first;
    Run<Id> mended{};
    batch.for_run(index, [&](int64_t feature, int64_t position, Id id) {
      const bool inside = static_cast<uint64_t>(static_cast<int64_t>(id)) < static_cast<uint64_t>(row_counts[feature]);
      mended.values[position - first] = inside ? id : Id{0};
    });
    store_run(mended, out + first, left < Run<Id>::kCount ? left : Run<Id>::kCount);
  }
};

// `bad` gets the first block that does not lie in [0, data_count).
struct BlockCheck {
  const int64_t *begins, *sizes;
  int64_t data_count;
  int64_t* bad;

  FASTIMPL_BOTH void operator()(int64_t k) const {
    if (sizes[k] < 0 || begins[k] < 0 || sizes[k] > data_count || begins[k] > data_count - sizes[k])
      lower_shared(bad, k);
  }
};

// Of a run of the output: its values, from as many blocks as it has. `starts` are where blocks begin in the output.
template <typename Value>
struct GatherBlocks {
  const Value* data;
  const int64_t *begins, *starts;
  int64_t block_count, out_count;
  Value* out;

  FASTIMPL_BOTH void operator()(int64_t index) const {
    const int64_t first = index * Run<Value>::kCount, left = out_count - first,
                  count = left < Run<Value>::kCount ? left : Run<Value>::kCount;
    const int64_t* const places = starts;
    int64_t k = last_not_above(block_count, first, [places](int64_t block) { return places[block]; });
    if (first + count <= starts[k + 1]) {
      store_run(load_run(data + begins[k] + first - starts[k], count), out + first, count);
      return;
    }
    Run<Value> run{};
    for (int64_t i = 0; i < count; ++i) {
      while (starts[k + 1] <= first + i) ++k;
      run.values[i] = data[begins[k] + first + i - starts[k]];
    }
    store_run(run, out + first, count);
  }
};

// Ids by bucket, as Bucketing of pipe_ids.h. found[0] counts positions without a bucket, found[1] is the least of them,
// found[2] counts block sizes below 1, at which nothing is divided.
template <typename Id>
struct FindBuckets {
  GridIds<Id> batch;
  const int64_t *block_sizes, *destinations;
  int64_t bucket_count;
  int64_t *buckets, *positions, *found;

  FASTIMPL_BOTH void operator()(int64_t index) const {
    batch.for_run(index, [&](int64_t feature, int64_t position, Id id) {
      const int64_t size = block_sizes == nullptr ? 1 : block_sizes[feature];
      const int64_t value = block_sizes == nullptr ? destinations[position] : static_cast<int64_t>(id);
      const int64_t bucket = size < 1 || value < 0 ? -1 : value / size;
      positions[position] = position;
      buckets[position] = bucket;
      if (bucket >= 0 && bucket < bucket_count) return;
      add_shared(found, 1);
      lower_shared(found + 1, position);
    });
  }
};

struct BlockSizeCheck {
  const int64_t* block_sizes;
  int64_t* found;
  FASTIMPL_BOTH void operator()(int64_t feature) const {
    if (block_sizes[feature] < 1) add_shared(found + 2, 1);
  }
};

// Of one bag in one bucket: its ids there, from positions that are sorted by bucket, stably. Two searches, no counting.
struct BucketLengths {
  const int64_t *offsets, *buckets, *positions;
  int64_t all_bags, id_count;
  int64_t* lengths;

  // Sorted entries before (bucket, position).
  FASTIMPL_BOTH int64_t before(int64_t bucket, int64_t position) const {
    int64_t low = 0, high = id_count;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (buckets[middle] < bucket || (buckets[middle] == bucket && positions[middle] < position)) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
  FASTIMPL_BOTH void operator()(int64_t index) const {
    const int64_t bucket = index / all_bags, bag = index % all_bags;
    lengths[index] = before(bucket, offsets[bag + 1]) - before(bucket, offsets[bag]);
  }
};

// Of one place of the output: its id, local to its block, and its weight.
template <typename Id>
struct MoveToBucket {
  GridIds<Id> batch;
  const int64_t *block_sizes, *buckets, *positions;
  const float* weights;
  Id* out_ids;
  float* out_weights;

  FASTIMPL_BOTH void operator()(int64_t to) const {
    const int64_t from = positions[to];
    const int64_t start = block_sizes == nullptr ? 0 : buckets[to] * block_sizes[batch.feature_of(from)];
    out_ids[to] = static_cast<Id>(batch.ids[from] - start);
    if (weights != nullptr) out_weights[to] = weights[from];
  }
};

}  // namespace fastimpl::pipeline
