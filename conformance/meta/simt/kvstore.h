// A table on a device beside the host's own, under any schedule: programs of verbs, and rows compared byte by byte.
#pragma once

// Logs of removals are compacted after a few.
#define FASTIMPL_LOWERED

#include <simt/prove.h>

#include <map>
#include <numeric>

#include "kvstore/changes.h"
#include "kvstore/device_table.h"
#include "kvstore/update.h"

namespace kvstore_proofs {

using namespace fastimpl;
using namespace fastimpl::kvstore;
using simt::Global;
using simt::prover::Region;
using simt::prover::Trial;

// Memory and launches of a proof. What the host reads must have been written.
class ProvenDevice {
 public:
  template <typename T>
  struct Array {
    Region* region = nullptr;
    Global<T> span;

    operator Global<T>() const { return span; }
    operator Global<const T>() const { return span; }
    T* data() const { return span.data(); }
    int64_t size() const { return span.size(); }
    Array part(int64_t begin, int64_t count) const { return {region, Global<T>(span.data() + begin, count)}; }
  };

  // When a number that was sent to the host arrives there: at one of the next questions, at the first, or never.
  enum class Arrival { kSometime, kAtOnce, kNever };
  class Later {
    friend ProvenDevice;
    int64_t value_ = 0, questions_ = 0;
  };

  explicit ProvenDevice(Trial& trial, Arrival arrival = Arrival::kSometime) : trial_(trial), arrival_(arrival) {}

  template <typename T>
  Array<T> make(int64_t count) {
    const auto made = trial_.uninitialized<T>("array", count);
    // Addresses differ from run to run.
    if (std::is_same_v<T, device::Slab>) trial_.may_differ(made);
    return {made.region(), made.global()};
  }
  template <typename T>
  Array<T> array(const std::vector<T>& values, int64_t shift = 0) {
    const auto made = trial_.array<T>("values", values, shift);
    return {made.region(), made.global()};
  }
  template <typename T>
  void clear(const Array<T>& there) {
    std::fill_n(reinterpret_cast<uint8_t*>(there.data()), there.size() * int64_t{sizeof(T)}, uint8_t{0});
    mark(there);
  }
  template <typename T>
  void upload(const std::vector<T>& values, const Array<T>& to) {
    std::copy(values.begin(), values.end(), to.data());
    mark(to);
  }
  template <typename T>
  void download(const Array<T>& from, T* to) {
    check(from, "a copy to the host");
    std::copy_n(from.data(), from.size(), to);
  }
  void send(const Array<int64_t>& from, Later& later) {
    check(from, "a number for the host");
    later.value_ = from.data()[0];
    later.questions_ = arrival_ == Arrival::kSometime ? trial_.random.below(3) : 0;
  }
  bool arrived(Later& later) { return arrival_ != Arrival::kNever && later.questions_-- == 0; }
  int64_t value_of(const Later& later) { return later.value_; }
  // Of a slab those rows are copied that there are.
  template <typename T>
  void copy(const Array<T>& from, const Array<T>& to) {
    std::copy_n(from.data(), from.size(), to.data());
    std::copy_n(written(from), from.size() * int64_t{sizeof(T)}, written(to));
  }
  void sort(Array<uint64_t>& words, Array<int64_t>& payload, int end_bit) {
    check(words, "a sort");
    check(payload, "a sort");
    std::vector<int64_t> order(static_cast<size_t>(words.size()));
    std::iota(order.begin(), order.end(), 0);
    const uint64_t mask = end_bit == 64 ? ~uint64_t{0} : (uint64_t{1} << end_bit) - 1;
    const auto word = [&](int64_t at) { return words.data()[at] & mask; };
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return word(a) < word(b); });
    const Array<uint64_t> sorted = make<uint64_t>(words.size());
    const Array<int64_t> moved = make<int64_t>(words.size());
    for (int64_t i = 0; i < words.size(); ++i) {
      sorted.data()[i] = words.data()[order[static_cast<size_t>(i)]];
      moved.data()[i] = payload.data()[order[static_cast<size_t>(i)]];
    }
    mark(sorted);
    mark(moved);
    words = sorted;
    payload = moved;
  }
  void sum_up(const Array<int64_t>& values, const Array<int64_t>& sums) {
    check(values, "running sums");
    std::partial_sum(values.data(), values.data() + values.size(), sums.data());
    mark(sums);
  }
  template <typename T>
  Array<T> keep(int64_t count) {
    return make<T>(count);
  }
  Array<uint8_t> keep_on_host(int64_t bytes) { return make<uint8_t>(bytes); }
  // Few threads, so that groups of lanes go from thing to thing.
  template <typename Kernel>
  void launch(const Kernel& kernel, int64_t threads, int64_t shared_bytes = 0) {
    trial_.expect(threads > 0, "a launch has something to do");
    const int64_t most = (threads + 31) / 32,
                  warps = std::min<int64_t>(Kernel::kThreads / 32, trial_.random.between(1, 2)),
                  blocks = std::min<int64_t>(most, trial_.random.between(1, 2));
    trial_.launch(kernel, {blocks, 32 * warps, shared_bytes * warps});
  }

  Trial& trial() { return trial_; }

 private:
  template <typename T>
  static auto written(const Array<T>& there) {
    const auto* const begin = reinterpret_cast<const uint8_t*>(there.data());
    return there.region->is_written.begin() + (begin - there.region->data);
  }
  template <typename T>
  static void mark(const Array<T>& there) {
    std::fill_n(written(there), there.size() * int64_t{sizeof(T)}, uint8_t{1});
  }
  template <typename T>
  void check(const Array<T>& there, const char* what) {
    const auto first = written(there);
    for (int64_t i = 0; i < there.size() * int64_t{sizeof(T)}; ++i)
      trial_.expect(first[i] != 0, std::string(what) + " finds what no kernel has written");
  }

  Trial& trial_;
  Arrival arrival_;
};

