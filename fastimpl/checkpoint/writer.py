"""The fast writer: every rank writes once, straight to the final offsets of the final files.

There is no shard folder and no merge pass. The coordinator plans blocks (``plan``), each rank learns its own part
(``wire``), short runs are exchanged (``exchange``), and each block is one write (``blockio``, ``run``).
"""

from __future__ import annotations

import array
import errno
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from fastimpl import ops
from fastimpl.checkpoint.blockio import LocalPart
from fastimpl.checkpoint.device_copies import ChooseCopies, CopyStarts, copies_for_device
from fastimpl.checkpoint.exchange import Exchange
from fastimpl.checkpoint.geometry import Geometry, geometry
from fastimpl.checkpoint.pause import collector_paused
from fastimpl.checkpoint.plan import BlockRules, plan_blocks
from fastimpl.checkpoint.replicas import chunk_key, find_holders
from fastimpl.checkpoint.run import FileSet, Runner, SaveStats
from fastimpl.checkpoint.single import file_bytes
from fastimpl.checkpoint.source import LazySource, RowReader, Source
from fastimpl.checkpoint.wire import OwnBlock, PackedPlan, RankPlan, pack_plans, unpack_plan
from twinproof.checkpoint import dcp
from twinproof.checkpoint.catalog import Part, joined
from twinproof.checkpoint.format import check_storable
from twinproof.checkpoint.plan import GlobalPlan, SaveJob, exported_dtype
from twinproof.checkpoint.planners import check_planned
from twinproof.checkpoint.publish import StagedFolder, rank_count_of
from twinproof.errors import PlanError

__all__ = ["HuggingFaceStorageWriter", "PlannedWrites"]

logger = logging.getLogger("twinproof.checkpoint")

_NO_RANDOM_ACCESS = {errno.ESPIPE, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}

Instruction = tuple[PackedPlan, Sequence[str], bool]  # The rank's plan, names of the files, whether writes go in order.


class PlannedWrites:
    """The ``SaveEngine`` that writes each byte once, at its offset, from the rank that holds it or a neighbour of it.

    Attributes:
        choose_copies: how bytes come from a device; pinned double buffers for CUDA.
        stats: of the last save; zeros before the first.
    """

    def __init__(self) -> None:
        self.choose_copies: ChooseCopies = copies_for_device
        self.stats = SaveStats()

    def announce(self, items: Sequence[WriteItem]) -> bytes:
        """Which chunks this rank holds: torch's removal of duplicates keeps each on one plan only."""
        self.stats = SaveStats()
        return array.array("Q", map(_item_key, items)).tobytes()

    def instruct(self, plan: GlobalPlan) -> list[Instruction]:
        """Plan every write and every message."""
        mode = plan.options.write_mode
        sequential = mode == "sequential" or (mode == "auto" and not _has_random_access(plan.folder.path))
        rules = BlockRules.of(plan.options.block_bytes, sequential=sequential)
        holders = find_holders(plan.arrangement, plan.announced)
        pieces = plan_blocks(plan.arrangement, plan.rank_count, rules, holders)
        packed = pack_plans(pieces, list(plan.arrangement.files.values()))
        names = list(plan.arrangement.files)
        return [(part, names, sequential) for part in packed]

    def prepare(self, job: SaveJob, instruction: Instruction, folder: StagedFolder) -> tuple[Runner, bool]:
        """Unpack this rank's plan and find the data that it names; nothing is sent or written yet."""
        packed, names, sequential = instruction
        rank_plan = unpack_plan(packed)
        items = _items(rank_plan, job.items, job.local_items)
        sources = {key: _source(item, job) for key, item in items.items()}
        parts = _parts(rank_plan, items, sources, job)
        starts = CopyStarts(self.choose_copies, [source.device for source in sources.values()])
        runner = Runner(
            rank_plan,
            parts,
            FileSet(folder.path, names, sequential),
            Exchange(job.group, *_by_turn(rank_plan, parts, job.rank), starts),
            rank=job.rank,
            rank_count=rank_count_of(job.group),
            thread_count=job.options.thread_count,
            starts=starts,
            checksums=job.options.checksums,
            progress=job.options.progress,
        )
        self.stats = runner.stats
        self.stats.plan_s, self.stats.plan_bytes = time.perf_counter() - job.begun_s, packed.size_bytes
        return runner, folder.durable

    def write(self, prepared: tuple[Runner, bool]) -> list[Part]:
        """Write this rank's blocks. A rank that fails goes on sending messages of the planned length."""
        runner, durable = prepared
        failure: BaseException | None = None
        try:
            runner.run()
        except BaseException as error:
            failure = error
        begun_s = time.perf_counter()
        try:
            runner.files.close(durable=durable and failure is None)
        except BaseException as error:
            failure = failure or error
        self.stats.fsync_s = time.perf_counter() - begun_s
        if failure is not None:
            raise failure
        return joined(runner.sums)

    file_bytes = staticmethod(file_bytes)


