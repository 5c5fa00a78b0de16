// What reading the rows of a batch costs when nothing else is done: every line once, lines fetched ahead. A limit.
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kAhead = 8, kLineBytes = 64, kPartRows = 4096;

uint64_t read_range(const uint8_t* rows, int64_t row_bytes, const int64_t* places, int64_t begin, int64_t end) {
  uint64_t sum = 0;
  for (int64_t i = begin; i < end; ++i) {
    const uint8_t* const next = rows + places[i + kAhead < end ? i + kAhead : end - 1] * row_bytes;
    for (int64_t at = 0; at < row_bytes; at += kLineBytes) asm volatile("prefetcht0 %0" : : "m"(next[at]));
    const auto* const words = reinterpret_cast<const uint64_t*>(rows + places[i] * row_bytes);
    for (int64_t word = 0; word < row_bytes / 8; ++word) sum += words[word];
  }
  return sum;
}

}  // namespace

// The sum of all 8-byte words of rows `places`; rows of `row_bytes`, a multiple of 8, aligned to 8.
extern "C" uint64_t read_rows(const uint8_t* rows, int64_t row_bytes, const int64_t* places, int64_t count, int64_t thread_count) {
  std::atomic<int64_t> next{0};
  std::atomic<uint64_t> sum{0};
  std::vector<std::thread> others;
  // Parts are taken as threads come, so that one that is held up holds up nobody.
  const auto read = [&] {
    for (int64_t begin = next.fetch_add(kPartRows); begin < count; begin = next.fetch_add(kPartRows)) {
      sum += read_range(rows, row_bytes, places, begin, begin + kPartRows < count ? begin + kPartRows : count);
    }
  };
  for (int64_t t = 1; t < thread_count; ++t) others.emplace_back(read);
  read();
  for (std::thread& other : others) other.join();
  return sum;
}
