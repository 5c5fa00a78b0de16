// CUDA launchers of the strided moves: part of a strided tensor into a dense device buffer, ready for one copy to the
// host.
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "checkpoint/args.h"
#include "common/current_stream.h"

namespace {

using namespace fastimpl;
using namespace fastimpl::checkpoint;

using torch::stable::Tensor;

constexpr int kThreads = 256;

template <typename Body>
__global__ void for_each_index(Body body, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) body(i);
}

template <bool kGather>
void strided_cuda(const Tensor& strided, int64_t start, const Tensor& dense) {
  STD_TORCH_CHECK(dense.scalar_type() == torch::headeronly::ScalarType::Byte && dense.is_contiguous() &&
                      dense.is_cuda() && dense.get_device() == strided.get_device(),
                  "dense must be a contiguous uint8 tensor on the same device");
  const auto args = strided_args(strided, start, dense);
  if (args.count == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(strided.get_device_index());
  auto* const stream = static_cast<cudaStream_t>(current_stream(strided.get_device()));
  const int64_t blocks = (args.count + kThreads - 1) / kThreads;
  const auto grid = static_cast<unsigned>(blocks < 65535 ? blocks : 65535);
  dispatch_width(strided.element_size(), [&](auto zero) {
    using T = decltype(zero);
    const StridedMove<T, kGather> body{args.shape, static_cast<T*>(strided.data_ptr()),
                                       static_cast<T*>(dense.data_ptr()), start};
    for_each_index<<<grid, kThreads, 0, stream>>>(body, args.count);
  });
  const cudaError_t status = cudaGetLastError();
  STD_TORCH_CHECK(status == cudaSuccess, "launch failed: ", cudaGetErrorString(status));
}

void strided_gather(Tensor source, int64_t start, Tensor dense) { strided_cuda<true>(source, start, dense); }

void strided_scatter(Tensor target, int64_t start, Tensor dense) { strided_cuda<false>(target, start, dense); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(twinproof, CUDA, m) {
  m.impl("checkpoint_gather", TORCH_BOX(&strided_gather));
  m.impl("checkpoint_scatter", TORCH_BOX(&strided_scatter));
}
