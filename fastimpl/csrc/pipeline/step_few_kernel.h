// Rows with few occurrences, of which a group of lanes does several at once: their gradients, weights and momenta are
// under way together, and what rows share is summed for some of them in one go. Each row is summed and updated by the
// operations of update_row in their order; compile without contraction. A kernel of its own, since no other needs so
// many registers.
#pragma once

#include <type_traits>

#include "pipeline/step_batch.h"

namespace fastimpl::pipeline {

template <Float kType>
using BitsOf = std::conditional_t<kType == Float::kFloat32, float, uint16_t>;

template <Float kType>
SIMT float number_of(BitsOf<kType> bits) {
  if constexpr (kType == Float::kFloat32) return bits;
  if constexpr (kType == Float::kFloat16) return from_float16(bits);
  if constexpr (kType == Float::kBFloat16) return from_bfloat16(bits);
}
template <Float kType>
SIMT BitsOf<kType> bits_of_number(float value) {
  if constexpr (kType == Float::kFloat32) return value;
  if constexpr (kType == Float::kFloat16) return to_float16(value);
  if constexpr (kType == Float::kBFloat16) return to_bfloat16(value);
}

// A warp looks at 32 sorted positions. Where other rows begin is listed for StepRows.
template <Optimizer kOptimizer, unsigned kLanesOfGroup>
struct StepFewRows {
  static constexpr int kVec = 4;
  static constexpr unsigned kFew = 4;                          // Occurrences of a row, at most.
  static constexpr unsigned kElements = kLanesOfGroup * kVec;  // Of a row, at most: each lane has one vector.
  static constexpr bool kHasFirst = momentum1_width(kOptimizer, 2) == 2,
                        kHasSecond = momentum2_width(kOptimizer, 2) == 2, kIsRowWise = is_row_wise(kOptimizer);
  // At once: four groups of a warp have enough under way with two each, and states of elements leave room for no more.
  static constexpr int kRows = kLanesOfGroup < simt::kLanes || kHasFirst ? 2 : 4;
  // Blocks are small: registers are what there is room for, and less of it is left over.
  static constexpr int kThreads = 64;
  // Eight lanes sum a row, each with its running sum. Squares of rows lie so that those lanes meet in no bank.
  static constexpr unsigned kSums = 8, kAtOnce = kLanesOfGroup / kSums < kRows ? kLanesOfGroup / kSums : kRows,
                            kStride = kElements + 8;
  static constexpr int kPasses = kIsRowWise ? kRows / static_cast<int>(kAtOnce) : 0;
  static constexpr int64_t kFloats = kIsRowWise ? kRows * kStride : 0;  // Of shared memory, for each group.
  using Numbers = simt::Vector<float, kVec>;

  StepBatch batch;
  Hyper h;
  Global<int64_t> other_rows;    // Where they begin; room for all positions.
  Global<uint64_t> other_count;  // Zero before.

  SIMT void operator()() const {
    const int64_t warps = simt::threads() / simt::kLanes, step = simt::blocks() * warps * simt::kLanes;
    for (int64_t tile = (simt::block() * warps + simt::warp()) * simt::kLanes; tile < batch.count; tile += step)
      step_tile(tile + simt::lane());
  }

  // What a lane knows of the sorted position that is its own.
  struct Place {
    int64_t row, table;  // The table's number, or -1 where no row with few occurrences begins.
    unsigned length;     // Occurrences of that row.
    Occurrence occurrence;
  };

  // Some rows of one table; no row has no occurrence.
  struct Rows {
    int64_t row[kRows];
    unsigned lane[kRows], length[kRows];
    unsigned longest;
  };

  // Every lane comes with its own of 32 sorted positions. A row has few occurrences if it ends soon enough, at a place
  // of the same group.
  SIMT void step_tile(int64_t at) const {
    const LaneGroup<kLanesOfGroup> group;
    const bool is_there = at < batch.count;
    Place mine{is_there ? batch.rows.load(at) : batch.row_count, -1, 0, {0, 1, 1}};
    const int64_t position = is_there ? batch.positions.load(at) : 0;
    const bool is_first = mine.row < batch.row_count && (at == 0 || batch.rows.load(at - 1) != mine.row);
    const bool is_last = is_there && (at + 1 == batch.count || batch.rows.load(at + 1) != mine.row);
    const unsigned ends = (simt::ballot(group.mask(), is_last) & group.mask()) >> simt::lane();
    mine.length = ends == 0 ? kLanesOfGroup : simt::first_lane(ends) + 1;
    const bool is_few = is_first && mine.length <= kFew;
    unsigned done = 0;
    if (simt::any(group.mask(), is_few)) {
      if (is_there) mine.occurrence = batch.occurrence_of(position);
      if (is_few) mine.table = batch.table_number(mine.row);
      done = step_few(group, mine);
    }
    list(group, is_first && (done >> simt::lane() & 1) == 0, at);
  }

