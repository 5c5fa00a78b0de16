"""What is pickled and copied: readers, planners and writers are; a manager is not while it holds what is one's own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.checkpoint.cases import assert_loads, load_with, random_bits, save, save_with
from conformance.checkpoint.trainer import alone
from conformance.harness import Rank, assert_equal, assert_same_tensors, raises, requirement, succeeds
from twinproof.errors import UnsupportedError

HOW: dict[str, Callable[[Any], Any]] = {
    "a pickle": lambda given: pickle.loads(pickle.dumps(given)),
    "a deep copy": copy.deepcopy,
    "a copy": copy.copy,
}


def _manager(checkpoint: Any, folder: Path, **options: Any) -> Any:
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, 3.0)
    return checkpoint.CheckpointManager(folder, model=model, interval=1, durable=False, **options)


@requirement(
    "CKPT-882",
    "A manager that holds a process group, threads, or a save on its way MUST refuse to be pickled or copied, naming "
    "what it holds and what to do instead, and go on as it was; one that holds nothing MUST travel with its policy.",
)
@pytest.mark.parametrize("how", HOW)
def test_managers(checkpoint: Any, tmp_path: Path, how: str) -> None:
    expected = ("another manager", "where: CheckpointManager")
    with alone(), _manager(checkpoint, tmp_path / "run", keep_latest_k=2) as manager:
        with raises(UnsupportedError, mentions=("got: a thread of retention", *expected), where=how):
            HOW[how](manager)
        for step in (1, 2, 3):
            manager.save(step)
    kept = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert_equal(kept, ["step-2", "step-3"], where="what retention left, behind the refusal")
    with alone(), _manager(checkpoint, tmp_path / "run", keep_latest_k=0, async_mode="async") as manager:
        manager.save(4)
        with raises(UnsupportedError, mentions=("got: a save on its way", *expected), where=how):
            HOW[how](manager)
        manager.maybe_wait_for_saving()
        with succeeds("to travel", where=f"{how}, a save that is done"):
            HOW[how](manager)
    for what, options in {"closed": {}, "load_only": {"load_only": True}, "off": {"enable": False}}.items():
        manager = _manager(checkpoint, tmp_path / "run", **options)
        if what == "closed":
            manager.close()
        with succeeds("to travel", where=f"{how}, {what}"):
            made = HOW[how](manager)
        assert_equal(made.policy, manager.policy, where=f"{how}, {what}: the policy")
        if what == "load_only":
            with alone():
                assert_equal(made.load(), True, where=f"{how}: a load")
        manager.close()
        made.close()


def _with_a_group(rank: Rank, folder: str) -> None:
    with _manager(rank.component("checkpoint"), Path(folder), keep_latest_k=0) as manager:
        for how, act in HOW.items():
            with raises(UnsupportedError, mentions=("got: a process group", "another manager"), where=how):
                act(manager)
        assert_equal(manager.save(1), True, where=f"a save on rank {rank.rank}, behind the refusals")


@requirement(
    "CKPT-883",
    "A manager of several ranks MUST refuse to be pickled or copied, whatever its options, and go on as it was.",
)
def test_managers_of_ranks(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_with_a_group, 2, str(tmp_path))
    with alone(), _manager(checkpoint, tmp_path, load_only=True) as manager:
        assert_equal(manager.load(), True, where="a load of what the ranks saved")


@requirement(
    "CKPT-884",
    "Readers, planners and writers of one process MUST be pickled and copied, before they are used and after that, and "
    "what comes out MUST load and save as the first did.",
)
@pytest.mark.parametrize("how", HOW)
def test_readers_and_writers(checkpoint: Any, tmp_path: Path, how: str) -> None:
    state = {"w": random_bits(torch.float32, (5, 3), 1), "n": random_bits(torch.float64, (4,), 2)}
    plain = {"x.weight": torch.rand(6, 4).to(torch.float8_e4m3fn), "x.weight_scale_inv": torch.rand(2, 1)}
    save(checkpoint, state, tmp_path / "ck")
    save(checkpoint, plain, tmp_path / "quantized")
    for used in (False, True):
        where, found = f"{how}, {used=}", {name: torch.zeros_like(value) for name, value in state.items()}
        reader = checkpoint.HuggingFaceStorageReader(tmp_path / "ck", thread_count=2)
        planner = checkpoint.HuggingFaceLoadPlanner()
        scaled = checkpoint.QuantizedHuggingFaceStorageReader(tmp_path / "quantized", 2, block_size=4)
        writer = checkpoint.HuggingFaceStorageWriter(tmp_path / f"{used}", thread_count=2)
        saver, values = checkpoint.HuggingFaceSavePlanner(), [torch.zeros(6, 4), torch.zeros(6, 4)]
        load_with(scaled, {"x.weight": values[0]})
        if used:
            load_with(reader, {name: torch.zeros_like(value) for name, value in state.items()}, planner)
            save_with(writer, state, saver)
        else:
            scaled = checkpoint.QuantizedHuggingFaceStorageReader(tmp_path / "quantized", 2, block_size=4)
        with succeeds("to travel", where=where):
            reader, planner, scaled, writer, saver = (HOW[how](o) for o in (reader, planner, scaled, writer, saver))
        load_with(reader, found, planner)
        assert_same_tensors(found, state, where=where)
        load_with(scaled, {"x.weight": values[1]})
        assert_same_tensors({"x": values[1]}, {"x": values[0]}, where=f"{where}: quantized")
        other = {name: value.flip(0) for name, value in state.items()}
        save_with(writer, other, saver)
        assert_loads(checkpoint, tmp_path / f"{used}", other)