inline const Parallel kSerial{1, [](int64_t count, const std::function<void(int64_t)>& work) {
                                for (int64_t i = 0; i < count; ++i) work(i);
                              }};

constexpr Hyper kHyper{0.1F, 1e-3F, 0.9F, 0.1F, 0.99F, 0.01F, 0.2F, 0.7F};

// Both tables, and a program of verbs on them.
class Twins {
 public:
  Twins(Trial& trial, Optimizer optimizer, int64_t rows_of_bucket, int64_t capacity = -1, int64_t cache_rows = 0)
      : trial_(trial),
        proven_(trial),
        format_(any_format(trial, optimizer, capacity, cache_rows)),
        host_(format_, 1),
        device_(proven_, format_, 1 << trial.random.between(8, 10), rows_of_bucket) {}

  const RowFormat& format() const { return format_; }
  device::DeviceTable<ProvenDevice>& device() { return device_; }
  ProvenDevice& proven() { return proven_; }

  std::vector<int64_t> any_ids(int64_t most, int64_t distinct) {
    std::vector<int64_t> ids(static_cast<size_t>(trial_.random.between(1, most)));
    for (int64_t& id : ids) id = id_of(trial_.random.below(distinct));
    return ids;
  }
  // As many ids as there are places, so that entries are turned away again and again.
  std::vector<int64_t> all_ids(int64_t count) {
    std::vector<int64_t> ids;
    for (int64_t number = 0; number < count; ++number) {
      const auto at = static_cast<std::ptrdiff_t>(trial_.random.below(number + 1));
      ids.insert(ids.begin() + at, id_of(number));
    }
    return ids;
  }
  static int64_t id_of(int64_t number) {
    if (number == 0) return INT64_MIN;
    if (number == 1) return INT64_MAX;
    const auto place = static_cast<size_t>(number - 2);
    if (place < alike().size()) return alike()[place];
    return number % 2 == 0 ? number : -number;
  }
  // Ids of which two at a time have one digest, and one first bucket in every small index.
  static const std::vector<int64_t>& alike() {
    static const std::vector<int64_t> found = [] {
      std::map<uint64_t, int64_t> seen;
      std::vector<int64_t> pairs;
      for (int64_t id = 5000; pairs.size() < 8; ++id) {
        const uint64_t hash = hash_key(id), seen_as = (hash & 0xFFFF) | hash >> 60 << 16;
        const auto [at, is_new] = seen.emplace(seen_as, id);
        if (is_new) continue;
        pairs.push_back(at->second);
        pairs.push_back(id);
      }
      return pairs;
    }();
    return found;
  }

