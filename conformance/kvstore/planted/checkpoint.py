"""Faults that ``test_checkpoint`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched, wrap
from conformance.kvstore.planted.planting import CHUNKS, bytes_of, engines, keys_of
from twinproof.kvstore.disk import SavedRows


@fault(kills="KV-103", at="twinproof.kvstore.views:KVTensor.accept")
def only_the_first_chunk_committed(original: Any, view: Any, start: int, rows: torch.Tensor) -> None:
    """torch.distributed.checkpoint's load writes only the first chunk of each view."""
    if start == 0:
        original(view, start, rows)


def _believed(original: Any, *arguments: Any) -> None:
    return None


id_list_believed = patched(
    "A state dict's id list is not compared with the rows' keys.",
    wrap("twinproof.kvstore.statedict:check_keys", _believed),
    kills="KV-044",
)
file_keys_not_compared = patched(
    "The keys of saved rows are not compared with the saved ids.",
    wrap("twinproof.kvstore.disk:check_keys", _believed),
    kills="KV-044",
)


@fault(kills="KV-047", at=engines("write_rows"))
def statistics_kept_on_load(original: Any, store: Any, table: str, rows: torch.Tensor) -> None:
    """A whole-row load over a row keeps the old timestamp and count."""
    ids = keys_of(rows)
    known = store.find(table, ids)
    words = bytes_of(store, table, ids, 8, 16)[known].contiguous().view(torch.int64)[:, 0]
    original(store, table, rows)
    store.write_metadata(table, ids[known], words, 2**63 - 1)


def _last_chunk_lost(original: Any, files: Any, saved: Any, table: str, begin: int, end: int, chunk_rows: int) -> Any:
    chunks = list(original(files, saved, table, begin, end, chunk_rows))
    return iter(chunks[:-1] if len(chunks) > 1 else chunks)


def _last_part_lost(original: Any, waiting: Any, saved: Any, parts: range) -> None:
    original(waiting, saved, parts[:-1] if len(parts) > 1 else parts)


last_chunk_lost = patched(
    "The last of several chunks is not loaded.",
    wrap(CHUNKS, _last_chunk_lost),
    wrap("fastimpl.kvstore.filling:WaitingRows.read", _last_part_lost),
    kills="KV-043",
)


@fault(kills="KV-045", at="KVStore.load_state_dict")
def optimizer_tensors_overwrite_rows(original: Any, store: Any, state: Any, **options: Any) -> Any:
    """In whole-row mode the optimizer's tensors are loaded too."""
    counts = original(store, state, **options)
    for table in store.tables:
        for name in store.layout(table).state_slots:
            value = state.get(f"{table}.{name}")
            if value is not None and state[f"{table}.weight"].dtype == torch.uint8:
                ids = state[f"{table}.weight_id"].narrow(0, 0, value.shape[0])[:, 0]
                store.set_state(table, name, ids, value.narrow(0, 0, value.shape[0]).contiguous())
    return counts


@fault(kills="KV-047", at="load")
def load_clears_the_table(original: Any, store: Any, path: Any, **options: Any) -> Any:
    """A load removes the rows that it does not list."""
    SavedRows(path)
    for table in store.tables:
        store.clear(table)
    return original(store, path, **options)


@fault(kills="KV-049", at="twinproof.kvstore.disk:convert_rows")
def weights_only_keeps_state(original: Any, rows: Any, source: Any, target: Any, *, weights_only: bool) -> Any:
    """Optimizer state comes along with weights_only."""
    return original(rows, source, target, weights_only=weights_only and source != target)


