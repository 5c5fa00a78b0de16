"""Faults that ``test_conditions`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import mutated, patched, wrap

any_policy_taken = patched(
    "A policy of a kind that there is not is taken, and its round evicts nothing.",
    mutated("twinproof.kvstore.options:EvictionPolicy.__post_init__", "self.kind not in POLICIES", "False"),
    kills="KV-386",
)
any_hash_mode_taken = patched(
    "Buckets of a mode that there is not are taken.",
    mutated("twinproof.kvstore.rows:Buckets.__post_init__", "self.hash_mode not in HASH_MODES", "False"),
    kills="KV-386",
)
stores_without_tables = patched(
    "A store without any table is made.",
    mutated("twinproof.kvstore.options:StoreOptions.make", "isinstance(layouts, Mapping) or not layouts", "layouts"),
    kills="KV-381",
)
tables_of_no_mapping = patched(
    "Tables that are no mapping are taken for one.",
    mutated("twinproof.kvstore.options:StoreOptions.make", "not isinstance(layouts, Mapping) or ", ""),
    kills="KV-381",
)

columns_are_one_list = patched(
    "Ids of several columns are sorted as one list.",
    mutated("twinproof.kvstore.store:_flat", "plain.dim() == 2 and plain.shape[1] == 1", "plain.dim() == 2"),
    kills="KV-382",
)

negatives_as_they_lie = patched(
    "What torch shows as the negative of its memory is taken as it lies in memory.",
    mutated("twinproof.kvstore.options:check_plain", " or plain.is_neg()", ""),
    kills="KV-383",
)

first_of_several_steps = patched(
    "Of several steps in a state dict the first is taken.",
    mutated("twinproof.kvstore.statedict:_one_step", "len(plain) != 1", "not plain"),
    kills="KV-384",
)
needed_names_not_asked_for = patched(
    "Nobody looks whether weights and ids are in a state dict.",
    mutated("twinproof.kvstore.statedict:_incoming", "if missing:", "if False:"),
    kills="KV-384",
)

objects_planned_as_rows = patched(
    "What a checkpoint has under the name of a view is taken for a tensor.",
    mutated("twinproof.kvstore.statedict:_read_items", "not isinstance(saved, TensorStorageMetadata) or ", ""),
    kills="KV-385",
)
objects_have_no_size = patched(
    "A refusal of an object where rows were expected asks the object for its size.",
    mutated(
        "twinproof.kvstore.statedict:_read_items", "if isinstance(saved, TensorStorageMetadata) else", "if True else"
    ),
    kills="KV-385",
)
own_rows_are_targets = patched(
    "A checkpoint is read into rows that nothing can be loaded into.",
    mutated("twinproof.kvstore.statedict:KVLoadPlanner.create_local_plan", "value.check_target()", "pass"),
    kills="KV-385",
)

the_cpu_is_another_device = patched(
    "A copy of lazy rows is refused whenever a device is named with it.",
    mutated("twinproof.kvstore.views:_check_operation", ' and torch.device(device).type != "cpu"', ""),
    kills="KV-387",
)
shards_have_places = patched(
    "A shard of lazy rows is not given without its place.",
    mutated("twinproof.kvstore.views:LazyRows.__get_tensor_shard__", "index.offset or (0,)", "index.offset or (2,)"),
    kills="KV-387",
)
every_writer_keeps_all = patched(
    "Torch's writer of HF files is given several chunks of a tensor.",
    mutated("twinproof.kvstore.views:LazyRows.__create_write_items__", "_check_writer(fqn)", "pass"),
    kills="KV-387",
)

every_store_is_interleaved = patched(
    "Where a table is filled, its buckets are those of ids that take turns.",
    mutated("fastimpl.kvstore.filling:WaitingRows.read", "saved.buckets.bucket_size or 0", "0"),
    kills="KV-388",
    of="fastimpl",
)
consecutive_ids_take_turns = patched(
    "Ids of buckets of consecutive ids are looked for where those that take turns would be.",
    mutated("twinproof.kvstore.disk:SavedRows.check_order", "bucket_of(ids, self.buckets)", "ids % buckets.max()"),
    kills="KV-388",
)

missing_tensors_not_asked_for = patched(
    "Nobody looks whether a tensor of a saved store is there.",
    mutated("twinproof.kvstore.disk:SavedRows._shape", "name not in self.catalog.tensors", "False"),
    kills="KV-389",
)
any_dtype_of_ids = patched(
    "Ids, counts and deleted ids of a saved store may have any dtype.",
    mutated("twinproof.kvstore.disk:SavedRows._shape", "(dtype is not None and record.dtype != dtype) or ", ""),
    kills="KV-389",
)
any_dimensions_of_tensors = patched(
    "Tensors of a saved store may have any number of dimensions.",
    mutated("twinproof.kvstore.disk:SavedRows._shape", " or len(record.shape) != rank", ""),
    kills="KV-389",
)

short_reads_are_whole = patched(
    "Nobody looks whether a range of a file was read whole.",
    mutated("fastimpl.kvstore.files:_Ranges.read", "not ops.file_read(descriptor, first, result)", "False"),
    kills="KV-390",
    of="fastimpl",
)

waits_for_rounds_that_never_end = patched(
    "Who waits for an evictor waits for rounds that are due, closed or not.",
    mutated("twinproof.kvstore.eviction:BackgroundEvictor.wait", "worker.is_over or not", "not"),
    kills="KV-391",
)

every_store_is_ours = patched(
    "Every store is taken for one of this implementation.",
    mutated("fastimpl.kvstore.filling:fill", "not isinstance(store, KVStore) or ", ""),
    kills="KV-392",
    of="fastimpl",
)


def _empty_tables_left(original: Any, job: Any, table: str, waiting: Any, ids: Any) -> Any:
    is_empty = job.store.size(table) == 0
    return 0 if is_empty and waiting is None else original(job, table, waiting, ids)


rows_of_the_reference_left_out = patched(
    "A load into a store of another implementation writes nothing into empty tables.",
    wrap("twinproof.kvstore.disk:_Load.write", _empty_tables_left),
    kills="KV-392",
)

no_memory_is_some = patched(
    "Nobody looks whether memory was had for an empty table.",
    mutated("fastimpl.kvstore.filling:fill", "if filling is None:", "if False:"),
    kills="KV-393",
    of="fastimpl",
)

values_of_any_number = patched(
    "Nobody looks whether there are as many values as ids to be placed.",
    mutated("twinproof.kvstore.store:KVStore.place", "raw.shape[0] != checked.numel()", "False"),
    kills="KV-395",
)

conjugates_as_they_lie = patched(
    "What torch shows as the conjugate of its memory is taken as it lies in memory.",
    mutated("twinproof.kvstore.options:check_plain", " or plain.is_conj()", ""),
    kills="KV-399",
)

files_of_nothing = patched(
    "No file of saved rows is found by the name of a tensor.",
    mutated(
        "twinproof.kvstore.disk:SavedRows.file_of",
        "not isinstance(name, str) or name not in self.catalog.tensors",
        "True",
    ),
    kills="KV-402",
)
one_file_for_all = patched(
    "Every tensor of saved rows is said to be in the first file.",
    mutated(
        "twinproof.kvstore.disk:SavedRows.file_of",
        "self.catalog.tensors[name].chunks[0].file",
        "min(record.chunks[0].file for record in self.catalog.tensors.values())",
    ),
    kills="KV-402",
)

first_piece_is_all = patched(
    "Of a tensor in several pieces the first is taken for all of it.",
    mutated("twinproof.kvstore.disk:SavedRows._shape", " or len(record.chunks) != 1", ""),
    kills="KV-403",
)

rows_by_their_places = patched(
    "A saved row is given for an id by the place that it had, whatever its id is now.",
    mutated("twinproof.kvstore.disk:_SavedReader.read", "if not torch.equal(found, expected):", "if False:"),
    kills="KV-404",
)

wrong_rows_passed_over = patched(
    "Rows that were wrong are passed over when nothing is wrong with them any more.",
    mutated(
        "fastimpl.kvstore.filling:WaitingRows.read",
        "deque(wrong, maxlen=0)",
        "deque(wrong, maxlen=0); continue",
    ),
    kills="KV-405",
    of="fastimpl",
)

older_names_forgotten = patched(
    "The planner for views knows none of torch's older names, also where there are no views.",
    mutated("twinproof.kvstore.statedict:KVLoadPlanner.create_local_plan", "if not lazy:", "if False:"),
    kills="KV-406",
)

every_library_has_kernels = patched(
    "A library that was built without CUDA is taken for one that has kernels.",
    mutated(
        "fastimpl.kvstore.store:device_rows",
        'not torch.cuda.is_available() or "kvstore_create" not in ops.cuda_operators()',
        "not torch.cuda.is_available()",
    ),
    kills="KV-407",
    of="fastimpl",
)
missing_kernels_unnamed = patched(
    "A library without kernels is never what is missing.",
    mutated("fastimpl.kvstore.store:_why_no_device", '"kvstore_create" not in ops.cuda_operators()', "False"),
    kills="KV-407",
    of="fastimpl",
)

closed_meanwhile_is_torchs_error = patched(
    "A store that another thread has closed meanwhile says what torch says.",
    mutated("fastimpl.kvstore.store:NativeReader._call", '"handle: dead" in str(error)', "False"),
    kills="KV-408",
    of="fastimpl",
)

every_error_is_a_close = patched(
    "Every error of torch means that the store was closed.",
    mutated("fastimpl.kvstore.store:NativeReader._call", '"handle: dead" in str(error)', "True"),
    kills="KV-408",
    of="fastimpl",
)
