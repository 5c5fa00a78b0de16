// The plain execution of kernels: fibers that run one after the other, each until it waits for others, as fast as that
// goes. It checks bounds, alignment and masks and ends the program where they are wrong; it sees no race. Put this
// folder before the prover's, whose host.h then finds this world.
#pragma once

#include <algorithm>
#include <cstdio>
#include <memory>
#include <vector>

#include <simt.h>
#include <simt/fault.h>
#include <simt/fiber.h>

namespace simt::prover {

enum class State : uint8_t { kReady, kInWarp, kInBlock, kReturned };
enum class Meeting : uint8_t { kSync, kBallot, kMatch, kShuffle };

struct Fiber {
  Context context;
  State state = State::kReady;
  Meeting meeting = Meeting::kSync;
  unsigned mask = 0, width = 32;
  uint64_t given = 0;
  uint64_t got[32] = {};
};

struct Span {
  const void* base;
  const void* at;
};

struct Atomic {
  const void* base;
  void* at;
  uint32_t size;
  Order order;
  Scope scope;
  Site site;
};

class World {
 public:
  template <typename Kernel>
  void launch(const Kernel& kernel, Shape shape) {
    run([](const void* argument) { (*static_cast<const Kernel*>(argument))(); }, &kernel, shape.blocks, shape.threads,
        shape.shared_bytes);
  }

  int64_t thread() const { return now_; }
  int64_t block() const { return block_; }
  int64_t threads() const { return thread_count_; }
  int64_t blocks() const { return block_count_; }

  void touch(const void* /*base*/, const void* at, int64_t size, int64_t alignment, bool /*writes*/, const char* what,
             Site site) {
    if (reinterpret_cast<uintptr_t>(at) % static_cast<uintptr_t>(alignment) != 0)
      stop(kind::kMisaligned, what + std::string(" of ") + std::to_string(size) + " bytes", {here(what, site)});
  }
  [[noreturn]] void stop_outside(const char* what, int64_t at, int64_t count, int64_t limit, Site site) {
    stop(kind::kOutOfBounds,
         std::to_string(count) + " elements at " + std::to_string(at) + " of a span of " + std::to_string(limit),
         {here(what, site)});
  }
  // The program ends: there is nobody to whom a wrong kernel could be reported from within it.
  [[noreturn]] void stop(const char* kind, const std::string& message, const std::vector<Place>& places) {
    for (const Place& place : places) {
      std::fprintf(stderr, "simt: %s: %s: %s, block %ld thread %ld, %s:%d\n", kind, message.c_str(), place.what.c_str(),
                   static_cast<long>(place.block), static_cast<long>(place.thread), place.site.file, place.site.line);
    }
    std::abort();
  }
  Place here(std::string what, Site site) const { return {std::move(what), block_, now_, site}; }

  uint64_t atomic_load(const Atomic& access) {
    uint64_t bits = 0;
    std::memcpy(&bits, access.at, access.size);
    return bits;
  }
  void atomic_store(const Atomic& access, uint64_t bits) { std::memcpy(access.at, &bits, access.size); }
  template <typename Change>
  uint64_t atomic_change(const Atomic& access, const Change& change) {
    const uint64_t old = atomic_load(access);
    uint64_t bits = old;
    if (change(&bits)) atomic_store(access, bits);
    return old;
  }
  void fence(Scope /*scope*/) {}

  const uint64_t* meet_in_warp(Meeting meeting, unsigned mask, unsigned width, uint64_t value, Site site) {
    Fiber& mine = me();
    const int64_t lane = now_ % kLanes, first = now_ - lane;
    if ((mask >> lane & 1) == 0) stop(kind::kMask, "a lane outside of its mask", {here("meets", site)});
    mine.meeting = meeting;
    mine.mask = mask;
    mine.width = width;
    mine.given = value;
    for (int64_t i = 0; i < kLanes; ++i) {
      if ((mask >> i & 1) == 0 || i == lane) continue;
      if (first + i >= thread_count_ || fibers_[at(first + i)].state == State::kReturned)
        stop(kind::kReturnedLane, "a lane that is not there", {here("meets", site)});
      const Fiber& other = fibers_[at(first + i)];
      // A lane that waits for others alone comes later.
      if (other.state != State::kInWarp || (other.mask >> lane & 1) == 0) {
        wait(State::kInWarp);
        return mine.got;
      }
      if (other.mask != mask || other.meeting != meeting || other.width != width)
        stop(kind::kMask, "lanes that mean different things", {here("meets", site)});
    }
    uint64_t given[kLanes] = {};
    for (unsigned i = 0; i < kLanes; ++i) given[i] = (mask >> i & 1) != 0 ? fibers_[at(first + i)].given : 0;
    for (unsigned i = 0; i < kLanes; ++i) {
      if ((mask >> i & 1) == 0) continue;
      Fiber& other = fibers_[at(first + i)];
      std::copy_n(given, kLanes, other.got);
      other.state = State::kReady;
    }
    return mine.got;
  }

