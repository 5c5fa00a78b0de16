"""G. Tables cut among ranks: the same bits as uncut tables, wherever the order of sums allows it.

Every rank's gradient is made from its own samples, so that the uncut oracle sees all samples, by rank, with each
gradient divided by the number of ranks once: what a mean over ranks is.
"""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import Rank, assert_equal, assert_within_derived, raises, requirement
from conformance.pipeline.support import (
    DTYPES,
    OPTIMIZERS,
    Jagged,
    Naive,
    assert_bits,
    generator_of,
    joined,
    random_jagged,
    random_tables,
    values_of,
)
from refimpl.errors import ConfigError, IdRangeError
from refimpl.optimizers import Hyper, row_sum

LR, EPS = 0.05, 1e-8


def collection_of(pipeline: Any, configs: Any, weights: Any, **options: Any) -> Any:
    """The collection that is cut."""
    collection = pipeline.EmbeddingBagCollection(configs, **options)
    state = {f"embedding_bags.{c.name}.weight": w for c, w in zip(configs, weights, strict=True)}
    collection.load_state_dict(state)
    return collection


def sharded_of(pipeline: Any, collection: Any, plan: Any, optimizer: str, group: Any = None, **options: Any) -> Any:
    """The collection, cut by the plan."""
    fused = pipeline.FusedOptimizer(optimizer, lr=LR, eps=EPS)
    return pipeline.ShardedEmbeddingBagCollection(collection, plan, optimizer=fused, process_group=group, **options)


def batches_of(rank: Rank, keys: Any, limits: Any, seed: int, *, uneven: bool = False, **options: Any) -> list[Jagged]:
    """Every rank's batch; uneven ones are of 1 to 4 samples, and the first rank's ids are few."""
    strides = [1 + (seed + r) % 4 if uneven else 3 for r in range(rank.world_size)]
    return [random_jagged(keys, limits, stride, 100 * seed + r, **options) for r, stride in enumerate(strides)]


def gradient_of(batches: list[Jagged], width: int, seed: int, rank: int) -> torch.Tensor:
    """The gradient of one rank's pooled columns."""
    return values_of((batches[rank].stride, width), 1000 * seed + rank)


def train(rank: Rank, sharded: Any, batches: list[Jagged], seed: int, pipeline: Any) -> torch.Tensor:
    """One step of this rank; its pooled columns."""
    pooled = sharded(batches[rank.rank].kjt(pipeline)).values()
    pooled.backward(gradient_of(batches, pooled.shape[1], seed, rank.rank))
    result: torch.Tensor = pooled.detach()
    return result


def expected_step(naive: Naive, batches: list[Jagged], seed: int, step: int) -> list[torch.Tensor]:
    """The oracle's step on all samples; each rank's pooled columns."""
    pooled = naive.pooled(joined(batches))
    world_size, width = len(batches), pooled.shape[1]
    grads = [gradient_of(batches, width, seed, r) / world_size for r in range(world_size)]
    naive.step(joined(batches), torch.cat(grads), Hyper(LR, step, EPS))
    return list(torch.split(pooled, [batch.stride for batch in batches]))


def assert_shards(sharded: Any, naive: Naive, where: str) -> None:
    """This rank's parts are the oracle's, bit for bit."""
    for name, (shard, weight, states) in sharded.local_shards().items():
        table = next(table for table in naive.tables if table.config.name == name)
        rows, columns = slice(*shard.rows), slice(*shard.columns)
        assert_bits(weight, table.weight[rows, columns], f"{where} weight of {name}")
        for state, value in states.items():
            whole = table.states[state]
            expected = whole[rows] if whole.shape[1] == 1 else whole[rows, columns]
            assert_bits(value, expected, f"{where} {state} of {name}")


