"""Rows of key-value tables that are read before their lookup, and are never stale."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from twinproof.optimizers import Hyper
from twinproof.pipeline.jagged import Bags
from twinproof.pipeline.modules import KeyValueBags, StoreRows

__all__ = ["Prefetched", "PrefetchedRows", "prefetch"]


class StoreMark:
    """The number of the last change of a store whose effect on prefetched rows is known."""

    def __init__(self, store: Any) -> None:
        self.store, self.mark = store, store.mark()

    def is_now(self) -> bool:
        """Whether the store has not changed since."""
        found: bool = self.store.mark() == self.mark
        return found


class Prefetched:
    """Float32 rows [n, D] of one batch's ids [n] in one table, as they were at a mark."""

    def __init__(self, ids: torch.Tensor, rows: torch.Tensor, mark: StoreMark) -> None:
        self.ids, self.rows, self.mark = ids, rows, mark


class PrefetchedRows(StoreRows):
    """``StoreRows`` that take rows which were read ahead, for one batch at a time.

    A store numbers its changes. The table's own update is followed by a second look at the rows that both batches
    have, or at all, where the table has a capacity, for which an update evicts others; after any other change the rows
    are read again when they are looked up.
    """

    def __init__(self, store: Any, table: str) -> None:
        super().__init__(store, table)
        self._held: weakref.ref[Prefetched] | None = None

    def _ahead(self) -> Prefetched | None:
        return None if self._held is None else self._held()

    def prefetch(self, ids: torch.Tensor, mark: StoreMark) -> Prefetched:
        """Read a batch's rows; they belong to the caller."""
        found = Prefetched(ids, super().read(ids), mark)
        self._held = weakref.ref(found)
        return found

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """Float32 [n, D] of these ids, int64 [n]: those read ahead, if they are of the same ids and still true."""
        ahead = self._ahead()
        if ahead is None or ahead.ids is not ids:
            return super().read(ids)
        self._held = None
        return ahead.rows if ahead.mark.is_now() else super().read(ids)

    def step(self, ids: torch.Tensor, grads: torch.Tensor, hyper: Hyper) -> None:
        """Take one step, and read again what both batches have."""
        ahead = self._ahead()
        super().step(ids, grads, hyper)
        # One change more is this update's; a second is somebody else's, before or behind it, to rows not known here.
        if ahead is not None and self.store.mark() == ahead.mark.mark + 1:
            self._read_again(ahead, ids)
            ahead.mark.mark += 1

    def _read_again(self, ahead: Prefetched, stepped: torch.Tensor) -> None:
        """Those of the rows whose ids are among ``stepped``; on a device all, for the host would wait for which."""
        may_evict = self.store.options.capacities[self.table] is not None
        if may_evict or ahead.ids.device.type != "cpu":
            ahead.rows.copy_(self.store.get(self.table, ahead.ids))
            return
        shared = torch.isin(ahead.ids, stepped).nonzero()[:, 0]
        if shared.numel():
            ahead.rows[shared] = self.store.get(self.table, ahead.ids[shared]).to(torch.float32)


def prefetch(lookups: Iterable[Any], dist_input: Iterable[Bags]) -> list[Prefetched]:
    """Read ahead the rows of every key-value table among the lookups; tables of one store share its mark."""
    marks: dict[int, StoreMark] = {}
    found = []
    for lookup, bags in zip(lookups, dist_input, strict=True):
        rows = lookup.rows if isinstance(lookup, KeyValueBags) else None
        if isinstance(rows, PrefetchedRows):
            mark = marks.setdefault(id(rows.store), StoreMark(rows.store))
            found.append(rows.prefetch(bags.indices, mark))
    return found
