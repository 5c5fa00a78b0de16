// The row store's jobs without a store: rows by known position, a map for every bucket, bytes copied. Limits and
// controls, so each is as good as a plain loop gets: two threads, lines fetched ahead, stores past the caches.
#include <emmintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <unordered_map>
#include <vector>

namespace {

constexpr int64_t kAhead = 8;

template <typename Body>
void on_threads(int64_t thread_count, int64_t count, const Body& body) {
  std::vector<std::thread> others;
  for (int64_t t = 1; t < thread_count; ++t) others.emplace_back([&, t] { body(count * t / thread_count, count * (t + 1) / thread_count); });
  body(0, count / thread_count);
  for (std::thread& other : others) other.join();
}

}  // namespace

// out[i] = rows[places[i]], rows of `row_bytes`, a multiple of 16; all aligned to 16.
extern "C" void gather(const uint8_t* rows, int64_t row_bytes, const int64_t* places, int64_t count, uint8_t* out, int64_t thread_count) {
  on_threads(thread_count, count, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint8_t* const next = rows + places[std::min(i + kAhead, end - 1)] * row_bytes;
      for (int64_t line = 0; line < row_bytes; line += 64) asm volatile("prefetcht0 %0" : : "m"(next[line]));
      const auto* const from = reinterpret_cast<const __m128i*>(rows + places[i] * row_bytes);
      auto* const to = reinterpret_cast<__m128i*>(out + i * row_bytes);
      for (int64_t word = 0; word < row_bytes / 16; ++word) _mm_stream_si128(to + word, _mm_load_si128(from + word));
    }
    _mm_sfence();
  });
}

extern "C" void copy(const uint8_t* from, uint8_t* to, int64_t byte_count, int64_t thread_count) {
  on_threads(thread_count, byte_count, [&](int64_t begin, int64_t end) { std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin)); });
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
