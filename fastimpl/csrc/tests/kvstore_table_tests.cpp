// The row store's tables against a dictionary, with snapshots, growth, failing allocations and threads.
#include "kvstore_tests.h"

#include <limits>

namespace {

using namespace kvstore_tests;
using Model = std::map<int64_t, Bytes>;

Bytes initial_row(const RowFormat& format, int64_t key) {
  Bytes row(static_cast<size_t>(format.row_bytes));
  format.open(key, 0, {0, 0}, row.data(), format.row_bytes);
  return row;
}

int64_t random_key() {
  const int64_t extremes[] = {0, -1, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()};
  switch (uniform(0, 9)) {
    case 0: return extremes[uniform(0, 3)];
    case 1: return uniform(0, 40) << 32;
    case 2: return -uniform(0, 40) * 4096;
    default: return uniform(0, 300);
  }
}

std::vector<int64_t> random_keys(int64_t count) {
  std::vector<int64_t> keys(static_cast<size_t>(count));
  for (auto& key : keys) key = random_key();
  return keys;
}

Bytes random_bytes(int64_t count) {
  Bytes bytes(static_cast<size_t>(count));
  for (auto& byte : bytes) byte = static_cast<uint8_t>(uniform(0, 255));
  return bytes;
}

void check_same(const Table& table, const Parallel& parallel, const Model& model, const Overlay* snapshot,
                const char* what) {
  std::vector<int64_t> keys = random_keys(50);
  for (const auto& [key, row] : model) keys.push_back(key);
  const int64_t count = static_cast<int64_t>(keys.size()), row_bytes = table.format.row_bytes;
  Bytes got(static_cast<size_t>(count * row_bytes));
  read_rows(table, parallel, keys.data(), count, {0, row_bytes}, got.data(), snapshot);
  for (int64_t i = 0; i < count; ++i) {
    const auto found = model.find(keys[static_cast<size_t>(i)]);
    const Bytes expected =
        found == model.end() ? initial_row(table.format, keys[static_cast<size_t>(i)]) : found->second;
    require(std::equal(expected.begin(), expected.end(), got.begin() + i * row_bytes), what);
  }
  std::vector<int64_t> listed;
  for_each_key(table, snapshot, [&](int64_t key, uint64_t) { listed.push_back(key); });
  std::sort(listed.begin(), listed.end());
  std::vector<int64_t> known;
  for (const auto& [key, row] : model) known.push_back(key);
  require(listed == known, "the listed keys are not the dictionary's");
  require(count_rows(table, snapshot) == static_cast<int64_t>(model.size()), "row count");
}

struct Kept {
  Overlay* overlay;
  Model model;
};

class Machine {
 public:
  Machine(int64_t dim, bool adam, int64_t shard_count, int64_t thread_count)
      : table_(format_of(dim, adam), shard_count), parallel_(threads(thread_count)) {}

  void run(int64_t steps) {
    for (int64_t i = 0; i < steps; ++i) {
      step();
      check_same(table_, parallel_, model_, nullptr, "a row differs from the dictionary's");
      for (const Kept& kept : kept_)
        check_same(table_, parallel_, kept.model, kept.overlay, "a snapshot's row changed");
      int64_t in_maps = 0;
      for (int64_t s = 0; s < table_.rows.shard_count(); ++s) in_maps += table_.rows.shard_at(s).size();
      require(in_maps == table_.rows.pool.size(), "rows in the maps and in the pool differ in number");
    }
    while (!kept_.empty()) release(0);
    require(table_.overlays.empty(), "overlays outlive their snapshots");
  }

 private:
  void step() {
    const auto keys = random_keys(uniform(0, 900));
    change_ = {change_.version + 1, change_.now + 7};
    const bool fails = uniform(0, 3) == 0;
    if (fails) table_.memory.fail_after(uniform(0, 3));
    try {
      switch (uniform(0, 6)) {
        case 0:
        case 1: set(keys, true); break;
        case 2: set(keys, false); break;
        case 3: set_whole(keys); break;
        case 4: set_words(keys); break;
        case 5: remove(keys); break;
        default: take_or_release();
      }
    } catch (const std::bad_alloc&) {
      require(fails, "an allocation failed by itself");
    }
    table_.memory.fail_after(-1);
  }

