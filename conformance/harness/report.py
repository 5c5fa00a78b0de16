"""Reports, all made from one JSON document, so that no two of them can disagree.

The document holds the environment, the implementation, and every collected requirement with its sentence, outcome,
duration, tests and planted bugs. JUnit XML, Markdown and HTML are views of it. What a run says as a whole is decided in
:func:`verdict`, once, for the exit code and for every view.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from conformance.harness.outcomes import SCHEMA_VERSION

if TYPE_CHECKING:
    from conformance.harness.suite import Suite

__all__ = [
    "BAD",
    "KIND",
    "ReportError",
    "Verdict",
    "check_comparable",
    "document",
    "read_content",
    "read_json",
    "regressions",
    "report_of",
    "sides",
    "to_junit",
    "to_markdown",
    "verdict",
    "write_json",
]

KIND = "twinproof-conformance"
BAD = ("failed", "error")
_RAN = ("passed", "failed", "error", "xfailed")
_NOT_KILLED = ("survived", "no kill")
_KEYS = {"started", "duration_s", "implementation", "profile", "seed", "planted_mode", "deviations", "environment"}
_KEYS |= {"summary", "requirements"}
# Of pytest's exit codes, those of a run that came to its end: green, red, nothing collected.
_ENDED = (0, 1, 5)
_STOPPED = {2: "it was interrupted, or a test module could not be imported", 3: "an internal error", 4: "wrong usage"}


class ReportError(ValueError):
    """A file that is no report of this suite, or one of a newer schema."""


@dataclass(frozen=True)
class Verdict:
    """What a run says as a whole: the exit code of ``twinproof verify``, the word for it, and one sentence."""

    exit_code: int
    word: str
    sentence: str
    is_of_requirements: bool = False


def verdict(report: dict[str, Any]) -> Verdict:
    """The verdict on a run: 0 when it found nothing wrong, 1 when it did or ran nothing, 2 when it did not end."""
    requirements = report["requirements"]
    counts = Counter(found["outcome"] for found in requirements)
    bugs = Counter(bug["verdict"] for found in requirements for bug in found["planted"])
    wrong = _wrong(counts, bugs, len(requirements))
    # Reports before the status was kept say only what their requirements say.
    status = report.get("exit_status", 1 if wrong else 0)
    if status not in _ENDED:
        why = _STOPPED.get(status, f"exit status {status}")
        return Verdict(2, "not finished", "; ".join([f"the run did not end: {why}", *wrong]))
    if status == 1 or wrong:
        return Verdict(1, "failed", "; ".join(wrong) or "a test beside the requirements failed", bool(wrong))
    killed = f"{bugs['killed']} of {sum(bugs.values())} planted bugs killed"
    if not any(counts[outcome] for outcome in _RAN):
        if not bugs["killed"]:
            return Verdict(1, "nothing ran", "no requirement was run; that proves nothing")
        return Verdict(0, "passed", killed)
    held = f"{counts['passed']} of {len(requirements)} requirements hold"
    also = [f"{counts[name]} {text}" for name, text in _ASIDE.items() if counts[name]] + ([killed] if bugs else [])
    return Verdict(0, "passed", ", ".join([held, *also]))


_ASIDE = {"xfailed": "known to deviate", "skipped": "skipped", "none": "not run"}


def _wrong(counts: Counter[str], bugs: Counter[str], total: int) -> list[str]:
    failed, alive = sum(counts[name] for name in BAD), sum(bugs[name] for name in _NOT_KILLED)
    found = [f"{failed} of {total} requirements do not hold"] if failed else []
    return found + ([f"{alive} of {sum(bugs.values())} planted bugs were not killed"] if alive else [])


def document(suite: Suite, *, exit_status: int = 0) -> dict[str, Any]:
    """The report of a finished run, ready for JSON; ``exit_status`` is pytest's."""
    requirements = suite.recorder.requirements()
    started = suite.recorder.started_at
    return {
        "kind": KIND,
        "schema": SCHEMA_VERSION,
        "started": datetime.fromtimestamp(started, timezone.utc).isoformat(timespec="seconds"),
        "duration_s": round(time.time() - started, 3),
        "exit_status": exit_status,
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
        "areas": {
            module: _about(module) for module in sorted({found["test"].split("::")[0] for found in requirements})
        },
        "requirements": requirements,
    }


def _about(module: str) -> str:
    """What a test module is about: the first line of its docstring."""
    text = getattr(sys.modules.get(module), "__doc__", None) or ""
    return text.strip().split("\n")[0]


def write_json(suite: Suite, path: Path, *, exit_status: int) -> None:
    """Write the report of a run; missing parent folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document(suite, exit_status=exit_status), indent=1) + "\n", encoding="utf-8")


def read_content(path: Path) -> Any:
    """A file's JSON. Raises ReportError with its path."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ReportError(f"{path}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A report as it was written.

    Raises:
        ReportError: not JSON, not a report, or of another schema version.
    """
    return report_of(read_content(path), path)


def report_of(content: Any, path: Path) -> dict[str, Any]:
    """``content`` of the file ``path``, where it is a report. Raises ReportError where it is none."""
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise ReportError(f"{path}: is no report of kind {KIND!r}")
    if content.get("schema") != SCHEMA_VERSION:
        raise ReportError(f"{path}: schema is {content.get('schema')!r}; this version reads {SCHEMA_VERSION}")
    missing = sorted(_KEYS - content.keys())
    if missing:
        raise ReportError(f"{path}: got a report without {', '.join(missing)}")
    return content


def check_comparable(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Demand that two reports can be compared, so that "no difference" says something.

    Raises:
        ReportError: a run that did not end; a run before that judged nothing; no requirement that both have.
    """
    for name, report in (("before", before), ("after", after)):
        found = verdict(report)
        if found.exit_code == 2:
            raise ReportError(f"nothing to compare: got {found.sentence}, expected a run that ended; where: {name}")
    judged, there = _judged(before), {found["id"] for found in after["requirements"]}
    if not judged:
        raise ReportError("nothing to compare: got no requirement that was run, expected one or more; where: before")
    if not judged & there:
        got, expected = (", ".join(sorted(ids)[:3]) or "none" for ids in (there, judged))
        raise ReportError(f"no requirement in common: got {got}, expected some of {expected}; where: after")


