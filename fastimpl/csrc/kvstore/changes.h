// Which ids a table holds, and which changed or went since some version. Under the shared lock.
#pragma once

#include "kvstore/evict.h"

namespace fastimpl::kvstore {

// So many rows are worth another thread.
constexpr int64_t kListedRows = regime(65536, 3);

// Ids in [first, last], ascending.
inline Ids list_ids(const Table& table, const Parallel& parallel, int64_t first, int64_t last,
                    const Overlay* snapshot) {
  const int64_t row_count = table.rows.pool.size(),
                part_count = std::max<int64_t>(1, std::min(parallel.thread_count, row_count / kListedRows));
  const auto begin_of = [&](int64_t part) { return row_count * part / part_count; };
  Ids ids(static_cast<size_t>(row_count));
  std::vector<int64_t> ends(static_cast<size_t>(part_count));
  const auto is_wanted = [&](int64_t key) { return first <= key && key <= last; };
  parallel.run(part_count, [&](int64_t part) {
    int64_t at = begin_of(part);
    for_live_keys(table, snapshot, at, begin_of(part + 1), [&](int64_t key, uint64_t) {
      if (is_wanted(key)) ids[static_cast<size_t>(at++)] = key;
    });
    ends[static_cast<size_t>(part)] = at;
  });
  // Each part wrote from its begin on; what it passed over is closed here.
  auto behind = ids.begin();
  for (int64_t part = 0; part < part_count; ++part) {
    const auto from = ids.begin() + begin_of(part), to = ids.begin() + ends[static_cast<size_t>(part)];
    behind = from == behind ? to : std::move(from, to, behind);
  }
  ids.erase(behind, ids.end());
  for_kept_keys(table, snapshot, [&](int64_t key, uint64_t) {
    if (is_wanted(key)) ids.push_back(key);
  });
  sort_keys(parallel, ids.data(), static_cast<int64_t>(ids.size()));
  return ids;
}

inline Ids list_changed(const Table& table, const Parallel& parallel, uint64_t since, const Overlay* snapshot) {
  Ids ids;
  for_each_key(table, snapshot, [&](int64_t key, uint64_t version) {
    if (version > since) ids.push_back(key);
  });
  sort_keys(parallel, ids.data(), static_cast<int64_t>(ids.size()));
  return ids;
}

// A removal counts while no row has followed it.
inline Ids list_removed(const Table& table, const Parallel& parallel, uint64_t since, const Overlay* snapshot) {
  const Removals& log = snapshot == nullptr ? *table.removals : *snapshot->removals;
  const size_t count = snapshot == nullptr ? log.size() : snapshot->removal_count;
  Ids ids;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t hash = hash_key(log[i].key);
    if (log[i].version > since && table.as_of(snapshot, hash, log[i].key, table.rows.find(hash, log[i].key)) == nullptr)
      ids.push_back(log[i].key);
  }
  sort_keys(parallel, ids.data(), static_cast<int64_t>(ids.size()));
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

}  // namespace fastimpl::kvstore