  void set(const std::vector<int64_t>& keys, bool visit) {
    const RowFormat& format = table_.format;
    const int64_t count = static_cast<int64_t>(keys.size());
    const Range range =
        visit ? Range{kHeaderBytes, format.weight_end()} : Range{format.weight_end() - 4, format.row_bytes - 4};
    const int64_t width = range.end - range.begin;
    const Bytes values = random_bytes(count * width);
    write_values(table_, parallel_, keys.data(), count, values.data(), range, visit, change_);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t key = keys[static_cast<size_t>(i)];
      auto [at, fresh] = model_.try_emplace(key, initial_row(format, key));
      if (fresh) set_metadata(at->second.data(), word_of(change_.now, 0));
      std::copy_n(values.begin() + i * width, width, at->second.begin() + range.begin);
      if (visit) set_metadata(at->second.data(), word_of(change_.now, count_of(metadata(at->second.data())) + 1));
    }
  }

  void set_whole(const std::vector<int64_t>& keys) {
    const int64_t count = static_cast<int64_t>(keys.size()), row_bytes = table_.format.row_bytes;
    Bytes values = random_bytes(count * row_bytes);
    for (int64_t i = 0; i < count; ++i) std::memcpy(values.data() + i * row_bytes, &keys[static_cast<size_t>(i)], 8);
    write_whole(table_, parallel_, keys.data(), count, values.data(), change_);
    for (int64_t i = 0; i < count; ++i) {
      Bytes row(values.begin() + i * row_bytes, values.begin() + (i + 1) * row_bytes);
      row[15] |= 0x80;
      for (const Range& pad : table_.padding) std::fill(row.begin() + pad.begin, row.begin() + pad.end, uint8_t{0});
      model_[keys[static_cast<size_t>(i)]] = row;
    }
  }

