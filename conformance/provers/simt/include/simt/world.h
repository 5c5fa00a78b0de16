// One launch: fibers for all threads of a grid, vector clocks that say what is ordered, and the checks of each access,
// collective and end.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <unordered_map>

#include <simt.h>
#include <simt/fiber.h>
#include <simt/shadow.h>

namespace simt::prover {

// The smallest limits of the devices that kernels are built for (compute capability 8.0 and later).
struct Limits {
  int64_t threads = 1024, blocks = 2147483647, shared_bytes = 99 * 1024;
  // Of a launch: more makes no sense while each access is checked.
  int64_t proven_threads = 4096;
  int64_t points = 4000000;
};

enum class State : uint8_t { kWaitsForRoom, kReady, kInWarp, kInBlock, kReturned };
enum class Meeting : uint8_t { kSync, kBallot, kMatch, kShuffle };

inline const char* name_of(Meeting meeting) {
  static const char* const names[] = {"sync_warp", "vote", "match", "shuffle"};
  return names[static_cast<int>(meeting)];
}

struct AsyncCopy {
  uint8_t* to;
  const uint8_t* from;
  int bytes, valid_bytes;
  int64_t group;
  uint32_t clock;

  // Moving twice is moving once: nobody may write the source before the copy is over.
  void move() const {
    std::memcpy(to, from, static_cast<size_t>(valid_bytes));
    std::memset(to + valid_bytes, 0, static_cast<size_t>(bytes - valid_bytes));
  }
};

struct Fiber {
  Context context;
  State state = State::kReady;
  Meeting meeting = Meeting::kSync;
  unsigned mask = 0, width = 32;
  uint64_t given = 0;
  uint64_t got[32] = {};
  Site site{"", 0};
  std::deque<AsyncCopy> copies;
  int64_t group = 0;
  uint32_t copy_clock = 0;
  std::vector<uint32_t> to_acquire, released;  // By fences: what relaxed loads saw, and what relaxed stores publish.
  bool is_release_block_scope = false;
};

// A place of a span that begins at `base`.
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

// Stacks are kept for the next launch.
inline std::vector<Stack>& known_stacks() {
  static thread_local std::vector<Stack> stacks;
  return stacks;
}

class World {
 public:
  World(Schedule* schedule, Random poison, const Limits& limits)
      : schedule_(schedule), random_(poison), limits_(limits) {}

  Region& add_region(std::string name, int64_t bytes, int64_t shift) {
    regions_.push_back(std::make_unique<Region>(std::move(name), bytes, shift));
    regions_.back()->poison(&random_);
    return *regions_.back();
  }
  const std::vector<std::unique_ptr<Region>>& regions() const { return regions_; }

  bool has_fault() const { return !fault_.kind.empty(); }
  const Fault& fault() const { return fault_; }
  // Whether the run was left because another one covers it, or because it took too long for an exhaustive search.
  bool is_pruned() const { return is_pruned_; }
  int64_t points() const { return points_; }

  void set_fault(const char* kind, std::string message, std::vector<Place> places) {
    if (!has_fault()) fault_ = {kind, kernel_, std::move(message), std::move(places)};
  }

  // Runs a grid to its end or its first fault.
  void launch(const std::string& kernel, void (*body)(const void*), const void* argument, int64_t block_count,
              int64_t thread_count, int64_t most_threads, int64_t shared_bytes, Site site);

  // What kernels ask for.
  int64_t thread() const { return now_ % thread_count_; }
  int64_t block() const { return now_ / thread_count_; }
  int64_t threads() const { return thread_count_; }
  int64_t blocks() const { return block_count_; }

  // A plain access of `size` bytes; returns when it may be made.
  void touch(const void* base, const void* at, int64_t size, int64_t alignment, bool writes, const char* what,
             Site site);
  [[noreturn]] void stop_outside(const char* what, int64_t at, int64_t count, int64_t limit, Site site);
  uint64_t atomic_load(const Atomic& access);
  void atomic_store(const Atomic& access, uint64_t bits);
  template <typename Change>
  uint64_t atomic_change(const Atomic& access, const Change& change);
  void fence(Scope scope);
  const uint64_t* meet_in_warp(Meeting meeting, unsigned mask, unsigned width, uint64_t value, Site site);
  void meet_in_block(Site site);
  uint8_t* shared_part(int64_t offset_bytes, int64_t bytes, int64_t alignment, Site site);
  void copy_async(const Span& to, const Span& from, int bytes, int valid_bytes, Site site);
  void commit_copies() { ++me().group; }
  void wait_copies(int64_t left);
  [[noreturn]] void stop(const char* kind, std::string message, std::vector<Place> places);
  Place here(std::string what, Site site) const { return place_of(now_, std::move(what), site); }

