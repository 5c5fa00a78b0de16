// Properties of the row store's kernels, and what their two files share.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <thread>

#include "kvstore/changes.h"
#include "kvstore/filling.h"
#include "kvstore/update.h"

// Tables against a dictionary, with snapshots, growth, failing allocations and threads.
void kvstore_table_tests();
// Sorting, rounding, optimizers, eviction and capacity.
void kvstore_algorithm_tests();

namespace kvstore_tests {

using namespace fastimpl;
using namespace fastimpl::kvstore;
using Bytes = std::vector<uint8_t>;

inline std::mt19937_64 random_bits(20251122);

inline int64_t uniform(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random_bits);
}

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "kvstore_tests: %s\n", what);
  std::exit(1);
}

inline Parallel threads(int64_t count) {
  return {count, [](int64_t worker_count, const std::function<void(int64_t)>& work) {
            std::vector<std::thread> workers;
            for (int64_t i = 1; i < worker_count; ++i) workers.emplace_back(work, i);
            work(0);
            for (auto& worker : workers) worker.join();
          }};
}

// D elements of float32, then momentum1 and momentum2 as Adam has them; or no state, and then padding.
inline RowFormat format_of(int64_t dim, bool adam) {
  RowFormat format{};
  const int64_t begin = kHeaderBytes + (dim + 3) / 4 * 16;
  format.dim = dim;
  format.weight_type = Float::kFloat32;
  format.row_bytes = begin;
  if (adam) {
    format.optimizer = Optimizer::kAdam;
    format.momentum1 = {begin, dim, Float::kFloat32};
    format.momentum2 = {begin + 4 * dim, dim, Float::kFloat32};
    format.row_bytes = begin + (2 * dim + 3) / 4 * 16;
  }
  format.uniform = true;
  format.low = -1.0F;
  format.span = 2.0F;
  format.table_word = 12345;
  format.counts_visits = true;
  format.logs_removals = true;
  format.capacity = -1;
  return format;
}

}  // namespace kvstore_tests
