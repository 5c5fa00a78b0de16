// What the bytes of a row mean: header fields, the values that carry information, the initial row of an id.
//
// The layout itself is decided in twinproof.kvstore.options; here are its numbers.
#pragma once

#include <cstring>
#include <utility>
#include <vector>

#include "common/optimizers.h"
#include "kvstore/hash.h"

namespace fastimpl::kvstore {

inline uint64_t metadata(const uint8_t* row) {
  uint64_t word;
  std::memcpy(&word, row + 8, sizeof word);
  return word;
}
inline void set_metadata(uint8_t* row, uint64_t word) { std::memcpy(row + 8, &word, sizeof word); }

struct Range {
  int64_t begin, end;
};

struct StateSlot {
  int64_t offset_bytes, count;
  Float type;
};

struct RowFormat {
  int64_t row_bytes, dim;
  Float weight_type;
  Optimizer optimizer;
  StateSlot momentum1, momentum2;  // Count 0 where the optimizer has no such state.
  bool uniform;                    // Initial weights are low + span * unit, else zero.
  float low, span;
  uint64_t table_word;  // mix(seed + golden * (table index + 1)).
  bool counts_visits;   // Under the score policy the count's bits are the score.
  bool logs_removals;
  int64_t capacity;     // Rows at most; -1 is any number.
  bool ranks_by_count;  // Who makes room for others: the lowest count, else the oldest.
  bool is_on_host;      // Of a store on a device: rows lie in host memory,
  int64_t cache_rows;   // but for so many.

  int64_t weight_bytes() const { return dim * float_bytes(weight_type); }
  int64_t weight_end() const { return kHeaderBytes + weight_bytes(); }

  // The bytes between the values: always zero.
  std::vector<Range> padding() const {
    std::vector<Range> result;
    int64_t end = weight_end();
    StateSlot slots[2] = {momentum1, momentum2};
    if (slots[1].offset_bytes < slots[0].offset_bytes) std::swap(slots[0], slots[1]);
    for (const StateSlot& slot : slots) {
      if (slot.count == 0) continue;
      if (slot.offset_bytes > end) result.push_back({end, slot.offset_bytes});
      end = slot.offset_bytes + slot.count * float_bytes(slot.type);
    }
    if (end < row_bytes) result.push_back({end, row_bytes});
    return result;
  }

  InitialWeight initial_weight() const { return {uniform, low, span, table_word}; }

  void initial_weights(int64_t key, uint8_t* weights) const {
    if (!uniform) {
      std::memset(weights, 0, static_cast<size_t>(weight_bytes()));
      return;
    }
    const InitialWeight initial = initial_weight();
    const uint64_t row_word = initial.row_word(key);
    for (int64_t element = 0; element < dim; ++element) {
      const float value = initial.value(row_word, element);
      narrow(weight_type, &value, weights + element * float_bytes(weight_type), 1);
    }
  }

  // A row as it begins, but for the bytes [skip.begin, skip.end), which the caller is about to write.
  void open(int64_t key, uint64_t word, Range skip, uint8_t* row, int64_t block_bytes) const {
    std::memcpy(row, &key, sizeof key);
    set_metadata(row, word);
    const bool covered = skip.begin <= kHeaderBytes && skip.end >= weight_end();
    if (!covered) initial_weights(key, row + kHeaderBytes);
    const int64_t end = covered ? skip.end : weight_end();
    std::memset(row + end, 0, static_cast<size_t>(block_bytes - end));
  }

  // Bytes [range) of the row of an id that is not there; `scratch` holds a row.
  void copy_initial(int64_t key, Range range, uint8_t* scratch, uint8_t* to) const {
    if (range.begin == kHeaderBytes && range.end == weight_end()) {
      initial_weights(key, to);
      return;
    }
    open(key, 0, {0, 0}, scratch, row_bytes);
    std::memcpy(to, scratch + range.begin, static_cast<size_t>(range.end - range.begin));
  }
};

}  // namespace fastimpl::kvstore
