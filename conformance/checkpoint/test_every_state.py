"""N. Every component's state, saved in every way: the right bytes, or a named error, never neither."""

from __future__ import annotations

import copy
import io
import multiprocessing
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, set_element
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from conformance.checkpoint.cases import load, save
from conformance.checkpoint.states import MAKERS, Made, agreed
from conformance.checkpoint.trainer import Said
from conformance.harness import Rank, assert_equal, assert_same_tensor, requirement
from conformance.harness.raising import errors_inside
from twinproof.errors import TwinproofError

WAYS = ("save", "thread", "process")
STORAGES = ("ours", "torch files", "torch HF")
# What cannot be right, by (state, way, storage) and number of ranks: torch's own stagers make plain memory, in which a
# rank's rows would stand for the whole; torch's HF writer keeps one chunk of a tensor.
ROWS = ("rows", "live rows", "module with rows")


def _refused(state: str, way: str, storage: str, rank_count: int) -> bool:
    if storage == "ours":
        return False
    if way == "save":
        return state in ROWS[:2] and storage == "torch HF"
    return state in ROWS and rank_count > 1


def _writer(rank: Rank, storage: str, path: str, group: Any) -> Any:
    if storage == "ours":
        return rank.component("checkpoint").HuggingFaceStorageWriter(path, block_bytes=64, process_group=group)
    if storage == "torch files":
        return dcp.FileSystemWriter(path)
    return dcp.HuggingFaceStorageWriter(path, save_distributed=True)


def _save(made: Made, way: str, writer: Any, group: Any) -> None:
    if way == "save":
        dcp.save(made.state, storage_writer=writer, process_group=group)
        made.train()
        return
    options = {"async_checkpointer_type": AsyncCheckpointerType[way.upper()], "process_group": group}
    future: Any = dcp.async_save(made.state, storage_writer=writer, **options)
    made.train()
    getattr(future, "upload_completion", future).result()


def _load(rank: Rank, made: Made, storage: str, path: str) -> None:
    readers = {"torch files": dcp.FileSystemReader, "torch HF": dcp.HuggingFaceStorageReader}
    reader = readers[storage] if storage in readers else rank.component("checkpoint").HuggingFaceStorageReader
    targets = made.targets()
    dcp.load(targets, storage_reader=reader(path), no_dist=True)
    made.compare(targets)


def _outcome(act: Any, *arguments: Any) -> str:
    try:
        act(*arguments)
    except BaseException as error:
        inside = [each for each in errors_inside(error) if isinstance(each, TwinproofError)]
        if inside:
            return "refused"
        return f"{type(error).__name__}: {str(error)[-300:]}"
    return "right"


def _through_storage(rank: Rank, folder: str, way: str, storage: str) -> dict[str, str]:
    # Workers of the pool are daemons, which may not have the child that an async save in a process needs.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    outcomes = {}
    # DCP's collectives and the writer's need groups of their own, or they would meet the training's.
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, make in MAKERS.items():
            path = f"{folder}/{name}"

            def act(make: Any = make, path: str = path) -> None:
                made = make(rank)
                writer = _writer(rank, storage, path, groups[0])
                _save(made, way, writer, groups[1])
                dist.barrier()
                _load(rank, made, storage, path)

            outcomes[name] = agreed(_outcome(act))
    return outcomes


def _check(outcomes: Mapping[str, str], expected: Mapping[str, str]) -> None:
    # A component that the implementation lacks has no state; where it lacks all that was asked for, that is said.
    lacking = {name: found for name, found in outcomes.items() if found.startswith("Skipped: implementation ")}
    if lacking.keys() == outcomes.keys():
        pytest.skip("; ".join(sorted(set(lacking.values()))))
    outcomes = {name: found for name, found in outcomes.items() if name not in lacking}
    wrong = {name: found for name, found in outcomes.items() if found != expected[name]}
    assert_equal(wrong, {name: expected[name] for name in wrong}, where="states by outcome")


@requirement(
    "CKPT-420",
    "The state of every component MUST be saved as it was when the save was asked for, by dcp.save and by "
    "dcp.async_save in a thread and in a process, with our storage and with torch's, on 1 and 2 ranks; what another "
    "stager or writer cannot hold MUST be a named error.",
)
@pytest.mark.parametrize("rank_count", [1, 2])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.night] * (way == "process")) for way in WAYS])
def test_every_way(checkpoint: Any, rank_pool: Any, tmp_path: Path, way: str, storage: str, rank_count: int) -> None:
    found = rank_pool.run(_through_storage, rank_count, str(tmp_path), way, storage, timeout_s=110)
    expected = {s: "refused" if _refused(s, way, storage, rank_count) else "right" for s in MAKERS}
    _check(found[0], expected)


