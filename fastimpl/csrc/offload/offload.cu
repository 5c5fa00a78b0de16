// CUDA launchers of packing, many small device tensors into one slab, ready for one copy to the host, and back; and of
// the update of a chunk in its slot.
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>

#include "common/current_stream.h"
#include "common/simt.h"
#include "offload/args.h"
#include "offload/slab.h"
#include "offload/slot_plan.h"

namespace {

using namespace fastimpl;
using namespace fastimpl::offload;
using torch::stable::Tensor;

constexpr int kThreads = 256;
// Blocks of one entry: enough for a large tensor among small ones, few enough that these pay for none.
constexpr int64_t kBlocksMax = 64;

// One row of the grid for each entry; the table travels in the launch's arguments.
template <bool kGather>
__global__ void for_each_word(const __grid_constant__ PackBatch<kGather> batch) {
  const int entry = static_cast<int>(blockIdx.y);
  const int64_t count = batch.word_count(entry), step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t word = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; word < count; word += step)
    batch(entry, word);
}

template <bool kGather>
void move_all(const std::vector<Tensor>& tensors, const Tensor& slab, const std::vector<int64_t>& offsets) {
  STD_TORCH_CHECK(slab.is_cuda(), "slab: not on the device of the tensors");
  std::vector<PackEntry> entries(tensors.size());
  pack_entries(tensors, slab, offsets, entries.data());
  const torch::stable::accelerator::DeviceGuard guard(slab.get_device_index());
  auto* const stream = static_cast<cudaStream_t>(current_stream(slab.get_device()));
  for (size_t first = 0; first < entries.size(); first += kPackBatch) {
    const size_t count = std::min<size_t>(kPackBatch, entries.size() - first);
    PackBatch<kGather> batch{};
    batch.slab = static_cast<uint8_t*>(slab.data_ptr());
    int64_t words = 1;
    for (size_t i = 0; i < count; ++i) {
      batch.entries[i] = entries[first + i];
      words = std::max(words, batch.word_count(static_cast<int>(i)));
    }
    const int64_t blocks = std::min((words + kThreads - 1) / kThreads, kBlocksMax);
    for_each_word<kGather>
        <<<dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(count)), kThreads, 0, stream>>>(batch);
    const cudaError_t status = cudaGetLastError();
    STD_TORCH_CHECK(status == cudaSuccess, "launch failed: ", cudaGetErrorString(status));
  }
}

void pack_cuda(std::vector<Tensor> sources, Tensor slab, std::vector<int64_t> offsets) {
  move_all<true>(sources, slab, offsets);
}

void unpack_cuda(std::vector<Tensor> targets, Tensor slab, std::vector<int64_t> offsets) {
  move_all<false>(targets, slab, offsets);
}

// Queues every copy of a list on the current stream; host memory has to be pinned for copies that run beside others.
void copy_cuda(std::vector<Tensor> targets, std::vector<Tensor> sources) {
  int32_t device = -1;
  const std::vector<CopyRun> runs = copy_runs(targets, sources, [&](const Tensor& to, const Tensor& from, size_t i) {
    STD_TORCH_CHECK(to.is_cuda() || from.is_cuda(), "copy ", i, ": both sides are on the host");
    for (const Tensor* side : {&to, &from}) {
      STD_TORCH_CHECK(side->is_cuda() || side->is_cpu(), "copy ", i, ": neither on CUDA nor on the host");
      if (!side->is_cuda()) continue;
      if (device < 0) device = side->get_device_index();
      STD_TORCH_CHECK(side->get_device_index() == device, "copy ", i, ": on another device than those before");
    }
  });
  if (runs.empty()) return;
  const torch::stable::accelerator::DeviceGuard guard(device);
  auto* const stream = static_cast<cudaStream_t>(current_stream(device));
  for (const CopyRun& run : runs) {
    const cudaError_t status =
        cudaMemcpyAsync(run.to, run.from, static_cast<size_t>(run.size), cudaMemcpyDefault, stream);
    STD_TORCH_CHECK(status == cudaSuccess, "copy failed: ", cudaGetErrorString(status));
  }
  // What the pages of a slab wait for. Neighbours are few: an event each is cheap.
  const void* last = nullptr;
  for (const CopyRun& run : runs) {
    for (const void* home : {run.to_home, run.from_home}) {
      if (home != last) slabs().used(home, stream);
      last = home;
    }
  }
}

void slot_step_cuda(int64_t kind, std::vector<Tensor> params, std::vector<Tensor> grads, std::vector<Tensor> first,
                    std::vector<Tensor> second, std::vector<Tensor> third, std::vector<int64_t> hyper_of,
                    std::vector<double> hypers) {
  const SlotLists lists = slot_lists(kind, params, grads, {&first, &second, &third}, hyper_of, hypers);
  if (lists.entries.empty()) return;
  STD_TORCH_CHECK(params[0].is_cuda(), "params: not on a CUDA device");
  const torch::stable::accelerator::DeviceGuard guard(params[0].get_device_index());
  auto* const stream = static_cast<cudaStream_t>(current_stream(params[0].get_device()));
  with_slot(lists.kind, lists.type, [&](auto chosen, auto type) {
    launch_slots<decltype(chosen)::value, decltype(type)::value>(
        lists.entries, lists.hypers, kThreads, [&](const auto& kernel, int64_t blocks) {
          const cudaError_t status = simt::launch(kernel, {blocks, kThreads}, stream);
          STD_TORCH_CHECK(status == cudaSuccess, "launch failed: ", cudaGetErrorString(status));
        });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(twinproof, CUDA, m) {
  m.impl("offload_slot_step", TORCH_BOX(&slot_step_cuda));
  m.impl("offload_copy", TORCH_BOX(&copy_cuda));
  m.impl("offload_pack", TORCH_BOX(&pack_cuda));
  m.impl("offload_unpack", TORCH_BOX(&unpack_cuda));
}
