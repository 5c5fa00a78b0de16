"""One block of a file: put together from headers, local chunks and messages, and written with one call.

Prevents tiny writes, and a write that other ranks' bytes share a page with.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from fastimpl import ops
from fastimpl.checkpoint.geometry import Geometry
from fastimpl.checkpoint.source import LazySource, Source
from fastimpl.checkpoint.wire import HEADER_WORDS, OwnBlock
from fastimpl.regimes import regime
from twinproof.checkpoint.catalog import Part
from twinproof.checkpoint.format import buffer_of
from twinproof.errors import CorruptionError

__all__ = ["LocalPart", "assemble", "block_sums", "piece_sums", "write_at"]

_IOV_MAX = regime(512, 3)
_ZERO_COPY_BYTES = regime(256 << 10, 48)  # Below this, copying a piece is cheaper than one more entry of a vector.


@dataclass(eq=False)
class LocalPart:
    """Bytes ``skip`` to ``skip + count`` of a local chunk, and where they lie in the file.

    ``staged`` holds them in host memory while a copy from a device is in flight or done.
    """

    source: Source
    geometry: Geometry
    base: int
    skip: int
    count: int
    staged: torch.Tensor | None = None

    @property
    def is_run(self) -> bool:
        """Whether they are contiguous in the file."""
        return self.geometry.is_run(self.skip, self.count)

    @property
    def file_offset(self) -> int:
        """File offset of the first byte. Only for runs."""
        return self.base + self.geometry.locate(self.skip)

    def data(self) -> torch.Tensor:
        """The bytes, uint8 on the CPU."""
        if self.staged is not None:
            return self.staged
        return self.source.read(self.skip, self.skip + self.count)

    def place(self, window: torch.Tensor, window_start: int) -> None:
        """Copy or read the bytes to where they lie in a window of the file, uint8, which begins at ``window_start``."""
        if isinstance(self.source, LazySource) and self.is_run:
            begin = self.file_offset - window_start
            self.source.fill(self.skip, self.skip + self.count, window[begin : begin + self.count])
        else:
            ops.place_rectangles(window, window_start, self.data(), torch.tensor(self.descriptor(), device="cpu"))

    def descriptor(self) -> list[int]:
        """For ``ops.place_rectangles``."""
        return self.geometry.descriptor(self.base, self.skip, self.count)


def assemble(
    block: OwnBlock, header: bytes, parts: Sequence[LocalPart], messages: Sequence[torch.Tensor], scratch: torch.Tensor
) -> list[torch.Tensor]:
    """The bytes of a block as few tensors in file order, each uint8 on the CPU; together exactly the block.

    Args:
        block: the file range.
        header: the file's header; its part inside the block is written.
        parts: local bytes in the block.
        messages: other ranks' bytes, framed as in ``wire``.
        scratch: uint8 buffer of at least the block's size; reused, so the result is valid until the next call.

    Raises:
        CorruptionError: the contents do not fill the block. Nothing zero-filled is ever written.
    """
    size_bytes = block.end - block.start
    window = scratch[:size_bytes]
    head = header[block.start : block.end]
    buffer_of(window)[: len(head)] = head
    large = _zero_copy(parts, size_bytes)
    for part in parts:
        if part not in large:
            part.place(window, block.start)
    filled = (
        len(head)
        + sum(part.count for part in parts)
        + sum(_place_message(window, block, message) for message in messages)
    )
    if filled != size_bytes:
        raise CorruptionError(
            "a block would be written with missing bytes",
            got=filled,
            expected=size_bytes,
            where=f"file {block.file} at {block.start}",
        )
    result, position = [], block.start
    for part in large:
        result += [window[position - block.start : part.file_offset - block.start], part.data()]
        position = part.file_offset + part.count
    return [*result, window[position - block.start :]]


def _zero_copy(parts: Sequence[LocalPart], size_bytes: int) -> list[LocalPart]:
    # Long runs go from the caller's memory straight to the file, where they make up most of the block.
    large = [p for p in parts if p.count >= _ZERO_COPY_BYTES and p.source.is_view and p.is_run]
    if len(large) > _IOV_MAX // 2 or sum(p.count for p in large) * 2 < size_bytes:
        return []
    return sorted(large, key=lambda p: p.file_offset)


def _place_message(window: torch.Tensor, block: OwnBlock, message: torch.Tensor) -> int:
    word_count = int(message[: 8 * HEADER_WORDS].view(torch.int64)[1])
    begin = 8 * (HEADER_WORDS + word_count)
    descriptors = message[8 * HEADER_WORDS : begin].view(torch.int64)
    data_bytes = _moved_bytes(descriptors.tolist())
    ops.place_rectangles(window, block.start, message[begin : begin + data_bytes], descriptors)
    return data_bytes


def _moved_bytes(words: Sequence[int]) -> int:
    return sum(count for _, count in _moves(words))


def _moves(words: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Of each descriptor: the file offset of its tensor, and the bytes that it moves."""
    at = 0
    while at < len(words):
        yield words[at + 1], words[at + 3]
        at += 4 + 3 * words[at]


