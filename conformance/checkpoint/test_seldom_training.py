"""Training as it seldom is: optimizers without a rate, states without tensors, parameters that are joined."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as by_name
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FullyShardedDataParallel

from conformance.checkpoint.trainer import Counter, Trainer, alone
from conformance.harness import Rank, assert_equal, assert_same_tensor, raises, requirement, succeeds
from twinproof.checkpoint.native import with_own_keys
from twinproof.errors import ConfigError, MissingKeyError, PlanError


class _Momentum(torch.optim.Optimizer):
    """An optimizer whose groups have no learning rate."""

    def __init__(self, params: Iterator[torch.nn.Parameter]) -> None:
        super().__init__(params, {"decay": 0.5})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    seen = self.state[param].setdefault("seen", torch.zeros_like(param))
                    seen.mul_(group["decay"]).add_(param.grad)
                    param.data.sub_(seen)


def _stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for number in range(count):
        loss = model(torch.full((2, 3), float(number + 1))).square().sum()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


@requirement(
    "CKPT-790",
    "An optimizer without a learning rate MUST be saved and restored as any other, also into one that has not stepped; "
    "what is no list of torch's optimizers MUST be refused by name, and nothing be made.",
)
def test_other_optimizers(checkpoint: Any, tmp_path: Path) -> None:
    models = [torch.nn.Linear(3, 1) for _ in range(3)]
    optimizers = [_Momentum(model.parameters()) for model in models]
    _stepped(models[0], optimizers[0], 2)
    _stepped(models[2], optimizers[2], 1)
    with alone(), succeeds("saves and loads", where="no learning rate"):
        checkpoint.save_training(tmp_path / "ck", models[0], optimizers[0], 2)
        for model, optimizer in zip(models[1:], optimizers[1:], strict=True):
            assert_equal(checkpoint.load_training(tmp_path / "ck", model, optimizer), 2, where="step")
    for model, optimizer in zip(models, optimizers, strict=True):
        _stepped(model, optimizer, 2)
        assert_equal(optimizer.param_groups[0].keys(), {"params", "decay"}, where="options of the group")
    for model in models[1:]:
        for name, value in model.named_parameters():
            assert_same_tensor(value.detach(), models[0].get_parameter(name).detach(), where=f"{name}, trained on")
    wrong: tuple[Any, ...] = (
        object(),
        Counter(),
        [Counter()],
        iter(optimizers),
        (each for each in optimizers),
        {optimizers[0]},
        None,
        3,
        "sgd",
    )
    for given in wrong:
        for verb in (checkpoint.save_training, checkpoint.load_training):
            path = tmp_path / ("ck" if verb is checkpoint.load_training else "new")
            step = (1,) if verb is checkpoint.save_training else ()
            with raises(ConfigError, mentions=("not a model and its optimizers",), where=f"{given!r}"), alone():
                verb(path, models[0], given, *step)
    assert_equal([path.name for path in tmp_path.iterdir()], ["ck"], where="what was made")


class _Two(torch.nn.Module):
    """Two layers, each of which has its weight and bias in one parameter; the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = _joint(torch.nn.Linear(3, 4)), _joint(torch.nn.Linear(3, 4))

    def forward(self, inputs: torch.Tensor, is_whole: bool) -> Any:
        total = self.a(inputs).sum()
        return total + self.b(inputs).sum() if is_whole else total


def _joint(module: torch.nn.Module) -> torch.nn.Module:
    made: torch.nn.Module = FullyShardedDataParallel(module, use_orig_params=False, device_id=torch.device("cpu"))
    return made


def _trained(seed: int, is_whole: bool | None) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = _joint(_Two())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    if is_whole is not None:
        torch.autograd.backward(model(torch.arange(6.0).view(2, 3) / (seed + dist.get_rank()), is_whole))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _assert_alike(found: Any, wanted: Any, where: str) -> None:
    (model, optimizer), (other, its) = found, wanted
    for number, (one, two) in enumerate(zip(model.parameters(), other.parameters(), strict=True)):
        assert_same_tensor(one.detach(), two.detach(), where=f"{where}: parameter {number}")
        for name, value in its.state[two].items():
            assert_same_tensor(optimizer.state[one][name], value, where=f"{where}: {name} of parameter {number}")


