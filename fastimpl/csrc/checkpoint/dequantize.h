// Block-quantized weights to floating point: 8-bit floats with a scale for each block, and MXFP4.
//
// No torch header here: sanitizers run on this file alone.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "common/floats.h"
#include "common/regimes.h"
#include "common/vectors.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fastimpl::checkpoint {

constexpr int64_t kRunMax =
    regime(512, 32);  // Numbers that are computed in float32 before they are narrowed: whole groups of 32.

// A matrix whose rows lie `row_stride` elements apart.
struct Output {
  Float type;
  uint8_t* data;
  int64_t row_stride;

  uint8_t* at(int64_t row, int64_t column) const { return data + (row * row_stride + column) * float_bytes(type); }
};

// Calls `fill(numbers, first, count)` for runs of a row and narrows each to the output's type `T`.
template <typename T, Isa kIsa, typename Fill>
FASTIMPL_INLINE void write_row(const Output& out, int64_t row, int64_t begin, int64_t end, const Fill& fill) {
  auto* const values = reinterpret_cast<typename T::Bits*>(out.at(row, 0));
  if constexpr (std::is_same_v<T, Fp32>) {
    for (int64_t first = begin; first < end; first += kRunMax) {
      fill(values + first, first, std::min(kRunMax, end - first));
    }
  } else {
    std::array<float, kRunMax> numbers;
    for (int64_t first = begin; first < end; first += kRunMax) {
      const int64_t count = std::min(kRunMax, end - first);
      fill(numbers.data(), first, count);
      narrow_row<T, kIsa>(numbers.data(), values + first, count);
    }
  }
}

struct Fp8 {
  const uint8_t* values;  // [rows, columns].
  int64_t rows, columns;
  const float* table;   // What each byte stands for.
  const float* scales;  // [block rows, scale_columns], of the blocks that the values touch.
  int64_t scale_columns;
  int64_t first_row, first_column;  // Position of the first value in its block.
  int64_t block;
};

// An 8-bit float with 4 bits of exponent and 3 of mantissa, bias 7, no infinity; the largest magnitude is no number.
inline float from_e4m3(uint8_t byte, uint32_t nan_bits) {
  const uint32_t sign = static_cast<uint32_t>(byte & 0x80) << 24, magnitude = byte & 0x7F;
  if (magnitude == 0x7F) return float_of(sign | nan_bits);
  if (magnitude < 8) return float_of(sign | bits_of(static_cast<float>(magnitude) * 0x1p-9F));
  return float_of(sign | ((magnitude << 20) + (120U << 23)));
}

// Whether arithmetic gives the table's bits: on whole vectors it takes half the time of single lookups.
inline bool is_e4m3(const float* table) {
  const uint32_t nan_bits = bits_of(table[0x7F]);
  for (int byte = 0; byte < 256; ++byte) {
    if (bits_of(from_e4m3(static_cast<uint8_t>(byte), nan_bits)) != bits_of(table[byte])) return false;
  }
  return true;
}

