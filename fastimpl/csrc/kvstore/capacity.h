// Adding the rows of a batch to a table that may hold only so many: who goes is chosen before anything is written.
#pragma once

#include <stdexcept>

#include "common/sort.h"
#include "kvstore/read.h"
#include "kvstore/remove.h"

namespace fastimpl::kvstore {

// A batch with more distinct ids than the table may hold.
struct CapacityExceeded : std::runtime_error {
  explicit CapacityExceeded(int64_t distinct_count_)
      : std::runtime_error("capacity exceeded"), distinct_count(distinct_count_) {}
  int64_t distinct_count;
};

struct Ranked {
  uint64_t rank;
  int64_t key;
  uint32_t slot;
  bool operator<(const Ranked& other) const { return rank != other.rank ? rank < other.rank : key < other.key; }
};

// Distinct ids of a batch.
inline int64_t distinct_count(const Parallel& parallel, const int64_t* ids, int64_t count) {
  std::vector<int64_t> sorted(ids, ids + count);
  sort_keys(parallel, sorted.data(), count);
  return std::unique(sorted.begin(), sorted.end()) - sorted.begin();
}

struct Inserted {
  Table::Found found;
  Removing excess;  // Rows beyond the capacity, none of them in the batch.
};

// The rows that go: lowest count or oldest timestamp first, then lowest id.
inline Removing choose_excess(Table& table, const Table::Found& found) {
  Removing removing;
  const int64_t row_count = table.rows.pool.size(),
                excess = table.format.capacity < 0 ? 0 : row_count - table.format.capacity;
  if (excess <= 0) return removing;
  std::vector<bool> in_batch(static_cast<size_t>(row_count));
  for (const uint32_t slot : found.slots) in_batch[slot] = true;
  std::vector<Ranked> candidates;
  for (int64_t slot = 0; slot < row_count; ++slot) {
    if (in_batch[static_cast<size_t>(slot)]) continue;
    const uint8_t* const row = table.rows.pool.at(slot);
    const uint64_t word = metadata(row);
    candidates.push_back({table.format.ranks_by_count ? count_of(word) : timestamp_of(word), RowPool::key(row),
                          static_cast<uint32_t>(slot)});
  }
  std::nth_element(candidates.begin(), candidates.begin() + (excess - 1), candidates.end());
  if (!table.overlays.empty()) table.overlays.back()->rows.pool.prepare(excess);
  for (int64_t i = 0; i < excess; ++i) {
    const Ranked& gone = candidates[static_cast<size_t>(i)];
    table.keep(hash_key(gone.key), gone.key, table.rows.pool.at(gone.slot));
    removing.slots.push_back(gone.slot);
  }
  prepare_removal(table, removing);
  return removing;
}

// The first step of every change that adds rows: finds or opens them, and chooses who makes room for them.
// Throws CapacityExceeded or std::bad_alloc, and then the table is as it was.
inline Inserted insert_rows(Table& table, const Parallel& parallel, const int64_t* ids, int64_t count, Range skip,
                            uint64_t now) {
  if (table.format.capacity >= 0 && count > table.format.capacity) {
    const int64_t distinct = distinct_count(parallel, ids, count);
    if (distinct > table.format.capacity) throw CapacityExceeded(distinct);
  }
  compact_when_long(table);
  Inserted inserted{table.find(parallel, ids, count, Table::Missing::kInsert, {0, kHeaderBytes}, skip, now), {}};
  try {
    inserted.excess = choose_excess(table, inserted.found);
  } catch (...) {
    table.undo(inserted.found, ids);
    throw;
  }
  return inserted;
}

inline void remove_excess(Table& table, Inserted& inserted, Change change) noexcept {
  if (inserted.excess.slots.empty()) return;
  remove_slots(table, inserted.excess, change);
  table.evicted_count += static_cast<int64_t>(inserted.excess.slots.size());
}

}  // namespace fastimpl::kvstore
