"""The files that a page is made of, told apart by what they hold; what is none of them is refused by name.

Three kinds are known: reports of this suite, evidence of ``twinproof bench --json``, and the score of machine-made
mutants that ``ci/mutate record`` keeps. The suite imports nothing of the bench: of its evidence it reads version 1,
whose ``outcomes`` each have ``gate``, ``kind``, ``sentence``, ``workload``, ``bound``, ``result``, ``reason`` and two
rulings, ``subject`` and ``control``, with ``result``, ``reason``, ``value``, ``low`` and ``high``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.harness.report import KIND, ReportError, read_content, report_of

__all__ = ["RESULTS", "Sources", "read_sources"]

RESULTS = ("pass", "fail", "implausible", "undecided")
_EVIDENCE_VERSION = 1
_TEXTS = ("gate", "kind", "sentence", "workload", "reason")
_COUNTS = ("killed_count", "judged_count", "listed_count")


@dataclass
class Sources:
    """What was read: reports in the order given, evidence of benches, and (killed, judged) mutants by file."""

    reports: list[dict[str, Any]] = field(default_factory=list)
    bench: list[dict[str, Any]] = field(default_factory=list)
    mutants: dict[str, tuple[int, int]] = field(default_factory=dict)


def read_sources(paths: Sequence[Path], *, history: Path | None = None) -> Sources:
    """Read files of the three kinds, and every report of the folder ``history`` (older runs of the same).

    Raises:
        ReportError: a file of no known kind, or of another version, with its path; a folder without a report.
    """
    found = Sources()
    for path in paths:
        _add(found, read_content(path), path)
    if history is not None:
        older = sorted(history.rglob("*.json"))
        if not older:
            raise ReportError(f"{history}: got no *.json there, expected reports of earlier runs")
        found.reports = [report_of(read_content(path), path) for path in older] + found.reports
    return found


def _add(found: Sources, content: Any, path: Path) -> None:
    if isinstance(content, dict) and "outcomes" in content and content.get("kind") != KIND:
        found.bench.append(_evidence(content, path))
    elif _is_score(content):
        files = (item for component in content.values() for item in component.items())
        found.mutants |= {name: (counts["killed_count"], _judged(counts)) for name, counts in files}
    else:
        found.reports.append(report_of(content, path))


def _judged(counts: dict[str, int]) -> int:
    # A mutant that is listed with a reason is left out of the score, as ci/mutate does.
    return counts["judged_count"] - counts["listed_count"]


def _is_score(content: Any) -> bool:
    components = list(content.values()) if isinstance(content, dict) else []
    files = [counts for each in components if isinstance(each, dict) for counts in each.values()]
    return bool(files) and all(
        isinstance(counts, dict) and all(type(counts.get(name)) is int for name in _COUNTS) for counts in files
    )


def _evidence(content: dict[str, Any], path: Path) -> dict[str, Any]:
    version = content.get("version")
    if version != _EVIDENCE_VERSION:
        raise ReportError(f"{path}: evidence of a bench has version {version!r}; this reads {_EVIDENCE_VERSION}")
    outcomes = content["outcomes"]
    for number, outcome in enumerate(outcomes if isinstance(outcomes, list) else [None]):
        wrong = _wrong_field(outcome)
        if wrong:
            raise ReportError(f"{path}: outcomes[{number}] of a bench's evidence: {wrong}")
    return content


def _wrong_field(outcome: Any) -> str:
    """What is wrong with an outcome, or nothing."""
    if not isinstance(outcome, dict):
        return f"got {type(outcome).__name__}, expected an object"
    for name in _TEXTS:
        if not isinstance(outcome.get(name), str):
            return f"{name}: got {outcome.get(name)!r}, expected a text"
    if not _is_number(outcome.get("bound")):
        return f"bound: got {outcome.get('bound')!r}, expected a number"
    for place, ruling in (("", outcome), ("subject.", outcome.get("subject")), ("control.", outcome.get("control"))):
        if not isinstance(ruling, dict) or ruling.get("result") not in RESULTS:
            got = ruling.get("result") if isinstance(ruling, dict) else ruling
            return f"{place}result: got {got!r}, expected one of {', '.join(RESULTS)}"
        for name in ("value", "low", "high") if place else ():
            if ruling.get(name) is not None and not _is_number(ruling[name]):
                return f"{place}{name}: got {ruling[name]!r}, expected a number or null"
    return ""


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