#if defined(__x86_64__)
// As many numbers of a run as fill vectors; returns how many.
__attribute__((target("avx2"), noinline)) inline int64_t e4m3_run_avx2(const uint8_t* values, uint32_t nan_bits,
                                                                       float scale, float* numbers, int64_t count) {
  const __m256i magnitudes = _mm256_set1_epi32(0x7F), normal_exponent = _mm256_set1_epi32(120 << 23),
                smallest_exponent = _mm256_set1_epi32(121 << 23), smallest_normal = _mm256_set1_epi32(8);
  const __m256 scales = _mm256_set1_ps(scale), nan = _mm256_set1_ps(float_of(nan_bits));
  int64_t e = 0;
  for (; e + 8 <= count; e += 8) {
    const __m256i byte = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(values + e)));
    const __m256i magnitude = _mm256_and_si256(byte, magnitudes), mantissa = _mm256_slli_epi32(magnitude, 20);
    const __m256i sign = _mm256_slli_epi32(_mm256_andnot_si256(magnitudes, byte), 24);
    const __m256 normal = _mm256_castsi256_ps(_mm256_add_epi32(mantissa, normal_exponent));
    // What is subnormal here is exact above the smallest normal number, which goes away again.
    const __m256 above = _mm256_castsi256_ps(_mm256_add_epi32(mantissa, smallest_exponent));
    const __m256 subnormal = _mm256_sub_ps(above, _mm256_set1_ps(0x1p-6F));
    const __m256 is_small = _mm256_castsi256_ps(_mm256_cmpgt_epi32(smallest_normal, magnitude));
    const __m256 is_nan = _mm256_castsi256_ps(_mm256_cmpeq_epi32(magnitude, magnitudes));
    const __m256 number = _mm256_blendv_ps(_mm256_blendv_ps(normal, subnormal, is_small), nan, is_nan);
    const __m256 with_sign = _mm256_or_ps(number, _mm256_castsi256_ps(sign));
    _mm256_storeu_ps(numbers + e, _mm256_mul_ps(with_sign, scales));
  }
  return e;
}
#endif

template <typename T, Isa kIsa>
FASTIMPL_INLINE void dequantize_fp8_as(const Fp8& in, const Output& out, bool has_formula) {
  const uint32_t nan_bits = bits_of(in.table[0x7F]);
  for (int64_t row = 0; row < in.rows; ++row) {
    const uint8_t* values = in.values + row * in.columns;
    const float* scales = in.scales + (in.first_row + row) / in.block * in.scale_columns;
    for (int64_t begin = 0; begin < in.columns;) {
      const int64_t block = (in.first_column + begin) / in.block;
      const int64_t end = std::min(in.columns, (block + 1) * in.block - in.first_column);
      const float scale = scales[block];
      write_row<T, kIsa>(out, row, begin, end, [&](float* numbers, int64_t first, int64_t count) FASTIMPL_INLINED {
        int64_t e = 0;
#if defined(__x86_64__)
        if constexpr (kIsa != Isa::kPlain) {
          if (has_formula) e = e4m3_run_avx2(values + first, nan_bits, scale, numbers, count);
        }
#endif
        for (; e < count; ++e) numbers[e] = in.table[values[first + e]] * scale;
      });
      begin = end;
    }
  }
}

inline void dequantize_fp8(const Fp8& in, const Output& out, Isa isa) {
  const bool has_formula = is_e4m3(in.table);
  with_type(out.type, [&](auto type) FASTIMPL_INLINED {
    run_on(isa, [&](auto unit) FASTIMPL_INLINED {
      dequantize_fp8_as<decltype(type), decltype(unit)::value>(in, out, has_formula);
    });
  });
}

struct Mxfp4 {
  const uint8_t* values;  // [rows, groups, group_bytes], the low half of a byte first.
  const uint8_t* scales;  // [rows, groups], exponents with bias 127; 255 is no number.
  int64_t rows, groups, group_bytes;
  int64_t skip;     // Values of a row before the first that is wanted.
  int64_t columns;  // Values of a row that are wanted.
};

inline float power_of_two(uint8_t biased) {
  if (biased == 255) return std::numeric_limits<float>::quiet_NaN();
  // The smallest power has no exponent of its own: it is subnormal.
  return float_of(biased == 0 ? 0x00400000U : static_cast<uint32_t>(biased) << 23);
}

constexpr std::array<float, 16> kHalves = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,  4.0F,  6.0F,
                                           -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F};

// `count` numbers of one group from its half `at` on; `values` is the row's first byte.
inline void mxfp4_run(const uint8_t* values, float scale, int64_t at, float* numbers, int64_t count) {
  std::array<float, 16> scaled;
  for (size_t i = 0; i < 16; ++i) scaled[i] = kHalves[i] * scale;
  int64_t i = 0;
  if ((at & 1) != 0 && count > 0) numbers[i++] = scaled[values[at++ / 2] >> 4];
  for (; i + 1 < count; i += 2, at += 2) {
    numbers[i] = scaled[values[at / 2] & 15];
    numbers[i + 1] = scaled[values[at / 2] >> 4];
  }
  if (i < count) numbers[i] = scaled[values[at / 2] & 15];
}

