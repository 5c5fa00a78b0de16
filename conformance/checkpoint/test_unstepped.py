"""Optimizers that have not stepped, or not all of their parameters: what has no state is saved and loaded so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from conformance.checkpoint.cases import mesh_of
from conformance.checkpoint.trainer import alone
from conformance.harness import (
    Rank,
    assert_equal,
    assert_same_tensor,
    assert_same_tensors,
    raises,
    requirement,
    succeeds,
)
from twinproof.errors import ConfigError, PlanError, UnsupportedError

# A step that is not one of the training shows in each: in a count, in a size, in how a momentum begins.
_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
    "SGD with dampening": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "a rate in a tensor": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1)),
}


class _Model(torch.nn.Module):
    """Two layers, of which the second is used where ``all_of_it``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, batch: torch.Tensor, *, all_of_it: bool = True) -> torch.Tensor:
        """Of [n, 4], the same shape."""
        found: torch.Tensor = self.first(batch)
        return self.second(found) if all_of_it else found


class _Run:
    """A model and its optimizer, which steps on the same batches wherever it begins."""

    def __init__(self, kind: str = "Adam", *, mesh: Any = None) -> None:
        self.model = _Model()
        if mesh is not None:
            fully_shard(self.model, mesh=mesh)
        self.optimizer = _OPTIMIZERS[kind](self.model.parameters())

    def step(self, *numbers: int, all_of_it: bool = True) -> None:
        """Steps of these numbers."""
        for number in numbers:
            self.backward(number, all_of_it=all_of_it)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def backward(self, number: int, *, all_of_it: bool = True) -> None:
        """The gradients of one step."""
        batch = torch.randn(5, 4, generator=torch.Generator().manual_seed(number))
        torch.autograd.backward(self.model(batch, all_of_it=all_of_it).square().sum())

    def save(self, checkpoint: Any, folder: Path) -> None:
        """By ``save_training``."""
        with alone(), succeeds("a save", where=folder.name):
            checkpoint.save_training(folder, self.model, self.optimizer, 0, durable=False)

    def load(self, checkpoint: Any, folder: Path) -> None:
        """By ``load_training``."""
        with alone():
            checkpoint.load_training(folder, self.model, self.optimizer)

    def values(self) -> dict[str, torch.Tensor]:
        """Copies of the parameters and of the states that there are."""
        found: dict[str, Any] = {}
        for name, param in self.model.named_parameters():
            found[name] = param
            found |= {f"{name}.{key}": torch.as_tensor(value) for key, value in self.optimizer.state[param].items()}
        return {n: v.full_tensor() if hasattr(v, "full_tensor") else v.detach().clone() for n, v in found.items()}

    def with_states(self) -> list[str]:
        """The parameters that have states."""
        named = self.model.named_parameters()
        return [name for name, param in named if self.optimizer.state.get(param)]


def _saved_before_its_first_step(checkpoint: Any, folder: Path, kind: str, mesh: Any = None) -> None:
    straight, saved, resumed = (_Run(kind, mesh=mesh) for _ in range(3))
    has_states = saved.with_states()
    saved.save(checkpoint, folder)
    assert_equal(saved.with_states(), has_states, where="states behind a save")
    assert_equal([param.grad for param in saved.model.parameters()], [None] * 4, where="gradients behind a save")
    resumed.load(checkpoint, folder)
    for run in (straight, saved, resumed):
        run.step(1, 2, 3)
    assert_same_tensors(saved.values(), straight.values(), where="a run that was saved")
    assert_same_tensors(resumed.values(), straight.values(), where="a run that was resumed")


def _saved_on_ranks(rank: Rank, folder: str) -> None:
    checkpoint, mesh = rank.component("checkpoint"), mesh_of(rank)
    for kind in _OPTIMIZERS:
        # Torch has no step of Rprop for sharded parameters, and no way to save a rate in a plain tensor beside them.
        if kind not in ("Rprop", "a rate in a tensor"):
            _saved_before_its_first_step(checkpoint, Path(folder) / kind, kind, mesh)


@requirement(
    "CKPT-692",
    "A save before the first step MUST leave the optimizer as it is, and a load of it MUST begin where it was: both "
    "runs go on, bit for bit, as without the save, whichever optimizer it is.",
)
@pytest.mark.parametrize("kind", _OPTIMIZERS)
def test_before_the_first_step(checkpoint: Any, tmp_path: Path, kind: str) -> None:
    _saved_before_its_first_step(checkpoint, tmp_path / "ck", kind)


