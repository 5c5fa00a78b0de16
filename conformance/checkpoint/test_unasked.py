"""What a checkpoint has of an object and a fresh one does not ask for: an object gets back all that it said."""

from __future__ import annotations

import itertools
import math
import pickle
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from conformance.checkpoint.trainer import Said, alone
from conformance.harness import Rank, assert_equal, assert_same_tensor, raises, requirement, succeeds
from twinproof.errors import MissingKeyError, PlanError


class _Odd(int):
    """A number whose text is that of another kind."""


def _run(said: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), {"loader": Said(said)}


def _save(checkpoint: Any, folder: Path, said: Any) -> None:
    model, optimizer, states = _run(said)
    with alone():
        checkpoint.save_training(folder / "step-1", model, optimizer, 1, states=states, durable=False)


def _load(checkpoint: Any, folder: Path, way: str, said: Any) -> Any:
    """What an object has that said this, when it was restored."""
    model, optimizer, states = _run(said)
    _load_into(checkpoint, folder, way, model, optimizer, states)
    return states["loader"].said


def _load_into(checkpoint: Any, folder: Path, way: str, model: Any, optimizer: Any, states: dict[str, Any]) -> None:
    with alone():
        if way == "load_training":
            checkpoint.load_training(folder / "step-1", model, optimizer, states=states)
            return
        options = {"optimizers": optimizer, "states": states, "interval": 1, "durable": False}
        with checkpoint.CheckpointManager(folder, model=model, **options) as manager:
            assert_equal(manager.load(), True, where="a load")


def _plain(value: Any) -> Any:
    """The same with tensors as lists, and mappings as dictionaries."""
    if isinstance(value, torch.Tensor):
        return ["tensor", str(value.dtype), value.tolist()]
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


# What an object said when it was saved, and what a fresh one says.
_CASES: dict[str, tuple[Any, Any]] = {
    "counts": (Counter(wiki=3, books=2), Counter()),
    "more counts": (Counter(wiki=3, books=2), Counter(wiki=1)),
    "counts by number": (Counter({1: 3, 2: 5}), Counter({1: 1, 2: 1})),
    "a mapping that is empty": ({"at": {"wiki": 10}, "n": 1}, {"at": {}, "n": 0}),
    "a mapping of tensors": (defaultdict(list, a=torch.ones(2), b=torch.tensor(3)), defaultdict(list)),
    "more of a nested one": ({"a": {"b": {"x": 1, "y.z": 2}}}, {"a": {"b": {"x": 0}}}),
    "mappings of a list": ({"q": [{"x": 1}, {"x": 2, "y": 5}]}, {"q": [{"x": 0}]}),
    "a list that is empty": ({"q": [{"x": 1}, torch.ones(2), 7]}, {"q": []}),
    "a tensor not made yet": ({"ema": torch.ones(3, dtype=torch.float64)}, {"ema": None}),
    "a mapping not made yet": ({"buffer": {"x": [1, 2]}}, {"buffer": None}),
    "a number where a mapping was to be": ({"buffer": 5}, {"buffer": {}}),
    "in order": (OrderedDict(b=1, a=2), OrderedDict()),
    "by its own keys": ({"at": {0: 4, None: 5}}, {"at": {0: 0, None: 0}}),
    "numbers": ({"at": {0: 4, -1: torch.ones(2), "wiki": 3}}, {"at": {}}),
    "more numbers": (Counter({1: 3, 2: 5}), Counter({2: 1})),
    "None, tuples, bytes, truth": ({"at": {None: 1, (1, "a"): 2, b"x": 3, True: 4, 1.5: 5}}, {"at": None}),
    "numbers in a list": ({"q": [{3: {4: 5}}, {6: 7}]}, {"q": []}),
    "numbers in some of a list": ({"q": [{3: 1}, {6: 7}]}, {"q": [{3: 0}]}),
    "text that begins as a number": ({"at": {"1st": 1, "(": 2}}, {"at": {}}),
    "text of numbers": ({"at": {"7": 1}}, {"at": {"7": 0}}),
    "an optimizer's own": ({"state": {0: {"step": torch.tensor(2.0)}}, "param_groups": [{"lr": 0.1}]}, {"state": {}}),
}


