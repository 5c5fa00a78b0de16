"""Runs functions in forked processes under faults, and programs of any kind under the shim or the tracer."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from conformance.harness.planted import active_bug
from conformance.provers.faults.build import build_shim, build_tracer
from conformance.provers.faults.model import Fault, FaultError, Outcome, Trace
from conformance.provers.faults.protocol import Answer, ForkedReport, ForkedRun, Via
from conformance.provers.faults.session import Session
from conformance.provers.search_path import search_path

__all__ = ["FaultServer", "RankOutcomes", "run_program"]

# As ``-m`` would start it, but with the search path of this process.
_LAUNCH = (
    "import os, sys; sys.path[:] = sys.argv[1].split(os.pathsep); "
    "from conformance.provers.faults import server; server.main(sys.argv[2:])"
)
_STARTUP_S = 120.0
# Beyond the children's own limit and the server's grace after it.
_ANSWER_GRACE_S = 15.0


@dataclass(frozen=True)
class RankOutcomes:
    """What became of each rank, by rank, and the calls of all of them in one order."""

    outcomes: tuple[Outcome, ...]
    trace: Trace

    def __getitem__(self, rank: int) -> Outcome:
        return self.outcomes[rank]

    def values(self) -> list[Any]:
        """The results by rank; raises the first rank's error instead."""
        return [outcome.value() for outcome in self.outcomes]


class FaultServer:
    """A process that has imported the implementation under the shim, and forks; a context manager.

    Args:
        implementation: handed to rank functions as ``rank.implementation``.
        preload: modules that children find imported.
    """

    def __init__(self, implementation: str = "", preload: Sequence[str] = ()) -> None:
        self.implementation = implementation
        self._folder = tempfile.TemporaryDirectory(prefix="twinproof-faults-")
        ours, theirs = socket.socketpair()
        shim = str(build_shim())
        # Threads of a numerical library would not survive the fork.
        environment = {**os.environ, "LD_PRELOAD": _preload(), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = search_path()
        with theirs:
            command = [sys.executable, "-c", _LAUNCH, search_path(), str(theirs.fileno()), shim, *preload]
            self._process = subprocess.Popen(command, env=environment, pass_fds=(theirs.fileno(),))
        self._connection = Connection(ours.detach())
        try:
            failure = self._ask(list(sys.path), _STARTUP_S)
            if failure is not None:
                raise FaultError(f"the fork server cannot start:\n{failure.traceback_text}") from failure.error()
        except BaseException:
            self.close()
            raise

    def run_forked(
        self,
        function: Callable[..., Any],
        *args: Any,
        root: str | os.PathLike[str],
        faults: Sequence[Fault] = (),
        rank: int = 0,
        timeout_s: float = 30.0,
        via: Via = "shim",
    ) -> Outcome:
        """Call ``function(*args)`` in a fresh process; calls on paths under ``root`` count and meet ``faults``.

        The function is pickled by reference, arguments and result by value. ``rank`` is the label in the trace. A
        planted bug that is active here is active there.

        Raises:
            FaultError: the server is gone, or calls were lost from the trace.
            ValueError: a fault that the tracer cannot inject.
        """
        return self._run(function, args, (rank,), root, faults, timeout_s, via, grouped=False).outcomes[0]

    def run_ranks_forked(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        root: str | os.PathLike[str],
        faults: Sequence[Fault] = (),
        timeout_s: float = 60.0,
        via: Via = "shim",
    ) -> RankOutcomes:
        """Call ``function(rank, *args)`` in ``world_size`` fresh processes with a gloo group of their own.

        ``rank`` is a :class:`conformance.harness.Rank`. No rank is waited for longer than ``timeout_s`` and a few
        seconds.
        """
        return self._run(function, args, tuple(range(world_size)), root, faults, timeout_s, via, grouped=True)

    def _run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        labels: tuple[int, ...],
        root: str | os.PathLike[str],
        faults: Sequence[Fault],
        timeout_s: float,
        via: Via,
        *,
        grouped: bool,
    ) -> RankOutcomes:
        _check(via, faults)
        bug = active_bug()
        with Session(root, faults) as session, tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            run = ForkedRun(
                payload=pickle.dumps((function, args)),
                sys_path=list(sys.path),
                labels=labels,
                session=str(session.path),
                folder=folder,
                store=os.path.join(folder, "store") if grouped else None,
                tracer=str(build_tracer()) if via == "tracer" else None,
                implementation=self.implementation,
                timeout_s=timeout_s,
                planted=None if bug is None else (bug[0], bug[1].id),
            )
            answers = self._ask(run, timeout_s + _ANSWER_GRACE_S)
            trace = session.trace()
            logs = [Path(folder, f"child{label}.log") for label in labels]
            outcomes = tuple(_outcome(answer, log, trace) for answer, log in zip(answers, logs, strict=True))
        return RankOutcomes(outcomes, trace)

    def _ask(self, question: Any, timeout_s: float) -> Any:
        try:
            self._connection.send(question)
            if self._connection.poll(timeout_s):
                return self._connection.recv()
        except (EOFError, ConnectionError):
            raise FaultError(f"the fork server ended with exit code {self._process.wait()}") from None
        self.close()
        raise FaultError(f"the fork server gave no answer within {timeout_s} s")

    def close(self) -> None:
        """End the server. Safe to call twice."""
        self._connection.close()
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> FaultServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _preload() -> str:
    # Behind what is preloaded already: a sanitizer's runtime must come first.
    return ":".join(filter(None, (os.environ.get("LD_PRELOAD"), str(build_shim()))))


