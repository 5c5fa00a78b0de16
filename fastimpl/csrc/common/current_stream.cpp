// The one place that looks up torch's current CUDA stream, and the operator that says whether it is found.
//
// The function lies in libtorch_cuda.so alone. torch loads that library with local scope, and a CPU build has none, so
// that neither linking nor a weak symbol reaches it: it is looked up in the library that torch has loaded already.
#include "common/current_stream.h"

#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

namespace fastimpl {
namespace {

using CurrentStream = int32_t (*)(int32_t device_index, void** stream);

CurrentStream look_up() {
  void* const library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
  if (library == nullptr) return nullptr;
  return reinterpret_cast<CurrentStream>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
}

CurrentStream found() {
  static const CurrentStream function = look_up();
  return function;
}

bool stream_symbol() { return knows_current_stream(); }

}  // namespace

bool knows_current_stream() { return found() != nullptr; }

void* current_stream(int32_t device_index) {
  STD_TORCH_CHECK(knows_current_stream(),
                  "no current CUDA stream: this torch has no libtorch_cuda.so with aoti_torch_get_current_cuda_stream; "
                  "expected a CUDA build of torch 2.11 or later");
  void* stream = nullptr;
  STD_TORCH_CHECK(found()(device_index, &stream) == 0, "no current CUDA stream: torch refused device ", device_index);
  return stream;
}

}  // namespace fastimpl

STABLE_TORCH_LIBRARY_IMPL(twinproof, CompositeExplicitAutograd, m) {
  m.impl("common_stream_symbol", TORCH_BOX(&fastimpl::stream_symbol));
}
