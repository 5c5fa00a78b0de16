// What every operator of the row store does with its arguments: checks, and torch's threads.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "common/parallel.h"
#include "kvstore/pool.h"

namespace fastimpl::kvstore {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline Parallel parallel_of() {
  return {static_cast<int64_t>(torch::stable::get_num_threads()),
          [](int64_t worker_count, const std::function<void(int64_t)>& work) {
            torch::stable::parallel_for(0, worker_count, 1, [&work](int64_t begin, int64_t end) {
              for (int64_t i = begin; i < end; ++i) work(i);
            });
          }};
}

inline void check(const Tensor& t, ScalarType type, int64_t dim, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == type && t.is_contiguous() && t.is_cpu() && t.dim() == dim, name,
                  ": not a contiguous CPU tensor of the dtype and rank");
}

inline const int64_t* ids_of(const Tensor& ids) {
  check(ids, ScalarType::Long, 1, "ids");
  STD_TORCH_CHECK(ids.numel() <= kSlotsMax, "ids: got ", ids.numel(), ", a batch holds at most ", kSlotsMax);
  return static_cast<const int64_t*>(ids.data_ptr());
}

}  // namespace fastimpl::kvstore
