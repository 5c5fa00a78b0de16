"""Rows of a tensor that is too large to exist: read when asked, handed to torch's checkpoint in bounded chunks.

Torch plans a save from shapes alone and asks for data chunk by chunk (``torch.distributed._checkpointable``); a
tensor that implements that protocol never has to be whole, on any rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.utils._pytree import tree_map_only

from refimpl.errors import ConfigError, ShapeError

__all__ = ["CHUNK_BYTES", "LazyRows", "dense_rows"]

CHUNK_BYTES = 16 << 20


class LazyRows(torch.Tensor):
    """This rank's rows of a global tensor. Its shape is the local one.

    A subclass has ``read_rows(start, length)``. Any torch operation works on the rows as read at that moment.

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
        read = tree_map_only(LazyRows, lambda lazy: lazy.full_tensor(), (args, kwargs or {}))
        return func(*read[0], **read[1])

    def _global_chunks(self) -> list[ChunkStorageMetadata]:
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
        properties, size = TensorProperties(dtype=self.dtype), torch.Size((self.global_row_count, *self.shape[1:]))
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            for chunk in self._global_chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._global_chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        start = int((index.offset or (0,))[0]) - self.row_offset
        return self.read_rows(start, min(self.chunk_rows, self.shape[0] - start))


class _Dense(LazyRows):
    _rows: torch.Tensor

    def read_rows_into(self, start: int, length: int, out: torch.Tensor) -> None:
        """The same as bytes, into ``out``, uint8 [length, bytes of a row]."""
        rows = self._rows[start : start + length].contiguous()
        out.copy_(rows.view(length, -1).view(torch.uint8))

    def read_rows(self, start: int, length: int) -> torch.Tensor:
        return self._rows[start : start + length].clone()


def dense_rows(rows: torch.Tensor, chunk_rows: int | None = None) -> LazyRows:
    """A tensor in memory as ``LazyRows``."""
    made: _Dense = _Dense._make(tuple(rows.shape), rows.dtype, chunk_rows)
    made._rows = rows
    return made
