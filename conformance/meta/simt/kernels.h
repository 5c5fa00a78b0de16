// Kernels for the prover's own tests: right, and with one fault each.
#pragma once

#include "simt.h"

namespace cases {

using simt::kAllLanes;
using simt::Order;
using simt::Scope;

enum class Bug { kNone, kLostInsert, kNoBarrier, kPlainLoad };

// A warp finds or inserts each of its ids in a table of buckets of 32 slots and counts it; the block sums what it did.
template <Bug kBug>
struct Insert {
  static constexpr int kThreads = 64;
  simt::Global<uint64_t> table, total;
  simt::Global<const uint64_t> ids;
  simt::Global<uint32_t> counts;
  int64_t buckets;

  SIMT void operator()() const {
    const unsigned warps = simt::threads() / 32, l = simt::lane();
    uint32_t mine = 0;
    for (int64_t i = simt::block() * warps + simt::warp(); i < ids.size(); i += simt::blocks() * warps) {
      const int64_t slot = find(ids.load(i) + 1);
      if (l == 0) {
        counts.atomic_add(slot, 1U);
        ++mine;
      }
    }
    const auto sums = simt::shared<uint32_t>(0, warps);
    if (l == 0) sums.store(simt::warp(), mine);
    if (kBug != Bug::kNoBarrier) simt::sync_block();
    if (simt::thread() == 0) {
      uint64_t sum = 0;
      for (unsigned k = 0; k < warps; ++k) sum += sums.load(k);
      total.atomic_add(0, sum);
    }
  }

  SIMT int64_t find(uint64_t key) const {
    int64_t bucket = static_cast<int64_t>((key * 0x9E3779B97F4A7C15U) >> 40) % buckets;
    while (true) {
      const int64_t place = bucket * 32 + simt::lane();
      const uint64_t seen = kBug == Bug::kPlainLoad ? table.load(place) : table.atomic_load(place);
      const unsigned hit = simt::ballot(kAllLanes, seen == key), empty = simt::ballot(kAllLanes, seen == 0);
      if (hit != 0) return bucket * 32 + simt::first_lane(hit);
      if (empty == 0) {
        bucket = (bucket + 1) % buckets;
        continue;
      }
      const auto leader = simt::first_lane(empty);
      uint64_t was = 1;
      if (simt::lane() == leader) was = claim(place, key);
      was = simt::shuffle(kAllLanes, was, leader);
      if (was == 0 || was == key) return bucket * 32 + leader;
    }
  }
  SIMT uint64_t claim(int64_t place, uint64_t key) const {
    if (kBug != Bug::kLostInsert) return table.atomic_cas(place, 0, key);
    if (table.atomic_load(place) != 0) return 1;
    table.atomic_store(place, key);
    return 0;
  }
};

// Each thread sums what its block shares, round after round.
struct Rounds {
  static constexpr int kThreads = 64;
  simt::Global<uint32_t> out;
  bool is_second_barrier_there;

  SIMT void operator()() const {
    const auto tile = simt::shared<uint32_t>(0, simt::threads());
    uint32_t sum = 0;
    for (unsigned round = 0; round < 3; ++round) {
      tile.store(simt::thread(), round + simt::thread());
      simt::sync_block();
      sum += tile.load((simt::thread() + 1) % simt::threads());
      if (is_second_barrier_there) simt::sync_block();
    }
    out.store(simt::block() * simt::threads() + simt::thread(), sum);
  }
};

// Neighbouring lanes exchange through shared memory. A vote makes lanes meet and orders no memory.
struct Neighbours {
  static constexpr int kThreads = 32;
  simt::Global<uint32_t> out;
  bool has_sync;

  SIMT void operator()() const {
    const auto tile = simt::shared<uint32_t>(0, 32);
    tile.store(simt::lane(), simt::lane());
    if (has_sync) {
      simt::sync_warp(kAllLanes);
    } else {
      simt::ballot(kAllLanes, true);
    }
    out.store(simt::lane(), tile.load(simt::lane() ^ 1));
  }
};

// Half of the lanes are done long before the others, and wait for them: each half exchanges by itself meanwhile.
struct Halves {
  static constexpr int kThreads = 32;
  simt::Global<uint32_t> out;

  SIMT void operator()() const {
    const unsigned first = simt::lane() / 16 * 16;
    uint32_t sum = 0;
    for (unsigned round = 0; round < (first == 0 ? 1U : 3U); ++round) {
      sum += simt::shuffle(0xFFFFU << first, simt::lane(), 15, 16);
    }
    simt::ballot(kAllLanes, true);
    out.store(simt::lane(), sum);
  }
};

// Sums `in` by a shuffle tree in each warp; the last warp may be partly there, and the last lanes may have nothing.
struct WarpSums {
  static constexpr int kThreads = 128;
  simt::Global<const float> in;
  simt::Global<float> out;

