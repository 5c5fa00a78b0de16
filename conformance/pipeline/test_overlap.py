"""The overlap report on the virtual device, whose clock knows every duration, held against closed forms."""

from __future__ import annotations

import dataclasses
import html
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, assert_le, examples, raises, requirement, succeeds
from conformance.pipeline.cases import EXACT, FUSED, LoaderError
from conformance.pipeline.jobs import Job
from conformance.pipeline.virtual_batches import on_host, virtual
from conformance.provers.virtual_device import Costs, VirtualClock, VirtualDevice, VirtualEngine
from twinproof.errors import ConfigError

SPARSE_DIST = "TrainPipelineSparseDist"
STREAMS = ("a", "b", "c")
SCHEDULES: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {}) for name in EXACT),
    (FUSED, {"emb_lookup_stream": "new", "embedding_lookup_before_optimizer": True}),
    ("TrainPipelineSemiSync", {"start_batch": 1}),
)
# Ops whose seconds are chosen. A step has two of each, and four dense parameters.
LOOKUP, UPDATE, DENSE = "twinproof::pipeline_pool", "twinproof::pipeline_step", "aten::mul_"
LINEAR, IDS = "aten::addmm", "twinproof::pipeline_check_ids"
ALL = {LOOKUP: 7.0, UPDATE: 5.0, DENSE: 2.0, LINEAR: 4.0, IDS: 1.0, "byte": 0.03125}


class HostsTime(VirtualClock):
    """The host's time counts, as on a GPU: it moves on while the host waits."""

    def host_s(self) -> float:
        """The host's."""
        return self.engine.time_s["host"]


def recorded(
    pipeline: Any,
    name: str,
    options: dict[str, Any],
    seconds: dict[str, float],
    *,
    sees_reads: bool = False,
    clock: type[VirtualClock] = VirtualClock,
    forgets: int | None = None,
) -> tuple[list[Any], VirtualEngine, list[float]]:
    """Six steps: the program, the engine with its clocks, and when each ends; ``seconds`` are those of ops by name.

    ``sees_reads``: the recorder finds the host's reads itself, as on a GPU; else the device tells of them. ``forgets``:
    behind so many steps the recorder begins anew.
    """
    from fastimpl.pipeline.recording import Recorder

    costs = Costs(h2d_s_per_byte=seconds.get("byte", 0.0), op_s=lambda op, size_bytes: seconds.get(op, 0.0))
    device, job = VirtualDevice(costs=costs), Job(pipeline, 5, kinds=("table_wise",), device="cpu")
    engine = device.engine
    recorder = Recorder(engine, clock(engine), sees_reads=sees_reads)
    if not sees_reads:
        device.engine = recorder  # type: ignore[assignment]
    batches = [virtual(device, batch) for batch in on_host(device, [job.batch(number) for number in range(6)])]
    with device:
        schedule, loader = job.schedule(name, engine=recorder, **options), iter(batches)
        ends_s = []
        for step in range(6):
            if step == forgets:
                recorder.forget()
            with recorder.step():
                schedule.progress(loader)
            ends_s.append(engine.makespan_s)
    return recorder.program(), engine, ends_s


def figures_of(pipeline: Any, name: str, options: dict[str, Any], seconds: dict[str, float]) -> tuple[Any, Any]:
    """The report of a schedule, and its stages by name."""
    from fastimpl.pipeline.overlap import overlap_report

    program, _, _ = recorded(pipeline, name, options, seconds)
    report = overlap_report(program, schedule=name, device="virtual")
    return report, {stage.stage: stage for stage in report.stages}


