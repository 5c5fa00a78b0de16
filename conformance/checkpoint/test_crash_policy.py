"""What a save may touch, in which order it makes data durable, and under which rights its files appear."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conformance.checkpoint import crash_programs as programs
from conformance.checkpoint.cases import INDEX, save
from conformance.checkpoint.crash_driver import Crashes
from conformance.checkpoint.crash_folders import (
    NEW,
    OLD,
    STRAY,
    assert_returned,
    assert_state,
    assert_stray,
    golden,
    leftovers,
    nothing,
    save_again,
    save_seed,
    state_in_file,
    tree,
)
from conformance.harness import assert_equal, raises, requirement
from conformance.provers.faults import CRASH_CALLS, FaultServer, Trace
from twinproof.errors import CheckpointExistsError


def _assert_sound(trace: Trace, where: str) -> None:
    found = [f"{item.kind}: {item.path.removeprefix(trace.root)}: {item.detail}" for item in trace.order_violations()]
    assert_equal(found, [], where=f"{where}: what a power cut could destroy")


@requirement(
    "CKPT-320",
    "A durable save MUST sync files, then their folder, then show them, the index last, then sync the parent.",
)
@pytest.mark.parametrize("first", [True, False], ids=["first save", "overwriting"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_order_of_a_save(
    checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path, world_size: int, first: bool
) -> None:
    prepare = nothing if first else golden(checkpoint, tmp_path)
    if world_size == 1:
        crashes = Crashes(server, tmp_path, prepare, programs.save_alone, impl.__name__, "{root}/ck", NEW, {})
    else:
        args = ("{root}/ck", NEW, {"thread_count": 2})
        crashes = Crashes(server, tmp_path, prepare, programs.save_together, *args, world_size=2)
    _assert_sound(crashes.record(), "save")


@requirement("CKPT-321", "A save into folders that do not exist yet MUST make their entries durable too.")
def test_order_in_new_folders(impl: ModuleType, server: FaultServer, tmp_path: Path) -> None:
    crashes = Crashes(server, tmp_path, nothing, programs.save_alone, impl.__name__, "{root}/run/step-1/ck", NEW, {})
    _assert_sound(crashes.record(), "save into new folders")


@requirement(
    "CKPT-322", "save_file and consolidation MUST make data durable before they show it, and the folder after."
)
@pytest.mark.parametrize("what", ["save_file", "consolidate"])
def test_order_of_other_writers(
    checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path, what: str
) -> None:
    if what == "save_file":
        file = "{root}/m.safetensors"
        crashes = Crashes(server, tmp_path, nothing, programs.save_one_file, impl.__name__, file, NEW)
    else:
        prepare = golden(checkpoint, tmp_path)
        programs.save_alone(impl.__name__, str(tmp_path / "golden" / "shards"), NEW, {"enable_consolidation": False})
        crashes = Crashes(server, tmp_path, prepare, programs.consolidate, impl.__name__, "{root}/shards", "{root}/ck")
    _assert_sound(crashes.record(), what)


@requirement("CKPT-323", "New files and folders MUST have the mode bits that the umask leaves.")
@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077, 0o027])
def test_umask(impl: ModuleType, server: FaultServer, tmp_path: Path, umask: int) -> None:
    target = tmp_path / "ck"
    server.run_forked(programs.save_with_umask, impl.__name__, str(target), NEW, umask, root=tmp_path).value()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [target, *target.iterdir()]}
    modes["save_file"] = stat.S_IMODE((tmp_path / "ck.safetensors").stat().st_mode)
    files = dict.fromkeys([*programs.FILES, INDEX, "save_file"], 0o666 & ~umask)
    assert_equal(modes, {**files, "ck": 0o777 & ~umask}, where=f"umask {umask:03o}")


@requirement("CKPT-324", "With overwrite=False a save over a checkpoint MUST raise and touch nothing at all.")
@pytest.mark.parametrize("world_size", [1, 2])
def test_refused_overwrite(
    checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path, world_size: int
) -> None:
    options = {"overwrite": False}
    prepare = golden(checkpoint, tmp_path)
    if world_size == 1:
        crashes = Crashes(server, tmp_path, prepare, programs.save_alone, impl.__name__, "{root}/ck", NEW, options)
    else:
        crashes = Crashes(server, tmp_path, prepare, programs.save_together, "{root}/ck", NEW, options, world_size=2)
    struck = crashes.run(where="overwrite=False")
    for outcome in [struck.outcome] if struck.ranks is None else struck.ranks.outcomes:
        with raises(Exception, mentions=("already there",) if world_size > 1 else (), where=struck.where):
            outcome.value()
    with raises(CheckpointExistsError, where=struck.where):
        struck.outcome.value()
    touched = [f"{event.call} {event.path}" for event in struck.outcome.trace.only(CRASH_CALLS)]
    assert_equal(touched, [], where="calls that change something")
    assert_state(checkpoint, struck.root / "ck", OLD, where=struck.where)
    first = Crashes(server, tmp_path, nothing, programs.save_alone, impl.__name__, "{root}/ck", NEW, options)
    first.record()
    assert_state(checkpoint, first.root / "ck", NEW, where="overwrite=False where nothing was")


@requirement("CKPT-325", "A save over a checkpoint MUST replace all of its files and leave every other file as it was.")
def test_what_an_overwrite_touches(checkpoint: Any, tmp_path: Path) -> None:
    target = tmp_path / "ck"
    save(checkpoint, programs.make_state(OLD), target, max_shard_size=200)
    count = len(list(target.glob("*.safetensors")))
    assert_equal(count > 2, True, where="the old checkpoint has files that the new one has not")
    for name, content in STRAY.items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_bytes(content)
    (target / "config.json").chmod(0o640)
    (target / "link").symlink_to("config.json")
    (target / "empty").mkdir()
    others = {"config.json", "sub", "sub/tokenizer.model", ".hidden", "link", "empty"}
    before = {name: value[1:] for name, value in tree(target).items() if name in others - {"sub", "empty"}}
    save_seed(checkpoint, target, NEW)
    after = tree(target)
    assert_equal(set(after), {*others, *programs.FILES, INDEX}, where="what is there")
    assert_equal({name: after[name][1:] for name in before}, before, where="time and content of other files")
    assert_equal(stat.S_IMODE((target / "config.json").stat().st_mode), 0o640, where="mode of another file")
    assert_equal(os.readlink(target / "link"), "config.json", where="a link")
    assert_stray(target, "overwritten")
    assert_state(checkpoint, target, NEW, where="overwritten")
    assert_equal(leftovers(tmp_path, "ck"), [], where="beside the checkpoint")


@requirement("CKPT-326", "Saving tensors that are mapped from the files being replaced MUST store their values.")
@pytest.mark.parametrize("alone", [False, True], ids=["folder", "file"])
def test_saving_over_mapped_files(
    checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path, alone: bool
) -> None:
    if alone:
        path = tmp_path / "m.safetensors"
        programs.save_one_file(impl.__name__, str(path), OLD)
    else:
        path = tmp_path / "ck"
        save_seed(checkpoint, path, OLD)
    # In a process of its own: writing into a mapped file that was cut short would end this one.
    outcome = server.run_forked(programs.save_mapped, impl.__name__, str(path), alone, root=tmp_path)
    assert_returned([outcome], "saving mapped tensors")
    if alone:
        assert_equal(state_in_file(checkpoint, path, (OLD,), where="mapped file"), OLD)
    else:
        assert_state(checkpoint, path, OLD, where="mapped folder")


@requirement("CKPT-327", "A save over a folder whose index is broken MUST replace it and succeed.")
@pytest.mark.parametrize(
    "text", ["{", "[]", '{"weight_map":{"a":"../x.safetensors"}}', '{"weight_map":{"a":"gone.safetensors"}}']
)
def test_overwriting_a_broken_checkpoint(checkpoint: Any, tmp_path: Path, text: str) -> None:
    target = tmp_path / "ck"
    save_seed(checkpoint, target, OLD)
    (target / INDEX).write_text(text)
    save_again(checkpoint, target, text)
