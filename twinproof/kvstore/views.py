"""Rows as two-dimensional tensors that are read when asked: whole rows, weights, metadata or one optimizer state.

Torch plans a save from shapes alone and asks for data chunk by chunk (``torch.distributed._checkpointable``); a tensor
that implements that protocol never has to be whole, on any rank. A view is its list of ids, and all that it is travels
with it: no rows of other ids, no flag that is lost on the way to another process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter as TorchHuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.utils._pytree import tree_map_only

from twinproof import regime
from twinproof.engine import locals_of_callers
from twinproof.errors import (
    ConfigError,
    CorruptionError,
    DetachedStoreError,
    MissingKeyError,
    UnsupportedError,
    check_flags,
    check_kind,
)
from twinproof.kvstore.options import (
    HEADER_BYTES,
    METADATA_OFFSET,
    RowLayout,
    as_bytes,
    check_ids,
    check_int,
    check_matrix,
    from_bytes,
    unpack_header,
)
from twinproof.kvstore.rows import SOURCES, Buckets, RowSource, RowStore, bucket_number, check_row_range, table_of

__all__ = ["CHUNK_BYTES", "Dealt", "HeldRows", "KVTensor", "LazyRows", "dense_rows", "view_slice"]


CHUNK_BYTES = regime(16 << 20, 96)

_ATEN = torch.ops.aten
# Not an alias, which ``rows[...]`` is: torch refuses a view that is its own base.
_SAME = (_ATEN.detach.default, _ATEN.lift_fresh.default)
_COPIES = (_ATEN.clone.default, _ATEN._to_copy.default)
_INTO_PLAIN = (_ATEN.copy_.default, _ATEN._foreach_copy_.default)
# What these give is not the rows, and torch's stagers take it for them.
_UNFILLED = (_ATEN.new_empty.default, _ATEN.new_empty_strided.default, _ATEN.empty_like.default)


@dataclass(frozen=True, eq=False)
class Dealt:
    """How one table of a state dict is dealt to ranks: this one has the rows of buckets [begin, end).

    Saved rows stand in the order of their buckets, and the counts of all buckets beside them, so that each of any
    number of ranks finds its own.
    """

    buckets: Buckets
    begin: int
    end: int

    @property
    def has_all(self) -> bool:
        """Whether these are all buckets."""
        return (self.begin, self.end) == (0, self.buckets.total_count)

    def check_count(self, count: int, where: str) -> None:
        """Demand as many buckets as were saved. Raises ConfigError."""
        if count != self.buckets.total_count:
            raise ConfigError(
                "rows are dealt to ranks by another number of buckets than they were saved by",
                got=f"{self.buckets.total_count} buckets",
                expected=f"{count} buckets; kvstore.save and kvstore.load, or one rank, may change it",
                where=where,
            )

    def rows(self, counts: torch.Tensor, row_count: int, where: str) -> tuple[int, int]:
        """The rows [begin, end) of this rank among those of all, by saved counts, int64 [buckets].

        Raises CorruptionError where these are no counts of so many rows.
        """
        ends = counts.cumsum(0)
        total = int(ends[-1])
        if bool((counts < 0).any()) or total != row_count:
            raise CorruptionError("not the rows of these buckets", got=row_count, expected=total, where=where)
        begin, end = (0 if bucket == 0 else int(ends[bucket - 1]) for bucket in (self.begin, self.end))
        return begin, end

    def check_ids(self, ids: torch.Tensor, counts: torch.Tensor, where: str) -> None:
        """Demand that saved ids, int64 [n], are those of this rank's buckets. Raises ConfigError."""
        buckets = torch.arange(self.begin, self.end, device="cpu")
        mine = buckets.repeat_interleave(counts[self.begin : self.end])
        wrong = ids[bucket_number(ids, self.buckets) != mine]
        if wrong.numel():
            raise ConfigError(
                "rows were saved by other buckets than they are dealt by",
                got=f"ids {wrong[:10].tolist()} in buckets of others",
                expected=f"the buckets of the save, here {self.buckets}",
                where=where,
            )


