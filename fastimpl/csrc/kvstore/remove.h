// Removing rows: the last rows of the pool take the places of those that go. Under the exclusive lock.
#pragma once

#include <atomic>

#include "kvstore/table.h"

namespace fastimpl::kvstore {

// One change of a table: the number it gets, and the clock.
struct Change {
  uint64_t version;
  uint64_t now;
  std::atomic<uint64_t>* last = nullptr;  // The store's last number; null where the number is given.

  // The second step begins, which cannot fail: only now the store has one change more.
  void begin() {
    if (last != nullptr) version = ++*last;
  }
};

// The log without removals that a row or a later removal of the same id has followed, and without those that only marks
// before `mark` need. Throws std::bad_alloc.
inline std::shared_ptr<Removals> removals_since(const Table& table, uint64_t mark) {
  const Removals& log = *table.removals;
  return compacted(log, [&](size_t at) {
    return log[at].version <= mark || table.rows.find(hash_key(log[at].key), log[at].key) != nullptr;
  });
}

// Under the exclusive lock. Throws std::bad_alloc, and then the log is as it was.
inline void compact_removals(Table& table) { table.set_removals(removals_since(table, 0)); }

// The first step of every change that removes rows: without it the log would grow with every removal for ever. Throws
// std::bad_alloc, and then nothing has changed.
inline void compact_when_long(Table& table) {
  if (is_long(*table.removals, table.compacted_count)) compact_removals(table);
}

// Removes the rows at these slots, each listed once. Nothing here allocates but what `prepare_removal` allocated.
struct Removing {
  std::vector<uint32_t> slots;
  std::vector<bool> tail_goes;
};

inline void prepare_removal(Table& table, Removing& removing) {
  removing.tail_goes.resize(removing.slots.size());
  if (table.format.logs_removals) reserve_log(*table.removals, removing.slots.size());
}

inline void remove_slots(Table& table, Removing& removing, Change change) noexcept {
  if (removing.slots.empty()) return;  // What was reserved stays.
  RowSet& rows = table.rows;
  const int64_t gone_count = static_cast<int64_t>(removing.slots.size()), left_count = rows.pool.size() - gone_count;
  for (const uint32_t slot : removing.slots) {
    const int64_t key = RowPool::key(rows.pool.at(slot));
    const uint64_t hash = hash_key(key);
    rows.shard(hash).erase(hash, slot);
    if (table.format.logs_removals) table.removals->push_back({key, change.version});
    if (slot >= left_count) removing.tail_goes[static_cast<size_t>(slot - left_count)] = true;
  }
  // The rows at the end that stay move to the places that became free before them.
  int64_t tail = 0;
  for (const uint32_t hole : removing.slots) {
    if (hole >= left_count) continue;
    while (removing.tail_goes[static_cast<size_t>(tail)]) ++tail;
    const int64_t from = left_count + tail++;
    const uint8_t* const moving = rows.pool.at(from);
    const uint64_t hash = hash_key(RowPool::key(moving));
    rows.shard(hash).move(hash, static_cast<uint32_t>(from), hole);
    std::memcpy(rows.pool.at(hole), moving, static_cast<size_t>(rows.pool.stride()));
  }
  rows.pool.truncate(left_count);
  rows.trim();
}

// Removes the rows of a batch; how many there were.
inline int64_t remove_rows(Table& table, const Parallel& parallel, const int64_t* ids, int64_t count, Change change) {
  compact_when_long(table);
  auto found = table.find(parallel, ids, count, Table::Missing::kSkip, {0, kHeaderBytes}, {0, 0}, change.now);
  Removing removing;
  removing.slots.assign(found.slots.begin(), found.slots.end());
  std::sort(removing.slots.begin(), removing.slots.end());
  removing.slots.erase(std::unique(removing.slots.begin(), removing.slots.end()), removing.slots.end());
  if (!removing.slots.empty() && removing.slots.back() == kAbsent) removing.slots.pop_back();
  prepare_removal(table, removing);
  change.begin();
  remove_slots(table, removing, change);
  return static_cast<int64_t>(removing.slots.size());
}

}  // namespace fastimpl::kvstore
