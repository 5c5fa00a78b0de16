"""Device tensors through two pinned buffers: while one is written to or filled from a file, the other is in flight.

Prevents pageable copies, which reach a third of the bus; a buffer that is reused before its copy ended; and bytes that
are read before the caller's stream has made them. Every thread has a current stream of its own, so that what the copies
run behind is recorded in the caller's thread (``CopyStart``), and each thread's stream begins there.

Streams are those of an ``Engine``; ``InlineCopies`` runs the same buffer program without any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch

from twinproof.engine import Engine, engine_for

if TYPE_CHECKING:
    from fastimpl.checkpoint.blockio import LocalPart

__all__ = [
    "ChooseCopies",
    "Copies",
    "CopyStart",
    "CopyStarts",
    "DoubleBuffer",
    "EngineCopies",
    "EngineStart",
    "InlineCopies",
    "Stager",
    "copies_for_device",
]


class Copies(Protocol):
    """Asynchronous copies of one thread. A copy's event must be waited for before either side is touched again."""

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Host memory that copies can run to and from at full speed."""

    def on(self) -> AbstractContextManager[None]:
        """Ops inside run in order with the copies: after those queued before, before those queued later."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> object:
        """Start a copy; returns its event."""

    def upload(self, dense: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The bytes of a buffer in memory of the device, for ops inside ``on``. The buffer is free at the next mark."""

    def mark(self) -> object:
        """An event behind everything queued so far, copies and ops."""

    def wait(self, event: object) -> None:
        """Block the host until what the event stands for has ended."""


class CopyStart(Protocol):
    """A point of the caller's stream, taken in the caller's thread: the copies of every thread run behind it."""

    def of_thread(self) -> Copies:
        """Copies for the calling thread."""


class InlineCopies:
    """Copies that are over when they return; their own start."""

    def of_thread(self) -> InlineCopies:
        """The same for every thread: there is nothing to order."""
        return self

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")

    def on(self) -> AbstractContextManager[None]:
        """No change."""
        return nullcontext()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> object:
        """Copy now."""
        target.copy_(source)
        return None

    def upload(self, dense: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copied now; the buffer itself where it lies there."""
        return dense.to(device)

    def mark(self) -> object:
        """Everything is over."""
        return None

    def wait(self, event: object) -> None:
        """Nothing to wait for."""


class EngineStart:
    """Behind everything that the calling thread's current stream has been given so far.

    Args:
        engine: whose streams the copies run on.
        buffer: makes host memory of a size in bytes; the engine's by default.
    """

    def __init__(self, engine: Engine, buffer: Callable[[int], torch.Tensor] | None = None) -> None:
        self.engine = engine
        self.buffer = buffer or engine.host_empty
        self.event = engine.event()
        engine.record(self.event, engine.current())

    def of_thread(self) -> EngineCopies:
        """Copies on a new stream, behind this point."""
        return EngineCopies(self.engine, self.event, self.buffer)


class EngineCopies:
    """Copies on a stream of their own, which begins behind an event. See ``EngineStart``."""

    def __init__(self, engine: Engine, begun: object, buffer: Callable[[int], torch.Tensor]) -> None:
        self.engine, self._buffer = engine, buffer
        self.stream = engine.stream("checkpoint copies")
        engine.wait(self.stream, begun)

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Pinned memory of that size."""
        return self._buffer(size_bytes)

    def on(self) -> AbstractContextManager[None]:
        """Send ops to the stream of the copies."""
        return self.engine.on(self.stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> object:
        """Queue the copy; memory of the device stays reserved until it ran."""
        with self.on():
            self.engine.copy(target, source)
            for side in (target, source):
                if self.engine.holds(side):
                    self.engine.keep(side, self.stream)
        return self.mark()

    def upload(self, dense: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Queue the copy into new memory of the stream."""
        with self.on():
            there = self.engine.device_empty(dense.numel())
            self.engine.copy(there, dense)
        return there

    def mark(self) -> object:
        """Record an event on the stream."""
        event = self.engine.event()
        self.engine.record(event, self.stream)
        return event

    def wait(self, event: object) -> None:
        """Block until the event."""
        self.engine.synchronize(event)


def copies_for_device(device: torch.device) -> CopyStart | None:
    """Where copies from or to a device begin, as of now: None where the CPU can use its memory as it lies."""
    if device.type == "cpu":
        return None
    return EngineStart(engine_for(device), _pinned) if device.type == "cuda" else InlineCopies()


def _pinned(size_bytes: int) -> torch.Tensor:
    # torch keeps it for the next save, which then need not pin memory again.
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


ChooseCopies = Callable[[torch.device], "CopyStart | None"]


class CopyStarts:
    """Where the copies of one save or load begin on each device. Made in the caller's thread, used in any.

    Args:
        choose: for a device, called once.
        devices: all that the save or load touches.
    """

    def __init__(self, choose: ChooseCopies, devices: Iterable[torch.device]) -> None:
        self._starts = {device: choose(device) for device in dict.fromkeys(devices)}

    def needs_copies(self, device: torch.device) -> bool:
        """Whether the CPU cannot use the device's memory as it lies."""
        return self._starts[device] is not None

    def of_thread(self, device: torch.device) -> Copies | None:
        """Copies for the calling thread, None where there is no need of any."""
        start = self._starts[device]
        return start.of_thread() if start is not None else None


class DoubleBuffer:
    """Two host buffers used in turn. ``take`` waits until the copy that last used the buffer has ended."""

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self._buffers = [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(2)]
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

    def mark(self) -> None:
        """Keep the buffer last taken until what was queued so far has ended."""
        self._events[self._turn].append(self.copies.mark())

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
        starts: where the copies of this save begin.
    """

    def __init__(self, starts: CopyStarts) -> None:
        self.starts = starts
        self._buffers: dict[torch.device, DoubleBuffer | None] = {}

    def _buffer(self, device: torch.device) -> DoubleBuffer | None:
        if device not in self._buffers:
            copies = self.starts.of_thread(device)
            self._buffers[device] = DoubleBuffer(copies) if copies is not None else None
        return self._buffers[device]

    def start(self, parts: Sequence[LocalPart]) -> list[tuple[DoubleBuffer, object]]:
        """Start the copies of one block; returns what ``finish`` waits for. Two blocks may be in flight."""
        waits: list[tuple[DoubleBuffer, object]] = []
        by_device: dict[torch.device, list[LocalPart]] = {}
        for part in parts:
            by_device.setdefault(part.source.device, []).append(part)
        for device, mine in by_device.items():
            buffers = self._buffer(device)
            if buffers is None:
                continue
            host, at = buffers.take(sum(part.count for part in mine)), 0
            for part in mine:
                part.staged = host[at : at + part.count]
                # A tensor that lies otherwise is gathered or cast first, in order with the copy.
                with buffers.copies.on():
                    source = part.source.dense(part.skip, part.skip + part.count)
                    waits.append((buffers, buffers.copy(part.staged, source)))
                at += part.count
        return waits

    @staticmethod
    def finish(waits: Sequence[tuple[DoubleBuffer, object]]) -> None:
        """Wait until the bytes of a block are in host memory."""
        for buffers, event in waits:
            buffers.copies.wait(event)
