"""Exchanges of several modules: in whatever groups they are fused, and of whom each is told what."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from conformance.harness import Rank, assert_equal, raises, requirement, succeeds
from conformance.harness.places import on_pretend
from conformance.pipeline.batches import Jagged, random_jagged, values_of
from conformance.pipeline.cases import TRAINING
from conformance.pipeline.jobs import Batch, Job, assert_same_state
from conformance.pipeline.model import assert_bits
from conformance.pipeline.sharding import collection_of, sharded_of
from twinproof.errors import ConfigError, MissingKeyError
from twinproof.pipeline.sharding import Awaitable

KINDS = ("table_wise", "row_wise", "data_parallel")


def _module(pipeline: Any, number: int, group: Any = None) -> Any:
    """Three features, of which each table is cut by another kind."""
    configs = [pipeline.EmbeddingBagConfig(7, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(3)]
    whole = collection_of(pipeline, configs, [values_of((7, 4), 10 * number + i) for i in range(3)])
    plan = {
        f"t{i}": pipeline.table_wise(0) if kind == "table_wise" else getattr(pipeline, kind)() for i, kind in _each()
    }
    return sharded_of(pipeline, whole, plan, "sgd", group, device="cpu")


def _each() -> Any:
    return enumerate(KINDS)


def _finished(module: Any, context: Any, given: Any) -> torch.Tensor:
    found: torch.Tensor = module.compute_and_output_dist(context, given.wait().wait()).wait().values().detach()
    return found


# In which groups three exchanges are fused, and whose sizes are waited for between.
GROUPS: dict[str, Callable[[Any, Any], Any]] = {
    "all": lambda fuse, d: fuse(d),
    "none": lambda fuse, d: None,
    "one of two twice": lambda fuse, d: (fuse(d[:2]), fuse(d[1:])),
    "all twice": lambda fuse, d: (fuse(d), fuse(d)),
    "one, then all": lambda fuse, d: (fuse(d[:1]), fuse(d)),
    "with one that was read": lambda fuse, d: (fuse(d[:2]), d[0].wait(), fuse(d)),
    "overlapping, one read between": lambda fuse, d: (fuse(d[:2]), fuse(d[1:]), d[0].wait()),
    "with what is none of ours": lambda fuse, d: fuse([*d, Awaitable(lambda: None)]),
}


def _fused(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    modules = [_module(pipeline, number, rank.group) for number in range(3)]
    stride = 3 + rank.rank
    batches = [random_jagged(["f0", "f1", "f2"], [7] * 3, stride, 10 * n + rank.rank).kjt(pipeline) for n in range(3)]
    expected = [module(batch).values().detach() for module, batch in zip(modules, batches, strict=True)]
    counts = dict[str, int]()
    for what, fuse in GROUPS.items():
        contexts = [module.create_context() for module in modules]
        exchange = mock.Mock(side_effect=dist.all_to_all_single)
        with mock.patch.object(dist, "all_to_all_single", exchange):
            dists = [m.input_dist(ctx, each) for m, ctx, each in zip(modules, contexts, batches, strict=True)]
            with succeeds("exchanges", where=what):
                fuse(pipeline.fuse_input_dists, dists)
                found = [_finished(*parts) for parts in zip(modules, contexts, dists, strict=True)]
        for number, (got, wanted) in enumerate(zip(found, expected, strict=True)):
            assert_bits(got, wanted, f"{what}: module {number}")
        counts[what] = exchange.call_count
    for what in ("all twice", "with what is none of ours"):
        assert_equal(counts[what], counts["all"], where=f"{what}: exchanges")
    for what in set(GROUPS) - {"none"}:
        assert_equal(counts["all"] <= counts[what] <= counts["none"], True, where=f"{what}: exchanges {counts}")


def _fused_over_devices(pipeline: Any) -> None:
    modules = [_module(pipeline, number) for number in range(4)]
    batches = [random_jagged(["f0", "f1", "f2"], [7] * 3, 3, number).kjt(pipeline) for number in range(4)]
    expected = [module(batch).values().detach() for module, batch in zip(modules, batches, strict=True)]
    with on_pretend() as device:
        places = [torch.device("cpu"), device.device] * 2
        for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
            contexts = [module.to(place).create_context() for module, place in zip(modules, places, strict=True)]
            dists = [
                module.input_dist(context, batch.to(place))
                for module, context, batch, place in zip(modules, contexts, batches, places, strict=True)
            ]
            with succeeds("exchanges", where=f"{order}"):
                pipeline.fuse_input_dists(dists)
                found = {n: _finished(modules[n], contexts[n], dists[n]).cpu() for n in order}
            for number, wanted in enumerate(expected):
                assert_bits(found[number], wanted, f"{order}: module {number}")


@requirement(
    "PIPE-593",
    "Exchanges MUST give what each gives alone in whatever groups they are fused, one in several, again, or after its "
    "sizes were read, beside what is none of ours, and send nothing twice; those of modules on several devices too.",
)
def test_fused_in_groups(pipeline: Any, rank_pool: Any) -> None:
    _fused_over_devices(pipeline)
    for world_size in (1, 2):
        rank_pool.run(_fused, world_size)


def _without_first(ids: Any) -> Any:
    """A batch that lacks a feature."""
    return ids.permute(list(range(1, len(ids.keys()))))


@requirement(
    "PIPE-592",
    "What the exchange of a batch raised, made ahead of its turn, MUST come out as it is when its turn comes, in every "
    "schedule, with key-value tables or none; the steps before and behind are the loop's.",
)
@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("name", TRAINING)
def test_failed_ahead(pipeline: Any, kvstore: Any, name: str, is_stored: bool) -> None:
    options: dict[str, Any] = {"kvstore": kvstore if is_stored else None, "kinds": ("table_wise", "row_wise")}
    job, loop = (Job(pipeline, 3, **options) for _ in range(2))
    given, batches = job.batches(5), loop.batches(5)
    given[2] = Batch(given[2].dense, [_without_first(each) for each in given[2].ids], given[2].target)
    schedule, loader = job.schedule(name, **({"start_batch": 10**6} if "Semi" in name else {})), iter(given)
    for step, batch in enumerate(batches):
        if step == 2:
            with raises(MissingKeyError, mentions=("f0",), where=name):
                schedule.progress(loader)
            continue
        with succeeds("a step", where=f"{name}: step {step}"):
            output = schedule.progress(loader)
        assert_bits(output, loop.step(batch), f"{name}: step {step}")
        assert_same_state(job, loop, f"{name}: step {step}")


@requirement(
    "PIPE-596",
    "A sharding MUST be refused by name whose ranks are no whole numbers, and one that has a store or buckets and is "
    "not of key-value tables; the owners of ids MUST be refused of a table whose whole bags are where its parts are.",
)
def test_parts_of_plans(pipeline: Any) -> None:
    table = pipeline.EmbeddingBagConfig(5, 4, "t", feature_names=["f"])
    collection = pipeline.EmbeddingBagCollection([table])
    wrong = [pipeline.table_wise(rank) for rank in (True, 0.0, "0", None)]
    for sharding in (*wrong, pipeline.column_wise([False]), pipeline.column_wise([0.0])):
        with raises(ConfigError, mentions=("ranks", "t"), where=f"{sharding.ranks}"):
            pipeline.ShardedEmbeddingBagCollection(collection, {"t": sharding})
    kind = type(pipeline.row_wise())
    for name in ("row_wise", "data_parallel", "column_wise"):
        for part in ("store", "buckets"):
            for value in (object(), "a word", 0):
                with raises(ConfigError, mentions=(part, name), where=f"{name} with {part}={value!r}"):
                    kind(name, (0,) if name == "column_wise" else (), **{part: value})
    shardings = {"table_wise": pipeline.table_wise(0), "column_wise": pipeline.column_wise([0])}
    for name, sharding in (*shardings.items(), ("data_parallel", pipeline.data_parallel())):
        sharded = pipeline.ShardedEmbeddingBagCollection(collection, {"t": sharding})
        with raises(NotImplementedError, mentions=("whole bags", name), where=f"owners of a {name} table"):
            sharded.owner_of(torch.tensor([1, 2]), 0)
    by_rows = pipeline.ShardedEmbeddingBagCollection(collection, {"t": pipeline.row_wise()})
    assert_equal(by_rows.owner_of(torch.tensor([1, 4]), 0).tolist(), [0, 0], where="owners of a table by rows")


class _Done:
    """An exchange that is over."""

    def wait(self) -> None:
        """Nothing is waited for."""


def _alone(rank: int) -> Any:
    """An exchange as with ranks that have no samples: each rank gets its own part, and zeros of the others."""

    def exchanged(result: Any, data: Any, out: Any = None, sent: Any = None, group: Any = None, **options: Any) -> Any:
        world_size = dist.get_world_size(group)
        out = out or [result.shape[0] // world_size] * world_size
        sent = sent or [data.shape[0] // world_size] * world_size
        result.zero_()
        torch.split(result, out)[rank].copy_(torch.split(data, sent)[rank])
        return _Done() if options.get("async_op") else None

    return exchanged


_COLLECTIVES = ("all_to_all_single", "all_gather_object", "all_gather_into_tensor", "all_reduce")
_SOME: dict[str, list[list[list[int]]]] = {
    "ids in every bag": [[[0], [1]], [[2], [3]], [[4], [5]]],
    "ids of one feature": [[[0], [1]], [[], []], [[], []]],
    "no ids": [[[], []], [[], []], [[], []]],
    "no samples": [[], [], []],
}


def _counted(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    names = [name for name in _COLLECTIVES if hasattr(dist, name)]
    for holder, mode in product(range(rank.world_size), ("ids alone", "weighted", "trained")):
        configs = [pipeline.EmbeddingBagConfig(7, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(3)]
        weights = [values_of((7, 4), number) for number in range(3)]
        whole = collection_of(pipeline, configs, weights, is_weighted=mode != "ids alone")
        cut = (pipeline.table_wise(holder), pipeline.table_wise(holder), pipeline.column_wise([holder]))
        plan = {f"t{i}": sharding for i, sharding in enumerate(cut)}
        counts = dict[str, list[int]]()
        for what, bags in _SOME.items():
            module = sharded_of(pipeline, whole, plan, "sgd", rank.group, device="cpu")
            ones = [[[1.0] * len(bag) for bag in feature] for feature in bags]
            batch = Jagged(["f0", "f1", "f2"], bags, None if mode == "ids alone" else ones).kjt(pipeline)
            if mode == "trained":
                batch.weights().requires_grad_()
            with ExitStack() as stack:
                pretended = {name: mock.Mock(side_effect=getattr(dist, name)) for name in names}
                pretended["all_to_all_single"].side_effect = _alone(rank.rank)
                for name, each in pretended.items():
                    stack.enter_context(mock.patch.object(dist, name, each))
                with succeeds("a step", where=f"{what}, {mode}, tables on rank {holder}"):
                    pooled = module(batch).values()
                    pooled.backward(torch.ones_like(pooled))
            counts[what] = [each.call_count for each in pretended.values()]
        for what, found in counts.items():
            where = f"{what}, {mode}, tables on rank {holder}: {names} of rank {rank.rank}"
            assert_equal(found, counts["ids in every bag"], where=where)


@requirement(
    "PIPE-624",
    "Every rank MUST make the same exchanges in a step, one that holds no table, sends no ids, gets none or has no "
    "samples too, with weights or none, trained or not: the others wait for it.",
)
def test_exchanges_of_nothing(rank_pool: Any) -> None:
    rank_pool.run(_counted, 2)