@requirement(
    "CKPT-832",
    "An object MUST get back all that it said when it was saved, from load_training and from a manager: entries of "
    "mappings and lists that a fresh one does not have yet, too; what a fresh one said itself stays as it was.",
)
@pytest.mark.parametrize("way", ["load_training", "a manager"])
def test_entries_of_objects(checkpoint: Any, tmp_path: Path, way: str) -> None:
    for number, (what, (said, fresh)) in enumerate(_CASES.items()):
        _save(checkpoint, tmp_path / f"{number}", said)
        before = _plain(fresh)
        with succeeds("a load", where=what):
            found = _load(checkpoint, tmp_path / f"{number}", way, fresh)
        assert_equal(_plain(found), _plain(said), where=what)
        assert_equal(type(found), type(said), where=f"{what}: what it is")
        if not isinstance(before, dict) or set(before) != set(_plain(said)):
            assert_equal(_plain(fresh), before, where=f"{what}: what a fresh one said")


@requirement(
    "CKPT-900",
    "An object that says more by now than when it was saved, as after a step back in a run, MUST get back what it said "
    "then, as from torch.load: entries that the checkpoint lacks MUST be gone, and one value be back where it has "
    "several by now. One of which the checkpoint has nothing MUST be refused by name, unless it said nothing.",
)
@pytest.mark.parametrize("way", ["load_training", "a manager"])
def test_step_back(checkpoint: Any, tmp_path: Path, way: str) -> None:
    longer: dict[str, tuple[Any, Any]] = {
        "one value beside a tensor": (
            {"t": torch.ones(1), "b": None},
            {"t": torch.zeros(1), "b": {"x": torch.ones(2)}},
        ),
        "a list in the middle": ({"q": [{"x": 1}]}, {"q": [{"x": 5}, {"y": 6}, torch.ones(2)], "n": {"m": {"k": 1}}}),
    }
    for number, (what, (now, said)) in enumerate([*_CASES.items(), *((k, v[::-1]) for k, v in longer.items())]):
        # Of a mapping without entries a checkpoint has nothing.
        if what == "a number where a mapping was to be":
            continue
        _save(checkpoint, tmp_path / f"{number}", said)
        before, expected = _plain(now), _plain(said)
        with succeeds("a load", where=what):
            found = _load(checkpoint, tmp_path / f"{number}", way, now)
        # The object's own mappings stay, without entries.
        expected = {**{key: {} for key, each in before.items() if isinstance(each, dict)}, **expected}
        assert_equal(_plain(found), expected, where=what)
        assert_equal(type(found), type(said), where=f"{what}: what it is")
        assert_equal(list(_plain(now)), list(before), where=f"{what}: keys of what the object had said")
    model, optimizer, _ = _run(None)
    with alone():
        checkpoint.save_training(tmp_path / "other" / "step-1", model, optimizer, 1, durable=False)
    now = {"at": {"wiki": 5}}
    with raises(MissingKeyError, mentions=("nothing of an object", "loader"), where="an object that was not saved"):
        _load(checkpoint, tmp_path / "other", way, now)
    assert_equal(now, {"at": {"wiki": 5}}, where="what an object had that was not saved")


@requirement(
    "CKPT-989",
    "An object of which a checkpoint has nothing MUST be refused by name beside others whose names begin with its own, "
    "or end or go on as it does; nothing of any object is changed.",
)
@pytest.mark.parametrize("way", ["load_training", "a manager"])
@pytest.mark.parametrize("saved", ["loader_valid", "loader2", "loader-eval", "a.loader", "loader 0.seen"])
def test_names_that_begin_alike(checkpoint: Any, tmp_path: Path, saved: str, way: str) -> None:
    model, optimizer, _ = _run(None)
    with alone():
        states = {saved: Said({"seen": 7})}
        checkpoint.save_training(tmp_path / "step-1", model, optimizer, 1, states=states, durable=False)
    for said in ({"seen": 0}, {"seen": 0, "file": "a"}, {"at": {"wiki": 5}}):
        states = {saved: Said({"seen": 0}), "loader": Said(said)}
        with raises(MissingKeyError, mentions=("nothing of an object", "got: loader;"), where=f"{saved} beside {said}"):
            _load_into(checkpoint, tmp_path, way, model, optimizer, states)
        found = {name: state.said for name, state in states.items()}
        assert_equal(found, {saved: {"seen": 0}, "loader": said}, where=f"{saved} beside {said}: what objects have")