@pytest.mark.night
@requirement(
    "PIPE-160",
    "A replay of what was recorded MUST end every step when the virtual clock did, for every schedule and placement.",
    needs=("streams",),
)
def test_replay_is_exact(pipeline: Any) -> None:
    from fastimpl.pipeline.overlap import replay

    for name, options in SCHEDULES:
        program, _, ends_s = recorded(pipeline, name, options, ALL)
        assert_equal(replay(program).ends_s, ends_s, where=f"ends of steps, {name} {options}")
    program, _, ends_s = recorded(pipeline, FUSED, {"emb_lookup_stream": "current"}, ALL)
    assert_equal(replay(program).ends_s, ends_s, where="ends of steps, lookups on the caller's stream")
    program, _, ends_s = recorded(pipeline, FUSED, {}, ALL, sees_reads=True)
    assert_equal(replay(program).ends_s, ends_s, where="ends of steps, reads seen by the recorder")


@requirement(
    "PIPE-161",
    "The report of Fused MUST say that a lookup of L seconds and a dense optimizer of P hide min(L, P) of each other, "
    "and that without one of them a step takes what the other takes.",
    needs=("streams",),
)
def test_fused_hides_the_shorter(pipeline: Any) -> None:
    for lookup_s, dense_s in ((4.0, 1.0), (1.0, 4.0)):
        report, stages = figures_of(pipeline, FUSED, {}, {LOOKUP: lookup_s, DENSE: dense_s})
        both = {"lookup": 2 * lookup_s, "dense_optimizer": 4 * dense_s}
        longer, shorter = max(both.values()), min(both.values())
        assert_equal(report.step_s, longer, where=f"a step, {both}")
        assert_equal(report.serial_s, longer + shorter, where=f"one after the other, {both}")
        for stage, seconds in both.items():
            assert_equal(stages[stage].duration_s, seconds, where=f"duration of {stage}, {both}")
            assert_equal(stages[stage].hidden_fraction, shorter / seconds, where=f"hidden of {stage}, {both}")
            assert_equal(stages[stage].exposed_s, seconds - shorter, where=f"exposed of {stage}, {both}")


@requirement(
    "PIPE-162",
    "The report of SparseDist MUST say that the input dist is hidden as far as the rest of a step is as long, and "
    "that lookup, forward and dense optimizer are exposed in full.",
    needs=("streams",),
)
def test_sparse_dist_hides_the_input_dist(pipeline: Any) -> None:
    for ids_s in (1.0, 16.0):
        report, stages = figures_of(pipeline, SPARSE_DIST, {}, {IDS: ids_s, LOOKUP: 1.0, LINEAR: 4.0, DENSE: 1.0})
        rest, exchange = 2 * 1.0 + 2 * 4.0 + 4 * 1.0, 2 * ids_s
        assert_equal(report.step_s, max(rest, exchange), where=f"a step, ids {ids_s}")
        assert_equal(stages["input_dist"].exposed_s, max(0.0, exchange - rest), where=f"exposed ids, {ids_s}")
        if exchange < rest:
            found = {name: stages[name].exposed_s for name in ("lookup", "forward", "dense_optimizer")}
            assert_equal(found, {"lookup": 2.0, "forward": 8.0, "dense_optimizer": 4.0}, where="exposed")


@requirement(
    "PIPE-163",
    "The exposed time of a stage MUST be what a step is shorter when the schedule is run with ops of that stage that "
    "take no time.",
    needs=("streams",),
)
def test_counterfactual_is_a_rerun(pipeline: Any) -> None:
    seconds = {LOOKUP: 3.0, UPDATE: 5.0, DENSE: 2.0, IDS: 2.0}
    report, stages = figures_of(pipeline, FUSED, {}, seconds)
    for stage, op in (("lookup", LOOKUP), ("dense_optimizer", DENSE), ("input_dist", IDS)):
        rerun, _ = figures_of(pipeline, FUSED, {}, {**seconds, op: 0.0})
        assert_equal(stages[stage].exposed_s, report.step_s - rerun.step_s, where=f"exposed of {stage}")


