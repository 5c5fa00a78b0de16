"""Mounts at a checkpoint's folder and inside of it: what is mounted is never deleted at its source."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from conformance.checkpoint.cases import FILE, INDEX, assert_loads, save
from conformance.checkpoint.crash_folders import leftovers, tree
from conformance.checkpoint.trainer import Trainer, alone
from conformance.checkpoint.users import bind_mount
from conformance.harness import assert_equal, raises, requirement, succeeds
from twinproof.checkpoint.publish import find_leftovers, remove_leftover
from twinproof.errors import CheckpointExistsError, StorageError

STATE = {"w": torch.ones(2)}
Mount = Callable[[Path], AbstractContextManager[None]]


@pytest.fixture(params=["told", "mounted"])
def mount(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mount:
    """Mounts a folder with one file in another place; where the system only says so, the file lies there itself."""
    told = tmp_path / "mountinfo"

    @contextmanager
    def tell(target: Path) -> Iterator[None]:
        (target / "precious").write_text("x")
        point = os.fspath(target).replace(" ", "\\040")
        told.write_text(
            f"36 35 98:0 / / rw - ext4 /dev/root rw\n37 36 98:0 /mnt {point} rw shared:1 - ext4 /dev/root rw\n"
        )
        try:
            yield
        finally:
            told.write_text("")

    @contextmanager
    def bind(target: Path) -> Iterator[None]:
        source = tmp_path / "source"
        source.mkdir(exist_ok=True)
        (source / "precious").write_text("x")
        with bind_mount(source, target, below=tmp_path):
            yield
            assert_equal((source / "precious").read_text(), "x", where="what is mounted")

    if request.param == "mounted":
        (tmp_path / "probe").mkdir()
        with bind_mount(tmp_path / "probe", tmp_path / "probe", below=tmp_path):
            pass  # Who may not skips here.
        (tmp_path / "probe").rmdir()
        return bind
    told.write_text("")
    monkeypatch.setattr("twinproof.checkpoint.trees._MOUNTS", told)
    return tell


def _save(checkpoint: Any, kind: str, folder: Path, **options: Any) -> None:
    if kind == "native":
        trainer = Trainer(1)
        with alone():
            checkpoint.save_training(folder, trainer.model, trainer.optimizer, 1, durable=False)
    else:
        save(checkpoint, STATE, folder, durable=False, **options)


@requirement(
    "CKPT-927",
    "A folder that is a mount point of its own file system, or in which something is mounted, MUST take a first save "
    "and refuse the next one by name, before anything is written; what is mounted stays, with its content.",
)
@pytest.mark.parametrize("kind", ["hf", "native"])
@pytest.mark.parametrize("inside", ["", "data", "some data/deep"])
def test_saves(checkpoint: Any, tmp_path: Path, mount: Mount, kind: str, inside: str) -> None:
    folder = tmp_path / "run 1"
    (folder / inside).mkdir(parents=True)
    with mount(folder / inside):
        with succeeds("the first save", where=f"something is mounted at {folder.name}/{inside}"):
            _save(checkpoint, kind, folder)
        before = tree(folder)
        with raises(CheckpointExistsError, mentions=("cannot be renamed", str(folder / inside)), where="the next one"):
            _save(checkpoint, kind, folder)
        assert_equal(tree(folder), before, where="what is there")
        assert_equal((folder / inside / "precious").read_text(), "x", where="what is mounted")
        assert_equal(leftovers(tmp_path, folder.name, "source", "mountinfo"), [], where="beside the folder")


class _Acts(DefaultSavePlanner):
    """Does something in the middle of a save."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.act = act

    def resolve_data(self, write_item: Any) -> Any:
        self.act()
        return super().resolve_data(write_item)


