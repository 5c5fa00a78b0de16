"""H. State dicts of the optimizer in a backward, as frameworks save and load them: by the optimizer alone."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)

from conformance.harness import Rank, assert_equal, raises, requirement, succeeds
from conformance.pipeline.batches import values_of
from conformance.pipeline.model import assert_bits
from conformance.pipeline.sharding import batches_of, collection_of, sharded_of, train
from twinproof.errors import ConfigError, MissingKeyError, ShapeError, UnsupportedError
from twinproof.optimizers import FUSED_OPTIMIZERS

ROWS, WIDTH, NAMES = 8, 4, ("a", "b")
# One process, of no group.
ALONE = Rank(0, 1, cast(Any, None), "")


def _made(pipeline: Any, rank: Rank, optimizer: str, kinds: tuple[str, str], seed: int) -> Any:
    """Two tables cut in these ways, none of which has stepped."""
    last = rank.world_size - 1
    configs = [pipeline.EmbeddingBagConfig(ROWS, WIDTH, name, feature_names=[name]) for name in NAMES]
    collection = collection_of(pipeline, configs, [values_of((ROWS, WIDTH), seed + i) for i in range(2)])
    ranks = {"table_wise": (last,), "column_wise": (range(rank.world_size),)}
    plan = {n: getattr(pipeline, kind)(*ranks.get(kind, ())) for n, kind in zip(NAMES, kinds, strict=True)}
    return sharded_of(pipeline, collection, plan, optimizer, rank.group, device="cpu")


def _train(pipeline: Any, rank: Rank, sharded: Any, steps: range) -> None:
    for step in steps:
        batches = batches_of(rank, list(NAMES), [ROWS, ROWS], step)
        train(rank, sharded, batches, step, pipeline, "cpu")


def _assert_same(found: Any, expected: Any, where: str) -> None:
    """Tables, states and step are equal, bit for bit."""
    got, want = found.local_shards(), expected.local_shards()
    assert_equal(list(got), list(want), where=f"{where}: tables")
    for name, (_, weight, states) in got.items():
        assert_bits(weight, want[name][1], f"{where}: weight of {name}")
        assert_equal(list(states), list(want[name][2]), where=f"{where}: states of {name}")
        for state, value in states.items():
            assert_bits(value, want[name][2][state], f"{where}: {state} of {name}")
    counts = (found.fused_optimizer.step_count, expected.fused_optimizer.step_count)
    assert_equal(counts[0], counts[1], where=f"{where}: steps")


def _through_file(state: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, **options)


def _to(value: Any, device: str) -> Any:
    """As accelerate sends an optimizer's state dict when it prepares the optimizer."""
    if isinstance(value, dict):
        return {key: _to(each, device) for key, each in value.items()}
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _resumed(rank: Rank, optimizer: str) -> None:
    pipeline = rank.component("pipeline")
    kinds = ("row_wise", "table_wise")
    job = _made(pipeline, rank, optimizer, kinds, 1)
    _train(pipeline, rank, job, range(1, 3))
    job.fused_optimizer.param_groups[0]["lr"] = 0.5
    saved = _through_file({"model": job.state_dict(), "optimizer": job.fused_optimizer.state_dict()})
    _train(pipeline, rank, job, range(3, 5))
    again = _made(pipeline, rank, optimizer, kinds, 5)
    _train(pipeline, rank, again, range(7, 8))
    again.load_state_dict(saved["model"])
    with succeeds("a load", where=optimizer):
        again.fused_optimizer.load_state_dict(saved["optimizer"])
    assert_equal(again.fused_optimizer.param_groups[0]["lr"], 0.5, where="learning rate")
    _train(pipeline, rank, again, range(3, 5))
    _assert_same(again, job, f"{optimizer}, resumed by the optimizer's state dict")
    # Its own, sent to where it is, is what accelerate loads into it.
    with succeeds("a load of its own", where=optimizer):
        again.fused_optimizer.load_state_dict(_to(again.fused_optimizer.state_dict(), "cpu"))
    _assert_same(again, job, f"{optimizer}, prepared")
    _assert_apart(pipeline, rank, again, copy.deepcopy(again), f"{optimizer}, deepcopy")


