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
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fastimpl.checkpoint.blockio import LocalPart
from fastimpl.checkpoint.exchange import Exchange
from fastimpl.checkpoint.geometry import Geometry, geometry
from fastimpl.checkpoint.plan import BlockRules, plan_blocks
from fastimpl.checkpoint.replicas import chunk_key, find_holders
from fastimpl.checkpoint.run import FileSet, Runner, SaveStats
from fastimpl.checkpoint.source import LazySource, RowReader, Source
from fastimpl.checkpoint.staging import ChooseCopies, copies_for_device
from fastimpl.checkpoint.wire import OwnBlock, PackedPlan, RankPlan, pack_plans, unpack_plan
from twinproof.checkpoint.arrange import exported_dtype
from twinproof.checkpoint.base import WriterBase
from twinproof.checkpoint.memory import check_storable
from twinproof.checkpoint.outcome import raise_first, write_results
from twinproof.checkpoint.shards import save_shards
from twinproof.errors import PlanError

__all__ = ["HuggingFaceStorageWriter"]

logger = logging.getLogger("twinproof.checkpoint")

_NO_RANDOM_ACCESS = {errno.ESPIPE, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class HuggingFaceStorageWriter(WriterBase):
    """A ``StorageWriter`` for ``dcp.save`` and ``dcp.async_save`` that writes final HF files once.

    Takes the arguments of ``refimpl.checkpoint.HuggingFaceStorageWriter``.

    Attributes:
        choose_copies: how bytes come from a device; pinned double buffers for CUDA.
    """

    choose_copies: ChooseCopies = staticmethod(copies_for_device)

    _held: Sequence[bytes] = ()

    @cached_property
    def stats(self) -> SaveStats:
        """Of the last save; zeros before the first."""
        return SaveStats()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Besides the checks, say which chunks this rank holds: torch's dedup keeps each on one plan only."""
        plan = super().prepare_local_plan(plan)
        keys = array.array("Q", map(_item_key, plan.items))
        return SavePlan(plan.items, keys.tobytes(), plan.planner_data, plan.usable)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Lay out the files; torch's plans go back without anything of ours."""
        plans = super().prepare_global_plan(plans)
        self._held = [plan.storage_data or b"" for plan in plans] if self.arrangement is not None else []
        return [SavePlan(plan.items, None, plan.planner_data, plan.usable) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's blocks. Every rank raises when any rank failed, and nothing becomes visible."""
        self.stats = SaveStats()
        if self.options.writes_shards:
            save_shards(self, plan, planner)
        else:
            self._save(plan, planner)
        future: Future[list[WriteResult]] = Future()
        future.set_result(write_results(plan.items, self.arrangement))
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index and show the checkpoint at one instant; the coordinator only."""
        begun = time.perf_counter()
        super().finish(metadata, results)
        self.stats.publish_s = time.perf_counter() - begun
        logger.info("saved %s: %s", self.path, self.stats)

    def _save(self, plan: SavePlan, planner: SavePlanner) -> None:
        begun = time.perf_counter()
        self.check_replicas(planner)
        packed, folder, names, sequential = self._plan(planner)
        failure: Exception | None = None
        rank_plan = unpack_plan(packed)
        items = _items(rank_plan, plan.items, self.local_items)
        sources: dict[int, Source] = {}
        try:
            sources = {key: self._source(item, planner) for key, item in items.items()}
        except Exception as error:
            failure = error
        parts = self._parts(rank_plan, items, sources)
        files = FileSet(folder, names, sequential)
        exchange = Exchange(self.group, *_by_turn(rank_plan, parts, self.rank), self.choose_copies)
        threads, rank_count = self.options.thread_count, 1 if self.group is None else dist.get_world_size(self.group)
        runner = Runner(
            rank_plan,
            parts,
            files,
            exchange,
            rank=self.rank,
            rank_count=rank_count,
            thread_count=threads,
            failure=failure,
            choose_copies=self.choose_copies,
        )
        plan_s = time.perf_counter() - begun
        try:
            runner.run()
        except Exception as error:
            failure = error
        begun = time.perf_counter()
        try:
            files.close(durable=self.options.durable and failure is None)
        except Exception as error:
            failure = failure or error
        self.stats = runner.stats
        self.stats.plan_s, self.stats.plan_bytes, self.stats.fsync_s = (
            plan_s,
            packed.size_bytes,
            time.perf_counter() - begun,
        )
        self.settle(failure)

    def _plan(self, planner: SavePlanner) -> tuple[PackedPlan, Path, Sequence[str], bool]:
        """Coordinator: plan and make the staging folder. Every rank: receive its part, or the coordinator's error."""
        messages: list[Any] = []
        failure: Exception | None = None
        count = 1 if self.group is None else dist.get_world_size(self.group)
        if self.is_coordinator:
            try:
                messages = self._plan_all(planner, count)
            except Exception as error:
                failure = error
                messages = [error] * count
        if self.group is None:
            received = messages
        else:
            received = [None]
            dist.scatter_object_list(received, messages or None, group_src=0, group=self.group)
        if failure is not None:
            raise failure
        if isinstance(received[0], Exception):
            raise_first([received[0]])
        result: tuple[PackedPlan, Path, Sequence[str], bool] = received[0]
        return result

    def _plan_all(self, planner: SavePlanner, rank_count: int) -> list[Any]:
        arrangement = self.arranged(planner)
        folder = self.open_staging()
        try:
            mode = self.options.write_mode
            sequential = mode == "sequential" or (mode == "auto" and not _has_random_access(folder))
            rules = BlockRules.of(self.options.block_bytes, sequential=sequential)
            pieces = plan_blocks(arrangement, rank_count, rules, find_holders(arrangement, self._held))
            packed = pack_plans(pieces, list(arrangement.files.values()))
        except BaseException:
            self.discard_staging()
            raise
        names = list(arrangement.files)
        return [(part, folder, names, sequential) for part in packed]

    def _source(self, item: WriteItem, planner: SavePlanner) -> Source:
        data = item.tensor_data
        assert data is not None
        reader = _reader_of(item, planner)
        if reader is not None:
            stored = data.properties.dtype
            target = exported_dtype(item.index.fqn, stored, self.options)
            return LazySource(reader, data.chunk.offsets, data.chunk.sizes, stored, target)
        value = planner.resolve_data(item)
        assert isinstance(value, torch.Tensor)
        check_storable(value, item.index.fqn)
        if tuple(value.shape) != tuple(data.chunk.sizes) or value.dtype != data.properties.dtype:
            got = f"{value.dtype} {list(value.shape)}"
            raise PlanError(
                "the data is not what was planned",
                got=got,
                expected=f"{data.properties.dtype} {list(data.chunk.sizes)}",
                where=item.index.fqn,
            )
        return Source(value, exported_dtype(item.index.fqn, value.dtype, self.options))

    def _parts(self, plan: RankPlan, items: dict[int, WriteItem], sources: dict[int, Source]) -> list[list[LocalPart]]:
        """For each block, the local bytes in it. Needs no data, so that a failed rank can still keep to the plan."""
        parts: list[list[LocalPart]] = [[] for _ in plan.blocks]
        shapes: dict[int, Geometry] = {}
        for piece in plan.pieces:
            geo = shapes.get(piece.item)
            if geo is None:
                data = items[piece.item].tensor_data
                assert data is not None
                dtype = exported_dtype(items[piece.item].index.fqn, data.properties.dtype, self.options)
                geo = shapes[piece.item] = geometry(data.size, data.chunk.offsets, data.chunk.sizes, dtype.itemsize)
            block = plan.blocks[piece.block]
            skip = geo.held_before(block.start - piece.begin)
            count = geo.held_before(block.end - piece.begin) - skip
            parts[piece.block].append(LocalPart(sources.get(piece.item), geo, piece.begin, skip, count))
        return parts


def _reader_of(item: WriteItem, planner: SavePlanner) -> RowReader | None:
    # A planner that looks data up in its own way is asked, and may hand out whole chunks.
    if not isinstance(planner, DefaultSavePlanner) or type(planner).resolve_data is not DefaultSavePlanner.resolve_data:
        return None
    value = planner.state_dict.get(item.index.fqn)
    return value if isinstance(value, torch.Tensor) and isinstance(value, RowReader) else None


def _item_key(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return chunk_key(item.index.fqn, item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes)


def _items(plan: RankPlan, items: Sequence[WriteItem], local_items: Sequence[WriteItem]) -> dict[int, WriteItem]:
    """Plan item number -> write item, for every item that the plan uses."""
    by_chunk = {(item.index.fqn, tuple(item.index.offset or ())): item for item in local_items} if plan.replicas else {}
    used = dict.fromkeys(piece.item for piece in plan.pieces)
    return {number: items[number] if number >= 0 else by_chunk[plan.replicas[-1 - number]] for number in used}


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
