// How a list of parameters is cut into launches, on the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "offload/slot_kernel.h"

namespace fastimpl::offload {

template <typename Kernel>
int64_t slot_blocks(int64_t count, int64_t threads) {
  const int64_t each = threads * Kernel::kTurns * Kernel::kVec;
  return (count + each - 1) / each;
}

// Adds one parameter to a launch that has room for it; false, and nothing added, if it has not. `named` are the numbers
// of the hyperparameters that the launch has.
template <typename Kernel>
bool add_to_slot(Kernel& kernel, int64_t& blocks, std::vector<int64_t>& named, const SlotTensors& tensors,
                 const std::vector<SlotHyper>& hypers, int64_t threads) {
  using Bits = typename Kernel::Bits;
  constexpr int64_t kBlocksMax = int64_t{1} << 30;
  if (kernel.entry_count == kSlotEntries || blocks > kBlocksMax) return false;
  auto found = std::find(named.begin(), named.end(), tensors.hyper);
  if (found == named.end()) {
    if (named.size() == kSlotHypers) return false;
    kernel.hypers[named.size()] = hypers[static_cast<size_t>(tensors.hyper)];
    found = named.insert(named.end(), tensors.hyper);
  }
  const auto memory = [&](void* data) { return Global<Bits>(static_cast<Bits*>(data), data ? tensors.count : 0); };
  uintptr_t bits = reinterpret_cast<uintptr_t>(tensors.param) | reinterpret_cast<uintptr_t>(tensors.grad);
  for (void* const state : tensors.states) bits |= reinterpret_cast<uintptr_t>(state);
  kernel.entries[kernel.entry_count++] = {memory(tensors.param),
                                          memory(tensors.states[0]),
                                          memory(tensors.states[1]),
                                          memory(tensors.states[2]),
                                          {static_cast<const Bits*>(tensors.grad), tensors.count},
                                          static_cast<int32_t>(blocks),
                                          static_cast<int16_t>(found - named.begin()),
                                          bits % 16 == 0};
  blocks += slot_blocks<Kernel>(tensors.count, threads);
  return true;
}

// Calls `launch(kernel, blocks)` for as many launches as the list needs: one, where it has at most kSlotEntries
// parameters of at most kSlotHypers hyperparameters.
template <SlotKind kKind, Float kType, typename Launch>
void launch_slots(const std::vector<SlotTensors>& list, const std::vector<SlotHyper>& hypers, int64_t threads,
                  const Launch& launch) {
  using Kernel = SlotStep<kKind, kType>;
  size_t next = 0;
  while (next < list.size()) {
    Kernel kernel{};
    int64_t blocks = 0;
    std::vector<int64_t> named;
    for (; next < list.size(); ++next) {
      if (list[next].count == 0) continue;
      if (!add_to_slot(kernel, blocks, named, list[next], hypers, threads)) break;
    }
    if (blocks > 0) launch(kernel, blocks);
  }
}

}  // namespace fastimpl::offload
