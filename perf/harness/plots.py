"""The gates of one run as a picture: each ratio with its interval, its floor and its control; counts beside limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perf.harness.gates import Kind
from perf.harness.results import Evidence, title_of
from perf.harness.svg import LinearAxis, LogAxis, diamond, disc, drawing, line, text
from twinproof.errors import ConfigError

__all__ = ["bench_plot"]

_WIDTH = 960
_LABEL, _PLOT, _MARGIN = 260, 380, 12
_ROW, _HEAD = 24, 30
_LEGEND = "filled circle: measured, with its interval; hollow diamond: the control, which must lie beyond the limit"
_FOOT = "upright bar: the limit; its foot points to where a value must lie"
# Shares of a limit above that are drawn at the border.
_SHARE_MAX = 1.5
Outcome = Mapping[str, Any]


def bench_plot(evidence: Evidence) -> str:
    """A self-contained SVG of every outcome of a run.

    Raises:
        ConfigError: no gate was measured.
    """
    measured = [outcome for outcome in evidence.outcomes if outcome["subject"]["value"] is not None]
    if not measured:
        got, expected = "no gate with a value", "evidence of a run that measured one"
        raise ConfigError("nothing to plot", got=got, expected=expected, where="evidence")
    paired = [outcome for outcome in measured if Kind(outcome["kind"]).is_paired]
    counted = [outcome for outcome in measured if not Kind(outcome["kind"]).is_paired]
    absent = [outcome["gate"] for outcome in evidence.outcomes if outcome["subject"]["value"] is None]
    title = title_of(evidence)
    parts = [text(_MARGIN, 20, title, is_bold=True), text(_MARGIN, 38, _LEGEND, size=11)]
    parts.append(text(_MARGIN, 53, _FOOT, size=11))
    y = 64.0
    for rows, draw in ((paired, _ratios), (counted, _shares)):
        if rows:
            parts += draw(rows, y)
            y += _HEAD + len(rows) * _ROW + 26
    for gate in absent:
        y += 16
        parts.append(text(_MARGIN, y, f"not measured here: {gate}", size=11))
    return drawing(_WIDTH, y + 12, f"Gates of {title}", parts)


def _positive(outcome: Outcome) -> Iterator[float]:
    yield outcome["bound"]
    for who in ("subject", "control"):
        yield from (outcome[who][name] for name in ("value", "low", "high") if outcome[who][name] is not None)


def _ratios(rows: Sequence[Outcome], top: float) -> Iterator[str]:
    axis = LogAxis.around((value for outcome in rows for value in _positive(outcome)), _LABEL, _PLOT)
    yield text(_LABEL, top + 14, "times as fast as its peer (logarithmic)", size=11)
    bottom = top + _HEAD + len(rows) * _ROW
    for tick in axis.ticks():
        x = axis.at(tick)
        yield line(x, top + _HEAD - 6, x, bottom, width=0.3)
        yield text(x, bottom + 13, f"{tick:g}", anchor="middle", size=11)
    yield line(axis.at(1), top + _HEAD - 6, axis.at(1), bottom, dash="2 3")
    for number, outcome in enumerate(rows):
        y = top + _HEAD + (number + 0.5) * _ROW
        yield from _limit(axis.at(outcome["bound"]), y, is_floor=True)
        control, subject = outcome["control"], outcome["subject"]
        for ruling in (control, subject):
            if ruling["low"] is not None:
                thick = 2.0 if ruling is subject else 1.0
                yield line(axis.at(ruling["low"]), y, axis.at(ruling["high"]), y, width=thick)
        if control["value"] is not None:
            yield diamond(axis.at(control["value"]), y)
        yield disc(axis.at(subject["value"]), y)
        yield from _words(outcome, y, f"{_figure(subject)} (>= {outcome['bound']:.3g})")


def _limit(x: float, y: float, *, is_floor: bool) -> Iterator[str]:
    yield line(x, y - 9, x, y + 9, width=2)
    tip = x + (7 if is_floor else -7)
    yield line(x, y + 9, tip, y + 9, width=2)


def _figure(ruling: Mapping[str, Any]) -> str:
    interval = "" if ruling["low"] is None else f" [{ruling['low']:.3g}, {ruling['high']:.3g}]"
    return f"{ruling['value']:.4g}{interval}"


def _words(outcome: Outcome, y: float, figure: str) -> Iterator[str]:
    yield text(_MARGIN, y + 4, outcome["gate"])
    result = str(getattr(outcome["result"], "value", outcome["result"]))
    word = result if result in ("pass", "undecided") else result.upper()
    yield text(_LABEL + _PLOT + 14, y + 4, word, is_bold=word.isupper(), size=11)
    yield text(_LABEL + _PLOT + 92, y + 4, figure, size=11)


def _shares(rows: Sequence[Outcome], top: float) -> Iterator[str]:
    axis = LinearAxis(0.0, _SHARE_MAX, _LABEL, _PLOT)
    yield text(_LABEL, top + 14, f"share of its limit; {_SHARE_MAX:g} stands for all above", size=11)
    bottom = top + _HEAD + len(rows) * _ROW
    for tick in (0, 0.5, 1, _SHARE_MAX):
        yield line(axis.at(tick), top + _HEAD - 6, axis.at(tick), bottom, width=0.3)
        yield text(axis.at(tick), bottom + 13, f"{tick:g}", anchor="middle", size=11)
    for number, outcome in enumerate(rows):
        y, bound = top + _HEAD + (number + 0.5) * _ROW, outcome["bound"]
        yield from _limit(axis.at(1), y, is_floor=False)
        if outcome["control"]["value"] is not None:
            yield diamond(axis.at(_share(outcome["control"]["value"], bound)), y)
        yield disc(axis.at(_share(outcome["subject"]["value"], bound)), y)
        yield from _words(outcome, y, f"{_figure(outcome['subject'])} (<= {bound:.4g})")


def _share(value: float, bound: float) -> float:
    """Of a limit of 0, nothing is all that is allowed."""
    if bound > 0:
        return value / bound
    return 1.0 if value <= bound else math.inf
