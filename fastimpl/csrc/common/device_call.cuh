// One call of a pipeline's operator on a CUDA device: its stream, its scratch, its launches, and what is checked alike.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#include <optional>
#include <vector>

#include "common/current_stream.h"
#include "common/simt.h"
#include "common/words_plan.h"

namespace fastimpl::device {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;
using Tensors = std::vector<Tensor>;
using Ints = std::vector<int64_t>;

inline void check_cuda(cudaError_t status) {
  STD_TORCH_CHECK(status == cudaSuccess, "CUDA: ", cudaGetErrorString(status));
}

// The caller's stream on the device of a tensor.
inline cudaStream_t stream_of(const Tensor& like) {
  return static_cast<cudaStream_t>(current_stream(like.get_device()));
}

// One call: its device and stream, and scratch that lives as long as it.
class Call {
 public:
  explicit Call(const Tensor& like) : like_(like), guard_(like.get_device_index()) { stream_ = stream_of(like); }

  template <typename T>
  T* scratch(int64_t count, ScalarType type) {
    held_.push_back(torch::stable::new_empty(like_, {count}, type));
    return static_cast<T*>(held_.back().data_ptr());
  }

  // Carried by launches: nothing is waited for, and a graph holds the values of this call.
  template <typename T>
  const T* upload(const std::vector<T>& values) {
    static_assert(std::is_trivially_copyable_v<T>, "bytes are all there is to it");
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(T)), count = words_for(bytes);
    auto* const there = scratch<int64_t>(std::max<int64_t>(count, 1), ScalarType::Long);
    store_words(values.data(), bytes, {reinterpret_cast<uint64_t*>(there), count},
                [&](const StoreWords& kernel) { run(kernel, {1, StoreWords::kThreads}); });
    return reinterpret_cast<const T*>(there);
  }

  // A kernel written with simt.h.
  template <typename Kernel>
  void run(const Kernel& kernel, simt::Shape shape) {
    check_cuda(simt::launch(kernel, shape, stream_));
  }

  template <typename T>
  void clear(T* there, int64_t count) {
    check_cuda(cudaMemsetAsync(there, 0, static_cast<size_t>(count) * sizeof(T), stream_));
  }

  template <typename T>
  void copy(const T* from, T* to, int64_t count) {
    check_cuda(cudaMemcpyAsync(to, from, static_cast<size_t>(count) * sizeof(T), cudaMemcpyDeviceToDevice, stream_));
  }

  // Running sums of `count` values, from the first on.
  void sum_up(const int64_t* values, int64_t* sums, int64_t count) {
    size_t bytes = 0;
    check_cuda(cub::DeviceScan::InclusiveSum(nullptr, bytes, values, sums, count, stream_));
    check_cuda(cub::DeviceScan::InclusiveSum(scratch<uint8_t>(static_cast<int64_t>(bytes), ScalarType::Byte), bytes,
                                             values, sums, count, stream_));
  }

  // `values` by `keys`, stably; the results lie in new scratch.
  template <typename Word>
  void sort(const Word** keys, const Word** values, int64_t count, int end_bit) {
    const ScalarType type = sizeof(Word) == 4 ? ScalarType::Int : ScalarType::Long;
    auto *const sorted = scratch<Word>(count, type), *const moved = scratch<Word>(count, type);
    size_t bytes = 0;
    check_cuda(
        cub::DeviceRadixSort::SortPairs(nullptr, bytes, *keys, sorted, *values, moved, count, 0, end_bit, stream_));
    void* const space = scratch<uint8_t>(static_cast<int64_t>(bytes), ScalarType::Byte);
    check_cuda(
        cub::DeviceRadixSort::SortPairs(space, bytes, *keys, sorted, *values, moved, count, 0, end_bit, stream_));
    *keys = sorted;
    *values = moved;
  }

 private:
  Tensor like_;
  DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
  Tensors held_;
};

// Whether a tensor is dense memory of the device of another.
inline bool lies_beside(const Tensor& t, const Tensor& like) {
  return t.is_cuda() && t.get_device_index() == like.get_device_index() && t.is_contiguous();
}

inline void check_plain(const Tensor& t, const Tensor& like, ScalarType type, int64_t dim, const char* name) {
  STD_TORCH_CHECK(lies_beside(t, like) && t.scalar_type() == type && t.dim() == dim, name,
                  ": not a contiguous tensor of the device, dtype and rank");
}

template <typename Body>
void with_ids(const Tensor& indices, const Body& body) {
  STD_TORCH_CHECK(indices.is_cuda() && indices.is_contiguous() && indices.dim() == 1,
                  "indices: not a contiguous 1-D CUDA tensor");
  if (indices.scalar_type() == ScalarType::Int) return body(int32_t{});
  STD_TORCH_CHECK(indices.scalar_type() == ScalarType::Long, "indices: not int32 or int64");
  body(int64_t{});
}

}  // namespace fastimpl::device
