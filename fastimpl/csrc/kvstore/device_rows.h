// Rows on a grid: slabs of rows of one stride, read and written in the largest pieces that their places allow. Written
// with simt.h; half a warp a row.
#pragma once

#include "common/simt.h"
#include "kvstore/device_index.h"
#include "kvstore/row.h"

namespace fastimpl::kvstore::device {

struct Slab {
  Global<uint8_t> bytes;
};

constexpr int64_t kVersionWords = 1;

// A row, padding, and in the last 8 bytes of the stride the version of the row's last change. The stride is a multiple
// of 16, and so is where a slab begins. Slabs of host memory may have a cache: a row that has a line is there, and
// nowhere else.
struct RowStore {
  Global<const Slab> slabs;
  int64_t stride;
  int shift;                          // A slab has 1 << shift rows.
  Global<const uint32_t> lines = {};  // Of each slot: the number of its line, from 1 on, or 0. Empty without a cache.
  Global<uint8_t> cache = {};

  SIMT Global<uint8_t> row(int64_t slot) const {
    const uint32_t line = lines.size() == 0 ? 0 : lines.load(slot);
    return line == 0 ? home(slot) : cached(line - 1);
  }
  SIMT Global<uint8_t> cached(int64_t line) const { return cache.part(line * stride, stride); }
  SIMT Global<uint8_t> home(int64_t slot) const {
    const Slab slab = slabs.load(slot >> shift);
    return slab.bytes.part((slot & ((int64_t{1} << shift) - 1)) * stride, stride);
  }
  SIMT uint64_t version(const Global<uint8_t>& row) const {
    return row.as<const uint64_t>().load(stride / 8 - kVersionWords);
  }
  SIMT void set_version(const Global<uint8_t>& row, uint64_t version) const {
    row.as<uint64_t>().store(stride / 8 - kVersionWords, version);
  }
};

SIMT int64_t key_of(const Global<uint8_t>& row) { return row.as<const int64_t>().load(0); }
SIMT uint64_t word_in(const Global<uint8_t>& row) { return row.as<const uint64_t>().load(1); }
SIMT void set_word(const Global<uint8_t>& row, uint64_t word) { row.as<uint64_t>().store(1, word); }

// Bytes that one instruction moves.
template <int kBytes>
struct Piece {
  using Word = std::conditional_t<kBytes >= 4, uint32_t, std::conditional_t<kBytes == 2, uint16_t, uint8_t>>;
  static constexpr int kWords = kBytes / static_cast<int>(sizeof(Word));
  using Value = simt::Vector<Word, kWords>;

  SIMT static Value load(const Global<const uint8_t>& from, int64_t at) {
    return from.as<const Word>().template load_vector<kWords>(at / static_cast<int64_t>(sizeof(Word)));
  }
  SIMT static void store(const Global<uint8_t>& to, int64_t at, const Value& value) {
    to.as<Word>().template store_vector<kWords>(at / static_cast<int64_t>(sizeof(Word)), value);
  }
  SIMT static void copy(const HalfWarp& group, const Global<uint8_t>& to, int64_t to_at,
                        const Global<const uint8_t>& from, int64_t from_at, int64_t bytes) {
    for (int64_t at = static_cast<int64_t>(group.rank) * kBytes; at < bytes; at += kWays * kBytes)
      store(to, to_at + at, load(from, from_at + at));
  }
};

SIMT void clear_bytes(unsigned rank, unsigned lanes, const Global<uint8_t>& row, int64_t begin, int64_t end) {
  const int64_t words = (begin + 3) / 4, words_end = end / 4;
  for (int64_t at = begin + rank; at < end && at < words * 4; at += lanes) row.store(at, 0);
  for (int64_t at = words + rank; at < words_end; at += lanes) row.as<uint32_t>().store(at, 0);
  const int64_t rest = words_end > words ? words_end * 4 : words * 4;
  for (int64_t at = rest + rank; at < end; at += lanes) row.store(at, 0);
}

// What a row is before it is written.
struct InitialRow {
  InitialWeight weight;
  int64_t dim;
  Float type;

  SIMT int64_t weight_end() const { return kHeaderBytes + dim * float_bytes(type); }
  SIMT uint32_t bits(uint64_t row_word, int64_t element) const {
    const float value = weight.value(row_word, element);
    if (type == Float::kFloat32) return bits_of(value);
    return type == Float::kFloat16 ? to_float16(value) : to_bfloat16(value);
  }

  // Key, weight and zeros, up to the stride; the metadata and the version are the caller's, and so is a weight that it
  // writes anyway. Some lanes call this.
  SIMT void open(unsigned rank, unsigned lanes, const Global<uint8_t>& row, int64_t id, int64_t stride,
                 bool passes_weight = false) const {
    if (rank == 0) row.as<int64_t>().store(0, id);
    const uint64_t row_word = weight.row_word(id);
    for (int64_t e = rank; !passes_weight && e < dim; e += lanes) {
      if (type == Float::kFloat32) {
        row.as<uint32_t>().store(kHeaderBytes / 4 + e, bits(row_word, e));
      } else {
        row.as<uint16_t>().store(kHeaderBytes / 2 + e, static_cast<uint16_t>(bits(row_word, e)));
      }
    }
    clear_bytes(rank, lanes, row, weight_end(), stride - 8 * kVersionWords);
  }

