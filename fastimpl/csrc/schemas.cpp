// Every operator's schema, in one place. Mutated arguments are annotated; the typed wrappers are in fastimpl/ops.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(twinproof, m) {
  // Checkpoint. Windows and dense buffers are uint8; descriptors are int64, see fastimpl/ops.py.
  m.def("rect_place(Tensor(a!) window, int window_start, Tensor dense, Tensor descriptors) -> ()");
  m.def("rect_take(Tensor window, int window_start, Tensor(a!) dense, Tensor descriptors) -> ()");
  m.def("rect_read(int file, Tensor(a!) dense, Tensor(b!) window, Tensor descriptor) -> Tensor");
  m.def("strided_gather(Tensor source, int start, Tensor(a!) dense) -> ()");
  m.def("strided_scatter(Tensor(a!) target, int start, Tensor dense) -> ()");
}
