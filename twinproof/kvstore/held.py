"""Rows that left their store: what a copied or pickled view of a moment reads."""

from __future__ import annotations

import torch

from twinproof.errors import MissingKeyError, UnsupportedError
from twinproof.kvstore.layout import RowLayout
from twinproof.kvstore.rows import RowSource

__all__ = ["HeldRows"]


class HeldRows(RowSource):
    """Some bytes of the rows of some ids of one table, in memory, read-only.

    Args:
        table: the table's name.
        layout: of its whole rows.
        ids: int64 [n].
        begin: first byte of a row that is held.
        rows: uint8 [n, w], the bytes [begin, begin + w) of the ids' rows.
    """

    read_only = True

    def __init__(self, table: str, layout: RowLayout, ids: torch.Tensor, begin: int, rows: torch.Tensor) -> None:
        super().__init__({table: layout}, _HeldReader(ids, begin, rows))
        self._arguments = (table, layout, ids, begin, rows)

    def __reduce__(self) -> tuple[object, ...]:
        return HeldRows, self._arguments


class _HeldReader:
    """Bytes [begin, begin + w) of the rows of ids [n], found by the order of the ids."""

    def __init__(self, ids: torch.Tensor, begin: int, rows: torch.Tensor) -> None:
        self._begin, self._rows = begin, rows
        self._sorted, self._order = ids.sort(stable=True)
        self._unique: torch.Tensor = torch.unique_consecutive(self._sorted)

    def _places(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each id would stand among the sorted ones, and whether it does."""
        places = torch.searchsorted(self._sorted, ids).clamp(max=max(0, self._sorted.numel() - 1))
        found = self._sorted[places] == ids if self._sorted.numel() else torch.zeros_like(ids, dtype=torch.bool)
        return places, found

    def read(self, table: str, ids: torch.Tensor, begin: int, end: int, out: torch.Tensor) -> None:
        first, behind = self._begin, self._begin + self._rows.shape[1]
        if not first <= begin <= end <= behind:
            raise UnsupportedError("bytes of the rows were left behind", got=(begin, end), expected=(first, behind))
        places, found = self._places(ids)
        if not bool(found.all()):
            raise MissingKeyError("ids whose rows were left behind", got=ids[~found][:10].tolist(), where=table)
        out.copy_(self._rows[self._order[places], begin - first : end - first])

    def find(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        return self._places(ids)[1]

    def ids(self, table: str, begin: int, last: int) -> torch.Tensor:
        return self._unique[(self._unique >= begin) & (self._unique <= last)]

    def size(self, table: str) -> int:
        return int(self._unique.numel())
