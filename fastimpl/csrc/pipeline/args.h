// What the launchers of the pipeline's operators check alike, and the batch that kernels are given.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>

#include "pipeline/bags.h"

namespace fastimpl::pipeline {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using Ints = std::vector<int64_t>;

inline Parallel parallel_of() {
  return {static_cast<int64_t>(torch::stable::get_num_threads()),
          [](int64_t worker_count, const std::function<void(int64_t)>& work) {
            torch::stable::parallel_for(0, worker_count, 1, [&work](int64_t begin, int64_t end) {
              for (int64_t i = begin; i < end; ++i) work(i);
            });
          }};
}

inline Isa isa_of(int64_t isa) {
  const auto best = static_cast<int64_t>(best_isa());
  STD_TORCH_CHECK(isa >= -1 && isa <= best, "isa: got ", isa, ", this machine has up to ", best);
  return static_cast<Isa>(isa < 0 ? best : isa);
}

inline void check_plain(const Tensor& t, ScalarType type, int64_t dim, const char* name) {
  STD_TORCH_CHECK(t.is_cpu() && t.is_contiguous() && t.scalar_type() == type && t.dim() == dim, name,
                  ": not a contiguous CPU tensor of the dtype and rank");
}

inline Float float_type(const Tensor& t, const char* name) {
  if (t.scalar_type() == ScalarType::Float) return Float::kFloat32;
  if (t.scalar_type() == ScalarType::Half) return Float::kFloat16;
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::BFloat16, name, ": not float32, float16 or bfloat16");
  return Float::kBFloat16;
}

// Calls `body` with an id of the tensor's type.
template <typename Body>
auto with_ids(const Tensor& indices, const Body& body) {
  STD_TORCH_CHECK(indices.is_cpu() && indices.is_contiguous() && indices.dim() == 1,
                  "indices: not a contiguous 1-D CPU tensor");
  if (indices.scalar_type() == ScalarType::Int) return body(int32_t{});
  STD_TORCH_CHECK(indices.scalar_type() == ScalarType::Long, "indices: not int32 or int64");
  return body(int64_t{});
}

template <typename T>
const T* data_of(const Tensor& t) {
  return static_cast<const T*>(t.data_ptr());
}

// Bags of a feature. Raises where offsets are none, so that nothing is read by them.
inline int64_t check_offsets(const Parallel& parallel, const Tensor& offsets, int64_t feature_count, int64_t id_count) {
  check_plain(offsets, ScalarType::Long, 1, "offsets");
  const int64_t all = offsets.numel() - 1;
  STD_TORCH_CHECK(feature_count > 0 ? all >= 0 && all % feature_count == 0 : all == 0, "offsets: got ", offsets.numel(),
                  " for ", feature_count, " features, expected features * bags + 1");
  STD_TORCH_CHECK(are_offsets(parallel, data_of<int64_t>(offsets), all, id_count), "offsets: not ascending from 0 to ",
                  id_count);
  return feature_count > 0 ? all / feature_count : 0;
}

inline const float* weights_of(const std::optional<Tensor>& weights, int64_t id_count) {
  if (!weights) return nullptr;
  check_plain(*weights, ScalarType::Float, 1, "weights");
  STD_TORCH_CHECK(weights->numel() == id_count, "weights: got ", weights->numel(), " for ", id_count, " indices");
  // A batch without ids has no pointer, and needs none.
  static const float none = 0;
  return id_count == 0 ? &none : data_of<float>(*weights);
}

inline std::vector<BagTable> tables_of(const Tensors& tables, const Ints& means) {
  STD_TORCH_CHECK(means.size() == tables.size(), "means: got ", means.size(), " for ", tables.size(), " tables");
  std::vector<BagTable> result;
  for (size_t t = 0; t < tables.size(); ++t) {
    const Tensor& table = tables[t];
    STD_TORCH_CHECK(table.is_cpu() && table.is_contiguous() && table.dim() == 2 && table.size(1) >= 1, "table ", t,
                    ": not a contiguous CPU matrix with columns");
    result.push_back({static_cast<uint8_t*>(table.data_ptr()), table.size(0), table.size(1),
                      float_type(table, "tables"), means[t] != 0, nullptr, nullptr});
  }
  return result;
}

// The batch, of which offsets and ids have been checked against the tables.
template <typename Id>
BagBatch<Id> batch_of(const Parallel& parallel, const Tensors& tables, const Ints& feature_tables,
                      const Tensor& indices, const Tensor& offsets, const std::optional<Tensor>& weights,
                      const Ints& means) {
  BagBatch<Id> batch{{tables_of(tables, means),
                      {},
                      0,
                      0,
                      data_of<int64_t>(offsets),
                      weights_of(weights, indices.numel()),
                      indices.numel()},
                     data_of<Id>(indices)};
  Ints row_counts;
  for (const int64_t table : feature_tables) {
    STD_TORCH_CHECK(table >= 0 && table < static_cast<int64_t>(tables.size()), "feature_tables: got ", table, " of ",
                    tables.size(), " tables");
    batch.features.push_back({table, batch.width});
    batch.width += batch.tables[static_cast<size_t>(table)].dim;
    row_counts.push_back(batch.tables[static_cast<size_t>(table)].row_count);
  }
  batch.bag_count = check_offsets(parallel, offsets, batch.feature_count(), batch.id_count);
  if (batch.all_bags() == 0) return batch;
  const BadIds bad =
      find_bad_ids(parallel, batch.ids, batch.offsets, row_counts.data(), batch.feature_count(), batch.bag_count);
  STD_TORCH_CHECK(bad.count == 0, "indices: ", bad.count, " outside of their tables, the first at position ",
                  bad.first);
  return batch;
}

// The pooled matrix or its gradient.
inline void check_pooled(const Tensor& t, const Bags& batch, const char* name) {
  check_plain(t, ScalarType::Float, 2, name);
  STD_TORCH_CHECK(t.size(1) == batch.width && (batch.features.empty() || t.size(0) == batch.bag_count), name, ": got [",
                  t.size(0), ", ", t.size(1), "], expected [", batch.bag_count, ", ", batch.width, "]");
}

}  // namespace fastimpl::pipeline
