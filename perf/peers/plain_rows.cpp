// The row store's jobs without a store: rows by known position, a map for every bucket, bytes copied. Limits and
// controls, so each is as good as a plain loop gets: threads that are there before they are needed, lines fetched ahead,
// stores past the caches.
#include <emmintrin.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

namespace {

constexpr int64_t kAhead = 8;
constexpr int kSpins = 4000;  // Some 100 microseconds: whoever waits no longer than that is not put to sleep.

// Threads that live as long as this; the caller of `run` is one more.
class Workers {
 public:
  explicit Workers(int64_t thread_count) {
    for (int64_t t = 1; t < thread_count; ++t) threads_.emplace_back([this, t] { serve(t); });
  }
  ~Workers() {
    start({});
    for (std::thread& thread : threads_) thread.join();
  }

  // `body(begin, end)` on every thread, each with its part of [0, count). One caller at a time.
  void run(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
    const auto thread_count = static_cast<int64_t>(threads_.size()) + 1;
    busy_.store(thread_count - 1);
    start([&body, count, thread_count](int64_t t) { body(count * t / thread_count, count * (t + 1) / thread_count); });
    body(0, count / thread_count);
    wait([this] { return busy_.load() == 0; });
  }

 private:
  // Spins at first, then sleeps.
  template <typename Ready>
  void wait(const Ready& ready) {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (ready()) return;
      _mm_pause();
    }
    std::unique_lock<std::mutex> held(lock_);
    changed_.wait(held, ready);
  }

  void start(std::function<void(int64_t)> job) {
    {
      const std::lock_guard<std::mutex> held(lock_);
      job_ = std::move(job);
      ++turn_;
    }
    changed_.notify_all();
  }

  void serve(int64_t thread) {
    for (int64_t seen = 0;;) {
      wait([&] { return turn_.load() != seen; });
      seen = turn_.load();
      if (!job_) return;
      job_(thread);
      {
        const std::lock_guard<std::mutex> held(lock_);
        --busy_;
      }
      changed_.notify_all();
    }
  }

  std::mutex lock_;
  std::condition_variable changed_;
  std::function<void(int64_t)> job_;  // Empty: the end. Written before `turn_`, which says that it is there.
  std::atomic<int64_t> turn_{0}, busy_{0};
  std::vector<std::thread> threads_;
};

}  // namespace

extern "C" Workers* start_workers(int64_t thread_count) { return new Workers(thread_count); }
extern "C" void end_workers(Workers* workers) { delete workers; }

// out[i] = rows[places[i]], rows of `row_bytes`, a multiple of 8; all aligned to 16.
extern "C" void gather(const uint8_t* rows, int64_t row_bytes, const int64_t* places, int64_t count, uint8_t* out, Workers* workers) {
  workers->run(count, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint8_t* const next = rows + places[std::min(i + kAhead, end - 1)] * row_bytes;
      for (int64_t line = 0; line < row_bytes; line += 64) asm volatile("prefetcht0 %0" : : "m"(next[line]));
      const uint8_t* const from = rows + places[i] * row_bytes;
      uint8_t* const to = out + i * row_bytes;
      if (row_bytes % 16 == 0) {
        for (int64_t at = 0; at < row_bytes; at += 16) {
          _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), _mm_load_si128(reinterpret_cast<const __m128i*>(from + at)));
        }
      } else {
        for (int64_t at = 0; at < row_bytes; at += 8) {
          long long word;
          std::memcpy(&word, from + at, sizeof word);
          _mm_stream_si64(reinterpret_cast<long long*>(to + at), word);
        }
      }
    }
    _mm_sfence();
  });
}

extern "C" void copy(const uint8_t* from, uint8_t* to, int64_t byte_count, Workers* workers) {
  workers->run(byte_count, [&](int64_t begin, int64_t end) { std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin)); });
}

// Ids by bucket, id modulo `bucket_count`, as a map from bucket to list gives them, each list sorted.
extern "C" void sort_by_map(const int64_t* ids, int64_t count, int64_t bucket_count, int64_t* sorted) {
  std::unordered_map<int64_t, std::vector<int64_t>> buckets;
  for (int64_t i = 0; i < count; ++i) buckets[(ids[i] % bucket_count + bucket_count) % bucket_count].push_back(ids[i]);
  for (int64_t bucket = 0; bucket < bucket_count; ++bucket) {
    const auto found = buckets.find(bucket);
    if (found == buckets.end()) continue;
    std::sort(found->second.begin(), found->second.end());
    sorted = std::copy(found->second.begin(), found->second.end(), sorted);
  }
}
