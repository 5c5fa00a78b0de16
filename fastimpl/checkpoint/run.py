"""Carry out one rank's plan: rounds of exchange on the calling thread, whole local blocks on all threads.

Prevents errors that die with a worker thread: the first one is kept, everything else
stops, and it is raised, whatever its class.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fastimpl.checkpoint.blockio import LocalPart, assemble, block_sums, write_at
from fastimpl.checkpoint.device_copies import CopyStarts, DoubleBuffer, Stager
from fastimpl.checkpoint.exchange import Exchange, Round
from fastimpl.checkpoint.plan import first_file
from fastimpl.checkpoint.wire import OwnBlock, RankPlan
from fastimpl.regimes import regime
from twinproof.checkpoint.catalog import Meter, Part, Progress
from twinproof.checkpoint.publish import storage_error

IN_FLIGHT_BYTES = regime(8 << 20, 256)  # Exchanged bytes that wait in memory before the next round is posted.
# What systems say that do not copy between these files, or not at all, where others still could read and write.
# A source that became a folder is told by its own name, by whoever reads it then.
_CANNOT_COPY = (errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EISDIR)

Staged = Sequence[tuple[DoubleBuffer, object]]

__all__ = ["FileSet", "Runner", "SaveStats"]


@dataclass
class SaveStats:
    """One rank's save: seconds by phase, and exact counts."""

    plan_s: float = 0.0
    exchange_s: float = 0.0
    write_s: float = 0.0
    fsync_s: float = 0.0
    publish_s: float = 0.0
    written_bytes: int = 0
    write_count: int = 0
    sent_bytes: int = 0
    plan_bytes: int = 0


