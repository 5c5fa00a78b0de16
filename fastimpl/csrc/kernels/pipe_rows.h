// Rows of three float types as float32, and one loop body for every vector unit: each operation is a single float32
// operation, so that neither the unit nor the thread changes a bit. Compile without contraction.
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "kv_memory.h"
#include "off_adam.h"

namespace fastimpl::pipe {

using kv::Float;
using offload::Bf16;
using offload::Fp16;
using offload::Fp32;
using offload::Isa;

template <Isa kValue>
using Unit = std::integral_constant<Isa, kValue>;

#if defined(__x86_64__)
template <typename Body>
__attribute__((target("avx2,f16c"))) void run_avx2(const Body& body) {
  body(Unit<Isa::kAvx2>());
}

template <typename Body>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,prefer-vector-width=512"))) void run_avx512(const Body& body) {
  body(Unit<Isa::kAvx512>());
}
#endif

// Calls `body(Unit<isa>())` in a function that may use the unit's instructions. The body, and what it calls, has to be
// inlined for that: FASTIMPL_INLINE, and for a lambda the attribute of the same name.
template <typename Body>
void run_on(Isa isa, const Body& body) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return run_avx512(body);
  if (isa == Isa::kAvx2) return run_avx2(body);
#endif
  (void)isa;
  body(Unit<Isa::kPlain>());
}

#define FASTIMPL_INLINED __attribute__((always_inline))

template <typename Body>
FASTIMPL_INLINE void with_type(Float type, const Body& body) {
  switch (type) {
    case Float::kFloat32: return body(Fp32());
    case Float::kFloat16: return body(Fp16());
    case Float::kBFloat16: return body(Bf16());
  }
}

// As bytes, for the operands of assembly.
template <int kBytes>
struct __attribute__((may_alias, packed)) Block {
  uint8_t bytes[kBytes];
};

// float16 is converted by the processor where it can, through memory alone: a vector type would need the unit's
// instructions in every function that it passes through. All round to nearest even, and NaNs keep their upper bits.
template <Isa kIsa>
FASTIMPL_INLINE void widen_halves(const uint16_t* from, float* __restrict__ to, int64_t count) {
  int64_t e = 0;
#if defined(__x86_64__)
  if constexpr (kIsa == Isa::kAvx512) {
    for (; e + 16 <= count; e += 16) {
      asm("vcvtph2ps %1, %%zmm0\n\tvmovups %%zmm0, %0"
          : "=m"(*reinterpret_cast<Block<64>*>(to + e))
          : "m"(*reinterpret_cast<const Block<32>*>(from + e))
          : "xmm0");
    }
  }
  if constexpr (kIsa != Isa::kPlain) {
    for (; e + 8 <= count; e += 8) {
      asm("vcvtph2ps %1, %%ymm0\n\tvmovups %%ymm0, %0"
          : "=m"(*reinterpret_cast<Block<32>*>(to + e))
          : "m"(*reinterpret_cast<const Block<16>*>(from + e))
          : "xmm0");
    }
  }
#endif
  for (; e < count; ++e) to[e] = Fp16::widen(from[e]);
}

template <Isa kIsa>
FASTIMPL_INLINE void narrow_halves(const float* from, uint16_t* __restrict__ to, int64_t count) {
  int64_t e = 0;
#if defined(__x86_64__)
  if constexpr (kIsa == Isa::kAvx512) {
    for (; e + 16 <= count; e += 16) {
      asm("vmovups %1, %%zmm0\n\tvcvtps2ph $0, %%zmm0, %0"
          : "=m"(*reinterpret_cast<Block<32>*>(to + e))
          : "m"(*reinterpret_cast<const Block<64>*>(from + e))
          : "xmm0");
    }
  }
  if constexpr (kIsa != Isa::kPlain) {
    for (; e + 8 <= count; e += 8) {
      asm("vmovups %1, %%ymm0\n\tvcvtps2ph $0, %%ymm0, %0"
          : "=m"(*reinterpret_cast<Block<16>*>(to + e))
          : "m"(*reinterpret_cast<const Block<32>*>(from + e))
          : "xmm0");
    }
  }
#endif
  for (; e < count; ++e) to[e] = kv::to_float16(from[e]);
}

