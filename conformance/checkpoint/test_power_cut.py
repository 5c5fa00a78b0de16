"""H. What a power cut may leave: every state of the disk that an ordering file system allows is opened and read."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from conformance.checkpoint import crash_programs as programs
from conformance.checkpoint.cases import save_ranks, zeros_like
from conformance.checkpoint.crash_driver import Crashes
from conformance.checkpoint.crash_folders import (
    NEW,
    OLD,
    STRAY,
    assert_stray,
    golden,
    nothing,
    state_in,
    state_in_file,
)
from conformance.harness import Mismatch, Rank, assert_equal, requirement, succeeds
from conformance.harness.compare import assert_same_tensors
from conformance.provers.faults import DiskState, Fault, FaultServer, Snapshot, power_cut_states

# One process loads natively here, and torch's threads warn of it when they like.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Prepare = Callable[[Path], object]
SYNCS = ("fsync", "fdatasync", "syncfs", "msync", "sync_file_range")


def _states(crashes: Crashes, below: str) -> Iterator[tuple[DiskState, Path]]:
    """Each state that a power cut may leave of a path below the root, made on disk again beside it."""
    prepare, taken = crashes.prepare, []

    def prepared(root: Path) -> None:
        prepare(root)
        taken.append(Snapshot.of(root))

    crashes.prepare = prepared
    trace = crashes.record()
    target = crashes.root.parent / "cut" / Path(below).name
    for state in power_cut_states(trace, taken[-1], Snapshot.of(crashes.root), below=str(crashes.root / below)):
        shutil.rmtree(target.parent, ignore_errors=True)
        target.parent.mkdir()
        state.put(target)
        yield state, target


def _judge(state: DiskState, found: int | None, first: bool, seen: set[int | None]) -> None:
    allowed: tuple[int | None, ...] = (None, NEW) if first else (OLD, NEW)
    if found not in ((NEW,) if state.returned else allowed):
        expected = "the new state" if state.returned else f"one of {allowed}, whole"
        raise Mismatch("a power cut loses a checkpoint", got=found, expected=expected, where=state.where)
    seen.add(found)


def _crashes(
    server: FaultServer, tmp_path: Path, implementation: str, prepare: Prepare, world_size: int, **options: Any
) -> Crashes:
    if world_size == 1:
        return Crashes(server, tmp_path, prepare, programs.save_alone, implementation, "{root}/ck", NEW, options)
    given = {"thread_count": 2, **options}
    return Crashes(server, tmp_path, prepare, programs.save_together, "{root}/ck", NEW, given, world_size=world_size)


@requirement(
    "CKPT-460",
    "Whatever names and unsynced data a power cut loses, at any instant of a durable save, the folder MUST hold the "
    "old checkpoint whole or the new one whole, and the new one once the save returned.",
)
@pytest.mark.parametrize("first", [True, False], ids=["first save", "overwriting"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_save(
    checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path, world_size: int, first: bool
) -> None:
    prepare, seen = nothing if first else golden(checkpoint, tmp_path), set[int | None]()
    for state, folder in _states(_crashes(server, tmp_path, impl.__name__, prepare, world_size), "ck"):
        _judge(state, state_in(checkpoint, folder, (OLD, NEW), where=state.where), first, seen)
        if not first:
            assert_stray(folder, state.where)
    assert_equal(seen, {None if first else OLD, NEW}, where="states that were seen")


@requirement(
    "CKPT-461",
    "The same MUST hold of save_file, of a consolidation, and of a manager's native save over another.",
)
@pytest.mark.parametrize("what", ["save_file", "consolidate", "native"])
def test_other_writers(checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path, what: str) -> None:
    seen = set[int | None]()
    if what == "save_file":

        def prepare(root: Path) -> None:
            programs.save_one_file(impl.__name__, f"{root}/m.safetensors", OLD)

        crashes = Crashes(server, tmp_path, prepare, programs.save_one_file, impl.__name__, "{root}/m.safetensors", NEW)
        for state, path in _states(crashes, "m.safetensors"):
            _judge(state, state_in_file(checkpoint, path, (OLD, NEW), where=state.where), False, seen)
    elif what == "consolidate":
        copy = golden(checkpoint, tmp_path)
        programs.save_alone(impl.__name__, str(tmp_path / "golden/shards"), NEW, {"enable_consolidation": False})
        crashes = Crashes(server, tmp_path, copy, programs.consolidate, impl.__name__, "{root}/shards", "{root}/ck")
        for state, folder in _states(crashes, "ck"):
            _judge(state, state_in(checkpoint, folder, (OLD, NEW), where=state.where), False, seen)
    else:
        programs.save_natively(impl.__name__, str(tmp_path / "golden"), OLD)

        def copied(root: Path) -> None:
            shutil.copytree(tmp_path / "golden", root, dirs_exist_ok=True)

        crashes = Crashes(server, tmp_path, copied, programs.save_natively, impl.__name__, "{root}", NEW)
        for state, folder in _states(crashes, "step-1"):
            _judge(state, _native_state(folder, state.where), False, seen)
    assert_equal(seen, {OLD, NEW}, where="states that were seen")


def _native_state(folder: Path, where: str) -> int | None:
    if not (folder / ".metadata").exists():
        return None
    targets = {name: zeros_like(value) for name, value in programs.make_state(OLD).items()}
    with succeeds("torch's reader", where):
        dcp.load({f"p_{name}": value for name, value in targets.items()}, checkpoint_id=folder, no_dist=True)
    for seed in (OLD, NEW):
        try:
            assert_same_tensors(targets, programs.make_state(seed))
        except Mismatch:
            continue
        return seed
    raise Mismatch("neither the old state nor the new one", got="another", expected=[OLD, NEW], where=where)


@requirement(
    "CKPT-462",
    "Without durability a save MUST sync nothing, and still show its files whole at one instant: only a machine that "
    "stops may lose them, and never a process.",
)
def test_not_durable(checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path) -> None:
    seen = set[int | None]()
    crashes = _crashes(server, tmp_path, impl.__name__, golden(checkpoint, tmp_path), 1, durable=False)
    for state, folder in _states(crashes, "ck"):
        if state.is_whole:
            found = state_in(checkpoint, folder, (OLD, NEW), where=state.where)
            assert_equal(found in (OLD, NEW), True, where=f"{state.where}: old or new")
            seen.add(found)
    assert_equal(seen, {OLD, NEW}, where="states that were seen")
    synced = [event.path for event in crashes.record() if event.call in SYNCS]
    assert_equal(synced, [], where="calls that sync")


@requirement(
    "CKPT-552",
    "A durable save over a checkpoint MUST sync the folder that names both after the new one took its name, before it "
    "deletes anything of the old one, with an exchange of the two and without.",
)
def test_old_one_outlives_the_new_name(checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path) -> None:
    crashes = _crashes(server, tmp_path, impl.__name__, golden(checkpoint, tmp_path), 1)
    renamed = [event.path2 for event in crashes.record().only("rename")]
    assert_equal(str(crashes.root / "ck") in renamed, True, where="the checkpoint is shown by a rename")
    number = 1 + renamed.index(str(crashes.root / "ck"))
    for where, faults in (
        ("an exchange", ()),
        ("two renames", (Fault("rename", number, "errno", errno=errno.EINVAL),)),
    ):
        struck = crashes.run(*faults, where=where)
        struck.outcome.value()
        trace = struck.outcome.trace
        named = [event for event in trace.only("rename") if event.succeeded and event.path2 == str(crashes.root / "ck")]
        shown = max(event.end for event in named)
        deleted = [event.begin for event in trace.only(("unlink", "rmdir")) if event.begin > shown]
        synced = [event.end for event in trace.only("fsync") if event.path == str(crashes.root) and event.begin > shown]
        assert_equal(bool(deleted), True, where=f"{where}: the old one is deleted")
        assert_equal(bool(synced) and min(synced) < min(deleted), True, where=f"{where}: the names are synced first")


@requirement(
    "CKPT-605",
    "Where a file of others cannot have a second name, its copy MUST be on disk before the new checkpoint is shown, "
    "with its content and its mode.",
)
def test_copies_of_others(checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path) -> None:
    crashes = _crashes(server, tmp_path, impl.__name__, golden(checkpoint, tmp_path), 1)
    (tmp_path / "golden/ck/config.json").chmod(0o640)
    for code in (errno.EPERM, errno.EXDEV, errno.EMLINK):
        struck = crashes.run(Fault("link", 1, "errno", errno=code, times=0), where=os.strerror(code))
        struck.outcome.value()
        assert_stray(crashes.root / "ck", struck.where)
        assert_equal((crashes.root / "ck/config.json").stat().st_mode & 0o777, 0o640, where=f"{struck.where}: mode")
        trace = struck.outcome.trace
        renamed = [event.begin for event in trace.only("rename") if event.path2 == str(crashes.root / "ck")]
        assert_equal(len(renamed), 1, where=f"{struck.where}: the checkpoint is shown by a rename")
        shown = renamed[0]
        synced = {Path(event.path).name for event in trace.only("fsync") if event.end < shown}
        missing = {Path(name).name for name in STRAY} - synced
        assert_equal(missing, set(), where=f"{struck.where}: copies that are not synced")


class _Own:
    """A state that differs from rank to rank, as a data loader's does: each rank has a file of its own."""

    def __init__(self, rank: int) -> None:
        self.values = {f"rank{rank}": torch.full((300,), rank)}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = state_dict