  // One lane counts for all of the group.
  SIMT void list(const LaneGroup<kLanesOfGroup>& group, bool is_other, int64_t at) const {
    const unsigned own = 1U << simt::lane(), others = simt::ballot(group.mask(), is_other) & group.mask();
    if (others == 0) return;
    uint64_t begin = 0;
    if (simt::lane() == simt::first_lane(others)) begin = other_count.atomic_add(0, simt::count_lanes(others));
    begin = simt::shuffle(group.mask(), begin, simt::first_lane(others) % kLanesOfGroup, kLanesOfGroup);
    if (is_other) other_rows.store(static_cast<int64_t>(begin) + simt::count_lanes(others & (own - 1)), at);
  }

  // Table by table. Returns the lanes whose rows are done.
  SIMT unsigned step_few(const LaneGroup<kLanesOfGroup>& group, const Place& mine) const {
    unsigned left = simt::ballot(group.mask(), mine.table >= 0), done = 0;
    while (left != 0) {
      const int64_t number = simt::shuffle(group.mask(), mine.table, simt::first_lane(left), kLanesOfGroup);
      const unsigned same = simt::ballot(group.mask(), mine.table == number);
      left &= ~same;
      const StepTable table = batch.tables.load(number);
      if (table.dim > kElements) continue;
      done |= same;
      switch (table.type) {
        case Float::kFloat32: step_rows<Float::kFloat32>(group, table, mine, same); break;
        case Float::kFloat16: step_rows<Float::kFloat16>(group, table, mine, same); break;
        case Float::kBFloat16: step_rows<Float::kBFloat16>(group, table, mine, same); break;
      }
    }
    return done;
  }

  // The rows of one table that begin at the lanes `heads`.
  template <Float kType>
  SIMT void step_rows(const LaneGroup<kLanesOfGroup>& group, const StepTable& table, const Place& mine,
                      unsigned heads) const {
    while (heads != 0) {
      Rows rows;
      rows.longest = 0;
      SIMT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const bool is_row = heads != 0;
        rows.lane[r] = is_row ? simt::first_lane(heads) % kLanesOfGroup : 0;
        heads &= heads - 1;
        rows.row[r] = simt::shuffle(group.mask(), mine.row, rows.lane[r], kLanesOfGroup) - table.base;
        const unsigned length = simt::shuffle(group.mask(), mine.length, rows.lane[r], kLanesOfGroup);
        rows.length[r] = is_row ? length : 0;
        rows.longest = rows.longest < rows.length[r] ? rows.length[r] : rows.longest;
      }
      step_some<kType>(group, table, mine.occurrence, rows);
    }
  }