  void meet_in_block(Site /*site*/) {
    me().state = State::kInBlock;
    const bool is_last = std::all_of(fibers_.begin(), fibers_.begin() + thread_count_,
                                     [](const Fiber& fiber) { return fiber.state == State::kInBlock; });
    if (!is_last) return wait(State::kInBlock);
    for (int64_t i = 0; i < thread_count_; ++i) fibers_[at(i)].state = State::kReady;
  }

  uint8_t* shared_part(int64_t offset_bytes, int64_t bytes, int64_t alignment, Site site) {
    if (offset_bytes < 0 || offset_bytes + bytes > static_cast<int64_t>(shared_.size()) * 16)
      stop(kind::kOutOfBounds, "more than the launch shares", {here("shared", site)});
    if (offset_bytes % alignment != 0) stop(kind::kMisaligned, "an offset", {here("shared", site)});
    return reinterpret_cast<uint8_t*>(shared_.data()) + offset_bytes;
  }
  void copy_async(const Span& to, const Span& from, int bytes, int valid_bytes, Site /*site*/) {
    auto* const target = static_cast<uint8_t*>(const_cast<void*>(to.at));
    std::memcpy(target, from.at, static_cast<size_t>(valid_bytes));
    std::memset(target + valid_bytes, 0, static_cast<size_t>(bytes - valid_bytes));
  }
  void commit_copies() {}
  void wait_copies(int64_t /*left*/) {}

 private:
  struct alignas(16) Shared16 {
    uint8_t bytes[16];
  };

  static size_t at(int64_t index) { return static_cast<size_t>(index); }
  Fiber& me() { return fibers_[at(now_)]; }

  void run(void (*body)(const void*), const void* argument, int64_t block_count, int64_t thread_count,
           int64_t shared_bytes);
  // The next thread that can run does; without one, the block is over, or its threads wait for each other.
  void pass() {
    Context* const from = &me().context;
    for (int64_t i = 1; i <= thread_count_; ++i) {
      const int64_t next = (now_ + i) % thread_count_;
      if (fibers_[at(next)].state != State::kReady) continue;
      now_ = next;
      switch_context(from, &me().context);
      return;
    }
    switch_context(from, &main_);
  }
  void wait(State state) {
    me().state = state;
    pass();
  }
  void end_of_thread() {
    me().state = State::kReturned;
    pass();
    std::abort();
  }

  std::vector<Fiber> fibers_;
  std::vector<Stack> stacks_;
  std::vector<Shared16> shared_;
  Context main_;
  void (*body_)(const void*) = nullptr;
  const void* argument_ = nullptr;
  int64_t block_ = 0, block_count_ = 0, thread_count_ = 0, now_ = 0;
};

// The world of the launch that runs.
inline thread_local World* current = nullptr;

inline void World::run(void (*body)(const void*), const void* argument, int64_t block_count, int64_t thread_count,
                       int64_t shared_bytes) {
  World* const outer = current;
  current = this;
  body_ = body;
  argument_ = argument;
  block_count_ = block_count;
  thread_count_ = thread_count;
  shared_.resize(static_cast<size_t>((shared_bytes + 15) / 16));
  while (static_cast<int64_t>(stacks_.size()) < thread_count) stacks_.emplace_back();
  fibers_.resize(std::max(fibers_.size(), at(thread_count)));
  for (block_ = 0; block_ < block_count; ++block_) {
    for (int64_t i = 0; i < thread_count; ++i) {
      fibers_[at(i)].state = State::kReady;
      fibers_[at(i)].context.start(stacks_[at(i)], [] {
        current->body_(current->argument_);
        current->end_of_thread();
      });
    }
    now_ = 0;
    switch_context(&main_, &me().context);
    for (int64_t i = 0; i < thread_count; ++i) {
      now_ = i;
      if (me().state != State::kReturned)
        stop(kind::kDeadlock, "threads wait for each other", {here("waits", {"", 0})});
    }
  }
  current = outer;
}

}  // namespace simt::prover
