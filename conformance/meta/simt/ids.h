// Batches for the kernels that look at ids and move them: right ones, some ids outside, offsets that are none.
#pragma once

#include <simt/prove.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "common/words_plan.h"
#include "pipeline/check_kernel.h"
#include "pipeline/ids.h"
#include "pipeline/move_kernel.h"
#include "pipeline/place_kernel.h"
#include "pipeline/pool.h"
#include "pipeline/step_plan.h"

using namespace fastimpl;
using namespace fastimpl::pipeline;
using simt::prover::Array;
using simt::prover::Trial;

namespace id_cases {

using Ints = std::vector<int64_t>;

inline const Parallel& serial() {
  static const Parallel one{1, [](int64_t count, const std::function<void(int64_t)>& work) {
                              for (int64_t i = 0; i < count; ++i) work(i);
                            }};
  return one;
}

template <typename Id>
struct Batch {
  int64_t features, bags;
  std::vector<Id> ids;
  Ints offsets{0}, row_counts;

  // Now and then more ids than a warp takes at once.
  Batch(Trial& trial, bool has_bad) : features(trial.random.between(1, 4)), bags(trial.random.between(1, 5)) {
    // Many that are not in their tables, or one alone.
    const bool has_many = has_bad && trial.random.below(2) == 0;
    for (int64_t f = 0; f < features; ++f) row_counts.push_back(trial.random.between(has_many ? 0 : 1, 9));
    const int64_t long_bag = trial.random.below(3) == 0 ? trial.random.below(features * bags) : -1;
    for (int64_t bag = 0; bag < features * bags; ++bag) {
      const int64_t rows = row_counts[static_cast<size_t>(bag / bags)];
      const int64_t length = bag == long_bag              ? trial.random.between(500, 1300)
                             : trial.random.below(3) == 0 ? 0
                                                          : trial.random.between(0, 7);
      for (int64_t i = 0; i < length; ++i) {
        const bool is_bad = has_many && (rows == 0 || trial.random.below(2) == 0);
        ids.push_back(static_cast<Id>(is_bad ? trial.random.between(-2, 9) : trial.random.below(rows)));
      }
      offsets.push_back(count());
    }
    if (has_bad && !has_many && count() > 0) ids[static_cast<size_t>(trial.random.below(count()))] = -1;
  }
  int64_t count() const { return static_cast<int64_t>(ids.size()); }
  int64_t all() const { return features * bags; }
  // Offsets that are none: anything may stand in some of them.
  void break_offsets(Trial& trial) {
    for (int64_t i = trial.random.between(1, 3); i > 0; --i) {
      const int64_t values[] = {-1, INT64_MAX, std::numeric_limits<int64_t>::min(), 0, count() + 1};
      const int64_t at = trial.random.below(3) == 0 ? all() : trial.random.below(all() + 1);
      offsets[static_cast<size_t>(at)] = values[trial.random.below(5)];
    }
  }
};

inline simt::Shape any_shape(Trial& trial) { return {trial.random.between(1, 2), 32 * trial.random.between(1, 2)}; }

template <typename T>
std::vector<T> numbers(int64_t count, Trial& trial) {
  std::vector<T> values(static_cast<size_t>(count));
  for (T& value : values) value = static_cast<T>(trial.random.between(-1000, 1000)) / static_cast<T>(2);
  return values;
}

// What is found, and the batch that is made, are those of the host's operator.
template <typename Id>
void prove_checks(Trial& trial) {
  Batch<Id> batch(trial, trial.random.below(3) > 0);
  if (trial.random.below(3) == 0) batch.break_offsets(trial);
  if (trial.random.below(3) == 0) batch.row_counts[static_cast<size_t>(trial.random.below(batch.features))] = -1;
  const bool is_cut = are_offsets(serial(), batch.offsets.data(), batch.all(), batch.count());
  std::vector<Id> mended(batch.ids.size());
  Ints ends(batch.offsets.size()), expected{-1, 0};
  if (is_cut) {
    const BadIds bad = find_bad_ids(serial(), batch.ids.data(), batch.offsets.data(), batch.row_counts.data(),
                                    batch.features, batch.bags);
    mend_bag_ids(serial(), batch.ids.data(), batch.offsets.data(), batch.row_counts.data(), batch.features, batch.bags,
                 mended.data());
    ends = batch.offsets;
    expected = {bad.count, bad.count == 0 ? kNoPosition : bad.first};
  } else {
    ends.back() = batch.count();
    expected[1] = first_wrong_offset(batch.offsets.data(), batch.all());
  }
  const bool mends = trial.random.below(4) > 0;
  const auto offsets = trial.array<int64_t>("offsets", batch.offsets);
  const auto found = trial.array<int64_t>("found", {0, kNoPosition});
  const auto out = trial.uninitialized<Id>("mended", mends ? batch.count() : 0);
  const auto out_ends = trial.uninitialized<int64_t>("mended offsets", mends ? batch.all() + 1 : 0);
  trial.launch(CheckOffsets{offsets, batch.count(), found}, any_shape(trial));
  trial.launch(CheckIds<Id>{trial.array<Id>("ids", batch.ids), offsets,
                            trial.array<int64_t>("row counts", batch.row_counts), batch.bags, found, out, out_ends},
               any_shape(trial));
  trial.expect_same(found.values(), expected, "what was found");
  if (!mends) return;
  trial.expect_same(out.values(), mended, "mended ids");
  trial.expect_same(out_ends.values(), ends, "mended offsets");
}

inline void prove_words(Trial& trial) {
  std::vector<uint8_t> bytes(
      static_cast<size_t>(trial.random.between(0, 3) * Words::kCount * 4 + trial.random.below(20)));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(trial.random.below(256));
  const auto size = static_cast<int64_t>(bytes.size());
  const auto there = trial.uninitialized<uint64_t>("words", words_for(size));
  store_words(bytes.data(), size, there, [&](const StoreWords& kernel) { trial.launch(kernel, {1, 64}); });
  bytes.resize(static_cast<size_t>(words_for(size) * 8));
  std::vector<uint64_t> expected(bytes.size() / 8);
  if (!bytes.empty()) std::memcpy(expected.data(), bytes.data(), bytes.size());
  trial.expect_same(there.values(), expected, "words");
}

inline Integers integers_of(Trial& trial, const char* name, int64_t count, bool is_narrow) {
  if (is_narrow) return {trial.uninitialized<uint32_t>(name, count), {}, true};
  return {{}, trial.uninitialized<int64_t>(name, count), false};
}

inline Ints values_of(const simt::prover::Array<uint32_t>& narrow, const simt::prover::Array<int64_t>& wide,
                      bool is_narrow) {
  if (!is_narrow) return wide.values();
  const auto values = narrow.values();
  return {values.begin(), values.end()};
}

// A batch over tables of every type, its features' tables their own.
template <typename Id>
struct World {
  Batch<Id> batch;
  std::vector<std::vector<uint8_t>> rows;
  std::vector<Array<uint8_t>> there;
  BagBatch<Id> host;
  std::vector<PlacedFeature> features;
  int64_t row_count = 0;

