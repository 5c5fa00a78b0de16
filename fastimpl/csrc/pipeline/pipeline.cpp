// CPU launchers of the pipeline's operators: everything is checked before anything is written.
#include <torch/csrc/stable/library.h>

#include "common/huge_pages.h"
#include "pipeline/args.h"
#include "pipeline/ids.h"
#include "pipeline/step.h"

namespace {

using namespace fastimpl;
using namespace fastimpl::pipeline;
using OptionalTensor = std::optional<Tensor>;

constexpr size_t kHyperWords = 8;

void pool_bags_cpu(Tensors tables, Ints feature_tables, Tensor indices, Tensor offsets, OptionalTensor weights,
                   Ints means, Tensor out, int64_t isa, int64_t max_blocks) {
  const Isa unit = isa_of(isa);
  // Of a grid, which the host has not.
  STD_TORCH_CHECK(max_blocks >= 0, "max_blocks: got ", max_blocks);
  with_ids(indices, [&](auto id) {
    const Parallel parallel = parallel_of();
    const auto batch = batch_of<decltype(id)>(parallel, tables, feature_tables, indices, offsets, weights, means);
    check_pooled(out, batch, "out");
    if (batch.all_bags() > 0) pool_bags(parallel, batch, static_cast<float*>(out.data_ptr()), unit);
  });
}

// States of `width(dim)` floats a row, dim or 1 or none.
float* momentum_of(const Tensor& momentum, const BagTable& table, int64_t width, const char* name, size_t index) {
  if (width == 0) {
    STD_TORCH_CHECK(momentum.numel() == 0, name, " ", index, ": the optimizer has none, got ", momentum.numel(),
                    " elements");
    return nullptr;
  }
  check_plain(momentum, ScalarType::Float, width == 1 && momentum.dim() == 1 ? 1 : 2, name);
  STD_TORCH_CHECK(momentum.size(0) == table.row_count && momentum.numel() == table.row_count * width, name, " ", index,
                  ": got ", momentum.numel(), " elements for ", table.row_count, " rows of ", width);
  return static_cast<float*>(momentum.data_ptr());
}

void step_bags_cpu(Tensors tables, Tensors momentum1, Tensors momentum2, Ints feature_tables, Tensor indices,
                   Tensor offsets, OptionalTensor weights, Ints means, Tensor grad, int64_t optimizer,
                   std::vector<double> hyper, int64_t isa) {
  const Isa unit = isa_of(isa);
  STD_TORCH_CHECK(optimizer >= 1 && optimizer < kOptimizerCount, "optimizer: got ", optimizer, ", expected 1 to ",
                  kOptimizerCount - 1);
  STD_TORCH_CHECK(hyper.size() == kHyperWords, "hyper: got ", hyper.size(), " values, expected ", kHyperWords);
  STD_TORCH_CHECK(momentum1.size() == tables.size() && momentum2.size() == tables.size(), "momenta: got ",
                  momentum1.size(), " and ", momentum2.size(), " for ", tables.size(), " tables");
  const auto chosen = static_cast<Optimizer>(optimizer);
  const auto rounded = [&hyper](size_t at) { return static_cast<float>(hyper[at]); };
  const Hyper values{rounded(0), rounded(1), rounded(2), rounded(3), rounded(4), rounded(5), rounded(6), rounded(7)};
  with_ids(indices, [&](auto id) {
    const Parallel parallel = parallel_of();
    auto batch = batch_of<decltype(id)>(parallel, tables, feature_tables, indices, offsets, weights, means);
    check_pooled(grad, batch, "grad");
    for (size_t t = 0; t < tables.size(); ++t) {
      BagTable& table = batch.tables[t];
      table.momentum1 = momentum_of(momentum1[t], table, momentum1_width(chosen, table.dim), "momentum1", t);
      table.momentum2 = momentum_of(momentum2[t], table, momentum2_width(chosen, table.dim), "momentum2", t);
    }
    STD_TORCH_CHECK(fits_words(batch), "tables: too many rows for so many indices");
    step_bags(parallel, batch, static_cast<const float*>(grad.data_ptr()), chosen, values, unit);
  });
}

Tensor bag_weight_gradients_cpu(Tensors tables, Ints feature_tables, Tensor indices, Tensor offsets, Ints means,
                                Tensor grad, int64_t isa) {
  const Isa unit = isa_of(isa);
  Tensor out = torch::stable::new_empty(indices, {indices.numel()}, ScalarType::Float);
  with_ids(indices, [&](auto id) {
    const Parallel parallel = parallel_of();
    const auto batch = batch_of<decltype(id)>(parallel, tables, feature_tables, indices, offsets, std::nullopt, means);
    check_pooled(grad, batch, "grad");
    if (batch.all_bags() > 0)
      bag_weight_gradients(parallel, batch, static_cast<const float*>(grad.data_ptr()),
                           static_cast<float*>(out.data_ptr()), unit);
  });
  return out;
}

void check_row_counts(const Ints& row_counts) {
  for (const int64_t count : row_counts) STD_TORCH_CHECK(count >= -1, "row_counts: got ", count);
}

// [count of ids outside, position of the first or INT64_MAX].
Tensor check_bag_ids_cpu(Tensor indices, Tensor offsets, Ints row_counts) {
  check_row_counts(row_counts);
  Tensor result = torch::stable::new_empty(indices, {2}, ScalarType::Long);
  with_ids(indices, [&](auto id) {
    const Parallel parallel = parallel_of();
    const auto feature_count = static_cast<int64_t>(row_counts.size());
    const int64_t bag_count = check_offsets(parallel, offsets, feature_count, indices.numel());
    BadIds bad{0, -1};
    if (feature_count * bag_count > 0) {
      bad = find_bad_ids(parallel, data_of<decltype(id)>(indices), data_of<int64_t>(offsets), row_counts.data(),
                         feature_count, bag_count);
    }
    auto* const words = static_cast<int64_t*>(result.data_ptr());
    words[0] = bad.count;
    words[1] = bad.count == 0 ? INT64_MAX : bad.first;
  });
  return result;
}

Tensor mend_bag_ids_cpu(Tensor indices, Tensor offsets, Ints row_counts) {
  check_row_counts(row_counts);
  Tensor result = torch::stable::new_empty(indices, {indices.numel()});
  with_ids(indices, [&](auto id) {
    using Id = decltype(id);
    const Parallel parallel = parallel_of();
    const auto feature_count = static_cast<int64_t>(row_counts.size());
    const int64_t bag_count = check_offsets(parallel, offsets, feature_count, indices.numel());
    if (feature_count * bag_count == 0) return;
    mend_bag_ids(parallel, data_of<Id>(indices), data_of<int64_t>(offsets), row_counts.data(), feature_count, bag_count,
                 static_cast<Id*>(result.data_ptr()));
  });
  return result;
}

// Ids and offsets that lead nowhere else, and what was found: as `check_bag_ids`, or [-1, first wrong offset], where
// all ids are 0 and belong to the last bag. Nothing is refused: a device does not wait to know.
std::tuple<Tensor, Tensor, Tensor> settle_bag_ids_cpu(Tensor indices, Tensor offsets, Ints row_counts) {
  check_row_counts(row_counts);
  check_plain(offsets, ScalarType::Long, 1, "offsets");
  const auto feature_count = static_cast<int64_t>(row_counts.size()), all = offsets.numel() - 1;
  STD_TORCH_CHECK(feature_count > 0 ? all >= 0 && all % feature_count == 0 : all == 0, "offsets: got ", offsets.numel(),
                  " for ", feature_count, " features, expected features * bags + 1");
  const int64_t id_count = indices.numel(), *const begins = data_of<int64_t>(offsets);
  if (are_offsets(parallel_of(), begins, all, id_count)) {
    Tensor found = check_bag_ids_cpu(indices, offsets, row_counts);
    return {mend_bag_ids_cpu(indices, offsets, row_counts), torch::stable::clone(offsets), found};
  }
  Tensor mended = torch::stable::new_zeros(indices, {id_count}), ends = torch::stable::new_zeros(offsets, {all + 1}),
         found = torch::stable::new_empty(indices, {2}, ScalarType::Long);
  static_cast<int64_t*>(ends.data_ptr())[all] = id_count;
  auto* const words = static_cast<int64_t*>(found.data_ptr());
  words[0] = -1;
  words[1] = first_wrong_offset(begins, all);
  return {mended, ends, found};
}

void gather_blocks_cpu(Tensor data, Tensor begins, Tensor sizes, Tensor out) {
  STD_TORCH_CHECK(data.is_cpu() && data.is_contiguous() && data.dim() == 1, "data: not a contiguous 1-D CPU tensor");
  check_plain(begins, ScalarType::Long, 1, "begins");
  check_plain(sizes, ScalarType::Long, 1, "sizes");
  STD_TORCH_CHECK(begins.numel() == sizes.numel(), "begins: got ", begins.numel(), " for ", sizes.numel(), " sizes");
  check_plain(out, data.scalar_type(), 1, "out");
  const int64_t block_count = sizes.numel();
  Ints starts(static_cast<size_t>(block_count + 1));
  const int64_t bad =
      place_blocks(data_of<int64_t>(begins), data_of<int64_t>(sizes), block_count, data.numel(), starts.data());
  STD_TORCH_CHECK(bad < 0, "block ", bad, ": does not lie in ", data.numel(), " elements");
  STD_TORCH_CHECK(out.numel() == starts.back(), "out: got ", out.numel(), " elements, blocks have ", starts.back());
  gather_blocks(parallel_of(), data_of<uint8_t>(data), data_of<int64_t>(begins), starts.data(), block_count,
                static_cast<int64_t>(data.element_size()), static_cast<uint8_t*>(out.data_ptr()));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bucketize_cpu(Tensor indices, Tensor offsets, OptionalTensor weights,
                                                         OptionalTensor block_sizes, OptionalTensor destinations,
                                                         int64_t feature_count, int64_t bucket_count) {
  const Parallel parallel = parallel_of();
  const int64_t id_count = indices.numel();
  STD_TORCH_CHECK(feature_count >= 0, "feature_count: got ", feature_count);
  STD_TORCH_CHECK(bucket_count >= 1 && bucket_count <= INT32_MAX, "bucket_count: got ", bucket_count);
  STD_TORCH_CHECK(block_sizes.has_value() != destinations.has_value(),
                  "block_sizes, destinations: expected one of them");
  if (block_sizes) {
    check_plain(*block_sizes, ScalarType::Long, 1, "block_sizes");
    STD_TORCH_CHECK(block_sizes->numel() == feature_count, "block_sizes: got ", block_sizes->numel(), " for ",
                    feature_count, " features");
    for (int64_t f = 0; f < feature_count; ++f)
      STD_TORCH_CHECK(data_of<int64_t>(*block_sizes)[f] >= 0, "block_sizes: got ", data_of<int64_t>(*block_sizes)[f]);
  } else {
    check_plain(*destinations, ScalarType::Long, 1, "destinations");
    STD_TORCH_CHECK(destinations->numel() == id_count, "destinations: got ", destinations->numel(), " for ", id_count,
                    " indices");
  }
  const float* const from_weights = weights_of(weights, id_count);
  const int64_t bag_count = check_offsets(parallel, offsets, feature_count, id_count), all = feature_count * bag_count;
  STD_TORCH_CHECK(all == 0 || bucket_count <= (int64_t{1} << 40) / all, "bucket_count: got ", bucket_count, " for ",
                  all, " bags");
  Tensor lengths = torch::stable::new_empty(offsets, {bucket_count * all});
  Tensor out_ids = torch::stable::new_empty(indices, {id_count}),
         positions = torch::stable::new_empty(offsets, {id_count});
  Tensor out_weights = torch::stable::new_empty(indices, {weights ? id_count : 0}, ScalarType::Float);
  with_ids(indices, [&](auto id) {
    using Id = decltype(id);
    if (all == 0) return;
    const Bucketing<Id> job{data_of<Id>(indices),
                            data_of<int64_t>(offsets),
                            block_sizes ? data_of<int64_t>(*block_sizes) : nullptr,
                            destinations ? data_of<int64_t>(*destinations) : nullptr,
                            from_weights,
                            feature_count,
                            bag_count,
                            bucket_count};
    Scratch<uint32_t> buckets(id_count);
    const BadIds bad = find_buckets(parallel, job, buckets.data());
    STD_TORCH_CHECK(bad.count == 0, block_sizes ? "indices: " : "destinations: ", bad.count,
                    " outside of the buckets, the first at position ", bad.first);
    bucketize(parallel, job, buckets.data(), static_cast<int64_t*>(lengths.data_ptr()),
              static_cast<Id*>(out_ids.data_ptr()), weights ? static_cast<float*>(out_weights.data_ptr()) : nullptr,
              static_cast<int64_t*>(positions.data_ptr()));
  });
  return {lengths, out_ids, out_weights, positions};
}

// Random rows of large tables miss the translation of small pages at every access.
void advise_huge_pages_cpu(Tensor memory) {
  STD_TORCH_CHECK(memory.is_cpu() && memory.is_contiguous(), "memory: not a contiguous CPU tensor");
  advise_huge_pages(memory.data_ptr(), static_cast<size_t>(memory.numel()) * memory.element_size());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(twinproof, CPU, m) {
  m.impl("pipeline_pool", TORCH_BOX(&pool_bags_cpu));
  m.impl("pipeline_step", TORCH_BOX(&step_bags_cpu));
  m.impl("pipeline_weight_gradients", TORCH_BOX(&bag_weight_gradients_cpu));
  m.impl("pipeline_check_ids", TORCH_BOX(&check_bag_ids_cpu));
  m.impl("pipeline_mend_ids", TORCH_BOX(&mend_bag_ids_cpu));
  m.impl("pipeline_settle_ids", TORCH_BOX(&settle_bag_ids_cpu));
  m.impl("pipeline_gather_blocks", TORCH_BOX(&gather_blocks_cpu));
  m.impl("pipeline_advise_huge_pages", TORCH_BOX(&advise_huge_pages_cpu));
  m.impl("pipeline_bucketize", TORCH_BOX(&bucketize_cpu));
}
