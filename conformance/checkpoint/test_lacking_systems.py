"""File systems and users that lack something: modes, owners, attributes, a list of mounts, a right to write."""

from __future__ import annotations

import errno
import logging
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from conformance.checkpoint.cases import FILE, INDEX, assert_loads, save
from conformance.checkpoint.crash_folders import leftovers
from conformance.harness import assert_equal, raises, requirement, succeeds
from twinproof.errors import StorageError

_HIDDEN = ".team.saving-"
_ACL_OF_FILE = "system.posix_acl_access"
# Another user may read and write. Source: acl(5), and Linux' posix_acl_xattr.h: version 2, then a tag, what it may do
# and an id for each of owner, user 1000, group, mask and others.
_ENTRIES = ((1, 6, 2**32 - 1), (2, 6, 1000), (4, 4, 2**32 - 1), (16, 6, 2**32 - 1), (32, 4, 2**32 - 1))
_ACL = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in _ENTRIES)


def _state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2,), value)}


@pytest.fixture
def folder(checkpoint: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Path:
    """A folder with a checkpoint."""
    caplog.set_level(logging.WARNING, logger="twinproof.checkpoint")
    path = tmp_path / "team"
    save(checkpoint, _state(1.0), path)
    return path


def _refusing(code: int, real: Callable[..., Any], is_refused: Callable[..., bool]) -> Callable[..., Any]:
    """A function of the system that refuses some calls."""

    def call(*arguments: Any, **options: Any) -> Any:
        if is_refused(*arguments):
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    return call


def _note(path: Path, name: str, value: bytes) -> None:
    try:
        os.setxattr(path, name, value)
    except (AttributeError, OSError) as error:
        pytest.skip(f"no extended attributes here: {error}")


@requirement(
    "CKPT-917",
    "On a file system without modes a save over a checkpoint MUST succeed, and the log name the mode that was not "
    "given; any other refusal of one MUST be a StorageError, and the checkpoint stay as it was.",
)
def test_modes(
    checkpoint: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for code in (errno.EPERM, errno.EOPNOTSUPP, errno.EIO):
        folder.chmod(0o750)
        save(checkpoint, _state(1.0), folder)
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(os, "chmod", _refusing(code, os.chmod, lambda *_: True))
            if code == errno.EIO:
                with raises(StorageError, mentions=("EIO", f"where: {folder}"), where="a mode that is refused"):
                    save(checkpoint, _state(2.0), folder)
            else:
                with succeeds("a save", where=errno.errorcode[code]):
                    save(checkpoint, _state(2.0), folder)
        told = f"{folder} is replaced by a folder that cannot be given its mode 0750" in caplog.text
        assert_equal(told, code != errno.EIO, where=f"{errno.errorcode[code]}: the log, {caplog.text}")
        assert_loads(checkpoint, folder, _state(1.0 if code == errno.EIO else 2.0))
        assert_equal(leftovers(folder.parent, "team"), [], where=f"{errno.errorcode[code]}: what is left")


@requirement(
    "CKPT-918",
    "A folder with a checkpoint whose owner cannot be given to another MUST be replaced, and the log name the owner; "
    "an empty one MUST be filled as it is, or be replaced where the process may not write in it.",
)
def test_owners(
    checkpoint: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if os.geteuid() != 0:
        pytest.skip("an ordinary user may give a folder no other owner")
    empty, closed = folder.with_name("empty"), folder.with_name("closed")
    for path in (folder, empty, closed):
        path.mkdir(exist_ok=True)
        os.chown(path, 1000, -1)
    before = {path: path.stat().st_ino for path in (folder, empty, closed)}
    access = os.access
    monkeypatch.setattr(os, "chown", _refusing(errno.EPERM, os.chown, lambda path, uid, gid: uid != -1))
    # The rights of root are not those of whom the folder is closed to.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != closed and access(path, mode))
    for path in before:
        caplog.clear()
        with succeeds("a save", where=path.name):
            save(checkpoint, _state(2.0), path)
        assert_loads(checkpoint, path, _state(2.0))
        is_filled = path.stat().st_ino == before[path]
        assert_equal(is_filled, path == empty, where=f"{path.name} is filled as it is")
        told = f"{path} is replaced by a folder that cannot be given its owner 1000" in caplog.text
        assert_equal(told, not is_filled, where=f"{path.name}: the log, {caplog.text}")
    assert_equal(leftovers(folder.parent, *(path.name for path in before)), [], where="what is left")


@requirement(
    "CKPT-919",
    "The log MUST name a user's attribute that a folder cannot be given of the one that it replaces, and no label of "
    "the system's own; such a label MUST stay on what the system gave it.",
)
def test_attributes_of_folders(
    checkpoint: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _note(folder, "user.note", b"kept")
    listed, found, remove, removed = os.listxattr, os.getxattr, os.removexattr, list[str]()

    # As SELinux labels: other ones on what is new, and one that the old folder never had.
    def labels(path: Any) -> dict[str, bytes]:
        new = {"security.selinux": b"new", "security.ima": b"new"}
        return new if _HIDDEN in os.fspath(path) else {"security.selinux": b"old"}

    def noted(path: Any, name: str) -> None:
        removed.append(name)
        remove(path, name)

    monkeypatch.setattr(os, "listxattr", lambda path: [*listed(path), *labels(path)])
    monkeypatch.setattr(os, "getxattr", lambda path, name: labels(path).get(name) or found(path, name))
    monkeypatch.setattr(os, "removexattr", noted)
    for is_allowed in (True, False):
        caplog.clear()
        refused = ("security.",) if is_allowed else ("security.", "user.")

        def is_refused(path: Any, name: str, value: bytes, refused: tuple[str, ...] = refused) -> bool:
            return name.startswith(refused)

        with monkeypatch.context() as patch, succeeds("a save", where=f"attributes, {is_allowed=}"):
            patch.setattr(os, "setxattr", _refusing(errno.EPERM, os.setxattr, is_refused))
            save(checkpoint, _state(2.0), folder)
        told = [] if is_allowed else [f"{folder} is replaced by a folder that cannot be given its user.note"]
        assert_equal([record.getMessage() for record in caplog.records], told, where=f"the log, {is_allowed=}")
        assert_equal("user.note" in listed(folder), is_allowed, where=f"the user's attribute, {is_allowed=}")
    assert_equal(removed, [], where="labels that are taken away")


@requirement(
    "CKPT-934",
    "A file of a checkpoint that takes the place of another MUST keep its ACL, and not take over what users noted of "
    "the content of the old one.",
)
def test_attributes_of_files(checkpoint: Any, folder: Path) -> None:
    _note(folder / FILE, "user.note", b"of the old content")
    _note(folder / FILE, _ACL_OF_FILE, _ACL)
    with succeeds("a save", where="over a file with attributes"):
        save(checkpoint, _state(2.0), folder)
    names = [name for name in os.listxattr(folder / FILE) if name.startswith(("user.", "system."))]
    found = {name: os.getxattr(folder / FILE, name) for name in names}
    assert_equal(found, {_ACL_OF_FILE: _ACL}, where="attributes of the new file")


@requirement(
    "CKPT-935",
    "Where the system lists no mounts, a save MUST replace a checkpoint all the same. A checkpoint of which a file is "
    "a link to nothing, or a folder, MUST be replaced too.",
)
@pytest.mark.parametrize("what", ["mounts", "a link", "a folder"])
def test_what_is_not_there(checkpoint: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    if what == "mounts":
        monkeypatch.setattr("twinproof.checkpoint.trees._MOUNTS", os.fspath(folder / "nothing"))
    else:
        (folder / FILE).unlink()
        (folder / FILE).symlink_to("nothing") if what == "a link" else (folder / FILE).mkdir(mode=0o700)
    with succeeds("a save", where=what):
        save(checkpoint, _state(2.0), folder)
    assert_loads(checkpoint, folder, _state(2.0))
    mode = stat.S_IMODE((folder / FILE).lstat().st_mode)
    assert_equal(mode, stat.S_IMODE((folder / INDEX).stat().st_mode), where="the file's mode")
    assert_equal(leftovers(folder.parent, "team"), [], where="what is left")


class _Fails(DefaultSavePlanner):
    """Fails in the middle of a save."""

    def resolve_data(self, write_item: Any) -> Any:
        raise ValueError("the planner's own")


@requirement(
    "CKPT-949",
    "Where the system does not let go what a failed save has written, the error that ended the save MUST be told, the "
    "checkpoint stay, and the next save succeed and name what is left.",
)
def test_failed_saves(
    checkpoint: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", _refusing(errno.EIO, os.rmdir, lambda path: True))
        with raises(ValueError, mentions=("the planner's own",), where="a save that fails") as caught:
            save(checkpoint, _state(2.0), folder, planner=_Fails())
    assert_equal("EIO" in str(caught.outer), False, where=f"what is told: {caught.outer}")
    assert_loads(checkpoint, folder, _state(1.0))
    (left,) = leftovers(folder.parent, "team")
    told = [record.getMessage() for record in caplog.records if record.name == "twinproof.checkpoint"]
    assert_equal((left.startswith(_HIDDEN), told), (True, []), where="what is left, and the log")
    with succeeds("a save", where="the next one"):
        save(checkpoint, _state(2.0), folder)
    assert_equal(left in caplog.text, True, where=f"the log names what is left: {caplog.text}")
    assert_loads(checkpoint, folder, _state(2.0))
