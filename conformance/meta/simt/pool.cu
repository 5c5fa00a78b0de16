// All kernels of pooling, for a device.
#include "pipeline/pool_plan.h"

using namespace fastimpl::pipeline;

template <bool kWeighted, typename Id>
cudaError_t pool(const PoolLaunch& launch, const PoolBatch<Id>& batch, simt::Global<const PoolPart> parts,
                 cudaStream_t stream) {
  cudaError_t status = cudaSuccess;
  with_pool<kWeighted>(launch, batch, parts, [&](const auto& kernel) {
    status = simt::launch(kernel, launch.shape(batch.bag_count, 0), stream);
  });
  return status;
}

template cudaError_t pool<false>(const PoolLaunch&, const PoolBatch<int32_t>&, simt::Global<const PoolPart>,
                                 cudaStream_t);
template cudaError_t pool<true>(const PoolLaunch&, const PoolBatch<int32_t>&, simt::Global<const PoolPart>,
                                cudaStream_t);
template cudaError_t pool<false>(const PoolLaunch&, const PoolBatch<int64_t>&, simt::Global<const PoolPart>,
                                 cudaStream_t);
template cudaError_t pool<true>(const PoolLaunch&, const PoolBatch<int64_t>&, simt::Global<const PoolPart>,
                                cudaStream_t);
