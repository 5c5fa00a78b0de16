// Checks that the launchers of the offload operators share.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <vector>

#include "common/regimes.h"
#include "offload/pack.h"

namespace fastimpl::offload {

// Whether the elements fill their memory without gaps, in any order of dimensions. Quadratic in the rank, which is
// small.
inline bool is_dense(const torch::stable::Tensor& t) {
  if (t.is_contiguous()) return true;
  int64_t expected = 1;
  for (int64_t done = 0; done < t.dim(); ++done) {
    bool found = false;
    for (int64_t d = 0; d < t.dim() && !found; ++d) {
      if (t.size(d) > 1 && t.stride(d) == expected) {
        expected *= t.size(d);
        found = true;
      }
    }
    if (!found) break;
  }
  return t.numel() <= 1 || expected == t.numel();
}

inline bool have_same_order(const torch::stable::Tensor& a, const torch::stable::Tensor& b) {
  if (a.dim() != b.dim()) return false;
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) != b.size(d) || (a.size(d) > 1 && a.stride(d) != b.stride(d))) return false;
  }
  return true;
}

// So many entries need no memory of the heap. The C library gives and takes back arrays of up to 1 KiB without a look
// at its other blocks; a larger one first merges all small blocks that were freed since, which were one or two a
// tensor.
constexpr int64_t kFewEntries = regime(64, 3);

// Tensors and their places in a slab, which have to be in order and apart: then any split between threads is right.
// Fills an entry for each, and returns the bytes of all.
inline int64_t pack_entries(const std::vector<torch::stable::Tensor>& tensors, const torch::stable::Tensor& slab,
                            const std::vector<int64_t>& offsets, PackEntry* entries) {
  STD_TORCH_CHECK(slab.scalar_type() == torch::headeronly::ScalarType::Byte && slab.is_contiguous() && slab.dim() == 1,
                  "slab: not a contiguous 1-D uint8 tensor");
  STD_TORCH_CHECK(tensors.size() == offsets.size(), "offsets: got ", offsets.size(), " for ", tensors.size(),
                  " tensors");
  int64_t end = 0, total = 0;
  const bool on_cpu = slab.is_cpu();
  const int64_t room = slab.numel();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const torch::stable::Tensor& t = tensors[i];
    const int64_t size = t.numel() * static_cast<int64_t>(t.element_size());
    STD_TORCH_CHECK(on_cpu ? t.is_cpu() : (t.is_cuda() && t.get_device_index() == slab.get_device_index()), "tensor ",
                    i, ": not on the device of the slab");
    STD_TORCH_CHECK(is_dense(t), "tensor ", i, ": has gaps");
    STD_TORCH_CHECK(offsets[i] >= end && offsets[i] <= room - size, "tensor ", i, ": bytes ", offsets[i], " + ", size,
                    " of a slab of ", room, ", of which ", end, " are taken");
    entries[i] = {static_cast<uint8_t*>(t.data_ptr()), offsets[i], size};
    end = offsets[i] + size;
    total += size;
  }
  return total;
}

}  // namespace fastimpl::offload