def _joint_parameters(rank: Rank, path: str) -> None:
    checkpoint, whole, half = rank.component("checkpoint"), _trained(1, True), _trained(1, False)
    with succeeds("saves", where=f"rank {rank.rank}"):
        checkpoint.save_training(f"{path}/whole", *whole, 1)
        checkpoint.save_training(f"{path}/half", *half, 1)
    for is_whole in (None, True):
        target = _trained(2, is_whole)
        with succeeds("a load", where=f"trained {is_whole}, rank {rank.rank}"):
            checkpoint.load_training(f"{path}/whole", *target)
        _assert_alike(target, whole, f"trained {is_whole}, rank {rank.rank}")
    with raises(PlanError, mentions=("states of a parameter", "b."), where=f"one layer trained, rank {rank.rank}"):
        checkpoint.load_training(f"{path}/whole", *_trained(2, False))
    for is_whole in (None, True):
        with raises(MissingKeyError, mentions=("optimizer.state.b.",), where=f"no states of a layer, rank {rank.rank}"):
            checkpoint.load_training(f"{path}/half", *_trained(2, is_whole))


@requirement(
    "CKPT-791",
    "Parameters that FSDP1 has joined to one MUST be saved and restored with their states; where the checkpoint or the "
    "optimizer has states of only some of them, the load MUST be refused by a name of those that lack them.",
)
def test_joint_parameters(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for rank_count in (1, 2):
        rank_pool.run(_joint_parameters, rank_count, str(tmp_path / f"{rank_count}"))


class _Rows:
    """Stands for a tensor without memory that a load could fill."""

    def __init__(self, asked: list[tuple[int, ...]]) -> None:
        self.asked = asked

    def memory_for(self, sizes: torch.Size) -> torch.Tensor:
        self.asked.append(tuple(sizes))
        return torch.zeros(sizes)


class _Holder:
    """A state of training that says what it is given, and takes what is loaded."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.said, self.taken = said, dict[str, Any]()

    def state_dict(self) -> dict[str, Any]:
        return self.said

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.taken = state_dict


@requirement(
    "CKPT-792",
    "A target without memory MUST get memory of what was saved under its name; where that is no tensor it MUST be "
    "given as it is, and where there is none left out.",
)
@pytest.mark.parametrize("kind", ["a tensor", "an object", "nothing"])
def test_targets_that_get_memory(checkpoint: Any, tmp_path: Path, kind: str) -> None:
    trainer, value = Trainer(1), {"a tensor": torch.arange(6.0).view(3, 2), "an object": "text", "nothing": None}[kind]
    said = {"n": torch.tensor(3)} if kind == "nothing" else {"n": torch.tensor(3), "rows": value}
    asked: list[tuple[int, ...]] = []
    saved, loaded = _Holder(said), _Holder({"n": torch.tensor(0), "rows": _Rows(asked)})
    with alone(), succeeds("a save", where=kind):
        checkpoint.save_training(tmp_path / "ck", trainer.model, trainer.optimizer, 1, states={"x": saved})
    late = Trainer(2)
    target = late.model, late.optimizer
    with alone(), succeeds("a load", where=kind):
        checkpoint.load_training(tmp_path / "ck", *target, states={"x": loaded})
    assert_equal(asked, [(3, 2)] if isinstance(value, torch.Tensor) else [], where="memory that was asked for")
    if isinstance(value, torch.Tensor):
        assert_same_tensor(loaded.taken["rows"], value, where=kind)
    else:
        assert_equal(loaded.taken.get("rows"), value, where=kind)
    assert_equal("rows" in loaded.taken, kind != "nothing", where=f"{kind}: whether it is there")
    assert_equal(int(loaded.taken["n"]), 3, where="beside it")


class _Any:
    """A state of whatever it is given, which takes what is loaded."""

    def __init__(self, value: dict[Any, Any]) -> None:
        self.value = value

    def state_dict(self) -> dict[Any, Any]:
        return self.value

    def load_state_dict(self, state_dict: dict[Any, Any]) -> None:
        self.value = state_dict


class _Grouped(dict[Any, Any]):
    """A mapping that says more of itself than its entries."""

    said = "nothing"


def _keyed(number: int) -> dict[Any, Any]:
    """A state whose keys are no text, at every depth, with tensors and without."""
    grouped = _Grouped({3: number, "of text": f"{number}"})
    grouped.said = "more"
    return {
        0: number,
        (1, 2): [number, "x" * number],
        None: {True: {-1: float(number)}, "plain": {"text": number}},
        7: {"tensor": torch.full((2,), number), 8: torch.tensor(number), 2.5: {number - number: None}},
        "list": [torch.tensor([number]), {5: number, "deep": [{6: number}, number]}],
        "grouped": grouped,
        "empty": {},
        # Lists without tensors are one value each, whatever stands there.
        11: [f"{number}"] * number,
        12: [number] if number > 5 else number,
    }


def _shown(value: Any) -> Any:
    """The same with tensors as lists, and keys with their class: true is no 1."""
    if isinstance(value, dict):
        return {(type(key).__name__, key): _shown(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shown(each) for each in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


@requirement(
    "CKPT-808",
    "Of a state whose keys are no text, at any depth, everything MUST be restored under the keys that it has, what is "
    "no tensor too; keys of one text MUST be refused by name, and the state stay as it was.",
)
def test_keys_of_states(checkpoint: Any, tmp_path: Path) -> None:
    for where, is_managed in (("load_training", False), ("a manager", True)):
        states = [_Any(_keyed(number)) for number in (4, 9)]
        path = tmp_path / where
        trainers = [Trainer(seed) for seed in (1, 2)]
        for trainer, state in zip(trainers, states, strict=True):
            given: dict[str, Any] = {"states": {"keyed": state}}
            with alone(), succeeds("a save and a load", where=where):
                if is_managed:
                    with trainer.manager(checkpoint, path, interval=1, **given) as manager:
                        manager.save(1) if state is states[0] else manager.load()
                elif state is states[0]:
                    checkpoint.save_training(path, trainer.model, trainer.optimizer, 1, **given)
                else:
                    checkpoint.load_training(path, trainer.model, trainer.optimizer, **given)
        assert_equal(_shown(states[1].value), _shown(_keyed(4)), where=where)
        assert_equal(getattr(states[1].value["grouped"], "said", None), "more", where=f"{where}: beside the entries")
    assert_equal(with_own_keys({0: 1, "a": 2}, {0: 7, "a": 8}), {0: 7, "a": 8}, where="a mapping that is one value")
    twins = _Any({"grouped": {3: 1, "3": 2}})
    trainer = Trainer(3)
    with alone(), raises(BaseException, mentions=("grouped.3",), where="a save"):
        checkpoint.save_training(tmp_path / "t", trainer.model, trainer.optimizer, 1, states={"keyed": twins})
    with alone(), raises(PlanError, mentions=("one name", "got: ['3']", "keyed.grouped"), where="a load"):
        path = tmp_path / "load_training"
        checkpoint.load_training(path, trainer.model, trainer.optimizer, states={"keyed": twins})
    assert_equal(twins.value, {"grouped": {3: 1, "3": 2}}, where="the state of a load that was refused")


class _Masters:
    """Master weights by name, as a trainer keeps them among its states."""

    def __init__(self, masters: Any) -> None:
        self.masters = masters

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {f"{number}": master.detach() for number, master in enumerate(self.masters.parameters())}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        self.masters.load([state_dict[f"{number}"] for number in range(len(state_dict))])


def _with_masters(offload: Any, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    masters = offload.MasterWeights(model.parameters())
    optimizer = torch.optim.AdamW(masters.parameters(), lr=0.01)
    masters.attach(optimizer)
    return model, optimizer, {"masters": _Masters(masters), "adam": optimizer}


def _train_in_half(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for number in range(count):
        torch.autograd.backward(model(torch.full((2, 3), number + 1.0, dtype=torch.bfloat16)).square().sum())
        optimizer.step()


@requirement(
    "CKPT-846",
    "Objects MUST be given back what they said behind the model, by load_training and by a manager, so that master "
    "weights among the states are those that were saved, and training goes on bit for bit.",
)
@pytest.mark.parametrize("way", ["load_training", "a manager"])
def test_masters_among_the_states(checkpoint: Any, offload: Any, tmp_path: Path, way: str) -> None:
    model, optimizer, states = _with_masters(offload, 1)
    options: dict[str, Any] = {"interval": 1, "durable": False}
    _train_in_half(model, optimizer, 3)
    with alone(), checkpoint.CheckpointManager(tmp_path, model=model, states=states, **options) as manager:
        manager.save(3)
    _train_in_half(model, optimizer, 2)
    other, its_optimizer, its_states = _with_masters(offload, 2)
    if way == "load_training":
        # Of the model, none of whose parameters is stepped by an optimizer of its own.
        nobodys = torch.optim.SGD(other.parameters())
        path = tmp_path / "again"
        with alone():
            checkpoint.save_training(path, model, torch.optim.SGD(model.parameters()), 5, states=states, durable=False)
            assert_equal(checkpoint.load_training(path, other, nobodys, states=its_states), 5, where="step")
    else:
        with alone(), checkpoint.CheckpointManager(tmp_path, model=other, states=its_states, **options) as manager:
            manager.load()
    with succeeds("a step", where=f"behind {way}"):
        _train_in_half(other, its_optimizer, 2)
    if way == "load_training":
        _train_in_half(model, optimizer, 2)
    for name, value in model.named_parameters():
        assert_same_tensor(other.get_parameter(name).detach(), value.detach(), where=name)
    for name, value in states["masters"].state_dict().items():
        assert_same_tensor(its_states["masters"].state_dict()[name], value, where=f"master {name}")


class _Told(torch.nn.Linear):
    """With a state that is no tensor."""

    told: Any = None

    def get_extra_state(self) -> Any:
        return {"value": self.weight[0, 0].item()}

    def set_extra_state(self, state: Any) -> None:
        self.told = state["value"]


class _Aside(torch.nn.Module):
    """A module that saves what is no parameter and no buffer, as tables that are cut and rows of a store do."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.rows, self.dense = torch.full((2, 3), value), _Told(3, 1)
        torch.nn.init.constant_(self.dense.weight, value)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}rows"] = self.rows

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        if f"{prefix}rows" in state_dict:
            self.rows = state_dict[f"{prefix}rows"].clone()
        else:
            arguments[2].append(f"{prefix}rows")


