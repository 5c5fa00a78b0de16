// Writing a batch: values into rows, whole rows, header words. Under the exclusive lock.
#pragma once

#include "kv_capacity.h"

namespace fastimpl::kv {

inline void visit_header(const RowFormat& format, uint8_t* row, uint64_t now) {
  uint64_t count = count_of(metadata(row));
  if (format.counts_visits && count < kCountMax) ++count;
  set_metadata(row, word_of(now, count));
}

// Places values [count, width] at [range.begin, range.end) of the rows; of duplicates the last wins.
inline void write_values(Table& table, const Parallel& parallel, const int64_t* ids, int64_t count, const uint8_t* values, Range range,
                         bool visit, Change change) {
  const int64_t width = range.end - range.begin;
  auto inserted = insert_rows(table, parallel, ids, count, range, change.now);
  table.for_found(parallel, inserted.found, {range, values, width}, [&](int64_t position, uint8_t* row) {
    short_copy(row + range.begin, values + position * width, width);
    if (visit) visit_header(table.format, row, change.now);
    table.rows.pool.set_version(row, change.version);
  });
  remove_excess(table, inserted, change);
}

// A block with this row: used is set, padding is zero.
inline void make_block(const Table& table, const uint8_t* row, uint64_t version, uint8_t* block) {
  const RowPool& pool = table.rows.pool;
  const __m128i used = _mm_set_epi64x(static_cast<int64_t>(kUsed), 0);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(block), _mm_or_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row)), used));
  short_copy(block + kHeaderBytes, row + kHeaderBytes, pool.row_bytes() - kHeaderBytes);
  for (const Range& pad : table.padding) std::memset(block + pad.begin, 0, static_cast<size_t>(pad.end - pad.begin));
  std::memset(block + pool.row_bytes(), 0, static_cast<size_t>(pool.stride() - pool.row_bytes()));
  pool.set_version(block, version);
}

// Replaces whole rows [count, row_bytes]. Where they are many their lines are written without being read first.
inline void write_whole(Table& table, const Parallel& parallel, const int64_t* ids, int64_t count, const uint8_t* values, Change change) {
  constexpr int64_t kBlockBytesMax = 4096;
  const int64_t row_bytes = table.format.row_bytes, stride = table.rows.pool.stride();
  const bool streams = count * stride >= kStreamBytes && stride <= kBlockBytesMax;
  const Range whole{0, row_bytes}, none{0, 0};
  auto inserted = insert_rows(table, parallel, ids, count, whole, change.now);
  table.for_found(parallel, inserted.found, {streams ? none : whole, values, row_bytes}, [&](int64_t position, uint8_t* row) {
    alignas(64) uint8_t block[kBlockBytesMax];
    make_block(table, values + position * row_bytes, change.version, streams ? block : row);
    if (streams) stream_copy(row, block, stride);
  });
  remove_excess(table, inserted, change);
}

// Sets the bits `mask` of the metadata of the rows that exist.
inline void write_metadata(Table& table, const Parallel& parallel, const int64_t* ids, int64_t count, const int64_t* words, uint64_t mask,
                           Change change) {
  const auto found = table.find(parallel, ids, count, Table::Missing::kSkip, {0, kHeaderBytes}, {0, 0}, change.now);
  table.for_found(parallel, found, {{0, kHeaderBytes}, reinterpret_cast<const uint8_t*>(words), 8}, [&](int64_t position, uint8_t* row) {
    set_metadata(row, (metadata(row) & ~mask) | (static_cast<uint64_t>(words[position]) & mask) | kUsed);
    table.rows.pool.set_version(row, change.version);
  });
}

}  // namespace fastimpl::kv
