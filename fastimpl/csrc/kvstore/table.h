// One table: its live rows, what its snapshots keep, and how rows come, change and go.
//
// Every change is made in two steps under the exclusive lock. The first finds or adds the rows of a batch, saves what
// snapshots need, and is the only one that allocates; it is undone when memory runs out. The second writes and cannot
// fail. Within a step each shard belongs to one thread.
#pragma once

#include "kvstore/batch.h"
#include "kvstore/removals.h"

namespace fastimpl::kvstore {

// What one snapshot shows otherwise than the live rows: a row as it was when it first changed after that moment, or a
// row without the used bit where there was none.
struct Overlay {
  Overlay(Memory& memory, int64_t row_bytes, int64_t shard_count, uint64_t version_,
          std::shared_ptr<const Removals> removals_)
      : version(version_),
        removals(std::move(removals_)),
        removal_count(removals->size()),
        rows(memory, row_bytes, shard_count) {}

  const uint64_t version;
  const std::shared_ptr<const Removals> removals;  // The first `removal_count` of them.
  const size_t removal_count;
  RowSet rows;
};

class Table {
 public:
  Table(const RowFormat& format_, int64_t shard_count)
      : format(format_), padding(format_.padding()), rows(memory, format_.row_bytes, shard_count) {}

  const RowFormat format;
  const std::vector<Range> padding;
  Memory memory;
  mutable FairSharedMutex lock;
  RowSet rows;
  std::vector<std::unique_ptr<Overlay>> overlays;  // Ascending versions; the last is the only one that still grows.
  std::shared_ptr<Removals> removals = std::make_shared<Removals>();  // In the order of time, where they are logged.
  size_t compacted_count = 0;  // Removals left by the last compaction of their log.
  int64_t evicted_count = 0;
  // Of the last update. Written under the lock, so that a moment has that of its rows; read without it.
  std::atomic<int64_t> step{0};

  // The rows of a batch: the slot of position `grouped.position(i)` is `slots[i]`.
  struct Found {
    Grouped grouped;
    Scratch<uint32_t> slots;
    int64_t row_count_before;
  };

  enum class Missing { kSkip, kInsert };

  // The first step: finds the batch's rows. A missing id gets a row, opened but for the bytes `skip`, or kAbsent.
  // Throws std::bad_alloc, and then the table is as it was.
  Found find(const Parallel& parallel, const int64_t* ids, int64_t count, Missing missing, Range fetched, Range skip,
             uint64_t now) {
    Found found{group_by_shards(parallel, ids, count, rows.shard_count()), Scratch<uint32_t>(count), rows.pool.size()};
    const int64_t added = missing == Missing::kInsert ? count : 0;
    if (rows.pool.size() + added > kSlotsMax) throw std::bad_alloc();
    rows.pool.prepare(added);
    if (!overlays.empty()) overlays.back()->rows.pool.prepare(count);
    try {
      parallel.run(found.grouped.group_count(),
                   [&](int64_t group) { find_group(found, group, ids, missing, fetched, skip, now); });
    } catch (...) {
      undo(found, ids);
      throw;
    }
    return found;
  }

  // What `for_found` fetches ahead: bytes of the rows, none where whole lines are written past the caches; and of what
  // belongs to each position, since a thread that passes over those of others defeats the machine's own prefetching.
  struct Ahead {
    Range row;
    const uint8_t* values;
    int64_t width;
  };

  // The second step: `body(position, row)` for every row that was found, ascending within a shard.
  template <typename Body>
  void for_found(const Parallel& parallel, const Found& found, Ahead ahead, Body&& body) {
    const Range fetched = ahead.row;
    const int64_t first_line = fetched.begin / kLineBytes * kLineBytes,
                  distance = row_distance(fetched.end - first_line + 2 * kLineBytes);
    const auto fetch_values = [&](int64_t index) {
      const uint8_t* const values = ahead.values + found.grouped.position(index) * ahead.width;
      prefetch_far(values, values + ahead.width);
    };
    const auto fetch_row = [&](int64_t index) {
      const uint32_t slot = found.slots[index];
      if (slot == kAbsent || fetched.begin == fetched.end) return;
      const uint8_t* const next = rows.pool.at(slot);
      fetch_line(next);
      prefetch_lines(next + first_line, next + fetched.end);
      fetch_line(next + rows.pool.stride() - kVersionBytes);
    };
    parallel.run(found.grouped.group_count(), [&](int64_t group) {
      const int64_t end = found.grouped.begins[static_cast<size_t>(group + 1)];
      for (int64_t i = found.grouped.begins[static_cast<size_t>(group)]; i < end; ++i) {
        if (i + kValuesDistance < end) fetch_values(i + kValuesDistance);
        if (i + distance < end) fetch_row(i + distance);
        const uint32_t slot = found.slots[i];
        if (slot != kAbsent) body(found.grouped.position(i), rows.pool.at(slot));
      }
      // Streamed bytes become visible to other threads before this one says that it has ended.
      _mm_sfence();
    });
  }

