// The right kernels for a device: that the same source compiles.
#include "kernels.h"

using namespace cases;

template <typename... Kernels>
cudaError_t launch_all(cudaStream_t stream) {
  cudaError_t last = cudaSuccess;
  ((last = simt::launch(Kernels{}, {2, 32, 256}, stream)), ...);
  return last;
}

cudaError_t every(cudaStream_t stream) {
  return launch_all<Insert<Bug::kNone>, Rounds, Neighbours, WarpSums, Message<Publish::kRelease>,
                    Message<Publish::kFence>, LastBlock<Order::kAcqRel>, Pipeline<Ring::kRight>, Histogram, Bytes,
                    Flags<true>, Slips>(stream);
}
