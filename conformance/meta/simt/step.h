// A batch for the fused step, what it gives by the book, and the same on the device.
#pragma once

#include <simt/prove.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "common/sums.h"
#include "pipeline/step_few_kernel.h"
#include "pipeline/step_kernel.h"

using namespace fastimpl;
using namespace fastimpl::pipeline;
using simt::prover::Array;
using simt::prover::Trial;

namespace step_cases {

constexpr Hyper kHyper{0.1F, 1e-3F, 0.9F, 0.1F, 0.99F, 0.01F, 0.2F, 0.7F};

struct Shapes {
  bool has_quads, has_weights;
  int64_t tables, dim_max, bags, ids_max, hot;  // `hot`: how many ids are those of one row.
  int64_t hot_id = 0;                           // -1: of none.
};

struct BookTable {
  uint8_t* rows;
  int64_t row_count, dim;
  Float type;
  bool mean;
  float *momentum1, *momentum2;
  int64_t base;

  float load(int64_t element) const {
    if (type == Float::kFloat32) return reinterpret_cast<const float*>(rows)[element];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(rows)[element];
    return type == Float::kFloat16 ? from_float16(bits) : from_bfloat16(bits);
  }
  void store(int64_t element, float value) const {
    if (type == Float::kFloat32) {
      reinterpret_cast<float*>(rows)[element] = value;
    } else {
      reinterpret_cast<uint16_t*>(rows)[element] = type == Float::kFloat16 ? to_float16(value) : to_bfloat16(value);
    }
  }
};

template <typename T>
std::vector<T> floats_of(Trial& trial, int64_t count, double low) {
  std::vector<T> values(static_cast<size_t>(count));
  // As many bits as a float has: sums in another order are other sums.
  for (T& value : values) value = static_cast<T>(low + static_cast<double>(trial.random.below(1 << 24)) / (1 << 22));
  return values;
}

// One case: a batch, what a step of it gives by the book, and the same on the device.
template <Optimizer kOptimizer>
struct Case {
  Trial& trial;
  Shapes shapes;
  std::vector<BookTable> tables;
  std::vector<int64_t> columns;
  std::vector<std::vector<uint8_t>> rows, rows_before;
  std::vector<std::vector<float>> first, second, first_before, second_before;
  std::vector<int64_t> ids, offsets{0}, sorted, positions, bags, begins;
  std::vector<float> weights, lengths, grad;
  int64_t width = 0, row_count = 0, dim_max = 1;

  Case(Trial& given, const Shapes& wanted) : trial(given), shapes(wanted) {
    make_tables();
    make_batch();
    step_on_host();
  }

  void make_tables() {
    for (int64_t t = 0; t < shapes.tables; ++t) {
      int64_t dim = trial.random.between(1, shapes.dim_max);
      if (shapes.has_quads) dim = (dim + 3) / 4 * 4;
      const int64_t count = trial.random.between(1, 6);
      const auto type = static_cast<Float>(trial.random.below(3));
      std::vector<uint8_t> bytes(static_cast<size_t>(count * dim * float_bytes(type)));
      const auto numbers = floats_of<float>(trial, count * dim, -2);
      narrow(type, numbers.data(), bytes.data(), count * dim);
      rows.push_back(bytes);
      first.push_back(floats_of<float>(trial, count * momentum1_width(kOptimizer, dim), 0));
      second.push_back(floats_of<float>(trial, count * momentum2_width(kOptimizer, dim), 0));
      tables.push_back({nullptr, count, dim, type, trial.random.below(2) == 1, nullptr, nullptr, row_count});
      columns.push_back(width);
      row_count += count;
      width += dim;
      dim_max = std::max(dim_max, dim);
    }
    rows_before = rows;
    first_before = first;
    second_before = second;
    for (size_t t = 0; t < tables.size(); ++t) {
      tables[t].rows = rows[t].data();
      tables[t].momentum1 = first[t].data();
      tables[t].momentum2 = second[t].data();
    }
  }

  void make_batch() {
    for (size_t f = 0; f < columns.size(); ++f) {
      for (int64_t b = 0; b < shapes.bags; ++b) {
        int64_t length = trial.random.between(0, shapes.ids_max);
        const bool is_hot = f == 0 && b == 0 && shapes.hot > 0;
        if (is_hot) length = shapes.hot;
        for (int64_t i = 0; i < length; ++i) {
          const auto count = static_cast<uint64_t>(tables[f].row_count);
          const bool is_outside = !is_hot && trial.random.below(8) == 0;
          ids.push_back(is_hot ? shapes.hot_id : is_outside ? -1 : static_cast<int64_t>(trial.random.below(count)));
        }
        offsets.push_back(offsets.back() + length);
      }
    }
    if (shapes.has_weights) weights = floats_of<float>(trial, static_cast<int64_t>(ids.size()), -1);
    grad = floats_of<float>(trial, shapes.bags * width, -2);
  }

