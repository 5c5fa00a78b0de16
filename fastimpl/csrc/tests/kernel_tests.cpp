// Properties of the kernels against element-by-element definitions, on random shapes with a fixed seed.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "checkpoint/crc32.h"
#include "checkpoint/dequantize.h"
#include "checkpoint/rectangle_read.h"
#include "checkpoint/strided.h"
#include "kvstore_tests.h"
#include "offload_tests.h"
#include "pipeline_tests.h"

namespace {

using Ints = std::vector<int64_t>;
std::mt19937_64 random_bits(20251121);

int64_t uniform(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random_bits); }

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "kernel_tests: %s\n", what);
  std::exit(1);
}

struct Case {
  Ints shape, offset, size;
  fastimpl::checkpoint::Rectangle rect() const {
    return {static_cast<int64_t>(shape.size()), shape.data(), offset.data(), size.data()};
  }
};

Case random_case() {
  Case c;
  const int64_t ndim = uniform(1, 4);
  for (int64_t d = 0; d < ndim; ++d) {
    const int64_t shape = uniform(1, d + 1 == ndim ? 40 : 6), size = uniform(1, shape);
    c.shape.push_back(shape);
    c.size.push_back(size);
    c.offset.push_back(uniform(0, shape - size));
  }
  return c;
}

int64_t product(const Ints& v) { return std::accumulate(v.begin(), v.end(), int64_t{1}, std::multiplies<int64_t>()); }

// The definition: the p-th byte of the rectangle in row-major order, by counting through the tensor.
Ints positions(const Case& c) {
  Ints result;
  for (int64_t flat = 0; flat < product(c.shape); ++flat) {
    int64_t rest = flat;
    bool inside = true;
    for (int64_t d = static_cast<int64_t>(c.shape.size()) - 1; d >= 0; --d) {
      const int64_t index = rest % c.shape[d];
      rest /= c.shape[d];
      inside = inside && index >= c.offset[d] && index < c.offset[d] + c.size[d];
    }
    if (inside) result.push_back(flat);
  }
  return result;
}

void rect_copy_matches_its_definition() {
  for (int i = 0; i < 3000; ++i) {
    const Case c = random_case();
    require(fastimpl::checkpoint::is_valid(c.rect()), "a rectangle inside its tensor was refused");
    const Ints at = positions(c);
    require(static_cast<int64_t>(at.size()) == fastimpl::checkpoint::rectangle_bytes(c.rect()), "rect_bytes");
    const int64_t skip = uniform(0, static_cast<int64_t>(at.size()) - 1),
                  count = uniform(0, static_cast<int64_t>(at.size()) - skip);
    std::vector<uint8_t> window(static_cast<size_t>(product(c.shape)), 0xEE), dense(static_cast<size_t>(count)),
        back(dense.size());
    for (auto& byte : dense) byte = static_cast<uint8_t>(uniform(0, 200));
    std::vector<uint8_t> expected = window;
    for (int64_t p = 0; p < count; ++p) {
      require(fastimpl::checkpoint::locate(c.rect(), skip + p) == at[static_cast<size_t>(skip + p)], "rect_locate");
      expected[static_cast<size_t>(at[static_cast<size_t>(skip + p)])] = dense[static_cast<size_t>(p)];
    }
    fastimpl::checkpoint::copy_rectangle<true>(window.data(), dense.data(), c.rect(), skip, count);
    require(window == expected, "place wrote other bytes than the rectangle's");
    fastimpl::checkpoint::copy_rectangle<false>(window.data(), back.data(), c.rect(), skip, count);
    require(back == dense, "take did not return what place wrote");
  }
}

