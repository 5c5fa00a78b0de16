"""Skip-gram with negative samples, as word2vec does it, on rows that live in a store.

Every value of a sample's gradient is made by operations that round once and look at one element, so that its bits do
not depend on which samples a rank works on; the sigmoid is word2vec's table for the same reason.
"""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from conformance.harness import Rank, assert_equal
from conformance.kvstore.corpus import CONTEXTS, Corpus
from conformance.kvstore.sharded import ShardedRows, recut
from refimpl.optimizers import row_sum

__all__ = ["Job", "Plan", "killed_run", "recut_run", "resumed_run", "single_run"]

EMBEDDING_DIM = 16
EPOCH, STEP_SECONDS = 1_700_000_000, 60
STEP_KEY = "job.step"
_REACH, _CELLS = 6.0, 1000
_MIDDLES = ((cell + 0.5) / _CELLS * 2 * _REACH - _REACH for cell in range(_CELLS))
_SIGMOID = torch.tensor([1 / (1 + math.exp(-middle)) for middle in _MIDDLES])
_LABELS = torch.tensor([1.0] + [0.0] * (CONTEXTS - 1))


@dataclass(frozen=True)
class Plan:
    """The whole job: samples of a step over all ranks, steps, when it is saved and killed, and what is evicted when.

    Every ``evict_every`` steps those contexts go that were not seen for ``contexts_ttl_steps``, and those inputs that
    were seen once, more than ``inputs_ttl_steps`` ago. A step takes a minute of the injected clock.
    """

    batch: int
    step_count: int
    saved_after: int
    killed_after: int
    evict_every: int
    inputs_ttl_steps: int
    contexts_ttl_steps: int
    bucket_count: int = 1024

    @classmethod
    def of(cls, step_count: int, batch: int = 20_000) -> Plan:
        """A plan that keeps most inputs, and evicts before it saves and after."""
        half = step_count // 2
        return cls(batch, step_count, half, min(half + 3, step_count), 5, step_count * 17 // 20, 4)

    @property
    def sample_count(self) -> int:
        """Samples of the whole job."""
        return self.batch * self.step_count


@dataclass(frozen=True)
class Done:
    """What one rank did: rows of its store, rows evicted, ids looked up, its share of the mean distance between labels
    and predictions in its first and last step, seconds of training, saving and loading.
    """

    row_count: int
    evicted_count: int
    id_count: int
    errors: tuple[float, float]
    train_seconds: float
    save_seconds: float = 0.0
    load_seconds: float = 0.0


def gradients(
    center: torch.Tensor, contexts: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the mean loss over ``count`` samples: for centers [n, D], for contexts [n, 3, D], the first one true, and for
    the scores [n, 3].
    """
    scores = torch.stack([row_sum(center * contexts[:, slot])[:, 0] for slot in range(CONTEXTS)], dim=1)
    cells = ((scores + _REACH) * (_CELLS / (2 * _REACH))).clamp(0, _CELLS - 1).to(torch.int64)
    errors = (_SIGMOID[cells] - _LABELS) / count
    for_center = torch.zeros_like(center)
    for slot in range(CONTEXTS):
        for_center = for_center + errors[:, slot, None] * contexts[:, slot]
    return for_center, errors[:, :, None] * center[:, None], errors


class Job:
    """One process's part of the training: its rows, its place in the stream, its clock.

    Args:
        kvstore: the implementation.
        plan: see Plan.
        corpus: the samples.
    """

    def __init__(self, kvstore: Any, plan: Plan, corpus: Corpus) -> None:
        self.plan, self.corpus, self._kvstore = plan, corpus, kvstore
        self.step, self.id_count, self.errors = 0, 0, list[float]()
        layout = kvstore.RowLayout(EMBEDDING_DIM, optimizer="partial_rowwise_adam")
        self.buckets = kvstore.Buckets(plan.bucket_count)
        self.store = kvstore.KVStore(
            {"inputs": layout, "contexts": layout},
            optimizer_in_row=True,
            return_whole_row=True,
            seed=3,
            initializer=kvstore.Initializer.uniform(-1 / 32, 1 / 32),
            eviction={
                "inputs": kvstore.EvictionPolicy.ttl_count(plan.inputs_ttl_steps * STEP_SECONDS, 2),
                "contexts": kvstore.EvictionPolicy.ttl(plan.contexts_ttl_steps * STEP_SECONDS),
            },
            clock=lambda: EPOCH + STEP_SECONDS * self.step,
        )
        self.join(None, 0, 1)

    def join(self, group: Any, rank: int, world_size: int) -> None:
        """Work on every ``world_size``-th sample; alone on a plain store, else on one that is dealt to the group."""
        self._rank, self._world_size, kvstore = rank, world_size, self._kvstore
        self._shared = None if world_size == 1 else ShardedRows(kvstore, self.store, self.buckets, group)
        rows = self.store if self._shared is None else self._shared
        self._inputs = kvstore.KVEmbeddingBag(rows, table="inputs", mode="mean", lr=0.02)
        self._contexts = kvstore.KVEmbedding(rows, table="contexts", lr=0.02)
        self._inputs.step_count = self._contexts.step_count = self.step

    def train(self, last: int) -> float:
        """Steps up to ``last``; returns seconds."""
        begun = time.perf_counter()
        while self.step < last:
            first = self.step * self.plan.batch
            samples = torch.arange(first + self._rank, first + self.plan.batch, self._world_size)
            if self._shared is not None:
                self._shared.begin(samples)
            center = self._inputs(self.corpus.bags[samples])
            contexts = self._contexts(self.corpus.contexts(samples))
            for_center, for_contexts, errors = gradients(center.detach(), contexts.detach(), self.plan.batch)
            torch.autograd.backward([center, contexts], [for_center, for_contexts])
            self.errors.append(float(errors.abs().sum()) / CONTEXTS)
            self.step += 1
            self.id_count += center.shape[0] * (self.corpus.bags.shape[1] + CONTEXTS)
            if self.step % self.plan.evict_every == 0:
                self.store.evict()
        return time.perf_counter() - begun

    def save(self, path: str) -> float:
        """Whole rows and the step; returns seconds."""
        begun = time.perf_counter()
        self._kvstore.save(self.store, path, buckets=self.buckets, metadata={STEP_KEY: str(self.step)}, durable=False)
        return time.perf_counter() - begun

    def load(self, path: str) -> float:
        """The rows that this rank owns, and the step; returns seconds. Before ``join``."""
        begun = time.perf_counter()
        self._kvstore.load(self.store, path)
        self.step = int(self._kvstore.SavedRows(path).catalog.metadata[STEP_KEY])
        return time.perf_counter() - begun

    def write_rows(self, path: Path) -> int:
        """All rows as they are, for comparing; returns how many."""
        tensors: dict[str, torch.Tensor] = {}
        for table in self.store.tables:
            ids = self.store.ids(table)
            tensors |= {f"{table}.ids": ids, f"{table}.rows": self.store.get_rows(table, ids)}
        safetensors.torch.save_file(tensors, path)
        return sum(self.store.size(table) for table in self.store.tables)

    def done(self, folder: str, rank: int, **seconds: float) -> Done:
        """Write the rows to the folder, and close."""
        row_count = self.write_rows(Path(folder) / f"rank{rank}.safetensors")
        evicted_count = self.store.stats().evicted_count
        self.store.close()
        return Done(row_count, evicted_count, self.id_count, (self.errors[0], self.errors[-1]), **seconds)


def _job(rank: Rank, plan: Plan, corpus: str, threads: int = 1) -> Job:
    torch.set_num_threads(threads)
    return Job(rank.component("kvstore"), plan, Corpus.load(corpus))


def single_run(rank: Rank, plan: Plan, corpus: str, checkpoint: str, folder: str) -> Done:
    """The whole job on one rank and a plain store, by two threads; saves half-way as well."""
    job = _job(rank, plan, corpus, 2)
    try:
        trained = job.train(plan.saved_after)
        saved = job.save(checkpoint)
        trained += job.train(plan.step_count)
        return job.done(folder, 0, train_seconds=trained, save_seconds=saved)
    finally:
        torch.set_num_threads(1)


def killed_run(rank: Rank, plan: Plan, corpus: str, checkpoint: str, note: str) -> None:
    """Saves half-way, notes how long that took, trains on and dies by SIGKILL, without a word."""
    job = _job(rank, plan, corpus)
    job.join(rank.group, rank.rank, rank.world_size)
    trained = job.train(plan.saved_after)
    saved = job.save(checkpoint)
    Path(f"{note}.{rank.rank}").write_text(f"{trained} {saved} {job.id_count}")
    job.train(plan.killed_after)
    os.kill(os.getpid(), signal.SIGKILL)


def resumed_run(rank: Rank, plan: Plan, corpus: str, checkpoint: str, folder: str) -> Done:
    """Goes on from what was saved, on as many ranks as there are now."""
    job = _job(rank, plan, corpus)
    loaded = job.load(checkpoint)
    assert_equal(job.step, plan.saved_after, where="the step that was saved")
    job.join(rank.group, rank.rank, rank.world_size)
    return job.done(folder, rank.rank, train_seconds=job.train(plan.step_count), load_seconds=loaded)


def recut_run(rank: Rank, plan: Plan, corpus: str, folder: str) -> Done:
    """Never stops: all ranks but the last begin, and deal their rows anew to all in memory, half-way."""
    job = _job(rank, plan, corpus)
    first = torch.distributed.new_group(list(range(rank.world_size - 1)))
    trained = 0.0
    if rank.rank < rank.world_size - 1:
        job.join(first, rank.rank, rank.world_size - 1)
        trained = job.train(plan.saved_after)
    job.step = plan.saved_after
    recut(rank.component("kvstore"), job.store, job.buckets, rank.group)
    job.join(rank.group, rank.rank, rank.world_size)
    return job.done(folder, rank.rank, train_seconds=trained + job.train(plan.step_count))