  // Bytes [begin, begin + to.size()) of the row of an id that is not there, at any address.
  SIMT void read(const HalfWarp& group, int64_t id, int64_t begin, const Global<uint8_t>& to) const {
    const int64_t end = begin + to.size(), element_bytes = float_bytes(type);
    const auto put = [&](int64_t at, uint64_t value) {
      if (begin <= at && at < end) to.store(at - begin, static_cast<uint8_t>(value));
    };
    for (int64_t at = group.rank; at < kHeaderBytes; at += kWays)
      put(at, at < 8 ? static_cast<uint64_t>(id) >> (8 * at) : 0);
    const uint64_t row_word = weight.row_word(id);
    for (int64_t e = group.rank; e < dim; e += kWays) {
      const uint32_t value = bits(row_word, e);
      for (int64_t byte = 0; byte < element_bytes; ++byte)
        put(kHeaderBytes + e * element_bytes + byte, value >> (8 * byte));
    }
    for (int64_t at = (begin > weight_end() ? begin : weight_end()) + group.rank; at < end; at += kWays) put(at, 0);
  }
};

// Bytes [begin, begin + width) of the row at each of `slots` into `out`, [slots, width]; where there is none, nothing.
// Where slots are guessed, `wanted` are the ids, and a slot whose row is of another id becomes none. Half a warp has
// some rows under way at once, neighbours in `out`. Everything lies at multiples of kBytes. Initial rows are of another
// kernel, since what they need of registers would leave few of these rows under way.
template <int kBytes>
struct ReadRows {
  static constexpr int kThreads = 256;
  static constexpr int kRows = 4;
  RowStore rows;
  Global<const int64_t> wanted;
  Global<int64_t> slots;
  Global<uint8_t> out;
  int64_t begin, width;

  SIMT void operator()() const {
    const HalfWarp group;
    for (int64_t at = group.number() * kRows; at < slots.size(); at += kRows * group.count()) {
      // The first lanes look at a slot each.
      const int64_t mine = group.rank < kRows && at + group.rank < slots.size() ? checked(at + group.rank) : kNowhere;
      Global<uint8_t> found[kRows];
      bool is_there[kRows];
      SIMT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const int64_t slot = simt::shuffle(group.mask, mine, static_cast<unsigned>(r), kWays);
        is_there[r] = slot != kNowhere;
        if (is_there[r]) found[r] = rows.row(slot);
      }
      for (int64_t place = static_cast<int64_t>(group.rank) * kBytes; place < width; place += kWays * kBytes) {
        typename Piece<kBytes>::Value value[kRows];
        SIMT_UNROLL
        for (int r = 0; r < kRows; ++r) {
          if (is_there[r]) value[r] = Piece<kBytes>::load(found[r], begin + place);
        }
        SIMT_UNROLL
        for (int r = 0; r < kRows; ++r) {
          if (is_there[r]) Piece<kBytes>::store(out, (at + r) * width + place, value[r]);
        }
      }
    }
  }

  // The slot of item `at`, unless it was guessed and wrong.
  SIMT int64_t checked(int64_t at) const {
    const int64_t slot = slots.load(at);
    if (slot == kNowhere || wanted.size() == 0 || key_of(rows.row(slot)) == wanted.load(at)) return slot;
    slots.store(at, kNowhere);
    return kNowhere;
  }
};

// The same bytes of the initial rows of ids that have no slot: mostly none, so that half a warp looks at 16 at once.
struct ReadInitial {
  static constexpr int kThreads = 256;
  InitialRow initial;
  Global<const int64_t> wanted, slots;
  Global<uint8_t> out;
  int64_t begin, width;

  SIMT void operator()() const {
    const HalfWarp group;
    for (int64_t some = group.number() * kWays; some < slots.size(); some += kWays * group.count()) {
      const int64_t mine = some + group.rank;
      unsigned missing = group.ballot(mine < slots.size() && slots.load(mine) == kNowhere);
      for (; missing != 0; missing &= missing - 1) {
        const int64_t at = some + simt::first_lane(missing);
        initial.read(group, wanted.load(at), begin, out.part(at * width, width));
      }
    }
  }
};

// Occurrences of the distinct ids of a batch: of id i those at `positions`, ascending, from `begins` [i] to the next.
struct RunList {
  Global<const int64_t> wanted, begins, positions;
  Count count;

  SIMT int64_t size() const { return count.of(wanted.size()); }
  SIMT int64_t length(int64_t at) const { return begins.load(at + 1) - begins.load(at); }
  SIMT int64_t last(int64_t at) const { return positions.load(begins.load(at + 1) - 1); }
};

