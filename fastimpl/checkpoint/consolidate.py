"""Shard folders that torch already wrote, turned into final HF files in large blocks, read and written once.

The blocks are those of a save (``plan``); the sources are ranges of the shard files instead of tensors. A block's
part of a chunk is one contiguous range of its shard file. Nothing is read twice, and no tensor is held whole. Where no
sums are wanted the system itself copies long runs, from page cache to page cache or on the disk.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

from fastimpl import ops
from fastimpl.checkpoint.blockio import piece_sums
from fastimpl.checkpoint.geometry import Geometry, geometry
from fastimpl.checkpoint.plan import Block, BlockRules, plan_blocks
from fastimpl.checkpoint.readio import read_exactly
from fastimpl.checkpoint.run import FileSet
from fastimpl.regimes import regime
from twinproof.checkpoint import shards
from twinproof.checkpoint.catalog import Box, Chunk, Meter, Part, Progress, joined
from twinproof.checkpoint.format import StrPath, buffer_of
from twinproof.checkpoint.plan import Arrangement, GlobalTensor
from twinproof.checkpoint.publish import StagedFolder, storage_error
from twinproof.checkpoint.shards import MergeJob, record_dtype
from twinproof.errors import CorruptionError

__all__ = ["consolidate_safetensors_files", "consolidate_safetensors_files_on_every_rank"]

# Input files that one thread keeps open: many shards must not exhaust the process's descriptors.
_OPEN_MAX = regime(32, 2)
_RULES = BlockRules.of(1 << 20)  # Blocks of 2 MiB stay in a core's cache between reading and writing.
_COPIED_BYTES = regime(64 << 10, 16)  # Shorter runs are written together with what is beside them.


class _Inputs:
    """Input files of one thread, least recently used closed first."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()

    def read(self, file: str, offset: int, target: torch.Tensor) -> None:
        """Fill ``target``, uint8, from a file offset. Raises StorageError, CorruptionError."""
        read_exactly(self.descriptor(file), [buffer_of(target)], offset, file)

    def descriptor(self, file: str) -> int:
        """Of an input, until the next one is asked for. Raises StorageError."""
        if file in self._open:
            self._open.move_to_end(file)
        else:
            if len(self._open) >= _OPEN_MAX:
                os.close(self._open.popitem(last=False)[1])
            try:
                self._open[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise storage_error(error, "opening", file) from error
        return self._open[file]

    def close(self) -> None:
        """Close all."""
        while self._open:
            os.close(self._open.popitem()[1])


@dataclass(frozen=True)
class _Piece:
    """Bytes ``skip`` to ``skip + count`` of a stored chunk whose tensor begins at ``begin`` of the output file."""

    chunk: Chunk
    geometry: Geometry
    begin: int
    skip: int
    count: int

    @property
    def is_run(self) -> bool:
        """Whether they are contiguous in the output file, too."""
        return self.geometry.is_run(self.skip, self.count)

    @property
    def offset(self) -> int:
        """Of the first byte in the input."""
        return self.chunk.begin + self.skip

    @property
    def start(self) -> int:
        """Of the first byte in the output file."""
        return self.begin + self.geometry.locate(self.skip)


class _MergePlan:
    """Output blocks and, for each, the stored chunks that lie in it."""

    def __init__(self, job: MergeJob) -> None:
        self.names = list(job.layouts)
        self.sources: list[tuple[Chunk, Geometry]] = []
        tensors: dict[str, GlobalTensor] = {}
        for file, layout in job.layouts.items():
            for name, begin in layout.begins.items():
                record, dtype = job.catalog.tensors[name], record_dtype(job.catalog, name)
                tensors[name] = GlobalTensor(name, dtype, record.shape, [], file, begin)
                for chunk in record.chunks:
                    if 0 not in chunk.sizes:
                        tensors[name].parts.append((0, len(self.sources), Box(chunk.offsets, chunk.sizes)))
                        self.sources.append((chunk, geometry(record.shape, chunk.offsets, chunk.sizes, dtype.itemsize)))
        self.headers = [layout.header for layout in job.layouts.values()]
        self.checksums, self.sums = job.checksums, list[Part]()
        plan = plan_blocks(Arrangement(tensors, dict(job.layouts)), 1, _RULES, {})
        self.blocks = plan.blocks
        self._contents: list[list[tuple[int, int]]] = [[] for _ in plan.blocks]
        for source, begin, number in plan.pieces[0]:
            self._contents[number].append((source, begin))

    def share(self, first: int, last: int, ways: int) -> list[deque[int]]:
        """Blocks ``first`` to ``last`` in consecutive parts, so that writers mostly are in different files."""
        cuts = [first + (last - first) * i // ways for i in range(ways + 1)]
        return [deque(range(a, b)) for a, b in pairwise(cuts)]

    def pieces(self, number: int) -> list[_Piece]:
        """What a block holds beside a header. Raises CorruptionError rather than leave a gap."""
        block, pieces = self.blocks[number], []
        for source, begin in self._contents[number]:
            chunk, geo = self.sources[source]
            skip = geo.held_before(block.start - begin)
            pieces.append(_Piece(chunk, geo, begin, skip, geo.held_before(block.end - begin) - skip))
        filled = sum(piece.count for piece in pieces) + len(self.headers[block.file][block.start : block.end])
        if filled != block.end - block.start:
            raise CorruptionError(
                "a block would be written with missing bytes",
                got=filled,
                expected=block.end - block.start,
                where=self.names[block.file],
            )
        return pieces

    def assemble(
        self, block: Block, pieces: Sequence[_Piece], inputs: _Inputs, window: torch.Tensor, dense: torch.Tensor
    ) -> None:
        """Fill ``window`` with the block's header and these pieces."""
        head = self.headers[block.file][block.start : block.end]
        buffer_of(window)[: len(head)] = head
        for piece in pieces:
            first = piece.start - block.start
            target = window[first : first + piece.count] if piece.is_run else dense[: piece.count]
            inputs.read(piece.chunk.file, piece.offset, target)
            if self.checksums:
                # Appending to a list is atomic.
                self.sums.append(Part(piece.chunk.file, piece.chunk.begin, piece.skip, piece.count, ops.crc32(target)))
            if not piece.is_run:
                words = piece.geometry.descriptor(piece.begin, piece.skip, piece.count)
                ops.place_rectangles(window, block.start, target, torch.tensor(words, device="cpu"))
        if self.checksums:
            bases = {piece.begin for piece in pieces}
            header_bytes = len(self.headers[block.file])
            self.sums += piece_sums(self.names[block.file], block.start, header_bytes, bases, [window])


class _Carrier:
    """One thread's way of bringing blocks into their files."""

    def __init__(self, plan: _MergePlan, files: FileSet) -> None:
        self.plan, self.files, self.inputs = plan, files, _Inputs()
        self._window = torch.empty(_RULES.direct_max_bytes, dtype=torch.uint8, device="cpu")
        self._dense = torch.empty(_RULES.direct_max_bytes, dtype=torch.uint8, device="cpu")
        # Bytes that the system copies are seen by nobody who could sum them.
        self._copies = not plan.checksums

    def carry(self, number: int) -> int:
        """Write one block; returns its size. Raises CorruptionError, StorageError."""
        block = self.plan.blocks[number]
        window = self._window[: block.end - block.start]
        copied, rest = self._copy(block, self.plan.pieces(number))
        position = block.start
        if sum(end - start for start, end in copied) < len(window):
            self.plan.assemble(block, rest, self.inputs, window, self._dense)
        for start, end in [*sorted(copied), (block.end, block.end)]:
            if start > position:
                self.files.write(block.file, position, [window[position - block.start : start - block.start]])
            position = end
        return len(window)

    def _copy(self, block: Block, pieces: Sequence[_Piece]) -> tuple[list[tuple[int, int]], list[_Piece]]:
        """Ranges of the output file that the system copied, and the pieces that it did not."""
        copied, rest = [], []
        for piece in pieces:
            done = 0
            if self._copies and piece.is_run and piece.count >= _COPIED_BYTES:
                source = self.inputs.descriptor(piece.chunk.file)
                done = self.files.copy(block.file, piece.start, source, piece.offset, piece.count)
                copied.append((piece.start, piece.start + done))
                # Where it cannot, it is not asked again.
                self._copies = done == piece.count
            if done < piece.count:
                rest.append(replace(piece, skip=piece.skip + done, count=piece.count - done))
        return copied, rest


def _drain(
    plan: _MergePlan, queues: Sequence[deque[int]], files: FileSet, failures: list[BaseException], meter: Meter
) -> None:
    carrier = _Carrier(plan, files)
    try:
        for number in _taken(queues, failures):
            meter.add(carrier.carry(number))
    except BaseException as error:
        # Of any class: what ends a helper's thread in silence leaves a block unwritten.
        failures.append(error)
    finally:
        carrier.inputs.close()


def _taken(queues: Sequence[deque[int]], failures: Sequence[BaseException]) -> Iterator[int]:
    """A thread's own blocks, then what other threads have left, until any thread failed."""
    for queue in queues:
        while not failures:
            try:
                number = queue.popleft()
            except IndexError:
                break
            yield number


def merge(job: MergeJob, folder: StagedFolder, progress: Progress | None = None) -> list[Part]:
    """Write this rank's share of the blocks of all files, with all threads in every file."""
    plan = _MergePlan(job)
    first, last = (len(plan.blocks) * rank // job.rank_count for rank in (job.rank, job.rank + 1))
    queues = plan.share(first, last, max(min(job.thread_count, last - first), 1))
    failures: list[BaseException] = []
    meter = Meter(progress, sum(block.end - block.start for block in plan.blocks[first:last]))
    files = FileSet(folder.path, plan.names)
    threads = [
        threading.Thread(target=_drain, args=(plan, queues[i:] + queues[:i], files, failures, meter))
        for i in range(1, len(queues))
    ]
    for thread in threads:
        thread.start()
    _drain(plan, queues, files, failures, meter)
    for thread in threads:
        thread.join()
    try:
        files.close(durable=folder.durable and not failures)
    except OSError as error:
        failures.append(error)
    if failures:
        raise failures[0]
    return joined(plan.sums)


def consolidate_safetensors_files(
    input_dir: StrPath,
    output_dir: StrPath,
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    num_threads: int = 1,
) -> None:
    """See ``refimpl.checkpoint.consolidate_safetensors_files``. Threads share the work inside every file."""
    shards.consolidate(merge, input_dir, output_dir, fqn_to_index_mapping, num_threads, crc=ops.crc32)


def consolidate_with_progress(
    input_dir: StrPath,
    output_dir: StrPath,
    mapping: Mapping[str, int] | None,
    *,
    num_threads: int,
    max_shard_size: int | None = None,
    progress: Progress,
) -> None:
    """``consolidate_safetensors_files`` that also splits by size and calls ``progress(done_bytes, total_bytes)``."""
    shards.consolidate(
        partial(merge, progress=progress),
        input_dir,
        output_dir,
        mapping,
        num_threads,
        max_shard_size=max_shard_size,
        crc=ops.crc32,
    )


def consolidate_safetensors_files_on_every_rank(
    input_dir: StrPath,
    output_dir: StrPath,
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    num_threads: int = 1,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """As ``consolidate_safetensors_files``, with the blocks of all files shared out among the ranks of a group.

    Raises:
        DistributedError: another rank failed; the rank at fault raises its own error. The output is then as before.
    """
    shards.consolidate(
        merge,
        input_dir,
        output_dir,
        fqn_to_index_mapping,
        num_threads,
        process_group=process_group,
        on_every_rank=True,
        crc=ops.crc32,
    )
