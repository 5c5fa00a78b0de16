"""``save`` and ``load``: whole rows through the checkpoint component, re-cut by bucket, all or nothing.

Prevents half-loaded stores: a load reads and checks every row that it is going to write before it writes the first.
The second reading comes from the page cache; memory stays at one chunk.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp

from refimpl.checkpoint import HuggingFaceStorageWriter
from twinproof.errors import ConfigError
from twinproof.kvstore.base import KVStoreBase
from twinproof.kvstore.buckets import Buckets, bucket_of, rank_buckets, sort_ids_by_bucket
from twinproof.kvstore.convert import check_convertible, convert_rows
from twinproof.kvstore.lazy import LazyRows, dense_rows
from twinproof.kvstore.moments import Named, Part, check_base, named, note_load, part_of
from twinproof.kvstore.room import check_room, make_room
from twinproof.kvstore.saved import SavedRows, content_metadata
from twinproof.kvstore.state import gathered, place_rows, rank_and_world
from twinproof.kvstore.views import KVTensor

__all__ = ["LoadReport", "SaveReport", "load", "load_with", "save", "save_with"]

LOAD_CHUNK_ROWS = 65536


@dataclass(frozen=True)
class SaveReport:
    """What a save wrote from this rank: rows and removed ids by table, the mark for the next delta, phase times."""

    row_counts: dict[str, int]
    deleted_counts: dict[str, int]
    mark: int
    phase_seconds: dict[str, float] = field(compare=False)


@dataclass(frozen=True)
class LoadReport:
    """What a load brought to this rank: rows and removed ids by table, phase times."""

    row_counts: dict[str, int]
    deleted_counts: dict[str, int]
    phase_seconds: dict[str, float] = field(compare=False)


def save(
    store: KVStoreBase,
    path: str | os.PathLike[str],
    *,
    buckets: Buckets | None = None,
    since: int | None = None,
    form: str = "rows",
    process_group: Any = None,
    chunk_rows: int | None = None,
    **writer_options: Any,
) -> SaveReport:
    """Save one moment of the store as HF safetensors, rows in bucket order, ids ascending inside a bucket.

    Equal contents give equal bytes. Called by every rank; each saves its own buckets (``rank_buckets``).

    Args:
        store: the store.
        path: folder; replaced at one instant.
        buckets: how ids fall into buckets; the same on every rank. None is one bucket.
        since: save only rows that changed after this mark, and which went (needs ``track_changes``).
        form: "rows", or "separate" for weight, metadata and each state as tensors of their own.
        process_group: None is the default group, or this process alone.
        chunk_rows: rows handed over at once, at most; None is 16 MiB worth.
        writer_options: further options of ``HuggingFaceStorageWriter``.

    Raises:
        ConfigError: an id outside this rank's buckets, changes that are not tracked; on every rank.
        CheckpointExistsError, StorageError, DistributedError.
    """
    return save_with(
        HuggingFaceStorageWriter,
        store,
        path,
        buckets=buckets,
        since=since,
        form=form,
        process_group=process_group,
        chunk_rows=chunk_rows,
        **writer_options,
    )


def save_with(
    writer_class: Any,
    store: KVStoreBase,
    path: str | os.PathLike[str],
    *,
    buckets: Buckets | None = None,
    since: int | None = None,
    form: str = "rows",
    process_group: Any = None,
    chunk_rows: int | None = None,
    sort_ids: Any = sort_ids_by_bucket,
    **writer_options: Any,
) -> SaveReport:
    """``save`` through another writer class and another ``sort_ids_by_bucket``."""
    if form not in ("rows", "separate"):
        raise ConfigError("not a form", got=form, expected=("rows", "separate"), where="form")
    chosen = Buckets() if buckets is None else buckets
    started = time.perf_counter()
    with store.snapshot() as source:
        mark = source.mark()
        state, counts, deleted, named_parts = _planned(
            store, source, chosen, since, form, process_group, chunk_rows, sort_ids
        )
        planned = time.perf_counter()
        kind = "full" if since is None else "delta"
        moments, bases, steps = named_parts
        metadata = content_metadata(store.options.rows, chosen, kind, form, moments, bases, steps)
        metadata |= writer_options.pop("metadata", None) or {}
        with writer_class(path, metadata=metadata, **writer_options) as writer, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            alone = rank_and_world(process_group)[1] == 1
            dcp.save(state, storage_writer=writer, process_group=process_group, no_dist=alone)
    store.moments.note(mark, moments)
    phases = {"plan": planned - started, "write": time.perf_counter() - planned}
    return SaveReport(counts, deleted, mark, phases)


def _planned(
    store: KVStoreBase,
    source: Any,
    buckets: Buckets,
    since: int | None,
    form: str,
    process_group: Any,
    chunk_rows: int | None,
    sort_ids: Any,
) -> tuple[dict[str, Any], dict[str, int], dict[str, int], Named]:
    rank, world_size = rank_and_world(process_group)
    begin, end = rank_buckets(buckets.total_count, world_size, rank)
    sorted_ids: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    deleted: dict[str, torch.Tensor] = {}

    def local_parts() -> dict[str, Part]:
        for table in store.tables:
            ids, gone = (source.ids(table), None) if since is None else source.changes(table, since)
            total, mode, size = buckets.total_count, buckets.hash_mode, buckets.bucket_size
            sorted_ids[table] = sort_ids(ids, begin, end, total, hash_mode=mode, bucket_size=size)
            if gone is not None:
                deleted[table] = gone
        return {t: part_of(store, source, t, ids[:, 0], deleted.get(t), since) for t, (ids, _) in sorted_ids.items()}

    by_rank = gathered(local_parts, process_group)
    state: dict[str, Any] = {}
    for table, (ids, counts) in sorted_ids.items():
        views = ("row",) if form == "rows" else ("weight", "metadata", *source.layout(table).state_slots)
        names = {"row": "rows"}
        rows: dict[str, LazyRows] = {
            f"{table}.{names.get(view, view)}": KVTensor.over(
                source, ids[:, 0], view, table=table, chunk_rows=chunk_rows
            )
            for view in views
        }
        rows[f"{table}.ids"] = dense_rows(ids[:, 0])
        place_rows(list(rows.values()), [found[table].row_count for found in by_rank], rank)
        rows[f"{table}.bucket_counts"] = dense_rows(counts[:, 0])
        rows[f"{table}.bucket_counts"].place(buckets.total_count, begin)
        if deleted:
            rows[f"{table}.deleted"] = dense_rows(deleted[table])
            place_rows([rows[f"{table}.deleted"]], [found[table].deleted_count for found in by_rank], rank)
        state |= rows
    row_counts = {table: ids.shape[0] for table, (ids, _) in sorted_ids.items()}
    deleted_counts = {table: deleted[table].numel() if deleted else 0 for table in store.tables}
    return state, row_counts, deleted_counts, named(store, by_rank, since)


class Waiting(Protocol):
    """Checked rows beside an empty table, which nobody sees."""

    def publish(self) -> bool:
        """Make them the table's, in one step; False, and nothing done, if the table is not empty any more."""

    def close(self) -> None:
        """Let go of what the table did not take."""


