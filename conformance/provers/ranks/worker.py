"""What runs inside one process of the rank pool; nothing that happens here may be lost on the way back.

Exceptions travel with their causes when they pickle and as text when they do not. torch's ``CheckpointException`` is a
``BaseException``, so everything is caught. A call that outlives its timeout ends the process from faulthandler's own
thread, which needs no cooperation from Python, after writing every stack.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import os
import pickle
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import pytest

from conformance.harness.devices import place_of, prepare_device
from conformance.harness.implementation import Component, component
from conformance.harness.planted import activate, find_bug

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["TIMEOUT_MARK", "Failure", "Job", "Rank", "RemoteError", "Report", "main"]

# What faulthandler writes before the stacks.
TIMEOUT_MARK = "Timeout ("
# Only bounds a group whose pool vanished; every call has its own, shorter, timeout.
_GROUP_TIMEOUT = timedelta(minutes=10)
_CAUSES_MAX = 8


@dataclass(frozen=True)
class Rank:
    """Who a function of the pool is: ``group`` is the default process group and has exactly ``world_size`` ranks.

    ``device`` names where objects are sent that take a device.
    """

    rank: int
    world_size: int
    group: ProcessGroup
    implementation: str
    device: str = "cpu"

    def component(self, stem: str) -> Component:
        """The component of the implementation under test, as the fixture of that name gives it; skips by name."""
        return component(self.implementation, stem, place_of(self.device, stem))


@dataclass(frozen=True)
class Job:
    """One call. ``payload`` is (function, args, kwargs), pickled apart: an import that fails is that rank's report."""

    payload: bytes
    sys_path: list[str]
    timeout_s: float
    planted: tuple[str, str] | None


class RemoteError(Exception):
    """Stands for an exception of a rank that does not survive pickling; its text is ``Type: message``."""


@dataclass(frozen=True)
class Failure:
    """An exception on its way between processes."""

    pickled: bytes | None
    text: str
    traceback_text: str
    cause: Failure | None
    skipped: bool = False

    @staticmethod
    def of(error: BaseException, depth: int = 0) -> Failure:
        """Pack ``error`` and its explicit causes."""
        if isinstance(error, pytest.skip.Exception):
            # pytest pretends that the class lives in builtins, where pickle does not find it.
            return Failure(None, str(error), "", None, skipped=True)
        pickled = None
        with contextlib.suppress(Exception):
            data = pickle.dumps(error)
            if type(pickle.loads(data)) is type(error):
                pickled = data
        inner = error.__cause__
        return Failure(
            pickled=pickled,
            text=f"{type(error).__name__}: {error}",
            traceback_text="".join(traceback.format_exception(error)),
            cause=Failure.of(inner, depth + 1) if inner is not None and depth < _CAUSES_MAX else None,
        )

    def error(self) -> BaseException:
        """The exception again, its causes attached."""
        if self.skipped:
            return pytest.skip.Exception(self.text)
        error: BaseException = RemoteError(self.text) if self.pickled is None else pickle.loads(self.pickled)
        if self.cause is not None:
            error.__cause__ = self.cause.error()
        return error


@dataclass(frozen=True)
class Report:
    """The answer of one rank: a pickled result or a failure, and when, by the clock that all processes share."""

    result: bytes
    failure: Failure | None
    finished_at: float


def main(
    connection: Connection,
    rank: int,
    world_size: int,
    store_path: str,
    log_path: str,
    implementation: str,
    device: str = "cpu",
) -> None:
    """Report the start, then serve jobs until the pool closes the pipe, or until one fails."""
    _redirect_output(log_path)
    # What the server imported stays; a collection need not look at it.
    gc.freeze()
    with contextlib.suppress(EOFError, OSError):
        try:
            me = _join_group(rank, world_size, store_path, implementation, device)
            report = Report(pickle.dumps(None), None, time.monotonic())
        except BaseException as error:
            report = Report(b"", Failure.of(error), time.monotonic())
        connection.send_bytes(pickle.dumps(report))
        while report.failure is None:
            report = _run(me, pickle.loads(connection.recv_bytes()))
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send_bytes(pickle.dumps(report))
    # Leaving at once closes the group's sockets, so that peers in a collective fail now and not at a timeout; no
    # destructor of a broken group gets a chance to hang.
    os._exit(0)


def _redirect_output(log_path: str) -> None:
    descriptor = os.open(log_path, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), line_buffering=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), line_buffering=True)
    faulthandler.enable(file=2)


def _join_group(rank: int, world_size: int, store_path: str, implementation: str, device: str) -> Rank:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # Gloo asks the resolver for this host's address, which containers often do not know.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{store_path}", rank=rank, world_size=world_size, timeout=_GROUP_TIMEOUT
    )
    group = dist.group.WORLD
    assert group is not None
    prepare_device(device, implementation)
    return Rank(rank, world_size, group, implementation, device)


def _run(me: Rank, job: Job) -> Report:
    faulthandler.dump_traceback_later(job.timeout_s, exit=True, file=2)
    try:
        sys.path += [entry for entry in job.sys_path if entry not in sys.path]
        function, args, kwargs = pickle.loads(job.payload)
        with contextlib.ExitStack() as stack:
            if job.planted is not None:
                module, identifier = job.planted
                stack.enter_context(activate(module, find_bug(module, identifier)))
            result = pickle.dumps(function(me, *args, **kwargs))
    except BaseException as error:
        return Report(b"", Failure.of(error), time.monotonic())
    else:
        return Report(result, None, time.monotonic())
    finally:
        faulthandler.cancel_dump_traceback_later()