def _by_a_manager(rank: Rank, folder: str) -> dict[str, str]:
    outcomes, manager_of = {}, rank.component("checkpoint").CheckpointManager
    for name, make in MAKERS.items():
        path = f"{folder}/{name}"

        def act(make: Any = make, path: str = path) -> None:
            made = make(rank)
            states = {"made": Said(made.state)}
            options: dict[str, Any] = {"interval": 1, "async_mode": "async", "durable": False}
            with manager_of(path, model=torch.nn.Linear(1, 1), states=states, **options) as manager:
                manager.save(1)
                made.train()
            dist.barrier()
            targets = {"made": made.targets()}
            dcp.load(targets, storage_reader=dcp.FileSystemReader(f"{path}/step-1"), no_dist=True)
            made.compare(targets["made"])

        outcomes[name] = agreed(_outcome(act))
    return outcomes


@requirement(
    "CKPT-844",
    "An asynchronous save of a manager MUST hold the state of every component as it was at the call, rows of a store "
    "and cut tables too, on 1 and 2 ranks.",
)
def test_manager_beside_training(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for rank_count in (1, 2):
        found = rank_pool.run(_by_a_manager, rank_count, str(tmp_path / f"{rank_count}"))
        _check(found[0], dict.fromkeys(MAKERS, "right"))


def _pickled(state: Mapping[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=False)
    return loaded


def _copied(rank: Rank) -> dict[str, dict[str, str]]:
    outcomes: dict[str, dict[str, str]] = {"deepcopy": {}, "torch.save": {}, "clone": {}}
    copies = {
        "deepcopy": copy.deepcopy,
        "torch.save": _pickled,
        "clone": lambda state: {name: value.clone() for name, value in state.items()},
    }
    for way, act in copies.items():
        for name, make in MAKERS.items():

            def check(make: Any = make, act: Any = act) -> None:
                made = make(rank)
                found = act(made.state)
                made.train()
                made.compare_local(found)

            outcomes[way][name] = agreed(_outcome(check))
    return outcomes


@requirement(
    "CKPT-421",
    "A copy of any component's state, by copy.deepcopy, clone or torch.save, MUST hold the values of its moment, on 1 "
    "and 2 ranks, or be a named error.",
)
def test_copies(checkpoint: Any, rank_pool: Any) -> None:
    for rank_count in (1, 2):
        found = rank_pool.run(_copied, rank_count)[0]
        for way, outcomes in found.items():
            refused = {"torch.save": ("live rows",)}.get(way, ())
            _check(outcomes, {state: "refused" if state in refused else "right" for state in MAKERS})
        assert_equal(set(found), {"deepcopy", "torch.save", "clone"}, where="ways")


def _offloaded(offload: Any) -> tuple[torch.nn.Linear, torch.optim.Optimizer, Any]:
    torch.manual_seed(5)
    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, offload.OptimizerStateOffloader(optimizer, step_device="cpu")


def _step(model: torch.nn.Linear, optimizer: torch.optim.Optimizer, factor: float) -> None:
    optimizer.zero_grad()
    model(torch.ones(3, 6) * factor).square().sum().backward()
    optimizer.step()


@requirement(
    "CKPT-424",
    "get_optimizer_state_dict of an offloaded optimizer, nested or flattened, saved as tensors and given to "
    "set_optimizer_state_dict, MUST let training go on bit for bit.",
)
@pytest.mark.parametrize("flat", [False, True])
def test_optimizer_state(checkpoint: Any, offload: Any, tmp_path: Path, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer, offloader = _offloaded(offload)
    for factor in (1.0, 2.0):
        _step(model, optimizer, factor)
    saved: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    tensors, names = flatten_state_dict(saved)
    tensors = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    save(checkpoint, tensors, tmp_path / "ck", durable=False)
    for factor in (3.0, 4.0):
        _step(model, optimizer, factor)
    other_model, other_optimizer, other_offloader = _offloaded(offload)
    _step(other_model, other_optimizer, -9.0)
    targets = {name: torch.zeros_like(value) for name, value in tensors.items()}
    load(checkpoint, targets, tmp_path / "ck")
    for name, value in targets.items():
        set_element(saved, names[name], value)
    set_model_state_dict(other_model, saved["model"])
    set_optimizer_state_dict(other_model, other_optimizer, saved["optimizer"], options=options)
    for factor in (3.0, 4.0):
        _step(other_model, other_optimizer, factor)
    offloader.settle()
    other_offloader.settle()
    assert_same_tensor(other_model.weight.detach(), model.weight.detach(), where="weight after two more steps")
