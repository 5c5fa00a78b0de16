// CUDA launchers of pooling and the fused step. Nothing is waited for and no host memory is copied, so that a graph may
// hold them: ids that no table has are skipped, and who wants to know asks pipeline_check_ids or pipeline_settle_ids.
#include <torch/csrc/stable/library.h>

#include "common/device_call.cuh"
#include "pipeline/pool_plan.h"
#include "pipeline/step_few_kernel.h"
#include "pipeline/step_kernel.h"
#include "pipeline/step_plan.h"

namespace {

using namespace fastimpl;
using namespace fastimpl::pipeline;
using namespace fastimpl::device;

Float float_type(const Tensor& t) {
  if (t.scalar_type() == ScalarType::Float) return Float::kFloat32;
  if (t.scalar_type() == ScalarType::Half) return Float::kFloat16;
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::BFloat16, "tables: not float32, float16 or bfloat16");
  return Float::kBFloat16;
}

// A table as the host knows it; `base` counts rows through all tables.
struct HostTable {
  uint8_t* rows;
  int64_t row_count, dim;
  Float type;
  bool mean;
  float *momentum1, *momentum2;
  int64_t base;

  int64_t bytes() const { return row_count * dim * float_bytes(type); }
};

struct HostFeature {
  int64_t table, column;
};

// What the host knows of a batch.
struct Host {
  std::vector<HostTable> tables;
  std::vector<HostFeature> features;
  int64_t width = 0, bag_count = 0, row_count = 0, dim_max = 1;

  int64_t dim_min() const {
    int64_t least = dim_max;
    for (const HostTable& table : tables) least = std::min(least, table.dim);
    return least;
  }
  const HostTable& table_of(const HostFeature& feature) const { return tables[static_cast<size_t>(feature.table)]; }
};

Host describe(const Tensors& tables, const Ints& feature_tables, const Ints& means, const Tensor& indices,
              const Tensor& offsets) {
  Host host;
  STD_TORCH_CHECK(means.size() == tables.size(), "means: got ", means.size(), " for ", tables.size(), " tables");
  for (size_t t = 0; t < tables.size(); ++t) {
    check_plain(tables[t], indices, tables[t].scalar_type(), 2, "table");
    host.tables.push_back({static_cast<uint8_t*>(tables[t].data_ptr()), tables[t].size(0), tables[t].size(1),
                           float_type(tables[t]), means[t] != 0, nullptr, nullptr, host.row_count});
    host.row_count += tables[t].size(0);
    host.dim_max = std::max(host.dim_max, tables[t].size(1));
  }
  for (const int64_t table : feature_tables) {
    STD_TORCH_CHECK(table >= 0 && table < static_cast<int64_t>(tables.size()), "feature_tables: got ", table, " of ",
                    tables.size(), " tables");
    host.features.push_back({table, host.width});
    host.width += host.tables[static_cast<size_t>(table)].dim;
  }
  check_plain(offsets, indices, ScalarType::Long, 1, "offsets");
  const int64_t all = offsets.numel() - 1, count = static_cast<int64_t>(host.features.size());
  STD_TORCH_CHECK(count > 0 ? all >= 0 && all % count == 0 : all == 0, "offsets: got ", offsets.numel(), " for ", count,
                  " features");
  host.bag_count = count > 0 ? all / count : 0;
  return host;
}

const float* weights_of(const std::optional<Tensor>& weights, const Tensor& indices) {
  if (!weights) return nullptr;
  check_plain(*weights, indices, ScalarType::Float, 1, "weights");
  STD_TORCH_CHECK(weights->numel() == indices.numel(), "weights: got ", weights->numel(), " for ", indices.numel(),
                  " indices");
  return static_cast<const float*>(weights->data_ptr());
}

// Positions and bags as kernels look for them. Without bags there is nothing to look for.
template <typename Id>
PlacedBatch<Id> placed(Call& call, const Host& host, const Tensor& indices, const Tensor& offsets) {
  std::vector<PlacedFeature> features;
  for (const HostFeature& feature : host.features) {
    const HostTable& table = host.table_of(feature);
    features.push_back(
        {{table.rows, table.bytes()}, table.row_count, table.base, table.dim, feature.column, table.type, table.mean});
  }
  return {{call.upload(features), static_cast<int64_t>(features.size())},
          {static_cast<const Id*>(indices.data_ptr()), indices.numel()},
          {static_cast<const int64_t*>(offsets.data_ptr()), offsets.numel()},
          host.bag_count,
          host.width};
}