 private:
  using Clock = uint32_t;

  Fiber& me() { return fibers_[static_cast<size_t>(now_)]; }
  Clock* row(int thread) { return &clocks_[static_cast<size_t>(thread) * static_cast<size_t>(2 * total_)]; }
  int total() const { return static_cast<int>(total_); }
  void join(Clock* into, const Clock* from) const {
    for (int i = 0; i < width_; ++i) into[i] = std::max(into[i], from[i]);
  }
  void join(std::vector<Clock>* into, const Clock* from) const {
    into->resize(static_cast<size_t>(2 * total_));
    join(into->data(), from);
  }
  Place place_of(int64_t thread, std::string what, Site site) const {
    return {std::move(what), thread / thread_count_, thread % thread_count_, site};
  }
  int64_t block_of(int agent) const { return agent % total_ / thread_count_; }
  uint16_t number_of(Site site);
  void yield(const Operation& operation);
  void leave() { switch_context(&me().context, &main_); }
  void prepare(int64_t shared_bytes);
  void run();
  int next_thread();
  void end_of_thread();
  void admit_block();
  void make_ready(int thread);
  void make_idle(State state);
  void report_stuck();
  Region& region_of(const void* base, const char* what, Site site);
  std::pair<Region*, int64_t> locate(const void* base, const void* at, int64_t size, int64_t alignment,
                                     const char* what, Site site);
  bool compare(const Region& region, int64_t offset, const Access& old, const Access& access, Site site);
  void record_word(Region& region, int64_t offset, const Access& access, Site site);
  void record(Region& region, int64_t offset, int64_t size, Access access, Site site);
  void check_written(const Region& region, int64_t offset, int64_t size, Site site);
  void forget_atomics(const void* at, int64_t size);
  AtomicPlace& atomic_place(const Atomic& access);
  void touch_atomic(const Atomic& access, bool loads, bool writes, const char* what);
  bool includes(const AtomicEntry& entry, Scope scope) const {
    const bool is_one_block = entry.thread < 0 || block_of(entry.thread) == block();
    return is_one_block || (!entry.is_block_scope && scope == Scope::kDevice);
  }
  void add_entry(AtomicPlace& place, uint64_t bits, Order order, Scope scope, const std::vector<Clock>* inherited);
  void take(const AtomicEntry& entry, Order order, Scope scope);
  [[noreturn]] void stop_race(const Region& region, int64_t offset, const Access& old, const Access& now, Site site);
  static const char* verb_of(const Access& access, bool is_copy) {
    if (is_copy) return access.writes ? "asynchronous copy's store" : "asynchronous copy's load";
    if (access.is_atomic) return access.writes ? "atomic write" : "atomic load";
    return access.writes ? "store" : "load";
  }

  Schedule* schedule_;
  Random random_;
  Limits limits_;
  std::vector<std::unique_ptr<Region>> regions_, shared_;
  std::vector<Fiber> fibers_;
  std::vector<Operation> operations_;
  std::vector<Clock> clocks_;
  std::vector<int> ready_;
  std::vector<size_t> place_in_ready_;
  std::vector<int64_t> waiting_blocks_, returned_in_block_;
  std::map<std::pair<const char*, int>, uint16_t> site_numbers_;
  std::vector<Site> sites_;
  std::unordered_map<uintptr_t, AtomicPlace> atomics_;
  Context main_;
  std::string kernel_;
  void (*body_)(const void*) = nullptr;
  const void* argument_ = nullptr;
  int64_t thread_count_ = 1, block_count_ = 0, total_ = 0, points_ = 0, launch_points_ = 0;
  int now_ = 0, width_ = 0;
  uint32_t generation_ = 0;
  Fault fault_;
  bool is_pruned_ = false;
};

// The world of the launch that runs: calls in a kernel have no other way to it.
inline thread_local World* current = nullptr;

}  // namespace simt::prover

#include <simt/world_accesses.h>
#include <simt/world_launch.h>