def block_sums(
    file: str,
    block: OwnBlock,
    header_bytes: int,
    parts: Sequence[LocalPart],
    messages: Sequence[torch.Tensor],
    pieces: Sequence[torch.Tensor],
) -> list[Part]:
    """The sums of an assembled block, one or more for each tensor in it, while its bytes are in the core's cache.

    Args:
        file: name of the block's file.
        header_bytes: length of the file's header, which is not summed; 0 where the block holds none of it.
        block: the file range.
        parts: local bytes in the block; they say which tensors lie in it.
        messages: other ranks' bytes, likewise.
        pieces: what ``assemble`` gave.
    """
    moves = [(part.base, part.count) for part in parts]
    for message in messages:
        word_count = int(message[: 8 * HEADER_WORDS].view(torch.int64)[1])
        moves += _moves(message[8 * HEADER_WORDS : 8 * (HEADER_WORDS + word_count)].view(torch.int64).tolist())
    return piece_sums(file, block.start, header_bytes, {base for base, count in moves if count}, pieces)


def piece_sums(
    file: str, start: int, header_bytes: int, bases: Iterable[int], pieces: Iterable[torch.Tensor]
) -> list[Part]:
    """The sums of bytes that lie one after the other in a file from ``start`` on, cut where a tensor begins.

    Args:
        file: its name.
        start: file offset of the first byte.
        header_bytes: bytes at the start of the file that are no tensor's.
        bases: file offsets of the tensors that the bytes belong to.
        pieces: uint8, CPU.
    """
    begins, found = sorted(bases), []
    for piece in pieces:
        end = start + piece.numel()
        first = max(start, header_bytes)
        if first < end:
            cuts = [first, *begins[bisect_right(begins, first) : bisect_left(begins, end)], end]
            sums = ops.crc32_between(piece, [cut - start for cut in cuts])
            for (low, high), crc in zip(pairwise(cuts), sums, strict=True):
                base = begins[bisect_right(begins, low) - 1]
                found.append(Part(file, base, low - base, high - low, crc))
        start = end
    return found


def write_at(descriptor: int, pieces: Sequence[torch.Tensor], offset: int | None) -> int:
    """Write the pieces one after the other at a file offset; None appends. Returns the number of write calls.

    Short writes are continued. Raises OSError.
    """
    views = [buffer_of(piece) for piece in pieces if piece.numel()]
    calls = 0
    while views:
        batch = views[:_IOV_MAX]
        written = os.writev(descriptor, batch) if offset is None else os.pwritev(descriptor, batch, offset)
        calls += 1
        if written == 0:
            raise OSError(errno.EIO, "the file system wrote nothing")
        offset = None if offset is None else offset + written
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]
    return calls