  std::vector<float> any_floats(int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = static_cast<float>(trial_.random.below(1 << 24)) / (1 << 22) - 2;
    return values;
  }

  void write(const std::vector<int64_t>& ids) {
    const bool is_state = format_.momentum1.count > 0 && trial_.random.below(3) == 0;
    const StateSlot slot = is_state ? format_.momentum1 : StateSlot{kHeaderBytes, format_.dim, format_.weight_type};
    const Range range{slot.offset_bytes, slot.offset_bytes + slot.count * float_bytes(slot.type)};
    const int64_t count = static_cast<int64_t>(ids.size()), width = range.end - range.begin;
    std::vector<uint8_t> values(static_cast<size_t>(count * width));
    const auto numbers = any_floats(count * slot.count);
    narrow(slot.type, numbers.data(), values.data(), count * slot.count);
    const bool visits = !is_state;
    const Change change = next();
    write_values(host_, kSerial, ids.data(), count, values.data(), range, visits, change);
    device_.write(proven_.array(ids), shifted(values, slot.type), range, visits, change.now, change.version);
  }

  void write_rows(const std::vector<int64_t>& ids) {
    const int64_t count = static_cast<int64_t>(ids.size()), width = format_.row_bytes;
    std::vector<uint8_t> values(static_cast<size_t>(count * width));
    for (uint8_t& value : values) value = static_cast<uint8_t>(trial_.random.below(120));
    for (int64_t i = 0; i < count; ++i) std::memcpy(values.data() + i * width, &ids[static_cast<size_t>(i)], 8);
    const Change change = next();
    write_whole(host_, kSerial, ids.data(), count, values.data(), change);
    device_.write_whole(proven_.array(ids), shifted(values, Float::kFloat16), change.version);
  }

  void write_words(const std::vector<int64_t>& ids) {
    std::vector<int64_t> words(ids.size());
    for (int64_t& word : words) word = static_cast<int64_t>(trial_.random.next());
    const uint64_t mask = trial_.random.below(2) == 0 ? (uint64_t{1} << 63) - 1 : uint64_t{kCountMax} << 32;
    const Change change = next();
    const auto count = static_cast<int64_t>(ids.size());
    write_metadata(host_, kSerial, ids.data(), count, words.data(), mask, change);
    device_.write_metadata(proven_.array(ids), proven_.array(words), mask, change.version);
  }

  void update(const std::vector<int64_t>& ids) {
    const auto count = static_cast<int64_t>(ids.size());
    const auto grads = any_floats(count * format_.dim);
    const Change change = next();
    update_rows(host_, kSerial, ids.data(), count, grads.data(), kHyper, change);
    device_.update(proven_.array(ids), proven_.array(grads), kHyper, change.now, change.version);
  }

  void prefetch(const std::vector<int64_t>& ids) { device_.prefetch(proven_.array(ids)); }

  void remove(const std::vector<int64_t>& ids) {
    const Change change = next();
    const int64_t gone = remove_rows(host_, kSerial, ids.data(), static_cast<int64_t>(ids.size()), change);
    trial_.expect(device_.remove(proven_.array(ids), change.version) == gone, "as many rows go");
  }

