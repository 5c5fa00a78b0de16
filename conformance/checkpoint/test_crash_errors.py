"""Errors of the file system: raised on every rank with their cause, in time, and nothing half-done is left
visible.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from conformance.checkpoint import crash_programs as programs
from conformance.checkpoint.cases import State, random_bits, save
from conformance.checkpoint.crash_driver import Crashes, Struck, sampled
from conformance.checkpoint.crash_folders import (
    NEW,
    OLD,
    assert_returned,
    assert_state,
    assert_stray,
    carries_errno,
    golden,
    is_harmless,
    is_shown,
    leftovers,
    nothing,
    save_again,
    state_in,
    state_in_file,
)
from conformance.harness import Mismatch, Rank, assert_equal, assert_same_tensors, requirement
from conformance.harness.raising import errors_inside
from conformance.provers.faults import READ_CALLS, WRITE_CALLS, Fault, FaultServer, Outcome

# What can fail before the new checkpoint is in force. Clearing away the old one afterwards is another matter.
BUILDING = ("open", *WRITE_CALLS, "fsync", "fdatasync", "rename", "link", "mkdir", "ftruncate", "fallocate", "close")
CLEARING = ("unlink", "rmdir")


def _outcomes(struck: Struck) -> Iterable[Outcome]:
    return (struck.outcome,) if struck.ranks is None else struck.ranks.outcomes


def _assert_raised(struck: Struck, code: int) -> None:
    """Every rank raised in time, and each knows the original cause."""
    for rank, outcome in enumerate(_outcomes(struck)):
        where = f"{struck.where}, rank {rank}"
        if outcome.error is None:
            got = "a hang" if outcome.timed_out else f"exit code {outcome.exit_code}, no error"
            raise Mismatch("a rank does not raise", got=got, expected=os.strerror(code), where=where)
        if not carries_errno(outcome.error, code):
            raise Mismatch("the cause is lost", got=repr(outcome.error), expected=os.strerror(code), where=where)


def _assert_unharmed(checkpoint: Any, struck: Struck, old: int | None) -> None:
    """The old state is there whole, or the new one where the error came after it had been put into force."""
    target = struck.root / "ck"
    shown = is_shown(struck.outcome.trace, target)
    found = state_in(checkpoint, target, (OLD, NEW), where=struck.where)
    assert_equal(found, NEW if shown else old, where=f"{struck.where}: state")
    kept = ("ck",) if old is not None or shown else ()
    assert_equal(_left(struck, *kept), [], where=struck.where)


def _left(struck: Struck, *kept: str) -> list[str]:
    """What lies beside what should be there.

    Where the folder above cannot be synced once the new state is shown, what it replaced stays (CKPT-933).
    """
    trace, root = struck.outcome.trace, str(struck.root)
    is_unsynced = is_shown(trace, struck.root / "ck") and all(event.path == root for event in trace.struck)
    return [name for name in leftovers(struck.root, *kept) if not (is_unsynced and name.startswith(".ck."))]


@requirement("CKPT-310", "An error of any call before publication MUST be raised with its number, and nothing be left.")
@pytest.mark.parametrize(
    ("code", "first"),
    [
        pytest.param(errno.ENOSPC, True, id="ENOSPC-first save"),
        pytest.param(errno.EIO, False, id="EIO-overwriting"),
        pytest.param(errno.EIO, True, id="EIO-first save", marks=pytest.mark.night),
        pytest.param(errno.ENOSPC, False, id="ENOSPC-overwriting", marks=pytest.mark.night),
    ],
)
def test_any_call_fails(
    checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path, code: int, first: bool
) -> None:
    prepare = nothing if first else golden(checkpoint, tmp_path)
    crashes = Crashes(server, tmp_path, prepare, programs.save_alone, impl.__name__, "{root}/ck", NEW, {})
    count = crashes.record().count(BUILDING)
    for struck in crashes.struck(Fault(BUILDING, number, "errno", errno=code) for number in range(1, count + 1)):
        if struck.outcome.error is None and is_harmless(struck.outcome.trace, struck.root / "ck"):
            # What fails after publication may be reported or logged; the checkpoint is whole either way.
            assert_state(checkpoint, struck.root / "ck", NEW, where=struck.where)
            continue
        _assert_raised(struck, code)
        _assert_unharmed(checkpoint, struck, None if first else OLD)
        if not first:
            assert_stray(struck.root / "ck", struck.where)
        save_again(checkpoint, struck.root / "ck", struck.where)


@requirement(
    "CKPT-311", "A disk that stays full from any write on MUST fail the save and leave the old checkpoint alone."
)
def test_disk_stays_full(checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path) -> None:
    prepare = golden(checkpoint, tmp_path)
    options = {"thread_count": 4}
    crashes = Crashes(server, tmp_path, prepare, programs.save_alone, impl.__name__, "{root}/ck", NEW, options)
    count = crashes.record().count(WRITE_CALLS)
    for struck in crashes.struck(Fault(WRITE_CALLS, number, "errno", times=0) for number in range(1, count + 1)):
        _assert_raised(struck, errno.ENOSPC)
        _assert_unharmed(checkpoint, struck, OLD)


@requirement("CKPT-312", "A failure to clear away what a save replaced MUST NOT harm the checkpoint that is in force.")
def test_clearing_fails(checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path) -> None:
    prepare = golden(checkpoint, tmp_path)
    crashes = Crashes(server, tmp_path, prepare, programs.save_alone, impl.__name__, "{root}/ck", NEW, {})
    count = crashes.record().count(CLEARING)
    for struck in crashes.struck(Fault(CLEARING, number, "errno", errno=errno.EIO) for number in range(1, count + 1)):
        found = state_in(checkpoint, struck.root / "ck", (OLD, NEW), where=struck.where)
        assert_equal(found, OLD if struck.outcome.error is not None else NEW, where=struck.where)


@requirement(
    "CKPT-313", "A full disk under any thread of any rank MUST be raised on every rank with its cause, in time."
)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("threads", [1, 4])
def test_full_disk_on_one_rank(
    checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path, rank: int, threads: int
) -> None:
    args = ("{root}/ck", NEW, {"thread_count": threads})
    crashes = Crashes(server, tmp_path, golden(checkpoint, tmp_path), programs.save_together, *args, world_size=2)
    count = crashes.record().count(WRITE_CALLS, rank=rank)
    if not count:
        pytest.skip(f"rank {rank} of {impl.__name__} makes no write that could fail")
    points = [Fault(WRITE_CALLS, number, "errno", times=0, rank=rank) for number in sampled(count, 4)]
    for struck in crashes.struck(points):
        _assert_raised(struck, errno.ENOSPC)
        _assert_unharmed(checkpoint, struck, OLD)


@requirement(
    "CKPT-314", "A failing open, fsync or rename on one rank MUST be raised on every rank with its cause, in time."
)
@pytest.mark.parametrize("rank", [0, 1])
def test_other_calls_fail_on_one_rank(
    checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path, rank: int
) -> None:
    prepare = golden(checkpoint, tmp_path)
    crashes = Crashes(server, tmp_path, prepare, programs.save_together, "{root}/ck", NEW, {}, world_size=2)
    trace = crashes.record()
    points = [
        Fault(call, number, "errno", errno=errno.EIO, rank=rank)
        for call in ("open", "fsync", "rename", "mkdir")
        for number in sampled(trace.count(call, rank=rank), 3)
    ]
    if not points:
        pytest.skip(f"rank {rank} of {impl.__name__} makes no call that could fail")
    for struck in crashes.struck(points):
        if struck.outcome.error is None and is_harmless(struck.outcome.trace, struck.root / "ck"):
            assert_state(checkpoint, struck.root / "ck", NEW, where=struck.where)
            continue
        _assert_raised(struck, errno.EIO)
        _assert_unharmed(checkpoint, struck, OLD)


@requirement("CKPT-315", "Short writes MUST be continued, so that the files are right to the byte.")
@pytest.mark.parametrize("world_size", [0, 2])
def test_short_writes(checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path, world_size: int) -> None:
    function: Any = programs.save_together if world_size else programs.save_alone
    args = ("{root}/ck", NEW, {"thread_count": 2})
    first = () if world_size else (impl.__name__,)
    crashes = Crashes(server, tmp_path, nothing, function, *first, *args, world_size=world_size)
    count = crashes.record().count(WRITE_CALLS)
    points = [Fault(WRITE_CALLS, number, "short") for number in sampled(count, 8)]
    for struck in crashes.struck([*points, Fault(WRITE_CALLS, 1, "short", times=0)]):
        assert_returned(_outcomes(struck), struck.where)
        assert_state(checkpoint, struck.root / "ck", NEW, where=struck.where)


@requirement(
    "CKPT-316", "A call that a signal interrupts MUST be repeated, or fail the save and leave the old checkpoint."
)
def test_interrupted_calls(checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path) -> None:
    prepare = golden(checkpoint, tmp_path)
    crashes = Crashes(server, tmp_path, prepare, programs.save_alone, impl.__name__, "{root}/ck", NEW, {})
    calls = ("open", *WRITE_CALLS, "fsync", "fdatasync", "rename")
    count = crashes.record().count(calls)
    for struck in crashes.struck(Fault(calls, number, "eintr") for number in range(1, count + 1)):
        if struck.outcome.error is None:
            assert_state(checkpoint, struck.root / "ck", NEW, where=struck.where)
        else:
            _assert_raised(struck, errno.EINTR)
            _assert_unharmed(checkpoint, struck, OLD)


@requirement(
    "CKPT-317", "Consolidation and save_file that fail MUST raise the cause, leave the old files and nothing else."
)
@pytest.mark.parametrize("what", ["consolidate", "save_file"])
def test_other_writers_fail(checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path, what: str) -> None:
    prepare = golden(checkpoint, tmp_path)
    programs.save_one_file(impl.__name__, str(tmp_path / "golden" / "m.safetensors"), OLD)
    programs.save_alone(impl.__name__, str(tmp_path / "golden" / "shards"), NEW, {"enable_consolidation": False})
    if what == "consolidate":
        crashes = Crashes(server, tmp_path, prepare, programs.consolidate, impl.__name__, "{root}/shards", "{root}/ck")
    else:
        file = "{root}/m.safetensors"
        crashes = Crashes(server, tmp_path, prepare, programs.save_one_file, impl.__name__, file, NEW)
    calls = (*WRITE_CALLS, "fsync", "rename")
    count = crashes.record().count(calls)
    for struck in crashes.struck(Fault(calls, number, "errno", times=0) for number in range(1, count + 1)):
        _assert_raised(struck, errno.ENOSPC)
        shown = struck.outcome.trace.only("rename")
        landed = any(event.succeeded and event.path2.endswith(("/ck", "/m.safetensors")) for event in shown)
        expected = NEW if landed else OLD
        assert_equal(_left(struck, "ck", "shards", "m.safetensors"), [], where=struck.where)
        if what == "consolidate":
            found = state_in(checkpoint, struck.root / "ck", (OLD, NEW), where=struck.where)
        else:
            found = state_in_file(checkpoint, struck.root / "m.safetensors", (OLD, NEW), where=struck.where)
        assert_equal(found, expected, where=struck.where)


@requirement(
    "CKPT-553",
    "Reads that give less than they were asked for MUST be continued, and reads that a signal interrupts be repeated: "
    "of headers and of the index, of whole tensors, rows and columns, and of shards that are merged.",
)
@pytest.mark.parametrize("what", ["load", "load_file", "consolidate"])
def test_short_reads(checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path, what: str) -> None:
    root, merged = tmp_path / "root", tmp_path / "root/merged"
    merged.mkdir(parents=True)
    if what == "load_file":
        programs.save_one_file(impl.__name__, str(root / "m.safetensors"), NEW)
        call: tuple[Any, ...] = (programs.read_one_file, impl.__name__, str(root / "m.safetensors"), NEW)
    else:
        programs.save_alone(impl.__name__, str(root / "ck"), NEW, {"enable_consolidation": what == "load"})
        args = (NEW,) if what == "load" else (str(merged),)
        program: Any = programs.read_back if what == "load" else programs.consolidate
        call = (program, impl.__name__, str(root / "ck"), *args)
    seen = server.run_forked(*call, root=root)
    assert_returned([seen], "a run without faults")
    count = seen.trace.count(READ_CALLS)
    for fault in (
        Fault(READ_CALLS, 1, "short", times=0),
        *(Fault(READ_CALLS, number, "eintr") for number in sampled(count, 6)),
    ):
        where = f"{fault.action} at read {fault.nth} of {count}"
        assert_returned([server.run_forked(*call, root=root, faults=[fault])], where)
        if what == "consolidate":
            assert_state(checkpoint, merged, NEW, where=where)


@requirement("CKPT-318", "A rank that writes for longer than the caller's group waits MUST NOT make the save fail.")
def test_slow_rank(checkpoint: Any, server: FaultServer, tmp_path: Path) -> None:
    args = ("{root}/ck", NEW, str(tmp_path / "store"), 1.0)
    slow = Fault(WRITE_CALLS, 1, "delay", delay_s=2.5)
    crashes = Crashes(server, tmp_path, nothing, programs.save_at_slow_rank, *args, world_size=2)
    struck = next(iter(crashes.struck([slow])))
    assert_returned(_outcomes(struck), struck.where)
    assert_state(checkpoint, struck.root / "ck", NEW, where=struck.where)


# What kernels and file systems say that do not copy ranges between these files, where reads and writes still work.
REFUSALS = (errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


def _large_state() -> State:
    """A tensor longer than any block, one that is shorter and not long, and a scalar between two of them."""
    return {
        "a": random_bits(torch.float32, (701, 1000), 1),
        "b": random_bits(torch.float64, (), 2),
        "c": random_bits(torch.uint8, (90_001,), 3),
        "d": random_bits(torch.float16, (77, 1), 4),
    }


def _copy_faults(count: int) -> Iterator[Fault]:
    """Ways of the system's own copy that are no errors, at each of its calls."""
    for number in range(1, count + 1):
        yield Fault("copy_file_range", number, "short")
        yield Fault("copy_file_range", number, "eintr")
        yield Fault("copy_file_range", number, "errno", errno=REFUSALS[number % len(REFUSALS)])
    for code in REFUSALS:
        yield Fault("copy_file_range", 1, "errno", errno=code, times=0)
    yield Fault("copy_file_range", 1, "short", times=0)