// How many rows a table has, on the device: now, and before the batch that was added last.
constexpr int64_t kRowsNow = 0, kRowsBefore = 1, kRowCounts = 2;

// What a change says about every row: new rows are those behind the rows that there were.
struct Visit {
  uint64_t now, version;
  Global<const int64_t> row_counts;
  bool is_counted, visits;

  SIMT bool is_new(int64_t slot) const { return slot >= row_counts.load(kRowsBefore); }
  SIMT uint64_t word(uint64_t old, bool is_new, int64_t occurrences) const {
    if (!visits) return is_new ? word_of(now, 0) : old;
    uint64_t count = is_new ? 0 : count_of(old);
    if (is_counted) count += static_cast<uint64_t>(occurrences);
    return word_of(now, count < kCountMax ? count : kCountMax);
  }
};

// Places the last of an id's values, [batch, width], at [begin, begin + width) of its row.
template <int kBytes>
struct WriteValues {
  static constexpr int kThreads = 256;
  RowStore rows;
  InitialRow initial;
  RunList runs;
  Global<const int64_t> slots;
  Global<const uint8_t> values;
  int64_t begin, width;
  Visit visit;

  SIMT void operator()() const {
    const HalfWarp group;
    const int64_t end = runs.size();
    const bool has_weight = begin <= kHeaderBytes && begin + width >= initial.weight_end();
    for (int64_t at = group.number(); at < end; at += group.count()) {
      // Loads that do not wait for each other come before the row is written.
      const int64_t slot = slots.load(at), last = runs.last(at), id = runs.wanted.load(at);
      const bool is_new = visit.is_new(slot);
      const auto row = rows.row(slot);
      if (is_new) {
        initial.open(group.rank, kWays, row, id, rows.stride, has_weight);
        group.sync();
      }
      Piece<kBytes>::copy(group, row, begin, values, last * width, width);
      if (group.rank == 0) {
        set_word(row, visit.word(is_new ? 0 : word_in(row), is_new, runs.length(at)));
        rows.set_version(row, visit.version);
      }
    }
  }
};

struct Padding {
  static constexpr int kMost = 3;
  Range parts[kMost];
  int count;

  SIMT Range part(int i) const {
    Range result{0, 0};
    for (int k = 0; k < kMost; ++k) result = k == i ? parts[k] : result;
    return result;
  }
};

// Replaces rows by the last of an id's rows, [batch, row_bytes]: used is set, padding is zero.
template <int kBytes>
struct WriteWhole {
  static constexpr int kThreads = 256;
  RowStore rows;
  RunList runs;
  Global<const int64_t> slots;
  Global<const uint8_t> values;
  int64_t row_bytes;
  Padding padding;
  uint64_t version;

  SIMT void operator()() const {
    const HalfWarp group;
    const int64_t end = runs.size();
    for (int64_t at = group.number(); at < end; at += group.count()) {
      const auto row = rows.row(slots.load(at));
      Piece<kBytes>::copy(group, row, 0, values, runs.last(at) * row_bytes, row_bytes);
      group.sync();
      for (int i = 0; i < padding.count; ++i) {
        const Range pad = padding.part(i);
        clear_bytes(group.rank, kWays, row, pad.begin, pad.end);
      }
      clear_bytes(group.rank, kWays, row, row_bytes, rows.stride - 8 * kVersionWords);
      if (group.rank == 0) {
        set_word(row, word_in(row) | kUsed);
        rows.set_version(row, version);
      }
    }
  }
};

// Sets the bits `mask` of the metadata of the rows that exist, to the last of an id's words. One thread a row.
struct WriteMetadata {
  static constexpr int kThreads = 256;
  RowStore rows;
  RunList runs;
  Global<const int64_t> slots, words;
  uint64_t mask, version;

  SIMT void operator()() const {
    const int64_t end = runs.size();
    for (int64_t at = first_item(); at < end; at += item_step()) {
      const int64_t slot = slots.load(at);
      if (slot == kNowhere) continue;
      const auto row = rows.row(slot);
      const auto word = static_cast<uint64_t>(words.load(runs.last(at)));
      set_word(row, (word_in(row) & ~mask) | (word & mask) | kUsed);
      rows.set_version(row, version);
    }
  }
};

// Rows move from the end to places that became free before it; the entries of their ids follow.
struct MoveRows {
  static constexpr int kThreads = 256;
  Index index;
  RowStore rows;
  Global<const int64_t> from, to;

  SIMT void operator()() const {
    const HalfWarp group;
    for (int64_t at = group.number(); at < to.size(); at += group.count()) {
      const auto source = rows.row(from.load(at)), target = rows.row(to.load(at));
      Piece<16>::copy(group, target, 0, source, 0, rows.stride);
      if (group.rank == 0) index.slots.store(index.find(key_of(source)), static_cast<uint32_t>(to.load(at)));
    }
  }
};

}  // namespace fastimpl::kvstore::device
