"""torch's own stream sanitizer (``TORCH_CUDA_SANITIZER=1``) on what the virtual device sees: a second opinion.

Its checker, ``torch.cuda._sanitizer.EventHandler``, is plain Python and knows nothing of ours. On a GPU it is told of
tensors by their first address; here of every 256 bytes that an access touches, which is finer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.cuda._sanitizer import EventHandler

from conformance.provers.virtual_device import VirtualDevice
from conformance.provers.virtual_device.clocks import HOST
from conformance.provers.virtual_device.tracker import Memory, byte_range

__all__ = ["TorchSanitizer"]

_GRANULE_BYTES = 256


class TorchSanitizer:
    """Listens to a virtual device from now on; use before anything was run on it.

    Attributes:
        errors: what torch's checker found, one line for each pair of accesses.
        access_count: what it was told of.
    """

    def __init__(self, device: VirtualDevice) -> None:
        self.errors: list[str] = []
        self.access_count = 0
        self._handler = EventHandler()
        self._streams: dict[str, int] = {}
        # Held, so that no number of an object that is gone is taken for another's.
        self._events: dict[int, Any] = {}
        self._memory: dict[int, tuple[int, Memory]] = {}
        engine, tracker = device.engine, device.tracker
        record, wait, synchronize, access = engine.record, engine.wait, engine.synchronize, tracker.access

        def recorded(event: Any, stream: str) -> None:
            self._handler._handle_event_record(self._event(event), self._stream(stream))
            record(event, stream)

        def waited(stream: str, event: Any) -> None:
            self._handler._handle_event_wait(self._event(event), self._stream(stream))
            wait(stream, event)

        def synchronized(event: Any) -> None:
            self._handler._handle_event_synchronization(self._event(event))
            synchronize(event)

        def accessed(tensor: torch.Tensor, memory: Memory, *, stream: str, tick: int, writes: bool, what: str) -> None:
            if stream != HOST:  # It does not look at the host.
                self._tell(byte_range(tensor), memory, stream, writes, what)
            access(tensor, memory, stream=stream, tick=tick, writes=writes, what=what)

        for owner, name, listener in (
            (engine, "record", recorded),
            (engine, "wait", waited),
            (engine, "synchronize", synchronized),
            (tracker, "access", accessed),
        ):
            setattr(owner, name, listener)

    def _stream(self, name: str) -> int:
        if name not in self._streams:
            self._streams[name] = len(self._streams)
            self._handler._handle_stream_creation(self._streams[name])
        return self._streams[name]

    def _event(self, event: Any) -> int:
        if id(event) not in self._events:
            self._events[id(event)] = event
            self._handler._handle_event_creation(id(event))
        return id(event)

    def _tell(self, touched: tuple[int, int], memory: Memory, stream: str, writes: bool, what: str) -> None:
        number, _ = self._memory.setdefault(id(memory), (len(self._memory), memory))
        granules = range(touched[0] // _GRANULE_BYTES, -(-touched[1] // _GRANULE_BYTES))
        pointers = {(number << 40) + granule for granule in granules}
        self.access_count += 1
        found = self._handler._handle_kernel_launch(
            self._stream(stream),
            set() if writes else pointers,
            pointers if writes else set(),
            set(),
            what,
            {pointer: [] for pointer in pointers},
        )
        pairs = ((error.previous_access, error.current_access) for error in found)  # type: ignore[attr-defined]
        self.errors += [f"{before.operator} | {now.operator}" for before, now in pairs]
