"""Every access to every storage, by byte range, and the pairs of them that nothing orders."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from conformance.provers.virtual_device.clocks import HOST, Clock, Clocks

__all__ = ["Access", "Hazard", "Memory", "Tracker", "here"]

_OWN = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


def here() -> str:
    """``file:line function`` of the program, outside torch and this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OWN, _TORCH)) and "contextlib" not in name:
            break
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"


@dataclass(frozen=True)
class Access:
    """One op's use of bytes ``start`` to ``end`` of a storage."""

    stream: str
    tick: int
    writes: bool
    start: int
    end: int
    what: str

    def overlaps(self, other: Access) -> bool:
        """Whether they touch a common byte."""
        return self.start < other.end and other.start < self.end

    def covers(self, other: Access) -> bool:
        """Whether every byte of ``other`` is touched."""
        return self.start <= other.start and other.end <= self.end

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        return f"{self.what} on {self.stream} {verb} bytes {self.start}..{self.end}"


@dataclass(frozen=True)
class Hazard:
    """Two program points that nothing orders (``kind`` race, host-read, released), or an op and a misplaced operand."""

    kind: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.first} | {self.second}"


@dataclass
class Memory:
    """One storage: where it lives, the stream that allocated it, what still has to be remembered about it."""

    weak: Any  # A StorageWeakRef, which torch leaves untyped.
    size_bytes: int
    on_host: bool
    home: str
    accesses: list[Access] = field(default_factory=list)
    kept_for: set[str] = field(default_factory=set)
    last: dict[str, Access] = field(default_factory=dict)
    # What the race prover says of a storage: its kind of host memory, where it was made, where it was given back.
    is_pinned: bool = False
    made_at: str = ""
    gone_at: Any = None


def _is_known(known: Clock, needed: Mapping[str, int]) -> bool:
    """Whether all of these ops of streams are known to be over."""
    return all(known.covers(*one) for one in needed.items())


