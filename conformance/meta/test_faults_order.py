"""The reader of recorded orders: silent on a right sequence, and naming each way to lose data in a power cut."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.provers.faults import Fault, FaultServer, why_no_shim, why_no_tracer

pytestmark = pytest.mark.skipif(why_no_shim() is not None, reason=str(why_no_shim()))

_EXCHANGE = 2
_HERE = -100


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    modules = ("pytest", "torch.distributed.checkpoint", "safetensors.torch", __name__)
    with FaultServer(preload=modules) as running:
        yield running


def _put(path: str, content: bytes = b"data", *, sync: bool = True) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, content)
    if sync:
        os.fsync(descriptor)
    os.close(descriptor)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _staged(root: str, *, data: bool = True, staging: bool = True, parent: bool = True, exchange: bool = False) -> None:
    """A folder is filled, synced, and renamed onto (or exchanged with) its target; each flag is one sync."""
    hidden, target = f"{root}/.hidden", f"{root}/checkpoint"
    os.mkdir(hidden)
    _put(f"{hidden}/model.safetensors", sync=data)
    _put(f"{hidden}/model.safetensors.index.json")
    if staging:
        _sync(hidden)
    if exchange:
        libc = ctypes.CDLL(None)
        assert libc.renameat2(_HERE, hidden.encode(), _HERE, target.encode(), _EXCHANGE) == 0
    else:
        os.rename(hidden, target)
    if parent:
        _sync(root)


def _sound(root: str) -> None:
    _staged(root)


def _sound_exchange(root: str) -> None:
    os.mkdir(f"{root}/checkpoint")
    _staged(root, exchange=True)
    os.rmdir(f"{root}/.hidden")


def _sound_file_by_file(root: str) -> None:
    for name in ("model.safetensors", "model.safetensors.index.json"):
        _put(f"{root}/.{name}")
        if name.endswith("json"):
            _sync(root)
        os.rename(f"{root}/.{name}", f"{root}/{name}")
    _sync(root)


def _sound_deleted(root: str) -> None:
    _put(f"{root}/probe", sync=False)
    os.unlink(f"{root}/probe")
    _staged(root)


def _no_data_sync(root: str) -> None:
    _staged(root, data=False)


def _sync_before_last_write(root: str) -> None:
    _put(f"{root}/model.safetensors")
    _put(f"{root}/model.safetensors", b"more", sync=False)
    _sync(root)


def _rename_before_sync(root: str) -> None:
    _put(f"{root}/.model.safetensors", sync=False)
    os.rename(f"{root}/.model.safetensors", f"{root}/model.safetensors")
    _sync(f"{root}/model.safetensors")
    _sync(root)


def _no_staging_sync(root: str) -> None:
    _staged(root, staging=False)


def _no_parent_sync(root: str) -> None:
    _staged(root, parent=False)


def _no_parent_sync_after_exchange(root: str) -> None:
    os.mkdir(f"{root}/checkpoint")
    _staged(root, parent=False, exchange=True)


def _index_in_place_before_data(root: str) -> None:
    _put(f"{root}/model.safetensors.index.json")
    _put(f"{root}/model.safetensors")
    _sync(root)


def _index_before_data_sync(root: str) -> None:
    _put(f"{root}/model.safetensors", sync=False)
    _put(f"{root}/model.safetensors.index.json")
    _sync(f"{root}/model.safetensors")
    _sync(root)


def _index_before_folder_sync(root: str) -> None:
    _put(f"{root}/model.safetensors")
    _put(f"{root}/model.safetensors.index.json")
    _sync(root)


def _index_renamed_first(root: str) -> None:
    for name in ("model.safetensors.index.json", "model.safetensors"):
        _put(f"{root}/.{name}")
        os.rename(f"{root}/.{name}", f"{root}/{name}")
    _sync(root)


def _failed_sync(root: str) -> None:
    descriptor = os.open(f"{root}/model.safetensors", os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, b"data")
    try:
        os.fsync(descriptor)
    except OSError:
        os.close(descriptor)
    _sync(root)


@pytest.mark.parametrize("program", [_sound, _sound_exchange, _sound_file_by_file, _sound_deleted])
def test_a_sound_order_is_not_complained_about(
    server: FaultServer, tmp_path: Path, program: Callable[[str], None]
) -> None:
    outcome = server.run_forked(program, str(tmp_path), root=tmp_path)
    outcome.value()
    assert outcome.trace.order_violations() == ()


@pytest.mark.parametrize(
    ("program", "kind", "path"),
    [
        (_no_data_sync, "data_not_synced", "/checkpoint/model.safetensors"),
        (_sync_before_last_write, "data_not_synced", "/model.safetensors"),
        (_rename_before_sync, "data_not_synced", "/model.safetensors"),
        (_no_staging_sync, "folder_not_synced", "/checkpoint"),
        (_no_parent_sync, "folder_not_synced", ""),
        (_no_parent_sync_after_exchange, "folder_not_synced", ""),
        (_index_in_place_before_data, "index_before_data", "/model.safetensors"),
        (_index_before_data_sync, "index_before_data", "/model.safetensors"),
        (_index_before_folder_sync, "index_before_data", "/model.safetensors"),
        (_index_renamed_first, "index_before_data", "/model.safetensors"),
    ],
)
def test_each_wrong_order_is_named(
    server: FaultServer, tmp_path: Path, program: Callable[[str], None], kind: str, path: str
) -> None:
    outcome = server.run_forked(program, str(tmp_path), root=tmp_path)
    outcome.value()
    found = outcome.trace.order_violations()
    assert (kind, f"{os.path.realpath(tmp_path)}{path}") in {(item.kind, item.path) for item in found}


def test_a_sync_that_failed_is_none(server: FaultServer, tmp_path: Path) -> None:
    outcome = server.run_forked(_failed_sync, str(tmp_path), root=tmp_path, faults=[Fault("fsync", 1, "errno")])
    assert [item.kind for item in outcome.trace.order_violations()] == ["data_not_synced"]


def _save_with_safetensors(path: str) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"a": torch.arange(100)}, path)


def _save_with_torch(path: str) -> None:
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(path, single_file_per_rank=False)
    save({"a": torch.arange(100), "b": torch.ones(3)}, storage_writer=writer, no_dist=True)


@pytest.mark.skipif(why_no_tracer() is not None, reason=str(why_no_tracer()))
def test_the_raw_rename_of_the_safetensors_library_is_seen_by_the_tracer_alone(
    server: FaultServer, tmp_path: Path
) -> None:
    path = str(tmp_path / "f.safetensors")
    expected: list[tuple[Any, int]] = [("shim", 0), ("tracer", 1)]
    for via, count in expected:
        outcome = server.run_forked(_save_with_safetensors, path, root=tmp_path, via=via)
        outcome.value()
        assert outcome.trace.count("rename", suffix=".safetensors") == count
        assert outcome.trace.bytes_written == os.path.getsize(path)
    # The library does not sync at all.
    assert {item.kind for item in outcome.trace.order_violations()} == {"data_not_synced", "folder_not_synced"}
    os.unlink(path)
    faults = [Fault("rename", 1, "kill")]
    assert server.run_forked(_save_with_safetensors, path, root=tmp_path, via="tracer", faults=faults).killed
    assert not os.path.exists(path)


def test_the_writer_of_torch_is_seen_by_the_shim(server: FaultServer, tmp_path: Path) -> None:
    target = str(tmp_path / "checkpoint")
    outcome = server.run_forked(_save_with_torch, target, root=tmp_path)
    outcome.value()
    written = sum(entry.stat().st_size for entry in os.scandir(target))
    assert outcome.trace.bytes_written == written
    assert outcome.trace.count("rename", suffix=".metadata") == 1
    assert outcome.trace.count("fsync", suffix=".distcp") == 2
    # It syncs its data files but never a folder; torch 2.13 also syncs .metadata before Python has flushed it.
    found = outcome.trace.order_violations()
    assert {item.path for item in found if item.kind == "folder_not_synced"} == {os.path.realpath(tmp_path), target}
    assert not any(item.path.endswith(".distcp") for item in found)
    faults = [Fault("write", outcome.trace.count("write", suffix=".metadata.tmp"), "kill", path_suffix=".metadata.tmp")]
    killed = server.run_forked(_save_with_torch, str(tmp_path / "other"), root=tmp_path, faults=faults)
    assert killed.killed
    assert not os.path.exists(tmp_path / "other" / ".metadata")