def random_plan(pipeline: Any, configs: Any, world_size: int, seed: int, kinds: Any) -> dict[str, Any]:
    """A sharding of one of the kinds for each table."""
    generator = generator_of(seed)

    def draw(count: int) -> int:
        return int(torch.randint(0, count, (1,), generator=generator))

    plan = {}
    for config in configs:
        kind = kinds[draw(len(kinds))]
        if kind == "table_wise":
            plan[config.name] = pipeline.table_wise(draw(world_size))
        elif kind == "column_wise":
            most = min(world_size, config.embedding_dim)
            ranks = torch.randperm(world_size, generator=generator).tolist()[: 1 + draw(most)]
            plan[config.name] = pipeline.column_wise(ranks)
        else:
            plan[config.name] = pipeline.row_wise() if kind == "row_wise" else pipeline.data_parallel()
    return plan


def _whole_bags(rank: Rank, seeds: range) -> None:
    pipeline = rank.component("pipeline")
    for seed in seeds:
        optimizer = OPTIMIZERS[seed % 5]
        # One value for a row belongs to a column block, so column-wise goes with element-wise optimizers here.
        kinds = ("table_wise",) if "rowwise" in optimizer else ("table_wise", "column_wise")
        configs, weights, keys, limits = random_tables(pipeline, seed)
        weighted = seed % 2 == 1
        collection = collection_of(pipeline, configs, weights, is_weighted=weighted)
        plan = random_plan(pipeline, configs, rank.world_size, seed, kinds)
        sharded, naive = (
            sharded_of(pipeline, collection, plan, optimizer, rank.group),
            Naive(configs, weights, optimizer),
        )
        for step in range(1, 4):
            batches = batches_of(rank, keys, limits, seed + step, weighted=weighted, uneven=seed % 3 == 0)
            pooled = train(rank, sharded, batches, seed + step, pipeline)
            expected = expected_step(naive, batches, seed + step, step)
            assert_bits(pooled, expected[rank.rank], f"seed {seed} step {step} pooled")
            assert_shards(sharded, naive, f"seed {seed} step {step}")


@requirement(
    "PIPE-078",
    "Table-wise tables, and column-wise ones with an element-wise optimizer, MUST be the uncut table bit for bit, "
    "pooled rows, weights and states after every step, on 1 to 4 ranks, with batches of different size.",
)
def test_whole_bags(rank_pool: Any) -> None:
    for world_size in (1, 2, 3, 4):
        rank_pool.run(_whole_bags, world_size, range(4 * world_size, 4 * world_size + 6))


