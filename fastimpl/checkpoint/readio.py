"""Ranges of files into tensors: exactly the needed bytes, from all threads at once, straight into the caller's memory.

There is no mmap and no intermediate tensor: a load into CPU memory adds no more than one window per thread.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fastimpl import ops
from fastimpl.checkpoint.device_copies import ChooseCopies, CopyStarts, DoubleBuffer, InlineCopies
from fastimpl.checkpoint.geometry import Geometry
from fastimpl.regimes import regime
from twinproof.checkpoint.catalog import Meter
from twinproof.checkpoint.format import as_bits, buffer_of, dense_bytes
from twinproof.checkpoint.publish import storage_error
from twinproof.engine import in_mode_of_caller
from twinproof.errors import CorruptionError

__all__ = ["LoadStats", "ReadJob", "read_exactly", "run_jobs"]

TASK_BYTES = regime(8 << 20, 512)  # The most that one task reads; bounds the memory of each thread.
WINDOW_BYTES = regime(1 << 20, 96)  # Rows with gaps pass through a window that stays in the core's cache.
_BUFFERS_MAX = regime(256, 3)  # Of one call; the system takes 1024.
_SLICES_OF_THREAD = 4  # At the least, of a load of that many windows: the last slices end at about the same time.
GAP_BYTES = regime(4096, 16)  # Shorter gaps are read along: a page is the unit of every file system.


@dataclass
class LoadStats:
    """One rank's load: seconds by phase, and exact counts."""

    plan_s: float = 0.0
    read_s: float = 0.0
    read_bytes: int = 0
    read_count: int = 0


@dataclass(frozen=True)
class ReadJob:
    """A rectangle of a stored tensor and the target of its values: same shape, any strides, no lazy conjugate."""

    file: str
    base: int
    geometry: Geometry
    target: torch.Tensor
    dtype: torch.dtype


def read_exactly(descriptor: int, buffers: Sequence[memoryview], offset: int, path: str) -> int:
    """Fill the buffers from a file offset; returns the number of calls. Raises StorageError, CorruptionError."""
    calls, pending = 0, [view for view in buffers if len(view)]
    try:
        while pending:
            got = os.preadv(descriptor, pending, offset)
            calls += 1
            if got == 0:
                raise CorruptionError(
                    "the file became shorter while it was read",
                    got=f"its end at {offset}",
                    expected="its full length",
                    where=path,
                )
            offset += got
            while pending and got >= len(pending[0]):
                got -= len(pending.pop(0))
            if got:
                pending[0] = pending[0][got:]
    except OSError as error:
        raise storage_error(error, "reading", path) from error
    return calls


class _Thread(threading.local):
    """Memory of one reading thread, kept for all its tasks."""

    def __init__(self) -> None:
        self.window = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.buffers: dict[torch.device, DoubleBuffer] = {}

    def take_window(self, size_bytes: int) -> torch.Tensor:
        if self.window.numel() < size_bytes:
            self.window = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        return self.window[:size_bytes]


@dataclass(frozen=True)
class _Slice:
    """Bytes ``skip`` to ``skip + count`` of a job's rectangle."""

    job: ReadJob
    skip: int
    count: int


def _slices(jobs: Iterable[ReadJob], slice_bytes: int) -> Iterator[_Slice]:
    for job in jobs:
        total = job.geometry.total_bytes
        # Cuts fall between elements, so that a slice can be scattered and cast on its own.
        for skip in range(0, total, slice_bytes):
            yield _Slice(job, skip, min(slice_bytes, total - skip))


def _is_dense(part: _Slice, starts: CopyStarts) -> bool:
    """Whether it is a whole job, one run in the file, that goes straight into one run of the target's memory."""
    job = part.job
    return (
        part.count == job.geometry.run_bytes == job.geometry.total_bytes
        and job.target.dtype == job.dtype
        and job.target.is_contiguous()
        and not starts.needs_copies(job.target.device)
    )