def _check(via: Via, faults: Sequence[Fault]) -> None:
    # One tracer serves all threads: a call that it held would hold the thread that is to release it.
    if via == "tracer" and any(fault.action == "hold" for fault in faults):
        raise ValueError("only the shim can hold calls; got hold via the tracer")


def _outcome(answer: Answer, log: Path, trace: Trace) -> Outcome:
    code = os.waitstatus_to_exitcode(answer.status)
    report: ForkedReport | None = pickle.loads(answer.report) if answer.report else None
    failure = None if report is None else report.failure
    return Outcome(
        result=None if report is None or failure is not None else pickle.loads(report.result),
        error=None if failure is None else failure.error(),
        killed=code == -signal.SIGKILL and not answer.timed_out,
        exit_code=code,
        timed_out=answer.timed_out,
        finished_s=answer.finished_s,
        log=log.read_text(errors="replace") if log.exists() else "",
        trace=trace,
    )


def run_program(
    command: Sequence[str],
    *,
    root: str | os.PathLike[str],
    faults: Sequence[Fault] = (),
    rank: int = 0,
    timeout_s: float = 60.0,
    via: Via = "shim",
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Run an unmodified program under faults; ``result`` is its standard output as text, ``log`` its standard error.

    Args:
        command: program and arguments.
        root: only calls on paths under this folder count.
        faults: what to inject.
        rank: the label in the trace.
        timeout_s: the program is killed then.
        via: ``shim`` for dynamically linked programs, ``tracer`` for all.
        environment: added to the present one.
    """
    _check(via, faults)
    with Session(root, faults) as session:
        words, extra = list(command), {**os.environ, **(environment or {})}
        if via == "shim":
            extra |= {"LD_PRELOAD": _preload(), "TWINPROOF_FAULTS": str(session.path)}
            extra["TWINPROOF_FAULTS_RANK"] = str(rank)
        else:
            words = [str(build_tracer()), str(session.path), str(rank), "run", *words]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started, timed_out = time.monotonic(), False
        process = subprocess.Popen(words, env=extra, start_new_session=True, **pipes)
        try:
            output, log = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            os.killpg(process.pid, signal.SIGKILL)
            output, log = process.communicate()
        code = process.returncode
        trace = session.trace()
    killed = code == -signal.SIGKILL and not timed_out
    return Outcome(output, None, killed, code, timed_out, time.monotonic() - started, log, trace)
