// Writing a batch: values into rows, whole rows, header words. Under the exclusive lock.
#pragma once

#include "kvstore/capacity.h"

namespace fastimpl::kvstore {

inline void visit_header(const RowFormat& format, uint8_t* row, uint64_t now) {
  uint64_t count = count_of(metadata(row));
  if (format.counts_visits && count < kCountMax) ++count;
  set_metadata(row, word_of(now, count));
}

// Places values [count, width] at [range.begin, range.end) of the rows; of duplicates the last wins.
inline void write_values(Table& table, const Parallel& parallel, const int64_t* ids, int64_t count,
                         const uint8_t* values, Range range, bool visit, Change change) {
  const int64_t width = range.end - range.begin;
  auto inserted = insert_rows(table, parallel, ids, count, range, change.now);
  change.begin();
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
  _mm_storeu_si128(reinterpret_cast<__m128i*>(block),
                   _mm_or_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row)), used));
  short_copy(block + kHeaderBytes, row + kHeaderBytes, pool.row_bytes() - kHeaderBytes);
  for (const Range& pad : table.padding) std::memset(block + pad.begin, 0, static_cast<size_t>(pad.end - pad.begin));
  std::memset(block + pool.row_bytes(), 0, static_cast<size_t>(pool.stride() - pool.row_bytes()));
  pool.set_version(block, version);
}

// Makes blocks past the caches: lines are written without being read first, and are whole only once `_mm_sfence` has
// run.
class BlockWriter {
 public:
  explicit BlockWriter(const Table& table)
      : row_bytes_(table.format.row_bytes),
        stride_(table.rows.pool.stride()),
        kept_(static_cast<size_t>(stride_), 255),
        plain_bytes_((table.padding.empty() ? row_bytes_ : table.padding.front().begin) / 16 * 16) {
    for (const Range& pad : table.padding) std::fill(kept_.begin() + pad.begin, kept_.begin() + pad.end, uint8_t{0});
  }

  int64_t stride() const { return stride_; }

  // What `make_block` makes.
  void stream(const uint8_t* row, uint64_t version, uint8_t* block) const {
    const auto put = [&](int64_t at, __m128i word) { _mm_stream_si128(reinterpret_cast<__m128i*>(block + at), word); };
    const auto word_at = [](const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); };
    const uint8_t* const kept = kept_.data();
    put(0, _mm_or_si128(word_at(row), _mm_set_epi64x(static_cast<int64_t>(kUsed), 0)));
    int64_t at = kHeaderBytes;
    for (; at < plain_bytes_; at += 16) put(at, word_at(row + at));
    for (; at + 16 <= row_bytes_; at += 16) put(at, _mm_and_si128(word_at(row + at), word_at(kept + at)));
    __m128i last = _mm_setzero_si128();
    if (at < row_bytes_) {
      alignas(16) uint8_t rest[16] = {};
      std::memcpy(rest, row + at, static_cast<size_t>(row_bytes_ - at));
      last = _mm_and_si128(word_at(rest), word_at(kept + at));
    }
    for (; at + 16 < stride_; at += 16) put(at, std::exchange(last, _mm_setzero_si128()));
    put(at, _mm_or_si128(last, _mm_set_epi64x(static_cast<int64_t>(version), 0)));
  }

 private:
  const int64_t row_bytes_, stride_;
  std::vector<uint8_t> kept_;  // A byte for each of the row, 0 in its padding and else 255.
  const int64_t plain_bytes_;  // Before the first padding.
};

// Replaces whole rows [count, row_bytes]; past the caches where they are many.
inline void write_whole(Table& table, const Parallel& parallel, const int64_t* ids, int64_t count,
                        const uint8_t* values, Change change) {
  const int64_t row_bytes = table.format.row_bytes;
  const BlockWriter writer(table);
  const bool streams = count * writer.stride() >= kStreamBytes;
  const Range whole{0, row_bytes}, block{0, writer.stride()}, none{0, 0};
  auto inserted = insert_rows(table, parallel, ids, count, block, change.now);
  change.begin();
  table.for_found(parallel, inserted.found, {streams ? none : whole, values, row_bytes},
                  [&](int64_t position, uint8_t* row) {
                    if (streams) {
                      writer.stream(values + position * row_bytes, change.version, row);
                    } else {
                      make_block(table, values + position * row_bytes, change.version, row);
                    }
                  });
  remove_excess(table, inserted, change);
}

// Sets the bits `mask` of the metadata of the rows that exist.
inline void write_metadata(Table& table, const Parallel& parallel, const int64_t* ids, int64_t count,
                           const int64_t* words, uint64_t mask, Change change) {
  const auto found = table.find(parallel, ids, count, Table::Missing::kSkip, {0, kHeaderBytes}, {0, 0}, change.now);
  change.begin();
  table.for_found(parallel, found, {{0, kHeaderBytes}, reinterpret_cast<const uint8_t*>(words), 8},
                  [&](int64_t position, uint8_t* row) {
                    set_metadata(row,
                                 (metadata(row) & ~mask) | (static_cast<uint64_t>(words[position]) & mask) | kUsed);
                    table.rows.pool.set_version(row, change.version);
                  });
}

}  // namespace fastimpl::kvstore
