"""Faults, the calls that were seen, and what became of a process; plain data without a process behind it.

Prevents crash tests that cannot say which call they struck: a fault names its call and its number, and every call that
counted is in the trace, with the fault that it met.
"""

from __future__ import annotations

import errno as errno_module
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "ACTIONS",
    "CALLS",
    "CRASH_CALLS",
    "READ_CALLS",
    "WRITE_CALLS",
    "Action",
    "Event",
    "Fault",
    "FaultError",
    "Outcome",
    "Trace",
]

# Canonical names: the 64-bit, "at" and numbered variants of a call count as the call. The order is that of session.h.
CALLS = (
    "open",
    "write",
    "pwrite",
    "writev",
    "pwritev",
    "fwrite",
    "fflush",
    "fsync",
    "fdatasync",
    "syncfs",
    "sync_file_range",
    "rename",
    "link",
    "symlink",
    "unlink",
    "rmdir",
    "mkdir",
    "ftruncate",
    "truncate",
    "fallocate",
    "sendfile",
    "copy_file_range",
    "mmap",
    "msync",
    "close",
    "read",
    "pread",
    "readv",
    "preadv",
)
WRITE_CALLS = ("write", "pwrite", "writev", "pwritev", "fwrite", "sendfile", "copy_file_range")
READ_CALLS = ("read", "pread", "readv", "preadv")
# Every call that changes what a reader of the folder, or a machine after a power cut, finds.
CRASH_CALLS = (
    *WRITE_CALLS,
    "fflush",
    "fsync",
    "fdatasync",
    "rename",
    "link",
    "symlink",
    "unlink",
    "rmdir",
    "mkdir",
    "ftruncate",
    "truncate",
    "fallocate",
    "msync",
)

Action = Literal["errno", "short", "eintr", "delay", "kill", "kill_group", "torn", "hold"]
ACTIONS: tuple[str, ...] = ("pass", "errno", "short", "delay", "kill", "kill_group", "torn", "hold")


class FaultError(RuntimeError):
    """The harness itself could not do what was asked: no compiler, a full event table, a server that vanished."""


@dataclass(frozen=True)
class Fault:
    """One fault to inject.

    Args:
        call: canonical name or names from ``CALLS``.
        nth: which matching call, from 1, counted over all processes and threads of the run.
        action: ``errno`` fails the call without making it; ``eintr`` is ``errno`` with EINTR; ``short`` writes or reads
            half; ``delay`` waits first; ``kill`` ends the process before the call; ``kill_group`` ends its process
            group; ``torn`` writes half (makes the whole call, if it is no write) and then ends the process; ``hold``
            waits for a thread in ``letting_go`` and fails the call with ETIMEDOUT where none came (shim only).
        errno: for ``errno``; default ENOSPC.
        times: how many matching calls in a row; 0 means all from the n-th on, as on a full disk.
        delay_s: for ``delay``, and the longest that ``hold`` waits.
        path_suffix: only calls with a path that ends like this.
        rank: only calls of the process with this rank label.
    """

    call: str | tuple[str, ...]
    nth: int
    action: Action
    errno: int = errno_module.ENOSPC
    times: int = 1
    delay_s: float = 0.0
    path_suffix: str | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.calls if name not in CALLS]
        if unknown or not self.calls:
            raise ValueError(f"unknown calls {unknown}; known: {', '.join(CALLS)}")
        if self.action != "eintr" and self.action not in ACTIONS[1:]:
            raise ValueError(f"unknown action {self.action!r}; known: eintr, {', '.join(ACTIONS[1:])}")
        if self.nth < 1 or self.times < 0 or self.delay_s < 0:
            raise ValueError(f"nth counts from 1, times and delay_s from 0; got {self}")
        if self.action == "hold" and not self.delay_s:
            raise ValueError(f"hold needs the longest wait, delay_s; got {self}")

    @property
    def calls(self) -> tuple[str, ...]:
        """``call`` as a tuple."""
        return (self.call,) if isinstance(self.call, str) else self.call


