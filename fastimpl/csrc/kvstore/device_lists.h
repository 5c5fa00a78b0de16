// Lists that the verbs of a table on a grid work on: the distinct ids of a batch, rows in the order of their slots,
// what is picked of a list by its marks, who goes. Written with simt.h; one thread an item, unless said.
#pragma once

#include "common/simt.h"
#include "kvstore/device_rows.h"
#include "kvstore/device_update.h"
#include "kvstore/policy.h"

namespace fastimpl::kvstore::device {

// Words to sort a batch by: equal ids have equal words, and of words in order the buckets are in order too.
struct HashIds {
  static constexpr int kThreads = 256;
  Global<const int64_t> batch;
  Global<uint64_t> words;
  Global<int64_t> positions;

  SIMT void operator()() const {
    for (int64_t at = first_item(); at < batch.size(); at += item_step()) {
      words.store(at, hash_key(batch.load(at)));
      positions.store(at, at);
    }
  }
};

// 1 where a run of equal words begins.
struct MarkRuns {
  static constexpr int kThreads = 256;
  Global<const uint64_t> words;
  Global<int64_t> marks;

  SIMT void operator()() const {
    for (int64_t at = first_item(); at < words.size(); at += item_step())
      marks.store(at, at == 0 || words.load(at - 1) != words.load(at) ? 1 : 0);
  }
};

// Whether item `at` is marked, by the running sums of the marks.
SIMT bool is_marked(const Global<const int64_t>& sums, int64_t at) {
  return sums.load(at) != (at == 0 ? 0 : sums.load(at - 1));
}

// Where each run begins, and its id; `begins` has one more, which is the end.
struct ListRuns {
  static constexpr int kThreads = 256;
  Global<const int64_t> sums, positions, batch;
  Global<int64_t> begins, distinct;

  SIMT void operator()() const {
    for (int64_t at = first_item(); at < sums.size(); at += item_step()) {
      if (is_marked(sums, at)) {
        begins.store(sums.load(at) - 1, at);
        distinct.store(sums.load(at) - 1, batch.load(positions.load(at)));
      }
      if (at == sums.size() - 1) begins.store(sums.load(at), sums.size());
    }
  }
};

// 1 where a slot is there, or is not; 0 behind the last.
struct MarkSlots {
  static constexpr int kThreads = 256;
  Global<const int64_t> slots;
  bool is_there;
  Global<int64_t> marks;
  Count count = {};

  SIMT void operator()() const {
    const int64_t end = count.of(slots.size());
    for (int64_t at = first_item(); at < slots.size(); at += item_step())
      marks.store(at, at < end && (slots.load(at) != kNowhere) == is_there ? 1 : 0);
  }
};

// 1 for each slot that is there, as a bool has it; 0 for others, or with `passes_missing` nothing.
struct TellFound {
  static constexpr int kThreads = 256;
  Global<const int64_t> slots;
  Global<uint8_t> is_there;
  bool passes_missing;

  SIMT void operator()() const {
    for (int64_t at = first_item(); at < slots.size(); at += item_step()) {
      const bool is_found = slots.load(at) != kNowhere;
      if (is_found || !passes_missing) is_there.store(at, is_found ? 1 : 0);
    }
  }
};

// Slots for ids that have none, counted up from how many rows there are.
struct AssignSlots {
  static constexpr int kThreads = 256;
  Global<const int64_t> sums, row_counts;
  Global<int64_t> slots;

  SIMT void operator()() const {
    const int64_t row_count = row_counts.load(kRowsNow);
    for (int64_t at = first_item(); at < sums.size(); at += item_step()) {
      if (is_marked(sums, at)) slots.store(at, row_count + sums.load(at) - 1);
    }
  }
};

// Counts rows that were added: as many as are marked. One thread.
struct AddRows {
  static constexpr int kThreads = 32;
  Global<const int64_t> sums;
  Global<int64_t> row_counts;

  SIMT void operator()() const {
    if (first_item() != 0) return;
    const int64_t before = row_counts.load(kRowsNow);
    row_counts.store(kRowsBefore, before);
    row_counts.store(kRowsNow, before + sums.load(sums.size() - 1));
  }
};

// The marked values, in order; and, where there are such, others beside them.
struct PickMarked {
  static constexpr int kThreads = 256;
  Global<const int64_t> sums, values;
  Global<int64_t> picked;
  Global<const int64_t> others = {};
  Global<int64_t> picked_others = {};

  SIMT void operator()() const {
    for (int64_t at = first_item(); at < sums.size(); at += item_step()) {
      if (!is_marked(sums, at)) continue;
      picked.store(sums.load(at) - 1, values.load(at));
      if (others.size() != 0) picked_others.store(sums.load(at) - 1, others.load(at));
    }
  }
};

// The values at these places.
struct PickAt {
  static constexpr int kThreads = 256;
  Global<const int64_t> places, values;
  Global<int64_t> picked;

  SIMT void operator()() const {
    for (int64_t at = first_item(); at < places.size(); at += item_step())
      picked.store(at, values.load(places.load(at)));
  }
};

// begin, begin + 1, and so on.
struct CountUp {
  static constexpr int kThreads = 256;
  int64_t begin;
  Global<int64_t> numbers;

