"""A caching allocator on paper: where blocks would lie on a device, and how large the largest hole is."""

from __future__ import annotations

from typing import Any

import torch

from conformance.provers.virtual_device import VirtualDevice
from conformance.provers.virtual_device.tracker import Memory

__all__ = ["Arena"]

_GRANULE_BYTES = 512  # Of torch's caching allocator.


class Arena:
    """Best fit with splitting and merging, in steps of 512 bytes, fed by what a virtual device allocates and frees.

    Args:
        device: whose device memory is placed, from now on; what fits nowhere is counted in ``failed_bytes``.
        size_bytes: of the whole.
    """

    def __init__(self, device: VirtualDevice, size_bytes: int) -> None:
        self.failed_bytes = 0
        self._holes = {0: size_bytes}
        self._blocks: dict[int, tuple[int, int, Memory]] = {}
        tracker = device.tracker
        memory_of, forget = tracker.memory_of, tracker._forget

        def made(tensor: torch.Tensor, **options: Any) -> Memory:
            found = memory_of(tensor, **options)
            if id(found) not in self._blocks and not found.on_host:
                self._place(found)
            return found

        def forgotten(key: int) -> None:
            self._free(tracker._memory[key])
            forget(key)

        for name, listener in (("memory_of", made), ("_forget", forgotten)):
            setattr(tracker, name, listener)

    @property
    def largest_hole_bytes(self) -> int:
        """What could be allocated at once."""
        return max(self._holes.values(), default=0)

    def _place(self, memory: Memory) -> None:
        size = -(-memory.size_bytes // _GRANULE_BYTES) * _GRANULE_BYTES
        fitting = [(hole, at) for at, hole in self._holes.items() if hole >= size]
        if not fitting:
            self.failed_bytes += size
            return
        hole, at = min(fitting)
        del self._holes[at]
        if hole > size:
            self._holes[at + size] = hole - size
        self._blocks[id(memory)] = (at, size, memory)

    def _free(self, memory: Memory) -> None:
        at, size, _ = self._blocks.pop(id(memory), (0, 0, memory))
        for start, hole in list(self._holes.items()):
            if size and start + hole == at:
                at, size = start, hole + size
                del self._holes[start]
            elif size and at + size == start:
                size += hole
                del self._holes[start]
        if size:
            self._holes[at] = size
