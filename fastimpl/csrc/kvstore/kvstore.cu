// The row store on a CUDA device: memory, CUB's sort and sums, and the launchers of its operators, under the names that
// they have on the CPU. A handle's tensor lies on the device and is never read there: its address is what it names.
//
// Calls of one store and its snapshots are made one at a time. Each works on the caller's stream, behind what the one
// before queued.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "common/device_call.cuh"
#include "kvstore/device_store.h"
#include "kvstore/words.h"

namespace {

using namespace fastimpl;
using namespace fastimpl::device;
using namespace fastimpl::kvstore;
using namespace fastimpl::kvstore::device;
using simt::Global;

// Some waves of blocks on the largest device: blocks that find nothing to do cost time as well.
constexpr int64_t kOutOfMemory = -1, kSharedBytes = 96 * 1024, kBlocksMax = 1 << 13;
// Scratch memory up to so much comes as a part of larger pieces, which begin at multiples of the unit.
constexpr int64_t kSmallBytes = int64_t{4} << 20, kUnitBytes = 256;

class CudaDevice {
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

  // A count that is copied to the host while the host goes on.
  class Later {
   public:
    Later() {
      const cudaError_t status = cudaHostAlloc(&memory_, sizeof(int64_t), cudaHostAllocDefault);
      if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        throw std::bad_alloc();
      }
      check_cuda(status);
      check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
    }
    ~Later() {
      // No copy runs into memory that is gone.
      cudaEventSynchronize(event_);
      cudaEventDestroy(event_);
      cudaFreeHost(memory_);
    }
    Later(const Later&) = delete;
    Later& operator=(const Later&) = delete;

   private:
    friend CudaDevice;
    void* memory_ = nullptr;
    cudaEvent_t event_ = nullptr;
  };

  // `like` lies on the device.
  explicit CudaDevice(const Tensor& like) : like_(like) { make_event(); }
  CudaDevice(CudaDevice&&) = default;
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  // Around each call: what was queued before comes first, on whichever stream it was.
  void begin() {
    piece_ = {};
    stream_ = stream_of(like_);
    check_cuda(cudaStreamWaitEvent(stream_, static_cast<cudaEvent_t>(done_.get()), 0));
  }
  void end() {
    piece_ = {};
    check_cuda(cudaEventRecord(static_cast<cudaEvent_t>(done_.get()), stream_));
  }
  // For tests: after so many more allocations of rows, indexes and snapshots all fail; -1 ends it.
  void fail_after(int64_t allocation_count) { *countdown_ = allocation_count; }
  torch::stable::Device place() const { return like_.device(); }