  SIMT void operator()() const {
    const int64_t at = simt::thread();
    const int64_t there = static_cast<int64_t>(simt::threads()) - simt::warp() * 32;
    const unsigned mask = there >= 32 ? kAllLanes : (1U << there) - 1;
    float sum = at < in.size() ? in.load(at) : 0;
    for (unsigned step = 1; step < 32; step *= 2) {
      const float other = simt::shuffle(mask, sum, (simt::lane() + step) % (there >= 32 ? 32 : there));
      if (there >= 32) sum += other;
    }
    if (simt::lane() == 0) out.store(simt::warp(), sum);
  }
};

enum class Publish { kRelease, kFence, kRelaxed, kBlockScope, kPlainPayload };

// The first thread of block 0 tells that of block 1, which does not wait: it takes what it sees.
template <Publish kHow>
struct Message {
  static constexpr int kThreads = 32;
  simt::Global<uint32_t> flag, payload, out;

  SIMT void operator()() const {
    if (simt::thread() != 0) return;
    const Scope scope = kHow == Publish::kBlockScope ? Scope::kBlock : Scope::kDevice;
    if (simt::block() == 0) {
      if (kHow == Publish::kPlainPayload) {
        payload.store(0, 7);
      } else {
        payload.atomic_store(0, 7);
      }
      if (kHow == Publish::kFence) simt::fence();
      flag.atomic_store(0, 1, kHow == Publish::kRelease ? Order::kRelease : Order::kRelaxed, scope);
    } else {
      const uint32_t seen = flag.atomic_load(0, kHow == Publish::kRelease ? Order::kAcquire : Order::kRelaxed, scope);
      if (kHow == Publish::kFence) simt::fence();
      if (seen == 1)
        out.store(0, kHow == Publish::kPlainPayload ? payload.load(0) : payload.atomic_load(0));
      else
        out.store(0, 7);
    }
  }
};

// The block that ends last sums what all have left: a counter that releases and acquires.
template <Order kOrder>
struct LastBlock {
  static constexpr int kThreads = 32;
  simt::Global<uint32_t> parts, counter, out;

  SIMT void operator()() const {
    if (simt::thread() != 0) return;
    parts.store(simt::block(), simt::block() + 1);
    if (counter.atomic_add(0, 1, kOrder) + 1 != simt::blocks()) return;
    uint32_t sum = 0;
    for (unsigned b = 0; b < simt::blocks(); ++b) sum += parts.load(b);
    out.store(0, sum);
  }
};

enum class Ring { kRight, kNoWait, kOneTooFew, kNoBarrier };

// A ring of two tiles: copies of the next one are under way while the present one is summed.
template <Ring kHow>
struct Pipeline {
  static constexpr int kThreads = 32;
  static constexpr int kTile = 32;
  simt::Global<const float> in;
  simt::Global<float> out;

  SIMT void fetch(simt::Shared<float> ring, int64_t tile) const {
    const int64_t at = tile * kTile + simt::lane();
    if (tile * kTile < in.size()) simt::copy_async<4>(ring, tile % 2 * kTile + simt::lane(), in, at);
    simt::commit_copies();
  }
  SIMT void operator()() const {
    const auto ring = simt::shared<float>(0, 2 * kTile);
    float sum = 0;
    fetch(ring, 0);
    for (int64_t tile = 0; tile * kTile < in.size(); ++tile) {
      fetch(ring, tile + 1);
      if (kHow == Ring::kOneTooFew) {
        simt::wait_copies<2>();
      } else if (kHow != Ring::kNoWait) {
        simt::wait_copies<1>();
      }
      if (kHow != Ring::kNoBarrier) simt::sync_warp(kAllLanes);
      sum += ring.load(tile % 2 * kTile + (simt::lane() + 1) % 32);
      simt::sync_warp(kAllLanes);
    }
    out.store(simt::lane(), sum);
  }
};

// Lanes with the same value count once, by the first of them.
struct Histogram {
  static constexpr int kThreads = 64;
  simt::Global<const uint32_t> in;
  simt::Global<uint32_t> counts;

  SIMT void operator()() const {
    const uint32_t value = in.load(simt::thread());
    const unsigned peers = simt::match_any(kAllLanes, value);
    if (simt::lane() == simt::first_lane(peers)) counts.atomic_add(value, simt::count_lanes(peers));
  }
};

// Neighbouring bytes of a word are different places; a scope of the block is enough within one.
struct Bytes {
  static constexpr int kThreads = 64;
  simt::Global<uint8_t> out;
  simt::Global<uint32_t> counts;

