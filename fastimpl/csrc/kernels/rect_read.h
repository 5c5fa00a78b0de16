// Reads part of a rectangle of a row-major tensor from a file: rows with their gaps through a window that stays in the
// core's cache, the rectangle taken out of each window. No torch header here.
#pragma once

#include <unistd.h>

#include <cerrno>

#include "kernels/rect_copy.h"

namespace fastimpl {

// Bytes of the rectangle that lie before byte `position` of the tensor.
inline int64_t rect_held_before(const Rect& r, int64_t position) {
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

struct ReadCounts {
  int64_t status = 0;  // 0, an errno, or kEndOfFile.
  int64_t calls = 0;
  int64_t bytes = 0;
};

constexpr int64_t kEndOfFile = -1;

inline int64_t read_fully(int file, uint8_t* target, int64_t count, int64_t offset, ReadCounts* counts) {
  while (count > 0) {
    const ssize_t got = pread(file, target, static_cast<size_t>(count), static_cast<off_t>(offset));
    ++counts->calls;
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    if (got == 0) return kEndOfFile;
    counts->bytes += got;
    target += got;
    offset += got;
    count -= got;
  }
  return 0;
}

// Fills dense[0, count) with bytes [skip, skip + count) of the rectangle; `base` is the file offset of the tensor.
inline ReadCounts rect_read(int file, int64_t base, const Rect& r, int64_t skip, int64_t count, uint8_t* dense, uint8_t* window, int64_t window_bytes) {
  ReadCounts counts;
  const int64_t end = count > 0 ? rect_locate(r, skip + count - 1) + 1 : 0;
  for (int64_t done = 0; done < count && counts.status == 0;) {
    const int64_t first = rect_locate(r, skip + done);
    const int64_t last = end - first < window_bytes ? end : first + window_bytes;
    const int64_t part = rect_held_before(r, last) - (skip + done);
    counts.status = read_fully(file, window, last - first, base + first, &counts);
    if (counts.status == 0) rect_copy<false>(window - first, dense + done, r, skip + done, part);
    done += part;
  }
  return counts;
}

}  // namespace fastimpl
