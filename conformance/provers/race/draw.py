"""A trace as a picture: one lane a stream, ops as boxes, waits as arrows, hazards dashed, numbered and in words."""

from __future__ import annotations

from html import escape

from conformance.provers.race.memory import Hazard
from conformance.provers.race.report import Report
from conformance.provers.race.trace import Box
from conformance.provers.virtual_device.clocks import HOST

__all__ = ["to_html", "to_svg"]

_BOXES_MAX = 1500
_LANE, _BOX, _LEFT, _TOP, _WIDTH_MIN, _WIDTH_MAX = 64, 26, 210, 46, 900, 12_000
# A box is wide enough to be seen, and a label is written where it fits.
_SHORTEST, _CHARACTER = 14.0, 6.2
_STYLE = """
text { font: 11px ui-monospace, monospace; fill: #111 }
.title { font-size: 14px; font-weight: bold }
.lane { stroke: #bbb }
.box { fill: #e8eef7; stroke: #35507a }
.host { fill: #f3f1e8; stroke: #77703f }
.bad { stroke: #c00000; stroke-width: 3; stroke-dasharray: 6 3 }
.wait { stroke: #444; fill: none; marker-end: url(#arrow) }
.hazard { stroke: #c00000; stroke-width: 2; stroke-dasharray: 7 4; fill: none }
.word { fill: #c00000; font-weight: bold }
"""

_ARROW = """<defs><marker id="arrow" markerWidth="7" markerHeight="7" refX="6" refY="3.5" orient="auto">
<path d="M0,0 L7,3.5 L0,7 z"/></marker></defs>"""


def to_svg(report: Report) -> str:
    """The picture; a trace of many ops is cut to those around its hazards, or to the first, and says so."""
    boxes, marks = _chosen(report)
    lanes = [lane for lane in report.trace.lanes() if lane == HOST or any(box.lane == lane for box in boxes)]
    at: dict[str, float] = {lane: _TOP + number * _LANE for number, lane in enumerate(lanes)}
    places, width = _places(boxes)
    foot = _TOP + len(lanes) * _LANE
    words = _words(report)
    height = foot + 18 * (len(words) + 1)
    width = max(width, _LEFT + 20 + _CHARACTER * max(map(len, [*words, ""])) * 1.1)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" role="img">',
        f"<style>{_STYLE}</style>",
        _ARROW,
        f'<rect width="{width:.0f}" height="{height}" fill="white"/>',
        f'<text class="title" x="10" y="22">{escape(_title(report, boxes))}</text>',
    ]
    for lane, y in at.items():
        out.append(f'<line class="lane" x1="{_LEFT}" x2="{width:.0f}" y1="{y + _LANE / 2}" y2="{y + _LANE / 2}"/>')
        out.append(f'<text x="10" y="{y + _LANE / 2 + 4}">{escape(_fitting(report.label(lane), _LEFT - 20))}</text>')
    for index, box in enumerate(boxes):
        out.append(_drawn(box, places[index], at[box.lane], marks.get(id(box), [])))
    out += _edges(report, boxes, places, at)
    index_of = {id(box): index for index, box in enumerate(boxes)}
    for number, hazard in enumerate(report.hazards, start=1):
        out += _hazard(report, number, hazard, index_of, places, at)
    out += [
        f'<text class="{"word" if is_hazard else ""}" x="10" y="{foot + 18 * (row + 1)}">{escape(line)}</text>'
        for row, (line, is_hazard) in enumerate((line, line.startswith("HAZARD")) for line in words)
    ]
    return "\n".join([*out, "</svg>"]) + "\n"


def to_html(report: Report, accept: tuple[str, ...] = ()) -> str:
    """One page without anything from elsewhere: the picture and the report."""
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>twinproof race</title>\n'
        f"<body><h1>twinproof race</h1>\n<pre>{escape(report.text(accept))}</pre>\n"
        f'<div style="overflow-x: auto">{to_svg(report)}</div></body></html>\n'
    )


def _boxes_of(report: Report, hazard: Hazard) -> list[Box]:
    found = (report.trace.box_of.get((use.stream, use.tick)) for use in (hazard.first, hazard.second))
    return [box for box in found if box is not None]


