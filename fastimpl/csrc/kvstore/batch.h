// A batch of ids on its way through the map: ids whose cache lines are fetched ahead, and the positions of
// a batch grouped by shard, so that threads which write never meet.
#pragma once

#include "common/regimes.h"
#include "kvstore/rows.h"

namespace fastimpl::kvstore {

constexpr int64_t kLineBytes = 64;
constexpr int64_t kWindow = regime(1024, 7), kGroupDistance = regime(24, 3), kValuesDistance = regime(14, 2),
                  kFarBytes = 32 << 10;

// What is too large to stay in a cache is written past it.
constexpr int64_t kStreamBytes = regime(4 << 20, 1 << 10);

// Both 16-byte aligned, `bytes` a multiple of 16.
inline void stream_copy(uint8_t* to, const uint8_t* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_load_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
}

// Any multiple of 16 without a call; the last copy of an odd width overlaps the one before.
inline void short_copy(uint8_t* to, const uint8_t* from, int64_t bytes) {
  const auto copy16 = [&](int64_t at) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + at), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
  };
  if (bytes < 16) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
    return;
  }
  for (int64_t at = 0; at + 16 <= bytes; at += 16) copy16(at);
  if (bytes % 16 != 0) copy16(bytes - 16);
}

// How many rows are fetched ahead when each has this many bytes: as many as a core has lines on their way.
inline int64_t row_distance(int64_t bytes) {
  return std::max<int64_t>(2, std::min<int64_t>(24, 48 * kLineBytes / (bytes + kLineBytes)));
}
constexpr int64_t kSerialIds = regime(512, 4), kGroupsMax = regime(256, 3);

// The positions of a batch in groups, one for each thread, each of whole shards, its positions in ascending order: so
// few groups that what belongs to the positions is still read almost in order.
struct Grouped {
  Scratch<uint32_t> positions{0};  // Empty: every position, in order, is in the only group.
  std::vector<int64_t> begins;     // Of each group, and the end.

  int64_t group_count() const { return static_cast<int64_t>(begins.size()) - 1; }
  int64_t position(int64_t index) const { return positions.size() == 0 ? index : positions[index]; }
};

inline Grouped group_by_shards(const Parallel& parallel, const int64_t* ids, int64_t count, int64_t shard_count) {
  Grouped grouped;
  if (parallel.thread_count <= 1 || shard_count == 1 || count < kSerialIds) {
    grouped.begins = {0, count};
    return grouped;
  }
  const int64_t part_count = parallel.thread_count,
                group_count = std::min({shard_count, parallel.thread_count, kGroupsMax});
  grouped.positions = Scratch<uint32_t>(count);
  Scratch<uint8_t> groups(count);
  std::vector<int64_t> next(static_cast<size_t>(part_count * group_count));
  const auto range_of = [&](int64_t part) { return Range{count * part / part_count, count * (part + 1) / part_count}; };
  // Divisions are dear: each shard's group is found once.
  std::vector<uint8_t> group_of(static_cast<size_t>(shard_count));
  for (int64_t shard = 0; shard < shard_count; ++shard)
    group_of[static_cast<size_t>(shard)] = static_cast<uint8_t>(shard * group_count / shard_count);
  parallel.run(part_count, [&](int64_t part) {
    std::vector<int64_t> counts(static_cast<size_t>(group_count));
    const Range range = range_of(part);
    for (int64_t i = range.begin; i < range.end; ++i) {
      const uint8_t group = group_of[static_cast<size_t>(shard_of(hash_key(ids[i]), shard_count))];
      groups[i] = group;
      ++counts[group];
    }
    std::copy(counts.begin(), counts.end(), next.begin() + part * group_count);
  });
  int64_t total = 0;
  for (int64_t group = 0; group < group_count; ++group) {
    grouped.begins.push_back(total);
    for (int64_t part = 0; part < part_count; ++part)
      total += std::exchange(next[static_cast<size_t>(part * group_count + group)], total);
  }
  grouped.begins.push_back(total);
  parallel.run(part_count, [&](int64_t part) {
    std::vector<int64_t> places(next.begin() + part * group_count, next.begin() + (part + 1) * group_count);
    uint32_t* const positions = grouped.positions.data();
    const Range range = range_of(part);
    for (int64_t i = range.begin; i < range.end; ++i) positions[places[groups[i]]++] = static_cast<uint32_t>(i);
  });
  return grouped;
}

inline void prefetch_lines(const uint8_t* begin, const uint8_t* end) {
  for (const uint8_t* line = begin; line < end; line += kLineBytes) fetch_line(line);
}

