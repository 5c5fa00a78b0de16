// Sorting ids, and sorting them by bucket: counting passes only, so that equal input takes equal time.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
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
// Values of a group's digit: two for each id, which then is nearly in its place, and few enough for a core's second
// cache.
constexpr int kGroupDigitBits = regime(17, 5);

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
    for (int64_t i = count * way / ways; i < end; ++i) {
      fetch_ahead(from + i);
      ++counts[part_at(i)];
    }
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
    for (int64_t i = count * way / ways; i < end; ++i) {
      fetch_ahead(source + i);
      const int64_t place = places[part_at(i)]++;
      target[place] = source[i];
      fetch_next_to_write(target + place);
    }
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
    // A negative id is as far from the last multiple as -1 - id, which is none, but counted down. Signs of ids are
    // not to be foreseen: what follows takes no branch.
    const auto sign = static_cast<uint64_t>(id >> 63);
    const uint64_t distance = static_cast<uint64_t>(id) ^ sign, near = distance - near_quotient(distance) * divisor_,
                   rest = near - (near >= divisor_ ? divisor_ : 0);
    return static_cast<int64_t>((rest ^ sign) + (divisor_ & sign));
  }

  // Whether of two ids the lesser has never the greater bucket.
  bool keeps_order() const { return divides_; }
  // The largest id of a bucket, where order is kept; the largest there is for those that it would lie behind.
  int64_t last_id(int64_t bucket) const {
    const auto behind = static_cast<unsigned __int128>(bucket + 1) * divisor_;
    return behind > INT64_MAX ? INT64_MAX : static_cast<int64_t>(behind) - 1;
  }

 private:
  // Divisions are dear. The product is the quotient or one less: the factor is less than 1 below 2**64 / divisor.
  uint64_t near_quotient(uint64_t value) const {
    return static_cast<uint64_t>(static_cast<unsigned __int128>(value) * factor_ >> 64);
  }
  uint64_t quotient(uint64_t value) const {
    const uint64_t near = near_quotient(value);
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

// Brings ids that are nearly in order from `from` to `to`, in order.
inline void insert_ids(const uint64_t* from, uint64_t* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const auto id = static_cast<int64_t>(from[i]);
    int64_t at = i;
    for (; at > 0 && static_cast<int64_t>(to[at - 1]) > id; --at) to[at] = to[at - 1];
    to[at] = static_cast<uint64_t>(id);
  }
}

// Sorts ids of `from` into `to`; `from` is used up.
inline void sort_ids_to(uint64_t* from, uint64_t* to, int64_t count) {
  if (count <= kInsertionWords) return insert_ids(from, to, count);
  for (int64_t i = 0; i < count; ++i) from[i] = sortable(static_cast<int64_t>(from[i]));
  sort_large(from, to, count);
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] ^ (uint64_t{1} << 63);
}

// What one thread needs to sort groups, as much as the largest that it meets.
struct GroupMemory {
  uint64_t* spare(int64_t count) {
    if (!words || words->size() < count) words = std::make_unique<Scratch<uint64_t>>(count);
    return words->data();
  }
  std::unique_ptr<Scratch<uint64_t>> words;
  std::vector<uint32_t> ends;
};

// What ids of a group are brought in order by: bucket, and below it their highest differing bits. Of one run, where by
// bucket and inside is by id, those bits alone.
class GroupDigit {
 public:
  GroupDigit(const uint64_t* words, int64_t count, const BucketRule& rule, int64_t first_bucket, int64_t run_count)
      : rule_(rule), first_bucket_(first_bucket), is_one_run_(run_count == 1) {
    const int top_bits = differing_bits(words, count),
              wanted = std::min(65 - __builtin_clzll(static_cast<uint64_t>(count)), kGroupDigitBits),
              run_bits = is_one_run_ ? 0 : 64 - __builtin_clzll(static_cast<uint64_t>(run_count - 1));
    bits_ = std::min(top_bits, std::max(0, wanted - run_bits));
    shift_ = std::min(63, top_bits - bits_);
  }
  int bits() const { return bits_; }
  // Whether ids of one value are equal.
  bool is_whole() const { return shift_ == 0; }

  uint64_t operator()(uint64_t word) const {
    const auto id = static_cast<int64_t>(word);
    const uint64_t high = (sortable(id) >> shift_) & ((uint64_t{1} << bits_) - 1);
    return is_one_run_ ? high : static_cast<uint64_t>(rule_(id) - first_bucket_) << bits_ | high;
  }

 private:
  BucketRule rule_;
  int64_t first_bucket_;
  bool is_one_run_;
  int bits_, shift_;
};

