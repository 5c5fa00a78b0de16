"""``bench history``: ratios in order of time, and steps whose rate of false alarms is what it says."""

from __future__ import annotations

import math
import random
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from perf.harness.cli import main
from perf.harness.history import FALSE_ALARMS, find_step, history_lines, history_plot, runs_min, series
from perf.harness.judge import Machine, Outcome, Result, Ruling
from perf.harness.results import Evidence, write_evidence

_SHAPE = {"component": "kvstore", "job": "get", "shape": [10, 4], "tensor_count": 1}


def _run(hour: int, value: float, *, gates: Sequence[str] = ("kv-get",), commit: str | None = "abc") -> Evidence:
    ruling = Ruling(Result.PASS, "measured", value, 0.9 * value, 1.1 * value)
    outcomes = [
        Outcome(gate, "claim", "is fast", "shape", 1.5, Result.PASS, "measured", ruling, ruling).as_dict()
        for gate in gates
    ]
    facts = {"cpu": {"count": 2, "model": "Some"}, "commit": commit}
    created = f"2026-01-{1 + hour // 24:02}T{hour % 24:02}:00:00+00:00"
    return Evidence("fastimpl", "full", 0, Machine(("cpu",), "tmpfs"), facts, {"shape": _SHAPE}, {}, outcomes, created)


def _noisy(count: int, seed: int, *, step_at: int | None = None, factor: float = 1.0) -> list[float]:
    """Heavy tails: one run in ten is far off, as on machines that others use."""
    draw = random.Random(seed)
    spreads = [0.3 if draw.random() < 0.1 else 0.02 for _ in range(count)]
    values = [2 * math.exp(draw.gauss(0, spread)) for spread in spreads]
    return [value * (factor if step_at is not None and n >= step_at else 1) for n, value in enumerate(values)]


def test_false_alarms_are_as_rare_as_they_are_said_to_be() -> None:
    trial_count, allowed = 300, 0.05
    alarms = sum(find_step(_noisy(12, seed), false_alarms=allowed) is not None for seed in range(trial_count))
    # Five standard deviations of a binomial of that rate: the test itself is wrong once in a million.
    deviation = math.sqrt(trial_count * allowed * (1 - allowed))
    assert alarms <= trial_count * allowed + 5 * deviation
    # It is not that it never speaks, either.
    assert alarms >= trial_count * allowed - 3.5 * deviation


def test_machines_of_one_name_have_histories_of_their_own() -> None:
    """Under a hypervisor's name for several processors a step would be that of another one."""
    runs = [_run(hour, 2.0) for hour in range(4)]
    flags: tuple[dict[str, list[str]], ...] = (
        {"flags": ["avx2"]},
        {"flags": ["avx2", "avx512f"]},
        {"flags": ["avx2"]},
        {},
    )
    for run, said in zip(runs, flags, strict=True):
        run.environment["cpu"] = {"count": 2, "model": "Some", **said}
    found = [(each.machine, len(each.points)) for each in series(runs)]
    # What says nothing of its vector units is taken for the first.
    assert found == [("2 x Some, tmpfs", 3), ("2 x Some, tmpfs, cpu flags avx2 avx512f", 1)]


@pytest.mark.parametrize("step_at", [4, 8, 12])
def test_a_step_is_found_where_it_is(step_at: int) -> None:
    values = [2.0 + 0.02 * (n % 3) for n in range(16)]
    stepped = [value * (0.8 if n >= step_at else 1) for n, value in enumerate(values)]
    assert find_step(values) is None
    found = find_step(stepped)
    assert found is not None
    assert found.index == step_at
    assert found.factor == pytest.approx(0.8, rel=0.02)
    assert 0 < found.chance <= FALSE_ALARMS


def test_one_run_that_is_far_off_is_no_step() -> None:
    for place in (0, 7, 15):
        values = [2.0 + 0.02 * (n % 3) for n in range(16)]
        values[place] = 0.5
        assert find_step(values) is None


def test_too_few_runs_tell_no_step() -> None:
    # Of 8 runs, the clearest step looks like 2 of the 70 ways to choose a half: 0.029; of 7, like 2 of 35: 0.057.
    assert runs_min(0.05) == 8
    assert runs_min(0.05 / 10) == 11
    clear = [1.0, 1.01, 1.02, 1.03, 2.0, 2.01, 2.02, 2.03]
    found = find_step(clear)
    assert found is not None
    assert found.index == 4
    assert [find_step(clear[:count]) for count in (0, 1, 2, 7)] == [None] * 4
    assert find_step(clear, false_alarms=0.05 / 10) is None


def test_the_chance_is_divided_among_the_gates() -> None:
    # Clear enough alone, and not among twenty.
    values = [1.0, 1.01, 1.02, 1.03, 2.0, 2.01, 2.02, 2.03]
    alone = series(_run(n, value) for n, value in enumerate(values))
    assert "STEP to 1.985 times at 2026-01-01T04:00 abc" in "\n".join(history_lines(alone))
    gates = [f"kv-get-{n}" for n in range(20)]
    many = series(_run(n, value, gates=gates) for n, value in enumerate(values))
    lines = "\n".join(history_lines(many))
    assert "STEP" not in lines
    assert lines.count("8 runs; a step shows in 12") == 20


