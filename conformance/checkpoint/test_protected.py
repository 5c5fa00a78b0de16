"""Folders that their owner has made read-only: beside a checkpoint, around it, and what deletes them."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.checkpoint.cases import assert_loads, save
from conformance.checkpoint.crash_folders import leftovers
from conformance.checkpoint.trainer import Trainer, alone
from conformance.checkpoint.users import as_ordinary_user, common_folder
from conformance.harness import assert_equal, raises, requirement, succeeds
from twinproof.checkpoint.publish import find_leftovers, remove_leftover
from twinproof.errors import StorageError


@pytest.fixture
def common(checkpoint: Any, tmp_path: Path) -> Iterator[Path]:
    """A folder of an ordinary user, as whom this process runs meanwhile."""
    for kind in ("hf", "native"):
        _save(checkpoint, kind, tmp_path / kind, 0.0)  # What is imported late is imported now.
    with common_folder() as path, as_ordinary_user():
        yield path


def _save(checkpoint: Any, kind: str, folder: Path, value: float) -> None:
    if kind == "native":
        trainer = Trainer(1)
        with alone():
            checkpoint.save_training(folder, trainer.model, trainer.optimizer, int(value), durable=False)
    else:
        save(checkpoint, {"w": torch.full((2,), value)}, folder, durable=False)


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@requirement(
    "CKPT-925",
    "A read-only folder of others in a checkpoint's folder MUST be kept as it is over a save. One that may not be "
    "listed MUST be named by a StorageError before anything is written; the checkpoint stays, and nothing is left.",
)
@pytest.mark.parametrize("kind", ["hf", "native"])
def test_read_only_folders_inside(checkpoint: Any, common: Path, kind: str) -> None:
    folder = common / "ck"
    _save(checkpoint, kind, folder, 1.0)
    (folder / "run/logs").mkdir(parents=True)
    (folder / "run/logs/log.txt").write_text("a line")
    for path in (folder / "run/logs", folder / "run"):
        path.chmod(0o555)
    for number in (2.0, 3.0):
        with succeeds("a save", where="beside a read-only folder"):
            _save(checkpoint, kind, folder, number)
        assert_equal((_mode(folder / "run"), _mode(folder / "run/logs")), (0o555, 0o555), where="modes")
        assert_equal((folder / "run/logs/log.txt").read_text(), "a line", where="what is in it")
        assert_equal(leftovers(common, "ck"), [], where="what is left")
    (folder / "closed").mkdir(mode=0)
    before = sorted(os.listdir(folder))
    with raises(StorageError, mentions=("EACCES", f"where: {folder / 'closed'}"), where="a folder without bits"):
        _save(checkpoint, kind, folder, 4.0)
    assert_equal((sorted(os.listdir(folder)), leftovers(common, "ck")), (before, []), where="behind the refusal")
    if kind == "hf":
        assert_loads(checkpoint, folder, {"w": torch.full((2,), 3.0)})


@requirement(
    "CKPT-926",
    "What a save replaces, retention deletes or a killed save has left MUST be deleted whole by its owner, also where "
    "folders in it, or it itself, are read-only; the new checkpoint MUST be as protected as the old one was.",
)
@pytest.mark.parametrize("kind", ["hf", "native", "retention", "leftovers"])
def test_read_only_checkpoints(checkpoint: Any, common: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    caplog.set_level(logging.WARNING, logger="twinproof.checkpoint")
    folder = common / "run/step-1"
    for number in (1, 2, 3):
        if kind == "retention":
            _keep_one(checkpoint, common / "run", number)
        else:
            _save(checkpoint, "hf" if kind == "leftovers" else kind, folder, float(number))
            assert_equal(_mode(folder), 0o755 if number == 1 else 0o555, where="the mode of the folder")
        newest = common / f"run/step-{number if kind == 'retention' else 1}"
        assert_equal(sorted(os.listdir(common / "run")), [newest.name], where=f"behind save {number}")
        (newest / "logs").mkdir(exist_ok=True) if number == 1 else None
        (newest / "logs").chmod(0o555) if number == 1 else None
        newest.chmod(0o555)
    if kind == "leftovers":
        folder.rename(common / "run/.step-1.saving-000000000000")
        (leftover,) = find_leftovers(common / "run")
        with succeeds("clean", where="a leftover that is read-only"):
            remove_leftover(leftover)
        assert_equal(os.listdir(common / "run"), [], where="behind clean")
    assert_equal(caplog.text, "", where="the log")


@requirement(
    "CKPT-939",
    "What links in a read-only leftover lead to MUST stay as it is when that is deleted, its mode too. Where folders "
    "in it are somebody else's, the error MUST say what could not be deleted, and not what was tried first.",
)
def test_leftovers_with_links(common: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, inside = common / "elsewhere", common / ".ck.saving-000000000000/logs"
    for folder in (elsewhere, inside):
        folder.mkdir(parents=True)
        (folder / "log.txt").write_text("a line")
    (inside / "link").symlink_to(elsewhere)
    for folder in (elsewhere, inside):
        folder.chmod(0o555)

    def refused(path: Any, mode: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), os.fspath(path))

    (leftover,) = find_leftovers(common)
    told = raises(StorageError, mentions=("EACCES", f"where: {leftover.path}"), where="folders of somebody else")
    with monkeypatch.context() as patch, told:
        # As the system answers who does not own a folder.
        patch.setattr(os, "chmod", refused)
        remove_leftover(leftover)
    assert_equal(sorted(os.listdir(inside)), ["link", "log.txt"], where="behind a refusal")
    with succeeds("clean", where="a leftover with a link"):
        remove_leftover(leftover)
    assert_equal(os.listdir(common), ["elsewhere"], where="behind clean")
    assert_equal((_mode(elsewhere), os.listdir(elsewhere)), (0o555, ["log.txt"]), where="what the link led to")


def _keep_one(checkpoint: Any, folder: Path, step: int) -> None:
    model = torch.nn.Linear(2, 1)
    options = {"interval": 1, "durable": False, "keep_latest_k": 1}
    with alone(), checkpoint.CheckpointManager(folder, model=model, **options) as manager:
        manager.save(step)
