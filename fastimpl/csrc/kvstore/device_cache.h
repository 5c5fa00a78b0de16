// Rows of host memory that lie in the device's for a while: a cache of sets of 16 lines, each of which holds one row.
//
// It is exact: a row has one home at a time, its line or its place in host memory, and `RowStore::row` says which; so
// every kernel reads and changes rows where they are. Rows move in `prefetch` alone, half a warp a set, so that nobody
// else touches a line: what the batch lacks takes free lines, then those of rows that the two batches in flight did not
// ask for, the oldest first, of equal ones the lowest id. A row that changed goes back to host memory before its line
// is taken. Where a set has no line to give, a row stays in host memory. Written with simt.h.
#pragma once

#include "common/simt.h"
#include "kvstore/device_rows.h"

namespace fastimpl::kvstore::device {

constexpr int64_t kBatchesInFlight = 2;

// Numbers of lines and of slots begin at 1 here; 0 is none.
struct Cache {
  RowStore rows;
  Global<uint32_t> lines;   // Of each slot: its line.
  Global<uint32_t> owners;  // Of each line: its slot,
  Global<int64_t> epochs;   // when a batch asked for it last,
  Global<int64_t> keys;     // and what its row was when it was like its place in host memory.
  Global<uint64_t> versions;

  SIMT bool is_changed(int64_t line) const {
    const auto row = rows.cached(line);
    return rows.version(row) != versions.load(line) || key_of(row) != keys.load(line);
  }
};

// The lines of a batch's rows are needed; 1 for each row that has none. One thread a row.
struct TouchLines {
  static constexpr int kThreads = 256;
  Cache cache;
  int64_t epoch;
  Global<const int64_t> slots;
  Global<int64_t> marks;
  Count count = {};

  SIMT void operator()() const {
    const int64_t end = count.of(slots.size());
    for (int64_t at = first_item(); at < slots.size(); at += item_step()) {
      const int64_t slot = at < end ? slots.load(at) : kNowhere;
      const uint32_t line = slot == kNowhere ? 0 : cache.lines.load(slot);
      if (line != 0) cache.epochs.store(line - 1, epoch);
      marks.store(at, slot != kNowhere && line == 0 ? 1 : 0);
    }
  }
};

// The set of each slot, and its own number; where there is no slot, the set behind the last. One thread a slot.
struct ListSets {
  static constexpr int kThreads = 256;
  int64_t set_count;
  Global<const int64_t> slots;
  Global<uint64_t> sets;
  Global<int64_t> order;
  Count count = {};

  SIMT void operator()() const {
    const int64_t end = count.of(slots.size());
    for (int64_t at = first_item(); at < slots.size(); at += item_step()) {
      sets.store(at, static_cast<uint64_t>(at < end ? slots.load(at) % set_count : set_count));
      order.store(at, at);
    }
  }
};

// Who of a set goes first: free lines, then the oldest, then the lowest id. Two lines have one id where a row moved and
// left its line behind: then the first of them, since all lanes have to choose the same one.
struct Candidate {
  int64_t age, key;
  uint32_t rank;

  SIMT bool is_before(const Candidate& other) const {
    if (age != other.age) return age < other.age;
    return key != other.key ? key < other.key : rank < other.rank;
  }
};

// Brings rows that have no line into their sets, in order, as far as these have lines to give. Half a warp a set.
struct FillSets {
  static constexpr int kThreads = 256;
  static constexpr int64_t kFree = -1, kNeeded = INT64_MAX;
  Cache cache;
  int64_t set_count, epoch;
  Global<const uint64_t> sets;
  Global<const int64_t> order, slots;

  SIMT void operator()() const {
    const HalfWarp group;
    for (int64_t at = group.number(); at < sets.size(); at += group.count()) {
      const bool begins = at == 0 || sets.load(at - 1) != sets.load(at);
      if (begins && static_cast<int64_t>(sets.load(at)) < set_count) fill(group, at);
    }
  }

  // The run that begins here.
  SIMT void fill(const HalfWarp& group, int64_t begin) const {
    const auto set = static_cast<int64_t>(sets.load(begin));
    Candidate mine = candidate(group, set * kWays + group.rank);
    for (int64_t at = begin; at < sets.size() && static_cast<int64_t>(sets.load(at)) == set; ++at) {
      const Candidate chosen = first_of(group, mine);
      if (chosen.age == kNeeded) return;
      const int64_t line = set * kWays + chosen.rank, slot = slots.load(order.load(at));
      give_back(group, line);
      take(group, line, slot);
      if (group.rank == chosen.rank) mine.age = kNeeded;
    }
  }

