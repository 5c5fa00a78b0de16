"""The overlap report's command on the virtual device, and its recorder on a CPU, where nothing overlaps."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fastimpl import ops, pipeline
from fastimpl.pipeline.overlap import HostWait, Instruction, Record, Span, StepEnd, Work, overlap_report, replay
from fastimpl.pipeline.overlap_views import to_svg
from fastimpl.pipeline.recording import HostClock, Recorder
from perf.harness.cli import main
from perf.pipeline import overlap
from perf.pipeline.pr2916_model import Sizes, loader_of, make_model
from twinproof.engine import InlineEngine
from twinproof.errors import ConfigError

pytestmark = pytest.mark.skipif(not ops.available(), reason="no library was built")


def test_files_say_what_fused_hides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = [found for found in overlap._SCHEDULES if found[0] == "Fused, lookup stream new"]
    monkeypatch.setattr(overlap, "_SCHEDULES", tuple(fused))
    said: list[str] = []
    overlap.write_overlap(tmp_path / "new" / "figures", overlap.stage_durations(["lookup=10"]), said.append)
    (report,) = json.loads((tmp_path / "new" / "figures.json").read_text())["reports"]
    # An example with a shorter lookup: F + B + max(P, L).
    assert report["step_s"] == pytest.approx(0.030 + 0.087 + 0.015)
    stages = {stage["stage"]: stage for stage in report["stages"]}
    assert stages["lookup"]["exposed_s"] == pytest.approx(0.0)
    assert stages["dense_optimizer"]["exposed_s"] == pytest.approx(0.005)
    assert "step 132.00" in said[0]
    trace = json.loads((tmp_path / "new" / "figures.trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in trace} == {"M", "X", "s", "f"}
    picture = ElementTree.parse(tmp_path / "new" / "figures.svg").getroot()
    assert len(picture.findall(".//{http://www.w3.org/2000/svg}title")) >= 3 * 4


def test_the_picture_agrees_with_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [found for found in overlap._SCHEDULES if found[0] in ("Base", "Fused, after data dist")]
    monkeypatch.setattr(overlap, "_SCHEDULES", tuple(chosen))
    runs = overlap.measure_overlap(overlap.STAGE_MS)
    for report, timeline in runs:
        picture = ElementTree.fromstring(to_svg([(report, timeline)]))
        titles = [found.text or "" for found in picture.iter("{http://www.w3.org/2000/svg}title")]
        words = [found.text or "" for found in picture.iter("{http://www.w3.org/2000/svg}text")]
        # Three steps are shown: what is drawn of each stage is what the report says of it, three times.
        drawn: dict[str, float] = {}
        for title in titles:
            found = re.fullmatch(r"(\w+), step (\d+): (\S+) ms", title)
            assert found is not None, title
            if found[2] in ("2", "3", "4"):
                drawn[found[1]] = drawn.get(found[1], 0.0) + float(found[3])
        expected = {stage.stage: 3000 * stage.duration_s for stage in report.stages}
        assert drawn == pytest.approx({**expected, "wait": 3000 * report.host_blocked_s})
        assert set(expected) == set(overlap.STAGE_MS)
        (headline,) = (word for word in words if word.startswith(f"{report.schedule}: "))
        assert f"step {1000 * report.step_s:.4g} ms, one after the other {1000 * report.serial_s:.4g}" in headline
        (stages,) = (word for word in words if "batch copy 3 (" in word)
        for name, figure in overlap.STAGE_MS.items():
            assert f"{name.replace('_', ' ')} {figure:.4g} (" in stages
            assert any(word.endswith(f"  {name.replace('_', ' ')}") for word in words), "the legend names it"
        # An axis in milliseconds, and a line where each step ends.
        length_ms = round(1000 * (timeline.ends_s[4] - timeline.ends_s[1]))
        assert [int(word) for word in words if word.isdigit()] == [*range(0, length_ms + 1, 50)]
        assert [word for word in words if word.endswith("ends")] == [f"step {number} ends" for number in (2, 3, 4)]


def test_wrong_durations_are_refused() -> None:
    for word in ("lookups=3", "lookup", "lookup=-1", "lookup=x"):
        with pytest.raises(ConfigError, match="not a duration of a stage"):
            overlap.stage_durations([word])


def test_the_command_line_refuses_what_it_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["--table"], ["--overlap", str(tmp_path / "x")]):
        with pytest.raises(SystemExit) as refused:
            main(["offload", *option])
        assert refused.value.code == 2
    assert main(["pipeline", "--overlap", str(tmp_path / "x"), "--stage-ms", "lookups=3"]) == 2
    refusal = capsys.readouterr().err
    assert "not a duration of a stage" in refusal
    assert "where: --stage-ms" in refusal
    shown = ["pipeline", "--overlap", str(tmp_path / "x")]
    for name, words in {
        "--stage-ms": ["pipeline", "--stage-ms", "lookup=3"],
        "--gates": [*shown, "--gates"],
        "--only": [*shown, "--only", "kv-get"],
        "--gate": [*shown, "--gate", "kv-get"],
        "--no-repeat": ["pipeline", "--table", "--no-repeat"],
        "--short": ["pipeline", "--table", "--short"],
        "--impl": [*shown, "--impl", "refimpl"],
        "--json": [*shown, "--json", str(tmp_path / "x.json")],
        "--only: --gate": ["--gate", "kv-get", "--only", "kv-set"],
    }.items():
        with pytest.raises(SystemExit) as refused:
            main(words)
        assert refused.value.code == 2
        assert f"no effect has {name}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_nothing_is_hidden_where_the_host_does_all() -> None:
    sizes = Sizes(table_count=2, rows=16, dim=4, batch=4, pooling=2, width=4)
    model, optimizer = make_model(sizes)
    recorder = Recorder(InlineEngine(), HostClock())
    schedule: Any = pipeline.TrainPipelineFusedSparseDist(model, optimizer, engine=recorder)
    batches = islice(loader_of(sizes, 0), 8)
    for _ in range(6):
        with recorder.step():
            schedule.progress(batches)
    report = overlap_report(recorder.program(), schedule="Fused", device="cpu")
    assert set(overlap.STAGE_MS) <= {stage.stage for stage in report.stages}
    for stage in report.stages:
        assert stage.hidden_fraction == 0
        assert stage.exposed_s == pytest.approx(stage.duration_s, rel=1e-6)
    with pytest.raises(ConfigError, match="too few steps"):
        overlap_report(recorder.program(), schedule="Fused", device="cpu", margin_count=3)


def test_work_waits_for_the_host_and_the_host_for_work() -> None:
    program: list[Instruction] = [
        Work("a", 0, "left", 5.0),
        Record(1, "left"),
        HostWait(1, 0, issued_s=1.0),
        Work("b", 0, "right", 2.0, issued_s=1.5),
        StepEnd(0, issued_s=2.0),
    ]
    found = replay(program)
    # The host waits from 1 to 5, and needs half a second more for what it had ready at 1.5.
    assert found.host_waits == [Span("wait", 0, "host", 1.0, 5.0)]
    assert found.spans[1] == Span("b", 0, "right", 5.5, 7.5)
    assert replay(program, without="a").ends_s == [3.5]


class _SlowHost(HostClock):
    """A host whose clock moves when it is told to."""

    now_s = 0.0

    def lane(self, name: str) -> str:
        return name

    def mark(self, stream: Any) -> float:
        return 0.0

    def host_s(self) -> float:
        return self.now_s


class _Events(InlineEngine):
    """Waiting for an event takes the host three seconds."""

    def __init__(self, clock: _SlowHost) -> None:
        super().__init__()
        self.clock = clock

    def event(self) -> Any:
        return object()

    def synchronize(self, event: Any) -> None:
        self.clock.now_s += 3.0


def test_the_time_that_the_host_waits_is_not_its_own() -> None:
    clock = _SlowHost()
    recorder = Recorder(_Events(clock), clock)
    event = recorder.event()
    with recorder.step():
        clock.now_s += 1.0
        recorder.record(event, "side")
        recorder.synchronize(event)
        clock.now_s += 0.5
        with recorder.stage("forward"):
            pass
    found = recorder.program()
    assert [one.issued_s for one in found if isinstance(one, HostWait)] == [1.0]
    assert [one.issued_s for one in found if isinstance(one, StepEnd)] == [1.5]
    assert recorder.step_count == 1
    with pytest.raises(StopIteration), recorder.step():
        raise StopIteration
    assert recorder.step_count == 1, "a step that raised is none"
