"""Faults that ``test_bounds`` must notice."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from conformance.harness import fault
from conformance.kvstore.planted.planting import CHUNKS, as_rows, engines


@fault(kills="KV-117", at=engines("read"))
@as_rows
def probes_end_early(original: Any, store: Any, table: str, ids: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Of many ids that share their low bits only the first 64 are found."""
    rows: torch.Tensor = original(store, table, ids, begin, end)
    # Ids are told apart by their place in a group of 64 that share their low bits.
    places: dict[int, int] = {}
    for position, key in enumerate(ids.tolist()):
        group = key & 0xFFFF
        places[group] = places.get(group, 0) + 1
        if places[group] > 64:
            rows[position] = 0
    return rows


_WRAP_BYTES = 2**32


@fault(kills="KV-118", at=engines("write"))
def write_offset_of_32_bits(
    original: Any, store: Any, table: str, ids: torch.Tensor, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    """The place of a row in the batch that is written is cut to 32 bits."""
    fits = max(1, _WRAP_BYTES // values.shape[1])
    original(store, table, ids[:fits], values[:fits], begin, now, visit=visit)
    if ids.numel() > fits:
        original(store, table, ids[fits:], values[: ids.numel() - fits], begin, now, visit=visit)


@fault(kills="KV-119", at="fastimpl.kvstore.store:NativeReader.read")
def read_offset_of_32_bits(
    original: Any, store: Any, table: str, ids: torch.Tensor, begin: int, end: int, out: Any
) -> None:
    """The place of a row in the batch that is read is cut to 32 bits."""
    fits = max(1, _WRAP_BYTES // max(1, end - begin))
    original(store, table, ids[:fits], begin, end, out[:fits])
    if ids.numel() > fits:
        original(store, table, ids[fits:], begin, end, out[: ids.numel() - fits])


@fault(kills="KV-120", at=CHUNKS)
def load_in_one_piece(original: Any, files: Any, saved: Any, table: str, begin: int, end: int, chunk_rows: int) -> Any:
    """A load reads a whole table at once and needs double memory (torchrec 3148)."""
    return original(files, saved, table, begin, end, 1 << 30)


@fault(kills="KV-131", at="fastimpl.checkpoint.writer:_reader_of")
def rows_before_the_first_write(original: Any, item: Any, planner: Any) -> None:
    """All rows are read before the first is written, so that a save holds the table twice (torchrec 3148)."""


@fault(kills="KV-136", at="fastimpl.checkpoint.source:LazySource.fill")
def cut_rows_from_their_start(original: Any, source: Any, begin: int, end: int, out: torch.Tensor) -> None:
    """Where a block begins inside a row, its bytes are taken from the row's start."""
    original(source, begin, end, out)
    cut_bytes = -begin % source._row_bytes
    if 0 < cut_bytes <= end - begin:
        out[:cut_bytes] = source.read(begin - begin % source._row_bytes, end)[:cut_bytes]


@fault(kills="KV-281", at="fastimpl.kvstore.store:NativeRows.stats")
def maps_without_rows_not_counted(original: Any, store: Any) -> Any:
    """Of memory for finding rows only that is counted which rows use."""
    found = original(store)
    return dataclasses.replace(found, map_bytes=min(found.map_bytes, 8 * found.row_count))