  // For a call: torch's memory of this stream. Small arrays are parts of pieces that grow as a call goes on, since a
  // call makes dozens of them, and asking torch for one takes the host longer than a launch.
  template <typename T>
  Array<T> make(int64_t count) {
    const int64_t wanted = std::max<int64_t>(1, count * static_cast<int64_t>(sizeof(T))),
                  bytes = (wanted + kUnitBytes - 1) / kUnitBytes * kUnitBytes;
    if (bytes > kSmallBytes) {
      const auto owner = empty(bytes);
      return {owner, Global<T>(static_cast<T*>(owner->data_ptr()), count)};
    }
    if (bytes > piece_.bytes - piece_.used) {
      const int64_t more = std::max(bytes, std::min(2 * piece_.bytes, 4 * kSmallBytes));
      piece_ = {empty(more), more, 0};
    }
    auto* const data = static_cast<uint8_t*>(piece_.owner->data_ptr()) + piece_.used;
    piece_.used += bytes;
    return {piece_.owner, Global<T>(reinterpret_cast<T*>(data), count)};
  }
  // For long: memory of its own, which is given back when nothing that was queued needs it any more.
  template <typename T>
  Array<T> keep(int64_t count) {
    if (*countdown_ == 0) throw std::bad_alloc();
    if (*countdown_ > 0) --*countdown_;
    void* memory = nullptr;
    const size_t bytes = std::max<size_t>(1, static_cast<size_t>(count) * sizeof(T));
    const cudaError_t status = cudaMalloc(&memory, bytes);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw std::bad_alloc();
    }
    check_cuda(status);
    return {std::shared_ptr<void>(memory, [](void* gone) { cudaFree(gone); }),
            Global<T>(static_cast<T*>(memory), count)};
  }
  // The same in pinned memory of the host, which kernels reach at the same address.
  Array<uint8_t> keep_on_host(int64_t bytes) {
    if (*countdown_ == 0) throw std::bad_alloc();
    if (*countdown_ > 0) --*countdown_;
    void* memory = nullptr;
    const cudaError_t status = cudaHostAlloc(&memory, static_cast<size_t>(bytes), cudaHostAllocMapped);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw std::bad_alloc();
    }
    check_cuda(status);
    // Kernels that were queued may still use it.
    return {std::shared_ptr<void>(memory,
                                  [](void* gone) {
                                    cudaDeviceSynchronize();
                                    cudaFreeHost(gone);
                                  }),
            Global<uint8_t>(static_cast<uint8_t*>(memory), bytes)};
  }
  template <typename T>
  void clear(const Array<T>& there) {
    check_cuda(cudaMemsetAsync(there.data(), 0, static_cast<size_t>(there.size()) * sizeof(T), stream_));
  }
  template <typename T>
  void upload(const std::vector<T>& values, const Array<T>& to) {
    copy_bytes(to.data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice);
  }
  template <typename T>
  void download(const Array<T>& from, T* to) {
    copy_bytes(to, from.data(), static_cast<size_t>(from.size()) * sizeof(T), cudaMemcpyDeviceToHost);
    check_cuda(cudaStreamSynchronize(stream_));
  }
  template <typename T>
  void copy(const Array<T>& from, const Array<T>& to) {
    copy_bytes(to.data(), from.data(), static_cast<size_t>(from.size()) * sizeof(T), cudaMemcpyDefault);
  }
  void send(const Array<int64_t>& from, Later& later) {
    copy_bytes(later.memory_, from.data(), sizeof(int64_t), cudaMemcpyDeviceToHost);
    check_cuda(cudaEventRecord(later.event_, stream_));
  }
  bool arrived(const Later& later) {
    const cudaError_t status = cudaEventQuery(later.event_);
    if (status == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    check_cuda(status);
    return true;
  }
  int64_t value_of(const Later& later) {
    int64_t value = 0;
    std::memcpy(&value, later.memory_, sizeof value);
    return value;
  }
  void sort(Array<uint64_t>& words, Array<int64_t>& payload, int end_bit) {
    const auto sorted = make<uint64_t>(words.size());
    const auto moved = make<int64_t>(words.size());
    const auto run = [&](void* space, size_t& bytes) {
      check_cuda(cub::DeviceRadixSort::SortPairs(space, bytes, words.data(), sorted.data(), payload.data(),
                                                 moved.data(), words.size(), 0, end_bit, stream_));
    };
    size_t bytes = 0;
    run(nullptr, bytes);
    const auto space = make<uint8_t>(static_cast<int64_t>(bytes));
    run(space.data(), bytes);
    words = sorted;
    payload = moved;
  }
  void sum_up(const Array<int64_t>& values, const Array<int64_t>& sums) {
    const auto run = [&](void* space, size_t& bytes) {
      check_cuda(cub::DeviceScan::InclusiveSum(space, bytes, values.data(), sums.data(), values.size(), stream_));
    };
    size_t bytes = 0;
    run(nullptr, bytes);
    const auto space = make<uint8_t>(static_cast<int64_t>(bytes));
    run(space.data(), bytes);
  }
  template <typename Kernel>
  void launch(const Kernel& kernel, int64_t threads, int64_t shared_bytes = 0) {
    STD_TORCH_CHECK(shared_bytes <= kSharedBytes, "rows: a warp needs ", shared_bytes,
                    " bytes of shared memory, a block has ", kSharedBytes);
    const int64_t most = Kernel::kThreads / simt::kLanes,
                  warps =
                      shared_bytes == 0 ? most : std::min(most, std::max<int64_t>(1, kSharedBytes / 2 / shared_bytes)),
                  block = warps * simt::kLanes;
    check_cuda(simt::launch(kernel, {std::min((threads + block - 1) / block, kBlocksMax), block, shared_bytes * warps},
                            stream_));
  }

 private:
  // Scratch memory of the call, and how much of it is taken.
  struct ScratchPiece {
    std::shared_ptr<Tensor> owner;
    int64_t bytes = 0, used = 0;
  };

  std::shared_ptr<Tensor> empty(int64_t bytes) {
    try {
      return std::make_shared<Tensor>(torch::stable::new_empty(like_, {bytes}, ScalarType::Byte));
    } catch (const std::exception&) {
      throw std::bad_alloc();  // There is nothing else that an empty tensor could want.
    }
  }
  void make_event() {
    const DeviceGuard guard(like_.get_device_index());
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    done_ = std::shared_ptr<void>(event, [](void* gone) { cudaEventDestroy(static_cast<cudaEvent_t>(gone)); });
  }
  void copy_bytes(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    if (bytes > 0) check_cuda(cudaMemcpyAsync(to, from, bytes, kind, stream_));
  }

  Tensor like_;
  cudaStream_t stream_ = nullptr;
  ScratchPiece piece_;
  std::shared_ptr<int64_t> countdown_ = std::make_shared<int64_t>(-1);
  std::shared_ptr<void> done_;
};