class _Around(torch.nn.Module):
    """Several modules, one of them under two names, of which one is wrapped."""

    def __init__(self, value: float, wrap: Any) -> None:
        super().__init__()
        self.first, self.inner = torch.nn.Linear(2, 2, bias=False), wrap(_Aside(value))
        torch.nn.init.constant_(self.first.weight, value)
        self.again, self.last = self.first, _Aside(value + 1)

    def get_extra_state(self) -> Any:
        return {"value": self.first.weight[0, 0].item()}

    def set_extra_state(self, state: Any) -> None:
        assert_equal(state, {"value": 1.0}, where="extra state")


def _wrapped_models(rank: Rank, path: str) -> None:
    checkpoint = rank.component("checkpoint")
    replicated, compiled = torch.nn.parallel.DistributedDataParallel, functools.partial(torch.compile, backend="eager")
    wraps: dict[str, Any] = {
        "DistributedDataParallel": replicated,
        "compiled": compiled,
        "both": lambda module: replicated(compiled(module)),
        "nothing": lambda module: module,
    }
    for kind, is_whole in itertools.product(wraps, (True, False)):
        wrap = wraps[kind]
        saved, fresh = (wrap(_Aside(value)) if is_whole else _Around(value, wrap) for value in (1.0, 0.0))
        where = f"{kind}, around {'the model' if is_whole else 'a part'}"
        options: dict[str, Any] = {"interval": 1, "durable": False}
        with checkpoint.CheckpointManager(f"{path}/{where}", model=saved, **options) as manager:
            manager.save(1)
        loading = checkpoint.CheckpointManager(f"{path}/{where}", model=fresh, **options)
        with loading as manager, succeeds("a load", where=where):
            manager.load()
        for name, value in saved.state_dict().items():
            if isinstance(value, torch.Tensor):
                assert_same_tensor(fresh.state_dict()[name], value, where=f"{name}, {where}")
        told = [each.told for each in fresh.modules() if isinstance(each, _Told)]
        assert_equal(told, [1.0] if is_whole else [1.0, 2.0], where=f"extra states, {where}")