@dataclass
class FileSet:
    """The output files that this rank writes, opened when first needed."""

    folder: Path
    names: Sequence[str]
    sequential: bool = False
    _open: dict[int, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def path(self, file: int) -> Path:
        """Path of a file by number."""
        return self.folder / self.names[file]

    def write(self, file: int, start: int, pieces: Sequence[torch.Tensor]) -> int:
        """Write pieces one after the other; returns the number of write calls. Raises StorageError."""
        descriptor = self._descriptor(file)
        try:
            return write_at(descriptor, pieces, None if self.sequential else start)
        except OSError as error:
            raise storage_error(error, "writing", self.path(file)) from error

    def copy(self, file: int, start: int, source: int, offset: int, count: int) -> int:
        """Have the system copy bytes of another file, which then pass through no memory of this process.

        Returns how many it copied: fewer than ``count`` where it cannot. Raises StorageError.
        """
        done, descriptor = 0, self._descriptor(file)
        # Not every Python offers the call, and some file systems copy nothing where there is something.
        while done < count and hasattr(os, "copy_file_range"):
            try:
                got = os.copy_file_range(source, descriptor, count - done, offset + done, start + done)
            except OSError as error:
                if error.errno not in _CANNOT_COPY:
                    raise storage_error(error, "copying to", self.path(file)) from error
                got = 0
            if got == 0:
                break
            done += got
        return done

    def _descriptor(self, file: int) -> int:
        with self._lock:
            if file not in self._open:
                try:
                    self._open[file] = os.open(self.path(file), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
                except OSError as error:
                    # All that were opened stay so: they are synced together, in the end.
                    doing = f"opening a file for writing, one of {len(self.names)}, {len(self._open)} of them open,"
                    raise storage_error(error, doing, self.path(file)) from error
            return self._open[file]

    def close(self, *, durable: bool) -> None:
        """Sync and close every file that was opened; all are closed, then the first error is raised."""
        failure: OSError | None = None
        for file, descriptor in self._open.items():
            try:
                if durable and failure is None:
                    os.fsync(descriptor)
            except OSError as error:
                failure = storage_error(error, "fsync", self.path(file))
            finally:
                os.close(descriptor)
        self._open.clear()
        if failure is not None:
            raise failure


class Runner:
    """One save on one rank.

    Args:
        plan: this rank's part.
        parts: for each block of the plan, the local bytes in it.
        files: where to write.
        exchange: the rounds.
        rank, rank_count: this rank, and how many save.
        thread_count: threads that write, the calling one included.
        starts: where copies from each device begin.
        checksums: sum what is written.
        progress: told of written bytes.

    Attributes:
        sums: of what this rank wrote, with ``checksums``.
    """

    def __init__(
        self,
        plan: RankPlan,
        parts: Sequence[Sequence[LocalPart]],
        files: FileSet,
        exchange: Exchange,
        *,
        rank: int,
        rank_count: int,
        thread_count: int,
        starts: CopyStarts,
        checksums: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.plan, self.parts, self.files, self.exchange = plan, parts, files, exchange
        self.failure: BaseException | None = None
        self.numbers = {id(block): number for number, block in enumerate(plan.blocks)}
        mine = [block for block in plan.blocks if block.owner == rank]
        self.checksums, self.sums = checksums, list[Part]()
        self.meter = Meter(progress, sum(block.end - block.start for block in mine))
        solo = [block for block in mine if block.turn < 0]
        if not files.sequential and solo:
            first = first_file(rank, rank_count, len(files.names))
            solo.sort(key=lambda block: (block.file < first, block.file, block.start))
        self.solo = deque(solo)
        self.thread_count = 1 if files.sequential else min(thread_count, len(mine)) or 1
        self.starts = starts
        self.stats = SaveStats()
        self._caller = _Thread(starts)
        self._lock = threading.Lock()

    def run(self) -> None:
        """Do everything. Raises the first error of any thread, after all rounds were completed."""
        workers: list[threading.Thread] = []
        try:
            for number in range(1, self.thread_count):
                worker = threading.Thread(target=self._work, name=f"checkpoint-write-{number}")
                worker.start()
                workers.append(worker)
        except BaseException as error:  # The others wait for this rank's messages, also where it gets no threads.
            self._fail(error)
        self._rounds()
        self._work()
        for worker in workers:
            worker.join()
        self.stats.sent_bytes = self.exchange.sent_bytes
        if self.failure is not None:
            raise self.failure

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.failure = self.failure or error

    def _rounds(self) -> None:
        thread = self._caller
        pending: deque[Round] = deque()
        posted = 0
        for turn in range(self.plan.turn_count):
            # Tiny messages are posted far ahead, so that ranks do not wait for each other's writes; large ones are not.
            while posted < self.plan.turn_count and (
                posted == turn or sum(r.size_bytes for r in pending) < IN_FLIGHT_BYTES
            ):
                pending.append(self.exchange.start(posted, failed=self.failure is not None))
                posted += 1
            current = pending.popleft()
            begun = time.perf_counter()
            try:
                self.exchange.finish(current)
            except BaseException as error:
                self._fail(error)
            self.stats.exchange_s += time.perf_counter() - begun
            block = self.exchange.owned.get(turn)
            if block is not None:
                if self.files.sequential:
                    self._work(before=block)
                self._write(block, current.inbox, thread, self._stage(block, thread))

    def _next(self, before: OwnBlock | None) -> OwnBlock | None:
        try:
            if before is not None and (self.solo[0].file, self.solo[0].start) > (before.file, before.start):
                return None
            return self.solo.popleft() if self.failure is None else None
        except IndexError:
            return None

    def _work(self, before: OwnBlock | None = None) -> None:
        # A block that was taken and not written is a failure, whatever ended its thread.
        try:
            self._drain(before)
        except BaseException as error:
            self._fail(error)

    def _drain(self, before: OwnBlock | None = None) -> None:
        """Write whole local blocks; the bytes of the next come from their device while this one is written."""
        thread = _Thread(self.starts)
        block = self._next(before)
        staged = self._stage(block, thread)
        while block is not None:
            following = self._next(before)
            ahead = self._stage(following, thread)
            self._write(block, (), thread, staged)
            block, staged = following, ahead

    def _stage(self, block: OwnBlock | None, thread: _Thread) -> Staged:
        try:
            return thread.stager.start(self._parts_of(block)) if block is not None else []
        except BaseException as error:
            self._fail(error)
            return []

    def _parts_of(self, block: OwnBlock) -> Sequence[LocalPart]:
        return self.parts[self.numbers[id(block)]]

    def _write(self, block: OwnBlock, inbox: Sequence[torch.Tensor], thread: _Thread, staged: Staged) -> None:
        if self.failure is not None:
            return
        begun = time.perf_counter()
        try:
            size_bytes = block.end - block.start
            thread.stager.finish(staged)
            header = self.plan.headers.get(block.file, b"")
            parts = self._parts_of(block)
            pieces = assemble(block, header, parts, inbox, thread.take(size_bytes))
            name = self.files.names[block.file]
            sums = block_sums(name, block, len(header), parts, inbox, pieces) if self.checksums else ()
            calls = self.files.write(block.file, block.start, pieces)
            self.meter.add(size_bytes)
        except BaseException as error:
            self._fail(error)
            return
        with self._lock:
            self.stats.write_s += time.perf_counter() - begun
            self.stats.written_bytes += size_bytes
            self.stats.write_count += calls
            self.sums += sums


class _Thread:
    """Memory of one writing thread: staging buffers, and scratch that grows to the largest block."""

    def __init__(self, starts: CopyStarts) -> None:
        self.stager = Stager(starts)
        self.buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, size_bytes: int) -> torch.Tensor:
        """Scratch. Its pages only become memory where they are used."""
        if self.buffer.numel() < size_bytes:
            self.buffer = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        return self.buffer
