"""Key-value tables under every schedule, and their rows read ahead: the loop's bits, never stale."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
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


class Looked(torch.nn.Module):
    """Rows of a store, pooled, under a square: the loss depends on every row that was looked up."""

    def __init__(self, pipeline: Any, store: Any, buckets: Any) -> None:
        super().__init__()
        whole = pipeline.EmbeddingBagCollection([pipeline.EmbeddingBagConfig(1, 4, "a")], device="meta")
        plan = {"a": pipeline.key_value(store, buckets)}
        self.tables = pipeline.ShardedEmbeddingBagCollection(
            whole, plan, optimizer=pipeline.FusedOptimizer("sgd", lr=0.5)
        )
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, ids: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss [1] and the pooled rows."""
        pooled = self.tables(ids).values()
        return (pooled * self.scale).square().mean().reshape(1), pooled.detach()


def _write_one(store: Any) -> None:
    store.set("a", torch.tensor([5]), torch.full((1, 4), 7.0))


CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    "a capacity evicts them": ({"capacity": 2}, None),
    "a listener writes one": ({}, _write_one),
    "a listener deletes one": ({}, lambda store: store.delete("a", torch.tensor([6]))),
}


@requirement(
    "PIPE-543",
    "Rows read ahead MUST be read again where the update between them and their lookup changes more than its own rows: "
    "where it evicts others for a capacity, and where a listener to it writes or deletes some.",
)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_by_the_update(pipeline: Any, kvstore: Any, change: str) -> None:
    options, listener = CHANGES[change]

    def run(name: str) -> list[torch.Tensor]:
        layouts = {"a": kvstore.RowLayout(4, optimizer="sgd")}
        store = kvstore.KVStore(layouts, optimizer_in_row=True, clock=lambda: 5, **options)
        store.set("a", torch.tensor([5, 6]), torch.tensor([[1.0], [2.0]]).expand(2, 4).contiguous())
        if listener is not None:
            store.add_listener(lambda _: listener(store), steps=True)
        model = Looked(pipeline, store, kvstore.Buckets(4))
        schedule = getattr(pipeline, name)(model, torch.optim.SGD([model.scale], 0.1), torch.device("cpu"))
        some = ([1, 2], [5, 6], [6, 3], [5], [1, 6])
        batches = iter([pipeline.KeyedJaggedTensor(["a"], ids, lengths=_one(ids)) for ids in map(torch.tensor, some)])
        return [schedule.progress(batches) for _ in some]

    expected = run("TrainPipelineBase")
    for step, (one, other) in enumerate(zip(run(PREFETCH[0]), expected, strict=True)):
        assert_bits(one, other, f"{change}: step {step}")
    assert_equal(any(bool(pooled.any()) for pooled in expected), True, where="whether there was anything to read")


def _one(ids: torch.Tensor) -> torch.Tensor:
    """The lengths of one bag."""
    return torch.tensor([ids.numel()])


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
    "Prefetch MUST read a batch's rows once, before the update of the batch before, and after it again, of a table "
    "without a capacity, only those that both batches have.",
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


@requirement(
    "PIPE-597",
    "Rows read ahead MUST be read again where somebody writes or deletes them between that and the update of the batch "
    "before, whether that update has rows of its own or none.",
)
@pytest.mark.parametrize("change", ["write", "delete"])
def test_changed_before_the_update(pipeline: Any, kvstore: Any, change: str) -> None:
    def run(name: str) -> list[torch.Tensor]:
        store = kvstore.KVStore({"a": kvstore.RowLayout(4, optimizer="sgd")}, optimizer_in_row=True, clock=lambda: 5)
        store.set("a", torch.tensor([5, 6]), torch.tensor([[1.0], [2.0]]).expand(2, 4).contiguous())
        model = Looked(pipeline, store, kvstore.Buckets(4))

        class Editing(getattr(pipeline, name)):  # type: ignore[misc]
            """Edits the store when the backward begins."""

            def _backward(self, losses: torch.Tensor) -> None:
                _write_one(store) if change == "write" else store.delete("a", torch.tensor([6]))
                super()._backward(losses)

        schedule = Editing(model, torch.optim.SGD([model.scale], 0.1), torch.device("cpu"))
        some = [[1, 2], [5, 6], [], [5, 6], [6], [], [6, 5]]
        ids = [torch.tensor(each, dtype=torch.int64) for each in some]
        batches = iter([pipeline.KeyedJaggedTensor(["a"], each, lengths=_one(each)) for each in ids])
        return [schedule.progress(batches) for _ in some]

    expected = run("TrainPipelineBase")
    for step, (one, other) in enumerate(zip(run(PREFETCH[0]), expected, strict=True)):
        assert_bits(one, other, f"{change}: step {step}")
    assert_equal(bool(expected[1].any()), True, where="whether there was anything to read")
