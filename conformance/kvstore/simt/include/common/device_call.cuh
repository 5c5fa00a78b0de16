// What launchers ask of CUDA, made of the CPU: memory is the host's and not zero, a stream does everything at once, and
// a kernel is run by the plain execution of simt.h. Found before the library's header of this name.
//
// Two things are a GPU's own and are kept: the host waits where it allocates, where it copies from or to memory that is
// not pinned, and where it says so, which is counted within calls; and a copy to pinned memory is late for as long as a
// test says.
#pragma once

#include <simt.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <vector>

enum cudaError_t { cudaSuccess, cudaErrorMemoryAllocation, cudaErrorInvalidValue, cudaErrorNotReady };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault };
using cudaStream_t = struct FakeStream*;
using cudaEvent_t = struct FakeEvent*;
constexpr unsigned cudaEventDisableTiming = 2, cudaHostAllocDefault = 0, cudaHostAllocMapped = 2, kOfDevice = 99;

namespace fake {

// How many calls of this thread are under way. What is freed outside of any is a store that nobody has any more: when
// Python finds that out is no call's matter.
inline int& call_depth() {
  static thread_local int depth = 0;
  return depth;
}

class Host {
 public:
  // Copies to pinned memory stay under way until this is taken back, or the host waits.
  void hold_copies(bool is_held) {
    const std::lock_guard<std::mutex> held(guard_);
    is_held_ = is_held;
    if (!is_held_) deliver();
  }
  int64_t wait_count() {
    const std::lock_guard<std::mutex> held(guard_);
    return wait_count_;
  }
  void wait() {
    const std::lock_guard<std::mutex> held(guard_);
    if (call_depth() > 0) ++wait_count_;
    deliver();
  }
  int64_t copy_count() {
    const std::lock_guard<std::mutex> held(guard_);
    return static_cast<int64_t>(copies_.size());
  }
  void add(void* memory, size_t bytes, bool is_pinned) {
    const std::lock_guard<std::mutex> held(guard_);
    (is_pinned ? pinned_ : device_)[memory] = static_cast<int64_t>(bytes);
  }
  void take(void* memory) {
    const std::lock_guard<std::mutex> held(guard_);
    pinned_.erase(memory);
    device_.erase(memory);
  }
  // What is held for long, of one kind of memory.
  int64_t held_bytes(bool is_pinned) {
    const std::lock_guard<std::mutex> held(guard_);
    int64_t bytes = 0;
    for (const auto& [memory, size] : is_pinned ? pinned_ : device_) bytes += size;
    return bytes;
  }
  // Whether this copy to pinned memory is late: what it brings is what is there now.
  bool holds(void* to, const void* from, size_t bytes) {
    const std::lock_guard<std::mutex> held(guard_);
    if (!is_held_ || pinned_.count(to) == 0) return false;
    const auto* const begin = static_cast<const char*>(from);
    copies_.push_back({to, std::vector<char>(begin, begin + bytes)});
    std::memset(to, 0xA5, bytes);
    return true;
  }
  bool is_pinned(const void* memory) {
    const std::lock_guard<std::mutex> held(guard_);
    return pinned_.count(const_cast<void*>(memory)) != 0;
  }

 private:
  struct Copy {
    void* to;
    std::vector<char> bytes;
  };

  void deliver() {
    for (const Copy& copy : copies_) std::memcpy(copy.to, copy.bytes.data(), copy.bytes.size());
    copies_.clear();
  }

