// Rows that are found by key: a pool and one map for each shard. The live rows of a table are such a set, and so is
// what a snapshot keeps of rows that changed after it.
#pragma once

#include <memory>

#include "common/parallel.h"
#include "common/regimes.h"
#include "kvstore/map.h"
#include "kvstore/row.h"

namespace fastimpl::kvstore {

constexpr int64_t kTouchedGrain = regime(4096, 3);

class RowSet {
 public:
  RowSet(Memory& memory, int64_t row_bytes, int64_t shard_count) : pool(memory, row_bytes) {
    shards_.reserve(static_cast<size_t>(shard_count));
    for (int64_t i = 0; i < shard_count; ++i) shards_.emplace_back(memory, pool);
  }

  RowPool pool;

  int64_t shard_count() const { return static_cast<int64_t>(shards_.size()); }
  int64_t shard_index(uint64_t hash) const { return shard_of(hash, shard_count()); }
  const ShardMap& shard(uint64_t hash) const { return shards_[static_cast<size_t>(shard_index(hash))]; }
  ShardMap& shard(uint64_t hash) { return shards_[static_cast<size_t>(shard_index(hash))]; }
  const ShardMap& shard_at(int64_t index) const { return shards_[static_cast<size_t>(index)]; }

  // The row of a key, or null.
  uint8_t* find(uint64_t hash, int64_t key) const {
    const uint32_t slot = shard(hash).find(hash, key);
    return slot == kAbsent ? nullptr : pool.at(slot);
  }

  // A new row whose key and metadata are written, and nothing else; the key has none yet. Threads may insert at once,
  // each into shards of its own, after `pool.prepare`. Throws std::bad_alloc.
  int64_t insert(uint64_t hash, int64_t key) {
    const int64_t slot = pool.push(1).next;
    insert_at(slot, hash, key);
    return slot;
  }

  // The same with a row that was pushed before.
  void insert_at(int64_t slot, uint64_t hash, int64_t key) {
    std::memcpy(pool.at(slot), &key, sizeof key);
    shard(hash).insert(hash, static_cast<uint32_t>(slot));
  }

  int64_t map_bytes() const {
    int64_t bytes = 0;
    for (const ShardMap& shard : shards_) bytes += shard.held_bytes() + static_cast<int64_t>(sizeof(ShardMap));
    return bytes;
  }

  // Makes room for this many rows, and touches it. Throws std::bad_alloc.
  void reserve(const Parallel& parallel, int64_t row_count) {
    const int64_t touched = pool.allocate(row_count);
    parallel.run_ranges(std::max<int64_t>(0, row_count - touched), kTouchedGrain, [&](int64_t begin, int64_t end) {
      for (int64_t slot = touched + begin; slot < touched + end; ++slot)
        *static_cast<volatile uint8_t*>(pool.at(slot)) = 0;
    });
    const double mean = static_cast<double>(row_count) / static_cast<double>(shard_count());
    const auto shard_rows = static_cast<int64_t>(mean + 6 * __builtin_sqrt(mean)) + 1;
    // Clearing the pages of a map is most of the work.
    parallel.run(shard_count(), [&](int64_t shard) { shards_[static_cast<size_t>(shard)].reserve(shard_rows); });
  }

  // Both have rows of one width, as many shards, and memory of one account.
  void swap(RowSet& other) noexcept {
    pool.swap(other.pool);
    for (size_t i = 0; i < shards_.size(); ++i) shards_[i].swap(other.shards_[i]);
  }

  void trim() noexcept {
    pool.trim();
    for (ShardMap& shard : shards_) shard.trim();
  }

 private:
  std::vector<ShardMap> shards_;
};

}  // namespace fastimpl::kvstore
