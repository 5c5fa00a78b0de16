// A table whose rows and index lie on a device: what is launched, in which order. `Device` brings memory, copies, two
// algorithms (a stable sort and running sums) and launches; the verbs are the same on a GPU and in a proof.
//
//   Array<T> make<T>(count), keep<T>(count): memory, not cleared, for a call or for long; freed with its last Array
//   keep_on_host(bytes): the same for long, in host memory that the device reaches
//   clear(span), copy(from, to), upload(host, to), download(from, host), which waits
//   Later; send(from, later), arrived(later), value_of(later): a number that is copied to the host meanwhile
//   sort(words, payload, end_bit): stable; both are other arrays afterwards
//   sum_up(values, sums): running sums
//   launch(kernel, threads, shared_bytes): as many threads as are useful; shared memory for each warp
//
// A slot is the number of a row; rows are dense, so that a scan meets rows only, and the places of rows that go are
// taken by the last rows. Every change first makes room and lists what it will do, and then does it: where memory runs
// out (std::bad_alloc, of every kind of memory) nothing has changed.
//
// How many rows there are is counted on the device, and writes work on lists of which the host knows only how long they
// may be: it waits for nothing. What it keeps is a bound, `most_rows_`: a count that it once knew, and every id of the
// batches since. Room is made for the bound. A truer count is copied to the host behind each batch, one copy at a time,
// and taken when it has arrived; nobody waits for it.
//
// When it arrives depends on time, and so do the sizes of index and slabs, and which entry of the index an id has. What
// a table holds does not: the slot of a new row is the number of rows that the device counts, plus its rank among the
// new ids in the order of their hashes; entries are found by id; and what removes or moves rows asks for the exact
// count first. So slots, ids, bytes and the order of lists are a pure function of the operations.
//
// A moment keeps the rows that change after it, when they change, in a table of its own: those whose last change is not
// after it. Other rows it reads where they are. Where memory for what it keeps runs out, the change fails.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

#include "kvstore/device_cache.h"
#include "kvstore/device_lists.h"
#include "kvstore/device_moment.h"
#include "kvstore/removals.h"

namespace fastimpl::kvstore::device {

// More distinct ids than a table may hold.
struct TooManyIds : std::runtime_error {
  explicit TooManyIds(int64_t count_)
      : std::runtime_error("more distinct ids than the table may hold"), count(count_) {}
  int64_t count;
};

constexpr int64_t kIdMin = std::numeric_limits<int64_t>::min(), kIdMax = std::numeric_limits<int64_t>::max();
constexpr int64_t kRowsOfBucket = 8;  // On average at most: half of the entries stay free.
constexpr int64_t kSlabBytes = int64_t{16} << 20;

template <typename Device>
class DeviceTable {
 public:
  template <typename T>
  using Array = typename Device::template Array<T>;
  using Longs = Array<int64_t>;

  // What there was when so many changes had been made. It lives no longer than the table.
  struct Moment {
    uint64_t version;
    DeviceTable kept;                          // Rows that changed since.
    Longs row_count;                           // One number, on the device.
    std::shared_ptr<const Removals> removals;  // The first `removal_count` of them.
    size_t removal_count;
  };

  // `slab_bytes` and `rows_of_bucket` are for proofs, where tables are small. It never has more than `rows_max` rows.
  DeviceTable(Device& device, const RowFormat& format, int64_t slab_bytes = kSlabBytes,
              int64_t rows_of_bucket = kRowsOfBucket, int64_t rows_max = std::numeric_limits<int64_t>::max())
      : device_(device),
        format_(format),
        rows_max_(rows_max),
        stride_((format.row_bytes + 8 * kVersionWords + 15) / 16 * 16),
        rows_of_bucket_(rows_of_bucket),
        cache_(device, stride_, format.is_on_host ? format.cache_rows : 0) {
    while (stride_ << (shift_ + 1) <= slab_bytes) ++shift_;
    index_ = make_index(0);
    row_counts_ = device_.template keep<int64_t>(kRowCounts);
    device_.clear(row_counts_);
  }

  const RowFormat& format() const { return format_; }
  // How many rows there are. Asks the device where the host does not know.
  int64_t size() {
    if (!is_exact_) set_row_count(host(row_counts_, kRowsNow, 1)[0]);
    return most_rows_;
  }
  int64_t evicted_count() const { return evicted_count_; }
  // With what moments keep.
  int64_t held_bytes() {
    int64_t bytes = static_cast<int64_t>(slabs_.size()) * (stride_ << shift_);
    for (const auto& moment : living()) bytes += moment->kept.held_bytes();
    return bytes;
  }
  int64_t map_bytes() {
    int64_t bytes = bucket_count() * (kWays * (2 + 8 + 4) + 4);
    for (const auto& moment : living()) bytes += moment->kept.map_bytes();
    return bytes;
  }

