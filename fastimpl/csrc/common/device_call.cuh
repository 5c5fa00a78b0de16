// One call of a pipeline's operator on a CUDA device: its stream, its scratch, its launches, and what is checked alike.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
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

// A CPU-only torch lacks this symbol; weak, so that one library loads on both. It is only reached with CUDA tensors.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** ret_stream);

namespace fastimpl::device {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
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

// One call: its device and stream, and scratch that lives as long as it.
class Call {
 public:
  explicit Call(const Tensor& like) : like_(like), guard_(like.get_device_index()) {
    void* stream = nullptr;
    STD_TORCH_CHECK(
        aoti_torch_get_current_cuda_stream && aoti_torch_get_current_cuda_stream(like.get_device(), &stream) == 0,
        "no current CUDA stream");
    stream_ = static_cast<cudaStream_t>(stream);
  }

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

  // For kernels that have a launch of their own.
  cudaStream_t stream() const { return stream_; }

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
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
  Tensors held_;
};

inline void check_plain(const Tensor& t, const Tensor& like, ScalarType type, int64_t dim, const char* name) {
  STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == like.get_device_index() && t.is_contiguous() &&
                      t.scalar_type() == type && t.dim() == dim,
                  name, ": not a contiguous tensor of the device, dtype and rank");
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
