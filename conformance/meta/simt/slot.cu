// The update in a slot, of each kind and dtype, for a device.
#include "offload/slot_plan.h"

using namespace fastimpl;
using namespace fastimpl::offload;

cudaError_t update(SlotKind kind, Float type, const std::vector<SlotTensors>& list,
                   const std::vector<SlotHyper>& hypers, cudaStream_t stream) {
  cudaError_t status = cudaSuccess;
  with_slot(kind, type, [&](auto chosen, auto given) {
    launch_slots<decltype(chosen)::value, decltype(given)::value>(
        list, hypers, 256,
        [&](const auto& kernel, int64_t blocks) { status = simt::launch(kernel, {blocks, 256}, stream); });
  });
  return status;
}
