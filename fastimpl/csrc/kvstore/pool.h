// The rows of a table: one dense array of blocks, cut into chunks so that growth never moves a row.
//
// A block is a row, padding, and in its last 8 bytes the version of the row's last change. Blocks start at multiples of
// 64 bytes. There are no holes: a deleted row's place is taken by the last row, so that memory can always be given back
// and scans meet rows only. Pointers to rows live no longer than the table's lock.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>

#include "common/memory.h"
#include "common/regimes.h"

namespace fastimpl::kvstore {

constexpr int64_t kChunkBytesMax = regime(16 << 20, 1 << 10);
constexpr int64_t kChunkRowsMin = 16;
constexpr int64_t kSlotsMax = int64_t{0xFFFFFFF0};
constexpr int64_t kVersionBytes = 8;

struct SlotRange {
  int64_t next = 0, end = 0;
};

class RowPool {
 public:
  RowPool(Memory& memory, int64_t row_bytes)
      : memory_(memory), row_bytes_(row_bytes), stride_((row_bytes + kVersionBytes + 63) / 64 * 64) {
    while (kChunkRowsMin << (shift_ + 1) <= kChunkBytesMax / stride_) ++shift_;
    shift_ += 4;  // kChunkRowsMin is 1 << 4.
    mask_ = (int64_t{1} << shift_) - 1;
  }
  RowPool(const RowPool&) = delete;
  RowPool& operator=(const RowPool&) = delete;
  ~RowPool() { release_chunks(0); }

  int64_t size() const { return size_.load(std::memory_order_relaxed); }
  int64_t row_bytes() const { return row_bytes_; }
  int64_t stride() const { return stride_; }

  uint8_t* at(int64_t slot) const { return chunks_[static_cast<size_t>(slot >> shift_)] + (slot & mask_) * stride_; }

  static int64_t key(const uint8_t* row) {
    int64_t key;
    std::memcpy(&key, row, sizeof key);
    return key;
  }
  uint64_t version(const uint8_t* row) const {
    uint64_t version;
    std::memcpy(&version, row + stride_ - kVersionBytes, sizeof version);
    return version;
  }
  void set_version(uint8_t* row, uint64_t version) const {
    std::memcpy(row + stride_ - kVersionBytes, &version, sizeof version);
  }

  // Room for the pointers of every chunk that `row_count` more rows can need. One thread; before `push`. Throws.
  void prepare(int64_t row_count) {
    const int64_t chunk_count = (step_up(size() + row_count) >> shift_) + 1;
    if (chunk_count <= chunk_limit_) return;
    const int64_t limit = std::max(chunk_count, 2 * chunk_limit_);
    auto longer = std::make_unique<uint8_t*[]>(static_cast<size_t>(limit));
    std::copy_n(chunks_.get(), chunk_limit_, longer.get());
    chunks_ = std::move(longer);
    chunk_limit_ = limit;
  }

  // At least one and at most `wanted` new last rows, their blocks not yet written, and no more than memory is held for
  // where it is held for one; several threads may push at once. Throws std::bad_alloc, and then there is no new row.
  SlotRange push(int64_t wanted) {
    int64_t slot = size(), behind;
    do {
      if (slot >= held_rows_.load(std::memory_order_acquire)) hold(slot + 1);
      behind = std::min(slot + wanted, held_rows_.load(std::memory_order_acquire));
    } while (!size_.compare_exchange_weak(slot, behind, std::memory_order_relaxed));
    return {slot, behind};
  }

  // Undoes all pushes since there were `row_count` rows; nothing is given back.
  void truncate(int64_t row_count) noexcept { size_.store(row_count, std::memory_order_relaxed); }

  // Memory for this many rows, not yet touched; returns how many had theirs before. Throws.
  int64_t allocate(int64_t row_count) {
    prepare(std::max<int64_t>(0, row_count - size()));
    const int64_t before = held_rows_.load();
    if (row_count > before) hold(row_count);
    return before;
  }

  // Gives memory back when the rows need less than half of it.
  void trim() noexcept {
    const int64_t wanted = step_up(size());
    if (wanted > held_rows_.load() / 2) return;
    const int64_t chunk_count = (wanted + mask_) >> shift_;
    release_chunks(chunk_count);
    held_rows_.store(std::min(wanted, chunk_count << shift_));
    if (chunk_count > 0) drop_tail(chunk_count - 1, held_rows_.load());
  }

