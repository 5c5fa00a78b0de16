// Backward and update in one: occurrences are sorted by row, each row's gradients are summed in order of position, and
// the row takes one step. A row belongs to one thread; one with very many occurrences is summed by columns instead, so
// that the order of no sum depends on the number of threads.
#pragma once

#include <memory>
#include <numeric>
#include <utility>

#include "common/regimes.h"
#include "common/sort.h"
#include "common/step_row.h"
#include "pipeline/pool.h"
#include "pipeline/rows.h"

namespace fastimpl::pipeline {

constexpr int kDigitBits = regime(11, 3);
// A row has many occurrences when it has so many, and a considerable share of all: then its columns are split.
constexpr int64_t kLongRow = regime(4096, 6);
// Columns of a cache line, which no two threads should read.
constexpr int64_t kLineColumns = 16;

inline int bit_width(uint64_t value) { return value == 0 ? 0 : 64 - __builtin_clzll(value); }

// Sorts words by their bits from `low` to `high`, after `base` is taken from them, stably. `spare` has as many.
inline void sort_stably(const Parallel& parallel, uint64_t* words, uint64_t* spare, int64_t count, uint64_t base,
                        int low, int high) {
  const int pass_count = (high - low + kDigitBits - 1) / kDigitBits;
  std::vector<int64_t> begins((size_t{1} << kDigitBits) + 1);
  uint64_t *from = words, *to = spare;
  for (int pass = 0; pass < pass_count; ++pass) {
    const int first = low + (high - low) * pass / pass_count, last = low + (high - low) * (pass + 1) / pass_count;
    const uint64_t mask = (uint64_t{1} << (last - first)) - 1;
    distribute(
        parallel, from, to, count, static_cast<int64_t>(mask + 1),
        [from, base, first, mask](int64_t i) { return static_cast<int64_t>(((from[i] - base) >> first) & mask); },
        begins.data());
    std::swap(from, to);
  }
  if (from != words) std::copy_n(from, count, words);
}

// Uninitialised, and from the heap, which hands the same pages out again call after call.
template <typename T>
std::unique_ptr<T[]> heap_array(int64_t count) {
  return std::unique_ptr<T[]>(new T[static_cast<size_t>(count)]);
}

// An occurrence is a word: the row, counted through all tables, above what says which gradient it has: its bag, as
// feature and number in the feature, or its position where ids have weights.
struct Occurrences {
  std::unique_ptr<uint64_t[]> sorted;
  std::unique_ptr<uint64_t[]> bag_of;  // Of a position; null without weights.
  int bag_bits, payload_bits;
  std::vector<uint64_t> bases;        // Of each table: the number of its first row.
  std::vector<int64_t> table_begins;  // In `sorted`, and the end of it.

