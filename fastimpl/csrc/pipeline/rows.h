// Sums of rows in float32: each operation is a single float32 operation, so that neither the vector unit nor the thread
// changes a bit. Compile without contraction.
#pragma once

#include "common/memory.h"
#include "common/sums.h"
#include "common/vectors.h"

namespace fastimpl::pipeline {

FASTIMPL_INLINE void divide_row(float* row, float divisor, int64_t dim) {
  for_elements(dim, [=](int64_t e) FASTIMPL_INLINED { row[e] = row[e] / divisor; });
}

// What an occurrence adds to a sum that starts at +0; the first one is added to that, which makes +0 of a -0.
template <typename Term>
FASTIMPL_INLINE void add_terms(float* sum, int64_t dim, bool is_first, const Term& term) {
  if (is_first) {
    for_elements(dim, [&](int64_t e) FASTIMPL_INLINED { sum[e] = 0.0F + term(e); });
  } else {
    for_elements(dim, [&](int64_t e) FASTIMPL_INLINED { sum[e] += term(e); });
  }
}

FASTIMPL_INLINE void add_row(float* sum, const float* row, int64_t dim, bool is_first) {
  add_terms(sum, dim, is_first, [=](int64_t e) FASTIMPL_INLINED { return row[e]; });
}

FASTIMPL_INLINE void add_scaled(float* sum, const float* row, float scale, int64_t dim, bool is_first) {
  add_terms(sum, dim, is_first, [=](int64_t e) FASTIMPL_INLINED { return scale * row[e]; });
}

// One pass where the processor converts: the row is added as it is read.
template <Isa kIsa>
FASTIMPL_INLINE void add_halves(float* sum, const uint16_t* row, int64_t dim, bool is_first) {
  int64_t e = 0;
#if defined(__x86_64__)
  if constexpr (kIsa == Isa::kAvx512) {
    for (; !is_first && e + 16 <= dim; e += 16) {
      asm("vcvtph2ps %1, %%zmm0\n\tvaddps %0, %%zmm0, %%zmm0\n\tvmovups %%zmm0, %0"
          : "+m"(*reinterpret_cast<Block<64>*>(sum + e))
          : "m"(*reinterpret_cast<const Block<32>*>(row + e))
          : "xmm0");
    }
  }
  if constexpr (kIsa != Isa::kPlain) {
    for (; !is_first && e + 8 <= dim; e += 8) {
      asm("vcvtph2ps %1, %%ymm0\n\tvaddps %0, %%ymm0, %%ymm0\n\tvmovups %%ymm0, %0"
          : "+m"(*reinterpret_cast<Block<32>*>(sum + e))
          : "m"(*reinterpret_cast<const Block<16>*>(row + e))
          : "xmm0");
    }
  }
#endif
  if (is_first) {
    widen_halves<kIsa>(row, sum, dim);
    for_elements(dim, [=](int64_t i) FASTIMPL_INLINED { sum[i] = 0.0F + sum[i]; });
    return;
  }
  for (; e < dim; ++e) sum[e] += Fp16::widen(row[e]);
}

constexpr int64_t kLineBytes = 64;

FASTIMPL_INLINE void fetch_row(const void* row, int64_t bytes) {
  const auto* const first = static_cast<const uint8_t*>(row);
  for (int64_t at = 0; at < bytes; at += kLineBytes) fetch_line(first + at);
}

// Rows asked for ahead of their use: enough bytes under way to hide memory, at least two rows, not so many that lines
// are lost before they are used.
FASTIMPL_INLINE int64_t rows_ahead(int64_t row_bytes) {
  const int64_t wanted = 4096 / row_bytes;
  return wanted < 2 ? 2 : wanted > 32 ? 32 : wanted;
}

}  // namespace fastimpl::pipeline
