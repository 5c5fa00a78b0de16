// The fused optimizers on stored rows: duplicates are reduced first, then each row takes one step.
#pragma once

#include "common/step_row.h"
#include "kvstore/evict.h"

namespace fastimpl::kvstore {

// Values of one row in float32: gradient, weight, momentum1, momentum2, each `dim` wide.
struct RowValues {
  float *grad, *weight, *momentum1, *momentum2;
};

inline void update_row(const RowFormat& format, uint8_t* row, const RowValues& v, const Hyper& h) {
  const int64_t dim = format.dim;
  widen(format.weight_type, row + kHeaderBytes, v.weight, dim);
  widen(format.momentum1.type, row + format.momentum1.offset_bytes, v.momentum1, format.momentum1.count);
  widen(format.momentum2.type, row + format.momentum2.offset_bytes, v.momentum2, format.momentum2.count);
  if (format.optimizer == Optimizer::kNone) return;
  with_formula(format.optimizer, [&](auto formula) FASTIMPL_INLINED {
    step_row<decltype(formula)::value, Isa::kPlain>(v.weight, v.grad, v.momentum1, v.momentum2, dim, h);
  });
  narrow(format.weight_type, v.weight, row + kHeaderBytes, dim);
  narrow(format.momentum1.type, v.momentum1, row + format.momentum1.offset_bytes, format.momentum1.count);
  narrow(format.momentum2.type, v.momentum2, row + format.momentum2.offset_bytes, format.momentum2.count);
}

// One step on the rows of a batch with gradients [count, dim]. Each row's sum starts at +0 and adds in ascending
// position, so that no thread count changes a bit.
inline void update_rows(Table& table, const Parallel& parallel, const int64_t* ids, int64_t count, const float* grads,
                        const Hyper& hyper, Change change) {
  const RowFormat& format = table.format;
  RowPool& pool = table.rows.pool;
  std::vector<uint64_t> order(static_cast<size_t>(count)), spare(static_cast<size_t>(count));
  const int64_t group_limit = std::max<int64_t>(table.rows.shard_count(), 1);
  std::vector<float> scratch(static_cast<size_t>(4 * format.dim * group_limit));
  auto inserted = insert_rows(table, parallel, ids, count, {0, 0}, change.now);
  change.begin();
  const auto& [grouped, slots, before] = inserted.found;
  const auto body = [&, &grouped = grouped, &slots = slots](int64_t group) {
    const int64_t begin = grouped.begins[static_cast<size_t>(group)],
                  size = grouped.begins[static_cast<size_t>(group + 1)] - begin;
    uint64_t* const words = order.data() + begin;
    for (int64_t i = 0; i < size; ++i)
      words[i] = static_cast<uint64_t>(slots[begin + i]) << 32 | static_cast<uint64_t>(grouped.position(begin + i));
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

}  // namespace fastimpl::kvstore
