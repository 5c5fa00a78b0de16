"""Programs that go on while the folder that a save has replaced is cleared, and what the system refuses meanwhile."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.checkpoint.cases import assert_loads, save
from conformance.checkpoint.crash_folders import leftovers
from conformance.harness import assert_equal, requirement, succeeds
from twinproof.checkpoint import publish

_HIDDEN = ".ck.saving-"
BEFORE = {"gone.txt": "", "log.txt": "a", "logs/one": "1", "old/two": "2"}


def _nothing() -> None:
    """What a program does at most moments."""


class _Folder:
    """A checkpoint beside files of others, which is replaced while programs act before and behind the exchange."""

    def __init__(self, checkpoint: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checkpoint, self.path, self.patch = checkpoint, path, monkeypatch
        self.replaced: Path | None = None
        save(checkpoint, {"w": torch.zeros(2)}, path, durable=False)
        for name, text in BEFORE.items():
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text(text)

    def save(self, before: Callable[[], object] = _nothing, behind: Callable[[], object] = _nothing) -> None:
        """Replace the checkpoint."""
        exchange = publish._exchange

        def exchanged(new: Path, old: Path) -> bool:
            before()
            is_done, self.replaced = exchange(new, old), new
            behind()
            return is_done

        self.patch.setattr(publish, "_exchange", exchanged)
        with succeeds("the save", where="beside programs"):
            save(self.checkpoint, {"w": torch.ones(2)}, self.path, durable=False)
        assert_loads(self.checkpoint, self.path, {"w": torch.ones(2)})

    def is_replaced(self, path: Any) -> bool:
        """Whether a path is in the folder that was replaced, or that folder itself."""
        return self.replaced is not None and Path(path).is_relative_to(self.replaced)

    def files(self) -> dict[str, str]:
        """Files of others, and their content."""
        paths = [path for path in self.path.rglob("*") if path.is_file() and not path.name.startswith("model")]
        return {str(path.relative_to(self.path)): path.read_text() for path in paths}


@pytest.fixture
def folder(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> _Folder:
    """A folder with a checkpoint and with files of others."""
    caplog.set_level(logging.WARNING, logger="twinproof.checkpoint")
    return _Folder(checkpoint, tmp_path / "ck", monkeypatch)


@requirement(
    "CKPT-936",
    "A file that a program removes before a save exchanges the folders and again behind it, and one that comes and "
    "goes while the old folder is cleared, MUST be gone, and neither be told nor leave something beside the folder.",
)
def test_removed_twice(folder: _Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    listdir = os.listdir

    def fleeting(path: Any = ".") -> list[str]:
        if not folder.is_replaced(path):
            return listdir(path)
        passing = Path(path) / "passing.txt"
        passing.write_text("for a moment")
        names = listdir(path)
        passing.unlink()
        return names

    monkeypatch.setattr(os, "listdir", fleeting)
    gone = folder.path / "gone.txt"
    folder.save(gone.unlink, gone.unlink)
    assert_equal(folder.files(), {name: text for name, text in BEFORE.items() if name != "gone.txt"}, where="files")
    assert_equal(caplog.text, "", where="the log")
    assert_equal(leftovers(folder.path.parent, "ck"), [], where="what is left")


@requirement(
    "CKPT-937",
    "A folder that a program removes before a save exchanges the folders MUST stay where something is written into it "
    "behind the exchange, without a word; where the system refuses to remove it, the log MUST say so.",
)
@pytest.mark.parametrize("is_refused", [False, True])
def test_removed_folders(
    folder: _Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_refused: bool
) -> None:
    removed, rmdir = folder.path / "old", os.rmdir

    def busy(path: Any, **options: Any) -> None:
        if Path(path) == removed and folder.replaced is not None:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), os.fspath(path))
        rmdir(path, **options)

    if is_refused:
        monkeypatch.setattr(os, "rmdir", busy)
        folder.save(lambda: shutil.rmtree(removed))
    else:
        folder.save(lambda: shutil.rmtree(removed), lambda: (removed / "new").write_text("3"))
    kept = {name: text for name, text in BEFORE.items() if name != "old/two"}
    assert_equal(folder.files(), kept if is_refused else kept | {"old/new": "3"}, where="files of others")
    told = f"{os.strerror(errno.EBUSY)}: '{removed}'" in caplog.text
    assert_equal((told, bool(caplog.text)), (is_refused, is_refused), where=f"the log: {caplog.text}")
    assert_equal((removed.is_dir(), leftovers(folder.path.parent, "ck")), (True, []), where="what is there")


@requirement(
    "CKPT-938",
    "Where programs write into the folder that was replaced whenever it is cleared, or a folder in it can no longer be "
    "listed, the save MUST succeed, delete and bring over the rest, and name what it left and why.",
)
@pytest.mark.parametrize("what", ["written into", "not listed"])
def test_what_cannot_be_cleared(
    folder: _Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    rmdir, listdir, made = os.rmdir, os.listdir, list[str]()

    def late(path: Any, **options: Any) -> None:
        if Path(path) == folder.replaced:
            made.append(f"late-{len(made)}")
            (Path(path) / made[-1]).write_text("late")
        rmdir(path, **options)

    def refused(path: Any = ".") -> list[str]:
        if folder.is_replaced(path) and Path(path).name == "logs":
            raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(path))
        return listdir(path)

    monkeypatch.setattr(os, *(("rmdir", late) if what == "written into" else ("listdir", refused)))
    (folder.path / "log.txt").unlink()
    folder.save(lambda: (folder.path / "log.txt").write_text("ab"))
    monkeypatch.undo()
    assert folder.replaced is not None
    left, code = (made[-1:], errno.ENOTEMPTY) if made else (["logs"], errno.EIO)
    place = folder.replaced if made else folder.replaced / "logs"
    assert_equal(folder.files(), BEFORE | {"log.txt": "ab"} | dict.fromkeys(made[:-1], "late"), where="files of others")
    assert_equal(os.listdir(folder.replaced), left, where="what is left of the old folder")
    assert_equal(f"{os.strerror(code)}: '{place}'" in caplog.text, True, where=f"the log: {caplog.text}")