  uint64_t row(int64_t at) const { return sorted[at] >> payload_bits; }
  uint64_t payload(int64_t at) const { return sorted[at] & ((uint64_t{1} << payload_bits) - 1); }
};

inline int bag_bits_of(const Bags& batch) { return bit_width(static_cast<uint64_t>(batch.bag_count)); }

inline int payload_bits_of(const Bags& batch) {
  const int bits = bag_bits_of(batch) + bit_width(static_cast<uint64_t>(batch.feature_count()));
  return batch.weights == nullptr ? bits : bit_width(static_cast<uint64_t>(batch.id_count));
}

// Whether row and payload fit into a word.
inline bool fits_words(const Bags& batch) {
  unsigned __int128 row_count = 0;
  for (const BagTable& table : batch.tables) row_count += static_cast<uint64_t>(table.row_count);
  return row_count < uint64_t{1} << 62 && bit_width(static_cast<uint64_t>(row_count)) + payload_bits_of(batch) <= 64;
}

// Where each table's occurrences begin, tables one after the other, and for each feature how far its occurrences move.
inline std::vector<int64_t> group_by_table(const Bags& batch, std::vector<int64_t>* table_begins) {
  const auto first_of = [&](size_t feature) { return batch.offsets[static_cast<int64_t>(feature) * batch.bag_count]; };
  std::vector<int64_t> next(batch.tables.size() + 1), moves;
  for (size_t f = 0; f < batch.features.size(); ++f)
    next[static_cast<size_t>(batch.features[f].table)] += first_of(f + 1) - first_of(f);
  std::exclusive_scan(next.begin(), next.end(), next.begin(), int64_t{0});
  *table_begins = next;
  for (size_t f = 0; f < batch.features.size(); ++f) {
    int64_t& begin = next[static_cast<size_t>(batch.features[f].table)];
    moves.push_back(begin - first_of(f));
    begin += first_of(f + 1) - first_of(f);
  }
  return moves;
}

template <typename Id>
void fill_words(const Parallel& parallel, const BagBatch<Id>& batch, const std::vector<int64_t>& moves,
                Occurrences& found) {
  const bool weighted = batch.weights != nullptr;
  const int bag_bits = found.bag_bits, payload_bits = found.payload_bits;
  for_bags(parallel, batch.offsets, batch.feature_count(), batch.bag_count,
           [&](int64_t feature, int64_t first, int64_t last) {
             const uint64_t base = found.bases[static_cast<size_t>(batch.features[static_cast<size_t>(feature)].table)];
             const int64_t* const offsets = batch.offsets + feature * batch.bag_count;
             const Id* const ids = batch.ids;
             uint64_t* const words = found.sorted.get();
             const int64_t move = moves[static_cast<size_t>(feature)];
             for (int64_t number = first; number < last; ++number) {
               const auto bag = static_cast<uint64_t>(feature << bag_bits | number);
               const int64_t end = offsets[number + 1];
               for (int64_t at = offsets[number]; at < end; ++at) {
                 words[at + move] = (base + static_cast<uint64_t>(ids[at])) << payload_bits |
                                    (weighted ? static_cast<uint64_t>(at) : bag);
               }
               if (weighted) std::fill(found.bag_of.get() + offsets[number], found.bag_of.get() + end, bag);
             }
           });
}

// Each table by itself: its words are few enough for a cache. One that has more than a thread's share is sorted by all
// threads.
template <typename Id>
Occurrences sort_occurrences(const Parallel& parallel, const BagBatch<Id>& batch) {
  Occurrences found{heap_array<uint64_t>(batch.id_count), nullptr, bag_bits_of(batch), payload_bits_of(batch), {}, {}};
  uint64_t row_count = 0;
  for (const BagTable& table : batch.tables) {
    found.bases.push_back(row_count);
    row_count += static_cast<uint64_t>(table.row_count);
  }
  if (batch.weights != nullptr) found.bag_of = heap_array<uint64_t>(batch.id_count);
  fill_words(parallel, batch, group_by_table(batch, &found.table_begins), found);
  const auto count_of = [&](int64_t table) {
    return found.table_begins[static_cast<size_t>(table + 1)] - found.table_begins[static_cast<size_t>(table)];
  };
  const auto sort_table = [&](const Parallel& given, int64_t table) {
    const auto t = static_cast<size_t>(table);
    const int64_t count = count_of(table);
    const auto spare = heap_array<uint64_t>(count);
    const int row_bits = bit_width(static_cast<uint64_t>(batch.tables[t].row_count));
    sort_stably(given, found.sorted.get() + found.table_begins[t], spare.get(), count,
                found.bases[t] << found.payload_bits, found.payload_bits, found.payload_bits + row_bits);
  };
  std::vector<int64_t> small;
  for (int64_t table = 0; table < static_cast<int64_t>(batch.tables.size()); ++table) {
    if (count_of(table) * parallel.thread_count > batch.id_count) {
      sort_table(parallel, table);
    } else if (count_of(table) > 1) {
      small.push_back(table);
    }
  }
  const Parallel alone{1, {}};
  parallel.run(static_cast<int64_t>(small.size()),
               [&](int64_t at) { sort_table(alone, small[static_cast<size_t>(at)]); });
  return found;
}

struct StepJob {
  const Bags& batch;
  const Occurrences& found;
  const float* grad;
  const Hyper& hyper;
  int64_t long_row;

  // Its bag: feature, number in the feature.
  FASTIMPL_INLINE uint64_t bag_of(uint64_t payload) const {
    return batch.weights == nullptr ? payload : found.bag_of[payload];
  }

  FASTIMPL_INLINE const float* grad_of(uint64_t bag) const {
    const uint64_t number = bag & ((uint64_t{1} << found.bag_bits) - 1);
    return grad + static_cast<int64_t>(number) * batch.width + batch.features[bag >> found.bag_bits].column;
  }

  FASTIMPL_INLINE float length_of(uint64_t bag) const {
    const int64_t number = static_cast<int64_t>(bag & ((uint64_t{1} << found.bag_bits) - 1)),
                  at = static_cast<int64_t>(bag >> found.bag_bits) * batch.bag_count + number;
    return static_cast<float>(batch.offsets[at + 1] - batch.offsets[at]);
  }