class HuggingFaceStorageWriter(dcp.HuggingFaceStorageWriter, engine=PlannedWrites):
    """A ``StorageWriter`` for ``dcp.save`` and ``dcp.async_save`` that writes final HF files once.

    Takes the arguments of ``twinproof.checkpoint.dcp.HuggingFaceStorageWriter``.
    """

    _engine: PlannedWrites
    _crc32 = staticmethod(ops.crc32)

    @property
    def choose_copies(self) -> ChooseCopies:
        """How bytes come from a device; pinned double buffers for CUDA."""
        return self._engine.choose_copies

    @choose_copies.setter
    def choose_copies(self, choose: ChooseCopies) -> None:
        self._engine.choose_copies = choose

    @property
    def stats(self) -> SaveStats:
        """Of the last save; zeros before the first."""
        return self._engine.stats

    @collector_paused()
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As the shared writer; a plan is many small objects."""
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """As the shared writer; logs the phase times."""
        begun_s = time.perf_counter()
        super().finish(metadata, results)
        self.stats.publish_s = time.perf_counter() - begun_s
        logger.info("saved %s: %s", self.path, self.stats)


def _source(item: WriteItem, job: SaveJob) -> Source:
    data = item.tensor_data
    assert data is not None
    reader = _reader_of(item, job.planner)
    if reader is not None:
        stored = data.properties.dtype
        target = exported_dtype(item.index.fqn, stored, job.options)
        return LazySource(reader, data.chunk.offsets, data.chunk.sizes, stored, target)
    value = job.planner.resolve_data(item)
    assert isinstance(value, torch.Tensor)
    check_storable(value, item.index.fqn)
    check_planned(item, value)
    return Source(value, exported_dtype(item.index.fqn, value.dtype, job.options))


def _parts(
    plan: RankPlan, items: dict[int, WriteItem], sources: dict[int, Source], job: SaveJob
) -> list[list[LocalPart]]:
    """For each block, the local bytes in it."""
    parts: list[list[LocalPart]] = [[] for _ in plan.blocks]
    shapes: dict[int, Geometry] = {}
    for piece in plan.pieces:
        geo = shapes.get(piece.item)
        if geo is None:
            data = items[piece.item].tensor_data
            assert data is not None
            dtype = exported_dtype(items[piece.item].index.fqn, data.properties.dtype, job.options)
            geo = shapes[piece.item] = geometry(data.size, data.chunk.offsets, data.chunk.sizes, dtype.itemsize)
        block = plan.blocks[piece.block]
        skip = geo.held_before(block.start - piece.begin)
        count = geo.held_before(block.end - piece.begin) - skip
        parts[piece.block].append(LocalPart(sources[piece.item], geo, piece.begin, skip, count))
    return parts


def _reader_of(item: WriteItem, planner: SavePlanner) -> RowReader | None:
    # A planner that looks data up in its own way is asked, and may hand out whole chunks.
    if not isinstance(planner, DefaultSavePlanner) or type(planner).resolve_data is not DefaultSavePlanner.resolve_data:
        return None
    value = planner.state_dict.get(item.index.fqn)
    return value if isinstance(value, RowReader) else None


def _item_key(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return chunk_key(item.index.fqn, item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes)


def _chunk_of(item: WriteItem) -> tuple[str, tuple[int, ...]]:
    # A planner may leave the offsets out of the item's index.
    assert item.tensor_data is not None
    return item.index.fqn, tuple(item.tensor_data.chunk.offsets)


def _items(plan: RankPlan, items: Sequence[WriteItem], local_items: Sequence[WriteItem]) -> dict[int, WriteItem]:
    """Plan item number -> write item, for every item that the plan uses."""
    by_chunk = {_chunk_of(item): item for item in local_items} if plan.replicas else {}
    used = dict.fromkeys(piece.item for piece in plan.pieces)
    return {number: items[number] if number >= 0 else _replica(plan.replicas[-1 - number], by_chunk) for number in used}


def _replica(
    chunk: tuple[str, tuple[int, ...]], by_chunk: Mapping[tuple[str, tuple[int, ...]], WriteItem]
) -> WriteItem:
    if chunk not in by_chunk:
        got, expected = f"nothing at {list(chunk[1])}", "the chunk that this rank had when the save was planned"
        raise PlanError("this rank lacks a replica that it is to write", got=got, expected=expected, where=chunk[0])
    return by_chunk[chunk]


def _by_turn(
    plan: RankPlan, parts: Sequence[Sequence[LocalPart]], rank: int
) -> tuple[dict[int, OwnBlock], dict[int, list[tuple[OwnBlock, Sequence[LocalPart]]]]]:
    owned = {block.turn: block for block in plan.blocks if block.owner == rank and block.turn >= 0}
    foreign: dict[int, list[tuple[OwnBlock, Sequence[LocalPart]]]] = {}
    for block, content in zip(plan.blocks, parts, strict=True):
        if block.owner != rank:
            foreign.setdefault(block.turn, []).append((block, content))
    return owned, foreign


def _has_random_access(folder: Path) -> bool:
    """Whether a file there can be written back to front; object-store mounts often refuse."""
    probe = folder / ".probe"
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, b"\0", 4096)
        os.pwrite(descriptor, b"\0", 0)
    except OSError as error:
        if error.errno in _NO_RANDOM_ACCESS:
            return False
        raise
    finally:
        os.close(descriptor)
        os.unlink(probe)
    return True
