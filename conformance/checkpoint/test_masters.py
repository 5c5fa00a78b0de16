"""Sharded models in half precision whose masters and optimizer stand among the states, in a process that is new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from conformance.checkpoint.cases import mesh_of
from conformance.checkpoint.trainer import alone
from conformance.harness import Rank, assert_equal, assert_same_tensors, raises, requirement, succeeds
from twinproof.errors import ConfigError, PlanError


class _Run:
    """A model in bfloat16 of shards, masters, and AdamW, offloaded to steps on the CPU or not."""

    def __init__(self, rank: Rank, *, is_offloaded: bool) -> None:
        offload = rank.component("offload")
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 5)).to(torch.bfloat16)
        fully_shard(self.model, mesh=mesh_of(rank))
        self.masters = offload.MasterWeights(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.masters.parameters(), lr=0.01)
        self.offloader = None
        if is_offloaded:
            options = {"step_device": "cpu", "master_weights": self.masters}
            self.offloader = offload.OptimizerStateOffloader(self.optimizer, **options)
        else:
            self.masters.attach(self.optimizer)

    def manager(self, checkpoint: Any, folder: Path, **states: Any) -> Any:
        """A manager of all of it."""
        states = {"adam": self.optimizer, "masters": self.masters, **states}
        return checkpoint.CheckpointManager(folder, model=self.model, states=states, interval=1, durable=False)

    def step(self, *numbers: int) -> None:
        """Steps of these numbers."""
        for number in numbers:
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)
            torch.autograd.backward(self.model(batch).float().square().sum())
            self.optimizer.step()

    def values(self) -> dict[str, torch.Tensor]:
        """Whole copies of parameters, masters and states."""
        found: dict[str, Any] = dict(self.model.named_parameters())
        for number, master in enumerate(self.masters.parameters()):
            found[f"master {number}"] = master
            for name, state in self.optimizer.state_dict()["state"].get(number, {}).items():
                found[f"{name} of {number}"] = state
        return {name: _whole(value) for name, value in found.items()}


def _whole(value: torch.Tensor) -> torch.Tensor:
    # Of one rank the whole of a tensor is its own memory.
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def _resumed(rank: Rank, folder: str) -> None:
    checkpoint = rank.component("checkpoint")
    for is_offloaded in (False, True):
        where, path = f"offloaded: {is_offloaded}", Path(folder) / f"{is_offloaded}"
        run = _Run(rank, is_offloaded=is_offloaded)
        run.step(1, 2)
        with run.manager(checkpoint, path) as manager:
            manager.save(2)
        saved = run.values()
        torch.save(saved, f"{path}-{rank.rank}.pt")
        run.step(3)
        fresh = _Run(rank, is_offloaded=is_offloaded)
        with succeeds("a load and a step", where=where), fresh.manager(checkpoint, path) as manager:
            manager.load()
            found = fresh.values()
            fresh.step(3)
        assert_same_tensors(found, saved, where=f"{where}: what was saved")
        assert_same_tensors(fresh.values(), run.values(), where=f"{where}: a step behind it")


def _resumed_elsewhere(rank: Rank, folder: str) -> None:
    checkpoint = rank.component("checkpoint")
    for is_offloaded in (False, True):
        where, path = f"offloaded: {is_offloaded}, of {rank.world_size}", Path(folder) / f"{is_offloaded}"
        fresh = _Run(rank, is_offloaded=is_offloaded)
        with succeeds("a load and a step", where=where), fresh.manager(checkpoint, path) as manager:
            manager.load()
            found = fresh.values()
            fresh.step(3)
        assert_same_tensors(found, torch.load(f"{path}-0.pt"), where=f"{where}: what was saved")


@requirement(
    "CKPT-890",
    "An optimizer among the states whose parameters are sharded, as masters of FSDP2's, MUST get its states back in a "
    "process that is new, sharded as they are, on any number of ranks: the run goes on bit for bit, offloaded too.",
)
def test_masters_of_shards(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_resumed, 2, str(tmp_path))
    for count in (1, 3):
        rank_pool.run(_resumed_elsewhere, count, str(tmp_path))


class _Folded(torch.optim.SGD):
    """One whose states are sharded, and of another shape than their parameters."""

    def step(self, closure: Any = None) -> Any:
        """Keeps each row twice."""
        for param in self.param_groups[0]["params"]:
            self.state[param]["folded"] = torch.cat([param.detach(), param.detach()], 1)
        return None


def _refused(rank: Rank, folder: str) -> None:
    checkpoint = rank.component("checkpoint")
    run, fresh = (_Run(rank, is_offloaded=False) for _ in range(2))
    folded, other = (_Folded([each.model.get_parameter("0.weight")], lr=0.1) for each in (run, fresh))
    folded.step()
    with run.manager(checkpoint, Path(folder), folded=folded) as manager:
        manager.save(1)
    before = fresh.values()
    mentions = ("sharded otherwise", "got: folded.state.0.folded, (7, 12)", "expected: (7, 6)", "where: states")
    with (
        fresh.manager(checkpoint, Path(folder), folded=other) as manager,
        raises(PlanError, mentions=mentions, where="a state of another shape"),
    ):
        manager.load()
    assert_same_tensors(fresh.values(), before, where="what a refused load leaves")
    assert_equal(len(other.state), 0, where="states behind a load that was refused")


@requirement(
    "CKPT-891",
    "A state of such an optimizer that is sharded and has another shape than its parameter MUST be refused by name "
    "where the optimizer does not have it yet, before anything is loaded.",
)
def test_states_of_other_shapes(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_refused, 2, str(tmp_path))


@requirement(
    "CKPT-899",
    "Tensors that an optimizer among the states has beside the states of its parameters, in its groups or under keys "
    "of its own, MUST come back to a fresh one that lacks them.",
)
def test_tensors_beside_states(checkpoint: Any, tmp_path: Path) -> None:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(2, 1)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    (model, optimizer), (other, fresh) = made(), made()
    torch.autograd.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    held: Any = optimizer.state
    held["shared"] = torch.arange(3.0)
    optimizer.param_groups[0]["swept"] = torch.arange(4.0)
    options: dict[str, Any] = {"interval": 1, "durable": False}
    with alone(), checkpoint.CheckpointManager(tmp_path, model=model, states={"sgd": optimizer}, **options) as manager:
        manager.save(1)
    loaded = checkpoint.CheckpointManager(tmp_path, model=other, states={"sgd": fresh}, **options)
    with alone(), loaded, succeeds("a load", where="a fresh optimizer"):
        loaded.load()
    found: Any = fresh.state
    assert_same_tensors({"shared": found["shared"]}, {"shared": held["shared"]}, where="a key of its own")
    swept = [each.param_groups[0]["swept"] for each in (fresh, optimizer)]
    assert_same_tensors({"swept": swept[0]}, {"swept": swept[1]}, where="a tensor of its group")
    momenta = [each.state_dict()["state"][0] for each in (fresh, optimizer)]
    assert_same_tensors(momenta[0], momenta[1], where="states of a parameter")


class _Own(torch.optim.SGD):
    """One that says its states itself."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


