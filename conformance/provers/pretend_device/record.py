"""What a program did on the pretend device: events with file and line, and the counts that gates are made of."""

from __future__ import annotations

import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

__all__ = ["Counts", "Event", "Record", "Traffic", "here"]

_SKIPPED = (str(Path(__file__).parent), str(Path(torch.__file__).parent), "<")
_LIBRARY = sysconfig.get_path("stdlib")


def here() -> str:
    """``folder/file:line function`` of the program, outside torch and this package, and autograd's node."""
    node = torch._C._current_autograd_node()
    suffix = f", in {node.name()}" if node is not None else ""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        is_library = name.startswith(_LIBRARY) and "site-packages" not in name
        if not name.startswith(_SKIPPED) and not is_library:
            path = Path(name)
            return f"{path.parent.name}/{path.name}:{frame.f_lineno} {frame.f_code.co_name}{suffix}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return f"torch{suffix}"


@dataclass(frozen=True)
class Event:
    """One thing that the program did.

    Attributes:
        kind: "mix", "refused", "wait", "to device", "to host", "launch" or "address".
        what: the operator or function.
        where: the program point.
        size_bytes: of a copy.
        wait_count: how often the host waits for the device in it.
        is_pageable: of a copy: whether its host side is memory that is not pinned.
        is_hidden: of a copy: whether the program asked for something else, such as rows by an index on the host.
    """

    kind: str
    what: str
    where: str
    size_bytes: int = 0
    wait_count: int = 0
    is_pageable: bool = False
    is_hidden: bool = False

    def __str__(self) -> str:
        notes = ["pageable"] * self.is_pageable + ["hidden"] * self.is_hidden
        size = f", {self.size_bytes} bytes" if self.size_bytes else ""
        waits = f", the host waits {self.wait_count} times" if self.wait_count else ""
        return f"{' '.join([*notes, self.kind])}: {self.what} at {self.where}{size}{waits}"


@dataclass(frozen=True)
class Traffic:
    """Copies in one direction: how many, their bytes, and how many from or to pageable memory, or hidden."""

    count: int = 0
    size_bytes: int = 0
    pageable_count: int = 0
    hidden_count: int = 0


@dataclass(frozen=True)
class Counts:
    """What was done: host waits, launches (operators on the device), and copies by direction."""

    host_waits: int = 0
    launches: int = 0
    to_device: Traffic = Traffic()
    to_host: Traffic = Traffic()


def _traffic(events: Iterable[Event], kind: str) -> Traffic:
    found = [event for event in events if event.kind == kind]
    return Traffic(
        len(found),
        sum(event.size_bytes for event in found),
        sum(event.is_pageable for event in found),
        sum(event.is_hidden for event in found),
    )


@dataclass
class Record:
    """Events in order of time."""

    events: list[Event] = field(default_factory=list)

    def counts(self, begin: int = 0, end: int | None = None) -> Counts:
        """Of the events from number ``begin`` on, before number ``end``."""
        events = self.events[begin:end]
        return Counts(
            sum(event.wait_count for event in events),
            sum(event.kind == "launch" for event in events),
            _traffic(events, "to device"),
            _traffic(events, "to host"),
        )

    def waits(self, begin: int = 0, end: int | None = None) -> dict[str, int]:
        """``operator at place`` -> how often the host waited there, most first."""
        found: Counter[str] = Counter()
        for event in self.events[begin:end]:
            if event.wait_count:
                found[f"{event.what} at {event.where}"] += event.wait_count
        return dict(found.most_common())
