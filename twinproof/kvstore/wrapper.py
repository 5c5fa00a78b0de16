"""``KVTensorWrapper``: FBGEMM's name, constructor and methods over rows of this store.

Prevents what the original does to its callers: no input is changed, a key that is not the id is an error, and a state
is read in its own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from twinproof.errors import ConfigError, CorruptionError, DetachedStoreError, ShapeError, UnsupportedError
from twinproof.kvstore.checks import check_ids, check_matrix
from twinproof.kvstore.layout import HEADER_BYTES, RowLayout, as_bytes, from_bytes
from twinproof.kvstore.rows import RowSource, RowStore

__all__ = ["KVTensorWrapper"]


class KVTensorWrapper:
    """Rows of one table as a two-dimensional tensor that is read and written in ranges.

    Args:
        shape: [rows, width], the width in elements of ``dtype``.
        dtype: of what is read and written; need not be the weights'.
        row_offset: added to an id to give the store's.
        snapshot_handle: a snapshot of the store to read from; None reads the store.
        sorted_indices: int64 [rows] or [rows, 1], the id of each row; None is 0, 1, 2, and so on.
        width_offset: where the width begins, in elements of ``dtype``: in the whole row, header first, where the store
            returns whole rows, else behind the header.
        checkpoint_handle: only None; there are no hard-linked checkpoints here.
        read_only: writes do nothing.
        only_load_weight: of whole rows that are written, only the weight is taken.
        table: needed where the store has several.

    Give it the store with ``set_dram_db_wrapper`` before anything else.

    Raises:
        ConfigError, ShapeError, UnsupportedError: arguments that cannot be honoured, as soon as the store is known.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        row_offset: int,
        snapshot_handle: RowSource | None = None,
        sorted_indices: torch.Tensor | None = None,
        width_offset: int = 0,
        checkpoint_handle: None = None,
        read_only: bool = False,
        only_load_weight: bool = False,
        *,
        table: str | None = None,
    ) -> None:
        if len(shape) != 2 or min(shape) < 0:
            raise ShapeError("not the shape of rows", got=list(shape), expected="[rows, width]", where="shape")
        if not isinstance(dtype, torch.dtype):
            raise ConfigError("not a dtype", got=dtype, where="dtype")
        if checkpoint_handle is not None:
            raise UnsupportedError("there are no checkpoint handles here", got=checkpoint_handle, expected="SavedRows")
        if type(width_offset) is not int or width_offset < 0:
            raise ConfigError("not an offset", got=width_offset, expected="an int >= 0", where="width_offset")
        self._ids = None if sorted_indices is None else check_ids(sorted_indices.reshape(-1), "sorted_indices").clone()
        if self._ids is not None and self._ids.numel() != shape[0]:
            raise ShapeError("one id for each row", got=self._ids.numel(), expected=shape[0], where="sorted_indices")
        self.shape, self.dtype, self.read_only = tuple(shape), dtype, bool(read_only)
        self.only_load_weight = bool(only_load_weight)
        self._row_offset, self._width_offset, self._table = row_offset, width_offset, table
        self._snapshot, self._store = snapshot_handle, cast("RowStore | None", None)

    def set_dram_db_wrapper(self, db: RowStore) -> None:
        """Give it the store. Raises ConfigError: no such table, or a range outside its rows."""
        if self._table is None and len(db.tables) > 1:
            raise ConfigError("the store has several tables", got=None, expected=db.tables, where="table")
        self._table = db.tables[0] if self._table is None else self._table
        layout, (begin, end) = db.layout(self._table), self._range(db.return_whole_row)
        if end > layout.row_bytes:
            raise ConfigError("columns outside the row", got=(begin, end), expected=f"within {layout.row_bytes} bytes")
        if self.only_load_weight and not self._is_whole(layout, begin, end):
            raise ConfigError("only_load_weight is for whole rows", got=(begin, end), expected=(0, layout.row_bytes))
        self._store = db

    def set_embedding_rocks_dp_wrapper(self, db: RowStore) -> None:
        """The same: there is one kind of store."""
        self.set_dram_db_wrapper(db)

    def _range(self, whole: bool) -> tuple[int, int]:
        begin = self._width_offset * self.dtype.itemsize + (0 if whole else HEADER_BYTES)
        return begin, begin + self.shape[1] * self.dtype.itemsize

    @staticmethod
    def _is_whole(layout: RowLayout, begin: int, end: int) -> bool:
        return (begin, end) == (0, layout.row_bytes)

    def _opened(self) -> tuple[RowStore, str, int, int]:
        if self._store is None or self._table is None:
            raise DetachedStoreError("no store was given", expected="set_dram_db_wrapper(store)")
        return self._store, self._table, *self._range(self._store.return_whole_row)

    def _global(self, dim: int, start: int, length: int) -> torch.Tensor:
        if dim != 0:
            raise ShapeError("only rows can be narrowed", got=dim, expected=0, where="dim")
        if start < 0 or length < 0 or start + length > self.shape[0]:
            raise ShapeError("a range outside the rows", got=(start, length), expected=f"within {self.shape[0]} rows")
        return torch.arange(start, start + length) if self._ids is None else self._ids[start : start + length]

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """Rows [start, start + length), fresh: [length, width]."""
        return self.get_weights_by_ids(self._global(dim, start, length))

    def get_weights_by_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """What is shown of any ids [n]; in whole rows the key is the id, without ``row_offset``."""
        store, table, begin, end = self._opened()
        source, checked = self._snapshot or store, check_ids(ids)
        raw = source.get_rows(table, checked + self._row_offset, offset_bytes=begin, width_bytes=end - begin)
        if self._is_whole(store.layout(table), begin, end):
            raw[:, :8] = as_bytes(checked.reshape(-1, 1))
        return from_bytes(raw, self.dtype)

    def set_range(self, dim: int, start: int, length: int, weights: torch.Tensor) -> None:
        """Write rows [start, start + length) from [length, width]."""
        self.set_weights_and_ids(weights, self._global(dim, start, length))

    def set_weights_and_ids(self, weights: torch.Tensor, ids: torch.Tensor) -> None:
        """Write what is shown of any ids; neither argument is changed.

        Raises:
            CorruptionError: whole rows whose keys are not ``ids``. ConfigError, ShapeError, UnsupportedError.
        """
        store, table, begin, end = self._opened()
        checked = check_ids(ids)
        raw = as_bytes(check_matrix(weights, checked.numel(), self.shape[1], self.dtype, "weights"))
        whole, layout = self._is_whole(store.layout(table), begin, end), store.layout(table)
        if whole and not torch.equal(from_bytes(raw[:, :8], torch.int64)[:, 0], checked):
            raise CorruptionError("rows whose keys are not the ids", got=checked.numel(), where=table)
        if self.read_only:
            return
        mine = checked + self._row_offset
        if not whole:
            store.place(table, mine, raw, begin)
        elif self.only_load_weight:
            store.place(table, mine, raw[:, HEADER_BYTES : HEADER_BYTES + layout.weight_bytes], HEADER_BYTES)
        else:
            store.set_rows(table, torch.cat([as_bytes(mine.reshape(-1, 1)), raw[:, 8:]], dim=1))

    @property
    def strides(self) -> tuple[int, int]:
        """Of a dense tensor of this shape."""
        return self.shape[1], 1

    @property
    def dtype_str(self) -> str:
        """Name of the dtype."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def device_str(self) -> str:
        """``cpu``."""
        return "cpu"

    @property
    def layout_str(self) -> str:
        """``Strided``, as the original spells it."""
        return "Strided"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError("a wrapper stays with its store", got=type(self).__name__, expected="KVTensor")