// Calls `body(e)` for every element, without a dependence between them: whole blocks first, whose loop has no remainder.
template <typename Body>
FASTIMPL_INLINE void for_elements(int64_t dim, const Body& body) {
  constexpr int64_t kBlock = 32;
  int64_t begin = 0;
  for (; begin + kBlock <= dim; begin += kBlock) {
#pragma GCC ivdep
    for (int64_t e = 0; e < kBlock; ++e) body(begin + e);
  }
#pragma GCC ivdep
  for (int64_t e = begin; e < dim; ++e) body(e);
}

// The row in float32: itself, or widened into `scratch`.
template <typename T, Isa kIsa>
FASTIMPL_INLINE const float* wide_row(const typename T::Bits* row, float* scratch, int64_t dim) {
  if constexpr (std::is_same_v<T, Fp32>) {
    return row;
  } else if constexpr (std::is_same_v<T, Fp16>) {
    widen_halves<kIsa>(row, scratch, dim);
  } else {
    for_elements(dim, [=](int64_t e) FASTIMPL_INLINED { scratch[e] = T::widen(row[e]); });
  }
  return scratch;
}

template <typename T, Isa kIsa>
FASTIMPL_INLINE void narrow_row(const float* from, typename T::Bits* __restrict__ to, int64_t dim) {
  if constexpr (std::is_same_v<T, Fp16>) {
    narrow_halves<kIsa>(from, to, dim);
  } else {
    for_elements(dim, [=](int64_t e) FASTIMPL_INLINED { to[e] = T::narrow(from[e]); });
  }
}

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

// refimpl.optimizers.row_sum of the products: eight running sums, element e into sum e mod 8, then halves added.
inline float dot_plain(const float* a, const float* b, int64_t dim, float* lanes, int64_t from) {
  for (int64_t e = from; e < dim; ++e) lanes[e % 8] += a[e] * b[e];
  for (int half = 4; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

#if defined(__x86_64__)
// By itself, so that the eight sums stay in one register.
__attribute__((target("avx2"), noinline)) inline float dot_avx2(const float* a, const float* b, int64_t dim) {
  __m256 sums = _mm256_setzero_ps();
  int64_t e = 0;
  for (; e + 8 <= dim; e += 8) sums = _mm256_add_ps(sums, _mm256_mul_ps(_mm256_loadu_ps(a + e), _mm256_loadu_ps(b + e)));
  float lanes[8];
  _mm256_storeu_ps(lanes, sums);
  return dot_plain(a, b, dim, lanes, e);
}
#endif

template <Isa kIsa>
FASTIMPL_INLINE float dot_row(const float* a, const float* b, int64_t dim) {
#if defined(__x86_64__)
  if constexpr (kIsa != Isa::kPlain) return dot_avx2(a, b, dim);
#endif
  float lanes[8] = {};
  return dot_plain(a, b, dim, lanes, 0);
}

constexpr int64_t kLineBytes = 64;

FASTIMPL_INLINE void fetch_row(const void* row, int64_t bytes) {
  const auto* const first = static_cast<const uint8_t*>(row);
  for (int64_t at = 0; at < bytes; at += kLineBytes) kv::fetch_line(first + at);
}

// Rows asked for ahead of their use: enough bytes under way to hide memory, at least two rows, not so many that lines
// are lost before they are used.
FASTIMPL_INLINE int64_t rows_ahead(int64_t row_bytes) {
  const int64_t wanted = 4096 / row_bytes;
  return wanted < 2 ? 2 : wanted > 32 ? 32 : wanted;
}

}  // namespace fastimpl::pipe
