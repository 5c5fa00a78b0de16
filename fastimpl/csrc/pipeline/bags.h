// Bags of ids over tables of rows: which table, which columns, and that nothing is read outside of them.
#pragma once

#include <algorithm>
#include <vector>

#include "common/parallel.h"
#include "common/regimes.h"
#include "pipeline/rows.h"

namespace fastimpl::pipeline {

// Rows lie one after the other. Momenta are null where the optimizer has none, and [rows, dim] or [rows] as it asks.
struct BagTable {
  uint8_t* rows;
  int64_t row_count, dim;
  Float type;
  bool mean;
  float *momentum1, *momentum2;

  int64_t row_bytes() const { return dim * float_bytes(type); }
};

// `column` is where the feature's columns begin in the pooled matrix.
struct BagFeature {
  int64_t table, column;
};

// All of a batch but the ids, whose type what comes after them need not know: bag `feature * bag_count + bag` holds ids
// [offsets[bag], offsets[bag + 1]). `weights` is null without them.
struct Bags {
  std::vector<BagTable> tables;
  std::vector<BagFeature> features;
  int64_t bag_count, width;
  const int64_t* offsets;
  const float* weights;
  int64_t id_count;

  int64_t feature_count() const { return static_cast<int64_t>(features.size()); }
  int64_t all_bags() const { return feature_count() * bag_count; }
  const BagTable& table_of(int64_t feature) const {
    return tables[static_cast<size_t>(features[static_cast<size_t>(feature)].table)];
  }
};

template <typename Id>
struct BagBatch : Bags {
  const Id* ids;
};

constexpr int64_t kOffsetsGrain = regime(65536, 3);
// So many ids are worth a part of their own.
constexpr int64_t kPartIds = regime(512, 3);

// Whether offsets begin at 0, end at `id_count` and never fall. `bag_count` of them and one more.
inline bool are_offsets(const Parallel& parallel, const int64_t* offsets, int64_t bag_count, int64_t id_count) {
  if (offsets[0] != 0 || offsets[bag_count] != id_count) return false;
  std::atomic<bool> falls{false};
  parallel.run_ranges(bag_count, kOffsetsGrain, [&](int64_t begin, int64_t end) {
    bool found = false;
    for (int64_t bag = begin; bag < end; ++bag) found |= offsets[bag + 1] < offsets[bag];
    if (found) falls = true;
  });
  return !falls;
}

// Of offsets that are none: the first that begins elsewhere than at 0, falls, or is the last.
inline int64_t first_wrong_offset(const int64_t* offsets, int64_t bag_count) {
  if (offsets[0] != 0) return 0;
  for (int64_t bag = 1; bag < bag_count; ++bag) {
    if (offsets[bag] < offsets[bag - 1]) return bag;
  }
  return bag_count;
}

// Ids and bags are equally dear: cuts all bags into parts of about as many of both.
inline std::vector<int64_t> balanced_bags(const int64_t* offsets, int64_t bag_count, int64_t part_count) {
  std::vector<int64_t> begins(static_cast<size_t>(part_count + 1), bag_count);
  const int64_t total = offsets[bag_count] + bag_count;
  int64_t begin = 0;
  for (int64_t part = 0; part < part_count; ++part) {
    const auto wanted = static_cast<int64_t>(static_cast<__int128>(total) * part / part_count);
    int64_t end = bag_count;
    while (begin < end) {
      const int64_t middle = begin + (end - begin) / 2;
      if (offsets[middle] + middle < wanted) {
        begin = middle + 1;
      } else {
        end = middle;
      }
    }
    begins[static_cast<size_t>(part)] = begin;
  }
  return begins;
}

// Calls `body(feature, first bag, last bag)` for every run of bags of one feature, in parallel, in parts of equal work.
template <typename Body>
void for_bags(const Parallel& parallel, const int64_t* offsets, int64_t feature_count, int64_t bag_count,
              const Body& body) {
  const int64_t all = feature_count * bag_count, id_count = offsets[all];
  const int64_t parts = parallel.thread_count <= 1
                            ? 1
                            : std::max<int64_t>(1, std::min(8 * parallel.thread_count, (id_count + all) / kPartIds));
  const std::vector<int64_t> begins = balanced_bags(offsets, all, parts);
  parallel.run(parts, [&](int64_t part) {
    const int64_t end = begins[static_cast<size_t>(part + 1)];
    for (int64_t bag = begins[static_cast<size_t>(part)]; bag < end;) {
      const int64_t feature = bag / bag_count, last = std::min(end, (feature + 1) * bag_count);
      body(feature, bag - feature * bag_count, last - feature * bag_count);
      bag = last;
    }
  });
}

struct BadIds {
  int64_t count, first;  // `first` is a position, -1 where there is none.
};

// Ids outside [0, row_counts[feature]). A table of -1 rows finds them by id, and none is outside.
template <typename Id>
BadIds find_bad_ids(const Parallel& parallel, const Id* ids, const int64_t* offsets, const int64_t* row_counts,
                    int64_t feature_count, int64_t bag_count) {
  std::atomic<int64_t> count{0}, first{INT64_MAX};
  const Isa isa = best_isa();
  for_bags(parallel, offsets, feature_count, bag_count, [&](int64_t feature, int64_t first_bag, int64_t last_bag) {
    const int64_t begin = offsets[feature * bag_count + first_bag], end = offsets[feature * bag_count + last_bag];
    if (row_counts[feature] < 0) return;
    const auto limit = static_cast<uint64_t>(row_counts[feature]);
    int64_t wrong = 0;
    run_on(isa, [&](auto) FASTIMPL_INLINED {
      int64_t found = 0;
      for (int64_t at = begin; at < end; ++at) found += static_cast<uint64_t>(static_cast<int64_t>(ids[at])) >= limit;
      wrong = found;
    });
    if (wrong == 0) return;
    count += wrong;
    int64_t at = begin;
    while (static_cast<uint64_t>(static_cast<int64_t>(ids[at])) < limit) ++at;
    for (int64_t known = first; at < known && !first.compare_exchange_weak(known, at);) {
    }
  });
  return {count, count == 0 ? -1 : first.load()};
}

}  // namespace fastimpl::pipeline
