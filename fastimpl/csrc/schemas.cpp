// Every operator's schema, in one place. Mutated arguments are annotated; the typed wrappers are in fastimpl/ops.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(twinproof, m) {
  // Of the library itself: whether torch's current CUDA stream can be asked for.
  m.def("common_stream_symbol() -> bool");
  // Checkpoint. Windows and dense buffers are uint8; descriptors are int64, see fastimpl/ops.
  m.def("checkpoint_place(Tensor(a!) window, int window_start, Tensor dense, Tensor descriptors) -> ()");
  m.def("checkpoint_take(Tensor window, int window_start, Tensor(a!) dense, Tensor descriptors) -> ()");
  m.def("checkpoint_read(int file, Tensor(a!) dense, Tensor(b!) window, Tensor descriptor) -> Tensor");
  m.def("checkpoint_crc32(Tensor data, Tensor cuts) -> Tensor");
  m.def(
      "checkpoint_dequantize_fp8(Tensor values, Tensor table, Tensor scales, int first_row, int first_column, int "
      "block, Tensor(a!) out) -> ()");
  m.def("checkpoint_dequantize_mxfp4(Tensor values, Tensor scales, int skip, Tensor(a!) out) -> ()");
  m.def("checkpoint_gather(Tensor source, int start, Tensor(a!) dense) -> ()");
  m.def("checkpoint_scatter(Tensor(a!) target, int start, Tensor dense) -> ()");
  // Offload. Lists belong together by index; an empty list: there is none of this kind.
  m.def(
      "offload_adam_step(Tensor[] grads, Tensor(a!)[] masters, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor(d!)[] max_exp_avg_sqs, "
      "Tensor(e!)[] weights, float[] hyper, bool maximize, bool coupled, int isa) -> ()");
  m.def(
      "offload_slot_step(int kind, Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] first, Tensor(c!)[] second, "
      "Tensor(d!)[] third, int[] hyper_of, float[] hypers) -> ()");
  m.def("offload_copy(Tensor(a!)[] targets, Tensor[] sources) -> ()");
  m.def("offload_copy_count(Tensor[] targets, Tensor[] sources) -> int");
  m.def("offload_slab(int size, int device, int node) -> Tensor");
  m.def("offload_slab_facts(Tensor memory) -> int[]");
  m.def("offload_slab_counts() -> int[]");
  m.def("offload_pack(Tensor[] sources, Tensor(a!) slab, int[] offsets) -> ()");
  m.def("offload_unpack(Tensor(a!)[] targets, Tensor slab, int[] offsets) -> ()");
  // Pipeline. Tables [rows, dim] of their own dtypes and dims; ids int32 or int64; offsets int64 [features * bags + 1],
  // feature by feature; means by table; `width` columns are those of all features.
  m.def(
      "pipeline_pool(Tensor[] tables, int[] feature_tables, Tensor indices, Tensor offsets, Tensor? weights, int[] "
      "means, Tensor(a!) out, int isa, int max_blocks=0) -> ()");
  m.def(
      "pipeline_step(Tensor(a!)[] tables, Tensor(b!)[] momentum1, Tensor(c!)[] momentum2, int[] feature_tables, Tensor "
      "indices, Tensor offsets, "
      "Tensor? weights, int[] means, Tensor grad, int optimizer, float[] hyper, int isa) -> ()");
  m.def(
      "pipeline_weight_gradients(Tensor[] tables, int[] feature_tables, Tensor indices, Tensor offsets, int[] means, "
      "Tensor grad, int isa) -> Tensor");
  m.def("pipeline_check_ids(Tensor indices, Tensor offsets, int[] row_counts) -> Tensor");
  m.def("pipeline_mend_ids(Tensor indices, Tensor offsets, int[] row_counts) -> Tensor");
  m.def("pipeline_settle_ids(Tensor indices, Tensor offsets, int[] row_counts) -> (Tensor, Tensor, Tensor)");
  m.def("pipeline_advise_huge_pages(Tensor memory) -> ()");
  m.def("pipeline_gather_blocks(Tensor data, Tensor begins, Tensor sizes, Tensor(a!) out) -> ()");
  m.def(
      "pipeline_bucketize(Tensor indices, Tensor offsets, Tensor? weights, Tensor? block_sizes, Tensor? destinations, "
      "int feature_count, int bucket_count) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  // Row store. A handle is immutable: it names a store or a snapshot; ids are int64, rows and values uint8.
  m.def("kvstore_create(Tensor formats, int shard_count) -> Tensor");
  m.def("kvstore_close(Tensor handle) -> ()");
  m.def("kvstore_read(Tensor handle, int table, Tensor ids, int begin, int end, Tensor(a!) out) -> ()");
  m.def("kvstore_contains(Tensor handle, int table, Tensor ids) -> Tensor");
  m.def("kvstore_ids(Tensor handle, int table, int first, int last) -> Tensor");
  m.def("kvstore_size(Tensor handle, int table) -> int");
  m.def("kvstore_changes(Tensor handle, int table, int since) -> (Tensor, Tensor, int)");
  m.def("kvstore_mark(Tensor handle) -> int");
  m.def("kvstore_forget(Tensor handle, int mark) -> int");
  m.def("kvstore_write(Tensor handle, int table, Tensor ids, Tensor values, int begin, int now, bool visit) -> int");
  m.def("kvstore_write_rows(Tensor handle, int table, Tensor ids, Tensor rows) -> int");
  m.def("kvstore_write_metadata(Tensor handle, int table, Tensor ids, Tensor words, int mask) -> int");
  m.def("kvstore_update(Tensor handle, int table, Tensor ids, Tensor grads, Tensor hyper, int now, int step) -> int");
  m.def("kvstore_set_step(Tensor handle, int table, int step) -> ()");
  m.def("kvstore_step(Tensor handle, int table) -> int");
  m.def("kvstore_delete(Tensor handle, int table, Tensor ids) -> Tensor");
  m.def("kvstore_clear(Tensor handle, int table) -> int");
  m.def("kvstore_begin_round(Tensor handle, int table, int keep_count) -> (Tensor, Tensor)");
  m.def("kvstore_evict(Tensor handle, int table, Tensor ids, Tensor plan) -> Tensor");
  m.def("kvstore_reserve(Tensor handle, int table, int row_count) -> int");
  m.def("kvstore_prefetch(Tensor handle, int table, Tensor ids) -> int");
  m.def("kvstore_stats(Tensor handle) -> (Tensor, int)");
  m.def("kvstore_snapshot(Tensor handle) -> Tensor");
  m.def("kvstore_fail_after(Tensor handle, int table, int allocation_count) -> ()");
  m.def("kvstore_fill_open(Tensor handle, int table, int row_count, int ahead) -> Tensor");
  m.def(
      "kvstore_fill(Tensor filling, int file, int begin, Tensor ids, Tensor ends, int start, int bucket_size) -> int");
  m.def("kvstore_fill_publish(Tensor filling) -> int");
  m.def("kvstore_sort_ids(Tensor ids, int total_count, int bucket_size, int begin, int end) -> (Tensor, Tensor, int)");
  m.def("kvstore_read_file(int file, int begin, Tensor(a!) dense) -> Tensor");
  m.def("kvstore_keys(Tensor rows) -> Tensor");
  m.def("kvstore_saved_fit(Tensor rows, Tensor ids, Tensor ends, int start, int bucket_size) -> bool");
}