def _chosen(report: Report) -> tuple[list[Box], dict[int, list[int]]]:
    marks: dict[int, list[int]] = {}
    for number, hazard in enumerate(report.hazards, start=1):
        for box in _boxes_of(report, hazard):
            marks.setdefault(id(box), []).append(number)
    boxes = report.trace.boxes
    if len(boxes) > _BOXES_MAX:
        bad = [index for index, box in enumerate(boxes) if id(box) in marks]
        begin = max(0, min(bad, default=0) - _BOXES_MAX // 4)
        boxes = boxes[begin : begin + _BOXES_MAX]
    return boxes, marks


def _places(boxes: list[Box]) -> tuple[list[tuple[float, float]], float]:
    """(left, right) of each box: time, stretched where short ops would vanish, in the order of every lane."""
    if not boxes:
        return [], _WIDTH_MIN
    begin, end = min(box.begin_s for box in boxes), max(box.end_s for box in boxes)
    shortest = min(box.end_s - box.begin_s for box in boxes) or 1e-9
    wanted = (end - begin) / shortest * 90 if end > begin else _WIDTH_MIN
    scale = min(max(wanted, _WIDTH_MIN), _WIDTH_MAX) / max(end - begin, 1e-9)
    free: dict[str, float] = {}
    places: list[tuple[float, float]] = []
    for box in boxes:
        left = max(_LEFT + (box.begin_s - begin) * scale, free.get(box.lane, 0.0))
        right = max(_LEFT + (box.end_s - begin) * scale, left + _SHORTEST)
        free[box.lane] = right
        places.append((left, right))
    return places, max(right for _, right in places) + 20


def _fitting(text: str, width: float) -> str:
    room = int(width / _CHARACTER)
    return text if len(text) <= room else text[: max(room - 1, 0)] + "…" if room > 2 else ""


def _drawn(box: Box, place: tuple[float, float], y: float, marks: list[int]) -> str:
    left, right = place
    top = y + (_LANE - _BOX) / 2
    kind = ("host" if box.lane == HOST else "box") + (" bad" if marks else "")
    label = escape(_fitting(f"{box.site.op} {box.site.point.short}", right - left - 6))
    return (
        f'<g><title>{escape(str(box.site))}</title><rect class="{kind}" x="{left:.1f}" y="{top:.1f}" '
        f'width="{right - left:.1f}" height="{_BOX}"/><text x="{left + 3:.1f}" y="{top + 17:.1f}">{label}</text></g>'
    )


def _edges(report: Report, boxes: list[Box], places: list[tuple[float, float]], at: dict[str, float]) -> list[str]:
    """An arrow from the last box that ended by then to the first that begins later, for each wait between lanes."""
    out: list[str] = []
    by_lane: dict[str, list[int]] = {}
    for index, box in enumerate(boxes):
        by_lane.setdefault(box.lane, []).append(index)
    for edge in report.trace.edges:
        before = [index for index in by_lane.get(edge.of, ()) if boxes[index].end_s <= edge.of_s + 1e-12]
        after = [index for index in by_lane.get(edge.to, ()) if boxes[index].begin_s >= edge.to_s - 1e-12]
        if not before or edge.to not in at or (not after and edge.to != HOST):
            continue
        x1, y1 = places[before[-1]][1], at[edge.of] + _LANE / 2
        x2 = places[after[0]][0] if after else x1 + 12
        y2 = at[edge.to] + _LANE / 2
        out.append(f'<path class="wait" d="M{x1:.1f},{y1} L{x2:.1f},{y2}"><title>{escape(edge.what)}</title></path>')
    return out


def _hazard(
    report: Report,
    number: int,
    hazard: Hazard,
    index_of: dict[int, int],
    places: list[tuple[float, float]],
    at: dict[str, float],
) -> list[str]:
    found = [box for box in _boxes_of(report, hazard) if id(box) in index_of]
    points = [(sum(places[index_of[id(box)]]) / 2, at[box.lane] + _LANE / 2) for box in found]
    out = [f'<text class="word" x="{x - 4:.1f}" y="{y - _BOX / 2 - 4:.1f}">HAZARD {number}</text>' for x, y in points]
    if len(points) == 2:
        (x1, y1), (x2, y2) = points
        out.append(f'<path class="hazard" d="M{x1:.1f},{y1} L{x2:.1f},{y2}"/>')
    return out


def _title(report: Report, boxes: list[Box]) -> str:
    rest = len(report.trace.boxes) + report.trace.left_out_count - len(boxes)
    cut = f"; {rest} more ops are not drawn" if rest else ""
    return f"{len(boxes)} ops, left to right in virtual time, {len(report.hazards)} hazards{cut}"


def _words(report: Report) -> list[str]:
    out = []
    for number, hazard in enumerate(report.hazards, start=1):
        first, second = (
            f"{use.site or use.what} on {report.label(use.stream)}" for use in (hazard.first, hazard.second)
        )
        out.append(f"HAZARD {number}, {hazard.kind}: {first}  |  {second}")
    out += [f"not covered, {gap.kind}: {gap.site}: {gap.why}" for gap in report.not_covered]
    return out
