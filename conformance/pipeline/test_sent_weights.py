"""G. Weights of a batch whose rows lie on other ranks: their gradients come home."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch

from conformance.harness import Rank, assert_equal, assert_same_tensor, requirement, succeeds
from conformance.pipeline.batches import Jagged, joined, place_of, random_jagged, values_of
from conformance.pipeline.model import Naive, assert_bits, random_tables
from conformance.pipeline.sharding import (
    batches_of,
    collection_of,
    gradient_of,
    random_plan,
    sharded_of,
)
from refimpl.optimizers import row_sum

KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel")


def _gradient(
    pipeline: Any, module: Any, batch: Jagged, grad: torch.Tensor, *, wanting: bool = True, at: Any = None
) -> Any:
    """The gradient of the batch's weights."""
    kjt = batch.kjt(pipeline)
    weights = kjt.weights().requires_grad_(wanting)
    at = at or pipeline.device
    module(kjt.to(at)).values().backward(grad.to(at))
    return weights.grad


def _blocks(sharding: Any, width: int) -> list[slice]:
    """Columns of each rank, by rank."""
    if sharding.kind != "column_wise":
        return [slice(0, width)]
    size = -(-width // len(sharding.ranks))
    begins = sorted((rank, part * size) for part, rank in enumerate(sharding.ranks) if part * size < width)
    return [slice(begin, min(begin + size, width)) for _, begin in begins]


def _expected(
    configs: Sequence[Any], weights: Sequence[Any], plan: Any, batch: Jagged, grad: torch.Tensor, world_size: int
) -> torch.Tensor:
    """Of each weight of the batch, in loops. A feature is in at most two tables, whose order then makes no bit."""
    found = {key: [torch.zeros(len(bag)) for bag in bags] for key, bags in zip(batch.keys, batch.bags, strict=True)}
    at = 0
    for config, weight in zip(configs, weights, strict=True):
        sharding, width = plan[config.name], config.embedding_dim
        # Replicas are looked up at home, and nothing is sent.
        divisor = 1 if sharding.kind == "data_parallel" else world_size
        for name in config.feature_names:
            for sample, bag in enumerate(batch.picked([name]).bags[0]):
                g = grad[sample, at : at + width] / divisor
                g = g / len(bag) if config.pooling.value == "MEAN" and bag else g
                for position, row in enumerate(bag):
                    total = torch.zeros(())
                    for block in _blocks(sharding, width):
                        total = total + row_sum((g[block] * weight[row, block].float())[None])[0, 0]
                    found[name][sample][position] += total * divisor
            at += width
    return torch.cat([part for key in batch.keys for part in found[key]])


def _width(configs: Sequence[Any]) -> int:
    return sum(config.embedding_dim * len(config.feature_names) for config in configs)


def _home(rank: Rank, seeds: Sequence[int]) -> None:
    pipeline = rank.component("pipeline")
    for seed in seeds:
        configs, weights, keys, limits = random_tables(pipeline, seed, count=2)
        collection = collection_of(pipeline, configs, weights, is_weighted=True)
        plan = random_plan(pipeline, configs, rank.world_size, seed, KINDS)
        batches = batches_of(rank, keys, limits, seed, weighted=True, uneven=True)
        batch, grad = batches[rank.rank], gradient_of(batches, _width(configs), seed, rank.rank)
        got = _gradient(pipeline, sharded_of(pipeline, collection, plan, "sgd", rank.group), batch, grad)
        expected = _expected(configs, weights, plan, batch, grad, rank.world_size)
        where = f"gradient of weights by {[sharding.kind for sharding in plan.values()]}, seed {seed}, rank {rank.rank}"
        assert_same_tensor(got, expected, where=where)


@requirement(
    "PIPE-113",
    "Weights of a batch that require a gradient MUST get that of their own rank's loss from tables cut in any way: "
    "row_sum of the row times its bag's gradient over W, on each rank's columns, added by rank, and times W.",
)
def test_home(rank_pool: Any) -> None:
    for world_size, seeds in ((1, (0, 1)), (2, range(8)), (3, (0, 1, 2))):
        rank_pool.run(_home, world_size, seeds)


def _keys(rank: Rank) -> None:
    pipeline, kvstore = rank.component("pipeline"), rank.component("kvstore")
    config = pipeline.EmbeddingBagConfig(9, 6, "t", feature_names=["f"], pooling=pipeline.PoolingType.MEAN)
    weight = torch.randn(9, 6, generator=torch.Generator().manual_seed(2))
    store = kvstore.KVStore({"t": kvstore.RowLayout(6, optimizer="sgd")}, optimizer_in_row=True, clock=lambda: 1)
    store.set("t", torch.arange(9), weight)
    plan = {"t": pipeline.key_value(store, kvstore.Buckets(4))}
    collection = collection_of(pipeline, [config], [weight], is_weighted=True)
    batches = batches_of(rank, ["f"], [9], 3, weighted=True)
    grad = gradient_of(batches, 6, 3, rank.rank)
    got = _gradient(
        pipeline,
        sharded_of(pipeline, collection, plan, "sgd", rank.group, device="cpu"),
        batches[rank.rank],
        grad,
        at="cpu",
    )
    expected = _expected([config], [weight], plan, batches[rank.rank], grad, rank.world_size)
    assert_same_tensor(got, expected, where=f"gradient of weights of keys, rank {rank.rank}")


@requirement(
    "PIPE-115", "Weights of ids of a key-value table MUST get the same gradient, from the rank that has the row."
)
def test_keys(rank_pool: Any) -> None:
    rank_pool.run(_keys, 2)


# Which tables are cut by rows, and so looked up together, and which stand between them.
ARRANGEMENTS = (
    ("row_wise", "table_wise", "row_wise"),
    ("table_wise", "row_wise", "column_wise", "row_wise"),
    ("key_value", "table_wise", "key_value"),
    ("row_wise", "key_value", "row_wise", "data_parallel", "key_value"),
    ("data_parallel", "row_wise", "row_wise"),
    ("key_value", "column_wise", "row_wise", "key_value"),
)


def _arranged(rank: Rank) -> None:
    pipeline, kvstore = rank.component("pipeline"), rank.component("kvstore")
    for seed, kinds in enumerate(ARRANGEMENTS):
        configs, weights, plan = [], [], {}
        for number, kind in enumerate(kinds):
            name = f"t{number}"
            configs.append(pipeline.EmbeddingBagConfig(11, 4, name, feature_names=[f"f{number}"]))
            weights.append(values_of((11, 4), 10 * seed + number))
            if kind == "key_value":
                store = kvstore.KVStore({name: kvstore.RowLayout(4, optimizer="sgd")}, optimizer_in_row=True, clock=int)
                store.set(name, torch.arange(11), weights[-1])
                plan[name] = pipeline.key_value(store, kvstore.Buckets(4))
            elif kind == "table_wise":
                plan[name] = pipeline.table_wise(number % rank.world_size)
            elif kind == "column_wise":
                plan[name] = pipeline.column_wise(list(range(rank.world_size)))
            else:
                plan[name] = getattr(pipeline, kind)()
        collection = collection_of(pipeline, configs, weights, is_weighted=True)
        keys = [f"f{number}" for number in range(len(kinds))]
        batches = batches_of(rank, keys, [11] * len(kinds), seed, weighted=True, uneven=True)
        batch, grad = batches[rank.rank], gradient_of(batches, _width(configs), seed, rank.rank)
        module = sharded_of(pipeline, collection, plan, "sgd", rank.group, device="cpu")
        got = _gradient(pipeline, module, batch, grad, at="cpu")
        expected = _expected(configs, weights, plan, batch, grad, rank.world_size)
        assert_same_tensor(got, expected, where=f"gradient of weights by {kinds}, rank {rank.rank}")


@requirement(
    "PIPE-498",
    "Weights of a batch MUST get that gradient wherever the tables that are cut alike stand among the others, side by "
    "side or apart.",
)
def test_arrangements(rank_pool: Any) -> None:
    for world_size in (1, 2):
        rank_pool.run(_arranged, world_size)


def _some(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    configs, weights, keys, limits = random_tables(pipeline, 4, count=2, dtypes=[torch.float32])
    # The last rank holds no table, and only its weights want a gradient.
    plan = {config.name: pipeline.table_wise(0) for config in configs}
    collection = collection_of(pipeline, configs, weights, is_weighted=True)
    sharded = sharded_of(pipeline, collection, plan, "adagrad", rank.group)
    batches = batches_of(rank, keys, limits, 4, weighted=True)
    batch, grad = batches[rank.rank], gradient_of(batches, _width(configs), 4, rank.rank)
    wanting = rank.rank == rank.world_size - 1
    got = _gradient(pipeline, sharded, batch, grad, wanting=wanting)
    assert_equal(got is not None, wanting, where=f"whether rank {rank.rank} has a gradient")
    if wanting:
        expected = _expected(configs, weights, plan, batch, grad, rank.world_size)
        assert_same_tensor(got, expected, where="gradient of weights on the rank without tables")
    assert_equal(sharded.fused_optimizer.step_count, 1, where="steps")


@requirement(
    "PIPE-114",
    "Ranks whose weights want no gradient, and ranks without tables, MUST take part in sending gradients of weights "
    "home, and get none that they did not ask for.",
)
def test_some(rank_pool: Any) -> None:
    rank_pool.run(_some, 2)


class _Model(torch.nn.Module):
    def __init__(self, tables: Any) -> None:
        super().__init__()
        self.tables, self.scale = tables, torch.nn.Parameter(torch.ones(()))

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss = (self.tables(batch).values() * self.scale).square().mean()
        return loss.reshape(1), loss.detach()


def _trained(pipeline: Any, tables: Any, batches: Sequence[Jagged], schedule: str | None, place: Any) -> list[Any]:
    """The gradients of the batches' weights by a schedule, or by a plain loop."""
    model = _Model(tables).to(place)
    optimizer = torch.optim.SGD([model.scale], lr=0.1)
    kjts = [batch.kjt(pipeline) for batch in batches]
    wanting, loader = [kjt.weights().requires_grad_() for kjt in kjts], iter(kjts)
    driver = None if schedule is None else getattr(pipeline, schedule)(model, optimizer, place)
    for kjt in kjts:
        if driver is not None:
            driver.progress(loader)
            continue
        optimizer.zero_grad()
        model(kjt.to(place))[0].sum().backward()
        optimizer.step()
    return [each.grad for each in wanting]


def _assert_alike(gradients: Callable[[str | None], list[Any]], schedules: Sequence[str]) -> None:
    expected = gradients(None)
    for schedule in schedules:
        for step, (got, wanted) in enumerate(zip(gradients(schedule), expected, strict=True)):
            assert_equal(got is not None, True, where=f"{schedule} step {step}: a gradient")
            assert_same_tensor(got, wanted, where=f"{schedule} step {step}")


SCHEDULES = ("TrainPipelineBase", "TrainPipelineSparseDist", "TrainPipelineFusedSparseDist")


@requirement(
    "PIPE-118", "Every schedule MUST give the weights of its batches the gradients that a plain loop gives them."
)
def test_schedules(pipeline: Any) -> None:
    configs, weights, keys, limits = random_tables(pipeline, 4, count=2, dtypes=[torch.float32])
    plan = {configs[0].name: pipeline.table_wise(0), configs[1].name: pipeline.row_wise()}
    batches = [random_jagged(keys, limits, 3, step, weighted=True) for step in range(4)]

    def gradients(schedule: str | None) -> list[Any]:
        collection = collection_of(pipeline, configs, weights, is_weighted=True)
        tables = sharded_of(pipeline, collection, plan, "adagrad")
        return _trained(pipeline, tables, batches, schedule, place_of(pipeline))

    _assert_alike(gradients, SCHEDULES)


@requirement(
    "PIPE-493",
    "So MUST every schedule, the one that reads rows ahead among them, with key-value tables, also where the next "
    "batch has as many ids: a batch's weights get their gradients from its own rows.",
)
def test_schedules_of_keys(pipeline: Any, kvstore: Any) -> None:
    config = pipeline.EmbeddingBagConfig(12, 6, "t", feature_names=["f"])
    weight = values_of((12, 6), 7)
    bags = [[[step, step + 3], [], [(step + 5) % 12]] for step in range(5)]
    scales = [[[1.0 + step, 0.5], [], [0.25]] for step in range(5)]
    batches = [Jagged(["f"], [rows], [values]) for rows, values in zip(bags, scales, strict=True)]

    def gradients(schedule: str | None) -> list[Any]:
        store = kvstore.KVStore({"t": kvstore.RowLayout(6, optimizer="adagrad")}, optimizer_in_row=True, clock=int)
        store.set("t", torch.arange(12), weight)
        collection = collection_of(pipeline, [config], [weight], is_weighted=True)
        plan = {"t": pipeline.key_value(store, kvstore.Buckets(4))}
        tables = sharded_of(pipeline, collection, plan, "adagrad", device="cpu")
        return _trained(pipeline, tables, batches, schedule, torch.device("cpu"))

    _assert_alike(gradients, (*SCHEDULES, "PrefetchTrainPipelineSparseDist"))


def _sparse_batches(filled: Sequence[int], strides: Sequence[int], *, weighted: bool) -> list[Jagged]:
    """Each rank's samples of two features, whose bags have ids of a table's first rows where a number says so."""
    batches = []
    for rank, stride in enumerate(strides):
        bags = [[[(rank + at) % 2, at % 2] * filled[2 * rank + f] for at in range(stride)] for f in range(2)]
        weights = [[[0.25 + rank + at + i for i in range(len(bag))] for at, bag in enumerate(of)] for of in bags]
        batches.append(Jagged(["f0", "f1"], bags, weights if weighted else None))
    return batches


# How two tables are cut. Ids are of the first rows alone: the last rank has none of a table that is cut by rows.
SPARSE_PLANS: tuple[tuple[tuple[Any, ...], ...], ...] = (
    (("table_wise", 0), ("table_wise", 0)),
    (("table_wise", 0), ("table_wise", 1)),
    (("table_wise", 1), ("row_wise",)),
    (("row_wise",), ("row_wise",)),
    (("column_wise", [1, 0]), ("row_wise",)),
    (("data_parallel",), ("table_wise", 0)),
)


def _nothing_to_send(rank: Rank) -> None:
    pipeline, at = rank.component("pipeline"), rank.rank
    configs = [pipeline.EmbeddingBagConfig(7, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
    weights = [values_of((7, 4), i) for i in range(2)]
    for turn, (kinds, mode) in enumerate(product(SPARSE_PLANS, ("ids alone", "weighted", "trained"))):
        plan = {f"t{i}": getattr(pipeline, kind)(*given) for i, (kind, *given) in enumerate(kinds)}
        collection = collection_of(pipeline, configs, weights, is_weighted=mode != "ids alone")
        for number, filled in enumerate(product(range(2), repeat=4)):
            strides = ((2, 2), (2, 0), (0, 2))[(turn // 3 + number) % 3]
            batches = _sparse_batches(filled, strides, weighted=mode != "ids alone")
            sharded, where = sharded_of(pipeline, collection, plan, "sgd", rank.group), f"{kinds}, {mode}, rank {at}"
            where = f"{where}: ids {filled}, samples {strides}"
            kjt, grad = batches[at].kjt(pipeline), gradient_of(batches, 8, 1, at)
            if mode == "trained":
                kjt.weights().requires_grad_()
            with succeeds("a step", where=where):
                pooled = sharded(kjt.to(rank.device)).values()
                pooled.backward(grad.to(rank.device))
            expected = Naive(configs, weights, "sgd").pooled(joined(batches))
            assert_bits(pooled.detach(), torch.split(expected, list(strides))[at], f"{where}: pooled")
            if mode == "trained" and kjt.values().numel():
                home = _expected(configs, weights, plan, batches[at], grad, rank.world_size)
                assert_same_tensor(kjt.weights().grad, home, where=f"{where}: gradient of weights")


@requirement(
    "PIPE-623",
    "Ranks and lookups that send no ids, get none, or have no samples MUST take part with the rest, in both directions "
    "and by every cut: with weights or none, trained or not, each rank gets its bags and its weights' gradients.",
)
def test_nothing_to_send(rank_pool: Any) -> None:
    rank_pool.run(_nothing_to_send, 2)
