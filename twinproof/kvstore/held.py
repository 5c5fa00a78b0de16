"""Rows that left their store: what a copied or pickled view of a moment reads."""

from __future__ import annotations

import torch

from twinproof.errors import ConfigError, MissingKeyError, UnsupportedError
from twinproof.kvstore.layout import RowLayout
from twinproof.kvstore.reading import RowSource

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
        self.table, self._layout, self._held_ids, self._begin, self._rows = table, layout, ids, begin, rows
        self._sorted, self._order = ids.sort(stable=True)

    def __reduce__(self) -> tuple[object, ...]:
        # The order follows from the ids.
        return HeldRows, (self.table, self._layout, self._held_ids, self._begin, self._rows)

    @property
    def tables(self) -> tuple[str, ...]:
        return (self.table,)

    def layout(self, table: str) -> RowLayout:
        if table != self.table:
            raise ConfigError("no such table", got=table, expected=[self.table], where="table")
        return self._layout

    def _places(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each id would stand among the sorted ones, and whether it does."""
        places = torch.searchsorted(self._sorted, ids).clamp(max=max(0, self._sorted.numel() - 1))
        found = self._sorted[places] == ids if self._sorted.numel() else torch.zeros_like(ids, dtype=torch.bool)
        return places, found

    def _read(self, table: str, ids: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        first, behind = self._begin, self._begin + self._rows.shape[1]
        if not first <= begin <= end <= behind:
            raise UnsupportedError("bytes of the rows were left behind", got=(begin, end), expected=(first, behind))
        places, found = self._places(ids)
        if not bool(found.all()):
            raise MissingKeyError("ids whose rows were left behind", got=ids[~found][:10].tolist(), where=table)
        return self._rows[self._order[places], begin - first : end - first]

    def _find(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        return self._places(ids)[1]

    def _ids(self, table: str, begin: int, last: int) -> torch.Tensor:
        unique = self._unique()
        return unique[(unique >= begin) & (unique <= last)]

    def _size(self, table: str) -> int:
        return int(self._unique().numel())

    def _unique(self) -> torch.Tensor:
        unique: torch.Tensor = torch.unique_consecutive(self._sorted)
        return unique