# Reads and checks the rows of an empty table beside it. Arguments: the store, the saved rows, the table, the range of
# positions, ``weights_only``, and how many tables wait before this one. None: they have to be converted, or the
# implementation knows no such way. Raises what reading saved rows raises, and AllocationError.
Fill = Callable[[KVStoreBase, SavedRows, str, range, bool, int], Waiting | None]


def load(
    store: KVStoreBase,
    path: str | os.PathLike[str],
    *,
    weights_only: bool = False,
    tables: tuple[str, ...] | None = None,
    process_group: Any = None,
    owned: tuple[int, int] | None = None,
    chunk_rows: int = LOAD_CHUNK_ROWS,
) -> LoadReport:
    """Load the buckets that this rank owns, in either form; listed ids are replaced, other rows stay.

    A delta replaces its rows and removes its deleted ids. It loads only into tables whose last load was its base: the
    full save or delta whose mark it was given as ``since``. One that names no base (its store was at that mark neither
    saved nor loaded, or the format is older) loads anywhere: apply such deltas in the order in which they were saved.
    Timestamps, counts and the optimizer's step come from the file. The world may have another size than the one that
    saved. Every row is checked before the first is written; values of other dtypes are rounded to nearest even. In a
    table with a capacity the load is one batch: rows that it does not list make room for it.

    Args:
        store: the store; it must have the same tables, or a part of them named by ``tables``.
        path: folder or file.
        weights_only: optimizer states become zero; needed when the saved optimizer is another.
        tables: only these; None demands that store and file have the same tables.
        process_group: None is the default group, or this process alone.
        owned: buckets [begin, end) of this rank; None is ``rank_buckets``.
        chunk_rows: rows in memory at once, at most.

    Raises:
        FormatError, VersionError: not a saved store, or a newer one. CorruptionError: torn, or contradicting itself.
        MissingKeyError: a table that is not there. ConfigError: other layouts. CapacityError: more rows than a table
            may hold. DeltaBaseError: a delta on another base. FileNotFoundError.
    """
    return load_with(
        SavedRows,
        store,
        path,
        weights_only=weights_only,
        tables=tables,
        process_group=process_group,
        owned=owned,
        chunk_rows=chunk_rows,
    )


