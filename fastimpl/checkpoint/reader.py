"""The fast reader: what DCP asks for becomes read jobs, carried out by ``readio``."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from fastimpl import ops
from fastimpl.checkpoint.device_copies import ChooseCopies, copies_for_device
from fastimpl.checkpoint.geometry import geometry
from fastimpl.checkpoint.pause import collector_paused
from fastimpl.checkpoint.readio import LoadStats, ReadJob, run_jobs
from twinproof.checkpoint import dcp
from twinproof.checkpoint.catalog import LoadJob

__all__ = ["HuggingFaceStorageReader", "ReadRanges"]

logger = logging.getLogger("twinproof.checkpoint")


class ReadRanges:
    """The ``LoadEngine`` that reads exactly the needed ranges, in parallel, into the caller's memory.

    Attributes:
        choose_copies: how bytes go to a device; pinned double buffers for CUDA.
        stats: seconds, bytes and calls of the last load; zeros before the first.
    """

    def __init__(self) -> None:
        self.choose_copies: ChooseCopies = copies_for_device
        self.stats = LoadStats()

    def read(self, job: LoadJob) -> None:
        """Fill every target in place."""
        jobs, lazy = [], []
        for wanted in job.ranges:
            target = memory = wanted.target
            if target.is_conj() or target.is_neg() or target.dtype.itemsize > 8:
                # A lazily conjugated view has no memory of its own to fill, and complex128 no integers of its width.
                memory = torch.empty(target.shape, dtype=wanted.dtype, device=target.device)
                lazy.append((target, memory))
            if 0 not in wanted.sizes:
                geo = geometry(wanted.chunk.sizes, wanted.offsets, wanted.sizes, wanted.dtype.itemsize)
                jobs.append(ReadJob(wanted.chunk.file, wanted.chunk.begin, geo, memory, wanted.dtype))
        # Their memory is filled past torch, so autograd has to be told; it may change even where the load fails.
        torch.autograd.graph.increment_version([wanted.target for wanted in job.ranges])
        planned_s = time.perf_counter()
        self.stats = run_jobs(jobs, job.thread_count, self.choose_copies, job.meter)
        for target, memory in lazy:
            target.copy_(memory)
        self.stats.plan_s, self.stats.read_s = planned_s - job.begun_s, time.perf_counter() - planned_s


class HuggingFaceStorageReader(dcp.HuggingFaceStorageReader, engine=ReadRanges):
    """A ``StorageReader`` for ``dcp.load`` that reads HF files and torch's shard folders.

    Takes the arguments of ``twinproof.checkpoint.dcp.HuggingFaceStorageReader``.
    """

    _engine: ReadRanges
    _crc32 = staticmethod(ops.crc32)

    @property
    def choose_copies(self) -> ChooseCopies:
        """How bytes go to a device; pinned double buffers for CUDA."""
        return self._engine.choose_copies

    @choose_copies.setter
    def choose_copies(self, choose: ChooseCopies) -> None:
        self._engine.choose_copies = choose

    @property
    def stats(self) -> LoadStats:
        """Seconds, bytes and calls of this rank's last load; zeros before the first."""
        return self._engine.stats

    @collector_paused()
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As the shared reader; shard folders have many headers."""
        return super().read_metadata(*args, **kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """As the shared reader; logs the phase times."""
        future = super().read_data(plan, planner)
        logger.info("loaded %s: %s", self.path, self.stats)
        return future
