"""H. Steps of the optimizer in the backward, behind a load: what goes on from them, and what is no step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.harness import Rank, assert_equal, raises, requirement, succeeds
from conformance.pipeline.batches import values_of
from conformance.pipeline.model import assert_bits
from conformance.pipeline.sharding import batches_of, collection_of, sharded_of, train
from twinproof.errors import ConfigError, MissingKeyError
from twinproof.optimizers import STEP_MAX

WIDTH, ROWS = 4, 8


def _config(pipeline: Any) -> Any:
    return pipeline.EmbeddingBagConfig(ROWS, WIDTH, "t", feature_names=["f"])


class _Job:
    """A collection over one key-value table, and its store."""

    def __init__(self, rank: Rank, optimizer: str) -> None:
        self.rank, self.pipeline, self.kvstore = rank, rank.component("pipeline"), rank.component("kvstore")
        layout = self.kvstore.RowLayout(WIDTH, optimizer=optimizer)
        self.store = self.kvstore.KVStore({"t": layout}, optimizer_in_row=True, clock=lambda: 1)
        collection = collection_of(self.pipeline, [_config(self.pipeline)], [values_of((ROWS, WIDTH), 1)])
        plan = {"t": self.pipeline.key_value(self.store, self.kvstore.Buckets(4))}
        self.sharded = sharded_of(self.pipeline, collection, plan, optimizer, rank.group, device="cpu")

    def train(self, steps: range) -> None:
        for step in steps:
            train(self.rank, self.sharded, batches_of(self.rank, ["f"], [ROWS], step), step, self.pipeline, "cpu")

    def rows(self) -> torch.Tensor:
        found: torch.Tensor = self.store.get("t", torch.arange(ROWS))
        return found


def _assert_same(job: _Job, other: _Job, step: int, where: str) -> None:
    assert_equal((job.store.step_count("t"), other.store.step_count("t")), (step, step), where=f"{where}: steps")
    assert_bits(job.rows(), other.rows(), f"{where}: rows")


def _resumed(rank: Rank, folder: str, optimizer: str) -> None:
    job, again, third = (_Job(rank, optimizer) for _ in range(3))
    job.train(range(1, 4))
    dealt = {"process_group": rank.group}
    job.kvstore.save(job.store, folder, buckets=job.kvstore.Buckets(4), **dealt)
    states = job.sharded.optimizer_state_dict()
    job.train(range(4, 6))
    # The rows alone, which have their step; then with the collection's, which is the same.
    for one, state in ((again, {}), (third, states)):
        where = f"{optimizer}, loaded with {sorted(state)}"
        one.kvstore.load(one.store, folder, **dealt)
        if state:
            one.sharded.load_optimizer_state_dict(state)
        one.train(range(4, 6))
        _assert_same(one, job, 5, where)
    # Where the collection is ahead of the table its step is taken.
    for one in (job, again, third):
        one.sharded.fused_optimizer.step_count = 9
        one.train(range(10, 11))
    _assert_same(again, job, 10, f"{optimizer}, set to 9")
    _assert_same(third, job, 10, f"{optimizer}, set to 9 behind its states")
    # Another module that trains the table counts on, and the collection behind it: as steps that are told.
    other, ids = again.kvstore.KVEmbedding(again.store, table="t", lr=0.5), torch.tensor([1, 2])
    other(ids).sum().backward()
    again.train(range(11, 12))
    job.store.apply_gradients("t", ids, torch.ones(2, WIDTH), 0.5, 11)
    job.sharded.fused_optimizer.step_count = 11
    job.train(range(11, 12))
    _assert_same(again, job, 12, f"{optimizer}, beside a KVEmbedding")


@requirement(
    "PIPE-689",
    "A key-value table whose rows were loaded with their step, or trained by another module, MUST be stepped by a "
    "collection with the step behind it, as if nothing had been stopped, and with the collection's own where that is "
    "larger; on every rank.",
)
@pytest.mark.parametrize("optimizer", ["adam", "partial_rowwise_adam", "lamb"])
def test_resumed(rank_pool: Any, tmp_path: Path, optimizer: str) -> None:
    for world_size in (1, 2):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        rank_pool.run(_resumed, world_size, str(folder), optimizer)


NO_STEPS: dict[str, Any] = {
    "text": "x",
    "none": None,
    "a list": [1, 2],
    "two": torch.tensor([1, 2]),
    "nothing": torch.tensor([], dtype=torch.int64),
    "negative": torch.tensor([-1]),
    "a half": torch.tensor([1.5]),
    "nan": torch.tensor([float("nan")]),
    "infinite": torch.tensor([float("inf")]),
    "the last": torch.tensor([STEP_MAX]),
    "too large": torch.tensor([2.0**63]),
    "complex": torch.tensor([1j]),
    "on meta": torch.zeros(1, device="meta"),
}
STEPS: dict[str, tuple[Any, int]] = {
    "an int": (7, 7),
    "int64": (torch.tensor([2**40]), 2**40),
    "float32": (torch.tensor(3.0), 3),
    "none yet": (torch.tensor([0]), 0),
    "the last but one": (torch.tensor(STEP_MAX - 1), STEP_MAX - 1),
}


def _holder(pipeline: Any, kind: str, seed: int) -> tuple[Any, Callable[[], dict[str, Any]], Callable[[Any], Any], str]:
    """A module of one table, what gives its state, what loads it, and the name of the step there."""
    weight = values_of((ROWS, WIDTH), seed)
    if kind == "lookups":
        optimizer = pipeline.FusedOptimizer("adam")
        module = pipeline.TableBatchedEmbeddingBags([_config(pipeline)], optimizer=optimizer, weights=[weight])
        return module, module.state_dict, module.load_state_dict, "step"
    collection = collection_of(pipeline, [_config(pipeline)], [weight])
    module = sharded_of(pipeline, collection, {"t": pipeline.row_wise()}, "adam", device="cpu")
    return module, module.optimizer_state_dict, module.load_optimizer_state_dict, "fused_optimizer.step"


def _numbers(module: Any, kind: str) -> list[torch.Tensor]:
    if kind == "lookups":
        return [value.clone() for value in module.state_dict().values()]
    _, weight, states = module.local_shards()["t"]
    return [weight.clone(), *(state.clone() for state in states.values())]


@requirement(
    "PIPE-693",
    "A step in a state dict of tables that is not one whole number which a step can follow MUST be refused by name "
    "before any table, state or step is changed; what is one MUST be taken, whatever holds it.",
)
@pytest.mark.parametrize("kind", ["lookups", "sharded"])
def test_no_steps(pipeline: Any, kind: str) -> None:
    module, _, load, name = _holder(pipeline, kind, 1)
    _, give, _, _ = _holder(pipeline, kind, 2)
    state = {key: value if key == name else value.clone() for key, value in give().items()}
    if kind == "sharded":
        for part in (value for key, value in state.items() if key != name):
            part.to_local().fill_(1)
    module.fused_optimizer.step_count = 5
    before = _numbers(module, kind)
    for where, wrong in NO_STEPS.items():
        with raises(ConfigError, mentions=(f"where: {name}", "one whole number from 0"), where=f"{kind}, {where}"):
            load({**state, name: wrong})
        assert_equal(module.fused_optimizer.step_count, 5, where=f"{kind}, steps after {where}")
        for found, expected in zip(_numbers(module, kind), before, strict=True):
            assert_bits(found, expected, f"{kind}, after {where}")
    for where, (given, expected_count) in STEPS.items():
        with succeeds("a load", where=f"{kind}, {where}"):
            load({**state, name: given})
        got = (type(module.fused_optimizer.step_count), module.fused_optimizer.step_count)
        assert_equal(got, (int, expected_count), where=f"{kind}, {where}")


@requirement(
    "PIPE-694",
    "The optimizer in the backward MUST refuse a state dict of its own without its learning rate or step, or with a "
    "step that is none, by name, and go on as if nothing had been loaded.",
)
def test_handles(pipeline: Any) -> None:
    module, _, _, _ = _holder(pipeline, "sharded", 1)
    handle = module.fused_optimizer
    handle.step_count = 5
    good = handle.state_dict()
    (group,) = good["param_groups"]
    before = dict(handle.param_groups[0])
    for name in ("lr", "step_count"):
        without = {key: value for key, value in group.items() if key != name}
        with raises(MissingKeyError, mentions=(name, "where: param_groups"), where=f"without {name}"):
            handle.load_state_dict({**good, "param_groups": [without]})
        assert_equal(handle.param_groups[0], before, where=f"the group, after one without {name}")
    for where, wrong in NO_STEPS.items():
        with raises(ConfigError, mentions=("where: step_count",), where=where):
            handle.load_state_dict({**good, "param_groups": [{**group, "step_count": wrong}]})
        with raises(ConfigError, mentions=("where: step_count",), where=f"{where}, assigned"):
            handle.step_count = wrong
        assert_equal(handle.step_count, 5, where=f"steps, after {where}")
    for where, (given, count) in STEPS.items():
        with succeeds("a load", where=where):
            handle.load_state_dict({**good, "param_groups": [{**group, "step_count": given}]})
        assert_equal((type(handle.step_count), handle.step_count), (int, count), where=where)


@requirement(
    "PIPE-695",
    "Options of torch's optimizers in the group of the optimizer in the backward, which no step reads, MUST be refused "
    "by name by the next backward, which is no step: neither table nor step count changes. 0 and False of those that "
    "its formula does without MUST pass.",
)
@pytest.mark.parametrize("kind", ["lookups", "sharded"])
def test_unread_options(pipeline: Any, kind: str) -> None:
    module, _, _, _ = _holder(pipeline, kind, 1)
    batch = pipeline.KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([2]))

    def backward() -> None:
        made = module(batch).values() if kind == "sharded" else module(batch.values(), batch.offsets())
        made.sum().backward()

    (group,), before = module.fused_optimizer.param_groups, _numbers(module, kind)
    constants = {"eps": 1e-3, "betas": (0.5, 0.5), "beta1": 0.5, "beta2": 0.5}
    without = {"weight_decay": 0.5, "momentum": 0.9, "dampening": 0.5, "lr_decay": 0.5}
    without |= dict.fromkeys(("nesterov", "amsgrad", "maximize"), True)
    for name, value in (constants | without).items():
        group[name] = value
        words = "FusedOptimizer('adam'" if name in constants else f"'adam' in the backward has no {name}"
        with raises(ConfigError, mentions=(f"where: {name}", f"got: {value}", words), where=name):
            backward()
        del group[name]
        assert_equal(module.fused_optimizer.step_count, 0, where=f"steps, after {name}")
        for found, expected in zip(_numbers(module, kind), before, strict=True):
            assert_bits(found, expected, f"after {name}")
    # What a scheduler keeps there is its own.
    group |= {"initial_lr": 0.5, "max_lr": 1.0} | {name: type(value)() for name, value in without.items()}
    with succeeds("a backward", where="options of schedulers, and those without which it steps"):
        backward()
    assert_equal(module.fused_optimizer.step_count, 1, where="steps")