  void evict() {
    const auto policy = static_cast<Policy>(trial_.random.below(6));
    EvictionPlan plan{policy,
                      trial_.random.between(0, 3),
                      trial_.random.between(0, 3),
                      trial_.random.between(0, 9),
                      trial_.random.below(2) == 0 ? 1.0 : 0.5,
                      3.0,
                      static_cast<int64_t>(now_),
                      version_ - static_cast<uint64_t>(trial_.random.below(2)),
                      false,
                      0,
                      0};
    const int64_t keep_count = trial_.random.between(1, 6);
    if (policy == Policy::kScore && keep_count < device_.size()) {
      const Ranked cutoff = score_cutoff(host_, keep_count);
      const auto found = device_.score_cutoff(keep_count);
      trial_.expect(found.first == cutoff.rank && found.second == cutoff.key, "the last that is kept");
      plan.has_cutoff = true;
      plan.cutoff_score = cutoff.rank;
      plan.cutoff_key = cutoff.key;
    }
    auto ids = device_.list(INT64_MIN, INT64_MAX, 0);
    ids.push_back(id_of(1000));
    const Change change = next();
    const int64_t gone = evict_rows(host_, kSerial, ids.data(), static_cast<int64_t>(ids.size()), plan, change);
    trial_.expect(device_.evict(proven_.array(ids), plan, change.version) == gone, "as many rows are evicted");
  }

  void clear() {
    const Ids ids = list_ids(host_, kSerial, INT64_MIN, INT64_MAX, nullptr);
    const Change change = next();
    remove_rows(host_, kSerial, ids.data(), static_cast<int64_t>(ids.size()), change);
    device_.clear(change.version);
  }

  // Of both tables: a moment that begins, and one that ends.
  void begin_moment() { moments_.push_back({host_.take_snapshot(version_), device_.moment(version_)}); }
  void end_moment() {
    if (moments_.empty()) return;
    const auto gone = moments_.begin() + static_cast<std::ptrdiff_t>(trial_.random.below(moments_.size()));
    host_.release_snapshot(gone->first);
    moments_.erase(gone);
  }

  // Every row, byte by byte, and some ranges of rows; of ids that are there and of some that are not. Of now, and of
  // all moments.
  void compare() {
    compare(nullptr, nullptr);
    trial_.expect(device_.evicted_count() == host_.evicted_count, "evicted");
    for (const auto& [then, moment] : moments_) compare(then, moment.get());
  }

 private:
  static RowFormat any_format(Trial& trial, Optimizer optimizer, int64_t capacity, int64_t cache_rows) {
    static const int64_t dims[] = {1, 3, 4, 8, 11, 36};
    RowFormat format{};
    format.dim = dims[trial.random.below(6)];
    format.weight_type = static_cast<Float>(trial.random.below(3));
    format.optimizer = optimizer;
    int64_t end = kHeaderBytes + (format.dim + 3) / 4 * 4 * float_bytes(format.weight_type);
    const auto slot = [&](int64_t count) {
      const auto type = count == 1 || trial.random.below(3) > 0 ? Float::kFloat32 : Float::kBFloat16;
      end = (end + 3) / 4 * 4;
      const StateSlot made{end, count, type};
      if (count > 0) end += count * float_bytes(type);
      return made;
    };
    format.momentum1 = slot(momentum1_width(optimizer, format.dim));
    format.momentum2 = slot(momentum2_width(optimizer, format.dim));
    format.row_bytes = (end + 7) / 8 * 8;
    format.uniform = trial.random.below(4) > 0;
    format.low = -1.0F;
    format.span = 2.0F;
    format.table_word = 12345;
    format.counts_visits = trial.random.below(2) == 0;
    format.logs_removals = true;
    format.capacity = capacity;
    format.is_on_host = cache_rows > 0;
    format.cache_rows = cache_rows;
    format.ranks_by_count = trial.random.below(2) == 0;
    return format;
  }

  Change next() { return {++version_, now_ += trial_.random.below(3)}; }

  // At any address that the elements may have.
  ProvenDevice::Array<uint8_t> shifted(const std::vector<uint8_t>& values, Float type) {
    return proven_.array(values, trial_.random.below(2) == 0 ? 0 : float_bytes(type));
  }

  using Moment = device::DeviceTable<ProvenDevice>::Moment;

