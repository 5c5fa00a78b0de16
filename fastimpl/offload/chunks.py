"""Chunks: whole parameters that lie next to each other in host memory, so that one copy moves them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastimpl.offload.layout import ChunkLayout
from twinproof.offload.states import Bundle, chunks_of

__all__ = ["Chunk", "cut"]


@dataclass
class Chunk:
    """Bytes ``begin`` to ``end`` of one block of host memory.

    ``arrived`` is set behind the copy in, ``home`` behind the copy out; ``is_leaving`` until the host has waited for
    ``home``, ``is_arriving`` until for ``arrived``. ``version`` is what a write changes, as it was when
    the chunk was copied in first.
    """

    bundles: list[Bundle]
    memory: torch.Tensor
    begin: int
    end: int
    arrived: Any
    home: Any
    is_leaving: bool = False
    is_arriving: bool = False
    version: Any = None
    _layout: ChunkLayout | None = None

    @property
    def layout(self) -> ChunkLayout:
        """The plan of its bundles as they are now."""
        if self._layout is None:
            self._layout = ChunkLayout(self.bundles, self.host, self.begin)
        return self._layout

    def drop_layout(self) -> None:
        """Its bundles have changed: plan anew."""
        self._layout = None

    def forget_here(self) -> None:
        """What is on the device may no longer be one block of it."""
        if self._layout is not None:
            self._layout.here = None

    @property
    def size_bytes(self) -> int:
        """Of the copy."""
        return self.end - self.begin

    @property
    def host(self) -> torch.Tensor:
        """Its range of host memory."""
        return self.memory[self.begin : self.end]


def cut(memory: torch.Tensor, bundles: Sequence[Bundle], chunk_bytes: int, engine: Any) -> Iterable[Chunk]:
    """Lay bundles out in a block, one behind the other, and cut it into chunks."""
    position = 0
    for some in chunks_of(bundles, chunk_bytes):
        begin = position
        for bundle in some:
            bundle.offset_bytes = position
            position += bundle.span_bytes
        yield Chunk(some, memory, begin, position, engine.event(), engine.event())
