// The device's movement of ids, run by a serial grid: what the host's kernels give, whatever the order of threads.
#include "pipeline/grid_ids.h"
#include "pipeline/ids.h"
#include "pipeline_tests.h"

namespace {

using namespace fastimpl;
using namespace fastimpl::pipeline;
using kvstore_tests::require;
using kvstore_tests::threads;
using kvstore_tests::uniform;
using pipeline_cases::run_grid;
using Ints = std::vector<int64_t>;

// Ids begin at any place, so that runs of them are aligned or not; memory ends where they end.
template <typename Id>
struct Batch {
  int64_t feature_count = uniform(1, 5), bag_count = uniform(1, 6), shift = uniform(0, 3);
  std::vector<Id> held;
  Ints offsets{0};
  int64_t count = 0;

  explicit Batch(int64_t longest) : held(static_cast<size_t>(shift)) {
    for (int64_t bag = 0; bag < feature_count * bag_count; ++bag) {
      // Some features have no ids at all, at the beginning and at the end too.
      offsets.push_back(offsets.back() + (uniform(0, 2) == 0 ? 0 : uniform(0, longest)));
    }
    count = offsets.back();
    held.resize(held.size() + static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) ids()[i] = static_cast<Id>(uniform(-2, 9));
  }
  int64_t all() const { return feature_count * bag_count; }
  Id* ids() { return held.data() + shift; }
  GridIds<Id> grid() { return {ids(), offsets.data(), feature_count, bag_count, count}; }
  int64_t runs() const { return run_count(count, Run<Id>::kCount); }
};

template <typename Id>
void ids_are_mended_on_a_grid() {
  for (int i = 0; i < 200; ++i) {
    Batch<Id> batch(i == 0 ? 3000 : 9);
    Ints row_counts, found{0, INT64_MAX};
    for (int64_t f = 0; f < batch.feature_count; ++f) row_counts.push_back(uniform(0, 12));
    const BadIds bad = find_bad_ids(threads(1), batch.ids(), batch.offsets.data(), row_counts.data(),
                                    batch.feature_count, batch.bag_count);
    run_grid(batch.runs(), CountBadIds<Id>{batch.grid(), row_counts.data(), found.data()});
    run_grid(1, EndBadIds{found.data()});
    require(found[0] == bad.count && found[1] == bad.first, "bad ids on a grid");
    const auto shift = static_cast<size_t>(uniform(0, 3)), size = static_cast<size_t>(batch.count);
    std::vector<Id> expected(size), got(size + shift);
    mend_bag_ids(threads(1), batch.ids(), batch.offsets.data(), row_counts.data(), batch.feature_count, batch.bag_count,
                 expected.data());
    run_grid(batch.runs(), MendBadIds<Id>{batch.grid(), row_counts.data(), got.data() + shift});
    require(std::equal(expected.begin(), expected.end(), got.begin() + static_cast<int64_t>(shift)),
            "mended ids on a grid");
    // Offsets that are none must not lead outside of memory, which the sanitizer watches.
    batch.offsets[static_cast<size_t>(uniform(0, batch.all()))] = uniform(0, 1) == 0 ? INT64_MAX : -7;
    run_grid(batch.runs(), MendBadIds<Id>{batch.grid(), row_counts.data(), got.data() + shift});
  }
}

template <typename Value>
void blocks_are_gathered_on_a_grid() {
  for (int i = 0; i < 100; ++i) {
    const int64_t data_count = uniform(0, 60), block_count = uniform(0, i == 0 ? 3000 : 12);
    std::vector<Value> data(static_cast<size_t>(data_count));
    for (Value& value : data) value = static_cast<Value>(kvstore_tests::random_bits());
    Ints begins, sizes, starts(static_cast<size_t>(block_count + 1));
    for (int64_t k = 0; k < block_count; ++k) {
      begins.push_back(uniform(0, data_count));
      sizes.push_back(uniform(0, 2) == 0 ? 0 : uniform(0, data_count - begins.back()));
    }
    require(place_blocks(begins.data(), sizes.data(), block_count, data_count, starts.data()) == -1, "place_blocks");
    const int64_t total = starts.back(), runs = run_count(total, Run<Value>::kCount);
    std::vector<Value> expected(static_cast<size_t>(total)), got(expected.size());
    gather_blocks(threads(1), reinterpret_cast<const uint8_t*>(data.data()), begins.data(), starts.data(), block_count,
                  sizeof(Value), reinterpret_cast<uint8_t*>(expected.data()));
    run_grid(runs, GatherBlocks<Value>{data.data(), begins.data(), starts.data(), block_count, total, got.data()});
    require(got == expected, "blocks on a grid");
    int64_t bad = INT64_MAX;
    run_grid(block_count, BlockCheck{begins.data(), sizes.data(), data_count, &bad});
    require(bad == INT64_MAX, "right blocks on a grid");
    for (int wrong = 0; wrong < 2 && block_count > 0; ++wrong) {
      const auto k = static_cast<size_t>(uniform(0, block_count - 1));
      (uniform(0, 1) == 0 ? begins : sizes)[k] = uniform(0, 1) == 0 ? -1 : data_count + 1;
    }
    run_grid(block_count, BlockCheck{begins.data(), sizes.data(), data_count, &bad});
    const int64_t first = place_blocks(begins.data(), sizes.data(), block_count, data_count, starts.data());
    require(bad == (first < 0 ? INT64_MAX : first), "the first block outside on a grid");
  }
}

// `wrong` positions are given no bucket.
template <typename Id>
void check_buckets(int64_t longest, int64_t wrong) {
  Batch<Id> batch(longest);
  const int64_t bucket_count = uniform(1, 6), id_count = batch.count;
  const bool given = uniform(0, 1) == 1;
  Ints block_sizes, destinations;
  for (int64_t f = 0; f < batch.feature_count; ++f)
    block_sizes.push_back(uniform(0, 3) == 0 ? (int64_t{1} << 58) : uniform(1, 9));
  for (int64_t p = 0; p < id_count; ++p) {
    const int64_t size = block_sizes[static_cast<size_t>(batch.grid().feature_of(p))],
                  most = std::numeric_limits<Id>::max();
    batch.ids()[p] = static_cast<Id>(uniform(0, size > most / bucket_count ? most : size * bucket_count - 1));
    destinations.push_back(uniform(0, bucket_count - 1));
  }
  for (int64_t i = 0; i < wrong && id_count > 0; ++i) {
    const int64_t p = uniform(0, id_count - 1);
    batch.ids()[p] = -1;
    destinations[static_cast<size_t>(p)] = uniform(0, 1) == 0 ? -1 : bucket_count;
  }
  std::vector<float> weights(static_cast<size_t>(id_count));
  for (float& weight : weights) weight = static_cast<float>(uniform(-99, 99));
  const int64_t *const sizes = given ? nullptr : block_sizes.data(), *const told =
                                                                         given ? destinations.data() : nullptr;
  const Bucketing<Id> job{batch.ids(),    batch.offsets.data(), sizes,           told,
                          weights.data(), batch.feature_count,  batch.bag_count, bucket_count};
  std::vector<uint32_t> theirs(weights.size());
  const BadIds bad = find_buckets(threads(1), job, theirs.data());

  Ints buckets(weights.size()), positions(buckets.size()), found{0, INT64_MAX, 0};
  run_grid(batch.runs(),
           FindBuckets<Id>{batch.grid(), sizes, told, bucket_count, buckets.data(), positions.data(), found.data()});
  require(found[0] == bad.count && (bad.count == 0 || found[1] == bad.first) && found[2] == 0, "buckets on a grid");
  if (bad.count > 0) return;
  require(std::equal(buckets.begin(), buckets.end(), theirs.begin()), "the bucket of each id on a grid");
  std::stable_sort(positions.begin(), positions.end(), [&](int64_t a, int64_t b) {
    return buckets[static_cast<size_t>(a)] < buckets[static_cast<size_t>(b)];
  });
  std::sort(buckets.begin(), buckets.end());

  const auto places = static_cast<size_t>(bucket_count * batch.all());
  Ints lengths(places), known_lengths(places), known_positions(positions.size());
  std::vector<Id> ids(weights.size()), known_ids(ids.size());
  std::vector<float> moved(weights.size()), known_weights(moved.size());
  bucketize(threads(1), job, theirs.data(), known_lengths.data(), known_ids.data(), known_weights.data(),
            known_positions.data());
  run_grid(static_cast<int64_t>(places), BucketLengths{batch.offsets.data(), buckets.data(), positions.data(),
                                                       batch.all(), id_count, lengths.data()});
  run_grid(id_count, MoveToBucket<Id>{batch.grid(), sizes, buckets.data(), positions.data(), weights.data(), ids.data(),
                                      moved.data()});
  require(lengths == known_lengths && positions == known_positions, "lengths and positions by bucket on a grid");
  require(ids == known_ids && moved == known_weights, "ids and weights by bucket on a grid");
}

void block_sizes_are_checked_on_a_grid() {
  Batch<int64_t> batch(9);
  Ints sizes(static_cast<size_t>(batch.feature_count), 3), buckets(static_cast<size_t>(batch.count)),
      positions(buckets.size()), found{0, INT64_MAX, 0};
  sizes[static_cast<size_t>(uniform(0, batch.feature_count - 1))] = uniform(-1, 0);
  run_grid(batch.feature_count, BlockSizeCheck{sizes.data(), found.data()});
  require(found[2] == 1, "a block size on a grid");
  // Nothing is divided by it.
  run_grid(batch.runs(), FindBuckets<int64_t>{batch.grid(), sizes.data(), nullptr, 2, buckets.data(), positions.data(),
                                              found.data()});
}

}  // namespace

void pipeline_grid_tests() {
  ids_are_mended_on_a_grid<int64_t>();
  ids_are_mended_on_a_grid<int32_t>();
  blocks_are_gathered_on_a_grid<uint8_t>();
  blocks_are_gathered_on_a_grid<uint16_t>();
  blocks_are_gathered_on_a_grid<uint32_t>();
  blocks_are_gathered_on_a_grid<uint64_t>();
  for (int i = 0; i < 150; ++i) {
    check_buckets<int64_t>(i == 0 ? 3000 : 9, i % 3 == 0 ? uniform(1, 3) : 0);
    check_buckets<int32_t>(9, i % 3 == 0 ? uniform(1, 3) : 0);
    block_sizes_are_checked_on_a_grid();
  }
}
