// A batch of ids on its way through the map: ids whose cache lines are fetched ahead, and the positions of
// a batch grouped by shard, so that threads which write never meet.
#pragma once

#include "kv_rows.h"

namespace fastimpl::kv {

constexpr int64_t kDistance = 15, kRing = 32;
constexpr int64_t kLineBytes = 64;
constexpr int64_t kSerialIds = 512;

// The positions of a batch in groups, one for each thread, each of whole shards, its positions in ascending order: so few
// groups that what belongs to the positions is still read almost in order.
struct Grouped {
  std::vector<uint32_t> positions;  // Empty: every position, in order, is in the only group.
  std::vector<int64_t> begins;      // Of each group, and the end.

  int64_t group_count() const { return static_cast<int64_t>(begins.size()) - 1; }
  int64_t position(int64_t index) const { return positions.empty() ? index : positions[static_cast<size_t>(index)]; }
};

inline Grouped group_by_shards(const Parallel& parallel, const int64_t* ids, int64_t count, int64_t shard_count) {
  Grouped grouped;
  if (parallel.thread_count <= 1 || shard_count == 1 || count < kSerialIds) {
    grouped.begins = {0, count};
    return grouped;
  }
  const int64_t part_count = parallel.thread_count, group_count = std::min(shard_count, parallel.thread_count);
  const auto group_of = [&](int64_t id) { return shard_of(hash_key(id), shard_count) * group_count / shard_count; };
  grouped.positions.resize(static_cast<size_t>(count));
  std::vector<int64_t> next(static_cast<size_t>(part_count * group_count));
  const auto range_of = [&](int64_t part) { return Range{count * part / part_count, count * (part + 1) / part_count}; };
  parallel.run(part_count, [&](int64_t part) {
    int64_t* const counts = next.data() + part * group_count;
    for (int64_t i = range_of(part).begin; i < range_of(part).end; ++i) ++counts[group_of(ids[i])];
  });
  int64_t total = 0;
  for (int64_t group = 0; group < group_count; ++group) {
    grouped.begins.push_back(total);
    for (int64_t part = 0; part < part_count; ++part) total += std::exchange(next[static_cast<size_t>(part * group_count + group)], total);
  }
  grouped.begins.push_back(total);
  parallel.run(part_count, [&](int64_t part) {
    int64_t* const places = next.data() + part * group_count;
    for (int64_t i = range_of(part).begin; i < range_of(part).end; ++i) {
      grouped.positions[static_cast<size_t>(places[group_of(ids[i])]++)] = static_cast<uint32_t>(i);
    }
  });
  return grouped;
}

inline void prefetch_lines(const uint8_t* begin, const uint8_t* end) {
  for (const uint8_t* line = begin; line < end; line += kLineBytes) __builtin_prefetch(line);
}

// Three stages, each some ids behind the one before: the group's line is fetched, then the lines of the row that its
// tags point at, then `visit(index, hash, id, slot or kAbsent)` is called in ascending order. `visit` may insert: a row
// that was looked up too early is looked up again.
template <bool kInserts, typename IdAt, typename Visit>
void visit_rows(const RowSet& rows, int64_t begin, int64_t end, Range fetched, IdAt&& id_at, Visit&& visit) {
  struct Lookup {
    uint64_t hash;
    int64_t id;
    const Group* home;
    const uint8_t* row;
    uint32_t slot;
  };
  Lookup ring[kRing];
  const int64_t first_line = fetched.begin / kLineBytes * kLineBytes;
  const auto fetch_group = [&](Lookup& lookup, int64_t index) {
    lookup.id = id_at(index);
    lookup.hash = hash_key(lookup.id);
    lookup.home = rows.shard(lookup.hash).home(lookup.hash);
    __builtin_prefetch(lookup.home);
  };
  const auto fetch_row = [&](Lookup& lookup) {
    // Where rows are inserted, the home group may have been given back since it was noted; it is found anew.
    const Group* const home = kInserts ? rows.shard(lookup.hash).home(lookup.hash) : lookup.home;
    const unsigned bits = home == nullptr ? 0 : home->match(tag_of(lookup.hash));
    lookup.slot = kAbsent;
    if (bits == 0) return;
    lookup.slot = home->slots[__builtin_ctz(bits)];
    lookup.row = rows.pool.at(lookup.slot);
    if (first_line > 0) __builtin_prefetch(lookup.row);
    prefetch_lines(lookup.row + first_line, lookup.row + fetched.end);
  };
  const auto finish = [&](const Lookup& lookup, int64_t index) {
    uint32_t slot = lookup.slot;
    if (slot == kAbsent || RowPool::key(lookup.row) != lookup.id) slot = rows.shard(lookup.hash).find(lookup.hash, lookup.id);
    visit(index, lookup.hash, lookup.id, slot);
  };
  for (int64_t index = begin; index < end + 2 * kDistance; ++index) {
    if (index - 2 * kDistance >= begin) finish(ring[(index - 2 * kDistance) % kRing], index - 2 * kDistance);
    if (index - kDistance >= begin && index - kDistance < end) fetch_row(ring[(index - kDistance) % kRing]);
    if (index < end) fetch_group(ring[index % kRing], index);
  }
}

}  // namespace fastimpl::kv
