"""Ranks and parts of a model that have no parameters, or train none: a stage of activations, a frozen stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.checkpoint.trainer import alone
from conformance.harness import Rank, assert_equal, assert_same_tensors, raises, requirement, succeeds
from twinproof.errors import ConfigError

# One process saves and loads here, and torch's threads warn of it when they like.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class _Stage(torch.nn.Module):
    """A layer under a name of its own, full of a value."""

    def __init__(self, name: str, value: float) -> None:
        super().__init__()
        setattr(self, name, torch.nn.Linear(3, 3))
        for param in self.parameters():
            torch.nn.init.constant_(param, value)


def _trained(stage: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.5, momentum=0.9)
    for param in stage.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def _parts(kind: str, value: float) -> Any:
    """What a rank has beside the one that trains."""
    made = {"nothing": [], "an activation": torch.nn.ReLU(), "activations": [torch.nn.ReLU(), torch.nn.Identity()]}
    return made[kind] if kind in made else _Stage("second", value).requires_grad_(False)


KINDS = ("nothing", "an activation", "activations", "a frozen stage")


def _run(rank: Rank, kind: str, value: float) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """Model and optimizers of a rank, and the tensors that it has."""
    model = _Stage("first", value) if rank.rank == 0 else _parts(kind, value)
    optimizers: Any = _trained(model) if rank.rank == 0 else []
    tensors = dict(model.state_dict()) if isinstance(model, torch.nn.Module) else {}
    if rank.rank == 0:
        tensors |= {f"momentum of {n}": state["momentum_buffer"] for n, state in enumerate(optimizers.state.values())}
    return model, optimizers, tensors


def _on_ranks(rank: Rank, folder: str, kind: str, way: str) -> None:
    checkpoint, options = rank.component("checkpoint"), {"interval": 1, "durable": False}
    model, optimizers, saved = _run(rank, kind, 1.0)
    saved = {name: value.clone() for name, value in saved.items()}
    other, others, found = _run(rank, kind, 2.0)
    where = f"{kind}, {way}, rank {rank.rank}"
    with succeeds("a save and a load", where=where):
        if way == "training":
            checkpoint.save_training(folder, model, optimizers, 3, durable=False)
            assert_equal(checkpoint.load_training(folder, other, others), 3, where=f"{where}: the step")
        elif way == "native":
            with checkpoint.CheckpointManager(folder, model=model, optimizers=optimizers, **options) as manager:
                manager.save(1)
            with checkpoint.CheckpointManager(folder, model=other, optimizers=others, **options) as manager:
                assert_equal(manager.load(), True, where=where)
        else:
            with checkpoint.CheckpointManager(folder, model=model, last_save_in_hf=True, **options) as manager:
                manager.save(1, last_step=True)
            first = {"initial_load_path": f"{folder}/step-1", **options}
            with checkpoint.CheckpointManager(f"{folder}-2", model=other, **first) as manager:
                assert_equal(manager.load(), True, where=where)
    if way == "HF":
        saved, found = (
            {name: value for name, value in each.items() if "momentum" not in name} for each in (saved, found)
        )
    assert_same_tensors(found, saved, where=where)


@requirement(
    "CKPT-914",
    "A rank whose part of the model has no parameters, or trains none, and one that has no part MUST save and load "
    "with the others: save_training and a manager, in torch's format and in HF's; without an optimizer of its own.",
)
@pytest.mark.parametrize("way", ["training", "native", "HF"])
def test_ranks_without_parameters(rank_pool: Any, tmp_path: Path, way: str) -> None:
    for number, kind in enumerate(KINDS):
        rank_pool.run(_on_ranks, 2, str(tmp_path / f"{number}"), kind, way)


@requirement(
    "CKPT-915",
    "Optimizers MUST be one for each part that is trained, in order: parts without parameters and frozen ones need "
    "none, and one of no parameter is saved and loaded; a part that is trained and has none MUST be refused by name.",
)
def test_optimizers_of_trained_parts(checkpoint: Any, tmp_path: Path) -> None:
    def made(value: float) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
        trained: list[torch.nn.Module] = [_Stage("first", value), _Stage("third", 2 * value)]
        return trained, [torch.nn.ReLU(), trained[0], _Stage("second", value).requires_grad_(False), trained[1]]

    stages, parts = made(1.0)
    optimizers = [_trained(stage) for stage in stages]
    others, other_parts = made(5.0)
    fresh = [torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9) for stage in others]
    with alone(), succeeds("a save and a load", where="two of four parts"):
        checkpoint.save_training(tmp_path / "ck", parts, optimizers, 4, durable=False)
        assert_equal(checkpoint.load_training(tmp_path / "ck", other_parts, fresh), 4, where="the step")
    for number, (mine, other) in enumerate(zip(optimizers, fresh, strict=True)):
        states = [[state["momentum_buffer"] for state in each.state.values()] for each in (other, mine)]
        found, expected = (dict(zip("ab", each, strict=True)) for each in states)
        assert_same_tensors(found, expected, where=f"states of optimizer {number}")
        assert_equal(other.param_groups[0]["lr"], 0.5, where=f"the rate of optimizer {number}")
    for part, other_part in zip(parts, other_parts, strict=True):
        assert_same_tensors(dict(other_part.state_dict()), dict(part.state_dict()), where="a part")
    idle = torch.optim.SGD([{"params": []}], lr=0.5)
    with alone(), succeeds("a save and a load", where="an optimizer of no parameter"):
        checkpoint.save_training(tmp_path / "idle", torch.nn.ReLU(), idle, 5, durable=False)
        assert_equal(checkpoint.load_training(tmp_path / "idle", torch.nn.ReLU(), idle), 5, where="the step")
    for what, (given, model) in {
        "none of one": ([], parts[1]),
        "one of two": (optimizers[:1], parts),
        "three of two": ([*optimizers, optimizers[0]], parts),
        "one of none": (optimizers[:1], []),
    }.items():
        with raises(ConfigError, mentions=("each part of the model that is trained",), where=what), alone():
            checkpoint.save_training(tmp_path / "other", model, given, 4, durable=False)
