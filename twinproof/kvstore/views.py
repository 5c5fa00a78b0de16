"""Views of a store's rows as two-dimensional tensors: whole rows, weights, metadata or one optimizer state.

Prevents views whose rows belong to other ids, and flags that get lost on the way to another process: a view is its
list of ids, and everything it is travels with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from twinproof.errors import ConfigError, CorruptionError, DetachedStoreError, UnsupportedError
from twinproof.kvstore.checks import check_ids, check_matrix
from twinproof.kvstore.held import HeldRows
from twinproof.kvstore.layout import HEADER_BYTES, METADATA_OFFSET, RowLayout, as_bytes, from_bytes, unpack_header
from twinproof.kvstore.lazy import LazyRows
from twinproof.kvstore.rows import RowSource, RowStore

__all__ = ["KVTensor", "view_slice"]

# Torch writes files with this protocol of pickle, which nothing else has used since Python 3.0.
TORCH_SAVE_PROTOCOL = 2


def view_slice(layout: RowLayout, view: str) -> tuple[int, int, torch.dtype]:
    """The bytes [begin, end) of a row that a view shows, and their dtype. Raises ConfigError."""
    if view == "row":
        return 0, layout.row_bytes, torch.uint8
    if view == "weight":
        return HEADER_BYTES, HEADER_BYTES + layout.weight_bytes, layout.weight_dtype
    if view == "metadata":
        return METADATA_OFFSET, HEADER_BYTES, torch.int64
    if view not in layout.state_slots:
        expected = ["row", "weight", "metadata", *layout.state_slots]
        raise ConfigError("the row holds no such state", got=view, expected=expected, where="view")
    slot = layout.state_slots[view]
    return slot.offset_bytes, slot.end_bytes, slot.dtype


class KVTensor(LazyRows):
    """The rows of ``ids`` in one table, read from the source when asked.

    Args:
        source: a store, a snapshot, or saved rows.
        ids: int64 [N]; row i of the view belongs to ids[i].
        view: "row" (uint8 [N, row_bytes], header included), "weight" ([N, D]), "metadata" (int64 [N, 1]), or the name
            of an optimizer state ([N, count] in its dtype).
        read_only: writes do nothing but tell how many rows they skipped. Always so where the source is read-only, and
            for "metadata".
        table: needed when the source has several.
        chunk_rows: see ``LazyRows``.

    Writes place values and leave timestamps and counts alone (but "row", which holds them), so that the order in
    which weight and states are loaded does not matter. Pickling keeps ids, flags and what the
    source says of itself. A view of a moment (a snapshot) takes its rows along, as ``clone`` and ``copy.deepcopy`` do;
    a view of a store stays a reference: unpickled, it must be given a source with ``attach``, and ``torch.save``, which
    would keep the reference alone, is refused. Saved rows are found again by their path.

    Raises:
        ConfigError: no such table or view. ShapeError, UnsupportedError.
    """

    table: str
    view_name: str
    read_only: bool
    _ids: torch.Tensor
    _source: RowSource | None
    _description: tuple[Callable[..., RowSource], tuple[Any, ...]] | None
    _range: tuple[int, int]

    @staticmethod
    def __new__(
        cls,
        source: RowSource,
        ids: torch.Tensor,
        view: str = "row",
        read_only: bool = False,
        *,
        table: str | None = None,
        chunk_rows: int | None = None,
    ) -> KVTensor:
        return cls.over(source, check_ids(ids).clone(), view, read_only, table=table, chunk_rows=chunk_rows)

    @classmethod
    def over(
        cls,
        source: RowSource,
        checked: torch.Tensor,
        view: str = "row",
        read_only: bool = False,
        *,
        table: str | None = None,
        chunk_rows: int | None = None,
    ) -> KVTensor:
        """The same over int64 ids [N] that nobody writes any more: they are not copied."""
        if table is None and len(source.tables) > 1:
            raise ConfigError("the source has several tables", got=None, expected=source.tables, where="table")
        name = source.tables[0] if table is None else table
        begin, end, dtype = view_slice(source.layout(name), view)
        made: KVTensor = cls._make((checked.numel(), (end - begin) // dtype.itemsize), dtype, chunk_rows)
        made.table, made.view_name, made._ids, made._range = name, view, checked, (begin, end)
        made._source, made._description = source, source.reopened()
        made.read_only = bool(read_only) or source.read_only or view == "metadata"
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @property
    def ids(self) -> torch.Tensor:
        """A copy of the ids, int64 [N]."""
        return self._ids.clone()

    @property
    def source(self) -> RowSource:
        """Where the rows are. Raises DetachedStoreError when they are in another process."""
        if self._source is None and self._description is not None:
            reopen, arguments = self._description
            self._source = reopen(*arguments)
        if self._source is None:
            raise DetachedStoreError(
                "this view came from another process and has no rows here",
                got=f"{self.view_name} of {self.table!r}",
                expected="attach(source)",
            )
        return self._source

    def attach(self, source: RowSource) -> KVTensor:
        """Give an unpickled view its rows; returns it.

        Raises:
            ConfigError: the source's rows of this table have another width or dtype.
        """
        begin, end, dtype = view_slice(source.layout(self.table), self.view_name)
        if (end - begin, dtype) != (self._range[1] - self._range[0], self.dtype):
            raise ConfigError("rows of another layout", got=source.layout(self.table), where=self.table)
        self._source, self._range = source, (begin, end)
        self.read_only = self.read_only or source.read_only
        return self

    def read_rows(self, start: int, length: int) -> torch.Tensor:
        """Rows [start, start + length), fresh, from the source as it is now."""
        return self.get_weights_by_ids(self._ids[start : start + length])

    def read_rows_into(self, start: int, length: int, out: torch.Tensor) -> None:
        """The same as bytes, into ``out``, uint8 [length, bytes of a row], contiguous. Raises ShapeError."""
        begin, end = self._range
        ids = self._ids[start : start + length]
        self.source.get_rows(self.table, ids, offset_bytes=begin, width_bytes=end - begin, out=out)

    def get_weights_by_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """What this view shows of any ids, [n, width]; a missing id reads as in ``RowSource``."""
        begin, end = self._range
        raw = self.source.get_rows(self.table, ids, offset_bytes=begin, width_bytes=end - begin)
        return from_bytes(raw, self.dtype)

    def set_range(self, dim: int, start: int, length: int, values: torch.Tensor) -> int:
        """Write rows [start, start + length) with values [length, width]; returns how many it skipped.

        Raises:
            CorruptionError: whole rows whose keys are not this view's ids. ConfigError, ShapeError, UnsupportedError.
        """
        self._check_range(dim, start, length)
        return self.set_weights_and_ids(values, self._ids[start : start + length])

    def set_weights_and_ids(self, values: torch.Tensor, ids: torch.Tensor) -> int:
        """Write what this view shows of any ids; returns how many rows it skipped: 0, or all when read-only.

        Raises:
            CorruptionError: whole rows whose keys are not ``ids``. ConfigError, ShapeError, UnsupportedError.
        """
        checked = check_ids(ids)
        plain = check_matrix(values, checked.numel(), self.shape[1], self.dtype, "values")
        if self.view_name == "row":
            check_keys(plain, checked, self.table)
        if self.read_only:
            return checked.numel()
        # Whatever is not read-only is a store.
        store = cast("RowStore", self.source)
        if self.view_name == "row":
            store.set_rows(self.table, plain)
        else:
            store.place(self.table, checked, plain, self._range[0])
        return 0

    def in_memory(self, dtype: torch.dtype | None = None) -> LazyRows:
        """See ``LazyRows``; without another dtype a read-only view of the same name."""
        if dtype not in (None, self.dtype):
            return super().in_memory(dtype)
        begin, _ = self._range
        held = HeldRows(self.table, self.source.layout(self.table), self._ids, begin, as_bytes(self.full_tensor()))
        return self._moved_to(held)

    def staged(self, memo: dict[int, Any]) -> KVTensor:
        """A view of a snapshot of the store, one for all views of a state dict; what never changes stays itself."""
        source = self.source
        if source.read_only:
            return self
        if id(source) not in memo:
            memo[id(source)] = cast("RowStore", source).snapshot()
        return self._moved_to(memo[id(source)])

    def _moved_to(self, source: RowSource) -> KVTensor:
        made = KVTensor.over(source, self._ids, self.view_name, table=self.table, chunk_rows=self.chunk_rows)
        made.place(self.global_row_count, self.row_offset)
        return made

    def check_target(self) -> None:
        """Demand rows of a store. Raises UnsupportedError."""
        if self.source.read_only:
            raise UnsupportedError(
                "nothing can be loaded into the rows of a moment",
                got=f"{self.view_name} of {self.table!r}",
                expected="views of the store itself: state_dict(snapshot=False)",
            )

    def accept(self, start: int, rows: torch.Tensor) -> None:
        """Write rows that a load found, as ``set_range`` does; the metadata of rows that are there, too."""
        if self.view_name == "metadata":
            ids = self._ids[start : start + rows.shape[0]]
            cast("RowStore", self.source).set_metadata(self.table, ids, rows)
        else:
            self.set_range(0, start, rows.shape[0], rows)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._source is not None and self._description is None:
            if self._source.read_only and not isinstance(self._source, HeldRows):
                return self.in_memory().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
            if not self._source.read_only and int(protocol) <= TORCH_SAVE_PROTOCOL:
                raise UnsupportedError(
                    "a view of a store is a reference, and torch.save would keep no row of it",
                    got=f"{self.view_name} of {self.table!r}",
                    expected="state_dict() or clone(), which take their rows along",
                )
        state = {
            "table": self.table,
            "view_name": self.view_name,
            "read_only": self.read_only,
            "_range": self._range,
            "_description": self._description,
            "global_row_count": self.global_row_count,
            "row_offset": self.row_offset,
            "chunk_rows": self.chunk_rows,
            "_source": self._source if isinstance(self._source, HeldRows) else None,
        }
        return _rebuild, (self._ids, self.shape[1], self.dtype, state)


def check_keys(rows: torch.Tensor, ids: torch.Tensor, table: str) -> None:
    """Demand that the keys in the headers are the ids. Raises CorruptionError."""
    keys = unpack_header(rows).ids
    wrong = (keys != ids).nonzero()[:, 0]
    if wrong.numel():
        at = int(wrong[0])
        raise CorruptionError(
            "a row's key is not its id", got=int(keys[at]), expected=int(ids[at]), where=f"{table}, row {at}"
        )


def _rebuild(ids: torch.Tensor, width: int, dtype: torch.dtype, state: dict[str, Any]) -> KVTensor:
    made: KVTensor = KVTensor._make((ids.numel(), width), dtype, state["chunk_rows"])
    made._ids = ids
    for name, value in state.items():
        setattr(made, name, value)
    return made
