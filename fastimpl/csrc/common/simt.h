// What kernels are written with: one source, two executions. Under nvcc each call is the intrinsic of its name. A host
// compiler takes <simt/host.h> of the prover instead (conformance/provers/simt, found by include path), under which
// each thread of the grid is a fiber and each access is checked. A kernel is a plain struct with `kThreads`, the most
// threads of a block, and `void operator()() const`; it reaches memory through Global and Shared alone. A guard by
// name: a copy of this file in another project is the same header.
#ifndef SIMT_KERNEL_HEADER
#define SIMT_KERNEL_HEADER

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace simt {

enum class Order { kRelaxed, kAcquire, kRelease, kAcqRel };
// Who takes part in an atomic access or a fence: the threads of a block, or of the device.
enum class Scope { kBlock, kDevice };

constexpr unsigned kLanes = 32, kAllLanes = 0xFFFFFFFFU;

// Neighbouring elements that one instruction moves; their place is a multiple of their size.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T values[kCount];
};

struct Shape {
  int64_t blocks;
  int64_t threads;
  int64_t shared_bytes = 0;
};

}  // namespace simt

#if !defined(__CUDACC__)
#include <simt/host.h>
#else

#include <cuda_runtime.h>

#include <cuda/atomic>

#define SIMT __device__ __forceinline__
#define SIMT_UNROLL _Pragma("unroll")

namespace simt {

SIMT unsigned thread() { return threadIdx.x; }
SIMT unsigned threads() { return blockDim.x; }
SIMT unsigned block() { return blockIdx.x; }
SIMT unsigned blocks() { return gridDim.x; }
SIMT unsigned lane() { return threadIdx.x % kLanes; }
SIMT unsigned warp() { return threadIdx.x / kLanes; }

// Of a mask that is not zero.
SIMT unsigned first_lane(unsigned mask) { return static_cast<unsigned>(__ffs(static_cast<int>(mask))) - 1; }
SIMT unsigned count_lanes(unsigned mask) { return static_cast<unsigned>(__popc(mask)); }

// All threads of the block meet, and what each did before is seen by all.
SIMT void sync_block() { __syncthreads(); }
// The lanes of `mask` meet, and what each did before is seen by them. No other collective of lanes orders memory.
SIMT void sync_warp(unsigned mask) { __syncwarp(mask); }

SIMT unsigned ballot(unsigned mask, bool yes) { return __ballot_sync(mask, yes); }
SIMT bool any(unsigned mask, bool yes) { return __any_sync(mask, yes) != 0; }
SIMT bool all(unsigned mask, bool yes) { return __all_sync(mask, yes) != 0; }
template <typename T>
SIMT unsigned match_any(unsigned mask, T value) {
  return __match_any_sync(mask, value);
}
// `width` is a power of two: lanes exchange within groups of that many.
template <typename T>
SIMT T shuffle(unsigned mask, T value, unsigned from, unsigned width = kLanes) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves 4 or 8 bytes");
  return __shfl_sync(mask, value, static_cast<int>(from), static_cast<int>(width));
}
template <typename T>
SIMT T shuffle_up(unsigned mask, T value, unsigned by, unsigned width = kLanes) {
  return __shfl_up_sync(mask, value, by, static_cast<int>(width));
}
template <typename T>
SIMT T shuffle_down(unsigned mask, T value, unsigned by, unsigned width = kLanes) {
  return __shfl_down_sync(mask, value, by, static_cast<int>(width));
}
template <typename T>
SIMT T shuffle_xor(unsigned mask, T value, unsigned with, unsigned width = kLanes) {
  return __shfl_xor_sync(mask, value, static_cast<int>(with), static_cast<int>(width));
}

// Orders what this thread did before with what it does after, for acquiring and releasing relaxed atomics around it.
SIMT void fence(Scope scope = Scope::kDevice) {
  if (scope == Scope::kBlock) {
    cuda::atomic_thread_fence(cuda::memory_order_acq_rel, cuda::thread_scope_block);
  } else {
    cuda::atomic_thread_fence(cuda::memory_order_acq_rel, cuda::thread_scope_device);
  }
}

