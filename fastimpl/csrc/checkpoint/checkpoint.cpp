// CPU launchers of the checkpoint operators: checks first, then one kernel call per descriptor.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <torch/csrc/stable/ops.h>

#include "checkpoint/args.h"
#include "checkpoint/crc32.h"
#include "checkpoint/dequantize.h"
#include "checkpoint/rectangle_read.h"

namespace {

using torch::stable::Tensor;
using namespace fastimpl;
using namespace fastimpl::checkpoint;

constexpr int64_t kFixedWords = 4;  // ndim, base, skip, count; then shape, offset and size of each dimension.

void check_bytes(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(
      t.scalar_type() == torch::headeronly::ScalarType::Byte && t.is_contiguous() && t.dim() == 1 && t.is_cpu(), name,
      " must be a contiguous 1-D uint8 CPU tensor");
}

void check_words(const Tensor& t) {
  STD_TORCH_CHECK(t.scalar_type() == torch::headeronly::ScalarType::Long && t.is_contiguous() && t.is_cpu(),
                  "descriptors must be a contiguous int64 CPU tensor");
}

struct Move {
  Rectangle rect;
  int64_t base;   // File offset of the tensor's first byte.
  int64_t skip;   // Bytes of the rectangle before the first one to move.
  int64_t count;  // Bytes to move.
};

// Reads one descriptor and checks that every byte it moves lies inside the window. Returns its length in words.
int64_t read_move(const int64_t* words, int64_t left, int64_t window_start, int64_t window_bytes, Move* move) {
  STD_TORCH_CHECK(left >= kFixedWords && words[0] >= 1 && words[0] <= kDimMax && left >= kFixedWords + 3 * words[0],
                  "descriptor cut short: got ", left, " words");
  const int64_t ndim = words[0];
  *move = {{ndim, words + kFixedWords, words + kFixedWords + ndim, words + kFixedWords + 2 * ndim},
           words[1],
           words[2],
           words[3]};
  STD_TORCH_CHECK(is_valid(move->rect), "descriptor: the rectangle lies outside its tensor");
  const int64_t total = rectangle_bytes(move->rect);
  STD_TORCH_CHECK(move->skip >= 0 && move->count >= 0 && move->skip <= total && move->count <= total - move->skip,
                  "descriptor: bytes ", move->skip, " + ", move->count, " of a rectangle of ", total);
  if (move->count > 0) {
    // Of the tensor's first byte within the window; a base near the end of its range must not wrap around.
    int64_t from = 0, first = 0, last = 0;
    const bool fits = !__builtin_sub_overflow(move->base, window_start, &from) &&
                      !__builtin_add_overflow(from, locate(move->rect, move->skip), &first) &&
                      !__builtin_add_overflow(from, locate(move->rect, move->skip + move->count - 1), &last);
    STD_TORCH_CHECK(fits && first >= 0 && last < window_bytes, "descriptor: bytes ", first, "..", last,
                    " of a window of ", window_bytes);
  }
  return kFixedWords + 3 * ndim;
}

template <bool kPlace>
void move_rectangles(const Tensor& window, int64_t window_start, const Tensor& dense, const Tensor& descriptors) {
  check_bytes(window, "window");
  check_bytes(dense, "dense");
  check_words(descriptors);
  const auto* words = static_cast<const int64_t*>(descriptors.data_ptr());
  const int64_t word_count = descriptors.numel(), window_bytes = window.numel();
  int64_t dense_bytes = 0;
  Move move{};
  // Everything is checked before the first byte moves: a refused call changes nothing.
  for (int64_t at = 0; at < word_count;) {
    at += read_move(words + at, word_count - at, window_start, window_bytes, &move);
    dense_bytes += move.count;
  }
  STD_TORCH_CHECK(dense_bytes == dense.numel(), "dense: got ", dense.numel(), " bytes, the descriptors move ",
                  dense_bytes);
  auto* out = static_cast<uint8_t*>(window.data_ptr());
  auto* in = static_cast<uint8_t*>(dense.data_ptr());
  for (int64_t at = 0; at < word_count;) {
    at += read_move(words + at, word_count - at, window_start, window_bytes, &move);
    copy_rectangle<kPlace>(out + (move.base - window_start), in, move.rect, move.skip, move.count);
    in += move.count;
  }
}

void checkpoint_place(Tensor window, int64_t window_start, Tensor dense, Tensor descriptors) {
  move_rectangles<true>(window, window_start, dense, descriptors);
}

void checkpoint_take(Tensor window, int64_t window_start, Tensor dense, Tensor descriptors) {
  move_rectangles<false>(window, window_start, dense, descriptors);
}

// Returns int64 [status, calls, bytes]; the caller, who knows the file's name, makes the error.
Tensor checkpoint_read(int64_t file, Tensor dense, Tensor window, Tensor descriptor) {
  check_bytes(window, "window");
  check_bytes(dense, "dense");
  check_words(descriptor);
  Move move{};
  const int64_t length =
      read_move(static_cast<const int64_t*>(descriptor.data_ptr()), descriptor.numel(), 0, INT64_MAX, &move);
  STD_TORCH_CHECK(length == descriptor.numel() && move.count == dense.numel() && window.numel() > 0,
                  "descriptor: moves ", move.count, " bytes, dense has ", dense.numel(), ", window has ",
                  window.numel());
  const auto counts =
      read_rectangle(static_cast<int>(file), move.base, move.rect, move.skip, move.count,
                     static_cast<uint8_t*>(dense.data_ptr()), static_cast<uint8_t*>(window.data_ptr()), window.numel());
  Tensor result = torch::stable::new_empty(descriptor, {3});
  auto* out = static_cast<int64_t*>(result.data_ptr());
  out[0] = counts.status;
  out[1] = counts.calls;
  out[2] = counts.bytes;
  return result;
}

// Returns int64 [cuts - 1]: the CRC-32 of the bytes between each cut and the next.
Tensor checkpoint_crc32(Tensor data, Tensor cuts) {
  check_bytes(data, "data");
  STD_TORCH_CHECK(cuts.scalar_type() == torch::headeronly::ScalarType::Long && cuts.is_contiguous() && cuts.is_cpu() &&
                      cuts.dim() == 1 && cuts.numel() >= 1,
                  "cuts must be a contiguous int64 CPU tensor of at least one number");
  const auto* at = static_cast<const int64_t*>(cuts.data_ptr());
  const int64_t count = cuts.numel() - 1;
  for (int64_t i = 0; i <= count; ++i) {
    STD_TORCH_CHECK(at[i] >= (i == 0 ? 0 : at[i - 1]) && at[i] <= data.numel(), "cuts: got ", at[i], " at ", i,
                    ", expected ascending offsets of ", data.numel(), " bytes");
  }
  const auto* bytes = static_cast<const uint8_t*>(data.data_ptr());
  const bool products = has_carryless_product();
  Tensor result = torch::stable::new_empty(cuts, {count});
  auto* out = static_cast<int64_t*>(result.data_ptr());
  for (int64_t i = 0; i < count; ++i) out[i] = crc32(bytes + at[i], at[i + 1] - at[i], products);
  return result;
}

template <bool kGather>
void strided_cpu(const Tensor& strided, int64_t start, const Tensor& dense) {
  check_bytes(dense, "dense");
  const auto args = strided_args(strided, start, dense);
  dispatch_width(strided.element_size(), [&](auto zero) {
    using T = decltype(zero);
    strided_move<T, kGather>(args.shape, static_cast<T*>(strided.data_ptr()), static_cast<T*>(dense.data_ptr()), start,
                             args.count);
  });
}

void checkpoint_gather(Tensor source, int64_t start, Tensor dense) { strided_cpu<true>(source, start, dense); }

void checkpoint_scatter(Tensor target, int64_t start, Tensor dense) { strided_cpu<false>(target, start, dense); }

Float float_type(const Tensor& out) {
  switch (out.scalar_type()) {
    case torch::headeronly::ScalarType::Float: return Float::kFloat32;
    case torch::headeronly::ScalarType::Half: return Float::kFloat16;
    case torch::headeronly::ScalarType::BFloat16: return Float::kBFloat16;
    default: STD_TORCH_CHECK(false, "out: expected float32, float16 or bfloat16");
  }
}

Output output_of(const Tensor& out) {
  STD_TORCH_CHECK(out.dim() == 2 && out.is_cpu() && (out.stride(1) == 1 || out.size(1) <= 1) && out.stride(0) >= 0,
                  "out must be a CPU matrix whose rows are dense");
  return {float_type(out), static_cast<uint8_t*>(out.data_ptr()), out.stride(0)};
}

void check_dense(const Tensor& t, torch::headeronly::ScalarType type, int64_t ndim, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == type && t.is_contiguous() && t.dim() == ndim && t.is_cpu(), name,
                  ": expected a contiguous CPU tensor of ", ndim, " dimensions and the documented dtype");
}