  SIMT void operator()() const {
    const auto count = simt::shared<uint32_t>(0, 1);
    if (simt::thread() == 0) count.store(0, 0);
    out.store(simt::block() * simt::threads() + simt::thread(), static_cast<uint8_t>(simt::thread()));
    simt::sync_block();
    count.atomic_add(0, 1, Order::kRelaxed, Scope::kBlock);
    simt::sync_block();
    if (simt::thread() == 0) counts.store(simt::block(), count.load(0));
  }
};

// Two threads raise a flag each and look at the other's: with stores and loads both may miss it.
template <bool kWithChanges>
struct Flags {
  static constexpr int kThreads = 2;
  simt::Global<uint32_t> flags, missed;

  SIMT void operator()() const {
    const unsigned me = simt::thread();
    if (kWithChanges) {
      flags.atomic_add(0, 1U << (16 * me));
      missed.store(me, flags.atomic_add(0, 0) >> (16 * (1 - me)) & 1 ? 0 : 1);
    } else {
      flags.atomic_store(me, 1);
      missed.store(me, flags.atomic_load(1 - me) == 1 ? 0 : 1);
    }
  }
};

// One small fault each, which needs no more than a few lines.
enum class Slip {
  kOutside,
  kPastArray,
  kPastShared,
  kVectorOffset,
  kVector,
  kSharedUnwritten,
  kScratchUnwritten,
  kNotInMask,
  kOtherMask,
  kOtherPart,
  kOtherKind,
  kFromOutside,
  kReturned,
  kNoSuchLane,
  kReturnBeforeBarrier,
  kTwoBarriers,
  kDeadlock,
  kFirstCome,
  kFloatSum,
  kSpin,
  kMixedSizes,
  kWidth,
};

struct Slips {
  static constexpr int kThreads = 64;
  simt::Global<uint32_t> a, b;
  Slip slip;

  SIMT void operator()() const {
    const unsigned t = simt::thread(), l = simt::lane();
    const bool low = l < 16;
    switch (slip) {
      case Slip::kOutside: return a.store(t + 1, 1);
      case Slip::kPastArray: return a.store(t + 1, 1);
      case Slip::kPastShared: return simt::shared<uint32_t>(64, 64).store(t, 1);
      case Slip::kVectorOffset: return a.part(1, a.size() - 1).store_vector<2>(2 * (t % 8), {{1, 2}});
      case Slip::kVector: return a.store_vector<2>(2 * (t % 8), {{1, 2}});
      case Slip::kSharedUnwritten: return a.store(t, simt::shared<uint32_t>(0, 64).load(t));
      case Slip::kScratchUnwritten: return a.store(t, b.load(t));
      case Slip::kNotInMask: simt::ballot(0xFFFF, true); return;
      case Slip::kOtherMask: simt::ballot(low ? 0x1FFFFU : kAllLanes, true); return;
      case Slip::kOtherPart: simt::ballot(low ? 0xFFFFU : kAllLanes, true); return;
      case Slip::kOtherKind:
        if (low) {
          simt::sync_warp(kAllLanes);
        } else {
          simt::ballot(kAllLanes, true);
        }
        return;
      case Slip::kFromOutside:
        if (low) simt::shuffle(0xFFFFU, l, 16);
        return;
      case Slip::kReturned:
        if (l == 5) return;
        simt::sync_warp(kAllLanes);
        return;
      case Slip::kNoSuchLane: simt::sync_warp(kAllLanes); return;
      case Slip::kReturnBeforeBarrier:
        if (t == 40) return;
        simt::sync_block();
        return;
      case Slip::kTwoBarriers:
        if (t < 32) {
          simt::sync_block();
        } else {
          simt::sync_block();
        }
        return;
      case Slip::kDeadlock:
        if (low) simt::sync_warp(kAllLanes);
        simt::sync_block();
        return;
      case Slip::kFirstCome: a.store(b.atomic_add(0, 1), t); return;
      case Slip::kFloatSum: a.as<float>().atomic_add(0, t == 0 ? 1e8F : t == 1 ? -1e8F : 1.0F); return;
      case Slip::kSpin:
        if (t != 0) return;
        if (simt::block() == 1) return b.atomic_store(0, 1);
        while (b.atomic_load(0) == 0) {
        }
        return;
      case Slip::kMixedSizes:
        a.as<uint64_t>().atomic_add(0, 1);
        a.atomic_add(1, 1);
        return;
      case Slip::kWidth: simt::shuffle_xor(kAllLanes, t, 1, 12); return;
    }
  }
};

}  // namespace cases