  World(Trial& trial, bool has_bad)
      : batch(trial, has_bad),
        host{{{}, {}, batch.bags, 0, batch.offsets.data(), nullptr, batch.count()}, batch.ids.data()} {
    for (int64_t f = 0; f < batch.features; ++f) {
      const int64_t dim = trial.random.between(1, 20), count = batch.row_counts[static_cast<size_t>(f)];
      const auto type = static_cast<Float>(trial.random.below(3));
      const bool mean = trial.random.below(2) == 0;
      const auto values = numbers<float>(count * dim, trial);
      rows.emplace_back(static_cast<size_t>(count * dim * float_bytes(type)));
      narrow(type, values.data(), rows.back().data(), count * dim);
      there.push_back(trial.array<uint8_t>("rows", rows.back()));
      host.tables.push_back({rows.back().data(), count, dim, type, mean, nullptr, nullptr});
      host.features.push_back({f, host.width});
      features.push_back({there.back(), count, row_count, dim, host.width, type, mean});
      row_count += count;
      host.width += dim;
    }
  }
  PlacedBatch<Id> placed(Trial& trial) {
    const auto known = trial.array<PlacedFeature>("features", features);
    trial.may_differ(known);
    return {known, trial.array<Id>("ids", batch.ids), trial.array<int64_t>("offsets", batch.offsets), batch.bags,
            host.width};
  }
};

template <typename Id>
void prove_places(Trial& trial) {
  World<Id> world(trial, trial.random.below(2) == 0);
  const Batch<Id>& batch = world.batch;
  const bool is_broken = trial.random.below(4) == 0, is_narrow = trial.random.below(2) == 0;
  if (is_broken) world.batch.break_offsets(trial);
  const auto narrow_rows = trial.uninitialized<uint32_t>("rows", is_narrow ? batch.count() : 0),
             narrow_at = trial.uninitialized<uint32_t>("positions", is_narrow ? batch.count() : 0);
  const auto wide_rows = trial.uninitialized<int64_t>("rows", is_narrow ? 0 : batch.count()),
             wide_at = trial.uninitialized<int64_t>("positions", is_narrow ? 0 : batch.count());
  const auto begins = trial.uninitialized<int64_t>("begins", batch.count());
  const auto lengths = trial.uninitialized<float>("lengths", batch.count());
  trial.launch(PlacePositions<Id>{world.placed(trial),
                                  world.row_count,
                                  {narrow_rows, wide_rows, is_narrow},
                                  {narrow_at, wide_at, is_narrow},
                                  begins,
                                  lengths},
               any_shape(trial));
  const Ints rows = values_of(narrow_rows, wide_rows, is_narrow);
  if (is_broken) {
    // Whatever the offsets are: rows of the tables or of none, and gradients of the batch.
    for (const int64_t row : rows) trial.expect(row >= 0 && row <= world.row_count, "a row of some table or of none");
    for (const int64_t begin : begins.values())
      trial.expect(begin >= 0 && begin < batch.bags * world.host.width, "a gradient of the batch");
    return;
  }
  Ints known_rows, known_begins;
  std::vector<float> known_lengths;
  for (int64_t bag = 0; bag < batch.all(); ++bag) {
    const auto& feature = world.features[static_cast<size_t>(bag / batch.bags)];
    const int64_t begin = batch.offsets[static_cast<size_t>(bag)], end = batch.offsets[static_cast<size_t>(bag) + 1];
    for (int64_t at = begin; at < end; ++at) {
      const auto id = static_cast<int64_t>(batch.ids[static_cast<size_t>(at)]);
      known_rows.push_back(id >= 0 && id < feature.row_count ? feature.base + id : world.row_count);
      known_begins.push_back(bag % batch.bags * world.host.width + feature.column);
      known_lengths.push_back(feature.mean ? static_cast<float>(end - begin) : 1);
    }
  }
  Ints order(known_rows.size());
  std::iota(order.begin(), order.end(), 0);
  trial.expect_same(rows, known_rows, "rows of positions");
  trial.expect_same(values_of(narrow_at, wide_at, is_narrow), order, "positions");
  trial.expect_same(begins.values(), known_begins, "gradients of positions");
  trial.expect_same(lengths.values(), known_lengths, "lengths of bags");
}

template <typename Id>
void prove_weight_gradients(Trial& trial) {
  const bool has_bad = trial.random.below(3) == 0;
  World<Id> world(trial, has_bad);
  const Batch<Id>& batch = world.batch;
  const auto grad = numbers<float>(batch.bags * world.host.width, trial);
  const auto out = trial.uninitialized<float>("out", batch.count());
  std::vector<float> expected(batch.ids.size());
  if (!has_bad) bag_weight_gradients(serial(), world.host, grad.data(), expected.data(), best_isa());
  trial.launch(WeightGradients<Id>{world.placed(trial), trial.array<float>("grad", grad), out}, any_shape(trial));
  // With ids outside: they have no gradient, and nothing but memory of the tables was read.
  if (!has_bad) trial.expect_same(out.values(), expected, "gradients of weights");
}

template <typename Value>
void prove_gathering(Trial& trial) {
  const int64_t data_count = trial.random.between(0, 60),
                block_count = trial.random.between(1, trial.random.below(8) == 0 ? 200 : 12);
  const bool is_wrong = trial.random.below(4) == 0;
  std::vector<Value> data(static_cast<size_t>(data_count));
  for (Value& value : data) value = static_cast<Value>(trial.random.below(1 << 30));
  Ints begins, sizes, starts(static_cast<size_t>(block_count + 1));
  for (int64_t k = 0; k < block_count; ++k) {
    begins.push_back(trial.random.between(0, data_count));
    sizes.push_back(trial.random.below(3) == 0 ? 0 : trial.random.between(0, data_count - begins.back()));
  }
  place_blocks(begins.data(), sizes.data(), block_count, data_count, starts.data());
  const int64_t total = starts.back();
  std::vector<Value> expected(static_cast<size_t>(total));
  gather_blocks(serial(), reinterpret_cast<const uint8_t*>(data.data()), begins.data(), starts.data(), block_count,
                sizeof(Value), reinterpret_cast<uint8_t*>(expected.data()));
  if (is_wrong) {
    const auto k = static_cast<size_t>(trial.random.below(block_count));
    (trial.random.below(2) == 0 ? begins : sizes)[k] = trial.random.below(2) == 0 ? -5 : INT64_MAX;
  }
  // Sums of sizes that are none may be anything.
  for (int64_t k = 0; k < block_count; ++k) {
    const auto i = static_cast<size_t>(k);
    starts[i + 1] = static_cast<int64_t>(static_cast<uint64_t>(starts[i]) + static_cast<uint64_t>(sizes[i]));
  }
  const auto out = trial.uninitialized<Value>("out", total);
  trial.launch(GatherBlocks<Value>{trial.array<Value>("data", data), trial.array<int64_t>("begins", begins),
                                   trial.array<int64_t>("starts", starts), out},
               any_shape(trial));
  if (!is_wrong) trial.expect_same(out.values(), expected, "blocks");
}

template <typename Id>
void prove_buckets(Trial& trial) {
  Batch<Id> batch(trial, false);
  const int64_t bucket_count = trial.random.between(1, 4), count = batch.count();
  const bool is_told = trial.random.below(2) == 0, is_wrong = trial.random.below(4) == 0,
             is_narrow = trial.random.below(2) == 0;
  Ints block_sizes, destinations;
  for (const int64_t rows : batch.row_counts)
    block_sizes.push_back((rows + bucket_count - 1) / bucket_count + trial.random.below(2));
  for (int64_t at = 0; at < count; ++at) destinations.push_back(trial.random.below(bucket_count));
  // A feature that is not cut, whose ids may be any.
  if (trial.random.below(3) == 0) {
    block_sizes[0] = 0;
    for (int64_t at = 0; at < batch.offsets[static_cast<size_t>(batch.bags)]; ++at)
      batch.ids[static_cast<size_t>(at)] = static_cast<Id>(trial.random.between(-9, 9));
  }
  const auto weights = numbers<float>(trial.random.below(2) == 0 ? count : 0, trial);
  const Bucketing<Id> job{batch.ids.data(),
                          batch.offsets.data(),
                          is_told ? nullptr : block_sizes.data(),
                          is_told ? destinations.data() : nullptr,
                          weights.empty() ? nullptr : weights.data(),
                          batch.features,
                          batch.bags,
                          bucket_count};
  std::vector<uint32_t> buckets(batch.ids.size());
  trial.expect(find_buckets(serial(), job, buckets.data()).count == 0, "a bucket for each id");
  Ints lengths(static_cast<size_t>(bucket_count * batch.all())), positions(batch.ids.size());
  std::vector<Id> ids(batch.ids.size());
  std::vector<float> moved(weights.size());
  bucketize(serial(), job, buckets.data(), lengths.data(), ids.data(), weights.empty() ? nullptr : moved.data(),
            positions.data());
  if (is_wrong) {
    if (trial.random.below(2) == 0) batch.break_offsets(trial);
    for (int64_t at = 0; at < count; ++at) {
      if (trial.random.below(4) > 0) continue;
      batch.ids[static_cast<size_t>(at)] = std::numeric_limits<Id>::min();
      destinations[static_cast<size_t>(at)] = trial.random.below(2) == 0 ? -1 : bucket_count;
    }
    block_sizes[0] = trial.random.between(-1, 1);
  }
  const auto narrow_of = trial.uninitialized<uint32_t>("buckets", is_narrow ? count : 0),
             narrow_at = trial.uninitialized<uint32_t>("positions", is_narrow ? count : 0);
  const auto wide_of = trial.uninitialized<int64_t>("buckets", is_narrow ? 0 : count),
             wide_at = trial.uninitialized<int64_t>("positions", is_narrow ? 0 : count);
  const auto local = trial.uninitialized<Id>("local ids", count);
  const auto counted = trial.array<int64_t>("lengths", Ints(lengths.size()));
  trial.launch(FindBuckets<Id>{trial.array<Id>("ids", batch.ids),
                               trial.array<int64_t>("offsets", batch.offsets),
                               trial.array<int64_t>("block sizes", is_told ? Ints() : block_sizes),
                               trial.array<int64_t>("destinations", is_told ? destinations : Ints()),
                               batch.features,
                               batch.bags,
                               bucket_count,
                               {narrow_of, wide_of, is_narrow},
                               {narrow_at, wide_at, is_narrow},
                               local,
                               counted},
               any_shape(trial));
  const Ints found = values_of(narrow_of, wide_of, is_narrow);
  for (const int64_t bucket : found) trial.expect(bucket >= 0 && bucket < bucket_count, "one of the buckets");
  Ints order = values_of(narrow_at, wide_at, is_narrow);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return found[static_cast<size_t>(a)] < found[static_cast<size_t>(b)]; });
  const auto out_ids = trial.uninitialized<Id>("out ids", count);
  const auto out_weights = trial.uninitialized<float>("out weights", static_cast<int64_t>(weights.size()));
  const auto out_positions = trial.uninitialized<int64_t>("out positions", count);
  trial.launch(MoveToBuckets<Id>{{{}, trial.array<int64_t>("sorted", order), false},
                                 local,
                                 trial.array<float>("weights", weights),
                                 out_ids,
                                 out_weights,
                                 out_positions},
               any_shape(trial));
  if (is_wrong) return;
  trial.expect_same(counted.values(), lengths, "lengths by bucket");
  trial.expect_same(out_ids.values(), ids, "ids by bucket");
  trial.expect_same(out_weights.values(), moved, "weights by bucket");
  trial.expect_same(out_positions.values(), positions, "positions by bucket");
}

}  // namespace id_cases