// Sorts a group in place, and counts its runs. One pass by a digit that leaves hardly more than one id for each of its
// values; where ids are not spread, what has one value is sorted by itself.
inline void sort_by_digit(uint64_t* words, int64_t count, const GroupDigit& digit, int64_t run_count,
                          GroupMemory& memory, int64_t* counts) {
  const int bits = digit.bits();
  const int64_t value_count = run_count << bits;
  memory.ends.assign(static_cast<size_t>(value_count), 0);
  uint32_t* const ends = memory.ends.data();
  uint64_t* const spare = memory.spare(count);
  // Copies: what is counted could otherwise be their members.
  const auto count_all = [=](GroupDigit of) {
    for (int64_t i = 0; i < count; ++i) ++ends[of(words[i])];
  };
  const auto place_all = [=](GroupDigit of) {
    for (int64_t i = 0; i < count; ++i) spare[ends[of(words[i])]++] = words[i];
  };
  count_all(digit);
  uint32_t total = 0, largest = 0;
  for (int64_t value = 0; value < value_count; ++value) {
    largest = std::max(largest, ends[value]);
    total += std::exchange(ends[value], total);
  }
  place_all(digit);
  const bool is_spread = largest <= kInsertionWords || digit.is_whole();
  for (int64_t run = 0, begin = 0; run < run_count; ++run) {
    const int64_t first = begin;
    // All of a run at once, or each value's by itself.
    for (int64_t value = is_spread ? ((run + 1) << bits) - 1 : run << bits; value < (run + 1) << bits; ++value) {
      const int64_t size = ends[value] - begin;
      if (is_spread) {
        insert_ids(spare + begin, words + begin, size);
      } else {
        sort_ids_to(spare + begin, words + begin, size);
      }
      begin = ends[value];
    }
    counts[run] = begin - first;
  }
}

// One group's ids, sorted in place by bucket and inside.
inline void sort_group(uint64_t* words, int64_t count, const BucketRule& rule, int64_t first_bucket,
                       int64_t bucket_count, GroupMemory& memory, int64_t* counts) {
  const auto* const ids = reinterpret_cast<int64_t*>(words);
  const bool is_one_run = bucket_count == 1 || rule.keeps_order();
  if (count > int64_t{0xFFFFFFFF}) {
    // More ids than 32 bits count are left to the library.
    std::sort(words, words + count, [&rule](uint64_t a, uint64_t b) {
      const auto id = static_cast<int64_t>(a), other = static_cast<int64_t>(b);
      return std::make_pair(rule(id), id) < std::make_pair(rule(other), other);
    });
    for (int64_t i = 0; i < count; ++i) ++counts[rule(ids[i]) - first_bucket];
    return;
  }
  const int64_t run_count = is_one_run ? 1 : bucket_count;
  // Ids that come sorted, as a store lists them, are left so.
  if (count > 0 && !(is_one_run && std::is_sorted(ids, ids + count)))
    sort_by_digit(words, count, {words, count, rule, first_bucket, run_count}, run_count, memory, counts);
  const int64_t* begin = ids;
  for (int64_t bucket = 0; is_one_run && bucket < bucket_count; ++bucket) {
    const int64_t* const end = bucket + 1 == bucket_count
                                   ? ids + count
                                   : std::upper_bound(begin, ids + count, rule.last_id(first_bucket + bucket));
    counts[bucket] = end - begin;
    begin = end;
  }
}

// Ids by bucket, ascending inside, duplicates kept; the count of each bucket in [begin, end). Returns the number of ids
// outside that range, and writes nothing then.
inline int64_t sort_by_bucket(const Parallel& parallel, const int64_t* ids, int64_t count, const BucketRule& rule,
                              int64_t begin, int64_t end, int64_t* sorted, int64_t* counts) {
  const BucketGroups groups(std::max<int64_t>(1, end - begin));
  const int64_t ways = std::max<int64_t>(1, std::min(parallel.thread_count, count / kSplitWords)),
                group_count = groups.count();
  std::vector<int64_t> next(static_cast<size_t>(ways * group_count));
  std::atomic<int64_t> outside{0};
  const auto range_of = [&](int64_t way) { return std::make_pair(count * way / ways, count * (way + 1) / ways); };
  parallel.run(ways, [&](int64_t way) {
    const auto bucket_of = rule;
    const int64_t* const given = ids;
    const int64_t first_bucket = begin, bucket_count = end - begin;
    const int shift = groups.shift;
    int64_t* const counted = next.data() + way * group_count;
    int64_t wrong = 0;
    for (auto [i, last] = range_of(way); i < last; ++i) {
      fetch_ahead(given + i);
      const int64_t bucket = bucket_of(given[i]) - first_bucket;
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
  auto* const words = reinterpret_cast<uint64_t*>(sorted);
  if (end - begin == 1) {
    counts[0] = count;
    parallel.run(ways, [&](int64_t way) {
      const auto [first, last] = range_of(way);
      std::copy(ids + first, ids + last, sorted + first);
    });
    if (!std::is_sorted(sorted, sorted + count)) sort_keys(parallel, sorted, count);
    return 0;
  }
  parallel.run(ways, [&](int64_t way) {
    const auto bucket_of = rule;
    const int64_t* const given = ids;
    const int64_t first_bucket = begin;
    const int shift = groups.shift;
    int64_t* const places = next.data() + way * group_count;
    uint64_t* const target = words;
    for (auto [i, last] = range_of(way); i < last; ++i) {
      fetch_ahead(given + i);
      const int64_t id = given[i], place = places[(bucket_of(id) - first_bucket) >> shift]++;
      target[place] = static_cast<uint64_t>(id);
      fetch_next_to_write(target + place);
    }
  });
  std::atomic<int64_t> next_group{0};
  parallel.run(std::min(std::max<int64_t>(1, parallel.thread_count), group_count), [&](int64_t) {
    GroupMemory memory;
    for (int64_t group = next_group++; group < group_count; group = next_group++) {
      const int64_t first = begins[static_cast<size_t>(group)], first_bucket = groups.first_bucket(group);
      sort_group(words + first, begins[static_cast<size_t>(group + 1)] - first, rule, begin + first_bucket,
                 groups.end_bucket(group) - first_bucket, memory, counts + first_bucket);
    }
  });
  return 0;
}

}  // namespace fastimpl
