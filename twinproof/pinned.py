"""Host memory that is pinned at its exact size, and unpinned when nobody has it any more.

Prevents a collector that breaks what it knows nothing of: memory is dropped wherever Python collects, which may be in
the middle of a graph capture, where waiting for the device is an error, or in a forked child, where every CUDA call is.
"""

from __future__ import annotations

import os
import weakref
from typing import NamedTuple

import torch

__all__ = ["pinned_empty", "release_dropped"]

_PAGE_BYTES = 4096


class _Region(NamedTuple):
    memory: torch.Tensor  # Keeps the pages until they are unpinned.
    pointer: int
    device: torch.device
    process: int


# Dropped while it could not be unpinned. It belongs to the process: whoever made it may be gone.
_dropped: list[_Region] = []


def pinned_empty(size_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [size_bytes] on pages of its own, pinned; torch's own pinned memory is rounded up to a power of two.

    Args:
        size_bytes: of the memory; none is pinned for 0.
        device: the CUDA device whose copies use it: they are waited for before it is unpinned.
    """
    release_dropped()
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    from torch.cuda._pin_memory_utils import pin_memory

    pages_bytes = -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
    memory = torch.empty(pages_bytes + _PAGE_BYTES, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % _PAGE_BYTES :][:size_bytes]
    region = _Region(memory, memory.data_ptr(), device, os.getpid())
    pin_memory(region.pointer, size_bytes)
    # Another storage of the same pages: it can go while the region stays.
    handed_out: torch.Tensor = torch.from_dlpack(memory)
    weakref.finalize(handed_out.untyped_storage(), _drop, region).atexit = False
    return handed_out


def release_dropped() -> None:
    """Unpin what was dropped while that was impossible, if it is possible now."""
    waiting, _dropped[:] = list(_dropped), []
    for region in waiting:
        _drop(region)


def _drop(region: _Region) -> None:
    if region.process != os.getpid():
        # The parent's pages, copied on write: they are pinned there, and not here.
        return
    if torch.cuda.is_current_stream_capturing():
        _dropped.append(region)
        return
    from torch.cuda._pin_memory_utils import unpin_memory

    # Copies may still run to it; and memory freed while registered stays pinned under somebody else's data.
    torch.cuda.synchronize(region.device)
    unpin_memory(region.pointer)