namespace detail {

SIMT constexpr cuda::memory_order order_of(Order order) {
  return order == Order::kRelaxed   ? cuda::memory_order_relaxed
         : order == Order::kAcquire ? cuda::memory_order_acquire
         : order == Order::kRelease ? cuda::memory_order_release
                                    : cuda::memory_order_acq_rel;
}

// Calls `body` with the atomic reference of the scope.
template <typename T, typename Body>
SIMT auto with_atomic(T* at, Scope scope, const Body& body) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "an atomic access moves 4 or 8 bytes");
  if (scope == Scope::kBlock) return body(cuda::atomic_ref<T, cuda::thread_scope_block>(*at));
  return body(cuda::atomic_ref<T, cuda::thread_scope_device>(*at));
}

// `count` elements of memory. On the device an index is trusted; in the prover it is checked.
template <typename T, bool kShared>
class Memory {
 public:
  using Value = std::remove_const_t<T>;

  Memory() = default;
  __host__ __device__ Memory(T* data, int64_t count) : data_(data), count_(count) {}
  template <typename U = T, typename = std::enable_if_t<std::is_const_v<U> > >
  __host__ __device__ Memory(const Memory<Value, kShared>& other) : data_(other.data()), count_(other.size()) {}

  __host__ __device__ int64_t size() const { return count_; }
  __host__ __device__ T* data() const { return data_; }
  // Elements from `begin` on.
  SIMT Memory part(int64_t begin, int64_t count) const { return Memory(data_ + begin, count); }
  template <typename U>
  SIMT Memory<U, kShared> as() const {
    return Memory<U, kShared>(reinterpret_cast<U*>(data_),
                              count_ * static_cast<int64_t>(sizeof(T)) / static_cast<int64_t>(sizeof(U)));
  }

  SIMT Value load(int64_t at) const { return data_[at]; }
  SIMT void store(int64_t at, Value value) const { data_[at] = value; }
  template <int kCount>
  SIMT Vector<Value, kCount> load_vector(int64_t at) const {
    return *reinterpret_cast<const Vector<Value, kCount>*>(data_ + at);
  }
  template <int kCount>
  SIMT void store_vector(int64_t at, const Vector<Value, kCount>& value) const {
    if constexpr (!kShared && std::is_same_v<Value, float> && kCount == 4) {
      // By name: of an assignment the compiler may make four stores.
      asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(data_ + at)),
                   "f"(value.values[0]), "f"(value.values[1]), "f"(value.values[2]), "f"(value.values[3])
                   : "memory");
    } else {
      *reinterpret_cast<Vector<Value, kCount>*>(data_ + at) = value;
    }
  }

  SIMT Value atomic_load(int64_t at, Order order = Order::kRelaxed, Scope scope = Scope::kDevice) const {
    auto* const place = const_cast<Value*>(data_ + at);
    return with_atomic(place, scope, [&](auto ref) { return ref.load(order_of(order)); });
  }
  SIMT void atomic_store(int64_t at, Value value, Order order = Order::kRelaxed, Scope scope = Scope::kDevice) const {
    with_atomic(data_ + at, scope, [&](auto ref) {
      ref.store(value, order_of(order));
      return 0;
    });
  }
  // These return what was there before.
  SIMT Value atomic_add(int64_t at, Value value, Order order = Order::kRelaxed, Scope scope = Scope::kDevice) const {
    return with_atomic(data_ + at, scope, [&](auto ref) { return ref.fetch_add(value, order_of(order)); });
  }
  SIMT Value atomic_min(int64_t at, Value value, Order order = Order::kRelaxed, Scope scope = Scope::kDevice) const {
    return with_atomic(data_ + at, scope, [&](auto ref) { return ref.fetch_min(value, order_of(order)); });
  }
  SIMT Value atomic_max(int64_t at, Value value, Order order = Order::kRelaxed, Scope scope = Scope::kDevice) const {
    return with_atomic(data_ + at, scope, [&](auto ref) { return ref.fetch_max(value, order_of(order)); });
  }
  SIMT Value atomic_and(int64_t at, Value value, Order order = Order::kRelaxed, Scope scope = Scope::kDevice) const {
    return with_atomic(data_ + at, scope, [&](auto ref) { return ref.fetch_and(value, order_of(order)); });
  }
  SIMT Value atomic_or(int64_t at, Value value, Order order = Order::kRelaxed, Scope scope = Scope::kDevice) const {
    return with_atomic(data_ + at, scope, [&](auto ref) { return ref.fetch_or(value, order_of(order)); });
  }
  SIMT Value atomic_exchange(int64_t at, Value value, Order order = Order::kRelaxed,
                             Scope scope = Scope::kDevice) const {
    return with_atomic(data_ + at, scope, [&](auto ref) { return ref.exchange(value, order_of(order)); });
  }
  // Stores `wanted` where `expected` is.
  SIMT Value atomic_cas(int64_t at, Value expected, Value wanted, Order order = Order::kRelaxed,
                        Scope scope = Scope::kDevice) const {
    return with_atomic(data_ + at, scope, [&](auto ref) {
      Value found = expected;
      ref.compare_exchange_strong(found, wanted, order_of(order),
                                  order_of(order == Order::kAcqRel    ? Order::kAcquire
                                           : order == Order::kRelease ? Order::kRelaxed
                                                                      : order));
      return found;
    });
  }

 private:
  T* data_ = nullptr;
  int64_t count_ = 0;
};

