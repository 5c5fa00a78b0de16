"""Who may use what a save puts in the place of a folder or a file: those who could before, and nobody else."""

from __future__ import annotations

import errno
import logging
import os
import stat
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from conformance.checkpoint.cases import FILE, INDEX, assert_loads, save
from conformance.checkpoint.trainer import Trainer, alone
from conformance.checkpoint.users import another_group
from conformance.harness import assert_equal, requirement, succeeds

STATE = {"w": torch.ones(2)}
# What is made in a folder that has it may be used by another user, too. Source: acl(5), and Linux' posix_acl_xattr.h:
# version 2, then a tag, what it may do and an id for each of owner, user 1000, group, mask and others.
_ACL_OF_NEW = "system.posix_acl_default"
_ENTRIES = ((1, 7, 2**32 - 1), (2, 7, 1000), (4, 5, 2**32 - 1), (16, 7, 2**32 - 1), (32, 5, 2**32 - 1))
_ACL = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in _ENTRIES)


def _save(checkpoint: Any, kind: str, folder: Path) -> None:
    if kind == "native":
        trainer = Trainer(1)
        with alone():
            checkpoint.save_training(folder, trainer.model, trainer.optimizer, 1, durable=False)
    else:
        save(checkpoint, STATE, folder, durable=False)


def _mode(path: Path) -> str:
    return f"{stat.S_IMODE(path.stat().st_mode):04o}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder that somebody has prepared."""
    path = tmp_path / "team"
    path.mkdir()
    return path


def _found(path: Path) -> tuple[Any, ...]:
    status = path.stat()
    listed = os.listxattr(path) if hasattr(os, "listxattr") else []
    names = {name: os.getxattr(path, name) for name in listed if name.startswith(("user.", "system.posix_acl_"))}
    return status.st_gid, _mode(path), status.st_uid, names


def _assert_kept(checkpoint: Any, kind: str, folder: Path) -> None:
    """Save twice; what is known of the folder, and of the one in it, and the time of that one stay."""
    inner = folder / "logs"
    os.utime(inner, (1, 1))
    before = _found(folder), _found(inner), inner.stat().st_mtime
    for where in ("the first save", "the second"):
        with succeeds("a save", where):
            _save(checkpoint, kind, folder)
        assert_equal((_found(folder), _found(inner), inner.stat().st_mtime), before, where=where)
        groups = {path.name: path.stat().st_gid for path in folder.iterdir()}
        assert_equal(groups, dict.fromkeys(groups, before[0][0]), where=f"{where}: groups of what is in it")


@requirement(
    "CKPT-922",
    "A save to a folder that is there, empty or with a checkpoint, MUST leave it its mode, its extended attributes "
    "and, where the process may give files away, its owner; folders of others in it too, with their times.",
)
@pytest.mark.parametrize("kind", ["hf", "native"])
@pytest.mark.parametrize("what", ["owner", "attributes", "an ACL above"])
def test_folders(checkpoint: Any, folder: Path, kind: str, what: str) -> None:
    if what == "owner" and os.geteuid() != 0:
        pytest.skip("an ordinary user may give a folder no other owner")
    (folder / "logs").mkdir()
    for path in (folder, folder / "logs"):
        path.chmod(0o750)
        if what == "owner":
            os.chown(path, 1000, -1)
            continue
        at, name, value = (path, "user.note", b"kept") if what == "attributes" else (folder.parent, _ACL_OF_NEW, _ACL)
        try:
            os.setxattr(at, name, value)
        except (AttributeError, OSError) as error:
            pytest.skip(f"no extended attributes here: {error}")
    _assert_kept(checkpoint, kind, folder)
    files = {path.name: _found(path)[-1] for path in folder.iterdir() if path.is_file()}
    assert_equal(files, {name: {} for name in files}, where="attributes of files of the checkpoint")


@requirement(
    "CKPT-930",
    "A save to a folder that is there, empty or with a checkpoint, MUST leave it its group and the bit that gives that "
    "group to new files, and give it to its own; folders of others in it too.",
)
@pytest.mark.parametrize("kind", ["hf", "native"])
def test_groups(checkpoint: Any, folder: Path, kind: str) -> None:
    (folder / "logs").mkdir()
    for path in (folder, folder / "logs"):
        another_group(path)
        path.chmod(0o2770)
    _assert_kept(checkpoint, kind, folder)


