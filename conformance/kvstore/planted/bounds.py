"""Faults that patterns of ids, huge batches and small chunks show."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import PlantedBug, wrap
from conformance.kvstore.planted.planting import in_engine, keys_of, loaded, shared

_WRAP_BYTES = 2**32


def _short_probes(original: Any, store: Any, table: str, ids: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    rows: torch.Tensor = original(store, table, ids, begin, end)
    # Ids are told apart by their place in a group of 64 that share their low bits.
    places: dict[int, int] = {}
    for position, key in enumerate(ids.tolist()):
        group = key & 0xFFFF
        places[group] = places.get(group, 0) + 1
        if places[group] > 64:
            rows[position] = 0
    return rows


def _wrapped_write(
    original: Any, store: Any, table: str, ids: torch.Tensor, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    fits = max(1, _WRAP_BYTES // values.shape[1])
    original(store, table, ids[:fits], values[:fits], begin, now, visit=visit)
    if ids.numel() > fits:
        original(store, table, ids[fits:], values[: ids.numel() - fits], begin, now, visit=visit)


def _wrapped_read(original: Any, store: Any, table: str, ids: torch.Tensor, begin: int, end: int, out: Any) -> None:
    fits = max(1, _WRAP_BYTES // max(1, end - begin))
    original(store, table, ids[:fits], begin, end, out[:fits])
    if ids.numel() > fits:
        original(store, table, ids[fits:], begin, end, out[: ids.numel() - fits])


def _one_piece(original: Any, files: Any, saved: Any, table: str, begin: int, end: int, chunk_rows: int) -> Any:
    return original(files, saved, table, begin, end, 1 << 30)


def _in_two_batches(
    original: Any, store: Any, table: str, ids: torch.Tensor, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    half = ids.numel() // 2
    original(store, table, ids[:half], values[:half].contiguous(), begin, now, visit=visit)
    original(store, table, ids[half:], values[half:].contiguous(), begin, now, visit=visit)


def _zeroed_by_failure(original: Any, store: Any, table: str, rows: torch.Tensor) -> None:
    try:
        original(store, table, rows)
    except MemoryError:
        known = rows[store.find(table, keys_of(rows))][:1].clone()
        known[:, 8:] = 0
        original(store, table, known)
        raise


def _cut_rows_from_their_start(original: Any, source: Any, begin: int, end: int, out: torch.Tensor) -> None:
    original(source, begin, end, out)
    cut_bytes = -begin % source._row_bytes
    if 0 < cut_bytes <= end - begin:
        out[:cut_bytes] = source.read(begin - begin % source._row_bytes, end)[:cut_bytes]


PLANTED = (
    PlantedBug(
        "half_a_batch_before_memory_ran_out",
        "What was written before an allocation failed stays.",
        ("KV-121",),
        "fastimpl",
        wrap("fastimpl.kvstore.store:NativeRows.write", _in_two_batches),
    ),
    PlantedBug(
        "row_cleared_before_memory_ran_out",
        "A row that a failing load was about to replace is left blank.",
        ("KV-122",),
        "fastimpl",
        wrap("fastimpl.kvstore.store:NativeRows.write_rows", _zeroed_by_failure),
    ),
    in_engine(
        "probes_end_early",
        "Of ids that share their low bits only so many are found.",
        ("KV-117",),
        "read",
        _short_probes,
    ),
    in_engine(
        "write_offset_of_32_bits",
        "The place of a row in the batch that is written is cut to 32 bits (hazard 10).",
        ("KV-118",),
        "write",
        _wrapped_write,
    ),
    PlantedBug(
        "read_offset_of_32_bits",
        "The place of a row in the batch that is read is cut to 32 bits (hazard 10).",
        ("KV-119",),
        "fastimpl",
        wrap("fastimpl.kvstore.store:NativeReader.read", _wrapped_read),
    ),
    shared(
        "load_in_one_piece",
        "A load takes a whole table in hand at once (the double memory of torchrec 3148).",
        ("KV-120",),
        loaded(_one_piece),
    ),
    PlantedBug(
        "rows_before_the_first_write",
        "All rows are read before the first is written, so that a save holds the table twice (torchrec 3148).",
        ("KV-131",),
        "fastimpl",
        wrap("fastimpl.checkpoint.writer:_reader_of", lambda original, item, planner: None),
    ),
    PlantedBug(
        "cut_rows_from_their_start",
        "The rest of a row that the block before cut is taken from the row's start.",
        ("KV-136",),
        "fastimpl",
        wrap("fastimpl.checkpoint.source:LazySource.fill", _cut_rows_from_their_start),
    ),
)