def _assert_apart(pipeline: Any, rank: Rank, sharded: Any, copied: Any, where: str) -> None:
    """A copy has states of its own, which its optimizer saves and loads."""
    states = {name: value.clone() for name, value in _parts(copied).items()}
    assert_equal(sorted(states), sorted(_parts(sharded)), where=f"{where}: states of the copy")
    _train(pipeline, rank, sharded, range(8, 9))
    for name, value in _parts(copied).items():
        assert_bits(value, states[name], f"{where}: {name}")
    with succeeds("a load", where=where):
        copied.fused_optimizer.load_state_dict(sharded.fused_optimizer.state_dict())
    copied.load_state_dict(sharded.state_dict())
    _assert_same(copied, sharded, where)


def _parts(sharded: Any) -> dict[str, torch.Tensor]:
    """The values of every state in the optimizer's state dict, by name."""
    named = sharded.fused_optimizer.state_dict()["state"].items()
    found = {f"{weight}, {name}": part.to_local() for weight, held in named for name, part in held.items()}
    return {name: local for name, local in found.items() if local is not None}


@requirement(
    "PIPE-740",
    "The state dict of the optimizer in the backward of cut tables MUST have each state of each of them, so that a "
    "collection which loads it beside its tables goes on as the one that it was taken of, bit for bit; for a copy of a "
    "collection, too, apart from the original.",
)
@pytest.mark.parametrize("optimizer", FUSED_OPTIMIZERS)
def test_resumed(pipeline: Any, rank_pool: Any, optimizer: str) -> None:
    for world_size in (1, 2):
        rank_pool.run(_resumed, world_size, optimizer)
    sharded, _ = _alone(pipeline, optimizer)
    _assert_apart(pipeline, ALONE, sharded, pickle.loads(pickle.dumps(sharded)), f"{optimizer}, pickle")


def _alone(pipeline: Any, optimizer: str) -> tuple[Any, dict[str, Any]]:
    """Tables that have stepped, and the state dict of their optimizer with whole tensors of ones."""
    sharded = _made(pipeline, ALONE, optimizer, ("row_wise", "table_wise"), 1)
    _train(pipeline, ALONE, sharded, range(1, 3))
    state = sharded.fused_optimizer.state_dict()
    other = {w: {n: torch.ones(tuple(part.shape)) for n, part in held.items()} for w, held in state["state"].items()}
    return sharded, {**state, "state": other}