using Store = DeviceStore<CudaDevice>;
using Moment = StoreMoment<Store>;

// What a handle names: a store, or a moment of it.
struct Named {
  std::shared_ptr<Store> store;
  std::shared_ptr<Moment> moment;
};

// By the addresses of the handles' memory.
class DeviceHandles {
 public:
  Tensor add(Named named) {
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, kWords * sizeof(int64_t)));
    const torch::stable::Device place = named.store->device.place();
    {
      const std::lock_guard<std::mutex> held(guard_);
      named_[memory] = std::move(named);
    }
    const int64_t size = kWords, stride = 1;
    return torch::stable::from_blob(memory, {&size, 1}, {&stride, 1}, place, ScalarType::Long, [](void* gone) {
      all().take(gone);
      cudaFree(gone);
    });
  }
  Named get(const Tensor& handle) {
    const std::lock_guard<std::mutex> held(guard_);
    const auto found = named_.find(handle.data_ptr());
    STD_TORCH_CHECK(found != named_.end(), "handle: dead, or a copy; its store or snapshot is not here");
    return found->second;
  }
  // It ends outside of the lock.
  Named take(void* memory) {
    const std::lock_guard<std::mutex> held(guard_);
    const auto found = named_.find(memory);
    if (found == named_.end()) return {};
    Named named = std::move(found->second);
    named_.erase(found);
    return named;
  }
  static DeviceHandles& all() {
    // Never destroyed: handles may outlive every other global.
    static DeviceHandles* const handles = new DeviceHandles;
    return *handles;
  }

 private:
  static constexpr int64_t kWords = 3;
  std::mutex guard_;
  std::unordered_map<void*, Named> named_;
};

// One call: its store, its device, and the order of calls.
class StoreCall {
 public:
  explicit StoreCall(const Tensor& handle) : StoreCall(handle, DeviceHandles::all().get(handle)) {}
  ~StoreCall() {
    // A call that failed has queued what it has; the next comes behind it all the same.
    try {
      store->device.end();
    } catch (...) {
      return;
    }
  }
  StoreCall(const StoreCall&) = delete;
  StoreCall& operator=(const StoreCall&) = delete;

  const std::shared_ptr<Store> store;
  const std::shared_ptr<Moment> moment;  // None of the store itself.