// The same into the second level: a line that is wanted later takes no place among those that a core waits for.
inline void prefetch_far(const uint8_t* begin, const uint8_t* end) {
  for (const uint8_t* line = begin; line < end; line += kLineBytes) asm volatile("prefetcht1 %0" : : "m"(*line));
}

// How many distinct ids without a slot are in a window, or a few less: those that share 16 bits of their hash count
// once.
inline int64_t count_absent(const uint64_t* hashes, const uint32_t* slots, int64_t size) {
  if (std::find(slots, slots + size, kAbsent) == slots + size) return 0;
  uint64_t seen[1024] = {};
  int64_t count = 0;
  for (int64_t i = 0; i < size; ++i) {
    uint64_t& word = seen[(hashes[i] >> 16) & 1023];
    const uint64_t bit = uint64_t{slots[i] == kAbsent} << ((hashes[i] >> 26) & 63);
    count += (word & bit) == 0 && bit != 0;
    word |= bit;
  }
  return count;
}

// Windows of ids, each in two passes of which either is simple enough to keep many lines on their way: the first finds
// the slot that an id's tag points at, the second fetches rows ahead and calls `visit(index, hash, id, slot or
// kAbsent)`, in ascending order. `visit` may insert: what was not there at first is looked up again, and `expect` is
// told before each window how many ids, at least, it will insert.
template <bool kInserts, typename IdAt, typename Expect, typename Visit>
void visit_rows(const RowSet& rows, int64_t begin, int64_t end, Range fetched, IdAt&& id_at, Expect&& expect,
                Visit&& visit) {
  int64_t ids[kWindow];
  uint64_t hashes[kWindow];
  uint32_t slots[kWindow];
  const int64_t first_line = fetched.begin / kLineBytes * kLineBytes;
  // Rows of many lines come in two steps, since a core waits for fewer lines than it takes to hide the memory.
  const int64_t bytes = fetched.end - first_line, near = kInserts ? row_distance(bytes) : 4,
                far = std::max<int64_t>(8, std::min<int64_t>(20, kFarBytes / (bytes + 1)));
  const auto fetch_group = [&](int64_t at, int64_t index) {
    ids[at] = id_at(index);
    hashes[at] = hash_key(ids[at]);
    fetch_line(rows.shard(hashes[at]).home(hashes[at]));
  };
  const auto fetch_row_far = [&](int64_t at) {
    if (kInserts || slots[at] == kAbsent) return;
    const uint8_t* const row = rows.pool.at(slots[at]);
    prefetch_far(row + first_line, row + fetched.end);
  };
  const auto fetch_row = [&](int64_t at) {
    if (slots[at] == kAbsent) return;
    const uint8_t* const row = rows.pool.at(slots[at]);
    if (first_line > 0) fetch_line(row);
    prefetch_lines(row + first_line, row + fetched.end);
  };
  for (int64_t start = begin; start < end; start += kWindow) {
    const int64_t size = std::min(kWindow, end - start);
    for (int64_t at = 0; at < std::min(kGroupDistance, size); ++at) fetch_group(at, start + at);
    for (int64_t at = 0; at < size; ++at) {
      if (at + kGroupDistance < size) fetch_group(at + kGroupDistance, start + at + kGroupDistance);
      slots[at] = rows.shard(hashes[at]).candidate(hashes[at]);
    }
    if constexpr (kInserts) expect(count_absent(hashes, slots, size));
    for (int64_t at = 0; at < std::min(far, size); ++at) fetch_row_far(at);
    for (int64_t at = 0; at < std::min(near, size); ++at) fetch_row(at);
    for (int64_t at = 0; at < size; ++at) {
      if (at + far < size) fetch_row_far(at + far);
      if (at + near < size) fetch_row(at + near);
      uint32_t slot = slots[at];
      const bool is_it = slot == kAbsent ? !kInserts : RowPool::key(rows.pool.at(slot)) == ids[at];
      if (!is_it) slot = rows.shard(hashes[at]).find(hashes[at], ids[at]);
      visit(start + at, hashes[at], ids[at], slot);
    }
  }
}

template <typename IdAt, typename Visit>
void visit_rows(const RowSet& rows, int64_t begin, int64_t end, Range fetched, IdAt&& id_at, Visit&& visit) {
  visit_rows<false>(rows, begin, end, fetched, id_at, [](int64_t) {}, visit);
}

}  // namespace fastimpl::kvstore
