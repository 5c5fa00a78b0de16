"""Evidence of a bench on the page: verdicts in words, plots whose marks lie where the numbers say, no gate left out."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from conformance.harness.page import read_sources, to_html
from conformance.harness.page.gates import gates_line
from conformance.meta.pages import Node, case, evidence, page_of, parse, report, requirement, ruling

_REFUSED = ruling("fail", 0.5, 0.4, 0.6)
_GATES = evidence(
    ("fast", "claim", 1.5, ruling("pass", 3.0, 2.0, 4.0), _REFUSED),
    ("slow", "claim", 1.5, ruling("fail", 0.5, 0.4, 0.6), _REFUSED),
    ("even", "claim", 0.9, ruling("pass", 1.0, 0.98, 1.02), _REFUSED),
    ("noisy", "claim", 1.5, ruling("undecided", 1.5, 0.7, 3.0), _REFUSED),
    ("lax", "limit", 0.5, ruling("pass", 0.9, 0.8, 1.0), ruling("pass", 0.8, 0.7, 0.9)),
    ("elsewhere", "limit", 0.5, ruling("undecided"), ruling("undecided")),
    ("bytes", "counter", 1000.0, ruling("pass", 500.0), ruling("fail", 4_000_000.0)),
    ("nothing", "counter", 0.0, ruling("pass", 0.0), ruling("fail", 28.0)),
    ("magic", "claim", 1.5, ruling("implausible", 900.0, 800.0, 1000.0), _REFUSED),
)


def _rows(page: Node) -> dict[str, Node]:
    return {row.one("code", "id").text: row for row in page.one("table", "gates").one("tbody").every("tr")}


def test_every_gate_has_its_words() -> None:
    rows = _rows(page_of(report(requirement("KV-001", case())), bench=[_GATES]))
    expected = {
        "slow": ["not reached", "slower than the peer"],
        "lax": ["not reached", "control let through"],
        "magic": ["implausible", "faster than the peer"],
        "noisy": ["undecided", "undecided beside the peer"],
        "elsewhere": ["undecided", "not measured"],
        "fast": ["reached", "faster than the peer", "3 [2, 4], at least 1.5", "control 0.5 [0.4, 0.6]"],
        "even": ["reached", "same as the peer"],
        "bytes": ["reached", "500, at most 1 k", "control 4 M"],
        "nothing": ["reached", "0, at most 0"],
    }
    # What failed comes first, then what was not decided.
    assert [*rows] == ["slow", "lax", "magic", "noisy", "elsewhere", "fast", "even", "bytes", "nothing"]
    for name, words in expected.items():
        for word in (*words, f"{name} MUST be fast."):
            assert word in rows[name].text, (name, word)
    outcomes = [row.attributes["data-outcomes"] for row in rows.values()]
    assert outcomes == ["failed"] * 3 + ["undecided"] * 2 + ["passed"] * 4
    assert {row.attributes["data-stem"] for row in rows.values()} == {"kvstore"}


def _marks(row: Node) -> dict[str, float | None]:
    svg = row.one("svg", "gate")
    subject = [float(node.attributes["cx"]) for node in svg.every("circle", "subject")]
    control = [float(node.attributes["x"]) + 3.5 for node in svg.every("rect", "control")]
    return {
        "bound": float(svg.one("line", "bound").attributes["x1"]),
        "subject": subject[0] if subject else None,
        "control": control[0] if control else None,
    }


def test_marks_lie_on_the_side_of_the_bound_that_they_belong_to() -> None:
    rows = _rows(page_of(bench=[_GATES]))
    for name in ("fast", "even", "bytes"):
        marks = _marks(rows[name])
        assert marks["subject"] is not None
        assert marks["bound"] is not None
        assert marks["subject"] > marks["bound"], f"{name}: better is to the right, also where less is better"
    slow, lax = _marks(rows["slow"]), _marks(rows["lax"])
    assert slow["subject"] is not None
    assert slow["bound"] is not None
    assert slow["subject"] < slow["bound"]
    assert lax["control"] is not None
    assert lax["bound"] is not None
    assert lax["control"] > lax["bound"], "a control that was let through lies where it must not"
    # Ten times the bound is half of the width.
    assert _marks(rows["fast"])["subject"] == pytest.approx(120 + 120 * math.log10(3.0 / 1.5), abs=0.1)
    line = rows["fast"].one("line", "subject")
    ends = [float(line.attributes[name]) for name in ("x1", "x2")]
    assert ends == pytest.approx([120 + 120 * math.log10(end / 1.5) for end in (2.0, 4.0)], abs=0.1)
    # What lies beyond the scale is an arrow at its edge; what has no logarithm or was not measured has no mark.
    assert [*rows["magic"].every("polygon", "subject")]
    assert [*rows["bytes"].every("polygon", "control")]
    for name in ("nothing", "elsewhere"):
        assert _marks(rows[name])["subject"] is None
    assert "subject 3 [2, 4], bound 1.5, control 0.5" in rows["fast"].one("svg").attributes["aria-label"]


def test_the_line_of_the_gates() -> None:
    assert gates_line([]) is None
    assert gates_line([_GATES]) == (1, "3 of 9 gates failed, 2 undecided")
    green = evidence(("a", "claim", 1.0, ruling("pass", 2.0, 1.5, 3.0), _REFUSED))
    assert gates_line([green]) == (0, "1 of 1 gates reached, 0 undecided")
    undecided = evidence(("a", "claim", 1.0, ruling("undecided"), ruling("undecided")))
    assert gates_line([undecided]) == (1, "none of 1 gates was decided; that proves nothing")
    page = page_of(bench=[_GATES])
    heading = page.one("h1")
    assert " ".join(heading.text.split()) == "✗ gates failed 3 of 9 gates failed, 2 undecided"
    assert heading.attributes["data-gates-exit-code"] == "1"
    both = page_of(report(requirement("KV-001", case())), bench=[green])
    assert [node.attributes["data-gates-exit-code"] for node in both.every("p", "verdict")] == ["0"]


def test_a_page_of_the_evidence_that_the_repository_keeps() -> None:
    folder = Path(__file__).parents[2] / "perf" / "results"
    # What was measured of single operators on a GPU judges no gate.
    paths = [path for path in sorted(folder.rglob("*.json")) if "outcomes" in json.loads(path.read_text())]
    if not paths:
        pytest.skip("an installation has no evidence")
    sources = read_sources(paths)
    page = parse(to_html(sources))
    gates = [outcome["gate"] for path in paths for outcome in json.loads(path.read_text())["outcomes"]]
    assert sorted(node.text for node in page.every("code", "id")) == sorted(gates)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bound": "1"}, "bound: got '1', expected a number"),
        ({"result": "ok"}, "result: got 'ok', expected one of pass, fail, implausible, undecided"),
        ({"control": None}, "control.result: got None"),
        ({"subject": ruling("pass", True)}, "subject.value: got True, expected a number or null"),
    ],
)
def test_evidence_that_is_none_is_refused_by_its_field(tmp_path: Path, change: dict[str, object], message: str) -> None:
    content = evidence(("a", "claim", 1.0, ruling("pass", 2.0, 1.5, 3.0), _REFUSED))
    content["outcomes"][0].update(change)
    path = tmp_path / "e.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=r"e\.json: outcomes\[0\]") as caught:
        read_sources([path])
    assert message in str(caught.value)