@requirement(
    "CKPT-544",
    "Consolidation MUST give the same files where the system's own copy of a range is refused, cut short or copies "
    "nothing, and MUST raise where it fails.",
)
def test_copies_of_ranges(
    checkpoint: Any, impl: ModuleType, server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, shards = _large_state(), tmp_path / "shards"
    save(checkpoint, state, shards, enable_consolidation=False)
    args = (impl.__name__, str(shards), "{root}/ck")
    crashes = Crashes(server, tmp_path, nothing, programs.consolidate_large, *args)
    count = crashes.record().count("copy_file_range")
    for struck in crashes.struck(_copy_faults(count) if count else ()):
        assert_returned(_outcomes(struck), struck.where)
        assert_same_tensors(_only_file(struck.root / "ck"), state)
    for number in range(1, count + 1):
        short, refused = (
            Fault("copy_file_range", number, "short"),
            Fault("copy_file_range", number + 1, "errno", errno.EXDEV),
        )
        struck = crashes.run(short, refused, where=f"cut short at copy {number}, then refused")
        assert_returned(_outcomes(struck), struck.where)
        assert_same_tensors(_only_file(struck.root / "ck"), state)
    for struck in crashes.struck(Fault("copy_file_range", n, "errno", errno=errno.EIO) for n in range(1, count + 1)):
        _assert_raised(struck, errno.EIO)
        assert_equal(leftovers(struck.root), [], where=struck.where)
    monkeypatch.setattr(os, "copy_file_range", lambda *arguments, **options: 0, raising=False)
    programs.consolidate_large(impl.__name__, str(shards), str(tmp_path / "nothing"))
    assert_same_tensors(_only_file(tmp_path / "nothing"), state)
    monkeypatch.delattr(os, "copy_file_range")
    programs.consolidate_large(impl.__name__, str(shards), str(tmp_path / "absent"))
    assert_same_tensors(_only_file(tmp_path / "absent"), state)


def _only_file(folder: Path) -> State:
    (path,) = folder.glob("*.safetensors")
    found: State = load_file(path)
    return found


class _Stops(DefaultSavePlanner):
    """Ends the save where it is asked for data."""

    def __init__(self, stop: BaseException | None) -> None:
        super().__init__()
        self.stop = stop

    def resolve_data(self, write_item: Any) -> Any:
        if self.stop is not None:
            raise self.stop
        return super().resolve_data(write_item)


class _Unsaid:
    """A state that ends the save when it is asked for."""

    def __init__(self, stop: BaseException | None) -> None:
        self.stop = stop

    def state_dict(self) -> dict[str, Any]:
        if self.stop is not None:
            raise self.stop
        return {"x": torch.ones(2)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def _stopped(rank: Rank, folder: str, kind: type[BaseException], where: str, at: int) -> str:
    """What a rank hears of a save that is stopped on one: the names of all errors inside the one that is raised."""
    checkpoint = rank.component("checkpoint")
    stop = kind("stop") if rank.rank == at else None

    class Writer(checkpoint.HuggingFaceStorageWriter):  # type: ignore[misc, name-defined]
        def arranged(self, planner: Any) -> Any:
            if where == "arrangement" and stop is not None:
                raise stop
            return super().arranged(planner)

    def tell(done: int, total: int) -> None:
        if where == "progress" and stop is not None:
            raise stop

    # Ranks that wait for one that is gone give up: a comparison tells it.
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=5))
    state = {f"r{rank.rank}": torch.ones(1000), "both": torch.ones(3)}
    options = {"progress": tell, "check_replicas": where == "replicas", "process_group": group, "block_bytes": 64}
    try:
        if where == "a state":
            model = torch.nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            given = {"states": {"s": _Unsaid(stop)}, "process_group": group}
            checkpoint.save_training(folder, model, optimizer, 1, **given)
        else:
            planner = _Stops(stop if where in ("data", "replicas") else None)
            dcp.save(state, storage_writer=Writer(folder, **options), planner=planner)
    except BaseException as error:
        return " ".join(type(each).__name__ for each in errors_inside(error))
    return "no error"