# What an object said when it was saved, and what a fresh one says: tensors of another dtype or size.
_UNLIKE: dict[str, tuple[Any, Any]] = {
    "a fraction": ({"best": torch.tensor(0.875)}, {"best": torch.tensor(0)}),
    "a large count": ({"seen": torch.tensor(2**24 + 1)}, {"seen": torch.tensor(0.0)}),
    "double precision": ({"sum": [torch.tensor([0.1], dtype=torch.float64)]}, {"sum": [torch.zeros(1)]}),
    "more values": ({"losses": torch.arange(3.0), "n": 3}, {"losses": torch.empty(0), "n": 0}),
    "fewer values": ({"losses": torch.arange(2.0)}, {"losses": torch.zeros(2, 3)}),
}


def _parts_unlike(rank: Rank, path: str) -> None:
    checkpoint, own = rank.component("checkpoint"), f"rank {rank.rank}"
    said = {own: torch.tensor(0.5 + rank.rank), "seen": torch.tensor(0.25)}
    _save(checkpoint, Path(path), said)
    # The fresh object of one rank fits all that it said, and that of the other nothing.
    found = _load(
        checkpoint,
        Path(path),
        "load_training",
        {own: torch.tensor([0, 0.0][rank.rank]), "seen": torch.tensor(rank.rank)},
    )
    assert_equal(_plain(found), _plain(said), where=own)
    mesh = init_device_mesh("cpu", (rank.world_size,))
    whole = torch.arange(4, dtype=torch.float64) / 3
    _save(checkpoint, Path(path) / "cut", {"cut": distribute_tensor(whole, mesh, [Shard(0)])})
    fresh = {"cut": distribute_tensor(torch.zeros(4), mesh, [Shard(0)])}
    found = _load(checkpoint, Path(path) / "cut", "load_training", fresh)["cut"]
    assert_equal(found.placements, (Shard(0),), where=f"{own}: how it is cut")
    assert_same_tensor(found.full_tensor(), whole, where=f"{own}: a tensor that is cut")


@requirement(
    "CKPT-901",
    "A tensor of an object, and a tensor option of an optimizer, MUST come back with the dtype, size and value that it "
    "was saved with, as from torch.load, whatever a fresh one has in its place; each rank MUST get its own alone.",
)
@pytest.mark.parametrize("way", ["load_training", "a manager"])
def test_other_dtypes_and_sizes(checkpoint: Any, rank_pool: Any, tmp_path: Path, way: str) -> None:
    for number, (what, (said, fresh)) in enumerate(_UNLIKE.items()):
        _save(checkpoint, tmp_path / f"{number}", said)
        with succeeds("a load", where=what):
            found = _load(checkpoint, tmp_path / f"{number}", way, fresh)
        assert_equal(_plain(found), _plain(said), where=what)
    for number, (saved, fresh) in enumerate(((0.25, 1), (0.25, 1.0), (1 / 3, None))):
        path = tmp_path / f"rate {number}"
        model = torch.nn.Linear(2, 2)
        rate = torch.tensor(saved, dtype=torch.float64)
        with alone():
            checkpoint.save_training(
                path / "step-1", model, torch.optim.SGD(model.parameters(), lr=rate), 1, durable=False
            )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5 if fresh is None else torch.tensor(fresh))
        with alone(), succeeds("a load", where=f"a rate of {fresh}"):
            if way == "load_training":
                checkpoint.load_training(path / "step-1", model, optimizer)
            else:
                with checkpoint.CheckpointManager(path, model=model, optimizers=optimizer, interval=1) as manager:
                    manager.load()
        assert_equal(_plain(optimizer.param_groups[0]["lr"]), _plain(rate), where=f"a rate in place of {fresh}")
    if way == "load_training":
        rank_pool.run(_parts_unlike, 2, str(tmp_path / "parts"))