// The file holds the tensor at an odd offset; windows shorter than a row and longer than everything.
void rect_read_matches_its_definition() {
  std::FILE* const file = std::tmpfile();
  require(file != nullptr, "tmpfile");
  for (int i = 0; i < 1000; ++i) {
    const Case c = random_case();
    const Ints at = positions(c);
    const int64_t base = uniform(0, 50), total = static_cast<int64_t>(at.size());
    std::vector<uint8_t> content(static_cast<size_t>(base + product(c.shape)));
    for (auto& byte : content) byte = static_cast<uint8_t>(uniform(0, 255));
    require(pwrite(fileno(file), content.data(), content.size(), 0) == static_cast<ssize_t>(content.size()), "pwrite");
    require(ftruncate(fileno(file), static_cast<off_t>(content.size())) == 0, "ftruncate");
    for (int64_t position = 0; position <= product(c.shape); ++position) {
      const auto before = std::lower_bound(at.begin(), at.end(), position) - at.begin();
      require(fastimpl::checkpoint::held_before(c.rect(), position) == before, "rect_held_before");
    }
    const int64_t skip = uniform(0, total - 1), count = uniform(0, total - skip);
    std::vector<uint8_t> dense(static_cast<size_t>(count)), window(static_cast<size_t>(uniform(1, 200)));
    const auto counts = fastimpl::checkpoint::read_rectangle(fileno(file), base, c.rect(), skip, count, dense.data(),
                                                             window.data(), static_cast<int64_t>(window.size()));
    require(counts.status == 0, "read_rectangle failed");
    for (int64_t p = 0; p < count; ++p) {
      require(dense[static_cast<size_t>(p)] == content[static_cast<size_t>(base + at[static_cast<size_t>(skip + p)])],
              "read_rectangle read other bytes");
    }
    const auto beyond = fastimpl::checkpoint::read_rectangle(fileno(file), base + 1 + product(c.shape), c.rect(), 0, 1,
                                                             window.data(), window.data(), 1);
    require(beyond.status == fastimpl::kEndOfFile, "read_rectangle beyond the end");
  }
  require(fastimpl::checkpoint::read_rectangle(-1, 0, Case{{4}, {0}, {4}}.rect(), 0, 4, nullptr, nullptr, 4).status ==
              EBADF,
          "read_rectangle of a closed file");
  std::fclose(file);
}

void invalid_rectangles_are_refused() {
  const int64_t big = int64_t{1} << 62;
  const Case cases[] = {{{4}, {2}, {3}},   {{4}, {-1}, {2}}, {{4}, {0}, {0}}, {{big, 4}, {0, 0}, {1, 1}},
                        {{4}, {big}, {1}}, {{0}, {0}, {0}}};
  for (const Case& c : cases)
    require(!fastimpl::checkpoint::is_valid(c.rect()), "a rectangle outside its tensor was accepted");
  const Ints ones(fastimpl::checkpoint::kDimMax + 1, 1), zeros(ones.size(), 0);
  const auto of_ones = [&](int64_t ndim) {
    return fastimpl::checkpoint::Rectangle{ndim, ones.data(), zeros.data(), ones.data()};
  };
  require(fastimpl::checkpoint::is_valid(of_ones(1)) &&
              fastimpl::checkpoint::is_valid(of_ones(fastimpl::checkpoint::kDimMax)),
          "a rectangle of as many dimensions as there may be was refused");
  for (const int64_t ndim : {int64_t{-1}, int64_t{0}, fastimpl::checkpoint::kDimMax + 1})
    require(!fastimpl::checkpoint::is_valid(of_ones(ndim)), "a rectangle of too many or no dimensions was accepted");
}

// A serial grid: the functor that CUDA runs, its indices in random order.
template <typename T>
void strided_matches_its_definition() {
  for (int i = 0; i < 500; ++i) {
    fastimpl::checkpoint::Strided s;
    s.ndim = uniform(0, 4);
    Ints order(static_cast<size_t>(s.ndim));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_bits);
    int64_t span = 1;
    for (int64_t d : order) {
      s.size[d] = uniform(1, 7);
      s.stride[d] = span;
      span *= s.size[d] + uniform(0, 2);
    }
    int64_t total = 1;
    for (int64_t d = 0; d < s.ndim; ++d) total *= s.size[d];
    fastimpl::checkpoint::Strided merged;
    for (int64_t d = 0; d < s.ndim; ++d) merged.add(s.size[d], s.stride[d]);
    require(merged.ndim <= s.ndim, "dimensions were added");
    for (int64_t p = 0; p < total; ++p) require(merged.locate(p) == s.locate(p), "merged dimensions lie elsewhere");
    std::vector<T> memory(static_cast<size_t>(span));
    std::iota(memory.begin(), memory.end(), T{1});
    const int64_t start = uniform(0, total - 1), count = uniform(0, total - start);
    std::vector<T> by_row(static_cast<size_t>(count)), by_index(static_cast<size_t>(count));
    fastimpl::checkpoint::strided_move<T, true>(s, memory.data(), by_row.data(), start, count);
    Ints indices(static_cast<size_t>(count));
    std::iota(indices.begin(), indices.end(), 0);
    std::shuffle(indices.begin(), indices.end(), random_bits);
    const fastimpl::checkpoint::StridedMove<T, true> gather{s, memory.data(), by_index.data(), start};
    for (int64_t index : indices) gather(index);
    require(by_row == by_index, "row-wise and index-wise gather differ");
    for (int64_t p = 0; p < count; ++p)
      require(by_row[static_cast<size_t>(p)] == memory[static_cast<size_t>(s.locate(start + p))], "gather");
    std::vector<T> other(memory.size(), T{0}), expected = other;
    for (int64_t p = 0; p < count; ++p)
      expected[static_cast<size_t>(s.locate(start + p))] = by_row[static_cast<size_t>(p)];
    fastimpl::checkpoint::strided_move<T, false>(s, other.data(), by_row.data(), start, count);
    require(other == expected, "scatter");
  }
}

