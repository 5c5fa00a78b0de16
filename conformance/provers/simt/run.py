"""Runs a program of proofs under many schedules, and reads its verdicts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.provers.simt.build import SimtError

__all__ = ["KINDS", "POLICIES", "Fault", "Place", "Verdict", "prove", "replay"]

POLICIES = ("random", "priority", "exhaustive")
KINDS = (
    "race",
    "out-of-bounds",
    "misaligned",
    "uninitialized",
    "not-device-memory",
    "mask",
    "returned-lane",
    "shuffle-outside-mask",
    "barrier-divergence",
    "deadlock",
    "launch-limit",
    "no-end",
    "mixed-atomics",
    "misuse",
    "wrong-result",
    "schedule-dependence",
)  # fmt: skip
_FOUND, _TIMEOUT_S = 1, 540


@dataclass(frozen=True)
class Place:
    """A thread at a line of a kernel; ``line`` is 0 where it has touched nothing yet."""

    what: str
    block: int
    thread: int
    file: str
    line: int


@dataclass(frozen=True)
class Fault:
    """What was wrong in ``count`` runs. ``replay`` names the schedule of the first."""

    kind: str
    kernel: str
    message: str
    replay: str
    count: int
    places: tuple[Place, ...]

    def lines(self) -> list[str]:
        """The source line of each place, stripped."""
        texts = [Path(place.file).read_text(encoding="utf-8").splitlines() for place in self.places if place.line]
        numbers = [place.line for place in self.places if place.line]
        return [text[number - 1].strip() for text, number in zip(texts, numbers, strict=True)]

    def __str__(self) -> str:
        where = "".join(f"\n  {p.what}, block {p.block} thread {p.thread}, {p.file}:{p.line}" for p in self.places)
        return f"{self.kind} in {self.kernel}: {self.message}{where}\n  {self.count} times; replay {self.replay}"


@dataclass(frozen=True)
class Verdict:
    """What was seen of one proof. ``points`` are scheduling points, ``pruned`` runs that another run covers."""

    name: str
    runs: int
    points: int
    pruned: int
    is_complete: bool
    seconds: float
    faults: tuple[Fault, ...]


def _verdict(line: str) -> Verdict:
    words = json.loads(line)
    faults = []
    for fault in words.pop("faults"):
        places = tuple(Place(**place) for place in fault.pop("places"))
        faults.append(Fault(**fault, places=places))
    return Verdict(**words, faults=tuple(faults))


def _run(program: Path, arguments: Sequence[str]) -> tuple[Verdict, ...]:
    command = [str(program), "--json", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise SimtError(f"{' '.join(command)}: no verdict after {_TIMEOUT_S} s") from error
    if done.returncode not in (0, _FOUND):
        raise SimtError(f"{' '.join(command)}: exit status {done.returncode}, not a verdict: {done.stderr.strip()}")
    verdicts = tuple(_verdict(line) for line in done.stdout.splitlines())
    if any(verdict.faults for verdict in verdicts) != (done.returncode == _FOUND):
        raise SimtError(f"{' '.join(command)}: exit status {done.returncode} does not fit what it printed")
    return verdicts


def prove(
    program: Path,
    *,
    only: str | None = None,
    policies: Sequence[str] = ("random", "priority"),
    case_count: int = 10,
    seed_count: int = 50,
    run_count_max: int = 100_000,
    point_count_max: int = 4_000_000,
    keep_going: bool = False,
) -> tuple[Verdict, ...]:
    """Runs the proofs of ``program``, which :func:`build` made.

    Args:
        program: what to run.
        only: the name of one proof; else all of them.
        policies: of :data:`POLICIES`.
        case_count: how many inputs; a proof draws them from ``trial.random``.
        seed_count: runs of each case under the random policy, and as many under priorities.
        run_count_max: after so many runs of a case an exhaustive search ends, and is not complete.
        point_count_max: a launch with more scheduling points has no end; exhaustively, it is not complete.
        keep_going: whether to go on after the first fault of a proof and count alike ones.

    Raises:
        SimtError: the program ended without a verdict; ValueError: an unknown policy.
    """
    unknown = [policy for policy in policies if policy not in POLICIES]
    if unknown or not policies:
        raise ValueError(f"policies: got {list(policies)}, expected some of {POLICIES}")
    arguments = ["--policies", ",".join(policies), "--cases", str(case_count), "--seeds", str(seed_count)]
    arguments += ["--most-runs", str(run_count_max), "--most-points", str(point_count_max)]
    if only is not None:
        arguments += ["--only", only]
    if keep_going:
        arguments.append("--keep-going")
    return _run(program, arguments)


def replay(program: Path, *, only: str, token: str, point_count_max: int = 4_000_000) -> Verdict:
    """One run of the proof ``only`` under the schedule that ``Fault.replay`` names. Raises SimtError as ``prove``."""
    return _run(program, ["--only", only, "--replay", token, "--most-points", str(point_count_max)])[0]
