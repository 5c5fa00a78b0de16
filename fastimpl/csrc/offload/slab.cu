// What CUDA does for slabs.
#include "offload/slab.h"

#include <cuda_runtime.h>

#include <cctype>
#include <fstream>
#include <string>

#include "common/current_stream.h"

namespace fastimpl::offload {
namespace {

// Calls that a capture of another thread would forbid are allowed in this scope: none of them is captured.
class Relaxed {
 public:
  Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class OnDevice {
 public:
  explicit OnDevice(int device) {
    cudaGetDevice(&before_);
    cudaSetDevice(device);
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

// Errors while memory is given back have nobody to go to: the process may be ending.
struct CudaDriver : PinDriver {
  int node_of(int device) override {
    char id[32] = {};
    if (cudaDeviceGetPCIBusId(id, sizeof id, device) != cudaSuccess) return -1;
    std::string name(id);
    for (char& letter : name) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
    std::ifstream file("/sys/bus/pci/devices/" + name + "/numa_node");
    int node = -1;
    return file >> node ? node : -1;
  }
  int pin(void* pages, size_t bytes, int device) override {
    const OnDevice there(device);
    const cudaError_t status = cudaHostRegister(pages, bytes, cudaHostRegisterPortable);
    if (status != cudaSuccess) cudaGetLastError();
    return status;
  }
  void unpin(void* pages, int device) override {
    const OnDevice there(device);
    const Relaxed relaxed;
    cudaHostUnregister(pages);
    cudaGetLastError();
  }
  void* record(void* event, void* stream) override {
    auto made = static_cast<cudaEvent_t>(event);
    if (made == nullptr && cudaEventCreateWithFlags(&made, cudaEventDisableTiming) != cudaSuccess) return nullptr;
    cudaEventRecord(made, static_cast<cudaStream_t>(stream));
    return made;
  }
  void wait(void* event, int device) override {
    if (event == nullptr) return;
    const OnDevice there(device);
    const Relaxed relaxed;
    cudaEventSynchronize(static_cast<cudaEvent_t>(event));
    cudaEventDestroy(static_cast<cudaEvent_t>(event));
    cudaGetLastError();
  }
  bool is_capturing(int device) override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    try {
      if (!knows_current_stream()) return false;
      const cudaError_t asked = cudaStreamIsCapturing(static_cast<cudaStream_t>(current_stream(device)), &status);
      // The default stream cannot be asked while another thread captures.
      if (asked != cudaSuccess) cudaGetLastError();
      return asked == cudaErrorStreamCaptureImplicit || status != cudaStreamCaptureStatusNone;
    } catch (...) {
      // Torch is on its way out, and captures nothing any more.
      return false;
    }
  }
};

}  // namespace

PinDriver* pin_driver() {
  static CudaDriver* const made = new CudaDriver;
  return made;
}

}  // namespace fastimpl::offload
