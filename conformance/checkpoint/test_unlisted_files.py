"""Safetensors files that an index does not name: an old checkpoint is not read in silence where a newer one lies."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from conformance.checkpoint.cases import FILE, INDEX, assert_loads, load, save
from conformance.checkpoint.trainer import alone
from conformance.harness import assert_equal, assert_same_tensors, raises, requirement, succeeds
from twinproof.errors import CorruptionError

OLD = {"a": torch.ones(4, 4), "b": torch.ones(3)}
NEW = {name: 2 * value for name, value in OLD.items()}
SHARD = "shard-00001-model-00001-of-00001.safetensors"


def _by_torch(path: Path, state: dict[str, torch.Tensor], *, distributed: bool) -> None:
    with alone():
        writer = dcp.HuggingFaceStorageWriter(os.fspath(path), save_distributed=distributed)
        dcp.save(dict(state), storage_writer=writer, no_dist=True)


def _files(folder: Path) -> dict[str, bytes]:
    """Files of a folder by name, and their bytes; torch's writer leaves a folder of shards beside them."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def _zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(value) for name, value in OLD.items()}


@requirement(
    "CKPT-908",
    "Shards beside an index that has their tensors in other files, as torch's writer leaves them, MUST be refused by "
    "name by readers and consolidations, in place too, and nothing be changed; with either of both gone the other MUST "
    "be read. Shards of other tensors MUST be left alone.",
)
@pytest.mark.parametrize("whose", ["ours", "torch's"])
def test_shards_beside_an_index(checkpoint: Any, tmp_path: Path, whose: str) -> None:
    folder, out = tmp_path / "run", tmp_path / "out"
    if whose == "ours":
        save(checkpoint, OLD, folder)
    else:
        _by_torch(folder, OLD, distributed=False)
    final = sorted(_files(folder))
    _by_torch(folder, NEW, distributed=True)
    before = _files(folder)
    assert_equal(sorted(before), sorted([*final, SHARD]), where="what torch leaves")
    targets = _zeros()
    ways: dict[str, Callable[[], object]] = {
        "a reader": lambda: load(checkpoint, targets, folder),
        "consolidation in place": lambda: checkpoint.consolidate_safetensors_files(folder, folder),
        "consolidation": lambda: checkpoint.consolidate_safetensors_files(folder, out),
    }
    for what, way in ways.items():
        with raises(CorruptionError, mentions=("beside an index", SHARD, f"where: {folder}"), where=what):
            way()
    assert_same_tensors(targets, _zeros(), where="targets")
    assert_equal((_files(folder) == before, out.exists()), (True, False), where="what was changed")
    shutil.copytree(folder, tmp_path / "final")
    (tmp_path / "final" / SHARD).unlink()
    for name in final:
        (folder / name).unlink()
    with succeeds("a load", where="one of both"):
        assert_loads(checkpoint, tmp_path / "final", OLD)
        assert_loads(checkpoint, folder, NEW)
    _by_torch(tmp_path / "final", {"other": torch.ones(2)}, distributed=True)
    with succeeds("a load", where="shards of other tensors"):
        assert_loads(checkpoint, tmp_path / "final", OLD)


@requirement(
    "CKPT-909",
    "Final files that an index does not name and that hold its tensors too MUST be named in a warning by readers and "
    "consolidations, which go by the index; hidden files, others' tensors and files that are none MUST NOT be.",
)
def test_final_files_beside_an_index(checkpoint: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "run"
    save(checkpoint, OLD, folder)
    checkpoint.save_file({"other": torch.ones(1)}, folder / "adapter.safetensors")
    shutil.copy(folder / FILE, folder / "._model.safetensors")
    (folder / "broken.safetensors").write_bytes(b"\xff" * 9)
    (folder / "nothing.safetensors").symlink_to("nowhere")
    (folder / "folder.safetensors").mkdir()
    assert_loads(checkpoint, folder, OLD)
    assert_equal(caplog.messages, [], where="beside what holds none of the tensors")
    checkpoint.save_file({**NEW, "other": torch.ones(1)}, folder / "model.safetensors")
    for what in ("a reader", "consolidation"):
        caplog.clear()
        with succeeds("it", where=what):
            if what == "a reader":
                assert_loads(checkpoint, folder, OLD)
            else:
                checkpoint.consolidate_safetensors_files(folder, tmp_path / "out")
                assert_loads(checkpoint, tmp_path / "out", OLD)
        said = [text for text in caplog.messages if "not read" in text]
        named = [("['model.safetensors']" in text, os.fspath(folder) in text) for text in said]
        assert_equal(named, [(True, True)], where=f"{what}: what is logged")


@requirement(
    "CKPT-910",
    "verify MUST refuse shards beside an index that has their tensors in other files, and warn of final files that the "
    "index does not name and that hold its tensors, as text and as JSON.",
    needs=("staged_copies",),
)
def test_verify_names_them(impl: Any, checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module(f"{impl.__name__}.checkpoint.__main__").main
    folder = tmp_path / "run"
    save(checkpoint, OLD, folder)
    checkpoint.save_file(NEW, folder / "model.safetensors")
    told = "model.safetensors holds tensors that the index has in other files: not read"
    assert_equal(main(["verify", os.fspath(folder)]), 0, where="verify")
    assert_equal(f"warning: {told}\n" in capsys.readouterr().out, True, where="as text")
    assert_equal(main(["verify", os.fspath(folder), "--json"]), 0, where="verify as JSON")
    assert_equal(json.loads(capsys.readouterr().out)["warnings"], [told], where="as JSON")
    _by_torch(folder, NEW, distributed=True)
    for words in (["verify", os.fspath(folder)], ["inspect", os.fspath(folder)]):
        assert_equal(main([*words, "--json"]), 1, where=f"{words[0]} of both")
        assert_equal(json.loads(capsys.readouterr().out)["error"], "CorruptionError", where=f"{words[0]} of both")
    (folder / INDEX).unlink()
    (folder / FILE).unlink()
    (folder / "model.safetensors").unlink()
    assert_equal(main(["verify", os.fspath(folder), "--json"]), 0, where="verify of shards")
    assert_equal(json.loads(capsys.readouterr().out)["warnings"], [], where="shards alone")
