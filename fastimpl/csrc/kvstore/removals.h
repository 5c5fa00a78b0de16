// The log of removals: ids that went, in the order of time, for deltas.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "common/regimes.h"

namespace fastimpl::kvstore {

struct Removal {
  int64_t key;
  uint64_t version;
};
using Removals = std::vector<Removal>;

// So many removals are logged before those are dropped that no longer count.
constexpr int64_t kLoggedRemovals = regime(4096, 8);

inline bool is_long(const Removals& log, size_t compacted_count) {
  return static_cast<int64_t>(log.size()) > 2 * static_cast<int64_t>(compacted_count) + kLoggedRemovals;
}

// Without removals that a later removal of the same id has followed, and those that do not count any more: `is_over` is
// told the place of a removal. The memory of the result is what it needs.
template <typename IsOver>
std::shared_ptr<Removals> compacted(const Removals& log, const IsOver& is_over) {
  std::vector<std::pair<int64_t, size_t>> last;
  for (size_t i = 0; i < log.size(); ++i) {
    if (!is_over(i)) last.emplace_back(log[i].key, i);
  }
  std::sort(last.begin(), last.end());
  auto kept = std::make_shared<Removals>();
  for (size_t i = 0; i < last.size(); ++i) {
    if (i + 1 == last.size() || last[i + 1].first != last[i].first) kept->push_back(log[last[i].second]);
  }
  kept->shrink_to_fit();
  return kept;
}

// Bytes that a log holds.
inline int64_t bytes_of(const Removals& log) { return static_cast<int64_t>(log.capacity() * sizeof(Removal)); }

inline void reserve_log(Removals& log, size_t count) {
  const size_t wanted = log.size() + count;
  if (wanted > log.capacity()) log.reserve(std::max(wanted, 2 * log.capacity()));
}

}  // namespace fastimpl::kvstore
