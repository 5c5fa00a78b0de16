"""Rectangles of tensors as bytes of a file. All arithmetic in bytes on the innermost dimension."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["Geometry", "geometry"]


class Geometry(NamedTuple):
    """A rectangle with every full trailing dimension folded into the one before; ``shape`` is of the whole tensor."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def run_bytes(self) -> int:
        """Length of each contiguous piece in the file."""
        return self.sizes[-1]

    @property
    def total_bytes(self) -> int:
        """Bytes of the rectangle."""
        return math.prod(self.sizes)

    @property
    def first(self) -> int:
        """Offset of the first byte inside the tensor."""
        at = 0
        for shape, offset in zip(self.shape, self.offsets, strict=True):
            at = at * shape + offset
        return at

    def locate(self, position: int) -> int:
        """Offset inside the tensor of byte ``position`` of the rectangle."""
        at, stride = 0, 1
        for shape, offset, size in zip(reversed(self.shape), reversed(self.offsets), reversed(self.sizes), strict=True):
            at += (offset + position % size) * stride
            position //= size
            stride *= shape
        return at

    def is_run(self, skip: int, count: int) -> bool:
        """Whether bytes ``skip`` to ``skip + count`` of the rectangle lie in one of its contiguous pieces."""
        return skip // self.run_bytes == (skip + count - 1) // self.run_bytes

    def held_before(self, position: int) -> int:
        """How many bytes of the rectangle lie before this byte of the tensor."""
        if len(self.shape) == 1:
            return min(max(position - self.offsets[0], 0), self.sizes[0])
        held, rest, stride, inner = 0, position, math.prod(self.shape), math.prod(self.sizes)
        for shape, offset, size in zip(self.shape, self.offsets, self.sizes, strict=True):
            stride //= shape
            inner //= size
            index, rest = divmod(rest, stride)
            index -= offset
            if index < 0:
                return held
            if index >= size:
                return held + size * inner
            held += index * inner
        return held

    def runs(self) -> Iterator[tuple[int, int]]:
        """(begin, end) inside the tensor of each contiguous piece. Only for rectangles of few pieces."""
        for position in range(0, self.total_bytes, self.run_bytes):
            at = self.locate(position)
            yield at, at + self.run_bytes

    def descriptor(self, base: int, skip: int, count: int) -> list[int]:
        """Words for ``fastimpl.ops.place_rectangles`` and ``take_rectangles``."""
        return [len(self.shape), base, skip, count, *self.shape, *self.offsets, *self.sizes]


def geometry(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], itemsize: int) -> Geometry:
    """Geometry of a rectangle that is not empty, given in elements of ``itemsize`` bytes."""
    unit, last = itemsize, len(shape) - 1
    while last >= 0 and sizes[last] == shape[last]:
        unit *= shape[last]
        last -= 1
    if last < 0:
        return Geometry((unit,), (0,), (unit,))
    whole, first, part = shape[last] * unit, offsets[last] * unit, sizes[last] * unit
    if last == 0:  # Rows, by far the most frequent split; slices of torch.Size are slow.
        return Geometry((whole,), (first,), (part,))
    return Geometry((*shape[:last], whole), (*offsets[:last], first), (*sizes[:last], part))
