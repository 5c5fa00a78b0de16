// Filling an empty table from a file that is read once: rows go beside the table, are checked as they pass, and come
// into it in one step or not at all.
//
// Every id is new and stands once, which the order of saved rows shows; so rows lie one behind the other as they come,
// and no row is looked for. A thread reads so few at a time that they are in its cache still when they are checked and
// written.
#pragma once

#include "common/regimes.h"
#include "kvstore/saved.h"
#include "kvstore/write.h"

namespace fastimpl::kvstore {

constexpr int64_t kPieceBytes = regime(256 << 10, 200);

// Brings rows [first, first + count) of what is read into memory; false where that failed. Threads call it at once.
using ReadRows = std::function<bool(uint8_t* to, int64_t first, int64_t count)>;

// Rows that wait for a table. They have the version that the table's next change but `ahead` has, if no other comes
// between.
struct Filling {
  Filling(Table& table_, uint64_t version_)
      : table(table_), version(version_), rows(table_.memory, table_.format.row_bytes, table_.rows.shard_count()) {}

  Table& table;
  const uint64_t version;
  RowSet rows;
  bool has_last = false;
  int64_t last_id = 0;  // Of the last row, where there is one.
};

// Enters those rows of a batch into the map whose shards are [first_shard, behind_shard). The row of ids[i] has slot
// `base` + i.
inline void enter_shards(RowSet& rows, const int64_t* ids, int64_t count, int64_t base, int64_t first_shard,
                         int64_t behind_shard) {
  constexpr int64_t kEntered = regime(256, 3);
  uint64_t hashes[kEntered];
  uint32_t slots[kEntered];
  const auto shard_count = static_cast<uint64_t>(behind_shard - first_shard);
  int64_t waiting = 0;
  const auto enter = [&] {
    for (int64_t i = 0; i < waiting; ++i) fetch_line(rows.shard(hashes[i]).home(hashes[i]));
    for (int64_t i = 0; i < waiting; ++i) rows.shard(hashes[i]).insert(hashes[i], slots[i]);
    waiting = 0;
  };
  for (int64_t i = 0; i < count; ++i) {
    fetch_ahead(ids + i);
    const uint64_t hash = hash_key(ids[i]);
    hashes[waiting] = hash;
    slots[waiting] = static_cast<uint32_t>(base + i);
    // A row of another thread's shard is written over by the next: whose it is is not to be foreseen.
    waiting += static_cast<uint64_t>(rows.shard_index(hash) - first_shard) < shard_count;
    if (waiting == kEntered) enter();
  }
  enter();
}

// Adds the rows at positions [start, start + count) of what is saved, whose ids are `ids`. False where they cannot be
// read or are not what was saved, and then the filling is of no use any more. Throws std::bad_alloc, and then neither.
inline bool fill_rows(Filling& filling, const Parallel& parallel, const ReadRows& read, const int64_t* ids,
                      int64_t count, int64_t start, SavedOrder order) {
  if (count == 0) return true;
  RowPool& pool = filling.rows.pool;
  if (pool.size() + count > kSlotsMax) throw std::bad_alloc();
  // What begins a bucket follows nothing.
  const bool begins = std::binary_search(order.ends, order.ends + order.bucket_count, start);
  if (filling.has_last && !begins && filling.last_id >= ids[0]) return false;
  if (!ids_stand_in_order(parallel, ids, count, start, order)) return false;
  const int64_t base = pool.size(), row_bytes = pool.row_bytes();
  pool.prepare(count);
  for (int64_t pushed = 0; pushed < count;) {
    const SlotRange range = pool.push(count - pushed);
    pushed += range.end - range.next;
  }
  const BlockWriter writer(filling.table);
  const int64_t piece_rows = std::max<int64_t>(1, kPieceBytes / row_bytes),
                worker_count = std::max<int64_t>(1, parallel.thread_count);
  std::atomic<int64_t> next{0};
  std::atomic<bool> right{true};
  parallel.run(worker_count, [&](int64_t) {
    Scratch<uint8_t> piece(std::min(count, piece_rows) * row_bytes);
    for (int64_t at = next.fetch_add(piece_rows); at < count && right; at = next.fetch_add(piece_rows)) {
      const int64_t size = std::min(piece_rows, count - at);
      bool fit = read(piece.data(), start + at, size);
      for (int64_t i = 0; fit && i < size; ++i) {
        const uint8_t* const row = piece.data() + i * row_bytes;
        fit = is_row_of(row, ids[at + i]);
        writer.stream(row, filling.version, pool.at(base + at + i));
      }
      if (!fit) right = false;
    }
    _mm_sfence();
  });
  if (!right) return false;
  const int64_t shard_count = filling.rows.shard_count(), group_count = std::min(shard_count, worker_count);
  parallel.run(group_count, [&](int64_t group) {
    enter_shards(filling.rows, ids, count, base, shard_count * group / group_count,
                 shard_count * (group + 1) / group_count);
  });
  filling.has_last = true;
  filling.last_id = ids[count - 1];
  return true;
}

// Makes the rows the table's, if it is empty still: one step for every reader. False where it is not. Throws
// std::bad_alloc.
inline bool publish(Filling& filling, const Parallel& parallel, Change change) {
  Table& table = filling.table;
  const RowPool& pool = filling.rows.pool;
  if (table.rows.pool.size() != 0) return false;
  if (!table.overlays.empty()) {
    // Snapshots that were taken meanwhile have none of these rows.
    table.overlays.back()->rows.pool.prepare(pool.size());
    for (int64_t slot = 0; slot < pool.size(); ++slot)
      table.keep(hash_key(RowPool::key(pool.at(slot))), RowPool::key(pool.at(slot)), nullptr);
  }
  change.begin();
  if (change.version != filling.version) {
    parallel.run_ranges(pool.size(), kKeyGrain, [&](int64_t begin, int64_t end) {
      for (int64_t slot = begin; slot < end; ++slot) pool.set_version(pool.at(slot), change.version);
    });
  }
  table.rows.swap(filling.rows);
  return true;
}

}  // namespace fastimpl::kvstore