@requirement(
    "CKPT-980",
    "A CheckpointManager MUST refuse an optimizer of parameters that are none of its model's, as of master weights, "
    "where it is made, before any save; one of a group that is added later, where it is saved. An optimizer that says "
    "its states itself MUST NOT be refused before a save.",
)
def test_optimizers_of_no_model(checkpoint: Any, offload: Any, tmp_path: Path) -> None:
    parts = [torch.nn.ModuleDict({name: torch.nn.Linear(2, 1, dtype=torch.bfloat16)}) for name in "ab"]
    masters = [offload.MasterWeights(part.parameters()) for part in parts]
    sgd = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    adam = torch.optim.AdamW(masters[1].parameters())
    options: dict[str, Any] = {"interval": 5, "durable": False}
    mentions = ("none of the model's", "2 such", "AdamW", "among the states", "where: optimizers")
    cases: dict[str, tuple[Any, Any]] = {
        "alone": (parts[1], adam),
        "beside another": (parts[1], [sgd[1], adam]),
        "of the second part": (parts, [sgd[0], adam]),
    }
    for what, (model, optimizers) in cases.items():
        with raises(ConfigError, mentions=mentions, where=f"masters' optimizer, {what}"):
            checkpoint.CheckpointManager(tmp_path, model=model, optimizers=optimizers, **options)
    with succeeds("a manager", where="an optimizer that says its states itself"):
        own = _Own(masters[1].parameters(), lr=0.1)
        checkpoint.CheckpointManager(tmp_path, model=parts[1], optimizers=own, **options).close()
    manager = checkpoint.CheckpointManager(tmp_path, model=parts, optimizers=sgd, **options)
    with alone(), manager, succeeds("a save", where="optimizers of the model"):
        manager.save(5)
    with alone(), checkpoint.CheckpointManager(tmp_path, model=parts, optimizers=sgd, **options) as manager:
        sgd[1].add_param_group({"params": list(masters[1].parameters())})
        with raises(ConfigError, mentions=mentions[:2], where="a group that was added"):
            manager.save(10)


