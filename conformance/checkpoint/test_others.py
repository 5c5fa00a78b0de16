"""Files of others in a folder whose checkpoint is replaced, and the programs that write them meanwhile."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.checkpoint.cases import assert_loads, save
from conformance.checkpoint.crash_folders import leftovers
from conformance.checkpoint.trainer import Trainer, alone
from conformance.harness import assert_equal, requirement, succeeds
from conformance.provers.faults import Interruption, each_moment, interrupted
from twinproof.checkpoint import publish

BEFORE = {"state.json": "1", "log.txt": "a", "gone.txt": "", "logs/one": "1", "old/two": "2", "deep/er/three": "3"}
AFTER = {"state.json": "2", "log.txt": "ab", "late.json": "new", "logs/one": "3", "logs/late": "4", "deep/er/late": "5"}


def _is_of_others(path: Path, folder: Path) -> bool:
    names = {path.relative_to(folder).parts[0]}
    return bool(names & {"state.json", "log.txt", "gone.txt", "late.json", "twice.txt", "logs", "old", "deep", ".tmp"})


def _found(folder: Path) -> dict[str, str]:
    """Files of others below a folder, and their content."""
    paths = [path for path in folder.rglob("*") if path.is_file() and _is_of_others(path, folder)]
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def _act(folder: Path) -> None:
    """What a trainer and its loggers do: write, append, replace by a rename, remove."""
    (folder / "late.json").write_text("new")
    with open(folder / "log.txt", "a") as file:
        file.write("b")
    _replace(folder / "state.json", "2")
    _replace(folder / "logs/one", "3")
    (folder / "gone.txt").unlink()
    (folder / "logs/late").write_text("4")
    (folder / "deep/er/late").write_text("5")
    (folder / "deep/er/three").unlink()
    shutil.rmtree(folder / "old")


def _save(checkpoint: Any, kind: str, folder: Path, value: float) -> None:
    if kind == "native":
        trainer = Trainer(1)
        with alone():
            checkpoint.save_training(folder, trainer.model, trainer.optimizer, int(value), durable=False)
    else:
        save(checkpoint, {"w": torch.full((2,), value)}, folder, durable=False)


def _prepared(checkpoint: Any, kind: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _save(checkpoint, kind, folder, 1.0)
    for name, text in BEFORE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def _no_link(*_: Any, **__: Any) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@requirement(
    "CKPT-920",
    "What another program does to its files in a folder, at any moment of a save over the checkpoint there, MUST stand "
    "behind the save: files that are new, replaced, removed or longer, also in folders; the save MUST succeed.",
)
@pytest.mark.parametrize("kind", ["hf", "native", "without links"])
def test_any_moment(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    folder = tmp_path / "ck"
    if kind == "without links":
        monkeypatch.setattr(os, "link", _no_link)

    def once(nth: int) -> Interruption:
        _prepared(checkpoint, kind, folder)
        where = f"moment {nth}"
        with succeeds("the save", where), interrupted(tmp_path, nth, lambda: _act(folder)) as hook:
            _save(checkpoint, kind, folder, 2.0)
        assert_equal(_found(folder), AFTER if hook.seen_count >= nth else BEFORE, where=f"{where}: files of others")
        assert_equal(leftovers(tmp_path, "ck"), [], where=f"{where}: what is left")
        if kind != "native":
            assert_loads(checkpoint, folder, {"w": torch.full((2,), 2.0)})
        return hook

    each_moment(once)


@requirement(
    "CKPT-921",
    "A file that a program makes by a handle of the folder that a save replaces, at any moment until it is deleted, "
    "MUST be in the folder behind the save.",
)
def test_handles(checkpoint: Any, tmp_path: Path) -> None:
    folder = tmp_path / "ck"

    def once(nth: int) -> Interruption:
        _prepared(checkpoint, "hf", folder)
        made: list[str] = []
        handles = {name: os.open(folder / name, os.O_RDONLY) for name in ("", "logs")}

        def act() -> None:
            for name, handle in handles.items():
                try:
                    os.close(os.open("late.json", os.O_WRONLY | os.O_CREAT, dir_fd=handle))
                    made.append(os.path.join(name, "late.json"))
                except FileNotFoundError:
                    continue  # The folder is deleted, which the program hears.

        try:
            with succeeds("the save", f"moment {nth}"), interrupted(tmp_path, nth, act) as hook:
                _save(checkpoint, "hf", folder, 2.0)
        finally:
            for handle in handles.values():
                os.close(handle)
        assert_equal(_found(folder), BEFORE | dict.fromkeys(made, ""), where=f"moment {nth}: files of others")
        return hook

    each_moment(once)


@requirement(
    "CKPT-931",
    "What others did in a folder until it was exchanged MUST be in the new one before that is synced. Where a program "
    "has used a name again by then its later file MUST stay, and the log say so.",
)
def test_at_once(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for way in ("exchange", "two renames"):
        with monkeypatch.context() as patched:
            _assert_at_once(checkpoint, tmp_path, patched, caplog, way)
        caplog.clear()


def _assert_at_once(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    caplog.set_level(logging.WARNING, logger="twinproof.checkpoint")
    folder, fsync, exchange = tmp_path / "ck", os.fsync, publish._exchange
    _prepared(checkpoint, "hf", folder)
    (tmp_path / "ck/empty").mkdir()
    seen = list[dict[str, str]]()

    def exchanged(new: Path, old: Path) -> bool:
        _act(folder)
        (folder / "twice.txt").write_text("1")
        is_done = exchange(new, old) if way == "exchange" else False
        if is_done:
            # As a program does that opens its files by name for each line.
            _replace(folder / "state.json", "3")
            (folder / "twice.txt").write_text("2")
        return is_done

    def synced(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == tmp_path.stat().st_ino:
            seen.append(_found(folder))
        fsync(descriptor)

    monkeypatch.setattr(publish, "_exchange", exchanged)
    monkeypatch.setattr(os, "fsync", synced)
    with succeeds("the save", way):
        save(checkpoint, {"w": torch.zeros(2)}, folder)
    later = {"state.json": "3", "twice.txt": "2"} if way == "exchange" else {"twice.txt": "1"}
    assert_equal(seen, [AFTER | later], where="files of others when the names are synced")
    assert_equal(_found(folder), AFTER | later, where="files of others behind the save")
    assert_equal((folder / "empty").is_dir(), True, where="an empty folder")
    named = {name: f"{folder / name} was written twice" in caplog.text for name in ("state.json", "twice.txt")}
    assert_equal(named, dict.fromkeys(named, way == "exchange"), where=f"names in the log: {caplog.text}")
    assert_equal(leftovers(tmp_path, "ck"), [], where="what is left")
