// Many copies as few: what lies side by side on both ends, in one piece of memory each, is copied at once.
#pragma once

#include <cstdint>
#include <vector>

namespace fastimpl::offload {

// Bytes of one copy. `to_home` and `from_home` name the allocations: two that are neighbours by chance are never
// merged.
struct CopyRun {
  uint8_t* to;
  const uint8_t* from;
  int64_t size;
  const void* to_home;
  const void* from_home;
};

// Adds a copy behind the others, whose targets are elsewhere; empty ones are dropped.
inline void add_copy(std::vector<CopyRun>& runs, const CopyRun& next) {
  if (next.size == 0) return;
  if (!runs.empty()) {
    CopyRun& last = runs.back();
    const bool is_next = last.to + last.size == next.to && last.from + last.size == next.from;
    if (is_next && last.to_home == next.to_home && last.from_home == next.from_home) {
      last.size += next.size;
      return;
    }
  }
  runs.push_back(next);
}

}  // namespace fastimpl::offload