  int64_t size(const Moment& moment) { return host(moment.row_count)[0]; }

  // Bytes [range) of each id's row into `out`, as it is or as it was.
  void read(Global<const int64_t> ids, Range range, Global<uint8_t> out, Moment* moment = nullptr) {
    if (ids.size() == 0 || range.end == range.begin) return;
    // Keys of rows in host memory are far away.
    const bool guesses = moment == nullptr && !format_.is_on_host;
    const Longs slots = slots_of(ids, moment, guesses);
    read_found(guesses ? ids : Global<const int64_t>(), slots, range, out);
    const ReadInitial kernel{initial(), ids, slots, out, range.begin, range.end - range.begin};
    device_.launch(kernel, ids.size());
    if (moment != nullptr) moment->kept.read_found({}, moment->kept.slots_of(ids, nullptr), range, out);
  }

  // 1 for each id that has a row, else 0.
  void contains(Global<const int64_t> ids, Global<uint8_t> is_there, Moment* moment = nullptr) {
    if (ids.size() == 0) return;
    device_.launch(TellFound{slots_of(ids, moment), is_there, false}, ids.size());
    if (moment != nullptr) device_.launch(TellFound{moment->kept.slots_of(ids, nullptr), is_there, true}, ids.size());
  }

  // Keys of rows in [first, last] that changed after `since`, ascending, on the host.
  std::vector<int64_t> list(int64_t first, int64_t last, uint64_t since, Moment* moment = nullptr) {
    std::vector<int64_t> result = list_slots(first, last, since, moment == nullptr ? kEver : moment->version);
    if (moment != nullptr) {
      const std::vector<int64_t> kept = moment->kept.list_slots(first, last, since);
      result.insert(result.end(), kept.begin(), kept.end());
    }
    std::sort(result.begin(), result.end());
    // A row that was kept for a change that failed is listed twice.
    result.erase(std::unique(result.begin(), result.end()), result.end());
    return result;
  }

  // The same in the order of slots, of rows that did not change after `until`.
  std::vector<int64_t> list_slots(int64_t first, int64_t last, uint64_t since, uint64_t until = kEver) {
    const int64_t row_count = size();
    if (row_count == 0) return {};
    const Longs keys = device_.template make<int64_t>(row_count), marks = device_.template make<int64_t>(row_count);
    device_.launch(ListRows{rows(), first, last, since, until, keys, marks}, row_count);
    return host(picked(keys, marks));
  }

  void write(Global<const int64_t> ids, Global<const uint8_t> values, Range range, bool visits, uint64_t now,
             uint64_t version) {
    if (ids.size() == 0) return;
    const Batch batch = open(ids);
    const int64_t width = range.end - range.begin;
    const Visit visit{now, version, row_counts_, format_.counts_visits, visits};
    with_pieces(range.begin | width | address_of(values), [&](auto bytes) {
      const WriteValues<decltype(bytes)::value> kernel{rows(), initial(),   batch.runs(), batch.found.slots,
                                                       values, range.begin, width,        visit};
      device_.launch(kernel, batch.most() * kWays);
    });
    shrink(batch.excess, version);
  }

  void write_whole(Global<const int64_t> ids, Global<const uint8_t> values, uint64_t version) {
    if (ids.size() == 0) return;
    const Batch batch = open(ids);
    with_pieces(format_.row_bytes | address_of(values), [&](auto bytes) {
      const WriteWhole<decltype(bytes)::value> kernel{
          rows(), batch.runs(), batch.found.slots, values, format_.row_bytes, padding(), version};
      device_.launch(kernel, batch.most() * kWays);
    });
    shrink(batch.excess, version);
  }

  void write_metadata(Global<const int64_t> ids, Global<const int64_t> words, uint64_t mask, uint64_t version) {
    if (ids.size() == 0) return;
    const Batch batch = runs_of(ids);
    keep(batch.distinct, batch.found.slots, batch.count());
    device_.launch(WriteMetadata{rows(), batch.runs(), batch.found.slots, words, mask, version}, batch.most());
  }

  void update(Global<const int64_t> ids, Global<const float> grads, const Hyper& hyper, uint64_t now,
              uint64_t version) {
    if (ids.size() == 0) return;
    const Batch batch = open(ids);
    const Visit visit{now, version, row_counts_, format_.counts_visits, true};
    const StatePlaces places{format_.dim, format_.weight_type, format_.momentum1, format_.momentum2};
    with_formula(format_.optimizer, [&](auto formula) {
      using Kernel = UpdateRows<decltype(formula)::value>;
      const Kernel kernel{rows(), initial(), places, batch.runs(), batch.found.slots, grads, hyper, visit};
      device_.launch(kernel, batch.most() * simt::kLanes, Kernel::shared_bytes(format_.dim));
    });
    shrink(batch.excess, version);
  }