bool has_work(const Host& host, const Tensor& indices) {
  return indices.numel() > 0 && host.bag_count > 0 && !host.features.empty();
}

void check_pooled(const Tensor& t, const Host& host, const Tensor& indices, const char* name) {
  check_plain(t, indices, ScalarType::Float, 2, name);
  STD_TORCH_CHECK(t.size(1) == host.width && (host.features.empty() || t.size(0) == host.bag_count), name, ": got [",
                  t.size(0), ", ", t.size(1), "], expected [", host.bag_count, ", ", host.width, "]");
}

std::vector<PoolFeature> pool_features(const Host& host) {
  std::vector<PoolFeature> features;
  for (const HostFeature& feature : host.features) {
    const HostTable& table = host.table_of(feature);
    features.push_back({table.rows, table.row_count, table.dim, feature.column, table.type, table.mean});
  }
  return features;
}

// One launch for all features whose rows are read alike.
template <bool kWeighted, typename Id>
void pool_on_device(Call& call, const Host& host, const PoolBatch<Id>& arguments, float* out, int64_t max_blocks) {
  for (const PoolLaunch& launch : plan_pooling(pool_features(host), host.bag_count, host.width, out)) {
    simt::Global<const PoolPart> parts;
    if (launch.needs_list()) parts = {call.upload(launch.parts), static_cast<int64_t>(launch.parts.size())};
    with_pool<kWeighted>(launch, arguments, parts,
                         [&](const auto& kernel) { call.run(kernel, launch.shape(host.bag_count, max_blocks)); });
  }
}

void pool_bags_cuda(Tensors tables, Ints feature_tables, Tensor indices, Tensor offsets, std::optional<Tensor> weights,
                    Ints means, Tensor out, int64_t, int64_t max_blocks) {
  STD_TORCH_CHECK(max_blocks >= 0, "max_blocks: got ", max_blocks);
  with_ids(indices, [&](auto id) {
    using Id = decltype(id);
    const Host host = describe(tables, feature_tables, means, indices, offsets);
    check_pooled(out, host, indices, "out");
    const float* const scales = weights_of(weights, indices);
    Call call(indices);
    auto* const pooled = static_cast<float*>(out.data_ptr());
    const PoolBatch<Id> arguments{{static_cast<const Id*>(indices.data_ptr()), indices.numel()},
                                  {static_cast<const int64_t*>(offsets.data_ptr()), offsets.numel()},
                                  {scales, weights ? indices.numel() : 0},
                                  {pooled, host.bag_count * host.width},
                                  host.bag_count,
                                  host.width};
    if (weights) {
      pool_on_device<true>(call, host, arguments, pooled, max_blocks);
    } else {
      pool_on_device<false>(call, host, arguments, pooled, max_blocks);
    }
  });
}

Tensor bag_weight_gradients_cuda(Tensors tables, Ints feature_tables, Tensor indices, Tensor offsets, Ints means,
                                 Tensor grad, int64_t) {
  Tensor out = torch::stable::new_empty(indices, {indices.numel()}, ScalarType::Float);
  with_ids(indices, [&](auto id) {
    using Id = decltype(id);
    const Host host = describe(tables, feature_tables, means, indices, offsets);
    check_pooled(grad, host, indices, "grad");
    if (!has_work(host, indices)) return;
    Call call(indices);
    call.run(WeightGradients<Id>{placed<Id>(call, host, indices, offsets),
                                 {static_cast<const float*>(grad.data_ptr()), grad.numel()},
                                 {static_cast<float*>(out.data_ptr()), out.numel()}},
             places_shape(indices.numel()));
  });
  return out;
}

// States of `width` floats a row: dim, or 1, or none.
float* momentum_of(const Tensor& momentum, const HostTable& table, const Tensor& indices, int64_t width,
                   const char* name) {
  if (width == 0) {
    STD_TORCH_CHECK(momentum.numel() == 0, name, ": the optimizer has none, got ", momentum.numel(), " elements");
    return nullptr;
  }
  check_plain(momentum, indices, ScalarType::Float, width == 1 && momentum.dim() == 1 ? 1 : 2, name);
  STD_TORCH_CHECK(momentum.size(0) == table.row_count && momentum.numel() == table.row_count * width, name, ": got ",
                  momentum.numel(), " elements for ", table.row_count, " rows of ", width);
  return static_cast<float*>(momentum.data_ptr());
}

