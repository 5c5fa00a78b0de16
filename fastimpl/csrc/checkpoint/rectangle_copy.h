// Moves bytes between a rectangle of a row-major tensor, dense, and a window of the file in which the tensor lies.
//
// Row-major order of a rectangle's elements is their order in the file, so any part of a rectangle that a window sees
// is one dense run of the rectangle. No torch header here: sanitizers run on this file alone.
#pragma once

#include <cstdint>
#include <cstring>

namespace fastimpl::checkpoint {

constexpr int64_t kDimMax = 64;

// All sizes in bytes on the innermost dimension, in elements of the collapsed shape on the others.
struct Rectangle {
  int64_t ndim = 0;
  const int64_t* shape = nullptr;
  const int64_t* offset = nullptr;
  const int64_t* size = nullptr;
};

inline bool multiply_checked(int64_t a, int64_t b, int64_t* out) { return !__builtin_mul_overflow(a, b, out); }

// Whether the rectangle lies inside a tensor whose byte count fits in 63 bits.
inline bool is_valid(const Rectangle& r) {
  if (r.ndim < 1 || r.ndim > kDimMax) return false;
  int64_t total = 1;
  for (int64_t d = 0; d < r.ndim; ++d) {
    if (r.size[d] < 1 || r.offset[d] < 0 || r.shape[d] < 1 || r.size[d] > r.shape[d] ||
        r.offset[d] > r.shape[d] - r.size[d])
      return false;
    if (!multiply_checked(total, r.shape[d], &total)) return false;
  }
  return true;
}

inline int64_t rectangle_bytes(const Rectangle& r) {
  int64_t total = 1;
  for (int64_t d = 0; d < r.ndim; ++d) total *= r.size[d];
  return total;
}

// Offset inside the tensor of byte `position` of the rectangle.
inline int64_t locate(const Rectangle& r, int64_t position) {
  int64_t at = 0, stride = 1;
  for (int64_t d = r.ndim - 1; d >= 0; --d) {
    at += (r.offset[d] + position % r.size[d]) * stride;
    position /= r.size[d];
    stride *= r.shape[d];
  }
  return at;
}

template <bool kPlace>
inline void move_bytes(uint8_t* window, uint8_t* dense, int64_t count) {
  if constexpr (kPlace) {
    std::memcpy(window, dense, static_cast<size_t>(count));
  } else {
    std::memcpy(dense, window, static_cast<size_t>(count));
  }
}

// A run length known to the compiler becomes one load and one store instead of a call.
template <bool kPlace, int64_t kRun>
inline void move_rows_fixed(uint8_t* window, int64_t stride, uint8_t* dense, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) move_bytes<kPlace>(window + i * stride, dense + i * kRun, kRun);
}

template <bool kPlace>
inline void move_rows(uint8_t* window, int64_t stride, uint8_t* dense, int64_t run, int64_t rows) {
  switch (run) {
    case 1: return move_rows_fixed<kPlace, 1>(window, stride, dense, rows);
    case 2: return move_rows_fixed<kPlace, 2>(window, stride, dense, rows);
    case 4: return move_rows_fixed<kPlace, 4>(window, stride, dense, rows);
    case 8: return move_rows_fixed<kPlace, 8>(window, stride, dense, rows);
    case 16: return move_rows_fixed<kPlace, 16>(window, stride, dense, rows);
    case 32: return move_rows_fixed<kPlace, 32>(window, stride, dense, rows);
    default:
      for (int64_t i = 0; i < rows; ++i) move_bytes<kPlace>(window + i * stride, dense + i * run, run);
  }
}

// Moves bytes [skip, skip + count) of the rectangle. `window` is where byte 0 of the tensor would lie; only bytes of
// the rectangle are touched, so the caller checks that the first and the last of them are inside its memory.
template <bool kPlace>
inline void copy_rectangle(uint8_t* window, uint8_t* dense, const Rectangle& r, int64_t skip, int64_t count) {
  const int64_t run = r.size[r.ndim - 1];
  const int64_t stride = r.shape[r.ndim - 1];
  const int64_t rows_per_plane = r.ndim > 1 ? r.size[r.ndim - 2] : 1;
  const int64_t end = skip + count;
  while (skip < end) {
    uint8_t* const at = window + locate(r, skip);
    const int64_t within = skip % run;
    if (within != 0 || end - skip < run) {
      const int64_t part = run - within < end - skip ? run - within : end - skip;
      move_bytes<kPlace>(at, dense, part);
      dense += part;
      skip += part;
      continue;
    }
    const int64_t row = (skip / run) % rows_per_plane;
    int64_t rows = (end - skip) / run;
    if (rows > rows_per_plane - row) rows = rows_per_plane - row;
    move_rows<kPlace>(at, stride, dense, run, rows);
    dense += rows * run;
    skip += rows * run;
  }
}

}  // namespace fastimpl::checkpoint
