// Widening and rounding of the three element types of rows; every rounding is to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define FASTIMPL_BOTH __host__ __device__
#define FASTIMPL_INLINE __forceinline__
#else
#define FASTIMPL_BOTH
#define FASTIMPL_INLINE __attribute__((always_inline)) inline
#endif

namespace fastimpl {

enum class Float : int64_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

FASTIMPL_BOTH inline int64_t float_bytes(Float type) { return type == Float::kFloat32 ? 4 : 2; }

FASTIMPL_BOTH inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

FASTIMPL_BOTH inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

FASTIMPL_BOTH inline uint16_t to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  if (value != value) return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

FASTIMPL_BOTH inline float from_bfloat16(uint16_t half) { return float_of(static_cast<uint32_t>(half) << 16); }

// The rounding is left to the float adder: a number is added whose last bit has the weight of the result's last bit.
FASTIMPL_BOTH inline uint16_t to_float16(float value) {
  const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00 | ((magnitude >> 13) & 0x3FF));
  if (magnitude >= 0x47800000) return static_cast<uint16_t>(sign | 0x7C00);
  if (magnitude < 0x38800000) {
    // Subnormal in float16: steps of 2**-24, which is the last bit of floats from 0.5 on.
    const uint32_t steps = bits_of(float_of(magnitude) + 0.5F) - 0x3F000000;
    return static_cast<uint16_t>(sign | steps);
  }
  const uint32_t rounded = magnitude + 0xFFF + ((magnitude >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112 << 10)));
}

FASTIMPL_BOTH inline float from_float16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, magnitude = half & 0x7FFF;
  if (magnitude >= 0x7C00) return float_of(sign | 0x7F800000 | ((magnitude & 0x3FF) << 13));
  if (magnitude >= 0x0400) return float_of(sign | ((magnitude << 13) + (112 << 23)));
  const float value = static_cast<float>(magnitude) * 0x1p-24F;
  return float_of(sign | bits_of(value));
}

// The value of a half, by the device's own instruction there, which need not keep the payload of a NaN.
FASTIMPL_BOTH inline float value_of_float16(uint16_t half) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
#else
  return from_float16(half);
#endif
}

// The half nearest to a value, by the device's own instruction there; NaNs as above.
FASTIMPL_BOTH inline uint16_t float16_of_value(float value) {
#if defined(__CUDA_ARCH__)
  uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
#else
  return to_float16(value);
#endif
}

inline void widen(Float type, const uint8_t* from, float* to, int64_t count) {
  if (type == Float::kFloat32) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    uint16_t half;
    std::memcpy(&half, from + 2 * i, sizeof half);
    to[i] = type == Float::kFloat16 ? from_float16(half) : from_bfloat16(half);
  }
}

inline void narrow(Float type, const float* from, uint8_t* to, int64_t count) {
  if (type == Float::kFloat32) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t half = type == Float::kFloat16 ? to_float16(from[i]) : to_bfloat16(from[i]);
    std::memcpy(to + 2 * i, &half, sizeof half);
  }
}

}  // namespace fastimpl