// Whether every vector of four elements lies at a multiple of its size.
bool has_vectors(const Host& host, const float* grad) {
  const auto is_aligned = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  return is_aligned(grad) && std::all_of(host.tables.begin(), host.tables.end(), [&](const HostTable& table) {
           return table.dim % 4 == 0 && is_aligned(table.rows) && is_aligned(table.momentum1) &&
                  is_aligned(table.momentum2);
         });
}

std::vector<StepTable> described(const Host& host, Optimizer optimizer) {
  std::vector<StepTable> result;
  for (const HostTable& table : host.tables) {
    const int64_t first = momentum1_width(optimizer, table.dim), second = momentum2_width(optimizer, table.dim);
    result.push_back({{table.rows, table.bytes()},
                      {table.momentum1, table.row_count * first},
                      {table.momentum2, table.row_count * second},
                      table.dim,
                      table.base,
                      table.type});
  }
  return result;
}

constexpr int64_t kSharedBytes = 96 * 1024;  // What a block of every device from sm_80 on may have.

// Rows with few occurrences, where there is a kernel for them; the list of the others, else an empty one.
template <Optimizer kOptimizer, int kVec, unsigned kLanesOfGroup>
simt::Global<int64_t> launch_few(Call& call, const StepBatch& batch, const Hyper& h, int64_t dim_min,
                                 const simt::Global<uint64_t>& other_count) {
  // LAMB reads weights before it steps, and rows of odd width have no vectors.
  if constexpr (kVec == 4 && !is_scaled(kOptimizer)) {
    using Few = StepFewRows<kOptimizer, kLanesOfGroup>;
    if (dim_min > Few::kElements) return {};
    const simt::Global<int64_t> others(call.scratch<int64_t>(batch.count, ScalarType::Long), batch.count);
    const int64_t blocks = (batch.count + Few::kThreads - 1) / Few::kThreads;
    call.run(Few{batch, h, others, other_count},
             {std::min<int64_t>(blocks, 1 << 20), Few::kThreads, Few::kFloats * 4 * (Few::kThreads / kLanesOfGroup)});
    return others;
  }
  return {};
}

template <Optimizer kOptimizer, int kVec, unsigned kLanesOfGroup>
void launch_step(Call& call, const StepBatch& batch, const Hyper& h, int64_t dim_min, int64_t dim_max, bool has_long) {
  using Rows = StepRows<kOptimizer, kVec, kLanesOfGroup>;
  using Long = StepLongRows<kOptimizer, kVec>;
  const int64_t row_bytes = row_floats(kOptimizer, dim_max) * 4, groups = Rows::kGroups;
  const int64_t long_bytes = Long::shared_floats(dim_max, Long::kThreads) * 4;
  STD_TORCH_CHECK(row_bytes * groups <= kSharedBytes && (!has_long || long_bytes <= kSharedBytes), "tables: rows of ",
                  dim_max, " elements are more than a block has memory for");
  const int64_t count = batch.count, warps = std::min<int64_t>(8, kSharedBytes / 2 / (row_bytes * groups) + 1);
  const simt::Global<int64_t> long_rows(call.scratch<int64_t>(count / kLongRun + 1, ScalarType::Long),
                                        count / kLongRun + 1);
  const simt::Global<uint64_t> counts(reinterpret_cast<uint64_t*>(call.scratch<int64_t>(2, ScalarType::Long)), 2),
      long_count(counts.data(), 1), other_count(counts.data() + 1, 1);
  call.clear(counts.data(), 2);
  const auto others = launch_few<kOptimizer, kVec, kLanesOfGroup>(call, batch, h, dim_min, other_count);
  // How many are listed only the device knows: enough warps to fill it several times.
  const int64_t tiles = (count + simt::kLanes - 1) / simt::kLanes, blocks = (tiles + warps - 1) / warps,
                most = others.size() > 0 ? 1024 : 1 << 20;
  call.run(Rows{batch, h, dim_max, others, other_count, long_rows, long_count},
           {std::min(blocks, most), warps * simt::kLanes, row_bytes * groups * warps});
  if (!has_long) return;
  call.run(Long{batch, h, dim_max, long_rows, long_count},
           {std::min<int64_t>(count / kLongRun, 1024), Long::kThreads, long_bytes});
}

