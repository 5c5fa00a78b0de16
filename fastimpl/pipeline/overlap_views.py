"""An overlap report as files: figures as JSON, a trace for Perfetto or chrome://tracing, and a picture."""

from __future__ import annotations

import math
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
# Beside each colour a letter, for print and for whoever does not tell the colours apart.
_LETTERS = {
    "batch_copy": "C",
    "input_dist": "I",
    "lookup": "L",
    "prefetch": "P",
    "forward": "F",
    "backward": "B",
    "dense_optimizer": "D",
    "wait": "W",
}
_DARK = ("backward", "dense_optimizer", "lookup", "forward", "batch_copy")
_GREY = "#9aa0a6"
_WIDTH, _LABEL, _EARLIER, _LANE, _TITLE = 1060, 90, 110, 18, 26
_TICKS_MAX = 9
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
    """A picture: three steps of each schedule on one scale, a row for each stream, the report's figures in words.

    Work of these steps that was done before the first of them began, as by a host that runs ahead, stands at the left.
    """
    length_s = max(_window(timeline)[1] - _window(timeline)[0] for _, timeline in runs)
    scale = (_WIDTH - _LABEL - _EARLIER) / length_s
    parts, y = [_legend(runs)], 2 * _TITLE
    for report, timeline in runs:
        for line, size in ((_headline(report), 13), (_stage_line(report), 11)):
            parts.append(_text(0, y, line, size=size))
            y += 17
        top = y - 8
        for lane in _lanes(timeline):
            parts.append(_text(0, top + _LANE - 5, lane, size=11))
            parts += _earlier(timeline, lane, top) + _row(timeline, lane, top, scale)
            top += _LANE
        parts += _axis(timeline, y - 8, top, scale)
        y = top + 2 * _TITLE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" width="{_WIDTH}" height="{y}" '
        f'font-family="system-ui, sans-serif" role="img" aria-label="overlap of stages">'
        f'<rect width="{_WIDTH}" height="{y}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _headline(report: OverlapReport) -> str:
    step, serial, blocked = (f"{1000 * value:.4g}" for value in (report.step_s, report.serial_s, report.host_blocked_s))
    figures = f"step {step} ms, one after the other {serial}, host blocked {blocked}"
    return f"{report.schedule}: {figures} on {report.device}"


def _stage_line(report: OverlapReport) -> str:
    """Every stage with its milliseconds a step and the share of it that is hidden."""
    stages = sorted(report.stages, key=lambda stage: _place(stage.stage))
    return ", ".join(
        f"{stage.stage.replace('_', ' ')} {1000 * stage.duration_s:.4g} ({stage.hidden_fraction:.0%} hidden)"
        for stage in stages
    )


def _place(stage: str) -> int:
    """Where a stage stands in a step; stages that are not known come last."""
    return [*_COLOURS].index(stage) if stage in _COLOURS else len(_COLOURS)


def _window(timeline: Timeline) -> tuple[float, float]:
    last = min(_FIRST_SHOWN + _STEPS_SHOWN, len(timeline.ends_s)) - 1
    return timeline.ends_s[_FIRST_SHOWN - 1], timeline.ends_s[last]


def _row(timeline: Timeline, lane: str, y: int, scale: float) -> list[str]:
    begin_s, end_s = _window(timeline)
    boxes = []
    for span in (*timeline.spans, *timeline.host_waits):
        first, last = max(span.begin_s, begin_s), min(span.end_s, end_s)
        if span.stream == lane and last > first:
            x, width = _LABEL + _EARLIER + (first - begin_s) * scale, (last - first) * scale
            boxes.append(_box(span, x, y, width))
    return boxes


def _earlier(timeline: Timeline, lane: str, y: int) -> list[str]:
    """What the shown steps had done before the picture begins, a box each, in order."""
    begin_s, _ = _window(timeline)
    shown = range(_FIRST_SHOWN, _FIRST_SHOWN + _STEPS_SHOWN)
    every = (*timeline.spans, *timeline.host_waits)
    spans = [span for span in every if span.stream == lane and span.step in shown and span.end_s <= begin_s]
    width = min(16.0, (_EARLIER - 20) / max(1, len(spans)))
    return [_box(span, _LABEL + number * width, y, width) for number, span in enumerate(spans)]