@requirement(
    "CKPT-833",
    "Entries for which an object has no place and whose keys may have been numbers, None or tuples MUST be refused by "
    "name, with where they are, where the checkpoint does not say what they were; the object MUST keep what it had.",
)
def test_keys_that_may_be_numbers(checkpoint: Any, tmp_path: Path) -> None:
    # What is a number and what its text cannot be told apart behind a save.
    cases: dict[str, tuple[Any, Any, str]] = {
        "7": ({"at": {7: 1, "8": 2}}, {"at": {}}, "loader.at"),
        "-2": ({"at": {"-2": 1, 1: 1}}, {"at": {1: 0}}, "loader.at"),
        "None": ({"None": 1}, {}, "loader"),
        "3": ({"a": [{_Odd(3): 1}]}, {"a": []}, "loader.a.0"),
    }
    for number, (key, (said, fresh, place)) in enumerate(cases.items()):
        _save(checkpoint, tmp_path / f"{number}", said)
        before = _plain(fresh)
        with raises(PlanError, mentions=("no place", repr(key), f"where: {place}"), where=f"key {key}"):
            _load(checkpoint, tmp_path / f"{number}", "load_training", fresh)
        assert_equal(_plain(fresh), before, where=f"key {key}: what the object had")


def _in_parts(rank: Rank, path: str) -> None:
    # Each rank has what is its own beside what all have, as data loaders do.
    checkpoint, own = rank.component("checkpoint"), f"rank {rank.rank}"
    _save(checkpoint, Path(path), {own: rank.rank, "seen": {"wiki": 3}})
    found = _load(checkpoint, Path(path), "load_training", {own: -1, "seen": {}})
    assert_equal(found, {own: rank.rank, "seen": {"wiki": 3}}, where=f"{own}: what none asks for, and its own")
    fresh = {own: -1, "seen": {} if rank.rank else {"wiki": 0}}
    found = _load(checkpoint, Path(path), "a manager", fresh)
    seen = {} if rank.rank else {"wiki": 3}
    assert_equal(found, {own: rank.rank, "seen": seen}, where=f"{own}: what another rank asks for")
    with raises(PlanError, mentions=("no place",), where=f"{own}: keys that may be numbers"):
        _save(checkpoint, Path(path) / "n", {"at": {"7": 1}})
        _load(checkpoint, Path(path) / "n", "load_training", {"at": {}})


@requirement(
    "CKPT-834",
    "Entries of objects that no rank asks for MUST be loaded on every rank, and those that some rank asks for only "
    "there: states may be in parts.",
)
def test_objects_in_parts(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_in_parts, 2, str(tmp_path))


@requirement(
    "CKPT-825",
    "A load MUST be refused, and the object keep what it had, where the checkpoint has one value for all that the "
    "object says; a checkpoint whose planner kept no paths MUST load what the objects ask for.",
)
def test_one_value_for_entries_and_no_paths(checkpoint: Any, tmp_path: Path) -> None:
    _save(checkpoint, tmp_path / "one", 5)
    fresh = {"a": 1}
    with raises(CheckpointException, where="one value for all of the object"):
        _load(checkpoint, tmp_path / "one", "load_training", fresh)
    assert_equal(fresh, {"a": 1}, where="what the object had")
    _save(checkpoint, tmp_path, {"at": {"wiki": 10}})
    metadata = tmp_path / "step-1" / ".metadata"
    # As DefaultSavePlanner(flatten_state_dict=False) leaves it.
    metadata.write_bytes(pickle.dumps(replace(pickle.loads(metadata.read_bytes()), planner_data=None)))
    with succeeds("a load", where="no paths"):
        found = _load(checkpoint, tmp_path, "load_training", {"at": {"wiki": 0}})
    assert_equal(found, {"at": {"wiki": 10}}, where="no paths")


@requirement(
    "CKPT-955",
    "An object whose state is no mapping, but a number, a list or a tensor, MUST get back what it said when it was "
    "saved, from load_training and from a manager.",
)
@pytest.mark.parametrize("way", ["load_training", "a manager"])
def test_other_than_mappings(checkpoint: Any, tmp_path: Path, way: str) -> None:
    cases: dict[str, tuple[Any, Any]] = {
        "a number": (5, 0),
        "a list of values": ([1, 2], []),
        "a list of tensors": ([torch.ones(2), 7], [torch.zeros(2), 0]),
        "a tensor": (torch.ones(2), torch.zeros(2)),
    }
    for what, (said, fresh) in cases.items():
        _save(checkpoint, tmp_path / what, said)
        with succeeds("a load", where=what):
            found = _load(checkpoint, tmp_path / what, way, fresh)
        assert_equal(_plain(found), _plain(said), where=what)


