"""The fast reader: what DCP asks for becomes read jobs, carried out by ``readio``."""

from __future__ import annotations

import logging
import time
from functools import cached_property

import torch
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from fastimpl.checkpoint.geometry import geometry
from fastimpl.checkpoint.readio import LoadStats, ReadJob, run_jobs
from fastimpl.checkpoint.staging import ChooseCopies, copies_for_device
from twinproof.checkpoint.layout import torch_dtype
from twinproof.checkpoint.reader_base import ReaderBase

__all__ = ["HuggingFaceStorageReader"]

logger = logging.getLogger("twinproof.checkpoint")


class HuggingFaceStorageReader(ReaderBase):
    """A ``StorageReader`` for ``dcp.load`` that reads HF files and torch's shard folders.

    Takes the arguments of ``refimpl.checkpoint.HuggingFaceStorageReader``.

    Attributes:
        choose_copies: how bytes go to a device; pinned double buffers for CUDA.
    """

    choose_copies: ChooseCopies = staticmethod(copies_for_device)

    @cached_property
    def stats(self) -> LoadStats:
        """Seconds, bytes and calls of this rank's last load; zeros before the first."""
        return LoadStats()

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill every target in place; nothing is written before all targets were checked."""
        begun = time.perf_counter()
        targets = self.targets(plan, planner)
        jobs, lazy = [], []
        for item, target in targets:
            memory = target
            if target.is_conj() or target.is_neg():
                # A lazily conjugated view has no memory of its own to fill.
                memory = torch.empty(target.shape, dtype=target.dtype, device=target.device)
                lazy.append((target, memory))
            chunk = self.chunk_of(item.storage_index)
            dtype = torch_dtype(self.catalog.tensors[item.storage_index.fqn].dtype)
            assert dtype is not None
            if 0 not in item.lengths:
                geo = geometry(chunk.sizes, item.storage_offsets, item.lengths, dtype.itemsize)
                jobs.append(ReadJob(chunk.file, chunk.begin, geo, memory, dtype))
        planned = time.perf_counter()
        self.stats = run_jobs(jobs, self.thread_count, self.choose_copies)
        for target, memory in lazy:
            target.copy_(memory)
        for item, target in targets:
            planner.commit_tensor(item, target)
        self.stats.plan_s, self.stats.read_s = planned - begun, time.perf_counter() - planned
        logger.info("loaded %s: %s", self.path, self.stats)
        future: Future[None] = Future()
        future.set_result(None)
        return future
