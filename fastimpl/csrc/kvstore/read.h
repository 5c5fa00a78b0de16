// Reading a batch: bytes [begin, end) of each id's row into dense memory. Under the shared lock.
#pragma once

#include "common/regimes.h"
#include "kvstore/table.h"

namespace fastimpl::kvstore {

// Ids that are worth another thread.
constexpr int64_t kReadGrain = regime(192, 3);

// Ids that are missing, now or in the snapshot, read as their initial row.
inline void read_rows(const Table& table, const Parallel& parallel, const int64_t* ids, int64_t count, Range range,
                      uint8_t* out, const Overlay* snapshot) {
  const int64_t width = range.end - range.begin;
  const bool aligned = width % 16 == 0 && range.begin % 16 == 0 && reinterpret_cast<size_t>(out) % 16 == 0;
  const bool streams = aligned && width * count >= kStreamBytes;
  parallel.run_ranges(count, kReadGrain, [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> scratch(static_cast<size_t>(table.format.row_bytes));
    visit_rows(
        table.rows, begin, end, range, [&](int64_t index) { return ids[index]; },
        [&](int64_t index, uint64_t hash, int64_t id, uint32_t slot) {
          const uint8_t* const row =
              table.as_of(snapshot, hash, id, slot == kAbsent ? nullptr : table.rows.pool.at(slot));
          uint8_t* const to = out + index * width;
          if (row == nullptr) {
            table.format.copy_initial(id, range, scratch.data(), to);
          } else if (streams) {
            stream_copy(to, row + range.begin, width);
          } else {
            short_copy(to, row + range.begin, width);
          }
        });
    // Streamed bytes become visible to other threads before this one says that it has ended.
    _mm_sfence();
  });
}

inline void contains_rows(const Table& table, const Parallel& parallel, const int64_t* ids, int64_t count, bool* out,
                          const Overlay* snapshot) {
  parallel.run_ranges(count, kSerialIds, [&](int64_t begin, int64_t end) {
    visit_rows(
        table.rows, begin, end, {0, kHeaderBytes}, [&](int64_t index) { return ids[index]; },
        [&](int64_t index, uint64_t hash, int64_t id, uint32_t slot) {
          out[index] = table.as_of(snapshot, hash, id, slot == kAbsent ? nullptr : table.rows.pool.at(slot)) != nullptr;
        });
  });
}

// Calls `body(key, version)` for every row in slots [begin, end) that is now as it was in the snapshot, in no
// particular order; for every row there where the snapshot is null.
template <typename Body>
void for_live_keys(const Table& table, const Overlay* snapshot, int64_t begin, int64_t end, Body&& body) {
  const RowPool& pool = table.rows.pool;
  for (int64_t slot = begin; slot < end; ++slot) {
    const uint8_t* const row = pool.at(slot);
    const uint64_t version = pool.version(row);
    if (snapshot == nullptr || version <= snapshot->version) body(RowPool::key(row), version);
  }
}

// The same for every row of the snapshot that has changed or gone since.
template <typename Body>
void for_kept_keys(const Table& table, const Overlay* snapshot, Body&& body) {
  const RowPool& pool = table.rows.pool;
  if (snapshot == nullptr) return;
  const size_t first = table.index_of(snapshot);
  for (size_t i = first; i < table.overlays.size(); ++i) {
    Table::for_kept(*table.overlays[i], [&](uint64_t hash, int64_t key, const uint8_t* row) {
      if ((metadata(row) & kUsed) == 0) return;
      // A change that ran out of memory may have kept a row that did not change.
      const uint8_t* const live = table.rows.find(hash, key);
      if (live != nullptr && pool.version(live) <= snapshot->version) return;
      for (size_t earlier = first; earlier < i; ++earlier) {
        if (table.overlays[earlier]->rows.find(hash, key) != nullptr) return;
      }
      body(key, pool.version(row));
    });
  }
}

// The same for every row, now or in the snapshot.
template <typename Body>
void for_each_key(const Table& table, const Overlay* snapshot, Body&& body) {
  for_live_keys(table, snapshot, 0, table.rows.pool.size(), body);
  for_kept_keys(table, snapshot, body);
}

inline int64_t count_rows(const Table& table, const Overlay* snapshot) {
  if (snapshot == nullptr) return table.rows.pool.size();
  int64_t count = 0;
  for_each_key(table, snapshot, [&](int64_t, uint64_t) { ++count; });
  return count;
}

}  // namespace fastimpl::kvstore