@requirement(
    "CKPT-956",
    "An object that says nothing before a load, or has mappings without entries alone, MUST stay as it is where the "
    "checkpoint has nothing of it, as of one that came to the states since.",
)
def test_nothing_of_an_object(checkpoint: Any, tmp_path: Path) -> None:
    model, optimizer, _ = _run(None)
    with alone():
        checkpoint.save_training(tmp_path / "step-1", model, optimizer, 1, durable=False)
    cases: list[dict[str, Any]] = [{}, {"at": {}}, {"at": {"by": {}}}]
    for now in cases:
        for way in ("load_training", "a manager"):
            with succeeds("a load", where=f"{now}, {way}"):
                found = _load(checkpoint, tmp_path, way, now)
            assert_equal(found, now, where=f"what the object has, {way}")


class _History(torch.optim.Optimizer):
    """Keeps some numbers of each parameter."""

    def __init__(self, params: Any, count: int) -> None:
        super().__init__(params, {"lr": 0.1})
        self.count = count

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Give each parameter its state."""
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("history", torch.full((self.count,), 3.0))


@requirement(
    "CKPT-957",
    "A state of a parameter that has another size than in the checkpoint MUST be refused by its name, and the "
    "optimizer keep what it had: it is not put in the place of one that the optimizer cannot step.",
)
def test_states_of_another_size(checkpoint: Any, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    saved, now = _History(model.parameters(), 3), _History(model.parameters(), 2)
    for optimizer in (saved, now):
        optimizer.step()
    with alone():
        checkpoint.save_training(tmp_path, model, saved, 1, durable=False)
        shown = ("((2,), (3,))", "optimizer.state.weight.history")
        with raises(PlanError, mentions=shown, where="another size"):
            checkpoint.load_training(tmp_path, model, now)
    found = [state["history"].tolist() for state in now.state.values()]
    assert_equal(found, [[3.0, 3.0]] * 2, where="what the optimizer has")


@requirement(
    "CKPT-958",
    "A tensor of an object MUST come back with its values where a fresh one has a tensor without memory in its place, "
    "of the same dtype or another.",
)
def test_tensors_without_memory(checkpoint: Any, tmp_path: Path) -> None:
    _save(checkpoint, tmp_path, {"ema": torch.arange(3.0)})
    for dtype in (torch.float32, torch.float64):
        fresh = {"ema": torch.empty(3, dtype=dtype, device="meta")}
        with succeeds("a load", where=f"{dtype} without memory"):
            found = _load(checkpoint, tmp_path, "load_training", fresh)
        assert_same_tensor(found["ema"], torch.arange(3.0), where=f"{dtype} without memory")


@requirement(
    "CKPT-959",
    "A mapping without entries between others in a list, as of a worker that has nothing to say, MUST come back as one "
    "from load_training and a manager, whether the object says the same before, less or more.",
)
@pytest.mark.parametrize("way", ["load_training", "a manager"])
def test_empty_mappings_in_lists(checkpoint: Any, tmp_path: Path, way: str) -> None:
    said = {"workers": [{"at": 1}, {}, {"at": 3}], "last": [{"n": 1}, {}, torch.ones(2)]}
    _save(checkpoint, tmp_path, said)
    before: dict[str, Any] = {
        "the same": {"workers": [{"at": 0}, {}, {"at": 0}], "last": [{"n": 0}, {}, torch.zeros(2)]},
        "nothing": {"workers": [], "last": []},
        "more": {"workers": [{"at": 0}, {"at": 0}, {"at": 0}], "last": [{"n": 0}, {"n": 5, "m": 6}, torch.zeros(2)]},
        "values": {"workers": [{"at": 0}, 5, {"at": 0}], "last": [{"n": 0}, torch.ones(1), torch.zeros(2)]},
    }
    for what, now in before.items():
        with succeeds("a load", where=f"an object that says {what}"):
            found = _load(checkpoint, tmp_path, way, now)
        assert_equal(_plain(found), _plain(said), where=f"an object that had said {what}")


class _Remembers(torch.nn.Linear):
    """A module that says something beside its tensors."""

    def __init__(self, said: Any) -> None:
        super().__init__(2, 2)
        self.said = said

    def get_extra_state(self) -> Any:
        return self.said

    def set_extra_state(self, state: Any) -> None:
        self.said = state


_EXTRA: dict[str, tuple[Any, Any]] = {
    "counts": ({"seen": {"wiki": 3, "books": 2}, "n": 2}, {"seen": {}, "n": 0}),
    "tensors": ({"mean": {"a": torch.ones(2)}, "all": [torch.ones(1), 5]}, {"mean": {}, "all": []}),
    "by numbers": ({"at": {0: 4, 7: torch.ones(2)}}, {"at": {}}),
    "of another size": ({"losses": torch.arange(3.0, dtype=torch.float64)}, {"losses": torch.zeros(1)}),
    "nothing by now": ({"wiki": 1}, {}),
}


@requirement(
    "CKPT-970",
    "A module MUST get back all entries of the mapping that it said as its extra state, from load_training and from a "
    "manager, whether a fresh one has fewer of them or others; those that it said none of MUST be gone.",
)
@pytest.mark.parametrize("way", ["load_training", "a manager"])
def test_extra_states_of_other_entries(checkpoint: Any, tmp_path: Path, way: str) -> None:
    for number, (what, pair) in enumerate(_EXTRA.items()):
        for path, (said, fresh) in ((f"{number}", pair), (f"{number} back", pair[::-1])):
            model = torch.nn.Sequential(_Remembers(deepcopy(said)), _Remembers({"n": 1}))
            with alone():
                checkpoint.save_training(tmp_path / path / "step-1", model, [], 1, states=_frozen(model), durable=False)
            again = torch.nn.Sequential(_Remembers(deepcopy(fresh)), _Remembers({"n": 0}))
            with succeeds("a load", where=f"{what}, {path}"):
                _load_into(checkpoint, tmp_path / path, way, again, [], _frozen(again))
            expected = [{**{k: {} for k, v in fresh.items() if isinstance(v, dict)}, **said}, {"n": 1}]
            found = [each.said for each in again]
            assert_equal(_plain(found), _plain(expected), where=f"{what}, {path}")


def _frozen(model: torch.nn.Module) -> dict[str, Any]:
    """States of a model that nobody trains."""
    model.requires_grad_(False)
    return {}


def _own_objects(rank: Rank, path: str) -> None:
    # Each rank has an object under a name of its own, and one that all have.
    checkpoint, own = rank.component("checkpoint"), f"loader {rank.rank}"
    model, optimizer, _ = _run(None)
    states = {own: Said({"at": {"wiki": rank.rank}, "n": 1}), "all": Said({"seen": {"wiki": 3}})}
    checkpoint.save_training(f"{path}/step-1", model, optimizer, 1, states=states, durable=False)
    for way in ("load_training", "a manager"):
        fresh = {own: Said({"at": {}, "n": 0}), "all": Said({"seen": {}})}
        _load_into(checkpoint, Path(path), way, model, optimizer, fresh)
        for name, state in states.items():
            assert_equal(fresh[name].said, state.said, where=f"{name} by {way}")


@requirement(
    "CKPT-971",
    "An object that stands under a name of one rank alone, as a rank's own data loader, MUST get back all that it "
    "said, also what a fresh one does not ask for, as one that all ranks have does.",
)
def test_objects_of_one_rank(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_own_objects, 2, str(tmp_path))


class _Slow(torch.optim.SGD):
    """Keeps a slow copy of each parameter, and when it was made, from its third step on."""

    def step(self, closure: Any = None) -> Any:
        """One step."""
        result = super().step(closure)
        for param in (param for group in self.param_groups for param in group["params"]):
            state = self.state[param]
            state["n"] = state.get("n", 0) + 1
            if state["n"] == 3:
                state.update({"slow": param.detach().clone().double(), "at": {"step": torch.tensor(3), "n": {"m": 3}}})
        return result


def _adam(params: Any, is_saved: bool) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1, amsgrad=is_saved)


def _slow(params: Any, is_saved: bool) -> torch.optim.Optimizer:
    return _Slow(params, lr=0.1, momentum=0.5)


def _trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step_count: int) -> None:
    for _ in range(step_count):
        for place, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, 0.5 + place)
        optimizer.step()


def _states(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    def whole(value: Any) -> Any:
        # As it is cut, too.
        return [str(value.placements), value.full_tensor()] if isinstance(value, DTensor) else value

    return {
        name: {key: _plain(whole(value)) for key, value in sorted(optimizer.state[param].items())}
        for name, param in model.named_parameters()
    }


def _later_states(rank: Rank, path: str) -> None:
    checkpoint, mesh = rank.component("checkpoint"), init_device_mesh("cpu", (rank.world_size,))
    for way, make in itertools.product(("load_training", "a manager"), (_slow, _adam)):
        models = [torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)]
        for model in models:
            model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
        saved, fresh = (make(model.parameters(), model is models[0]) for model in models)
        _trained(models[0], saved, 4)
        folder = Path(f"{path}/{way} {make.__name__}")
        checkpoint.save_training(folder / "step-1", models[0], saved, 1, durable=False)
        _load_into(checkpoint, folder, way, models[1], fresh, {})
        where = f"{make.__name__} by {way}"
        assert_equal(_states(models[1], fresh), _states(models[0], saved), where=where)
        assert_equal(fresh.param_groups[0].get("amsgrad"), saved.param_groups[0].get("amsgrad"), where=where)
        for model, optimizer in zip(models, (saved, fresh), strict=True):
            _trained(model, optimizer, 1)
        assert_equal(_states(models[1], fresh), _states(models[0], saved), where=f"{where}, a step later")


@requirement(
    "CKPT-972",
    "States that an optimizer makes behind its first step, or by an option that the checkpoint has and a fresh one has "
    "not, MUST come back with their values and dtypes, sharded as their parameters, from load_training and a manager.",
)
def test_states_of_later_steps(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for rank_count in (1, 2):
        rank_pool.run(_later_states, rank_count, str(tmp_path / f"{rank_count}"))


@requirement(
    "CKPT-973",
    "Options of an optimizer's groups that a fresh one has not, as initial_lr of a scheduler that comes later, MUST "
    "come back, each in the group of its parameters; names of parameters stay as the program gave them.",
)
@pytest.mark.parametrize("way", ["load_training", "a manager"])
def test_options_of_groups(checkpoint: Any, tmp_path: Path, way: str) -> None:
    def made() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
        model = torch.nn.Linear(2, 2)
        return model, torch.optim.SGD([{"params": [each], "lr": 0.1} for each in model.parameters()])

    model, saved = made()
    torch.optim.lr_scheduler.ExponentialLR(saved, 0.5)
    for place, group in enumerate(saved.param_groups):
        group.update({"until": 70 + place, "scale": torch.tensor([place], dtype=torch.int64), "param_names": ["old"]})
        group["lr"] = 0.01
    with alone():
        checkpoint.save_training(tmp_path / "step-1", model, saved, 1, durable=False)
    model, fresh = made()
    _load_into(checkpoint, tmp_path, way, model, fresh, {})
    for place, group in enumerate(fresh.param_groups):
        found = {name: _plain(group.get(name)) for name in ("lr", "initial_lr", "until", "scale", "param_names")}
        expected = {"lr": 0.01, "initial_lr": 0.1, "until": 70 + place, "scale": _plain(torch.tensor([place]))}
        assert_equal(found, {**expected, "param_names": None}, where=f"group {place}")


@requirement(
    "CKPT-976",
    "Parameters that stand in one group of an optimizer, and were saved in groups of different options, MUST be "
    "refused by names and options: all would get the options of the first. With the same options they MUST load.",
)
@pytest.mark.parametrize("way", ["load_training", "a manager"])
def test_groups_that_were_several(checkpoint: Any, tmp_path: Path, way: str) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"lr": 0.1}, {"lr": 0.5}, "'lr': {'weight': 0.1, 'bias': 0.5}"),
        ({"momentum": 0.5}, {"momentum": 0.0}, "'momentum'"),
        ({"lr": torch.tensor(0.25)}, {"lr": torch.tensor(0.5)}, "'lr'"),
        ({}, {"until": 7}, "'until': {'weight': None, 'bias': 7}"),
        ({"eps": math.nan, "lr": torch.tensor(0.25)}, {"eps": math.nan, "lr": torch.tensor(0.25)}, ""),
    ]
    for number, (of_weight, of_bias, shown) in enumerate(cases):
        model, now, path = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), tmp_path / f"{number}"
        groups = [{"params": [model.weight], **of_weight}, {"params": [model.bias], **of_bias}]
        saved, fresh = torch.optim.SGD(groups, lr=0.3), torch.optim.SGD(now.parameters(), lr=0.7)
        with alone():
            checkpoint.save_training(path / "step-1", model, saved, 1, durable=False)
        if not shown:
            with succeeds("a load", where=f"{of_weight}"):
                _load_into(checkpoint, path, way, now, fresh, {})
            assert_equal(_plain(fresh.param_groups[0]["lr"]), _plain(of_weight["lr"]), where=f"{of_weight}")
            continue
        mentions = ("different options", shown)
        with raises(PlanError, mentions=mentions, where=f"{of_weight} beside {of_bias}"):
            _load_into(checkpoint, path, way, now, fresh, {})
        assert_equal(fresh.param_groups[0]["lr"], 0.7, where=f"{of_weight} beside {of_bias}")


class _Counts(torch.nn.Linear):
    """With a buffer of any dtype."""

    def __init__(self, seen: torch.Tensor) -> None:
        super().__init__(2, 2)
        self.register_buffer("seen", seen)


@requirement(
    "CKPT-974",
    "A load of a training checkpoint into tensors of a model whose dtype does not hold what was saved, fractions in "
    "integers or integers of fewer bits, MUST be refused by all their names and change nothing; floats are rounded.",
)
@pytest.mark.parametrize("way", ["load_training", "a manager"])
def test_dtypes_that_lose(checkpoint: Any, tmp_path: Path, way: str) -> None:
    cases = {
        (torch.float32, torch.int64): False,
        (torch.int64, torch.uint8): False,
        (torch.int64, torch.float32): False,
        (torch.int32, torch.bool): False,
        (torch.uint64, torch.int64): False,
        (torch.complex64, torch.float32): False,
        (torch.int32, torch.int64): True,
        (torch.uint8, torch.int16): True,
        (torch.bool, torch.int32): True,
        (torch.float32, torch.bfloat16): True,
        (torch.float16, torch.float64): True,
        (torch.uint64, torch.uint64): True,
    }
    for number, ((saved, target), is_held) in enumerate(cases.items()):
        model, now = (_Counts(torch.full((3,), fill).to(dtype)) for fill, dtype in ((1.0, saved), (0.0, target)))
        where = f"{saved} into {target}"
        with alone():
            path = tmp_path / f"{number}"
            checkpoint.save_training(path / "step-1", model, _sgd(model), 1, durable=False)
        before = {name: value.clone() for name, value in now.state_dict().items()}
        if is_held:
            with succeeds("a load", where=where):
                _load_into(checkpoint, path, way, now, _sgd(now), {})
            assert_same_tensor(now.get_buffer("seen"), torch.ones(3, dtype=target), where=where)
            continue
        with raises(PlanError, mentions=("lose what was saved", f"'seen': ({target}, {saved})"), where=where):
            _load_into(checkpoint, path, way, now, _sgd(now), {})
        for name, value in before.items():
            assert_same_tensor(now.state_dict()[name], value, where=f"{where}: {name}")


def _sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class _Grown(torch.nn.Linear):
    """A layer with other shapes and more parameters than the one that was saved."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.scale, self.shift = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))


