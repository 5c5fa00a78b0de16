// Three float types as float32, and one loop body for every vector unit: each operation is a single float32 operation,
// so that the unit changes no bit. Compile without contraction.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/floats.h"
#include "common/sums.h"

namespace fastimpl {

// Which instructions the loop may use; a machine has all up to its best.
enum class Isa : int64_t { kPlain = 0, kAvx2 = 1, kAvx512 = 2 };

struct Bf16 {
  using Bits = uint16_t;
  static float widen(Bits bits) { return from_bfloat16(bits); }
  static Bits narrow(float value) { return to_bfloat16(value); }
};
struct Fp16 {
  using Bits = uint16_t;
  static float widen(Bits bits) { return from_float16(bits); }
  // One NaN for all, as in bfloat16: which payload arrives here is up to the order of operands that a compiler chose.
  static Bits narrow(float value) { return value != value ? Bits{0x7E00} : to_float16(value); }
};
struct Fp32 {
  using Bits = float;
  static float widen(Bits value) { return value; }
  static Bits narrow(float value) { return value; }
};

#if defined(__x86_64__)
inline Isa best_isa() {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return Isa::kAvx512;
  }
  return __builtin_cpu_supports("avx2") ? Isa::kAvx2 : Isa::kPlain;
}
#else
inline Isa best_isa() { return Isa::kPlain; }
#endif

template <Isa kValue>
using Unit = std::integral_constant<Isa, kValue>;

#if defined(__x86_64__)
template <typename Body>
__attribute__((target("avx2,f16c"))) void run_avx2(const Body& body) {
  body(Unit<Isa::kAvx2>());
}

template <typename Body>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,prefer-vector-width=512"))) void run_avx512(
    const Body& body) {
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
  for (; e < count; ++e) to[e] = to_float16(from[e]);
}

// Calls `body(e)` for every element, without a dependence between them: whole blocks first, whose loop has no
// remainder.
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

// Four floats in one register, on every machine that this builds for.
using Quad = float __attribute__((vector_size(16)));

FASTIMPL_INLINE Quad load_quad(const float* from) {
  Quad quad;
  __builtin_memcpy(&quad, from, sizeof quad);
  return quad;
}

// The sum of the products of two rows, in the order of `lane_sum`.
FASTIMPL_INLINE float dot_row(const float* a, const float* b, int64_t dim) {
  Quad low{}, high{};
  int64_t e = 0;
  for (; e + 8 <= dim; e += 8) {
    low += load_quad(a + e) * load_quad(b + e);
    high += load_quad(a + e + 4) * load_quad(b + e + 4);
  }
  if (e < dim) {
    float lanes[8];
    __builtin_memcpy(lanes, &low, sizeof low);
    __builtin_memcpy(lanes + 4, &high, sizeof high);
    for (; e < dim; ++e) lanes[e % 8] += a[e] * b[e];
    return fold_lanes(lanes);
  }
  low += high;
  return (low[0] + low[2]) + (low[1] + low[3]);
}

}  // namespace fastimpl