  // Nobody else uses either; rows of one width, memory of one account.
  void swap(RowPool& other) noexcept {
    chunks_.swap(other.chunks_);
    std::swap(chunk_limit_, other.chunk_limit_);
    std::swap(chunk_count_, other.chunk_count_);
    size_.store(other.size_.exchange(size()));
    held_rows_.store(other.held_rows_.exchange(held_rows_.load()));
  }

  // Bytes of the rows that memory is held for.
  int64_t held_bytes() const { return held_rows_.load(std::memory_order_relaxed) * stride_; }

 private:
  // Memory grows in steps of about a hundredth, so that a few rows more or less need no other amount; what is held and
  // not yet touched, and so not resident, is less than that.
  int64_t step_up(int64_t row_count) const {
    if (row_count == 0) return 0;
    int64_t step = std::max<int64_t>(1, 16384 / stride_);
    while (step * 128 < row_count) step *= 2;
    return (row_count + step - 1) / step * step;
  }

  void hold(int64_t row_count) {
    std::lock_guard<std::mutex> guard(growth_);
    const int64_t held = held_rows_.load();
    if (row_count <= held) return;
    const int64_t wanted = step_up(row_count);
    const int64_t chunk_bytes = stride_ << shift_;
    for (; chunk_count_ << shift_ < wanted; ++chunk_count_)
      chunks_[static_cast<size_t>(chunk_count_)] = memory_.take(static_cast<size_t>(chunk_bytes));
    // Small tables stay on small pages: a huge page is committed, and cleared, as a whole.
    for (int64_t chunk = held >> shift_; chunk < chunk_count_; ++chunk) {
      if (wanted * stride_ > static_cast<int64_t>(kHugePageBytes) &&
          chunk_bytes > static_cast<int64_t>(kHugePageBytes)) {
        madvise(chunks_[static_cast<size_t>(chunk)], static_cast<size_t>(chunk_bytes), MADV_HUGEPAGE);
      }
    }
    held_rows_.store(wanted, std::memory_order_release);
  }

  void release_chunks(int64_t keep_count) noexcept {
    for (; chunk_count_ > keep_count; --chunk_count_) {
      memory_.give(chunks_[static_cast<size_t>(chunk_count_ - 1)], static_cast<size_t>(stride_ << shift_));
    }
  }

  // The pages of a chunk behind its last held row go back to the system; what is read there afterwards is zero.
  void drop_tail(int64_t chunk, int64_t row_count) noexcept {
    const auto chunk_bytes = static_cast<size_t>(stride_ << shift_);
    if (chunk_bytes < kMapThresholdBytes) return;
    const auto used = round_up(static_cast<size_t>((row_count - (chunk << shift_)) * stride_), kPageBytes);
    if (used < chunk_bytes) madvise(chunks_[static_cast<size_t>(chunk)] + used, chunk_bytes - used, MADV_DONTNEED);
  }

  Memory& memory_;
  const int64_t row_bytes_, stride_;
  int64_t shift_ = 0, mask_ = 0;
  std::unique_ptr<uint8_t*[]> chunks_;
  int64_t chunk_limit_ = 0, chunk_count_ = 0;
  // Threads that insert write here all the time; what `at` reads must not lie in the same cache line.
  alignas(64) std::atomic<int64_t> size_{0};
  alignas(64) std::atomic<int64_t> held_rows_{0};
  std::mutex growth_;
};

// Where one thread's new rows go: it takes a run of slots at once, since threads that push row by row wait for each
// other.
class SlotRun {
 public:
  explicit SlotRun(RowPool& pool) : pool_(pool) {}

  // At least this many slots are about to be taken.
  void expect(int64_t count) { expected_ = count; }

  // A new row. Throws std::bad_alloc.
  uint32_t take() {
    if (run_.next == run_.end) run_ = pool_.push(std::max<int64_t>(1, expected_));
    --expected_;
    if (run_.next + kAhead < run_.end) __builtin_prefetch(pool_.at(run_.next + kAhead), 1);
    return static_cast<uint32_t>(run_.next++);
  }

 private:
  static constexpr int64_t kAhead = regime(16, 2);
  RowPool& pool_;
  SlotRange run_;
  int64_t expected_ = 0;
};

}  // namespace fastimpl::kvstore