@requirement("CKPT-696", "So MUST saves of several ranks, whose parameters are sharded.")
def test_before_the_first_step_on_ranks(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_saved_on_ranks, 2, str(tmp_path))


@requirement("CKPT-697", "So MUST saves of a manager.")
def test_managers_before_the_first_step(checkpoint: Any, tmp_path: Path) -> None:
    straight, saved, resumed = (_Run("NAdam") for _ in range(3))
    options = {"interval": 1, "durable": False}
    for run, verb in ((saved, "save"), (resumed, "load")):
        with (
            checkpoint.CheckpointManager(tmp_path, model=run.model, optimizers=run.optimizer, **options) as manager,
            alone(),
        ):
            assert_equal(manager.save(1) if verb == "save" else manager.load(), True, where=verb)
    for run in (straight, saved, resumed):
        run.step(1, 2)
        assert_same_tensors(run.values(), straight.values(), where="a run")


@requirement(
    "CKPT-711",
    "A save of a model of two optimizers MUST leave each as it is, whichever of them has stepped; so MUST a load.",
)
@pytest.mark.parametrize("stepped", [(), (0,), (1,)])
def test_several_optimizers(checkpoint: Any, tmp_path: Path, stepped: tuple[int, ...]) -> None:
    def optimizers(model: _Model) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(part.parameters(), lr=0.1) for part in (model.first, model.second)]

    def counts(several: list[torch.optim.Optimizer]) -> list[list[int]]:
        return [[int(state["step"]) for state in each.state.values() if state] for each in several]

    model, other = _Model(), _Model()
    mine, loaded = optimizers(model), optimizers(other)
    torch.autograd.backward(model(torch.ones(2, 4)).sum())
    for number in stepped:
        mine[number].step()
    for each in mine:
        each.zero_grad()
    expected = [[1, 1] if number in stepped else [] for number in range(2)]
    with alone():
        checkpoint.save_training(tmp_path / "ck", model, mine, 0, durable=False)
        assert_equal(counts(mine), expected, where="steps behind a save")
        checkpoint.load_training(tmp_path / "ck", other, loaded)
    assert_equal(counts(loaded), expected, where="steps behind a load")


@requirement(
    "CKPT-693",
    "A load MUST give states to the parameters that had some when they were saved, and to no others, whatever states "
    "the optimizer has.",
)
@pytest.mark.parametrize("has", ["nothing", "empty states", "states of all", "states of some", "loaded nothing"])
def test_parameters_without_states(checkpoint: Any, tmp_path: Path, has: str) -> None:
    saved, resumed = _Run(), _Run()
    saved.step(1, 2, all_of_it=False)
    saved.save(checkpoint, tmp_path / "ck")
    if has == "loaded nothing":
        _Run().save(checkpoint, tmp_path / "before")
        resumed.load(checkpoint, tmp_path / "before")
    elif has == "empty states":
        resumed.optimizer.state.update({param: {} for param in resumed.model.parameters()})
    elif has != "nothing":
        resumed.step(7, all_of_it=has == "states of all")
    with succeeds("a load", where=f"the optimizer has {has}"):
        resumed.load(checkpoint, tmp_path / "ck")
    assert_equal(resumed.with_states(), ["first.weight", "first.bias"], where="who has states")
    for run in (saved, resumed):
        run.step(3, 4)
    assert_same_tensors(resumed.values(), saved.values(), where="a run that was resumed")


@requirement(
    "CKPT-701",
    "Gradients of an optimizer without states MUST NOT keep a load from giving it states, and MUST stay as they are.",
)
def test_gradients_before_a_load(checkpoint: Any, tmp_path: Path) -> None:
    saved, resumed = _Run(), _Run()
    saved.step(1, 2)
    saved.save(checkpoint, tmp_path / "ck")
    resumed.backward(7)
    gradients = [param.grad for param in resumed.model.parameters()]
    with succeeds("a load", where="of an optimizer that has gradients"):
        resumed.load(checkpoint, tmp_path / "ck")
    for param, gradient in zip(resumed.model.parameters(), gradients, strict=True):
        assert_equal(param.grad is gradient, True, where="gradients behind the load")
    resumed.optimizer.zero_grad()
    for run in (saved, resumed):
        run.step(3)
    assert_same_tensors(resumed.values(), saved.values(), where="a run that was resumed")


