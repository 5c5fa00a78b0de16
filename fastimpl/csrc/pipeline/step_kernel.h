// The fused step of table-batched embeddings: gradients of a row summed in order of position, what a row shares, the
// update. Written with simt.h: a group of lanes takes each row with few occurrences, a block each row with many.
// Every operation is rounded by itself and in the order of the host's kernels; compile without contraction.
#pragma once

#include "pipeline/step_batch.h"

namespace fastimpl::pipeline {

constexpr int64_t kRowSums = 16;  // Running sums of a row, twice eight.
FASTIMPL_BOTH constexpr int64_t row_floats(Optimizer optimizer, int64_t dim_max) {
  return (is_scaled(optimizer) ? 2 : 1) * ((dim_max + 3) / 4 * 4) + kRowSums + 4;
}

// Shared memory of one row: gradients, for LAMB squares of steps, eight running sums twice, what all elements need.
template <Optimizer kOptimizer>
struct RowMemory {
  Shared<float> grad, squares, sums, result;

  SIMT RowMemory(int64_t offset_floats, int64_t dim_max) {
    const int64_t dim = (dim_max + 3) / 4 * 4, more = is_scaled(kOptimizer) ? dim : 0;
    grad = simt::shared<float>(offset_floats * 4, dim);
    squares = simt::shared<float>((offset_floats + dim) * 4, more);
    sums = simt::shared<float>((offset_floats + dim + more) * 4, kRowSums);
    result = simt::shared<float>((offset_floats + dim + more + kRowSums) * 4, 1);
  }
};

template <int kVec>
SIMT simt::Vector<float, kVec> load_weights(const StepTable& table, int64_t element) {
  simt::Vector<float, kVec> result;
  if (table.type == Float::kFloat32) return table.rows.template as<const float>().template load_vector<kVec>(element);
  const auto halves = table.rows.template as<const uint16_t>().template load_vector<kVec>(element);
  for (int i = 0; i < kVec; ++i) {
    const uint16_t bits = halves.values[i];
    result.values[i] = table.type == Float::kFloat16 ? from_float16(bits) : from_bfloat16(bits);
  }
  return result;
}

template <int kVec>
SIMT void store_weights(const StepTable& table, int64_t element, const simt::Vector<float, kVec>& value) {
  if (table.type == Float::kFloat32) {
    table.rows.template as<float>().template store_vector<kVec>(element, value);
    return;
  }
  simt::Vector<uint16_t, kVec> halves;
  for (int i = 0; i < kVec; ++i) {
    const float number = value.values[i];
    halves.values[i] = table.type == Float::kFloat16 ? to_float16(number) : to_bfloat16(number);
  }
  table.rows.template as<uint16_t>().template store_vector<kVec>(element, halves);
}

// The fold of eight running sums, each of every eighth element, as lane_sum has them.
SIMT float sum_of(const Shared<float>& sums) {
  float lanes[8];
  for (int64_t i = 0; i < 8; ++i) lanes[i] = sums.load(i);
  return fold_lanes(lanes);
}

// What the elements of a row share. `memory.grad` is the row's; every thread of the group calls this.
template <Optimizer kOptimizer, typename Group>
SIMT float share_row(const Group& group, const StepTable& table, int64_t row, const RowMemory<kOptimizer>& memory,
                     const Hyper& h) {
  const unsigned rank = group.rank();
  if constexpr (is_row_wise(kOptimizer)) {
    if (rank < 8) {
      float sum = 0;
      for (int64_t e = rank; e < table.dim; e += 8) sum += memory.grad.load(e) * memory.grad.load(e);
      memory.sums.store(rank, sum);
    }
    group.sync();
    if (rank == 0) {
      const float mean_square = sum_of(memory.sums) / static_cast<float>(table.dim);
      const Global<float> momenta = kOptimizer == Optimizer::kRowwiseAdagrad ? table.momentum1 : table.momentum2;
      float momentum = momenta.load(row);
      memory.result.store(0, row_share(kOptimizer, mean_square, &momentum, &momentum, h));
      momenta.store(row, momentum);
    }
    group.sync();
    return memory.result.load(0);
  } else if constexpr (is_scaled(kOptimizer)) {
    for (int64_t e = rank; e < table.dim; e += group.size()) {
      const int64_t place = row * table.dim + e;
      float average = table.momentum1.load(place), square = table.momentum2.load(place);
      advance_adam(memory.grad.load(e), &average, &square, h);
      table.momentum1.store(place, average);
      table.momentum2.store(place, square);
      const float value = load_weights<1>(table, place).values[0], step = adam_change(average, square, h);
      memory.grad.store(e, value * value);
      memory.squares.store(e, step * step);
    }
    group.sync();
    if (rank < 8) {
      float weights = 0, steps = 0;
      for (int64_t e = rank; e < table.dim; e += 8) {
        weights += memory.grad.load(e);
        steps += memory.squares.load(e);
      }
      memory.sums.store(rank, weights);
      memory.sums.store(8 + rank, steps);
    }
    group.sync();
    const float norm = std::sqrt(sum_of(memory.sums)), length = std::sqrt(sum_of(memory.sums.part(8, 8)));
    return norm > 0 && length > 0 ? (h.lr * norm) / length : 1.0F;
  } else {
    return 0;
  }
}

// The update of a row whose gradient lies in `memory.grad`, each vector of which its own thread wrote.
template <Optimizer kOptimizer, int kVec, typename Group>
SIMT void update_row(const Group& group, const StepTable& table, int64_t row, const RowMemory<kOptimizer>& memory,
                     const Hyper& h) {
  constexpr bool kHasFirst = momentum1_width(kOptimizer, 2) == 2, kHasSecond = momentum2_width(kOptimizer, 2) == 2;
  constexpr bool kStores = !is_scaled(kOptimizer);
  if constexpr (is_row_wise(kOptimizer) || is_scaled(kOptimizer)) group.sync();
  const float shared = share_row<kOptimizer>(group, table, row, memory, h);
  for (int64_t e = static_cast<int64_t>(group.rank()) * kVec; e < table.dim; e += group.size() * kVec) {
    const int64_t place = row * table.dim + e;
    auto weight = load_weights<kVec>(table, place);
    const auto grad = memory.grad.template load_vector<kVec>(e);
    simt::Vector<float, kVec> first{}, second{};
    if constexpr (kHasFirst) first = table.momentum1.template load_vector<kVec>(place);
    if constexpr (kHasSecond) second = table.momentum2.template load_vector<kVec>(place);
    for (int i = 0; i < kVec; ++i) {
      weight.values[i] =
          weight.values[i] - element_step(kOptimizer, grad.values[i], shared, &first.values[i], &second.values[i], h);
    }
    if constexpr (kHasFirst && kStores) table.momentum1.template store_vector<kVec>(place, first);
    if constexpr (kHasSecond && kStores) table.momentum2.template store_vector<kVec>(place, second);
    store_weights<kVec>(table, place, weight);
  }
}

constexpr int64_t kLongRun = 256;  // Occurrences from which on a block takes the row.

// Rows with at most kLongRun occurrences: those that are listed, or all. Then a warp looks at 32 sorted positions. Each
// row is done by a group of lanes, which walks to the row's end. Rows with more are listed for StepLongRows.
template <Optimizer kOptimizer, int kVec, unsigned kLanesOfGroup>
struct StepRows {
  static constexpr int kThreads = 256;
  static constexpr unsigned kGroups = simt::kLanes / kLanesOfGroup;  // Of a warp.
  // Gradients that are under way at once, of one thread; divisions leave room for fewer.
  static constexpr unsigned kAhead = kVec == 4 ? 8 : 4, kAheadOfFactors = 2;
  StepBatch batch;
  Hyper h;
  int64_t dim_max;
  Global<const int64_t> listed;  // Where they begin; empty if all rows are to be done.
  Global<const uint64_t> listed_count;
  Global<int64_t> long_rows;    // Where they begin.
  Global<uint64_t> long_count;  // Zero before.

