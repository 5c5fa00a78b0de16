"""The same jobs without a library: what the kernel gives to processes that do nothing but move the bytes.

``save``, ``load`` and ``copy`` are limits: nothing is planned, exchanged or published; a load by ``PlainReader`` is
planned by DCP. The others are what the gates must refuse: one write per run, stores through a mapping, calls of a page
or less.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from twinproof.checkpoint.format import buffer_of

__all__ = ["PLAIN_SAVES", "Layout", "PlainReader", "copy", "load"]

_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class Layout:
    """Where this rank's share of every tensor lies in the final files.

    Attributes:
        parts: by tensor number, equal shares of ``dim``, contiguous.
        files: (file, header, tensor numbers).
        dim: the dimension that is shared out, 0 or 1.
        rank, rank_count: ranks start at different files, since writers of one inode wait for each other.
    """

    parts: list[torch.Tensor]
    files: list[tuple[str, bytes, list[int]]]
    dim: int
    rank: int
    rank_count: int

    def in_turn(self) -> list[tuple[str, bytes, list[int]]]:
        """The files, beginning with this rank's first."""
        first = self.rank * len(self.files) // self.rank_count
        return [*self.files[first:], *self.files[:first]]

    def runs(self, header: bytes, numbers: list[int]) -> Iterator[tuple[memoryview, int]]:
        """(bytes, file offset) of each contiguous piece of this rank in one file."""
        for position, number in enumerate(numbers):
            data = buffer_of(self.parts[number].view(torch.uint8))
            run_bytes = len(data) // (1 if self.dim == 0 else self.parts[number].shape[0])
            start = len(header) + position * self.rank_count * len(data) + self.rank * run_bytes
            for done in range(0, len(data), run_bytes):
                yield data[done : done + run_bytes], start
                start += self.rank_count * run_bytes


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(descriptor, data, offset)
        data, offset = data[done:], offset + done


def _save_by_run(layout: Layout, folder: Path) -> None:
    for file, header, numbers in layout.in_turn():
        descriptor = os.open(folder / file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if layout.rank == 0:
                _write(descriptor, memoryview(header), 0)
            for data, offset in layout.runs(header, numbers):
                _write(descriptor, data, offset)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _save_mapped(layout: Layout, folder: Path) -> None:
    for file, header, numbers in layout.in_turn():
        data_bytes = sum(layout.parts[number].nbytes for number in numbers) * layout.rank_count
        descriptor = os.open(folder / file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.ftruncate(descriptor, len(header) + data_bytes)
            with mmap.mmap(descriptor, len(header) + data_bytes) as mapping:
                mapping[: len(header)] = header
                for data, offset in layout.runs(header, numbers):
                    mapping[offset : offset + len(data)] = data
        finally:
            os.close(descriptor)


# Of rows, one write per run is the limit; of columns, it is what an exchange spares.
PLAIN_SAVES: dict[str, Callable[[Layout, Path], None]] = {
    "plain": _save_by_run,
    "per-run": _save_by_run,
    "mapped": _save_mapped,
}


def load(layout: Layout, folder: Path, *, call_bytes: int) -> None:
    """Read this rank's rows of every tensor into ``layout.parts``, at most ``call_bytes`` at a time."""
    for file, header, numbers in layout.in_turn():
        descriptor = os.open(folder / file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for data, offset in layout.runs(header, numbers):
                for done in range(0, len(data), call_bytes):
                    os.preadv(descriptor, [data[done : done + call_bytes]], offset + done)
        finally:
            os.close(descriptor)


class PlainReader(StorageReader):
    """DCP plans the load, and the reader, which knows its files, calls ``read``."""

    def __init__(self, metadata: Metadata, read: Callable[[], None]) -> None:
        self._metadata, self._read = metadata, read

    def reset(self, checkpoint_id: Any = None) -> None:
        """It is always at the same files."""

    def read_metadata(self) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Nothing is learnt from them."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        self._read()
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def copy(source: Path, target: Path, *, call_bytes: int = _BLOCK_BYTES) -> None:
    """Copy the bytes of a folder's files one after the other, ``call_bytes`` at a time, and sync: a merge's least."""
    buffer = memoryview(bytearray(call_bytes))
    for path in sorted(source.iterdir()):
        with path.open("rb", buffering=0) as reading, (target / path.name).open("wb", buffering=0) as writing:
            while count := reading.readinto(buffer):
                _write(writing.fileno(), buffer[:count], writing.tell())
                writing.seek(count, os.SEEK_CUR)
            os.fsync(writing.fileno())
