"""File systems that cannot sync a folder, and syncs that fail behind the moment at which a checkpoint is shown."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.checkpoint.cases import load, save
from conformance.checkpoint.trainer import Trainer, alone
from conformance.harness import assert_equal, raises, requirement, succeeds
from twinproof.errors import StorageError

KINDS = ("hf", "native", "file")


def _save(checkpoint: Any, kind: str, folder: Path, value: float) -> None:
    state = {"w": torch.full((2,), value)}
    if kind == "native":
        trainer = Trainer(1)
        with alone():
            checkpoint.save_training(folder, trainer.model, trainer.optimizer, int(value))
    elif kind == "file":
        checkpoint.save_file(state, folder)
    else:
        save(checkpoint, state, folder)


def _value(checkpoint: Any, kind: str, folder: Path) -> float:
    if kind == "native":
        trainer = Trainer(1)
        with alone():
            return float(checkpoint.load_training(folder, trainer.model, trainer.optimizer))
    if kind == "file":
        return float(checkpoint.load_file(folder)["w"][0])
    targets = {"w": torch.zeros(2)}
    load(checkpoint, targets, folder)
    return float(targets["w"][0])


def _failing(monkeypatch: pytest.MonkeyPatch, fails: Callable[[str, bool], bool], code: int) -> None:
    """Have fsync fail where ``fails`` says so of a path, and of whether it is a folder."""
    own = os.fsync

    def fsync(descriptor: int) -> None:
        path, is_folder = os.readlink(f"/proc/self/fd/{descriptor}"), stat.S_ISDIR(os.fstat(descriptor).st_mode)
        if fails(path, is_folder):
            raise OSError(code, os.strerror(code))
        own(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


@requirement(
    "CKPT-932",
    "Where a file system cannot sync folders a durable save of any kind MUST succeed, over a checkpoint too, and say "
    "so in the log; any other error of a folder's sync, and any of a file's, MUST be raised.",
)
@pytest.mark.parametrize("kind", KINDS)
def test_folders_without_sync(
    checkpoint: Any, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for code in (errno.EINVAL, errno.ENOTSUP):
        path = tmp_path / f"{kind}-{code}"
        for value in (1.0, 2.0):
            caplog.clear()
            with monkeypatch.context() as patch:
                _failing(patch, lambda _, is_folder: is_folder, code)
                with succeeds("a durable save", where=f"{kind}, folders refuse with {code}"):
                    _save(checkpoint, kind, path, value)
            assert_equal(f"{tmp_path} cannot be synced" in caplog.text, True, where=f"log of {kind}, {code}")
        assert_equal(_value(checkpoint, kind, path), 2.0, where=f"what was saved, {kind}, {code}")
        assert_equal(sorted(os.listdir(tmp_path))[-1:], [path.name], where="what is left")
    for name, fails, code in (
        ("a file", lambda path, is_folder: not is_folder, errno.EINVAL),
        ("a folder", lambda path, is_folder: is_folder, errno.EIO),
    ):
        with monkeypatch.context() as patch:
            _failing(patch, fails, code)
            with raises(StorageError, where=f"{kind}, a sync of {name} fails"):
                _save(checkpoint, kind, tmp_path / f"new-{kind}", 3.0)


@requirement(
    "CKPT-933",
    "Where the folder above cannot be synced behind the moment at which a checkpoint or a file is shown, the error "
    "MUST say that it is shown, and what a folder has replaced MUST stay beside it: a power cut may bring it back.",
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exchanges", [True, False])
def test_syncs_that_fail_at_the_end(
    checkpoint: Any, tmp_path: Path, kind: str, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr("twinproof.checkpoint.publish._exchange", lambda *_: False)
    path = tmp_path / "ck"
    for value, is_first in ((2.0, True), (1.0, False)):
        if not is_first:
            with succeeds("a save", where=kind):
                _save(checkpoint, kind, path, value)
        with monkeypatch.context() as patch:
            _failing(patch, lambda path, _: path == str(tmp_path), errno.EIO)
            with raises(StorageError, mentions=("it is shown", "EIO", "ck"), where=f"{kind}, first {is_first}"):
                _save(checkpoint, kind, path, 2.0)
        assert_equal(_value(checkpoint, kind, path), 2.0, where=f"what is shown, {kind}, first {is_first}")
    kept = [name for name in os.listdir(tmp_path) if name != "ck"]
    assert_equal(len(kept), int(kind != "file"), where=f"what was replaced, {kind}")
    if kind == "native":
        os.rename(tmp_path / kept[0], tmp_path / "old")
        assert_equal(_value(checkpoint, kind, tmp_path / "old"), 1.0, where="what was replaced, whole")