class LazyRows(torch.Tensor):
    """This rank's rows of a global tensor. Its shape is the local one.

    A subclass has ``read_rows(start, length)``. A torch operation works on the rows as read at that moment, but for
    these: ``detach`` is the tensor itself; ``copy.copy`` shares its rows, of a store those of any later moment;
    ``clone``, ``copy.deepcopy`` and ``to`` another dtype give the rows of this moment in memory, in the same place of
    the global tensor; what writes in place, asks for unfilled memory of the same kind (``new_empty``), goes to another
    device, or copies one rank's rows of several into plain memory is refused.

    Attributes:
        global_row_count: rows of the global tensor, over all ranks.
        row_offset: where this rank's rows begin in it.
        chunk_rows: rows of a chunk handed to torch's checkpoint, at most.
        dealt: how its table is dealt to ranks; None where nobody said, or of rows that are in no state dict.
        entry: what it is of its table, as "weight" or "bucket".
    """

    global_row_count: int
    row_offset: int
    chunk_rows: int
    dealt: Dealt | None = None
    entry: str = ""

    @classmethod
    def _make(cls, shape: tuple[int, ...], dtype: torch.dtype, chunk_rows: int | None) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))
        made.global_row_count, made.row_offset = shape[0], 0
        row_bytes = max(1, math.prod(shape[1:]) * dtype.itemsize)
        made.chunk_rows = max(1, CHUNK_BYTES // row_bytes) if chunk_rows is None else chunk_rows
        if type(made.chunk_rows) is not int or made.chunk_rows < 1:
            raise ConfigError("not a chunk", got=chunk_rows, expected="rows >= 1", where="chunk_rows")
        return made

    def read_rows(self, start: int, length: int) -> torch.Tensor:
        """Rows [start, start + length) of this rank, as fresh memory."""
        raise NotImplementedError

    def place(self, global_row_count: int, row_offset: int) -> None:
        """Make these the rows from ``row_offset`` of a global tensor. Raises ConfigError when they do not fit."""
        check_int(global_row_count, "global_row_count")
        check_int(row_offset, "row_offset")
        if not 0 <= row_offset <= global_row_count - self.shape[0]:
            raise ConfigError(
                "rows outside the tensor",
                got=(row_offset, self.shape[0]),
                expected=global_row_count,
                where="row_offset",
            )
        self.global_row_count, self.row_offset = global_row_count, row_offset

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:  # type: ignore[override]
        """Rows [start, start + length) as a plain tensor. Raises ShapeError for another dim or a range outside, and
        ConfigError for what is no number.
        """
        check_row_range(dim, start, length, self.shape[0])
        return self.read_rows(start, length)

    def full_tensor(self) -> torch.Tensor:
        """All rows of this rank as a plain tensor."""
        return self.read_rows(0, self.shape[0])

    def chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(start, rows) with at most ``chunk_rows`` rows each."""
        for start in range(0, self.shape[0], self.chunk_rows):
            yield start, self.read_rows(start, min(self.chunk_rows, self.shape[0] - start))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if func in _SAME:
            return args[0]
        _check_operation(func, args, options)
        if func in _COPIES:
            return args[0].in_memory(options.get("dtype"))
        read = tree_map_only(LazyRows, lambda lazy: lazy.full_tensor(), (args, options))
        return func(*read[0], **read[1])

    def in_memory(self, dtype: torch.dtype | None = None) -> LazyRows:
        """The rows of this moment, as plain memory in the same place of the global tensor; None keeps the dtype."""
        rows = self.full_tensor()
        made = dense_rows(rows if dtype is None else rows.to(dtype), self.chunk_rows)
        made.place(self.global_row_count, self.row_offset)
        return made

    def staged(self, memo: dict[int, Any]) -> torch.Tensor:
        """What an asynchronous save may read while training goes on; ``memo`` is shared by one state dict."""
        return self

    def memory_for(self, sizes: torch.Size) -> torch.Tensor:
        """Memory for saved rows, which the store's ``load_state_dict`` takes: as many as were saved."""
        return torch.empty(sizes, dtype=self.dtype, device="cpu")

    def __copy__(self) -> LazyRows:
        """The same rows once more, as a shallow copy of a tensor has its memory: of a store what is read then."""
        made: LazyRows = type(self)._make(tuple(self.shape), self.dtype, self.chunk_rows)
        vars(made).update(vars(self))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyRows:
        made = self.in_memory()
        memo[id(self)] = made
        return made

    def __setitem__(self, index: Any, values: Any) -> None:
        """Refused: torch would write to a copy of the rows."""
        raise _unwritable("rows[...] =")

    @property
    def data(self) -> Any:
        """As of any tensor."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, values: Any) -> None:
        """Refused: torch would keep the values beside the rows, where nothing reads them."""
        raise _unwritable("data =")

    def untyped_storage(self) -> Any:
        """Refused: there is none."""
        raise UnsupportedError(
            "lazy rows have no storage", got=repr(self), expected="full_tensor()", where="untyped_storage"
        )

    def storage(self) -> Any:
        """Refused: there is none."""
        return self.untyped_storage()

    def share_memory_(self) -> Any:
        """Refused: there is none to share."""
        return self.untyped_storage()

    def __dlpack__(self, **options: Any) -> Any:
        """Refused: there is no memory to hand out."""
        return self.untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        """With ``force`` all rows of this rank, read now. Else refused: there is no memory to share."""
        return self.full_tensor().numpy() if force else self.untyped_storage()

    def tolist(self) -> Any:
        """Refused: torch reads the memory that there is not."""
        return self.untyped_storage()

    def check_target(self) -> None:
        """Demand that a checkpoint can be loaded into these rows. Raises UnsupportedError."""
        expected = "rows of a store"
        raise UnsupportedError("rows in memory of their own", got=repr(self), expected=expected, where="load")

    def check_found(self, start: int, rows: torch.Tensor) -> None:
        """Demand that rows that a load found fit the place from ``start`` on. Raises CorruptionError."""

    def accept(self, start: int, rows: torch.Tensor) -> None:
        """Take rows that ``check_found`` let pass; see ``KVLoadPlanner``."""

    def global_chunks(self) -> list[ChunkStorageMetadata]:
        """This rank's rows in pieces of at most ``chunk_rows``, where they stand in the global tensor."""
        tail, zeros = tuple(self.shape[1:]), (0,) * (self.dim() - 1)
        starts = list(range(0, self.shape[0], self.chunk_rows))
        if self.global_row_count == 0:
            # An empty tensor is still a tensor; every rank names the same chunk and torch drops the repetitions.
            starts = [0]
        return [
            ChunkStorageMetadata(
                torch.Size((self.row_offset + start, *zeros)),
                torch.Size((min(self.chunk_rows, self.shape[0] - start), *tail)),
            )
            for start in starts
        ]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        if self.shape[0] > self.chunk_rows:
            _check_writer(fqn)
        properties, size = TensorProperties(dtype=self.dtype), torch.Size((self.global_row_count, *self.shape[1:]))
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            for chunk in self.global_chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        # Torch asks for this when it plans a load, fills what __get_tensor_shard__ gives, and calls that the end.
        raise UnsupportedError(
            "torch's planner would fill memory that these rows do not have",
            got=repr(self),
            expected="dcp.load(..., planner=KVLoadPlanner())",
            where="load",
        )

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        start = int((index.offset or (0,))[0]) - self.row_offset
        return self.read_rows(start, min(self.chunk_rows, self.shape[0] - start))


def _unwritable(act: str) -> UnsupportedError:
    return UnsupportedError("lazy rows have no memory to write to", got=act, expected="set_range", where="LazyRows")


def _check_operation(func: Any, args: Any, options: dict[str, Any]) -> None:
    """Refuse what would be answered with other bytes than the rows'. Raises UnsupportedError."""
    if func in _UNFILLED:
        raise UnsupportedError(
            "lazy rows give no unfilled memory of their kind", got=str(func), expected=_ADVICE, where="LazyRows"
        )
    device = options.get("device")
    if func in _COPIES and device is not None and torch.device(device).type != "cpu":
        raise UnsupportedError(
            "lazy rows are read on the CPU", got=device, expected="full_tensor().to(device)", where="LazyRows"
        )
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else options.get(argument.name)
        # Operations of several tensors, as ``torch._foreach_zero_``, take them as lists.
        several = value if isinstance(value, list | tuple) else (value,)
        lazies = [one for one in several if isinstance(one, LazyRows)]
        if lazies and argument.alias_info is not None and argument.alias_info.is_write:
            raise _unwritable(str(func))
        for lazy in lazies if func in _INTO_PLAIN else ():
            if lazy.global_row_count == lazy.shape[0]:
                continue
            got = f"{lazy.shape[0]} of {lazy.global_row_count} rows"
            raise UnsupportedError(
                "plain memory would lose where these rows stand", got=got, expected=_ADVICE, where=str(func)
            )


def _check_writer(fqn: str) -> None:
    """Refuse several chunks to torch's HF writer, which keeps the last one in silence. Raises UnsupportedError."""
    # A plan is made without its writer; the only place that names it is the call of torch's that wants the plan.
    if any(isinstance(each, TorchHuggingFaceStorageWriter) for each in locals_of_callers("storage_writer")):
        raise UnsupportedError(
            "torch's HuggingFaceStorageWriter keeps one chunk of a tensor and drops the others",
            got=fqn,
            expected="the HuggingFaceStorageWriter of this package, or chunk_rows of all rows",
            where="save",
        )


_ADVICE = "full_tensor() for this rank's rows; HuggingFaceStorageWriter, which stages them itself, for async_save"


class _Dense(LazyRows):
    _rows: torch.Tensor
    _sink: Callable[[torch.Tensor], Callable[[], None]] | None

    def read_rows_into(self, start: int, length: int, out: torch.Tensor) -> None:
        """The same as bytes, into ``out``, uint8 [length, bytes of a row]."""
        rows = self._rows[start : start + length].contiguous()
        out.copy_(rows.view(length, -1).view(torch.uint8))

    def read_rows(self, start: int, length: int) -> torch.Tensor:
        return self._rows[start : start + length].clone()

    def check_found(self, start: int, rows: torch.Tensor) -> None:
        if self._sink is not None:
            self._sink(rows)
            return
        # Ids and bucket counts say what the views are views of; a checkpoint of other ids fits none of them.
        held = self._rows[start : start + rows.shape[0]].reshape(rows.shape)
        if not torch.equal(held, rows):
            expected = f"{self!r} with the values it has"
            raise CorruptionError(
                "a checkpoint of other ids than the views'", got="others", expected=expected, where="load"
            )

    def accept(self, start: int, rows: torch.Tensor) -> None:
        if self._sink is not None:
            self._sink(rows)()

    def check_target(self) -> None:
        """Comparing is what loading means here, unless somebody wants the values."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild_dense, (self._rows, self.chunk_rows, self.global_row_count, self.row_offset)


def _rebuild_dense(rows: torch.Tensor, chunk_rows: int, global_row_count: int, row_offset: int) -> LazyRows:
    made = dense_rows(rows, chunk_rows)
    made.place(global_row_count, row_offset)
    return made


def dense_rows(
    rows: torch.Tensor,
    chunk_rows: int | None = None,
    *,
    sink: Callable[[torch.Tensor], Callable[[], None]] | None = None,
) -> LazyRows:
    """A tensor in memory as ``LazyRows``; what is loaded must be equal, or ``sink`` checks it and gives its writing."""
    made: _Dense = _Dense._make(tuple(rows.shape), rows.dtype, chunk_rows)
    made._rows, made._sink = rows, sink
    return made


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
            raise UnsupportedError(
                "bytes of the rows were left behind", got=(begin, end), expected=(first, behind), where=table
            )
        places, found = self._places(ids)
        if not bool(found.all()):
            got = ids[~found][:10].tolist()
            raise MissingKeyError(
                "ids whose rows were left behind", got=got, expected="ids of these views", where=table
            )
        out.copy_(self._rows[self._order[places], begin - first : end - first])

    def find(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        return self._places(ids)[1]

    def ids(self, table: str, begin: int, last: int) -> torch.Tensor:
        return self._unique[(self._unique >= begin) & (self._unique <= last)]

    def size(self, table: str) -> int:
        return int(self._unique.numel())


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
    if not isinstance(view, str) or view not in layout.state_slots:
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
    # Of the rows that it was made over; views that were pickled before it was kept have none.
    _layout: RowLayout | None = None

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
        check_kind(source, RowSource, "source", SOURCES)
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
        check_flags(read_only=read_only)
        name = table_of(source.tables, table)
        begin, end, dtype = view_slice(source.layout(name), view)
        made: KVTensor = cls._make((checked.numel(), (end - begin) // dtype.itemsize), dtype, chunk_rows)
        made.table, made.view_name, made._ids, made._range = name, view, checked, (begin, end)
        made._layout = source.layout(name)
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
    def state_optimizer(self) -> str | None:
        """The optimizer whose state this view shows; None where it shows none, or was pickled without its layout."""
        if self._layout is None or self.view_name in ("row", "weight", "metadata"):
            return None
        return self._layout.optimizer

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
                where="source",
            )
        return self._source

    def attach(self, source: RowSource) -> KVTensor:
        """Give an unpickled view its rows; returns it.

        Raises:
            ConfigError: what it shows has another width or dtype in the source's rows of this table, or another
                meaning: of whole rows their layout, of a state its optimizer; or it is none.
        """
        check_kind(source, RowSource, "source", SOURCES)
        layout = source.layout(self.table)
        begin, end, dtype = view_slice(layout, self.view_name)
        same = (end - begin, dtype) == (self._range[1] - self._range[0], self.dtype)
        if not same or not self._means_the_same(layout):
            expected = self._layout or f"{self._range[1] - self._range[0]} bytes of {self.dtype}"
            raise ConfigError("rows of another layout", got=layout, expected=expected, where=self.table)
        self._source, self._range = source, (begin, end)
        self._layout = layout
        # It travels as a view of these rows, and not of those that it was made over.
        self._description = source.reopened()
        self.read_only = self.read_only or source.read_only
        return self

    def _means_the_same(self, layout: RowLayout) -> bool:
        """Whether the bytes that this view shows are values of the same kind in rows of another layout."""
        if self._layout is None or self.view_name in ("weight", "metadata"):
            return True
        return self._layout == layout if self.view_name == "row" else self._layout.optimizer == layout.optimizer

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
        check_row_range(dim, start, length, self.shape[0])
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
        self._write(plain, checked, tell=True)
        return 0

    def _write(self, values: torch.Tensor, ids: torch.Tensor, *, tell: bool) -> None:
        # Whatever is not read-only is a store.
        store = cast("RowStore", self.source)
        if self.view_name == "row":
            store.set_rows(self.table, values, tell=tell)
        else:
            store.place(self.table, ids, values, self._range[0], tell=tell)

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
                where="load",
            )

    def check_found(self, start: int, rows: torch.Tensor) -> None:
        """Demand that the keys of whole rows are this view's ids. Raises CorruptionError."""
        if self.view_name == "row":
            check_keys(rows, self._ids[start : start + rows.shape[0]], self.table)

    def accept(self, start: int, rows: torch.Tensor) -> None:
        """Write rows that a load found; the metadata of rows that are there, too. The load calls who listens."""
        ids = self._ids[start : start + rows.shape[0]]
        if self.view_name == "metadata":
            cast("RowStore", self.source).set_metadata(self.table, ids, rows)
        elif not self.read_only:
            self._write(rows, ids, tell=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._source is not None and self._description is None:
            if self._source.read_only and not isinstance(self._source, HeldRows):
                return self.in_memory().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
            if not self._source.read_only and int(protocol) <= TORCH_SAVE_PROTOCOL:
                raise UnsupportedError(
                    "a view of a store is a reference, and torch.save would keep no row of it",
                    got=f"{self.view_name} of {self.table!r}",
                    expected="state_dict() or clone(), which take their rows along",
                    where="pickle",
                )
        state = {
            "table": self.table,
            "view_name": self.view_name,
            "read_only": self.read_only,
            "_range": self._range,
            "_layout": self._layout,
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
