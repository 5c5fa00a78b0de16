// The fused optimizers: duplicates are reduced first, then each row takes one step. The formulas, and the order of
// every rounding, are those of refimpl.optimizers; compile without contraction.
#pragma once

#include <cmath>

#include "kv_evict.h"

namespace fastimpl::kv {

struct Hyper {
  float lr, eps, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, root_correction;
};

// Values of one row in float32: gradient, weight, momentum1, momentum2, each `dim` wide.
struct RowValues {
  float *grad, *weight, *momentum1, *momentum2;
};

inline float mean_square(const float* grad, int64_t dim) {
  float lanes[8] = {};
  int64_t e = 0;
  for (; e + 8 <= dim; e += 8) {
    for (int64_t lane = 0; lane < 8; ++lane) lanes[lane] += grad[e + lane] * grad[e + lane];
  }
  for (int64_t lane = 0; e + lane < dim; ++lane) lanes[lane] += grad[e + lane] * grad[e + lane];
  return fold_lanes(lanes) / static_cast<float>(dim);
}

inline void adagrad_step(const RowValues& v, int64_t dim, const Hyper& h) {
  for (int64_t e = 0; e < dim; ++e) {
    v.momentum1[e] += v.grad[e] * v.grad[e];
    v.weight[e] -= (h.lr * v.grad[e]) / (std::sqrt(v.momentum1[e]) + h.eps);
  }
}

inline void rowwise_adagrad_step(const RowValues& v, int64_t dim, const Hyper& h) {
  v.momentum1[0] += mean_square(v.grad, dim);
  const float denominator = std::sqrt(v.momentum1[0]) + h.eps;
  for (int64_t e = 0; e < dim; ++e) v.weight[e] -= (h.lr * v.grad[e]) / denominator;
}

inline void adam_step(const RowValues& v, int64_t dim, const Hyper& h) {
  for (int64_t e = 0; e < dim; ++e) {
    v.momentum1[e] = h.beta1 * v.momentum1[e] + h.one_minus_beta1 * v.grad[e];
    v.momentum2[e] = h.beta2 * v.momentum2[e] + h.one_minus_beta2 * (v.grad[e] * v.grad[e]);
    v.weight[e] -= (h.step_size * v.momentum1[e]) / (std::sqrt(v.momentum2[e]) / h.root_correction + h.eps);
  }
}

inline void partial_rowwise_adam_step(const RowValues& v, int64_t dim, const Hyper& h) {
  v.momentum2[0] = h.beta2 * v.momentum2[0] + h.one_minus_beta2 * mean_square(v.grad, dim);
  const float denominator = std::sqrt(v.momentum2[0]) / h.root_correction + h.eps;
  for (int64_t e = 0; e < dim; ++e) {
    v.momentum1[e] = h.beta1 * v.momentum1[e] + h.one_minus_beta1 * v.grad[e];
    v.weight[e] -= (h.step_size * v.momentum1[e]) / denominator;
  }
}

inline void update_row(const RowFormat& format, uint8_t* row, const RowValues& v, const Hyper& h) {
  const int64_t dim = format.dim;
  widen(format.weight_type, row + kHeaderBytes, v.weight, dim);
  widen(format.momentum1.type, row + format.momentum1.offset_bytes, v.momentum1, format.momentum1.count);
  widen(format.momentum2.type, row + format.momentum2.offset_bytes, v.momentum2, format.momentum2.count);
  switch (format.optimizer) {
    case Optimizer::kNone: return;
    case Optimizer::kSgd:
      for (int64_t e = 0; e < dim; ++e) v.weight[e] -= h.lr * v.grad[e];
      break;
    case Optimizer::kAdagrad: adagrad_step(v, dim, h); break;
    case Optimizer::kRowwiseAdagrad: rowwise_adagrad_step(v, dim, h); break;
    case Optimizer::kAdam: adam_step(v, dim, h); break;
    case Optimizer::kPartialRowwiseAdam: partial_rowwise_adam_step(v, dim, h); break;
  }
  narrow(format.weight_type, v.weight, row + kHeaderBytes, dim);
  narrow(format.momentum1.type, v.momentum1, row + format.momentum1.offset_bytes, format.momentum1.count);
  narrow(format.momentum2.type, v.momentum2, row + format.momentum2.offset_bytes, format.momentum2.count);
}

// One step on the rows of a batch with gradients [count, dim]. Each row's sum starts at +0 and adds in ascending
// position, so that no thread count changes a bit.
inline void update_rows(Table& table, const Parallel& parallel, const int64_t* ids, int64_t count, const float* grads, const Hyper& hyper,
                        Change change) {
  const RowFormat& format = table.format;
  RowPool& pool = table.rows.pool;
  std::vector<uint64_t> order(static_cast<size_t>(count)), spare(static_cast<size_t>(count));
  const int64_t group_limit = std::max<int64_t>(table.rows.shard_count(), 1);
  std::vector<float> scratch(static_cast<size_t>(4 * format.dim * group_limit));
  auto inserted = insert_rows(table, parallel, ids, count, {0, 0}, change.now);
  const auto& [grouped, slots, before] = inserted.found;
  const auto body = [&, &grouped = grouped, &slots = slots](int64_t group) {
    const int64_t begin = grouped.begins[static_cast<size_t>(group)], size = grouped.begins[static_cast<size_t>(group + 1)] - begin;
    uint64_t* const words = order.data() + begin;
    for (int64_t i = 0; i < size; ++i) words[i] = static_cast<uint64_t>(slots[begin + i]) << 32 | static_cast<uint64_t>(grouped.position(begin + i));
    sort_large(words, spare.data() + begin, size);
    float* const floats = scratch.data() + 4 * format.dim * group;
    const RowValues values{floats, floats + format.dim, floats + 2 * format.dim, floats + 3 * format.dim};
    for (int64_t i = 0; i < size;) {
      uint8_t* const row = pool.at(static_cast<int64_t>(words[i] >> 32));
      std::fill_n(values.grad, format.dim, 0.0F);
      for (const uint64_t slot = words[i] >> 32; i < size && words[i] >> 32 == slot; ++i) {
        const float* const grad = grads + static_cast<int64_t>(words[i] & 0xFFFFFFFF) * format.dim;
        for (int64_t e = 0; e < format.dim; ++e) values.grad[e] += grad[e];
        visit_header(format, row, change.now);
      }
      if (i + 4 < size) {
        const uint8_t* const next = pool.at(static_cast<int64_t>(words[i + 4] >> 32));
        prefetch_lines(next, next + pool.stride());
      }
      update_row(format, row, values, hyper);
      pool.set_version(row, change.version);
    }
  };
  parallel.run(grouped.group_count(), body);
  remove_excess(table, inserted, change);
}

}  // namespace fastimpl::kv
