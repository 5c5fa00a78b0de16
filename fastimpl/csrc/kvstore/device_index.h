// From an id to the slot of its row, on a grid: buckets of 16 entries. One thread looks for an id, so that very many
// searches are under way at once; half a warp adds to a bucket. Written with simt.h.
//
// Nobody waits for anybody: a batch is sorted so that each bucket that entries are added to has one owner, half a warp,
// and a launch ends before the next begins. So there are no locks and no compare-and-swap, and the entries and slots
// are a pure function of the operations.
//
// An entry stands in the first bucket of its id that had room: one of two that the hash names, or, seldom, the next
// behind the second. A bucket that had none for an entry says so, and a search ends at a bucket that turned none away.
#pragma once

#include "common/simt.h"
#include "kvstore/hash.h"

namespace fastimpl::kvstore::device {

using simt::Global;

constexpr unsigned kWays = 16, kAllWays = 0xFFFF;
constexpr uint32_t kTurnedAway = 1U << kWays;
constexpr int64_t kNowhere = -1;

// The 16 lanes that do one thing together, and what numbers they have on the grid.
struct HalfWarp {
  unsigned first, mask, rank;

  SIMT HalfWarp()
      : first(simt::lane() & kWays), mask(kAllWays << (simt::lane() & kWays)), rank(simt::lane() & (kWays - 1)) {}

  SIMT int64_t number() const {
    return (static_cast<int64_t>(simt::block()) * simt::threads() + simt::thread()) / kWays;
  }
  SIMT int64_t count() const { return static_cast<int64_t>(simt::blocks()) * simt::threads() / kWays; }
  SIMT unsigned ballot(bool yes) const { return simt::ballot(mask, yes) >> first & kAllWays; }
  SIMT void sync() const { simt::sync_warp(mask); }
};

// One thread to each of many things.
SIMT int64_t first_item() { return static_cast<int64_t>(simt::block()) * simt::threads() + simt::thread(); }
SIMT int64_t item_step() { return static_cast<int64_t>(simt::blocks()) * simt::threads(); }

// How many of a list there are where the host does not know: the last of running sums. Without sums all are.
struct Count {
  Global<const int64_t> sums;

  SIMT int64_t of(int64_t most) const { return sums.size() == 0 ? most : sums.load(sums.size() - 1); }
};

SIMT unsigned without_lowest(unsigned bits, unsigned count) {
  for (unsigned i = 0; i < count; ++i) bits &= bits - 1;
  return bits;
}

struct Index {
  Global<uint16_t> digests;  // Of each entry, 16 to a bucket.
  Global<int64_t> ids;
  Global<uint32_t> slots;
  Global<uint32_t> states;  // Of each bucket: a bit for each entry that is there, and kTurnedAway.
  int bits;                 // There are 1 << bits buckets.

  SIMT static uint16_t digest_of(uint64_t hash) { return static_cast<uint16_t>(hash); }
  // Where a search looks in its turn: by the highest bits, then at an odd distance, then at the next.
  SIMT int64_t bucket_of(uint64_t hash, int64_t turn) const {
    const uint64_t last = (uint64_t{1} << bits) - 1, first = bits == 0 ? 0 : hash >> (64 - bits);
    if (turn == 0) return static_cast<int64_t>(first);
    return static_cast<int64_t>((first + (hash >> 16 | 1) + static_cast<uint64_t>(turn - 1)) & last);
  }

  // A bit for each entry of a bucket that has this digest, whether it is there or not. They fill one sector.
  SIMT unsigned alike(int64_t bucket, uint16_t digest) const {
    constexpr int kSome = 8;
    unsigned found = 0;
    SIMT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const auto some = digests.template load_vector<kSome>(bucket * kWays + half * kSome);
      SIMT_UNROLL
      for (int i = 0; i < kSome; ++i) found |= (some.values[i] == digest ? 1U : 0U) << (half * kSome + i);
    }
    return found;
  }

  // The number of an id's entry, or kNowhere. With `guesses` it may be an entry that has the id's digest and is the
  // only one where the id can be: who reads its row compares the key there, so that nothing is read of `ids`. One
  // thread.
  SIMT int64_t find(int64_t id, bool guesses = false) const {
    const uint64_t hash = hash_key(id);
    for (int64_t turn = 0; turn <= states.size(); ++turn) {
      const int64_t bucket = bucket_of(hash, turn);
      // Neither waits for the other.
      const uint32_t state = states.load(bucket);
      unsigned like = alike(bucket, digest_of(hash)) & state & kAllWays;
      const bool is_last = (state & kTurnedAway) == 0, is_sure = guesses && is_last && simt::count_lanes(like) == 1;
      for (; like != 0; like &= like - 1) {
        const int64_t entry = bucket * kWays + simt::first_lane(like);
        if (is_sure || ids.load(entry) == id) return entry;
      }
      if (is_last) return kNowhere;
    }
    return kNowhere;
  }

  SIMT void place(int64_t entry, int64_t id, int64_t slot) const {
    digests.store(entry, digest_of(hash_key(id)));
    ids.store(entry, id);
    slots.store(entry, static_cast<uint32_t>(slot));
  }
};

