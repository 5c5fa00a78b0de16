"""Key-value tables under every schedule, and their rows read ahead: the loop's bits, never stale."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from conformance.harness import Rank, assert_equal, raises, requirement
from conformance.pipeline.cases import VARIANTS
from conformance.pipeline.jobs import Job, assert_same_state
from conformance.pipeline.model import assert_bits

PREFETCH: tuple[str, dict[str, Any]] = ("PrefetchTrainPipelineSparseDist", {})


def _edit(job: Job, step: int) -> None:
    """Rows written, and rows deleted, between two steps."""
    for store, table, ids in job.stored:
        if step % 3 == 1:
            some = ids[::2].contiguous()
            store.set(table, some, store.get(table, some) * 0.5)
        elif step % 3 == 2:
            store.delete(table, ids[1::3].contiguous())


Components = tuple[Any, Any]


def _equal(components: Components, rank: Rank | None, variants: Any, seed: int, *, edits: bool) -> None:
    pipeline, kvstore = components
    for name, options in variants:
        loop, job = (Job(pipeline, seed, rank, kinds=("table_wise",), kvstore=kvstore) for _ in range(2))
        schedule, loader = job.schedule(name, **options), iter(job.batches(6))
        for step, batch in enumerate(loop.batches(6)):
            where = f"{name} {options} seed {seed} step {step}"
            assert_bits(schedule.progress(loader), loop.step(batch), f"{where} output")
            assert_same_state(job, loop, where)
            if edits:
                _edit(job, step)
                _edit(loop, step)
        with raises(StopIteration):
            schedule.progress(loader)


@requirement(
    "PIPE-138",
    "With key-value tables every schedule, the one that reads their rows ahead among them, MUST give the loop's bits "
    "after every step, also when rows are written or deleted between steps.",
)
def test_key_value_tables(pipeline: Any, kvstore: Any) -> None:
    for edits in (False, True):
        _equal((pipeline, kvstore), None, (PREFETCH, *VARIANTS), 11 + edits, edits=edits)


def _equal_on_ranks(rank: Rank) -> None:
    _equal((rank.component("pipeline"), rank.component("kvstore")), rank, (PREFETCH,), 12, edits=True)


@requirement("PIPE-139", "The same MUST hold on several ranks for the schedule that reads rows ahead.")
def test_prefetch_on_ranks(rank_pool: Any) -> None:
    for world_size in (2, 3):
        rank_pool.run(_equal_on_ranks, world_size)


class Reads:
    """A store's ``get``, with the number of rows of each call."""

    def __init__(self, store: Any) -> None:
        self._get, self.counts = store.get, list[int]()
        store.get = self

    def __call__(self, table: str, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        self.counts.append(ids.numel())
        found: torch.Tensor = self._get(table, ids, **options)
        return found


@requirement(
    "PIPE-145",
    "Prefetch MUST read a batch's rows once, before the update of the batch before, and after it again only those that "
    "both batches have.",
    needs=("streams",),
)
def test_read_once(pipeline: Any, kvstore: Any) -> None:
    job = Job(pipeline, 13, kinds=("table_wise",), kvstore=kvstore)
    stores = list({id(store): store for store, *_ in job.stored}.values())
    reads = [Reads(store) for store in stores]
    batches = job.batches(4)
    schedule, loader = job.schedule(PREFETCH[0]), iter(batches)
    for _ in batches:
        schedule.progress(loader)
    wanted = [
        sum(_rows_of(job, n, table, batches) for store, table, _ in job.stored if store is s)
        for n, s in enumerate(stores)
    ]
    assert_equal([sum(each.counts) for each in reads], wanted, where="rows read, by store")


def _rows_of(job: Job, number: int, table: str, batches: list[Any]) -> int:
    """Ids of one table in all batches, and of each batch's those that the batch before has."""
    config = next(config for config in job.tables[number][0] if config.name == table)
    ids = [torch.cat([batch.ids[number][name].values() for name in config.feature_names]) for batch in batches]
    again = [torch.isin(later, before).sum() for before, later in pairwise(ids)]
    return sum(each.numel() for each in ids) + int(sum(again))
