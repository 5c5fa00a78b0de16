"""The fault harness strikes exactly the call that was named, and reports exactly what became of the process."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.harness.planted import PlantedBug, activate, swap
from conformance.provers.faults import (
    READ_CALLS,
    Fault,
    FaultError,
    FaultServer,
    Session,
    build_shim,
    run_program,
    why_no_shim,
    why_no_tracer,
)

pytestmark = pytest.mark.skipif(why_no_shim() is not None, reason=str(why_no_shim()))
needs_tracer = pytest.mark.skipif(why_no_tracer() is not None, reason=str(why_no_tracer()))
VIAS = ["shim", pytest.param("tracer", marks=needs_tracer)]


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer("some.module", preload=("pytest", "torch.distributed", __name__)) as running:
        yield running


def _write_parts(path: str, count: int, size: int = 10) -> list[int]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    done = [os.write(descriptor, bytes([65 + number % 26]) * size) for number in range(count)]
    os.close(descriptor)
    return done


def _write_vector(path: str) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    done = os.pwritev(descriptor, [b"a" * 10, b"b" * 10, b"c" * 4], 0)
    os.close(descriptor)
    return done


def _write_one_part(path: str) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    done = os.pwritev(descriptor, [b"a" * 10], 5)
    os.close(descriptor)
    return done


def _write_in_threads(folder: str, count: int) -> None:
    paths = [os.path.join(folder, str(number)) for number in range(count)]
    threads = [threading.Thread(target=_write_parts, args=(path, 5)) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _fork_and_write(folder: str) -> None:
    pid = os.fork()
    if pid == 0:
        _write_parts(os.path.join(folder, "child"), 3)
        os._exit(0)
    os.waitpid(pid, 0)
    _write_parts(os.path.join(folder, "parent"), 3)


def _write_by_rank(rank: Any, folder: str) -> int:
    import torch
    import torch.distributed as dist

    _write_parts(os.path.join(folder, f"rank{rank.rank}"), 4)
    total = torch.ones(1)
    dist.all_reduce(total, group=rank.group)
    return int(total.item()) + 10 * int(rank.world_size)


def _wait_for_ever() -> None:
    threading.Event().wait()


def _raise_with_cause() -> None:
    try:
        os.open("/nowhere/at/all", os.O_RDONLY)
    except OSError as error:
        raise ValueError("outer") from error


def _end_by_itself() -> None:
    os._exit(7)


_VALUE = 1
_BUG = PlantedBug("toy", "A value is wrong.", ("CKPT-300",), "some.module", lambda: swap(f"{__name__}:_VALUE", 2))
PLANTED = (_BUG,)


def _value() -> int:
    return _VALUE


@pytest.mark.parametrize("via", VIAS)
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_kill_strikes_before_exactly_the_nth_call(server: FaultServer, tmp_path: Path, nth: int, via: Any) -> None:
    faults = [Fault("write", nth, "kill")]
    outcome = server.run_forked(_write_parts, str(tmp_path / "f"), 5, root=tmp_path, faults=faults, via=via)
    assert outcome.killed
    assert (tmp_path / "f").stat().st_size == 10 * (nth - 1)
    with pytest.raises(FaultError, match="killed=True"):
        outcome.value()


@pytest.mark.parametrize("via", VIAS)
def test_a_torn_write_leaves_half_and_kills(server: FaultServer, tmp_path: Path, via: Any) -> None:
    faults = [Fault("write", 2, "torn")]
    outcome = server.run_forked(_write_parts, str(tmp_path / "f"), 5, root=tmp_path, faults=faults, via=via)
    assert outcome.killed
    assert (tmp_path / "f").stat().st_size == 15
    assert outcome.trace.struck[0].result == 5


@pytest.mark.parametrize("via", VIAS)
def test_a_short_write_reports_what_it_wrote(server: FaultServer, tmp_path: Path, via: Any) -> None:
    faults = [Fault(("write", "pwritev"), 1, "short", times=0)]
    path = str(tmp_path / "f")
    assert server.run_forked(_write_parts, path, 3, root=tmp_path, faults=faults, via=via).value() == [5, 5, 5]
    assert (tmp_path / "f").read_bytes() == b"AAAAABBBBBCCCCC"
    vector = server.run_forked(_write_vector, str(tmp_path / "v"), root=tmp_path, faults=faults, via=via)
    assert 0 < vector.value() < 24
    assert (tmp_path / "v").stat().st_size == vector.value()
    single = server.run_forked(_write_one_part, str(tmp_path / "w"), root=tmp_path, faults=faults, via=via)
    assert single.value() == 5
    assert (tmp_path / "w").read_bytes() == b"\0" * 5 + b"a" * 5


def _read_parts(path: str) -> list[Any]:
    with open(path, "wb") as made:
        made.write(bytes(range(24)))
    descriptor = os.open(path, os.O_RDONLY)
    parts = bytearray(16), bytearray(8)
    done = [os.read(descriptor, 10), os.pread(descriptor, 8, 4), os.preadv(descriptor, parts, 0), bytes(parts[0])]
    done += [os.readv(descriptor, [parts[1]]), bytes(parts[1])]
    os.close(descriptor)
    return done


@pytest.mark.parametrize("via", VIAS)
def test_a_short_read_gives_the_first_half(server: FaultServer, tmp_path: Path, via: Any) -> None:
    faults = [Fault(READ_CALLS, 1, "short", times=0)]
    outcome = server.run_forked(_read_parts, str(tmp_path / "f"), root=tmp_path, faults=faults, via=via)
    read, placed, count, first, behind, last = outcome.value()
    assert (read, placed) == (bytes(range(5)), bytes(range(4, 8)))
    # Of a vector the tracer takes half the parts, and the shim half the bytes.
    assert count == (16 if via == "tracer" else 12)
    assert first == bytes(range(count)) + bytes(16 - count)
    assert (behind, last) == (4, bytes(range(5, 9)) + bytes(4))


@pytest.mark.parametrize("via", VIAS)
@pytest.mark.parametrize(("times", "struck"), [(1, 1), (3, 3), (0, 4)])
def test_an_errno_is_raised_as_often_as_asked(
    server: FaultServer, tmp_path: Path, times: int, struck: int, via: Any
) -> None:
    faults = [Fault("open", 2, "errno", errno=errno.EDQUOT, times=times)]
    outcome = server.run_forked(_open_five_times, str(tmp_path), root=tmp_path, faults=faults, via=via)
    assert outcome.value() == [0] + [errno.EDQUOT] * struck + [0] * (4 - struck)
    assert [event.errno for event in outcome.trace.struck] == [errno.EDQUOT] * struck


def _open_five_times(folder: str) -> list[int]:
    codes = []
    for number in range(5):
        try:
            os.close(os.open(os.path.join(folder, str(number)), os.O_WRONLY | os.O_CREAT))
            codes.append(0)
        except OSError as error:
            codes.append(error.errno or -1)
    return codes


@pytest.mark.parametrize("via", VIAS)
def test_an_interrupted_call_is_repeated_by_python(server: FaultServer, tmp_path: Path, via: Any) -> None:
    faults = [Fault("write", 1, "eintr")]
    outcome = server.run_forked(_write_parts, str(tmp_path / "f"), 2, root=tmp_path, faults=faults, via=via)
    assert outcome.value() == [10, 10]
    assert [event.errno for event in outcome.trace.only("write")] == [errno.EINTR, 0, 0]


@pytest.mark.parametrize("via", VIAS)
def test_a_delay_holds_the_call_up(server: FaultServer, tmp_path: Path, via: Any) -> None:
    faults = [Fault("write", 1, "delay", delay_s=0.2)]
    outcome = server.run_forked(_write_parts, str(tmp_path / "f"), 2, root=tmp_path, faults=faults, via=via)
    assert outcome.value() == [10, 10]
    assert outcome.finished_s >= 0.2


@pytest.mark.parametrize("via", VIAS)
def test_only_paths_under_the_root_with_the_suffix_count(server: FaultServer, tmp_path: Path, via: Any) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in-not").mkdir()
    faults = [Fault("write", 1, "errno", path_suffix=".b")]
    for name in ("in-not/f.b", "in/f.a"):
        assert server.run_forked(
            _write_parts, str(tmp_path / name), 1, root=tmp_path / "in", faults=faults, via=via
        ).value() == [10]
    outcome = server.run_forked(_write_parts, str(tmp_path / "in/f.b"), 1, root=tmp_path / "in", faults=faults, via=via)
    assert isinstance(outcome.error, OSError)
    assert outcome.error.errno == errno.ENOSPC


@pytest.mark.parametrize("via", VIAS)
def test_calls_of_all_threads_and_children_are_counted_once(server: FaultServer, tmp_path: Path, via: Any) -> None:
    outcome = server.run_forked(_write_in_threads, str(tmp_path), 4, root=tmp_path, via=via)
    assert outcome.value() is None
    assert outcome.trace.count("write") == 20
    assert len({event.tid for event in outcome.trace}) == 4
    assert len({event.begin for event in outcome.trace}) == len(outcome.trace)
    forked = server.run_forked(_fork_and_write, str(tmp_path), root=tmp_path, via=via)
    assert len({event.pid for event in forked.trace.only("write")}) == 2
    faults = [Fault("write", 4, "kill_group")]
    assert server.run_forked(_fork_and_write, str(tmp_path), root=tmp_path, faults=faults, via=via).killed


@pytest.mark.parametrize("via", VIAS)
def test_ranks_share_a_group_a_clock_and_a_counter(server: FaultServer, tmp_path: Path, via: Any) -> None:
    run = server.run_ranks_forked(_write_by_rank, 2, str(tmp_path), root=tmp_path, via=via)
    assert run.values() == [22, 22]
    assert [run.trace.count("write", rank=rank) for rank in (0, 1)] == [4, 4]
    faults = [Fault("write", 3, "kill", rank=1)]
    broken = server.run_ranks_forked(_write_by_rank, 2, str(tmp_path), root=tmp_path, faults=faults, via=via)
    assert broken[1].killed
    assert broken.trace.count("write", rank=1) == 3
    assert isinstance(broken[0].error, RuntimeError)
    assert broken[0].finished_s < 30


def test_a_process_that_hangs_raises_or_leaves_is_told_apart(server: FaultServer, tmp_path: Path) -> None:
    hanging = server.run_forked(_wait_for_ever, root=tmp_path, timeout_s=0.5)
    assert hanging.timed_out
    assert not hanging.killed
    assert "_wait_for_ever" in hanging.log
    raising = server.run_forked(_raise_with_cause, root=tmp_path)
    assert isinstance(raising.error, ValueError)
    assert isinstance(raising.error.__cause__, FileNotFoundError)
    leaving = server.run_forked(_end_by_itself, root=tmp_path)
    assert (leaving.exit_code, leaving.killed, leaving.timed_out, leaving.error) == (7, False, False, None)


@pytest.mark.parametrize("via", VIAS)
def test_unmodified_programs_are_armed_from_outside(tmp_path: Path, via: Any) -> None:
    command = ["/bin/sh", "-c", 'echo one > "$0/a"; echo two > "$0/b"; echo done', str(tmp_path)]
    clean = run_program(command, root=tmp_path, via=via)
    assert (clean.result, clean.exit_code) == ("done\n", 0)
    assert [os.path.basename(event.path) for event in clean.trace.only("write")] == ["a", "b"]
    faults = [Fault("write", 2, "kill")]
    assert run_program(command, root=tmp_path, faults=faults, via=via).killed
    assert (tmp_path / "b").read_text() == ""


def test_nothing_is_intercepted_before_arming(tmp_path: Path) -> None:
    shim = {"LD_PRELOAD": str(build_shim())}
    with Session(tmp_path, [Fault("open", 1, "kill", times=0)]) as session:
        command = [sys.executable, "-c", "import sys; open(sys.argv[1], 'w').close()", str(tmp_path / "f")]
        subprocess.run(command, env={**os.environ, **shim}, check=True, timeout=60)
        assert len(session.trace()) == 0


def test_a_planted_bug_is_planted_there_too(server: FaultServer, tmp_path: Path) -> None:
    assert server.run_forked(_value, root=tmp_path).value() == 1
    with activate(__name__, _BUG):
        assert server.run_forked(_value, root=tmp_path).value() == 2


def test_a_trace_with_lost_calls_is_refused(server: FaultServer, tmp_path: Path) -> None:
    with pytest.raises(FaultError, match="places"):
        server.run_forked(_write_parts, str(tmp_path / "f"), 9000, 1, root=tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"call": "wirte"},
        {"call": ()},
        {"nth": 0},
        {"action": "explode"},
        {"times": -1},
        {"delay_s": -0.1},
        {"action": "hold"},
    ],
)
def test_a_fault_that_can_never_strike_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Fault(**{"call": "write", "nth": 1, "action": "kill", **wrong})


def test_a_server_that_cannot_start_or_ends_says_so(tmp_path: Path) -> None:
    with pytest.raises(FaultError, match="no_such_module"):
        FaultServer(preload=("no_such_module",))
    with FaultServer() as running:
        os.kill(running._process.pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(FaultError, match="ended"):
            running.run_forked(_end_by_itself, root=tmp_path)
        assert time.monotonic() - started < 10
