"""Messages between a test and its fork server; plain data, so that both sides can be read on their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from conformance.provers.ranks.worker import Failure

__all__ = ["Answer", "ForkedReport", "ForkedRun", "Via"]

Via = Literal["shim", "tracer"]


@dataclass(frozen=True)
class ForkedRun:
    """One request: ``payload`` is the pickled (function, args), run in as many children as there are ``labels``.

    ``store`` is the rendezvous file of the children's process group, None for a single process without one.
    ``tracer`` is the tracer program when faults come from it rather than from the shim.
    """

    payload: bytes
    sys_path: list[str]
    labels: tuple[int, ...]
    session: str
    folder: str
    store: str | None
    tracer: str | None
    implementation: str
    timeout_s: float
    planted: tuple[str, str] | None


@dataclass(frozen=True)
class ForkedReport:
    """What a child says about itself, if it lives to say it."""

    result: bytes
    failure: Failure | None


@dataclass(frozen=True)
class Answer:
    """What the server says about one child: its report if any, its wait status, and whether it ran out of time."""

    report: bytes
    status: int
    timed_out: bool
    finished_s: float
