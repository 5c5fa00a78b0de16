// CUDA launchers of the movement of ids: checks, mending, jagged permutation, bucketizing. Nothing is waited for: what
// a check finds stays on the device.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "common/device_call.cuh"
#include "pipeline/check_kernel.h"
#include "pipeline/move_kernel.h"
#include "pipeline/step_plan.h"

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

void check_row_counts(const Ints& row_counts) {
  for (const int64_t count : row_counts) STD_TORCH_CHECK(count >= -1, "row_counts: got ", count);
}

// Looks at a batch: what it finds is two words on the device, see check_kernel.h. `mended`, `ends`: empty, or as many
// as there are ids and offsets.
template <typename Id>
void look(const Tensor& indices, const Tensor& offsets, const Ints& row_counts, const Tensor& found, Id* mended,
          int64_t* ends) {
  const int64_t id_count = indices.numel(), features = static_cast<int64_t>(row_counts.size());
  const int64_t bag_count = bag_count_of(offsets, indices, features);
  Call call(indices);
  const int64_t* const none = call.upload(Ints{0, kNoPosition});
  const simt::Global<int64_t> words(static_cast<int64_t*>(found.data_ptr()), 2);
  call.copy(none, words.data(), 2);
  const simt::Global<const int64_t> begins(static_cast<const int64_t*>(offsets.data_ptr()), offsets.numel());
  call.run(CheckOffsets{begins, id_count, words}, places_shape(offsets.numel()));
  const bool mends = ends != nullptr;
  call.run(CheckIds<Id>{{static_cast<const Id*>(indices.data_ptr()), id_count},
                        begins,
                        {call.upload(row_counts), features},
                        bag_count,
                        words,
                        {mended, mends ? id_count : 0},
                        {ends, mends ? offsets.numel() : 0}},
           places_shape(id_count));
}

// [count of ids outside, position of the first], or [-1, first wrong offset].
Tensor check_bag_ids_cuda(Tensor indices, Tensor offsets, Ints row_counts) {
  check_row_counts(row_counts);
  Tensor found = torch::stable::new_empty(indices, {2}, ScalarType::Long);
  with_ids(indices, [&](auto id) {
    using Id = decltype(id);
    look<Id>(indices, offsets, row_counts, found, nullptr, nullptr);
  });
  return found;
}

// Ids and offsets that lead nowhere else, and what was found.
std::tuple<Tensor, Tensor, Tensor> settle_bag_ids_cuda(Tensor indices, Tensor offsets, Ints row_counts) {
  check_row_counts(row_counts);
  Tensor mended = torch::stable::new_empty(indices, {indices.numel()}),
         ends = torch::stable::new_empty(offsets, {offsets.numel()}),
         found = torch::stable::new_empty(indices, {2}, ScalarType::Long);
  with_ids(indices, [&](auto id) {
    using Id = decltype(id);
    look<Id>(indices, offsets, row_counts, found, static_cast<Id*>(mended.data_ptr()),
             static_cast<int64_t*>(ends.data_ptr()));
  });
  return {mended, ends, found};
}

Tensor mend_bag_ids_cuda(Tensor indices, Tensor offsets, Ints row_counts) {
  return std::get<0>(settle_bag_ids_cuda(indices, offsets, row_counts));
}

template <typename T>
simt::Global<const T> memory_of(const Tensor& t) {
  return {static_cast<const T*>(t.data_ptr()), t.numel()};
}
template <typename T>
simt::Global<T> written(const Tensor& t) {
  return {static_cast<T*>(t.data_ptr()), t.numel()};
}

template <typename Value>
void gather(Call& call, const Tensor& data, const Tensor& begins, const simt::Global<const int64_t>& starts,
            const Tensor& out) {
  call.run(GatherBlocks<Value>{memory_of<Value>(data), memory_of<int64_t>(begins), starts, written<Value>(out)},
           places_shape(out.numel()));
}

