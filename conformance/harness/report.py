"""Reports, all made from one JSON document, so that no two of them can disagree.

The document holds the environment, the implementation, and every collected requirement with its sentence, outcome,
duration, tests and planted bugs. JUnit XML, Markdown and HTML are views of it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from conformance.harness.outcomes import SCHEMA_VERSION

if TYPE_CHECKING:
    from conformance.harness.suite import Suite

__all__ = ["KIND", "ReportError", "document", "read_json", "regressions", "to_junit", "to_markdown", "write_json"]

KIND = "twinproof-conformance"
_BAD = ("failed", "error")


class ReportError(ValueError):
    """A file that is no report of this suite, or one of a newer schema."""


def document(suite: Suite) -> dict[str, Any]:
    """The report of a finished run, ready for JSON."""
    requirements = suite.recorder.requirements()
    started = suite.recorder.started_at
    return {
        "kind": KIND,
        "schema": SCHEMA_VERSION,
        "started": datetime.fromtimestamp(started, timezone.utc).isoformat(timespec="seconds"),
        "duration_s": round(time.time() - started, 3),
        "implementation": suite.facts,
        "profile": suite.profile,
        "seed": suite.seed,
        "planted_mode": suite.planted_mode,
        "deviations": [
            {"requirement": entry.requirement, "kind": entry.kind, "reason": entry.reason, "tracker": entry.tracker}
            for entry in suite.deviations
        ],
        "environment": suite.environment,
        "summary": {
            "outcomes": dict(sorted(Counter(found["outcome"] for found in requirements).items())),
            "planted": {verdict: count for verdict, count in suite.recorder.verdicts().items() if count},
        },
        "requirements": requirements,
    }


def write_json(suite: Suite, path: Path) -> None:
    """Write the report of a run; missing parent folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document(suite), indent=1) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """A report as it was written.

    Raises:
        ReportError: not JSON, not a report, or of another schema version.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReportError(f"{path}: {error}") from error
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise ReportError(f"{path}: is no report of kind {KIND!r}")
    if content.get("schema") != SCHEMA_VERSION:
        raise ReportError(f"{path}: schema is {content.get('schema')!r}; this version reads {SCHEMA_VERSION}")
    return content


def regressions(before: dict[str, Any], after: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What got worse and what else changed between two reports, one sentence each.

    Worse is: a requirement that passed and no longer does, or is gone, or fails now; a planted bug that was killed and
    no longer is.
    """
    worse: list[str] = []
    other: list[str] = []
    old, new = ({found["id"]: found for found in report["requirements"]} for report in (before, after))
    for identifier in sorted({*old, *new}):
        was = old[identifier]["outcome"] if identifier in old else "absent"
        now = new[identifier]["outcome"] if identifier in new else "absent"
        if was != now:
            (worse if was == "passed" or now in _BAD else other).append(f"{identifier}: {was} -> {now}")
        killed = {bug["bug"]: bug["verdict"] for bug in old.get(identifier, {}).get("planted", [])}
        for bug in new.get(identifier, {}).get("planted", []):
            verdict = killed.get(bug["bug"], "absent")
            if verdict != bug["verdict"]:
                place = worse if verdict == "killed" else other
                place.append(f"{identifier} against {bug['bug']}: {verdict} -> {bug['verdict']}")
    return worse, other


def to_junit(report: dict[str, Any]) -> str:
    """JUnit XML: one suite, one case per test and one per requirement and planted bug."""
    cases: list[ElementTree.Element] = []
    for found in report["requirements"]:
        for test in found["tests"]:
            cases.append(_junit_case(found, test["nodeid"], test["duration_s"], test["outcome"], test["message"]))
        for bug in found["planted"]:
            outcome = {"killed": "passed", "skipped": "skipped"}.get(bug["verdict"], "failed")
            name = f"{found['id']} [planted:{bug['bug']}]"
            cases.append(_junit_case(found, name, bug["duration_s"], outcome, bug["message"] or bug["verdict"]))
    counts = {tag: sum(case.find(tag) is not None for case in cases) for tag in ("failure", "error", "skipped")}
    suite = ElementTree.Element(
        "testsuite",
        name=f"twinproof {report['implementation']['name']}",
        tests=str(len(cases)),
        failures=str(counts["failure"]),
        errors=str(counts["error"]),
        skipped=str(counts["skipped"]),
        time=str(report["duration_s"]),
        timestamp=report["started"],
    )
    suite.extend(cases)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _junit_case(found: dict[str, Any], name: str, duration_s: float, outcome: str, message: str) -> ElementTree.Element:
    case = ElementTree.Element("testcase", classname=found["id"], name=name, time=str(duration_s))
    tag = {"failed": "failure", "error": "error", "skipped": "skipped", "xfailed": "skipped", "none": "skipped"}.get(
        outcome
    )
    if tag is not None:
        first, _, _ = message.partition("\n")
        # XML 1.0 has no way to write most control characters, and failures of hostile files are full of them.
        text = "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in message)
        first = "".join(c if c.isprintable() else repr(c)[1:-1] for c in first)
        ElementTree.SubElement(case, tag, message=first or outcome).text = text
    return case


def to_markdown(report: dict[str, Any]) -> str:
    """The requirement matrix as a Markdown table, after the facts of the run."""
    facts = report["implementation"]
    summary = ", ".join(f"{count} {outcome}" for outcome, count in report["summary"]["outcomes"].items())
    lines = [
        f"# Conformance of {facts['name']} {facts['version']}",
        "",
        f"{report['started']}, profile {report['profile']}, seed {report['seed']}: {summary or 'nothing ran'}.",
        "",
        "| requirement | outcome | planted bugs | sentence |",
        "| --- | --- | --- | --- |",
    ]
    for found in report["requirements"]:
        bugs = ", ".join(f"{bug['bug']} ({bug['verdict']})" for bug in found["planted"]) or "-"
        sentence = " ".join(found["sentence"].split()).replace("|", "\\|")
        lines.append(f"| {found['id']} | {found['outcome']} | {bugs} | {sentence} |")
    failures = [test for found in report["requirements"] for test in found["tests"] if test["outcome"] in _BAD]
    for test in failures:
        lines += ["", f"## {test['nodeid']}", "", "```", test["message"].replace("```", "'''"), "```"]
    return "\n".join(lines) + "\n"
