"""Shard folders that torch already wrote, turned into final HF files in large blocks, read and written once.

The blocks are those of a save (``plan``); the sources are ranges of the shard files instead of tensors. A block's
part of a chunk is one contiguous range of its shard file. Nothing is read twice, and no tensor is held whole.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
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
from twinproof.checkpoint.catalog import Box, Chunk, Meter, Progress
from twinproof.checkpoint.checksums import Part, joined
from twinproof.checkpoint.format import StrPath, buffer_of
from twinproof.checkpoint.plan import Arrangement, GlobalTensor
from twinproof.checkpoint.publish import StagedFolder, storage_error
from twinproof.checkpoint.shards import MergeJob, record_dtype
from twinproof.errors import CorruptionError

__all__ = ["consolidate_safetensors_files", "consolidate_safetensors_files_on_every_rank"]

# Input files that one thread keeps open: many shards must not exhaust the process's descriptors.
_OPEN_MAX = regime(32, 2)
_RULES = BlockRules.of(1 << 20)  # Blocks of 2 MiB stay in a core's cache between reading and writing.


class _Inputs:
    """Input files of one thread, least recently used closed first."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()

    def read(self, file: str, offset: int, target: torch.Tensor) -> None:
        """Fill ``target``, uint8, from a file offset. Raises StorageError, CorruptionError."""
        if file in self._open:
            self._open.move_to_end(file)
        else:
            if len(self._open) >= _OPEN_MAX:
                os.close(self._open.popitem(last=False)[1])
            try:
                self._open[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise storage_error(error, "opening", file) from error
        read_exactly(self._open[file], [buffer_of(target)], offset, file)

    def close(self) -> None:
        """Close all."""
        while self._open:
            os.close(self._open.popitem()[1])


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
        self.contents: list[list[tuple[int, int]]] = [[] for _ in plan.blocks]
        for source, begin, number in plan.pieces[0]:
            self.contents[number].append((source, begin))

    def share(self, first: int, last: int, ways: int) -> list[deque[int]]:
        """Blocks ``first`` to ``last`` in consecutive parts, so that writers mostly are in different files."""
        cuts = [first + (last - first) * i // ways for i in range(ways + 1)]
        return [deque(range(a, b)) for a, b in pairwise(cuts)]

    def assemble(
        self,
        block: Block,
        content: Sequence[tuple[int, int]],
        inputs: _Inputs,
        window: torch.Tensor,
        dense: torch.Tensor,
    ) -> None:
        """Fill ``window`` with the block's bytes. Raises CorruptionError rather than leave a gap."""
        head = self.headers[block.file][block.start : block.end]
        buffer_of(window)[: len(head)] = head
        filled = len(head)
        for source, begin in content:
            chunk, geo = self.sources[source]
            skip = geo.held_before(block.start - begin)
            count = geo.held_before(block.end - begin) - skip
            first = begin + geo.locate(skip) - block.start
            is_run = skip // geo.run_bytes == (skip + count - 1) // geo.run_bytes
            target = window[first : first + count] if is_run else dense[:count]
            inputs.read(chunk.file, chunk.begin + skip, target)
            if self.checksums:
                # Appending to a list is atomic.
                self.sums.append(Part(chunk.file, chunk.begin, skip, count, ops.crc32(target)))
            if not is_run:
                ops.place_rectangles(window, block.start, target, torch.tensor(geo.descriptor(begin, skip, count)))
            filled += count
        if filled != block.end - block.start:
            raise CorruptionError(
                "a block would be written with missing bytes",
                got=filled,
                expected=block.end - block.start,
                where=self.names[block.file],
            )
        if self.checksums:
            bases = {begin for _, begin in content}
            header_bytes = len(self.headers[block.file])
            self.sums += piece_sums(self.names[block.file], block.start, header_bytes, bases, [window])


def _drain(
    plan: _MergePlan, queues: Sequence[deque[int]], files: FileSet, failures: list[BaseException], meter: Meter
) -> None:
    inputs = _Inputs()
    window = torch.empty(_RULES.direct_max_bytes, dtype=torch.uint8)
    dense = torch.empty(_RULES.direct_max_bytes, dtype=torch.uint8)
    try:
        for number in _taken(queues, failures):
            block = plan.blocks[number]
            size_bytes = block.end - block.start
            plan.assemble(block, plan.contents[number], inputs, window[:size_bytes], dense)
            files.write(block.file, block.start, [window[:size_bytes]])
            meter.add(size_bytes)
    except BaseException as error:
        # Of any class: what ends a helper's thread in silence leaves a block unwritten.
        failures.append(error)
    finally:
        inputs.close()


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
    progress: Progress | None = None,
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