constexpr int64_t kGroupBytes = 16;  // Of the published format.

#if defined(__x86_64__)
// Whole groups of 16 bytes.
__attribute__((target("avx2"), noinline)) inline void mxfp4_groups_avx2(const uint8_t* values, const uint8_t* scales,
                                                                        int64_t groups, float* numbers) {
  const __m256 magnitudes = _mm256_loadu_ps(kHalves.data());
  const __m128i low = _mm_set1_epi8(15);
  for (int64_t g = 0; g < groups; ++g, values += kGroupBytes, numbers += 2 * kGroupBytes) {
    const __m256 scale = _mm256_set1_ps(power_of_two(scales[g]));
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
    const __m128i first = _mm_and_si128(bytes, low), second = _mm_and_si128(_mm_srli_epi16(bytes, 4), low);
    const __m128i ordered[2] = {_mm_unpacklo_epi8(first, second), _mm_unpackhi_epi8(first, second)};
    for (int part = 0; part < 4; ++part) {
      const __m128i eight = part % 2 == 0 ? ordered[part / 2] : _mm_srli_si128(ordered[part / 2], 8);
      const __m256i half = _mm256_cvtepu8_epi32(eight);
      // The upper bit is the sign; the permutation looks at the three others.
      const __m256 sign = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_srli_epi32(half, 3), 31));
      const __m256 number = _mm256_or_ps(_mm256_permutevar8x32_ps(magnitudes, half), sign);
      _mm256_storeu_ps(numbers + 8 * part, _mm256_mul_ps(number, scale));
    }
  }
}
#endif

template <typename T, Isa kIsa>
FASTIMPL_INLINE void dequantize_mxfp4_as(const Mxfp4& in, const Output& out) {
  const int64_t group = 2 * in.group_bytes;
  for (int64_t row = 0; row < in.rows; ++row) {
    const uint8_t* const values = in.values + row * in.groups * in.group_bytes;
    const uint8_t* const scales = in.scales + row * in.groups;
    for (int64_t begin = 0; begin < in.columns;) {
      const int64_t number = (in.skip + begin) / group;
      int64_t end = std::min(in.columns, (number + 1) * group - in.skip);
#if defined(__x86_64__)
      if constexpr (kIsa != Isa::kPlain) {
        const int64_t whole = (in.columns - begin) / (2 * kGroupBytes);
        if (in.group_bytes == kGroupBytes && (in.skip + begin) % group == 0 && whole > 0) {
          end = begin + whole * group;
          write_row<T, kIsa>(out, row, begin, end, [&](float* numbers, int64_t first, int64_t count) FASTIMPL_INLINED {
            const int64_t from = (in.skip + first) / group;
            mxfp4_groups_avx2(values + from * kGroupBytes, scales + from, count / group, numbers);
          });
          begin = end;
          continue;
        }
      }
#endif
      const float scale = power_of_two(scales[number]);
      write_row<T, kIsa>(out, row, begin, end, [&](float* numbers, int64_t first, int64_t count) FASTIMPL_INLINED {
        mxfp4_run(values, scale, in.skip + first, numbers, count);
      });
      begin = end;
    }
  }
}

inline void dequantize_mxfp4(const Mxfp4& in, const Output& out, Isa isa) {
  with_type(out.type, [&](auto type) FASTIMPL_INLINED {
    run_on(isa,
           [&](auto unit) FASTIMPL_INLINED { dequantize_mxfp4_as<decltype(type), decltype(unit)::value>(in, out); });
  });
}

}  // namespace fastimpl::checkpoint
