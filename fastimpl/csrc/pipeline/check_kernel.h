// Ids and offsets of a batch, looked at on a grid. What is found stays on the device, so that nobody waits for it; a
// copy of the batch is made in which everything is in its place, whatever was given.
//
// `found` are two words, {0, kNoPosition} at first. Right offsets: the number of ids outside of their tables, and the
// position of the first. Wrong offsets: -1, and the first offset that is wrong. No order of threads shows in them.
// A table of -1 rows finds them by id, and none is outside.
#pragma once

#include "common/simt.h"
#include "pipeline/bag_kernel.h"

namespace fastimpl::pipeline {

constexpr int64_t kNoPosition = INT64_MAX;

// The last of `count` features that does not begin behind `position`, by where features begin in the offsets.
SIMT int64_t feature_at(const simt::Global<const int64_t>& offsets, int64_t bag_count, int64_t count,
                        int64_t position) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (offsets.load(middle * bag_count) <= position) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

SIMT int64_t least_of_warp(int64_t value) {
  for (unsigned by = simt::kLanes / 2; by > 0; by /= 2) {
    const int64_t other = simt::shuffle_xor(simt::kAllLanes, value, by);
    value = other < value ? other : value;
  }
  return value;
}

SIMT int64_t sum_of_warp(int64_t value) {
  for (unsigned by = simt::kLanes / 2; by > 0; by /= 2) value += simt::shuffle_xor(simt::kAllLanes, value, by);
  return value;
}

// Whether offsets begin at 0, end at `id_count` and never fall.
struct CheckOffsets {
  static constexpr int kThreads = 256;
  simt::Global<const int64_t> offsets;
  int64_t id_count;
  simt::Global<int64_t> found;

  SIMT void operator()() const {
    const int64_t last = offsets.size() - 1, stride = static_cast<int64_t>(simt::blocks()) * simt::threads();
    int64_t least = kNoPosition;
    for (int64_t at = static_cast<int64_t>(simt::block()) * simt::threads() + simt::thread(); at <= last;
         at += stride) {
      const int64_t begin = offsets.load(at);
      const bool is_wrong =
          (at == 0 && begin != 0) || (at == last && begin != id_count) || (at > 0 && begin < offsets.load(at - 1));
      if (is_wrong && at < least) least = at;
    }
    const int64_t first = least_of_warp(least);
    if (simt::lane() > 0 || first == kNoPosition) return;
    found.atomic_min(0, -1);
    found.atomic_min(1, first);
  }
};

// Behind CheckOffsets. Where `mended_offsets` is not empty, `mended` gets the ids, those outside as 0; and under wrong
// offsets all ids are 0 and belong to the last bag.
template <typename Id>
struct CheckIds {
  static constexpr int kThreads = 256;
  simt::Global<const Id> ids;
  simt::Global<const int64_t> offsets, row_counts;
  int64_t bag_count;
  simt::Global<int64_t> found;
  simt::Global<Id> mended;
  simt::Global<int64_t> mended_offsets;

  SIMT void operator()() const {
    const bool is_cut = found.atomic_load(0) >= 0;
    const int64_t warps = simt::threads() / simt::kLanes, step = simt::blocks() * warps,
                  own = simt::block() * warps + simt::warp();
    mend_offsets(is_cut, own * simt::kLanes + simt::lane(), step * simt::kLanes);
    int64_t count = 0, least = kNoPosition;
    for (int64_t begin = own * kOfWarp; begin < ids.size(); begin += step * kOfWarp)
      check(begin, begin + kOfWarp < ids.size() ? begin + kOfWarp : ids.size(), is_cut, count, least);
    count = sum_of_warp(count);
    least = least_of_warp(least);
    if (simt::lane() > 0 || count == 0) return;
    found.atomic_add(0, count);
    found.atomic_min(1, least);
  }

  SIMT void mend_offsets(bool is_cut, int64_t own, int64_t step) const {
    for (int64_t at = own; at < mended_offsets.size(); at += step)
      mended_offsets.store(at, is_cut ? offsets.load(at) : at + 1 < mended_offsets.size() ? 0 : ids.size());
  }

  SIMT void check(int64_t begin, int64_t end, bool is_cut, int64_t& count, int64_t& least) const {
    const int64_t features = row_counts.size();
    int64_t feature = is_cut ? feature_at(offsets, bag_count, features, begin) : 0;
    for (int64_t at = begin + simt::lane(); at < end; at += simt::kLanes) {
      while (is_cut && feature + 1 < features && offsets.load((feature + 1) * bag_count) <= at) ++feature;
      const Id id = ids.load(at);
      const int64_t rows = row_counts.load(feature);
      const bool is_inside =
          is_cut && (rows < 0 || static_cast<uint64_t>(static_cast<int64_t>(id)) < static_cast<uint64_t>(rows));
      if (mended_offsets.size() > 0) mended.store(at, is_inside ? id : Id{0});
      if (!is_cut || is_inside) continue;
      ++count;
      if (at < least) least = at;
    }
  }
};

}  // namespace fastimpl::pipeline
