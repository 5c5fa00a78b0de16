// The scheduler and the meetings of threads; a part of world.h.
#pragma once

#include <simt/world.h>

namespace simt::prover {

inline void World::stop(const char* kind, std::string message, std::vector<Place> places) {
  set_fault(kind, std::move(message), std::move(places));
  leave();
  std::abort();  // A fiber of a run that is over is never switched to.
}

inline void World::launch(const std::string& kernel, void (*body)(const void*), const void* argument,
                          int64_t block_count, int64_t thread_count, int64_t most_threads, int64_t shared_bytes,
                          Site site) {
  kernel_ = kernel;
  const auto refuse = [&](const std::string& what, int64_t got, int64_t low, int64_t high) {
    set_fault(
        kind::kLimit,
        what + ": got " + std::to_string(got) + ", expected " + std::to_string(low) + " to " + std::to_string(high),
        {{"launch", 0, 0, site}});
  };
  if (thread_count < 1 || thread_count > limits_.threads) return refuse("threads", thread_count, 1, limits_.threads);
  if (thread_count > most_threads)
    return refuse("threads against the kernel's kThreads", thread_count, 1, most_threads);
  if (block_count < 1 || block_count > limits_.blocks) return refuse("blocks", block_count, 1, limits_.blocks);
  if (shared_bytes < 0 || shared_bytes > limits_.shared_bytes)
    return refuse("bytes of shared memory", shared_bytes, 0, limits_.shared_bytes);
  if (block_count * thread_count > limits_.proven_threads)
    return refuse("threads that one launch proves", block_count * thread_count, 1, limits_.proven_threads);
  body_ = body;
  argument_ = argument;
  block_count_ = block_count;
  thread_count_ = thread_count;
  prepare(shared_bytes);
  World* const outer = current;
  current = this;
  run();
  current = outer;
}

inline void World::prepare(int64_t shared_bytes) {
  total_ = block_count_ * thread_count_;
  width_ = total();
  ++generation_;
  launch_points_ = 0;
  atomics_.clear();
  shared_.clear();
  for (int64_t b = 0; b < block_count_; ++b) {
    shared_.push_back(std::make_unique<Region>("shared memory of block " + std::to_string(b), shared_bytes));
    shared_.back()->poison(&random_);
  }
  fibers_ = std::vector<Fiber>(static_cast<size_t>(total_));
  operations_.assign(static_cast<size_t>(total_), Operation{});
  clocks_.assign(static_cast<size_t>(2 * total_ * total_), 0);
  std::vector<Stack>& stacks = known_stacks();
  while (stacks.size() < fibers_.size()) stacks.emplace_back();
  place_in_ready_.assign(static_cast<size_t>(total_), 0);
  for (int i = 0; i < total(); ++i) {
    row(i)[i] = 1;
    Fiber& fiber = fibers_[static_cast<size_t>(i)];
    fiber.state = State::kWaitsForRoom;
    fiber.context.start(stacks[static_cast<size_t>(i)], [] {
      current->body_(current->argument_);
      current->end_of_thread();
    });
  }
  // A device runs some of the blocks at once, in any order; the others wait until one has ended.
  ready_.clear();
  returned_in_block_.assign(static_cast<size_t>(block_count_), 0);
  waiting_blocks_.clear();
  for (int64_t b = 0; b < block_count_; ++b) waiting_blocks_.push_back(b);
  for (int64_t b = block_count_ - 1; b > 0; --b)
    std::swap(waiting_blocks_[static_cast<size_t>(b)],
              waiting_blocks_[static_cast<size_t>(schedule_->choose(static_cast<int>(b + 1)))]);
  const int resident = schedule_->choose(static_cast<int>(block_count_)) + 1;
  for (int i = 0; i < resident; ++i) admit_block();
  schedule_->begin(total());
}

inline void World::admit_block() {
  if (waiting_blocks_.empty()) return;
  const int64_t block = waiting_blocks_.back();
  waiting_blocks_.pop_back();
  for (int64_t i = block * thread_count_; i < (block + 1) * thread_count_; ++i) {
    make_ready(static_cast<int>(i));
  }
}

inline void World::make_ready(int thread) {
  fibers_[static_cast<size_t>(thread)].state = State::kReady;
  place_in_ready_[static_cast<size_t>(thread)] = ready_.size();
  ready_.push_back(thread);
}

// This thread waits, or has returned.
inline void World::make_idle(State state) {
  me().state = state;
  const size_t place = place_in_ready_[static_cast<size_t>(now_)];
  ready_[place] = ready_.back();
  place_in_ready_[static_cast<size_t>(ready_[place])] = place;
  ready_.pop_back();
}

inline int World::next_thread() {
  if (ready_.empty()) return Schedule::kStop;
  const int next = schedule_->pick(ready_, operations_);
  if (next == Schedule::kStop) is_pruned_ = true;
  return next;
}

inline void World::run() {
  while (!has_fault() && !is_pruned_) {
    const int next = next_thread();
    if (next == Schedule::kStop) {
      if (!is_pruned_) report_stuck();
      return;
    }
    now_ = next;
    switch_context(&main_, &me().context);
  }
}

// Somebody else may run here.
inline void World::yield(const Operation& operation) {
  ++points_;
  if (++launch_points_ > limits_.points) {
    if (schedule_->stops_at_atomics_only()) {
      is_pruned_ = true;
      leave();
    }
    std::vector<Place> places;
    for (int i = 0; i < total() && places.size() < 4; ++i) {
      const Fiber& fiber = fibers_[static_cast<size_t>(i)];
      if (fiber.state != State::kReturned) places.push_back(place_of(i, "still runs", fiber.site));
    }
    stop(kind::kNoEnd,
         "no end after " + std::to_string(limits_.points) + " scheduling points, with " +
             std::to_string(waiting_blocks_.size()) + " blocks that wait for room: a loop waits for what nobody does",
         std::move(places));
  }
  if (schedule_->stops_at_atomics_only() && !operation.is_atomic) return;
  operations_[static_cast<size_t>(now_)] = operation;
  const int next = next_thread();
  if (next == now_) {
    operations_[static_cast<size_t>(now_)] = Operation{};
    return;
  }
  if (next == Schedule::kStop) {
    leave();
    std::abort();
  }
  Fiber& from = me();
  now_ = next;
  switch_context(&from.context, &me().context);
  operations_[static_cast<size_t>(now_)] = Operation{};
}

inline void World::report_stuck() {
  std::vector<Place> places;
  for (int i = 0; i < total(); ++i) {
    const Fiber& fiber = fibers_[static_cast<size_t>(i)];
    if (fiber.state != State::kInWarp && fiber.state != State::kInBlock) continue;
    const bool is_known = std::any_of(places.begin(), places.end(), [&](const Place& place) {
      return place.site.line == fiber.site.line && place.site.file == fiber.site.file;
    });
    const char* const what = fiber.state == State::kInBlock ? "waits in sync_block" : name_of(fiber.meeting);
    if (!is_known) places.push_back(place_of(i, what, fiber.site));
  }
  if (!places.empty()) set_fault(kind::kDeadlock, "threads wait for each other, and none can run", std::move(places));
}

inline void World::end_of_thread() {
  Fiber& fiber = me();
  const int64_t first = block() * thread_count_;
  for (int64_t i = first; i < first + thread_count_; ++i) {
    const Fiber& other = fibers_[static_cast<size_t>(i)];
    const bool is_of_warp = (i - first) / kLanes == thread() / kLanes;
    if (other.state == State::kInWarp && is_of_warp && (other.mask >> (thread() % kLanes) & 1) != 0)
      stop(kind::kReturnedLane, std::string("a lane that ") + name_of(other.meeting) + " names returns without it",
           {place_of(i, name_of(other.meeting), other.site), here("returns after", fiber.site)});
    if (other.state == State::kInBlock)
      stop(kind::kDivergence, "a thread returns while others of its block wait in sync_block",
           {place_of(i, "sync_block", other.site), here("returns after", fiber.site)});
  }
  make_idle(State::kReturned);
  for (const AsyncCopy& copy : fiber.copies) copy.move();
  if (++returned_in_block_[static_cast<size_t>(block())] == thread_count_) admit_block();
  leave();
  std::abort();
}

// All lanes of the mask meet; each sees what each gave. Only sync_warp orders memory.
inline const uint64_t* World::meet_in_warp(Meeting meeting, unsigned mask, unsigned width, uint64_t value, Site site) {
  me().site = site;
  yield({});
  Fiber& fiber = me();
  const int lane = static_cast<int>(thread() % kLanes), first = now_ - lane;
  const auto lanes_here = static_cast<int>(std::min<int64_t>(kLanes, thread_count_ - (thread() - lane)));
  const char* const name = name_of(meeting);
  if ((mask >> lane & 1) == 0) {
    stop(kind::kMask, std::string(name) + " by a lane that is not in its mask", {here(name, site)});
  }
  bool is_last = true;
  for (int i = 0; i < 32; ++i) {
    if ((mask >> i & 1) == 0 || i == lane) continue;
    if (i >= lanes_here) {
      stop(kind::kReturnedLane,
           std::string(name) + " names lane " + std::to_string(i) + ", which the block does not have",
           {here(name, site)});
    }
    const Fiber& other = fibers_[static_cast<size_t>(first + i)];
    if (other.state == State::kReturned) {
      stop(kind::kReturnedLane, std::string(name) + " names lane " + std::to_string(i) + ", which has returned",
           {here(name, site), place_of(first + i, "returned after", other.site)});
    }
    // A lane that waits for others alone comes later: parts of a warp may do something by themselves meanwhile.
    if (other.state != State::kInWarp || (other.mask >> lane & 1) == 0) {
      is_last = false;
    } else if (other.mask != mask || other.meeting != meeting || other.width != width) {
      stop(kind::kMask, std::string(name) + " meets " + name_of(other.meeting) + " of another mask, kind or width",
           {here(name, site), place_of(first + i, name_of(other.meeting), other.site)});
    }
  }
  fiber.meeting = meeting;
  fiber.mask = mask;
  fiber.width = width;
  fiber.given = value;
  if (!is_last) {
    make_idle(State::kInWarp);
    leave();
    return me().got;
  }
  std::vector<Clock> joined;
  for (int i = 0; i < lanes_here; ++i) {
    if ((mask >> i & 1) != 0 && meeting == Meeting::kSync) join(&joined, row(first + i));
  }
  for (int i = 0; i < lanes_here; ++i) {
    if ((mask >> i & 1) == 0) continue;
    Fiber& other = fibers_[static_cast<size_t>(first + i)];
    for (int j = 0; j < lanes_here; ++j) other.got[j] = fibers_[static_cast<size_t>(first + j)].given;
    if (i != lane) make_ready(first + i);
    if (meeting == Meeting::kSync) {
      std::copy_n(joined.data(), width_, row(first + i));
      ++row(first + i)[first + i];
    }
  }
  return me().got;
}

inline void World::meet_in_block(Site site) {
  me().site = site;
  yield({});
  const auto first = static_cast<int>(block() * thread_count_);
  int64_t waiting = 1;
  for (int i = first; i < first + thread_count_; ++i) {
    const Fiber& other = fibers_[static_cast<size_t>(i)];
    if (i == now_) continue;
    if (other.state == State::kReturned)
      stop(kind::kDivergence, "sync_block after another thread of the block has returned",
           {here("sync_block", site), place_of(i, "returned after", other.site)});
    if (other.state != State::kInBlock) continue;
    ++waiting;
    if (other.site.line != site.line || other.site.file != site.file)
      stop(kind::kDivergence, "threads of a block wait in different calls of sync_block",
           {here("sync_block", site), place_of(i, "sync_block", other.site)});
  }
  if (waiting < thread_count_) {
    make_idle(State::kInBlock);
    leave();
    return;
  }
  std::vector<Clock> joined;
  for (int i = first; i < first + thread_count_; ++i) join(&joined, row(i));
  for (int i = first; i < first + thread_count_; ++i) {
    std::copy_n(joined.data(), width_, row(i));
    ++row(i)[i];
    if (i != now_) make_ready(i);
  }
}

}  // namespace simt::prover
