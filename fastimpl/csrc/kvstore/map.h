// From a key to the slot of its row: one shard of the map, 64 bytes (a cache line) for every 10 entries.
//
// Keys are not stored here but compared with those in the rows, which a reader needs anyway; so every int64 is a key
// and no value is reserved. Extendible hashing: a directory of segments of bounded size, of which one splits when it is
// full, so that no insertion waits for more than one segment. No tombstones: a group counts the entries that it had no
// room for, and a search ends at a group that turned none away.
#pragma once

#include <emmintrin.h>

#include <vector>

#include "common/regimes.h"
#include "kvstore/hash.h"
#include "kvstore/pool.h"

namespace fastimpl::kvstore {

constexpr int kGroupSlots = 10;
constexpr uint32_t kAbsent = 0xFFFFFFFF;
constexpr int kTagBits = 16, kGroupBits = regime(10, 3);
constexpr int64_t kSegmentGroups = int64_t{1} << kGroupBits;
constexpr int64_t kFirstGroups = regime(8, 2);
constexpr int64_t kDepthMax = 26;

struct alignas(64) Group {
  uint16_t tags[kGroupSlots];  // 0 is empty.
  uint32_t turned_away;        // Entries whose search passes through this group.
  uint32_t slots[kGroupSlots];

  // A bit for every entry with this tag.
  unsigned match(uint16_t tag) const {
    const __m128i wanted = _mm_set1_epi16(static_cast<int16_t>(tag));
    const __m128i* const words = reinterpret_cast<const __m128i*>(tags);
    const __m128i found = _mm_packs_epi16(_mm_cmpeq_epi16(_mm_load_si128(words), wanted),
                                          _mm_cmpeq_epi16(_mm_load_si128(words + 1), wanted));
    return static_cast<unsigned>(_mm_movemask_epi8(found)) & ((1U << kGroupSlots) - 1);
  }
};
static_assert(sizeof(Group) == 64);

// Which bits of a hash decide what: 0-15 the tag, 16-25 the group, 26-51 the segment, the highest 12 the shard.
inline uint16_t tag_of(uint64_t hash) { return static_cast<uint16_t>((hash & 0xFFFF) + ((hash & 0xFFFF) == 0)); }
inline int64_t shard_of(uint64_t hash, int64_t shard_count) {
  return static_cast<int64_t>(((hash >> 32) * static_cast<uint64_t>(shard_count)) >> 32);
}

class ShardMap {
 public:
  ShardMap(Memory& memory, const RowPool& pool) : memory_(memory), pool_(pool) {}
  ShardMap(ShardMap&& other) noexcept : memory_(other.memory_), pool_(other.pool_) { swap(other); }
  ShardMap(const ShardMap&) = delete;
  ShardMap& operator=(const ShardMap&) = delete;
  ~ShardMap() { clear(); }

  int64_t size() const { return size_; }
  int64_t held_bytes() const { return held_bytes_ + static_cast<int64_t>(directory_.capacity() * sizeof(Segment*)); }

  // The first group that a search for this hash looks at; null in an empty map.
  const Group* home(uint64_t hash) const {
    return directory_.empty() ? nullptr
                              : segment(hash)->groups() + (static_cast<int64_t>(hash >> kTagBits) & group_mask_);
  }

  // The first entry whose tag is this hash's, whoever's it is; kAbsent where there is none, and then no key of this
  // hash has an entry. No row is looked at.
  uint32_t candidate(uint64_t hash) const {
    const Group* group = nullptr;
    const int at = locate(hash, [](uint32_t) { return true; }, &group);
    return at < 0 ? kAbsent : group->slots[at];
  }

  // kAbsent where the key has no entry.
  uint32_t find(uint64_t hash, int64_t key) const {
    const Group* group = nullptr;
    const int at = locate(hash, [&](uint32_t slot) { return RowPool::key(pool_.at(slot)) == key; }, &group);
    return at < 0 ? kAbsent : group->slots[at];
  }

  // Adds an entry for a key that has none. Throws std::bad_alloc, and then nothing was added.
  void insert(uint64_t hash, uint32_t slot) {
    make_room(hash);
    place(segment(hash), hash, slot);
    ++size_;
  }

  // Removes the entry of this slot; no memory is needed for it.
  void erase(uint64_t hash, uint32_t slot) noexcept {
    const Group* found = nullptr;
    const int at = locate(hash, [slot](uint32_t other) { return other == slot; }, &found);
    if (at < 0) return;
    Segment* const home_segment = segment(hash);
    int64_t index = static_cast<int64_t>(hash >> kTagBits) & group_mask_;
    for (; home_segment->groups() + index != found; index = (index + step(hash)) & group_mask_)
      --home_segment->groups()[index].turned_away;
    home_segment->groups()[index].tags[at] = 0;
    --home_segment->count;
    --size_;
  }