  void step_on_host() {
    std::vector<int64_t> row_of(ids.size());
    for (int64_t bag = 0, at = 0; bag < static_cast<int64_t>(offsets.size()) - 1; ++bag) {
      const auto f = static_cast<size_t>(bag / shapes.bags), b = static_cast<size_t>(bag);
      for (; at < offsets[b + 1]; ++at) {
        bags.push_back(bag);
        const int64_t id = ids[static_cast<size_t>(at)];
        // An id that no table has is behind all rows.
        row_of[static_cast<size_t>(at)] = id >= 0 && id < tables[f].row_count ? tables[f].base + id : row_count;
        begins.push_back((bag % shapes.bags) * width + columns[f]);
        lengths.push_back(tables[f].mean ? static_cast<float>(offsets[b + 1] - offsets[b]) : 1);
      }
    }
    positions.resize(ids.size());
    std::iota(positions.begin(), positions.end(), 0);
    std::stable_sort(positions.begin(), positions.end(), [&](int64_t a, int64_t b) {
      return row_of[static_cast<size_t>(a)] < row_of[static_cast<size_t>(b)];
    });
    for (const int64_t position : positions) sorted.push_back(row_of[static_cast<size_t>(position)]);
    for (size_t at = 0; at < sorted.size(); ++at) {
      if (sorted[at] < row_count && (at == 0 || sorted[at] != sorted[at - 1])) step_row_on_host(at);
    }
  }

  // By the book: each occurrence of the row in order, then what the row shares, then each element.
  void step_row_on_host(size_t begin) {
    const auto f = static_cast<size_t>(bags[static_cast<size_t>(positions[begin])] / shapes.bags);
    BookTable& table = tables[f];
    const int64_t dim = table.dim, row = sorted[begin] - table.base;
    std::vector<float> sum(static_cast<size_t>(dim));
    for (size_t at = begin; at < sorted.size() && sorted[at] == sorted[begin]; ++at) {
      const auto position = static_cast<size_t>(positions[at]);
      for (int64_t e = 0; e < dim; ++e) {
        float g = grad[static_cast<size_t>(begins[position] + e)];
        if (table.mean) g = g / lengths[position];
        if (!weights.empty()) g = weights[position] * g;
        sum[static_cast<size_t>(e)] += g;
      }
    }
    float* const m1 = table.momentum1 + row * momentum1_width(kOptimizer, dim);
    float* const m2 = table.momentum2 + row * momentum2_width(kOptimizer, dim);
    const auto g = [&sum](int64_t e) { return sum[static_cast<size_t>(e)]; };
    float shared = 0;
    if (is_row_wise(kOptimizer))
      shared = row_share(kOptimizer, lane_sum(dim, g, g) / static_cast<float>(dim), m1, m2, kHyper);
    if (is_scaled(kOptimizer))
      shared = row_scale(dim, [&](int64_t e) { return table.load(row * dim + e); }, g, m1, m2, kHyper);
    for (int64_t e = 0; e < dim; ++e) {
      const float change = element_step(kOptimizer, g(e), shared, m1 + e, m2 + e, kHyper);
      table.store(row * dim + e, table.load(row * dim + e) - change);
    }
  }

  bool has_factors() const {
    return shapes.has_weights || std::any_of(tables.begin(), tables.end(), [](const BookTable& t) { return t.mean; });
  }

