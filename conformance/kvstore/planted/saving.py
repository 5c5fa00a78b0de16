"""Faults in views, state dicts, files and loads."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch

from conformance.harness import swap, wrap
from conformance.kvstore.planted.planting import both, exported, in_store, loaded, shared
from twinproof.errors import TwinproofError
from twinproof.kvstore.disk import SavedRows


def _one_bucket_ahead(original: Any, cls: Any, *arguments: Any, **options: Any) -> Any:
    made = original(cls, *arguments, **options)
    if made.view_name.startswith("momentum"):
        made._ids = made._ids.sort().values
    return made


def _row_of_width_d(original: Any, lazy: Any, fqn: str, object: Any) -> Any:
    items = original(lazy, fqn, object)
    for item in items if getattr(lazy, "view_name", "") == "row" else ():
        width = lazy.source.layout(lazy.table).embedding_dim
        vars(item.tensor_data)["size"] = torch.Size((item.tensor_data.size[0], width))
    return items


def _stale_counts() -> AbstractContextManager[Any]:
    counts: dict[str, int] = {}

    def around(original: Any, lazy: Any, fqn: str, object: Any) -> Any:
        items = original(lazy, fqn, object)
        for item in items:
            count = counts.setdefault(fqn, item.tensor_data.size[0])
            vars(item.tensor_data)["size"] = torch.Size((count, *item.tensor_data.size[1:]))
        return items

    return wrap(WRITE_ITEMS, around)


def _write_anyway(original: Any, view: Any, values: Any, ids: Any) -> int:
    read_only, view.read_only = view.read_only, view.read_only and view.view_name != "momentum1"
    try:
        return int(original(view, values, ids))
    finally:
        view.read_only = read_only


def _nothing_skipped(original: Any, view: Any, values: Any, ids: Any) -> int:
    original(view, values, ids)
    return 0


def _flag_lost(original: Any, view: Any, protocol: Any) -> Any:
    rebuild, (ids, width, dtype, state) = original(view, protocol)
    return rebuild, (ids, width, dtype, state | {"read_only": False})


def _one_row_on(original: Any, lazy: Any, dim: int, start: int, length: int) -> torch.Tensor:
    lazy._check_range(dim, start, length)
    rows: torch.Tensor = lazy.read_rows(min(start + (length == 2), max(0, lazy.shape[0] - length)), length)
    return rows


def _local_keys(original: Any, view: Any, ids: torch.Tensor) -> torch.Tensor:
    rows: torch.Tensor = original(view, ids)
    if view.view_name == "row" and rows.numel():
        rows[:, :8] = (ids + 2**62).reshape(-1, 1).view(torch.uint8)
    return rows


def _never_detached(original: Any, view: Any, ids: torch.Tensor) -> torch.Tensor:
    if view._source is None and view._description is None:
        return torch.zeros(ids.numel(), view.shape[1], dtype=view.dtype)
    rows: torch.Tensor = original(view, ids)
    return rows


def _any_keys(original: Any, *arguments: Any) -> None:
    return None


def _last_chunk_lost(original: Any, files: Any, saved: Any, table: str, begin: int, end: int, chunk_rows: int) -> Any:
    chunks = list(original(files, saved, table, begin, end, chunk_rows))
    return iter(chunks[:-1] if len(chunks) > 1 else chunks)


def _last_part_lost(original: Any, waiting: Any, saved: Any, parts: range) -> None:
    original(waiting, saved, parts[:-1] if len(parts) > 1 else parts)


def _old_parts_cut(original: Any, waiting: Any, saved: Any, parts: range) -> None:
    original(waiting, saved, range(parts.start, parts.stop - (saved.version == 1), parts.step))


def _old_files_cut(original: Any, files: Any, saved: Any, table: str, begin: int, end: int, chunk_rows: int) -> Any:
    for ids, rows in original(files, saved, table, begin, end, chunk_rows):
        kept = ids.numel() - (saved.version == 1)
        yield ids[:kept], rows[:kept]


def _states_matter(original: Any, store: Any, state: Any, **options: Any) -> Any:
    counts = original(store, state, **options)
    for table in store.tables:
        for name in store.layout(table).state_slots:
            value = state.get(f"{table}.{name}")
            if value is not None and state[f"{table}.weight"].dtype == torch.uint8:
                ids = state[f"{table}.weight_id"].narrow(0, 0, value.shape[0])[:, 0]
                store.set_state(table, name, ids, value.narrow(0, 0, value.shape[0]).contiguous())
    return counts


def _cleared_first(original: Any, store: Any, path: Any, **options: Any) -> Any:
    SavedRows(path)
    for table in store.tables:
        store.clear(table)
    return original(store, path, **options)


def _applied_unchecked(original: Any, store: Any, path: Any, **options: Any) -> Any:
    with suppress(TwinproofError, OSError):
        saved = SavedRows(path)
        for table in saved.tables:
            store.set_rows(table, saved.rows(table, 0, min(1, saved.saved[table].row_count))[1])
    return original(store, path, **options)


def _states_loaded(original: Any, rows: Any, source: Any, target: Any, *, weights_only: bool) -> Any:
    return original(rows, source, target, weights_only=weights_only and source != target)


def _truncating(original: Any, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if values.dtype == torch.float32 and dtype == torch.bfloat16:
        values = (values.contiguous().view(torch.int32) & -65536).view(torch.float32)
    result: torch.Tensor = original(values, dtype)
    return result


def _every_bucket(original: Any, saved: Any, begin: int, end: int) -> tuple[int, int]:
    return 0, int(saved.row_count)


def _any_bucket(original: Any, files: Any, saved: Any, table: str, begin: int, end: int, chunk_rows: int) -> Any:
    return original(files, saved, table, 0, saved.buckets.total_count, chunk_rows)


def _no_metadata(original: Any, layout: Any, ids: Any, words: torch.Tensor, values: Any) -> Any:
    return original(layout, ids, torch.zeros_like(words), values)


def _everything(original: Any, store: Any, path: Any, **options: Any) -> Any:
    if options.get("since") is not None:
        options["since"] = 0
    return original(store, path, **options)


def _time_stamped(original: Any, store: Any, path: Any, **options: Any) -> Any:
    return original(store, path, **(options | {"metadata": {"folder": os.path.basename(os.fspath(path))}}))


def _empty_skipped(original: Any, store: Any, path: Any, **options: Any) -> Any:
    report = original(store, path, **options)
    for table in store.tables:
        if store.size(table) == 1:
            store.clear(table)
    return report


def _extra_tables(original: Any, store: Any, path: Any, **options: Any) -> Any:
    if options.get("tables") is None:
        options["tables"] = tuple(t for t in store.tables if t in SavedRows(path).tables)
    return original(store, path, **options)


VIEW = "twinproof.kvstore.views:KVTensor"
WRITE_ITEMS = "twinproof.kvstore.views:LazyRows.__create_write_items__"

PLANTED = (
    shared(
        "optimizer_view_over_other_ids",
        "A state's view lists its ids in another order than the weights.",
        ("KV-040",),
        wrap(f"{VIEW}.__new__", _one_bucket_ahead),
    ),
    shared(
        "row_width_from_embedding_dim",
        "The global width of whole rows is D instead of the row's bytes.",
        ("KV-086",),
        wrap(WRITE_ITEMS, _row_of_width_d),
    ),
    shared("stale_row_count", "Global row counts are those of the first state dict.", ("KV-086",), _stale_counts),
    shared(
        "read_only_state_written",
        "A write to the read-only view of momentum1 reaches the store.",
        ("KV-037", "KV-045"),
        wrap(f"{VIEW}.set_weights_and_ids", _write_anyway),
    ),
    shared(
        "skipped_rows_not_reported",
        "A read-only view reports no skipped rows.",
        ("KV-037",),
        wrap(f"{VIEW}.set_weights_and_ids", _nothing_skipped),
    ),
    shared(
        "read_only_lost_in_pickle",
        "Pickling loses the read-only flag.",
        ("KV-038",),
        wrap(f"{VIEW}.__reduce_ex__", _flag_lost),
    ),
    shared(
        "narrow_one_row_on",
        "A range of two rows begins one row late.",
        ("KV-039",),
        wrap("twinproof.kvstore.views:LazyRows.narrow", _one_row_on),
    ),
    shared(
        "local_keys_in_views",
        "Views carry local keys (FBGEMM 4735).",
        ("KV-041",),
        wrap(f"{VIEW}.get_weights_by_ids", _local_keys),
    ),
    shared(
        "detached_view_reads_zeros",
        "A view without rows behind it reads zeros.",
        ("KV-085",),
        wrap(f"{VIEW}.get_weights_by_ids", _never_detached),
    ),
    shared(
        "view_takes_any_keys",
        "set_range does not look at the keys of the rows.",
        ("KV-084",),
        wrap("twinproof.kvstore.views:check_keys", _any_keys),
    ),
    shared(
        "last_chunk_lost",
        "The last of several chunks is not loaded.",
        ("KV-043",),
        loaded(_last_chunk_lost, _last_part_lost),
    ),
    shared(
        "old_files_lose_a_row",
        "The last row of a version 1 file is not loaded.",
        ("KV-099",),
        loaded(_old_files_cut, _old_parts_cut),
    ),
    in_store(
        "optimizer_tensors_overwrite_rows",
        "In whole-row mode the optimizer's tensors are loaded too.",
        ("KV-045",),
        "load_state_dict",
        _states_matter,
    ),
    exported(
        "load_clears_the_table", "A load removes the rows that it does not list.", ("KV-047",), "load", _cleared_first
    ),
    exported(
        "load_before_check",
        "A load writes rows before it has checked all of them.",
        ("KV-048",),
        "load",
        _applied_unchecked,
    ),
    shared(
        "newer_version_accepted",
        "Files of a newer version are read as if they were of this one.",
        ("KV-048",),
        swap("twinproof.kvstore.deltas:FORMAT_VERSION", 99),
    ),
    shared(
        "weights_only_keeps_state",
        "Optimizer state comes along with weights_only.",
        ("KV-049",),
        wrap("twinproof.kvstore.disk:convert_rows", _states_loaded),
    ),
    shared(
        "conversion_truncates",
        "float32 becomes bfloat16 by cutting.",
        ("KV-050",),
        wrap("twinproof.kvstore.rows:_raw", _truncating),
    ),
    shared(
        "every_rank_reads_all",
        "A rank reads the rows of all buckets.",
        ("KV-051", "KV-097"),
        both(
            wrap("twinproof.kvstore.disk:SavedTable.rows_of", _every_bucket),
            wrap("refimpl.kvstore:WholeTensors.chunks", _any_bucket),
        ),
    ),
    shared(
        "separate_form_loses_headers",
        "Timestamps and counts are not restored from the separate form.",
        ("KV-054", "KV-042"),
        both(
            wrap("twinproof.kvstore.disk:assemble_rows", _no_metadata),
            wrap("refimpl.kvstore:assemble_rows", _no_metadata),
        ),
    ),
    exported("delta_holds_everything", "A delta holds every row ever written.", ("KV-098",), "save", _everything),
    exported("path_in_the_file", "The file depends on where it is saved.", ("KV-052",), "save", _time_stamped),
    exported("single_row_not_loaded", "A table of one row loads as empty.", ("KV-053",), "load", _empty_skipped),
    exported(
        "tables_silently_left_out",
        "Tables that only the file has are left out in silence.",
        ("KV-101",),
        "load",
        _extra_tables,
    ),
)