extern __shared__ __align__(16) unsigned char shared_bytes[];

}  // namespace detail

template <typename T>
using Global = detail::Memory<T, false>;
template <typename T>
using Shared = detail::Memory<T, true>;

// A part of the bytes of shared memory that the launch gives each block.
template <typename T>
SIMT Shared<T> shared(int64_t offset_bytes, int64_t count) {
  return Shared<T>(reinterpret_cast<T*>(detail::shared_bytes + offset_bytes), count);
}

// An asynchronous copy of 4, 8 or 16 bytes; of these the first `valid_bytes` come from `from`, the rest are zero. It is
// over when wait_copies says so, for this thread alone.
template <int kBytes, typename T>
SIMT void copy_async(Shared<T> to, int64_t at, Global<std::add_const_t<T> > from, int64_t from_at,
                     int valid_bytes = kBytes) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "an asynchronous copy moves 4, 8 or 16 bytes");
  const auto target = static_cast<unsigned>(__cvta_generic_to_shared(to.data() + at));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(from.data() + from_at),
                 "r"(valid_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(from.data() + from_at), "n"(kBytes),
                 "r"(valid_bytes)
                 : "memory");
  }
}
// The copies since the last call are a group.
SIMT void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `kLeft` of this thread's groups are under way.
template <int kLeft>
SIMT void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

namespace detail {

// One block is room enough: without the 1 the compiler spills registers to make room for more.
template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1) run(const Kernel kernel) {
  kernel();
}

}  // namespace detail

template <typename Kernel>
cudaError_t launch(const Kernel& kernel, Shape shape, cudaStream_t stream) {
  static_assert(std::is_trivially_copyable_v<Kernel> && sizeof(Kernel) <= 4096, "not an argument of a launch");
  if (shape.shared_bytes > 48 * 1024) {
    const cudaError_t status = cudaFuncSetAttribute(detail::run<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                    static_cast<int>(shape.shared_bytes));
    if (status != cudaSuccess) return status;
  }
  void* arguments[] = {const_cast<Kernel*>(&kernel)};
  return cudaLaunchKernel(detail::run<Kernel>, dim3(static_cast<unsigned>(shape.blocks)),
                          dim3(static_cast<unsigned>(shape.threads)), arguments,
                          static_cast<size_t>(shape.shared_bytes), stream);
}

}  // namespace simt
#endif  // __CUDACC__
#endif  // SIMT_KERNEL_HEADER