  // The row of this hash moved from one slot to another.
  void move(uint64_t hash, uint32_t from, uint32_t to) noexcept {
    const Group* found = nullptr;
    const int at = locate(hash, [from](uint32_t other) { return other == from; }, &found);
    if (at >= 0) const_cast<Group*>(found)->slots[at] = to;
  }

  // Makes the map large enough for `row_count` entries, however they fall within six standard deviations.
  void reserve(int64_t row_count) { rebuild(row_count); }

  // Gives memory back when it is used to less than an eighth; keeps what it has where that needs memory.
  void trim() noexcept {
    if (held_bytes_ <= 64 * 64 || size_ * 8 * 64 > held_bytes_ * kGroupSlots) return;
    try {
      rebuild(size_);
    } catch (const std::bad_alloc&) {
      return;  // The larger map goes on being right.
    }
  }

  // Of maps over one pool, or of pools that are swapped as well.
  void swap(ShardMap& other) noexcept {
    directory_.swap(other.directory_);
    std::swap(group_mask_, other.group_mask_);
    std::swap(depth_, other.depth_);
    std::swap(size_, other.size_);
    std::swap(held_bytes_, other.held_bytes_);
  }

  void clear() noexcept {
    // Downwards: the first of the entries that show a segment is the last to be asked for its depth.
    for (size_t i = directory_.size(); i-- > 0;) {
      if (is_first(i)) release(directory_[i]);
    }
    directory_ = {};
    group_mask_ = 0;
    depth_ = 0;
    size_ = 0;
  }

 private:
  struct alignas(64) Segment {
    int64_t count;
    int64_t depth;  // This segment stands at all directory entries that agree in `depth` low bits.
    Group* groups() { return reinterpret_cast<Group*>(this + 1); }
    const Group* groups() const { return reinterpret_cast<const Group*>(this + 1); }
  };
  static_assert(sizeof(Segment) == 64);

  static uint64_t segment_bits(uint64_t hash) { return hash >> (kTagBits + kGroupBits); }
  static int64_t step(uint64_t hash) { return 2 * static_cast<int64_t>(tag_of(hash)) + 1; }
  static int64_t entry_limit(int64_t group_count) { return group_count * kGroupSlots * 4 / 5; }

  int64_t group_count() const { return group_mask_ + 1; }
  Segment* segment(uint64_t hash) const { return directory_[segment_bits(hash) & (directory_.size() - 1)]; }
  bool is_first(size_t index) const { return (index >> directory_[index]->depth) == 0; }

  template <typename IsIt>
  int locate(uint64_t hash, IsIt&& is_it, const Group** found) const {
    if (directory_.empty()) return -1;
    const Group* const groups = segment(hash)->groups();
    const uint16_t tag = tag_of(hash);
    int64_t index = static_cast<int64_t>(hash >> kTagBits) & group_mask_;
    // The step is odd, so that a search meets every group once.
    for (int64_t tries = 0; tries <= group_mask_; ++tries, index = (index + step(hash)) & group_mask_) {
      *found = groups + index;
      for (unsigned bits = groups[index].match(tag); bits != 0; bits &= bits - 1) {
        const int at = __builtin_ctz(bits);
        if (is_it(groups[index].slots[at])) return at;
      }
      if (groups[index].turned_away == 0) return -1;
    }
    return -1;
  }

  // The segment has room: its limit is below its slots.
  void place(Segment* target, uint64_t hash, uint32_t slot) const {
    int64_t index = static_cast<int64_t>(hash >> kTagBits) & group_mask_;
    for (;; index = (index + step(hash)) & group_mask_) {
      Group& group = target->groups()[index];
      const unsigned empty = group.match(0);
      if (empty != 0) {
        const int at = __builtin_ctz(empty);
        group.tags[at] = tag_of(hash);
        group.slots[at] = slot;
        ++target->count;
        return;
      }
      ++group.turned_away;
    }
  }

  Segment* acquire(int64_t depth, int64_t group_count) {
    const size_t bytes = static_cast<size_t>(group_count + 1) * 64;
    auto* const made = reinterpret_cast<Segment*>(memory_.take(bytes));
    held_bytes_ += static_cast<int64_t>(bytes);
    made->depth = depth;
    return made;
  }

  void release(Segment* segment) noexcept {
    const size_t bytes = static_cast<size_t>(group_count() + 1) * 64;
    held_bytes_ -= static_cast<int64_t>(bytes);
    memory_.give(reinterpret_cast<uint8_t*>(segment), bytes);
  }

