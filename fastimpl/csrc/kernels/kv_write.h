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
  table.for_found(parallel, inserted.found, range, [&](int64_t position, uint8_t* row) {
    short_copy(row + range.begin, values + position * width, width);
    if (visit) visit_header(table.format, row, change.now);
    table.rows.pool.set_version(row, change.version);
  });
  remove_excess(table, inserted, change);
}

// Replaces whole rows [count, row_bytes]; used is set, padding is zero.
inline void write_whole(Table& table, const Parallel& parallel, const int64_t* ids, int64_t count, const uint8_t* values, Change change) {
  const int64_t row_bytes = table.format.row_bytes;
  const Range whole{0, row_bytes};
  auto inserted = insert_rows(table, parallel, ids, count, whole, change.now);
  table.for_found(parallel, inserted.found, whole, [&](int64_t position, uint8_t* row) {
    short_copy(row, values + position * row_bytes, row_bytes);
    set_metadata(row, metadata(row) | kUsed);
    for (const Range& pad : table.padding) std::memset(row + pad.begin, 0, static_cast<size_t>(pad.end - pad.begin));
    table.rows.pool.set_version(row, change.version);
  });
  remove_excess(table, inserted, change);
}

// Sets the bits `mask` of the metadata of the rows that exist.
inline void write_metadata(Table& table, const Parallel& parallel, const int64_t* ids, int64_t count, const int64_t* words, uint64_t mask,
                           Change change) {
  const auto found = table.find(parallel, ids, count, Table::Missing::kSkip, {0, kHeaderBytes}, {0, 0}, change.now);
  table.for_found(parallel, found, {0, kHeaderBytes}, [&](int64_t position, uint8_t* row) {
    set_metadata(row, (metadata(row) & ~mask) | (static_cast<uint64_t>(words[position]) & mask) | kUsed);
    table.rows.pool.set_version(row, change.version);
  });
}

}  // namespace fastimpl::kv