@requirement(
    "PIPE-741",
    "The optimizer in the backward of cut tables MUST refuse a state dict by name that lacks a state of a table, has "
    "one of another, or one that does not fit, and one without groups, as torchrec saves them; then neither states nor "
    "learning rate nor step have changed. A state dict without states MUST NOT pass for one.",
)
def test_refused(pipeline: Any) -> None:
    sharded, good = _alone(pipeline, "adam")
    states, weight = good["state"], "embedding_bags.b.weight"
    group = {**good["param_groups"][0], "lr": 7.0, "step_count": 9}
    without = {name: value for name, value in states[weight].items() if name != "b.momentum2"}
    last = f"{weight}: b.momentum2"
    wrong: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
        "no states": (MissingKeyError, {}, ("momentum1", "momentum2", "where: state")),
        "no table": (MissingKeyError, {name: states[name] for name in states if name != weight}, (last,)),
        "no state": (MissingKeyError, {**states, weight: without}, (last,)),
        "another table": (ConfigError, {**states, "embedding_bags.c.weight": {"c.m": 1}}, ("embedding_bags.c.weight",)),
        "another state": (ConfigError, {**states, weight: {**states[weight], "b.m": 1}}, ("b.m",)),
        "no dictionary": (ConfigError, {**states, weight: torch.ones(1)}, (weight, "state name -> tensor")),
        "another shape": (ShapeError, {**states, weight: {**states[weight], "b.momentum2": torch.ones(1, 1)}}, (last,)),
        "no tensor": (UnsupportedError, {**states, weight: {**states[weight], "b.momentum2": 1}}, (last,)),
    }
    before, counts = {name: value.clone() for name, value in _parts(sharded).items()}, dict(_group(sharded))

    def assert_unchanged(where: str) -> None:
        assert_equal(_group(sharded), counts, where=f"the group, after {where}")
        for name, value in _parts(sharded).items():
            assert_bits(value, before[name], f"{name}, after {where}")

    for where, (kind, given, words) in wrong.items():
        with raises(kind, mentions=words, where=where):
            sharded.fused_optimizer.load_state_dict({**good, "param_groups": [group], "state": given})
        assert_unchanged(where)
    for name in ("state", "param_groups"):
        with raises(MissingKeyError, mentions=("KeyedOptimizer",), where=f"without {name}"):
            sharded.fused_optimizer.load_state_dict({key: good[key] for key in good if key != name})
        assert_unchanged(f"one without {name}")
    with succeeds("a load", where="whole tensors"):
        sharded.fused_optimizer.load_state_dict({**good, "param_groups": [group]})
    assert_equal((_group(sharded)["lr"], _group(sharded)["step_count"]), (7.0, 9), where="the group")
    for name, value in _parts(sharded).items():
        assert_bits(value, torch.ones_like(value), f"{name}, loaded from whole tensors")


def _group(sharded: Any) -> dict[str, Any]:
    (group,) = sharded.fused_optimizer.param_groups
    return {name: value for name, value in group.items() if name != "params"}


@requirement(
    "PIPE-742",
    "A handle whose tables are not there MUST say so: its state dict is refused by name where its collection was "
    "deleted, and a copy of the handle alone, or that of lookups which are not cut, refuses states that it has no "
    "table for.",
)
def test_without_tables(pipeline: Any) -> None:
    sharded, good = _alone(pipeline, "adagrad")
    config = pipeline.EmbeddingBagConfig(ROWS, WIDTH, "a", feature_names=["a"])
    lookups = pipeline.TableBatchedEmbeddingBags([config], optimizer=pipeline.FusedOptimizer("adagrad"))
    apart = copy.deepcopy(sharded.fused_optimizer)
    assert_equal(apart.state_dict()["state"], {}, where="states of a copy alone")
    for where, handle in (("a copy alone", apart), ("lookups", lookups.fused_optimizer)):
        with raises(ConfigError, mentions=("embedding_bags.a.weight", "where: state"), where=where):
            handle.load_state_dict(good)
        with succeeds("a load without states", where=where):
            handle.load_state_dict({**good, "state": {}})
        assert_equal(handle.step_count, 2, where=f"steps of {where}")
    handle = sharded.fused_optimizer
    del sharded
    for where, work in (("state_dict", handle.state_dict), ("load", lambda: handle.load_state_dict(good))):
        with raises(UnsupportedError, mentions=("collection that was deleted",), where=where):
            work()


def _pieces(sharded: Any) -> list[tuple[str, str, tuple[slice, slice], torch.Tensor]]:
    """Table, state, rows and columns, and the values there, of this rank's parts."""
    return [
        (name, state, (slice(*shard.rows), slice(*shard.columns)), value.clone())
        for name, (shard, _, states) in sharded.local_shards().items()
        for state, value in states.items()
    ]


def _whole(ranks: list[Any]) -> dict[tuple[str, str], torch.Tensor]:
    found = dict[tuple[str, str], torch.Tensor]()
    for name, state, place, value in (piece for pieces in ranks for piece in pieces):
        found.setdefault((name, state), torch.full((ROWS, WIDTH), float("nan")))[place] = value
    return found