  // Keeps a row for the newest snapshot, unless that has it already. Threads call this for shards of their own.
  void keep(uint64_t hash, int64_t key, const uint8_t* row) {
    if (overlays.empty()) return;
    Overlay& newest = *overlays.back();
    if (row != nullptr && rows.pool.version(row) > newest.version) return;
    if (newest.rows.find(hash, key) != nullptr) return;
    uint8_t* const kept = newest.rows.pool.at(newest.rows.insert(hash, key));
    if (row == nullptr) {
      std::memset(kept + 8, 0, static_cast<size_t>(rows.pool.stride() - 8));
    } else {
      std::memcpy(kept, row, static_cast<size_t>(rows.pool.stride()));
    }
  }

  // A new snapshot of this moment, whose version is that of the last change.
  Overlay* take_snapshot(uint64_t version) {
    overlays.push_back(std::make_unique<Overlay>(memory, format.row_bytes, rows.shard_count(), version, removals));
    return overlays.back().get();
  }

  // Bytes of the log of removals, and of those logs before it that snapshots keep.
  int64_t log_bytes() const {
    int64_t bytes = bytes_of(*removals);
    const Removals* last = removals.get();
    for (size_t i = overlays.size(); i-- > 0;) {
      const Removals* const log = overlays[i]->removals.get();
      if (log != last) bytes += bytes_of(*log);
      last = log;
    }
    return bytes;
  }

  // The log from now on; snapshots keep the one that they saw.
  void set_removals(std::shared_ptr<Removals> log) noexcept {
    compacted_count = log->size();
    removals = std::move(log);
  }

  // Gives a snapshot back. What an older one needs of it moves there; where that needs memory that is not there, this
  // throws and the snapshot stays.
  void release_snapshot(const Overlay* gone) {
    const size_t index = index_of(gone);
    if (index > 0) {
      Overlay& older = *overlays[index - 1];
      older.rows.pool.prepare(gone->rows.pool.size());
      for_kept(*gone, [&](uint64_t hash, int64_t key, const uint8_t* row) {
        if (older.rows.find(hash, key) != nullptr) return;
        std::memcpy(older.rows.pool.at(older.rows.insert(hash, key)), row, static_cast<size_t>(rows.pool.stride()));
      });
    }
    overlays.erase(overlays.begin() + static_cast<std::ptrdiff_t>(index));
  }

  // Rows that a failed insertion left behind are in the pool but not in the map: they are passed over.
  template <typename Body>
  static void for_kept(const Overlay& overlay, Body&& body) {
    for (int64_t slot = 0; slot < overlay.rows.pool.size(); ++slot) {
      const uint8_t* const row = overlay.rows.pool.at(slot);
      const int64_t key = RowPool::key(row);
      const uint64_t hash = hash_key(key);
      if (overlay.rows.find(hash, key) == row) body(hash, key, row);
    }
  }

  // What a snapshot shows of a key: its row, or null. `live` is the live row or null; so is `snapshot` for the present.
  const uint8_t* as_of(const Overlay* snapshot, uint64_t hash, int64_t key, const uint8_t* live) const {
    if (snapshot == nullptr || (live != nullptr && rows.pool.version(live) <= snapshot->version)) return live;
    // The first change after this moment is kept by this snapshot, or by a later one if that was there by then.
    for (size_t i = index_of(snapshot); i < overlays.size(); ++i) {
      const uint8_t* const kept = overlays[i]->rows.find(hash, key);
      if (kept != nullptr) return (metadata(kept) & kUsed) != 0 ? kept : nullptr;
    }
    return live;
  }

  size_t index_of(const Overlay* snapshot) const {
    size_t index = 0;
    while (overlays[index].get() != snapshot) ++index;
    return index;
  }

  // Takes back what `find` inserted.
  void undo(const Found& found, const int64_t* ids) noexcept {
    for (int64_t i = 0; i < found.slots.size(); ++i) {
      if (found.slots[i] == kAbsent || found.slots[i] < found.row_count_before) continue;
      const uint64_t hash = hash_key(ids[found.grouped.position(i)]);
      rows.shard(hash).erase(hash, found.slots[i]);
    }
    rows.pool.truncate(found.row_count_before);
  }

 private:
  void find_group(Found& found, int64_t group, const int64_t* ids, Missing missing, Range fetched, Range skip,
                  uint64_t now) {
    const int64_t begin = found.grouped.begins[static_cast<size_t>(group)],
                  end = found.grouped.begins[static_cast<size_t>(group + 1)];
    SlotRun run(rows.pool);
    // All groups get here, even where one of them runs out of memory: what is undone later is what was found.
    std::fill(found.slots.begin() + begin, found.slots.begin() + end, kAbsent);
    visit_rows<true>(
        rows, begin, end, fetched, [&](int64_t index) { return ids[found.grouped.position(index)]; },
        [&](int64_t new_count) { run.expect(new_count); },
        [&](int64_t index, uint64_t hash, int64_t id, uint32_t slot) {
          if (slot == kAbsent && missing == Missing::kSkip) return;
          keep(hash, id, slot == kAbsent ? nullptr : rows.pool.at(slot));
          if (slot == kAbsent) {
            slot = run.take();
            rows.insert_at(slot, hash, id);
            format.open(id, word_of(now, 0), skip, rows.pool.at(slot), rows.pool.stride());
          }
          found.slots[index] = slot;
        });
  }
};

}  // namespace fastimpl::kvstore
