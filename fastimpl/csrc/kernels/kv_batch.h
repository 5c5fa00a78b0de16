// A batch of ids on its way through the map: windows of ids whose cache lines are fetched ahead, and the positions of
// a batch grouped by shard, so that threads which write never meet.
#pragma once

#include "kv_parallel.h"
#include "kv_rows.h"

namespace fastimpl::kv {

constexpr int kWindow = 16;
constexpr int64_t kLineBytes = 64;
constexpr int64_t kSerialIds = 512;

// The positions of a batch, those of one shard together and in ascending order.
struct Grouped {
  std::vector<uint32_t> positions;  // Empty: every position, in order, is in the only group.
  std::vector<int64_t> begins;      // Of each group, and the end.

  int64_t group_count() const { return static_cast<int64_t>(begins.size()) - 1; }
  int64_t position(int64_t index) const { return positions.empty() ? index : positions[static_cast<size_t>(index)]; }
};

inline Grouped group_by_shard(const Parallel& parallel, const int64_t* ids, int64_t count, int64_t shard_count) {
  Grouped grouped;
  if (parallel.thread_count <= 1 || shard_count == 1 || count < kSerialIds) {
    grouped.begins = {0, count};
    return grouped;
  }
  const int64_t part_count = parallel.thread_count;
  grouped.positions.resize(static_cast<size_t>(count));
  std::vector<int64_t> next(static_cast<size_t>(part_count * shard_count));
  const auto range_of = [&](int64_t part) { return Range{count * part / part_count, count * (part + 1) / part_count}; };
  parallel.run(part_count, [&](int64_t part) {
    int64_t* const counts = next.data() + part * shard_count;
    for (int64_t i = range_of(part).begin; i < range_of(part).end; ++i) ++counts[shard_of(hash_key(ids[i]), shard_count)];
  });
  int64_t total = 0;
  for (int64_t shard = 0; shard < shard_count; ++shard) {
    grouped.begins.push_back(total);
    for (int64_t part = 0; part < part_count; ++part) total += std::exchange(next[static_cast<size_t>(part * shard_count + shard)], total);
  }
  grouped.begins.push_back(total);
  parallel.run(part_count, [&](int64_t part) {
    int64_t* const places = next.data() + part * shard_count;
    for (int64_t i = range_of(part).begin; i < range_of(part).end; ++i) {
      grouped.positions[static_cast<size_t>(places[shard_of(hash_key(ids[i]), shard_count)]++)] = static_cast<uint32_t>(i);
    }
  });
  return grouped;
}

inline void prefetch_lines(const uint8_t* begin, const uint8_t* end) {
  for (const uint8_t* line = begin; line < end; line += kLineBytes) __builtin_prefetch(line);
}

// Three stages, each a window behind the one before: the group's line is fetched, then the lines of the row that its
// tags point at, then `visit(index, hash, id, slot or kAbsent)` is called in ascending order. `visit` may insert: a row
// that was looked up too early is looked up again.
template <typename IdAt, typename Visit>
void visit_rows(const RowSet& rows, int64_t begin, int64_t end, Range fetched, IdAt&& id_at, Visit&& visit) {
  struct Lookup {
    uint64_t hash;
    int64_t id;
    const Group* home;
    uint32_t guess;
  };
  Lookup ring[3][kWindow];
  const int64_t window_count = (end - begin + kWindow - 1) / kWindow;
  const auto each = [&](int64_t window, auto&& body) {
    if (window < 0 || window >= window_count) return;
    const int64_t first = begin + window * kWindow, last = std::min(end, first + kWindow);
    for (int64_t index = first; index < last; ++index) body(ring[window % 3][index - first], index);
  };
  for (int64_t window = 0; window < window_count + 2; ++window) {
    each(window, [&](Lookup& lookup, int64_t index) {
      lookup.id = id_at(index);
      lookup.hash = hash_key(lookup.id);
      lookup.home = rows.shard(lookup.hash).home(lookup.hash);
      if (lookup.home != nullptr) __builtin_prefetch(lookup.home);
    });
    each(window - 1, [&](Lookup& lookup, int64_t) {
      // The home group may have been given back since it was noted; it is found anew.
      const Group* const home = rows.shard(lookup.hash).home(lookup.hash);
      const unsigned bits = home == nullptr ? 0 : home->match(tag_of(lookup.hash));
      lookup.guess = bits == 0 ? kAbsent : home->slots[__builtin_ctz(bits)];
      if (lookup.guess == kAbsent) return;
      const uint8_t* const row = rows.pool.at(lookup.guess);
      __builtin_prefetch(row);
      prefetch_lines(row + fetched.begin / kLineBytes * kLineBytes, row + fetched.end);
    });
    each(window - 2, [&](Lookup& lookup, int64_t index) {
      uint32_t slot = lookup.guess;
      if (slot == kAbsent || RowPool::key(rows.pool.at(slot)) != lookup.id) slot = rows.shard(lookup.hash).find(lookup.hash, lookup.id);
      visit(index, lookup.hash, lookup.id, slot);
    });
  }
}

}  // namespace fastimpl::kv