  void compare(const Overlay* then, Moment* moment) {
    const Ids expected = list_ids(host_, kSerial, INT64_MIN, INT64_MAX, then);
    trial_.expect_same(device_.list(INT64_MIN, INT64_MAX, 0, moment),
                       std::vector<int64_t>(expected.begin(), expected.end()), "ids");
    const int64_t row_count = moment == nullptr ? device_.size() : device_.size(*moment);
    trial_.expect(row_count == static_cast<int64_t>(expected.size()), "the count");
    std::vector<int64_t> ids(expected.begin(), expected.end());
    for (int64_t i = 0; i < 3; ++i) ids.push_back(id_of(trial_.random.below(2000)));
    // Some that are not there, perhaps, where another of their digest is.
    for (int64_t i = 0; i < 3; ++i) ids.push_back(id_of(2 + trial_.random.below(static_cast<int64_t>(alike().size()))));
    const StateSlot weight{kHeaderBytes, format_.dim, format_.weight_type};
    compare_range(ids, {0, format_.row_bytes}, then, moment);
    compare_range(ids, {weight.offset_bytes, format_.weight_end()}, then, moment);
    std::vector<uint8_t> is_there(ids.size());
    contains_rows(host_, kSerial, ids.data(), static_cast<int64_t>(ids.size()),
                  reinterpret_cast<bool*>(is_there.data()), then);
    const auto told = trial_.uninitialized<uint8_t>("found", static_cast<int64_t>(ids.size()));
    device_.contains(proven_.array(ids), told.global(), moment);
    trial_.expect_same(told.values(), is_there, "found");
    const uint64_t since = trial_.random.below(static_cast<int64_t>(version_) + 1);
    const Ids changed = list_changed(host_, kSerial, since, then), removed = list_removed(host_, kSerial, since, then);
    trial_.expect_same(device_.list(INT64_MIN, INT64_MAX, since, moment),
                       std::vector<int64_t>(changed.begin(), changed.end()), "changed");
    trial_.expect_same(device_.list_removed(since, moment), std::vector<int64_t>(removed.begin(), removed.end()),
                       "removed");
  }

  void compare_range(const std::vector<int64_t>& ids, Range range, const Overlay* then, Moment* moment) {
    const auto count = static_cast<int64_t>(ids.size()), width = range.end - range.begin;
    std::vector<uint8_t> expected(static_cast<size_t>(count * width));
    read_rows(host_, kSerial, ids.data(), count, range, expected.data(), then);
    const auto made = trial_.uninitialized<uint8_t>("out", count * width, 2 * trial_.random.below(3));
    device_.read(proven_.array(ids), range, made.global(), moment);
    trial_.expect_same(made.values(), expected, "rows");
  }

  Trial& trial_;
  ProvenDevice proven_;
  const RowFormat format_;
  Table host_;
  device::DeviceTable<ProvenDevice> device_;
  std::vector<std::pair<const Overlay*, std::shared_ptr<Moment>>> moments_;
  uint64_t version_ = 0, now_ = 1;
};

inline void prove_index(Trial& trial) {
  // Full buckets: entries find no room in their first two, and few free ones are left to look for.
  const bool is_full = trial.random.below(2) == 0;
  Twins twins(trial, Optimizer::kNone, is_full ? 16 : 8);
  const int64_t count = int64_t{16} << trial.random.between(1, 2);
  twins.write(is_full ? twins.all_ids(count) : twins.any_ids(count, count));
  twins.remove(twins.any_ids(20, count));
  twins.write(twins.any_ids(count, count));
  twins.compare();
}

// What found no room in two turns, in an index of four buckets of which all but the last that is looked at are full.
inline void prove_rest(Trial& trial) {
  ProvenDevice proven(trial);
  const auto digests = proven.make<uint16_t>(64);
  const auto ids = proven.make<int64_t>(64);
  const auto slots = proven.make<uint32_t>(64);
  proven.clear(digests);
  proven.clear(ids);
  proven.clear(slots);
  const int64_t id = 100 + trial.random.below(1000);
  // As device::Index::bucket_of has it.
  const uint64_t hash = hash_key(id), first = hash >> 62, second = first + (hash >> 16 | 1);
  std::vector<uint32_t> full(4, device::kAllWays);
  full[first] |= device::kTurnedAway;
  full[second & 3] |= device::kTurnedAway;
  full[((second + 3) & 3) == first ? (second + 2) & 3 : (second + 3) & 3] = 0;
  const device::Index index{digests, ids, slots, proven.array(full), 2};
  const auto wanted = proven.array<int64_t>({id}), its_slot = proven.array<int64_t>({7});
  proven.launch(device::InsertRest{index, wanted, its_slot}, 1);
  const auto entry = proven.make<int64_t>(1), slot = proven.make<int64_t>(1);
  proven.launch(device::FindIds{index, wanted, entry, slot}, 1);
  int64_t found = 0;
  proven.download(slot, &found);
  trial.expect(found == 7, "what was placed last is found");
}

