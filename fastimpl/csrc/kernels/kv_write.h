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

// The same past the caches. `kept` has a byte for each of the row, 0 in its padding and else 255.
inline void stream_block(const RowPool& pool, const uint8_t* row, const uint8_t* kept, int64_t plain_bytes, uint64_t version, uint8_t* block) {
  const auto put = [&](int64_t at, __m128i word) { _mm_stream_si128(reinterpret_cast<__m128i*>(block + at), word); };
  const auto word_at = [](const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); };
  put(0, _mm_or_si128(word_at(row), _mm_set_epi64x(static_cast<int64_t>(kUsed), 0)));
  int64_t at = kHeaderBytes;
  for (; at < plain_bytes; at += 16) put(at, word_at(row + at));
  for (; at + 16 <= pool.row_bytes(); at += 16) put(at, _mm_and_si128(word_at(row + at), word_at(kept + at)));
  __m128i last = _mm_setzero_si128();
  if (at < pool.row_bytes()) {
    alignas(16) uint8_t rest[16] = {};
    std::memcpy(rest, row + at, static_cast<size_t>(pool.row_bytes() - at));
    last = _mm_and_si128(word_at(rest), word_at(kept + at));
  }
  for (; at + 16 < pool.stride(); at += 16) put(at, std::exchange(last, _mm_setzero_si128()));
  put(at, _mm_or_si128(last, _mm_set_epi64x(static_cast<int64_t>(version), 0)));
}

// Replaces whole rows [count, row_bytes]. Where they are many their lines are written without being read first.
inline void write_whole(Table& table, const Parallel& parallel, const int64_t* ids, int64_t count, const uint8_t* values, Change change) {
  const int64_t row_bytes = table.format.row_bytes, stride = table.rows.pool.stride();
  const int64_t plain_bytes = (table.padding.empty() ? row_bytes : table.padding.front().begin) / 16 * 16;
  std::vector<uint8_t> kept(static_cast<size_t>(stride), 255);
  for (const Range& pad : table.padding) std::fill(kept.begin() + pad.begin, kept.begin() + pad.end, uint8_t{0});
  const bool streams = count * stride >= kStreamBytes;
  const Range whole{0, row_bytes}, block{0, stride}, none{0, 0};
  auto inserted = insert_rows(table, parallel, ids, count, block, change.now);
  table.for_found(parallel, inserted.found, {streams ? none : whole, values, row_bytes}, [&](int64_t position, uint8_t* row) {
    if (streams) {
      stream_block(table.rows.pool, values + position * row_bytes, kept.data(), plain_bytes, change.version, row);
    } else {
      make_block(table, values + position * row_bytes, change.version, row);
    }
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
