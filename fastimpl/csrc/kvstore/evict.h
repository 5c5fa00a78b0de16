// An eviction round on the host: rows that the plan condemns go, counts of the others decay.
#pragma once

#include "common/sums.h"
#include "kvstore/policy.h"
#include "kvstore/write.h"

namespace fastimpl::kvstore {

inline double weight_square_sum(const RowFormat& format, const uint8_t* row, float* scratch) {
  widen(format.weight_type, row + kHeaderBytes, scratch, format.dim);
  double lanes[8] = {};
  for (int64_t e = 0; e < format.dim; ++e) {
    const double wide = scratch[e];
    lanes[e % 8] += wide * wide;
  }
  return fold_lanes(lanes);
}

inline bool condemned(const EvictionPlan& plan, const RowFormat& format, const uint8_t* row, float* scratch) {
  const double square_sum = plan.policy == Policy::kL2 ? weight_square_sum(format, row, scratch) : 0;
  return is_condemned(plan, metadata(row), RowPool::key(row), square_sum);
}

// Removes those of the ids that the plan condemns and that did not change after its mark; decays the counts of the
// others. Returns how many it removed.
inline int64_t evict_rows(Table& table, const Parallel& parallel, const int64_t* ids, int64_t count,
                          const EvictionPlan& plan, Change change) {
  const Range fetched = plan.policy == Policy::kL2 ? Range{0, table.format.weight_end()} : Range{0, kHeaderBytes};
  compact_when_long(table);
  auto found = table.find(parallel, ids, count, Table::Missing::kSkip, fetched, {0, 0}, change.now);
  Removing removing;
  std::vector<float> scratch(static_cast<size_t>(table.format.dim));
  for (const uint32_t slot : found.slots) {
    if (slot == kAbsent || table.rows.pool.version(table.rows.pool.at(slot)) > plan.mark) continue;
    if (condemned(plan, table.format, table.rows.pool.at(slot), scratch.data())) removing.slots.push_back(slot);
  }
  prepare_removal(table, removing);
  change.begin();
  // Slots that stay are written before any row moves.
  for (const uint32_t slot : found.slots) {
    if (slot == kAbsent) continue;
    uint8_t* const row = table.rows.pool.at(slot);
    const uint64_t word = metadata(row), fewer = decayed_count(plan, count_of(word));
    if (table.rows.pool.version(row) > plan.mark || fewer == count_of(word) ||
        condemned(plan, table.format, row, scratch.data()))
      continue;
    set_metadata(row, word_of(timestamp_of(word), fewer));
    table.rows.pool.set_version(row, change.version);
  }
  remove_slots(table, removing, change);
  table.evicted_count += static_cast<int64_t>(removing.slots.size());
  return static_cast<int64_t>(removing.slots.size());
}

// The (score, key) of the last row that is kept when the `keep_count` highest stay.
inline Ranked score_cutoff(const Table& table, int64_t keep_count) {
  std::vector<Ranked> all;
  all.reserve(static_cast<size_t>(table.rows.pool.size()));
  for (int64_t slot = 0; slot < table.rows.pool.size(); ++slot) {
    const uint8_t* const row = table.rows.pool.at(slot);
    all.push_back({count_of(metadata(row)), RowPool::key(row), static_cast<uint32_t>(slot)});
  }
  const auto last = all.end() - static_cast<std::ptrdiff_t>(keep_count);
  std::nth_element(all.begin(), last, all.end());
  return *last;
}

}  // namespace fastimpl::kvstore
