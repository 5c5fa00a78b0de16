// Sorting ids, and sorting them by bucket: counting passes only, so that equal input takes equal time.
#pragma once

#include "kv_parallel.h"
#include "kv_map.h"

namespace fastimpl::kv {

constexpr int kTopBits = 8, kDigitBitsMax = 11;
constexpr int64_t kParts = int64_t{1} << kTopBits;
constexpr int64_t kInsertionWords = 32;

// Order of signed keys as unsigned words.
inline uint64_t sortable(int64_t key) { return static_cast<uint64_t>(key) ^ (uint64_t{1} << 63); }

inline void insertion_sort(uint64_t* words, int64_t count) {
  for (int64_t i = 1; i < count; ++i) {
    const uint64_t word = words[i];
    int64_t at = i;
    for (; at > 0 && words[at - 1] > word; --at) words[at] = words[at - 1];
    words[at] = word;
  }
}

// The number of low bits in which the words are not all equal.
inline int differing_bits(const uint64_t* words, int64_t count) {
  uint64_t differing = 0;
  for (int64_t i = 1; i < count; ++i) differing |= words[i] ^ words[0];
  return differing == 0 ? 0 : 64 - __builtin_clzll(differing);
}

// Sorts `count` words; `spare` has as many, and the result is in `words`. One pass by as many of the highest differing
// bits as leave a few words for each value, then each part by itself: every level has at least two bits less.
inline void sort_words(uint64_t* words, uint64_t* spare, int64_t count) {
  if (count <= kInsertionWords) return insertion_sort(words, count);
  const int top_bits = differing_bits(words, count);
  if (top_bits == 0) return;
  const int wanted = std::min(61 - __builtin_clzll(static_cast<uint64_t>(count)), kDigitBitsMax), bits = std::min(top_bits, wanted), shift = top_bits - bits;
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  uint32_t ends[1 << kDigitBitsMax] = {};
  for (int64_t i = 0; i < count; ++i) ++ends[(words[i] >> shift) & mask];
  uint32_t total = 0;
  for (uint64_t digit = 0; digit <= mask; ++digit) total += std::exchange(ends[digit], total);
  for (int64_t i = 0; i < count; ++i) spare[ends[(words[i] >> shift) & mask]++] = words[i];
  int64_t begin = 0;
  for (uint64_t digit = 0; digit <= mask; ++digit) {
    const int64_t part_words = ends[digit] - begin;
    if (part_words > kInsertionWords && shift > 0) sort_words(spare + begin, words + begin, part_words);
    std::copy_n(spare + begin, part_words, words + begin);
    if (part_words <= kInsertionWords) insertion_sort(words + begin, part_words);
    begin += part_words;
  }
}

// More words than 32 bits count are left to the library.
inline void sort_large(uint64_t* words, uint64_t* spare, int64_t count) {
  if (count > int64_t{0xFFFFFFFF}) {
    std::sort(words, words + count);
  } else if (count > 1) {
    sort_words(words, spare, count);
  }
}

// Distributes `count` words over `part_count` parts, each part's words in the order of input; `begins` has
// part_count + 1 entries; `part_of` takes a position. Threads take ranges of the input.
template <typename PartOf>
void distribute(const Parallel& parallel, const uint64_t* from, uint64_t* to, int64_t count, int64_t part_count, PartOf&& part_of, int64_t* begins) {
  const int64_t ways = std::max<int64_t>(1, std::min(parallel.thread_count, count / 65536));
  std::vector<int64_t> next(static_cast<size_t>(ways * part_count));
  parallel.run(ways, [&](int64_t way) {
    int64_t* const counts = next.data() + way * part_count;
    for (int64_t i = count * way / ways; i < count * (way + 1) / ways; ++i) ++counts[part_of(i)];
  });
  int64_t total = 0;
  for (int64_t part = 0; part < part_count; ++part) {
    begins[part] = total;
    for (int64_t way = 0; way < ways; ++way) total += std::exchange(next[static_cast<size_t>(way * part_count + part)], total);
  }
  begins[part_count] = total;
  parallel.run(ways, [&](int64_t way) {
    int64_t* const places = next.data() + way * part_count;
    for (int64_t i = count * way / ways; i < count * (way + 1) / ways; ++i) to[places[part_of(i)]++] = from[i];
  });
}

// Sorts words: one pass by their highest differing bits into parts, then each part by itself on any thread.
inline void sort_all(const Parallel& parallel, uint64_t* words, uint64_t* spare, int64_t count) {
  const int top_bits = differing_bits(words, count);
  if (count < 65536 || top_bits <= kTopBits) return sort_large(words, spare, count);
  const int shift = top_bits - kTopBits;
  std::vector<int64_t> begins(kParts + 1);
  distribute(parallel, words, spare, count, kParts, [words, shift](int64_t i) { return static_cast<int64_t>((words[i] >> shift) & (kParts - 1)); }, begins.data());
  parallel.run(kParts, [&](int64_t part) {
    const int64_t begin = begins[static_cast<size_t>(part)], part_words = begins[static_cast<size_t>(part + 1)] - begin;
    sort_large(spare + begin, words + begin, part_words);
    std::copy_n(spare + begin, part_words, words + begin);
  });
}

// Keys ascending, in place.
inline void sort_keys(const Parallel& parallel, int64_t* keys, int64_t count) {
  Scratch<uint64_t> spare(count);
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
  // Divisions are dear: each id's bucket is found once.
  Scratch<uint32_t> found(count);
  uint32_t* const buckets = found.data();
  std::atomic<int64_t> outside{0};
  parallel.run_ranges(count, 65536, [&](int64_t first, int64_t last) {
    int64_t wrong = 0;
    for (int64_t i = first; i < last; ++i) {
      const int64_t bucket = rule(ids[i]);
      wrong += bucket < begin || bucket >= end;
      buckets[i] = static_cast<uint32_t>(bucket - begin);
    }
    outside += wrong;
  });
  if (outside != 0) return outside;
  const int64_t bucket_count = end - begin;
  std::fill_n(counts, bucket_count, 0);
  if (count == 0) return 0;
  Scratch<uint64_t> spare(count);
  std::vector<int64_t> begins(static_cast<size_t>(bucket_count + 1));
  auto* const words = reinterpret_cast<uint64_t*>(sorted);
  const auto bucket_at = [buckets](int64_t i) { return static_cast<int64_t>(buckets[i]); };
  distribute(parallel, reinterpret_cast<const uint64_t*>(ids), words, count, bucket_count, bucket_at, begins.data());
  const auto finish = [&](int64_t bucket) {
    const int64_t first = begins[static_cast<size_t>(bucket)], size = begins[static_cast<size_t>(bucket + 1)] - first;
    counts[bucket] = size;
    for (int64_t i = first; i < first + size; ++i) words[i] ^= uint64_t{1} << 63;
    if (bucket_count == 1) {
      sort_all(parallel, words, spare.data(), size);
    } else if (!std::is_sorted(words + first, words + first + size)) {
      // Ids that come sorted, as a store lists them, are left so: nothing is touched that would have to be there.
      sort_large(words + first, spare.data() + first, size);
    }
    for (int64_t i = first; i < first + size; ++i) words[i] ^= uint64_t{1} << 63;
  };
  parallel.run_ranges(bucket_count, 1, [&](int64_t first, int64_t last) {
    for (int64_t bucket = first; bucket < last; ++bucket) finish(bucket);
  });
  return 0;
}

}  // namespace fastimpl::kv
