// Pooling: the sum or the mean of the rows of each bag, and the gradient of the weights of its ids.
#pragma once

#include "pipeline/bags.h"

namespace fastimpl::pipeline {

template <typename T, Isa kIsa>
FASTIMPL_INLINE void add_stored(float* sum, const typename T::Bits* row, int64_t dim, bool is_first) {
  if constexpr (std::is_same_v<T, Fp16>) {
    add_halves<kIsa>(sum, row, dim, is_first);
  } else {
    add_terms(sum, dim, is_first, [=](int64_t e) FASTIMPL_INLINED { return T::widen(row[e]); });
  }
}

// Bags [first, last) of one feature. The sum starts at +0 and adds in order of position.
template <typename T, Isa kIsa, typename Id>
FASTIMPL_INLINE void pool_run(const BagBatch<Id>& batch, int64_t feature, int64_t first, int64_t last, float* out,
                              float* scratch) {
  const BagTable& table = batch.table_of(feature);
  const auto* const rows = reinterpret_cast<const typename T::Bits*>(table.rows);
  const int64_t dim = table.dim, row_bytes = table.row_bytes(), ahead = rows_ahead(row_bytes), width = batch.width;
  const int64_t* const offsets = batch.offsets + feature * batch.bag_count;
  const int64_t last_at = offsets[last];
  const Id* const ids = batch.ids;
  const float* const weights = batch.weights;
  float* const column = out + batch.features[static_cast<size_t>(feature)].column;
  for (int64_t at = offsets[first]; at < std::min(offsets[first] + ahead, last_at); ++at)
    fetch_row(rows + ids[at] * dim, row_bytes);
  for (int64_t bag = first; bag < last; ++bag) {
    float* const sum = column + bag * width;
    const int64_t begin = offsets[bag], end = offsets[bag + 1];
    if (begin == end) for_elements(dim, [=](int64_t e) FASTIMPL_INLINED { sum[e] = 0.0F; });
    for (int64_t at = begin; at < end; ++at) {
      if (at + ahead < last_at) fetch_row(rows + ids[at + ahead] * dim, row_bytes);
      const auto* const row = rows + ids[at] * dim;
      if (weights == nullptr) {
        add_stored<T, kIsa>(sum, row, dim, at == begin);
      } else {
        add_scaled(sum, wide_row<T, kIsa>(row, scratch, dim), weights[at], dim, at == begin);
      }
    }
    if (table.mean && end > begin) divide_row(sum, static_cast<float>(end - begin), dim);
  }
}

inline int64_t largest_dim(const std::vector<BagTable>& tables) {
  int64_t dim = 0;
  for (const BagTable& table : tables) dim = std::max(dim, table.dim);
  return dim;
}

// Writes [bag_count, width] floats; ids have been checked.
template <typename Id>
void pool_bags(const Parallel& parallel, const BagBatch<Id>& batch, float* out, Isa isa) {
  for_bags(parallel, batch.offsets, batch.feature_count(), batch.bag_count,
           [&](int64_t feature, int64_t first, int64_t last) {
             std::vector<float> scratch(static_cast<size_t>(batch.table_of(feature).dim));
             with_type(batch.table_of(feature).type, [&](auto type) {
               run_on(isa, [&](auto unit) FASTIMPL_INLINED {
                 pool_run<decltype(type), unit()>(batch, feature, first, last, out, scratch.data());
               });
             });
           });
}

template <typename T, Isa kIsa, typename Id>
FASTIMPL_INLINE void weight_gradient_run(const BagBatch<Id>& batch, int64_t feature, int64_t first, int64_t last,
                                         const float* grad, float* out, float* scratch) {
  const BagTable& table = batch.table_of(feature);
  const auto* const rows = reinterpret_cast<const typename T::Bits*>(table.rows);
  const int64_t dim = table.dim, row_bytes = table.row_bytes(), ahead = rows_ahead(row_bytes);
  const int64_t* const offsets = batch.offsets + feature * batch.bag_count;
  const int64_t last_at = offsets[last];
  const float* const column = grad + batch.features[static_cast<size_t>(feature)].column;
  float* const mean = scratch + dim;
  for (int64_t bag = first; bag < last; ++bag) {
    const float* bag_grad = column + bag * batch.width;
    const int64_t begin = offsets[bag], end = offsets[bag + 1];
    if (table.mean && end > begin) {
      std::copy_n(bag_grad, dim, mean);
      divide_row(mean, static_cast<float>(end - begin), dim);
      bag_grad = mean;
    }
    for (int64_t at = begin; at < end; ++at) {
      if (at + ahead < last_at) fetch_row(rows + batch.ids[at + ahead] * dim, row_bytes);
      out[at] = dot_row(bag_grad, wide_row<T, kIsa>(rows + batch.ids[at] * dim, scratch, dim), dim);
    }
  }
}

// out[position] = row_sum(gradient of the bag, after the mean's division, times the row); ids have been checked.
template <typename Id>
void bag_weight_gradients(const Parallel& parallel, const BagBatch<Id>& batch, const float* grad, float* out, Isa isa) {
  for_bags(parallel, batch.offsets, batch.feature_count(), batch.bag_count,
           [&](int64_t feature, int64_t first, int64_t last) {
             std::vector<float> scratch(static_cast<size_t>(2 * batch.table_of(feature).dim));
             with_type(batch.table_of(feature).type, [&](auto type) {
               run_on(isa, [&](auto unit) FASTIMPL_INLINED {
                 weight_gradient_run<decltype(type), unit()>(batch, feature, first, last, grad, out, scratch.data());
               });
             });
           });
}

}  // namespace fastimpl::pipeline
