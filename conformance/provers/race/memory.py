"""Storages of a program with torch's own streams: which place they lie in, and the hazards found on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from conformance.provers.race.points import Site
from conformance.provers.virtual_device.clocks import HOST, Clock
from conformance.provers.virtual_device.tracker import Access, Memory, Tracker, byte_range

__all__ = ["KINDS", "Hazard", "Memories", "Use"]

# What each kind of hazard says, and the edge that is missing.
KINDS = {
    "race": "two streams use the same memory in no order, and one writes; let the later one wait for the earlier",
    "host-read": "the host looks at memory that a stream may not have written yet; synchronize before it",
    "host-write": "the host writes memory that a stream may not be through with; synchronize before it",
    "released": "memory is given back while a stream that was not recorded may still use it; record_stream or wait",
    "unfinished-event": "elapsed_time of an event that the host has not waited for; synchronize before it",
}
# Beyond this many bytes an overlap of strided tensors is taken from their first and last byte alone.
_EXACT_BYTES_MAX = 1 << 22


@dataclass(frozen=True)
class Use(Access):
    """An access with its program point and, for exact overlaps, its shape in memory."""

    site: Site | None = None
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    item_bytes: int = 1

    @property
    def is_dense(self) -> bool:
        """Whether every byte from the first to the last is touched."""
        return prod(self.sizes) * self.item_bytes == self.end - self.start

    def overlaps(self, other: Access) -> bool:
        """Whether they touch a common byte; columns of one matrix do not."""
        if not super().overlaps(other):
            return False
        if not isinstance(other, Use) or (self.is_dense and other.is_dense):
            return True
        begin, end = min(self.start, other.start), max(self.end, other.end)
        if end - begin > _EXACT_BYTES_MAX:
            return True
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            return bool((self._marks(begin, end) & other._marks(begin, end)).any())

    def _marks(self, begin: int, end: int) -> torch.Tensor:
        marks = torch.zeros(end - begin, dtype=torch.bool)
        strides = [stride * self.item_bytes for stride in self.strides]
        marks.as_strided((*self.sizes, self.item_bytes), (*strides, 1), self.start - begin).fill_(True)
        return marks

    def covers(self, other: Access) -> bool:
        """Whether every byte of ``other`` is touched."""
        same = isinstance(other, Use) and (self.start, self.sizes, self.strides, self.item_bytes) == (
            other.start, other.sizes, other.strides, other.item_bytes,
        )  # fmt: skip
        return same or (self.is_dense and super().covers(other))

    def __str__(self) -> str:
        return f"{self.what} on {self.stream} {'writes' if self.writes else 'reads'}"


@dataclass
class Hazard:
    """Two program points that nothing orders.

    Attributes:
        kind: a key of ``KINDS``.
        first, second: the earlier and the later in this run; each has ``site`` and ``stream``.
        memory: the storage, in words.
        is_pageable: whether the host's side is memory that is not pinned, of which CUDA only says that such a copy
            might wait.
        count: how often this pair was found, on whatever memory.
    """

    kind: str
    first: Use
    second: Use
    memory: str
    is_pageable: bool = False
    count: int = 1

    @property
    def points(self) -> tuple[str, str]:
        """``file:line`` of both."""
        return tuple(use.site.point.short for use in (self.first, self.second) if use.site)  # type: ignore[return-value]


class Memories(Tracker):
    """The tracker of the virtual device, with places that are known by allocation and hazards that carry points.

    Args:
        site: makes the program point of what is going on.
        label: the words for a stream.
    """

    def __init__(self, site: Callable[[str], Site], label: Callable[[str], str]) -> None:
        super().__init__()
        self.found: dict[tuple[Any, ...], Hazard] = {}
        self.on_found: Callable[[Hazard, bool], None] = lambda hazard, is_new: None
        self._site, self._label = site, label
        self._foreign: set[int] = set()
        self._op_count = 0
        self._gone: dict[str, list[Memory]] = {}

    def memory_of(self, tensor: torch.Tensor, *, stream: str, on_host: bool = True) -> Memory:
        """What is known of a tensor's storage; a new one lies on the host unless said otherwise."""
        return super().memory_of(_unwrapped(tensor), stream=stream, on_host=on_host)

    def knows(self, tensor: torch.Tensor) -> Memory | None:
        """What is known of a tensor's storage, if it was seen."""
        return super().knows(_unwrapped(tensor))

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Whether the storage lies on the device."""
        memory = self.knows(tensor)
        return memory is not None and not memory.on_host

    def of_storage(self, storage: torch.UntypedStorage) -> Memory | None:
        """What is known of a storage."""
        found = self._memory.get(storage._cdata)
        return None if found is None or found.weak.expired() else found

    def sweep(self) -> None:
        """As the tracker's; storages that no second stream has touched can wait until there are many."""
        self._op_count += 1
        if self._op_count % 256 == 0:
            super().sweep()
            self._foreign &= set(self._memory)
            return
        for key in [key for key in self._foreign if key in self._memory and self._memory[key].weak.expired()]:
            self._forget(key)
            self._foreign.discard(key)

    def note_gone(self) -> None:
        """Remember this place for storages that went away here; the next op judges them."""
        for key in self._foreign & set(self._memory) if self._foreign else ():
            memory = self._memory[key]
            if memory.gone_at is None and memory.weak.expired():
                memory.gone_at = self._site("given back")

    def sweep_all(self) -> None:
        """Look at every storage now."""
        super().sweep()

    def access_of(self, tensor: torch.Tensor, *, stream: str, tick: int, writes: bool, what: Any) -> Access:
        """A ``Use``; ``what`` is its site."""
        start, end = byte_range(tensor)
        sizes, strides, item = tuple(tensor.size()), tuple(tensor.stride()), tensor.element_size()
        if stream != HOST:
            memory = self.knows(tensor)
            if memory is None or memory.home != stream:
                self._foreign.add(tensor.untyped_storage()._cdata)
        return Use(stream, tick, writes, start, end, str(what), what, sizes, strides, item)

    def read_bytes(self, memory: Memory, size_bytes: int, *, stream: str, site: Site) -> None:
        """Note that ``stream`` reads the first bytes of a storage."""
        tick = self.clocks.advance(stream)
        self.note(memory, Use(stream, tick, False, 0, size_bytes, str(site), site, (size_bytes,), (1,), 1))

    def access_bytes(self, memory: Memory, *, stream: str, site: Site) -> None:
        """Note that the whole storage begins anew on ``stream``."""
        tick = self.clocks.advance(stream)
        use = Use(stream, tick, True, 0, memory.size_bytes, str(site), site, (memory.size_bytes,), (1,), 1)
        memory.accesses, memory.last = [use], {stream: use}

    def given_back(self, memory: Memory) -> None:
        """The block is its home stream's again; who gets it next begins after what that stream knows then."""
        if not memory.on_host:
            memory.gone_at = memory.gone_at or self._site("given back before")
            self._gone.setdefault(memory.home, []).append(memory)

    def judge_gone(self, stream: str) -> None:
        """``stream`` is about to do something, on memory that others may not be through with."""
        for memory in self._gone.pop(stream, ()):
            super().given_back(memory)

    def judge_all_gone(self) -> None:
        """The program is over: what nobody has taken yet is judged as if somebody did.

        What went away after the last operator is not: a script's own variables are gone by now, and harm nobody.
        """
        for stream in list(self._gone):
            self.judge_gone(stream)

    def check(self, memory: Memory, old: Access, new: Access, clock: Clock) -> None:
        """Note a hazard, unless the later stream knows the earlier access to be over."""
        if clock.covers(old.stream, old.tick):
            return
        host = next((access for access in (old, new) if access.stream == HOST), None)
        kind = "race" if host is None else "host-write" if host.writes else "host-read"
        is_pageable = host is not None and memory.on_host and not memory.is_pinned
        self._note(kind, old, new, memory, is_pageable=is_pageable)

    def report_released(self, memory: Memory, access: Access) -> None:
        """Memory went back while ``access`` may not be over."""
        site: Site = memory.gone_at
        back = Use(memory.home, 0, True, access.start, access.end, str(site), site)
        self._note("released", access, back, memory)

    def note_event(self, first: Use, second: Use) -> None:
        """The host asks for the time of an event that may not be over."""
        self._note("unfinished-event", first, second, None)

    def _note(self, kind: str, old: Access, new: Access, memory: Memory | None, *, is_pageable: bool = False) -> None:
        assert isinstance(old, Use)
        assert isinstance(new, Use)
        key = (kind, old.site, old.stream, new.site, new.stream)
        known = self.found.get(key)
        if known is not None:
            known.count += 1
        else:
            known = self.found[key] = Hazard(kind, old, new, self._words(memory), is_pageable)
        self.on_found(known, known.count == 1)

    def _words(self, memory: Memory | None) -> str:
        if memory is None:
            return "an event"
        place = ("pinned host" if memory.is_pinned else "pageable host") if memory.on_host else "device"
        made = f", made by {memory.made_at}" if memory.made_at else ""
        home = "" if memory.on_host else f" of {self._label(memory.home)}"
        return f"{memory.size_bytes} bytes of {place} memory{home}{made}"

    def alive(self) -> Iterator[Memory]:
        """Every storage that is alive."""
        return (memory for memory in self.memories() if not memory.weak.expired())


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor within those that ``torch.func`` hands to a function; they have no storage."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
