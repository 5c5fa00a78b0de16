// Properties of the pipeline's kernels against naive loops: any tables, any bags, any unit, any number of threads.
#include "pipeline_tests.h"

#include "pipeline/ids.h"
#include "pipeline/step.h"

namespace {

using namespace fastimpl;
using namespace fastimpl::pipeline;
using kvstore_tests::require;
using kvstore_tests::threads;
using kvstore_tests::uniform;
using Bytes = std::vector<uint8_t>;
using Floats = std::vector<float>;
using Ints = std::vector<int64_t>;

float random_float() { return static_cast<float>(uniform(-1000, 1000)) / 256.0F; }

Floats random_floats(int64_t count, bool positive = false) {
  Floats values(static_cast<size_t>(count));
  for (float& value : values) value = positive ? std::abs(random_float()) : random_float();
  return values;
}

Isa any_unit() { return static_cast<Isa>(uniform(0, static_cast<int64_t>(fastimpl::best_isa()))); }

// Memory of exactly the size asked for, so that the sanitizer sees the first byte outside.
struct World {
  std::vector<Bytes> rows;
  std::vector<Floats> momentum1, momentum2;
  Ints offsets;
  std::vector<int64_t> ids;
  Floats weights, grad;
  std::vector<BagTable> tables;
  std::vector<BagFeature> features;
  int64_t bag_count, width = 0;
  Optimizer optimizer;