  // How many rows there were.
  int64_t remove(Global<const int64_t> ids, uint64_t version) {
    if (ids.size() == 0) return 0;
    const Batch batch = counted_runs_of(ids);
    const Longs marks = device_.template make<int64_t>(batch.most());
    device_.launch(MarkSlots{batch.found.slots, true, marks}, batch.most());
    const Leaving leaving = leaving_marked(batch, marks);
    take_away(leaving, version);
    return leaving.size();
  }

  void clear(uint64_t version) {
    const std::vector<int64_t> keys = format_.logs_removals ? list(kIdMin, kIdMax, 0) : std::vector<int64_t>();
    make_log_room(keys.size());
    keep_all();
    Memory empty = make_index(0);
    const Array<Slab> none = shown_of({});
    for (const int64_t key : keys) removals_->push_back({key, version});
    cache_.clear();
    device_.launch(CountUp{0, row_counts_.part(kRowsNow, 1)}, 1);
    set_row_count(0);
    slabs_.clear();
    shown_ = none;
    index_ = std::move(empty);
  }

  int64_t evict(Global<const int64_t> ids, const EvictionPlan& plan, uint64_t version) {
    if (ids.size() == 0) return 0;
    const Batch batch = counted_runs_of(ids);
    const Longs marks = device_.template make<int64_t>(batch.most());
    CondemnRows kernel{rows(), format_.dim, format_.weight_type, plan, version, false, batch.found.slots, marks};
    device_.launch(kernel, batch.most() * kWays);
    const Leaving leaving = leaving_marked(batch, marks);
    if (has_decay(plan)) keep(batch.distinct, batch.found.slots);
    // Counts decay once nothing can fail any more.
    kernel.decays = true;
    device_.launch(kernel, batch.most() * kWays);
    take_away(leaving, version);
    evicted_count_ += leaving.size();
    return leaving.size();
  }

  // The (score, key) of the last row that is kept when the `keep_count` highest stay.
  std::pair<uint64_t, int64_t> score_cutoff(int64_t keep_count) {
    const int64_t row_count = size();
    const Longs order = ranked(counted(0, row_count), true);
    const int64_t slot = host(order, row_count - keep_count, 1)[0];
    const Longs one = device_.template make<int64_t>(1);
    device_.upload({slot}, one);
    const auto words = device_.template make<uint64_t>(1), keys = device_.template make<uint64_t>(1);
    device_.launch(RankRows{rows(), true, one, words}, 1);
    device_.launch(SortableKeys{rows(), one, keys}, 1);
    return {host(words)[0], static_cast<int64_t>(host(keys)[0] ^ (uint64_t{1} << 63))};
  }

  // Ids that went after `since` and have no row, ascending.
  std::vector<int64_t> list_removed(uint64_t since, Moment* moment = nullptr) {
    const Removals& log = moment == nullptr ? *removals_ : *moment->removals;
    const size_t count = moment == nullptr ? log.size() : moment->removal_count;
    std::vector<int64_t> gone;
    for (size_t i = 0; i < count; ++i) {
      if (log[i].version > since) gone.push_back(log[i].key);
    }
    std::sort(gone.begin(), gone.end());
    gone.erase(std::unique(gone.begin(), gone.end()), gone.end());
    const std::vector<uint8_t> is_there = are_there(gone, moment);
    std::vector<int64_t> result;
    for (size_t i = 0; i < gone.size(); ++i) {
      if (is_there[i] == 0) result.push_back(gone[i]);
    }
    return result;
  }

  // The log without what only marks before `mark` need. Throws std::bad_alloc.
  std::shared_ptr<Removals> removals_since(uint64_t mark) {
    Removals since;
    std::vector<int64_t> keys;
    for (const Removal& removal : *removals_) {
      if (removal.version <= mark) continue;
      since.push_back(removal);
      keys.push_back(removal.key);
    }
    const std::vector<uint8_t> has_row = are_there(keys, nullptr);
    return compacted(since, [&](size_t at) { return has_row[at] != 0; });
  }

  // The log from now on; moments keep the one that they saw.
  void set_removals(std::shared_ptr<Removals> log) noexcept {
    compacted_count_ = log->size();
    removals_ = std::move(log);
  }

  // Bytes of the log of removals, and of those logs before it that moments keep.
  int64_t log_bytes() {
    std::vector<std::shared_ptr<const Removals>> logs{removals_};
    for (const auto& moment : living()) {
      if (std::find(logs.begin(), logs.end(), moment->removals) == logs.end()) logs.push_back(moment->removals);
    }
    int64_t bytes = 0;
    for (const auto& log : logs) bytes += bytes_of(*log);
    return bytes;
  }