// Writers of disjoint rectangles share a window in the fast writer's readers; ThreadSanitizer watches this one.
void disjoint_rectangles_may_be_placed_at_once() {
  const int64_t rows = 64, row_bytes = 4096, ways = 4;
  std::vector<uint8_t> window(static_cast<size_t>(rows * row_bytes));
  std::vector<std::thread> threads;
  for (int64_t way = 0; way < ways; ++way) {
    threads.emplace_back([&window, way] {
      const Case c{{rows, row_bytes}, {0, way * row_bytes / ways}, {rows, row_bytes / ways}};
      std::vector<uint8_t> dense(static_cast<size_t>(rows * row_bytes / ways), static_cast<uint8_t>(way + 1));
      fastimpl::checkpoint::copy_rectangle<true>(window.data(), dense.data(), c.rect(), 0,
                                                 static_cast<int64_t>(dense.size()));
    });
  }
  for (auto& thread : threads) thread.join();
  for (size_t i = 0; i < window.size(); ++i) {
    require(window[i] == static_cast<int64_t>(i) % row_bytes * ways / row_bytes + 1, "parallel place");
  }
}

bool is_same(float a, float b) { return std::isnan(a) ? std::isnan(b) : fastimpl::bits_of(a) == fastimpl::bits_of(b); }

std::vector<uint8_t> random_bytes(int64_t count) {
  std::vector<uint8_t> bytes(static_cast<size_t>(count));
  for (auto& byte : bytes) byte = static_cast<uint8_t>(uniform(0, 255));
  return bytes;
}

// Number by number, from the definition; outputs lie in rows with room between them, which must stay as it was.
template <typename Write, typename Expect>
void dequantizes(int64_t rows, int64_t columns, Write&& write, Expect&& expect) {
  using fastimpl::Float;
  const int64_t stride = columns + uniform(0, 3);
  const int64_t best = static_cast<int64_t>(fastimpl::best_isa());
  for (const int64_t each : {0, 1, 2, 10, 11, 12, 20, 21, 22}) {
    const auto type = static_cast<Float>(each / 10);
    const auto isa = static_cast<fastimpl::Isa>(std::min(each % 10, best));
    const auto width = static_cast<size_t>(fastimpl::float_bytes(type));
    std::vector<uint8_t> memory(static_cast<size_t>(rows * stride) * width, 0xA5);
    write(fastimpl::checkpoint::Output{type, memory.data(), stride}, isa);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < stride; ++column) {
        const uint8_t* at = memory.data() + static_cast<size_t>(row * stride + column) * width;
        if (column >= columns) {
          require(at[0] == 0xA5 && at[width - 1] == 0xA5, "dequantize: beyond a row");
          continue;
        }
        const float number = expect(row, column);
        uint8_t narrowed[4];
        fastimpl::narrow(type, &number, narrowed, 1);
        float got = 0, expected = 0;
        fastimpl::widen(type, at, &got, 1);
        fastimpl::widen(type, narrowed, &expected, 1);
        require(is_same(got, expected), "dequantize: a number");
      }
    }
  }
}

