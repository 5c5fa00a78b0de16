"""Several implementations side by side, and the runs of one in order of time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance.harness import cli
from conformance.harness.page.sides import sides_of
from conformance.meta.pages import Node, bug, case, page_of, parse, report, requirement

_BAD = {"message": "1 of 2 elements differ", "got": "3", "expected": "2"}


def _badges(row: Node) -> list[str]:
    return [badge.text.split(maxsplit=1)[1] for badge in row.every("span", "badge")]


def test_sides_stand_beside_each_other() -> None:
    first = report(requirement("KV-001", case()), requirement("KV-002", case("failed", **_BAD)), name="first")
    held = [requirement(identifier, case()) for identifier in ("KV-001", "KV-002", "OPT-001")]
    second = report(*held, name="second")
    page = page_of(first, second)
    headings = [" ".join(node.text.split()[1:]) for node in page.every("h1")]
    assert headings == [
        "failed first 1.0: 1 of 2 requirements do not hold",
        "passed second 1.0: 3 of 3 requirements hold",
    ]
    table = page.one("table", "components")
    assert [cell.text for cell in table.one("thead").every("th")] == ["component", "first 1.0", "second 1.0"]
    cells = [[" ".join(cell.text.split()) for cell in row.every("td")] for row in table.one("tbody").every("tr")]
    assert cells == [["1 of 2 ✗ 1 failed", "2 of 2"], ["not in this report", "1 of 1"]]
    assert _badges(page.one("tr", id="KV-002")) == ["failed", "passed"]
    assert _badges(page.one("tr", id="OPT-001")) == ["not in it", "passed"]
    marks = {name: page.one("tr", id=name).attributes["data-outcomes"].split() for name in ("KV-001", "KV-002")}
    assert marks == {"KV-001": ["passed", "passed"], "KV-002": ["failed", "passed", "differs"]}
    assert "first 1.0" in page.one("details", "card").one("summary").text
    assert "implementations differ" in page.one("form").text
    assert "implementations differ" not in page_of(first).one("form").text


def test_runs_of_one_implementation_are_its_history() -> None:
    runs = [
        report(requirement("KV-001", case()), requirement("KV-002", case()), started="2026-11-01T00:00:00+00:00"),
        # A run that leaves KV-002 out says nothing of it.
        report(requirement("KV-001", case("failed", **_BAD)), started="2026-11-02T00:00:00+00:00"),
        report(
            requirement("KV-001", case()),
            requirement("KV-002", case("skipped", text="lacks it")),
            requirement("KV-003", case()),
            started="2026-11-03T00:00:00+00:00",
        ),
    ]
    # The order of the files says nothing; the newest decides.
    page = page_of(runs[1], runs[2], runs[0], runs[1])
    assert page.one("h1").attributes["data-exit-code"] == "0"
    rows = [" ".join(row.text.split()) for row in page.one("table", "runs").one("tbody").every("tr")]
    assert [row.split("T")[0] for row in rows] == ["2026-11-03", "2026-11-02", "2026-11-01"]
    assert "✓ 1 holds now KV-001" in rows[0]
    assert "– 1 not proven now KV-002" in rows[0]
    assert "1 not run before" in rows[0]
    assert "✗ 1 fails now KV-001" in rows[1]
    assert "0 of 1" in rows[1]
    assert "the first run here" in rows[2]
    strip = page.one("tr", id="KV-001").one("div", "glyphs")
    assert strip.text == "✓✗✓"
    assert strip.attributes["aria-label"] == "the last 3 runs, oldest first: passed, failed, passed"
    assert not [*page.one("tr", id="KV-003").every("div", "glyphs")]
    assert len([*page.one("svg", "columns").every("rect")]) == 3
    assert not [*page_of(runs[0]).every("table", "runs")]


def test_of_each_component_the_newest_run_counts_and_planted_bugs_may_come_from_another() -> None:
    older = report(requirement("KV-001", case("failed", **_BAD)), started="2026-11-01")
    other = report(requirement("OPT-001", case()), started="2026-11-02")
    planted = report(requirement("OPT-001", bugs=[bug("lives", "survived")]), started="2026-11-03", planted_mode="only")
    (side,) = sides_of([older, other, planted])
    outcomes = {name: entry["outcome"] for name, entry in side.requirements.items()}
    assert outcomes == {"KV-001": "failed", "OPT-001": "passed"}
    assert side.verdict.sentence == "1 of 2 requirements do not hold; 1 of 1 planted bugs were not killed"
    assert side.verdict.exit_code == 1
    (side,) = sides_of([older, report(requirement("KV-001", case()), started="2026-11-04")])
    assert side.verdict.exit_code == 0
    both = report(requirement("KV-001", case("failed", **_BAD)), requirement("OPT-001", case()), exit_status=1)
    (side,) = sides_of([both, report(requirement("KV-001", case()), started="2999-11-04")])
    assert side.verdict.exit_code == 0
    beside = report(requirement("OPT-001", case()), exit_status=1)
    (side,) = sides_of([beside, report(requirement("KV-001", case()), started="2999-11-04")])
    assert side.verdict.sentence == "a test beside the requirements failed"
    stopped = report(requirement("KV-001", case()), started="2026-11-05", exit_status=2)
    (side,) = sides_of([other, stopped])
    assert side.verdict.exit_code == 2


def test_the_command_takes_a_folder_of_earlier_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now, folder, out = tmp_path / "now.json", tmp_path / "before", tmp_path / "out.html"
    now.write_text(json.dumps(report(requirement("KV-001", case()), started="2026-11-02")), encoding="utf-8")
    (folder / "deeper").mkdir(parents=True)
    words = ["report", str(now), "--html", str(out), "--history", str(folder)]
    assert cli.main(words) == 2
    assert "got no *.json there" in capsys.readouterr().err
    old = report(requirement("KV-001", case("failed", **_BAD)), started="2026-11-01")
    (folder / "deeper" / "old.json").write_text(json.dumps(old), encoding="utf-8")
    assert cli.main(words) == 0
    assert "1 holds now" in parse(out.read_text(encoding="utf-8")).one("table", "runs").text
    (folder / "other.json").write_text("{}", encoding="utf-8")
    assert cli.main(words) == 2
    assert "other.json: is no report" in capsys.readouterr().err
    assert cli.main(["report", str(now), "--history", str(folder / "deeper")]) == 2
    assert "by --html alone" in capsys.readouterr().err
    assert cli.main(["report", str(now), str(now), "--markdown", str(tmp_path / "m.md")]) == 0
    assert (tmp_path / "m.md").read_text(encoding="utf-8").count("# Conformance of mine 1.0") == 2