def _bundles(slices: Iterable[_Slice], limit_bytes: int, starts: CopyStarts) -> Iterator[list[_Slice]]:
    """Slices that one call reads: dense ones without a gap between them in the file, or a single one of any kind."""
    bundle: list[_Slice] = []
    size_bytes, end = 0, None
    for part in slices:
        begin = part.job.base + part.job.geometry.locate(0) if _is_dense(part, starts) else None
        is_next = begin is not None and begin == end and size_bytes + part.count <= limit_bytes
        if bundle and not (is_next and len(bundle) < _BUFFERS_MAX):
            yield bundle
            bundle, size_bytes = [], 0
        bundle.append(part)
        size_bytes, end = size_bytes + part.count, None if begin is None else begin + part.count
    if bundle:
        yield bundle


def _fill(dense: torch.Tensor, part: _Slice, descriptor: int, window: Callable[[int], torch.Tensor]) -> tuple[int, int]:
    """Read one slice's bytes, dense. Returns (bytes read, calls)."""
    job, geo = part.job, part.job.geometry
    run = geo.run_bytes
    gap = (geo.shape[-1] - run) if len(geo.shape) > 1 else 0
    if gap == 0 or part.count <= run - part.skip % run:
        at = job.base + geo.locate(part.skip)
        return part.count, read_exactly(descriptor, [buffer_of(dense)], at, job.file)
    if gap >= GAP_BYTES:
        return _fill_by_run(dense, part, descriptor)
    return _fill_by_window(dense, part, descriptor, window)


def _fill_by_run(dense: torch.Tensor, part: _Slice, descriptor: int) -> tuple[int, int]:
    geo, view, position, calls = part.job.geometry, buffer_of(dense), part.skip, 0
    end = part.skip + part.count
    while position < end:
        upto = min(end, position - position % geo.run_bytes + geo.run_bytes)
        piece = view[position - part.skip : upto - part.skip]
        calls += read_exactly(descriptor, [piece], part.job.base + geo.locate(position), part.job.file)
        position = upto
    return part.count, calls


def _fill_by_window(
    dense: torch.Tensor, part: _Slice, descriptor: int, window: Callable[[int], torch.Tensor]
) -> tuple[int, int]:
    # Rows are read with their gaps, and the rectangle is taken out while the bytes are still in the core's cache.
    words = torch.tensor(part.job.geometry.descriptor(part.job.base, part.skip, part.count), device="cpu")
    status, calls, read_bytes = ops.read_rectangle(descriptor, dense, window(WINDOW_BYTES), words)
    if status > 0:
        raise storage_error(OSError(status, os.strerror(status)), "reading", part.job.file)
    if status < 0:
        where = part.job.file
        raise CorruptionError(
            "the file became shorter while it was read", got="its end", expected="its full length", where=where
        )
    return read_bytes, calls


def _flat_bytes(target: torch.Tensor) -> torch.Tensor | None:
    """The target's bytes as one row, where its memory is one row."""
    return dense_bytes(target) if target.is_contiguous() else None


