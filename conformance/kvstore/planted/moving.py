"""Faults of rows that are in no memory, of copies of them, and of the optimizer's step."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch

from conformance.harness import swap, wrap
from conformance.kvstore.planted.planting import reference, shared


def _allowed(*_: Any) -> None:
    return None


def _still_the_store(original: Any, view: Any, dtype: Any = None) -> Any:
    return original(view, dtype) if view.source.read_only else view._moved_to(view.source)


def _but_metadata(original: Any, view: Any, start: int, rows: Any) -> None:
    if view.view_name != "metadata":
        original(view, start, rows)


def _no_steps(original: Any, content: Any) -> Any:
    return original(dataclasses.replace(content, steps={}))


def _zero_steps(original: Any, saved: Any, *arguments: Any, **options: Any) -> None:
    original(saved, *arguments, **options)
    saved.steps = {table: saved.steps.get(table, 0) for table in saved.tables}


def _other_rows_stay(original: Any, store: Any, state: Any, **options: Any) -> Any:
    return original(store, state, **options | {"clear": False})


def _a_snapshot_each(original: Any, view: Any, memo: Any) -> Any:
    return original(view, {})


def _any_step(original: Any, evictor: Any, table: str) -> None:
    evictor._step_count = 0
    evictor._trigger_steps, kept = 1, evictor._trigger_steps
    try:
        original(evictor, table)
    finally:
        evictor._trigger_steps = kept


def _whole_kibibytes(original: Any, evictor: Any) -> bool:
    """As upstream, which compares whole gigabytes."""
    evictor._trigger_bytes, kept = (evictor._trigger_bytes or 0) // 1024 * 1024, evictor._trigger_bytes
    try:
        return bool(original(evictor))
    finally:
        evictor._trigger_bytes = kept


def _by_numpy(original: Any, engine: Any, table: str, rows: Any) -> None:
    importlib.import_module("numpy")
    original(engine, table, torch.from_numpy(rows.numpy()))


def _local_keys(original: Any, wrapper: Any, ids: Any) -> Any:
    rows = original(wrapper, ids)
    if rows.dtype == torch.uint8 and rows.numel():
        rows[:, :8] = (ids + wrapper._row_offset).reshape(-1, 1).view(torch.uint8)
    return rows


def _unchecked_keys(original: Any, wrapper: Any, weights: Any, ids: Any) -> Any:
    if weights.dtype == torch.uint8 and weights.shape[0] == ids.numel():
        weights = torch.cat([ids.reshape(-1, 1).view(torch.uint8), weights[:, 8:]], dim=1)
    return original(wrapper, weights, ids)


PLANTED = (
    shared(
        "wrapper_shows_local_keys",
        "Whole rows that a wrapper reads keep the store's own key, as upstream's did until resharding broke.",
        ("KV-156",),
        wrap("twinproof.kvstore.modules:KVTensorWrapper.get_weights_by_ids", _local_keys),
    ),
    shared(
        "wrapper_replaces_keys",
        "A wrapper replaces the keys of rows that are written by the ids, as upstream's does.",
        ("KV-157",),
        wrap("twinproof.kvstore.modules:KVTensorWrapper.set_weights_and_ids", _unchecked_keys),
    ),
    shared(
        "round_after_every_step",
        "The background evictor runs a round after every step of training.",
        ("KV-154",),
        wrap("twinproof.kvstore.eviction:BackgroundEvictor._stepped", _any_step),
    ),
    shared(
        "memory_in_whole_units",
        "The memory that triggers a round is rounded down to whole units.",
        ("KV-155",),
        wrap("twinproof.kvstore.eviction:BackgroundEvictor._has_many_bytes", _whole_kibibytes),
    ),
    reference(
        "rows_by_numpy",
        "The rows of the reference pass through numpy, which need not be installed.",
        ("KV-153",),
        wrap("refimpl.kvstore:DictRows.put", _by_numpy),
    ),
    shared(
        "lazy_rows_take_any_operation",
        "Unfilled memory and writes in place are granted by rows that have no memory, as torch's stager was.",
        ("KV-150", "CKPT-420"),
        swap("twinproof.kvstore.views:_check_operation", _allowed),
    ),
    shared(
        "copy_is_the_store",
        "A copy of a view still reads the store.",
        ("KV-151", "CKPT-421"),
        wrap("twinproof.kvstore.views:KVTensor.in_memory", _still_the_store),
    ),
    shared(
        "metadata_not_loaded",
        "dcp.load passes over timestamps and counts, whose view is read-only.",
        ("KV-152",),
        wrap("twinproof.kvstore.views:KVTensor.accept", _but_metadata),
    ),
    shared(
        "step_in_no_file",
        "The optimizer's step is in no file, and Adam begins again.",
        ("KV-140",),
        wrap("twinproof.kvstore.deltas:SavedContent.metadata", _no_steps),
    ),
    shared(
        "old_files_reset_the_step",
        "A file that tells no step sets it to zero.",
        ("KV-141",),
        wrap("twinproof.kvstore.disk:SavedRows.__init__", _zero_steps),
    ),
    shared(
        "module_keeps_other_rows",
        "A module that was loaded keeps rows that the state dict does not have.",
        ("KV-142",),
        wrap("twinproof.kvstore.store:KVStore.load_state_dict", _other_rows_stay),
    ),
    shared(
        "snapshot_for_each_view",
        "Each view of a state dict is staged at a moment of its own.",
        ("KV-143",),
        wrap("twinproof.kvstore.views:KVTensor.staged", _a_snapshot_each),
    ),
)
