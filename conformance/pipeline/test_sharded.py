"""G. Tables cut among ranks: the same bits as uncut tables, wherever the order of sums allows it.

Every rank's gradient is made from its own samples, so that the uncut oracle sees all samples, by rank, with each
gradient divided by the number of ranks once: what a mean over ranks is.
"""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import Rank, assert_equal, assert_within_derived, raises, requirement
from conformance.pipeline.batches import Jagged, joined, values_of
from conformance.pipeline.model import DTYPES, OPTIMIZERS, Naive, assert_bits, hyper_of, random_tables
from conformance.pipeline.sharding import (
    assert_shards,
    batches_of,
    collection_of,
    expected_step,
    gradient_of,
    is_element_wise,
    random_plan,
    sharded_of,
    train,
)


def _whole_bags(rank: Rank, seeds: range) -> None:
    pipeline = rank.component("pipeline")
    for seed in seeds:
        optimizer = OPTIMIZERS[seed % len(OPTIMIZERS)]
        # What a row has once belongs to a column block, so column-wise goes with element-wise optimizers here.
        kinds = ("table_wise", "column_wise") if is_element_wise(optimizer) else ("table_wise",)
        configs, weights, keys, limits = random_tables(pipeline, seed)
        weighted = seed % 2 == 1
        collection = collection_of(pipeline, configs, weights, is_weighted=weighted)
        plan = random_plan(pipeline, configs, rank.world_size, seed, kinds)
        sharded, naive = (
            sharded_of(pipeline, collection, plan, optimizer, rank.group).to(rank.device),
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
def test_whole_bags(rank_pool: Any, device: str) -> None:
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
        optimizer = OPTIMIZERS[seed % len(OPTIMIZERS)]
        configs, weights, keys, limits = random_tables(pipeline, seed, dtypes=[torch.float32], rows=11)
        plan = {config.name: pipeline.row_wise() for config in configs}
        collection = collection_of(pipeline, configs, weights)
        sharded, naive = (
            sharded_of(pipeline, collection, plan, optimizer, rank.group).to(rank.device),
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
def test_rows(rank_pool: Any, device: str) -> None:
    for world_size in (1, 2, 3, 4):
        rank_pool.run(_rows, world_size, range(6 * world_size, 6 * world_size + 6))


def _row_error(rank: Rank, factor: float) -> None:
    pipeline = rank.component("pipeline")
    config = pipeline.EmbeddingBagConfig(200, 16, "t", feature_names=["f"])
    weight = values_of((200, 16), 1)
    sharded = sharded_of(
        pipeline, collection_of(pipeline, [config], [weight]), {"t": pipeline.row_wise()}, "sgd", rank.group
    ).to(rank.device)
    batches = batches_of(rank, ["f"], [200], 5, longest=60)
    pooled = sharded(batches[rank.rank].kjt(pipeline).to(rank.device)).values().detach().cpu()
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
def test_row_error(rank_pool: Any, tolerance_factor: float, device: str) -> None:
    for world_size in (2, 3):
        rank_pool.run(_row_error, world_size, tolerance_factor)


def _mixed(rank: Rank, seeds: range) -> None:
    import refimpl.pipeline as reference

    pipeline = rank.component("pipeline")
    for seed in seeds:
        optimizer, arms = OPTIMIZERS[seed % len(OPTIMIZERS)], []
        for package in (pipeline, reference):
            configs, weights, keys, limits = random_tables(package, seed, count=4)
            weighted = seed % 4 == 1
            collection = collection_of(package, configs, weights, is_weighted=weighted)
            kinds = ("table_wise", "column_wise", "row_wise", "data_parallel")
            plan = random_plan(package, configs, rank.world_size, seed, kinds)
            # The reference's bits are the host's: a GPU adds what is indexed twice in no fixed order.
            place = "cpu" if package is reference else rank.device
            arms.append(sharded_of(package, collection, plan, optimizer, rank.group, device=place))
        for step in range(1, 4):
            batches = batches_of(rank, keys, limits, seed + step, weighted=weighted, uneven=True)
            pooled = [
                train(rank, arm, batches, seed + step, p, place)
                for arm, p, place in zip(arms, (pipeline, reference), (rank.device, "cpu"), strict=True)
            ]
            assert_bits(pooled[0], pooled[1], f"seed {seed} step {step} pooled")
            mine, theirs = (arm.local_shards() for arm in arms)
            assert_equal(list(mine), list(theirs), where="tables of this rank")
            for name, (_, weight, states) in mine.items():
                assert_bits(weight, theirs[name][1], f"seed {seed} step {step} {name}")
                for state, value in states.items():
                    assert_bits(value, theirs[name][2][state], f"seed {seed} step {step} {state} of {name}")
            for (name, param), (_, other) in zip(arms[0].named_parameters(), arms[1].named_parameters(), strict=True):
                if hasattr(param, "_in_backward_optimizers"):
                    assert_bits(param.detach(), other.detach(), f"seed {seed} step {step} {name}")
                    continue
                assert_bits(param.grad, other.grad, f"seed {seed} step {step} gradient of {name}")


@requirement(
    "PIPE-086",
    "Plans that mix every kind of sharding, with dtypes mixed, features shared and batches of different size, MUST "
    "give the reference's bits after every step.",
)
def test_mixed(rank_pool: Any, device: str) -> None:
    for world_size in (1, 2, 3, 4):
        rank_pool.run(_mixed, world_size, range(4 * world_size, 4 * world_size + 6))


def _columns(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    config = pipeline.EmbeddingBagConfig(7, 10, "t", feature_names=["f"])
    weight = values_of((7, 10), 1)
    ranks = list(range(rank.world_size))[::-1]
    plan = {"t": pipeline.column_wise(ranks)}
    sharded = sharded_of(pipeline, collection_of(pipeline, [config], [weight]), plan, "rowwise_adagrad", rank.group).to(
        rank.device
    )
    shard, _, _ = sharded.local_shards()["t"]
    part = slice(*shard.columns)
    narrow = pipeline.EmbeddingBagConfig(7, shard.width, "t", feature_names=["f"])
    naive = Naive([narrow], [weight[:, part]], "rowwise_adagrad")
    for step in range(1, 4):
        batches = batches_of(rank, ["f"], [7], step)
        train(rank, sharded, batches, step, pipeline)
        grads = [gradient_of(batches, 10, step, r)[:, part] / rank.world_size for r in range(rank.world_size)]
        naive.step(joined(batches), torch.cat(grads), hyper_of(step))
        _, found, states = sharded.local_shards()["t"]
        assert_bits(found, naive.tables[0].weight, f"step {step} columns")
        assert_bits(states["momentum1"], naive.tables[0].states["momentum1"], f"step {step} momentum1")


@requirement(
    "PIPE-079", "A column-wise table whose optimizer keeps one value for a row MUST keep one for each column block."
)
def test_columns(rank_pool: Any, device: str) -> None:
    for world_size in (2, 4):
        rank_pool.run(_columns, world_size)


def _nothing(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    configs = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", DTYPES[i], [f"f{i}"]) for i in range(2)]
    weights = [values_of((6, 4), i, DTYPES[i]) for i in range(2)]
    plan = {"t0": pipeline.table_wise(rank.world_size - 1), "t1": pipeline.table_wise(rank.world_size - 1)}
    sharded = sharded_of(pipeline, collection_of(pipeline, configs, weights), plan, "adam", rank.group).to(rank.device)
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
def test_nothing(rank_pool: Any, device: str) -> None:
    for world_size in (1, 2, 3):
        rank_pool.run(_nothing, world_size)


def _moved(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    configs, weights, keys, limits = random_tables(pipeline, 3, dtypes=DTYPES[:2], multiple=4)
    batches = batches_of(rank, keys, limits, 7)
    results = []
    for shift in range(rank.world_size):
        plan = {c.name: pipeline.table_wise((i + shift) % rank.world_size) for i, c in enumerate(configs)}
        sharded = sharded_of(pipeline, collection_of(pipeline, configs, weights), plan, "adagrad", rank.group).to(
            rank.device
        )
        train(rank, sharded, batches, 7, pipeline)
        results.append(train(rank, sharded, batches, 8, pipeline))
    for other in results[1:]:
        assert_bits(other, results[0], "pooled after a step")


@requirement("PIPE-080", "Which rank holds a table MUST NOT change a bit.")
def test_moved(rank_pool: Any, device: str) -> None:
    rank_pool.run(_moved, 3)


def _refused(rank: Rank) -> None:
    pipeline, names = rank.component("pipeline"), ["a", "b"]
    kinds = {
        "table_wise": lambda: pipeline.table_wise(rank.world_size - 1),
        "row_wise": pipeline.row_wise,
        "data_parallel": pipeline.data_parallel,
    }
    for kind, rule in kinds.items():
        configs = [pipeline.EmbeddingBagConfig(8, 4, name, feature_names=[name]) for name in names]
        weights = [values_of((8, 4), seed) for seed in (1, 2)]
        arms = []
        for is_tried in (False, True):
            collection = collection_of(pipeline, configs, weights)
            plan = {"a": pipeline.row_wise(), "b": rule()}
            sharded = sharded_of(pipeline, collection, plan, "adam", rank.group, device="cpu")
            for step in range(2):
                batch = batches_of(rank, names, [8, 8], step)[rank.rank].kjt(pipeline)
                pooled = sharded(batch).values()
                pooled.backward(torch.ones_like(pooled))
                if is_tried:
                    with raises(RuntimeError, mentions=("second time",), where=f"a second backward, {kind}"):
                        pooled.backward(torch.ones_like(pooled))
                assert_equal(sharded.fused_optimizer.step_count, step + 1, where=f"steps of {kind}, tried {is_tried}")
            arms.append(sharded)
        plain, tried = (each.local_shards() for each in arms)
        for name, (_, weight, states) in plain.items():
            assert_bits(tried[name][1], weight, f"{kind}: weight of {name}")
            for state, value in states.items():
                assert_bits(tried[name][2][state], value, f"{kind}: {state} of {name}")


@requirement(
    "PIPE-760",
    "A second backward of a cut collection that retain_graph did not announce MUST be refused on every rank before "
    "anything is counted: it is no step, and the steps that follow are those of a collection that was not asked.",
)
def test_refused_backwards(rank_pool: Any) -> None:
    for world_size in (1, 2):
        rank_pool.run(_refused, world_size)
