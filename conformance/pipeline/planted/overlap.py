"""Faults of the overlap report: figures that flatter, figures that accuse, and pictures that explain nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

from conformance.harness import swap, wrap
from conformance.pipeline.planted.planting import fast

_OVERLAP = "fastimpl.pipeline.overlap"
_RECORDER = "fastimpl.pipeline.recording:Recorder"


def _own_duration(original: Any, *args: Any, **options: Any) -> Any:
    report = original(*args, **options)
    stages = tuple(dataclasses.replace(stage, exposed_s=stage.duration_s) for stage in report.stages)
    return dataclasses.replace(report, stages=stages)


def _waiting_is_work(original: Any, recorder: Any, stream: Any, event: Any) -> None:
    begun = recorder._open.get(recorder._lane(stream))
    original(recorder, stream, event)
    if begun is not None:
        recorder._open[recorder._lane(stream)] = begun


def _serial(original: Any, program: Any, *, without: str | None = None) -> Any:
    """All on one stream: what a sum of durations would say."""
    moved = [dataclasses.replace(one, stream="default") if hasattr(one, "stream") else one for one in program]
    return original(moved, without=without)


def _first_only(original: Any, program: Any, *, without: str | None = None) -> Any:
    if without is None:
        return original(program)
    early = [getattr(one, "stage", None) == without and one.step < 3 for one in program]
    named = [
        dataclasses.replace(one, stage="early") if is_early else one
        for one, is_early in zip(program, early, strict=True)
    ]
    return original(named, without=without)


def _without_edges(original: Any, runs: Any) -> Any:
    return original([(title, dataclasses.replace(timeline, edges=[])) for title, timeline in runs])


def _unheard(original: Any, recorder: Any, event: Any) -> None:
    recorder._engine.synchronize(event)


def _by_itself(original: Any, mine: Any, everything: Any) -> float:
    copies = [dataclasses.replace(span, stream="another") for span in mine]
    seconds: float = original(mine, [*everything, *copies])
    return seconds


PLANTED = (
    fast(
        "exposed_is_the_duration",
        "Exposed time is the stage's own duration, hidden or not.",
        ("PIPE-161",),
        wrap("fastimpl.pipeline.overlap:overlap_report", _own_duration),
    ),
    fast(
        "work_hides_itself",
        "A stage counts as hidden while it runs itself.",
        ("PIPE-161",),
        wrap(f"{_OVERLAP}:_hidden_s", _by_itself),
    ),
    fast(
        "one_stream_in_the_replay",
        "The replay puts everything on one stream.",
        ("PIPE-162",),
        wrap(f"{_OVERLAP}:replay", _serial),
    ),
    fast(
        "waiting_counts_as_work",
        "The time that a stream waits for an event counts as work of the stage.",
        ("PIPE-160",),
        wrap(f"{_RECORDER}.wait", _waiting_is_work),
    ),
    fast(
        "reads_unseen",
        "The host's reads of the device's values are taken for its own time.",
        ("PIPE-160",),
        swap("fastimpl.pipeline.recording:_READS", frozenset()),
    ),
    fast(
        "stage_left_out_of_some_steps",
        "The counterfactual leaves the stage out of the first steps only.",
        ("PIPE-163",),
        wrap(f"{_OVERLAP}:replay", _first_only),
    ),
    fast(
        "trace_without_edges",
        "The trace has no arrows for events.",
        ("PIPE-164",),
        wrap("fastimpl.pipeline.overlap_views:to_trace", _without_edges),
    ),
    fast(
        "host_waits_unheard",
        "Waits of the host are not recorded.",
        ("PIPE-165",),
        wrap(f"{_RECORDER}.synchronize", _unheard),
    ),
)