  template <int kVec, unsigned kLanesOfGroup>
  void prove(simt::Shape shape) {
    std::vector<StepTable> described;
    std::vector<Array<uint8_t>> device_rows;
    std::vector<Array<float>> device_first, device_second;
    for (size_t t = 0; t < tables.size(); ++t) {
      device_rows.push_back(trial.array<uint8_t>("rows", rows_before[t]));
      device_first.push_back(trial.array<float>("momentum1", first_before[t]));
      device_second.push_back(trial.array<float>("momentum2", second_before[t]));
      described.push_back(
          {device_rows[t], device_first[t], device_second[t], tables[t].dim, tables[t].base, tables[t].type});
    }
    const auto device_tables = trial.array<StepTable>("tables", described);
    // Its pointers are others in each run.
    trial.may_differ(device_tables);
    // Four bytes or eight, see plan_sort.
    const bool is_narrow = trial.random.below(2) == 0;
    const auto integers = [&](const char* name, const std::vector<int64_t>& values) {
      if (!is_narrow) return Integers{{}, trial.array<int64_t>(name, values), false};
      return Integers{trial.array<uint32_t>(name, {values.begin(), values.end()}), {}, true};
    };
    const StepBatch batch{device_tables,
                          integers("sorted rows", sorted),
                          integers("positions", positions),
                          static_cast<int64_t>(sorted.size()),
                          row_count,
                          trial.array<int64_t>("begins", begins),
                          trial.array<float>("lengths", lengths),
                          trial.array<float>("weights", weights),
                          trial.array<float>("grad", grad),
                          has_factors()};
    const auto long_rows = trial.uninitialized<int64_t>("long rows", static_cast<int64_t>(ids.size()) / kLongRun + 1);
    const auto long_count = trial.array<uint64_t>("long count", {0});
    trial.may_differ(long_rows);
    const auto others = trial.uninitialized<int64_t>("other rows", static_cast<int64_t>(ids.size()));
    const auto other_count = trial.array<uint64_t>("other count", {0});
    trial.may_differ(others);
    bool is_listed = false;
    if constexpr (kVec == 4 && !is_scaled(kOptimizer)) {
      using Few = StepFewRows<kOptimizer, kLanesOfGroup>;
      is_listed = !ids.empty() && trial.random.below(4) > 0;
      shape.shared_bytes = Few::kFloats * 4 * shape.threads / kLanesOfGroup;
      if (is_listed) trial.launch(Few{batch, kHyper, others, other_count}, shape);
    }
    shape.shared_bytes = row_floats(kOptimizer, dim_max) * 4 * shape.threads / kLanesOfGroup;
    const auto listed = is_listed ? others.global() : simt::Global<int64_t>();
    trial.launch(
        StepRows<kOptimizer, kVec, kLanesOfGroup>{batch, kHyper, dim_max, listed, other_count, long_rows, long_count},
        shape);
    using Long = StepLongRows<kOptimizer, kVec>;
    trial.launch(Long{batch, kHyper, dim_max, long_rows, long_count}, {2, 32, Long::shared_floats(dim_max, 32) * 4});
    const uint64_t is_long = shapes.hot > kLongRun && shapes.hot_id >= 0 ? 1 : 0;
    trial.expect(long_count.values()[0] == is_long, "rows with more occurrences than a group takes are listed");
    for (size_t t = 0; t < tables.size(); ++t) {
      trial.expect_same(device_rows[t].values(), rows[t], "rows");
      trial.expect_same(device_first[t].values(), first[t], "momentum1");
      trial.expect_same(device_second[t].values(), second[t], "momentum2");
    }
  }
};

// Occurrences of one row: the most that a group of lanes takes, one more, whole turns of a block's ring, any number.
inline int64_t many(Trial& trial, int64_t which) {
  constexpr int64_t kRing = StepLongRows<Optimizer::kSgd, 1>::kRing;
  switch (which) {
    case 0: return kLongRun;
    case 1: return kLongRun + 1;
    case 2: return kLongRun + kRing;
    default: return kLongRun + 1 + static_cast<int64_t>(trial.random.below(40));
  }
}

// Rows in vectors of four: some to a warp, one to a warp, one to a block.
template <Optimizer kOptimizer>
void prove_vectors(Trial& trial, int64_t which) {
  const bool has_weights = trial.random.below(2) == 1;
  switch (which % 3) {
    case 0: return Case<kOptimizer>(trial, {true, has_weights, 2, 40, 3, 9, 0}).template prove<4, 8>({2, 64});
    case 1: {
      // One row with many occurrences, or many rows with few.
      const Shapes hot{true, has_weights, 1, 140, 2, 3, 40}, cold{true, has_weights, 3, 136, 3, 5, 0};
      return Case<kOptimizer>(trial, which / 3 == 1 ? cold : hot).template prove<4, 32>({1, 64});
    }
    default: {
      const Shapes shapes{true, has_weights, 1, 8, 2, 0, many(trial, which / 3), which / 3 == 3 ? -1 : 0};
      return Case<kOptimizer>(trial, shapes).template prove<4, 8>({1, 32});
    }
  }
}

// Rows of any width.
template <Optimizer kOptimizer>
void prove_elements(Trial& trial, int64_t which) {
  const bool has_weights = trial.random.below(2) == 1;
  const bool is_hot = which % 2 == 1;
  const Shapes shapes{false, has_weights, 3, 11, 2, is_hot ? 0 : 12, is_hot ? many(trial, which / 2) : 0};
  Case<kOptimizer>(trial, shapes).template prove<1, 32>({1, 32});
}

template <Optimizer kOptimizer>
void prove_all(Trial& trial) {
  const int64_t number = trial.case_number / 2;
  trial.case_number % 2 == 0 ? prove_vectors<kOptimizer>(trial, number) : prove_elements<kOptimizer>(trial, number);
}

}  // namespace step_cases