  SIMT void operator()() const {
    const unsigned own = simt::warp() * kGroups + simt::lane() / kLanesOfGroup;
    const RowMemory<kOptimizer> memory(own * row_floats(kOptimizer, dim_max), dim_max);
    if (listed.size() == 0) return step_all(memory);
    const int64_t groups = simt::threads() / kLanesOfGroup, count = static_cast<int64_t>(listed_count.load(0));
    for (int64_t number = simt::block() * groups + own; number < count; number += simt::blocks() * groups)
      step(listed.load(number), memory);
  }

  SIMT void step_all(const RowMemory<kOptimizer>& memory) const {
    const unsigned warps = simt::threads() / simt::kLanes, own = simt::lane() / kLanesOfGroup;
    const int64_t count = batch.count;
    for (int64_t tile = static_cast<int64_t>(simt::block()) * warps + simt::warp(); tile * simt::kLanes < count;
         tile += static_cast<int64_t>(simt::blocks()) * warps) {
      const int64_t at = tile * simt::kLanes + simt::lane();
      const unsigned heads = simt::ballot(simt::kAllLanes, at < count && batch.is_first(at));
      unsigned number = 0;
      for (unsigned bit = 0; bit < simt::kLanes; ++bit) {
        if ((heads >> bit & 1) == 0) continue;
        if (number++ % kGroups == own) step(tile * simt::kLanes + bit, memory);
      }
    }
  }

