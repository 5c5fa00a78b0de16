// Every operator's schema, in one place. Mutated arguments are annotated; the typed wrappers are in fastimpl/ops.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(twinproof, m) {
  // Checkpoint. Windows and dense buffers are uint8; descriptors are int64, see fastimpl/ops.py.
  m.def("rect_place(Tensor(a!) window, int window_start, Tensor dense, Tensor descriptors) -> ()");
  m.def("rect_take(Tensor window, int window_start, Tensor(a!) dense, Tensor descriptors) -> ()");
  m.def("rect_read(int file, Tensor(a!) dense, Tensor(b!) window, Tensor descriptor) -> Tensor");
  m.def("strided_gather(Tensor source, int start, Tensor(a!) dense) -> ()");
  m.def("strided_scatter(Tensor(a!) target, int start, Tensor dense) -> ()");
  // Offload. Lists belong together by index; an empty list: there is none of this kind.
  m.def(
      "adam_step(Tensor[] grads, Tensor(a!)[] masters, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] max_exp_avg_sqs, "
      "Tensor(e!)[] weights, float[] hyper, bool maximize, bool coupled, int isa) -> ()");
  m.def("pack(Tensor[] sources, Tensor(a!) slab, int[] offsets) -> ()");
  m.def("unpack(Tensor(a!)[] targets, Tensor slab, int[] offsets) -> ()");
  // Pipeline. Tables [rows, dim] of their own dtypes and dims; ids int32 or int64; offsets int64 [features * bags + 1],
  // feature by feature; means by table; `width` columns are those of all features.
  m.def(
      "pool_bags(Tensor[] tables, int[] feature_tables, Tensor indices, Tensor offsets, Tensor? weights, int[] means, Tensor(a!) out, int isa) -> ()");
  m.def(
      "step_bags(Tensor(a!)[] tables, Tensor(b!)[] momentum1, Tensor(c!)[] momentum2, int[] feature_tables, Tensor indices, Tensor offsets, "
      "Tensor? weights, int[] means, Tensor grad, int optimizer, float[] hyper, int isa) -> ()");
  m.def(
      "bag_weight_gradients(Tensor[] tables, int[] feature_tables, Tensor indices, Tensor offsets, int[] means, Tensor grad, int isa) -> Tensor");
  m.def("check_bag_ids(Tensor indices, Tensor offsets, int[] row_counts) -> Tensor");
  m.def("mend_bag_ids(Tensor indices, Tensor offsets, int[] row_counts) -> Tensor");
  m.def("advise_huge_pages(Tensor memory) -> ()");
  m.def("gather_blocks(Tensor data, Tensor begins, Tensor sizes, Tensor(a!) out) -> ()");
  m.def(
      "bucketize(Tensor indices, Tensor offsets, Tensor? weights, Tensor? block_sizes, Tensor? destinations, int feature_count, int bucket_count) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  // Row store. A handle is immutable: it names a store or a snapshot; ids are int64, rows and values uint8.
  m.def("kv_create(Tensor formats, int shard_count) -> Tensor");
  m.def("kv_close(Tensor handle) -> ()");
  m.def("kv_read(Tensor handle, int table, Tensor ids, int begin, int end, Tensor(a!) out) -> ()");
  m.def("kv_contains(Tensor handle, int table, Tensor ids) -> Tensor");
  m.def("kv_ids(Tensor handle, int table, int first, int last) -> Tensor");
  m.def("kv_size(Tensor handle, int table) -> int");
  m.def("kv_changes(Tensor handle, int table, int since) -> (Tensor, Tensor)");
  m.def("kv_mark(Tensor handle) -> int");
  m.def("kv_write(Tensor handle, int table, Tensor ids, Tensor values, int begin, int now, bool visit) -> int");
  m.def("kv_write_rows(Tensor handle, int table, Tensor ids, Tensor rows) -> int");
  m.def("kv_write_metadata(Tensor handle, int table, Tensor ids, Tensor words, int mask) -> int");
  m.def("kv_update(Tensor handle, int table, Tensor ids, Tensor grads, Tensor hyper, int now) -> int");
  m.def("kv_delete(Tensor handle, int table, Tensor ids) -> Tensor");
  m.def("kv_clear(Tensor handle, int table) -> int");
  m.def("kv_begin_round(Tensor handle, int table, int keep_count) -> (Tensor, Tensor)");
  m.def("kv_evict(Tensor handle, int table, Tensor ids, Tensor plan) -> Tensor");
  m.def("kv_reserve(Tensor handle, int table, int row_count) -> int");
  m.def("kv_stats(Tensor handle) -> (Tensor, int)");
  m.def("kv_snapshot(Tensor handle) -> Tensor");
  m.def("kv_fail_after(Tensor handle, int table, int allocation_count) -> ()");
  m.def("kv_fill_open(Tensor handle, int table, int row_count, int ahead) -> Tensor");
  m.def("kv_fill(Tensor filling, int file, int begin, Tensor ids, Tensor ends, int start, int bucket_size) -> int");
  m.def("kv_fill_publish(Tensor filling) -> int");
  m.def("kv_sort_ids(Tensor ids, int total_count, int bucket_size, int begin, int end) -> (Tensor, Tensor, int)");
  m.def("file_read(int file, int begin, Tensor(a!) dense) -> Tensor");
  m.def("kv_keys(Tensor rows) -> Tensor");
  m.def("kv_saved_fit(Tensor rows, Tensor ids, Tensor ends, int start, int bucket_size) -> bool");
}
