// Backward and update in one: occurrences are sorted by row, each row's gradients are summed in order of position, and
// the row takes one step. A row belongs to one thread; one with very many occurrences is summed by columns instead, so
// that the order of no sum depends on the number of threads.
#pragma once

#include "kv_sort.h"
#include "pipe_pool.h"
#include "pipe_update.h"

namespace fastimpl::pipe {

using kv::Scratch;

constexpr int kDigitBits = 11;
// Occurrences of one row from which on its columns are split.
constexpr int64_t kLongRow = 4096;
constexpr int64_t kColumnBlock = 64;

inline int bit_width(uint64_t value) { return value == 0 ? 0 : 64 - __builtin_clzll(value); }

// Sorts words by their bits from `low` to `high`, stably; the result is in either buffer.
inline uint64_t* sort_stably(const Parallel& parallel, uint64_t* words, uint64_t* spare, int64_t count, int low, int high) {
  const int pass_count = (high - low + kDigitBits - 1) / kDigitBits;
  std::vector<int64_t> begins((size_t{1} << kDigitBits) + 1);
  for (int pass = 0; pass < pass_count; ++pass) {
    const int first = low + (high - low) * pass / pass_count, last = low + (high - low) * (pass + 1) / pass_count;
    const uint64_t mask = (uint64_t{1} << (last - first)) - 1;
    kv::distribute(parallel, words, spare, count, static_cast<int64_t>(mask + 1), [&](int64_t i) { return static_cast<int64_t>((words[i] >> first) & mask); },
                   begins.data());
    std::swap(words, spare);
  }
  return words;
}

// An occurrence is a word: the row, counted through all tables, above what says which gradient it has: its bag, or its
// position where ids have weights.
struct Occurrences {
  Scratch<uint64_t> words, spare;
  Scratch<int32_t> bag_of;  // Of a position; empty without weights.
  uint64_t* sorted;
  int payload_bits;
  std::vector<int64_t> table_begins;  // In `sorted`.

  uint64_t row(int64_t at) const { return sorted[at] >> payload_bits; }
  uint64_t payload(int64_t at) const { return sorted[at] & ((uint64_t{1} << payload_bits) - 1); }
};

// Whether rows and payloads fit into a word, and bags into 32 bits.
template <typename Id>
bool fits_words(const BagBatch<Id>& batch) {
  unsigned __int128 row_count = 0;
  for (const BagTable& table : batch.tables) row_count += static_cast<uint64_t>(table.row_count);
  const int64_t payload_max = std::max(batch.all_bags(), batch.id_count);
  return row_count < uint64_t{1} << 62 && bit_width(static_cast<uint64_t>(row_count)) + bit_width(static_cast<uint64_t>(payload_max)) <= 64 &&
         batch.all_bags() <= INT32_MAX;
}

template <typename Id>
Occurrences sort_occurrences(const Parallel& parallel, const BagBatch<Id>& batch) {
  std::vector<uint64_t> bases;
  uint64_t row_count = 0;
  for (const BagTable& table : batch.tables) {
    bases.push_back(row_count);
    row_count += static_cast<uint64_t>(table.row_count);
  }
  const bool weighted = batch.weights != nullptr;
  const int payload_bits = bit_width(static_cast<uint64_t>(weighted ? batch.id_count : batch.all_bags()));
  Occurrences found{Scratch<uint64_t>(batch.id_count), Scratch<uint64_t>(batch.id_count), Scratch<int32_t>(weighted ? batch.id_count : 0), nullptr, payload_bits, {}};
  for_bags(parallel, batch.offsets, batch.feature_count(), batch.bag_count, [&](int64_t feature, int64_t first, int64_t last) {
    const uint64_t base = bases[static_cast<size_t>(batch.features[static_cast<size_t>(feature)].table)];
    for (int64_t bag = feature * batch.bag_count + first; bag < feature * batch.bag_count + last; ++bag) {
      for (int64_t at = batch.offsets[bag]; at < batch.offsets[bag + 1]; ++at) {
        const uint64_t row = base + static_cast<uint64_t>(batch.ids[at]);
        found.words[at] = row << payload_bits | static_cast<uint64_t>(weighted ? at : bag);
        if (weighted) found.bag_of[at] = static_cast<int32_t>(bag);
      }
    }
  });
  found.sorted = sort_stably(parallel, found.words.data(), found.spare.data(), batch.id_count, payload_bits, payload_bits + bit_width(row_count));
  for (const uint64_t base : bases) {
    const auto* const end = found.sorted + batch.id_count;
    found.table_begins.push_back(std::lower_bound(static_cast<const uint64_t*>(found.sorted), end, base << payload_bits) - found.sorted);
  }
  found.table_begins.push_back(batch.id_count);
  return found;
}

template <typename Id>
struct StepJob {
  const BagBatch<Id>& batch;
  const Occurrences& found;
  const float* grad;
  const Hyper& hyper;

