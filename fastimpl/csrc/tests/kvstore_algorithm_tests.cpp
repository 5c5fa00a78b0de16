// The row store's sorting, rounding, optimizers, eviction and capacity.
#include <cmath>

#include "kvstore_tests.h"

namespace {

using namespace kvstore_tests;

// Sorted by bucket and inside, and counted, as the library does it.
void require_in_bucket_order(const std::vector<int64_t>& ids, const BucketRule& rule, int64_t bucket_count) {
  const auto count = static_cast<int64_t>(ids.size());
  std::vector<int64_t> sorted(ids.size()), expected = ids, counts(static_cast<size_t>(bucket_count)),
                                           expected_counts(counts.size());
  std::sort(expected.begin(), expected.end(),
            [&](int64_t a, int64_t b) { return std::pair(rule(a), a) < std::pair(rule(b), b); });
  for (const int64_t id : ids) ++expected_counts[static_cast<size_t>(rule(id))];
  for (const int64_t thread_count : {1, 2, 3}) {
    require(sort_by_bucket(threads(thread_count), ids.data(), count, rule, 0, bucket_count, sorted.data(),
                           counts.data()) == 0,
            "ids outside all buckets");
    require(sorted == expected && counts == expected_counts, "sort_by_bucket");
  }
}

// A bucket that holds all ids whose high bits are these, so that they differ in few bits or in many.
void buckets_of_a_size_match_the_library() {
  for (const int64_t count : {0, 1, 2, 600, 40000, 300000}) {
    for (const int bits : {1, 9, 33, 62}) {
      for (const int64_t bucket_count : {1, 2, 255, 256, 257, 3000}) {
        const uint64_t values = uint64_t{1} << bits;
        const auto size = static_cast<int64_t>((values - 1) / static_cast<uint64_t>(bucket_count)) + 1;
        std::vector<int64_t> ids(static_cast<size_t>(count));
        for (auto& id : ids) id = static_cast<int64_t>(random_bits() % values);
        require_in_bucket_order(ids, {bucket_count, size}, bucket_count);
        // Ids as a store lists them.
        std::sort(ids.begin(), ids.end());
        require_in_bucket_order(ids, {bucket_count, size}, bucket_count);
        require_in_bucket_order(ids, {bucket_count, 0}, bucket_count);
        // Most of them one id, so that one value of a digit has nearly all.
        for (size_t i = 0; i < ids.size(); ++i) ids[i] = i % 3 == 0 ? ids[i] : 1 - static_cast<int64_t>(i % 2);
        require_in_bucket_order(ids, {bucket_count, 0}, bucket_count);
      }
    }
  }
}

void sorting_matches_the_library() {
  for (const int64_t count : {0, 1, 2, 511, 513, 70000, 300000}) {
    for (const int bits : {1, 9, 33, 64}) {
      std::vector<int64_t> ids(static_cast<size_t>(count));
      for (auto& id : ids) id = static_cast<int64_t>(random_bits() << (64 - bits)) >> (bits == 64 ? 0 : uniform(0, 3));
      std::vector<int64_t> sorted = ids, expected = ids;
      sort_keys(threads(3), sorted.data(), count);
      std::sort(expected.begin(), expected.end());
      require(sorted == expected, "sort_keys");
      const int64_t bucket_count = uniform(0, 1) == 0 ? uniform(1, 300) : uniform(1, 3000);
      const BucketRule rule{bucket_count, 0};
      for (const int64_t id : ids)
        require(rule(id) == (id % bucket_count + bucket_count) % bucket_count, "the bucket is the remainder");
      require_in_bucket_order(ids, rule, bucket_count);
    }
  }
  const BucketRule chunks{4, 10};
  require(chunks(-1) == -1 && chunks(-11) == -1 && chunks(39) == 3 && BucketRule{7, 0}(-1) == 6, "bucket rules floor");
  const std::vector<int64_t> ids{0, 39, 40, -1};
  int64_t sorted[4], counts[4];
  require(sort_by_bucket(threads(1), ids.data(), 4, chunks, 0, 4, sorted, counts) == 2, "ids outside are counted");
}

Bytes row_of(const Table& table, int64_t key) {
  Bytes row(static_cast<size_t>(table.format.row_bytes));
  read_rows(table, threads(1), &key, 1, {0, table.format.row_bytes}, row.data(), nullptr);
  return row;
}

// Every step of every optimizer: many threads give what one gives, and a batch with duplicates what their sum gives.
void steps_do_not_depend_on_threads() {
  const Hyper hyper{0.1F, 1e-8F, 0.9F, 0.1F, 0.999F, 0.001F, 0.1F, 0.0316F};
  for (const Optimizer optimizer : {Optimizer::kSgd, Optimizer::kAdagrad, Optimizer::kRowwiseAdagrad, Optimizer::kAdam,
                                    Optimizer::kPartialRowwiseAdam}) {
    RowFormat format = format_of(13, true);
    format.optimizer = optimizer;
    if (optimizer == Optimizer::kRowwiseAdagrad) format.momentum1.count = 1;
    if (optimizer == Optimizer::kPartialRowwiseAdam) format.momentum2.count = 1;
    Table one(format, 1), many(format, 8), reduced(format, 3);
    for (uint64_t step = 1; step < 4; ++step) {
      std::vector<int64_t> keys(3000);
      for (auto& key : keys) key = uniform(-200, 200);
      std::vector<float> grads(keys.size() * 13);
      for (auto& grad : grads) grad = static_cast<float>(uniform(-100, 100)) / 64.0F;
      update_rows(one, threads(1), keys.data(), 3000, grads.data(), hyper, {step, step});
      update_rows(many, threads(4), keys.data(), 3000, grads.data(), hyper, {step, step});
      std::map<int64_t, std::vector<float>> sums;
      for (size_t i = 0; i < keys.size(); ++i) {
        auto& sum = sums.try_emplace(keys[i], std::vector<float>(13)).first->second;
        for (size_t e = 0; e < 13; ++e) sum[e] += grads[i * 13 + e];
      }
      for (const auto& [key, sum] : sums) update_rows(reduced, threads(1), &key, 1, sum.data(), hyper, {step, step});
    }
    for (int64_t key = -200; key <= 200; ++key) {
      const Bytes row = row_of(one, key), same = row_of(many, key), values = row_of(reduced, key);
      require(row == same, "a step depends on threads or shards");
      require(std::equal(row.begin() + kHeaderBytes, row.end(), values.begin() + kHeaderBytes),
              "duplicates were not summed first");
    }
  }
}

void no_optimizer_changes_nothing() {
  const RowFormat format = format_of(4, false);
  Bytes row(static_cast<size_t>(format.row_bytes), 0x3C);
  const Bytes before = row;
  std::vector<float> numbers(16, 1.0F);
  float* const first = numbers.data();
  update_row(format, row.data(), {first, first + 4, first + 8, first + 12}, {});
  require(row == before, "a table without an optimizer keeps its rows");
  const InitialWeight zero{false, -1.0F, 2.0F, 12345}, uniform_weight{true, -1.0F, 2.0F, 12345};
  require(zero.value(zero.row_word(7), 3) == 0, "weights that begin at zero");
  const float drawn = uniform_weight.value(uniform_weight.row_word(7), 3);
  require(drawn >= -1 && drawn < 1 && drawn != 0, "weights that are drawn");
}

void evictions_remove_what_the_policy_condemns() {
  Table table(format_of(4, false), 4);
  std::vector<int64_t> keys(1000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i);
  const Bytes values(16 * keys.size(), 0);
  for (uint64_t now = 1; now <= 10; ++now) {
    // The rows from 100 * now on are written: row k has the timestamp and count k / 100.
    const int64_t first = 100 * static_cast<int64_t>(now - 1);
    write_values(table, threads(2), keys.data() + first, 1000 - first, values.data(), {kHeaderBytes, 32}, true,
                 {now, now});
  }
  const auto* const held = table.take_snapshot(10);
  EvictionPlan plan{Policy::kTtl, 5, 0, 0, 1.0, 0.0, 11, 9, false, 0, 0};
  // Rows 0 to 499 are older than 5; rows from 900 on changed after the mark.
  require(evict_rows(table, threads(2), keys.data(), 1000, plan, {11, 11}) == 500, "ttl");
  plan = {Policy::kCount, 0, 4, 0, 0.5, 0.0, 11, 11, false, 0, 0};
  require(evict_rows(table, threads(2), keys.data(), 1000, plan, {12, 12}) == 200, "halved counts below 4");
  require(count_of(metadata(row_of(table, 750).data())) == 4 && count_of(metadata(row_of(table, 999).data())) == 5,
          "decayed counts");
  require(list_ids(table, threads(1), 0, 999, nullptr).front() == 700 &&
              list_ids(table, threads(1), 0, 999, held).size() == 1000,
          "who is left");
  require(
      list_removed(table, threads(1), 11, nullptr).size() == 200 && list_removed(table, threads(1), 0, held).empty(),
      "logged removals");
  compact_removals(table);
  require(list_removed(table, threads(1), 0, nullptr).size() == 700, "compacted removals");
  const auto since = removals_since(table, 11);
  require(since->size() == 200 && bytes_of(*since) == 200 * sizeof(Removal), "removals since a mark");
  table.release_snapshot(held);
  const Ranked cutoff = score_cutoff(table, 50);
  require(cutoff.rank == 5 && cutoff.key == 950, "the lowest score of the best 50");
}

// The oldest rows make room, and no row of the batch; too large a batch changes nothing.
void capacity_is_kept() {
  RowFormat format = format_of(4, false);
  format.capacity = 100;
  Table table(format, 3);
  std::vector<int64_t> keys(160);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i);
  const Bytes values(16 * keys.size(), 0);
  write_values(table, threads(2), keys.data(), 80, values.data(), {kHeaderBytes, 32}, true, {1, 1});
  write_values(table, threads(2), keys.data(), 10, values.data(), {kHeaderBytes, 32}, true, {2, 2});
  write_values(table, threads(2), keys.data() + 100, 50, values.data(), {kHeaderBytes, 32}, true, {3, 3});
  const auto ids = list_ids(table, threads(1), 0, 999, nullptr);
  require(ids.size() == 100 && ids[9] == 9 && ids[10] == 40 && table.evicted_count == 30, "the oldest rows made room");
  try {
    write_values(table, threads(2), keys.data(), 101, values.data(), {kHeaderBytes, 32}, true, {4, 4});
    require(false, "too large a batch was accepted");
  } catch (const CapacityExceeded& exceeded) {
    require(exceeded.distinct_count == 101 && list_ids(table, threads(1), 0, 999, nullptr) == ids,
            "too large a batch changed the table");
  }
}

