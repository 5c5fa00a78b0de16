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

namespace fastimpl::device {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;
using Tensors = std::vector<Tensor>;
using Ints = std::vector<int64_t>;

constexpr int kThreads = 256;

template <typename Body>
__global__ void for_each_index(Body body, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) body(i);
}

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

  template <typename T>
  const T* upload(const std::vector<T>& values) {
    const size_t bytes = values.size() * sizeof(T);
    auto* const there = scratch<uint8_t>(static_cast<int64_t>(std::max<size_t>(bytes, 1)), ScalarType::Byte);
    if (bytes > 0) check_cuda(cudaMemcpyAsync(there, values.data(), bytes, cudaMemcpyHostToDevice, stream_));
    return reinterpret_cast<const T*>(there);
  }

  template <typename Body>
  void launch(const Body& body, int64_t count) {
    if (count == 0) return;
    const auto blocks = static_cast<unsigned>(std::min<int64_t>((count + kThreads - 1) / kThreads, 1 << 20));
    for_each_index<<<blocks, kThreads, 0, stream_>>>(body, count);
    check_cuda(cudaGetLastError());
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

  void read_back(const int64_t* there, int64_t* here, int64_t count) {
    check_cuda(
        cudaMemcpyAsync(here, there, static_cast<size_t>(count) * sizeof(int64_t), cudaMemcpyDeviceToHost, stream_));
    check_cuda(cudaStreamSynchronize(stream_));
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

  // Positions by row, stably; the results lie in new scratch.
  void sort(const int64_t** rows, const int64_t** positions, int64_t count, int end_bit) {
    auto *const sorted = scratch<int64_t>(count, ScalarType::Long), *const moved =
                                                                        scratch<int64_t>(count, ScalarType::Long);
    size_t bytes = 0;
    check_cuda(
        cub::DeviceRadixSort::SortPairs(nullptr, bytes, *rows, sorted, *positions, moved, count, 0, end_bit, stream_));
    void* const space = scratch<uint8_t>(static_cast<int64_t>(bytes), ScalarType::Byte);
    check_cuda(
        cub::DeviceRadixSort::SortPairs(space, bytes, *rows, sorted, *positions, moved, count, 0, end_bit, stream_));
    *rows = sorted;
    *positions = moved;
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
