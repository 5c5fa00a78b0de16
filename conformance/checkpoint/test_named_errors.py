"""What the file system refuses of a save in torch's own format, and of folders that are looked at: errors by name."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from conformance.checkpoint import crash_programs as programs
from conformance.checkpoint.cases import assert_loads, save
from conformance.checkpoint.crash_driver import Crashes
from conformance.checkpoint.crash_folders import NEW, nothing
from conformance.checkpoint.trainer import Trainer, alone
from conformance.harness import Mismatch, assert_equal, raises, requirement, succeeds
from conformance.harness.raising import errors_inside
from conformance.provers.faults import WRITE_CALLS, Fault, FaultServer
from twinproof.checkpoint.publish import named_errors
from twinproof.errors import FormatError, StorageError

_CALLS = ("open", *WRITE_CALLS, "fsync", "rename", "mkdir", "close")


def _assert_named(error: BaseException | None, code: int, where: str) -> None:
    if error is None:
        raise Mismatch("no error was raised", got="no error", expected=errno.errorcode[code], where=where)
    named = [each for each in errors_inside(error) if isinstance(each, StorageError)]
    found = [(each.errno, each.where is not None) for each in named]
    if (code, True) not in found:
        raise Mismatch("the error has no name", got=repr(error), expected=f"StorageError, {code}", where=where)


@requirement(
    "CKPT-892",
    "What the file system refuses of a save in torch's format, at any call before it is shown, MUST be a StorageError "
    "with its number and where, also where torch's writer says something else then; nothing is left.",
)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_native_saves(impl: ModuleType, server: FaultServer, tmp_path: Path, code: int) -> None:
    crashes = Crashes(server, tmp_path, nothing, programs.save_natively, impl.__name__, "{root}/run", NEW)
    count = crashes.record().count(_CALLS)
    assert_equal(count > 5, True, where="calls of a save")
    # A disk that is full stays so.
    points = [Fault(_CALLS, number, "errno", errno=code, times=1) for number in range(1, count + 1)]
    points += [Fault(WRITE_CALLS, number, "errno", errno=code, times=0) for number in (1, 2)]
    for struck in crashes.struck(points):
        left = sorted(os.listdir(struck.root / "run")) if (struck.root / "run").exists() else []
        # It may be shown when the call fails, which then may be told or not.
        if left != ["step-1"] or struck.outcome.error is not None:
            _assert_named(struck.outcome.error, code, struck.where)
        assert_equal(left in ([], ["step-1"]), True, where=f"{struck.where}: {left}")


def _closed_to_all(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """As a folder of another user is: nobody may look at what is in it, root neither."""
    stat, listdir = os.stat, os.listdir

    def refused(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            if not isinstance(path, int) and Path(os.fsdecode(path)).is_relative_to(folder / "in"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fsdecode(path))
            return original(path, *arguments, **options)

        return call

    monkeypatch.setattr(os, "stat", refused(stat))
    monkeypatch.setattr(os, "listdir", refused(listdir))


def _load(manager: Any) -> None:
    with manager:
        manager.load()


@requirement(
    "CKPT-893",
    "A folder that may not be looked at MUST be a StorageError with its number and the folder: where a save begins, in "
    "either format, and where a manager looks for steps.",
)
def test_closed_folders(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, path = Trainer(1), tmp_path / "in" / "ck"
    acts: dict[str, Callable[[], Any]] = {
        "save_training": lambda: checkpoint.save_training(path, trainer.model, trainer.optimizer, 1),
        "an HF save": lambda: dcp.save(
            {"w": torch.ones(2)}, storage_writer=checkpoint.HuggingFaceStorageWriter(path), no_dist=True
        ),
        "a manager's load": lambda: _load(trainer.manager(checkpoint, path)),
    }
    for what, act in acts.items():
        with monkeypatch.context() as patched:
            _closed_to_all(patched, tmp_path)
            try:
                with alone():
                    act()
                error: BaseException | None = None
            except BaseException as raised:  # Torch's CheckpointException is no Exception.
                error = raised
        _assert_named(error, errno.EACCES, what)


@requirement(
    "CKPT-894",
    "A save to a path through '..' of a folder that is not there MUST be refused by name, as the system refuses it to "
    "whoever reads there, and nothing be made; one of a folder that is there MUST be found under that path.",
)
def test_paths_through_parents(checkpoint: Any, tmp_path: Path) -> None:
    trainer = Trainer(1)

    def save(path: Path, kind: str) -> None:
        if kind == "native":
            checkpoint.save_training(path, trainer.model, trainer.optimizer, 1, durable=False)
        else:
            writer = checkpoint.HuggingFaceStorageWriter(path, durable=False)
            dcp.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)

    for kind in ("native", "hf"):
        with alone(), raises(StorageError, mentions=("ENOENT", f"where: {tmp_path}"), where=f"{kind}: nothing there"):
            save(Path(f"{tmp_path}/none/../{kind}"), kind)
        assert_equal(sorted(os.listdir(tmp_path)), ["there"] if kind == "hf" else [], where=f"{kind}: what was made")
        (tmp_path / "there" / "in").mkdir(parents=True, exist_ok=True)
        path = Path(f"{tmp_path}/there/in/../{kind}")
        with alone(), succeeds("a save and a load", where=f"{kind}: a folder that is there"):
            save(path, kind)
            if kind == "native":
                checkpoint.load_training(path, trainer.model, trainer.optimizer)
            else:
                found = {"w": torch.zeros(2)}
                dcp.load(found, storage_reader=checkpoint.HuggingFaceStorageReader(path), no_dist=True)


@requirement(
    "CKPT-895",
    "A file that is too short for the length of its header MUST be refused by what it has and what it needs.",
)
def test_short_files(checkpoint: Any, tmp_path: Path) -> None:
    path = tmp_path / "short.safetensors"
    for size in range(8):
        path.write_bytes(bytes(size))
        mentions = ("too short", f"got: {size} bytes", "expected: at least 8", f"where: {path}")
        with raises(FormatError, mentions=mentions, where=f"{size} bytes"):
            checkpoint.load_file(path)


@requirement(
    "CKPT-869",
    "Of what torch's code raises behind an error of the file system, as its cause or while it was handled, that error "
    "MUST be told by name; what has none behind it, or only one that the caller was handling, MUST stay as it is.",
)
def test_what_stands_behind(checkpoint: Any) -> None:
    del checkpoint

    def handled() -> None:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            raise RuntimeError("a position is wrong")

    def caused() -> None:
        raise RuntimeError("a position is wrong") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for what, act in {"handled": handled, "caused": caused}.items():
        with raises(StorageError, mentions=("ENOSPC", "where: here"), where=what), named_errors("writing", "here"):
            act()
    given = RuntimeError("of something else")
    here = named_errors("writing", "here")
    with raises(RuntimeError, mentions=("of something else",), where="nothing behind it") as caught, here:
        raise given
    assert_equal(caught.outer is given, True, where="the error itself")
    another = RuntimeError("of something else")

    def fails() -> None:
        with named_errors("writing", "here"):
            raise another

    try:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    except OSError:
        with raises(RuntimeError, mentions=("of something else",), where="in a handler of another error") as caught:
            fails()
    assert_equal(caught.outer is another, True, where="the error itself, in a handler of another")
    _assert_of_elsewhere()


def _assert_of_elsewhere() -> None:
    """An error whose cause was made elsewhere, where nothing was handled: what the caller handles is not behind it."""
    causes = {"an error of the system": OSError(errno.ENOSPC, "no space"), "another": ValueError("a value")}
    for what, cause in causes.items():
        expected = StorageError if isinstance(cause, OSError) else RuntimeError
        try:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        except OSError:
            with raises(expected, where=f"in a handler, behind it {what}") as caught, named_errors("writing", "here"):
                raise RuntimeError("of something else") from cause
        assert_equal("ENOSPC" in str(caught.error), expected is StorageError, where=f"what is told, behind it {what}")


@requirement(
    "CKPT-966",
    "A folder or file with a name too long for the hidden ones beside it MUST be a StorageError that says how long a "
    "name may be, also where it is there; nothing is left, and what is there stays. Tensors may have any name.",
)
@pytest.mark.parametrize("length", [240, 300])
def test_names_that_are_too_long(checkpoint: Any, tmp_path: Path, length: int) -> None:
    name, state = "n" * length, {"w" * 500: torch.ones(2)}
    save(checkpoint, state, tmp_path / "ck", enable_consolidation=False)
    assert_loads(checkpoint, tmp_path / "ck", state)
    if length < 256:
        (tmp_path / name).mkdir()
        (tmp_path / name / "old").write_bytes(b"")
    file = f"{'f' * length}.safetensors"
    ways: dict[str, Callable[[], Any]] = {
        "a save": lambda: save(checkpoint, state, tmp_path / name),
        "a file": lambda: checkpoint.save_file(state, tmp_path / file),
        "a merge": lambda: checkpoint.consolidate_safetensors_files(tmp_path / "ck", tmp_path / name),
    }
    before = sorted(tmp_path.rglob("*"))
    for what, way in ways.items():
        where = file if what == "a file" else name
        said = ("ENAMETOOLONG", "232 of 255", f"where: {tmp_path / where}")
        with raises(StorageError, mentions=said, where=f"{what}, {length} bytes"):
            way()
        assert_equal(sorted(tmp_path.rglob("*")), before, where=f"what is there behind {what}")
    with succeeds("a save", where="under the longest name that always works"):
        for _ in range(2):
            save(checkpoint, state, tmp_path / ("n" * 232))
