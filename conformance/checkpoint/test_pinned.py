"""Saves into folders that cannot be renamed, such as mount points: files appear in them one by one, the index last."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from conformance.checkpoint.cases import FILE, INDEX, assert_folder, assert_loads, random_bits, save
from conformance.checkpoint.trainer import Trainer, alone
from conformance.harness import assert_equal, raises, requirement, succeeds
from twinproof.errors import CheckpointExistsError

FILES = {f"model-{number:05d}-of-00003.safetensors": [f"{number}"] for number in (1, 2, 3)}
MAPPING = {f"{number}": number for number in (1, 2, 3)}


def _state() -> dict[str, torch.Tensor]:
    return {name: random_bits(torch.float32, (7, 3), number) for name, number in MAPPING.items()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of others that says of itself that something is mounted there."""
    path = tmp_path / "mounted"
    path.mkdir()
    (path / "config.json").write_text("{}")
    monkeypatch.setattr(os.path, "ismount", lambda given: os.path.realpath(given) == str(path))
    return path


@requirement(
    "CKPT-603",
    "A save into a folder that cannot be renamed MUST give the same files beside those of others and nothing else, and "
    "MUST sync the folder before its index, or torch's metadata, appears there, and after it.",
)
@pytest.mark.parametrize("kind", ["hf", "native"])
def test_order(checkpoint: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    rename, fsync, inode = os.rename, os.fsync, folder.stat().st_ino
    events: list[str] = []

    def renamed(source: Any, target: Any, **options: Any) -> None:
        rename(source, target, **options)
        if Path(target).parent == folder:
            events.append(Path(target).name)

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        if os.fstat(descriptor).st_ino == inode:
            events.append("sync")

    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "fsync", synced)
    if kind == "hf":
        save(checkpoint, _state(), folder, fqn_to_index_mapping=MAPPING)
        assert_folder(folder, FILES, _state())
        files, last = list(FILES), INDEX
    else:
        trainer = Trainer(1)
        with alone():
            checkpoint.save_training(folder, trainer.model, trainer.optimizer, 3)
            assert_equal(checkpoint.load_training(folder, trainer.model, trainer.optimizer), 3, where="the step")
        files, last = ["__0_0.distcp"], ".metadata"
    assert_equal(sorted(os.listdir(folder)), sorted(["config.json", last, *files]), where="the folder")
    assert_equal(sorted(name for name in events if name != "sync"), sorted([last, *files]), where="what was renamed")
    assert_equal(events[-3:], ["sync", last, "sync"], where="the end of what happened")


