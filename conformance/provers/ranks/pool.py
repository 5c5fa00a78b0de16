"""A pool of gloo processes, so that a rank that dies, hangs or fails is reported at once and by name.

Started lazily, one crew per world size, each with its own default process group of exactly that size; a crew in which
anything went wrong is torn down and a fresh one serves the next run, since a group that lost a collective midway has no
known state. Workers are forked from a server that has imported torch once.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from conformance.harness.compare import Mismatch
from conformance.harness.planted import active_bug
from conformance.harness.requirements import STEMS
from conformance.provers.ranks import worker as rank_process
from conformance.provers.ranks.errors import RankDied, RankError, RankTimeout, error_of, prefixed
from conformance.provers.ranks.worker import TIMEOUT_MARK, Job, Rank, Report
from conformance.provers.search_path import search_path

__all__ = ["Rank", "RankDied", "RankError", "RankPool", "RankTimeout"]

_WORLD_SIZE_MAX = 4
# An optimizer imports the compiler at its first step. Nothing here starts a thread or looks for a device.
_PRELOADED = ("torch.distributed.checkpoint", "torch.distributed.tensor", "torch._dynamo", "hypothesis")
# Of our own packages that is known, too; a crew that follows a failure does not import them again.
_OURS = ("refimpl", "fastimpl")
# After a first failure the others get this long: a failing worker leaves the group, which ends its peers' collectives.
_FAILURE_GRACE_S = 2.0
# Importing torch on a loaded machine is slow; it must not eat the timeout of the first call.
_STARTUP_S = 120.0
# A worker ends itself at the timeout, with its stacks; only one that is stopped or deep in the kernel needs this.
_TIMEOUT_GRACE_S = 5.0


class _Worker:
    """One process, its pipe and its output."""

    def __init__(self, rank: int, world_size: int, folder: Path, implementation: str, device: str) -> None:
        context = get_context("forkserver")
        self.rank = rank
        self.log_path = folder / f"rank{rank}.log"
        self.log_path.touch()
        self._log = self.log_path.open("rb")
        self._text = ""
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=rank_process.main,
            args=(theirs, rank, world_size, str(folder / "store"), str(self.log_path), implementation, device),
            daemon=True,
            name=f"twinproof-rank-{rank}-of-{world_size}",
        )
        self.process.start()
        theirs.close()

    def take_report(self) -> Report | None:
        """The answer, if there is one; None also after the last one of a worker that ended."""
        if not self.connection.poll():
            return None
        try:
            report = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            # The pipe closes a moment before the process is reaped.
            self.process.join(_FAILURE_GRACE_S)
            return None
        assert isinstance(report, Report)
        return report

    def output(self) -> str:
        """What it has printed since the last :meth:`take_output`."""
        self._text += self._log.read().decode(errors="replace")
        return self._text

    def take_output(self) -> str:
        text, self._text = self.output(), ""
        return text

    def close(self) -> None:
        self.connection.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self._log.close()


def _components(implementation: str) -> list[str]:
    return [f"{implementation}.{stem}" for stem in STEMS] if implementation in _OURS else []


def _start_server(implementation: str, empty: Path) -> None:
    """Start the server that workers are forked from, if none runs. ``empty`` has no packages."""
    # Without effect once a server runs; workers import what it lacks.
    get_context("forkserver").set_forkserver_preload([*_PRELOADED, rank_process.__name__, *_components(implementation)])
    before, here = os.environ.get("PYTHONPATH"), os.open(".", os.O_RDONLY)
    os.environ["PYTHONPATH"] = search_path()
    try:
        # Before Python 3.13 it looks into the folder that it begins in first of all. Workers come back from there.
        os.chdir(empty)
        forkserver.ensure_running()
    finally:
        os.fchdir(here)
        os.close(here)
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class _Crew:
    """The workers of one world size."""

    def __init__(self, world_size: int, implementation: str, device: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="twinproof-ranks-")
        folder = Path(self._folder.name)
        _start_server(implementation, folder)
        self._workers = [_Worker(rank, world_size, folder, implementation, device) for rank in range(world_size)]
        try:
            self._answers(_STARTUP_S)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._folder.cleanup()

    def run(self, job: Job) -> list[Any]:
        """The results by rank; the caller discards the crew when this raises."""
        message = pickle.dumps(job)
        for worker in self._workers:
            worker.connection.send_bytes(message)
        return self._answers(job.timeout_s)

    def _answers(self, timeout_s: float) -> list[Any]:
        try:
            reports = self._collect(timeout_s)
        finally:
            for worker in self._workers:
                sys.stdout.write(prefixed(worker.rank, worker.take_output()))
        error = error_of(reports)
        if error is not None:
            raise error
        return [pickle.loads(reports[worker.rank].result) for worker in self._workers]

    def _collect(self, timeout_s: float) -> dict[int, Report]:
        started = time.monotonic()
        deadline = started + timeout_s + _TIMEOUT_GRACE_S
        pending = {worker.rank: worker for worker in self._workers}
        reports: dict[int, Report] = {}
        failed = False
        while pending:
            handles = [handle for worker in pending.values() for handle in (worker.connection, worker.process.sentinel)]
            if not wait(handles, timeout=max(0.0, deadline - time.monotonic())):
                if failed:
                    break
                raise _timeout(timeout_s, pending, reports)
            for rank, worker in list(pending.items()):
                report = worker.take_report()
                if report is None:
                    if worker.process.is_alive():
                        continue
                    if time.monotonic() - started >= timeout_s and TIMEOUT_MARK in worker.output():
                        raise _timeout(timeout_s, pending, reports)
                    raise _died(worker, reports)
                reports[rank] = report
                del pending[rank]
                if report.failure is not None and not failed:
                    failed, deadline = True, min(deadline, time.monotonic() + _FAILURE_GRACE_S)
        return reports


def _died(worker: _Worker, reports: dict[int, Report]) -> BaseException:
    first = error_of(reports)
    if isinstance(first, Mismatch | pytest.skip.Exception):
        # The verdict came before the process ended; a crash of a peer that lost its group changes nothing about it.
        return first
    worker.process.join()
    code = worker.process.exitcode
    lines = [f"[rank {worker.rank}] died with exit code {code} and no answer"]
    lines += [prefixed(worker.rank, worker.output()[-2000:]), *([] if first is None else [str(first)])]
    return RankDied("\n".join(lines).rstrip(), rank=worker.rank, exit_code=code, errors=getattr(first, "errors", None))


def _timeout(timeout_s: float, pending: dict[int, _Worker], reports: dict[int, Report]) -> RankTimeout:
    lines = [f"no answer within {timeout_s} s from ranks {sorted(pending)}; their stacks:"]
    for rank, worker in pending.items():
        # Each ends itself at the same moment as the one that was seen first, or is past ending itself.
        worker.process.join(_FAILURE_GRACE_S)
        lines.append(prefixed(rank, worker.output()))
    first = error_of(reports)
    return RankTimeout("\n".join([*lines, *([] if first is None else [str(first)])]).rstrip())


class RankPool:
    """Runs module-level functions on ``world_size`` processes; a context manager.

    Args:
        implementation: the module under test, handed to every function as ``rank.implementation``.
        world_size_max: the largest world that may be asked for.
        device: handed to every function as ``rank.device``.
    """

    def __init__(self, implementation: str, *, world_size_max: int = _WORLD_SIZE_MAX, device: str = "cpu") -> None:
        self._implementation, self._world_size_max, self._device = implementation, world_size_max, device
        self._crews: dict[int, _Crew] = {}

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """Call ``function(rank, *args, **kwargs)`` on every rank at once; the results by rank.

        The function is pickled by reference; arguments and results by value. A planted bug that is active here is
        active there for the duration of the call. What workers print appears on stdout, prefixed by ``[rank k]``.

        Raises:
            Mismatch: when the first failing rank's comparison did not hold.
            RankError: when ranks raised anything else; ``errors`` has them all.
            RankDied: as soon as a worker ends without an answer.
            RankTimeout: after ``timeout_s`` seconds, with the stacks of each busy rank.
        """
        if not 1 <= world_size <= self._world_size_max:
            raise ValueError(f"world_size must be 1 to {self._world_size_max}, got {world_size}")
        active = active_bug()
        job = Job(
            payload=pickle.dumps((function, args, kwargs)),
            sys_path=list(sys.path),
            timeout_s=timeout_s,
            planted=None if active is None else (active[0], active[1].id),
        )
        crew = self._crews.get(world_size)
        if crew is None:
            crew = self._crews[world_size] = _Crew(world_size, self._implementation, self._device)
        try:
            return crew.run(job)
        except BaseException:
            self._crews.pop(world_size).close()
            raise

    def close(self) -> None:
        """End all workers."""
        while self._crews:
            self._crews.popitem()[1].close()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
