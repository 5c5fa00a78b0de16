// Memory of one table, counted exactly: rows, maps and what snapshots keep.
//
// Prevents allocations that nobody accounts for and that no test can make fail: everything that grows with the rows
// comes from here.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace fastimpl::kv {

constexpr size_t kHugePageBytes = size_t{2} << 20;
constexpr size_t kMapThresholdBytes = size_t{1} << 20;

// Fetches the cache line at `address`. Not the compiler's builtin: functions that only fetch pass for functions without
// effects, and GCC leaves calls of such out.
inline void fetch_line(const void* address) { asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(address))); }

class Memory {
 public:
  // Zeroed and aligned to 64 bytes, to huge pages where it is large. Throws std::bad_alloc.
  uint8_t* take(size_t bytes) {
    // A test's countdown: the allocation at which it reaches zero fails, and every later one.
    if (countdown_.load(std::memory_order_relaxed) >= 0 && countdown_.fetch_sub(1) <= 0) {
      countdown_.store(0);
      throw std::bad_alloc();
    }
    uint8_t* const memory = bytes < kMapThresholdBytes ? take_small(bytes) : take_mapped(bytes);
    held_bytes_.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
    return memory;
  }

  void give(uint8_t* memory, size_t bytes) noexcept {
    if (memory == nullptr) return;
    if (bytes < kMapThresholdBytes) {
      std::free(memory);
    } else {
      munmap(memory, round_up(bytes, kPageBytes));
    }
    held_bytes_.fetch_sub(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  }

  int64_t held_bytes() const { return held_bytes_.load(std::memory_order_relaxed); }

  // For tests: -1 is never.
  void fail_after(int64_t allocation_count) { countdown_.store(allocation_count); }

  static size_t round_up(size_t bytes, size_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

  static constexpr size_t kPageBytes = 4096;

 private:
  static uint8_t* take_small(size_t bytes) {
    void* const memory = std::aligned_alloc(64, round_up(bytes, 64));
    if (memory == nullptr) throw std::bad_alloc();
    return static_cast<uint8_t*>(std::memset(memory, 0, bytes));
  }

  // Maps a huge page more than needed and gives the unaligned ends back.
  static uint8_t* take_mapped(size_t bytes) {
    const size_t wanted = round_up(bytes, kPageBytes), mapped = wanted + kHugePageBytes;
    void* const found = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) throw std::bad_alloc();
    auto* const begin = static_cast<uint8_t*>(found);
    auto* const aligned = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<size_t>(begin), kHugePageBytes));
    if (aligned > begin) munmap(begin, static_cast<size_t>(aligned - begin));
    const size_t behind = static_cast<size_t>(begin + mapped - (aligned + wanted));
    if (behind > 0) munmap(aligned + wanted, behind);
    return aligned;
  }

  std::atomic<int64_t> held_bytes_{0};
  std::atomic<int64_t> countdown_{-1};
};

// `count` values for the length of one call, not set: large ones come in huge pages, which costs a fraction of as many
// small page faults. Throws std::bad_alloc.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t count) : size_(static_cast<size_t>(count)) {
    const size_t bytes = size_ * sizeof(T), alignment = bytes < kMapThresholdBytes ? 64 : kHugePageBytes;
    memory_.reset(static_cast<T*>(std::aligned_alloc(alignment, Memory::round_up(bytes, alignment))));
    if (memory_ == nullptr && bytes > 0) throw std::bad_alloc();
    if (alignment == kHugePageBytes) madvise(memory_.get(), bytes, MADV_HUGEPAGE);
  }

  T* data() { return memory_.get(); }
  T* begin() { return memory_.get(); }
  T* end() { return memory_.get() + size_; }
  const T* begin() const { return memory_.get(); }
  const T* end() const { return memory_.get() + size_; }
  int64_t size() const { return static_cast<int64_t>(size_); }
  T& operator[](int64_t index) { return memory_.get()[index]; }
  const T& operator[](int64_t index) const { return memory_.get()[index]; }

 private:
  struct Free {
    void operator()(T* memory) const noexcept { std::free(memory); }
  };
  size_t size_;
  std::unique_ptr<T, Free> memory_;
};

}  // namespace fastimpl::kv
