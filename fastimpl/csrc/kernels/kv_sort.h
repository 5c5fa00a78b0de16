// Sorting ids, and sorting them by bucket: counting passes only, so that equal input takes equal time.
#pragma once

#include "kv_parallel.h"
#include "kv_map.h"

namespace fastimpl::kv {

constexpr int kDigitBits = 8;
constexpr int64_t kDigits = 256;
constexpr int64_t kSmallSort = 512;

// Order of signed keys as unsigned words.
inline uint64_t sortable(int64_t key) { return static_cast<uint64_t>(key) ^ (uint64_t{1} << 63); }

// Sorts `count` words whose bits above `top_bits` are all equal. `spare` has as many; the result is in `words`.
inline void sort_words(uint64_t* words, uint64_t* spare, int64_t count, int top_bits) {
  if (count <= kSmallSort) {
    std::sort(words, words + count);
    return;
  }
  uint64_t *from = words, *to = spare;
  for (int shift = 0; shift < top_bits; shift += kDigitBits) {
    int64_t next[kDigits] = {};
    for (int64_t i = 0; i < count; ++i) ++next[(from[i] >> shift) & (kDigits - 1)];
    if (next[(from[0] >> shift) & (kDigits - 1)] == count) continue;
    int64_t total = 0;
    for (int64_t& place : next) total += std::exchange(place, total);
    for (int64_t i = 0; i < count; ++i) to[next[(from[i] >> shift) & (kDigits - 1)]++] = from[i];
    std::swap(from, to);
  }
  if (from != words) std::copy_n(from, count, words);
}

// Distributes `count` words over `part_count` parts, each part's words in the order of input; `begins` has
// part_count + 1 entries. Threads take ranges of the input.
template <typename PartOf>
void distribute(const Parallel& parallel, const uint64_t* from, uint64_t* to, int64_t count, int64_t part_count, PartOf&& part_of, int64_t* begins) {
  const int64_t ways = std::max<int64_t>(1, std::min(parallel.thread_count, count / 65536));
  std::vector<int64_t> next(static_cast<size_t>(ways * part_count));
  parallel.run(ways, [&](int64_t way) {
    int64_t* const counts = next.data() + way * part_count;
    for (int64_t i = count * way / ways; i < count * (way + 1) / ways; ++i) ++counts[part_of(from[i])];
  });
  int64_t total = 0;
  for (int64_t part = 0; part < part_count; ++part) {
    begins[part] = total;
    for (int64_t way = 0; way < ways; ++way) total += std::exchange(next[static_cast<size_t>(way * part_count + part)], total);
  }
  begins[part_count] = total;
  parallel.run(ways, [&](int64_t way) {
    int64_t* const places = next.data() + way * part_count;
    for (int64_t i = count * way / ways; i < count * (way + 1) / ways; ++i) to[places[part_of(from[i])]++] = from[i];
  });
}

// Sorts words: one pass by their highest differing bits into parts that fit a cache, then each part by itself.
inline void sort_all(const Parallel& parallel, uint64_t* words, uint64_t* spare, int64_t count) {
  if (count <= 1) return;
  uint64_t differing = 0;
  for (int64_t i = 1; i < count; ++i) differing |= words[i] ^ words[0];
  const int top_bits = differing == 0 ? 0 : 64 - __builtin_clzll(differing);
  if (count < 65536 || top_bits <= kDigitBits) return sort_words(words, spare, count, top_bits);
  const int shift = top_bits - kDigitBits;
  std::vector<int64_t> begins(kDigits + 1);
  distribute(parallel, words, spare, count, kDigits, [shift](uint64_t word) { return static_cast<int64_t>((word >> shift) & (kDigits - 1)); }, begins.data());
  parallel.run(kDigits, [&](int64_t part) {
    const int64_t begin = begins[static_cast<size_t>(part)], part_words = begins[static_cast<size_t>(part + 1)] - begin;
    sort_words(spare + begin, words + begin, part_words, shift);
    std::copy_n(spare + begin, part_words, words + begin);
  });
}

// Keys ascending, in place.
inline void sort_keys(const Parallel& parallel, int64_t* keys, int64_t count) {
  std::vector<uint64_t> spare(static_cast<size_t>(count));
  auto* const words = reinterpret_cast<uint64_t*>(keys);
  for (int64_t i = 0; i < count; ++i) words[i] = sortable(keys[i]);
  sort_all(parallel, words, spare.data(), count);
  for (int64_t i = 0; i < count; ++i) keys[i] = static_cast<int64_t>(words[i] ^ (uint64_t{1} << 63));
}

struct BucketRule {
  int64_t total_count;
  int64_t bucket_size;  // 0: id mod total_count; else id / bucket_size, floored.

  // May lie outside 0 to total_count - 1 for the second rule only.
  int64_t operator()(int64_t id) const {
    const int64_t divisor = bucket_size == 0 ? total_count : bucket_size;
    const int64_t quotient = id / divisor, rest = id % divisor;
    if (bucket_size == 0) return rest < 0 ? rest + divisor : rest;
    return rest < 0 ? quotient - 1 : quotient;
  }
};

// Ids by bucket, ascending inside, duplicates kept; the count of each bucket in [begin, end). Returns the number of
// ids outside that range, and writes nothing then.
inline int64_t sort_by_bucket(const Parallel& parallel, const int64_t* ids, int64_t count, BucketRule rule, int64_t begin, int64_t end, int64_t* sorted,
                              int64_t* counts) {
  std::atomic<int64_t> outside{0};
  parallel.run_ranges(count, 65536, [&](int64_t first, int64_t last) {
    int64_t wrong = 0;
    for (int64_t i = first; i < last; ++i) {
      const int64_t bucket = rule(ids[i]);
      wrong += bucket < begin || bucket >= end;
    }
    outside += wrong;
  });
  if (outside != 0) return outside;
  const int64_t bucket_count = end - begin;
  std::fill_n(counts, bucket_count, 0);
  if (count == 0) return 0;
  std::vector<uint64_t> spare(static_cast<size_t>(count));
  std::vector<int64_t> begins(static_cast<size_t>(bucket_count + 1));
  auto* const words = reinterpret_cast<uint64_t*>(sorted);
  const auto part_of = [rule, begin](uint64_t word) { return rule(static_cast<int64_t>(word)) - begin; };
  distribute(parallel, reinterpret_cast<const uint64_t*>(ids), words, count, bucket_count, part_of, begins.data());
  parallel.run(bucket_count, [&](int64_t bucket) {
    const int64_t first = begins[static_cast<size_t>(bucket)], size = begins[static_cast<size_t>(bucket + 1)] - first;
    counts[bucket] = size;
    if (size <= 1) return;
    uint64_t differing = 0;
    for (int64_t i = first; i < first + size; ++i) {
      words[i] = sortable(static_cast<int64_t>(words[i]));
      differing |= words[i] ^ words[first];
    }
    sort_words(words + first, spare.data() + first, size, differing == 0 ? 0 : 64 - __builtin_clzll(differing));
    for (int64_t i = first; i < first + size; ++i) words[i] ^= uint64_t{1} << 63;
  });
  return 0;
}

}  // namespace fastimpl::kv
