"""Where faults of the store are planted in every engine of rows, and what several of them use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

# Where the rows of a load come from: the reference's source, and the streamed one.
CHUNKS = ("refimpl.kvstore:WholeTensors.chunks", "fastimpl.kvstore.files:StreamedFiles.chunks")


def engines(method: str) -> tuple[str, ...]:
    """The paths of one method in every engine of rows, as the stores are bound to them."""
    return f"twinproof.kvstore.store:LockedRows.{method}", f"fastimpl.kvstore.store:NativeRows.{method}"


def as_rows(around: Callable[..., torch.Tensor]) -> Callable[..., None]:
    """Write a fault of an engine's ``read`` as a function that returns the rows, uint8 [n, end - begin]."""

    @functools.wraps(around)
    def filling(original: Any, engine: Any, table: str, ids: Any, begin: int, end: int, out: Any) -> None:
        def returning(engine: Any, table: str, ids: Any, begin: int, end: int) -> torch.Tensor:
            rows = torch.empty(ids.numel(), end - begin, dtype=torch.uint8)
            original(engine, table, ids, begin, end, rows)
            return rows

        out.copy_(around(returning, engine, table, ids, begin, end))

    return filling


def missing(engine: Any, table: str, ids: torch.Tensor) -> torch.Tensor:
    """Bool [n]: which ids have no row."""
    found: torch.Tensor = engine.find(table, ids)
    return ~found


def bytes_of(engine: Any, table: str, ids: torch.Tensor, begin: int = 0, end: int | None = None) -> torch.Tensor:
    """Bytes [begin, end) of rows, as the engine reads them."""
    last = engine.options.rows[table].row_bytes if end is None else end
    rows = torch.empty(ids.numel(), last - begin, dtype=torch.uint8)
    engine.read(table, ids, begin, last, rows)
    return rows


def keys_of(rows: torch.Tensor) -> torch.Tensor:
    """The keys in the headers of whole rows, int64 [n]."""
    return rows[:, :8].contiguous().view(torch.int64)[:, 0]