  // Brings rows of a batch to come into the cache. Changes no row, and waits for nothing.
  void prefetch(Global<const int64_t> ids) {
    if (ids.size() == 0 || !cache_.is_there()) return;
    const Batch batch = runs_of(ids);
    const int64_t most = batch.most(), epoch = cache_.next_epoch(), set_count = cache_.set_count();
    const Longs marks = device_.template make<int64_t>(most);
    device_.launch(TouchLines{cache_.of(rows()), epoch, batch.found.slots, marks, batch.count()}, most);
    const Longs sums = summed(marks), slots = marked(batch.found.slots, sums, most);
    auto sets = device_.template make<uint64_t>(most);
    Longs order = device_.template make<int64_t>(most);
    device_.launch(ListSets{set_count, slots, sets, order, {sums}}, most);
    int bits = 1;
    while (set_count >> bits != 0) ++bits;
    device_.sort(sets, order, bits);
    device_.launch(FillSets{cache_.of(rows()), set_count, epoch, sets, order, slots}, most * kWays);
  }

  // For proofs: the line of each slot from 1 on, 0 for none; and how long the log of removals is.
  std::vector<uint32_t> lines() { return host(cache_.lines()); }
  size_t logged_count() const { return removals_->size(); }

  // Room for this many rows.
  void reserve(int64_t row_count) {
    make_room(row_count);
    if (bucket_count() * rows_of_bucket_ < row_count) rebuild(row_count);
  }

  // The rows of now, after the change with number `version`. What they take is paid for when they change.
  std::shared_ptr<Moment> moment(uint64_t version) {
    RowFormat format = format_;
    format.cache_rows = 0;
    format.capacity = -1;
    format.logs_removals = false;
    const Longs row_count = device_.template keep<int64_t>(1);
    device_.copy(row_counts_.part(kRowsNow, 1), row_count);
    std::shared_ptr<Moment> result(new Moment{version,
                                              {device_, format, stride_ << shift_, rows_of_bucket_, most_rows_},
                                              row_count,
                                              removals_,
                                              removals_->size()});
    moments_.push_back(result);
    return result;
  }

 private:
  struct Memory {
    int bits;
    Array<uint16_t> digests;
    Longs ids;
    Array<uint32_t> slots, states;
  };

  struct Found {
    Longs entries, slots;
  };

  // Rows that go, and where the last rows that stay go instead.
  struct Leaving {
    Longs entries, movers, holes;
    std::vector<int64_t> keys;  // Where removals are logged.

    int64_t size() const { return entries.size(); }
  };

  // The distinct ids of a batch in the order of their hashes, and where each occurs.
  struct Batch {
    Longs distinct, begins, positions;
    Found found;
    Longs sums;           // The last is how many ids are distinct. Empty where the lists are no longer than that.
    Leaving excess = {};  // Rows that make room, of a table that is full.

    int64_t most() const { return distinct.size(); }
    Count count() const { return {sums}; }
    RunList runs() const { return {distinct, begins, positions, count()}; }
  };

  static constexpr uint64_t kEver = std::numeric_limits<uint64_t>::max();

  int64_t bucket_count() const { return int64_t{1} << index_.bits; }
  Index index() const { return {index_.digests, index_.ids, index_.slots, index_.states, index_.bits}; }
  RowStore rows() const { return cache_.over({shown_, stride_, shift_}); }
  InitialRow initial() const { return {format_.initial_weight(), format_.dim, format_.weight_type}; }

  Padding padding() const {
    Padding result{};
    for (const Range& part : format_.padding()) result.parts[result.count++] = part;
    return result;
  }

