"""Peak memory of a schedule's turn: torch's allocator on a GPU, tensors and resident memory on a host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from perf.harness.counters import peak_is_resettable, status_bytes, trim_heap
from perf.harness.paired import Sample

__all__ = ["CudaMeter", "HostMeter", "LiveBytes", "Meter", "meter_for"]


class Meter(Protocol):
    """What a turn takes. ``allocated``, ``reserved``: what these two mean here."""

    allocated: str
    reserved: str

    def start(self) -> None:
        """Forget peaks, and give back what nobody uses."""

    def step(self, run: Callable[[], Any]) -> None:
        """Run one of several equal steps."""

    def watching(self) -> AbstractContextManager[Any]:
        """Around everything whose memory counts and whose time does not."""

    def peaks(self) -> Sample:
        """``peak_allocated_bytes`` and ``peak_reserved_bytes`` since ``start``, where they are known."""


class CudaMeter:
    """torch's caching allocator."""

    allocated = "torch.cuda.max_memory_allocated"
    reserved = "torch.cuda.max_memory_reserved"

    def start(self) -> None:
        """The cache is emptied, so that each turn reserves what it needs itself."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def step(self, run: Callable[[], Any]) -> None:
        """The whole turn counts."""
        run()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The allocator always watches."""
        yield

    def peaks(self) -> Sample:
        """As torch counts."""
        return {
            "peak_allocated_bytes": float(torch.cuda.max_memory_allocated()),
            "peak_reserved_bytes": float(torch.cuda.max_memory_reserved()),
        }


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages that ops hand out, until they are freed, also after the mode has ended.

    Not seen: memory inside of an op, gloo's buffers, and tensors made outside of the mode. ``torch`` has no counter of
    its own for host memory.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in torch.utils._pytree.tree_leaves(result):
            if isinstance(made, torch.Tensor) and made.layout is torch.strided:
                self._note(made.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size_bytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._freed, key, size_bytes)

    def _freed(self, key: int, size_bytes: int) -> None:
        self._known.discard(key)
        self.live_bytes -= size_bytes


class HostMeter:
    """Tensors that are alive, and the resident memory of the process."""

    allocated = "tensors handed out by ops (a dispatch mode; memory inside of ops is not seen)"
    reserved = "VmHWM of the process"

    def __init__(self) -> None:
        self._tensors = LiveBytes()
        self._has_peak = False
        self._step_peaks: list[int] = []

    def start(self) -> None:
        """Of the process too, where the kernel allows it."""
        trim_heap()
        self._has_peak = peak_is_resettable()
        self._tensors.peak_bytes = self._tensors.live_bytes
        self._step_peaks = []

    def step(self, run: Callable[[], Any]) -> None:
        """Run one of several equal steps, of whose peaks the least counts.

        Threads of gloo let go of what they sent after the host was told that it is sent: some steps hold more by luck.
        """
        self._tensors.peak_bytes = self._tensors.live_bytes
        run()
        self._step_peaks.append(self._tensors.peak_bytes)

    def watching(self) -> AbstractContextManager[Any]:
        """Every op costs a few microseconds more."""
        return self._tensors

    def peaks(self) -> Sample:
        """Resident memory is absent where its peak cannot be reset."""
        found = {"peak_allocated_bytes": float(min(self._step_peaks, default=self._tensors.peak_bytes))}
        resident = status_bytes("VmHWM") if self._has_peak else None
        return found if resident is None else {**found, "peak_reserved_bytes": float(resident)}


def meter_for(device: str) -> Meter:
    """The meter of a device kind."""
    return CudaMeter() if device == "cuda" else HostMeter()
