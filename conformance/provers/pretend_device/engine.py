"""The pretend device as an engine of streams: copies and waits of pipeline and offload are counted on it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from conformance.provers.pretend_device.record import Event, here
from conformance.provers.pretend_device.tensors import backend, is_there

__all__ = ["PretendEngine"]


class PretendEngine:
    """Everything is over when the call returns; ``synchronize`` counts as a wait, and ``copy`` waits for nothing.

    The order of streams is the virtual device's to prove, not this one's.
    """

    stands_for_device = True

    def __init__(self) -> None:
        self.device = backend().device
        self._stage = "caller"

    def stream(self, name: str, priority: int = 0) -> Any:
        """A name."""
        return name

    def event(self) -> Any:
        """Nothing to remember."""
        return object()

    def current(self) -> Any:
        """The only one."""
        return "caller"

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """No change."""
        return contextlib.nullcontext()

    def record(self, event: Any, stream: Any) -> None:
        """Everything so far is over."""

    def wait(self, stream: Any, event: Any) -> None:
        """Nothing is open."""

    def synchronize(self, event: Any) -> None:
        """The host waits."""
        for record in backend().watchers:
            record.events.append(Event("wait", "synchronize", here(), wait_count=1))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy now; asked for without a wait."""
        target.copy_(source, non_blocking=True)

    def copy_many(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """One by one."""
        for target, source in zip(targets, sources, strict=True):
            self.copy(target, source)

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """References are enough."""

    def device_empty(self, size_bytes: int) -> torch.Tensor:
        """Memory of the device."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def host_empty(self, size_bytes: int) -> torch.Tensor:
        """Pinned memory."""
        return backend().pinned_empty(size_bytes)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor says so."""
        return is_there(tensor)

    def is_capturing(self) -> bool:
        """Never."""
        return False

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Nobody asks."""
        return contextlib.nullcontext()