@requirement(
    "CKPT-694",
    "States in a checkpoint for which the optimizer has no place MUST be refused by the parameter's name: they would "
    "be lost without a word. Those of parameters that it does not train are left out.",
)
def test_states_without_a_place(checkpoint: Any, tmp_path: Path) -> None:
    saved, partly, other = _Run(), _Run(), _Run()
    saved.step(1)
    saved.save(checkpoint, tmp_path / "ck")
    partly.step(1, all_of_it=False)
    other.optimizer = torch.optim.SGD(other.model.parameters(), lr=0.1)
    for run, name in ((partly, "second.weight"), (other, "first.weight")):
        before = run.values()
        with raises(PlanError, mentions=(name, "none to load them into"), where=name):
            run.load(checkpoint, tmp_path / "ck")
        assert_same_tensors(run.values(), before, where=f"{name}: after a refused load")
    frozen = _Run()
    frozen.model.second.requires_grad_(False)
    with succeeds("a load", where="parameters that are not trained"):
        frozen.load(checkpoint, tmp_path / "ck")
    assert_equal(frozen.with_states(), ["first.weight", "first.bias"], where="who has states")
    assert_equal(int(frozen.values()["first.weight.step"]), 1, where="steps of what is trained")


@requirement(
    "CKPT-695",
    "A load that fails MUST leave an optimizer that had no states without any, with its gradients and its rate.",
)
@pytest.mark.parametrize(("kind", "kept_bytes"), [("Adam", -700), ("a rate in a tensor", 1)])
def test_failed_loads(checkpoint: Any, tmp_path: Path, kind: str, kept_bytes: int) -> None:
    saved, fresh = _Run(kind), _Run(kind)
    rate = fresh.optimizer.param_groups[0]["lr"]
    saved.step(1)
    saved.save(checkpoint, tmp_path / "ck")
    for path in (tmp_path / "ck").glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:kept_bytes])
    fresh.backward(2)
    gradients = [param.grad for param in fresh.model.parameters()]
    with raises(BaseException, where="a checkpoint that is cut"):
        fresh.load(checkpoint, tmp_path / "ck")
    assert_equal(fresh.with_states(), [], where="who has states")
    for param, gradient in zip(fresh.model.parameters(), gradients, strict=True):
        assert_equal(param.grad is gradient, True, where="gradients behind the load")
    assert_equal(fresh.optimizer.param_groups[0]["lr"] is rate, True, where="the learning rate is what it was")
    assert_same_tensor(torch.as_tensor(rate), torch.tensor(0.1), where="the learning rate")