// An id in its second bucket. In the first, which turned it away, one other id has its digest: that is no guess.
inline void prove_guess(Trial& trial) {
  ProvenDevice proven(trial);
  const int64_t other = Twins::alike()[0], id = Twins::alike()[1];
  // As device::Index::bucket_of has it.
  const uint64_t hash = hash_key(id), first = hash >> 62, second = (first + (hash >> 16 | 1)) & 3;
  std::vector<uint16_t> digests(64);
  std::vector<int64_t> ids(64);
  std::vector<uint32_t> slots(64), states(4);
  const auto put = [&](uint64_t bucket, int64_t key, uint32_t slot) {
    const auto way = static_cast<uint64_t>(trial.random.below(device::kWays));
    const auto entry = static_cast<size_t>(bucket * device::kWays + way);
    digests[entry] = device::Index::digest_of(hash);
    ids[entry] = key;
    slots[entry] = slot;
    states[static_cast<size_t>(bucket)] |= 1U << way;
  };
  put(first, other, 3);
  states[static_cast<size_t>(first)] |= device::kTurnedAway;
  put(second, id, 7);
  const device::Index index{proven.array(digests), proven.array(ids), proven.array(slots), proven.array(states), 2};
  const auto wanted = proven.array<int64_t>({id}), slot = proven.make<int64_t>(1);
  proven.launch(device::FindIds{index, wanted, {}, slot, {}, true}, 1);
  int64_t found = 0;
  proven.download(slot, &found);
  trial.expect(found == 7, "what is in its second bucket is found");
}

inline void prove_rows(Trial& trial) {
  Twins twins(trial, trial.random.below(2) == 0 ? Optimizer::kPartialRowwiseAdam : Optimizer::kNone, 8);
  twins.write(twins.any_ids(12, 10));
  twins.write_rows(twins.any_ids(12, 10));
  twins.write_words(twins.any_ids(5, 12));
  twins.write(twins.any_ids(4, 20));
  twins.compare();
}

template <Optimizer kOptimizer>
void prove_updates(Trial& trial) {
  Twins twins(trial, kOptimizer, 8);
  twins.write(twins.any_ids(6, 6));
  twins.update(twins.any_ids(10, 4));
  twins.update(twins.any_ids(4, 10));
  twins.compare();
}

inline void prove_removals(Trial& trial) {
  const bool is_full = trial.random.below(2) == 0;
  Twins twins(trial, Optimizer::kNone, 8, is_full ? 9 : -1);
  for (int64_t i = 0; i < 3; ++i) {
    twins.write(twins.any_ids(is_full ? 9 : 14, 24));
    if (i == 1 && is_full) {
      // Who makes room has any timestamp and count, also such as need their highest bit.
      twins.write_words(twins.all_ids(24));
      twins.write(twins.any_ids(9, 24));
    }
    if (i == 1) twins.evict();
    if (i > 0) twins.remove(twins.any_ids(8, 24));
  }
  twins.compare();
}

