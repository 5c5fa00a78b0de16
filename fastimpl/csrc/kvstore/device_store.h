// The tables of a store on a device, its moments, and the number of the last change.
#pragma once

#include "kvstore/device_table.h"

namespace fastimpl::kvstore::device {

template <typename Device>
struct DeviceStore {
  using Table = DeviceTable<Device>;

  Device device;
  std::vector<std::unique_ptr<Table>> tables;
  uint64_t version = 0;
  uint64_t first_mark = 0;     // The first that changes can be asked since.
  std::vector<int64_t> steps;  // Of the last update of each table.

  explicit DeviceStore(Device device_) : device(std::move(device_)) {}
};

// A store as it was. The store lives as long, since its rows are read where they are.
template <typename Store>
struct StoreMoment {
  std::shared_ptr<Store> store;
  std::vector<std::shared_ptr<typename Store::Table::Moment>> tables;
  uint64_t version, first_mark;
  std::vector<int64_t> steps;

  explicit StoreMoment(const std::shared_ptr<Store>& store_)
      : store(store_), version(store_->version), first_mark(store_->first_mark), steps(store_->steps) {
    for (const auto& table : store->tables) tables.push_back(table->moment(version));
  }
};

// What happened to a change: 0, or the number of distinct ids that were too many. Memory is the caller's.
template <typename Body>
int64_t status_of(const Body& body) {
  try {
    body();
  } catch (const TooManyIds& found) {
    return found.count;
  }
  return 0;
}

// The ids of this moment, and [mark, has cutoff, score, key] of it; a cutoff only where keep_count is above 0.
template <typename Store>
std::pair<std::vector<int64_t>, std::vector<int64_t>> begin_round(Store& store, size_t index, int64_t keep_count) {
  auto& table = *store.tables[index];
  std::vector<int64_t> facts{static_cast<int64_t>(store.version), 0, 0, 0};
  if (keep_count > 0 && keep_count < table.size()) {
    const auto [score, key] = table.score_cutoff(keep_count);
    facts = {facts[0], 1, static_cast<int64_t>(score), key};
  }
  return {table.list(kIdMin, kIdMax, 0), facts};
}

// Drops what only marks before `mark` need, of all tables. Throws std::bad_alloc, and then of none.
template <typename Store>
void forget(Store& store, uint64_t mark) {
  const uint64_t first_mark = std::max(store.first_mark, mark);
  std::vector<std::shared_ptr<Removals>> logs;
  for (const auto& table : store.tables) logs.push_back(table->removals_since(first_mark));
  for (size_t i = 0; i < logs.size(); ++i) store.tables[i]->set_removals(std::move(logs[i]));
  store.first_mark = first_mark;
}

// Per table [rows, blocks, bytes of rows, bytes held for rows, bytes of the index, evicted, bytes of removals].
template <typename Store>
std::vector<int64_t> stats_of(Store& store) {
  std::vector<int64_t> counts;
  for (const auto& table : store.tables) {
    const int64_t row_count = table->size();
    counts.insert(counts.end(), {row_count, row_count, row_count * table->format().row_bytes, table->held_bytes(),
                                 table->map_bytes(), table->evicted_count(), table->log_bytes()});
  }
  return counts;
}

}  // namespace fastimpl::kvstore::device