// Rows that come and go for ever, by a capacity, by rounds and by name, leave a log of bounded length.
void logs_of_removals_stay_short() {
  RowFormat format = format_of(4, false);
  format.capacity = 100;
  Table table(format, 3);
  std::vector<int64_t> keys(200);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i);
  const Bytes values(16 * 100, 0);
  const EvictionPlan all{Policy::kTimestamp, 0, 0, 1 << 30, 1.0, 0.0, 0, ~uint64_t{0}, false, 0, 0};
  const auto limit = static_cast<size_t>(2 * 200 + kLoggedRemovals + 100);
  uint64_t version = 0, gone = 0;
  for (const char* const way : {"capacity", "rounds", "names"}) {
    for (int turn = 0; turn < 100; ++turn) {
      const int64_t* const some = keys.data() + turn % 2 * 100;
      ++version;
      write_values(table, threads(2), some, 100, values.data(), {kHeaderBytes, 32}, true, {version, version});
      ++version;
      if (way[0] == 'r') gone += evict_rows(table, threads(2), some, 100, all, {version, version}) == 100;
      if (way[0] == 'n') gone += remove_rows(table, threads(2), some, 100, {version, version}) == 100;
      require(table.removals->size() <= limit, way);
    }
  }
  require(gone == 200 && table.evicted_count == 20000, "all of them went");
  require(list_removed(table, threads(1), 0, nullptr).size() == 200 &&
              list_removed(table, threads(1), version - 1, nullptr).size() == 100,
          "removals that still count");
}

