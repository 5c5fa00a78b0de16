"""Model, optimizer and step in one checkpoint: a run that is resumed is the run that was not interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from conformance.checkpoint.cases import mesh_of, save
from conformance.checkpoint.trainer import Trainer, alone
from conformance.harness import Rank, assert_equal, assert_same_tensors, raises, requirement
from twinproof.errors import ConfigError, FormatError, MissingCheckpointError


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