  BagBatch<int64_t> batch() {
    std::vector<BagTable> mine = tables;
    for (size_t t = 0; t < mine.size(); ++t) {
      mine[t].rows = rows[t].data();
      mine[t].momentum1 = momentum1[t].empty() ? nullptr : momentum1[t].data();
      mine[t].momentum2 = momentum2[t].empty() ? nullptr : momentum2[t].data();
    }
    return {{mine, features, bag_count, width, offsets.data(), weights.empty() ? nullptr : weights.data(),
             static_cast<int64_t>(ids.size())},
            ids.data()};
  }
};

int64_t any_dim() {
  static const Ints dims{1,  2,  3,  4,  7,  8,   12,  15,  16,  17,  20,   31,
                         32, 33, 48, 64, 65, 100, 128, 130, 255, 256, 1000, 1024};
  return dims[static_cast<size_t>(uniform(0, static_cast<int64_t>(dims.size()) - 1))];
}

void add_table(World* w) {
  const int64_t dim = any_dim(), row_count = uniform(1, 30);
  const auto type = static_cast<Float>(uniform(0, 2));
  const Floats values = random_floats(dim * row_count);
  Bytes bytes(static_cast<size_t>(dim * row_count * fastimpl::float_bytes(type)));
  fastimpl::narrow(type, values.data(), bytes.data(), dim * row_count);
  w->tables.push_back({nullptr, row_count, dim, type, uniform(0, 1) == 1, nullptr, nullptr});
  w->rows.push_back(std::move(bytes));
  w->momentum1.push_back(random_floats(row_count * momentum1_width(w->optimizer, dim), true));
  w->momentum2.push_back(random_floats(row_count * momentum2_width(w->optimizer, dim), true));
}

World random_world(int64_t longest) {
  World w;
  w.optimizer = static_cast<Optimizer>(uniform(1, fastimpl::kOptimizerCount - 1));
  const int64_t table_count = uniform(1, 3), feature_count = uniform(1, 4);
  for (int64_t t = 0; t < table_count; ++t) add_table(&w);
  w.bag_count = uniform(0, 8);
  w.offsets.push_back(0);
  for (int64_t f = 0; f < feature_count; ++f) {
    const int64_t t = uniform(0, table_count - 1);
    const BagTable& table = w.tables[static_cast<size_t>(t)];
    w.features.push_back({t, w.width});
    w.width += table.dim;
    for (int64_t bag = 0; bag < w.bag_count; ++bag) {
      const int64_t length = uniform(0, 2) == 0 ? 0 : uniform(0, longest);
      for (int64_t i = 0; i < length; ++i) w.ids.push_back(uniform(0, table.row_count - 1));
      w.offsets.push_back(static_cast<int64_t>(w.ids.size()));
    }
  }
  if (uniform(0, 1) == 1) w.weights = random_floats(static_cast<int64_t>(w.ids.size()));
  w.grad = random_floats(w.bag_count * w.width);
  return w;
}

Floats row_of(const World& w, int64_t table, int64_t row) {
  const BagTable& t = w.tables[static_cast<size_t>(table)];
  Floats values(static_cast<size_t>(t.dim));
  fastimpl::widen(t.type, w.rows[static_cast<size_t>(table)].data() + row * t.row_bytes(), values.data(), t.dim);
  return values;
}

// Calls `visit(feature, bag, position, length)` in order.
template <typename Visit>
void for_positions(const World& w, const Visit& visit) {
  for (size_t f = 0; f < w.features.size(); ++f) {
    for (int64_t bag = 0; bag < w.bag_count; ++bag) {
      const size_t at = f * static_cast<size_t>(w.bag_count) + static_cast<size_t>(bag);
      for (int64_t p = w.offsets[at]; p < w.offsets[at + 1]; ++p)
        visit(w.features[f], bag, p, w.offsets[at + 1] - w.offsets[at]);
    }
  }
}

// The same bits; NaN is none of the values here.
bool are_same(const Floats& a, const Floats& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

void pooling_is_a_sum_in_order() {
  for (int i = 0; i < 200; ++i) {
    World w = random_world(12);
    Floats expected(static_cast<size_t>(w.bag_count * w.width), 0.0F), got(expected.size(), 7.0F);
    for_positions(w, [&](BagFeature feature, int64_t bag, int64_t p, int64_t) {
      const Floats row = row_of(w, feature.table, w.ids[static_cast<size_t>(p)]);
      float* const sum = expected.data() + bag * w.width + feature.column;
      for (size_t e = 0; e < row.size(); ++e)
        sum[e] += w.weights.empty() ? row[e] : w.weights[static_cast<size_t>(p)] * row[e];
    });
    for (size_t f = 0; f < w.features.size(); ++f) {
      const BagTable& table = w.tables[static_cast<size_t>(w.features[f].table)];
      for (int64_t bag = 0; bag < w.bag_count; ++bag) {
        const size_t at = f * static_cast<size_t>(w.bag_count) + static_cast<size_t>(bag);
        const int64_t length = w.offsets[at + 1] - w.offsets[at];
        for (int64_t e = 0; table.mean && length > 0 && e < table.dim; ++e)
          expected[static_cast<size_t>(bag * w.width + w.features[f].column + e)] /= static_cast<float>(length);
      }
    }
    if (w.bag_count > 0) pool_bags(threads(uniform(1, 4)), w.batch(), got.data(), any_unit());
    require(are_same(got, expected), "pool_bags");
  }
}

float eight_lane_sum(const Floats& values) {
  float lanes[8] = {};
  for (size_t e = 0; e < values.size(); ++e) lanes[e % 8] += values[e];
  return fastimpl::fold_lanes(lanes);
}

// The gradient that a bag hands to each of its rows, before weights.
Floats bag_grad(const World& w, BagFeature feature, int64_t bag, int64_t length) {
  const BagTable& table = w.tables[static_cast<size_t>(feature.table)];
  const float* const from = w.grad.data() + bag * w.width + feature.column;
  Floats grad(from, from + table.dim);
  for (float& g : grad) g = table.mean ? g / static_cast<float>(length) : g;
  return grad;
}

void weights_have_gradients() {
  for (int i = 0; i < 100; ++i) {
    World w = random_world(8);
    Floats expected(w.ids.size()), got(w.ids.size());
    for_positions(w, [&](BagFeature feature, int64_t bag, int64_t p, int64_t length) {
      Floats product = bag_grad(w, feature, bag, length);
      const Floats row = row_of(w, feature.table, w.ids[static_cast<size_t>(p)]);
      for (size_t e = 0; e < row.size(); ++e) product[e] *= row[e];
      expected[static_cast<size_t>(p)] = eight_lane_sum(product);
    });
    if (w.bag_count > 0) bag_weight_gradients(threads(uniform(1, 4)), w.batch(), w.grad.data(), got.data(), any_unit());
    require(are_same(got, expected), "bag_weight_gradients");
  }
}

// The formulas once more, one element after the other.
void step_naively(World* w, int64_t table, int64_t row, Floats* grad, const Hyper& h) {
  BagTable& t = w->tables[static_cast<size_t>(table)];
  Floats weight = row_of(*w, table, row);
  const int64_t first = momentum1_width(w->optimizer, t.dim), second = momentum2_width(w->optimizer, t.dim);
  float none = 0;
  float* const m1 = first == 0 ? &none : w->momentum1[static_cast<size_t>(table)].data() + row * first;
  float* const m2 = second == 0 ? &none : w->momentum2[static_cast<size_t>(table)].data() + row * second;
  Floats squares(grad->size());
  for (size_t e = 0; e < squares.size(); ++e) squares[e] = (*grad)[e] * (*grad)[e];
  const float mean_square = eight_lane_sum(squares) / static_cast<float>(t.dim);
  if (w->optimizer == Optimizer::kRowwiseAdagrad) *m1 += mean_square;
  if (w->optimizer == Optimizer::kPartialRowwiseAdam) *m2 = h.beta2 * *m2 + h.one_minus_beta2 * mean_square;
  float scale = 1;
  if (w->optimizer == Optimizer::kLamb) {
    Floats weights(squares.size()), steps(squares.size());
    for (size_t e = 0; e < weights.size(); ++e) {
      m1[e] = h.beta1 * m1[e] + h.one_minus_beta1 * (*grad)[e];
      m2[e] = h.beta2 * m2[e] + h.one_minus_beta2 * squares[e];
      const float step = (h.step_size * m1[e]) / (std::sqrt(m2[e]) / h.root_correction + h.eps);
      weights[e] = weight[e] * weight[e];
      steps[e] = step * step;
    }
    const float norm = std::sqrt(eight_lane_sum(weights)), length = std::sqrt(eight_lane_sum(steps));
    if (norm > 0 && length > 0) scale = (h.lr * norm) / length;
  }
  for (size_t e = 0; e < weight.size(); ++e) {
    const float g = (*grad)[e];
    switch (w->optimizer) {
      case Optimizer::kNone: break;
      case Optimizer::kSgd: weight[e] -= h.lr * g; break;
      case Optimizer::kAdagrad:
        m1[e] += squares[e];
        weight[e] -= (h.lr * g) / (std::sqrt(m1[e]) + h.eps);
        break;
      case Optimizer::kRowwiseAdagrad: weight[e] -= (h.lr / (std::sqrt(*m1) + h.eps)) * g; break;
      case Optimizer::kAdam:
        m1[e] = h.beta1 * m1[e] + h.one_minus_beta1 * g;
        m2[e] = h.beta2 * m2[e] + h.one_minus_beta2 * squares[e];
        weight[e] -= (h.step_size * m1[e]) / (std::sqrt(m2[e]) / h.root_correction + h.eps);
        break;
      case Optimizer::kLamb:
        weight[e] -= scale * ((h.step_size * m1[e]) / (std::sqrt(m2[e]) / h.root_correction + h.eps));
        break;
      case Optimizer::kPartialRowwiseAdam:
        m1[e] = h.beta1 * m1[e] + h.one_minus_beta1 * g;
        weight[e] -= (h.step_size * m1[e]) / (std::sqrt(*m2) / h.root_correction + h.eps);
        break;
    }
  }
  fastimpl::narrow(t.type, weight.data(), w->rows[static_cast<size_t>(table)].data() + row * t.row_bytes(), t.dim);
}

void step_all_naively(World* w, const Hyper& h) {
  std::map<std::pair<int64_t, int64_t>, Floats> sums;
  for_positions(*w, [&](BagFeature feature, int64_t bag, int64_t p, int64_t length) {
    const Floats grad = bag_grad(*w, feature, bag, length);
    Floats& sum = sums.try_emplace({feature.table, w->ids[static_cast<size_t>(p)]}, grad.size(), 0.0F).first->second;
    for (size_t e = 0; e < grad.size(); ++e)
      sum[e] += w->weights.empty() ? grad[e] : w->weights[static_cast<size_t>(p)] * grad[e];
  });
  for (auto& [place, sum] : sums) step_naively(w, place.first, place.second, &sum, h);
}

constexpr Hyper kHyper{0.05F, 1e-8F, 0.9F, 0.1F, 0.999F, 0.001F, 0.07F, 0.3F};

void check_step(World* w, const char* what) {
  World expected = *w;
  step_all_naively(&expected, kHyper);
  if (w->bag_count > 0) step_bags(threads(uniform(1, 4)), w->batch(), w->grad.data(), w->optimizer, kHyper, any_unit());
  require(w->rows == expected.rows, what);
  for (size_t t = 0; t < w->tables.size(); ++t)
    require(are_same(w->momentum1[t], expected.momentum1[t]) && are_same(w->momentum2[t], expected.momentum2[t]), what);
}

void steps_are_those_of_the_formulas() {
  for (int i = 0; i < 300; ++i) {
    World w = random_world(i % 10 == 0 ? 400 : 12);
    check_step(&w, "step_bags");
  }
}

// One id many times among few: longer than kLongRow, in one bag and over bags and features.
void one_row_may_occur_any_number_of_times() {
  for (int i = 0; i < 12; ++i) {
    World w = random_world(5);
    if (w.bag_count == 0 || w.ids.empty()) continue;
    const auto p = static_cast<size_t>(uniform(0, static_cast<int64_t>(w.ids.size()) - 1));
    const int64_t extra = i == 0 ? 100000 : uniform(kLongRow - 2, 2 * kLongRow);
    w.ids.insert(w.ids.begin() + static_cast<int64_t>(p), static_cast<size_t>(extra), w.ids[p]);
    if (!w.weights.empty()) w.weights = random_floats(static_cast<int64_t>(w.ids.size()));
    for (int64_t& offset : w.offsets) offset += offset > static_cast<int64_t>(p) ? extra : 0;
    check_step(&w, "a row that occurs very often");
  }
}

void order_is_kept_by_sorting() {
  for (int i = 0; i < 60; ++i) {
    const int64_t count = i == 0 ? 200000 : uniform(0, 3000);
    const int low = static_cast<int>(uniform(0, 20)), high = low + static_cast<int>(uniform(0, 40));
    std::vector<uint64_t> words(static_cast<size_t>(count)), spare(words.size());
    for (uint64_t& word : words) word = kvstore_tests::random_bits() & kvstore_tests::random_bits();
    const uint64_t base = kvstore_tests::random_bits();
    std::vector<uint64_t> expected = words;
    const uint64_t mask = (uint64_t{1} << (high - low)) - 1;
    const auto digits = [&](uint64_t word) { return ((word - base) >> low) & mask; };
    std::stable_sort(expected.begin(), expected.end(), [&](uint64_t a, uint64_t b) { return digits(a) < digits(b); });
    sort_stably(threads(uniform(1, 4)), words.data(), spare.data(), count, base, low, high);
    require(words == expected, "sort_stably");
  }
}

template <typename Id>
void ids_are_checked_and_mended() {
  for (int i = 0; i < 100; ++i) {
    World w = random_world(i == 0 ? 20000 : 12);
    const auto feature_count = static_cast<int64_t>(w.features.size());
    if (w.bag_count == 0) continue;
    std::vector<Id> ids(w.ids.size()), got(ids.size()), expected;
    for (Id& id : ids) id = static_cast<Id>(uniform(-2, 9));
    Ints row_counts;
    for (int64_t f = 0; f < feature_count; ++f) row_counts.push_back(uniform(-1, 9));
    BadIds known{0, -1};
    for (size_t p = 0, bag = 0; p < ids.size(); ++p) {
      while (w.offsets[bag + 1] <= static_cast<int64_t>(p)) ++bag;
      const int64_t rows = row_counts[bag / static_cast<size_t>(w.bag_count)];
      const bool bad = rows >= 0 && (ids[p] < 0 || ids[p] >= rows);
      if (bad && known.count++ == 0) known.first = static_cast<int64_t>(p);
      expected.push_back(bad ? Id{0} : ids[p]);
    }
    const BadIds bad = find_bad_ids(threads(uniform(1, 4)), ids.data(), w.offsets.data(), row_counts.data(),
                                    feature_count, w.bag_count);
    require(bad.count == known.count && bad.first == known.first, "find_bad_ids");
    mend_bag_ids(threads(uniform(1, 4)), ids.data(), w.offsets.data(), row_counts.data(), feature_count, w.bag_count,
                 got.data());
    require(got == expected, "mend_bag_ids");
  }
}

void offsets_are_known() {
  for (int i = 0; i < 100; ++i) {
    Ints offsets{0};
    for (int64_t bag = i == 0 ? 200000 : uniform(0, 9); bag > 0; --bag)
      offsets.push_back(offsets.back() + uniform(0, 3));
    const auto bag_count = static_cast<int64_t>(offsets.size()) - 1;
    const int64_t id_count = offsets.back();
    require(are_offsets(threads(3), offsets.data(), bag_count, id_count), "offsets");
    require(!are_offsets(threads(3), offsets.data(), bag_count, id_count + 1), "offsets that end elsewhere");
    const auto at = static_cast<size_t>(uniform(0, bag_count));
    offsets[at] = at == 0 ? 1 : id_count + 1;
    require(!are_offsets(threads(3), offsets.data(), bag_count, id_count), "offsets that fall");
  }
}

void blocks_lie_one_after_the_other() {
  for (int i = 0; i < 100; ++i) {
    const int64_t element_bytes = uniform(1, 8), data_count = uniform(0, 50),
                  block_count = uniform(0, i % 10 == 0 ? 20000 : 20);
    Bytes data(static_cast<size_t>(data_count * element_bytes));
    for (uint8_t& byte : data) byte = static_cast<uint8_t>(uniform(0, 255));
    Ints begins, sizes, starts(static_cast<size_t>(block_count + 1));
    Bytes expected;
    for (int64_t k = 0; k < block_count; ++k) {
      begins.push_back(uniform(0, data_count));
      sizes.push_back(uniform(0, data_count - begins.back()));
      expected.insert(expected.end(), data.begin() + begins.back() * element_bytes,
                      data.begin() + (begins.back() + sizes.back()) * element_bytes);
    }
    require(place_blocks(begins.data(), sizes.data(), block_count, data_count, starts.data()) == -1, "place_blocks");
    Bytes got(expected.size());
    gather_blocks(threads(uniform(1, 4)), data.data(), begins.data(), starts.data(), block_count, element_bytes,
                  got.data());
    require(got == expected, "gather_blocks");
    if (block_count == 0) continue;
    const int64_t k = uniform(0, block_count - 1);
    Ints bad = sizes;
    bad[static_cast<size_t>(k)] = uniform(0, 1) == 0 ? -1 : data_count - begins[static_cast<size_t>(k)] + 1;
    require(place_blocks(begins.data(), bad.data(), block_count, data_count, starts.data()) == k, "a block outside");
  }
  const int64_t most = std::numeric_limits<int64_t>::max();
  const Ints begins{0, 0, 0}, sizes{most - 1, 1, 1};
  Ints starts(4);
  require(place_blocks(begins.data(), sizes.data(), 2, most, starts.data()) == -1 && starts[2] == most,
          "blocks that end where numbers do");
  require(place_blocks(begins.data(), sizes.data(), 3, most, starts.data()) == 2, "blocks whose sum is no number");
}

void buckets_keep_order() {
  for (int i = 0; i < 150; ++i) {
    World w = random_world(i == 0 ? 20000 : 12);
    if (w.bag_count == 0) continue;
    const auto feature_count = static_cast<int64_t>(w.features.size()), all = feature_count * w.bag_count;
    const int64_t bucket_count = uniform(1, 6), id_count = static_cast<int64_t>(w.ids.size());
    Ints sizes, destinations(w.ids.size());
    for (int64_t f = 0; f < feature_count; ++f)
      sizes.push_back(i % 7 == 0 ? INT64_MAX / uniform(1, 9) : uniform(1, i % 3 == 0 ? 1000000007 : 9));
    // Now and then a feature that is not cut: its ids may be any.
    const bool has_whole = i % 5 == 0;
    if (has_whole) sizes[static_cast<size_t>(uniform(0, feature_count - 1))] = 0;
    std::vector<std::vector<int64_t>> places(static_cast<size_t>(bucket_count * all));
    for (size_t bag = 0; bag < static_cast<size_t>(all); ++bag) {
      const int64_t size = sizes[bag / static_cast<size_t>(w.bag_count)];
      for (auto p = static_cast<size_t>(w.offsets[bag]); p < static_cast<size_t>(w.offsets[bag + 1]); ++p) {
        const int64_t bucket = size == 0 ? 0 : uniform(0, std::min(bucket_count, INT64_MAX / size) - 1);
        const int64_t edge = uniform(0, 2);
        w.ids[p] = size == 0   ? (edge == 0 ? INT64_MIN : uniform(-9, 9))
                   : edge == 0 ? bucket * size
                               : bucket * size + (edge == 1 ? size - 1 : uniform(0, size - 1));
        destinations[p] = bucket;
        places[static_cast<size_t>(bucket * all) + bag].push_back(static_cast<int64_t>(p));
      }
    }
    const bool given = uniform(0, 1) == 1;
    const Bucketing<int64_t> job{w.ids.data(),
                                 w.offsets.data(),
                                 given ? nullptr : sizes.data(),
                                 given ? destinations.data() : nullptr,
                                 w.weights.empty() ? nullptr : w.weights.data(),
                                 feature_count,
                                 w.bag_count,
                                 bucket_count};
    std::vector<uint32_t> buckets(w.ids.size());
    require(find_buckets(threads(uniform(1, 4)), job, buckets.data()).count == 0, "find_buckets");
    Ints lengths(places.size()), ids(w.ids.size()), positions(w.ids.size());
    Floats weights(w.weights.size());
    bucketize(threads(uniform(1, 4)), job, buckets.data(), lengths.data(), ids.data(),
              w.weights.empty() ? nullptr : weights.data(), positions.data());
    size_t to = 0;
    for (size_t place = 0; place < places.size(); ++place) {
      require(lengths[place] == static_cast<int64_t>(places[place].size()), "lengths");
      for (const int64_t p : places[place]) {
        const auto from = static_cast<size_t>(p);
        const int64_t feature = static_cast<int64_t>(place) % all / w.bag_count;
        require(positions[to] == p &&
                    ids[to] ==
                        (given ? w.ids[from] : w.ids[from] - destinations[from] * sizes[static_cast<size_t>(feature)]),
                "bucketize");
        require(w.weights.empty() || weights[to] == w.weights[from], "weights in buckets");
        ++to;
      }
    }
    if (id_count == 0 || has_whole) continue;
    const int64_t p = uniform(0, id_count - 1);
    (given ? destinations : w.ids)[static_cast<size_t>(p)] = -1;
    const BadIds bad = find_buckets(threads(uniform(1, 4)), job, buckets.data());
    require(bad.count == 1 && bad.first == p, "an id without a bucket");
  }
}

}  // namespace

void pipeline_tests() {
  pooling_is_a_sum_in_order();
  weights_have_gradients();
  steps_are_those_of_the_formulas();
  one_row_may_occur_any_number_of_times();
  order_is_kept_by_sorting();
  ids_are_checked_and_mended<int64_t>();
  ids_are_checked_and_mended<int32_t>();
  offsets_are_known();
  blocks_lie_one_after_the_other();
  buckets_keep_order();
}
