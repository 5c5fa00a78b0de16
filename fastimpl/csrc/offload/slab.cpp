// Operators of slabs: host memory that a tensor owns, with a deleter of ours.
#include "offload/slab.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "offload/args.h"

namespace fastimpl::offload {

#if defined(FASTIMPL_WITH_CUDA)
PinDriver* pin_driver();
#else
static PinDriver* pin_driver() { return nullptr; }
#endif

Slabs& slabs() {
  static Slabs* const made = new Slabs(pin_driver());
  return *made;
}

}  // namespace fastimpl::offload

namespace {

using namespace fastimpl::offload;
using torch::headeronly::DeviceType;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor make_slab(int64_t size, int64_t device, int64_t node) {
  STD_TORCH_CHECK(size > 0, "size: got ", size, ", expected 1 or more");
  STD_TORCH_CHECK(device >= -1 && node >= -1, "device, node: got ", device, ", ", node, ", expected -1 or more");
  int error = 0;
  uint8_t* const pages =
      slabs().make(static_cast<size_t>(size), static_cast<int>(device), static_cast<int>(node), &error);
  STD_TORCH_CHECK(pages != nullptr, "pinning ", size, " bytes: CUDA error ", error);
  const int64_t stride = 1;
  return torch::stable::from_blob(pages, {&size, 1}, {&stride, 1}, torch::stable::Device(DeviceType::CPU),
                                  ScalarType::Byte, [](void* data) { slabs().drop(data); });
}

// Whether it is one, whether it is pinned, the node its pages were asked for, and the error of that.
std::vector<int64_t> slab_facts(Tensor memory) {
  SlabFacts facts{};
  if (!slabs().facts(home_of(memory), &facts)) return {0, 0, -1, 0};
  return {1, facts.is_pinned, facts.node, facts.bind_error};
}

std::vector<int64_t> slab_counts() {
  const SlabCounts c = slabs().counts();
  return {c.live_count, c.live_bytes, c.made_count, c.freed_count, c.kept_count, c.wait_count};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(twinproof, CompositeExplicitAutograd, m) {
  m.impl("offload_slab", TORCH_BOX(&make_slab));
  m.impl("offload_slab_facts", TORCH_BOX(&slab_facts));
  m.impl("offload_slab_counts", TORCH_BOX(&slab_counts));
}
