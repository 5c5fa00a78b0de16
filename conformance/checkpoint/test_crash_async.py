"""Asynchronous saves: a failure surfaces where it is awaited, and overlapping saves do not mix."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from conformance.checkpoint import crash_programs as programs
from conformance.checkpoint.crash_driver import Crashes
from conformance.checkpoint.crash_folders import (
    NEW,
    NEXT,
    assert_returned,
    assert_state,
    carries_errno,
    golden,
    leftovers,
    state_in,
)
from conformance.harness import assert_equal, requirement
from conformance.provers.faults import WRITE_CALLS, Fault, FaultServer


@requirement("CKPT-319", "An asynchronous save that fails MUST raise the cause at its future, and the next MUST work.")
@pytest.mark.parametrize("world_size", [1, 2])
def test_background_failure(checkpoint: Any, server: FaultServer, tmp_path: Path, world_size: int) -> None:
    args = ("{root}/ck", [NEW, NEXT], True)
    prepare = golden(checkpoint, tmp_path)
    crashes = Crashes(server, tmp_path, prepare, programs.save_in_background, *args, world_size=world_size)
    struck = crashes.run(Fault(WRITE_CALLS, 1, "errno"), where="asynchronous save on a full disk")
    assert struck.ranks is not None
    assert_returned(struck.ranks.outcomes, struck.where)
    for rank, (first, second) in enumerate(struck.ranks.values()):
        carries = first is not None and carries_errno(first, errno.ENOSPC)
        assert_equal(carries, True, where=f"rank {rank}: the cause is in {first!r}")
        assert_equal(second, None, where=f"rank {rank}: the save after the failed one")
    assert_state(checkpoint, struck.root / "ck", NEXT, where=struck.where)


@requirement("CKPT-328", "Asynchronous saves that overlap in one folder MUST leave one of their states there, whole.")
def test_overlapping_saves(checkpoint: Any, server: FaultServer, tmp_path: Path) -> None:
    args = ("{root}/ck", [NEW, NEXT], False)
    crashes = Crashes(server, tmp_path, golden(checkpoint, tmp_path), programs.save_in_background, *args, world_size=1)
    struck = crashes.run(where="overlapping saves")
    assert struck.ranks is not None
    assert_returned(struck.ranks.outcomes, struck.where)
    errors = struck.ranks.values()[0]
    assert_equal(errors.count(None) > 0, True, where=f"one of the saves succeeds; errors {errors}")
    found = state_in(checkpoint, struck.root / "ck", (NEW, NEXT), where=struck.where)
    assert_equal(found in (NEW, NEXT), True, where="the folder holds one of the states")
    assert_equal(leftovers(struck.root, "ck"), [], where="beside the checkpoint")