  int64_t segment_end(int64_t at, int64_t end) const {
    const uint64_t row = found.row(at);
    int64_t last = at + 1;
    while (last < end && found.row(last) == row) ++last;
    return last;
  }

  // Columns [column, column + count) of the sum over occurrences [begin, end).
  FASTIMPL_INLINE void sum_columns(const BagTable& table, int64_t begin, int64_t end, int64_t column, int64_t count,
                                   float* sum) const {
    for (int64_t at = begin; at < end; ++at) {
      const uint64_t payload = found.payload(at), bag = bag_of(payload);
      const float* const g = grad_of(bag) + column;
      const float weight = batch.weights == nullptr ? 1.0F : batch.weights[payload];
      const bool is_first = at == begin;
      if (!table.mean && batch.weights == nullptr) {
        add_row(sum, g, count, is_first);
      } else if (!table.mean) {
        add_scaled(sum, g, weight, count, is_first);
      } else {
        // Times a weight of one is the same bits.
        const float length = length_of(bag);
        add_terms(sum, count, is_first, [=](int64_t e) FASTIMPL_INLINED { return weight * (g[e] / length); });
      }
    }
  }

  template <typename T, Optimizer kOptimizer, Isa kIsa>
  FASTIMPL_INLINE void step(const BagTable& table, int64_t row, const float* sum, float* scratch) const {
    const int64_t dim = table.dim;
    auto* const stored = reinterpret_cast<typename T::Bits*>(table.rows) + row * dim;
    float* const first = table.momentum1 + row * momentum1_width(kOptimizer, dim);
    float* const second = table.momentum2 + row * momentum2_width(kOptimizer, dim);
    if constexpr (std::is_same_v<T, Fp32>) {
      step_row<kOptimizer, kIsa>(stored, sum, first, second, dim, hyper);
    } else {
      wide_row<T, kIsa>(stored, scratch, dim);
      step_row<kOptimizer, kIsa>(scratch, sum, first, second, dim, hyper);
      narrow_row<T, kIsa>(scratch, stored, dim);
    }
  }

  template <Optimizer kOptimizer>
  FASTIMPL_INLINE void fetch(const BagTable& table, uint64_t base, int64_t at, bool fetches_row) const {
    const int64_t dim = table.dim;
    fetch_row(grad_of(bag_of(found.payload(at))), dim * 4);
    if (!fetches_row) return;
    const auto row = static_cast<int64_t>(found.row(at) - base);
    fetch_row(table.rows + row * table.row_bytes(), table.row_bytes());
    if constexpr (momentum1_width(kOptimizer, 2) > 0) {
      fetch_row(table.momentum1 + row * momentum1_width(kOptimizer, dim), 4 * momentum1_width(kOptimizer, dim));
    }
    if constexpr (momentum2_width(kOptimizer, 2) > 0) {
      fetch_row(table.momentum2 + row * momentum2_width(kOptimizer, dim), 4 * momentum2_width(kOptimizer, dim));
    }
  }