  struct Source {
    const float* grad;
    float length, weight;
  };

  FASTIMPL_INLINE Source source(int64_t at) const {
    const auto payload = static_cast<int64_t>(found.payload(at));
    const int64_t bag = batch.weights == nullptr ? payload : found.bag_of[payload];
    const int64_t feature = bag / batch.bag_count;
    const float* const from = grad + (bag - feature * batch.bag_count) * batch.width + batch.features[static_cast<size_t>(feature)].column;
    return {from, static_cast<float>(batch.offsets[bag + 1] - batch.offsets[bag]), batch.weights == nullptr ? 1.0F : batch.weights[payload]};
  }

  int64_t segment_end(int64_t at, int64_t end) const {
    const uint64_t row = found.row(at);
    int64_t last = at + 1;
    while (last < end && found.row(last) == row) ++last;
    return last;
  }

  // Columns [column, column + count) of the sum over occurrences [begin, end).
  FASTIMPL_INLINE void sum_columns(const BagTable& table, int64_t begin, int64_t end, int64_t column, int64_t count, float* __restrict__ sum) const {
    const bool weighted = batch.weights != nullptr;
    clear_row(sum, count);
    for (int64_t at = begin; at < end; ++at) {
      const Source from = source(at);
      const float* __restrict__ const g = from.grad + column;
      if (table.mean && weighted) {
        for (int64_t e = 0; e < count; ++e) sum[e] += from.weight * (g[e] / from.length);
      } else if (table.mean) {
        for (int64_t e = 0; e < count; ++e) sum[e] += g[e] / from.length;
      } else if (weighted) {
        add_scaled(sum, g, from.weight, count);
      } else {
        add_row(sum, g, count);
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
      step_row<kOptimizer>(stored, sum, first, second, dim, hyper);
    } else {
      wide_row<T, kIsa>(stored, scratch, dim);
      step_row<kOptimizer>(scratch, sum, first, second, dim, hyper);
      narrow_row<T, kIsa>(scratch, stored, dim);
    }
  }

  template <Optimizer kOptimizer>
  FASTIMPL_INLINE void fetch(const BagTable& table, uint64_t base, int64_t at, bool fetches_row) const {
    const int64_t dim = table.dim;
    fetch_row(source(at).grad, dim * 4);
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
  FASTIMPL_INLINE void step_range(const BagTable& table, uint64_t base, int64_t begin, int64_t end, float* scratch, const Leave& leave) const {
    const int64_t ahead = rows_ahead(table.row_bytes());
    float* const sum = scratch + table.dim;
    for (int64_t at = begin; at < end;) {
      const int64_t last = segment_end(at, end);
      if (last - at >= kLongRow) {
        leave(at, last);
        at = last;
        continue;
      }
      for (int64_t i = at + ahead; i < std::min(last + ahead, end); ++i) fetch<kOptimizer>(table, base, i, found.row(i) != found.row(i - 1));
      sum_columns(table, at, last, 0, table.dim, sum);
      step<T, kOptimizer, kIsa>(table, static_cast<int64_t>(found.row(at) - base), sum, scratch);
      at = last;
    }
  }
};

struct Span {
  int64_t begin, end;
};

// One table's occurrences, cut where rows change.
inline std::vector<int64_t> row_cuts(const Occurrences& found, int64_t begin, int64_t end, int64_t part_count) {
  std::vector<int64_t> cuts{begin};
  for (int64_t part = 1; part < part_count; ++part) {
    const int64_t at = std::max(cuts.back(), begin + (end - begin) * part / part_count);
    // The first word of the next row, found by bisection: a row may have any number of occurrences.
    const uint64_t next = at < end ? (found.row(at) + 1) << found.payload_bits : 0;
    const bool starts = at == begin || at == end || found.row(at) != found.row(at - 1);
    cuts.push_back(starts ? at : std::lower_bound(found.sorted + at, found.sorted + end, next) - found.sorted);
  }
  cuts.push_back(end);
  return cuts;
}

template <typename T, Optimizer kOptimizer, typename Id>
void step_table(const Parallel& parallel, const StepJob<Id>& job, const BagTable& table, uint64_t base, Span span, Isa isa) {
  const int64_t part_count = parallel.thread_count <= 1 ? 1 : std::max<int64_t>(1, std::min(8 * parallel.thread_count, (span.end - span.begin) / 512));
  const std::vector<int64_t> cuts = row_cuts(job.found, span.begin, span.end, part_count);
  std::mutex guard;
  std::vector<Span> long_rows;
  parallel.run(part_count, [&](int64_t part) {
    const int64_t begin = cuts[static_cast<size_t>(part)], end = cuts[static_cast<size_t>(part + 1)];
    std::vector<float> scratch(static_cast<size_t>(2 * table.dim));
    const auto leave = [&](int64_t first, int64_t last) {
      const std::lock_guard<std::mutex> held(guard);
      long_rows.push_back({first, last});
    };
    run_on(isa, [&](auto unit) FASTIMPL_INLINED { job.template step_range<T, kOptimizer, unit()>(table, base, begin, end, scratch.data(), leave); });
  });
  std::vector<float> scratch(static_cast<size_t>(long_rows.empty() ? 0 : 2 * table.dim));
  float* const sum = scratch.data() + table.dim;
  for (const Span& row : long_rows) {
    parallel.run((table.dim + kColumnBlock - 1) / kColumnBlock, [&](int64_t block) {
      const int64_t column = block * kColumnBlock, count = std::min(kColumnBlock, table.dim - column);
      run_on(isa, [&](auto) FASTIMPL_INLINED { job.sum_columns(table, row.begin, row.end, column, count, sum + column); });
    });
    run_on(isa, [&](auto unit) FASTIMPL_INLINED {
      job.template step<T, kOptimizer, unit()>(table, static_cast<int64_t>(job.found.row(row.begin) - base), sum, scratch.data());
    });
  }
}

// One step of every row that occurs; `grad` is [bag_count, width]. Offsets and ids have been checked, and `fits_words`.
template <typename Id>
void step_bags(const Parallel& parallel, const BagBatch<Id>& batch, const float* grad, Optimizer optimizer, const Hyper& hyper, Isa isa) {
  if (batch.id_count == 0) return;
  const Occurrences found = sort_occurrences(parallel, batch);
  const StepJob<Id> job{batch, found, grad, hyper};
  uint64_t base = 0;
  for (size_t t = 0; t < batch.tables.size(); ++t) {
    const BagTable& table = batch.tables[t];
    const Span span{found.table_begins[t], found.table_begins[t + 1]};
    if (span.begin < span.end) {
      with_type(table.type, [&](auto type) {
        with_formula(optimizer, [&](auto formula) { step_table<decltype(type), formula()>(parallel, job, table, base, span, isa); });
      });
    }
    base += static_cast<uint64_t>(table.row_count);
  }
}

}  // namespace fastimpl::pipe