def row_wise_pooled(naive: Naive, batch: Jagged, world_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Pooled rows whose partial sums, by block of rows, are added in ascending block."""
    columns = []
    for table in naive.tables:
        block = -(-table.weight.shape[0] // world_size)
        for name in table.config.feature_names:
            feature = batch.picked([name])
            result = torch.zeros(feature.stride, table.weight.shape[1], dtype=dtype)
            for sample, bag in enumerate(feature.bags[0]):
                partial = torch.zeros(world_size, table.weight.shape[1], dtype=dtype)
                for row in bag:
                    partial[row // block] += table.weight[row].to(dtype)
                for part in partial:
                    result[sample] += part
                if table.mean and bag:
                    result[sample] /= len(bag)
            columns.append(result)
    return torch.cat(columns, dim=1)


def _rows(rank: Rank, seeds: range) -> None:
    pipeline = rank.component("pipeline")
    for seed in seeds:
        optimizer = OPTIMIZERS[seed % 5]
        configs, weights, keys, limits = random_tables(pipeline, seed, dtypes=[torch.float32], rows=11)
        plan = {config.name: pipeline.row_wise() for config in configs}
        collection = collection_of(pipeline, configs, weights)
        sharded, naive = (
            sharded_of(pipeline, collection, plan, optimizer, rank.group),
            Naive(configs, weights, optimizer),
        )
        for step in range(1, 4):
            batches = batches_of(rank, keys, limits, seed + step, uneven=seed % 2 == 0)
            before = row_wise_pooled(naive, joined(batches), rank.world_size, torch.float32)
            pooled = train(rank, sharded, batches, seed + step, pipeline)
            expected_step(naive, batches, seed + step, step)
            mine = torch.split(before, [batch.stride for batch in batches])[rank.rank]
            assert_bits(pooled, mine, f"seed {seed} step {step} pooled")
            assert_shards(sharded, naive, f"seed {seed} step {step}")


@requirement(
    "PIPE-077",
    "Row-wise tables MUST pool partial sums in ascending rank and divide a mean by the whole bag's ids, and their rows "
    "MUST then be updated as the uncut table's, bit for bit, for every optimizer, where W divides nothing too.",
)
def test_rows(rank_pool: Any) -> None:
    for world_size in (1, 2, 3, 4):
        rank_pool.run(_rows, world_size, range(5 * world_size, 5 * world_size + 5))


def _row_error(rank: Rank, factor: float) -> None:
    pipeline = rank.component("pipeline")
    config = pipeline.EmbeddingBagConfig(200, 16, "t", feature_names=["f"])
    weight = values_of((200, 16), 1)
    sharded = sharded_of(
        pipeline, collection_of(pipeline, [config], [weight]), {"t": pipeline.row_wise()}, "sgd", rank.group
    )
    batches = batches_of(rank, ["f"], [200], 5, longest=60)
    pooled = sharded(batches[rank.rank].kjt(pipeline)).values().detach()
    naive, exact = (
        torch.stack(
            [weight[torch.tensor(bag, dtype=torch.int64)].to(dtype).sum(0) for bag in batches[rank.rank].bags[0]]
        )
        for dtype in (torch.float32, torch.float64)
    )
    # torch's own sum is pairwise and errs less than one that adds in order, by at most the length of a bag.
    in_order = Naive([config], [weight], "sgd").pooled(batches[rank.rank])
    worse = in_order if (in_order - exact).abs().max() > (naive - exact).abs().max() else naive
    assert_within_derived(pooled, worse, exact, factor=factor, where="row-wise against uncut")


@requirement(
    "PIPE-084",
    "Row-wise pooled rows MUST err from the exact sum at most twice as much as the uncut table's sum in order.",
)
def test_row_error(rank_pool: Any, tolerance_factor: float) -> None:
    for world_size in (2, 3):
        rank_pool.run(_row_error, world_size, tolerance_factor)


def _mixed(rank: Rank, seeds: range) -> None:
    import refimpl.pipeline as reference

    pipeline = rank.component("pipeline")
    for seed in seeds:
        optimizer, arms = OPTIMIZERS[seed % 5], []
        for package in (pipeline, reference):
            configs, weights, keys, limits = random_tables(package, seed, count=4)
            weighted = seed % 4 == 1
            collection = collection_of(package, configs, weights, is_weighted=weighted)
            kinds = ("table_wise", "column_wise", "row_wise", "data_parallel")
            plan = random_plan(package, configs, rank.world_size, seed, kinds)
            arms.append(sharded_of(package, collection, plan, optimizer, rank.group))
        for step in range(1, 4):
            batches = batches_of(rank, keys, limits, seed + step, weighted=weighted, uneven=True)
            pooled = [
                train(rank, arm, batches, seed + step, p) for arm, p in zip(arms, (pipeline, reference), strict=True)
            ]
            assert_bits(pooled[0], pooled[1], f"seed {seed} step {step} pooled")
            mine, theirs = (arm.local_shards() for arm in arms)
            assert_equal(list(mine), list(theirs), where="tables of this rank")
            for name, (_, weight, states) in mine.items():
                assert_bits(weight, theirs[name][1], f"seed {seed} step {step} {name}")
                for state, value in states.items():
                    assert_bits(value, theirs[name][2][state], f"seed {seed} step {step} {state} of {name}")
            for (name, param), (_, other) in zip(arms[0].named_parameters(), arms[1].named_parameters(), strict=True):
                assert_bits(param.grad, other.grad, f"seed {seed} step {step} gradient of {name}")


@requirement(
    "PIPE-086",
    "Plans that mix every kind of sharding, with dtypes mixed, features shared and batches of different size, MUST "
    "give the reference's bits after every step.",
)
def test_mixed(rank_pool: Any) -> None:
    for world_size in (1, 2, 3, 4):
        rank_pool.run(_mixed, world_size, range(4 * world_size, 4 * world_size + 6))


def _columns(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    config = pipeline.EmbeddingBagConfig(7, 10, "t", feature_names=["f"])
    weight = values_of((7, 10), 1)
    ranks = list(range(rank.world_size))[::-1]
    plan = {"t": pipeline.column_wise(ranks)}
    sharded = sharded_of(pipeline, collection_of(pipeline, [config], [weight]), plan, "rowwise_adagrad", rank.group)
    shard, _, _ = sharded.local_shards()["t"]
    part = slice(*shard.columns)
    narrow = pipeline.EmbeddingBagConfig(7, shard.width, "t", feature_names=["f"])
    naive = Naive([narrow], [weight[:, part]], "rowwise_adagrad")
    for step in range(1, 4):
        batches = batches_of(rank, ["f"], [7], step)
        train(rank, sharded, batches, step, pipeline)
        grads = [gradient_of(batches, 10, step, r)[:, part] / rank.world_size for r in range(rank.world_size)]
        naive.step(joined(batches), torch.cat(grads), Hyper(LR, step, EPS))
        _, found, states = sharded.local_shards()["t"]
        assert_bits(found, naive.tables[0].weight, f"step {step} columns")
        assert_bits(states["momentum1"], naive.tables[0].states["momentum1"], f"step {step} momentum1")


@requirement(
    "PIPE-079", "A column-wise table whose optimizer keeps one value for a row MUST keep one for each column block."
)
def test_columns(rank_pool: Any) -> None:
    for world_size in (2, 4):
        rank_pool.run(_columns, world_size)


def _nothing(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    configs = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", DTYPES[i], [f"f{i}"]) for i in range(2)]
    weights = [values_of((6, 4), i, DTYPES[i]) for i in range(2)]
    plan = {"t0": pipeline.table_wise(rank.world_size - 1), "t1": pipeline.table_wise(rank.world_size - 1)}
    sharded = sharded_of(pipeline, collection_of(pipeline, configs, weights), plan, "adam", rank.group)
    naive = Naive(configs, weights, "adam")
    for step in range(1, 5):
        # Ranks without ids, a step without any, and a feature that is always empty.
        batches = [
            Jagged(["f0", "f1"], [[[r, 5] if (r + step) % 2 and step != 3 else [], []], [[], []]])
            for r in range(rank.world_size)
        ]
        pooled = train(rank, sharded, batches, step, pipeline)
        assert_bits(pooled, expected_step(naive, batches, step, step)[rank.rank], f"step {step} pooled")
        assert_shards(sharded, naive, f"step {step}")
    assert_equal(sharded.fused_optimizer.step_count, 4, where="steps, on every rank")


@requirement(
    "PIPE-082", "Ranks without a table, ranks without ids and steps without any id MUST take part and count every step."
)
def test_nothing(rank_pool: Any) -> None:
    for world_size in (1, 2, 3):
        rank_pool.run(_nothing, world_size)


def _moved(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    configs, weights, keys, limits = random_tables(pipeline, 3, dtypes=DTYPES[:2], multiple=4)
    batches = batches_of(rank, keys, limits, 7)
    results = []
    for shift in range(rank.world_size):
        plan = {c.name: pipeline.table_wise((i + shift) % rank.world_size) for i, c in enumerate(configs)}
        sharded = sharded_of(pipeline, collection_of(pipeline, configs, weights), plan, "adagrad", rank.group)
        train(rank, sharded, batches, 7, pipeline)
        results.append(train(rank, sharded, batches, 8, pipeline))
    for other in results[1:]:
        assert_bits(other, results[0], "pooled after a step")


@requirement("PIPE-080", "Which rank holds a table MUST NOT change a bit.")
def test_moved(rank_pool: Any) -> None:
    rank_pool.run(_moved, 3)


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