  // Of what a moment does not have.
  void check_is_store(const char* what) const { STD_TORCH_CHECK(moment == nullptr, "handle: ", what); }
  Store::Table::Moment* moment_of(int64_t index) const {
    return moment == nullptr ? nullptr : moment->tables[static_cast<size_t>(index)].get();
  }
  Store::Table& table(int64_t index) const {
    STD_TORCH_CHECK(index >= 0 && index < static_cast<int64_t>(store->tables.size()), "table: got ", index,
                    ", the store has ", store->tables.size());
    return *store->tables[static_cast<size_t>(index)];
  }
  Global<const int64_t> ids(const Tensor& t, const char* name = "ids") const {
    check_plain(t, handle_, ScalarType::Long, 1, name);
    return {static_cast<const int64_t*>(t.data_ptr()), t.numel()};
  }
  Global<const uint8_t> bytes(const Tensor& t, const char* name) const {
    check_plain(t, handle_, ScalarType::Byte, 2, name);
    return {static_cast<const uint8_t*>(t.data_ptr()), t.numel()};
  }
  Tensor longs(const std::vector<int64_t>& values) const {
    const auto count = static_cast<int64_t>(values.size());
    Tensor result = torch::stable::new_empty(handle_, {count}, ScalarType::Long);
    store->device.upload(
        values, CudaDevice::Array<int64_t>{nullptr, Global<int64_t>(static_cast<int64_t*>(result.data_ptr()), count)});
    return result;
  }
  // Runs what may be refused of a table, and turns what it throws into a status.
  template <typename Body>
  int64_t attempt(int64_t index, const Body& body) const {
    check_is_store("a snapshot cannot be written");
    Store::Table& found = table(index);
    try {
      return status_of([&] { body(found); });
    } catch (const std::bad_alloc&) {
      return kOutOfMemory;
    }
  }
  // The same of a change. One that was refused has no number.
  template <typename Body>
  int64_t change(int64_t index, const Body& body) const {
    const uint64_t before = store->version;
    const int64_t status = attempt(index, [&](Store::Table& found) { body(found, ++store->version); });
    if (status != 0) store->version = before;
    return status;
  }

 private:
  StoreCall(const Tensor& handle, const Named& named)
      : store(named.store), moment(named.moment), guard_(handle.get_device_index()), handle_(handle) {
    store->device.begin();
  }

  DeviceGuard guard_;
  Tensor handle_;
};

// Row `index` of a matrix of messages on the host.
template <typename Message>
Message read_message(const int64_t* words, int64_t width, int64_t index, const char* name) {
  constexpr int64_t kCount = sizeof(Message) / sizeof(int64_t);
  STD_TORCH_CHECK(width == kCount, name, ": got ", width, " words, expected ", kCount);
  Message message;
  std::memcpy(&message, words + index * kCount, sizeof message);
  STD_TORCH_CHECK(message.version == Message::kVersion, name, ": got version ", message.version, ", expected ",
                  Message::kVersion);
  return message;
}

Tensor kvstore_create_cuda(Tensor formats, int64_t shard_count) {
  check_plain(formats, formats, ScalarType::Long, 2, "formats");
  STD_TORCH_CHECK(formats.size(0) >= 1, "formats: got no table");
  STD_TORCH_CHECK(shard_count >= 1, "shard_count: got ", shard_count);
  const DeviceGuard guard(formats.get_device_index());
  auto store = std::make_shared<Store>(CudaDevice(formats));
  store->device.begin();
  std::vector<int64_t> words(static_cast<size_t>(formats.numel()));
  store->device.download(
      CudaDevice::Array<int64_t>{nullptr, Global<int64_t>(static_cast<int64_t*>(formats.data_ptr()), formats.numel())},
      words.data());
  for (int64_t t = 0; t < formats.size(0); ++t) {
    const RowFormat format = format_of(read_message<TableMessage>(words.data(), formats.size(1), t, "formats"));
    STD_TORCH_CHECK(is_sound(format), "formats: table ", t, " has slots outside its row");
    store->tables.push_back(std::make_unique<Store::Table>(store->device, format));
  }
  store->steps.resize(store->tables.size());
  store->device.end();
  return DeviceHandles::all().add({std::move(store), nullptr});
}

void kvstore_close_cuda(Tensor handle) {
  DeviceHandles::all().get(handle);
  DeviceHandles::all().take(handle.data_ptr());
}

void kvstore_read_cuda(Tensor handle, int64_t table_index, Tensor ids, int64_t begin, int64_t end, Tensor out) {
  const StoreCall call(handle);
  auto& table = call.table(table_index);
  const auto keys = call.ids(ids);
  STD_TORCH_CHECK(begin >= 0 && begin <= end && end <= table.format().row_bytes, "range: got ", begin, " to ", end,
                  " of a row of ", table.format().row_bytes);
  const int64_t bytes = out.numel() * static_cast<int64_t>(out.element_size());
  STD_TORCH_CHECK(lies_beside(out, handle), "out: not a contiguous tensor of the device");
  STD_TORCH_CHECK(bytes == keys.size() * (end - begin), "out: got ", out.numel(), " elements for ", keys.size(),
                  " rows of ", end - begin, " bytes");
  table.read(keys, {begin, end}, {static_cast<uint8_t*>(out.data_ptr()), bytes}, call.moment_of(table_index));
}

