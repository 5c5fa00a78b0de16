// The update of a chunk in its staging slot: all its parameters and all their states in one pass, one launch. Written
// with simt.h; the formula is that of foreach.h. A block takes neighbouring elements of one parameter.
#pragma once

#include "common/simt.h"
#include "offload/foreach.h"

namespace fastimpl::offload {

using simt::Global;

// One parameter. States that its kind lacks are empty.
template <typename Bits>
struct SlotEntry {
  Global<Bits> param, first, second, third;
  Global<const Bits> grad;
  int32_t first_block;  // Of those that do it.
  int16_t hyper;        // Its numbers, by their place in the table.
  bool has_vectors;     // Whether all begin at multiples of 16 bytes.
};

// The table travels in the launch's arguments, which may have 4 KiB.
constexpr int kSlotEntries = 40, kSlotHypers = 8;

template <SlotKind kKind, Float kType>
struct SlotStep {
  using T = Stored<kType>;
  using Bits = typename T::Bits;
  static constexpr int kThreads = 256;
  static constexpr int64_t kStates = slot_state_count(kKind);
  static constexpr int kVec = 16 / static_cast<int>(sizeof(Bits));
  static constexpr int64_t kTurns = 4;  // Vectors of one thread.

  SlotEntry<Bits> entries[kSlotEntries];
  SlotHyper hypers[kSlotHypers];
  int32_t entry_count;

  SIMT void operator()() const {
    const auto block = static_cast<int32_t>(simt::block());
    // The last entry that begins at this block or before; each has one block at least.
    int32_t low = 0, high = entry_count;
    while (high - low > 1) {
      const int32_t middle = low + (high - low) / 2;
      if (entries[middle].first_block <= block) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const SlotEntry<Bits> entry = entries[low];
    const SlotHyper h = hypers[entry.hyper];
    const int64_t count = entry.param.size(), threads = simt::threads();
    const int64_t begin = static_cast<int64_t>(block - entry.first_block) * threads * kTurns * kVec;
    for (int64_t turn = 0; turn < kTurns; ++turn) {
      const int64_t at = begin + (turn * threads + simt::thread()) * kVec;
      if (entry.has_vectors && at + kVec <= count) {
        update<kVec>(entry, h, at);
      } else {
        for (int64_t i = at; i < at + kVec && i < count; ++i) update<1>(entry, h, i);
      }
    }
  }

  template <int kCount>
  SIMT static void update(const SlotEntry<Bits>& entry, const SlotHyper& h, int64_t at) {
    auto param = entry.param.template load_vector<kCount>(at);
    const auto grad = entry.grad.template load_vector<kCount>(at);
    simt::Vector<Bits, kCount> first{}, second{}, third{};
    if constexpr (kStates > 0) first = entry.first.template load_vector<kCount>(at);
    if constexpr (kStates > 1) second = entry.second.template load_vector<kCount>(at);
    if constexpr (kStates > 2) third = entry.third.template load_vector<kCount>(at);
    for (int i = 0; i < kCount; ++i) {
      float weight = T::widen(param.values[i]), one = T::widen(first.values[i]), two = T::widen(second.values[i]),
            three = T::widen(third.values[i]);
      slot_element<kKind, kType>(weight, T::widen(grad.values[i]), one, two, three, h);
      param.values[i] = T::narrow(weight);
      first.values[i] = T::narrow(one);
      second.values[i] = T::narrow(two);
      third.values[i] = T::narrow(three);
    }
    entry.param.template store_vector<kCount>(at, param);
    if constexpr (kStates > 0) entry.first.template store_vector<kCount>(at, first);
    if constexpr (kStates > 1) entry.second.template store_vector<kCount>(at, second);
    if constexpr (kStates > 2) entry.third.template store_vector<kCount>(at, third);
  }
};

}  // namespace fastimpl::offload
