// Who runs next, and which of the values that a relaxed load may see it sees: at random by a seed, by priorities that
// change at a few points (PCT), or every choice that makes a difference, one after the other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace simt::prover {

// splitmix64: the same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15U;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
  }
  // Of [0, count).
  int64_t below(int64_t count) { return static_cast<int64_t>(next() % static_cast<uint64_t>(count)); }
  // Of [low, high].
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }

 private:
  uint64_t state_;
};

// What a thread is about to do. Two operations of different threads commute unless they meet in memory and one writes.
struct Operation {
  uint64_t address = 0;
  uint32_t size = 0;
  bool writes = false;
  bool is_atomic = false;

  bool commutes_with(const Operation& other) const {
    const bool meet = address < other.address + other.size && other.address < address + size;
    return !meet || !(writes || other.writes);
  }
};

class Schedule {
 public:
  static constexpr int kStop = -1;

  virtual ~Schedule() = default;
  // A launch of that many threads begins.
  virtual void begin(int thread_count) = 0;
  // One of `ready`, which is not empty; kStop where the rest of this run repeats another one.
  virtual int pick(const std::vector<int>& ready, const std::vector<Operation>& operations) = 0;
  // One of [0, count).
  virtual int choose(int count) = 0;
  // Whether threads stop before atomic operations alone: what is free of races commutes.
  virtual bool stops_at_atomics_only() const { return false; }
};

class RandomSchedule : public Schedule {
 public:
  explicit RandomSchedule(uint64_t seed) : random_(seed) {}
  void begin(int /*thread_count*/) override {}
  int pick(const std::vector<int>& ready, const std::vector<Operation>& /*operations*/) override {
    return ready[random_.next() % ready.size()];
  }
  int choose(int count) override { return count == 1 ? 0 : static_cast<int>(random_.below(count)); }

 private:
  Random random_;
};

// The thread of the highest priority runs, until one of a few chosen points makes it the lowest: a bug that needs d
// orders is found with a probability of at least 1 / (threads * points ** (d - 1)).
class PrioritySchedule : public Schedule {
 public:
  static constexpr int kChanges = 3;
  // A thread that waits in a loop for a lower one is made the lowest after that many points.
  static constexpr int64_t kPatience = 2000;

  // `points` is about how many scheduling points a run has.
  PrioritySchedule(uint64_t seed, int64_t points) : random_(seed) {
    for (int i = 0; i < kChanges; ++i) changes_.push_back(random_.below(std::max<int64_t>(points, 1)));
    std::sort(changes_.begin(), changes_.end());
  }
  void begin(int thread_count) override {
    priority_.resize(static_cast<size_t>(thread_count));
    for (int i = 0; i < thread_count; ++i) priority_[static_cast<size_t>(i)] = i + 1;
    for (int i = thread_count - 1; i > 0; --i)
      std::swap(priority_[static_cast<size_t>(i)], priority_[static_cast<size_t>(random_.below(i + 1))]);
  }
  int pick(const std::vector<int>& ready, const std::vector<Operation>& /*operations*/) override {
    int best = highest(ready);
    const bool is_changed = std::binary_search(changes_.begin(), changes_.end(), point_++);
    run_length_ = best == last_ ? run_length_ + 1 : 0;
    if (is_changed || run_length_ >= kPatience) {
      priority_[static_cast<size_t>(best)] = --lowest_;
      best = highest(ready);
      run_length_ = 0;
    }
    last_ = best;
    return best;
  }
  int choose(int count) override { return count == 1 ? 0 : static_cast<int>(random_.below(count)); }

 private:
  int highest(const std::vector<int>& ready) const {
    return *std::max_element(ready.begin(), ready.end(), [this](int a, int b) {
      return priority_[static_cast<size_t>(a)] < priority_[static_cast<size_t>(b)];
    });
  }

  Random random_;
  std::vector<int64_t> priority_, changes_;
  int64_t point_ = 0, lowest_ = 0, run_length_ = 0;
  int last_ = -1;
};

// Depth first over all choices, with sleep sets: of runs that differ only in the order of operations that commute, one
// is made. `advance` goes to the next run.
class ExhaustiveSchedule : public Schedule {
 public:
  ExhaustiveSchedule() = default;
  // Replays one run: the choices, in order.
  explicit ExhaustiveSchedule(const std::vector<int>& path) {
    for (const int choice : path) nodes_.push_back({-1, choice, {}, {}, {}});
    is_replay_ = true;
  }
  void begin(int /*thread_count*/) override {}
  void begin_run() {
    depth_ = 0;
    asleep_.clear();
  }
  bool stops_at_atomics_only() const override { return true; }

  int pick(const std::vector<int>& ready, const std::vector<Operation>& operations) override {
    // A thread that is not before an atomic operation meets nobody: it runs on, and nothing is chosen.
    for (const int thread : ready) {
      if (!operations[static_cast<size_t>(thread)].is_atomic) return thread;
    }
    if (depth_ == nodes_.size()) {
      if (is_replay_) return kStop;
      Node made{0, kStop, ready, asleep_, {}};
      made.chosen = first_awake(made);
      if (made.chosen == kStop) return kStop;
      nodes_.push_back(made);
    }
    const Node& node = nodes_[depth_++];
    std::vector<int> asleep;
    const Operation& mine = operations[static_cast<size_t>(node.chosen)];
    for (const auto* set : {&node.asleep, &node.done}) {
      for (const int other : *set) {
        if (other != node.chosen && mine.commutes_with(operations[static_cast<size_t>(other)])) asleep.push_back(other);
      }
    }
    asleep_ = std::move(asleep);
    return node.chosen;
  }

  int choose(int count) override {
    if (count == 1) return 0;
    if (depth_ == nodes_.size()) {
      if (is_replay_) return 0;
      nodes_.push_back({count, 0, {}, {}, {}});
    }
    return nodes_[depth_++].chosen;
  }

  // Whether there is another run.
  bool advance() {
    while (!nodes_.empty()) {
      Node& node = nodes_.back();
      if (node.count > 0) {
        if (++node.chosen < node.count) return true;
      } else {
        node.done.push_back(node.chosen);
        node.chosen = first_awake(node);
        if (node.chosen != kStop) return true;
      }
      nodes_.pop_back();
    }
    return false;
  }

  std::string path() const {
    std::string text;
    for (size_t i = 0; i < depth_; ++i) text += (i > 0 ? "." : "") + std::to_string(nodes_[i].chosen);
    return text;
  }

 private:
  // `count` is 0 where a thread is chosen, else how many values there are.
  struct Node {
    int count, chosen;
    std::vector<int> ready, asleep, done;
  };

  static int first_awake(const Node& node) {
    for (const int thread : node.ready) {
      const auto has = [thread](const std::vector<int>& set) {
        return std::find(set.begin(), set.end(), thread) != set.end();
      };
      if (!has(node.asleep) && !has(node.done)) return thread;
    }
    return kStop;
  }

  std::vector<Node> nodes_;
  std::vector<int> asleep_;
  size_t depth_ = 0;
  bool is_replay_ = false;
};

}  // namespace simt::prover
