"""Many small tensors as one: packed into a slab, so that between host and device a single copy moves them.

Prevents a launch and a copy for every tensor, which cost several microseconds each whatever their size
(facts/offload.md 5.3).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastimpl import ops
from twinproof.offload.states import ALIGN_BYTES

__all__ = ["Layout", "pack", "unpack", "view_like"]


# Tensors of one call. Lists of so many come from the first cache of the C library and go back to it; longer ones make
# it merge the small blocks that were freed since, two a tensor, which takes as long as copying 1 KiB.
_BATCH = 64


class Layout:
    """Places of tensors in a slab, aligned, in the order in which they were added.

    Attributes:
        offsets: first byte of each.
        size_bytes: of the slab, so far.
    """

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.size_bytes = 0

    def add(self, tensor: torch.Tensor) -> int:
        """Room for a tensor like this one; its first byte."""
        begin = self.size_bytes
        self.offsets.append(begin)
        self.size_bytes = -(-(begin + tensor.nbytes) // ALIGN_BYTES) * ALIGN_BYTES
        return begin


def view_like(slab: torch.Tensor, like: torch.Tensor, offset: int) -> torch.Tensor:
    """A tensor of the form of ``like`` at a byte of a slab, whose memory it shares."""
    values = slab[offset : offset + like.nbytes].view(like.dtype)
    return values.as_strided(like.shape, like.stride(), values.storage_offset())


def pack(sources: Sequence[torch.Tensor], slab: torch.Tensor, offsets: Sequence[int]) -> None:
    """Copy tensors into a slab of their device, uint8, at ascending offsets.

    See ``ops.pack``, which is called for so many tensors at a time: what it refuses among later ones comes too late.
    """
    if not sources:
        return
    if ops.available():
        for begin in range(0, len(sources), _BATCH):
            ops.pack(sources[begin : begin + _BATCH], slab, offsets[begin : begin + _BATCH])
        return
    for source, offset in zip(sources, offsets, strict=True):
        view_like(slab, source, offset).copy_(source)


def unpack(targets: Sequence[torch.Tensor], slab: torch.Tensor, offsets: Sequence[int]) -> None:
    """The inverse of ``pack``."""
    if not targets:
        return
    if ops.available():
        for begin in range(0, len(targets), _BATCH):
            ops.unpack(targets[begin : begin + _BATCH], slab, offsets[begin : begin + _BATCH])
        return
    for target, offset in zip(targets, offsets, strict=True):
        target.copy_(view_like(slab, target, offset))