@requirement(
    "CKPT-990",
    "A load of a training checkpoint into a model that has other names or shapes MUST name all of them at once, of the "
    "optimizer too, and change nothing.",
)
@pytest.mark.parametrize("way", ["load_training", "a manager"])
def test_other_models(checkpoint: Any, tmp_path: Path, way: str) -> None:
    def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.1)

    saved, grown = torch.nn.Linear(2, 2), _Grown()
    with alone():
        checkpoint.save_training(tmp_path / "step-1", saved, adam(saved), 1, durable=False)
    before = {name: value.clone() for name, value in grown.state_dict().items()}
    missing = ("'scale'", "'shift'", "'optimizer.param_groups.scale.lr'")
    with raises(MissingKeyError, mentions=("not in the checkpoint", *missing), where="more parameters"):
        _load_into(checkpoint, tmp_path, way, grown, adam(grown), {})
    wide = torch.nn.Linear(3, 4)
    shapes = ("'weight': ((4, 3), (2, 2))", "'bias': ((4,), (2,))")
    with raises(PlanError, mentions=("shapes differ", *shapes), where="other shapes"):
        _load_into(checkpoint, tmp_path, way, wide, adam(wide), {})
    for name, value in before.items():
        assert_same_tensor(grown.state_dict()[name], value, where=f"{name} behind a load that was refused")
