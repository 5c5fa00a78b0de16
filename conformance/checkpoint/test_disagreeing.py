"""Ranks that have different tensors under one name, and DTensors whose parts are not what their placements say."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlanner
from torch.distributed.tensor import DTensor, Shard

from conformance.checkpoint.cases import load_ranks, mesh_of, save_ranks
from conformance.checkpoint.trainer import Said
from conformance.harness import Rank, assert_equal, assert_same_tensor, raises, requirement, succeeds
from twinproof.errors import PlanError

_BY_STATES = ("save_training", "manager", "async manager")
_BY_MODEL = ("HF manager", "final files", "shard files", "our planner", "cached plans")


@contextmanager
def _cached() -> Iterator[Any]:
    """A planner that caches plans, of a class of its own, so that nothing is shared with other tests."""

    class PlannerOfThis(DefaultSavePlanner):
        pass

    try:
        yield lambda: PlannerOfThis(enable_plan_caching=True)
    finally:
        for name, table in vars(SavePlanner).items():
            if name.startswith("_cached"):
                table.pop("PlannerOfThis", None)


def _save(rank: Rank, way: str, folder: Path, value: Any) -> None:
    """Save a model with the value as its weight, or a state where the value is no parameter."""
    checkpoint, model = rank.component("checkpoint"), torch.nn.Linear(1, 1, bias=False)
    states = {"said": Said({"w": value})}
    given: dict[str, Any] = {"interval": 1, "durable": False}
    if way == "save_training":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        checkpoint.save_training(folder, model, optimizer, 1, states=states, durable=False)
    elif way in _BY_STATES:
        mode = "async" if "async" in way else "disabled"
        with checkpoint.CheckpointManager(folder, model=model, states=states, async_mode=mode, **given) as manager:
            manager.save(1)
    elif way == "HF manager":
        model.register_buffer("w", value)
        with checkpoint.CheckpointManager(folder, model=model, last_save_in_hf=True, **given) as manager:
            manager.save(1, last_step=True)
    else:
        planner = checkpoint.HuggingFaceSavePlanner() if way == "our planner" else None
        save_ranks(rank, {"w": value}, folder, planner=planner, enable_consolidation=way != "shard files")


def _name(way: str) -> str:
    return "said.w" if way in _BY_STATES else "w"


def _save_others(rank: Rank, path: str, way: str) -> None:
    first, folder = torch.ones(3), Path(path)
    others: dict[str, Any] = {"shape": torch.ones(4), "dtype": torch.ones(3, dtype=torch.bfloat16)}
    if way in (*_BY_STATES, "HF manager", "our planner"):
        # Torch's own planner ends such a save before a writer is asked.
        others["dimensions"] = torch.ones(3, 1)
    if way in _BY_STATES:
        others["kind"] = "said"
    if way == "cached plans":
        # Torch takes a plan that differs in dtypes for the one that it has.
        del others["dtype"]
    for number, (what, other) in enumerate(others.items()):
        values = (first, other) if number % 2 else (other, first)
        value, where = values[rank.rank], f"another {what}, by {way}, on rank {rank.rank}"
        shown = ["ranks disagree", "torch.float32 [3]", "rank 0", "rank 1", f"where: {_name(way)}"]
        shown.append(f"{other.dtype} {list(other.shape)}" if isinstance(other, torch.Tensor) else "an object")
        with _cached() as made, raises(PlanError, mentions=tuple(shown), where=where):
            if way == "cached plans":
                dcp.save({"w": first}, storage_writer=_writer(rank, folder / "before"), planner=made())
                dcp.save({"w": value}, storage_writer=_writer(rank, folder / what), planner=made())
            else:
                _save(rank, way, folder / what, value)
        found = os.listdir(folder / what) if (folder / what).exists() else []
        assert_equal(found, [], where=f"what {where} has left")
    with succeeds("a save of what ranks agree about", where=way), _cached():
        _save(rank, way, folder / "same", first + rank.rank)


def _writer(rank: Rank, folder: Path) -> Any:
    return rank.component("checkpoint").HuggingFaceStorageWriter(folder)


@requirement(
    "CKPT-944",
    "Ranks that have under one name tensors of another shape, number of dimensions or dtype, or an object beside a "
    "tensor, MUST be refused by every save by that name, with both and their ranks, and nothing is made.",
)
@pytest.mark.parametrize("way", [*_BY_STATES, *_BY_MODEL])
def test_other_tensors_of_one_name(checkpoint: Any, rank_pool: Any, tmp_path: Path, way: str) -> None:
    rank_pool.run(_save_others, 2, str(tmp_path), way)


def _uneven(rank: Rank, full: torch.Tensor, rows: int) -> DTensor:
    """A tensor of which the first rank has so many rows, whatever the placement says."""
    local = full[:rows] if rank.rank == 0 else full[rows:]
    given: dict[str, Any] = {"shape": full.shape, "stride": full.stride(), "run_check": False}
    made: DTensor = DTensor.from_local(local.clone(), mesh_of(rank), [Shard(0)], **given)
    return made


def _save_uneven(rank: Rank, path: str, way: str) -> None:
    full, folder = torch.arange(30.0).reshape(10, 3), Path(path) / "ck"
    _save(rank, way, folder, _uneven(rank, full, 5))
    held = sorted(os.listdir(folder))
    for rows in (3, 7):
        own, where = (rows, 10 - rows)[rank.rank], f"{rows} rows on rank 0, by {way}, on rank {rank.rank}"
        shown = ("not what was planned", f"[{own}, 3]", "[5, 3]", f"where: {_name(way)}")
        with raises(PlanError, mentions=shown, where=where):
            _save(rank, way, folder, _uneven(rank, full, rows))
        # The first rank clears up.
        found = sorted(os.listdir(folder)) if rank.rank == 0 else held
        assert_equal(found, held, where=f"what is there after {where}")


@requirement(
    "CKPT-945",
    "Parts of a DTensor whose shapes are not what its placements say MUST be refused by every save by name, with both "
    "shapes; the checkpoint that was there stays.",
)
@pytest.mark.parametrize("way", [*_BY_STATES, "HF manager", "final files", "shard files", "our planner"])
def test_parts_of_other_shapes(checkpoint: Any, rank_pool: Any, tmp_path: Path, way: str) -> None:
    rank_pool.run(_save_uneven, 2, str(tmp_path), way)


def _load_uneven(rank: Rank, path: str) -> None:
    checkpoint, full, folder = rank.component("checkpoint"), torch.arange(30.0).reshape(10, 3), Path(path)
    _save(rank, "save_training", folder / "states", full)
    _save(rank, "final files", folder / "model", full)
    target = _uneven(rank, torch.zeros(10, 3), 3)
    with raises(PlanError, mentions=("parts of targets", f"({(3, 7)[rank.rank]}, 3)", "(5, 3)", "said.w")):
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        checkpoint.load_training(folder / "states", model, optimizer, states={"said": Said({"w": target})})
    with raises(PlanError, mentions=("parts of targets", f"({(3, 7)[rank.rank]}, 3)", "(5, 3)", "where: w")):
        load_ranks(rank, {"w": target}, folder / "model", planner=checkpoint.HuggingFaceLoadPlanner())
    assert_same_tensor(target.to_local(), torch.zeros((3, 7)[rank.rank], 3), where=f"rank {rank.rank}")


@requirement(
    "CKPT-946",
    "Parts of a target whose shapes are not what its placements say MUST be refused by load_training and "
    "HuggingFaceLoadPlanner by name, with both shapes, and no target has changed.",
)
def test_targets_of_other_shapes(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_load_uneven, 2, str(tmp_path))
