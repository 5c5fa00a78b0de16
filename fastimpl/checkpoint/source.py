"""Bytes of a local tensor in row-major order, wherever and however it lies: the reading end of every save.

Contiguous CPU memory is handed out as it is. Everything else passes through a buffer of the size that was asked for, so
a save never holds a second copy of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from fastimpl import ops
from twinproof.checkpoint.format import as_bits, dense_bytes, waited
from twinproof.errors import PlanError

__all__ = ["LazySource", "RowFiller", "RowReader", "Source"]


@runtime_checkable
class RowReader(Protocol):
    """A tensor that is not in memory: a save is planned from its shape, and asks for rows when they are due."""

    row_offset: int

    def read_rows(self, start: int, length: int) -> torch.Tensor:
        """Rows [start, start + length) of this rank, from ``row_offset`` of the global tensor on."""
        ...


@runtime_checkable
class RowFiller(RowReader, Protocol):
    """A reader that can also fill memory of the caller."""

    def read_rows_into(self, start: int, length: int, out: torch.Tensor) -> None:
        """The bytes of the same rows into ``out``, uint8 [length, bytes of a row], contiguous."""
        ...


class Source:
    """Byte ranges of one chunk, as they are to stand in the file.

    Args:
        value: local data of the chunk; any strides, any device with memory.
        dtype: dtype in the file; differs from the value's for an export cast.
    """

    def __init__(self, value: torch.Tensor, dtype: torch.dtype) -> None:
        self.value = waited(value.detach())
        self.dtype = dtype
        self.device = self.value.device
        plain = self.value.is_contiguous() and not self.value.is_conj() and not self.value.is_neg()
        self.is_view = plain and self.device.type == "cpu" and dtype == self.value.dtype
        self._flat = dense_bytes(self.value) if plain and dtype == self.value.dtype else None

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Bytes ``begin`` to ``end`` of the chunk: uint8 [end - begin], on the CPU. A view where memory allows."""
        return self.dense(begin, end).cpu()

    def dense(self, begin: int, end: int) -> torch.Tensor:
        """The same on the value's own device."""
        if self._flat is not None:
            return self._flat[begin:end]
        width = self.dtype.itemsize
        first, last = begin // width, -(-end // width)
        values = self._elements(first, last)
        if self.dtype != self.value.dtype:
            values = values.to(self.dtype)
        return as_bits(values).view(torch.uint8)[begin - first * width : end - first * width]

    def _elements(self, first: int, last: int) -> torch.Tensor:
        # Flat elements, dense, on the tensor's own device. Lazy conjugates are rare and small enough to resolve whole.
        source = self.value.resolve_conj().resolve_neg()
        if source.is_contiguous():
            return source.view(-1)[first:last]
        dense = torch.empty((last - first) * source.element_size(), dtype=torch.uint8, device=source.device)
        ops.strided_gather(as_bits(source), first, dense)
        return dense.view(source.dtype)


class LazySource(Source):
    """Byte ranges of rows that are read when they are asked for, and forgotten.

    A writer has them read into its own block, where the reader can: memory new for each block costs page faults,
    and the heap keeps it.

    Args:
        reader: where the rows come from.
        offsets, sizes: of the chunk in the global tensor: whole rows.
        stored: dtype of the rows as read.
        dtype: dtype in the file.
    """

    is_view = False

    def __init__(
        self, reader: RowReader, offsets: Sequence[int], sizes: Sequence[int], stored: torch.dtype, dtype: torch.dtype
    ) -> None:
        self.dtype, self.device = dtype, torch.device("cpu")
        self._reader, self._stored = reader, stored
        self._first, self._row_shape = offsets[0] - reader.row_offset, tuple(sizes[1:])
        self._row_bytes = math.prod(self._row_shape) * dtype.itemsize

    def fill(self, begin: int, end: int, out: torch.Tensor) -> None:
        """Bytes ``begin`` to ``end`` of the chunk into ``out``, uint8 [end - begin].

        Whole rows come in place, a row that is cut by ``begin`` or ``end`` by way of memory of its own.
        """
        first, last = -(-begin // self._row_bytes), end // self._row_bytes
        reader = self._reader
        if self._stored != self.dtype or first >= last or not isinstance(reader, RowFiller):
            out.copy_(self.read(begin, end))
            return
        head_bytes, whole_bytes = first * self._row_bytes - begin, (last - first) * self._row_bytes
        whole = out[head_bytes : head_bytes + whole_bytes].view(last - first, self._row_bytes)
        reader.read_rows_into(self._first + first, last - first, whole)
        if head_bytes:
            out[:head_bytes] = self.read(begin, begin + head_bytes)
        if head_bytes + whole_bytes < end - begin:
            out[head_bytes + whole_bytes :] = self.read(begin + head_bytes + whole_bytes, end)

    def dense(self, begin: int, end: int) -> torch.Tensor:
        """The bytes; the reader's rows must be what was planned, else PlanError."""
        first, last = begin // self._row_bytes, -(-end // self._row_bytes)
        rows = self._reader.read_rows(self._first + first, last - first)
        if tuple(rows.shape) != (last - first, *self._row_shape) or rows.dtype != self._stored:
            raise PlanError(
                "the rows are not what was planned",
                got=f"{rows.dtype} {list(rows.shape)}",
                expected=f"{self._stored} {[last - first, *self._row_shape]}",
                where=f"rows {first} to {last}",
            )
        flat = dense_bytes(rows.to(self.dtype).contiguous())
        return flat[begin - first * self._row_bytes : end - first * self._row_bytes]
