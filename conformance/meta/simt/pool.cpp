// Pooling on a grid has the bits of the host's: any tables, any bags, any number of threads. Ids that a table has not
// are left out, and offsets that are none lead to no memory but the batch's.
#include "planted.h"

#include <simt/prove.h>

#include <limits>

#include "pipeline/pool.h"
#include "pipeline/pool_plan.h"

using namespace fastimpl;
using namespace fastimpl::pipeline;
using simt::prover::Trial;

namespace {

struct Table {
  std::vector<uint8_t> bytes;
  int64_t row_count, dim, shift;
  Float type;
  bool mean;
};

template <typename Id>
struct Batch {
  std::vector<Table> tables;
  std::vector<int64_t> feature_tables, offsets{0};
  std::vector<Id> ids;
  std::vector<float> weights;
  int64_t bag_count, width = 0;
  bool is_weighted, has_bad;
};

float any_float(Trial& trial) { return static_cast<float>(trial.random.between(-1000, 1000)) / 256.0F; }

Table any_table(Trial& trial) {
  static const int64_t dims[] = {1, 3, 4, 5, 8, 12, 16, 20, 32, 33, 40, 64, 72, 128, 136, 264};
  Table table{{},
              trial.random.between(1, 6),
              dims[trial.random.below(16)],
              // Rows that begin anywhere but at 16 bytes cannot be read in vectors.
              trial.random.below(3) == 0 ? trial.random.between(1, 3) : 0,
              static_cast<Float>(trial.random.below(3)),
              trial.random.below(2) == 0};
  std::vector<float> values(static_cast<size_t>(table.row_count * table.dim));
  for (float& value : values) value = any_float(trial);
  table.bytes.resize(values.size() * static_cast<size_t>(float_bytes(table.type)));
  narrow(table.type, values.data(), table.bytes.data(), static_cast<int64_t>(values.size()));
  return table;
}

template <typename Id>
Id bad_id(Trial& trial, int64_t row_count) {
  const Id all[] = {-1, static_cast<Id>(row_count), std::numeric_limits<Id>::min(), std::numeric_limits<Id>::max()};
  return all[trial.random.below(4)];
}

template <typename Id>
Batch<Id> any_batch(Trial& trial, bool is_weighted) {
  Batch<Id> batch;
  batch.is_weighted = is_weighted;
  batch.has_bad = trial.random.below(3) == 0;
  const int64_t table_count = trial.random.between(1, 2);
  // Now and then about as many as a launch carries.
  const bool has_many = trial.random.below(4) == 0;
  const int64_t feature_count =
      has_many ? trial.random.between(PoolParts::kCarried - 1, PoolParts::kCarried + 1) : trial.random.between(1, 3);
  for (int64_t t = 0; t < table_count; ++t) batch.tables.push_back(any_table(trial));
  batch.bag_count = trial.random.between(1, 9);
  // Now and then bags with one or two ids on average, but for one of them.
  const bool has_few = trial.random.below(2) == 0;
  for (int64_t f = 0; f < feature_count; ++f) {
    const int64_t t = trial.random.below(table_count);
    const Table& table = batch.tables[static_cast<size_t>(t)];
    batch.feature_tables.push_back(t);
    batch.width += table.dim;
    for (int64_t bag = 0; bag < batch.bag_count; ++bag) {
      const int64_t kind = trial.random.below(4), longest = has_few     ? (bag == 0 ? 6 : 2)
                                                            : kind == 0 ? 0
                                                            : kind == 1 ? 40
                                                                        : 6;
      for (int64_t i = trial.random.between(0, longest); i > 0; --i) {
        const bool is_bad = batch.has_bad && trial.random.below(4) == 0;
        batch.ids.push_back(
            static_cast<Id>(is_bad ? bad_id<Id>(trial, table.row_count) : trial.random.below(table.row_count)));
        if (is_weighted) batch.weights.push_back(any_float(trial));
      }
      batch.offsets.push_back(static_cast<int64_t>(batch.ids.size()));
    }
  }
  return batch;
}

// What the host's own operator gives.
template <typename Id>
std::vector<float> pooled_by_host(Batch<Id>& batch) {
  BagBatch<Id> host{{{},
                     {},
                     batch.bag_count,
                     batch.width,
                     batch.offsets.data(),
                     batch.is_weighted ? batch.weights.data() : nullptr,
                     static_cast<int64_t>(batch.ids.size())},
                    batch.ids.data()};
  // Ids outside are those of one more row, of zeros: a sum keeps its bits when they are added.
  std::vector<std::vector<uint8_t>> rows;
  for (const Table& table : batch.tables) {
    rows.push_back(table.bytes);
    rows.back().resize(rows.back().size() + static_cast<size_t>(table.dim * float_bytes(table.type)));
    host.tables.push_back(
        {rows.back().data(), table.row_count + 1, table.dim, table.type, table.mean, nullptr, nullptr});
  }
  std::vector<Id> ids = batch.ids;
  for (size_t bag = 0; bag + 1 < batch.offsets.size(); ++bag) {
    const int64_t table = batch.feature_tables[bag / static_cast<size_t>(batch.bag_count)],
                  count = batch.tables[static_cast<size_t>(table)].row_count;
    for (auto at = static_cast<size_t>(batch.offsets[bag]); at < static_cast<size_t>(batch.offsets[bag + 1]); ++at)
      if (ids[at] < 0 || ids[at] >= count) ids[at] = static_cast<Id>(count);
  }
  host.ids = ids.data();
  int64_t column = 0;
  for (const int64_t t : batch.feature_tables) {
    host.features.push_back({t, column});
    column += host.tables[static_cast<size_t>(t)].dim;
  }
  // A batch without ids has weights all the same, and nobody reads them.
  static const float none = 0;
  if (batch.is_weighted && batch.weights.empty()) host.weights = &none;
  std::vector<float> out(static_cast<size_t>(batch.bag_count * batch.width));
  const Parallel serial{1, [](int64_t count, const std::function<void(int64_t)>& work) {
                          for (int64_t i = 0; i < count; ++i) work(i);
                        }};
  pool_bags(serial, host, out.data(), best_isa());
  return out;
}

template <typename Id, bool kWeighted>
void pool_on_a_grid(Trial& trial) {
  Batch<Id> batch = any_batch<Id>(trial, kWeighted);
  std::vector<simt::prover::Array<uint8_t>> rows;
  for (const Table& table : batch.tables)
    rows.push_back(trial.array<uint8_t>("table", table.bytes, table.shift * float_bytes(table.type)));
  std::vector<PoolFeature> features;
  int64_t column = 0;
  for (const int64_t t : batch.feature_tables) {
    const Table& table = batch.tables[static_cast<size_t>(t)];
    features.push_back(
        {rows[static_cast<size_t>(t)].global().data(), table.row_count, table.dim, column, table.type, table.mean});
    column += table.dim;
  }
  const int64_t out_shift = trial.random.below(4) == 0 ? 1 : 0;
  const auto out = trial.uninitialized<float>("out", batch.bag_count * batch.width, out_shift);
  const auto ids = trial.array<Id>("ids", batch.ids);
  const std::vector<float> expected = pooled_by_host(batch);
  const bool is_cut = trial.random.below(6) > 0;
  if (!is_cut) {
    const auto bag = static_cast<size_t>(trial.random.below(static_cast<int64_t>(batch.offsets.size())));
    batch.offsets[bag] = trial.random.below(2) == 0 ? -7 : INT64_MAX;
  }
  const auto offsets = trial.array<int64_t>("offsets", batch.offsets);
  const auto weights = trial.array<float>("weights", batch.weights);
  const PoolBatch<Id> arguments{ids, offsets, weights, out, batch.bag_count, batch.width};
  for (const PoolLaunch& launch : plan_pooling(features, batch.bag_count, batch.width, out.global().data())) {
    // As the launcher: there is no list where the launch carries all of them.
    const auto parts = trial.array<PoolPart>("parts", launch.needs_list() ? launch.parts : std::vector<PoolPart>());
    // The addresses in them differ from run to run.
    trial.may_differ(parts);
    const int64_t most = trial.random.between(0, 3);
    simt::Shape shape = launch.shape(batch.bag_count, most);
    trial.expect(shape.blocks >= 1 && (most == 0 || shape.blocks <= most), "no more blocks than were asked for");
    trial.expect(most > 0 || shape.blocks * shape.threads >=
                                 static_cast<int64_t>(launch.parts.size()) * batch.bag_count * launch.lanes,
                 "a group of lanes for each bag of each part");
    // Few threads, so that groups of lanes go from bag to bag and from part to part; now and then as many as planned.
    if (trial.random.below(8) > 0) shape = {trial.random.between(1, 2), 32 * trial.random.between(1, 2)};
    shape.blocks = std::min<int64_t>(shape.blocks, 2);
    with_pool<kWeighted>(launch, arguments, parts, [&](const auto& kernel) { trial.launch(kernel, shape); });
  }
  if (is_cut) trial.expect_same(out.values(), expected, "pooled");
}

}  // namespace

SIMT_PROOF("pool int32") { pool_on_a_grid<int32_t, false>(trial); }
SIMT_PROOF("pool int64 weighted") { pool_on_a_grid<int64_t, true>(trial); }
SIMT_PROOF("nothing to pool") {
  const auto rows = trial.array<uint8_t>("rows", std::vector<uint8_t>(64));
  const auto launches = [&](int64_t dim, int64_t bag_count) {
    return plan_pooling({{rows.global().data(), 64 / std::max<int64_t>(dim, 1), dim, 0, Float::kFloat16, false}},
                        bag_count, dim, nullptr)
        .size();
  };
  trial.expect(launches(8, 0) == 0 && launches(0, 3) == 0 && launches(8, 3) == 1, "a launch where there is work");
}
// A planted fault is in all of them: half the kernels compile in half the time.
#if !defined(SIMT_PLANTED)
SIMT_PROOF("pool int64") { pool_on_a_grid<int64_t, false>(trial); }
SIMT_PROOF("pool int32 weighted") { pool_on_a_grid<int32_t, true>(trial); }
#endif

int main(int count, char** arguments) { return planted::main(count, arguments); }
