// Stores and snapshots behind handle tensors.
//
// A handle is int64 [3]: magic, id, generation. The object is found by the id and only for the very tensor that was
// handed out, so that a clone, a pickled copy or a handle whose object was closed is refused by name.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <pthread.h>
#include <unistd.h>

#include <unordered_map>

#include "kvstore/changes.h"
#include "kvstore/filling.h"
#include "kvstore/update.h"

namespace fastimpl::kvstore {

using torch::stable::Tensor;

struct Store {
  std::vector<std::unique_ptr<Table>> tables;
  std::atomic<uint64_t> version{0};
  // The first that changes can be asked since: written under the locks of all tables, read under that of one.
  uint64_t first_mark = 0;
  std::atomic<int64_t> snapshot_count{0};
  bool is_held = false;  // Over a fork. Under the lock of all handles.
};

// What a handle stands for: a store, or one moment of it, or rows that wait for one of its tables.
struct Source {
  explicit Source(std::shared_ptr<Store> store_) : store(std::move(store_)) {}
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  const std::shared_ptr<Store> store;
  std::vector<Overlay*> moment;  // By table; empty for the store itself.
  uint64_t moment_first_mark = 0;
  std::vector<int64_t> moment_steps;  // By table.
  std::unique_ptr<Filling> filling;

  Table& table(int64_t index) const {
    STD_TORCH_CHECK(index >= 0 && index < static_cast<int64_t>(store->tables.size()), "table: got ", index,
                    ", the store has ", store->tables.size());
    return *store->tables[static_cast<size_t>(index)];
  }
  const Overlay* overlay(int64_t index) const { return moment.empty() ? nullptr : moment[static_cast<size_t>(index)]; }

  ~Source() {
    if (moment.empty()) return;
    for (size_t i = 0; i < moment.size(); ++i) {
      const std::lock_guard<FairSharedMutex> held(store->tables[i]->lock);
      try {
        store->tables[i]->release_snapshot(moment[i]);
      } catch (const std::bad_alloc&) {
        // An older snapshot needs what this one kept; it stays until that one's memory can be had, or the store ends.
        continue;
      }
    }
    --store->snapshot_count;
  }
};

// Memory for this many rows, touched. Throws std::bad_alloc.
inline void reserve_rows(RowSet& rows, const Parallel& parallel, int64_t row_count) {
  // More than the machine has would not fail here but kill the process when it is touched.
  const int64_t machine_bytes = sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
  if (row_count > kSlotsMax || row_count > machine_bytes / rows.pool.stride()) throw std::bad_alloc();
  rows.reserve(parallel, row_count);
}

class Handles {
 public:
  Tensor add(std::shared_ptr<Source> source) {
    auto words = std::make_unique<int64_t[]>(kWordCount);
    int64_t* const data = words.get();
    {
      const std::lock_guard<std::mutex> held(guard_);
      data[0] = kMagic;
      data[1] = ++last_id_;
      data[2] = 1;
      entries_[data[1]] = {data, std::move(source)};
    }
    const int64_t size = kWordCount, stride = 1;
    const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
    Tensor handle = torch::stable::from_blob(data, {&size, 1}, {&stride, 1}, cpu, torch::headeronly::ScalarType::Long,
                                             [](void* memory) { table().forget(memory); });
    words.release();
    return handle;
  }

  std::shared_ptr<Source> get(const Tensor& handle) {
    STD_TORCH_CHECK(handle.is_cpu() && handle.scalar_type() == torch::headeronly::ScalarType::Long &&
                        handle.numel() == kWordCount && handle.is_contiguous() && word(handle, 0) == kMagic,
                    "handle: not a store's or snapshot's");
    const std::lock_guard<std::mutex> held(guard_);
    const auto found = entries_.find(word(handle, 1));
    STD_TORCH_CHECK(found != entries_.end(), "handle: dead, its store or snapshot was closed");
    STD_TORCH_CHECK(found->second.words == handle.data_ptr(),
                    "handle: a copy; a cloned or unpickled handle has no store");
    return found->second.source;
  }

  void close(const Tensor& handle) {
    std::shared_ptr<Source> last = get(handle);
    const std::lock_guard<std::mutex> held(guard_);
    entries_.erase(word(handle, 1));
  }

  static Handles& table() {
    // Never destroyed: handles may outlive every other global.
    static Handles* const handles = [] {
      pthread_atfork([] { table().hold(); }, [] { table().release(false); }, [] { table().release(true); });
      return new Handles;
    }();
    return *handles;
  }

 private:
  static constexpr int64_t kMagic = 0x74776b7673746f72, kWordCount = 3;

  struct Entry {
    const void* words;
    std::shared_ptr<Source> source;
  };

  static int64_t word(const Tensor& handle, int64_t index) {
    return static_cast<const int64_t*>(handle.data_ptr())[index];
  }

  // The handle tensor is gone.
  void forget(void* memory) {
    auto* const words = static_cast<int64_t*>(memory);
    Entry last{};
    {
      const std::lock_guard<std::mutex> held(guard_);
      const auto found = entries_.find(words[1]);
      if (found != entries_.end()) {
        last = std::move(found->second);
        entries_.erase(found);
      }
    }
    delete[] words;
  }

  // A process is forked between calls, for its child has no other thread: a lock that one held would never be free
  // there, and what it was writing never whole. Nobody waits for another lock of ours while holding a table's but those
  // who take all of a store's in their order; nor for Python, whose lock the thread that forks may hold.
  void hold() {
    guard_.lock();
    for (const auto& [id, entry] : entries_) {
      Store& store = *entry.source->store;
      if (store.is_held) continue;
      store.is_held = true;
      for (const auto& table : store.tables) table->lock.lock();
    }
  }
  void release(bool is_child) {
    for (const auto& [id, entry] : entries_) {
      Store& store = *entry.source->store;
      if (!store.is_held) continue;
      store.is_held = false;
      for (const auto& table : store.tables) is_child ? table->lock.make_anew() : table->lock.unlock();
    }
    if (is_child) {
      new (&guard_) std::mutex;
    } else {
      guard_.unlock();
    }
  }

  std::mutex guard_;
  std::unordered_map<int64_t, Entry> entries_;
  int64_t last_id_ = 0;
};

}  // namespace fastimpl::kvstore
