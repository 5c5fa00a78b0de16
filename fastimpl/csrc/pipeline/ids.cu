// CUDA launchers of the movement of ids: checks, mending, jagged permutation, bucketizing. What may be wrong is read
// back once, before anything is written that the caller sees. Never run on a GPU so far.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "common/device_call.cuh"
#include "pipeline/grid_ids.h"

namespace {

using namespace fastimpl;
using namespace fastimpl::pipeline;
using namespace fastimpl::device;
using OptionalTensor = std::optional<Tensor>;

// Bags of a feature.
int64_t bag_count_of(const Tensor& offsets, const Tensor& indices, int64_t feature_count) {
  check_plain(offsets, indices, ScalarType::Long, 1, "offsets");
  const int64_t all = offsets.numel() - 1;
  STD_TORCH_CHECK(feature_count > 0 ? all >= 0 && all % feature_count == 0 : all == 0, "offsets: got ", offsets.numel(),
                  " for ", feature_count, " features, expected features * bags + 1");
  return feature_count > 0 ? all / feature_count : 0;
}

template <typename Id>
GridIds<Id> ids_of(const Tensor& indices, const Tensor& offsets, int64_t feature_count) {
  return {static_cast<const Id*>(indices.data_ptr()), static_cast<const int64_t*>(offsets.data_ptr()), feature_count,
          bag_count_of(offsets, indices, feature_count), indices.numel()};
}

// Where the offsets of a batch are looked at: a flag on the device.
template <typename Id>
int64_t* check_offsets(Call* call, const GridIds<Id>& batch) {
  auto* const flag = const_cast<int64_t*>(call->upload(Ints{0}));
  const int64_t all = batch.feature_count * batch.bag_count;
  call->launch(OffsetCheck{batch.offsets, all, batch.id_count, flag}, all + 1);
  return flag;
}

void refuse_offsets(Call* call, const int64_t* flag, int64_t id_count) {
  int64_t is_wrong = 0;
  call->read_back(flag, &is_wrong, 1);
  STD_TORCH_CHECK(is_wrong == 0, "offsets: not ascending from 0 to ", id_count);
}

void check_row_counts(const Ints& row_counts) {
  for (const int64_t count : row_counts) STD_TORCH_CHECK(count >= 0, "row_counts: got ", count);
}

// [count of ids outside, position of the first or -1].
Tensor check_bag_ids_cuda(Tensor indices, Tensor offsets, Ints row_counts) {
  check_row_counts(row_counts);
  Tensor result = torch::stable::new_empty(indices, {2}, ScalarType::Long);
  with_ids(indices, [&](auto id) {
    using Id = decltype(id);
    const auto batch = ids_of<Id>(indices, offsets, static_cast<int64_t>(row_counts.size()));
    Call call(indices);
    const int64_t* const flag = check_offsets(&call, batch);
    const int64_t* const none = call.upload(Ints{0, INT64_MAX});
    auto* const found = static_cast<int64_t*>(result.data_ptr());
    call.copy(none, found, 2);
    if (batch.feature_count * batch.bag_count > 0) {
      call.launch(CountBadIds<Id>{batch, call.upload(row_counts), found}, run_count(batch.id_count, Run<Id>::kCount));
    }
    call.launch(EndBadIds{found}, 1);
    refuse_offsets(&call, flag, batch.id_count);
  });
  return result;
}

Tensor mend_bag_ids_cuda(Tensor indices, Tensor offsets, Ints row_counts) {
  check_row_counts(row_counts);
  Tensor result = torch::stable::new_empty(indices, {indices.numel()});
  with_ids(indices, [&](auto id) {
    using Id = decltype(id);
    const auto batch = ids_of<Id>(indices, offsets, static_cast<int64_t>(row_counts.size()));
    Call call(indices);
    const int64_t* const flag = check_offsets(&call, batch);
    if (batch.feature_count * batch.bag_count > 0) {
      call.launch(MendBadIds<Id>{batch, call.upload(row_counts), static_cast<Id*>(result.data_ptr())},
                  run_count(batch.id_count, Run<Id>::kCount));
    }
    refuse_offsets(&call, flag, batch.id_count);
  });
  return result;
}

template <typename Value>
void gather(Call* call, const Tensor& data, const int64_t* begins, const int64_t* starts, int64_t block_count,
            const Tensor& out) {
  const GatherBlocks<Value> job{static_cast<const Value*>(data.data_ptr()), begins, starts, block_count, out.numel(),
                                static_cast<Value*>(out.data_ptr())};
  call->launch(job, run_count(out.numel(), Run<Value>::kCount));
}

void gather_blocks_cuda(Tensor data, Tensor begins, Tensor sizes, Tensor out) {
  STD_TORCH_CHECK(data.is_cuda() && data.is_contiguous() && data.dim() == 1, "data: not a contiguous 1-D CUDA tensor");
  check_plain(begins, data, ScalarType::Long, 1, "begins");
  check_plain(sizes, data, ScalarType::Long, 1, "sizes");
  STD_TORCH_CHECK(begins.numel() == sizes.numel(), "begins: got ", begins.numel(), " for ", sizes.numel(), " sizes");
  check_plain(out, data, data.scalar_type(), 1, "out");
  const int64_t block_count = sizes.numel(), data_count = data.numel();
  // So that no sum of sizes wraps around to one that fits.
  STD_TORCH_CHECK(data_count == 0 || block_count <= INT64_MAX / data_count, "sizes: got ", block_count, " blocks of ",
                  data_count, " elements");
  Call call(data);
  auto *const from = static_cast<const int64_t*>(begins.data_ptr()), *const lengths =
                                                                         static_cast<const int64_t*>(sizes.data_ptr());
  // starts[0] is 0; behind the starts stands the first block that does not lie in data.
  auto* const starts = call.scratch<int64_t>(block_count + 2, ScalarType::Long);
  call.copy(call.upload(Ints{0}), starts, 1);
  call.copy(call.upload(Ints{INT64_MAX}), starts + block_count + 1, 1);
  call.launch(BlockCheck{from, lengths, data_count, starts + block_count + 1}, block_count);
  if (block_count > 0) call.sum_up(lengths, starts + 1, block_count);
  int64_t found[2] = {0, 0};
  call.read_back(starts + block_count, found, 2);
  STD_TORCH_CHECK(found[1] == INT64_MAX, "block ", found[1], ": does not lie in ", data_count, " elements");
  STD_TORCH_CHECK(out.numel() == found[0], "out: got ", out.numel(), " elements, blocks have ", found[0]);
  switch (data.element_size()) {
    case 1: return gather<uint8_t>(&call, data, from, starts, block_count, out);
    case 2: return gather<uint16_t>(&call, data, from, starts, block_count, out);
    case 4: return gather<uint32_t>(&call, data, from, starts, block_count, out);
    case 8: return gather<uint64_t>(&call, data, from, starts, block_count, out);
    default: STD_TORCH_CHECK(false, "data: elements of ", data.element_size(), " bytes, expected 1, 2, 4 or 8");
  }
}

// What the arguments of bucketize have to be, as far as shapes say.
void check_buckets(const Tensor& indices, const OptionalTensor& weights, const OptionalTensor& block_sizes,
                   const OptionalTensor& destinations, int64_t feature_count, int64_t bucket_count) {
  STD_TORCH_CHECK(feature_count >= 0, "feature_count: got ", feature_count);
  STD_TORCH_CHECK(bucket_count >= 1 && bucket_count <= INT32_MAX, "bucket_count: got ", bucket_count);
  STD_TORCH_CHECK(block_sizes.has_value() != destinations.has_value(),
                  "block_sizes, destinations: expected one of them");
  if (weights) {
    check_plain(*weights, indices, ScalarType::Float, 1, "weights");
    STD_TORCH_CHECK(weights->numel() == indices.numel(), "weights: got ", weights->numel(), " for ", indices.numel(),
                    " indices");
  }
  const Tensor& told = block_sizes ? *block_sizes : *destinations;
  const int64_t expected = block_sizes ? feature_count : indices.numel();
  check_plain(told, indices, ScalarType::Long, 1, block_sizes ? "block_sizes" : "destinations");
  STD_TORCH_CHECK(told.numel() == expected, block_sizes ? "block_sizes: got " : "destinations: got ", told.numel(),
                  ", expected ", expected);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bucketize_cuda(Tensor indices, Tensor offsets, OptionalTensor weights,
                                                          OptionalTensor block_sizes, OptionalTensor destinations,
                                                          int64_t feature_count, int64_t bucket_count) {
  check_buckets(indices, weights, block_sizes, destinations, feature_count, bucket_count);
  const int64_t id_count = indices.numel(), all = feature_count * bag_count_of(offsets, indices, feature_count);
  STD_TORCH_CHECK(all == 0 || bucket_count <= (int64_t{1} << 40) / all, "bucket_count: got ", bucket_count, " for ",
                  all, " bags");
  Tensor lengths = torch::stable::new_empty(offsets, {bucket_count * all});
  Tensor out_ids = torch::stable::new_empty(indices, {id_count}),
         positions = torch::stable::new_empty(offsets, {id_count});
  Tensor out_weights = torch::stable::new_empty(indices, {weights ? id_count : 0}, ScalarType::Float);
  const auto words = [](const OptionalTensor& t) { return t ? static_cast<const int64_t*>(t->data_ptr()) : nullptr; };
  with_ids(indices, [&](auto id) {
    using Id = decltype(id);
    const auto batch = ids_of<Id>(indices, offsets, feature_count);
    Call call(indices);
    const int64_t* const flag = check_offsets(&call, batch);
    auto *const buckets = call.scratch<int64_t>(id_count, ScalarType::Long), *const own = call.scratch<int64_t>(
                                                                                 id_count, ScalarType::Long);
    auto* const found = const_cast<int64_t*>(call.upload(Ints{0, INT64_MAX, 0}));
    if (block_sizes) call.launch(BlockSizeCheck{words(block_sizes), found}, feature_count);
    const FindBuckets<Id> find{batch, words(block_sizes), words(destinations), bucket_count, buckets, own, found};
    if (all > 0) call.launch(find, run_count(id_count, Run<Id>::kCount));
    refuse_offsets(&call, flag, id_count);
    int64_t wrong[3] = {0, 0, 0};
    call.read_back(found, wrong, 3);
    STD_TORCH_CHECK(wrong[2] == 0, "block_sizes: ", wrong[2], " below 1");
    STD_TORCH_CHECK(wrong[0] == 0, block_sizes ? "indices: " : "destinations: ", wrong[0],
                    " outside of the buckets, the first at position ", wrong[1]);
    if (all == 0) return;
    const int64_t *sorted = buckets, *moved = own;
    int end_bit = 1;
    while ((int64_t{1} << end_bit) < bucket_count) ++end_bit;
    if (id_count > 0) call.sort(&sorted, &moved, id_count, end_bit);
    if (id_count > 0) call.copy(moved, static_cast<int64_t*>(positions.data_ptr()), id_count);
    call.launch(BucketLengths{batch.offsets, sorted, moved, all, id_count, static_cast<int64_t*>(lengths.data_ptr())},
                bucket_count * all);
    const float* const scales = weights ? static_cast<const float*>(weights->data_ptr()) : nullptr;
    const MoveToBucket<Id> move{batch,
                                words(block_sizes),
                                sorted,
                                moved,
                                scales,
                                static_cast<Id*>(out_ids.data_ptr()),
                                static_cast<float*>(out_weights.data_ptr())};
    call.launch(move, id_count);
  });
  return {lengths, out_ids, out_weights, positions};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(twinproof, CUDA, m) {
  m.impl("pipeline_check_ids", TORCH_BOX(&check_bag_ids_cuda));
  m.impl("pipeline_mend_ids", TORCH_BOX(&mend_bag_ids_cuda));
  m.impl("pipeline_gather_blocks", TORCH_BOX(&gather_blocks_cuda));
  m.impl("pipeline_bucketize", TORCH_BOX(&bucketize_cuda));
}
