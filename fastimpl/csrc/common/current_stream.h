// The caller's stream on a CUDA device, asked of torch.
#pragma once

#include <cstdint>

namespace fastimpl {

// Whether the torch of this process can be asked: true in a build with CUDA, with or without a GPU.
bool knows_current_stream();

// torch's current stream of the calling thread on a device, a cudaStream_t. Throws where torch cannot be asked.
void* current_stream(int32_t device_index);

}  // namespace fastimpl