  // Whole rows in [begin, end); those with very many occurrences are left to `leave(begin, end)`.
  template <typename T, Optimizer kOptimizer, Isa kIsa, typename Leave>
  FASTIMPL_INLINE void step_range(const BagTable& table, uint64_t base, int64_t begin, int64_t end, float* scratch,
                                  const Leave& leave) const {
    const int64_t ahead = rows_ahead(table.row_bytes());
    const bool is_plain = !table.mean && batch.weights == nullptr;
    float* const sum = scratch + table.dim;
    for (int64_t at = begin; at < end;) {
      const int64_t last = segment_end(at, end);
      if (last - at >= long_row) {
        leave(at, last);
        at = last;
        continue;
      }
      for (int64_t i = at + ahead; i < std::min(last + ahead, end); ++i)
        fetch<kOptimizer>(table, base, i, found.row(i) != found.row(i - 1));
      const float* total = sum;
      if (last == at + 1 && is_plain) {
        total = grad_of(found.payload(at));
      } else {
        sum_columns(table, at, last, 0, table.dim, sum);
      }
      step<T, kOptimizer, kIsa>(table, static_cast<int64_t>(found.row(at) - base), total, scratch);
      at = last;
    }
  }
};

// Occurrences [begin, end) cut into parts where rows change.
inline std::vector<int64_t> row_cuts(const Occurrences& found, int64_t count, int64_t part_count) {
  std::vector<int64_t> cuts{0};
  for (int64_t part = 1; part < part_count; ++part) {
    const int64_t at = std::max(cuts.back(), count * part / part_count);
    const bool starts = at == 0 || at == count || found.row(at) != found.row(at - 1);
    // The first word of the next row, found by bisection: a row may have any number of occurrences.
    const uint64_t next = starts ? 0 : (found.row(at) + 1) << found.payload_bits;
    cuts.push_back(
        starts ? at : std::lower_bound(found.sorted.get() + at, found.sorted.get() + count, next) - found.sorted.get());
  }
  cuts.push_back(count);
  return cuts;
}

struct Span {
  int64_t begin, end;
  size_t table;
};

// Calls `body(type, formula, unit)`, three tags, inside of a function for the unit.
template <typename Body>
void with_kernel(Float type, Optimizer optimizer, Isa isa, const Body& body) {
  with_type(type, [&](auto tag) {
    with_formula(optimizer,
                 [&](auto formula) { run_on(isa, [&](auto unit) FASTIMPL_INLINED { body(tag, formula, unit); }); });
  });
}

// Rows with very many occurrences: one after the other, each by blocks of columns.
inline void step_long_row(const Parallel& parallel, const StepJob& job, const Span& row, uint64_t base,
                          Optimizer optimizer, Isa isa) {
  const BagTable& table = job.batch.tables[row.table];
  std::vector<float> scratch(static_cast<size_t>(2 * table.dim));
  float* const sum = scratch.data() + table.dim;
  const int64_t lines = (table.dim + kLineColumns - 1) / kLineColumns,
                ways = std::max<int64_t>(1, parallel.thread_count);
  const int64_t width = (lines + ways - 1) / ways * kLineColumns;
  parallel.run((table.dim + width - 1) / width, [&](int64_t block) {
    const int64_t column = block * width, count = std::min(width, table.dim - column);
    run_on(isa,
           [&](auto) FASTIMPL_INLINED { job.sum_columns(table, row.begin, row.end, column, count, sum + column); });
  });
  with_kernel(table.type, optimizer, isa, [&](auto type, auto formula, auto unit) FASTIMPL_INLINED {
    job.step<decltype(type), formula(), unit()>(table, static_cast<int64_t>(job.found.row(row.begin) - base), sum,
                                                scratch.data());
  });
}

// One step of every row that was found.
inline void step_rows(const Parallel& parallel, const Bags& batch, const Occurrences& found, const float* grad,
                      Optimizer optimizer, const Hyper& hyper, Isa isa) {
  const StepJob job{batch, found, grad, hyper,
                    std::max(kLongRow, batch.id_count / (4 * std::max<int64_t>(1, parallel.thread_count)))};
  const int64_t part_count =
      parallel.thread_count <= 1
          ? 1
          : std::max<int64_t>(1, std::min(16 * parallel.thread_count, batch.id_count / kPartIds));
  const std::vector<int64_t> cuts = row_cuts(found, batch.id_count, part_count);
  std::mutex guard;
  std::vector<Span> long_rows;
  parallel.run(part_count, [&](int64_t part) {
    const int64_t end = cuts[static_cast<size_t>(part + 1)];
    for (int64_t at = cuts[static_cast<size_t>(part)]; at < end;) {
      const auto t =
          static_cast<size_t>(std::upper_bound(found.table_begins.begin(), found.table_begins.end() - 1, at) -
                              found.table_begins.begin() - 1);
      const BagTable& table = batch.tables[t];
      const int64_t last = std::min(end, found.table_begins[t + 1]);
      std::vector<float> scratch(static_cast<size_t>(2 * table.dim));
      const auto leave = [&](int64_t first, int64_t stop) {
        const std::lock_guard<std::mutex> held(guard);
        long_rows.push_back({first, stop, t});
      };
      with_kernel(table.type, optimizer, isa, [&](auto type, auto formula, auto unit) FASTIMPL_INLINED {
        job.step_range<decltype(type), formula(), unit()>(table, found.bases[t], at, last, scratch.data(), leave);
      });
      at = last;
    }
  });
  for (const Span& row : long_rows) step_long_row(parallel, job, row, found.bases[row.table], optimizer, isa);
}

// One step of every row that occurs; `grad` is [bag_count, width]. Offsets and ids have been checked, and `fits_words`.
template <typename Id>
void step_bags(const Parallel& parallel, const BagBatch<Id>& batch, const float* grad, Optimizer optimizer,
               const Hyper& hyper, Isa isa) {
  if (batch.id_count == 0) return;
  step_rows(parallel, batch, sort_occurrences(parallel, batch), grad, optimizer, hyper, isa);
}

}  // namespace fastimpl::pipeline