  std::mutex guard_;
  std::map<void*, int64_t> pinned_, device_;
  std::vector<Copy> copies_;
  int64_t wait_count_ = 0;
  bool is_held_ = false;
};

inline Host& host() {
  // Never destroyed: stores may outlive every other global.
  static Host* const only = new Host;
  return *only;
}

}  // namespace fake

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned flags) {
  fake::host().wait();
  const size_t whole = (bytes + 255) / 256 * 256;
  *memory = std::aligned_alloc(256, whole);
  if (*memory == nullptr) return cudaErrorMemoryAllocation;
  // Of large memory the rest stays untouched: each row is written before it is read, and the proofs see to that.
  std::memset(*memory, 0xA5, std::min<size_t>(whole, 4096));
  fake::host().add(*memory, bytes, flags != kOfDevice);
  return cudaSuccess;
}
inline cudaError_t cudaMalloc(void** memory, size_t bytes) { return cudaHostAlloc(memory, bytes, kOfDevice); }
inline cudaError_t cudaFree(void* memory) {
  fake::host().wait();
  fake::host().take(memory);
  std::free(memory);
  return cudaSuccess;
}
inline cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }
inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t /*stream*/) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t /*stream*/) {
  if (kind == cudaMemcpyDeviceToHost && fake::host().holds(to, from, bytes)) return cudaSuccess;
  const void* const on_host = kind == cudaMemcpyDeviceToHost ? to : from;
  const bool leaves = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToHost;
  if (leaves && !fake::host().is_pinned(on_host)) fake::host().wait();
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t /*stream*/) {
  fake::host().wait();
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() {
  fake::host().wait();
  return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t /*event*/) {
  fake::host().wait();
  return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t /*event*/) {
  return fake::host().copy_count() == 0 ? cudaSuccess : cudaErrorNotReady;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t /*stream*/, cudaEvent_t event, unsigned /*flags*/) {
  return event == nullptr ? cudaErrorInvalidValue : cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned /*flags*/) {
  *event = static_cast<cudaEvent_t>(std::malloc(1));
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  std::free(event);
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t /*stream*/) {
  return event == nullptr ? cudaErrorInvalidValue : cudaSuccess;
}

namespace cub {

// The first call of each says how much memory the second one needs.
struct DeviceRadixSort {
  template <typename Key, typename Value>
  static cudaError_t SortPairs(void* space, size_t& bytes, const Key* keys, Key* sorted, const Value* values,
                               Value* moved, int64_t count, int begin_bit, int end_bit, cudaStream_t /*stream*/) {
    if (space == nullptr) {
      bytes = 1;
      return cudaSuccess;
    }
    if (begin_bit != 0 || end_bit < 1 || end_bit > 64) return cudaErrorInvalidValue;
    const Key mask = end_bit == 64 ? ~Key{0} : (Key{1} << end_bit) - 1;
    std::vector<std::pair<Key, int64_t>> order(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) order[static_cast<size_t>(i)] = {keys[i] & mask, i};
    std::sort(order.begin(), order.end());
    for (int64_t i = 0; i < count; ++i) {
      const int64_t from = order[static_cast<size_t>(i)].second;
      sorted[i] = keys[from];
      moved[i] = values[from];
    }
    return cudaSuccess;
  }
};
struct DeviceScan {
  template <typename Value>
  static cudaError_t InclusiveSum(void* space, size_t& bytes, const Value* values, Value* sums, int64_t count,
                                  cudaStream_t /*stream*/) {
    bytes = 1;
    if (space != nullptr) std::partial_sum(values, values + count, sums);
    return cudaSuccess;
  }
};

}  // namespace cub

namespace simt {

// One warp does what many would.
template <typename Kernel>
cudaError_t launch(const Kernel& kernel, Shape shape, cudaStream_t /*stream*/) {
  static_assert(std::is_trivially_copyable_v<Kernel> && sizeof(Kernel) <= 4096, "not an argument of a launch");
  const bool fits = shape.blocks >= 1 && shape.threads >= kLanes && shape.threads % kLanes == 0 &&
                    shape.threads <= Kernel::kThreads && shape.shared_bytes >= 0 && shape.shared_bytes <= 96 * 1024;
  if (!fits) return cudaErrorInvalidValue;
  static thread_local prover::World world;
  world.launch(kernel, {1, kLanes, shape.shared_bytes});
  return cudaSuccess;
}

}  // namespace simt

namespace fastimpl::device {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct DeviceGuard {
  explicit DeviceGuard(int32_t /*index*/) { ++fake::call_depth(); }
  ~DeviceGuard() { --fake::call_depth(); }
};

inline void check_cuda(cudaError_t status) { STD_TORCH_CHECK(status == cudaSuccess, "CUDA: status ", int{status}); }
inline cudaStream_t stream_of(const Tensor& /*like*/) { return nullptr; }
inline bool lies_beside(const Tensor& t, const Tensor& like) {
  return t.is_cpu() && like.is_cpu() && t.is_contiguous();
}
inline void check_plain(const Tensor& t, const Tensor& like, ScalarType type, int64_t dim, const char* name) {
  STD_TORCH_CHECK(lies_beside(t, like) && t.scalar_type() == type && t.dim() == dim, name,
                  ": not a contiguous tensor of the device, dtype and rank");
}

}  // namespace fastimpl::device
