// Checks and arguments that the CPU and CUDA launchers of the strided moves share.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include "checkpoint/strided.h"

namespace fastimpl::checkpoint {

struct StridedArgs {
  Strided shape;
  int64_t count;
};

inline StridedArgs strided_args(const torch::stable::Tensor& strided, int64_t start,
                                const torch::stable::Tensor& dense) {
  const int64_t width = static_cast<int64_t>(strided.element_size());
  const int64_t count = dense.numel() / width;
  STD_TORCH_CHECK(dense.numel() % width == 0, "dense: got ", dense.numel(), " bytes, not whole elements of ", width);
  STD_TORCH_CHECK(start >= 0 && start <= strided.numel() && count <= strided.numel() - start, "elements ", start, " + ",
                  count, " of ", strided.numel());
  StridedArgs args{{}, count};
  if (count == 0) return args;
  for (int64_t d = 0; d < strided.dim(); ++d) args.shape.add(strided.size(d), strided.stride(d));
  return args;
}

// Values move as integers of the element's width, so that every dtype and every NaN payload survives.
template <typename F>
inline void dispatch_width(size_t width, F&& body) {
  switch (width) {
    case 1: return body(uint8_t{});
    case 2: return body(uint16_t{});
    case 4: return body(uint32_t{});
    case 8: return body(uint64_t{});
    default: STD_TORCH_CHECK(false, "element width: got ", width, ", expected 1, 2, 4 or 8");
  }
}

}  // namespace fastimpl::checkpoint