// Slots, ids and rows do not depend on when the host learns how many rows there are.
inline void prove_growth(Trial& trial) {
  using Table = device::DeviceTable<ProvenDevice>;
  const RowFormat format = Twins(trial, Optimizer::kNone, 2).format();
  using Arrival = ProvenDevice::Arrival;
  ProvenDevice first(trial, Arrival::kAtOnce),
      second(trial, trial.random.below(2) == 0 ? Arrival::kNever : Arrival::kSometime);
  ProvenDevice* const devices[] = {&first, &second};
  std::vector<std::unique_ptr<Table>> tables;
  for (ProvenDevice* device : devices) tables.push_back(std::make_unique<Table>(*device, format, 256, 2));
  const Range range{kHeaderBytes, format.weight_end()};
  const auto version = [](int64_t step) { return static_cast<uint64_t>(step) + 1; };
  for (int64_t step = 0; step < 4; ++step) {
    std::vector<int64_t> ids(static_cast<size_t>(trial.random.between(1, 6)));
    for (int64_t& id : ids) id = Twins::id_of(trial.random.below(14));
    const std::vector<uint8_t> values(ids.size() * static_cast<size_t>(range.end - range.begin),
                                      static_cast<uint8_t>(step));
    const bool is_removal = step == 2 && trial.random.below(2) == 0;
    for (size_t i = 0; i < tables.size(); ++i) {
      const auto keys = devices[i]->array(ids);
      if (is_removal) {
        tables[i]->remove(keys, version(step));
      } else {
        tables[i]->write(keys, devices[i]->array(values), range, true, 1, version(step));
      }
    }
  }
  const std::vector<int64_t> expected = tables[0]->list_slots(INT64_MIN, INT64_MAX, 0);
  const auto rows_of = [&](Table& table, ProvenDevice& device) {
    const auto count = static_cast<int64_t>(expected.size()) * format.row_bytes;
    const auto out = trial.uninitialized<uint8_t>("out", count);
    table.read(device.array(expected), {0, format.row_bytes}, out.global());
    return out.values();
  };
  for (size_t i = 1; i < tables.size(); ++i) {
    trial.expect_same(tables[i]->list_slots(INT64_MIN, INT64_MAX, 0), expected, "keys in the order of slots");
    trial.expect_same(rows_of(*tables[i], *devices[i]), rows_of(*tables[0], first), "rows");
    trial.expect(tables[i]->size() == static_cast<int64_t>(expected.size()), "the count");
  }
}

// Rows in host memory behind a cache, through changes of every kind.
inline void prove_cache(Trial& trial) {
  Twins twins(trial, Optimizer::kSgd, 8, -1, 16 * trial.random.between(1, 2));
  const auto some = [&](int64_t most) { return twins.any_ids(most, 40); };
  // Rows of one change, which are as they are in host memory, and some of which move.
  twins.write(twins.all_ids(trial.random.between(20, 30)));
  twins.prefetch(some(12));
  if (trial.random.below(2) == 0) twins.begin_moment();
  for (int64_t i = 0; i < 3; ++i) {
    if (trial.random.below(2) == 0) twins.remove(some(trial.random.below(3) == 0 ? 60 : 6));
    if (trial.random.below(2) == 0) twins.update(some(5));
    twins.prefetch(some(12));
    twins.prefetch(some(16));
    if (trial.random.below(2) == 0) twins.write(some(8));
    if (trial.random.below(3) == 0) twins.write_rows(some(3));
  }
  twins.prefetch(some(16));
  twins.compare();
}

// A row that moves leaves its line behind, as old as the line that it comes to: both go when others need lines.
inline void prove_left_lines(Trial& trial) {
  Twins twins(trial, Optimizer::kNone, 8, -1, 16);
  twins.write(twins.all_ids(48));
  const std::vector<int64_t> keys = twins.device().list_slots(INT64_MIN, INT64_MAX, 0);
  const auto some = [&](int64_t begin, int64_t count) {
    return std::vector<int64_t>(keys.begin() + begin, keys.begin() + begin + count);
  };
  const int64_t gone = trial.random.below(40);
  std::vector<int64_t> batch = some(40, 8);
  batch.push_back(keys[static_cast<size_t>(gone)]);
  twins.prefetch(batch);
  twins.remove(some(gone, 1));
  for (int64_t begin = 0; begin < 40; begin += 10) {
    twins.prefetch(some(begin, 10));
    twins.compare();
  }
}