def _judged(report: dict[str, Any]) -> set[str]:
    """Ids of the requirements that a test, or a planted bug, was run for."""
    return {
        found["id"]
        for found in report["requirements"]
        if found["outcome"] in _RAN or any(bug["verdict"] != "skipped" for bug in found["planted"])
    }


def sides(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What the two runs are, a line each, and a line of what they were asked otherwise."""
    lines = []
    for name, report in (("before", before), ("after", after)):
        facts = report["implementation"]
        asked = f"profile {report['profile']}, planted {report['planted_mode']}"
        lines.append(f"{name:8} {facts['name']} {facts['version']}, {report['started'][:16]}, {asked}")
    old, new = (
        {"implementation": found["implementation"]["name"], **{key: found[key] for key in _ASKED}}
        for found in (before, after)
    )
    differ = [f"{key.replace('_', ' ')} {old[key]} and {new[key]}" for key in old if old[key] != new[key]]
    return lines + ([f"other runs, whose outcomes differ by that as well: {', '.join(differ)}"] if differ else [])


# Of a run, what changes outcomes beside the code.
_ASKED = ("profile", "planted_mode")


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
            (worse if was == "passed" or now in BAD else other).append(f"{identifier}: {was} -> {now}")
        killed = {bug["bug"]: bug["verdict"] for bug in old.get(identifier, {}).get("planted", [])}
        for bug in new.get(identifier, {}).get("planted", []):
            verdict = killed.get(bug["bug"], "absent")
            if verdict != bug["verdict"]:
                place = worse if verdict == "killed" else other
                place.append(f"{identifier} against {bug['bug']}: {verdict} -> {bug['verdict']}")
    return worse, other


def to_junit(reports: Sequence[dict[str, Any]]) -> str:
    """JUnit XML: a suite for each report, a case for each test and for each requirement and planted bug.

    Where a run is red and no case says so, a case ``verdict`` does: of one that did not end, or ran nothing.
    """
    root = ElementTree.Element("testsuites")
    root.extend(_junit_suite(report) for report in reports)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _junit_suite(report: dict[str, Any]) -> ElementTree.Element:
    cases: list[ElementTree.Element] = []
    for found in report["requirements"]:
        for test in found["tests"]:
            cases.append(_junit_case(found["id"], test["nodeid"], test["duration_s"], test["outcome"], test["message"]))
        for bug in found["planted"]:
            outcome = {"killed": "passed", "skipped": "skipped"}.get(bug["verdict"], "failed")
            name = f"{found['id']} [planted:{bug['bug']}]"
            cases.append(_junit_case(found["id"], name, bug["duration_s"], outcome, bug["message"] or bug["verdict"]))
    is_red = any(case.find(tag) is not None for case in cases for tag in ("failure", "error"))
    whole = verdict(report)
    if whole.exit_code == 2 or (whole.exit_code and not is_red):
        outcome = "error" if whole.exit_code == 2 else "failed"
        cases.append(_junit_case("twinproof", "verdict", 0.0, outcome, f"{whole.word}: {whole.sentence}"))
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
    return suite


def _junit_case(of: str, name: str, duration_s: float, outcome: str, message: str) -> ElementTree.Element:
    case = ElementTree.Element("testcase", classname=of, name=name, time=str(duration_s))
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


def to_markdown(reports: Sequence[dict[str, Any]]) -> str:
    """Each report's verdict, the facts of its run, the requirement matrix as a Markdown table, and the failures."""
    return "\n".join(map(_markdown, reports))


def _markdown(report: dict[str, Any]) -> str:
    facts, found = report["implementation"], verdict(report)
    summary = ", ".join(f"{count} {outcome}" for outcome, count in report["summary"]["outcomes"].items())
    lines = [
        f"# Conformance of {facts['name']} {facts['version']}",
        "",
        f"**{found.word}**: {found.sentence}.",
        "",
        f"{report['started']}, profile {report['profile']}, seed {report['seed']}: {summary or 'nothing ran'}.",
        "",
        "| requirement | outcome | planted bugs | sentence |",
        "| --- | --- | --- | --- |",
    ]
    for entry in report["requirements"]:
        bugs = ", ".join(f"{bug['bug']} ({bug['verdict']})" for bug in entry["planted"]) or "-"
        sentence = " ".join(entry["sentence"].split()).replace("|", "\\|")
        lines.append(f"| {entry['id']} | {entry['outcome']} | {bugs} | {sentence} |")
    failures = [test for entry in report["requirements"] for test in entry["tests"] if test["outcome"] in BAD]
    for test in failures:
        lines += ["", f"## {test['nodeid']}", "", "```", test["message"].replace("```", "'''"), "```"]
    return "\n".join(lines) + "\n"