  SIMT void step(int64_t begin, const RowMemory<kOptimizer>& memory) const {
    const LaneGroup<kLanesOfGroup> group;
    const int64_t row = batch.rows.load(begin), behind = begin + kLongRun;
    if (row >= batch.row_count) return;
    if (behind < batch.count && batch.rows.load(behind) == row) {
      if (group.rank() == 0) long_rows.store(static_cast<int64_t>(long_count.atomic_add(0, 1)), begin);
      return;
    }
    const StepTable table = batch.table_of(row);
    int64_t first = begin;
    while (true) {
      const int64_t at = first + group.rank();
      const bool is_mine = at < batch.count && batch.rows.load(at) == row;
      const Occurrence mine = is_mine ? batch.occurrence(at) : Occurrence{0, 1, 1};
      const unsigned there = simt::count_lanes(simt::ballot(group.mask(), is_mine));
      if (batch.has_factors) {
        add<true, kAheadOfFactors>(group, table, mine, there, first == begin, memory);
      } else {
        add<false, kAhead>(group, table, mine, there, first == begin, memory);
      }
      if (there < kLanesOfGroup) break;
      first += kLanesOfGroup;
    }
    update_row<kOptimizer, kVec>(group, table, row - table.base, memory, h);
  }

  // Adds the gradients of `count` occurrences, of which each lane has one, in their order.
  template <bool kHasFactors, unsigned kLoads>
  SIMT void add(const LaneGroup<kLanesOfGroup>& group, const StepTable& table, const Occurrence& mine, unsigned count,
                bool is_begin, const RowMemory<kOptimizer>& memory) const {
    // Every lane goes through all turns, since each has occurrences that the others need.
    const int64_t stride = static_cast<int64_t>(kLanesOfGroup) * kVec;
    for (int64_t turn = 0; turn < table.dim; turn += stride) {
      const int64_t e = turn + static_cast<int64_t>(group.rank()) * kVec;
      const bool has_elements = e < table.dim;
      simt::Vector<float, kVec> total{};
      if (!is_begin && has_elements) total = memory.grad.template load_vector<kVec>(e);
      for (unsigned some = 0; some < count; some += kLoads) {
        simt::Vector<float, kVec> loaded[kLoads];
        Occurrence from[kLoads];
        for (unsigned i = 0; i < kLoads; ++i) {
          const unsigned lane = some + i < count ? some + i : count - 1;
          from[i].begin = simt::shuffle(group.mask(), mine.begin, lane, kLanesOfGroup);
          if constexpr (kHasFactors) {
            from[i].length = simt::shuffle(group.mask(), mine.length, lane, kLanesOfGroup);
            from[i].weight = simt::shuffle(group.mask(), mine.weight, lane, kLanesOfGroup);
          }
          if (has_elements && some + i < count) loaded[i] = batch.grad.template load_vector<kVec>(from[i].begin + e);
        }
        for (unsigned i = 0; i < kLoads; ++i) {
          if (!has_elements || some + i >= count) break;
          for (int k = 0; k < kVec; ++k) {
            const float value = loaded[i].values[k];
            total.values[k] += kHasFactors ? batch.scaled(value, from[i]) : value;
          }
        }
      }
      if (has_elements) memory.grad.template store_vector<kVec>(e, total);
    }
  }
};

// Rows with more than kLongRun occurrences, a block each. Each thread copies the gradients of its own elements into a
// ring of its own, so that many are under way, and adds them in order.
template <Optimizer kOptimizer, int kVec>
struct StepLongRows {
  static constexpr int kThreads = 128;
  static constexpr unsigned kRing = 32;
  StepBatch batch;
  Hyper h;
  int64_t dim_max;
  Global<const int64_t> long_rows;
  Global<const uint64_t> long_count;

