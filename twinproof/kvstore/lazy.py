"""Rows of a tensor that is too large to exist: read when asked, handed to torch's checkpoint in bounded chunks.

Torch plans a save from shapes alone and asks for data chunk by chunk (``torch.distributed._checkpointable``); a
tensor that implements that protocol never has to be whole, on any rank.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter as TorchHuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.utils._pytree import tree_map_only

from twinproof.errors import ConfigError, CorruptionError, ShapeError, UnsupportedError

__all__ = ["CHUNK_BYTES", "LazyRows", "dense_rows"]

CHUNK_BYTES = 16 << 20

_ATEN = torch.ops.aten
_SAME = (_ATEN.detach.default, _ATEN.alias.default, _ATEN.lift_fresh.default)
_COPIES = (_ATEN.clone.default, _ATEN._to_copy.default)
# What these give is not the rows, and torch's stagers take it for them.
_UNFILLED = (_ATEN.new_empty.default, _ATEN.new_empty_strided.default, _ATEN.empty_like.default)


class LazyRows(torch.Tensor):
    """This rank's rows of a global tensor. Its shape is the local one.

    A subclass has ``read_rows(start, length)``. A torch operation works on the rows as read at that moment, but for
    these: ``detach`` is the tensor itself; ``clone``, ``copy.deepcopy`` and ``to`` another dtype give the rows of this
    moment in memory, in the same place of the global tensor; what writes in place, asks for unfilled memory of the same
    kind (``new_empty``), goes to another device, or copies one rank's rows of several into plain memory is refused.

    Attributes:
        global_row_count: rows of the global tensor, over all ranks.
        row_offset: where this rank's rows begin in it.
        chunk_rows: rows of a chunk handed to torch's checkpoint, at most.
    """

    global_row_count: int
    row_offset: int
    chunk_rows: int

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
        if not 0 <= row_offset <= global_row_count - self.shape[0]:
            raise ConfigError("rows outside the tensor", got=(row_offset, self.shape[0]), expected=global_row_count)
        self.global_row_count, self.row_offset = global_row_count, row_offset

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:  # type: ignore[override]
        """Rows [start, start + length) as a plain tensor. Raises ShapeError for another dim or a range outside."""
        self._check_range(dim, start, length)
        return self.read_rows(start, length)

    def _check_range(self, dim: int, start: int, length: int) -> None:
        if dim != 0:
            raise ShapeError("only rows can be narrowed", got=dim, expected=0, where="dim")
        if start < 0 or length < 0 or start + length > self.shape[0]:
            raise ShapeError("a range outside the rows", got=(start, length), expected=f"within {self.shape[0]} rows")

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

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyRows:
        made = self.in_memory()
        memo[id(self)] = made
        return made

    def untyped_storage(self) -> Any:
        """Refused: there is none."""
        raise UnsupportedError("lazy rows have no storage", got=repr(self), expected="full_tensor()")

    def storage(self) -> Any:
        """Refused: there is none."""
        return self.untyped_storage()

    def share_memory_(self) -> Any:
        """Refused: there is none to share."""
        return self.untyped_storage()

    def __dlpack__(self, **options: Any) -> Any:
        """Refused: there is no memory to hand out."""
        return self.untyped_storage()

    def check_target(self) -> None:
        """Demand that a checkpoint can be loaded into these rows. Raises UnsupportedError."""
        raise UnsupportedError("rows in memory of their own cannot be loaded into", got=repr(self))

    def accept(self, start: int, rows: torch.Tensor) -> None:
        """Rows that a load found for the place from ``start`` on; see ``KVLoadPlanner``. Raises CorruptionError."""
        raise NotImplementedError

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
        )

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        start = int((index.offset or (0,))[0]) - self.row_offset
        return self.read_rows(start, min(self.chunk_rows, self.shape[0] - start))


def _check_operation(func: Any, args: Any, options: dict[str, Any]) -> None:
    """Refuse what would be answered with other bytes than the rows'. Raises UnsupportedError."""
    if func in _UNFILLED:
        raise UnsupportedError("lazy rows give no unfilled memory of their kind", got=str(func), expected=_ADVICE)
    device = options.get("device")
    if func in _COPIES and device is not None and torch.device(device).type != "cpu":
        raise UnsupportedError("lazy rows are read on the CPU", got=device, expected="full_tensor().to(device)")
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else options.get(argument.name)
        if not isinstance(value, LazyRows):
            continue
        if argument.alias_info is not None and argument.alias_info.is_write:
            raise UnsupportedError("lazy rows have no memory to write to", got=str(func), expected="set_range")
        if func is _ATEN.copy_.default and value.global_row_count != value.shape[0]:
            got = f"{value.shape[0]} of {value.global_row_count} rows"
            raise UnsupportedError("plain memory would lose where these rows stand", got=got, expected=_ADVICE)


def _check_writer(fqn: str) -> None:
    """Refuse several chunks to torch's HF writer, which keeps the last one in silence. Raises UnsupportedError."""
    # A plan is made without its writer; the only place that names it is the call of torch's that wants the plan.
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if isinstance(frame.f_locals.get("storage_writer"), TorchHuggingFaceStorageWriter):
            raise UnsupportedError(
                "torch's HuggingFaceStorageWriter keeps one chunk of a tensor and drops the others",
                got=fqn,
                expected="the HuggingFaceStorageWriter of this package, or chunk_rows of all rows",
            )


_ADVICE = "full_tensor() for this rank's rows; HuggingFaceStorageWriter, which stages them itself, for async_save"


class _Dense(LazyRows):
    _rows: torch.Tensor
    _sink: Callable[[torch.Tensor], None] | None

    def read_rows_into(self, start: int, length: int, out: torch.Tensor) -> None:
        """The same as bytes, into ``out``, uint8 [length, bytes of a row]."""
        rows = self._rows[start : start + length].contiguous()
        out.copy_(rows.view(length, -1).view(torch.uint8))

    def read_rows(self, start: int, length: int) -> torch.Tensor:
        return self._rows[start : start + length].clone()

    def accept(self, start: int, rows: torch.Tensor) -> None:
        if self._sink is not None:
            self._sink(rows)
            return
        # Ids and bucket counts say what the views are views of; a checkpoint of other ids fits none of them.
        held = self._rows[start : start + rows.shape[0]].reshape(rows.shape)
        if not torch.equal(held, rows):
            raise CorruptionError("a checkpoint of other ids than the views'", got=repr(self))

    def check_target(self) -> None:
        """Comparing is what loading means here, unless somebody wants the values."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild_dense, (self._rows, self.chunk_rows, self.global_row_count, self.row_offset)


def _rebuild_dense(rows: torch.Tensor, chunk_rows: int, global_row_count: int, row_offset: int) -> LazyRows:
    made = dense_rows(rows, chunk_rows)
    made.place(global_row_count, row_offset)
    return made


def dense_rows(
    rows: torch.Tensor, chunk_rows: int | None = None, *, sink: Callable[[torch.Tensor], None] | None = None
) -> LazyRows:
    """A tensor in memory as ``LazyRows``; ``sink`` is given what is loaded, which else must be equal."""
    made: _Dense = _Dense._make(tuple(rows.shape), rows.dtype, chunk_rows)
    made._rows, made._sink = rows, sink
    return made
