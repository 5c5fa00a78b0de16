"""Exact counts of one process, so that an extra pass over the data cannot hide in a noisy clock.

Bytes and calls come from ``/proc/self/io``; peak memory from ``VmHWM``, reset through ``clear_refs``: a sampling thread
misses peaks that last as long as somebody holds the GIL. What the kernel does not offer is absent from the result and
never zero; a gate that needs it is then undecided.
"""

from __future__ import annotations

import ctypes
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from perf.harness.paired import Sample

__all__ = ["Counters", "peak_is_resettable", "read_io", "status_bytes", "trim_heap"]

_PROC = Path("/proc/self")
_RESET_PEAK = "5"
_IO_NAMES = {"rchar": "read_bytes", "wchar": "written_bytes", "syscr": "read_calls", "syscw": "write_calls"}


def read_io() -> dict[str, int]:
    """Bytes and calls of this process so far, reads and writes of any kind of file; empty where the kernel hides it.

    Source: proc_pid_io(5). Sockets used through ``send`` and ``recv``, as gloo does, are not counted.
    """
    try:
        lines = (_PROC / "io").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    fields = dict(line.split(": ") for line in lines)
    return {ours: int(fields[theirs]) for theirs, ours in _IO_NAMES.items()}


def status_bytes(name: str) -> int | None:
    """A memory field of ``/proc/self/status`` (``VmRSS``, ``VmHWM``) in bytes."""
    try:
        for line in (_PROC / "status").read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _reset_peak() -> bool:
    try:
        (_PROC / "clear_refs").write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return False
    return True


def peak_is_resettable() -> bool:
    """Whether this kernel lets a process reset its own peak; containers often do not."""
    return _reset_peak() and status_bytes("VmHWM") is not None


def trim_heap() -> None:
    """Give free heap back, so that memory freed by an earlier job cannot hide the growth of the next."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@dataclass(frozen=True)
class _Start:
    io: dict[str, int]
    faults: resource.struct_rusage
    rss_bytes: int | None


class Counters:
    """Counts between :meth:`start` and :meth:`stop`, in this process."""

    def __init__(self) -> None:
        self._start: _Start | None = None

    def start(self) -> None:
        """Begin; the peak is reset to what is resident now."""
        trim_heap()
        resettable = _reset_peak()
        rss_bytes = status_bytes("VmRSS") if resettable else None
        self._start = _Start(read_io(), resource.getrusage(resource.RUSAGE_SELF), rss_bytes)

    def stop(self) -> Sample:
        """The counts since :meth:`start`: bytes and calls, growth of the peak, faults; and fds and threads as of now.

        Raises:
            RuntimeError: when :meth:`start` was not called.
        """
        if self._start is None:
            raise RuntimeError("Counters.stop() before start()")
        started, self._start = self._start, None
        # The reading itself costs two calls and a few hundred bytes per file; the io file is therefore read first.
        now = read_io()
        found: Sample = {name: float(now[name] - value) for name, value in started.io.items() if name in now}
        peak = status_bytes("VmHWM")
        if peak is not None and started.rss_bytes is not None:
            found["rss_growth_bytes"] = float(max(0, peak - started.rss_bytes))
        faults = resource.getrusage(resource.RUSAGE_SELF)
        found["minor_fault_count"] = float(faults.ru_minflt - started.faults.ru_minflt)
        found["major_fault_count"] = float(faults.ru_majflt - started.faults.ru_majflt)
        found["open_fd_count"] = float(len(os.listdir(_PROC / "fd")))
        found["thread_count"] = float(len(os.listdir(_PROC / "task")))
        return found
