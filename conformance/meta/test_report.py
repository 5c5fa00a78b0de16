"""Every report is a view of one document, and the command line tells a worse run from a better one."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from conformance.harness import cli
from conformance.harness.outcomes import worst
from conformance.harness.page import Sources, to_badge, to_html
from conformance.harness.report import ReportError, read_json, regressions, to_junit, to_markdown
from conformance.meta.pages import parse

_TESTS = """
@requirement("CKPT-001", "MUST double | <b>always</b>")
@pytest.mark.parametrize("n", [0, 1])
def test_double(checkpoint, n):
    assert_equal(checkpoint.double(n), 2 * n)

@requirement("CKPT-002", "MUST fail")
def test_fail():
    assert_equal("\\x00<&>", "]]>")

@requirement("KV-001", "MUST exist")
def test_absent(kvstore):
    pass

def test_no_requirement():
    pass
"""
_PLANTED = """
PLANTED = (PlantedBug("wrong", "is wrong", ("CKPT-001",), "toy.impl",
           wrap("toy.impl:checkpoint.double", lambda original, x: original(x) + x)),)
"""


@pytest.fixture
def report(toy: Callable[..., pytest.RunResult], pytester: pytest.Pytester) -> dict[str, Any]:
    path = pytester.path / "out" / "report.json"
    toy(_TESTS, "--twinproof-planted", "all", "--twinproof-report", str(path), planted=_PLANTED)
    return read_json(path)


def test_the_document(report: dict[str, Any]) -> None:
    found = {entry["id"]: entry for entry in report["requirements"]}
    assert {identifier: entry["outcome"] for identifier, entry in found.items()} == {
        "CKPT-001": "passed",
        "CKPT-002": "failed",
        "KV-001": "skipped",
    }
    double = found["CKPT-001"]
    assert (double["stem"], len(double["tests"])) == ("checkpoint", 2)
    assert [(bug["bug"], bug["verdict"]) for bug in double["planted"]] == [("wrong", "killed")]
    assert "requirement  CKPT-002: MUST fail" in found["CKPT-002"]["tests"][0]["message"]
    assert report["summary"] == {"outcomes": {"failed": 1, "passed": 1, "skipped": 1}, "planted": {"killed": 1}}
    assert report["implementation"]["name"] == "toy.impl"
    assert report["environment"]["versions"]["torch"]


def test_views(report: dict[str, Any]) -> None:
    root = ElementTree.fromstring(to_junit([report]))
    suite = root[0]
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "5",
        "failures": "1",
        "errors": "0",
        "skipped": "1",
    }
    markdown = to_markdown([report])
    assert "| CKPT-001 | passed | wrong (killed) | MUST double \\| <b>always</b> |" in markdown
    page = to_html(Sources([report]))
    assert "<b>always</b>" not in page
    assert "&lt;b&gt;always" in page
    parse(page)


def test_badge(report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def label(*reports: dict[str, Any]) -> str | None:
        return ElementTree.fromstring(to_badge(reports)).get("aria-label")

    green = copy.deepcopy(report)
    green["requirements"] = [entry for entry in green["requirements"] if entry["outcome"] == "passed"]
    green["exit_status"] = 0
    assert label(green) == "twinproof: passed, 1 of 1"
    assert label(report) == "twinproof: failed, 1 of 3"
    # Of one implementation the newest run of a component counts, and its requirements once.
    early, late = ({**green, "started": f"2026-01-0{day}"} for day in (1, 3))
    between = {**report, "started": "2026-01-02"}
    assert label(early, between) == label(between, early) == "twinproof: failed, 1 of 3"
    assert label(early, between, late) == "twinproof: passed, 1 of 2"
    # Of two implementations the worse decides.
    other = {**between, "implementation": {**report["implementation"], "name": "other"}}
    assert label(late, other) == label(other, late) == "twinproof: failed, 2 of 4"
    assert label({**green, "requirements": []}) == "twinproof: nothing ran"
    assert label({**green, "exit_status": 2}) == "twinproof: not finished"
    source = tmp_path / "evidence.json"
    source.write_text("{}", encoding="utf-8")
    assert cli.main(["report", str(source), "--badge", str(tmp_path / "badge.svg")]) == 2
    assert not (tmp_path / "badge.svg").exists()


@pytest.mark.parametrize(
    ("outcome", "status", "expected"),
    [
        ("passed", 0, None),
        # It has a case that says so.
        ("failed", 1, None),
        ("skipped", 0, ("failure", "nothing ran: no requirement was run; that proves nothing")),
        ("passed", 1, ("failure", "failed: a test beside the requirements failed")),
        ("passed", 2, ("error", "not finished: the run did not end: it was interrupted, or a test module *")),
        ("failed", 3, ("error", "not finished: the run did not end: an internal error; 1 of 1 requirements *")),
    ],
)
def test_junit_is_red_where_the_verdict_is(
    report: dict[str, Any], outcome: str, status: int, expected: tuple[str, str] | None
) -> None:
    entry = next(entry for entry in report["requirements"] if entry["id"] == "CKPT-002")
    entry = {**entry, "outcome": outcome, "tests": [{**entry["tests"][0], "outcome": outcome}]}
    (suite,) = ElementTree.fromstring(to_junit([{**report, "requirements": [entry], "exit_status": status}]))
    found = {child.tag: child.get("message") for case in suite.findall("testcase[@name='verdict']") for child in case}
    assert list(found) == ([] if expected is None else [expected[0]])
    assert expected is None or fnmatch(found[expected[0]] or "", expected[1])
    assert len(suite) == int(suite.get("tests", "")) == 1 + len(found)
    red_count = int(suite.get("failures", "")) + int(suite.get("errors", ""))
    assert red_count == len(found) + (outcome == "failed")


def test_worse_and_better(report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = copy.deepcopy(report)
    after["requirements"][0]["outcome"] = "skipped"
    after["requirements"][0]["planted"][0]["verdict"] = "survived"
    after["requirements"][1]["outcome"] = "passed"
    worse, other = regressions(report, after)
    assert worse == ["CKPT-001: passed -> skipped", "CKPT-001 against wrong: killed -> survived"]
    assert other == ["CKPT-002: failed -> passed"]
    assert regressions(report, {"requirements": []})[0] == ["CKPT-001: passed -> absent"]
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, content in zip(paths, (report, after), strict=True):
        path.write_text(json.dumps(content), encoding="utf-8")
    assert cli.main(["compare", *map(str, paths)]) == 1
    assert "worse    CKPT-001: passed -> skipped" in capsys.readouterr().out
    assert cli.main(["compare", str(paths[0]), str(paths[0])]) == 0


def _as(report: dict[str, Any], outcome: str, **changed: Any) -> dict[str, Any]:
    """The report of a run of CKPT-002 alone, with this outcome."""
    (entry,) = [entry for entry in report["requirements"] if entry["id"] == "CKPT-002"]
    return {**report, "requirements": [{**entry, "outcome": outcome}], "exit_status": 0, **changed}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (("passed", {"exit_status": 2}), ("passed", {}), "got the run did not end: it was interrupted*where: before"),
        (("passed", {}), ("failed", {"exit_status": 3}), "got the run did not end: an internal error*where: after"),
        (("skipped", {}), ("skipped", {}), "got no requirement that was run, expected one or more; where: before"),
        (("passed", {}), ("passed", {"requirements": []}), "got none, expected some of CKPT-002; where: after"),
    ],
)
def test_what_cannot_be_compared_is_told(
    report: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    before: tuple[str, dict[str, Any]],
    after: tuple[str, dict[str, Any]],
    said: str,
) -> None:
    """Two runs without a common requirement have "no difference in outcomes"."""
    paths = [str(tmp_path / "before.json"), str(tmp_path / "after.json")]
    for path, (outcome, changed) in zip(paths, (before, after), strict=True):
        Path(path).write_text(json.dumps(_as(report, outcome, **changed)), encoding="utf-8")
    assert cli.main(["compare", *paths]) == 2
    assert fnmatch(capsys.readouterr().err, f"twinproof: *{said}*")


def test_compare_says_what_it_compares(
    report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {**report["implementation"], "name": "mine", "version": "3"}
    after = _as(report, "skipped", implementation=other, profile="quick", started="2026-02-03T04:05:06+00:00")
    paths = [str(tmp_path / "before.json"), str(tmp_path / "after.json")]
    for path, content in zip(paths, (_as(report, "passed"), after), strict=True):
        Path(path).write_text(json.dumps(content), encoding="utf-8")
    # A run that judges less than the one before is worse, also where it judges nothing at all.
    assert cli.main(["compare", *paths]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("before   toy.impl ")
    assert lines[1:] == [
        "after    mine 3, 2026-02-03T04:05, profile quick, planted all",
        "other runs, whose outcomes differ by that as well: implementation toy.impl and mine, profile ci and quick",
        "worse    CKPT-002: passed -> skipped",
    ]


def test_the_report_command(report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "r.json"
    source.write_text(json.dumps(report), encoding="utf-8")
    assert cli.main(["report", str(source)]) == 0
    assert capsys.readouterr().out == to_markdown([report])
    outputs = {name: tmp_path / "views" / name for name in ("html", "junit", "markdown")}
    words = [word for name, path in outputs.items() for word in (f"--{name}", str(path))]
    assert cli.main(["report", str(source), *words]) == 0
    assert outputs["html"].read_text(encoding="utf-8") == to_html(Sources([report]))
    assert outputs["junit"].read_text(encoding="utf-8") == to_junit([report])


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "\udc80" * 3, "[" * 100_000),
        '{"kind": "twinproof-conformance", "schema": 99}',
        '{"kind": "twinproof-conformance", "schema": 1}',
    ],
)
def test_what_is_no_report(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ReportError, match=r"r\.json"):
        read_json(path)
    assert cli.main(["report", str(path)]) == 2
    assert "r.json" in capsys.readouterr().err


def test_the_worst_test_decides() -> None:
    assert worst([]) == "none"
    assert worst(["passed", "skipped"]) == "passed"
    assert worst(["skipped", "skipped"]) == "skipped"
    assert worst(["passed", "xfailed"]) == "xfailed"
    assert worst(["failed", "error", "passed"]) == "error"