  FASTIMPL_BOTH static constexpr int64_t shared_floats(int64_t dim_max, int64_t threads) {
    return row_floats(kOptimizer, dim_max) + kRing * 4 + static_cast<int64_t>(kRing) * threads * kVec;
  }

  SIMT void operator()() const {
    const int64_t floats = row_floats(kOptimizer, dim_max);
    const RowMemory<kOptimizer> memory(0, dim_max);
    const auto begins = simt::shared<int64_t>(floats * 4, kRing);
    const auto factors = simt::shared<float>((floats + 2 * kRing) * 4, 2 * kRing);
    const auto ring =
        simt::shared<float>((floats + 4 * kRing) * 4, static_cast<int64_t>(kRing) * simt::threads() * kVec);
    const auto count = static_cast<int64_t>(long_count.load(0));
    for (int64_t number = simt::block(); number < count; number += simt::blocks()) {
      const int64_t begin = long_rows.load(number), row = batch.rows.load(begin);
      const StepTable table = batch.table_of(row);
      int64_t first = begin;
      while (true) {
        // Nobody still reads the occurrences before, or the row before.
        simt::sync_block();
        if (simt::warp() == 0) {
          const int64_t at = first + simt::lane();
          const bool is_mine = at < batch.count && batch.rows.load(at) == row;
          const Occurrence mine = is_mine ? batch.occurrence(at) : Occurrence{-1, 1, 1};
          begins.store(simt::lane(), mine.begin);
          factors.store(simt::lane(), mine.length);
          factors.store(kRing + simt::lane(), mine.weight);
        }
        simt::sync_block();
        unsigned there = 0;
        while (there < kRing && begins.load(there) >= 0) ++there;
        add(table, begins, factors, ring, there, first == begin, memory);
        if (there < kRing) break;
        first += kRing;
      }
      update_row<kOptimizer, kVec>(BlockGroup{}, table, row - table.base, memory, h);
    }
  }

  SIMT void add(const StepTable& table, const Shared<int64_t>& begins, const Shared<float>& factors,
                const Shared<float>& ring, unsigned count, bool is_begin, const RowMemory<kOptimizer>& memory) const {
    const int64_t stride = static_cast<int64_t>(simt::threads()) * kVec;
    for (int64_t e = static_cast<int64_t>(simt::thread()) * kVec; e < table.dim; e += stride) {
      // Two groups of copies: while the first is added the second is under way.
      const unsigned half = (count + 1) / 2;
      for (unsigned i = 0; i < count; ++i) {
        simt::copy_async<kVec * 4>(ring, place(i), batch.grad, begins.load(i) + e);
        if (i + 1 == half) simt::commit_copies();
      }
      simt::commit_copies();
      simt::Vector<float, kVec> total{};
      if (!is_begin) total = memory.grad.template load_vector<kVec>(e);
      simt::wait_copies<1>();
      for (unsigned i = 0; i < count; ++i) {
        if (i == half) simt::wait_copies<0>();
        const Occurrence from{0, factors.load(i), factors.load(kRing + i)};
        const auto value = ring.template load_vector<kVec>(place(i));
        for (int k = 0; k < kVec; ++k) total.values[k] += batch.scaled(value.values[k], from);
      }
      simt::wait_copies<0>();
      memory.grad.template store_vector<kVec>(e, total);
    }
  }

  SIMT static int64_t place(unsigned i) { return (static_cast<int64_t>(i) * simt::threads() + simt::thread()) * kVec; }
};

}  // namespace fastimpl::pipeline
