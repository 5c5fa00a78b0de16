"""The fork server: torch and the implementation imported once under the preloaded shim, then one fork per run.

A crash test needs hundreds of processes that die; importing torch in each would cost seconds. Every child is the
leader of its own process group, so that a kill, or the clean-up after a time limit, takes what it started with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import io
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from conformance.harness.planted import activate, find_bug
from conformance.provers.faults.protocol import Answer, ForkedReport, ForkedRun
from conformance.provers.ranks.worker import Failure, Rank

__all__ = ["main"]

# A child ends itself at its limit, with its stacks; this is for one that is stopped or deep in the kernel.
_TIMEOUT_GRACE_S = 3.0
_READ_BYTES = 1 << 16


def main(words: Sequence[str]) -> None:
    """Serve until the pipe closes: ``words`` are the descriptor of the pipe, the shim, and the modules to import."""
    connection = Connection(int(words[0]))
    shim = ctypes.CDLL(words[1])
    sys.path[:] = connection.recv()
    try:
        for name in words[2:]:
            importlib.import_module(name)
        _warm_up()
        connection.send(None)
    except BaseException as error:
        connection.send(Failure.of(error))
        return
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            run: ForkedRun = connection.recv()
            connection.send(_serve(run, connection, shim))


def _warm_up() -> None:
    if "torch" in sys.modules:
        import torch

        # A pool of threads would not survive the fork.
        torch.set_num_threads(1)


def _serve(run: ForkedRun, connection: Connection, shim: ctypes.CDLL) -> list[Answer]:
    started = time.monotonic()
    children: dict[int, tuple[int, int]] = {}
    for label in run.labels:
        readable, writable = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            connection.close()
            _become_child(run, label, writable, shim)
        os.close(writable)
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        children[readable] = (label, pid)
    answers: dict[int, Answer] = {}
    texts = dict.fromkeys(children, b"")
    deadline = started + run.timeout_s + _TIMEOUT_GRACE_S
    poll = select.poll()
    for readable in children:
        poll.register(readable)
    while len(answers) < len(children):
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        for readable, _ in ready:
            part = os.read(readable, _READ_BYTES)
            texts[readable] += part
            if not part:
                poll.unregister(readable)
                label, pid = children[readable]
                answers[label] = _reap(pid, texts[readable], started, run, timed_out=False)
        if not ready:
            for readable, (label, pid) in children.items():
                if label not in answers:
                    answers[label] = _reap(pid, texts[readable], started, run, timed_out=True)
    for readable in children:
        os.close(readable)
    return [answers[label] for label in run.labels]


def _reap(pid: int, text: bytes, started: float, run: ForkedRun, *, timed_out: bool) -> Answer:
    finished_s = time.monotonic() - started
    if timed_out:
        _kill_group(pid)
    # What the child started ends with it; until the child is reaped, its group's number is no one else's.
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    _kill_group(pid)
    _, status = os.waitpid(pid, 0)
    # faulthandler ends a child at its limit with status 1, before the child could report.
    timed_out = timed_out or (not text and finished_s >= run.timeout_s)
    return Answer(text, status, timed_out, finished_s)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _become_child(run: ForkedRun, label: int, writable: int, shim: ctypes.CDLL) -> None:
    """Never returns: whatever happens, the server's own code must not go on in a second process."""
    with contextlib.suppress(BaseException):
        os.setpgid(0, 0)
        _redirect_output(os.path.join(run.folder, f"child{label}.log"))
        faulthandler.dump_traceback_later(run.timeout_s, exit=True, file=2)
        report = _run(run, label, shim)
        shim.twinproof_faults_arm(None, 0)
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        sys.stderr.flush()
        with os.fdopen(writable, "wb") as pipe:
            pipe.write(pickle.dumps(report))
    os._exit(0)


def _redirect_output(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), line_buffering=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), line_buffering=True)
    faulthandler.enable(file=2)


def _run(run: ForkedRun, label: int, shim: ctypes.CDLL) -> ForkedReport:
    try:
        sys.path[:] = run.sys_path
        function, args = pickle.loads(run.payload)
        with contextlib.ExitStack() as stack:
            if run.planted is not None:
                module, identifier = run.planted
                stack.enter_context(activate(module, find_bug(module, identifier)))
            if run.store is not None:
                args = (_join_group(run, label), *args)
            _arm(run, label, shim)
            return ForkedReport(pickle.dumps(function(*args)), None)
    except BaseException as error:
        return ForkedReport(b"", Failure.of(error))
    finally:
        shim.twinproof_faults_arm(None, 0)


def _join_group(run: ForkedRun, label: int) -> Rank:
    import torch.distributed as dist

    # Gloo asks the resolver for this host's address, which containers often do not know.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    world_size = len(run.labels)
    limit = timedelta(seconds=run.timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{run.store}", rank=label, world_size=world_size, timeout=limit)
    group = dist.group.WORLD
    assert group is not None
    return Rank(label, world_size, group, run.implementation)


def _arm(run: ForkedRun, label: int, shim: ctypes.CDLL) -> None:
    if run.tracer is None:
        error = shim.twinproof_faults_arm(os.fsencode(run.session), label)
        if error:
            raise OSError(error, os.strerror(error), run.session)
        return
    command: list[Any] = [run.tracer, run.session, str(label), "seize", str(os.getpid())]
    # Its own group, so that a kill of ours does not end the one that has to report it.
    tracer = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert tracer.stdout is not None
    if tracer.stdout.readline() != b"seized\n":
        raise OSError(f"the tracer did not attach: exit code {tracer.wait()}")
    error = shim.twinproof_faults_filter()
    if error:
        raise OSError(error, os.strerror(error), "seccomp")