@requirement(
    "CKPT-847",
    "A model MUST be restored whole where a wrapper has names of its own, DistributedDataParallel or torch.compile, "
    "around it or around a part: also what a module saves that is no parameter and no buffer, as cut tables and rows.",
)
def test_wrapped_models(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_wrapped_models, 1, str(tmp_path))


class _Container(torch.optim.Optimizer, Stateful):
    """As torchtitan's: an optimizer for each part of a model in one, whose states have the names of parameters."""

    _flat = by_name.StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, parts: list[torch.nn.Module]) -> None:
        self.parts = parts
        self.inner = [torch.optim.Adam(part.parameters(), lr=0.5) for part in parts]
        super().__init__([param for part in parts for param in part.parameters()], {"lr": 0.5})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.inner:
            each.step()

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part, each in zip(self.parts, self.inner, strict=True):
            found.update(by_name.get_optimizer_state_dict(part, each, options=self._flat))
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, each in zip(self.parts, self.inner, strict=True):
            by_name.set_optimizer_state_dict(part, each, state_dict, options=self._flat)


class _Keyed(torch.optim.SGD):
    """As torchrec's: by default it says nothing of its groups."""

    def state_dict(self) -> dict[str, Any]:
        return {"state": super().state_dict()["state"]}


def _in_parts(seed: int, step_count: int) -> tuple[list[torch.nn.Module], _Container]:
    torch.manual_seed(seed)
    parts: list[torch.nn.Module] = [torch.nn.Sequential(), torch.nn.Sequential()]
    for name, part in zip("ab", parts, strict=True):
        part.add_module(name, torch.nn.Linear(3, 3))
    container = _Container(parts)
    _stepped(torch.nn.Sequential(*parts), container, step_count)
    return parts, container


