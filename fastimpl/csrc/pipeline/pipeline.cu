// CUDA launchers of pooling and the fused step. Checks are read back before anything is written, so that each call
// waits for the device once. Never run on a GPU so far.
#include <torch/csrc/stable/library.h>

#include "common/device_call.cuh"
#include "pipeline/grid.h"
#include "pipeline/pool_plan.h"
#include "pipeline/step_kernel.h"

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

// What the host knows of a batch.
struct Host {
  std::vector<GridTable> tables;
  std::vector<GridFeature> features;
  int64_t width = 0, bag_count = 0, row_count = 0, dim_max = 1;
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

// The batch on the device, its offsets and ids checked there.
template <typename Id>
GridBatch<Id> checked(Call& call, const Host& host, const Tensor& indices, const Tensor& offsets,
                      const std::optional<Tensor>& weights) {
  if (weights) {
    check_plain(*weights, indices, ScalarType::Float, 1, "weights");
    STD_TORCH_CHECK(weights->numel() == indices.numel(), "weights: got ", weights->numel(), " for ", indices.numel(),
                    " indices");
  }
  const int64_t feature_count = static_cast<int64_t>(host.features.size()), all = feature_count * host.bag_count;
  const GridBatch<Id> batch{call.upload(host.tables),
                            call.upload(host.features),
                            feature_count,
                            host.bag_count,
                            host.width,
                            static_cast<const Id*>(indices.data_ptr()),
                            static_cast<const int64_t*>(offsets.data_ptr()),
                            weights ? static_cast<const float*>(weights->data_ptr()) : nullptr,
                            indices.numel()};
  int64_t found[2] = {0, 0};
  auto* const flags = const_cast<int64_t*>(call.upload(Ints{0, 0}));
  call.launch(OffsetCheck{batch.offsets, all, batch.id_count, flags}, all + 1);
  // Offsets that are none lead to some bag all the same, so that both are asked before the host waits once.
  if (all > 0) call.launch(IdCheck<Id>{batch, flags}, batch.id_count);
  call.read_back(flags, found, 2);
  STD_TORCH_CHECK(found[0] == 0, "offsets: not ascending from 0 to ", batch.id_count);
  STD_TORCH_CHECK(found[1] == 0, "indices: some outside of their tables");
  return batch;
}

void check_pooled(const Tensor& t, const Host& host, const Tensor& indices, const char* name) {
  check_plain(t, indices, ScalarType::Float, 2, name);
  STD_TORCH_CHECK(t.size(1) == host.width && (host.features.empty() || t.size(0) == host.bag_count), name, ": got [",
                  t.size(0), ", ", t.size(1), "], expected [", host.bag_count, ", ", host.width, "]");
}

std::vector<PoolFeature> pool_features(const Host& host) {
  std::vector<PoolFeature> features;
  for (const GridFeature& feature : host.features) {
    const GridTable& table = host.tables[static_cast<size_t>(feature.table)];
    features.push_back({table.rows, table.row_count, table.dim, feature.column, table.type, table.mean});
  }
  return features;
}

// One launch for all features whose rows are read alike.
template <bool kWeighted, typename Id>
void pool_on_device(Call& call, const Host& host, const GridBatch<Id>& batch, float* out) {
  const int64_t id_count = batch.id_count, all = batch.feature_count * host.bag_count;
  const PoolBatch<Id> arguments{{batch.ids, id_count},
                                {batch.offsets, all + 1},
                                {batch.weights, kWeighted ? id_count : 0},
                                {out, host.bag_count * host.width},
                                host.bag_count,
                                host.width};
  for (const PoolLaunch& launch : plan_pooling(pool_features(host), host.bag_count, host.width, out)) {
    const simt::Global<const PoolPart> parts(call.upload(launch.parts), static_cast<int64_t>(launch.parts.size()));
    with_pool<kWeighted>(launch, arguments, parts,
                         [&](const auto& kernel) { call.run(kernel, launch.shape(host.bag_count)); });
  }
}

void pool_bags_cuda(Tensors tables, Ints feature_tables, Tensor indices, Tensor offsets, std::optional<Tensor> weights,
                    Ints means, Tensor out, int64_t) {
  with_ids(indices, [&](auto id) {
    using Id = decltype(id);
    const Host host = describe(tables, feature_tables, means, indices, offsets);
    check_pooled(out, host, indices, "out");
    Call call(indices);
    const auto batch = checked<Id>(call, host, indices, offsets, weights);
    auto* const pooled = static_cast<float*>(out.data_ptr());
    if (weights) {
      pool_on_device<true>(call, host, batch, pooled);
    } else {
      pool_on_device<false>(call, host, batch, pooled);
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
    Call call(indices);
    const auto batch = checked<Id>(call, host, indices, offsets, std::nullopt);
    call.launch(
        WeightGradient<Id>{batch, static_cast<const float*>(grad.data_ptr()), static_cast<float*>(out.data_ptr())},
        batch.id_count);
  });
  return out;
}

// States of `width` floats a row: dim, or 1, or none.
float* momentum_of(const Tensor& momentum, const GridTable& table, const Tensor& indices, int64_t width,
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
  return is_aligned(grad) && std::all_of(host.tables.begin(), host.tables.end(), [&](const GridTable& table) {
           return table.dim % 4 == 0 && is_aligned(table.rows) && is_aligned(table.momentum1) &&
                  is_aligned(table.momentum2);
         });
}

std::vector<StepTable> described(const Host& host, Optimizer optimizer) {
  std::vector<StepTable> result;
  for (const GridTable& table : host.tables) {
    const int64_t first = momentum1_width(optimizer, table.dim), second = momentum2_width(optimizer, table.dim);
    result.push_back({{table.rows, table.row_count * table.dim * float_bytes(table.type)},
                      {table.momentum1, table.row_count * first},
                      {table.momentum2, table.row_count * second},
                      table.dim,
                      table.base,
                      table.type});
  }
  return result;
}

constexpr int64_t kSharedBytes = 96 * 1024;  // What a block of every device from sm_80 on may have.

template <Optimizer kOptimizer, int kVec, unsigned kLanesOfGroup>
void launch_step(Call& call, const StepBatch& batch, const Hyper& h, int64_t dim_max, bool has_long) {
  using Long = StepLongRows<kOptimizer, kVec>;
  const int64_t row_bytes = row_floats(kOptimizer, dim_max) * 4, groups = simt::kLanes / kLanesOfGroup;
  const int64_t long_bytes = Long::shared_floats(dim_max, Long::kThreads) * 4;
  STD_TORCH_CHECK(row_bytes * groups <= kSharedBytes && (!has_long || long_bytes <= kSharedBytes), "tables: rows of ",
                  dim_max, " elements are more than a block has memory for");
  const int64_t count = batch.rows.size(), warps = std::min<int64_t>(8, kSharedBytes / 2 / (row_bytes * groups) + 1);
  auto* const long_rows = call.scratch<int64_t>(count / kLongRun + 1, ScalarType::Long);
  auto* const long_count = reinterpret_cast<uint64_t*>(call.scratch<int64_t>(1, ScalarType::Long));
  call.clear(long_count, 1);
  const int64_t tiles = (count + simt::kLanes - 1) / simt::kLanes, blocks = (tiles + warps - 1) / warps;
  call.run(
      StepRows<kOptimizer, kVec, kLanesOfGroup>{batch, h, dim_max, {long_rows, count / kLongRun + 1}, {long_count, 1}},
      {std::min<int64_t>(blocks, 1 << 20), warps * simt::kLanes, row_bytes * groups * warps});
  if (!has_long) return;
  call.run(Long{batch, h, dim_max, {long_rows, count / kLongRun + 1}, {long_count, 1}},
           {std::min<int64_t>(count / kLongRun, 4096), Long::kThreads, long_bytes});
}

template <typename Id>
void step_rows(Call& call, const Host& host, const GridBatch<Id>& batch, const float* grad, Optimizer optimizer,
               const Hyper& h) {
  const int64_t count = batch.id_count;
  auto *const rows = call.scratch<int64_t>(count, ScalarType::Long),
              *const positions = call.scratch<int64_t>(count, ScalarType::Long),
              *const begins = call.scratch<int64_t>(count, ScalarType::Long);
  auto* const lengths = call.scratch<float>(count, ScalarType::Float);
  call.launch(PlaceOfPosition<Id>{batch, rows, positions, begins, lengths}, count);
  const int64_t *sorted = rows, *moved = positions;
  int end_bit = 1;
  while (end_bit < 62 && (int64_t{1} << end_bit) < host.row_count) ++end_bit;
  call.sort(&sorted, &moved, count, end_bit);
  const std::vector<StepTable> tables = described(host, optimizer);
  const bool has_means = std::any_of(host.tables.begin(), host.tables.end(), [](const auto& t) { return t.mean; });
  const StepBatch step{{call.upload(tables), static_cast<int64_t>(tables.size())},
                       {sorted, count},
                       {moved, count},
                       {begins, count},
                       {lengths, count},
                       {batch.weights, batch.weights == nullptr ? 0 : count},
                       {grad, batch.bag_count * batch.width},
                       has_means || batch.weights != nullptr};
  const bool has_long = count > kLongRun;
  with_formula(optimizer, [&](auto formula) {
    constexpr Optimizer kChosen = decltype(formula)::value;
    if (!has_vectors(host, grad)) return launch_step<kChosen, 1, 32>(call, step, h, host.dim_max, has_long);
    if (host.dim_max <= 32) return launch_step<kChosen, 4, 8>(call, step, h, host.dim_max, has_long);
    launch_step<kChosen, 4, 32>(call, step, h, host.dim_max, has_long);
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
      GridTable& table = host.tables[t];
      table.momentum1 = momentum_of(momentum1[t], table, indices, momentum1_width(chosen, table.dim), "momentum1");
      table.momentum2 = momentum_of(momentum2[t], table, indices, momentum2_width(chosen, table.dim), "momentum2");
    }
    Call call(indices);
    const auto batch = checked<Id>(call, host, indices, offsets, weights);
    if (batch.id_count > 0) step_rows(call, host, batch, static_cast<const float*>(grad.data_ptr()), chosen, values);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(twinproof, CUDA, m) {
  m.impl("pipeline_pool", TORCH_BOX(&pool_bags_cuda));
  m.impl("pipeline_step", TORCH_BOX(&step_bags_cuda));
  m.impl("pipeline_weight_gradients", TORCH_BOX(&bag_weight_gradients_cuda));
}