def _saved(rank: Rank, folder: str, kinds: tuple[str, str]) -> Any:
    pipeline = rank.component("pipeline")
    job = _made(pipeline, rank, "adam", kinds, 1)
    _train(pipeline, rank, job, range(1, 3))
    dcp.save({"o": job.fused_optimizer}, checkpoint_id=folder, process_group=rank.group)
    return _pieces(job)


def _loaded(rank: Rank, folder: str, kinds: tuple[str, str]) -> Any:
    pipeline = rank.component("pipeline")
    job = _made(pipeline, rank, "adam", kinds, 1)
    with succeeds("dcp.load", where=f"{kinds} on {rank.world_size}"):
        dcp.load({"o": job.fused_optimizer}, checkpoint_id=folder, process_group=rank.group)
    assert_equal(job.fused_optimizer.step_count, 2, where="steps")
    return _pieces(job)


@requirement(
    "PIPE-743",
    "What torch's distributed checkpoint saves of the optimizer in the backward MUST load into that of any other plan "
    "or number of ranks, each state of each cut table bit for bit.",
)
def test_other_plans(rank_pool: Any, tmp_path: Path) -> None:
    plans = (("row_wise", "table_wise"), ("column_wise", "row_wise"))
    for saving, loading, order in ((2, 1, 1), (1, 2, 1), (2, 2, -1)):
        folder, (first, second) = str(tmp_path / f"{saving}{loading}{order}"), plans[::order]
        expected = _whole(rank_pool.run(_saved, saving, folder, first))
        found = _whole(rank_pool.run(_loaded, loading, folder, second))
        assert_equal(sorted(found), [(n, f"momentum{i}") for n in NAMES for i in (1, 2)], where="states")
        for (name, state), value in found.items():
            assert_bits(value, expected[name, state], f"{state} of {name}, {first} on {saving}, {second} on {loading}")
            assert_equal(bool(value.any()), True, where=f"whether {state} of {name} has stepped")


@requirement(
    "PIPE-795",
    "Torch's functions that name states by a model's parameters MUST be refused by name for the optimizer "
    "in a backward, to save and to load, alone or beside others; its own state dicts go on behind them, and are saved "
    "from hooks of the model's, too.",
)
def test_states_by_names_of_parameters(pipeline: Any) -> None:
    sharded = _made(pipeline, ALONE, "adam", ("row_wise", "table_wise"), 1)
    dense = torch.nn.Linear(WIDTH, 1)
    model, handle = torch.nn.ModuleDict({"tables": sharded, "dense": dense}), sharded.fused_optimizer
    plain = torch.optim.Adam(dense.parameters())
    said = ("no parameters of a model", "where: fused_optimizer", "load_state_dict()")
    for optimizers in ([handle], [plain, handle]):
        where = f"{len(optimizers)} optimizers"
        with raises(UnsupportedError, mentions=said, where=f"get_optimizer_state_dict, {where}"):
            get_optimizer_state_dict(model, optimizers)
        with raises(UnsupportedError, mentions=said, where=f"get_state_dict, {where}"):
            get_state_dict(model, optimizers)
    with raises(UnsupportedError, mentions=said, where="set_optimizer_state_dict"):
        set_optimizer_state_dict(model, [handle], {"state": {}, "param_groups": []})
    with succeeds("get_optimizer_state_dict", where="of the dense optimizer"):
        get_optimizer_state_dict(model, [plain])
    found: list[Any] = []

    def hook(*_: Any) -> None:
        found.append(handle.state_dict())

    model.register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]
    with succeeds("a state dict", where="in a hook of the model's, which torch asks for"):
        get_model_state_dict(model)
        handle.load_state_dict(found[0])
    assert_equal(len(found), 1, where="state dicts in the hook")
