// All kernels that look at ids, place them and move them, for a device.
#include "common/words_kernel.h"
#include "pipeline/check_kernel.h"
#include "pipeline/move_kernel.h"
#include "pipeline/place_kernel.h"

using namespace fastimpl;
using namespace fastimpl::pipeline;

template cudaError_t simt::launch(const StoreWords&, simt::Shape, cudaStream_t);
template cudaError_t simt::launch(const CheckOffsets&, simt::Shape, cudaStream_t);
template cudaError_t simt::launch(const CheckIds<int32_t>&, simt::Shape, cudaStream_t);
template cudaError_t simt::launch(const CheckIds<int64_t>&, simt::Shape, cudaStream_t);
template cudaError_t simt::launch(const PlacePositions<int32_t>&, simt::Shape, cudaStream_t);
template cudaError_t simt::launch(const PlacePositions<int64_t>&, simt::Shape, cudaStream_t);
template cudaError_t simt::launch(const WeightGradients<int32_t>&, simt::Shape, cudaStream_t);
template cudaError_t simt::launch(const WeightGradients<int64_t>&, simt::Shape, cudaStream_t);
template cudaError_t simt::launch(const GatherBlocks<uint8_t>&, simt::Shape, cudaStream_t);
template cudaError_t simt::launch(const GatherBlocks<uint32_t>&, simt::Shape, cudaStream_t);
template cudaError_t simt::launch(const GatherBlocks<uint64_t>&, simt::Shape, cudaStream_t);
template cudaError_t simt::launch(const FindBuckets<int32_t>&, simt::Shape, cudaStream_t);
template cudaError_t simt::launch(const FindBuckets<int64_t>&, simt::Shape, cudaStream_t);
template cudaError_t simt::launch(const MoveToBuckets<int32_t>&, simt::Shape, cudaStream_t);
template cudaError_t simt::launch(const MoveToBuckets<int64_t>&, simt::Shape, cudaStream_t);