def load_with(
    open_saved: Callable[[str | os.PathLike[str]], SavedRows],
    store: KVStoreBase,
    path: str | os.PathLike[str],
    *,
    weights_only: bool = False,
    tables: tuple[str, ...] | None = None,
    process_group: Any = None,
    owned: tuple[int, int] | None = None,
    chunk_rows: int = LOAD_CHUNK_ROWS,
    fill: Fill = lambda *_: None,
) -> LoadReport:
    """``load`` with another way to read saved rows, and a way to read those of an empty table once; see ``Fill``."""
    if type(chunk_rows) is not int or chunk_rows < 1:
        raise ConfigError("not a chunk", got=chunk_rows, expected="rows >= 1", where="chunk_rows")
    started = time.perf_counter()
    saved = open_saved(path)
    if tables is None and set(saved.tables) != set(store.tables):
        raise ConfigError("other tables than the store's", got=sorted(saved.tables), expected=sorted(store.tables))
    names = store.tables if tables is None else tables
    rank, world_size = rank_and_world(process_group)
    begin, end = rank_buckets(saved.buckets.total_count, world_size, rank) if owned is None else owned
    if not 0 <= begin <= end <= saved.buckets.total_count:
        raise ConfigError("not a range of buckets", got=(begin, end), expected=saved.buckets.total_count, where="owned")
    gone, listed = {}, {}
    for table in names:
        check_convertible(
            saved.saved_table(table).layout, store.layout(table), weights_only=weights_only, where=f"{path}: {table}"
        )
        check_base(store, table, saved.bases.get(table, ()), f"{path}: {table}")
        removed = saved.deleted(table)
        found = bucket_of(removed, saved.buckets)
        gone[table] = removed[(found >= begin) & (found < end)]
        first, behind = saved.saved_table(table).rows_of(begin, end)
        check_room(store, table, behind - first)
    waiting: dict[str, Waiting] = {}
    with ExitStack() as opened:
        for table in names:
            first, behind = saved.saved_table(table).rows_of(begin, end)
            filled = None
            if saved.kind == "full" and store.size(table) == 0:
                filled = fill(store, saved, table, range(first, behind), weights_only, len(waiting))
            if filled is None:
                limited = store.options.capacities[table] is not None
                listed[table] = [ids for ids, _ in saved.chunks(table, begin, end, chunk_rows) if limited]
            else:
                waiting[table] = opened.enter_context(closing(filled))
        for table in listed:
            first, behind = saved.saved_table(table).rows_of(begin, end)
            if store.size(table) == 0:
                store.reserve(table, behind - first)
        checked, mark = time.perf_counter(), store.mark()
        for table in names:
            store.moments.set_loaded(table, None)
        # What a delta removes goes first: it may be what makes room.
        deleted = {table: store.delete(table, ids) if ids.numel() else 0 for table, ids in gone.items()}
        for table, chunks in listed.items():
            make_room(store, table, torch.cat([torch.zeros(0, dtype=torch.int64), *chunks]))
        counts = {}
        for table in names:
            if table in waiting and waiting[table].publish():
                first, behind = saved.saved_table(table).rows_of(begin, end)
                counts[table] = behind - first
            else:
                counts[table] = _apply(store, saved, table, begin, end, chunk_rows, weights_only)
        note_load(store, saved, names, counts, mark, weights_only)
        for table in names if not weights_only else ():
            store.set_step_count(table, saved.steps.get(table, store.step_count(table)))
    return LoadReport(counts, deleted, {"check": checked - started, "write": time.perf_counter() - checked})


def _apply(
    store: KVStoreBase, saved: SavedRows, table: str, begin: int, end: int, chunk_rows: int, weights_only: bool
) -> int:
    source, target = saved.saved_table(table).layout, store.layout(table)
    row_count = 0
    for ids, rows in saved.chunks(table, begin, end, chunk_rows):
        store.set_rows(table, convert_rows(rows, source, target, weights_only=weights_only).contiguous())
        row_count += ids.numel()
    return row_count