@requirement(
    "CKPT-604",
    "A save that fails, or is interrupted, while its files appear in a folder that cannot be renamed MUST raise the "
    "cause and leave the folder as it was, so that the next save succeeds; a checkpoint that is there MUST NOT be "
    "touched.",
)
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_failures(checkpoint: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, behind: bool) -> None:
    rename = os.rename
    for failing in range(len(FILES) + 1):
        count = 0

        def renamed(source: Any, target: Any, failing: int = failing, **options: Any) -> None:
            nonlocal count
            if Path(target).parent == folder and Path(source).parent != folder:
                count += 1
                if count == failing + 1:
                    if behind:
                        rename(source, target, **options)
                    raise kind(errno.EIO, os.strerror(errno.EIO), os.fspath(source))
            rename(source, target, **options)

        monkeypatch.setattr(os, "rename", renamed)
        with raises(BaseException, mentions=("Input/output error",), where=f"file {failing} of four"):
            save(checkpoint, _state(), folder, fqn_to_index_mapping=MAPPING)
        assert_equal(os.listdir(folder), ["config.json"], where=f"file {failing} of four: the folder")
    monkeypatch.setattr(os, "rename", rename)
    with succeeds("the next save", where="after failures"):
        save(checkpoint, {"w": torch.ones(2)}, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with raises(CheckpointExistsError, mentions=("cannot be renamed", FILE)):
        save(checkpoint, _state(), folder, fqn_to_index_mapping=MAPPING)
    assert_equal({path.name: path.read_bytes() for path in folder.iterdir()}, before, where="what was there")


@requirement(
    "CKPT-688",
    "A save into the folder in which the process works, or one above it, MUST keep that folder itself: what is made "
    "in it later lies beside the checkpoint. A checkpoint that is there MUST NOT be replaced, and be named.",
)
@pytest.mark.parametrize("below", ["", "deep/er"])
def test_working_folder(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str) -> None:
    target = tmp_path / "run"
    (target / below).mkdir(parents=True)
    monkeypatch.chdir(target / below)
    inode = target.stat().st_ino
    with succeeds("a save", where=f"of the process in run/{below}"):
        save(checkpoint, {"w": torch.ones(2)}, Path("../" * len(Path(below).parts) or "."))
    assert_equal(target.stat().st_ino, inode, where="the folder is the same")
    with succeeds("a file", where="in the working folder"):
        Path("log.txt").write_text("a line")
    assert_equal((target / below / "log.txt").exists(), True, where="where the file lies")
    assert_folder(target, {"model-00001-of-00001.safetensors": ["w"]}, {"w": torch.ones(2)})
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    with raises(CheckpointExistsError, mentions=("cannot be renamed", FILE)):
        save(checkpoint, {"w": torch.zeros(2)}, target)
    assert_equal({path: path.read_bytes() for path in target.rglob("*") if path.is_file()}, before, where="the files")


@requirement(
    "CKPT-690",
    "A checkpoint beside the folder in which the process works MUST be replaced as any other, also where its name "
    "begins with that folder's, and where the working folder was removed.",
)
def test_beside_the_working_folder(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, working = tmp_path / "run-2", tmp_path / "run"
    beside.mkdir()
    working.mkdir()
    monkeypatch.chdir(working)
    for _ in range(2):
        with succeeds("a save", where="beside the working folder"):
            save(checkpoint, {"w": torch.ones(2)}, beside)
    working.rmdir()
    with succeeds("a save", where="of a process whose working folder was removed"):
        save(checkpoint, {"w": torch.zeros(2)}, beside)


@requirement(
    "CKPT-702",
    "A save without an index, as one file, as shards or in torch's format, MUST be refused in a folder with "
    "safetensors files of others, which it keeps and which would count as its own. They are named, nothing is made.",
)
@pytest.mark.parametrize("kind", ["single", "shards", "native"])
def test_files_of_others(checkpoint: Any, tmp_path: Path, kind: str) -> None:
    target, trainer = tmp_path / "ck", Trainer(1)
    target.mkdir()
    save_file({"w": torch.zeros(2), "other": torch.zeros(3)}, target / "adapter.safetensors")
    before = {path.name: path.read_bytes() for path in target.iterdir()}

    def saved(folder: Path) -> None:
        if kind == "native":
            with alone():
                checkpoint.save_training(folder, trainer.model, trainer.optimizer, 1)
        else:
            options = {"single_file": True} if kind == "single" else {"enable_consolidation": False}
            save(checkpoint, {"w": torch.ones(2)}, folder, **options)

    with raises(BaseException, mentions=["adapter.safetensors", "CheckpointExistsError"]):
        saved(target)
    assert_equal({path.name: path.read_bytes() for path in target.iterdir()}, before, where="the folder")
    assert_equal([path.name for path in tmp_path.iterdir()], ["ck"], where="beside the folder")
    for _ in range(2):
        with succeeds("a save", where="into a folder of its own"):
            saved(tmp_path / "own")
        with succeeds("a save", where="with an index"):
            save(checkpoint, {"w": torch.ones(2)}, target)
    assert_equal((target / "adapter.safetensors").read_bytes(), before["adapter.safetensors"], where="the other")
    assert_loads(checkpoint, target, {"w": torch.ones(2)})