void halves_round_to_nearest_even() {
  for (uint32_t half = 0; half < 65536; ++half) {
    const auto bits = static_cast<uint16_t>(half);
    const float wide = from_float16(bits), wide_b = from_bfloat16(bits);
    require(wide != wide || to_float16(wide) == bits, "float16 there and back");
    require(wide_b != wide_b || to_bfloat16(wide_b) == bits, "bfloat16 there and back");
    const float next = from_float16(static_cast<uint16_t>(bits + 1));
    if ((half & 0x7FFF) >= 0x7BFF) continue;
    // Half-way between neighbours goes to the even one; just beside it to the nearer one.
    const float middle = wide + (next - wide) / 2;
    require(to_float16(middle) == ((half & 1) ? half + 1 : half), "float16 half-way");
    require(to_float16(std::nextafterf(middle, next)) == half + 1, "float16 above half-way");
  }
  require(to_float16(65520.0F) == 0x7C00 && to_float16(65519.0F) == 0x7BFF, "float16 at its end");
  require(to_bfloat16(float_of(0x3F808000)) == 0x3F80 && to_bfloat16(float_of(0x3F818000)) == 0x3F82,
          "bfloat16 half-way");
}

// A saved table of one bucket; `wrong` is a row that has another key, or -1.
Bytes saved_rows(const RowFormat& format, const std::vector<int64_t>& ids, int64_t wrong) {
  Bytes rows(ids.size() * static_cast<size_t>(format.row_bytes));
  for (size_t i = 0; i < ids.size(); ++i) {
    uint8_t* const row = rows.data() + i * static_cast<size_t>(format.row_bytes);
    format.open(ids[i] + (static_cast<int64_t>(i) == wrong), word_of(7, 3), {0, 0}, row, format.row_bytes);
  }
  return rows;
}

