// CRC-32 of zlib's polynomial, which can be folded over pieces. No torch header here.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fastimpl::checkpoint {

constexpr uint32_t kCrcPolynomial = 0xEDB88320;  // Bit-reversed: the lowest bit is the highest power.
constexpr int64_t kCrcTables = 8;
constexpr int64_t kCrcLaneBytes = 16, kCrcStrideBytes = 64;

using CrcTables = std::array<std::array<uint32_t, 256>, kCrcTables>;

// tables[k][b] is the remainder of byte b followed by k zero bytes.
constexpr CrcTables make_crc_tables() {
  CrcTables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? kCrcPolynomial : 0);
    tables[0][byte] = value;
  }
  for (size_t table = 1; table < kCrcTables; ++table) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t value = tables[table - 1][byte];
      tables[table][byte] = (value >> 8) ^ tables[0][value & 255];
    }
  }
  return tables;
}

inline constexpr CrcTables kCrcTable = make_crc_tables();

// Eight bytes a step. `state` is the inverted checksum.
inline uint32_t crc32_by_tables(uint32_t state, const uint8_t* bytes, int64_t count) {
  for (; count >= kCrcTables; bytes += kCrcTables, count -= kCrcTables) {
    uint32_t low = 0, high = 0;
    std::memcpy(&low, bytes, 4);
    std::memcpy(&high, bytes + 4, 4);
    low ^= state;
    state = kCrcTable[7][low & 255] ^ kCrcTable[6][(low >> 8) & 255] ^ kCrcTable[5][(low >> 16) & 255] ^
            kCrcTable[4][low >> 24] ^ kCrcTable[3][high & 255] ^ kCrcTable[2][(high >> 8) & 255] ^
            kCrcTable[1][(high >> 16) & 255] ^ kCrcTable[0][high >> 24];
  }
  for (; count > 0; ++bytes, --count) state = (state >> 8) ^ kCrcTable[0][(state ^ *bytes) & 255];
  return state;
}

#if defined(__x86_64__)
inline bool has_carryless_product() { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }

__attribute__((target("pclmul,sse4.1"))) inline __m128i crc_load(const uint8_t* bytes) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
}

// `value` moved on by the powers of x that `by` holds, plus `next`.
__attribute__((target("pclmul,sse4.1"))) inline __m128i crc_fold(__m128i value, __m128i by, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(value, by, 0x00), high = _mm_clmulepi64_si128(value, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// Whole lanes of 16 bytes, at least four of them, by carry-less products: V. Gopal et al., "Fast CRC Computation for
// Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009; the constants are powers of x modulo the polynomial.
__attribute__((target("pclmul,sse4.1"), noinline)) inline uint32_t crc32_by_products(uint32_t state,
                                                                                     const uint8_t* bytes,
                                                                                     int64_t count) {
  const __m128i by_stride = _mm_set_epi64x(0x01C6E41596, 0x0154442BD4);
  const __m128i by_lane = _mm_set_epi64x(0x00CCAA009E, 0x01751997D0);
  __m128i lanes[4];
  for (int lane = 0; lane < 4; ++lane) lanes[lane] = crc_load(bytes + lane * kCrcLaneBytes);
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(state)));
  bytes += kCrcStrideBytes;
  count -= kCrcStrideBytes;
  for (; count >= kCrcStrideBytes; bytes += kCrcStrideBytes, count -= kCrcStrideBytes) {
    for (int lane = 0; lane < 4; ++lane) {
      lanes[lane] = crc_fold(lanes[lane], by_stride, crc_load(bytes + lane * kCrcLaneBytes));
    }
  }
  __m128i rest = lanes[0];
  for (int lane = 1; lane < 4; ++lane) rest = crc_fold(rest, by_lane, lanes[lane]);
  for (; count >= kCrcLaneBytes; bytes += kCrcLaneBytes, count -= kCrcLaneBytes) {
    rest = crc_fold(rest, by_lane, crc_load(bytes));
  }
  // The last lane to 8 bytes, to 4 and zeros, then Barrett's reduction.
  const __m128i low_words = _mm_setr_epi32(~0, 0, ~0, 0);
  rest = _mm_xor_si128(_mm_srli_si128(rest, 8), _mm_clmulepi64_si128(rest, by_lane, 0x10));
  const __m128i by_word = _mm_set_epi64x(0, 0x0163CD6124);
  rest = _mm_xor_si128(_mm_srli_si128(rest, 4), _mm_clmulepi64_si128(_mm_and_si128(rest, low_words), by_word, 0x00));
  const __m128i reduction = _mm_set_epi64x(0x01F7011641, 0x01DB710641);
  __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(rest, low_words), reduction, 0x10);
  quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low_words), reduction, 0x00);
  return static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(rest, quotient), 1));
}
#else
inline bool has_carryless_product() { return false; }
inline uint32_t crc32_by_products(uint32_t state, const uint8_t* bytes, int64_t count) {
  return crc32_by_tables(state, bytes, count);
}
#endif

// The checksum of `count` bytes; `products` says whether the machine has, and may use, carry-less products.
inline uint32_t crc32(const uint8_t* bytes, int64_t count, bool products) {
  uint32_t state = ~uint32_t{0};
  if (products && count >= kCrcStrideBytes) {
    const int64_t whole = count - count % kCrcLaneBytes;
    state = crc32_by_products(state, bytes, whole);
    bytes += whole;
    count -= whole;
  }
  return ~crc32_by_tables(state, bytes, count);
}

}  // namespace fastimpl::checkpoint
