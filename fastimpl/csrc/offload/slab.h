// Host memory for copies: pages of their own, near the device, pinned where there is one. A slab knows the copies that
// were queued from and to it, and waits for these alone before its pages go.
//
// Prevents a collector that stops the device: tensors are dropped wherever that happens, in the middle of a graph
// capture, where waiting is an error, or in a forked child, where every call of CUDA is.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "common/memory.h"

namespace fastimpl::offload {

// What a device does for slabs; every call may be one that notes, in tests.
struct PinDriver {
  virtual ~PinDriver() = default;
  // The NUMA node of a device, or -1.
  virtual int node_of(int device) = 0;
  // Pins pages for a device; 0, or an error of the driver.
  virtual int pin(void* pages, size_t bytes, int device) = 0;
  virtual void unpin(void* pages, int device) = 0;
  // An event behind what a stream was given so far; `event` is one that was recorded there before, or null.
  virtual void* record(void* event, void* stream) = 0;
  // Waits for an event and gives it back.
  virtual void wait(void* event, int device) = 0;
  // Whether a graph is being captured on the device's current stream.
  virtual bool is_capturing(int device) = 0;
};

struct SlabFacts {
  bool is_pinned;
  int node;        // Where the pages were asked to lie, -1: anywhere.
  int bind_error;  // errno of that, 0: none.
};

struct SlabCounts {
  int64_t live_count, live_bytes, made_count, freed_count, kept_count, wait_count;
};

// The kernel's call; libnuma would be one more library to find.
inline int bind_pages(void* pages, size_t bytes, int node) {
#if defined(SYS_mbind)
  constexpr int kPreferred = 1, kNodesMax = 1024, kWordBits = 64;
  unsigned long mask[kNodesMax / kWordBits] = {};
  if (node < 0 || node >= kNodesMax) return EINVAL;
  mask[node / kWordBits] = 1UL << (node % kWordBits);
  // Preferred, not demanded: a full node is slower, and no reason to fail.
  // The kernel looks at one bit less than it is told of.
  return syscall(SYS_mbind, pages, bytes, kPreferred, mask, kNodesMax + 1, 0) == 0 ? 0 : errno;
#else
  (void)pages, (void)bytes, (void)node;
  return ENOSYS;
#endif
}

class Slabs {
 public:
  explicit Slabs(PinDriver* driver) : driver_(driver) {}

  // `bytes` on pages of their own. `device`: pinned for it, -1: for none. `node`: where, -1: near the device. Throws
  // std::bad_alloc; returns null where the driver refuses to pin, with its error.
  uint8_t* make(size_t bytes, int device, int node, int* error) {
    free_kept();
    Slab slab{bytes, device, {false, node, 0}, getpid(), {}};
    uint8_t* const pages = map_pages(bytes);
    if (device >= 0 && node < 0 && driver_ != nullptr) slab.facts.node = driver_->node_of(device);
    if (slab.facts.node >= 0) {
      // Before the first touch, which pinning is.
      slab.facts.bind_error = bind_pages(pages, round_up(bytes, kPageBytes), slab.facts.node);
    }
    if (device >= 0 && driver_ != nullptr) {
      *error = driver_->pin(pages, bytes, device);
      if (*error != 0) {
        unmap_pages(pages, bytes);
        return nullptr;
      }
      slab.facts.is_pinned = true;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    ++counts_.live_count;
    ++counts_.made_count;
    counts_.live_bytes += static_cast<int64_t>(bytes);
    slabs_.emplace(pages, std::move(slab));
    return pages;
  }

  // A copy from or to a slab was queued on a stream; nothing for other memory.
  void used(const void* home, void* stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = slabs_.find(home);
    if (found == slabs_.end() || driver_ == nullptr) return;
    void*& event = found->second.events[stream];
    event = driver_->record(event, stream);
  }

  // Nobody has it any more. Called from wherever a tensor is dropped.
  void drop(void* pages) noexcept {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto found = slabs_.find(pages);
    // The parent's pages, copied on write: they are pinned there, and not here.
    if (found == slabs_.end() || found->second.process != getpid()) return;
    if (found->second.facts.is_pinned && driver_->is_capturing(found->second.device)) {
      // A captured copy may name the pages: they go when another slab is made.
      kept_.push_back(pages);
      counts_.kept_count = static_cast<int64_t>(kept_.size());
      return;
    }
    free(lock, found);
  }

  bool facts(const void* home, SlabFacts* facts) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = slabs_.find(home);
    if (found == slabs_.end()) return false;
    *facts = found->second.facts;
    return true;
  }

  SlabCounts counts() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return counts_;
  }

 private:
  struct Slab {
    size_t bytes;
    int device;
    SlabFacts facts;
    int process;
    std::map<void*, void*> events;  // By stream: one behind its last copy.
  };
  using Table = std::map<const void*, Slab>;

  void free_kept() {
    std::vector<void*> waiting;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      waiting.swap(kept_);
      counts_.kept_count = 0;
    }
    for (void* const pages : waiting) drop(pages);
  }

  void free(std::unique_lock<std::mutex>& lock, Table::iterator found) noexcept {
    void* const pages = const_cast<void*>(found->first);
    const Slab slab = std::move(found->second);
    slabs_.erase(found);
    --counts_.live_count;
    ++counts_.freed_count;
    counts_.live_bytes -= static_cast<int64_t>(slab.bytes);
    counts_.wait_count += static_cast<int64_t>(slab.events.size());
    lock.unlock();
    for (const auto& [stream, event] : slab.events) driver_->wait(event, slab.device);
    // Memory that is freed while it is pinned stays pinned under somebody else's data.
    if (slab.facts.is_pinned) driver_->unpin(pages, slab.device);
    unmap_pages(pages, slab.bytes);
  }

  PinDriver* const driver_;
  std::mutex mutex_;
  Table slabs_;
  std::vector<void*> kept_;
  SlabCounts counts_{};
};

// The process's slabs, never destroyed: tensors may outlive every static object.
Slabs& slabs();

}  // namespace fastimpl::offload