  template <Float kType>
  SIMT void step_some(const LaneGroup<kLanesOfGroup>& group, const StepTable& table, const Occurrence& mine,
                      const Rows& rows) const {
    const int64_t e = static_cast<int64_t>(group.rank()) * kVec;
    const bool has_elements = e < table.dim;
    const auto there = table.rows.template as<BitsOf<kType> >();
    simt::Vector<BitsOf<kType>, kVec> weights[kRows];
    Numbers first[kRows], second[kRows], total[kRows] = {};
    float momenta[kPasses + 1], shared[kRows] = {};
    SIMT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (rows.length[r] == 0 || !has_elements) continue;
      const int64_t place = rows.row[r] * table.dim + e;
      weights[r] = there.template load_vector<kVec>(place);
      if constexpr (kHasFirst) first[r] = table.momentum1.template load_vector<kVec>(place);
      if constexpr (kHasSecond) second[r] = table.momentum2.template load_vector<kVec>(place);
    }
    if constexpr (kIsRowWise) load_momenta(group, table, rows, momenta);
    add(group, mine, rows, has_elements, e, total);
    if constexpr (kIsRowWise) share(group, table, rows, total, momenta, shared);
    SIMT_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (rows.length[r] == 0 || !has_elements) continue;
      const int64_t place = rows.row[r] * table.dim + e;
      SIMT_UNROLL
      for (int i = 0; i < kVec; ++i) {
        weights[r].values[i] = bits_of_number<kType>(
            number_of<kType>(weights[r].values[i]) -
            element_step(kOptimizer, total[r].values[i], shared[r], &first[r].values[i], &second[r].values[i], h));
      }
      if constexpr (kHasFirst) table.momentum1.template store_vector<kVec>(place, first[r]);
      if constexpr (kHasSecond) table.momentum2.template store_vector<kVec>(place, second[r]);
      there.template store_vector<kVec>(place, weights[r]);
    }
  }

  // Adds the gradients of each row in the order of their occurrences.
  SIMT void add(const LaneGroup<kLanesOfGroup>& group, const Occurrence& mine, const Rows& rows, bool has_elements,
                int64_t e, Numbers (&total)[kRows]) const {
    for (unsigned turn = 0; turn < rows.longest; ++turn) {
      Numbers loaded[kRows];
      unsigned from[kRows];
      SIMT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        from[r] = turn < rows.length[r] ? rows.lane[r] + turn : rows.lane[r];
        const int64_t begin = simt::shuffle(group.mask(), mine.begin, from[r], kLanesOfGroup);
        if (turn < rows.length[r] && has_elements) loaded[r] = batch.grad.template load_vector<kVec>(begin + e);
      }
      SIMT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        Occurrence by{0, 1, 1};
        if (batch.has_factors) {
          by.length = simt::shuffle(group.mask(), mine.length, from[r], kLanesOfGroup);
          by.weight = simt::shuffle(group.mask(), mine.weight, from[r], kLanesOfGroup);
        }
        if (turn >= rows.length[r] || !has_elements) continue;
        SIMT_UNROLL
        for (int i = 0; i < kVec; ++i) {
          const float value = loaded[r].values[i];
          total[r].values[i] += batch.has_factors ? batch.scaled(value, by) : value;
        }
      }
    }
  }

  SIMT Global<float> momenta_of(const StepTable& table) const {
    return kOptimizer == Optimizer::kRowwiseAdagrad ? table.momentum1 : table.momentum2;
  }

  // Of the rows that this lane's eight lanes sum, the one of a pass; -1 where there is none, or for seven of the eight.
  SIMT static int64_t row_of(const LaneGroup<kLanesOfGroup>& group, const Rows& rows, int pass) {
    int64_t row = -1;
    SIMT_UNROLL
    for (unsigned i = 0; i < kAtOnce; ++i) {
      const unsigned r = static_cast<unsigned>(pass) * kAtOnce + i;
      if (group.rank() == i * kSums && rows.length[r] > 0) row = rows.row[r];
    }
    return row;
  }

  SIMT void load_momenta(const LaneGroup<kLanesOfGroup>& group, const StepTable& table, const Rows& rows,
                         float (&momenta)[kPasses + 1]) const {
    SIMT_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      const int64_t row = row_of(group, rows, pass);
      momenta[pass] = row < 0 ? 0 : momenta_of(table).load(row);
    }
  }

  // What the elements of each row share. Behind a row's elements there are zeros, which change no sum of squares.
  SIMT void share(const LaneGroup<kLanesOfGroup>& group, const StepTable& table, const Rows& rows,
                  const Numbers (&total)[kRows], float (&momenta)[kPasses + 1], float (&shared)[kRows]) const {
    const auto memory = simt::shared<float>(simt::thread() / kLanesOfGroup * kFloats * 4, kFloats);
    const unsigned rank = group.rank();
    SIMT_UNROLL
    for (unsigned r = 0; r < kRows; ++r) {
      Numbers squares;
      SIMT_UNROLL
      for (int i = 0; i < kVec; ++i) squares.values[i] = total[r].values[i] * total[r].values[i];
      memory.template store_vector<kVec>(r * kStride + rank * kVec, squares);
    }
    group.sync();
    SIMT_UNROLL
    for (unsigned pass = 0; pass < kPasses; ++pass) {
      const unsigned begin = (pass * kAtOnce + rank / kSums % kAtOnce) * kStride + rank % kSums;
      float sum = 0, own = 0;
      SIMT_UNROLL
      for (unsigned i = 0; i < kElements / kSums; ++i) sum += memory.load(begin + i * kSums);
      // As fold_lanes has it.
      SIMT_UNROLL
      for (unsigned half = kSums / 2; half > 0; half /= 2) sum += simt::shuffle_down(group.mask(), sum, half, kSums);
      const int64_t row = row_of(group, rows, static_cast<int>(pass));
      if (row >= 0) {
        own = row_share(kOptimizer, sum / static_cast<float>(table.dim), &momenta[pass], &momenta[pass], h);
        momenta_of(table).store(row, momenta[pass]);
      }
      SIMT_UNROLL
      for (unsigned i = 0; i < kAtOnce; ++i)
        shared[pass * kAtOnce + i] = simt::shuffle(group.mask(), own, i * kSums, kLanesOfGroup);
    }
    // The squares of the next rows overwrite these.
    group.sync();
  }
};

}  // namespace fastimpl::pipeline