@requirement(
    "CKPT-854",
    "An optimizer that derives from torch's `Stateful`, as torchtitan's container of one for each part, MUST be saved "
    "and restored by what it says of itself, by a manager and as training; beside others it MUST be refused by name, "
    "and so MUST another one whose states are not as torch's.",
)
def test_containers_of_optimizers(checkpoint: Any, tmp_path: Path) -> None:
    parts, container = _in_parts(1, 2)
    options: dict[str, Any] = {"interval": 1, "durable": False}
    with alone(), succeeds("saves", where="a container"):
        checkpoint.save_training(tmp_path / "ck", parts, container, 2)
        with checkpoint.CheckpointManager(tmp_path / "run", model=parts, optimizers=container, **options) as manager:
            manager.save(2)
    _stepped(torch.nn.Sequential(*parts), container, 2)
    for way, step_count in itertools.product(("training", "manager", "list"), (0, 1)):
        others, its = _in_parts(2, step_count)
        with alone(), succeeds("a load", where=f"{way}, {step_count} steps before"):
            if way == "training":
                checkpoint.load_training(tmp_path / "ck", others, its)
            else:
                given = its if way == "manager" else [its]
                with checkpoint.CheckpointManager(
                    tmp_path / "run", model=others, optimizers=given, **options
                ) as manager:
                    manager.load()
        _stepped(torch.nn.Sequential(*others), its, 2)
        for part, other in zip(parts, others, strict=True):
            for name, value in other.named_parameters():
                where = f"{way}, {step_count} steps before: {name}"
                assert_same_tensor(value.detach(), part.get_parameter(name).detach(), where=where)
    with raises(ConfigError, mentions=("names its states itself", "Adam"), where="beside another"):
        both = [container, torch.optim.Adam(parts[1].parameters())]
        checkpoint.CheckpointManager(tmp_path / "run", model=parts, optimizers=both, **options)
    with raises(ConfigError, mentions=("not as torch's", "param_groups", "_Keyed"), where="no groups"), alone():
        checkpoint.save_training(tmp_path / "new", parts[0], _Keyed(parts[0].parameters(), lr=0.5), 1)
    assert_equal((tmp_path / "new").exists(), False, where="what was made")