@requirement(
    "CKPT-981",
    "Master weights MUST stand among the states of a CheckpointManager and of save_training(), which needs no other "
    "optimizer then: a load brings them back bit for bit with the model that is rounded from them, saved at once or "
    "by copies, attached and offloaded, also where there are none of them.",
)
@pytest.mark.parametrize("mode", ["disabled", "async", "save_training"])
def test_masters_among_the_states(checkpoint: Any, offload: Any, tmp_path: Path, mode: str) -> None:
    def made(is_offloaded: bool, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
        masters = offload.MasterWeights(model.parameters())
        adam = torch.optim.AdamW(masters.parameters(), lr=0.1)
        if is_offloaded:
            offload.OptimizerStateOffloader(adam, step_device="cpu", master_weights=masters)
        else:
            masters.attach(adam)
        run = {"model": model, "states": {"adam": adam, "masters": masters, "none": offload.MasterWeights([])}}
        step(run)
        return run

    def step(run: dict[str, Any]) -> None:
        torch.autograd.backward(run["model"](torch.ones(2, 3, dtype=torch.bfloat16)).sum())
        run["states"]["adam"].step()

    def values(run: dict[str, Any]) -> dict[str, torch.Tensor]:
        masters = run["states"]["masters"].parameters()
        found = {f"master {i}": each for i, each in enumerate(masters)}
        return {name: each.detach().clone() for name, each in (*run["model"].named_parameters(), *found.items())}

    for is_offloaded in (False, True):
        where, path = f"{mode}, offloaded: {is_offloaded}", tmp_path / f"{is_offloaded}"
        saved, fresh = made(is_offloaded, 1), made(not is_offloaded, 2)
        expected = values(saved)
        one = torch.optim.SGD([saved["model"].weight])
        for what, states in {"none": {}, "one of a parameter": {"one": one}}.items():
            with raises(ConfigError, mentions=("one optimizer", "got: 0"), where=f"{what} among the states"):
                checkpoint.save_training(path, saved["model"], [], 1, states=states)
        with alone(), succeeds("a save and a load", where=where):
            if mode == "save_training":
                checkpoint.save_training(path, saved["model"], [], 1, states=saved["states"])
                checkpoint.load_training(path, fresh["model"], [], states=fresh["states"])
            else:
                options: dict[str, Any] = {"interval": 1, "durable": False, "async_mode": mode}
                with checkpoint.CheckpointManager(path, **saved, **options) as manager:
                    manager.save(1)
                with checkpoint.CheckpointManager(path, **fresh, **options) as manager:
                    manager.load()
        assert_same_tensors(values(fresh), expected, where=where)
        with succeeds("a step", where=f"{where}, behind a load"):
            step(fresh)