@requirement(
    "CKPT-686",
    "What ends a program while data is written, raised by progress or a planner on one rank, MUST be raised there and "
    "told to every other rank at once, and MUST leave nothing, as any error does.",
)
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize(("where", "at"), [("progress", 0), ("data", 1)])
def test_stopped(rank_pool: Any, tmp_path: Path, kind: type[BaseException], where: str, at: int) -> None:
    _assert_told(rank_pool, tmp_path, kind, where, at)


@requirement(
    "CKPT-691",
    "What ends a program before data is written, while replicas are compared, a save is arranged or a state is asked, "
    "MUST be raised on its rank and told to every other rank at once, and MUST leave nothing.",
)
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize(("where", "at"), [("replicas", 1), ("arrangement", 0), ("a state", 1)])
def test_stopped_before(rank_pool: Any, tmp_path: Path, kind: type[BaseException], where: str, at: int) -> None:
    _assert_told(rank_pool, tmp_path, kind, where, at)


def _assert_told(rank_pool: Any, tmp_path: Path, kind: type[BaseException], where: str, at: int) -> None:
    said = rank_pool.run(_stopped, 2, str(tmp_path / "ck"), kind, where, at, timeout_s=60)
    for rank, names in enumerate(said):
        assert_equal(kind.__name__ in names, True, where=f"rank {rank}: what is told in {names}")
        assert_equal("DistributedError" in said[1 - at], True, where=f"the other rank: {said[1 - at]}")
    assert_equal(leftovers(tmp_path), [], where="what is left")