Tensor kvstore_contains_cuda(Tensor handle, int64_t table_index, Tensor ids) {
  const StoreCall call(handle);
  const auto keys = call.ids(ids);
  Tensor result = torch::stable::new_empty(ids, {keys.size()}, ScalarType::Bool);
  call.table(table_index)
      .contains(keys, {static_cast<uint8_t*>(result.data_ptr()), keys.size()}, call.moment_of(table_index));
  return result;
}

Tensor kvstore_ids_cuda(Tensor handle, int64_t table_index, int64_t first, int64_t last) {
  const StoreCall call(handle);
  return call.longs(call.table(table_index).list(first, last, 0, call.moment_of(table_index)));
}

int64_t kvstore_size_cuda(Tensor handle, int64_t table_index) {
  const StoreCall call(handle);
  auto& table = call.table(table_index);
  const auto* const moment = call.moment_of(table_index);
  return moment == nullptr ? table.size() : table.size(*moment);
}

std::tuple<Tensor, Tensor, int64_t> kvstore_changes_cuda(Tensor handle, int64_t table_index, int64_t since) {
  const StoreCall call(handle);
  auto& table = call.table(table_index);
  auto* const moment = call.moment_of(table_index);
  const auto mark = static_cast<uint64_t>(since);
  return {call.longs(table.list(kIdMin, kIdMax, mark, moment)), call.longs(table.list_removed(mark, moment)),
          static_cast<int64_t>(moment == nullptr ? call.store->first_mark : call.moment->first_mark)};
}

int64_t kvstore_mark_cuda(Tensor handle) {
  const StoreCall call(handle);
  return static_cast<int64_t>(call.moment == nullptr ? call.store->version : call.moment->version);
}