@requirement(
    "CKPT-928",
    "What is mounted in a checkpoint's folder while a save writes MUST end the save with a StorageError of its place; "
    "it stays with its content, and so does the checkpoint.",
)
def test_mounted_meanwhile(checkpoint: Any, tmp_path: Path, mount: Mount) -> None:
    folder = tmp_path / "ck"
    save(checkpoint, STATE, folder)
    (folder / "data").mkdir()
    held: list[AbstractContextManager[None]] = []

    def act() -> None:
        if not held:
            held.append(mount(folder / "data"))
            held[0].__enter__()

    try:
        with raises(StorageError, mentions=("EBUSY", str(folder)), where="mounted meanwhile"):
            save(checkpoint, {"w": torch.zeros(2)}, folder, planner=_Acts(act))
        assert_loads(checkpoint, folder, STATE)
        assert_equal((folder / "data/precious").read_text(), "x", where="what is mounted")
        assert_equal(sorted(os.listdir(folder)), ["data", FILE, INDEX], where="the folder")
        assert_equal(leftovers(tmp_path, "ck", "source", "mountinfo"), [], where="what is left")
    finally:
        for each in held:
            each.__exit__(None, None, None)


@requirement(
    "CKPT-929",
    "Retention and clean MUST leave a folder in which something is mounted as it is, and name the mount; retention "
    "MUST go on with others, and delete it once nothing is mounted there; of a link to a mount, the link alone.",
)
def test_deletions(checkpoint: Any, tmp_path: Path, mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="twinproof.checkpoint")
    run, options = tmp_path / "run", {"interval": 1, "durable": False}
    model = torch.nn.Linear(2, 1)
    with alone(), checkpoint.CheckpointManager(run, model=model, **options) as manager:
        manager.save(1)
        manager.save(2)
    inside = run / "step-1/eval"
    inside.mkdir()
    with mount(inside):
        with alone(), checkpoint.CheckpointManager(run, model=model, keep_latest_k=1, **options) as manager:
            manager.save(3)
        assert_equal(sorted(os.listdir(run)), ["step-1", "step-3"], where="steps behind retention")
        assert_equal((inside / "precious").read_text(), "x", where="what is mounted")
        assert_equal("something is mounted" in caplog.text, True, where=f"the log: {caplog.text}")
    with alone(), checkpoint.CheckpointManager(run, model=model, keep_latest_k=1, **options) as manager:
        manager.save(4)
    assert_equal(os.listdir(run), ["step-4"], where="steps when nothing is mounted")
    _assert_link_deleted(checkpoint, tmp_path, mount)
    hidden = run / ".step-4.saving-000000000000"
    (run / "step-4").rename(hidden)
    (hidden / "eval").mkdir()
    with mount(hidden / "eval"):
        (leftover,) = find_leftovers(run)
        with raises(StorageError, mentions=("EBUSY", str(hidden)), where="clean"):
            remove_leftover(leftover)
        assert_equal((hidden / "eval/precious").read_text(), "x", where="what is mounted in a leftover")
        assert_equal((hidden / ".metadata").exists(), True, where="a leftover is there whole")
    remove_leftover(leftover)


def _assert_link_deleted(checkpoint: Any, tmp_path: Path, mount: Mount) -> None:
    """A step that somebody moved to what is mounted elsewhere, and linked to: the link is deleted, and nothing else."""
    run, elsewhere, model = tmp_path / "linked", tmp_path / "elsewhere", torch.nn.Linear(2, 1)
    options = {"interval": 1, "durable": False}
    with alone(), checkpoint.CheckpointManager(run, model=model, **options) as manager:
        manager.save(1)
    elsewhere.mkdir()
    with mount(elsewhere):
        for path in (run / "step-1").iterdir():
            shutil.copy(path, elsewhere)
        shutil.rmtree(run / "step-1")
        (run / "step-1").symlink_to(elsewhere)
        with alone(), checkpoint.CheckpointManager(run, model=model, keep_latest_k=1, **options) as manager:
            manager.save(2)
        assert_equal(os.listdir(run), ["step-2"], where="steps, of which one was a link to a mount")
        assert_equal((elsewhere / "precious").read_text(), "x", where="what is mounted elsewhere")