void tables_fill_in_one_step_or_not_at_all() {
  for (int round = 0; round < 60; ++round) {
    const RowFormat format = format_of(uniform(1, 40), uniform(0, 1) == 1);
    Table table(format, uniform(1, 9));
    const int64_t count = uniform(1, 3000), cut = uniform(0, count),
                  wrong = uniform(0, 3) == 0 ? uniform(0, count - 1) : -1;
    std::vector<int64_t> ids(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) ids[static_cast<size_t>(i)] = 3 * i - 1000;
    const Bytes rows = saved_rows(format, ids, wrong);
    const ReadRows read = [&](uint8_t* to, int64_t first, int64_t some) {
      std::copy_n(rows.begin() + first * format.row_bytes, some * format.row_bytes, to);
      return true;
    };
    const auto parallel = threads(uniform(1, 4));
    Filling filling(table, 5);
    bool fits = true;
    for (const auto& [begin, end] : {std::pair{int64_t{0}, cut}, std::pair{cut, count}}) {
      fits = fits && fill_rows(filling, parallel, read, ids.data() + begin, end - begin, begin, {{1, 0}, &count, 1});
    }
    require(fits == (wrong < 0), "what is wrong is found");
    require(table.rows.pool.size() == 0, "nothing is seen before it is published");
    if (!fits) continue;
    require(fill_rows(filling, parallel, read, ids.data(), 0, count, {{1, 0}, &count, 1}), "no rows fit anywhere");
    require(!fill_rows(filling, parallel, read, ids.data(), 1, 1, {{1, 0}, &count, 1}), "an id does not come twice");
    const bool moved_on = uniform(0, 1) == 1;
    Overlay* const before = moved_on ? table.take_snapshot(8) : nullptr;
    require(publish(filling, parallel, {moved_on ? 9U : 5U, 0}), "an empty table takes them");
    Bytes got(rows.size());
    read_rows(table, parallel, ids.data(), count, {0, format.row_bytes}, got.data(), nullptr);
    require(got == rows && count_rows(table, nullptr) == count, "rows that were filled");
    require(list_changed(table, parallel, moved_on ? 8 : 4, nullptr).size() == ids.size(), "they have changed");
    if (before != nullptr) require(count_rows(table, before) == 0, "a snapshot from before has none of them");
    Filling late(table, 6);
    require(!publish(late, parallel, {6, 0}), "a table with rows takes none");
  }
}

}  // namespace

void kvstore_algorithm_tests() {
  tables_fill_in_one_step_or_not_at_all();
  halves_round_to_nearest_even();
  sorting_matches_the_library();
  buckets_of_a_size_match_the_library();
  steps_do_not_depend_on_threads();
  no_optimizer_changes_nothing();
  evictions_remove_what_the_policy_condemns();
  capacity_is_kept();
  logs_of_removals_stay_short();
}
