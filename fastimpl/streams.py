"""Streams, events, copies and staging memory behind one interface, see ``twinproof.engine``, with fewer calls.

Prevents a call of Python for each copy of a chunk, and host memory whose last owner stops the device to give it back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastimpl import ops
from twinproof import engine
from twinproof.engine import Engine

__all__ = ["CudaEngine", "Engine", "InlineEngine", "engine_for", "placement_of"]


def _fit(target: torch.Tensor, source: torch.Tensor) -> bool:
    return (target.dtype, target.shape, target.stride()) == (source.dtype, source.shape, source.stride())


class InlineEngine(engine.InlineEngine):
    """The same on the CPU: copies by one call, host memory on pages of its own."""

    def copy_many(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy now."""
        if ops.available() and self.device.type == "cpu" and all(map(_fit, targets, sources)):
            ops.copy_all(targets, sources)
        else:
            super().copy_many(targets, sources)

    def host_empty(self, size_bytes: int) -> torch.Tensor:
        """On pages of its own."""
        return ops.host_slab(size_bytes) if size_bytes and ops.available() else super().host_empty(size_bytes)


class CudaEngine(engine.CudaEngine):
    """The same on ``torch.cuda``; one H200 has run it.

    Host memory waits for the copies that were queued through the engine before it goes, and for nothing else.
    """

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """One of ``copy_many``, so that host memory knows of it."""
        self.copy_many([target], [source])

    def copy_many(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """``cudaMemcpyAsync`` for all of them on the current stream, in one call, neighbours as one."""
        is_fit = ops.available() and all(map(_fit, targets, sources))
        if is_fit and all(to.is_cuda or of.is_cuda for to, of in zip(targets, sources, strict=True)):
            ops.copy_all(targets, sources)
            return
        for target, source in zip(targets, sources, strict=True):
            # A cast, or from host to host: torch's, which orders itself.
            super().copy(target, source)

    def host_empty(self, size_bytes: int) -> torch.Tensor:
        """On pages of its own near the device, pinned at its exact size."""
        if not size_bytes or not ops.available():
            return super().host_empty(size_bytes)
        return ops.host_slab(size_bytes, device=self.device.index)


def engine_for(device: torch.device) -> Engine:
    """The engine of a device kind."""
    return CudaEngine(device) if device.type == "cuda" else InlineEngine(device)


def placement_of(memory: torch.Tensor) -> str:
    """Where host memory lies, in words; empty where nobody knows."""
    facts = ops.slab_facts(memory) if memory.device.type == "cpu" and ops.available() else None
    if facts is None:
        return ""
    where = "any NUMA node" if facts.node < 0 else f"NUMA node {facts.node}"
    refused = f", refused with errno {facts.bind_error}" if facts.bind_error else ""
    return f"{'pinned' if facts.is_pinned else 'not pinned'}, {where}{refused}"