  template <typename T>
  static int64_t address_of(const Global<T>& span) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(span.data()) & 15);
  }

  // Calls `body` with the bytes of the largest piece that divides these numbers.
  template <typename Body>
  static void with_pieces(int64_t numbers, const Body& body) {
    if (numbers % 16 == 0) return body(std::integral_constant<int, 16>());
    if (numbers % 4 == 0) return body(std::integral_constant<int, 4>());
    if (numbers % 2 == 0) return body(std::integral_constant<int, 2>());
    body(std::integral_constant<int, 1>());
  }

  template <typename T>
  std::vector<T> host(const Array<T>& from) {
    return host(from, 0, from.size());
  }
  template <typename T>
  std::vector<T> host(const Array<T>& from, int64_t begin, int64_t count) {
    std::vector<T> result(static_cast<size_t>(count));
    if (count > 0) device_.download(from.part(begin, count), result.data());
    return result;
  }

  Memory make_index(int bits) {
    const int64_t buckets = int64_t{1} << bits, entries = buckets * kWays;
    Memory made{bits, device_.template keep<uint16_t>(entries), device_.template keep<int64_t>(entries),
                device_.template keep<uint32_t>(entries), device_.template keep<uint32_t>(buckets)};
    device_.clear(made.digests);
    device_.clear(made.ids);
    device_.clear(made.slots);
    device_.clear(made.states);
    return made;
  }

  Longs counted(int64_t begin, int64_t count) {
    Longs numbers = device_.template make<int64_t>(count);
    if (count > 0) device_.launch(CountUp{begin, numbers}, count);
    return numbers;
  }

  Longs summed(const Longs& marks) {
    Longs sums = device_.template make<int64_t>(marks.size());
    device_.sum_up(marks, sums);
    return sums;
  }

  // The marked values, in order.
  Longs picked(const Longs& values, const Longs& marks) {
    if (marks.size() == 0) return marks;
    const Longs sums = summed(marks);
    const int64_t count = last_of(sums);
    return count > 0 ? marked(values, sums, count) : device_.template make<int64_t>(0);
  }

  // The values that running sums mark, in order, with room for so many.
  Longs marked(const Longs& values, const Longs& sums, int64_t most) {
    Longs result = device_.template make<int64_t>(most);
    device_.launch(PickMarked{sums, values, result}, sums.size());
    return result;
  }

  // The same of two lists, in their places.
  void pick_both(Longs& values, Longs& others, const Longs& sums) {
    const Longs picked = device_.template make<int64_t>(sums.size()),
                picked_others = device_.template make<int64_t>(sums.size());
    device_.launch(PickMarked{sums, values, picked, others, picked_others}, sums.size());
    values = picked;
    others = picked_others;
  }

  int64_t last_of(const Longs& sums) { return host(sums, sums.size() - 1, 1)[0]; }

  Longs picked_at(const Longs& places, const Longs& values) {
    Longs result = device_.template make<int64_t>(places.size());
    if (places.size() > 0) device_.launch(PickAt{places, values, result}, places.size());
    return result;
  }

  Found find(Global<const int64_t> ids, Count count = {}) {
    Found found{device_.template make<int64_t>(ids.size()), device_.template make<int64_t>(ids.size())};
    device_.launch(FindIds{index(), ids, found.entries, found.slots, count}, ids.size());
    return found;
  }

  // Slots of ids, or guesses; of a moment, where they have not changed since.
  Longs slots_of(Global<const int64_t> ids, const Moment* moment, bool guesses = false) {
    const Longs slots = device_.template make<int64_t>(ids.size());
    device_.launch(FindIds{index(), ids, {}, slots, {}, guesses}, ids.size());
    if (moment != nullptr) device_.launch(HideNewer{rows(), moment->version, slots}, ids.size());
    return slots;
  }

  // Where there is no slot, nothing. `guessed`: the ids, where slots are guesses; those that are wrong become none.
  void read_found(Global<const int64_t> guessed, const Longs& slots, Range range, Global<uint8_t> out) {
    const int64_t width = range.end - range.begin;
    with_pieces(range.begin | width | address_of(out), [&](auto bytes) {
      using Kernel = ReadRows<decltype(bytes)::value>;
      const Kernel kernel{rows(), guessed, slots, out, range.begin, width};
      device_.launch(kernel, (slots.size() + Kernel::kRows - 1) / Kernel::kRows * kWays);
    });
  }

  // Whether ids of the host have rows.
  std::vector<uint8_t> are_there(const std::vector<int64_t>& ids, Moment* moment) {
    const auto count = static_cast<int64_t>(ids.size());
    if (count == 0) return {};
    const Longs there = device_.template make<int64_t>(count);
    const auto told = device_.template make<uint8_t>(count);
    device_.upload(ids, there);
    contains(there, told, moment);
    return host(told);
  }

  // Room in the log for so many removals. Throws std::bad_alloc, and then the log is as it was.
  void make_log_room(size_t count) {
    if (is_long(*removals_, compacted_count_)) {
      std::vector<int64_t> keys;
      for (const Removal& removal : *removals_) keys.push_back(removal.key);
      const std::vector<uint8_t> is_there = are_there(keys, nullptr);
      // Moments keep the log that they saw.
      removals_ = compacted(*removals_, [&](size_t at) { return is_there[at] != 0; });
      compacted_count_ = removals_->size();
    }
    reserve_log(*removals_, count);
  }

  // Rows at these slots are about to change or to go: moments that show them as they are keep them.
  void keep(const Longs& ids, const Longs& slots, Count count = {}) {
    if (ids.size() == 0) return;
    for (const auto& moment : living()) {
      const Longs marks = device_.template make<int64_t>(ids.size());
      device_.launch(MarkOlder{rows(), moment->version, slots, marks, count}, ids.size());
      const Longs sums = summed(marks);
      Longs going = ids, places = slots;
      pick_both(going, places, sums);
      moment->kept.take(rows(), going, places, sums);
    }
  }

  void keep_all() {
    const int64_t row_count = size();
    if (row_count == 0 || living().empty()) return;
    const Longs slots = counted(0, row_count), keys = device_.template make<int64_t>(row_count);
    device_.launch(KeysOfRows{rows(), slots, keys}, row_count);
    keep(keys, slots);
  }

  // Takes rows of another table, each listed once, whole and with their versions. The last of `sums` is their number.
  void take(const RowStore& from, const Longs& ids, const Longs& slots, const Longs& sums) {
    look_for_count();
    Batch batch{ids, {}, {}, find(ids, {sums}), sums};
    admit(batch, false, false);
    device_.launch(CopyRows{from, rows(), slots, batch.found.slots, batch.count()}, batch.most() * kWays);
  }

  std::vector<std::shared_ptr<Moment>> living() {
    std::vector<std::shared_ptr<Moment>> found;
    for (const auto& weak : moments_) {
      if (auto moment = weak.lock()) found.push_back(std::move(moment));
    }
    if (found.size() < moments_.size()) moments_.assign(found.begin(), found.end());
    return found;
  }

  // The host knows how many rows there are. A count that is on its way says nothing more.
  void set_row_count(int64_t row_count) {
    most_rows_ = row_count;
    is_exact_ = true;
    is_later_ = false;
  }

  // At most so many rows more. A count is sent where none is on its way.
  void add_at_most(int64_t count) {
    most_rows_ = with(count);
    is_exact_ = false;
    added_since_ += count;
    if (is_later_) return;
    device_.send(row_counts_.part(kRowsNow, 1), later_);
    is_later_ = true;
    added_since_ = 0;
  }

  // Takes a count that has arrived.
  void look_for_count() {
    if (!is_later_ || !device_.arrived(later_)) return;
    is_later_ = false;
    most_rows_ = std::min(device_.value_of(later_) + added_since_, rows_max_);
    is_exact_ = added_since_ == 0;
  }

  Batch runs_of(Global<const int64_t> ids) {
    const int64_t count = ids.size();
    auto words = device_.template make<uint64_t>(count);
    Longs positions = device_.template make<int64_t>(count);
    const Longs marks = device_.template make<int64_t>(count);
    device_.launch(HashIds{ids, words, positions}, count);
    device_.sort(words, positions, 64);
    device_.launch(MarkRuns{words, marks}, count);
    Batch batch{
        device_.template make<int64_t>(count), device_.template make<int64_t>(count + 1), positions, {}, summed(marks)};
    device_.launch(ListRuns{batch.sums, positions, ids, batch.begins, batch.distinct}, count);
    batch.found = find(batch.distinct, batch.count());
    return batch;
  }

  // The same, as long as it is, of a table whose rows the host has counted.
  Batch counted_runs_of(Global<const int64_t> ids) {
    size();
    return counted(runs_of(ids));
  }
  Batch counted(const Batch& batch) {
    const int64_t count = last_of(batch.sums);
    const Found found{batch.found.entries.part(0, count), batch.found.slots.part(0, count)};
    return {batch.distinct.part(0, count), batch.begins.part(0, count + 1), batch.positions, found, {}};
  }

  // A slot for every id of a batch: missing ones get the next, in the order of their hashes. Waits for nothing, but
  // where the table may become full, or memory that may be needed cannot be had.
  Batch open(Global<const int64_t> ids) {
    look_for_count();
    Batch batch = runs_of(ids);
    const bool is_near = format_.capacity >= 0 && most_rows_ + ids.size() > format_.capacity;
    if (is_near) {
      batch = counted(batch);
      if (batch.most() > format_.capacity) throw TooManyIds(batch.most());
    }
    admit(batch, is_near, true);
    return batch;
  }

  // The same of distinct ids. `is_sorted`: in the order of their hashes.
  void admit(Batch& batch, bool is_near, bool is_sorted) {
    const Longs marks = device_.template make<int64_t>(batch.most());
    device_.launch(MarkSlots{batch.found.slots, false, marks, batch.count()}, batch.most());
    const Longs sums = summed(marks);
    int64_t more = batch.most();
    bool is_known = is_near;
    const auto count_new = [&] {
      size();
      more = last_of(sums);
      is_known = true;
    };
    if (is_near) count_new();
    try {
      reserve(with(more));
    } catch (const std::bad_alloc&) {
      if (is_known) throw;
      count_new();
      reserve(with(more));
    }
    if (is_near && most_rows_ + more > format_.capacity) batch.excess = leaving_excess(batch, most_rows_ + more);
    keep(batch.distinct, batch.found.slots, batch.count());
    if (more > 0) add_new(batch, sums, is_sorted);
    // Also of none: those that were there before are said anew.
    device_.launch(AddRows{sums, row_counts_}, 1);
    if (is_known) {
      set_row_count(most_rows_ + more);
    } else {
      add_at_most(more);
    }
  }

  // How many rows there are at most, with so many more.
  int64_t with(int64_t count) const { return std::min(most_rows_ + count, rows_max_); }

  // Slots and entries for the ids that have none, which are marked.
  void add_new(const Batch& batch, const Longs& sums, bool is_sorted) {
    device_.launch(AssignSlots{sums, row_counts_, batch.found.slots}, batch.most());
    Longs ids = batch.distinct, slots = batch.found.slots;
    pick_both(ids, slots, sums);
    const Found undone{device_.template make<int64_t>(ids.size()), device_.template make<int64_t>(ids.size())};
    try {
      insert(ids, slots, {sums}, is_sorted);
    } catch (...) {
      // Nothing is left behind.
      device_.launch(FindIds{index(), ids, undone.entries, undone.slots, {sums}}, ids.size());
      device_.launch(EraseEntries{index(), undone.entries, {sums}}, ids.size());
      throw;
    }
  }

  // Adds entries for distinct ids that have none: by their first buckets, what is left by their second, then the rest.
  // `is_sorted`: in the order of their hashes, and so of their first buckets.
  void insert(Longs ids, Longs slots, Count count, bool is_sorted) {
    const int64_t most = ids.size();
    Longs sums;  // Of what is left: `count` looks at them.
    for (int64_t turn = 0; turn < 2; ++turn) {
      auto buckets = device_.template make<uint64_t>(most);
      Longs order = device_.template make<int64_t>(most);
      const Longs left = device_.template make<int64_t>(most);
      device_.launch(ListBuckets{index(), turn, ids, buckets, order, left, count}, most);
      if (turn > 0 || !is_sorted) device_.sort(buckets, order, index_.bits + 1);
      device_.launch(InsertRuns{index(), buckets, order, ids, slots, left, count}, most * kWays);
      sums = summed(left);
      pick_both(ids, slots, sums);
      count = {sums};
    }
    device_.launch(InsertRest{index(), ids, slots, count}, 1);
  }

  Array<Slab> shown_of(const std::vector<Array<uint8_t>>& slabs) {
    std::vector<Slab> found;
    for (const auto& slab : slabs) found.push_back({slab});
    const auto shown = device_.template keep<Slab>(static_cast<int64_t>(found.size()));
    device_.upload(found, shown);
    return shown;
  }

  void make_room(int64_t row_count) {
    const int64_t wanted = (row_count + (int64_t{1} << shift_) - 1) >> shift_;
    if (wanted <= static_cast<int64_t>(slabs_.size())) return;
    std::vector<Array<uint8_t>> more = slabs_;
    while (static_cast<int64_t>(more.size()) < wanted) {
      const int64_t bytes = stride_ << shift_;
      more.push_back(format_.is_on_host ? device_.keep_on_host(bytes) : device_.template keep<uint8_t>(bytes));
    }
    const auto lines = cache_.lines_for(static_cast<int64_t>(more.size()) << shift_);
    shown_ = shown_of(more);
    slabs_ = std::move(more);
    cache_.take(lines);
  }

  // An index for this many rows, of the rows that there are.
  void rebuild(int64_t row_count) {
    int bits = 0;
    while ((int64_t{1} << bits) * rows_of_bucket_ < row_count) ++bits;
    Memory old = index_;
    index_ = make_index(bits);
    try {
      if (most_rows_ == 0) return;
      const Longs keys = device_.template make<int64_t>(most_rows_), marks = device_.template make<int64_t>(most_rows_);
      const Count count{row_counts_.part(kRowsNow, 1)};
      device_.launch(ListRows{rows(), kIdMin, kIdMax, 0, kEver, keys, marks, count}, most_rows_);
      insert(keys, counted(0, most_rows_), count, false);
    } catch (...) {
      index_ = std::move(old);
      throw;
    }
  }

  // Slots from who goes first to who goes last: by rank, then by key.
  Longs ranked(const Longs& slots, bool by_count) {
    const int64_t count = slots.size();
    auto keys = device_.template make<uint64_t>(count), ranks = device_.template make<uint64_t>(count);
    device_.launch(SortableKeys{rows(), slots, keys}, count);
    Longs order = picked_at(counted(0, count), slots);
    device_.sort(keys, order, 64);
    device_.launch(RankRows{rows(), by_count, order, ranks}, count);
    device_.sort(ranks, order, 32);
    return order;
  }

  // Who makes room when a batch makes it so many rows: none of its own.
  Leaving leaving_excess(const Batch& batch, int64_t row_count) {
    const int64_t excess = row_count - format_.capacity;
    const Longs all = counted(0, most_rows_), marks = device_.template make<int64_t>(most_rows_);
    device_.launch(SetMarks{all, 0, 1, marks}, most_rows_);
    // Ids without a row have no slot yet.
    device_.launch(SetMarks{batch.found.slots, 0, 0, marks}, batch.most());
    const Longs order = ranked(picked(all, marks), format_.ranks_by_count);
    const Longs slots = device_.template make<int64_t>(excess), keys = device_.template make<int64_t>(excess);
    device_.copy(order.part(0, excess), slots);
    device_.launch(KeysOfRows{rows(), slots, keys}, excess);
    return leaving(keys, find(keys).entries, slots, row_count);
  }

  void shrink(const Leaving& excess, uint64_t version) {
    take_away(excess, version);
    evicted_count_ += excess.size();
  }

  Leaving leaving_marked(const Batch& batch, const Longs& marks) {
    const Longs keys = picked(batch.distinct, marks);
    if (keys.size() == 0) return {};
    return leaving(keys, picked(batch.found.entries, marks), picked(batch.found.slots, marks), most_rows_);
  }

  // What there is to do when these rows, each listed once, go from among so many: the last rows that stay take the
  // places before them that become free.
  Leaving leaving(const Longs& keys, const Longs& entries, const Longs& slots, int64_t row_count) {
    const int64_t count = keys.size(), left = row_count - count;
    Leaving result{entries, {}, {}, {}};
    if (format_.logs_removals) {
      result.keys = host(keys);
      make_log_room(result.keys.size());
    }
    keep(keys, slots);
    // Of the last `count` rows those that stay move; as many of the others go.
    const Longs stays = device_.template make<int64_t>(count);
    device_.launch(SetMarks{counted(left, count), left, 1, stays}, count);
    device_.launch(SetMarks{slots, left, 0, stays}, count);
    result.movers = picked(counted(left, count), stays);
    if (result.movers.size() == 0) return result;
    auto words = device_.template make<uint64_t>(count);
    Longs places = counted(0, count);
    device_.launch(SortableSlots{slots, words}, count);
    device_.sort(words, places, 32);
    result.holes = picked_at(places, slots).part(0, result.movers.size());
    return result;
  }

  // Does it. Nothing here needs memory but what gives memory back.
  void take_away(const Leaving& leaving, uint64_t version) {
    if (leaving.size() == 0) return;
    for (const int64_t key : leaving.keys) removals_->push_back({key, version});
    device_.launch(EraseEntries{index(), leaving.entries}, leaving.size());
    if (leaving.movers.size() > 0)
      device_.launch(MoveRows{index(), rows(), leaving.movers, leaving.holes}, leaving.movers.size() * kWays);
    set_row_count(most_rows_ - leaving.size());
    device_.launch(CountUp{most_rows_, row_counts_.part(kRowsNow, 1)}, 1);
    try {
      trim();
    } catch (const std::bad_alloc&) {
      return;  // What is larger than it need be goes on being right.
    }
  }

  // Gives memory back that rows need less than half of, and an index that is used to less than an eighth.
  void trim() {
    const int64_t wanted = (most_rows_ + (int64_t{1} << shift_) - 1) >> shift_;
    if (2 * wanted <= static_cast<int64_t>(slabs_.size()) && !slabs_.empty()) {
      const std::vector<Array<uint8_t>> fewer(slabs_.begin(), slabs_.begin() + static_cast<std::ptrdiff_t>(wanted));
      const Array<Slab> shown = shown_of(fewer);
      cache_.drop(rows(), most_rows_);
      shown_ = shown;
      slabs_ = fewer;
    }
    if (index_.bits > 3 && most_rows_ * 8 < bucket_count() * rows_of_bucket_) rebuild(2 * most_rows_);
  }

  Device& device_;
  const RowFormat format_;
  const int64_t rows_max_;
  const int64_t stride_, rows_of_bucket_;
  int shift_ = 0;
  RowCache<Device> cache_;
  std::vector<Array<uint8_t>> slabs_;
  Array<Slab> shown_;
  Memory index_;
  Longs row_counts_;
  // The rows are so many, or at most so many.
  int64_t most_rows_ = 0;
  bool is_exact_ = true;
  typename Device::Later later_;
  bool is_later_ = false;  // A count is on its way; so many rows may have been added since.
  int64_t added_since_ = 0;
  int64_t evicted_count_ = 0;
  std::shared_ptr<Removals> removals_ = std::make_shared<Removals>();
  size_t compacted_count_ = 0;  // Removals left by the last compaction of their log.
  std::vector<std::weak_ptr<Moment>> moments_;
};

}  // namespace fastimpl::kvstore::device