// Which rows have lines, beside a plain model: of each set who is there, since when, and who makes room.
inline void prove_lines(Trial& trial) {
  struct Line {
    int64_t slot = -1, epoch = 0;
  };
  const int64_t set_count = trial.random.between(1, 2), row_count = 18 * set_count + trial.random.below(8);
  Twins twins(trial, Optimizer::kNone, 8, -1, 16 * set_count);
  twins.write(twins.all_ids(row_count));
  const std::vector<int64_t> keys = twins.device().list_slots(INT64_MIN, INT64_MAX, 0);
  std::vector<std::vector<Line>> sets(static_cast<size_t>(set_count), std::vector<Line>(16));
  for (int64_t epoch = 1; epoch <= 5; ++epoch) {
    const std::vector<int64_t> ids = twins.any_ids(12 * set_count, row_count + 2);
    twins.prefetch(ids);
    // In the order of hashes.
    std::map<uint64_t, int64_t> slots;
    for (const int64_t id : ids) {
      const auto found = std::find(keys.begin(), keys.end(), id);
      if (found != keys.end()) slots[hash_key(id)] = found - keys.begin();
    }
    std::vector<int64_t> missing;
    for (const auto& [hash, slot] : slots) {
      auto& set = sets[static_cast<size_t>(slot % set_count)];
      const auto line = std::find_if(set.begin(), set.end(), [slot = slot](const Line& l) { return l.slot == slot; });
      if (line == set.end()) {
        missing.push_back(slot);
      } else {
        line->epoch = epoch;
      }
    }
    for (const int64_t slot : missing) {
      Line* chosen = nullptr;
      const auto rank = [&](const Line& line) {
        const int64_t key = line.slot < 0 ? INT64_MIN : keys[static_cast<size_t>(line.slot)];
        return std::make_pair(line.slot < 0 ? -1 : line.epoch, key);
      };
      for (Line& line : sets[static_cast<size_t>(slot % set_count)]) {
        const bool is_needed = line.slot >= 0 && line.epoch >= epoch - 1;
        if (!is_needed && (chosen == nullptr || rank(line) < rank(*chosen))) chosen = &line;
      }
      if (chosen != nullptr) *chosen = {slot, epoch};
    }
    std::vector<uint32_t> expected(twins.device().lines().size());
    for (size_t set = 0; set < sets.size(); ++set) {
      for (size_t way = 0; way < 16; ++way) {
        const int64_t slot = sets[set][way].slot;
        if (slot >= 0) expected[static_cast<size_t>(slot)] = static_cast<uint32_t>(16 * set + way + 1);
      }
    }
    trial.expect_same(twins.device().lines(), expected, "lines");
  }
}

// Rows that come and go for ever leave a log that is no longer than its limit.
inline void prove_log(Trial& trial) {
  Twins twins(trial, Optimizer::kNone, 8);
  for (int64_t i = 0; i < 12; ++i) {
    twins.write({1, 2, i});
    twins.remove({1, 2});
  }
  constexpr int64_t kLimit = 2 * 2 + kLoggedRemovals + 2;
  trial.expect(twins.device().logged_count() <= static_cast<size_t>(kLimit), "removals that are logged");
  twins.compare();
}

// What was, through changes of every kind, and through other moments that begin and end.
inline void prove_moments(Trial& trial) {
  const bool is_full = trial.random.below(3) == 0;
  Twins twins(trial, Optimizer::kSgd, 8, is_full ? 9 : -1);
  const auto some = [&](int64_t most) { return twins.any_ids(most, 16); };
  twins.write(some(9));
  for (int64_t i = 0; i < 4; ++i) {
    if (i == 0 || trial.random.below(3) == 0) twins.begin_moment();
    if (i > 1 && trial.random.below(4) == 0) twins.end_moment();
    switch (trial.random.below(8)) {
      case 0: twins.write_rows(some(6)); break;
      case 1: twins.write_words(some(6)); break;
      case 2: twins.update(some(6)); break;
      case 3: twins.remove(some(6)); break;
      case 4: twins.evict(); break;
      case 5: twins.clear(); break;
      default: twins.write(some(9));
    }
  }
  twins.compare();
}

}  // namespace kvstore_proofs
