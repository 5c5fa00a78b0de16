// From a key to 64 bits, on the host and on the device; and the weight of an id that was never written.
#pragma once

#include <cstdint>

#include "common/floats.h"

namespace fastimpl::kvstore {

constexpr int64_t kHeaderBytes = 16;
constexpr uint64_t kUsed = uint64_t{1} << 63;
constexpr uint64_t kCountMax = 0x7FFFFFFF;
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

// The finaliser of splitmix64: adversarial keys (sequences, strides, equal low bits) spread over all 64 bits. Different
// words stay different.
FASTIMPL_BOTH inline uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

FASTIMPL_BOTH inline uint64_t hash_key(int64_t key) { return mix(static_cast<uint64_t>(key) + kGolden); }

// Bytes 8-15 of a row: timestamp, count << 32, used << 63.
FASTIMPL_BOTH inline uint64_t timestamp_of(uint64_t word) { return word & 0xFFFFFFFF; }
FASTIMPL_BOTH inline uint64_t count_of(uint64_t word) { return (word >> 32) & kCountMax; }
FASTIMPL_BOTH inline uint64_t word_of(uint64_t timestamp, uint64_t count) { return timestamp | (count << 32) | kUsed; }

// twinproof.kvstore.options.Initializer: a pure function of seed, table, id and element.
struct InitialWeight {
  bool uniform;  // Weights are low + span * unit, else zero.
  float low, span;
  uint64_t table_word;  // mix(seed + golden * (table index + 1)).

  FASTIMPL_BOTH uint64_t row_word(int64_t key) const { return mix(table_word ^ static_cast<uint64_t>(key)); }
  // A product of two numbers of 24 bits is exact in float64, so that contraction changes no bit.
  FASTIMPL_BOTH float value(uint64_t row_word, int64_t element) const {
    if (!uniform) return 0;
    const uint64_t word = mix(row_word + kGolden * static_cast<uint64_t>(element + 1));
    const double first = low, width = span;
    return static_cast<float>(first + width * (static_cast<double>(word >> 40) * 0x1p-24));
  }
};

}  // namespace fastimpl::kvstore
