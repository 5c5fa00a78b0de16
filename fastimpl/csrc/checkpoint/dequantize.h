// Block-quantized weights to floating point: 8-bit floats with a scale for each block, and MXFP4.
//
// No torch header here: sanitizers run on this file alone.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "common/floats.h"

namespace fastimpl::checkpoint {

constexpr int64_t kRunMax = 512;  // Numbers that are computed in float32 before they are narrowed.

// A matrix whose rows lie `row_stride` elements apart.
struct Output {
  Float type;
  uint8_t* data;
  int64_t row_stride;

  uint8_t* at(int64_t row, int64_t column) const { return data + (row * row_stride + column) * float_bytes(type); }
};

// Calls `fill(numbers, first, count)` for runs of a row and narrows each to the output's type.
template <typename Fill>
inline void write_row(const Output& out, int64_t row, int64_t begin, int64_t end, Fill&& fill) {
  if (out.type == Float::kFloat32) {
    fill(reinterpret_cast<float*>(out.at(row, begin)), begin, end - begin);
    return;
  }
  std::array<float, kRunMax> numbers;
  for (int64_t first = begin; first < end; first += kRunMax) {
    const int64_t count = std::min(kRunMax, end - first);
    fill(numbers.data(), first, count);
    narrow(out.type, numbers.data(), out.at(row, first), count);
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

inline void dequantize_fp8(const Fp8& in, const Output& out) {
  for (int64_t row = 0; row < in.rows; ++row) {
    const uint8_t* values = in.values + row * in.columns;
    const float* scales = in.scales + (in.first_row + row) / in.block * in.scale_columns;
    for (int64_t begin = 0; begin < in.columns;) {
      const int64_t block = (in.first_column + begin) / in.block;
      const int64_t end = std::min(in.columns, (block + 1) * in.block - in.first_column);
      const float scale = scales[block];
      write_row(out, row, begin, end, [&](float* numbers, int64_t first, int64_t count) {
        for (int64_t i = 0; i < count; ++i) numbers[i] = in.table[values[first + i]] * scale;
      });
      begin = end;
    }
  }
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

inline void dequantize_mxfp4(const Mxfp4& in, const Output& out) {
  static constexpr std::array<float, 16> kNumbers = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,  4.0F,  6.0F,
                                                     -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F};
  const int64_t group = 2 * in.group_bytes;
  for (int64_t row = 0; row < in.rows; ++row) {
    const uint8_t* values = in.values + row * in.groups * in.group_bytes;
    for (int64_t begin = 0; begin < in.columns;) {
      const int64_t number = (in.skip + begin) / group;
      const int64_t end = std::min(in.columns, (number + 1) * group - in.skip);
      const float scale = power_of_two(in.scales[row * in.groups + number]);
      std::array<float, 16> scaled;
      for (size_t i = 0; i < 16; ++i) scaled[i] = kNumbers[i] * scale;
      write_row(out, row, begin, end, [&](float* numbers, int64_t first, int64_t count) {
        int64_t at = in.skip + first, i = 0;
        if ((at & 1) != 0 && count > 0) numbers[i++] = scaled[values[at++ / 2] >> 4];
        for (; i + 1 < count; i += 2, at += 2) {
          numbers[i] = scaled[values[at / 2] & 15];
          numbers[i + 1] = scaled[values[at / 2] >> 4];
        }
        if (i < count) numbers[i] = scaled[values[at / 2] & 15];
      });
      begin = end;
    }
  }
}

}  // namespace fastimpl::checkpoint