def test_series_are_in_order_of_time_and_never_mix_machines_forms_or_shapes() -> None:
    runs = [_run(2, 3.0), _run(0, 1.0), _run(1, 2.0)]
    (found,) = series(runs)
    assert [point.value for point in found.points] == [1.0, 2.0, 3.0]
    assert found.points[0].label == "2026-01-01T00:00 abc"
    others = [
        replace(runs[0], form="short"),
        replace(runs[0], machine=Machine(("cpu",), "ext4")),
        replace(runs[0], environment={"cpu": {"count": 4, "model": "Some"}}),
        replace(runs[0], workloads={"shape": {**_SHAPE, "shape": [20, 4]}}),
    ]
    assert sorted(len(each.points) for each in series([*runs, *others])) == [1, 1, 1, 1, 3]
    unmeasured = _run(5, 1.0)
    unmeasured.outcomes[0]["subject"]["value"] = None
    assert series([unmeasured]) == []


def test_implementations_are_apart() -> None:
    other = replace(_run(1, 3.0), implementation="theirs")
    assert [each.implementation for each in series([_run(0, 2.0), other])] == ["fastimpl", "theirs"]


def test_the_table_shows_the_last_runs_and_what_was_not_measured_in_one() -> None:
    runs = [_run(n, 2.0 + n / 100, gates=("kv-get", "kv-set") if n != 8 else ("kv-get",)) for n in range(10)]
    lines = list(history_lines(series(runs)))
    assert lines[0] == "kvstore of fastimpl on 2 x Some, tmpfs, full form: 10 runs, the last 8"
    assert lines[1] == "  run 3: 2026-01-01T02:00 abc"
    assert lines[9].split() == ["gate", *(word for n in range(3, 11) for word in ("run", str(n))), "floor", "step"]
    assert lines[10].split()[:10] == ["kv-get", "2.02", "2.03", "2.04", "2.05", "2.06", "2.07", "2.08", "2.09", "1.5"]
    assert lines[11].split()[7:10] == ["-", "2.09", "1.5"]


def _elements(svg: str, name: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(f"{{http://www.w3.org/2000/svg}}{name}"))


def test_the_plot_has_every_point_its_interval_the_floor_and_the_step() -> None:
    values = [2.0, 2.02, 2.01, 2.03, 2.02, 1.0, 1.02, 1.01, 1.03, 1.02]
    svg = history_plot(series(_run(n, value) for n, value in enumerate(values)))
    discs = _elements(svg, "circle")
    assert len(discs) == len(values)
    places = [float(disc.attrib["cx"]) for disc in discs]
    assert places == sorted(places)
    heights = [float(disc.attrib["cy"]) for disc in discs]
    # What is larger lies higher, and y grows downwards.
    assert max(heights[:5]) < min(heights[5:])
    dashes = {found.attrib.get("stroke-dasharray"): found for found in _elements(svg, "line")}
    floor, step = dashes["6 4"], dashes["1 3"]
    assert max(heights[:5]) < float(floor.attrib["y1"]) < min(heights[5:])
    assert places[4] < float(step.attrib["x1"]) < places[5]
    words = " ".join(str(found.text) for found in _elements(svg, "text"))
    assert "STEP to 0.505 times at 2026-01-01T05:00 abc" in words


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n in range(3):
        write_evidence(_run(n, 2.0, gates=("kv-get", "kv-<set>")), tmp_path / "runs" / f"{n}.json")
    pages = {name: tmp_path / "out" / f"history.{name}" for name in ("svg", "html")}
    options = [word for name, path in pages.items() for word in (f"--{name}", str(path))]
    assert main(["history", str(tmp_path / "runs"), *options]) == 0
    assert "3 runs; a step shows in 8" in capsys.readouterr().out
    assert len(_elements(pages["svg"].read_text(), "circle")) == 6
    page = pages["html"].read_text()
    # One file that asks for nothing else.
    assert page.count("kv-&lt;set&gt;") == 2
    assert "kv-<set>" not in page
    assert "<svg" in page
    assert not any(word in page for word in ("<script", "href=", "src=", "url(", "@import"))
    assert main(["history", str(tmp_path / "runs"), "--only", "kv-get"]) == 0
    assert "set" not in capsys.readouterr().out
    # A run of another implementation, of which nothing could be measured, is not left out in silence.
    bare = replace(_run(3, 1.0, gates=()), implementation="theirs")
    write_evidence(bare, tmp_path / "runs" / "bare.json")
    assert main(["history", str(tmp_path / "runs")]) == 0
    printed = capsys.readouterr()
    assert "3 runs; a step shows in 8" in printed.out
    assert printed.err == "no ratio in the run of theirs, full form, 2026-01-01T03:00: it is not shown\n"
    assert main(["history", str(tmp_path / "runs"), "--only", "nothing"]) == 2
    assert main(["history", str(tmp_path / "absent")]) == 2
    assert "nothing" in capsys.readouterr().err
