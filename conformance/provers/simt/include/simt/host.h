// The second execution of a kernel: each call of common/simt.h, made of the world of fibers. Signatures are those of
// the CUDA half, with the line of the call as a last argument that defaults to it.
#pragma once

#include <cstring>

#include <simt/world.h>

#define SIMT inline
#define SIMT_UNROLL

namespace simt {

using prover::Site;

SIMT unsigned thread() { return static_cast<unsigned>(prover::current->thread()); }
SIMT unsigned threads() { return static_cast<unsigned>(prover::current->threads()); }
SIMT unsigned block() { return static_cast<unsigned>(prover::current->block()); }
SIMT unsigned blocks() { return static_cast<unsigned>(prover::current->blocks()); }
SIMT unsigned lane() { return thread() % kLanes; }
SIMT unsigned warp() { return thread() / kLanes; }

SIMT unsigned first_lane(unsigned mask) { return static_cast<unsigned>(__builtin_ctz(mask)); }
SIMT unsigned count_lanes(unsigned mask) { return static_cast<unsigned>(__builtin_popcount(mask)); }

SIMT void sync_block(Site site = Site::here()) { prover::current->meet_in_block(site); }
SIMT void sync_warp(unsigned mask, Site site = Site::here()) {
  prover::current->meet_in_warp(prover::Meeting::kSync, mask, kLanes, 0, site);
}

SIMT unsigned ballot(unsigned mask, bool yes, Site site = Site::here()) {
  const uint64_t* const given = prover::current->meet_in_warp(prover::Meeting::kBallot, mask, kLanes, yes, site);
  unsigned result = 0;
  for (unsigned i = 0; i < kLanes; ++i) result |= (mask >> i & 1) != 0 && given[i] != 0 ? 1U << i : 0;
  return result;
}
SIMT bool any(unsigned mask, bool yes, Site site = Site::here()) { return ballot(mask, yes, site) != 0; }
SIMT bool all(unsigned mask, bool yes, Site site = Site::here()) { return ballot(mask, yes, site) == mask; }

namespace detail {

template <typename T>
uint64_t bits_of(T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "4 or 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <typename T>
T value_of(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// `from` is the lane to take from; a lane outside of its group of `width` keeps its own value.
template <typename T>
T shuffle_from(unsigned mask, T value, int from, bool is_inside, unsigned width, Site site) {
  prover::World* const world = prover::current;
  if (width == 0 || width > kLanes || (width & (width - 1)) != 0)
    world->stop(prover::kind::kMisuse,
                "shuffle: got width " + std::to_string(width) + ", expected 1, 2, 4, 8, 16 or 32",
                {world->here("shuffle", site)});
  const uint64_t* const given = world->meet_in_warp(prover::Meeting::kShuffle, mask, width, bits_of(value), site);
  if (!is_inside) return value;
  if ((mask >> from & 1) == 0)
    world->stop(prover::kind::kShuffleOutside,
                "shuffle from lane " + std::to_string(from) + ", which is not in the mask",
                {world->here("shuffle", site)});
  return value_of<T>(given[from]);
}

}  // namespace detail

template <typename T>
SIMT unsigned match_any(unsigned mask, T value, Site site = Site::here()) {
  const uint64_t mine = detail::bits_of(value);
  const uint64_t* const given = prover::current->meet_in_warp(prover::Meeting::kMatch, mask, kLanes, mine, site);
  unsigned result = 0;
  for (unsigned i = 0; i < kLanes; ++i) result |= (mask >> i & 1) != 0 && given[i] == mine ? 1U << i : 0;
  return result;
}
template <typename T>
SIMT T shuffle(unsigned mask, T value, unsigned from, unsigned width = kLanes, Site site = Site::here()) {
  const unsigned group = width == 0 ? 0 : lane() / width * width;
  return detail::shuffle_from(mask, value, static_cast<int>(group + (width == 0 ? 0 : from % width)), true, width,
                              site);
}
template <typename T>
SIMT T shuffle_up(unsigned mask, T value, unsigned by, unsigned width = kLanes, Site site = Site::here()) {
  const int from = static_cast<int>(lane()) - static_cast<int>(by);
  const bool is_inside = width != 0 && from >= static_cast<int>(lane() / width * width);
  return detail::shuffle_from(mask, value, from, is_inside, width, site);
}
template <typename T>
SIMT T shuffle_down(unsigned mask, T value, unsigned by, unsigned width = kLanes, Site site = Site::here()) {
  const unsigned from = lane() + by;
  const bool is_inside = width != 0 && from < lane() / width * width + width;
  return detail::shuffle_from(mask, value, static_cast<int>(from), is_inside, width, site);
}
template <typename T>
SIMT T shuffle_xor(unsigned mask, T value, unsigned with, unsigned width = kLanes, Site site = Site::here()) {
  const unsigned from = lane() ^ with;
  const bool is_inside = width != 0 && from < lane() / width * width + width;
  return detail::shuffle_from(mask, value, static_cast<int>(from), is_inside, width, site);
}

SIMT void fence(Scope scope = Scope::kDevice) { prover::current->fence(scope); }

namespace detail {

template <typename T, bool kShared>
class Memory {
 public:
  using Value = std::remove_const_t<T>;

  Memory() = default;
  Memory(T* data, int64_t count) : data_(data), count_(count) {}
  template <typename U = T, typename = std::enable_if_t<std::is_const_v<U>>>
  Memory(const Memory<Value, kShared>& other) : data_(other.data()), count_(other.size()) {}

  int64_t size() const { return count_; }
  T* data() const { return data_; }
  Memory part(int64_t begin, int64_t count, Site site = Site::here()) const {
    if (begin < 0 || count < 0 || begin + count > count_)
      prover::current->stop_outside("part", begin, count, count_, site);
    return Memory(data_ + begin, count);
  }
  template <typename U>
  Memory<U, kShared> as() const {
    return Memory<U, kShared>(reinterpret_cast<U*>(data_),
                              count_ * static_cast<int64_t>(sizeof(T)) / static_cast<int64_t>(sizeof(U)));
  }

  Value load(int64_t at, Site site = Site::here()) const {
    Value value;
    std::memcpy(static_cast<void*>(&value), check(at, 1, alignof(T), false, "load", site), sizeof value);
    return value;
  }
  void store(int64_t at, Value value, Site site = Site::here()) const {
    std::memcpy(check(at, 1, alignof(T), true, "store", site), &value, sizeof value);
  }
  template <int kCount>
  Vector<Value, kCount> load_vector(int64_t at, Site site = Site::here()) const {
    Vector<Value, kCount> value;
    std::memcpy(&value, check(at, kCount, alignof(Vector<Value, kCount>), false, "vector load", site), sizeof value);
    return value;
  }
  template <int kCount>
  void store_vector(int64_t at, const Vector<Value, kCount>& value, Site site = Site::here()) const {
    std::memcpy(check(at, kCount, alignof(Vector<Value, kCount>), true, "vector store", site), &value, sizeof value);
  }

  Value atomic_load(int64_t at, Order order = Order::kRelaxed, Scope scope = Scope::kDevice,
                    Site site = Site::here()) const {
    return value_of<Value>(prover::current->atomic_load(place(at, order, scope, "atomic load", site)));
  }
  void atomic_store(int64_t at, Value value, Order order = Order::kRelaxed, Scope scope = Scope::kDevice,
                    Site site = Site::here()) const {
    prover::current->atomic_store(place(at, order, scope, "atomic store", site), bits_of(value));
  }
  Value atomic_add(int64_t at, Value value, Order order = Order::kRelaxed, Scope scope = Scope::kDevice,
                   Site site = Site::here()) const {
    return change(at, order, scope, site, [=](Value old) { return static_cast<Value>(old + value); });
  }
  Value atomic_min(int64_t at, Value value, Order order = Order::kRelaxed, Scope scope = Scope::kDevice,
                   Site site = Site::here()) const {
    return change(at, order, scope, site, [=](Value old) { return value < old ? value : old; });
  }
  Value atomic_max(int64_t at, Value value, Order order = Order::kRelaxed, Scope scope = Scope::kDevice,
                   Site site = Site::here()) const {
    return change(at, order, scope, site, [=](Value old) { return old < value ? value : old; });
  }
  Value atomic_and(int64_t at, Value value, Order order = Order::kRelaxed, Scope scope = Scope::kDevice,
                   Site site = Site::here()) const {
    return change(at, order, scope, site, [=](Value old) { return old & value; });
  }
  Value atomic_or(int64_t at, Value value, Order order = Order::kRelaxed, Scope scope = Scope::kDevice,
                  Site site = Site::here()) const {
    return change(at, order, scope, site, [=](Value old) { return old | value; });
  }
  Value atomic_exchange(int64_t at, Value value, Order order = Order::kRelaxed, Scope scope = Scope::kDevice,
                        Site site = Site::here()) const {
    return change(at, order, scope, site, [=](Value) { return value; });
  }
  Value atomic_cas(int64_t at, Value expected, Value wanted, Order order = Order::kRelaxed,
                   Scope scope = Scope::kDevice, Site site = Site::here()) const {
    const uint64_t old =
        prover::current->atomic_change(place(at, order, scope, "atomic_cas", site), [=](uint64_t* bits) {
          if (*bits != bits_of(expected)) return false;
          *bits = bits_of(wanted);
          return true;
        });
    return value_of<Value>(old);
  }

 private:
  prover::Atomic place(int64_t at, Order order, Scope scope, const char* what, Site site) const {
    if (at < 0 || at >= count_) prover::current->stop_outside(what, at, 1, count_, site);
    return {data_, const_cast<Value*>(data_ + at), sizeof(T), order, scope, site};
  }
  T* check(int64_t at, int64_t count, size_t alignment, bool writes, const char* what, Site site) const {
    if (at < 0 || at + count > count_) prover::current->stop_outside(what, at, count, count_, site);
    prover::current->touch(data_, data_ + at, count * static_cast<int64_t>(sizeof(T)), static_cast<int64_t>(alignment),
                           writes, what, site);
    return data_ + at;
  }
  template <typename Change>
  Value change(int64_t at, Order order, Scope scope, Site site, const Change& change) const {
    const uint64_t old =
        prover::current->atomic_change(place(at, order, scope, "atomic change", site), [&change](uint64_t* bits) {
          *bits = bits_of(static_cast<Value>(change(value_of<Value>(*bits))));
          return true;
        });
    return value_of<Value>(old);
  }

  T* data_ = nullptr;
  int64_t count_ = 0;
};

}  // namespace detail

template <typename T>
using Global = detail::Memory<T, false>;
template <typename T>
using Shared = detail::Memory<T, true>;

template <typename T>
SIMT Shared<T> shared(int64_t offset_bytes, int64_t count, Site site = Site::here()) {
  auto* const data =
      prover::current->shared_part(offset_bytes, count * static_cast<int64_t>(sizeof(T)), alignof(T), site);
  return Shared<T>(reinterpret_cast<T*>(data), count);
}

template <int kBytes, typename T>
SIMT void copy_async(Shared<T> to, int64_t at, Global<std::add_const_t<T>> from, int64_t from_at,
                     int valid_bytes = kBytes, Site site = Site::here()) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "an asynchronous copy moves 4, 8 or 16 bytes");
  constexpr auto kSize = static_cast<int64_t>(sizeof(T));
  prover::World* const world = prover::current;
  if (valid_bytes < 0 || valid_bytes > kBytes)
    world->stop(prover::kind::kMisuse,
                "copy_async: got " + std::to_string(valid_bytes) + " valid bytes of " + std::to_string(kBytes),
                {world->here("copy_async", site)});
  if (at < 0 || at * kSize + kBytes > to.size() * kSize)
    world->stop_outside("copy_async to", at, kBytes / kSize, to.size(), site);
  if (from_at < 0 || from_at * kSize + valid_bytes > from.size() * kSize)
    world->stop_outside("copy_async from", from_at, valid_bytes / kSize, from.size(), site);
  world->copy_async({to.data(), to.data() + at}, {from.data(), from.data() + from_at}, kBytes, valid_bytes, site);
}
SIMT void commit_copies() { prover::current->commit_copies(); }
template <int kLeft>
SIMT void wait_copies() {
  prover::current->wait_copies(kLeft);
}

}  // namespace simt
