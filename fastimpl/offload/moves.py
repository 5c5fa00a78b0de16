"""Tensors of a chunk to and from its host memory with as few copies as their places allow.

Prevents one copy for each tensor: small ones that lie next to each other on the host are packed into one slab of the
device, which one copy moves. Large ones, and those of another form than their place, are copied by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fastimpl.offload.coalesce import pack, unpack
from twinproof.offload.states import ALIGN_BYTES, Place, view_of

__all__ = ["Item", "receive", "send"]

# A copy of this size takes longer than its launch does, so that packing it would only move it once more.
PACKED_BYTES = 1 << 18

# A place, the offset of its bundle, and the tensor: what lies there, or shall.
Item = tuple[Place, int, torch.Tensor]


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


def send(engine: Any, memory: torch.Tensor, items: Sequence[Item]) -> None:
    """Enqueue, on the current stream, copies of device tensors to their places in host memory."""
    packed, others = _split(engine, items)
    for place, at, tensor in others:
        engine.copy(view_of(memory, place, at), tensor)
    for run in _runs(packed):
        first, last = run[0][0], run[-1][0] + run[-1][1].nbytes
        host, tensors, offsets = memory[first:last], [t for _, t in run], [begin - first for begin, _ in run]
        if not engine.stands_for_device:
            pack(tensors, host, offsets)
            continue
        slab = engine.device_empty(last - first)
        pack(tensors, slab, offsets)
        engine.copy(host, slab)


def receive(engine: Any, memory: torch.Tensor, items: Sequence[Item]) -> None:
    """Enqueue, on the current stream, copies of places in host memory to device tensors."""
    packed, others = _split(engine, items)
    for place, at, tensor in others:
        engine.copy(tensor, view_of(memory, place, at))
    for run in _runs(packed):
        first, last = run[0][0], run[-1][0] + run[-1][1].nbytes
        host, tensors, offsets = memory[first:last], [t for _, t in run], [begin - first for begin, _ in run]
        if not engine.stands_for_device:
            unpack(tensors, host, offsets)
            continue
        slab = engine.device_empty(last - first)
        engine.copy(slab, host)
        unpack(tensors, slab, offsets)
