"""Model, optimizer and step in one checkpoint: a run that is resumed is the run that was not interrupted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from conformance.checkpoint.cases import load as load_hf
from conformance.checkpoint.cases import mesh_of, save
from conformance.checkpoint.trainer import Trainer, alone, load
from conformance.harness import (
    Rank,
    assert_equal,
    assert_same_tensor,
    assert_same_tensors,
    raises,
    requirement,
    succeeds,
)
from twinproof.errors import ConfigError, FormatError, MissingCheckpointError, PlanError


def _others(trainer: Trainer) -> dict[str, Any]:
    return {"lr_scheduler": trainer.scheduler, "dataloader": trainer.loader}


def _resumed(checkpoint: Any, folder: Path, mesh: Any = None) -> tuple[Trainer, list[float]]:
    trainer = Trainer(9, mesh)
    with alone():
        trainer.counter.step = checkpoint.load_training(
            folder, trainer.model, trainer.optimizer, states=_others(trainer)
        )
    return trainer, [trainer.step() for _ in range(3)]


def _stopped(checkpoint: Any, folder: Path, mesh: Any = None) -> tuple[Trainer, list[float]]:
    trainer = Trainer(1, mesh)
    for _ in range(3):
        trainer.step()
    with alone():
        step = trainer.counter.step
        checkpoint.save_training(folder, trainer.model, trainer.optimizer, step, states=_others(trainer), durable=False)
    return trainer, [trainer.step() for _ in range(3)]


@requirement(
    "CKPT-539",
    "What save_training saved, load_training MUST restore so that training goes on bit for bit: weights, optimizer, "
    "other states, and the step, which it returns.",
)
def test_resumed_run(checkpoint: Any, tmp_path: Path) -> None:
    straight, losses = _stopped(checkpoint, tmp_path / "step-3")
    resumed, again = _resumed(checkpoint, tmp_path / "step-3")
    assert_equal(again, losses, where="losses after the load")
    assert_equal(resumed.counter.step, 6, where="step")
    assert_same_tensors(resumed.weights(), straight.weights(), where="weights")
    found = Trainer(5)
    with found.manager(checkpoint, tmp_path) as manager, alone():
        assert_equal(manager.load(), True, where="a manager finds it")
    assert_equal(found.counter.step, 3, where="the manager's step")


def _run_sharded(rank: Rank, path: str) -> tuple[list[float], list[float], int]:
    checkpoint, mesh = rank.component("checkpoint"), mesh_of(rank)
    straight, losses = _stopped(checkpoint, Path(path), mesh)
    resumed, again = _resumed(checkpoint, Path(path), mesh)
    assert_same_tensors(resumed.weights(), straight.weights(), where="weights")
    return losses, again, resumed.counter.step


@requirement(
    "CKPT-540",
    "save_training and load_training MUST do so for FSDP2's sharded parameters too, and on another number of ranks.",
)
def test_sharded_run(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for losses, again, step in rank_pool.run(_run_sharded, 2, str(tmp_path / "step-3")):
        assert_equal((again, step), (losses, 6), where="losses and step")
    alone_again = Trainer(4)
    with alone():
        step = checkpoint.load_training(
            tmp_path / "step-3", alone_again.model, alone_again.optimizer, states=_others(alone_again)
        )
    whole = Trainer(1)
    for _ in range(3):
        whole.step()
    assert_equal(step, 3, where="step on one rank")
    for name, value in whole.weights().items():
        # Two ranks sum their gradients in another order than one rank does.
        torch.testing.assert_close(alone_again.weights()[name], value, rtol=1e-4, atol=1e-5)


@requirement(
    "CKPT-541",
    "load_training MUST refuse an HF checkpoint and a folder without one by name; both MUST refuse what is no model, "
    "optimizer, step or state before anything is written.",
)
def test_training_refusals(checkpoint: Any, tmp_path: Path) -> None:
    trainer = Trainer(1)
    model, optimizer = trainer.model, trainer.optimizer
    save(checkpoint, dict(trainer.model.state_dict()), tmp_path / "hf")
    with raises(FormatError, mentions=("optimizer", "hf")):
        checkpoint.load_training(tmp_path / "hf", model, optimizer)
    with raises(MissingCheckpointError, mentions=("absent",)):
        checkpoint.load_training(tmp_path / "absent", model, optimizer)
    wrong: list[tuple[Any, Any, Any, Any, str]] = [
        (model.state_dict(), optimizer, 1, None, "modules"),
        (model, "adam", 1, None, "Optimizer"),
        (model, optimizer, 1.5, None, "step"),
        (model, optimizer, True, None, "step"),
        (model, optimizer, 1, {"lr": 0.1}, "state_dict"),
    ]
    for given_model, given_optimizer, step, states, mention in wrong:
        with raises(ConfigError, mentions=(mention,), where=mention):
            checkpoint.save_training(tmp_path / "new", given_model, given_optimizer, step, states=states)
    assert_equal((tmp_path / "new").exists(), False, where="nothing is written")


def _in_parts(seed: int, *, part_count: int, optimizer_count: int) -> tuple[list[torch.nn.Module], list[Any]]:
    # Each part has a layer of its own name; of a whole model each optimizer has some of the parameters.
    torch.manual_seed(seed)
    parts: list[torch.nn.Module] = [torch.nn.ModuleDict({f"part{i}": torch.nn.Linear(3, 3)}) for i in range(part_count)]
    parameters = [list(part.parameters()) for part in parts]
    if part_count != optimizer_count:
        flat = [parameter for mine in parameters for parameter in mine]
        parameters = [flat[i::optimizer_count] for i in range(optimizer_count)]
    optimizers = [torch.optim.AdamW(mine, lr=0.1 * (i + 1)) for i, mine in enumerate(parameters)]
    for _ in range(2):
        for mine, optimizer in zip(parameters, optimizers, strict=True):
            for parameter in mine:
                parameter.grad = torch.randn(parameter.shape)
            optimizer.step()
    return parts, optimizers


def _values(parts: list[torch.nn.Module], optimizers: list[Any]) -> dict[str, torch.Tensor]:
    found = {name: value.detach() for part in parts for name, value in part.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        for place, state in enumerate(optimizer.state.values()):
            found |= {f"optimizer.{number}.{place}.{name}": value for name, value in state.items()}
        found[f"lr.{number}"] = torch.tensor([group["lr"] for group in optimizer.param_groups])
    return found


@requirement(
    "CKPT-515",
    "A model in parts with an optimizer each, and one module with several optimizers, MUST be restored whole; another "
    "number of optimizers, and names that two parts have, MUST be refused, with the first five named.",
)
def test_models_in_parts(checkpoint: Any, tmp_path: Path) -> None:
    for part_count, optimizer_count in ((1, 1), (1, 2), (2, 2), (3, 3)):
        where, path = f"{part_count} parts, {optimizer_count} optimizers", tmp_path / f"{part_count}{optimizer_count}"
        parts, optimizers = _in_parts(1, part_count=part_count, optimizer_count=optimizer_count)
        others, fresh = _in_parts(2, part_count=part_count, optimizer_count=optimizer_count)
        given, wanted = (parts[0], others[0]) if part_count == 1 else (parts, others)
        for group in (group for optimizer in fresh for group in optimizer.param_groups):
            group["lr"] = 9.0
        with succeeds("saving and loading", where), alone():
            checkpoint.save_training(path, given, optimizers, 0, durable=False)
            assert_equal(checkpoint.load_training(path, wanted, fresh), 0, where=f"{where}: step")
        assert_same_tensors(_values(others, fresh), _values(parts, optimizers), where=where)
    parts, optimizers = _in_parts(1, part_count=3, optimizer_count=3)
    for count in (1, 2):
        with raises(ConfigError, mentions=("one optimizer", str(count), "3")), alone():
            checkpoint.save_training(tmp_path / "new", parts, optimizers[:count], 1)
    with raises(ConfigError, mentions=("step", "-1")), alone():
        checkpoint.save_training(tmp_path / "new", parts, optimizers, -1)
    wide = [torch.nn.ModuleDict({f"{i}": torch.nn.Linear(1, 1, bias=False) for i in range(6)}) for _ in range(2)]
    each = [torch.optim.SGD(part.parameters(), lr=0.1) for part in wide]
    names = [f"{i}.weight" for i in range(6)]
    with raises(PlanError, mentions=(str(names[:5]),)), alone():
        checkpoint.save_training(tmp_path / "new", wide, each, 1)
    assert_equal((tmp_path / "new").exists(), False, where="nothing is written")


@requirement(
    "CKPT-601",
    "load(0) MUST restore step-0, and of it the model alone, beside later steps; a step that is not there MUST be "
    "refused.",
)
def test_step_0(checkpoint: Any, tmp_path: Path) -> None:
    first, later = Trainer(1), Trainer(2)
    with alone():
        for step, trainer in ((0, first), (4, later)):
            trainer.counter.step = step
            with trainer.manager(checkpoint, tmp_path / "run", last_save_model_only=False) as manager:
                assert_equal(manager.save(step, last_step=True), True, where=f"step {step} is saved")
    found = Trainer(3)
    found.counter.step = 7
    with found.manager(checkpoint, tmp_path / "run") as manager:
        assert_equal(load(manager, 0), True, where="step 0 is loaded")
        assert_same_tensors(found.weights(), first.weights(), where="step 0")
        assert_equal(found.counter.step, 7, where="what is not the model")
        load(manager)
        assert_same_tensors(found.weights(), later.weights(), where="the newest")
        assert_equal(found.counter.step, 4, where="the newest step")
        for step in (1, -2):
            with raises(MissingCheckpointError, mentions=[str(step), "0, 4"], where=f"step {step}"):
                load(manager, step)


@requirement(
    "CKPT-615",
    "A manager's saves of either format, and save_training, MUST sync nothing where durable=False, and MUST sync else.",
)
def test_durability_of_managers(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, synced.append)
    for durable in (False, True):
        trainer = Trainer(1)
        with alone():
            for in_hf in (False, True):
                run = tmp_path / f"{durable}{in_hf}"
                with trainer.manager(checkpoint, run, durable=durable, last_save_in_hf=in_hf) as manager:
                    for step in (2, 3):
                        synced.clear()
                        assert_equal(manager.save(step, last_step=step == 3), True, where=f"step {step}")
                        where = f"durable={durable}, in_hf={in_hf}, step {step}: syncs"
                        assert_equal(bool(synced), durable, where=where)
            synced.clear()
            checkpoint.save_training(tmp_path / f"{durable}", trainer.model, trainer.optimizer, 1, durable=durable)
            assert_equal(bool(synced), durable, where=f"durable={durable}: syncs of save_training")


class _Plain:
    """Names as they are."""

    is_lost = False

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self.is_lost:
            raise LookupError("lost on one rank")
        return state_dict

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return hf_state_dict


class _Counter:
    """A state of the user's."""

    is_lost = is_full = False

    def state_dict(self) -> dict[str, Any]:
        if self.is_lost:
            raise LookupError("lost on one rank")
        return {"count": torch.tensor(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.is_full:
            raise LookupError("full on one rank")


def _fail_on_one(rank: Rank, folder: str) -> list[str]:
    """What one rank cannot give or take, in every way to save and to load; what each raises here."""
    checkpoint, model, counter, adapter = rank.component("checkpoint"), torch.nn.Linear(2, 3), _Counter(), _Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training: Any = (model, optimizer)
    made = checkpoint.CheckpointManager
    options = {"interval": 1, "state_dict_adapter": adapter, "states": {"counter": counter}, "durable": False}
    hf: Any = options | {"last_save_in_hf": True}
    said = []
    with made(f"{folder}/native", model=model, **options) as native, made(f"{folder}/hf", model=model, **hf) as last:
        native.save(1)
        last.save(1, last_step=True)
        checkpoint.save_training(f"{folder}/plain", *training, 1, durable=False)
        start = {**options, "initial_load_path": f"{folder}/hf/step-1"}
        with made(f"{folder}/start", model=model, **start) as first:
            counter.is_lost = adapter.is_lost = rank.rank == 1
            wrong = f"{folder}/nothing" if rank.rank == 1 else f"{folder}/plain"
            ways: dict[str, Callable[[], Any]] = {
                "save": lambda: native.save(2),
                "last save": lambda: last.save(2, last_step=True),
                "load of an HF checkpoint": first.load,
                "save_training": lambda: checkpoint.save_training(
                    f"{folder}/next", *training, 2, states={"counter": counter}, durable=False
                ),
                "load_training": lambda: checkpoint.load_training(wrong, *training),
            }
            for name, way in ways.items():
                try:
                    way()
                    said.append(f"{name}: no error")
                except Exception as error:
                    said.append(f"{name}: {type(error).__name__}")
    return said


@requirement(
    "CKPT-652",
    "What one rank raises before a checkpoint is written or read, in an adapter, in a state or for a path, MUST be "
    "raised there and told to all others, which wait for nobody.",
)
def test_one_rank_fails_early(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    with succeeds("two ranks", where="an answer of both"):
        others, own = rank_pool.run(_fail_on_one, 2, str(tmp_path), timeout_s=30)
    ways = ["save", "last save", "load of an HF checkpoint", "save_training", "load_training"]
    assert_equal(others, [f"{way}: DistributedError" for way in ways], where="the other rank")
    expected = [f"{way}: LookupError" for way in ways[:-1]] + ["load_training: MissingCheckpointError"]
    assert_equal(own, expected, where="the rank that fails")
    assert_equal(sorted(os.listdir(tmp_path / "native")), ["step-1"], where="what is left")


def _fail_in_loads(rank: Rank, folder: str) -> list[str]:
    """What a state of one rank raises in every way to load it; what each raises here."""
    checkpoint, model, counter = rank.component("checkpoint"), torch.nn.Linear(2, 3), _Counter()
    training: Any = (model, torch.optim.SGD(model.parameters(), lr=0.1))
    states, said = {"counter": counter}, []
    with checkpoint.CheckpointManager(
        f"{folder}/native", model=model, interval=1, states=states, durable=False
    ) as manager:
        manager.save(1)
        plain = f"{folder}/plain"
        checkpoint.save_training(plain, *training, 1, states=states, durable=False)
        for flag in ("is_lost", "is_full"):
            setattr(counter, flag, rank.rank == 1)
            ways = {
                "load": manager.load,
                "load_training": lambda: checkpoint.load_training(plain, *training, states=states),
            }
            for name, way in ways.items():
                try:
                    way()
                    said.append(f"{name}, {flag}: no error")
                except Exception as error:
                    said.append(f"{name}, {flag}: {type(error).__name__}")
            setattr(counter, flag, False)
        with succeeds("load", where="afterwards"):
            manager.load()
    return said


@requirement(
    "CKPT-677",
    "What a state raises on one rank of a load, asked for its values or given those that were saved, MUST be "
    "raised there and told to all others, which wait for nobody.",
)
def test_one_state_fails(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    with succeeds("two ranks", where="an answer of both"):
        others, own = rank_pool.run(_fail_in_loads, 2, str(tmp_path), timeout_s=30)
    ways = [f"{way}, {flag}" for flag in ("is_lost", "is_full") for way in ("load", "load_training")]
    assert_equal(others, [f"{way}: DistributedError" for way in ways], where="the other rank")
    assert_equal(own, [f"{way}: LookupError" for way in ways], where="the rank that fails")


class _Remembers(torch.nn.Linear):
    """A module with a state that is no parameter and no buffer."""

    def __init__(self, seen: Any) -> None:
        super().__init__(3, 3)
        self.seen = seen

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def _plain(state: Any) -> Any:
    return tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, state)


EXTRA_STATES: dict[str, tuple[Any, Any]] = {
    "a number": (7, 0),
    "text": ("trained", "new"),
    "a tensor": (torch.arange(3.0), torch.zeros(3)),
    "a dictionary": ({"count": 7, "mean": torch.ones(2)}, {"count": 0, "mean": torch.zeros(2)}),
    "a list": ([1, torch.ones(2)], [0, torch.zeros(2)]),
}


@requirement(
    "CKPT-647",
    "Loads of training checkpoints MUST give modules the extra state that was saved, whatever it is: numbers, text and "
    "tensors, also inside of dictionaries and lists.",
)
@pytest.mark.parametrize("kind", EXTRA_STATES)
def test_extra_states(checkpoint: Any, tmp_path: Path, kind: str) -> None:
    saved, other = EXTRA_STATES[kind]

    def made(seen: Any) -> tuple[Any, Any]:
        # Each module has its own: a load may write into what is there.
        model = torch.nn.Sequential(_Remembers(deepcopy(seen)), _Remembers(deepcopy(other)))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def manager(model: Any, optimizer: Any) -> Any:
        options = {"model": model, "optimizers": optimizer, "interval": 1, "durable": False}
        return checkpoint.CheckpointManager(tmp_path / "run", **options)

    model, optimizer = made(saved)
    with alone():
        checkpoint.save_training(tmp_path / "step-1", model, optimizer, 1, durable=False)
        with manager(model, optimizer) as saver:
            saver.save(1)
    for way in ("load_training", "load"):
        again, its = made(other)
        with succeeds("a load", where=way), alone():
            if way == "load_training":
                checkpoint.load_training(tmp_path / "step-1", again, its)
            else:
                with manager(again, its) as loader:
                    loader.load()
        for part, expected in zip(again, (saved, other), strict=True):
            assert_equal(_plain(part.seen), _plain(expected), where=f"{way}: {kind}")


def _made(width: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(width, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _save_by(checkpoint: Any, way: str, path: Path, model: Any, optimizer: Any, step: int) -> None:
    """Save to ``step-1`` of the folder, whatever the step."""
    target = path / "step-1"
    if way == "save_training":
        checkpoint.save_training(target, model, optimizer, step)
    elif way == "HF":
        save(checkpoint, {name: value.detach() for name, value in model.named_parameters()}, target)
    else:
        options = {"last_save_in_hf": way == "manager, HF", "interval": 1}
        with checkpoint.CheckpointManager(path, model=model, **options) as manager:
            manager.save(1, last_step=way == "manager, HF")


def _load_by(checkpoint: Any, way: str, path: Path, model: Any, optimizer: Any) -> int | None:
    """Load the same; the answer is the step where the way tells it."""
    target = path / "step-1"
    if way == "save_training":
        step: int = checkpoint.load_training(target, model, optimizer)
        return step
    if way == "HF":
        load_hf(checkpoint, {name: value.detach() for name, value in model.named_parameters()}, target)
    else:
        start = {"initial_load_path": target} if way == "manager, HF" else {}
        folder = path / "none" if start else path
        with checkpoint.CheckpointManager(folder, model=model, interval=1, **start) as manager:
            assert_equal(manager.load(), True, where=way)
    return None


@requirement(
    "CKPT-807",
    "A load MUST read what is at its path now, also where this process loaded another checkpoint from there before: "
    "of other shapes, of the same, and one that is there again.",
)
@pytest.mark.parametrize("way", ["save_training", "HF", "manager", "manager, HF"])
@pytest.mark.parametrize("how", ["saved over", "moved there"])
def test_replaced_checkpoints(checkpoint: Any, tmp_path: Path, way: str, how: str) -> None:
    path = tmp_path / "run"
    for number, width in enumerate((3, 5, 5, 2), start=1):
        where = f"{way}, {how}, number {number}"
        (model, optimizer), late = _made(width), _made(width)
        with alone(), succeeds("a save and a load", where=where):
            if how == "saved over":
                _save_by(checkpoint, way, path, model, optimizer, number)
            else:
                _save_by(checkpoint, way, tmp_path / f"{number}", model, optimizer, number)
                shutil.rmtree(path, ignore_errors=True)
                (tmp_path / f"{number}").rename(path)
            step = _load_by(checkpoint, way, path, *late)
        assert_equal(step in (None, number), True, where=f"{where}: step")
        found, wanted = (dict(each.named_parameters()) for each in (late[0], model))
        for name, value in wanted.items():
            assert_same_tensor(found[name].detach(), value.detach(), where=f"{where}: {name}")
