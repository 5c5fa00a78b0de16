"""One training step of table-batched embeddings: pooling, backward and update, by this project and by its peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from conformance.harness import Mismatch, Rank
from perf.harness.paired import Round, Sample, interleave
from perf.harness.workloads import Workload
from perf.peers.fbgemm_bags import FbgemmBags, installed
from perf.peers.plain_bags import read_rows
from perf.peers.torch_bags import TorchBags
from perf.pipeline.tables import BAG_COUNT, EPS, LR, THREADS, OurBags, Plan, make_batch, make_tables

__all__ = ["measure_training"]


@dataclass
class _Batches:
    """A new batch for every run, and one gradient: multiples of 1/8, so that sums are exact in any order."""

    plan: Plan
    workload: Workload
    generator: torch.Generator

    def __post_init__(self) -> None:
        count, dim = self.workload.tensor_count, self.workload.shape[1]
        self.offsets = torch.arange(count * BAG_COUNT + 1) * self.plan.pooling
        grad = torch.empty(BAG_COUNT, count * dim).random_(0, 17, generator=self.generator)
        self.grad = grad.sub_(8).div_(8)

    def draw(self) -> torch.Tensor:
        """Ids."""
        return make_batch(self.plan, self.workload.tensor_count, self.workload.shape[0], self.generator)


def measure_training(
    plan: Plan, rank: Rank, workload: Workload, folder: str, round_count: int, seed: int
) -> list[Round]:
    """``seconds`` of a whole step, ``forward_seconds`` of its pooling alone.

    Ours is the public module, as the peers are. ``fbgemm`` and ``torch`` are peers; FBGEMM's tables lie in huge pages,
    as ours do, and in its own memory in ``fbgemm-plain``. ``one-thread`` is ``ours`` on one thread; ``read`` reads the
    rows of the batch from memory and does nothing with them. Every first pooling is compared with that of another
    contender, and some rows of every step of ours with the formula.
    """
    torch.set_num_threads(THREADS)
    tables = make_tables(workload.tensor_count, workload.shape, plan.dtype)
    batches = _Batches(plan, workload, torch.Generator().manual_seed(seed + 1))
    peers: dict[str, Any] = {}
    for name, has_huge_pages in (("fbgemm", True), ("fbgemm-plain", False)):
        if name in workload.contenders and installed():
            peers[name] = FbgemmBags(list(tables), plan.optimizer, LR, EPS, has_huge_pages=has_huge_pages)
    if "torch" in workload.contenders:
        peers["torch"] = TorchBags(list(tables), plan.optimizer, LR, EPS)
    ours = OurBags(tables, plan.optimizer)
    _check_pooling(ours, peers, batches)
    contenders: dict[str, Callable[[], Sample]] = {
        "ours": lambda: _run_ours(ours, batches),
        "one-thread": lambda: _run_ours_alone(ours, batches),
        "read": lambda: _run_read(tables, batches),
    }
    contenders |= {name: _run_of(peer, batches) for name, peer in peers.items()}
    chosen = {name: contenders[name] for name in workload.contenders if name in contenders}
    return interleave(chosen, round_count=round_count, seed=seed)


def _check_pooling(ours: OurBags, peers: dict[str, Any], batches: _Batches) -> None:
    """Before anyone has trained, all tables are the same, and their sums exact."""
    ids = batches.draw()
    expected = ours.pool(ids, batches.offsets)
    dim, some = ours.tables[0].shape[1], ids[: batches.plan.pooling]
    if not torch.equal(expected.detach()[0, :dim], ours.tables[0][some].float().sum(0)):
        raise Mismatch("pooling is not the sum of the rows")
    for name, peer in peers.items():
        if not torch.equal(peer.pool(ids, batches.offsets), expected):
            raise Mismatch(f"{name} pools to other values")


@contextmanager
def _on_one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(THREADS)
    # Threads are made by the first that needs them, who should not be the next contender.
    torch.zeros(2**20).add_(1)


def _run_ours(ours: OurBags, batches: _Batches) -> Sample:
    ids = batches.draw()
    expected = ours.expect(ids, batches.grad, batches.plan.pooling)
    begun = time.perf_counter()
    found = ours.pool(ids, batches.offsets)
    pooled = time.perf_counter()
    ours.step(found, batches.grad)
    ended = time.perf_counter()
    ours.check(expected)
    return {"seconds": ended - begun, "forward_seconds": pooled - begun}


def _run_ours_alone(ours: OurBags, batches: _Batches) -> Sample:
    with _on_one_thread():
        return _run_ours(ours, batches)


def _run_of(peer: Any, batches: _Batches) -> Callable[[], Sample]:
    def run() -> Sample:
        ids = batches.draw()
        row = peer.tables[0][ids[0]].clone()
        begun = time.perf_counter()
        found = peer.pool(ids, batches.offsets)
        pooled = time.perf_counter()
        peer.step(found, batches.grad)
        ended = time.perf_counter()
        if torch.equal(peer.tables[0][ids[0]], row):
            raise Mismatch("a step changed nothing")
        return {"seconds": ended - begun, "forward_seconds": pooled - begun}

    return run


def _run_read(tables: torch.Tensor, batches: _Batches) -> Sample:
    # The first is not timed: torch's idle threads still spin for a while and would hold up those of the loop.
    drawn = [batches.draw(), batches.draw()]
    table_of = torch.arange(tables.shape[0]).repeat_interleave(drawn[0].numel() // tables.shape[0])
    for places in [table_of * tables.shape[1] + ids for ids in drawn]:
        begun = time.perf_counter()
        read_rows(tables.view(-1, tables.shape[2]), places, THREADS)
        seconds = time.perf_counter() - begun
    return {"seconds": seconds, "forward_seconds": seconds}