  SIMT void operator()() const {
    for (int64_t at = first_item(); at < numbers.size(); at += item_step()) numbers.store(at, begin + at);
  }
};

// Sets the marks of these places, less `begin`, where there are such.
struct SetMarks {
  static constexpr int kThreads = 256;
  Global<const int64_t> places;
  int64_t begin, value;
  Global<int64_t> marks;

  SIMT void operator()() const {
    for (int64_t at = first_item(); at < places.size(); at += item_step()) {
      const int64_t place = places.load(at) - begin;
      if (place >= 0 && place < marks.size()) marks.store(place, value);
    }
  }
};

// The keys of rows in the order of their slots; a mark for those in [first, last] that changed after `since`, and not
// after `until`. Behind the last row there are no keys, and no marks.
struct ListRows {
  static constexpr int kThreads = 256;
  RowStore rows;
  int64_t first, last;
  uint64_t since, until;
  Global<int64_t> keys, marks;
  Count count = {};

  SIMT void operator()() const {
    const int64_t end = count.of(keys.size());
    for (int64_t at = first_item(); at < keys.size(); at += item_step()) {
      if (at >= end) {
        marks.store(at, 0);
        continue;
      }
      const auto row = rows.row(at);
      const int64_t key = key_of(row);
      const uint64_t version = rows.version(row);
      keys.store(at, key);
      marks.store(at, first <= key && key <= last && since < version && version <= until ? 1 : 0);
    }
  }
};

// What decides who makes room for others, of the rows at these slots.
struct RankRows {
  static constexpr int kThreads = 256;
  RowStore rows;
  bool by_count;
  Global<const int64_t> slots;
  Global<uint64_t> ranks;

  SIMT void operator()() const {
    for (int64_t at = first_item(); at < slots.size(); at += item_step()) {
      const uint64_t word = word_in(rows.row(slots.load(at)));
      ranks.store(at, by_count ? count_of(word) : timestamp_of(word));
    }
  }
};

// Slots as words, to sort by.
struct SortableSlots {
  static constexpr int kThreads = 256;
  Global<const int64_t> slots;
  Global<uint64_t> words;

  SIMT void operator()() const {
    for (int64_t at = first_item(); at < slots.size(); at += item_step())
      words.store(at, static_cast<uint64_t>(slots.load(at)));
  }
};

// Keys of the rows at these slots.
struct KeysOfRows {
  static constexpr int kThreads = 256;
  RowStore rows;
  Global<const int64_t> slots;
  Global<int64_t> keys;

  SIMT void operator()() const {
    for (int64_t at = first_item(); at < slots.size(); at += item_step())
      keys.store(at, key_of(rows.row(slots.load(at))));
  }
};

// Keys of the rows at these slots, as words of the same order.
struct SortableKeys {
  static constexpr int kThreads = 256;
  RowStore rows;
  Global<const int64_t> slots;
  Global<uint64_t> words;

  SIMT void operator()() const {
    for (int64_t at = first_item(); at < slots.size(); at += item_step())
      words.store(at, static_cast<uint64_t>(key_of(rows.row(slots.load(at)))) ^ (uint64_t{1} << 63));
  }
};

// Whom an eviction round removes: 1 for each of these rows that the plan condemns. The counts of others decay. Rows
// that changed after the plan's mark are left alone. Half a warp a row.
struct CondemnRows {
  static constexpr int kThreads = 256;
  RowStore rows;
  int64_t dim;
  Float weight_type;
  EvictionPlan plan;
  uint64_t version;
  bool decays;
  Global<const int64_t> slots;
  Global<int64_t> marks;

  SIMT void operator()() const {
    const HalfWarp group;
    for (int64_t at = group.number(); at < slots.size(); at += group.count()) {
      const int64_t slot = slots.load(at);
      if (slot == kNowhere) {
        if (group.rank == 0) marks.store(at, 0);
        continue;
      }
      const auto row = rows.row(slot);
      const double square_sum = plan.policy == Policy::kL2 ? sum_squares(group, row) : 0;
      if (group.rank == 0) marks.store(at, judge(row, square_sum) ? 1 : 0);
    }
  }

  // Eight running sums in float64, folded as fold_lanes does; lane 0 has the result.
  SIMT double sum_squares(const HalfWarp& group, const Global<uint8_t>& row) const {
    double sum = 0;
    for (int64_t e = group.rank; group.rank < 8 && e < dim; e += 8) {
      const double wide = load_float(row, weight_type, kHeaderBytes, e);
      sum += wide * wide;
    }
    for (unsigned half = 4; half > 0; half /= 2) sum += simt::shuffle_down(group.mask, sum, half, kWays);
    return sum;
  }

  SIMT bool judge(const Global<uint8_t>& row, double square_sum) const {
    if (rows.version(row) > plan.mark) return false;
    const uint64_t word = word_in(row), fewer = decayed_count(plan, count_of(word));
    if (is_condemned(plan, word, key_of(row), square_sum)) return true;
    if (decays && fewer != count_of(word)) {
      set_word(row, word_of(timestamp_of(word), fewer));
      rows.set_version(row, version);
    }
    return false;
  }
};

}  // namespace fastimpl::kvstore::device