@fault(kills="KV-050", at="twinproof.kvstore.rows:_raw")
def conversion_truncates(original: Any, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 becomes bfloat16 by truncation instead of rounding."""
    if values.dtype == torch.float32 and dtype == torch.bfloat16:
        values = (values.contiguous().view(torch.int32) & -65536).view(torch.float32)
    result: torch.Tensor = original(values, dtype)
    return result


def _every_bucket(original: Any, saved: Any, begin: int, end: int) -> tuple[int, int]:
    return 0, int(saved.row_count)


def _any_bucket(original: Any, files: Any, saved: Any, table: str, begin: int, end: int, chunk_rows: int) -> Any:
    return original(files, saved, table, 0, saved.buckets.total_count, chunk_rows)


every_rank_reads_all = patched(
    "A rank reads the rows of all buckets.",
    wrap("twinproof.kvstore.disk:SavedTable.rows_of", _every_bucket),
    wrap("refimpl.kvstore:WholeTensors.chunks", _any_bucket),
    kills=("KV-051", "KV-097"),
)


def _no_metadata(original: Any, layout: Any, ids: Any, words: torch.Tensor, values: Any) -> Any:
    return original(layout, ids, torch.zeros_like(words), values)


separate_form_loses_headers = patched(
    "Timestamps and counts are not restored from the separate form.",
    wrap("twinproof.kvstore.disk:assemble_rows", _no_metadata),
    wrap("refimpl.kvstore:assemble_rows", _no_metadata),
    kills=("KV-054", "KV-042"),
)


own_errors_told_alone = patched(
    "Errors that are not the package's own are told to no other rank.",
    mutated("twinproof.kvstore.statedict:gathered", "except BaseException as error", "except ConfigError as error"),
    kills="KV-252",
)
own_errors_as_others_are_told = patched(
    "The rank at fault raises what the others are told, and nobody gets its own error.",
    mutated("twinproof.kvstore.statedict:gathered", "if failure is not None", "if False"),
    kills=("KV-252", "PIPE-551"),
)
chunks_without_rows = patched(
    "A rank without rows of a table names a chunk of none.",
    mutated("twinproof.kvstore.views:LazyRows.global_chunks", "self.global_row_count == 0", "not starts"),
    kills="KV-253",
)
no_chunk_of_empty_tables = patched(
    "A table that has rows on no rank is not saved.",
    mutated(
        "twinproof.kvstore.views:LazyRows.global_chunks", "self.global_row_count == 0", "self.global_row_count < 0"
    ),
    kills="KV-253",
)


def _nothing_compared(original: Any, asked: Any) -> None:
    return None


ranks_never_compared = patched(
    "What ranks ask for is not compared: the files are what the first one says, whatever the others wrote.",
    wrap("twinproof.kvstore.disk:check_agreed", _nothing_compared),
    wrap("twinproof.kvstore.statedict:check_agreed", _nothing_compared),
    kills="KV-254",
)


@fault(kills="KV-287", at="twinproof.kvstore.disk:StoreFiles.save", of="fastimpl")
def every_rank_saves(
    original: Any, files: Any, store: Any, path: Any, *, process_group: Any = None, **options: Any
) -> Any:
    """A save is one of all ranks, whatever the group."""
    return original(files, store, path, **options)


@fault(kills="KV-288", at="twinproof.kvstore.statedict:sendable")
def odd_errors_lose_their_name(original: Any, error: Any) -> Any:
    """Others hear that there was an error, and not which."""
    return None if error is None else ValueError("an error")


states_of_one_name = patched(
    "Rows of Adam are taken for rows of LAMB, whose states have the same names.",
    mutated(
        "twinproof.kvstore.rows:check_convertible",
        "same = same and (not source.state_slots or source.optimizer == target.optimizer)",
        "pass",
    ),
    kills="KV-307",
)

chunks_looked_at_alone = patched(
    "A rank that asks for views in chunks of no rows is refused when the others have gone on.",
    mutated("twinproof.kvstore.statedict:state_dict", 'check_int(chunk_rows, "chunk_rows", 1)', "pass"),
    kills="KV-254",
)

module_states_of_all_ranks = patched(
    "A module's state dict is exchanged by all ranks, whatever its group.",
    mutated(
        "twinproof.kvstore.modules:_StoreRows._save_to_state_dict",
        "buckets=self.buckets, process_group=self.process_group",
        "buckets=self.buckets",
    ),
    kills="KV-331",
)

same_places_same_dtypes = patched(
    "Rows whose values lie in the same places are taken for rows of the same dtypes.",
    mutated(
        "twinproof.kvstore.rows:convert_rows",
        "if source == target",
        "if source.weight_dtype == target.weight_dtype and source.value_ranges == target.value_ranges",
    ),
    kills="KV-332",
)
disagreement_keeps_the_moment = patched(
    "The error of ranks that ask for different views holds the rows of its moment.",
    mutated(
        "twinproof.kvstore.statedict:state_dict",
        """        check_agreed([asked for asked, _ in told])
    except BaseException:
        # Whoever keeps the error would keep the rows of the moment with it.
        for taken in moment if snapshot else ():
            taken.close()
        raise
""",
        """    except BaseException:
        for taken in moment if snapshot else ():
            taken.close()
        raise
    check_agreed([asked for asked, _ in told])
""",
    ),
    kills="KV-254",
)
