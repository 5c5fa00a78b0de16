"""Faults that ``test_wrong_types`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched
from twinproof.errors import ConfigError


@fault(kills="KV-230", at="twinproof.kvstore.disk:check_store")
def argument_not_named(original: Any, store: Any) -> None:
    """What is no store is refused without the argument that it was given for."""
    try:
        original(store)
    except ConfigError as error:
        raise ConfigError(error.message, got=error.got, expected=error.expected, where=None) from None


what_is_no_tensor_not_named = patched(
    "What is no tensor is refused without the argument that it was given for.",
    mutated(
        "twinproof.kvstore.options:check_tensor", 'expected="torch.Tensor", where=where)', 'expected="torch.Tensor")'
    ),
    kills="KV-283",
)

scores_not_named = patched(
    "Scores of a wrong shape or kind are refused without saying that they are scores.",
    mutated(
        "twinproof.kvstore.store:KVStore.set_scores", 'check_tensor(scores, "scores")', 'check_tensor(scores, "values")'
    ),
    kills="KV-283",
)

form_not_told = patched(
    "A save in a form that there is not is refused without the form.",
    mutated("twinproof.kvstore.disk:_parts", "got=form, ", ""),
    kills="KV-284",
)

thresholds_not_told = patched(
    "A threshold of an evictor is refused without its value.",
    mutated(
        "twinproof.kvstore.eviction:BackgroundEvictor.__init__", '"not a threshold", got=value,', '"not a threshold",'
    ),
    kills="KV-284",
)

flags_are_chunks = patched(
    "A chunk of rows may be any number above 0: True is 1.",
    mutated(
        "twinproof.kvstore.disk:_check_chunk", "type(chunk_rows) is not int or chunk_rows < 1", "not chunk_rows >= 1"
    ),
    kills="KV-284",
)

flags_of_stores_may_be_text = patched(
    "A flag that is text is taken: false is true.",
    mutated("twinproof.kvstore.disk:StoreFiles.load", "check_flags(weights_only", "dict(weights_only"),
    kills="KV-328",
)

thresholds_not_looked_at = patched(
    "A threshold of another type is an error of whatever compares it.",
    mutated(
        "twinproof.kvstore.options:EvictionPolicy.__post_init__",
        'check_number(self.l2_threshold, "l2_threshold")',
        "pass",
    ),
    kills="KV-329",
)

metadata_wins = patched(
    "Metadata of a user's replaces what the store says of itself.",
    mutated("twinproof.kvstore.deltas:check_free_keys", "if taken:", "if len(taken) > 1:"),
    kills="KV-330",
)

letters_are_tables = patched(
    "A string passes for a list of tables: each letter is one.",
    mutated("twinproof.kvstore.rows:tables_of", "isinstance(tables, str) or ", ""),
    kills="KV-329",
)

buckets_not_looked_at = patched(
    "What is no buckets is an error of whatever asks it for their number.",
    mutated("twinproof.kvstore.rows:bucket_of", "chosen_buckets(buckets)\n", "pass\n"),
    kills="KV-311",
)

snapshots_of_others = patched(
    "A wrapper takes a snapshot whose rows are laid out in another way than its store's.",
    mutated(
        "twinproof.kvstore.modules:KVTensorWrapper.set_dram_db_wrapper",
        "if snapped != layout:",
        "if snapped.embedding_dim != layout.embedding_dim:",
    ),
    kills="KV-311",
)

moment_kept_with_the_error = patched(
    "A state dict that is refused keeps its moment as long as somebody keeps the error.",
    mutated("twinproof.kvstore.statedict:state_dict", "taken.close()", "pass"),
    kills="KV-313",
)

fractions_of_bytes_asked_for = patched(
    "Fractions of bytes of rows are asked of an engine.",
    mutated("twinproof.kvstore.rows:RowSource.get_rows", 'check_int(offset_bytes, "offset_bytes")', "offset_bytes"),
    kills="KV-355",
)
values_of_no_memory_placed = patched(
    "Values that are in no memory are placed.",
    mutated("twinproof.kvstore.store:KVStore.place", "check_strided(values", "check_tensor(values"),
    kills="KV-355",
)
listeners_heard_of_later = patched(
    "A listener that cannot be called is found after the first write.",
    mutated("twinproof.kvstore.store:KVStore.add_listener", "if not callable(listener):", "if False:"),
    kills="KV-355",
)

larger_memory_taken = patched(
    "Memory to read into may have more rows than there are ids.",
    mutated(
        "twinproof.kvstore.rows:check_out",
        "check_matrix(out, ids.numel()",
        "check_matrix(out[: ids.numel()] if isinstance(out, torch.Tensor) else out, ids.numel()",
    ),
    kills="KV-371",
)

saved_tables_are_looked_up = patched(
    "What is no name of a saved table is looked up as if it were one.",
    mutated("twinproof.kvstore.disk:SavedRows.saved_table", "not isinstance(name, str) or ", ""),
    kills="KV-378",
)

tensors_of_files_are_looked_up = patched(
    "What is no name of a tensor in a file is looked up as if it were one.",
    mutated("twinproof.kvstore.disk:SavedRows.file_of", "not isinstance(name, str) or ", ""),
    kills="KV-378",
)

rows_from_any_place = patched(
    "Where rows begin is compared before it is known to be a number.",
    mutated("twinproof.kvstore.rows:check_row_range", 'check_index(start, "start")', "pass"),
    kills="KV-379",
)

views_between_rows = patched(
    "A view begins between two rows of all ranks.",
    mutated("twinproof.kvstore.views:LazyRows.place", 'check_int(row_offset, "row_offset")', "pass"),
    kills="KV-379",
)

nested_ids_looked_up = patched(
    "A lookup takes nested ids, until torch refuses them.",
    mutated("twinproof.kvstore.options:check_dense", "found.is_nested or ", ""),
    kills="KV-469",
)
sparse_ids_looked_up = patched(
    "A lookup takes sparse ids, until torch refuses them.",
    mutated("twinproof.kvstore.options:check_dense", " or found.layout is not torch.strided", ""),
    kills="KV-469",
)