  // Calls `body(hash, slot)` for every entry of a segment; hashes come from the rows' keys, fetched ahead.
  template <typename F>
  void for_each(const Segment* from, F&& body) const {
    constexpr int64_t kAhead = 2;
    for (int64_t index = 0; index < group_count() + kAhead; ++index) {
      if (index < group_count()) {
        const Group& next = from->groups()[index];
        for (int at = 0; at < kGroupSlots; ++at) {
          if (next.tags[at] != 0) fetch_line(pool_.at(next.slots[at]));
        }
      }
      if (index < kAhead) continue;
      const Group& group = from->groups()[index - kAhead];
      for (int at = 0; at < kGroupSlots; ++at) {
        if (group.tags[at] != 0) body(hash_key(RowPool::key(pool_.at(group.slots[at]))), group.slots[at]);
      }
    }
  }

  void make_room(uint64_t hash) {
    if (directory_.empty()) {
      directory_.reserve(1);
      group_mask_ = kFirstGroups - 1;
      directory_.push_back(acquire(0, kFirstGroups));
      return;
    }
    // Equal hashes never meet twice, but hashes may agree in many bits; several splits can be needed.
    while (segment(hash)->count >= entry_limit(group_count())) {
      if (depth_ == 0 && group_count() < kSegmentGroups) {
        enlarge();
      } else {
        split(hash);
      }
    }
  }

  // The only segment of a small map, with twice as many groups.
  void enlarge() {
    Segment* const old = directory_[0];
    std::vector<std::pair<uint64_t, uint32_t>> entries;
    entries.reserve(static_cast<size_t>(old->count));
    Segment* const made = acquire(0, 2 * group_count());
    for_each(old, [&](uint64_t hash, uint32_t slot) { entries.emplace_back(hash, slot); });
    release(old);
    group_mask_ = 2 * group_mask_ + 1;
    for (const auto& [hash, slot] : entries) place(made, hash, slot);
    directory_[0] = made;
  }

  void split(uint64_t hash) {
    // Only keys made for it agree in so many bits; a directory for them would be larger than memory.
    if (segment(hash)->depth >= kDepthMax) throw std::bad_alloc();
    Segment* const old = segment(hash);
    Segment* halves[2] = {acquire(old->depth + 1, group_count()), nullptr};
    try {
      halves[1] = acquire(old->depth + 1, group_count());
      if (old->depth == depth_) {
        // Both halves of the longer directory show the same segments at first.
        directory_.reserve(2 * directory_.size());
        directory_.insert(directory_.end(), directory_.begin(), directory_.end());
        ++depth_;
      }
    } catch (...) {
      release(halves[0]);
      if (halves[1] != nullptr) release(halves[1]);
      throw;
    }
    const int64_t bit = old->depth;
    for_each(old, [&](uint64_t other, uint32_t slot) { place(halves[(segment_bits(other) >> bit) & 1], other, slot); });
    const uint64_t low = segment_bits(hash) & ((uint64_t{1} << bit) - 1);
    for (uint64_t index = low; index < directory_.size(); index += uint64_t{1} << bit)
      directory_[index] = halves[(index >> bit) & 1];
    release(old);
  }

  // A map of the same entries with room for `row_count`.
  void rebuild(int64_t row_count) {
    ShardMap made(memory_, pool_);
    int64_t wanted = std::max(row_count, size_), depth = 0, groups = kFirstGroups;
    // The number of entries of a segment is about Poisson distributed.
    const auto fits = [&](double mean, int64_t limit) {
      return mean + 6 * __builtin_sqrt(mean) < static_cast<double>(limit);
    };
    while (groups < kSegmentGroups && !fits(static_cast<double>(wanted), entry_limit(groups))) groups *= 2;
    while (!fits(static_cast<double>(wanted) / static_cast<double>(int64_t{1} << depth), entry_limit(groups))) ++depth;
    if (row_count > size_ && groups << depth <= group_count() * static_cast<int64_t>(directory_.size())) return;
    made.group_mask_ = groups - 1;
    made.directory_.reserve(size_t{1} << depth);
    for (int64_t i = 0; i < int64_t{1} << depth; ++i) {
      made.directory_.push_back(made.acquire(depth, groups));
      made.depth_ = depth;
    }
    for (size_t i = 0; i < directory_.size(); ++i) {
      if (is_first(i)) for_each(directory_[i], [&](uint64_t hash, uint32_t slot) { made.insert(hash, slot); });
    }
    swap(made);
  }

  Memory& memory_;
  const RowPool& pool_;
  std::vector<Segment*> directory_;
  int64_t group_mask_ = 0, depth_ = 0, size_ = 0, held_bytes_ = 0;
};

}  // namespace fastimpl::kvstore