@requirement(
    "CKPT-923",
    "Where a new folder cannot be given the group of one that is there, an empty one MUST be filled as it is; one with "
    "a checkpoint MUST be replaced with a warning, and no group get more access than it had.",
)
def test_groups_that_cannot_be_given(
    checkpoint: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="twinproof.checkpoint")
    group, inode = another_group(folder), folder.stat().st_ino
    folder.chmod(0o775)

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "chown", refused)
    save(checkpoint, STATE, folder)
    assert_equal((folder.stat().st_ino, folder.stat().st_gid), (inode, group), where="a folder that was prepared")
    assert_equal(caplog.text, "", where="the log of the first save")
    for mode, expected in ((0o775, "0755"), (0o770, "0700")):
        monkeypatch.undo()
        os.chown(folder, -1, group)
        folder.chmod(mode)
        (folder / FILE).chmod(0o664)
        os.chown(folder / FILE, -1, group)
        monkeypatch.setattr(os, "chown", refused)
        caplog.clear()
        save(checkpoint, STATE, folder)
        assert_equal(f"its group {group}" in caplog.text, True, where=f"the log names the group: {caplog.text}")
        modes = _mode(folder), _mode(folder / FILE)
        assert_equal(modes, (expected, "0644"), where=f"access of a group that had none, behind {mode:04o}")
        assert_loads(checkpoint, folder, STATE)


class _Looks(DefaultSavePlanner):
    """Looks, in the middle of a save, who may look at what is written."""

    def __init__(self, beside: Path) -> None:
        super().__init__()
        self.beside, self.seen = beside, set[str]()

    def resolve_data(self, write_item: Any) -> Any:
        hidden = [path for path in self.beside.parent.iterdir() if path.name.startswith(f".{self.beside.name}.saving-")]
        self.seen |= {_mode(path) for path in hidden}
        return super().resolve_data(write_item)


@requirement(
    "CKPT-924",
    "Whoever could not read a file or the folder of the checkpoint that a save replaces MUST NOT read what takes its "
    "place, nor while it is written; save_file MUST keep the group of its file.",
)
def test_files(checkpoint: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(checkpoint, STATE, folder)
    for path in folder.iterdir():
        path.chmod(0o600)
    (folder / INDEX).chmod(0o640)
    folder.chmod(0o750)
    planner = _Looks(folder)
    mapping = {"w": 1, "v": 2}
    save(checkpoint, {**STATE, "v": torch.ones(3)}, folder, planner=planner, fqn_to_index_mapping=mapping)
    assert_equal(planner.seen, {"0700"}, where="the mode of the hidden folder")
    names = {INDEX: "0640", "model-00001-of-00002.safetensors": "0600", "model-00002-of-00002.safetensors": "0600"}
    assert_equal({path.name: _mode(path) for path in folder.iterdir()}, names, where="modes of new names")
    assert_equal(_mode(folder), "0750", where="the mode of the folder")
    (folder / INDEX).chmod(0o664)
    save(checkpoint, {**STATE, "v": torch.ones(3)}, folder, fqn_to_index_mapping=mapping)
    assert_equal({path.name: _mode(path) for path in folder.iterdir()}, names | {INDEX: "0664"}, where="the same names")
    _assert_file(checkpoint, folder.parent / "f.safetensors", monkeypatch)


def _assert_file(checkpoint: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save_file(STATE, path)
    path.chmod(0o640)
    group = another_group(path) if os.geteuid() == 0 or len(os.getgroups()) > 1 else path.stat().st_gid
    seen, fsync = set[int](), os.fsync

    def synced(descriptor: int) -> None:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            seen.add(stat.S_IMODE(status.st_mode))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    checkpoint.save_file({"w": torch.zeros(2)}, path)
    assert_equal((_mode(path), path.stat().st_gid), ("0640", group), where="a file behind save_file")
    assert_equal({f"{mode & 0o077:03o}" for mode in seen}, {"000"}, where="access of others while it is written")
