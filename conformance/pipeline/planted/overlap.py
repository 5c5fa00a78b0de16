"""Faults that ``test_overlap`` must notice."""

from __future__ import annotations

import dataclasses
from typing import Any

from conformance.harness import fault, mutated, patched, swap


@fault(kills="PIPE-161", at="fastimpl.pipeline.overlap:overlap_report")
def exposed_is_the_duration(original: Any, *args: Any, **options: Any) -> Any:
    """Exposed time is the stage's own duration, hidden or not."""
    report = original(*args, **options)
    stages = tuple(dataclasses.replace(stage, exposed_s=stage.duration_s) for stage in report.stages)
    return dataclasses.replace(report, stages=stages)


@fault(kills="PIPE-161", at="fastimpl.pipeline.overlap:_hidden_s")
def work_hides_itself(original: Any, mine: Any, everything: Any) -> float:
    """A stage counts as hidden while it runs itself."""
    copies = [dataclasses.replace(span, stream="another") for span in mine]
    seconds: float = original(mine, [*everything, *copies])
    return seconds


@fault(kills="PIPE-162", at="fastimpl.pipeline.overlap:replay")
def one_stream_in_the_replay(original: Any, program: Any, *, without: str | None = None) -> Any:
    """The replay puts everything on one stream."""
    # All on one stream: what a sum of durations would say.
    moved = [dataclasses.replace(one, stream="default") if hasattr(one, "stream") else one for one in program]
    return original(moved, without=without)


@fault(kills="PIPE-160", at="fastimpl.pipeline.recording:Recorder.wait")
def waiting_counts_as_work(original: Any, recorder: Any, stream: Any, event: Any) -> None:
    """The time that a stream waits for an event counts as work of the stage."""
    begun = recorder._open.get(recorder._lane(stream))
    original(recorder, stream, event)
    if begun is not None:
        recorder._open[recorder._lane(stream)] = begun


reads_unseen = patched(
    "The host's reads of the device's values are taken for its own time.",
    swap("fastimpl.pipeline.recording:_READS", frozenset()),
    kills="PIPE-160",
)


@fault(kills="PIPE-163", at="fastimpl.pipeline.overlap:replay")
def stage_left_out_of_some_steps(original: Any, program: Any, *, without: str | None = None) -> Any:
    """The counterfactual leaves the stage out of the first steps only."""
    if without is None:
        return original(program)
    early = [getattr(one, "stage", None) == without and one.step < 3 for one in program]
    named = [
        dataclasses.replace(one, stage="early") if is_early else one
        for one, is_early in zip(program, early, strict=True)
    ]
    return original(named, without=without)


@fault(kills="PIPE-164", at="fastimpl.pipeline.overlap_views:to_trace")
def trace_without_edges(original: Any, runs: Any) -> Any:
    """The trace has no arrows for events."""
    return original([(title, dataclasses.replace(timeline, edges=[])) for title, timeline in runs])


@fault(kills="PIPE-165", at="fastimpl.pipeline.recording:Recorder.synchronize")
def host_waits_unheard(original: Any, recorder: Any, event: Any) -> None:
    """Waits of the host are not recorded."""
    recorder._engine.synchronize(event)


picture_begins_early = patched(
    "The picture begins with the second step, where nothing runs ahead yet.",
    mutated("fastimpl.pipeline.overlap_views:_window", "_FIRST_SHOWN - 1", "_FIRST_SHOWN % 1"),
    kills="PIPE-376",
)


host_blocked_in_shares = patched(
    "The end of a wait is divided by its begin.",
    mutated(
        "fastimpl.pipeline.overlap:overlap_report",
        "span.end_s - span.begin_s for span in whole.host_waits",
        "span.end_s // max(span.begin_s, 1e-9) for span in whole.host_waits",
    ),
    kills="PIPE-165",
)