// Rows and positions of all ids, sorted by row.
template <typename Word, typename Id>
StepBatch sorted(Call& call, const Host& host, const PlacedBatch<Id>& batch, const float* weights, int bits) {
  const int64_t count = batch.ids.size();
  const ScalarType type = sizeof(Word) == 4 ? ScalarType::Int : ScalarType::Long;
  const Word *rows = call.scratch<Word>(count, type), *positions = call.scratch<Word>(count, type);
  const simt::Global<int64_t> begins(call.scratch<int64_t>(count, ScalarType::Long), count);
  const simt::Global<float> lengths(call.scratch<float>(count, ScalarType::Float), count);
  call.run(
      PlacePositions<Id>{batch, host.row_count, integers(rows, count), integers(positions, count), begins, lengths},
      places_shape(count));
  call.sort(&rows, &positions, count, bits);
  StepBatch step{};
  step.rows = integers(rows, count);
  step.positions = integers(positions, count);
  step.count = count;
  step.row_count = host.row_count;
  step.begins = begins;
  step.lengths = lengths;
  step.weights = {weights, weights == nullptr ? 0 : count};
  return step;
}

template <typename Id>
void step_rows(Call& call, const Host& host, const PlacedBatch<Id>& batch, const float* weights, const Tensor& grad,
               Optimizer optimizer, const Hyper& h) {
  const int64_t count = batch.ids.size();
  const SortPlan plan = plan_sort(host.row_count, count);
  StepBatch step = plan.is_narrow ? sorted<uint32_t>(call, host, batch, weights, plan.bits)
                                  : sorted<int64_t>(call, host, batch, weights, plan.bits);
  const std::vector<StepTable> tables = described(host, optimizer);
  const auto* const from = static_cast<const float*>(grad.data_ptr());
  step.tables = {call.upload(tables), static_cast<int64_t>(tables.size())};
  step.grad = {from, grad.numel()};
  step.has_factors = weights != nullptr || std::any_of(host.tables.begin(), host.tables.end(),
                                                       [](const HostTable& table) { return table.mean; });
  const bool has_long = count > kLongRun;
  with_formula(optimizer, [&](auto formula) {
    constexpr Optimizer kChosen = decltype(formula)::value;
    if (!has_vectors(host, from))
      return launch_step<kChosen, 1, 32>(call, step, h, host.dim_min(), host.dim_max, has_long);
    if (host.dim_max <= 32) return launch_step<kChosen, 4, 8>(call, step, h, host.dim_min(), host.dim_max, has_long);
    launch_step<kChosen, 4, 32>(call, step, h, host.dim_min(), host.dim_max, has_long);
  });
}

void step_bags_cuda(Tensors tables, Tensors momentum1, Tensors momentum2, Ints feature_tables, Tensor indices,
                    Tensor offsets, std::optional<Tensor> weights, Ints means, Tensor grad, int64_t optimizer,
                    std::vector<double> hyper, int64_t) {
  STD_TORCH_CHECK(optimizer >= 1 && optimizer < kOptimizerCount, "optimizer: got ", optimizer, ", expected 1 to ",
                  kOptimizerCount - 1);
  STD_TORCH_CHECK(hyper.size() == 8, "hyper: got ", hyper.size(), " values, expected 8");
  STD_TORCH_CHECK(momentum1.size() == tables.size() && momentum2.size() == tables.size(),
                  "momenta: not one for each table");
  const auto chosen = static_cast<Optimizer>(optimizer);
  const auto rounded = [&hyper](size_t at) { return static_cast<float>(hyper[at]); };
  const Hyper values{rounded(0), rounded(1), rounded(2), rounded(3), rounded(4), rounded(5), rounded(6), rounded(7)};
  with_ids(indices, [&](auto id) {
    using Id = decltype(id);
    Host host = describe(tables, feature_tables, means, indices, offsets);
    check_pooled(grad, host, indices, "grad");
    for (size_t t = 0; t < tables.size(); ++t) {
      HostTable& table = host.tables[t];
      table.momentum1 = momentum_of(momentum1[t], table, indices, momentum1_width(chosen, table.dim), "momentum1");
      table.momentum2 = momentum_of(momentum2[t], table, indices, momentum2_width(chosen, table.dim), "momentum2");
    }
    const float* const scales = weights_of(weights, indices);
    if (!has_work(host, indices)) return;
    Call call(indices);
    step_rows(call, host, placed<Id>(call, host, indices, offsets), scales, grad, chosen, values);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(twinproof, CUDA, m) {
  m.impl("pipeline_pool", TORCH_BOX(&pool_bags_cuda));
  m.impl("pipeline_step", TORCH_BOX(&step_bags_cuda));
  m.impl("pipeline_weight_gradients", TORCH_BOX(&bag_weight_gradients_cuda));
}
