"""An overlap report as files: figures as JSON, a trace for Perfetto or chrome://tracing, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from fastimpl.pipeline.overlap import OverlapReport, Span, Timeline

__all__ = ["to_document", "to_svg", "to_trace"]

_VERSION = 1
_MICROSECONDS = 1e6
_COLOURS = {
    "batch_copy": "#8c6bb1",
    "input_dist": "#d9822b",
    "lookup": "#2f8f4e",
    "prefetch": "#66c2a5",
    "forward": "#4a86c5",
    "backward": "#1f4e79",
    "dense_optimizer": "#c4302b",
    "wait": "#d9b32b",
}
_GREY = "#9aa0a6"
_WIDTH, _LABEL, _LANE, _TITLE = 960, 110, 18, 26
_STEPS_SHOWN = 3
_FIRST_SHOWN = 2


def to_document(reports: Sequence[OverlapReport]) -> dict[str, Any]:
    """The reports, as JSON has them; seconds are per step."""
    return {"version": _VERSION, "reports": [asdict(report) for report in reports]}


def to_trace(timelines: Sequence[tuple[str, Timeline]]) -> dict[str, Any]:
    """A trace: a process for each schedule, a track for each stream and the host, an arrow for each event edge.

    The format is Chrome's "JSON Object Format": times in microseconds, "X" complete events, "s" and "f" flow events
    that lie inside of the work that they connect.
    """
    events: list[dict[str, Any]] = []
    arrow = 0
    for process, (title, timeline) in enumerate(timelines, 1):
        tracks = {name: number for number, name in enumerate(_lanes(timeline), 1)}
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}})
        for name, track in tracks.items():
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": track, "args": {"name": name}})
        for span in (*timeline.spans, *timeline.host_waits):
            events.append(_complete(span, process, tracks[span.stream]))
        for source, target in timeline.edges:
            arrow += 1
            for phase, span in (("s", timeline.spans[source]), ("f", timeline.spans[target])):
                events.append(_flow(phase, arrow, span, process, tracks[span.stream]))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _lanes(timeline: Timeline) -> list[str]:
    """The host first, then streams by their names."""
    return ["host", *sorted({span.stream for span in timeline.spans} - {"host"})]


def _complete(span: Span, process: int, track: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.stage,
        "cat": "stage",
        "pid": process,
        "tid": track,
        "ts": span.begin_s * _MICROSECONDS,
        "dur": (span.end_s - span.begin_s) * _MICROSECONDS,
        "args": {"step": span.step},
    }


def _flow(phase: str, number: int, span: Span, process: int, track: int) -> dict[str, Any]:
    # Inside of its work, not at its end, where the next work of the stream may begin.
    at_s = span.begin_s + (0.75 if phase == "s" else 0.0) * (span.end_s - span.begin_s)
    found = {"ph": phase, "id": number, "name": "event", "cat": "event", "pid": process, "tid": track}
    return {**found, "ts": at_s * _MICROSECONDS, **({"bp": "e"} if phase == "f" else {})}


def to_svg(runs: Sequence[tuple[OverlapReport, Timeline]]) -> str:
    """A picture: three steps of each schedule on one scale, a row for each stream."""
    length_s = max(_window(timeline)[1] - _window(timeline)[0] for _, timeline in runs)
    parts, y = [_legend()], 2 * _TITLE
    for report, timeline in runs:
        parts.append(_text(0, y - 8, f"{report.schedule}: {report.step_s:.4g} s a step on {report.device}"))
        for lane in _lanes(timeline):
            parts.append(_text(0, y + _LANE - 5, lane, size=11))
            parts += _row(timeline, lane, y, (_WIDTH - _LABEL) / length_s)
            y += _LANE
        y += _TITLE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" width="{_WIDTH}" height="{y}" '
        f'font-family="system-ui, sans-serif" role="img" aria-label="overlap of stages">{"".join(parts)}</svg>\n'
    )


def _window(timeline: Timeline) -> tuple[float, float]:
    last = min(_FIRST_SHOWN + _STEPS_SHOWN, len(timeline.ends_s)) - 1
    return timeline.ends_s[_FIRST_SHOWN - 1], timeline.ends_s[last]


def _row(timeline: Timeline, lane: str, y: int, scale: float) -> list[str]:
    begin_s, end_s = _window(timeline)
    boxes = []
    for span in (*timeline.spans, *timeline.host_waits):
        first, last = max(span.begin_s, begin_s), min(span.end_s, end_s)
        if span.stream == lane and last > first:
            place = f'x="{_LABEL + (first - begin_s) * scale:.2f}" width="{(last - first) * scale:.2f}"'
            title = escape(f"{span.stage}, step {span.step}: {span.end_s - span.begin_s:.4g} s")
            look = f'y="{y + 2}" height="{_LANE - 4}" fill="{_COLOURS.get(span.stage, _GREY)}" stroke="#fff"'
            boxes.append(f"<rect {place} {look}><title>{title}</title></rect>")
    return boxes


def _legend() -> str:
    parts, x = [], _LABEL
    for stage, colour in _COLOURS.items():
        parts.append(f'<rect x="{x}" y="4" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(x + 14, 13, stage.replace("_", " "), size=11))
        x += 105
    return "".join(parts)


def _text(x: int, y: int, text: str, *, size: int = 13) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="#1f2328">{escape(text)}</text>'