  void set_words(const std::vector<int64_t>& keys) {
    const int64_t count = static_cast<int64_t>(keys.size());
    std::vector<int64_t> words(keys.size());
    for (auto& word : words) word = static_cast<int64_t>(random_bits());
    const uint64_t mask = kCountMax << 32;
    write_metadata(table_, parallel_, keys.data(), count, words.data(), mask, change_);
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto at = model_.find(keys[i]);
      if (at == model_.end()) continue;
      set_metadata(at->second.data(),
                   (metadata(at->second.data()) & ~mask) | (static_cast<uint64_t>(words[i]) & mask) | kUsed);
    }
  }

  void remove(const std::vector<int64_t>& keys) {
    const int64_t removed = remove_rows(table_, parallel_, keys.data(), static_cast<int64_t>(keys.size()), change_);
    int64_t expected = 0;
    for (const int64_t key : keys) expected += static_cast<int64_t>(model_.erase(key));
    require(removed == expected, "how many rows were removed");
  }

  void take_or_release() {
    if (kept_.size() < 3 && uniform(0, 2) > 0) {
      kept_.push_back({table_.take_snapshot(change_.version), model_});
    } else if (!kept_.empty()) {
      release(static_cast<size_t>(uniform(0, static_cast<int64_t>(kept_.size()) - 1)));
    }
  }

  void release(size_t index) {
    table_.release_snapshot(kept_[index].overlay);
    kept_.erase(kept_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  Table table_;
  Parallel parallel_;
  Model model_;
  std::vector<Kept> kept_;
  Change change_{0, 1000};
};

void tables_match_a_dictionary() {
  Machine(1, false, 1, 1).run(60);
  Machine(6, true, 3, 1).run(60);
  Machine(6, true, 8, 3).run(60);
  Machine(70, false, 2, 2).run(30);
}

// Growth over many segments, with keys whose low or high bits agree, then shrinking until everything is given back.
void large_tables_grow_and_shrink() {
  for (const int shift : {0, 20, 40}) {
    Table table(format_of(4, false), 2);
    const Parallel parallel = threads(2);
    const int64_t count = 60000;
    std::vector<int64_t> keys(static_cast<size_t>(count));
    std::vector<float> values(static_cast<size_t>(4 * count)), got(values.size());
    for (int64_t i = 0; i < count; ++i) {
      keys[static_cast<size_t>(i)] = i << shift;
      for (int64_t e = 0; e < 4; ++e) values[static_cast<size_t>(4 * i + e)] = static_cast<float>(i);
    }
    const Range weights{kHeaderBytes, kHeaderBytes + 16};
    for (int64_t first = 0; first < count; first += 7000) {
      const int64_t part = std::min<int64_t>(7000, count - first);
      write_values(table, parallel, keys.data() + first, part, reinterpret_cast<uint8_t*>(values.data() + 4 * first),
                   weights, true, {1, 1});
    }
    read_rows(table, parallel, keys.data(), count, weights, reinterpret_cast<uint8_t*>(got.data()), nullptr);
    require(got == values, "a row was lost while the table grew");
    require(table.rows.map_bytes() < 24 * count, "the map is larger than 24 bytes a row");
    const int64_t held_bytes = table.memory.held_bytes();
    require(remove_rows(table, parallel, keys.data(), count - 100, {2, 2}) == count - 100, "removed rows");
    require(table.rows.pool.held_bytes() < 200 * table.rows.pool.stride() + 16384, "rows were not given back");
    require(table.memory.held_bytes() < held_bytes && table.rows.map_bytes() < 100000, "memory was not given back");
    got.resize(400);
    read_rows(table, parallel, keys.data() + count - 100, 100, weights, reinterpret_cast<uint8_t*>(got.data()),
              nullptr);
    require(std::equal(got.begin(), got.end(), values.end() - 400), "a row was lost while the table shrank");
  }
}

// Wide rows: growth, removal and what is given back cross several chunks.
void rows_cross_chunks() {
  Table table(format_of(1000, false), 3);
  const int64_t count = 14000;
  std::vector<int64_t> keys(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) keys[static_cast<size_t>(i)] = i * i;
  const auto write = [&](int64_t first, int64_t part, float value) {
    const std::vector<float> values(static_cast<size_t>(part * 1000), value);
    write_values(table, threads(2), keys.data() + first, part, reinterpret_cast<const uint8_t*>(values.data()),
                 {kHeaderBytes, 4016}, true, {1, 1});
  };
  for (int64_t first = 0; first < count; first += 2000) write(first, 2000, static_cast<float>(first));
  const auto check = [&](int64_t begin) {
    std::vector<float> got(static_cast<size_t>(1000 * (count - begin)));
    read_rows(table, threads(2), keys.data() + begin, count - begin, {kHeaderBytes, 4016},
              reinterpret_cast<uint8_t*>(got.data()), nullptr);
    for (int64_t i = begin; i < count; ++i) {
      const float* const row = got.data() + 1000 * (i - begin);
      require(row[0] == static_cast<float>(i / 2000 * 2000) && row[999] == row[0], "a row in another chunk");
    }
  };
  check(0);
  const int64_t held_bytes = table.memory.held_bytes();
  require(remove_rows(table, threads(2), keys.data(), 12000, {2, 2}) == 12000, "removed rows");
  check(12000);
  require(table.memory.held_bytes() <= held_bytes / 3, "chunks were not given back");
  for (int64_t first = 0; first < 12000; first += 2000) write(first, 2000, static_cast<float>(first));
  check(0);
}

// One shard that grew: its segments differ in depth, and each is given back once.
void uneven_maps_are_given_back() {
  Table table(format_of(1, false), 1);
  std::vector<int64_t> keys(100000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i * i);
  const std::vector<float> values(keys.size(), 1.0F);
  write_values(table, threads(1), keys.data(), 100000, reinterpret_cast<const uint8_t*>(values.data()),
               {kHeaderBytes, 20}, true, {1, 1});
  require(table.rows.map_bytes() > 64 * 1024 * 8, "the map did not grow");
}

// Every group of a small map has turned an entry away, so that a search for what is absent ends at none of them.
void searches_end() {
  Memory memory;
  const RowPool pool(memory, 64);
  ShardMap map(memory, pool);
  std::vector<uint64_t> left;
  uint32_t next = 0;
  for (uint64_t home = 0; home < static_cast<uint64_t>(kFirstGroups); ++home) {
    std::vector<uint64_t> entered;
    do {
      entered.push_back(home << kTagBits | (next + 1));
      map.insert(entered.back(), next++);
    } while (map.home(entered.back())->turned_away == 0);
    // The last one lies in another group; those that have left make room, and the map stays small.
    for (size_t i = 0; i + 1 < entered.size(); ++i)
      map.erase(entered[i], static_cast<uint32_t>(entered[i] & 0xFFFF) - 1);
    left.push_back(entered.back());
  }
  require(map.size() == kFirstGroups && map.held_bytes() < 64 * (kFirstGroups + 2), "the map stayed small");
  const uint64_t absent = 60000;
  for (uint64_t home = 0; home < static_cast<uint64_t>(kFirstGroups); ++home) {
    require(map.home(home << kTagBits)->turned_away > 0, "every group turned one away");
    require(map.candidate(home << kTagBits | absent) == kAbsent, "what is absent is not found");
    map.move(home << kTagBits | absent, 1, 2);
    map.erase(home << kTagBits | absent, 1);
  }
  for (const uint64_t hash : left)
    require(map.candidate(hash) == static_cast<uint32_t>(hash & 0xFFFF) - 1, "what is there is found");
  memory.give(nullptr, 64);
  require(map.size() == kFirstGroups && memory.held_bytes() > 0, "nothing was moved, erased or given back");
}

// The key of a hash: the steps of `hash_key` taken back.
int64_t key_of(uint64_t hash) {
  const auto unshifted = [](uint64_t z, int bits) {
    uint64_t found = z;
    for (int known = bits; known < 64; known += bits) found = z ^ (found >> bits);
    return found;
  };
  const auto inverse = [](uint64_t odd) {
    uint64_t found = odd;
    for (int i = 0; i < 6; ++i) found *= 2 - odd * found;
    return found;
  };
  uint64_t z = unshifted(hash, 31) * inverse(0x94D049BB133111EBu);
  z = unshifted(z, 27) * inverse(0xBF58476D1CE4E5B9u);
  return static_cast<int64_t>(unshifted(z, 30) - kGolden);
}

// Keys made for it agree in all bits that choose a segment: a map refuses them before its directory fills memory.
void keys_made_to_collide_are_refused() {
  Table table(format_of(1, false), 1);
  const int64_t room = kSegmentGroups * kGroupSlots * 4 / 5;
  std::vector<int64_t> keys;
  for (int64_t i = 0; i <= room; ++i) keys.push_back(key_of(static_cast<uint64_t>(i)));
  require(hash_key(keys[3]) == 3, "keys of hashes");
  const std::vector<float> values(keys.size(), 1.0F);
  const auto write = [&](int64_t begin, int64_t count) {
    write_values(table, threads(1), keys.data() + begin, count, reinterpret_cast<const uint8_t*>(values.data()),
                 {kHeaderBytes, 20}, true, {1, 1});
  };
  write(0, room);
  bool refused = false;
  try {
    write(room, 1);
  } catch (const std::bad_alloc&) {
    refused = true;
  }
  require(refused && table.rows.pool.size() == room, "one key more was not refused");
  for (const int64_t key : keys) {
    const bool is_last = key == keys.back();
    require((table.rows.find(hash_key(key), key) == nullptr) == is_last, "who is found behind a refusal");
  }
}

void reserved_tables_do_not_allocate() {
  Table table(format_of(4, false), 8);
  const int64_t count = 30000;
  table.rows.reserve(threads(2), count);
  table.memory.fail_after(0);
  std::vector<int64_t> keys(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) keys[static_cast<size_t>(i)] = i * 1000003;
  const Bytes values(static_cast<size_t>(16 * count), 1);
  write_values(table, threads(1), keys.data(), count, values.data(), {kHeaderBytes, 32}, true, {1, 1});
  require(table.rows.pool.size() == count, "rows after reserve");
}

// Rows whose every byte is one version: a reader sees whole rows only, and no version goes back. ThreadSanitizer and
// AddressSanitizer watch this one.
void readers_beside_writers_see_whole_rows() {
  Table table(format_of(30, true), 4);
  const Range weights{kHeaderBytes, table.format.weight_end()};
  const int64_t count = 600, width = weights.end - weights.begin, turns = 60;
  std::vector<int64_t> keys(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) keys[static_cast<size_t>(i)] = i * 77 - 5000;
  const auto write = [&](uint64_t version) {
    const Bytes values(static_cast<size_t>(count * width), static_cast<uint8_t>(version));
    const std::lock_guard<FairSharedMutex> held(table.lock);
    write_values(table, threads(2), keys.data(), count, values.data(), weights, true, {version, version});
  };
  write(1);
  std::atomic<bool> finished{false};
  const auto read = [&] {
    Bytes got(static_cast<size_t>(count * width));
    std::vector<int> seen(static_cast<size_t>(count));
    while (!finished) {
      const std::shared_lock<FairSharedMutex> held(table.lock);
      read_rows(table, threads(1), keys.data(), count, weights, got.data(), nullptr);
      for (int64_t i = 0; i < count; ++i) {
        const uint8_t* const row = got.data() + i * width;
        require(std::all_of(row, row + width, [row](uint8_t byte) { return byte == *row; }), "a torn row");
        require(*row >= seen[static_cast<size_t>(i)], "a version went back");
        seen[static_cast<size_t>(i)] = *row;
      }
    }
  };
  const auto snap = [&] {
    while (!finished) {
      Overlay* taken = nullptr;
      {
        const std::lock_guard<FairSharedMutex> held(table.lock);
        uint64_t newest = 0;
        for_each_key(table, nullptr, [&](int64_t, uint64_t version) { newest = std::max(newest, version); });
        taken = table.take_snapshot(newest);
      }
      Bytes first(static_cast<size_t>(count * width)), second(first.size());
      for (Bytes* got : {&first, &second}) {
        const std::shared_lock<FairSharedMutex> held(table.lock);
        read_rows(table, threads(1), keys.data(), count, weights, got->data(), taken);
      }
      require(first == second, "a snapshot changed");
      const std::lock_guard<FairSharedMutex> held(table.lock);
      table.release_snapshot(taken);
    }
  };
  std::vector<std::thread> others;
  others.emplace_back(read);
  others.emplace_back(read);
  others.emplace_back(snap);
  for (uint64_t version = 2; version < turns; ++version) {
    write(version);
    std::vector<int64_t> passing(500);
    for (size_t i = 0; i < passing.size(); ++i) passing[i] = static_cast<int64_t>(version * 1000 + i) * 13 + 1000000;
    const Bytes values(passing.size() * static_cast<size_t>(width));
    const std::lock_guard<FairSharedMutex> held(table.lock);
    write_values(table, threads(2), passing.data(), 500, values.data(), weights, true, {version, version});
    require(remove_rows(table, threads(2), passing.data(), 500, {version, version}) == 500, "passing rows");
  }
  finished = true;
  for (auto& other : others) other.join();
}

}  // namespace

void kvstore_table_tests() {
  tables_match_a_dictionary();
  large_tables_grow_and_shrink();
  rows_cross_chunks();
  uneven_maps_are_given_back();
  searches_end();
  keys_made_to_collide_are_refused();
  reserved_tables_do_not_allocate();
  readers_beside_writers_see_whole_rows();
}