  SIMT Candidate candidate(const HalfWarp& group, int64_t line) const {
    if (cache.owners.load(line) == 0) return {kFree, group.rank, group.rank};
    const int64_t age = cache.epochs.load(line);
    if (age > epoch - kBatchesInFlight) return {kNeeded, group.rank, group.rank};
    return {age, key_of(cache.rows.cached(line)), group.rank};
  }

  SIMT Candidate first_of(const HalfWarp& group, Candidate best) const {
    for (unsigned distance = kWays / 2; distance > 0; distance /= 2) {
      const Candidate other{simt::shuffle_xor(group.mask, best.age, distance, kWays),
                            simt::shuffle_xor(group.mask, best.key, distance, kWays),
                            simt::shuffle_xor(group.mask, best.rank, distance, kWays)};
      if (other.is_before(best)) best = other;
    }
    return best;
  }

  SIMT void give_back(const HalfWarp& group, int64_t line) const {
    const uint32_t owner = cache.owners.load(line);
    if (owner == 0) return;
    if (cache.is_changed(line))
      Piece<16>::copy(group, cache.rows.home(owner - 1), 0, cache.rows.cached(line), 0, cache.rows.stride);
    // What others read of the line is read.
    group.sync();
    if (group.rank == 0) cache.lines.store(owner - 1, 0);
  }

  SIMT void take(const HalfWarp& group, int64_t line, int64_t slot) const {
    const auto row = cache.rows.cached(line), home = cache.rows.home(slot);
    Piece<16>::copy(group, row, 0, home, 0, cache.rows.stride);
    // The owner of the line was read by all.
    group.sync();
    if (group.rank != 0) return;
    cache.lines.store(slot, static_cast<uint32_t>(line) + 1);
    cache.owners.store(line, static_cast<uint32_t>(slot) + 1);
    cache.epochs.store(line, epoch);
    cache.keys.store(line, key_of(home));
    cache.versions.store(line, cache.rows.version(home));
  }
};

// Slots from `row_count` on have no rows, and give their lines back. One thread a line.
struct DropLines {
  static constexpr int kThreads = 256;
  Cache cache;
  int64_t row_count;

  SIMT void operator()() const {
    for (int64_t line = first_item(); line < cache.owners.size(); line += item_step()) {
      const uint32_t owner = cache.owners.load(line);
      if (owner <= row_count) continue;
      cache.lines.store(owner - 1, 0);
      cache.owners.store(line, 0);
    }
  }
};

// The memory of a cache. Without lines it does nothing.
template <typename Device>
class RowCache {
 public:
  template <typename T>
  using Array = typename Device::template Array<T>;

  RowCache(Device& device, int64_t stride, int64_t row_count)
      : device_(device), stride_(stride), set_count_((row_count + kWays - 1) / kWays) {
    if (set_count_ == 0) return;
    const int64_t line_count = set_count_ * kWays;
    bytes_ = device_.template keep<uint8_t>(line_count * stride_);
    owners_ = device_.template keep<uint32_t>(line_count);
    epochs_ = device_.template keep<int64_t>(line_count);
    keys_ = device_.template keep<int64_t>(line_count);
    versions_ = device_.template keep<uint64_t>(line_count);
    lines_ = device_.template keep<uint32_t>(1);
    clear();
  }

  bool is_there() const { return set_count_ > 0; }
  int64_t set_count() const { return set_count_; }
  int64_t next_epoch() { return ++epoch_; }
  const Array<uint32_t>& lines() const { return lines_; }

  // The same rows, those that have lines there.
  RowStore over(RowStore rows) const {
    if (is_there()) {
      rows.lines = lines_;
      rows.cache = bytes_;
    }
    return rows;
  }
  Cache of(const RowStore& rows) const { return {rows, lines_, owners_, epochs_, keys_, versions_}; }

  // Lines of so many slots; `take` them when nothing can fail any more.
  Array<uint32_t> lines_for(int64_t slot_count) {
    if (!is_there() || slot_count <= lines_.size()) return lines_;
    const auto made = device_.template keep<uint32_t>(slot_count);
    device_.clear(made);
    device_.copy(lines_, made.part(0, lines_.size()));
    return made;
  }
  void take(const Array<uint32_t>& lines) { lines_ = lines; }

  void clear() {
    if (!is_there()) return;
    device_.clear(lines_);
    device_.clear(owners_);
  }
  void drop(const RowStore& rows, int64_t row_count) {
    if (is_there()) device_.launch(DropLines{of(rows), row_count}, owners_.size());
  }

 private:
  Device& device_;
  int64_t stride_, set_count_, epoch_ = kBatchesInFlight;
  Array<uint8_t> bytes_;
  Array<uint32_t> lines_, owners_;
  Array<int64_t> epochs_, keys_;
  Array<uint64_t> versions_;
};

}  // namespace fastimpl::kvstore::device