arrows_numbered_by_process = patched(
    "Arrows are numbered anew in each process of a trace.",
    mutated(
        "fastimpl.pipeline.overlap_views:to_trace",
        "tracks = {",
        "arrow = 0\n        tracks = {",
    ),
    kills="PIPE-419",
)
moments_counted_by_stream = patched(
    "A moment at which two other streams work hides a stage twice.",
    mutated("fastimpl.pipeline.overlap:_hidden_s", "max(reached, end)", "span.begin_s"),
    kills="PIPE-420",
)
begun_with_the_end = patched(
    "Without a margin the first step begins where the last ends.",
    mutated("fastimpl.pipeline.overlap:_step_s", "if steps[0] else 0.0", "if True else 0.0"),
    kills="PIPE-428",
)
waits_of_before = patched(
    "What the host waited before a recorder forgot counts on.",
    mutated(
        "fastimpl.pipeline.recording:Recorder.forget",
        "self._step, self._begun_s, self._blocked_s = 0, self._clock.host_s(), 0.0",
        "self._step, self._begun_s = 0, self._clock.host_s()",
    ),
    kills="PIPE-436",
)
edges_of_before = patched(
    "Edges from what a recorder forgot are recorded.",
    mutated("fastimpl.pipeline.recording:Recorder.forget", "self._events.clear()", "pass"),
    kills="PIPE-436",
)
own_work_unseen = patched(
    "Work behind the last stage of a step is not recorded.",
    mutated("fastimpl.pipeline.recording:Recorder.step", "yield\n        self._cut()", "yield"),
    kills="PIPE-449",
)
work_between_steps = patched(
    "Work between two steps is the next one's.",
    mutated("fastimpl.pipeline.recording:Recorder.step", "self._open.clear()", "pass"),
    kills="PIPE-449",
)
every_call_is_a_read = patched(
    "Every call of torch is taken for a read of the device's values.",
    mutated(
        "fastimpl.pipeline.recording:_Reads.__torch_function__",
        'getattr(func, "__name__", "") in _READS and args and self.recorder.holds(args[0])',
        "args",
    ),
    kills="PIPE-450",
)
own_work_before_a_stage = patched(
    "Work before a stage is the stage's.",
    mutated(
        "fastimpl.pipeline.recording:Recorder.stage", "self._cut()\n    self._labels.append", "self._labels.append"
    ),
    kills="PIPE-449",
)
stream_begins_inside_of_itself = patched(
    "A stream that is entered again is forgotten when it is left.",
    mutated("fastimpl.pipeline.recording:Recorder.on", "lane not in self._open", "True"),
    kills="PIPE-160",
)
waits_for_what_was_forgotten = patched(
    "A wait for an event that was forgotten is recorded.",
    mutated("fastimpl.pipeline.recording:Recorder.synchronize", "known is not None", "True"),
    kills="PIPE-436",
)
work_of_failed_steps = patched(
    "Work of a step that failed is the next step's.",
    mutated(
        "fastimpl.pipeline.recording:Recorder.step",
        "self._made[begun:] = [each for each in self._made[begun:] if each[0]]",
        "pass",
    ),
    kills="PIPE-516",
)
edges_of_failed_steps_go = patched(
    "Events of a step that failed are unknown to what waits for them.",
    mutated("fastimpl.pipeline.recording:Recorder.step", "if each[0]]", "if False]"),
    kills="PIPE-516",
)
host_time_of_failed_steps = patched(
    "The host's time in a step that failed counts as its own.",
    mutated("fastimpl.pipeline.recording:Recorder.step", "self._blocked_s += self._own_s() - begun_s", "pass"),
    kills="PIPE-516",
)
one_own_stage_in_the_legend = patched(
    "The legend has one stage for each place in a step, and all stages of a user's own have one place.",
    mutated(
        "fastimpl.pipeline.overlap_views:_legend",
        "sorted(found, key=lambda stage: (_place(stage), stage))",
        "sorted({_place(stage): stage for stage in found}.values(), key=lambda stage: (_place(stage), stage))",
    ),
    kills="PIPE-544",
)
one_own_stage_with_figures = patched(
    "The line of figures has one stage for each place in a step.",
    mutated(
        "fastimpl.pipeline.overlap_views:_stage_line",
        "sorted(report.stages, key",
        "sorted({_place(stage.stage): stage for stage in report.stages}.values(), key",
    ),
    kills="PIPE-544",
)
legend_of_the_last_schedule = patched(
    "The legend has the stages of the last schedule only.",
    mutated("fastimpl.pipeline.overlap_views:_legend", "for _, timeline in runs", "for _, timeline in runs[-1:]"),
    kills="PIPE-544",
)

reads_without_names = patched(
    "A read that is noted loses its arguments by name.",
    mutated(
        "fastimpl.pipeline.recording:_Reads.__torch_function__",
        "self.recorder.synchronize_stream(self.recorder.current())",
        "self.recorder.synchronize_stream(self.recorder.current()); kwargs = None",
    ),
    kills="PIPE-558",
)


names_where_they_just_fit = patched(
    "A name is written where it just fits.",
    mutated("fastimpl.pipeline.overlap_views:_box", "width > 6 * len(name) + 6", "width >= 6 * len(name) + 6"),
    kills="PIPE-639",
    of="fastimpl",
)
letters_where_they_just_fit = patched(
    "A letter is written where it just fits.",
    mutated("fastimpl.pipeline.overlap_views:_box", "width > 8", "width >= 8"),
    kills="PIPE-639",
    of="fastimpl",
)
last_wait_alone_counts = patched(
    "What the host issues in a replay is put off by its last wait alone, not by all waits before.",
    mutated("fastimpl.pipeline.overlap:_Replay.carry_out", "self.blocked_s + until - begun", "until - begun"),
    kills="PIPE-691",
)
