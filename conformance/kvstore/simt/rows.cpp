// The store's kernels and their host side on a CPU, by the plain execution of simt.h, for Python's ctypes. Arguments
// are checked by the caller; lists are kept until the next call and fetched.
#include <simt.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <numeric>

#include "kvstore/device_store.h"
#include "kvstore/words.h"

namespace {

using namespace fastimpl;
using namespace fastimpl::kvstore;
using namespace fastimpl::kvstore::device;

// Memory of the host as that of a device: what is not written is not zero.
class HostDevice {
 public:
  template <typename T>
  struct Array {
    std::shared_ptr<void> owner;
    Global<T> span;

    operator Global<T>() const { return span; }
    operator Global<const T>() const { return span; }
    T* data() const { return span.data(); }
    int64_t size() const { return span.size(); }
    Array part(int64_t begin, int64_t count) const { return {owner, Global<T>(span.data() + begin, count)}; }
  };

  template <typename T>
  Array<T> make(int64_t count) {
    const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 511) / 256 * 256;
    void* const memory = std::aligned_alloc(256, bytes);
    if (memory == nullptr) throw std::bad_alloc();
    // Slabs are large, and each row of them is written before it is read.
    std::memset(memory, 0xA5, std::min<size_t>(bytes, 4096));
    return {std::shared_ptr<void>(memory, std::free), Global<T>(static_cast<T*>(memory), count)};
  }
  template <typename T>
  Array<T> keep(int64_t count) {
    return make<T>(count);
  }
  template <typename T>
  void clear(const Array<T>& there) {
    std::memset(there.data(), 0, static_cast<size_t>(there.size()) * sizeof(T));
  }
  template <typename T>
  void upload(const std::vector<T>& values, const Array<T>& to) {
    std::copy(values.begin(), values.end(), to.data());
  }
  template <typename T>
  void download(const Array<T>& from, T* to) {
    std::copy_n(from.data(), from.size(), to);
  }
  template <typename T>
  void copy(const Array<T>& from, const Array<T>& to) {
    std::copy_n(from.data(), from.size(), to.data());
  }
  void sort(Array<uint64_t>& words, Array<int64_t>& payload, int /*end_bit*/) {
    std::vector<std::pair<uint64_t, int64_t>> pairs(static_cast<size_t>(words.size()));
    for (size_t i = 0; i < pairs.size(); ++i) pairs[i] = {words.data()[i], payload.data()[i]};
    std::stable_sort(pairs.begin(), pairs.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (size_t i = 0; i < pairs.size(); ++i) std::tie(words.data()[i], payload.data()[i]) = pairs[i];
  }
  void sum_up(const Array<int64_t>& values, const Array<int64_t>& sums) {
    std::partial_sum(values.data(), values.data() + values.size(), sums.data());
  }
  template <typename Kernel>
  void launch(const Kernel& kernel, int64_t /*threads*/, int64_t shared_bytes = 0) {
    world().launch(kernel, {1, 32, shared_bytes});
  }

 private:
  static simt::prover::World& world() {
    static thread_local simt::prover::World found;
    return found;
  }
};

using Store = DeviceStore<HostDevice>;

struct Handle {
  std::shared_ptr<Store> store;
  std::vector<int64_t> list;
};

Handle& at(void* handle) { return *static_cast<Handle*>(handle); }
Store::Table& table(void* handle, int64_t index) { return *at(handle).store->tables[static_cast<size_t>(index)]; }
Global<const int64_t> longs(const int64_t* values, int64_t count) { return {values, count}; }

int64_t keep(void* handle, std::vector<int64_t> list) {
  at(handle).list = std::move(list);
  return static_cast<int64_t>(at(handle).list.size());
}

constexpr int64_t kOutOfMemory = -1;

// Runs one change; its status.
template <typename Body>
int64_t change(void* handle, const Body& body) {
  try {
    return status_of([&] { body(++at(handle).store->version); });
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}

}  // namespace

extern "C" {

void* kv_create(const int64_t* words, int64_t count) {
  auto store = std::make_shared<Store>(HostDevice());
  for (int64_t t = 0; t < count; ++t) {
    TableMessage message;
    std::memcpy(&message, words + t * static_cast<int64_t>(sizeof message / 8), sizeof message);
    store->tables.push_back(std::make_unique<Store::Table>(store->device, format_of(message)));
  }
  return new Handle{std::move(store), {}};
}
void kv_close(void* handle) { delete &at(handle); }
void* kv_snapshot(void* handle) { return new Handle{at(handle).store->moment(), {}}; }
void kv_fetch(void* handle, int64_t* to) { std::copy(at(handle).list.begin(), at(handle).list.end(), to); }

void kv_read(void* handle, int64_t index, const int64_t* ids, int64_t count, int64_t begin, int64_t end, uint8_t* out) {
  table(handle, index).read(longs(ids, count), {begin, end}, {out, count * (end - begin)});
}
int64_t kv_contains(void* handle, int64_t index, const int64_t* ids, int64_t count) {
  const auto marks = table(handle, index).contains(longs(ids, count));
  return keep(handle, {marks.data(), marks.data() + marks.size()});
}
int64_t kv_ids(void* handle, int64_t index, int64_t first, int64_t last) {
  return keep(handle, table(handle, index).list(first, last, 0));
}
int64_t kv_changed(void* handle, int64_t index, int64_t since) {
  return keep(handle, table(handle, index).list(kIdMin, kIdMax, static_cast<uint64_t>(since)));
}
int64_t kv_removed(void* handle, int64_t index, int64_t since) {
  return keep(handle, table(handle, index).list_removed(static_cast<uint64_t>(since)));
}
int64_t kv_size(void* handle, int64_t index) { return table(handle, index).size(); }
int64_t kv_mark(void* handle) { return static_cast<int64_t>(at(handle).store->version); }
int64_t kv_stats(void* handle) { return keep(handle, stats_of(*at(handle).store)); }

int64_t kv_write(void* handle, int64_t index, const int64_t* ids, int64_t count, const uint8_t* values, int64_t begin,
                 int64_t width, int64_t now, int64_t visits) {
  return change(handle, [&](uint64_t version) {
    table(handle, index)
        .write(longs(ids, count), {values, count * width}, {begin, begin + width}, visits != 0,
               static_cast<uint64_t>(now), version);
  });
}
int64_t kv_write_rows(void* handle, int64_t index, const int64_t* ids, int64_t count, const uint8_t* rows) {
  return change(handle, [&](uint64_t version) {
    auto& found = table(handle, index);
    found.write_whole(longs(ids, count), {rows, count * found.format().row_bytes}, version);
  });
}
int64_t kv_write_metadata(void* handle, int64_t index, const int64_t* ids, int64_t count, const int64_t* words,
                          int64_t mask) {
  return change(handle, [&](uint64_t version) {
    table(handle, index).write_metadata(longs(ids, count), longs(words, count), static_cast<uint64_t>(mask), version);
  });
}
int64_t kv_update(void* handle, int64_t index, const int64_t* ids, int64_t count, const float* grads,
                  const double* hyper, int64_t now) {
  return change(handle, [&](uint64_t version) {
    auto& found = table(handle, index);
    found.update(longs(ids, count), {grads, count * found.format().dim}, hyper_of(hyper), static_cast<uint64_t>(now),
                 version);
  });
}
// Of these two the list has the number of rows.
int64_t kv_delete(void* handle, int64_t index, const int64_t* ids, int64_t count) {
  return change(handle,
                [&](uint64_t version) { keep(handle, {table(handle, index).remove(longs(ids, count), version)}); });
}
int64_t kv_evict(void* handle, int64_t index, const int64_t* ids, int64_t count, const int64_t* words) {
  EvictionMessage message;
  std::memcpy(&message, words, sizeof message);
  return change(handle, [&](uint64_t version) {
    keep(handle, {table(handle, index).evict(longs(ids, count), plan_of(message), version)});
  });
}
int64_t kv_clear(void* handle, int64_t index) {
  return change(handle, [&](uint64_t version) { table(handle, index).clear(version); });
}
int64_t kv_reserve(void* handle, int64_t index, int64_t row_count) {
  return change(handle, [&](uint64_t) { table(handle, index).reserve(row_count); });
}
// Four facts, then the ids.
int64_t kv_begin_round(void* handle, int64_t index, int64_t keep_count) {
  auto [ids, facts] = begin_round(*at(handle).store, static_cast<size_t>(index), keep_count);
  facts.insert(facts.end(), ids.begin(), ids.end());
  return keep(handle, std::move(facts));
}

}  // extern "C"
