"""Outcomes per requirement: the only record of a run, from which every report is made.

A requirement is as good as its worst test. A test that was skipped proves nothing, so a requirement of which every test
was skipped is skipped, never passed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from conformance.harness.planted import PlantedBug
from conformance.harness.requirements import Requirement

__all__ = ["SCHEMA_VERSION", "CaseResult", "Recorder", "worst"]

SCHEMA_VERSION = 1
# From worst to best. "none" means that nothing ran.
_OUTCOMES = ("error", "failed", "xfailed", "passed", "skipped", "none")
# A bug is dead when one case killed it; otherwise the worst of what happened.
_VERDICTS = ("no kill", "killed", "survived", "skipped")


@dataclass
class CaseResult:
    """One test case: ``outcome``, seconds over all phases, the failure's text, and the verdict on a planted bug.

    ``failure`` has the parts of the failure, as ``failure_of`` names them; failures of one cause share its ``cause``.
    """

    nodeid: str
    requirement: Requirement
    bug: PlantedBug | None = None
    outcome: str = "none"
    verdict: str = ""
    duration_s: float = 0.0
    message: str = ""
    failure: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For the list of tests of a requirement."""
        return {
            "nodeid": self.nodeid,
            "outcome": self.outcome,
            "duration_s": round(self.duration_s, 4),
            "message": self.message,
            **({"failure": self.failure} if self.failure else {}),
        }


def worst(outcomes: list[str]) -> str:
    """The outcome of a requirement from those of its tests."""
    return min(outcomes, key=_OUTCOMES.index, default="none")


@dataclass
class Recorder:
    """Collects case results while tests run."""

    started_at: float = field(default_factory=time.time)
    cases: dict[str, CaseResult] = field(default_factory=dict)

    def case(self, nodeid: str, requirement: Requirement, bug: PlantedBug | None) -> CaseResult:
        """The result of a test case, made on first use."""
        return self.cases.setdefault(nodeid, CaseResult(nodeid, requirement, bug))

    def requirements(self) -> list[dict[str, Any]]:
        """Every requirement that was collected, sorted by id, with its tests and its planted bugs."""
        by_id: dict[str, list[CaseResult]] = {}
        for case in self.cases.values():
            by_id.setdefault(case.requirement.id, []).append(case)
        return [self._requirement(by_id[identifier]) for identifier in sorted(by_id)]

    @staticmethod
    def _requirement(cases: list[CaseResult]) -> dict[str, Any]:
        requirement = cases[0].requirement
        plain = [case for case in cases if case.bug is None]
        planted: dict[str, list[CaseResult]] = {}
        for case in cases:
            if case.bug is not None:
                planted.setdefault(case.bug.id, []).append(case)
        return {
            "id": requirement.id,
            "stem": requirement.stem,
            "sentence": requirement.sentence,
            "test": f"{requirement.module}::{requirement.function}",
            "outcome": worst([case.outcome for case in plain]),
            "duration_s": round(sum(case.duration_s for case in plain), 4),
            "tests": [case.as_json() for case in plain],
            "planted": [_planted(bug_cases) for _, bug_cases in sorted(planted.items())],
        }

    def clusters(self) -> list[tuple[str, list[str], int]]:
        """Failures without a planted bug by their first difference: it, requirements, tests; the largest first."""
        by_difference: dict[str, list[CaseResult]] = {}
        for case in self.cases.values():
            cause = case.failure.get("cause", "")
            if case.bug is None and cause and case.outcome in ("failed", "error"):
                by_difference.setdefault(cause, []).append(case)
        found = [(text, sorted({c.requirement.id for c in cases}), len(cases)) for text, cases in by_difference.items()]
        return sorted(found, key=lambda cluster: (-len(cluster[1]), cluster[0]))

    def verdicts(self) -> dict[str, int]:
        """How many (requirement, planted bug) pairs ended in which verdict."""
        counts = dict.fromkeys(_VERDICTS, 0)
        for requirement in self.requirements():
            for bug in requirement["planted"]:
                counts[bug["verdict"]] += 1
        return counts


def _planted(cases: list[CaseResult]) -> dict[str, Any]:
    bug = cases[0].bug
    assert bug is not None
    verdicts = [case.verdict for case in cases if case.verdict]
    return {
        "bug": bug.id,
        "sentence": bug.sentence,
        "verdict": min(verdicts, key=_VERDICTS.index, default="skipped"),
        "duration_s": round(sum(case.duration_s for case in cases), 4),
        "message": "\n".join(case.message for case in cases if case.message),
        "places": list(bug.paths),
    }