// The entry, where it is asked for, and the slot of each id, kNowhere where there is none; or a guess at it, see
// Index::find. One thread an id.
struct FindIds {
  static constexpr int kThreads = 256;
  Index index;
  Global<const int64_t> wanted;
  Global<int64_t> entries, slots;
  Count count = {};
  bool guesses = false;

  SIMT void operator()() const {
    const int64_t end = count.of(wanted.size());
    for (int64_t at = first_item(); at < end; at += item_step()) {
      const int64_t entry = index.find(wanted.load(at), guesses);
      if (entries.size() != 0) entries.store(at, entry);
      slots.store(at, entry == kNowhere ? kNowhere : static_cast<int64_t>(index.slots.load(entry)));
    }
  }
};

// The bucket that each id looks at in a turn, and its own number; where there is no id, the bucket behind the last, and
// nothing is left.
struct ListBuckets {
  static constexpr int kThreads = 256;
  Index index;
  int64_t turn;
  Global<const int64_t> wanted;
  Global<uint64_t> buckets;
  Global<int64_t> order, is_left;
  Count count = {};

  SIMT void operator()() const {
    const int64_t end = count.of(wanted.size());
    for (int64_t at = first_item(); at < wanted.size(); at += item_step()) {
      const int64_t bucket = at < end ? index.bucket_of(hash_key(wanted.load(at)), turn) : index.states.size();
      buckets.store(at, static_cast<uint64_t>(bucket));
      order.store(at, at);
      if (at >= end) is_left.store(at, 0);
    }
  }
};

// Adds entries for ids that have none, each where `buckets` says, sorted; `order` are the numbers of the ids, which
// take free places in that order. `is_left`: 1 for each id that found no room; numbers behind the count are of no id,
// and passed over. Half a warp a bucket.
struct InsertRuns {
  static constexpr int kThreads = 256;
  Index index;
  Global<const uint64_t> buckets;
  Global<const int64_t> order;
  Global<const int64_t> wanted, slots;
  Global<int64_t> is_left;
  Count count = {};

  SIMT void operator()() const {
    const HalfWarp group;
    // Those of no id come last.
    const int64_t end = count.of(buckets.size());
    for (int64_t at = group.number(); at < end; at += group.count()) {
      if (at == 0 || buckets.load(at - 1) != buckets.load(at)) insert(group, at);
    }
  }

  // The run that begins here: 16 of its ids at a time.
  SIMT void insert(const HalfWarp& group, int64_t begin) const {
    const auto bucket = static_cast<int64_t>(buckets.load(begin));
    uint32_t state = simt::shuffle(group.mask, group.rank == 0 ? index.states.load(bucket) : 0, 0, kWays);
    for (int64_t some = begin;; some += kWays) {
      const int64_t at = some + group.rank;
      const bool is_mine = at < buckets.size() && static_cast<int64_t>(buckets.load(at)) == bucket;
      const unsigned count = simt::count_lanes(group.ballot(is_mine)), free = ~state & kAllWays,
                     room = simt::count_lanes(free);
      if (is_mine) {
        const int64_t number = order.load(at);
        const bool has_place = group.rank < room;
        if (has_place) {
          const unsigned way = simt::first_lane(without_lowest(free, group.rank));
          index.place(bucket * kWays + way, wanted.load(number), slots.load(number));
        }
        is_left.store(number, has_place ? 0 : 1);
      }
      state |= free ^ without_lowest(free, count < room ? count : room);
      if (count > room) state |= kTurnedAway;
      if (count < kWays) break;
    }
    if (group.rank == 0) index.states.store(bucket, state);
  }
};

// Adds what found no room in two turns, one after the other: few of very many. One thread.
struct InsertRest {
  static constexpr int kThreads = 32;
  Index index;
  Global<const int64_t> wanted, slots;
  Count count = {};

  SIMT void operator()() const {
    if (first_item() != 0) return;
    const int64_t end = count.of(wanted.size());
    for (int64_t at = 0; at < end; ++at) {
      const int64_t id = wanted.load(at);
      for (int64_t turn = 2; turn <= index.states.size(); ++turn) {
        const int64_t bucket = index.bucket_of(hash_key(id), turn);
        const uint32_t state = index.states.load(bucket);
        const unsigned free = ~state & kAllWays;
        if (free == 0) {
          index.states.store(bucket, state | kTurnedAway);
          continue;
        }
        const unsigned way = simt::first_lane(free);
        index.place(bucket * kWays + way, id, slots.load(at));
        index.states.store(bucket, state | 1U << way);
        break;
      }
    }
  }
};

// Removes entries, each listed once, kNowhere passed over. Several may be of one bucket.
struct EraseEntries {
  static constexpr int kThreads = 256;
  Index index;
  Global<const int64_t> entries;
  Count count = {};

  SIMT void operator()() const {
    const int64_t end = count.of(entries.size());
    for (int64_t at = first_item(); at < end; at += item_step()) {
      const int64_t entry = entries.load(at);
      if (entry == kNowhere) continue;
      index.states.atomic_and(entry / kWays, ~(1U << (entry % kWays)));
    }
  }
};

}  // namespace fastimpl::kvstore::device