int64_t kvstore_forget_cuda(Tensor handle, int64_t mark) {
  const StoreCall call(handle);
  call.check_is_store("a snapshot forgets nothing");
  try {
    forget(*call.store, static_cast<uint64_t>(mark));
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
  return 0;
}

int64_t kvstore_write_cuda(Tensor handle, int64_t table_index, Tensor ids, Tensor values, int64_t begin, int64_t now,
                           bool visit) {
  const StoreCall call(handle);
  const auto keys = call.ids(ids);
  const auto bytes = call.bytes(values, "values");
  const int64_t row_bytes = call.table(table_index).format().row_bytes;
  STD_TORCH_CHECK(values.size(0) == keys.size(), "values: got ", values.size(0), " rows for ", keys.size(), " ids");
  STD_TORCH_CHECK(begin >= kHeaderBytes && values.size(1) <= row_bytes - begin, "values: got ", values.size(1),
                  " bytes from byte ", begin, " on of a row of ", row_bytes);
  return call.change(table_index, [&](Store::Table& table, uint64_t version) {
    table.write(keys, bytes, {begin, begin + values.size(1)}, visit, static_cast<uint64_t>(now), version);
  });
}

int64_t kvstore_write_rows_cuda(Tensor handle, int64_t table_index, Tensor ids, Tensor rows) {
  const StoreCall call(handle);
  const auto keys = call.ids(ids);
  const auto bytes = call.bytes(rows, "rows");
  const int64_t row_bytes = call.table(table_index).format().row_bytes;
  STD_TORCH_CHECK(rows.size(0) == keys.size() && rows.size(1) == row_bytes, "rows: got [", rows.size(0), ", ",
                  rows.size(1), "], expected [", keys.size(), ", ", row_bytes, "]");
  return call.change(table_index,
                     [&](Store::Table& table, uint64_t version) { table.write_whole(keys, bytes, version); });
}

int64_t kvstore_write_metadata_cuda(Tensor handle, int64_t table_index, Tensor ids, Tensor words, int64_t mask) {
  const StoreCall call(handle);
  const auto keys = call.ids(ids), values = call.ids(words, "words");
  STD_TORCH_CHECK(values.size() == keys.size(), "words: got ", values.size(), " for ", keys.size(), " ids");
  return call.change(table_index, [&](Store::Table& table, uint64_t version) {
    table.write_metadata(keys, values, static_cast<uint64_t>(mask), version);
  });
}

// `hyper`: float64 [8] on the CPU.
int64_t kvstore_update_cuda(Tensor handle, int64_t table_index, Tensor ids, Tensor grads, Tensor hyper, int64_t now,
                            int64_t step) {
  const StoreCall call(handle);
  const auto keys = call.ids(ids);
  check_plain(grads, handle, ScalarType::Float, 2, "grads");
  const int64_t dim = call.table(table_index).format().dim;
  STD_TORCH_CHECK(hyper.is_cpu() && hyper.is_contiguous() && hyper.scalar_type() == ScalarType::Double &&
                      hyper.numel() == 8 && grads.size(0) == keys.size() && grads.size(1) == dim,
                  "grads: got [", grads.size(0), ", ", grads.size(1), "], expected [", keys.size(), ", ", dim, "]");
  const Hyper values = hyper_of(static_cast<const double*>(hyper.data_ptr()));
  return call.change(table_index, [&](Store::Table& table, uint64_t version) {
    table.update(keys, {static_cast<const float*>(grads.data_ptr()), grads.numel()}, values, static_cast<uint64_t>(now),
                 version);
    call.store->steps[static_cast<size_t>(table_index)] = step;
  });
}

// Nothing on the device knows of steps: no stream is asked.
int64_t& step_of(std::vector<int64_t>& steps, int64_t table_index) {
  STD_TORCH_CHECK(table_index >= 0 && table_index < static_cast<int64_t>(steps.size()), "table: got ", table_index,
                  ", the store has ", steps.size());
  return steps[static_cast<size_t>(table_index)];
}

void kvstore_set_step_cuda(Tensor handle, int64_t table_index, int64_t step) {
  const auto named = DeviceHandles::all().get(handle);
  STD_TORCH_CHECK(named.moment == nullptr, "handle: a snapshot cannot be written");
  step_of(named.store->steps, table_index) = step;
}

int64_t kvstore_step_cuda(Tensor handle, int64_t table_index) {
  const auto named = DeviceHandles::all().get(handle);
  return step_of(named.moment == nullptr ? named.store->steps : named.moment->steps, table_index);
}

// Returns [status, rows removed].
Tensor kvstore_delete_cuda(Tensor handle, int64_t table_index, Tensor ids) {
  const StoreCall call(handle);
  const auto keys = call.ids(ids);
  int64_t removed_count = 0;
  const int64_t status = call.change(
      table_index, [&](Store::Table& table, uint64_t version) { removed_count = table.remove(keys, version); });
  return call.longs({status, removed_count});
}

int64_t kvstore_clear_cuda(Tensor handle, int64_t table_index) {
  return StoreCall(handle).change(table_index, [](Store::Table& table, uint64_t version) { table.clear(version); });
}

std::tuple<Tensor, Tensor> kvstore_begin_round_cuda(Tensor handle, int64_t table_index, int64_t keep_count) {
  const StoreCall call(handle);
  call.check_is_store("a snapshot cannot be written");
  call.table(table_index);
  const auto [ids, facts] = begin_round(*call.store, static_cast<size_t>(table_index), keep_count);
  return {call.longs(ids), call.longs(facts)};
}

// `plan`: a message on the CPU. Returns [status, rows evicted].
Tensor kvstore_evict_cuda(Tensor handle, int64_t table_index, Tensor ids, Tensor plan) {
  const StoreCall call(handle);
  const auto keys = call.ids(ids);
  STD_TORCH_CHECK(plan.is_cpu() && plan.is_contiguous() && plan.scalar_type() == ScalarType::Long && plan.dim() == 2 &&
                      plan.size(0) == 1,
                  "plan: not one message on the CPU");
  const auto message =
      read_message<EvictionMessage>(static_cast<const int64_t*>(plan.data_ptr()), plan.size(1), 0, "plan");
  STD_TORCH_CHECK(is_policy(message.policy), "plan: got policy ", message.policy);
  int64_t evicted_count = 0;
  const int64_t status = call.change(table_index, [&](Store::Table& table, uint64_t version) {
    evicted_count = table.evict(keys, plan_of(message), version);
  });
  return call.longs({status, evicted_count});
}

int64_t kvstore_reserve_cuda(Tensor handle, int64_t table_index, int64_t row_count) {
  STD_TORCH_CHECK(row_count >= 0, "row_count: got ", row_count);
  return StoreCall(handle).attempt(table_index, [&](Store::Table& table) { table.reserve(row_count); });
}

// Without a cache there is nothing to do.
int64_t kvstore_prefetch_cuda(Tensor handle, int64_t table_index, Tensor ids) {
  const StoreCall call(handle);
  const auto keys = call.ids(ids);
  call.check_is_store("a snapshot brings no rows near");
  try {
    call.table(table_index).prefetch(keys);
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
  return 0;
}

// As on the CPU; who counts snapshots is above.
std::tuple<Tensor, int64_t> kvstore_stats_cuda(Tensor handle) {
  const StoreCall call(handle);
  return {call.longs(stats_of(*call.store)), 0};
}

// A handle of this moment; size 0 where memory ran out.
Tensor kvstore_snapshot_cuda(Tensor handle) {
  const StoreCall call(handle);
  call.check_is_store("a snapshot of a snapshot");
  try {
    return DeviceHandles::all().add({call.store, std::make_shared<Moment>(call.store)});
  } catch (const std::bad_alloc&) {
    return call.longs({});
  }
}

void kvstore_fail_after_cuda(Tensor handle, int64_t table_index, int64_t allocation_count) {
  const StoreCall call(handle);
  call.table(table_index);
  call.store->device.fail_after(allocation_count);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(twinproof, CUDA, m) {
  m.impl("kvstore_create", TORCH_BOX(&kvstore_create_cuda));
  m.impl("kvstore_close", TORCH_BOX(&kvstore_close_cuda));
  m.impl("kvstore_read", TORCH_BOX(&kvstore_read_cuda));
  m.impl("kvstore_contains", TORCH_BOX(&kvstore_contains_cuda));
  m.impl("kvstore_ids", TORCH_BOX(&kvstore_ids_cuda));
  m.impl("kvstore_size", TORCH_BOX(&kvstore_size_cuda));
  m.impl("kvstore_changes", TORCH_BOX(&kvstore_changes_cuda));
  m.impl("kvstore_mark", TORCH_BOX(&kvstore_mark_cuda));
  m.impl("kvstore_forget", TORCH_BOX(&kvstore_forget_cuda));
  m.impl("kvstore_write", TORCH_BOX(&kvstore_write_cuda));
  m.impl("kvstore_write_rows", TORCH_BOX(&kvstore_write_rows_cuda));
  m.impl("kvstore_write_metadata", TORCH_BOX(&kvstore_write_metadata_cuda));
  m.impl("kvstore_update", TORCH_BOX(&kvstore_update_cuda));
  m.impl("kvstore_set_step", TORCH_BOX(&kvstore_set_step_cuda));
  m.impl("kvstore_step", TORCH_BOX(&kvstore_step_cuda));
  m.impl("kvstore_delete", TORCH_BOX(&kvstore_delete_cuda));
  m.impl("kvstore_clear", TORCH_BOX(&kvstore_clear_cuda));
  m.impl("kvstore_begin_round", TORCH_BOX(&kvstore_begin_round_cuda));
  m.impl("kvstore_evict", TORCH_BOX(&kvstore_evict_cuda));
  m.impl("kvstore_reserve", TORCH_BOX(&kvstore_reserve_cuda));
  m.impl("kvstore_prefetch", TORCH_BOX(&kvstore_prefetch_cuda));
  m.impl("kvstore_stats", TORCH_BOX(&kvstore_stats_cuda));
  m.impl("kvstore_snapshot", TORCH_BOX(&kvstore_snapshot_cuda));
  m.impl("kvstore_fail_after", TORCH_BOX(&kvstore_fail_after_cuda));
}