class _Place:
    """A state beside model and optimizer, which fails where it is told to: asked for its values, or given them."""

    def __init__(self, fails: str = "") -> None:
        self._fails = fails

    def state_dict(self) -> dict[str, Any]:
        if self._fails == "asked":
            raise LookupError("no worker yet")
        return {"at": torch.tensor(5)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._fails == "given":
            raise LookupError("no such batch")


class _Breaks(torch.optim.Adam):
    """An optimizer whose step ends behind its work."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        raise LookupError("no scale yet")


def _adams(model: _Model, second: type[torch.optim.Adam] = torch.optim.Adam) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(model.first.parameters(), lr=0.1), second(model.second.parameters(), lr=0.1)]


def _adam_and_sgd(model: _Model) -> list[torch.optim.Optimizer]:
    return [_adams(model)[0], torch.optim.SGD(model.second.parameters(), lr=0.1)]


def _full_model(model: _Model) -> list[torch.optim.Optimizer]:
    """A model that once does not take what was loaded."""

    def full(*arguments: Any) -> None:
        handle.remove()
        raise LookupError("no room in the model")

    handle = model.register_load_state_dict_post_hook(full)  # type: ignore[no-untyped-call]
    return _adams(model)


# What fails: other states than were saved, optimizers, files to be cut, and what the error says.
_FAILURES: dict[str, tuple[dict[str, _Place], Callable[[_Model], list[torch.optim.Optimizer]], str, str]] = {
    # States are asked in the order of their names.
    "a state before the optimizer, asked": ({"a": _Place("asked")}, _adams, "", "no worker yet"),
    "a state behind the optimizer, asked": ({"z": _Place("asked")}, _adams, "", "no worker yet"),
    "a state before the optimizer, given": ({"a": _Place("given")}, _adams, "", "no such batch"),
    "a state behind the optimizer, given": ({"z": _Place("given")}, _adams, "", "no such batch"),
    "a state that the checkpoint lacks": ({"more": _Place()}, _adams, "", "nothing of an object"),
    "the step of one optimizer": ({}, lambda model: _adams(model, _Breaks), "", "no scale yet"),
    "an optimizer without a place": ({}, _adam_and_sgd, "", "none to load them into"),
    "the model": ({}, _full_model, "", "no room in the model"),
    "values that are cut": ({}, _adams, "*.distcp", ""),
    "metadata that is cut": ({}, _adams, ".metadata", ""),
}


def _counts(optimizers: list[torch.optim.Optimizer]) -> list[int]:
    """The steps that each parameter with states has taken."""
    return [int(state["step"]) for each in optimizers for state in each.state.values() if state]


def _save_steps(checkpoint: Any, folder: Path, trained: tuple[_Model, Any], spoilt: str) -> None:
    """One checkpoint as it is, and one whose files of these names are cut."""
    states = {"a": _Place(), "z": _Place()}
    for name in ("right", "wrong"):
        with alone():
            checkpoint.save_training(folder / name / "step-1", *trained, 1, states=states, durable=False)
    for path in (folder / "wrong" / "step-1").glob(spoilt) if spoilt else ():
        path.write_bytes(path.read_bytes()[:-700])


def _load_steps(checkpoint: Any, folder: Path, way: str, run: tuple[_Model, Any], states: dict[str, Any]) -> None:
    """By ``load_training`` or by a manager."""
    states = {"a": _Place(), "z": _Place(), **states}
    options = {"model": run[0], "optimizers": run[1], "states": states, "interval": 1, "durable": False}
    with alone():
        if way == "load_training":
            checkpoint.load_training(folder / "step-1", *run, states=states)
            return
        # Of the steps of its own folder a manager takes none whose files are cut.
        first = {"initial_load_path": folder / "step-1", "initial_load_model_only": False}
        with checkpoint.CheckpointManager(folder / "run", **options, **first) as manager:
            manager.load()


@requirement(
    "CKPT-725",
    "A load of load_training or of a manager that fails anywhere, in a state, an optimizer, the model or a file, "
    "before values are read, while they are and behind it, MUST leave optimizers that had no states without any, as "
    "their gradients were, and another load MUST then restore them.",
)
def test_loads_that_fail_anywhere(checkpoint: Any, tmp_path: Path) -> None:
    trained = (model := _Model(), optimizers := _adams(model))
    torch.autograd.backward(model(torch.ones(2, 4)).sum())
    for each in optimizers:
        each.step()
    for what, (states, make, spoilt, says) in _FAILURES.items():
        for way in ("load_training", "a manager"):
            folder, where = tmp_path / f"{what} {way}", f"{what}, {way}"
            _save_steps(checkpoint, folder, trained, spoilt)
            fresh = _Model()
            untrained = make(fresh)
            fresh.first.weight.grad = gradient = torch.ones(4, 4)
            with raises(BaseException, mentions=[says], where=where):
                _load_steps(checkpoint, folder / "wrong", way, (fresh, untrained), states)
            assert_equal(_counts(untrained), [], where=f"{where}: steps of those that had no states")
            before = (gradient, None, None, None)
            kept = [param.grad is old for param, old in zip(fresh.parameters(), before, strict=True)]
            assert_equal(kept, [True] * 4, where=f"{where}: gradients as they were")
            again = [untrained[0], _adams(fresh)[1]]
            with succeeds("another load", where=where):
                _load_steps(checkpoint, folder / "right", way, (fresh, again), {})
            assert_equal(_counts(again), [1] * 4, where=f"{where}: steps behind another load")


@requirement(
    "CKPT-704",
    "A manager's load that fails MUST leave the states of an optimizer that an earlier load of it gave states to.",
)
def test_a_load_that_fails_behind_another(checkpoint: Any, tmp_path: Path) -> None:
    saved, resumed = _Run(), _Run()
    saved.step(1)
    with (
        alone(),
        checkpoint.CheckpointManager(
            tmp_path / "run", model=saved.model, optimizers=saved.optimizer, interval=1
        ) as manager,
    ):
        manager.save(1)
    with (
        alone(),
        checkpoint.CheckpointManager(
            tmp_path / "run", model=resumed.model, optimizers=resumed.optimizer, interval=1
        ) as manager,
    ):
        manager.load()
        resumed.step(2)
        for path in (tmp_path / "run" / "step-1").glob("*.distcp"):
            path.write_bytes(bytes(path.stat().st_size))
        before = resumed.values()
        with raises(BaseException, where="a checkpoint of zeros"):
            manager.load(1)
        assert_same_tensors(resumed.values(), before, where="a run behind a load that failed")


@requirement(
    "CKPT-720",
    "A save and a load before the first step MUST leave each gradient that there is, where others have none.",
)
def test_gradients_of_some(checkpoint: Any, tmp_path: Path) -> None:
    stepped, run = _Run(), _Run()
    stepped.step(1, all_of_it=False)
    stepped.save(checkpoint, tmp_path / "stepped")
    run.backward(2, all_of_it=False)
    params = list(run.model.parameters())
    gradients = [param.grad for param in params]
    assert_equal([gradient is None for gradient in gradients], [False, False, True, True], where="gradients before")
    run.save(checkpoint, tmp_path / "unstepped")
    assert_equal([param.grad is old for param, old in zip(params, gradients, strict=True)], [True] * 4, where="save")
    run.load(checkpoint, tmp_path / "stepped")
    assert_equal([param.grad is old for param, old in zip(params, gradients, strict=True)], [True] * 4, where="load")


def _groups(model: _Model, rates: Sequence[float]) -> torch.optim.Optimizer:
    # As groups with and without decay are made where a part of the model has none of one kind.
    groups: list[dict[str, Any]] = [
        {"params": [], "lr": rates[0]},
        {"params": [], "lr": rates[1]},
        {"params": list(model.parameters()), "lr": rates[2]},
        {"params": [], "lr": rates[3]},
    ]
    return torch.optim.Adam(groups)


@requirement(
    "CKPT-835",
    "An optimizer with groups without parameters MUST be saved and restored as any other; those groups MUST stay where "
    "they are, with the options that the program gave them.",
)
def test_groups_without_parameters(checkpoint: Any, tmp_path: Path) -> None:
    model = _Model()
    optimizer = _groups(model, (0.1, 0.2, 0.3, 0.4))
    torch.autograd.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    with alone(), succeeds("a save", where="groups without parameters"):
        checkpoint.save_training(tmp_path / "ck", model, optimizer, 1, durable=False)
    assert_equal([g["lr"] for g in optimizer.param_groups], [0.1, 0.2, 0.3, 0.4], where="rates behind a save")
    fresh = _Model()
    restored = _groups(fresh, (0.5, 0.6, 0.7, 0.8))
    for time in ("first", "second"):
        with alone(), succeeds("a load", where=f"the {time} one"):
            checkpoint.load_training(tmp_path / "ck", fresh, restored)
        assert_equal(
            [g["lr"] for g in restored.param_groups], [0.5, 0.6, 0.3, 0.8], where=f"rates behind the {time} load"
        )
        assert_equal([len(g["params"]) for g in restored.param_groups], [0, 0, 4, 0], where="parameters of the groups")
    for own, other in zip(model.parameters(), fresh.parameters(), strict=True):
        assert_same_tensors(restored.state[other], optimizer.state[own], where="states")


class _Closed(torch.optim.SGD):
    """One that steps by a closure alone."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


@requirement(
    "CKPT-836",
    "SparseAdam MUST be restored where it has not stepped. An optimizer whose states cannot be saved by names, or that "
    "cannot make any without a closure, MUST be refused by its name, with what to do, and stay without states.",
)
def test_optimizers_of_their_own_steps(checkpoint: Any, tmp_path: Path) -> None:
    tables = [torch.nn.Embedding(5, 2, sparse=True) for _ in range(2)]
    sparse, restored = (torch.optim.SparseAdam(table.parameters()) for table in tables)
    torch.autograd.backward(tables[0](torch.tensor([1, 3])).sum())
    sparse.step()  # type: ignore[no-untyped-call]
    with alone(), succeeds("a save and a load", where="SparseAdam"):
        checkpoint.save_training(tmp_path / "sparse", tables[0], sparse, 1, durable=False)
        checkpoint.load_training(tmp_path / "sparse", tables[1], restored)
    (own,), (other,) = sparse.state.values(), restored.state.values()
    assert_equal(other["step"], own["step"], where="steps of SparseAdam")
    for name in ("exp_avg", "exp_avg_sq"):
        assert_same_tensor(other[name], own[name], where=f"{name} of SparseAdam")

    def loss() -> torch.Tensor:
        found: torch.Tensor = model(torch.ones(2, 4)).square().sum()
        torch.autograd.backward(found)
        return found

    model = _Model()
    lbfgs, closed = torch.optim.LBFGS(model.parameters()), _Closed(model.parameters(), lr=0.1, momentum=0.9)
    lbfgs.step(loss)  # type: ignore[no-untyped-call]
    with alone(), raises(UnsupportedError, mentions=("LBFGS", "list"), where="states in lists"):
        checkpoint.save_training(tmp_path / "lbfgs", model, lbfgs, 1)
    closed.step(loss)
    with alone():
        checkpoint.save_training(tmp_path / "closed", model, closed, 1, durable=False)
    fresh = _Model()
    untrained = _Closed(fresh.parameters(), lr=0.1, momentum=0.9)
    with alone(), raises(UnsupportedError, mentions=("_Closed", "closure", "has stepped"), where="a closure"):
        checkpoint.load_training(tmp_path / "closed", fresh, untrained)
    assert_equal(len(untrained.state), 0, where="states behind a load that was refused")
    assert_equal([param.grad for param in fresh.parameters()], [None] * 4, where="gradients")
    assert_equal(sorted(path.name for path in tmp_path.iterdir()), ["closed", "sparse"], where="what was made")


@requirement(
    "CKPT-843",
    "An optimizer of parameters that are none of the model's, as master weights, MUST be refused by name where it is "
    "saved or loaded by names of parameters, with how many; among the states it MUST be restored.",
)
def test_parameters_of_no_model(checkpoint: Any, tmp_path: Path) -> None:
    model = _Model()

    def masters() -> torch.optim.Optimizer:
        return torch.optim.Adam([torch.nn.Parameter(param.detach().double()) for param in model.parameters()])

    stepped, fresh, own = masters(), masters(), torch.optim.SGD(model.parameters())
    for param in stepped.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    stepped.step()
    for step in ("save", "load"):
        verb = checkpoint.save_training if step == "save" else checkpoint.load_training
        with alone(), raises(ConfigError, mentions=("none of the model's", "4 such", "Adam"), where=f"a {step}"):
            verb(tmp_path / "ck", model, stepped, *([1] if step == "save" else []))
        assert_equal(len(stepped.state), 4, where=f"states behind a {step} that was refused")
        if step == "save":
            assert_equal(list(tmp_path.iterdir()), [], where="what was made")
            with alone(), succeeds("a save", where="among the states"):
                checkpoint.save_training(tmp_path / "ck", model, own, 1, states={"masters": stepped}, durable=False)
    with alone(), succeeds("a load", where="among the states"):
        checkpoint.load_training(tmp_path / "ck", model, own, states={"masters": fresh})
    pairs = zip(stepped.state.values(), fresh.state.values(), strict=True)
    for number, (saved, loaded) in enumerate(pairs):
        assert_same_tensors(loaded, saved, where=f"states of parameter {number}")


_REFUSED = "no step today; got: a step; expected: none; where: the optimizer"


class _Refusing(torch.optim.SGD):
    """One that has a named error of its own."""

    def step(self, closure: Any = None) -> Any:
        raise ConfigError("no step today", got="a step", expected="none", where="the optimizer")


class _Lacking(torch.optim.SGD):
    """One that says its states and lacks what it needs for it."""

    def state_dict(self) -> Any:
        raise KeyError("its own")


@requirement(
    "CKPT-826",
    "What an optimizer raises MUST reach the caller as it is, where it says its states and lacks a key of its own, and "
    "where it refuses its step by a named error.",
)
def test_errors_of_optimizers(checkpoint: Any, tmp_path: Path) -> None:
    model = _Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.autograd.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    with alone():
        checkpoint.save_training(tmp_path / "ck", model, optimizer, 1, durable=False)
    found = []
    for verb, kind in ((checkpoint.save_training, _Lacking), (checkpoint.load_training, _Refusing)):
        own, steps = kind(model.parameters(), lr=0.1, momentum=0.9), [1] if kind is _Lacking else []
        # The error itself, not one that it is the cause of.
        try:
            with alone():
                verb(tmp_path / "ck", model, own, *steps)
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    assert_equal(found, [("KeyError", "'its own'"), ("ConfigError", _REFUSED)], where="what reached the caller")


@requirement(
    "CKPT-902",
    "Behind a load an optimizer MUST have an entry for those parameters alone that had states when it was saved.",
)
@pytest.mark.parametrize("kind", _OPTIMIZERS)
def test_entries_behind_a_load(checkpoint: Any, tmp_path: Path, kind: str) -> None:
    saved, fresh, stepped = (_Run(kind) for _ in range(3))
    saved.step(1, all_of_it=False)
    stepped.step(1, 2)
    saved.save(checkpoint, tmp_path / "ck")
    expected = [param in saved.optimizer.state for param in saved.model.parameters()]
    for what, run in (("a fresh one", fresh), ("one that has stepped all", stepped)):
        run.load(checkpoint, tmp_path / "ck")
        found = [param in run.optimizer.state for param in run.model.parameters()]
        assert_equal(found, expected, where=f"{kind}, {what}")


def _frozen_on_ranks(rank: Rank, folder: str) -> None:
    # Torch's Rprop steps no cut parameters.
    for kind in ("Adam", "SGD with dampening"):
        for cut, mesh in (("whole", None), ("cut", mesh_of(rank))):
            saved, straight = (_Run(kind, mesh=mesh) for _ in range(2))
            for run in (saved, straight):
                run.step(1, 2)
                run.model.first.requires_grad_(False)
                run.step(3)
            checkpoint, path, before = rank.component("checkpoint"), f"{folder}/{kind} {cut}", saved.values()
            checkpoint.save_training(path, saved.model, saved.optimizer, 3, durable=False)
            with torch.no_grad():
                for state in saved.optimizer.state.values():
                    for value in (each for each in state.values() if isinstance(each, torch.Tensor)):
                        value.zero_()
            checkpoint.load_training(path, saved.model, saved.optimizer)
            assert_same_tensors(saved.values(), before, where=f"{kind}, {cut}")
            for run in (saved, straight):
                run.model.first.requires_grad_(True)
                run.step(4)
            assert_same_tensors(saved.values(), straight.values(), where=f"{kind}, {cut}, a step behind")


@requirement(
    "CKPT-977",
    "States that an optimizer has of frozen parameters, as of layers that train later again, MUST be those of the "
    "checkpoint behind a load, and not be gone.",
)
def test_states_of_frozen_parameters(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_frozen_on_ranks, 2, str(tmp_path))


@requirement(
    "CKPT-978",
    "Optimizers that step the same parameters MUST be refused by name before anything is saved or loaded, by "
    "save_training, load_training and where a manager is made: of states of one name one would be lost.",
)
def test_optimizers_of_the_same_parameters(checkpoint: Any, tmp_path: Path) -> None:
    run = _Run()
    run.save(checkpoint, tmp_path / "ck")
    both = [run.optimizer, torch.optim.SGD([run.model.first.weight, run.model.second.bias], lr=0.2, momentum=0.9)]

    def manager() -> None:
        # Where it is made, or with its first save.
        with checkpoint.CheckpointManager(tmp_path / "run", model=run.model, optimizers=both, interval=1):
            pass

    calls: dict[str, Callable[[], Any]] = {
        "save_training": lambda: checkpoint.save_training(tmp_path / "new", run.model, both, 1, durable=False),
        "load_training": lambda: checkpoint.load_training(tmp_path / "ck", run.model, both),
        "a manager": manager,
    }
    for what, call in calls.items():
        mentions = ("step the same parameters", "2 such parameters", "Adam, SGD")
        with raises(ConfigError, mentions=mentions, where=what), alone():
            call()
    found = [path.name for path in tmp_path.iterdir()], [len(each.state) for each in both]
    assert_equal(found, (["ck"], [0, 0]), where="what is there")
