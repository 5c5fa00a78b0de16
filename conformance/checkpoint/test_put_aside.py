"""A crash between the two renames of a save, where folders cannot be exchanged: the only copy is found, or named."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from conformance.checkpoint import crash_programs as programs
from conformance.checkpoint.cases import load
from conformance.checkpoint.crash_driver import Crashes
from conformance.checkpoint.crash_folders import NEW, OLD, assert_state, golden
from conformance.checkpoint.trainer import alone
from conformance.harness import Rank, assert_equal, assert_same_tensors, raises, requirement, succeeds
from conformance.kvstore.cases import store_of
from conformance.provers.faults import Fault, FaultServer
from twinproof.errors import MissingCheckpointError, StorageError

TOLD = "put aside"


def _killed_between(crashes: Crashes, shown: str) -> Path:
    """What was to be shown, after a run that could not exchange two folders and was killed before its last rename."""
    target = crashes.root / shown
    number = 1 + [event.path2 for event in crashes.record().only("rename")].index(str(target))
    struck = crashes.run(Fault("rename", number, "errno", errno=errno.EINVAL), Fault("rename", number + 2, "kill"))
    assert_equal((struck.outcome.killed, target.exists()), (True, False), where="killed between two renames")
    return target


def _aside(path: Path, digits: str = "0" * 12) -> Path:
    """The checkpoint, put aside as a save does."""
    hidden = path.with_name(f".{path.name}.previous-{digits}")
    path.rename(hidden)
    return hidden


@requirement(
    "CKPT-885",
    "Where a save was killed between its two renames, whoever asks for the checkpoint MUST be told of its only copy by "
    "path, by a MissingCheckpointError: readers, consolidation, load_training, rows; it MUST load, renamed back.",
)
def test_only_copies_are_named(
    checkpoint: Any, kvstore: Any, impl: ModuleType, server: FaultServer, tmp_path: Path
) -> None:
    prepare = golden(checkpoint, tmp_path)
    crashes = Crashes(server, tmp_path, prepare, programs.save_alone, impl.__name__, "{root}/ck", NEW, {})
    path = _killed_between(crashes, "ck")
    (hidden,) = path.parent.glob(".ck.previous-*")
    store, model = store_of(kvstore), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    asked: dict[str, Callable[[], object]] = {
        "a reader": lambda: load(checkpoint, {"one": torch.zeros(1)}, path),
        "consolidation": lambda: checkpoint.consolidate_safetensors_files(path, tmp_path / "out"),
        "load_training": lambda: checkpoint.load_training(path, model, optimizer),
        "detect_format": lambda: checkpoint.detect_format(path),
        "rows": lambda: kvstore.load(store, path),
    }
    for what, ask in asked.items():
        with raises(MissingCheckpointError, mentions=(TOLD, f"got: {hidden}", f"where: {path}"), where=what):
            ask()
    assert_equal((path.exists(), (tmp_path / "out").exists()), (False, False), where="what is made by asking")
    path.with_name("link").symlink_to("ck")
    with raises(MissingCheckpointError, mentions=(TOLD, f"got: {hidden}"), where="a link"):
        checkpoint.detect_format(path.with_name("link"))
    hidden.rename(path)
    assert_state(checkpoint, path, OLD, where="renamed back")
    # What stands beside a checkpoint that is there, is a file, or has another name, is no copy of one that is gone.
    for name in (".gone.previous-0", ".gone.saving-000000000000", ".other.previous-000000000000"):
        (tmp_path / name).mkdir()
    (tmp_path / ".gone.previous-000000000000").write_bytes(b"")
    (tmp_path / ".gone.previous-00000000000a").symlink_to(".gone.previous-0")
    with raises(FileNotFoundError, where="no copy") as caught:
        load(checkpoint, {"one": torch.zeros(1)}, tmp_path / "gone")
    assert_equal(TOLD in str(caught.error), False, where="no copy")


def _manager(checkpoint: Any, folder: Path, value: float, **options: Any) -> Any:
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, value)
    return checkpoint.CheckpointManager(folder, model=model, interval=1, durable=False, **options), model


@requirement(
    "CKPT-886",
    "A manager's load MUST find the step that a killed save had put aside, the newest copy of it, and show it again; "
    "with load_only it MUST name it where it is asked for or nothing else is there, and change nothing.",
)
def test_steps_put_aside(checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path) -> None:
    def prepare(root: Path) -> None:
        programs.save_natively(impl.__name__, str(root / "run"), OLD)

    crashes = Crashes(server, tmp_path, prepare, programs.save_natively, impl.__name__, "{root}/run", NEW)
    folder = _killed_between(crashes, "run/step-1").parent
    (hidden,) = folder.glob(".step-1.previous-*")
    model = programs.model_of(NEW)
    reading = {"interval": 1, "load_only": True}
    with alone(), checkpoint.CheckpointManager(folder, model=model, **reading) as manager:
        for step in (-1, 1):
            told = (TOLD, os.fspath(hidden), f"where: {folder}")
            with raises(MissingCheckpointError, mentions=told, where=f"load_only, {step}"):
                manager.load(step)
    assert_equal((hidden.exists(), (folder / "step-1").exists()), (True, False), where="what load_only changes")
    saving = {"interval": 1, "durable": False}
    here = succeeds("a load", where="a step put aside")
    with alone(), checkpoint.CheckpointManager(folder, model=model, **saving) as manager, here:
        assert_equal(manager.load(), True, where="a load")
    expected = dict(programs.model_of(OLD).state_dict())
    assert_same_tensors(dict(model.state_dict()), expected, where="the step that was put aside")
    assert_equal((hidden.exists(), (folder / "step-1").is_dir()), (False, True), where="what is shown")


def _load_on_ranks(rank: Rank, folder: str) -> float:
    manager, model = _manager(rank.component("checkpoint"), Path(folder), 0.0)
    with manager:
        assert_equal(manager.load(), True, where=f"a load on rank {rank.rank}")
    return float(model.weight[0, 0])


@requirement(
    "CKPT-887",
    "A step that is put aside MUST come back on all ranks; older copies, and copies of what is there, MUST stay; where "
    "the system does not let it, a load MUST be a named error and start nothing afresh; with load_only an older step "
    "that is whole is loaded.",
)
def test_copies_of_steps(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for value, step in ((1.0, 1), (2.0, 3), (3.0, 3)):
        manager, _ = _manager(checkpoint, tmp_path / "run", value, keep_latest_k=0)
        with alone(), manager:
            manager.save(step)
        if step == 3:
            place = _aside(tmp_path / "run" / "step-3", f"{int(value):012x}")
            os.utime(place, (1000 * value, 1000 * value))
    (tmp_path / "run" / ".step-1.previous-00000000000a").mkdir()
    found = rank_pool.run(_load_on_ranks, 2, str(tmp_path / "run"))
    assert_equal(found, [3.0, 3.0], where="the newest copy of step 3")
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    kept = [".step-1.previous-00000000000a", ".step-3.previous-000000000002", "step-1", "step-3"]
    assert_equal(names, kept, where="what is there")
    hidden, (manager, _) = _aside(tmp_path / "run" / "step-3", "f" * 12), _manager(checkpoint, tmp_path / "run", 0.0)
    refused = mock.patch.object(os, "rename", side_effect=PermissionError(errno.EACCES, "Permission denied"))
    with (
        manager,
        refused,
        raises(StorageError, mentions=("renaming", hidden.name, "step-3"), where="no right to rename"),
    ):
        manager.load()
    reading, model = _manager(checkpoint, tmp_path / "run", 0.0, load_only=True)
    with alone(), reading:
        assert_equal(
            (reading.load(), float(model.weight.detach()[0, 0])), (True, 1.0), where="load_only, a step beside it"
        )


def _leave(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name / "sub").mkdir(parents=True)
        (folder / name / "sub" / "x").write_bytes(b"x")


@requirement(
    "CKPT-888",
    "A manager with retention MUST delete behind its next save what killed saves of steps had left, and nothing else: "
    "no only copy, link or name of others, and nothing that was made or has changed since the manager was made; what "
    "the system does not let go MUST be told, and stay.",
)
def test_left_by_killed_saves(checkpoint: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, digits = tmp_path / "run", "0123456789ab"
    manager, _ = _manager(checkpoint, folder, 1.0)
    with alone(), manager:
        manager.save(1)
    gone = (f".step-2.saving-{digits}", f".step-1.saving-{digits}", f".step-1.previous-{digits}")
    kept = (f".step-7.previous-{digits}", f".other.saving-{digits}", f".step-02.saving-{digits}", ".step-2.saving-0")
    at_work, later = f".step-4.saving-{digits}", f".step-5.saving-{digits}"
    _leave(folder, *gone, *kept, at_work, "elsewhere")
    (folder / f".step-8.saving-{digits}").symlink_to("elsewhere")
    (folder / f".step-9.saving-{digits}").write_bytes(b"")
    before = sorted(path.name for path in folder.iterdir())
    manager, _ = _manager(checkpoint, folder, 1.0, keep_latest_k=0)
    with alone(), manager:
        manager.save(2)
    names = sorted(path.name for path in folder.iterdir())
    assert_equal(names, sorted([*before, "step-2"]), where="a manager that keeps all")
    manager, _ = _manager(checkpoint, folder, 1.0)
    with alone(), manager:
        os.utime(folder / at_work / "sub" / "x", (1000, 1 << 33))
        _leave(folder, later)
        manager.save(3)
    names = sorted(path.name for path in folder.iterdir())
    expected = sorted([*({*before} - {*gone}), later, "step-2", "step-3"])
    assert_equal(names, expected, where="a manager that deletes old ones")
    # What a step had replaced goes with it: it would be found as the only copy of the step.
    _leave(folder, f".step-3.previous-{digits}")
    manager, _ = _manager(checkpoint, folder, 1.0, keep_latest_k=1)
    with alone(), manager:
        manager.save(4)
    names = sorted(path.name for path in folder.iterdir())
    expected = sorted([*({*expected} - {at_work, later, "step-1", "step-2", "step-3"}), "step-4"])
    assert_equal(names, expected, where="the one after it")
    _leave(folder, f".step-4.saving-{digits}")
    rename = os.rename

    def refused(source: Any, target: Any) -> None:
        if str(source).endswith(f"saving-{digits}"):
            raise PermissionError(errno.EACCES, "Permission denied")
        rename(source, target)

    manager, _ = _manager(checkpoint, folder, 1.0, keep_latest_k=1)
    with alone(), mock.patch.object(os, "rename", refused), manager:
        manager.save(5)
    names = sorted(path.name for path in folder.iterdir())
    expected = sorted([*({*expected} - {"step-4"}), f".step-4.saving-{digits}", "step-5"])
    assert_equal(names, expected, where="what the system does not let go")
    told = [record.getMessage() for record in caplog.records if "could not be deleted" in record.getMessage()]
    assert_equal([f".step-4.saving-{digits}" in each for each in told], [True], where="what is told of it")