void checkpoint_dequantize_fp8(Tensor values, Tensor table, Tensor scales, int64_t first_row, int64_t first_column,
                               int64_t block, Tensor out) {
  using torch::headeronly::ScalarType;
  check_dense(values, ScalarType::Byte, 2, "values");
  check_dense(table, ScalarType::Float, 1, "table");
  check_dense(scales, ScalarType::Float, 2, "scales");
  const Output target = output_of(out);
  const int64_t rows = values.size(0), columns = values.size(1);
  STD_TORCH_CHECK(table.numel() == 256, "table: got ", table.numel(), " numbers, expected 256");
  STD_TORCH_CHECK(out.size(0) == rows && out.size(1) == columns, "out: got ", out.size(0), " x ", out.size(1),
                  ", expected ", rows, " x ", columns);
  STD_TORCH_CHECK(block >= 1 && first_row >= 0 && first_row < block && first_column >= 0 && first_column < block,
                  "the first value lies at ", first_row, ", ", first_column, " of a block of ", block);
  if (rows == 0 || columns == 0) return;
  STD_TORCH_CHECK(
      scales.size(0) > (first_row + rows - 1) / block && scales.size(1) > (first_column + columns - 1) / block,
      "scales: got ", scales.size(0), " x ", scales.size(1), " blocks, the values touch more");
  dequantize_fp8(
      {static_cast<const uint8_t*>(values.data_ptr()), rows, columns, static_cast<const float*>(table.data_ptr()),
       static_cast<const float*>(scales.data_ptr()), scales.size(1), first_row, first_column, block},
      target, best_isa());
}

