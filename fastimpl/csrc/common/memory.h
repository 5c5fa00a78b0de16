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
#include <vector>

#include "common/regimes.h"

namespace fastimpl {

constexpr size_t kHugePageBytes = size_t{2} << 20;
constexpr size_t kMapThresholdBytes = regime(1 << 20, 1 << 12);

// Fetches the cache line at `address`. Not the compiler's builtin: functions that only fetch pass for functions without
// effects, and GCC leaves calls of such out.
inline void fetch_line(const void* address) {
  asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(address)));
}

// Fetches the line 2 KiB behind `address`, for a loop that reads word by word and does more with a word than a few
// steps: it has too few lines on their way, and not every machine fetches streams by itself. It may lie behind all
// memory.
inline void fetch_ahead(const void* address) { asm volatile("prefetcht0 2048(%0)" : : "r"(address)); }
// Fetches the line behind that of `address` for a store: one of many places that are filled word by word.
inline void fetch_next_to_write(const void* address) { asm volatile("prefetchw 64(%0)" : : "r"(address)); }

constexpr size_t kPageBytes = 4096;

inline size_t round_up(size_t bytes, size_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

// Zeroed pages of their own, which unmapping gives back at once, aligned to huge pages: maps a huge page more than
// needed and gives the unaligned ends back. Throws std::bad_alloc.
inline uint8_t* map_pages(size_t bytes) {
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

inline void unmap_pages(void* memory, size_t bytes) noexcept { munmap(memory, round_up(bytes, kPageBytes)); }

class Memory {
 public:
  // Zeroed and aligned to 64 bytes, to huge pages where it is large. Throws std::bad_alloc.
  uint8_t* take(size_t bytes) {
    // A test's countdown: the allocation at which it reaches zero fails, and every later one.
    if (countdown_.load(std::memory_order_relaxed) >= 0 && countdown_.fetch_sub(1) <= 0) {
      countdown_.store(0);
      throw std::bad_alloc();
    }
    uint8_t* const memory = bytes < kMapThresholdBytes ? take_small(bytes) : map_pages(bytes);
    held_bytes_.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
    return memory;
  }

  void give(uint8_t* memory, size_t bytes) noexcept {
    if (memory == nullptr) return;
    if (bytes < kMapThresholdBytes) {
      std::free(memory);
    } else {
      unmap_pages(memory, bytes);
    }
    held_bytes_.fetch_sub(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  }

  int64_t held_bytes() const { return held_bytes_.load(std::memory_order_relaxed); }

  // For tests: -1 is never.
  void fail_after(int64_t allocation_count) { countdown_.store(allocation_count); }

 private:
  static uint8_t* take_small(size_t bytes) {
    void* const memory = std::aligned_alloc(64, round_up(bytes, 64));
    if (memory == nullptr) throw std::bad_alloc();
    return static_cast<uint8_t*>(std::memset(memory, 0, bytes));
  }

  std::atomic<int64_t> held_bytes_{0};
  std::atomic<int64_t> countdown_{-1};
};

// For containers that live no longer than a call: large ones come in huge pages, which costs a fraction of as many
// small page faults, and go back to the system as a whole.
template <typename T>
struct PageAllocator {
  using value_type = T;
  PageAllocator() = default;
  template <typename U>
  PageAllocator(const PageAllocator<U>&) {}

  T* allocate(size_t count) {
    const size_t bytes = count * sizeof(T);
    if (bytes < kMapThresholdBytes) return static_cast<T*>(::operator new(bytes));
    uint8_t* const memory = map_pages(bytes);
    madvise(memory, bytes, MADV_HUGEPAGE);
    return reinterpret_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t count) noexcept {
    const size_t bytes = count * sizeof(T);
    if (bytes < kMapThresholdBytes) {
      ::operator delete(memory);
    } else {
      unmap_pages(memory, bytes);
    }
  }
  template <typename U>
  bool operator==(const PageAllocator<U>&) const {
    return true;
  }
  template <typename U>
  bool operator!=(const PageAllocator<U>&) const {
    return false;
  }
};

using Ids = std::vector<int64_t, PageAllocator<int64_t>>;

// `count` values, not set. Throws std::bad_alloc.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t count)
      : size_(static_cast<size_t>(count)), memory_(PageAllocator<T>().allocate(size_), Free{size_}) {}

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
    size_t count;
    void operator()(T* memory) const noexcept { PageAllocator<T>().deallocate(memory, count); }
  };
  size_t size_;
  std::unique_ptr<T, Free> memory_;
};

}  // namespace fastimpl
