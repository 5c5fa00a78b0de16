"""The implementations that a page shows side by side, each with its newest state and its runs in order of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from conformance.harness.report import Verdict, verdict
from conformance.harness.requirements import STEMS

__all__ = ["Side", "counts_of", "sides_of", "stems_of"]


@dataclass(frozen=True)
class Side:
    """One implementation.

    Attributes:
        name: of the implementation.
        runs: its reports, the oldest first.
        current: the runs that say what holds now: of each component the newest that ran its requirements, and the
            newest that planted bugs.
        requirements: what these say, by id.
    """

    name: str
    runs: tuple[dict[str, Any], ...]
    current: tuple[dict[str, Any], ...]
    requirements: dict[str, dict[str, Any]]

    @cached_property
    def outcomes(self) -> tuple[dict[str, str], ...]:
        """Of each run, the outcomes of what it did run, by requirement."""
        return tuple(
            {entry["id"]: str(entry["outcome"]) for entry in run["requirements"] if entry["outcome"] != "none"}
            for run in self.runs
        )

    @property
    def label(self) -> str:
        """Name, and version where it has one."""
        version = self.runs[-1]["implementation"]["version"]
        return self.name if version == "unversioned" else f"{self.name} {version}"

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict on the current runs together."""
        statuses = [_status_beside_requirements(run) for run in self.current]
        return verdict({"exit_status": max(statuses), "requirements": [*self.requirements.values()]})

    def areas(self) -> dict[str, str]:
        """What each test module is about."""
        return {module: text for run in self.current for module, text in run.get("areas", {}).items()}


def _status_beside_requirements(run: dict[str, Any]) -> int:
    """The exit status of a run, 0 where its own requirements say why it was 1: newer runs may have mended those."""
    found = verdict(run)
    status = int(run.get("exit_status", 0))
    return 0 if status == 5 or (status == 1 and found.is_of_requirements) else status


def stems_of(requirements: Sequence[dict[str, Any]]) -> list[str]:
    """The components of some requirements, in the suite's order, then others."""
    found = {entry["stem"] for entry in requirements}
    return [stem for stem in STEMS if stem in found] + sorted(found - set(STEMS))


def sides_of(reports: Sequence[dict[str, Any]]) -> list[Side]:
    """The sides in order of first appearance."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for report in reports:
        runs = by_name.setdefault(report["implementation"]["name"], [])
        # One run may be named twice: by itself, and within a folder.
        if report not in runs:
            runs.append(report)
    return [_side(name, sorted(runs, key=lambda run: str(run["started"]))) for name, runs in by_name.items()]


def _side(name: str, runs: list[dict[str, Any]]) -> Side:
    requirements: dict[str, dict[str, Any]] = {}
    used = []
    for stem in stems_of([entry for run in runs for entry in run["requirements"]]):
        plain = _newest(runs, stem, without="only")
        planted = _newest(runs, stem, without="none")
        bugs = {} if planted is None else {entry["id"]: entry["planted"] for entry in _of(planted, stem)}
        for entry in _of(plain or planted or runs[-1], stem):
            requirements[entry["id"]] = {**entry, "planted": bugs.get(entry["id"], [])}
        used += [run for run in (plain, planted) if run is not None]
    current = [run for run in runs if any(run is found for found in used)] or runs[-1:]
    return Side(name, tuple(runs), tuple(current), dict(sorted(requirements.items())))


def _newest(runs: list[dict[str, Any]], stem: str, *, without: str) -> dict[str, Any] | None:
    """The newest run of a component whose mode of planting is another one than ``without``."""
    fitting = (run for run in reversed(runs) if run["planted_mode"] != without and _of(run, stem))
    return next(fitting, None)


def _of(run: dict[str, Any], stem: str) -> list[dict[str, Any]]:
    return [entry for entry in run["requirements"] if entry["stem"] == stem]


def counts_of(entries: Sequence[dict[str, Any]], among: Sequence[str]) -> int:
    """How many requirements have one of some outcomes."""
    return sum(entry["outcome"] in among for entry in entries)
