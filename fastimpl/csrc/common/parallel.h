// Bounded parallelism from outside: torch's pool in the library, plain threads in the tests.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <new>
#include <shared_mutex>

namespace fastimpl {

// Runs `work(0)` to `work(worker_count - 1)`, at once or one after the other, and returns when all have returned.
using Workers = std::function<void(int64_t worker_count, const std::function<void(int64_t)>& work)>;

struct Parallel {
  int64_t thread_count;
  Workers run_workers;

  // Calls `task(0)` to `task(task_count - 1)`, each once, on at most `thread_count` threads. The first exception is
  // thrown here after all have ended: none leaves a thread of the pool.
  void run(int64_t task_count, const std::function<void(int64_t)>& task) const {
    if (task_count <= 1 || thread_count <= 1) {
      for (int64_t i = 0; i < task_count; ++i) task(i);
      return;
    }
    std::atomic<int64_t> next{0};
    std::mutex guard;
    std::exception_ptr failure;
    run_workers(task_count < thread_count ? task_count : thread_count, [&](int64_t) {
      for (int64_t i = next.fetch_add(1); i < task_count; i = next.fetch_add(1)) {
        try {
          task(i);
        } catch (...) {
          const std::lock_guard<std::mutex> held(guard);
          if (!failure) failure = std::current_exception();
        }
      }
    });
    if (failure) std::rethrow_exception(failure);
  }

  // Cuts [0, count) into ranges of at least `grain`, a few for each thread so that a slow one is no brake.
  void run_ranges(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) const {
    const int64_t part_count = thread_count <= 1 ? 1 : std::max<int64_t>(1, std::min(4 * thread_count, count / grain));
    run(part_count, [&](int64_t part) { body(count * part / part_count, count * (part + 1) / part_count); });
  }
};

// Many readers or one writer. Whoever waits holds up those who come later, so that neither kind starves.
class FairSharedMutex {
 public:
  void lock_shared() {
    const std::lock_guard<std::mutex> turn(turn_);
    rows_.lock_shared();
  }
  void unlock_shared() { rows_.unlock_shared(); }
  void lock() {
    const std::lock_guard<std::mutex> turn(turn_);
    rows_.lock();
  }
  void unlock() { rows_.unlock(); }
  // In a forked process: nobody holds it, nobody waits. Those who did live in the parent alone.
  void make_anew() {
    new (&turn_) std::mutex;
    new (&rows_) std::shared_mutex;
  }

 private:
  std::mutex turn_;
  std::shared_mutex rows_;
};

}  // namespace fastimpl
