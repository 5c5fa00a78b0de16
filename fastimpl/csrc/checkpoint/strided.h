// Elements of a strided tensor in row-major order, to and from dense memory. Host and device share the functor.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FASTIMPL_BOTH __host__ __device__
#else
#define FASTIMPL_BOTH
#endif

namespace fastimpl::checkpoint {

// So many dimensions of two elements and more have as many elements as an int64 counts.
constexpr int kStridedDimMax = 62;

// Dimensions of one element are left out, and neighbours that lie in memory as one are one.
struct Strided {
  int64_t ndim = 0;
  int64_t size[kStridedDimMax] = {};
  int64_t stride[kStridedDimMax] = {};  // In elements; may be zero (expanded) but not negative.

  // The next dimension, from the outermost to the innermost; of a tensor that has elements.
  void add(int64_t elements, int64_t step) {
    if (elements == 1) return;
    if (ndim && stride[ndim - 1] == step * elements) {
      size[ndim - 1] *= elements;
      stride[ndim - 1] = step;
      return;
    }
    size[ndim] = elements;
    stride[ndim++] = step;
  }

  // Memory offset, in elements, of the flat row-major index.
  FASTIMPL_BOTH int64_t locate(int64_t flat) const {
    int64_t at = 0;
    for (int64_t d = ndim - 1; d >= 0; --d) {
      at += (flat % size[d]) * stride[d];
      flat /= size[d];
    }
    return at;
  }
};

// One element per index: dense[i] <-> strided[start + i]. Independent indices, so any order of calls is right.
template <typename T, bool kGather>
struct StridedMove {
  Strided shape;
  T* strided;
  T* dense;
  int64_t start;

  FASTIMPL_BOTH void operator()(int64_t i) const {
    T* const element = strided + shape.locate(start + i);
    if constexpr (kGather) {
      dense[i] = *element;
    } else {
      *element = dense[i];
    }
  }
};

// The same on the host, a row at a time: the division per element is paid once per row.
template <typename T, bool kGather>
inline void strided_move(const Strided& shape, T* strided, T* dense, int64_t start, int64_t count) {
  const int64_t inner = shape.ndim ? shape.size[shape.ndim - 1] : 1;
  const int64_t step = shape.ndim ? shape.stride[shape.ndim - 1] : 0;
  int64_t done = 0;
  while (done < count) {
    const int64_t flat = start + done;
    T* const row = strided + shape.locate(flat);
    int64_t n = inner - flat % inner;
    if (n > count - done) n = count - done;
    T* const out = dense + done;
    for (int64_t i = 0; i < n; ++i) {
      if constexpr (kGather) {
        out[i] = row[i * step];
      } else {
        row[i * step] = out[i];
      }
    }
    done += n;
  }
}

}  // namespace fastimpl::checkpoint