@requirement(
    "PIPE-164",
    "In the trace, work MUST begin when the work before it on its track ends, when a wait of the host ends, or where "
    "an arrow ends that comes from work that is just over.",
    needs=("streams",),
)
def test_trace_shows_why(pipeline: Any) -> None:
    from fastimpl.pipeline.overlap import replay
    from fastimpl.pipeline.overlap_views import to_trace

    program, _, _ = recorded(pipeline, FUSED, {}, ALL)
    events = to_trace([(FUSED, replay(program))])["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert_equal(sorted(tracks.values()), ["data_dist", "default", "host", "memcpy"], where="tracks")
    work = [event for event in events if event["ph"] == "X"]
    ends = [(event["tid"], event["ts"] + event["dur"]) for event in work]
    arrows = {phase: {event["id"]: event for event in events if event["ph"] == phase} for phase in "sf"}
    assert_equal(sorted(arrows["s"]), sorted(arrows["f"]), where="ends of arrows")
    host = next(track for track, name in tracks.items() if name == "host")
    for event in work:
        reasons = {0.0, *(end for track, end in ends if track in (event["tid"], host))}
        for number, target in arrows["f"].items():
            if (target["tid"], target["ts"]) == (event["tid"], event["ts"]):
                reasons.add(_end_around(work, arrows["s"][number]))
        if event["tid"] != host:
            why = event["ts"] if event["ts"] in reasons else None
            assert_equal(why, event["ts"], where=f"reason of {event['name']} of step {event['args']['step']}")


@requirement(
    "PIPE-419",
    "A trace of several schedules MUST be the traces of each: a process of its own, with the same tracks, work and "
    "arrows, and no number of an arrow twice.",
    needs=("streams",),
)
def test_trace_of_several(pipeline: Any) -> None:
    from fastimpl.pipeline.overlap import replay
    from fastimpl.pipeline.overlap_views import to_trace

    runs = [(name, replay(recorded(pipeline, name, options, ALL)[0])) for name, options in SCHEDULES[1:3]]
    events = to_trace(runs)["traceEvents"]
    starts = [event["id"] for event in events if event["ph"] == "s"]
    assert_equal(len(set(starts)), sum(len(timeline.edges) for _, timeline in runs), where="numbers of arrows")
    processes = list(dict.fromkeys(event["pid"] for event in events))
    assert_equal(len(processes), len(runs), where="processes")
    for process, (name, timeline) in zip(processes, runs, strict=True):
        mine = [event for event in events if event["pid"] == process]
        arrows = {number: place for place, number in enumerate(dict.fromkeys(e["id"] for e in mine if "id" in e), 1)}
        found = [{**e, "pid": 1, **({"id": arrows[e["id"]]} if "id" in e else {})} for e in mine]
        assert_equal(found, to_trace([(name, timeline)])["traceEvents"], where=f"events of {name}")


def _program(data: st.DataObject, gaps: st.SearchStrategy[int]) -> list[Any]:
    """Four steps of work on some streams, with events between them; ``gaps``: what the host takes before each call."""
    from fastimpl.pipeline.overlap import HostWait, Record, StepEnd, Wait, Work

    program, event, issued_s = list[Any](), 0, 0

    def issued() -> float:
        nonlocal issued_s
        issued_s += data.draw(gaps)
        return float(issued_s)

    for step in range(4):
        for _ in range(data.draw(st.integers(2, 5))):
            stream, stage = data.draw(st.sampled_from(STREAMS)), data.draw(st.sampled_from(["x", "y", "z"]))
            program.append(Work(stage, step, stream, float(data.draw(st.integers(1, 4))), issued()))
            kind = data.draw(st.sampled_from(["none", "wait", "host"]))
            if kind != "none":
                event += 1
                program.append(Record(event, stream))
                other = data.draw(st.sampled_from(STREAMS))
                program.append(Wait(event, other) if kind == "wait" else HostWait(event, step, issued()))
        program.append(StepEnd(step, issued()))
    return program


@requirement(
    "PIPE-691",
    "A replay MUST place work, waits of the host and ends of steps where the longest path through streams, events and "
    "the host's calls leads, whose gaps are those recorded, however often the host waited before.",
    needs=("streams",),
)
@examples(60)
@given(data=st.data())
def test_longest_path(pipeline: Any, data: st.DataObject) -> None:
    from fastimpl.pipeline.overlap import HostWait, Record, Wait, Work, replay

    program = _program(data, st.integers(0, 3))
    ready: dict[str, float] = dict.fromkeys(STREAMS, 0.0)
    events: dict[int, float] = {}
    host_s = issued_s = 0.0
    begins, waits, ends = list[float](), list[float](), list[float]()
    for one in program:
        if not isinstance(one, (Record, Wait)):
            host_s, issued_s = host_s + one.issued_s - issued_s, one.issued_s
        if isinstance(one, Work):
            begins.append(max(ready[one.stream], host_s))
            ready[one.stream] = begins[-1] + one.duration_s
        elif isinstance(one, Record):
            events[one.event] = max(ready[one.stream], host_s)
        elif isinstance(one, Wait):
            ready[one.stream] = max(ready[one.stream], events[one.event])
        elif isinstance(one, HostWait):
            waits += [host_s] if events[one.event] > host_s else []
            host_s = max(host_s, events[one.event])
        else:
            ends.append(max(ready.values()))
    made = replay(program)
    assert_equal([span.begin_s for span in made.spans], begins, where="begins of work")
    assert_equal([span.begin_s for span in made.host_waits], waits, where="begins of waits")
    assert_equal(made.ends_s, ends, where="ends of steps")


@requirement(
    "PIPE-420",
    "Whatever is recorded, on any number of streams, a stage MUST be hidden for as long as any other stream works "
    "beside it, each moment once; and exposed for what a step is shorter when the same is recorded without it.",
    needs=("streams",),
)
@examples(60)
@given(data=st.data())
def test_any_program(pipeline: Any, data: st.DataObject) -> None:
    from fastimpl.pipeline.overlap import overlap_report, replay

    program = _program(data, st.just(0))
    timeline, report = replay(program), overlap_report(program, schedule="any", device="none", margin_count=1)
    steady = range(1, len(timeline.ends_s) - 1)
    for stage in report.stages:
        mine = [span for span in timeline.spans if span.stage == stage.stage and span.step in steady]
        # Durations are whole, and so is all else.
        moments = [(span.stream, at) for span in mine for at in range(int(span.begin_s), int(span.end_s))]
        busy = {(span.stream, at) for span in timeline.spans for at in range(int(span.begin_s), int(span.end_s))}
        hidden = [any((stream, at) in busy for stream in STREAMS if stream != own) for own, at in moments]
        assert_equal(stage.hidden_fraction, sum(hidden) / len(moments), where=f"hidden of {stage.stage}")
        assert_equal(stage.duration_s, len(moments) / len(steady), where=f"duration of {stage.stage}")
        without = [one for one in program if getattr(one, "stage", None) != stage.stage]
        rerun = replay(without).ends_s
        shorter = [ends[steady[-1]] - ends[steady[0] - 1] for ends in (timeline.ends_s, rerun)]
        assert_equal(stage.exposed_s, (shorter[0] - shorter[1]) / len(steady), where=f"exposed of {stage.stage}")


def _end_around(work: list[dict[str, Any]], point: dict[str, Any]) -> float:
    """When the work is over that a point of the trace lies in."""
    for event in work:
        if event["tid"] == point["tid"] and event["ts"] <= point["ts"] < event["ts"] + event["dur"]:
            end: float = event["ts"] + event["dur"]
            return end
    return -1.0


@requirement(
    "PIPE-165",
    "Host-blocked time MUST be what the host's clock moves on where enqueueing takes no time, and the report's the "
    "mean of its steps.",
    needs=("streams",),
)
def test_host_blocked(pipeline: Any) -> None:
    from fastimpl.pipeline.overlap import overlap_report, replay

    for name in (SPARSE_DIST, FUSED):
        program, engine, _ = recorded(pipeline, name, {}, ALL)
        waits = [(span.step, span.end_s - span.begin_s) for span in replay(program).host_waits]
        assert_equal(sum(wait_s for _, wait_s in waits), engine.time_s["host"], where=f"waits of the host, {name}")
        for margin_count in (1, 2):
            counted = range(margin_count, 6 - margin_count)
            mean_s = sum(wait_s for step, wait_s in waits if step in counted) / len(counted)
            report = overlap_report(program, schedule=name, device="virtual", margin_count=margin_count)
            assert_equal(report.host_blocked_s, mean_s, where=f"mean of steps {counted}, {name}")


@pytest.mark.night
@requirement(
    "PIPE-199",
    "With a lookup stream of its own a step of Fused MUST NOT take longer than one of SparseDist, nor that than one of "
    "Base, whatever lookup, exchange, forward, update and dense optimizer take.",
    needs=("streams",),
)
def test_never_longer(pipeline: Any) -> None:
    chosen = random.Random(5)
    schedules: tuple[tuple[str, dict[str, Any]], ...] = (
        *((name, {}) for name in EXACT[:2]),
        (FUSED, {"emb_lookup_stream": "new"}),
    )
    for _ in range(6):
        seconds = {op: float(chosen.randint(0, 6)) for op in (LOOKUP, UPDATE, DENSE, LINEAR, IDS)}
        all_ends_s = [recorded(pipeline, name, options, seconds)[2] for name, options in schedules]
        base, sparse_dist, fused = (ends_s[-1] - ends_s[2] for ends_s in all_ends_s)
        assert_le(sparse_dist, base, where=f"SparseDist against Base, {seconds}")
        assert_le(fused, sparse_dist, where=f"Fused against SparseDist, {seconds}")


@requirement(
    "PIPE-376",
    "The picture of a schedule MUST begin where its second step ends, and show three steps or what there is of them.",
    needs=("streams",),
)
def test_window_of_the_picture(pipeline: Any) -> None:
    from fastimpl.pipeline.overlap import replay
    from fastimpl.pipeline.overlap_views import _window

    program, _, _ = recorded(pipeline, FUSED, {}, ALL)
    timeline = replay(program)
    ends = timeline.ends_s
    assert_le(6, len(ends), where="steps of the program")
    assert_equal(_window(timeline), (ends[1], ends[4]), where="of many steps")
    for count in (3, 4, 5):
        short = dataclasses.replace(timeline, ends_s=ends[:count])
        assert_equal(_window(short), (ends[1], ends[count - 1]), where=f"of {count} steps")


@requirement(
    "PIPE-544",
    "The legend of a picture MUST name each stage of its schedules once, those that a user named too, with the colour "
    "of its boxes, and the lines above MUST give every stage's figures.",
    needs=("streams",),
)
def test_legend(pipeline: Any) -> None:
    from fastimpl.pipeline.overlap import HostWait, Record, StepEnd, Work, overlap_report, replay
    from fastimpl.pipeline.overlap_views import to_svg

    own = ["augment", "evict", "a < b", "my_own_stage"]
    every: list[list[list[str]]] = [
        [["forward", "augment", "evict", "dense_optimizer"]],
        [["lookup", *own], ["lookup", "backward"]],
        [own[:2], ["batch_copy", *own[2:]]],
        [own],
    ]
    for schedules in every:
        runs = list[Any]()
        for stages in schedules:
            program = list[Any]()
            for step in range(6):
                program += [Work(stage, step, "main", 1.0) for stage in stages]
                program += [Record(step, "main"), HostWait(step, step), StepEnd(step)]
            runs.append((overlap_report(program, schedule="mine", device="none", margin_count=1), replay(program)))
        picture = html.unescape(re.sub(r"<g>|</g>", "", to_svg(runs)))
        expected = sorted({"wait", *(stage for stages in schedules for stage in stages)})
        legend = dict[str, list[str]]()
        for colour, name in re.findall(
            r'y="4" width="10" height="10" fill="(.*?)"/><text .*?>.  (.*?)</text>', picture
        ):
            legend.setdefault(name.replace(" ", "_"), []).append(colour)
        assert_equal(
            sorted(legend), sorted(each.replace(" ", "_") for each in expected), where=f"legend of {schedules}"
        )
        for stage in expected:
            boxes = re.findall(rf'<title>{stage}, step .*?</title><rect .*?fill="(.*?)"', picture)
            assert_equal(legend[stage.replace(" ", "_")], sorted(set(boxes)), where=f"colours of {stage}, {schedules}")
        for stages in schedules:
            said = [name for name in stages if f"{name.replace('_', ' ')} 1000 (" in picture]
            assert_equal(said, stages, where=f"stages with figures, {stages}")


@requirement(
    "PIPE-639",
    "A box of the picture MUST hold its stage's name where that fits with room around it, else the stage's letter, and "
    "nothing where a letter would not fit.",
    needs=("streams",),
)
@pytest.mark.parametrize(("stage", "letter"), [("lookup", "L"), ("dense_optimizer", "D"), ("my_own", "?")])
def test_words_of_boxes(pipeline: Any, stage: str, letter: str) -> None:
    from fastimpl.pipeline.overlap import Span
    from fastimpl.pipeline.overlap_views import _box

    name, span = stage.replace("_", " "), Span(stage, 0, "main", 0.0, 1.0)
    # 6 px a letter, and 6 around the name.
    room = 6.0 * len(name) + 6
    cases = {0.5: "", 8.0: "", 8.5: letter, room - 1: letter, room: letter, room + 0.5: name, 500.0: name}
    for width, expected in cases.items():
        words = re.findall(r"<text .*?>(.*?)</text>", _box(span, 0.0, 0, width))
        assert_equal(words, [expected] if expected else [], where=f"{stage}, {width} wide")


@requirement(
    "PIPE-428",
    "Without a margin the overlap report MUST count every step, from the program's beginning to its end: what another "
    "number of steps at each end leaves out is all that it changes; a negative one MUST be refused.",
    needs=("streams",),
)
def test_margins(pipeline: Any) -> None:
    from fastimpl.pipeline.overlap import overlap_report, replay

    for name in (SPARSE_DIST, FUSED):
        program, _, _ = recorded(pipeline, name, {}, ALL)
        ends_s = [0.0, *replay(program).ends_s]
        for margin_count in (0, 1, 2):
            report = overlap_report(program, schedule=name, device="virtual", margin_count=margin_count)
            first, last = margin_count, len(ends_s) - 1 - margin_count
            expected = (last - first, (ends_s[last] - ends_s[first]) / (last - first))
            assert_equal((report.step_count, report.step_s), expected, where=f"{name}, margin {margin_count}")
        with raises(ConfigError, mentions=("margin_count", "-1")):
            overlap_report(program, schedule=name, device="virtual", margin_count=-1)


def _behind(program: list[Any], count: int) -> list[Any]:
    """What comes behind so many steps, counted from there; edges from what was before are no more."""
    from fastimpl.pipeline.overlap import HostWait, Record, StepEnd, Wait

    ends = [place for place, one in enumerate(program) if isinstance(one, StepEnd)]
    rest = program[ends[count - 1] + 1 :]
    known = {one.event for one in rest if isinstance(one, Record)}
    kept = [one for one in rest if not isinstance(one, (Wait, HostWait)) or one.event in known]
    return [dataclasses.replace(one, step=one.step - count) if hasattr(one, "step") else one for one in kept]


@pytest.mark.night
@requirement(
    "PIPE-436",
    "A recorder that was told to forget MUST record what follows as one that begins there: the same work, edges and "
    "waits, issued at the same moments, steps counted from 0, whatever the host waited before.",
    needs=("streams",),
)
def test_forgotten(pipeline: Any) -> None:
    from fastimpl.pipeline.recording import Recorder

    for name in (SPARSE_DIST, FUSED):
        whole, engine, _ = recorded(pipeline, name, {}, ALL, clock=HostsTime)
        assert_le(1.0, engine.time_s["host"], where=f"{name}: what the host waited")
        for count in (1, 3):
            found, _, _ = recorded(pipeline, name, {}, ALL, clock=HostsTime, forgets=count)
            assert_equal(found, _behind(whole, count), where=f"{name}: what is recorded behind {count} steps")
    engine = VirtualDevice().engine
    recorder = Recorder(engine, VirtualClock(engine))
    event = recorder.event()
    recorder.record(event, recorder.current())
    recorder.forget()
    recorder.synchronize(event)
    recorder.wait(recorder.current(), event)
    with succeeds("a program", where="an event that was forgotten"):
        program = recorder.program()
    assert_equal(program, [], where="a program of an event that was forgotten")


@requirement(
    "PIPE-449",
    "Work of a step outside of all stages, as a user's own before and behind progress(), MUST be recorded as "
    "such, and work between two steps MUST NOT, whatever events are recorded there.",
    needs=("streams",),
)
def test_own_work(pipeline: Any) -> None:
    from fastimpl.pipeline.overlap import Record, Work
    from fastimpl.pipeline.recording import Recorder

    found = list[Any]()
    for inside, between in ((0, 0), (3, 0), (0, 3), (3, 3)):
        costs = Costs(op_s=lambda op, size_bytes: {"aten::mul_": 2.0}.get(op, 0.0))
        device, job = VirtualDevice(costs=costs), Job(pipeline, 5, kinds=("table_wise",), device="cpu")
        recorder = Recorder(device.engine, VirtualClock(device.engine))
        batches = [virtual(device, batch) for batch in on_host(device, [job.batch(number) for number in range(2)])]
        with device:
            schedule, loader = job.schedule(SPARSE_DIST, engine=recorder), iter(batches)
            own, other = job.model.top.weight.detach(), job.model.bottom.weight.detach()
            event, stream = recorder.event(), recorder.stream("mine")
            recorder.record(event, recorder.current())
            for _ in range(2):
                with recorder.step():
                    for part in (lambda: None, lambda: schedule.progress(loader)):  # noqa: B023
                        part()
                        for _ in range(inside):
                            own.mul_(1.0)
                            recorder.wait(recorder.current(), event)
                            with recorder.on(stream):
                                other.mul_(1.0)
                            own.mul_(1.0)
                            recorder.synchronize(event)
                            own.mul_(1.0)
                for _ in range(between):
                    own.mul_(1.0)
                recorder.record(event, recorder.current())
        work = [one for one in recorder.program() if isinstance(one, Work) and one.stage == "other"]
        assert_equal(sum(one.duration_s for one in work), 32.0 * inside, where=f"{inside} inside, {between} between")
        found.append(len([one for one in recorder.program() if isinstance(one, Record)]))
    assert_equal(found, found[:1] * 4, where="events")


@requirement(
    "PIPE-450",
    "A recorder that looks for reads of the device's values itself MUST find some, and no more waits of the host than "
    "the device tells of, which knows those of operators too.",
    needs=("streams",),
)
def test_reads_seen(pipeline: Any) -> None:
    from fastimpl.pipeline.overlap import HostWait

    for name in (SPARSE_DIST, FUSED):
        programs = [recorded(pipeline, name, {}, ALL, sees_reads=sees)[0] for sees in (False, True)]
        told, seen = (sum(isinstance(one, HostWait) for one in program) for program in programs)
        assert_le(seen, told, where=f"{name}: waits that are seen, and told")
        assert_le(1, seen, where=f"{name}: waits that are seen")


def _listed(found: Any) -> Any:
    """What was read, with its type, as what can be compared."""
    if isinstance(found, (tuple, list)):
        return type(found).__name__, [_listed(one) for one in found]
    return type(found).__name__, found.tolist() if hasattr(found, "tolist") else found, str(getattr(found, "dtype", ""))


@requirement(
    "PIPE-558",
    "Inside of a recorded step every read of a tensor's values MUST give what it gives outside, with all of its "
    "arguments, by place or by name.",
    needs=("streams",),
)
def test_reads_as_outside(pipeline: Any) -> None:
    from fastimpl.pipeline.recording import HostClock, Recorder
    from twinproof.engine import InlineEngine

    table, one = torch.tensor([[0.0, 1.5], [2.5, 0.0]]), torch.tensor(3)
    reads: dict[str, Callable[[], Any]] = {
        "nonzero": lambda: table.nonzero(),
        "nonzero, a tuple": lambda: table.nonzero(as_tuple=True),
        "a function": lambda: torch.nonzero(table, as_tuple=True),
        "a function, by name": lambda: torch.nonzero(input=table, as_tuple=False),
        "numpy": lambda: table.requires_grad_().numpy(force=True),
        "cpu": lambda: table.cpu(memory_format=torch.contiguous_format),
        "item": lambda: one.item(),
        "tolist": lambda: table.tolist(),
        "a truth": lambda: bool(one),
        "a float": lambda: float(one),
        "an int": lambda: int(one),
        "an index": lambda: [10, 11, 12, 13][one],
    }
    for name, read in reads.items():
        expected = _listed(read())
        recorder = Recorder(InlineEngine(), HostClock(), sees_reads=True)
        with recorder.step():
            found = _listed(read())
        assert_equal(found, expected, where=name)


class ToldTime:
    """A clock that moves when it is told to, for the host and every stream."""

    now_s = 0.0

    def lane(self, name: str) -> str:
        """The stream."""
        return name

    def mark(self, stream: Any) -> float:
        """Now."""
        return self.now_s

    def seconds(self, begin: float, end: float) -> float:
        """The difference."""
        return end - begin

    def host_s(self) -> float:
        """Now."""
        return self.now_s


@requirement(
    "PIPE-516",
    "A call of progress that raises MUST be no step of a recorder: none of its work, of its waits and of the host's "
    "time in it is of the program, whose edges stay whole.",
    needs=("streams",),
)
def test_failed_steps(pipeline: Any) -> None:
    from fastimpl.pipeline.overlap import Record, Wait, overlap_report, replay
    from fastimpl.pipeline.recording import Recorder

    programs = list[list[Any]]()
    for failing in ((), (0,), (2,), (1, 3)):
        engine, clock = VirtualDevice().engine, ToldTime()
        recorder = Recorder(engine, clock)
        stream, event = recorder.stream("mine"), recorder.event()
        for call in range(5):
            for fails in (True, False) if call in failing else (False,):
                try:
                    with recorder.step(), recorder.stage("lookup"):
                        # What it waits for may be of a call that failed.
                        recorder.wait(stream, event)
                        clock.now_s += 1.0
                        recorder.record(event, recorder.current())
                        recorder.wait(stream, event)
                        recorder.synchronize(event)
                        clock.now_s += 40.0 * fails
                        if fails:
                            raise LoaderError
                except LoaderError:
                    continue
        program = recorder.program()
        assert_equal(recorder.step_count, 5, where=f"{failing}: steps")
        with succeeds("a replay", where=f"{failing}"):
            replay(program)
        programs.append([one for one in program if not isinstance(one, (Record, Wait))])
        report = overlap_report(program, schedule="", device="", margin_count=0)
        assert_equal(
            (report.step_s, report.serial_s), (1.0, 1.0), where=f"{failing}: seconds of a step, and of its work"
        )
    for found in programs[1:]:
        assert_equal(_without_events(found), _without_events(programs[0]), where="work, waits and steps")


def _without_events(program: list[Any]) -> list[Any]:
    """Numbers of events count those of calls that failed."""
    return [dataclasses.replace(one, event=0) if hasattr(one, "event") else one for one in program]