@dataclass(frozen=True)
class Event:
    """One call on a path under the root.

    ``begin`` and ``end`` are ticks of one clock over all processes; ``end`` is 0 for a call that never returned.
    ``size`` is what was asked for and ``result`` what was done, both in bytes for writes. ``offset`` is -1 for the
    file position. ``inode`` is the file's, or that of the first path; ``inode2`` that of the second path before the
    call, 0 without one. ``fault`` is the index of the fault that fired; ``created`` says that the call made the
    directory entry.
    """

    begin: int
    end: int
    pid: int
    tid: int
    rank: int
    call: str
    errno: int
    fault: int | None
    flags: int
    created: bool
    result: int
    offset: int
    size: int
    inode: int
    inode2: int
    path: str
    path2: str

    @property
    def succeeded(self) -> bool:
        """Whether the call returned without an error."""
        return self.end > 0 and self.errno == 0


@dataclass(frozen=True)
class Trace:
    """The calls of one run, in the order in which they began."""

    root: str
    events: tuple[Event, ...] = ()

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def only(self, calls: str | Iterable[str], *, suffix: str = "", rank: int | None = None) -> tuple[Event, ...]:
        """The events of these calls on paths that end in ``suffix``."""
        names = {calls} if isinstance(calls, str) else set(calls)
        return tuple(
            event
            for event in self.events
            if event.call in names
            and (event.path.endswith(suffix) or event.path2.endswith(suffix))
            and (rank is None or event.rank == rank)
        )

    def count(self, calls: str | Iterable[str], *, suffix: str = "", rank: int | None = None) -> int:
        """How many there are: the largest ``nth`` that such a fault can strike."""
        return len(self.only(calls, suffix=suffix, rank=rank))

    def writes(self, suffix: str = "") -> tuple[Event, ...]:
        """The calls that carry data into files with this path ending."""
        return self.only(WRITE_CALLS, suffix=suffix)

    @property
    def bytes_written(self) -> int:
        """What the write calls reported; data of shared mappings and of fprintf is not counted."""
        return sum(event.result for event in self.writes() if event.succeeded)

    @property
    def struck(self) -> tuple[Event, ...]:
        """The calls that met a fault."""
        return tuple(event for event in self.events if event.fault is not None)

    def order_violations(self, *, index_suffix: str = ".index.json") -> tuple[Any, ...]:
        """What a power cut could destroy, as :class:`~conformance.provers.faults.order.Violation`; empty when sound."""
        from conformance.provers.faults.order import order_violations

        return order_violations(self, index_suffix=index_suffix)

    def describe(self, *, last: int = 40) -> str:
        """The last events, one line each, for a failure message."""
        lines = []
        for event in self.events[-last:]:
            names = " -> ".join(path.removeprefix(self.root) or "/" for path in (event.path, event.path2) if path)
            fate = "never returned" if not event.end else errno_module.errorcode.get(event.errno, f"= {event.result}")
            mark = "" if event.fault is None else f" [fault {event.fault}]"
            lines.append(f"{event.begin:5d} rank {event.rank} {event.call} {names} ({event.size}) {fate}{mark}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Outcome:
    """What became of one forked process.

    Exactly one of these holds: it returned (``result``), it raised (``error``), it was killed (``killed``), it ended
    otherwise (``exit_code``), or it had to be ended at the time limit (``timed_out``, with stacks in ``log``).
    ``finished_s`` counts from the start of the run.
    """

    result: Any
    error: BaseException | None
    killed: bool
    exit_code: int
    timed_out: bool
    finished_s: float
    log: str
    trace: Trace = field(repr=False)

    def value(self) -> Any:
        """The result; raises ``error``, or FaultError for a process that gave none."""
        if self.error is not None:
            raise self.error
        if self.killed or self.timed_out or self.exit_code:
            fate = f"killed={self.killed} timed_out={self.timed_out} exit code {self.exit_code}"
            raise FaultError(f"no result: {fate}\n{self.log}")
        return self.result
