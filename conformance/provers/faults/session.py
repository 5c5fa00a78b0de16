"""The memory-mapped file that carries faults to the processes of a run and their calls back; mirrors ``session.h``.

It outlives a process that is killed at the very call that it was to report.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from conformance.provers.faults.model import ACTIONS, CALLS, Event, Fault, FaultError, Trace

__all__ = ["Session"]

_MAGIC, _VERSION = 0x54504C46, 2
_FAULTS_MAX, _EVENTS_MAX = 16, 8192
_PATH_BYTES, _ROOT_BYTES, _SUFFIX_BYTES = 320, 1024, 192


class _Fault(ctypes.Structure):
    _fields_ = (
        ("calls", ctypes.c_uint64),
        ("nth", ctypes.c_uint32),
        ("times", ctypes.c_uint32),
        ("action", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("delay_us", ctypes.c_uint32),
        ("matched", ctypes.c_uint64),
        ("suffix", ctypes.c_char * _SUFFIX_BYTES),
    )


class _Event(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("pid", ctypes.c_int32),
        ("tid", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("call", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("fault", ctypes.c_int32),
        ("flags", ctypes.c_int32),
        ("created", ctypes.c_int32),
        ("result", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("size", ctypes.c_uint64),
        ("inode", ctypes.c_uint64),
        ("inode2", ctypes.c_uint64),
        ("path", ctypes.c_char * _PATH_BYTES),
        ("path2", ctypes.c_char * _PATH_BYTES),
    )


class _Head(ctypes.Structure):
    _fields_ = (
        ("magic", ctypes.c_uint32),
        ("version", ctypes.c_uint32),
        ("event_bytes", ctypes.c_uint32),
        ("fault_bytes", ctypes.c_uint32),
        ("capacity", ctypes.c_uint32),
        ("fault_count", ctypes.c_uint32),
        ("clock", ctypes.c_uint64),
        ("used", ctypes.c_uint64),
        ("too_long", ctypes.c_uint64),
        ("held", ctypes.c_uint32),
        ("released", ctypes.c_uint32),
        ("root", ctypes.c_char * _ROOT_BYTES),
        ("faults", _Fault * _FAULTS_MAX),
    )


def _pack(fault: Fault) -> _Fault:
    suffix = (fault.path_suffix or "").encode()
    if len(suffix) >= _SUFFIX_BYTES:
        raise ValueError(f"path_suffix is longer than {_SUFFIX_BYTES - 1} bytes: {fault.path_suffix}")
    interrupted = fault.action == "eintr"
    return _Fault(
        calls=sum(1 << CALLS.index(name) for name in set(fault.calls)),
        nth=fault.nth,
        times=fault.times,
        action=ACTIONS.index("errno" if interrupted else fault.action),
        error=errno.EINTR if interrupted else fault.errno,
        rank=-1 if fault.rank is None else fault.rank,
        delay_us=int(fault.delay_s * 1e6),
        suffix=suffix,
    )


class Session:
    """One run's file: made with the faults, handed to processes by ``path``, read as a trace; a context manager.

    Args:
        root: only calls on this folder and what is below it count.
        faults: at most 16.
    """

    def __init__(self, root: str | os.PathLike[str], faults: Sequence[Fault] = ()) -> None:
        self.root = os.path.realpath(root)
        if len(faults) > _FAULTS_MAX or len(os.fsencode(self.root)) >= _ROOT_BYTES:
            limits = f"at most {_FAULTS_MAX} faults and a root of {_ROOT_BYTES} bytes"
            raise ValueError(f"{limits}; got {len(faults)}, {self.root}")
        descriptor, name = tempfile.mkstemp(prefix="twinproof-faults-", suffix=".session")
        self.path = Path(name)
        try:
            size_bytes = ctypes.sizeof(_Head) + _EVENTS_MAX * ctypes.sizeof(_Event)
            os.ftruncate(descriptor, size_bytes)
            self._memory = mmap.mmap(descriptor, size_bytes)
        finally:
            os.close(descriptor)
        head = _Head(
            magic=_MAGIC,
            version=_VERSION,
            event_bytes=ctypes.sizeof(_Event),
            fault_bytes=ctypes.sizeof(_Fault),
            capacity=_EVENTS_MAX,
            fault_count=len(faults),
            root=os.fsencode(self.root),
        )
        for index, fault in enumerate(faults):
            head.faults[index] = _pack(fault)
        self._memory[: ctypes.sizeof(head)] = bytes(head)

    def trace(self) -> Trace:
        """What was seen so far.

        Raises:
            FaultError: when calls were lost, since a trace with holes proves nothing.
        """
        head = _Head.from_buffer_copy(self._memory)
        if head.used > head.capacity or head.too_long:
            lost = f"{head.used} calls for {head.capacity} places, {head.too_long} paths too long"
            raise FaultError(f"{lost}: use fewer or shorter ones")
        start, step = ctypes.sizeof(_Head), ctypes.sizeof(_Event)
        packed = [_Event.from_buffer_copy(self._memory, start + number * step) for number in range(head.used)]
        # A slot without a beginning belongs to a process that another one killed while it was describing its call.
        events = [_event(item) for item in packed if item.begin]
        return Trace(self.root, tuple(sorted(events, key=lambda event: event.begin)))

    def close(self) -> None:
        """Remove the file."""
        self._memory.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _event(item: _Event) -> Event:
    return Event(
        begin=item.begin,
        end=item.end,
        pid=item.pid,
        tid=item.tid,
        rank=item.rank,
        call=CALLS[item.call],
        errno=item.error,
        fault=None if item.fault < 0 else item.fault,
        flags=item.flags,
        created=bool(item.created),
        result=item.result,
        offset=item.offset,
        size=item.size,
        inode=item.inode,
        inode2=item.inode2,
        path=os.fsdecode(item.path),
        path2=os.fsdecode(item.path2),
    )