void checkpoint_dequantize_mxfp4(Tensor values, Tensor scales, int64_t skip, Tensor out) {
  using torch::headeronly::ScalarType;
  check_dense(values, ScalarType::Byte, 3, "values");
  check_dense(scales, ScalarType::Byte, 2, "scales");
  const Output target = output_of(out);
  const int64_t rows = values.size(0), groups = values.size(1), group_bytes = values.size(2), columns = out.size(1);
  STD_TORCH_CHECK(scales.size(0) == rows && scales.size(1) == groups && out.size(0) == rows,
                  "rows and groups differ: values ", rows, " x ", groups, ", scales ", scales.size(0), " x ",
                  scales.size(1), ", out ", out.size(0), " rows");
  STD_TORCH_CHECK(skip >= 0 && skip <= 2 * groups * group_bytes && columns <= 2 * groups * group_bytes - skip,
                  "values ", skip, " + ", columns, " of a row of ", 2 * groups * group_bytes);
  if (rows == 0 || columns == 0) return;
  dequantize_mxfp4({static_cast<const uint8_t*>(values.data_ptr()), static_cast<const uint8_t*>(scales.data_ptr()),
                    rows, groups, group_bytes, skip, columns},
                   target, best_isa());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(twinproof, CPU, m) {
  m.impl("checkpoint_place", TORCH_BOX(&checkpoint_place));
  m.impl("checkpoint_take", TORCH_BOX(&checkpoint_take));
  m.impl("checkpoint_read", TORCH_BOX(&checkpoint_read));
  m.impl("checkpoint_crc32", TORCH_BOX(&checkpoint_crc32));
  m.impl("checkpoint_dequantize_fp8", TORCH_BOX(&checkpoint_dequantize_fp8));
  m.impl("checkpoint_dequantize_mxfp4", TORCH_BOX(&checkpoint_dequantize_mxfp4));
  m.impl("checkpoint_gather", TORCH_BOX(&checkpoint_gather));
  m.impl("checkpoint_scatter", TORCH_BOX(&checkpoint_scatter));
}