void fp8_matches_its_definition() {
  for (int round = 0; round < 40; ++round) {
    const int64_t block = uniform(1, 40), first_row = uniform(0, block - 1), first_column = uniform(0, block - 1);
    const int64_t rows = uniform(1, 50), columns = uniform(1, 700);
    const int64_t scale_rows = (first_row + rows - 1) / block + 1,
                  scale_columns = (first_column + columns - 1) / block + 1;
    const auto values = random_bytes(rows * columns);
    std::vector<float> table(256), scales(static_cast<size_t>(scale_rows * scale_columns));
    const bool is_random = round % 2 == 0;
    for (size_t byte = 0; byte < 256; ++byte) {
      const int exponent = static_cast<int>(byte >> 3 & 15), mantissa = static_cast<int>(byte & 7);
      const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                            : std::ldexp(static_cast<float>(mantissa + 8), exponent - 10);
      const float number = (byte & 127) == 127 ? std::nanf("") : magnitude;
      table[byte] = is_random ? static_cast<float>(uniform(-1000, 1000)) * 0x1p-9F
                              : std::copysign(number, byte < 128 ? 1.0F : -1.0F);
    }
    require(fastimpl::checkpoint::is_e4m3(table.data()) != is_random, "dequantize: the formula of e4m3");
    for (auto& number : scales) number = std::ldexp(1.0F, static_cast<int>(uniform(-20, 20)));
    const fastimpl::checkpoint::Fp8 in{values.data(), rows,      columns,      table.data(), scales.data(),
                                       scale_columns, first_row, first_column, block};
    dequantizes(
        rows, columns, [&](const auto& out, auto isa) { fastimpl::checkpoint::dequantize_fp8(in, out, isa); },
        [&](int64_t row, int64_t column) {
          const int64_t scale = (first_row + row) / block * scale_columns + (first_column + column) / block;
          return table[values[static_cast<size_t>(row * columns + column)]] * scales[static_cast<size_t>(scale)];
        });
  }
}

void mxfp4_matches_its_definition() {
  for (int round = 0; round < 40; ++round) {
    const int64_t rows = uniform(1, 6), groups = uniform(1, 60), group_bytes = uniform(1, 20);
    const int64_t all = 2 * groups * group_bytes, skip = uniform(0, all - 1), columns = uniform(1, all - skip);
    const auto values = random_bytes(rows * groups * group_bytes), scales = random_bytes(rows * groups);
    const fastimpl::checkpoint::Mxfp4 in{values.data(), scales.data(), rows, groups, group_bytes, skip, columns};
    const float magnitudes[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
    dequantizes(
        rows, columns, [&](const auto& out, auto isa) { fastimpl::checkpoint::dequantize_mxfp4(in, out, isa); },
        [&](int64_t row, int64_t column) {
          const int64_t at = row * all + skip + column;
          const int byte = values[static_cast<size_t>(at / 2)], half = at % 2 == 0 ? byte & 15 : byte >> 4;
          const int scale = scales[static_cast<size_t>(at / 2 / group_bytes)];
          const float number = half < 8 ? magnitudes[half] : -magnitudes[half - 8];
          return scale == 255 ? std::nanf("") : std::ldexp(number, scale - 127);
        });
  }
  const uint8_t byte = 0x21;
  float number = 7;
  for (const int64_t half : {0, 1}) fastimpl::checkpoint::mxfp4_run(&byte, 1.0F, half, &number, 0);
  require(number == 7, "dequantize: a run of no numbers");
}

void crc32_matches_its_definition() {
  using fastimpl::checkpoint::crc32;
  const uint8_t digits[] = {'1', '2', '3', '4', '5', '6', '7', '8', '9'};
  require(crc32(digits, 9, false) == 0xCBF43926, "the check value of CRC-32");
  std::vector<uint8_t> bytes(700);
  for (auto& byte : bytes) byte = static_cast<uint8_t>(uniform(0, 255));
  for (int64_t count = 0; count < 300; ++count) {
    const uint8_t* from = bytes.data() + uniform(0, 400);
    uint32_t expected = ~uint32_t{0};
    for (int64_t i = 0; i < count; ++i) {
      expected ^= from[i];
      for (int bit = 0; bit < 8; ++bit) expected = (expected >> 1) ^ ((expected & 1) != 0 ? 0xEDB88320u : 0u);
    }
    require(crc32(from, count, false) == ~expected, "crc32 by tables");
    require(crc32(from, count, fastimpl::checkpoint::has_carryless_product()) == ~expected, "crc32 by products");
  }
}

}  // namespace

int main() {
  crc32_matches_its_definition();
  fp8_matches_its_definition();
  mxfp4_matches_its_definition();
  rect_copy_matches_its_definition();
  rect_read_matches_its_definition();
  invalid_rectangles_are_refused();
  strided_matches_its_definition<uint8_t>();
  strided_matches_its_definition<uint16_t>();
  strided_matches_its_definition<uint32_t>();
  strided_matches_its_definition<uint64_t>();
  disjoint_rectangles_may_be_placed_at_once();
  kvstore_algorithm_tests();
  kvstore_table_tests();
  offload_tests();
  slab_tests();
  pipeline_tests();
  std::puts("kernel_tests: all properties hold");
}