class _Reading:
    """Carries out slices; one instance is shared by all threads of a load."""

    def __init__(self, starts: CopyStarts) -> None:
        self.local = _Thread()
        self.starts = starts
        self.stats = LoadStats()
        self._lock = threading.Lock()
        self._all: list[DoubleBuffer] = []

    def _buffers(self, device: torch.device) -> DoubleBuffer:
        buffers = self.local.buffers.get(device)
        if buffers is None:
            buffers = self.local.buffers[device] = DoubleBuffer(self.starts.of_thread(device) or InlineCopies())
            with self._lock:
                self._all.append(buffers)
        return buffers

    def read(self, descriptor: int, bundle: list[_Slice]) -> None:
        """Read slices into their targets."""
        if len(bundle) == 1:
            counts = self._read_one(descriptor, bundle[0])
        else:
            job = bundle[0].job
            buffers = [buffer_of(part.job.target) for part in bundle]
            calls = read_exactly(descriptor, buffers, job.base + job.geometry.locate(0), job.file)
            counts = sum(part.count for part in bundle), calls
        with self._lock:
            self.stats.read_bytes += counts[0]
            self.stats.read_count += counts[1]

    def _read_one(self, descriptor: int, part: _Slice) -> tuple[int, int]:
        target, job = part.job.target, part.job
        flat = _flat_bytes(target) if target.dtype == job.dtype else None
        if flat is not None and not self.starts.needs_copies(target.device):
            return _fill(flat[part.skip : part.skip + part.count], part, descriptor, self.local.take_window)
        buffers = self._buffers(target.device)
        dense = buffers.take(part.count)
        counts = _fill(dense, part, descriptor, self.local.take_window)
        self._deliver(dense, part, flat, buffers)
        return counts

    def _deliver(self, dense: torch.Tensor, part: _Slice, flat: torch.Tensor | None, buffers: DoubleBuffer) -> None:
        target, dtype = part.job.target, part.job.dtype
        if flat is not None:
            buffers.copy(flat[part.skip : part.skip + part.count], dense)
            return
        with buffers.copies.on():
            values = buffers.copies.upload(dense, target.device).view(dtype)
            if dtype != target.dtype:
                values = values.to(target.dtype)
            ops.strided_scatter(as_bits(target), part.skip // dtype.itemsize, as_bits(values).view(torch.uint8))
            buffers.mark()

    def drain(self) -> None:
        """Wait for copies of every thread."""
        for buffers in self._all:
            buffers.drain()


class _File:
    """An input that is open from the first of its bundles to the last, whichever threads read them."""

    def __init__(self, path: str, bundles: Sequence[list[_Slice]]) -> None:
        self.path, self.bundles = path, bundles
        self._lock, self._descriptor, self._left_count = threading.Lock(), -1, len(bundles)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Its descriptor, for one of the bundles. Raises StorageError."""
        with self._lock:
            if self._descriptor < 0:
                try:
                    self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise storage_error(error, "opening", self.path) from error
        try:
            yield self._descriptor
        finally:
            with self._lock:
                self._left_count -= 1
                if self._left_count == 0:
                    self.close()

    def close(self) -> None:
        """Also of a file that was not read to its end: after an error."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _files(jobs: Sequence[ReadJob], thread_count: int, starts: CopyStarts) -> list[_File]:
    # Slices of a small load are smaller, so that no thread is left without work.
    share = sum(job.geometry.total_bytes for job in jobs) // (_SLICES_OF_THREAD * thread_count)
    slice_bytes = min(TASK_BYTES, max(WINDOW_BYTES, share - share % GAP_BYTES))
    by_file: dict[str, list[ReadJob]] = {}
    for job in jobs:
        by_file.setdefault(job.file, []).append(job)
    files = []
    for path, mine in by_file.items():
        mine.sort(key=lambda job: job.base)
        files.append(_File(path, list(_bundles(_slices(mine, slice_bytes), slice_bytes, starts))))
    return files


def run_jobs(jobs: Sequence[ReadJob], thread_count: int, choose: ChooseCopies, meter: Meter) -> LoadStats:
    """Carry out read jobs, file by file in each file's order, with ``thread_count`` threads on one queue.

    No thread waits for the end of a file, so that many small files are read as fast as one large one. At most
    ``thread_count`` files are open at a time.

    Raises:
        StorageError, CorruptionError: the first error of any thread.
    """
    starts = CopyStarts(choose, [job.target.device for job in jobs])
    reading, files = _Reading(starts), _files(jobs, thread_count, starts)
    waiting = deque((file, bundle) for file in files for bundle in file.bundles)

    def work() -> None:
        # Appending to a deque and popping from it are atomic.
        while waiting:
            try:
                file, bundle = waiting.popleft()
            except IndexError:
                return
            try:
                with file.opened() as descriptor:
                    reading.read(descriptor, bundle)
                meter.add(sum(part.count for part in bundle))
            except BaseException:
                waiting.clear()
                raise

    try:
        _run_on_threads(work, min(thread_count, len(waiting)))
    finally:
        for file in files:
            file.close()
    reading.drain()
    return reading.stats


def _run_on_threads(work: Callable[[], None], thread_count: int) -> None:
    """Run ``work`` on so many threads, this one among them; all have returned when this returns or raises."""
    if thread_count < 2:
        work()
        return
    with ThreadPoolExecutor(thread_count - 1, thread_name_prefix="checkpoint-read") as pool:
        elsewhere = in_mode_of_caller(work)
        others = [pool.submit(elsewhere) for _ in range(thread_count - 1)]
        work()
    for other in others:
        other.result()
