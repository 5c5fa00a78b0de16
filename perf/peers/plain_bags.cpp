// What reading the rows of a batch costs when nothing else is done: every line once, lines fetched ahead. A limit.
#include <cstdint>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kAhead = 8, kLineBytes = 64;

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
  std::vector<uint64_t> sums(static_cast<size_t>(thread_count));
  std::vector<std::thread> others;
  const auto read = [&](int64_t t) { sums[static_cast<size_t>(t)] = read_range(rows, row_bytes, places, count * t / thread_count, count * (t + 1) / thread_count); };
  for (int64_t t = 1; t < thread_count; ++t) others.emplace_back(read, t);
  read(0);
  for (std::thread& other : others) other.join();
  uint64_t sum = 0;
  for (const uint64_t part : sums) sum += part;
  return sum;
}