class Tracker:
    """Storages, clocks and the hazards found so far.

    Attributes:
        hazards: in the order of discovery, each pair of program points once.
        live_bytes, peak_bytes: device memory of storages that were seen.
        held_bytes, peak_held_bytes: the same, and what was given back while another stream still needed it. The
            allocator hands such memory out again once the host knows of that stream's work, so a host that runs ahead
            of the device holds more and more of it.
    """

    def __init__(self) -> None:
        self.clocks = Clocks()
        self.hazards: list[Hazard] = []
        self.live_bytes = self.peak_bytes = self.peak_held_bytes = 0
        # What was given back early, each with its size; at most so many bytes are still held.
        self._deferred: list[tuple[int, dict[str, int]]] = []
        self._deferred_bytes = 0
        # What the host knew of streams when it was last asked which of it is still held.
        self._looked_at: dict[str, int] = {}
        self._memory: dict[int, Memory] = {}
        # Of each of them the weak reference's own number: all are asked at each op.
        self._weak: dict[int, int] = {}
        self._seen: set[tuple[str, str, str]] = set()

    def __reduce__(self) -> Any:
        raise TypeError("a virtual device cannot be copied: it watches the memory of one program")

    def report(self, kind: str, first: str, second: str) -> None:
        """Note a hazard, once."""
        if (kind, first, second) not in self._seen:
            self._seen.add((kind, first, second))
            self.hazards.append(Hazard(kind, first, second))

    def memory_of(self, tensor: torch.Tensor, *, stream: str, on_host: bool = False) -> Memory:
        """What is known of a tensor's storage; a storage that is new was allocated on ``stream``."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._memory.get(key)
        if found is None or found.weak.expired():
            if found is not None:
                self._forget(key)
            found = self._memory[key] = Memory(_weak(storage), storage.nbytes(), on_host, stream)
            self._weak[key] = found.weak.cdata
            if not on_host:
                self.live_bytes += found.size_bytes
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                # Which of it is held still takes a look at every clock: most new memory makes no peak anyway.
                if self.live_bytes + self._deferred_bytes > self.peak_held_bytes:
                    self.peak_held_bytes = max(self.peak_held_bytes, self.held_bytes)
        return found

    def knows(self, tensor: torch.Tensor) -> Memory | None:
        """What is known of a tensor's storage, if it was seen."""
        found = self._memory.get(tensor.untyped_storage()._cdata)
        return None if found is None or found.weak.expired() else found

    @property
    def held_bytes(self) -> int:
        """See the class."""
        known = self.clocks[HOST]
        # Of ops of its own nothing is handed out: a host that waits for nobody would look at all of it again and again.
        of_others = {name: tick for name, tick in known.items() if name != HOST}
        if of_others != self._looked_at:
            self._looked_at = of_others
            self._deferred = [(size, needed) for size, needed in self._deferred if not _is_known(known, needed)]
            self._deferred_bytes = sum(size for size, _ in self._deferred)
        return self.live_bytes + self._deferred_bytes

    def sweep(self) -> None:
        """Look for storages that were released since the last op, and for work that still needs them."""
        # What StorageWeakRef.expired comes down to, without two calls of Python.
        expired = torch.UntypedStorage._expired
        for key in [key for key, weak in self._weak.items() if expired(weak)]:
            self._forget(key)

    def _forget(self, key: int) -> None:
        memory = self._memory.pop(key)
        del self._weak[key]
        if not memory.on_host:
            self.live_bytes -= memory.size_bytes
            needed = {stream: access.tick for stream, access in memory.last.items() if stream in memory.kept_for}
            if needed and not _is_known(self.clocks[HOST], needed):
                self._deferred.append((memory.size_bytes, needed))
                self._deferred_bytes += memory.size_bytes
        self.given_back(memory)

    def given_back(self, memory: Memory) -> None:
        """Look for work of streams that the memory was not kept for."""
        # The allocator hands the block to whoever asks next on the home stream, which begins after what the host knows.
        known = Clock(self.clocks[HOST])
        if not memory.on_host:
            known.join(self.clocks[memory.home])
        for stream, access in memory.last.items():
            safe = stream in (memory.home, HOST) or stream in memory.kept_for or known.covers(stream, access.tick)
            if not safe:
                self.report_released(memory, access)

    def report_released(self, memory: Memory, access: Access) -> None:
        """Memory went back to its home stream while ``access`` of another may not be over."""
        self.report("released", str(access), f"memory of {memory.home} given back at {here()}")

    def access_of(self, tensor: torch.Tensor, *, stream: str, tick: int, writes: bool, what: str) -> Access:
        """The use of a tensor's bytes, as this tracker describes it."""
        start, end = byte_range(tensor)
        return Access(stream, tick, writes, start, end, what)

    def access(self, tensor: torch.Tensor, memory: Memory, *, stream: str, tick: int, writes: bool, what: str) -> None:
        """Note that op ``tick`` of ``stream`` uses the tensor's bytes."""
        self.note(memory, self.access_of(tensor, stream=stream, tick=tick, writes=writes, what=what))

    def note(self, memory: Memory, new: Access) -> None:
        """Note a use of a storage, and compare it with those that came before."""
        clock = self.clocks[new.stream]
        if new.start == new.end:
            return
        for old in memory.accesses:
            if old.stream != new.stream and (old.writes or new.writes) and old.overlaps(new):
                self.check(memory, old, new, clock)
        memory.accesses = [old for old in memory.accesses if not _outdated(old, new, clock)]
        memory.accesses.append(new)
        memory.last[new.stream] = new

    def check(self, memory: Memory, old: Access, new: Access, clock: Clock) -> None:
        """Report two accesses that conflict, unless the later stream knows the earlier access to be over."""
        if not clock.covers(old.stream, old.tick):
            kind = "host-read" if HOST in (old.stream, new.stream) else "race"
            self.report(kind, str(old), str(new))

    def memories(self) -> Iterator[Memory]:
        """Every storage that is alive."""
        return iter(list(self._memory.values()))


def _outdated(old: Access, new: Access, clock: Clock) -> bool:
    """Whether whoever conflicts with ``old`` and is unordered with it is unordered with ``new`` as well."""
    if not (clock.covers(old.stream, old.tick) and new.covers(old)):
        return False
    return new.writes or not old.writes


def _weak(storage: torch.UntypedStorage) -> Any:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and one past the last that the tensor can touch in its storage; gaps between rows count."""
    if tensor.numel() == 0:
        return 0, 0
    first = int(tensor.storage_offset())
    reach = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return first * tensor.element_size(), (first + reach + 1) * tensor.element_size()