def _box(span: Span, x: float, y: int, width: float) -> str:
    title = escape(f"{span.stage}, step {span.step}: {1000 * (span.end_s - span.begin_s):.4g} ms")
    look = f'y="{y + 2}" height="{_LANE - 4}" fill="{_COLOURS.get(span.stage, _GREY)}" stroke="#fff"'
    name = span.stage.replace("_", " ")
    # About 6 px a letter at this size.
    text = name if width > 6 * len(name) + 6 else _LETTERS.get(span.stage, "?") if width > 8 else ""
    ink = "#fff" if span.stage in _DARK else "#1f2328"
    place = f'x="{x + width / 2:.2f}" y="{y + 13}" font-size="10" text-anchor="middle" fill="{ink}"'
    word = f"<text {place}>{escape(text)}</text>" if text else ""
    return f'<g><title>{title}</title><rect x="{x:.2f}" width="{width:.2f}" {look}/>{word}</g>'


def _axis(timeline: Timeline, top: int, bottom: int, scale: float) -> list[str]:
    """Milliseconds since the picture begins, and a line where each step ends."""
    begin_s, end_s = _window(timeline)
    left, length_ms = _LABEL + _EARLIER, 1000 * (end_s - begin_s)
    parts = [_line(left, top, left, bottom + 5)]
    shown = [(number, at_s) for number, at_s in enumerate(timeline.ends_s) if begin_s < at_s <= end_s]
    for number, at_s in shown:
        x = left + (at_s - begin_s) * scale
        parts += [
            _line(x, top, x, bottom + 5, dashes="4 3"),
            _text(x - 2, bottom + 30, f"step {number} ends", end=True),
        ]
    tick_ms = _tick(length_ms)
    for number in range(int(length_ms / tick_ms) + 1):
        x = left + number * tick_ms / 1000 * scale
        parts += [_line(x, bottom, x, bottom + 4), _text(x, bottom + 15, f"{number * tick_ms:g}", size=10)]
    parts.append(_text(_LABEL, bottom + 15, "earlier", size=10))
    parts.append(_text(left - 18, bottom + 15, "ms", size=10))
    return parts


def _tick(length: float) -> float:
    """A round distance, of which at most ``_TICKS_MAX`` make the length."""
    size = 10.0 ** math.floor(math.log10(length / _TICKS_MAX))
    return next(size * step for step in (1, 2, 5, 10) if length / (size * step) <= _TICKS_MAX)


def _line(x1: float, y1: float, x2: float, y2: float, *, dashes: str = "none") -> str:
    place = f'x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"'
    return f'<line {place} stroke="#57606a" stroke-dasharray="{dashes}"/>'


def _legend(runs: Sequence[tuple[OverlapReport, Timeline]]) -> str:
    """The stages that the picture has, each with its colour and letter."""
    found = {span.stage for _, timeline in runs for span in (*timeline.spans, *timeline.host_waits)}
    parts, x = [], 0
    for stage in sorted(found, key=lambda stage: (_place(stage), stage)):
        name = f"{_LETTERS.get(stage, '?')}  {stage.replace('_', ' ')}"
        parts.append(f'<rect x="{x}" y="4" width="10" height="10" fill="{_COLOURS.get(stage, _GREY)}"/>')
        parts.append(_text(x + 14, 13, name, size=11))
        x += 36 + 7 * len(name)
    return "".join(parts)


def _text(x: float, y: int, text: str, *, size: int = 11, end: bool = False) -> str:
    anchor = ' text-anchor="end"' if end else ""
    return f'<text x="{x:.4g}" y="{y}" font-size="{size}" fill="#1f2328"{anchor}>{escape(text)}</text>'
