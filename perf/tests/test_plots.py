"""``bench plot``: what is drawn lies where its value is, and says without colour what it is."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from perf.harness.cli import main
from perf.harness.judge import Machine, Outcome, Result, Ruling
from perf.harness.plots import bench_plot
from perf.harness.results import Evidence, write_evidence
from perf.harness.svg import LinearAxis, LogAxis
from twinproof.errors import ConfigError

Found = list[dict[str, float]]


def _outcome(gate: str, kind: str, result: Result, subject: Ruling, control: Ruling, bound: float) -> Outcome:
    return Outcome(gate, kind, "It MUST be <fast> & small.", "shape", bound, result, "measured", subject, control)


def _ratio(value: float, low: float, high: float, result: Result = Result.PASS) -> Ruling:
    return Ruling(result, "measured", value, low, high)


CLAIM = _outcome("kv-get", "claim", Result.PASS, _ratio(4.0, 2.0, 8.0), _ratio(1.0, 0.5, 2.0, Result.FAIL), 2.0)
FAILED = _outcome("kv-set", "limit", Result.FAIL, _ratio(1.0, 0.9, 1.1), _ratio(0.5, 0.4, 0.6, Result.FAIL), 2.0)
COUNT = _outcome("calls", "counter", Result.PASS, Ruling(Result.PASS, "", 50.0), Ruling(Result.FAIL, "", 1e9), 100.0)
ZERO = _outcome("pages", "counter", Result.PASS, Ruling(Result.PASS, "", 0.0), Ruling(Result.FAIL, "", 3.0), 0.0)
ABSENT = _outcome("gpu", "claim", Result.UNDECIDED, Ruling(Result.UNDECIDED, "no"), Ruling(Result.UNDECIDED, ""), 1.0)


def _evidence(*outcomes: Outcome) -> Evidence:
    facts = {"cpu": {"count": 2, "model": "A & B <C>"}}
    found = [outcome.as_dict() for outcome in outcomes]
    return Evidence("fastimpl", "full", 0, Machine(("cpu",), "tmpfs"), facts, {}, {}, found, "2026-01-01T00:00:00")


def _elements(svg: str, name: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(f"{{http://www.w3.org/2000/svg}}{name}"))


def _numbers(svg: str, name: str, **wanted: str) -> Found:
    found = [element.attrib for element in _elements(svg, name)]
    chosen = [each for each in found if all(each.get(key.replace("_", "-")) == value for key, value in wanted.items())]
    return [{key: float(value) for key, value in each.items() if value.replace(".", "").isdigit()} for each in chosen]


def _corners(svg: str) -> list[tuple[float, float]]:
    """The middles of the diamonds."""
    points = [[p.split(",") for p in element.attrib["points"].split()] for element in _elements(svg, "polygon")]
    return [(float(each[0][0]), float(each[1][1])) for each in points]


def test_a_ratio_lies_on_its_axis_with_interval_floor_and_control() -> None:
    svg = bench_plot(_evidence(CLAIM))
    (subject,) = _numbers(svg, "circle")
    ((control_x, control_y),) = _corners(svg)
    assert control_y == subject["cy"]
    thick = _numbers(svg, "line", stroke_width="2")
    upright = [found for found in thick if found["x1"] == found["x2"]]
    whisker = [found for found in thick if found["y1"] == found["y2"] == subject["cy"]]
    assert len(upright) == len(whisker) == 1
    floor_x = upright[0]["x1"]
    # A logarithmic axis: from 1 to 2 is as far as from 2 to 4, and as from 4 to 8.
    unit = (subject["cx"] - control_x) / 2
    assert unit > 20
    places = (floor_x - control_x, subject["cx"] - floor_x, whisker[0]["x2"] - subject["cx"])
    assert places == pytest.approx([unit] * 3, abs=0.2)
    assert whisker[0]["x1"] == pytest.approx(floor_x, abs=0.2)
    # The foot of a floor points to what is larger.
    feet = [found for found in thick if found["y1"] == found["y2"] > subject["cy"]]
    assert [(foot["x1"], foot["x1"] < foot["x2"]) for foot in feet] == [(floor_x, True)]


def test_counts_are_shares_of_their_limit() -> None:
    svg = bench_plot(_evidence(COUNT, ZERO))
    half, zero = _numbers(svg, "circle")
    limits = [found["x1"] for found in _numbers(svg, "line", stroke_width="2") if found["x1"] == found["x2"]]
    assert len(set(limits)) == 1
    # What is allowed to be nothing and is nothing lies on its limit; what is far beyond, on the border.
    assert zero["cx"] == limits[0]
    (start, *_), border = sorted(found["x1"] for found in _numbers(svg, "line", stroke_width="0.3")), _corners(svg)
    assert half["cx"] - start == pytest.approx((limits[0] - start) / 2, abs=0.2)
    assert [x - start for x, _ in border] == pytest.approx([1.5 * (limits[0] - start)] * 2, abs=0.2)


def test_words_say_what_shapes_show() -> None:
    svg = bench_plot(_evidence(CLAIM, FAILED, ABSENT))
    words = [str(found.text) for found in _elements(svg, "text")]
    assert words.index("4 [2, 8] (>= 2)") == words.index("pass") + 1
    bold = [str(found.text).split()[0] for found in _elements(svg, "text") if "font-weight" in found.attrib]
    assert bold == ["fastimpl", "FAIL"]
    assert "not measured here: gpu" in words
    assert "2 x A & B <C>" in words[0]
    colours = {element.attrib.get(key) for element in ElementTree.fromstring(svg).iter() for key in ("fill", "stroke")}
    assert colours - {None} == {"#1a1a1a", "#ffffff"}


def test_axes() -> None:
    axis = LogAxis(0.5, 50.0, 100.0, 200.0)
    assert [axis.at(value) for value in (0.5, 5.0, 50.0)] == pytest.approx([100.0, 200.0, 300.0])
    assert [axis.at(value) for value in (0.1, 900.0)] == [100.0, 300.0]
    assert axis.ticks() == [0.5, 1, 2, 5, 10, 20, 50]
    assert LogAxis(0.01, 1e4, 0, 1).ticks() == pytest.approx([10.0**power for power in range(-2, 5)])
    assert LogAxis.around([2.0, 0.25], 0, 1) == LogAxis(0.25 / 1.15, 2.0 * 1.15, 0, 1)
    assert LinearAxis(0.0, 2.0, 10.0, 100.0).at(1.0) == 60.0


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "bench.json", tmp_path / "deep" / "plot.svg"
    write_evidence(_evidence(CLAIM, COUNT), source)
    assert main(["plot", str(source), "--svg", str(out)]) == 0
    assert len(_elements(out.read_text(), "circle")) == 2
    assert not any(word in out.read_text() for word in ("<script", "href=", "url(", "@import"))
    with pytest.raises(ConfigError, match="nothing to plot"):
        bench_plot(_evidence(ABSENT))
    write_evidence(replace(_evidence(), outcomes=[]), source)
    assert main(["plot", str(source), "--svg", str(out)]) == 2
    assert "nothing to plot" in capsys.readouterr().err
