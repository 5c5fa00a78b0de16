"""Device tensors through two pinned buffers: while one is written to or filled from a file, the other is in flight.

Prevents pageable copies, which reach a third of the bus, and a buffer that is reused before its copy ended.
``CudaCopies`` is the only part that needs a GPU; ``InlineCopies`` runs the same buffer program on the CPU, for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from fastimpl.checkpoint.blockio import LocalPart

__all__ = [
    "ChooseCopies",
    "Copies",
    "CudaCopies",
    "DoubleBuffer",
    "InlineCopies",
    "Stager",
    "copies_for",
    "copies_for_device",
]


class Copies(Protocol):
    """Asynchronous copies of one thread. A copy's event must be waited for before either side is touched again."""

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Host memory that copies can run to and from at full speed."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> object:
        """Start a copy; returns its event."""

    def wait(self, event: object) -> None:
        """Block the host until the copy ended."""


class InlineCopies:
    """Copies that are over when they return."""

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> object:
        """Copy now."""
        target.copy_(source)
        return None

    def wait(self, event: object) -> None:
        """Nothing to wait for."""


class CudaCopies:
    """Copies on a stream of their own, behind everything that the current stream had queued when this was made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.stream.wait_stream(torch.cuda.current_stream(device))

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Pinned memory."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> object:
        """Queue the copy; the memory of a temporary source stays reserved until it ran."""
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            device_side = source if source.is_cuda else target
            device_side.record_stream(self.stream)
            return self.stream.record_event()

    def wait(self, event: object) -> None:
        """Block until the event."""
        assert isinstance(event, torch.cuda.Event)
        event.synchronize()


def copies_for(device: torch.device) -> Copies:
    """The copies of a device kind."""
    return CudaCopies(device) if device.type == "cuda" else InlineCopies()


def copies_for_device(device: torch.device) -> Copies | None:
    """The copies that a save needs for tensors of a device: none where the CPU can read them as they lie."""
    return None if device.type == "cpu" else copies_for(device)


ChooseCopies = Callable[[torch.device], "Copies | None"]


class DoubleBuffer:
    """Two host buffers used in turn. ``take`` waits until the copy that last used the buffer has ended."""

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self._buffers = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]
        self._events: list[list[object]] = [[], []]
        self._turn = 0

    def take(self, size_bytes: int) -> torch.Tensor:
        """The other buffer, free to use."""
        self._turn ^= 1
        self._settle(self._turn)
        if self._buffers[self._turn].numel() < size_bytes:
            self._buffers[self._turn] = self.copies.buffer(size_bytes)
        return self._buffers[self._turn][:size_bytes]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> object:
        """Copy to or from the buffer last taken."""
        event = self.copies.copy(target, source)
        self._events[self._turn].append(event)
        return event

    def drain(self) -> None:
        """Wait for everything."""
        self._settle(0)
        self._settle(1)

    def _settle(self, turn: int) -> None:
        for event in self._events[turn]:
            self.copies.wait(event)
        self._events[turn] = []


class Stager:
    """Brings the device bytes of blocks to the host, one block ahead of the writes. One for each writing thread.

    Args:
        choose: the copies for a device, None where its bytes need no staging.
    """

    def __init__(self, choose: ChooseCopies = copies_for_device) -> None:
        self.choose = choose
        self._buffers: dict[torch.device, DoubleBuffer | None] = {}

    def _buffer(self, device: torch.device) -> DoubleBuffer | None:
        if device not in self._buffers:
            copies = self.choose(device)
            self._buffers[device] = DoubleBuffer(copies) if copies is not None else None
        return self._buffers[device]

    def start(self, parts: Sequence[LocalPart]) -> list[tuple[DoubleBuffer, object]]:
        """Start the copies of one block; returns what ``finish`` waits for. Two blocks may be in flight."""
        waits: list[tuple[DoubleBuffer, object]] = []
        by_device: dict[torch.device, list[LocalPart]] = {}
        for part in parts:
            if part.source is not None:
                by_device.setdefault(part.source.device, []).append(part)
        for device, mine in by_device.items():
            buffers = self._buffer(device)
            if buffers is None:
                continue
            host, at = buffers.take(sum(part.count for part in mine)), 0
            for part in mine:
                assert part.source is not None
                part.staged = host[at : at + part.count]
                source = part.source.dense(part.skip, part.skip + part.count)
                waits.append((buffers, buffers.copy(part.staged, source)))
                at += part.count
        return waits

    @staticmethod
    def finish(waits: Sequence[tuple[DoubleBuffer, object]]) -> None:
        """Wait until the bytes of a block are in host memory."""
        for buffers, event in waits:
            buffers.copies.wait(event)
