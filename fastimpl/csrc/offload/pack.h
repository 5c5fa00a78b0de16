// Many small tensors into one slab and back: one call, and between host and device one copy, instead of one for each.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "common/regimes.h"

#ifndef FASTIMPL_BOTH
#ifdef __CUDACC__
#define FASTIMPL_BOTH __host__ __device__
#else
#define FASTIMPL_BOTH
#endif
#endif

namespace fastimpl::offload {

struct PackEntry {
  uint8_t* tensor;
  int64_t offset, size;  // Bytes of the slab.
};

// What one thread of the host moves at a time: a call to memcpy for each piece, a task for about so many bytes.
constexpr int64_t kTaskBytes = regime(1 << 18, 192);

struct PackTask {
  int64_t first, last;  // Pieces.
};

struct PackPlan {
  std::vector<PackEntry> pieces;
  std::vector<PackTask> tasks;
};

// Large entries are cut, small ones share a task.
inline PackPlan plan_pack(const PackEntry* entries, int64_t count) {
  PackPlan plan;
  plan.pieces.reserve(static_cast<size_t>(count));
  int64_t first = 0, load = 0;
  for (int64_t i = 0; i < count; ++i) {
    const PackEntry& entry = entries[i];
    for (int64_t at = 0; at < entry.size; at += kTaskBytes) {
      const int64_t size = entry.size - at < kTaskBytes ? entry.size - at : kTaskBytes;
      plan.pieces.push_back({entry.tensor + at, entry.offset + at, size});
      load += size;
      const auto last = static_cast<int64_t>(plan.pieces.size());
      if (load >= kTaskBytes) {
        plan.tasks.push_back({first, last});
        first = last;
        load = 0;
      }
    }
  }
  if (first < static_cast<int64_t>(plan.pieces.size()))
    plan.tasks.push_back({first, static_cast<int64_t>(plan.pieces.size())});
  return plan;
}

// Pieces `first` to `last`, on this thread.
template <bool kGather>
inline void move_pieces(const PackEntry* pieces, int64_t first, int64_t last, uint8_t* slab) {
  // Tensors lie anywhere: the first lines of a later one, which no hardware foresees, are asked for while this is
  // copied.
  constexpr int64_t kAhead = 2, kLine = 64, kFirstBytes = 16 * kLine;
  for (int64_t i = first; i < last; ++i) {
    if (i + kAhead < last) {
      const PackEntry& later = pieces[i + kAhead];
      const int64_t end = later.size < kFirstBytes ? later.size : kFirstBytes;
      for (int64_t at = 0; at < end; at += kLine) __builtin_prefetch(later.tensor + at, kGather ? 0 : 1);
    }
    const PackEntry& piece = pieces[i];
    // An empty tensor may have no memory at all.
    if (piece.size == 0) continue;
    if constexpr (kGather) {
      std::memcpy(slab + piece.offset, piece.tensor, static_cast<size_t>(piece.size));
    } else {
      std::memcpy(piece.tensor, slab + piece.offset, static_cast<size_t>(piece.size));
    }
  }
}

template <bool kGather>
inline void run_task(const PackPlan& plan, const PackTask& task, uint8_t* slab) {
  move_pieces<kGather>(plan.pieces.data(), task.first, task.last, slab);
}

// So many entries fit into the arguments of one kernel launch, which needs no table in device memory.
constexpr int kPackBatch = 160;
constexpr int64_t kPackWord = 16;

struct alignas(16) PackWord {
  uint64_t low, high;
};

// One word of one entry: a device thread's work. Words of different indices are disjoint, so that any order is right.
template <bool kGather>
struct PackBatch {
  PackEntry entries[kPackBatch];
  uint8_t* slab;

  FASTIMPL_BOTH int64_t word_count(int entry) const { return (entries[entry].size + kPackWord - 1) / kPackWord; }

  FASTIMPL_BOTH void operator()(int entry, int64_t word) const {
    const PackEntry& e = entries[entry];
    const int64_t at = word * kPackWord;
    uint8_t* const there = slab + e.offset + at;
    uint8_t* const here = e.tensor + at;
    uint8_t* const to = kGather ? there : here;
    const uint8_t* const from = kGather ? here : there;
    const int64_t left = e.size - at;
    if (left >= kPackWord && ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % kPackWord) == 0) {
      *reinterpret_cast<PackWord*>(to) = *reinterpret_cast<const PackWord*>(from);
      return;
    }
    const int64_t count = left < kPackWord ? left : kPackWord;
    for (int64_t i = 0; i < count; ++i) to[i] = from[i];
  }
};

}  // namespace fastimpl::offload
