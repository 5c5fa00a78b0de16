"""A held call tells the two ways of making it apart: with the interpreter's lock given up, and with the lock kept."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.provers.faults import Fault, FaultError, FaultServer, letting_go, run_program, why_no_shim

pytestmark = pytest.mark.skipif(why_no_shim() is not None, reason=str(why_no_shim()))

# Long enough for a thread to be scheduled on any machine; no right program ever waits for it.
_LONG_S = 20.0
# A thread that is shut out never runs, so a short limit changes no verdict.
_SHORT_S = 0.2


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer(preload=("pytest", __name__)) as running:
        yield running


def _write(path: str, library: str | None, count: int) -> list[tuple[int, int]]:
    """(result, errno) of each ``pwrite``: by ``os``, or by a ctypes library that gives the lock up or keeps it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    found = []
    with letting_go():
        for number in range(count):
            if library is None:
                found.append((os.pwrite(descriptor, b"12345678", 8 * number), 0))
                continue
            write = getattr(ctypes, library)(None, use_errno=True).pwrite
            write.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_long]
            found.append((write(descriptor, b"12345678", 8, 8 * number), ctypes.get_errno()))
    os.close(descriptor)
    return found


@pytest.mark.parametrize("library", [None, "CDLL"])
def test_a_call_without_the_lock_is_let_go(server: FaultServer, tmp_path: Path, library: str | None) -> None:
    faults = [Fault("pwrite", 1, "hold", times=0, delay_s=_LONG_S)]
    outcome = server.run_forked(_write, str(tmp_path / "f"), library, 50, root=tmp_path, faults=faults)
    assert outcome.value() == [(8, 0)] * 50
    assert len(outcome.trace.struck) == 50
    assert outcome.finished_s < _LONG_S


def test_a_call_with_the_lock_fails_at_its_limit(server: FaultServer, tmp_path: Path) -> None:
    faults = [Fault("pwrite", 2, "hold", delay_s=_SHORT_S)]
    outcome = server.run_forked(_write, str(tmp_path / "f"), "PyDLL", 3, root=tmp_path, faults=faults)
    assert [result for result, _ in outcome.value()] == [8, -1, 8]
    assert [event.errno for event in outcome.trace.struck] == [errno.ETIMEDOUT]
    assert (tmp_path / "f").read_bytes() == b"12345678" + bytes(8) + b"12345678"


def _let_go_without_calls() -> str:
    with letting_go():
        return "over"


def test_nothing_to_hold_is_no_reason_to_wait(server: FaultServer, tmp_path: Path) -> None:
    assert server.run_forked(_let_go_without_calls, root=tmp_path).value() == "over"


def test_holding_needs_the_shim(tmp_path: Path) -> None:
    with pytest.raises(FaultError, match="not preloaded"), letting_go():
        pass
    with pytest.raises(ValueError, match="only the shim"):
        run_program(["true"], root=tmp_path, faults=[Fault("pwrite", 1, "hold", delay_s=1.0)], via="tracer")
