"""G. What every rank holds or must hear of: data-parallel tables, feature processors, bad ids of one rank."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from conformance.harness import Rank, assert_equal, raises, requirement, succeeds
from conformance.kvstore.model import LR
from conformance.pipeline.batches import Jagged, values_of
from conformance.pipeline.model import DTYPES, Naive, assert_bits, random_tables
from conformance.pipeline.sharding import (
    assert_shards,
    batches_of,
    collection_of,
    expected_step,
    gradient_of,
    placed,
    random_plan,
    sharded_of,
    train,
)
from refimpl.optimizers import Hyper, row_sum
from twinproof.errors import ConfigError, DistributedError, IdRangeError, MissingKeyError, ShapeError


def _one_bad_rank(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    configs = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
    weights = [values_of((6, 4), i) for i in range(2)]
    plan = {"t0": pipeline.row_wise(), "t1": pipeline.table_wise(0)}
    sharded = sharded_of(pipeline, collection_of(pipeline, configs, weights), plan, "sgd", rank.group)
    bad = 6 if rank.rank == 1 else 5
    with raises(IdRangeError, mentions=("6", "0 to 5", "table t1")):
        sharded(Jagged(["f0", "f1"], [[[1]], [[bad]]]).kjt(pipeline))
    naive = Naive(configs, weights, "sgd")
    batches = batches_of(rank, ["f0", "f1"], [6, 6], 3)
    train(rank, sharded, batches, 3, pipeline)
    expected_step(naive, batches, 3, 1)
    assert_shards(sharded, naive, "after a refusal")


@requirement(
    "PIPE-034", "An id outside its table on one rank MUST raise on every rank, at once, and the next batch MUST work."
)
def test_one_bad_rank(rank_pool: Any) -> None:
    rank_pool.run(_one_bad_rank, 3)


def _one_refused(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    configs = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
    kinds: dict[str, Any] = {
        "table_wise": pipeline.table_wise(1),
        "row_wise": pipeline.row_wise(),
        "column_wise": pipeline.column_wise([1, 0]),
        "data_parallel": pipeline.data_parallel(),
    }
    keys, lengths = ["f0", "f1"], torch.tensor([1, 2, 1, 1])
    right = pipeline.KeyedJaggedTensor(keys, torch.tensor([1, 2, 3, 4, 5]), lengths=lengths)
    wrong: dict[str, Any] = {
        "an id of the first": (IdRangeError, keys, torch.tensor([6, 2, 3, 4, 5]), lengths),
        "an id of the second": (IdRangeError, keys, torch.tensor([1, 2, 3, -1, 5]), lengths),
        "a feature": (MissingKeyError, ["f0", "g"], torch.tensor([1, 2, 3, 4, 5]), lengths),
        "ids of floats": (ShapeError, keys, torch.ones(5), lengths),
        "lengths": (ShapeError, keys, torch.tensor([1, 2, 3, 4, 5]), torch.tensor([1, 2, 3, 1])),
    }
    for plan in itertools.product(sorted(kinds), sorted(kinds)):
        if set(plan) == {"data_parallel"}:
            continue
        weights = [values_of((6, 4), i) for i in range(2)]
        cut = {f"t{i}": kinds[kind] for i, kind in enumerate(plan)}
        sharded, other = (
            sharded_of(pipeline, collection_of(pipeline, configs, weights), cut, "sgd", rank.group) for _ in range(2)
        )
        for number, (what, (error, names, ids, sizes)) in enumerate(wrong.items()):
            bad = pipeline.KeyedJaggedTensor(names, ids, lengths=sizes)
            is_mine = rank.rank == number % rank.world_size
            mine = placed(pipeline, bad if is_mine else right)
            with raises(error, where=f"{plan}, {what} of one rank") as caught:
                sharded(mine)
            expected_class = error if is_mine else DistributedError
            assert_equal(type(caught.outer), expected_class, where=f"{plan}, {what} of one rank: what is raised")
            with succeeds("the next batch", where=f"{plan}, behind {what}"):
                found, expected = (each(placed(pipeline, right)).values().detach() for each in (sharded, other))
            assert_bits(found, expected, f"{plan}, behind {what}")


@requirement(
    "PIPE-551",
    "What one rank's batch is refused for, an id, a feature, its ids or its lengths, MUST be raised on every rank at "
    "once, there as it is and elsewhere as the cause of a DistributedError, whichever ways of sharding its tables have "
    "beside each other; the next batch MUST be looked up.",
)
def test_one_refused(rank_pool: Any) -> None:
    rank_pool.run(_one_refused, 2)


def _dense(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    config = pipeline.EmbeddingBagConfig(6, 4, "t", feature_names=["f"])
    weight = values_of((6, 4), 1)
    plan = {"t": pipeline.data_parallel()}
    sharded = sharded_of(pipeline, collection_of(pipeline, [config], [weight]), plan, "sgd", rank.group)
    # The same optimizer on the uncut table: what it rounds is its own affair.
    model = torch.nn.Parameter(weight.clone())
    optimizers = [torch.optim.SGD(params, lr=LR) for params in (sharded.parameters(), [model])]
    assert_equal([name for name, _ in sharded.named_parameters()], ["embedding_bags.t.weight"], where="parameters")
    for step in range(1, 4):
        batches = batches_of(rank, ["f"], [6], step)
        pooled = train(rank, sharded, batches, step, pipeline)
        assert_bits(pooled, Naive([config], [model.detach()], "sgd").pooled(batches[rank.rank]), f"step {step} pooled")
        total = torch.zeros(6, 4)
        for r, batch in enumerate(batches):
            sums = Naive([config], [torch.zeros(6, 4)], "sgd")
            sums.step(batch, gradient_of(batches, 4, step, r), Hyper(-1.0))
            total = total + sums.tables[0].weight / rank.world_size
        assert_bits(sharded.embedding_bags["t"].weight.grad, total, f"step {step} gradient")
        model.grad = total
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_bits(sharded.embedding_bags["t"].weight.detach(), model.detach(), "weight on every rank")


@requirement(
    "PIPE-087",
    "A data-parallel table MUST be a parameter of the dense optimizer, its gradient the mean over ranks added in "
    "ascending rank, the same on every rank.",
)
def test_dense(rank_pool: Any) -> None:
    for world_size in (1, 2, 3):
        rank_pool.run(_dense, world_size)


def _processed(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    configs = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
    weights, scales = [values_of((6, 4), i) for i in range(2)], [values_of((4,), 10 + i) for i in range(2)]
    collection = collection_of(pipeline, configs, weights, is_weighted=True)
    processors = pipeline.PositionWeightedModuleCollection({"f0": 4, "f1": 4})
    with torch.no_grad():
        for i in range(2):
            processors.position_weights[f"f{i}"].copy_(scales[i])
    whole = pipeline.FeatureProcessedEmbeddingBagCollection(collection, processors)
    plan = {"t0": pipeline.table_wise(rank.world_size - 1), "t1": pipeline.table_wise(rank.world_size - 1)}
    sharded = sharded_of(pipeline, whole, plan, "adagrad", rank.group)
    batches = batches_of(rank, ["f0", "f1"], [6, 6], 3)
    pooled = train(rank, sharded, batches, 3, pipeline)
    with_weights = [
        Jagged(b.keys, b.bags, [[scales[i][: len(bag)].tolist() for bag in f] for i, f in enumerate(b.bags)])
        for b in batches
    ]
    naive = Naive(configs, weights, "adagrad")
    assert_bits(pooled, expected_step(naive, with_weights, 3, 1)[rank.rank], "pooled")
    assert_shards(sharded, naive, "after a step")
    for index in range(2):
        total = torch.zeros(4)
        for r, batch in enumerate(batches):
            grad = gradient_of(batches, 8, 3, r)[:, 4 * index : 4 * index + 4] / rank.world_size
            for sample, bag in enumerate(batch.bags[index]):
                for position, row in enumerate(bag):
                    total[position] += row_sum((grad[sample] * weights[index][row])[None])[0, 0]
        found = sharded.feature_processors.position_weights[f"f{index}"].grad
        assert_bits(found, total, f"gradient of the position weights of f{index}")
    with raises(ConfigError, mentions=("row_wise",)):
        sharded_of(pipeline, whole, {"t0": pipeline.row_wise(), "t1": pipeline.table_wise(0)}, "sgd", rank.group)


@requirement(
    "PIPE-106",
    "Feature processors on sharded tables MUST weigh as on uncut ones, and every rank MUST get the mean over ranks of "
    "their gradient, ranks without tables too.",
)
def test_processed(rank_pool: Any) -> None:
    for world_size in (1, 2):
        rank_pool.run(_processed, world_size)


def _alone(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    configs, weights, keys, limits = random_tables(pipeline, 5, dtypes=DTYPES[:2], multiple=4)
    plan = random_plan(pipeline, configs, 1, 5, ("table_wise", "row_wise"))
    batches = batches_of(rank, keys, limits, 5)
    pooled = []
    for group in (rank.group, None):
        sharded = sharded_of(pipeline, collection_of(pipeline, configs, weights), plan, "sgd", group)
        train(rank, sharded, batches, 5, pipeline)
        pooled.append(train(rank, sharded, batches, 6, pipeline))
    assert_bits(pooled[0], pooled[1], "pooled after a step")


@requirement("PIPE-090", "One rank MUST be what a process without ranks is.")
def test_alone(rank_pool: Any) -> None:
    rank_pool.run(_alone, 1)
