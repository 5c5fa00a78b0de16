// Positions of a batch on a grid, each with its bag. Offsets that are none lead to some bag, so that nothing outside of
// memory is touched whatever was given.
#pragma once

#include "common/simt.h"

namespace fastimpl::pipeline {

using simt::Global;

constexpr int64_t kOfWarp = 512;  // Positions that a warp takes one after the other.

// Of runs [first, last], whose beginnings are `begins`, the last that does not begin behind `at`; of runs that begin at
// one place it is the only one with something in it.
SIMT int64_t run_of(const Global<const int64_t>& begins, int64_t at, int64_t first, int64_t last) {
  int64_t low = first, high = last + 1;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (begins.load(middle) <= at) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Calls `body(at, run)` for all places below `count` in steps of `groups` groups of a warp's lanes, of which this
// thread's is number `own`. Each warp takes some in a row, so that a run is looked for among few.
template <typename Body>
SIMT void for_places(const Global<const int64_t>& begins, int64_t runs, int64_t count, unsigned own, unsigned groups,
                     const Body& body) {
  const int64_t warps = simt::threads() / simt::kLanes, step = simt::blocks() * warps * kOfWarp;
  for (int64_t begin = (simt::block() * warps + simt::warp()) * kOfWarp; begin < count; begin += step) {
    const int64_t end = begin + kOfWarp < count ? begin + kOfWarp : count;
    const int64_t first = run_of(begins, begin, 0, runs - 1), last = run_of(begins, end - 1, first, runs - 1);
    for (int64_t at = begin + own; at < end; at += groups) body(at, run_of(begins, at, first, last));
  }
}

// Enough warps for `count` places, up to as many as fill any device several times; one block at least.
inline simt::Shape places_shape(int64_t count) {
  constexpr int64_t kThreads = 256, kOfBlock = kThreads / simt::kLanes * kOfWarp, kBlocksMax = 4096;
  const int64_t blocks = (count + kOfBlock - 1) / kOfBlock;
  return {blocks < 1 ? 1 : blocks < kBlocksMax ? blocks : kBlocksMax, kThreads};
}

// A list of integers, four bytes each where they fit.
struct Integers {
  Global<uint32_t> narrow;
  Global<int64_t> wide;
  bool is_narrow;

  SIMT int64_t load(int64_t at) const { return is_narrow ? static_cast<int64_t>(narrow.load(at)) : wide.load(at); }
  SIMT void store(int64_t at, int64_t value) const {
    if (is_narrow) {
      narrow.store(at, static_cast<uint32_t>(value));
    } else {
      wide.store(at, value);
    }
  }
};

}  // namespace fastimpl::pipeline
