"""Many small tensors as one: packed into a slab, so that between host and device a single copy moves them.

Prevents a launch and a copy for every tensor, which cost several microseconds each whatever their size. Large tensors,
and those of another form than their place, are copied by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastimpl import ops
from fastimpl.regimes import regime
from twinproof.offload.states import ALIGN_BYTES, Place, view_of

__all__ = ["Item", "SlabLayout", "pack", "receive", "send", "unpack", "view_like"]


# Tensors of one call on the CPU. Lists of so many come from the first cache of the C library and go back to it; longer
# ones make it merge the small blocks that were freed since, two a tensor, which takes as long as copying 1 KiB.
_BATCH = regime(64, 2)
# On a device a call is a launch, which costs more than that: so many as one launch takes, ``kPackBatch`` in C++.
_DEVICE_BATCH = 160
# A copy of this size takes longer than its launch does, so that packing it would only move it once more.
PACKED_BYTES = regime(1 << 18, 1 << 10)

# A place, the offset of its bundle, and the tensor: what lies there, or shall.
Item = tuple[Place, int, torch.Tensor]


class SlabLayout:
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


@dataclass(frozen=True)
class _Run:
    """Neighbours: their bytes of host memory, as many on the device, and where in these each lies."""

    host: torch.Tensor
    slab: torch.Tensor
    tensors: list[torch.Tensor]
    offsets: list[int]


def view_like(slab: torch.Tensor, like: torch.Tensor, offset: int) -> torch.Tensor:
    """A tensor of the form of ``like`` at a byte of a slab, whose memory it shares."""
    values = slab[offset : offset + like.nbytes].view(like.dtype)
    return values.as_strided(like.shape, like.stride(), values.storage_offset())


def _batch_of(slab: torch.Tensor) -> int:
    return _BATCH if slab.device.type == "cpu" else _DEVICE_BATCH


def pack(sources: Sequence[torch.Tensor], slab: torch.Tensor, offsets: Sequence[int]) -> None:
    """Copy tensors into a slab of their device, uint8, at ascending offsets.

    See ``ops.pack``, which is called for so many tensors at a time: what it refuses among later ones comes too late.
    """
    if ops.available():
        count = _batch_of(slab)
        for begin in range(0, len(sources), count):
            ops.pack(sources[begin : begin + count], slab, offsets[begin : begin + count])
        return
    for source, offset in zip(sources, offsets, strict=True):
        view_like(slab, source, offset).copy_(source)


def unpack(targets: Sequence[torch.Tensor], slab: torch.Tensor, offsets: Sequence[int]) -> None:
    """The inverse of ``pack``."""
    if ops.available():
        count = _batch_of(slab)
        for begin in range(0, len(targets), count):
            ops.unpack(targets[begin : begin + count], slab, offsets[begin : begin + count])
        return
    for target, offset in zip(targets, offsets, strict=True):
        target.copy_(view_like(slab, target, offset))


def _runs(items: Sequence[Item]) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """(first byte, tensor) of neighbours, ascending: at most padding lies between them."""
    run: list[tuple[int, torch.Tensor]] = []
    end = 0
    for place, at, tensor in sorted(items, key=lambda item: item[0].offset_bytes + item[1]):
        begin = place.offset_bytes + at
        if run and begin - end >= ALIGN_BYTES:
            yield run
            run = []
        run.append((begin, tensor))
        end = begin + place.size_bytes
    if run:
        yield run


def _split(engine: Any, items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """Items to be packed, and the others."""
    packed = [item for item in items if item[0].size_bytes <= PACKED_BYTES or not engine.stands_for_device]
    # What a load left in host memory goes from there to there.
    fitting = [item for item in packed if item[0].fits(item[2]) and engine.holds(item[2])]
    chosen = {id(item[2]) for item in fitting}
    return fitting, [item for item in items if id(item[2]) not in chosen]


def _packed(engine: Any, memory: torch.Tensor, packed: Sequence[Item]) -> Iterator[_Run]:
    """The runs of items that lie side by side in host memory, each with a slab of the device."""
    for run in _runs(packed):
        first, last = run[0][0], run[-1][0] + run[-1][1].nbytes
        host = memory[first:last]
        slab = engine.device_empty(last - first) if engine.stands_for_device else host
        yield _Run(host, slab, [tensor for _, tensor in run], [begin - first for begin, _ in run])


def send(engine: Any, memory: torch.Tensor, items: Sequence[Item]) -> None:
    """Enqueue, on the current stream, copies of device tensors to their places in host memory: all in one call."""
    packed, others = _split(engine, items)
    targets, sources = [view_of(memory, place, at) for place, at, _ in others], [tensor for _, _, tensor in others]
    for run in _packed(engine, memory, packed):
        pack(run.tensors, run.slab, run.offsets)
        if engine.stands_for_device:
            targets.append(run.host)
            sources.append(run.slab)
    if targets:
        engine.copy_many(targets, sources)


def receive(engine: Any, memory: torch.Tensor, items: Sequence[Item]) -> None:
    """Enqueue, on the current stream, copies of places in host memory to device tensors: all in one call."""
    packed, others = _split(engine, items)
    targets, sources = [tensor for _, _, tensor in others], [view_of(memory, place, at) for place, at, _ in others]
    runs = list(_packed(engine, memory, packed))
    for run in runs if engine.stands_for_device else ():
        targets.append(run.slab)
        sources.append(run.host)
    if targets:
        engine.copy_many(targets, sources)
    for run in runs:
        unpack(run.tensors, run.slab, run.offsets)
