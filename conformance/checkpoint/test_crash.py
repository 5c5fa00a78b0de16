"""Killed at any point, a save leaves the previous checkpoint or the new one whole, and the next save works."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conformance.checkpoint import crash_programs as programs
from conformance.checkpoint.cases import save
from conformance.checkpoint.crash_driver import Crashes, sampled
from conformance.checkpoint.crash_folders import (
    NEW,
    NEXT,
    OLD,
    assert_state,
    assert_stray,
    golden,
    is_shown,
    leftovers,
    nothing,
    save_again,
    save_seed,
    state_in,
    state_in_file,
)
from conformance.harness import Mismatch, assert_equal, requirement, succeeds
from conformance.provers.faults import CRASH_CALLS, Fault, FaultServer


@requirement(
    "CKPT-300",
    "Killed at any call of a save over a checkpoint, the folder MUST hold the old one or the new one, whole.",
)
@pytest.mark.parametrize("via", ["shim", pytest.param("tracer", marks=pytest.mark.night)])
def test_killed_overwriting(checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path, via: str) -> None:
    crashes = Crashes(
        server,
        tmp_path,
        golden(checkpoint, tmp_path),
        programs.save_alone,
        impl.__name__,
        "{root}/ck",
        NEW,
        {},
        via=via,
    )
    seen = set()
    for struck in crashes.killed():
        folder = struck.root / "ck"
        found = state_in(checkpoint, folder, (OLD, NEW), where=struck.where)
        if found is None:
            raise Mismatch("the old checkpoint is gone", got="nothing", expected=OLD, where=struck.where)
        seen.add(found)
        assert_stray(folder, struck.where)
    # A crash test in which one of the two never shows has not looked at every point.
    assert_equal(seen, {OLD, NEW}, where="states after a kill")


@requirement("CKPT-301", "Killed at any call of a first save, the folder MUST show nothing or the whole checkpoint.")
def test_killed_first_save(checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path) -> None:
    crashes = Crashes(server, tmp_path, nothing, programs.save_alone, impl.__name__, "{root}/ck", NEW, {})
    seen = {state_in(checkpoint, struck.root / "ck", (NEW,), where=struck.where) for struck in crashes.killed()}
    assert_equal(seen, {None, NEW}, where="states after a kill")


@requirement("CKPT-302", "After a kill at any call, the next save MUST work and be what every reader finds.")
@pytest.mark.parametrize("first", [True, False], ids=["first save", "overwriting"])
def test_saving_after_a_kill(
    checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path, first: bool
) -> None:
    prepare = nothing if first else golden(checkpoint, tmp_path)
    crashes = Crashes(server, tmp_path, prepare, programs.save_alone, impl.__name__, "{root}/ck", NEW, {})
    for struck in crashes.killed():
        save_again(checkpoint, struck.root / "ck", struck.where)
        if not first:
            assert_stray(struck.root / "ck", struck.where)


@requirement("CKPT-303", "Killed at any call of save_file, the path MUST hold the old file or the new one, whole.")
@pytest.mark.parametrize("via", ["shim", "tracer"])
def test_killed_save_file(checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path, via: str) -> None:
    def prepare(root: Path) -> None:
        programs.save_one_file(impl.__name__, str(root / "m.safetensors"), OLD)

    crashes = Crashes(
        server, tmp_path, prepare, programs.save_one_file, impl.__name__, "{root}/m.safetensors", NEW, via=via
    )
    seen = set()
    for struck in crashes.killed():
        seen.add(state_in_file(checkpoint, struck.root / "m.safetensors", (OLD, NEW), where=struck.where))
        with succeeds("the next save_file", struck.where):
            programs.save_one_file(impl.__name__, str(struck.root / "m.safetensors"), NEXT)
        found = state_in_file(checkpoint, struck.root / "m.safetensors", (NEXT,), where=f"after {struck.where}")
        assert_equal(found, NEXT, where=struck.where)
    assert_equal(seen - {NEW}, {OLD}, where="states after a kill")


@requirement(
    "CKPT-304",
    "Killed at any call of a consolidation over a checkpoint, old or new MUST be there whole, and the shards.",
)
def test_killed_consolidation(checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path) -> None:
    prepare = golden(checkpoint, tmp_path)
    save(checkpoint, programs.make_state(NEW), tmp_path / "golden" / "shards", enable_consolidation=False)
    args = (impl.__name__, "{root}/shards", "{root}/ck")
    seen = set()
    for struck in Crashes(server, tmp_path, prepare, programs.consolidate, *args).killed():
        seen.add(state_in(checkpoint, struck.root / "ck", (OLD, NEW), where=struck.where))
        assert_stray(struck.root / "ck", struck.where)
        with succeeds("the next consolidation", struck.where):
            programs.consolidate(impl.__name__, str(struck.root / "shards"), str(struck.root / "ck"))
        assert_state(checkpoint, struck.root / "ck", NEW, where=f"again after {struck.where}")
    assert_equal(seen, {OLD, NEW}, where="states after a kill")


@requirement(
    "CKPT-305", "When one rank is killed, the others MUST raise within a bound, and old or new MUST be there whole."
)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("first", [True, False], ids=["first save", "overwriting"])
def test_killed_rank(
    checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path, rank: int, first: bool
) -> None:
    prepare = nothing if first else golden(checkpoint, tmp_path)
    crashes = Crashes(server, tmp_path, prepare, programs.save_together, "{root}/ck", NEW, {}, world_size=2)
    count = crashes.record().count(CRASH_CALLS, rank=rank)
    if not count:
        pytest.skip(f"rank {rank} of {impl.__name__} makes no call that could be struck")
    points = [Fault(CRASH_CALLS, number, "kill", rank=rank) for number in sampled(count, 6)]
    for struck in crashes.killed(points):
        assert struck.ranks is not None
        survivor = struck.ranks[1 - rank]
        if survivor.timed_out or survivor.killed:
            raise Mismatch("a rank hangs", got=survivor.log[-2000:], expected="an error", where=struck.where)
        found = state_in(checkpoint, struck.root / "ck", (OLD, NEW), where=struck.where)
        if survivor.error is None:
            assert_equal(found, NEW, where=f"{struck.where}: a rank returned")
        elif not is_shown(struck.ranks.trace, struck.root / "ck"):
            assert_equal(found, None if first else OLD, where=struck.where)
        save_again(checkpoint, struck.root / "ck", struck.where)


@requirement(
    "CKPT-306", "What a killed save left behind MUST be ignored by loads, by other saves and by consolidation."
)
def test_leftovers_are_ignored(checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path) -> None:
    prepare = golden(checkpoint, tmp_path)
    crashes = Crashes(server, tmp_path, prepare, programs.save_alone, impl.__name__, "{root}/ck", NEW, {})
    trace = crashes.record()
    # The last write of a save is where most is left behind.
    writes = trace.count(("write", "pwrite", "writev", "pwritev"))
    struck = next(crashes.killed([Fault(("write", "pwrite", "writev", "pwritev"), writes, "torn")]))
    assert_equal(bool(leftovers(struck.root, "ck")), True, where="something is left behind to be ignored")
    assert_state(checkpoint, struck.root / "ck", OLD, where="a load over leftovers")
    save_seed(checkpoint, struck.root / "beside", NEXT)
    assert_state(checkpoint, struck.root / "beside", NEXT, where="a save beside leftovers")
    checkpoint.consolidate_safetensors_files(struck.root / "ck", struck.root / "ck")
    assert_state(checkpoint, struck.root / "ck", OLD, where="a consolidation over leftovers")
    save_again(checkpoint, struck.root / "ck", struck.where)
