// Reads part of a rectangle of a row-major tensor from a file: rows with their gaps through a window that stays in the
// core's cache, the rectangle taken out of each window. No torch header here.
#pragma once

#include "checkpoint/rectangle_copy.h"
#include "common/files.h"

namespace fastimpl::checkpoint {

// Bytes of the rectangle that lie before byte `position` of the tensor.
inline int64_t held_before(const Rectangle& r, int64_t position) {
  int64_t stride = 1, inner = 1;
  for (int64_t d = 0; d < r.ndim; ++d) {
    stride *= r.shape[d];
    inner *= r.size[d];
  }
  int64_t held = 0, rest = position;
  for (int64_t d = 0; d < r.ndim; ++d) {
    stride /= r.shape[d];
    inner /= r.size[d];
    const int64_t index = rest / stride - r.offset[d];
    rest %= stride;
    if (index < 0) return held;
    if (index >= r.size[d]) return held + r.size[d] * inner;
    held += index * inner;
  }
  return held;
}

// Fills dense[0, count) with bytes [skip, skip + count) of the rectangle; `base` is the file offset of the tensor.
inline ReadCounts read_rectangle(int file, int64_t base, const Rectangle& r, int64_t skip, int64_t count,
                                 uint8_t* dense, uint8_t* window, int64_t window_bytes) {
  ReadCounts counts;
  const int64_t end = count > 0 ? locate(r, skip + count - 1) + 1 : 0;
  for (int64_t done = 0; done < count && counts.status == 0;) {
    const int64_t first = locate(r, skip + done);
    const int64_t last = end - first < window_bytes ? end : first + window_bytes;
    const int64_t part = held_before(r, last) - (skip + done);
    counts.status = read_fully(file, window, last - first, base + first, &counts);
    if (counts.status == 0) copy_rectangle<false>(window - first, dense + done, r, skip + done, part);
    done += part;
  }
  return counts;
}

}  // namespace fastimpl::checkpoint
