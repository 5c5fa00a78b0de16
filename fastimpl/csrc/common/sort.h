// Sorting ids, and sorting them by bucket: counting passes only, so that equal input takes equal time.
#pragma once

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "common/memory.h"
#include "common/parallel.h"
#include "common/regimes.h"

namespace fastimpl {

constexpr int kTopBits = regime(8, 2), kDigitBitsMax = regime(13, 3);
constexpr int64_t kParts = int64_t{1} << kTopBits;
constexpr int64_t kInsertionWords = regime(24, 3);
// So many words are sorted in parts, by all threads.
constexpr int64_t kSortedInParts = regime(65536, 12);
// So many words are worth another thread.
constexpr int64_t kSplitWords = regime(65536, 3);

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
// bits as leave about one word for each value; then what is left out of order is near its place, or, where the bits are
// not spread, each part is sorted by itself: every level has at least two bits less.
inline void sort_words(uint64_t* words, uint64_t* spare, int64_t count) {
  if (count <= kInsertionWords) return insertion_sort(words, count);
  const int top_bits = differing_bits(words, count);
  if (top_bits == 0) return;
  const int wanted = std::min(64 - __builtin_clzll(static_cast<uint64_t>(count)), kDigitBitsMax),
            bits = std::min(top_bits, wanted), shift = top_bits - bits;
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  uint32_t ends[1 << kDigitBitsMax];
  std::fill_n(ends, mask + 1, 0);
  for (int64_t i = 0; i < count; ++i) ++ends[(words[i] >> shift) & mask];
  uint32_t total = 0, largest = 0;
  for (uint64_t digit = 0; digit <= mask; ++digit) {
    largest = std::max(largest, ends[digit]);
    total += std::exchange(ends[digit], total);
  }
  for (int64_t i = 0; i < count; ++i) spare[ends[(words[i] >> shift) & mask]++] = words[i];
  if (largest <= kInsertionWords) {
    std::copy_n(spare, count, words);
    return insertion_sort(words, count);
  }
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
void distribute(const Parallel& parallel, const uint64_t* from, uint64_t* to, int64_t count, int64_t part_count,
                PartOf&& part_of, int64_t* begins) {
  const int64_t ways = std::max<int64_t>(1, std::min(parallel.thread_count, count / kSplitWords));
  std::vector<int64_t> next(static_cast<size_t>(ways * part_count));
  // Ends of ranges and what `part_of` holds are copied for each loop: its stores could change anything else, and the
  // division of an end would be done for every word.
  parallel.run(ways, [&](int64_t way) {
    const auto part_at = part_of;
    int64_t* const counts = next.data() + way * part_count;
    const int64_t end = count * (way + 1) / ways;
    for (int64_t i = count * way / ways; i < end; ++i) ++counts[part_at(i)];
  });
  int64_t total = 0;
  for (int64_t part = 0; part < part_count; ++part) {
    begins[part] = total;
    for (int64_t way = 0; way < ways; ++way)
      total += std::exchange(next[static_cast<size_t>(way * part_count + part)], total);
  }
  begins[part_count] = total;
  parallel.run(ways, [&](int64_t way) {
    const auto part_at = part_of;
    int64_t* const places = next.data() + way * part_count;
    const uint64_t* const source = from;
    uint64_t* const target = to;
    const int64_t end = count * (way + 1) / ways;
    for (int64_t i = count * way / ways; i < end; ++i) target[places[part_at(i)]++] = source[i];
  });
}

// Sorts words: one pass by their highest differing bits into parts, then each part by itself on any thread.
inline void sort_all(const Parallel& parallel, uint64_t* words, uint64_t* spare, int64_t count) {
  const int top_bits = differing_bits(words, count);
  if (count < kSortedInParts || top_bits <= kTopBits) return sort_large(words, spare, count);
  const int shift = top_bits - kTopBits;
  std::vector<int64_t> begins(kParts + 1);
  distribute(
      parallel, words, spare, count, kParts,
      [words, shift](int64_t i) { return static_cast<int64_t>((words[i] >> shift) & (kParts - 1)); }, begins.data());
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

// The bucket of an id: id mod `total_count`, or, with a bucket size, id / bucket size, floored.
class BucketRule {
 public:
  BucketRule(int64_t total_count, int64_t bucket_size)
      : divides_(bucket_size != 0),
        divisor_(static_cast<uint64_t>(divides_ ? bucket_size : total_count)),
        factor_(~uint64_t{0} / divisor_) {}

  // May lie outside 0 to total_count - 1 where there is a bucket size; -1 for every negative id then.
  int64_t operator()(int64_t id) const {
    if (divides_) return id < 0 ? -1 : static_cast<int64_t>(quotient(static_cast<uint64_t>(id)));
    // A negative id is as far from the last multiple as -1 - id, which is none, but counted down.
    const uint64_t distance = static_cast<uint64_t>(id < 0 ? -1 - id : id),
                   rest = distance - quotient(distance) * divisor_;
    return static_cast<int64_t>(id < 0 ? divisor_ - 1 - rest : rest);
  }

 private:
  // Divisions are dear. The product is the quotient or one less: the factor is less than 1 below 2**64 / divisor.
  uint64_t quotient(uint64_t value) const {
    const auto near = static_cast<uint64_t>(static_cast<unsigned __int128>(value) * factor_ >> 64);
    return near + (value - near * divisor_ >= divisor_);
  }

  bool divides_;
  uint64_t divisor_, factor_;
};

// The positions [0, count) in groups of adjacent buckets, so few that every group's next place is in a cache.
struct BucketGroups {
  BucketGroups(int64_t bucket_count_) : bucket_count(bucket_count_) {
    while ((bucket_count - 1) >> shift >= kParts) ++shift;
  }
  int64_t count() const { return ((bucket_count - 1) >> shift) + 1; }
  int64_t first_bucket(int64_t group) const { return group << shift; }
  int64_t end_bucket(int64_t group) const { return std::min(bucket_count, (group + 1) << shift); }

  int64_t bucket_count;
  int shift = 0;
};

// One group's ids, sorted by bucket and inside: from `from` to `sorted`. `from` is used up.
inline void sort_group(uint64_t* from, uint64_t* sorted, int64_t count, const BucketRule& rule, int64_t first_bucket,
                       int64_t bucket_count, int64_t* counts) {
  std::vector<int64_t> begins(static_cast<size_t>(bucket_count));
  int64_t* const places = begins.data();
  // A copy: what is counted could otherwise be its members.
  const auto bucket_at = [rule, from, first_bucket](int64_t i) {
    return rule(static_cast<int64_t>(from[i])) - first_bucket;
  };
  if (bucket_count == 1) {
    counts[0] = count;
    for (int64_t i = 0; i < count; ++i) sorted[i] = sortable(static_cast<int64_t>(from[i]));
  } else {
    for (int64_t i = 0; i < count; ++i) ++counts[bucket_at(i)];
    std::exclusive_scan(counts, counts + bucket_count, places, int64_t{0});
    for (int64_t i = 0; i < count; ++i) sorted[places[bucket_at(i)]++] = sortable(static_cast<int64_t>(from[i]));
  }
  for (int64_t bucket = 0, begin = 0; bucket < bucket_count; begin += counts[bucket++]) {
    // Ids that come sorted, as a store lists them, are left so.
    if (!std::is_sorted(sorted + begin, sorted + begin + counts[bucket]))
      sort_large(sorted + begin, from + begin, counts[bucket]);
  }
  for (int64_t i = 0; i < count; ++i) sorted[i] ^= uint64_t{1} << 63;
}

// Ids by bucket, ascending inside, duplicates kept; the count of each bucket in [begin, end). `id_at` gives the ids of
// [0, count). Returns the number of ids outside that range, and writes nothing then.
template <typename IdAt>
int64_t sort_by_bucket(const Parallel& parallel, IdAt&& id_at, int64_t count, const BucketRule& rule, int64_t begin,
                       int64_t end, int64_t* sorted, int64_t* counts) {
  const BucketGroups groups(std::max<int64_t>(1, end - begin));
  const int64_t ways = std::max<int64_t>(1, std::min(parallel.thread_count, count / kSplitWords)),
                group_count = groups.count();
  std::vector<int64_t> next(static_cast<size_t>(ways * group_count));
  std::atomic<int64_t> outside{0};
  const auto range_of = [&](int64_t way) { return std::make_pair(count * way / ways, count * (way + 1) / ways); };
  parallel.run(ways, [&](int64_t way) {
    const auto bucket_of = rule;
    const auto given = id_at;
    const int64_t first_bucket = begin, bucket_count = end - begin;
    const int shift = groups.shift;
    int64_t* const counted = next.data() + way * group_count;
    int64_t wrong = 0;
    for (auto [i, last] = range_of(way); i < last; ++i) {
      const int64_t bucket = bucket_of(given(i)) - first_bucket;
      const bool is_wrong = bucket < 0 || bucket >= bucket_count;
      wrong += is_wrong;
      ++counted[is_wrong ? 0 : bucket >> shift];
    }
    outside += wrong;
  });
  if (outside != 0) return outside;
  std::fill_n(counts, end - begin, 0);
  if (count == 0) return 0;
  std::vector<int64_t> begins(static_cast<size_t>(group_count + 1));
  int64_t total = 0;
  for (int64_t group = 0; group < group_count; ++group) {
    begins[static_cast<size_t>(group)] = total;
    for (int64_t way = 0; way < ways; ++way)
      total += std::exchange(next[static_cast<size_t>(way * group_count + group)], total);
  }
  begins.back() = total;
  Scratch<uint64_t> spare(count);
  auto* const words = reinterpret_cast<uint64_t*>(sorted);
  const bool is_single = end - begin == 1;
  parallel.run(ways, [&](int64_t way) {
    const auto bucket_of = rule;
    const auto given = id_at;
    const int64_t first_bucket = begin;
    const int shift = groups.shift;
    int64_t* const places = next.data() + way * group_count;
    uint64_t* const target = is_single ? words : spare.data();
    for (auto [i, last] = range_of(way); i < last; ++i) {
      const int64_t id = given(i);
      if (is_single) {
        target[i] = sortable(id);
      } else {
        target[places[(bucket_of(id) - first_bucket) >> shift]++] = static_cast<uint64_t>(id);
      }
    }
  });
  if (is_single) {
    counts[0] = count;
    if (!std::is_sorted(words, words + count)) sort_all(parallel, words, spare.data(), count);
    for (int64_t i = 0; i < count; ++i) words[i] ^= uint64_t{1} << 63;
    return 0;
  }
  parallel.run(group_count, [&](int64_t group) {
    const int64_t first = begins[static_cast<size_t>(group)], first_bucket = groups.first_bucket(group);
    sort_group(spare.data() + first, words + first, begins[static_cast<size_t>(group + 1)] - first, rule,
               begin + first_bucket, groups.end_bucket(group) - first_bucket, counts + first_bucket);
  });
  return 0;
}

}  // namespace fastimpl