def _save_by(rank: Rank, way: str, folder: Path, durable: bool) -> None:
    """Save to ``step-1`` of the folder, in one of the ways in which several ranks save."""
    checkpoint, model = rank.component("checkpoint"), programs.model_of(NEW)
    states, target = {"loader": _Own(rank.rank)}, folder / "step-1"
    if way == "files":
        programs.save_together(rank, str(target), NEW, {"durable": durable, "block_bytes": 64, "checksums": True})
    elif way == "shards":
        save_ranks(rank, states["loader"].values, target, durable=durable, enable_consolidation=False)
    elif way == "save_training":
        linear = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(linear.parameters())
        checkpoint.save_training(target, linear, optimizer, 1, states=states, durable=durable)
    else:
        options = {"last_save_in_hf": True} if way == "last save" else {}
        mode = "async" if way == "asynchronous" else "disabled"
        with checkpoint.CheckpointManager(
            folder, model=model, interval=1, states=states, durable=durable, async_mode=mode, **options
        ) as manager:
            manager.save(1, last_step=way == "last save")


_Seen = tuple[int, int]  # The inode of a file and its size.


def _watch(rank: Rank, way: str, folder: str, durable: bool) -> tuple[set[_Seen], set[int]]:
    """The files that this rank synced, as large as they were then, and those that it wrote and never synced."""
    synced, written = set[_Seen](), set[int]()

    def note(descriptor: int, *_: Any) -> None:
        status = os.fstat(descriptor)
        synced.add((status.st_ino, status.st_size))

    def write(call: Callable[..., int]) -> Callable[..., int]:
        def writes(descriptor: int, *arguments: Any) -> int:
            written.add(os.fstat(descriptor).st_ino)
            return call(descriptor, *arguments)

        return writes

    with ExitStack() as stack:
        for name in ("fsync", "fdatasync"):
            stack.enter_context(mock.patch.object(os, name, note))
        for name in ("writev", "pwritev"):
            stack.enter_context(mock.patch.object(os, name, write(getattr(os, name))))
        _save_by(rank, way, Path(folder), durable)
    return synced, written - {number for number, _ in synced}


@requirement(
    "CKPT-803",
    "A durable save by several ranks, of either format and asynchronous too, MUST sync every file of the checkpoint "
    "when its last byte is written, each rank those that it wrote; one that is not durable syncs none on any rank.",
)
@pytest.mark.parametrize("way", ["files", "shards", "save_training", "native", "asynchronous", "last save"])
def test_files_of_each_rank(checkpoint: Any, rank_pool: Any, tmp_path: Path, way: str) -> None:
    for world_size in (2, 3):
        for durable in (True, False):
            folder, where = tmp_path / f"{world_size}{durable}", f"{way}, {world_size} ranks, durable={durable}"
            found = rank_pool.run(_watch, world_size, way, str(folder), durable)
            files = {path: path.stat() for path in (folder / "step-1").iterdir()}
            synced = set[_Seen]().union(*(rank[0] for rank in found))
            missed = {path.name for path, status in files.items() if (status.st_ino, status.st_size) not in synced}
            assert_equal(missed, set() if durable else {path.name for path in files}, where=f"{where}: not synced")
            if durable:
                assert_equal([rank[1] for rank in found], [set()] * world_size, where=f"{where}: written, not synced")
            else:
                assert_equal(synced, set(), where=f"{where}: synced")