void gather_blocks_cuda(Tensor data, Tensor begins, Tensor sizes, Tensor out) {
  STD_TORCH_CHECK(data.is_cuda() && data.is_contiguous() && data.dim() == 1, "data: not a contiguous 1-D CUDA tensor");
  check_plain(begins, data, ScalarType::Long, 1, "begins");
  check_plain(sizes, data, ScalarType::Long, 1, "sizes");
  STD_TORCH_CHECK(begins.numel() == sizes.numel(), "begins: got ", begins.numel(), " for ", sizes.numel(), " sizes");
  check_plain(out, data, data.scalar_type(), 1, "out");
  const int64_t block_count = sizes.numel();
  STD_TORCH_CHECK(block_count > 0 || out.numel() == 0, "out: got ", out.numel(), " elements, blocks have 0");
  if (out.numel() == 0) return;
  Call call(data);
  auto* const starts = call.scratch<int64_t>(block_count + 1, ScalarType::Long);
  call.clear(starts, 1);
  call.sum_up(static_cast<const int64_t*>(sizes.data_ptr()), starts + 1, block_count);
  const simt::Global<const int64_t> places(starts, block_count + 1);
  switch (data.element_size()) {
    case 1: return gather<uint8_t>(call, data, begins, places, out);
    case 2: return gather<uint16_t>(call, data, begins, places, out);
    case 4: return gather<uint32_t>(call, data, begins, places, out);
    case 8: return gather<uint64_t>(call, data, begins, places, out);
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

// Positions by bucket, then ids, weights and positions in that order.
template <typename Word, typename Id>
void move(Call& call, FindBuckets<Id> find, int bits, const OptionalTensor& weights, const Tensor& out_ids,
          const Tensor& out_weights, const Tensor& out_positions) {
  const int64_t count = find.ids.size();
  const ScalarType type = sizeof(Word) == 4 ? ScalarType::Int : ScalarType::Long;
  const Word *buckets = call.scratch<Word>(count, type), *positions = call.scratch<Word>(count, type);
  find.buckets = integers(buckets, count);
  find.positions = integers(positions, count);
  call.run(find, places_shape(count));
  call.sort(&buckets, &positions, count, bits);
  const simt::Global<const float> scales = weights ? memory_of<float>(*weights) : simt::Global<const float>();
  call.run(MoveToBuckets<Id>{integers(positions, count), find.local_ids, scales, written<Id>(out_ids),
                             written<float>(out_weights), written<int64_t>(out_positions)},
           places_shape(count));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bucketize_cuda(Tensor indices, Tensor offsets, OptionalTensor weights,
                                                          OptionalTensor block_sizes, OptionalTensor destinations,
                                                          int64_t feature_count, int64_t bucket_count) {
  check_buckets(indices, weights, block_sizes, destinations, feature_count, bucket_count);
  const int64_t id_count = indices.numel(), bag_count = bag_count_of(offsets, indices, feature_count),
                all = feature_count * bag_count;
  STD_TORCH_CHECK(all == 0 || bucket_count <= (int64_t{1} << 40) / all, "bucket_count: got ", bucket_count, " for ",
                  all, " bags");
  Tensor lengths = torch::stable::new_empty(offsets, {bucket_count * all});
  Tensor out_ids = torch::stable::new_empty(indices, {id_count}),
         positions = torch::stable::new_empty(offsets, {id_count});
  Tensor out_weights = torch::stable::new_empty(indices, {weights ? id_count : 0}, ScalarType::Float);
  const auto words = [](const OptionalTensor& t) { return t ? memory_of<int64_t>(*t) : simt::Global<const int64_t>(); };
  with_ids(indices, [&](auto id) {
    using Id = decltype(id);
    if (all == 0) return;
    Call call(indices);
    call.clear(static_cast<int64_t*>(lengths.data_ptr()), lengths.numel());
    if (id_count == 0) return;
    const simt::Global<Id> local(call.scratch<Id>(id_count, indices.scalar_type()), id_count);
    const FindBuckets<Id> find{memory_of<Id>(indices),
                               memory_of<int64_t>(offsets),
                               words(block_sizes),
                               words(destinations),
                               feature_count,
                               bag_count,
                               bucket_count,
                               {},
                               {},
                               local,
                               written<int64_t>(lengths)};
    const SortPlan plan = plan_sort(bucket_count - 1, id_count);
    if (plan.is_narrow) {
      move<uint32_t>(call, find, plan.bits, weights, out_ids, out_weights, positions);
    } else {
      move<int64_t>(call, find, plan.bits, weights, out_ids, out_weights, positions);
    }
  });
  return {lengths, out_ids, out_weights, positions};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(twinproof, CUDA, m) {
  m.impl("pipeline_check_ids", TORCH_BOX(&check_bag_ids_cuda));
  m.impl("pipeline_mend_ids", TORCH_BOX(&mend_bag_ids_cuda));
  m.impl("pipeline_settle_ids", TORCH_BOX(&settle_bag_ids_cuda));
  m.impl("pipeline_gather_blocks", TORCH_BOX(&gather_blocks_cuda));
  m.impl("pipeline_bucketize", TORCH_BOX(&bucketize_cuda));
}
