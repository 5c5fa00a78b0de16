"""Faults that ``test_snapshot`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault
from conformance.kvstore.planted.planting import as_rows, engines
from twinproof.kvstore.options import HEADER_BYTES


@fault(kills=("KV-064", "KV-061"), at=engines("snapshot"))
def snapshot_shows_live_rows(original: Any, store: Any) -> Any:
    """A snapshot lists ids of its moment and reads the live table."""
    taken = original(store)
    for name in ("read", "find"):
        setattr(taken, name, getattr(store, name))
    return taken


@fault(kills="KV-061", at=engines("snapshot"))
def snapshot_never_released(original: Any, store: Any) -> Any:
    """A state dict's snapshot outlives it."""
    taken = original(store)
    store.__dict__.setdefault("_planted_snapshots", []).append(taken)
    return taken


@fault(kills="KV-091", at=engines("changes"))
def removals_not_tracked(original: Any, store: Any, table: str, since: int) -> Any:
    """Removed ids are not among the changes."""
    changed, removed, first_mark = original(store, table, since)
    return changed, removed[:0], first_mark


@fault(kills="KV-071", at=engines("read"))
@as_rows
def row_lost_by_growth(original: Any, store: Any, table: str, ids: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """A row is not found after the table has grown."""
    rows: torch.Tensor = original(store, table, ids, begin, end)
    if store.size(table) > 500:
        rows[ids == 2**62] = 0
    return rows


@fault(kills="KV-072", at="fastimpl.kvstore.store:NativeRows.reserve")
def reserve_half_the_room(original: Any, store: Any, table: str, row_count: Any) -> None:
    """A reserved table allocates before it is full."""
    original(store, table, row_count // 2 if type(row_count) is int else row_count)


@fault(kills="KV-241", at=engines("snapshot"))
def marks_lost_with_a_snapshot(original: Any, store: Any) -> Any:
    """When a snapshot is closed, the one before it shows rows that came after both."""
    taken = original(store)
    earlier = store.__dict__.setdefault("_planted_moments", [])
    before, close = [*earlier], taken.close
    earlier.append(taken)

    def closing() -> None:
        if before and taken in earlier:
            earlier.remove(taken)
            older, listed = before[-1], before[-1].ids
            older.ids = lambda table, begin, last: torch.unique(
                torch.cat([listed(table, begin, last), store.ids(table, begin, last)])
            )
        close()

    taken.close = closing
    return taken


@fault(kills="KV-242", at=engines("delete"))
def last_page_given_back(original: Any, store: Any, table: str, ids: torch.Tensor) -> int:
    """Memory behind the rows that stay is given back from the page on in which the last of them ends."""
    before = store.size(table)
    count = int(original(store, table, ids))
    left = store.ids(table, -(2**63), 2**63 - 1)
    if 0 < left.numel() <= before // 2 and left.numel() % 85 == 0:
        width = store.options.rows[table].weight_bytes
        store.write(table, left[-1:], torch.zeros(1, width, dtype=torch.uint8), HEADER_BYTES, 0, visit=False)
    return count
