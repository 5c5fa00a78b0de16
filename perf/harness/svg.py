"""Pictures as text: a few elements of SVG and two axes, so that a plot needs no library and no network.

Shapes tell what is what, and words say the verdict: a plot that is printed without colour says the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

__all__ = ["LinearAxis", "LogAxis", "diamond", "disc", "drawing", "line", "text"]

_INK, _PAPER = "#1a1a1a", "#ffffff"


def _element(name: str, content: str = "", **attributes: object) -> str:
    words = "".join(f' {key.replace("_", "-")}="{escape(_value(value))}"' for key, value in attributes.items())
    return f"<{name}{words}>{content}</{name}>" if content else f"<{name}{words}/>"


def _value(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def text(x: float, y: float, words: str, *, anchor: str = "start", is_bold: bool = False, size: int = 12) -> str:
    """A line of text whose baseline begins, is centred or ends (``anchor``: start, middle, end) at a point."""
    weight = {"font_weight": "bold"} if is_bold else {}
    return _element("text", escape(words), x=x, y=y, font_size=size, text_anchor=anchor, fill=_INK, **weight)


def line(x1: float, y1: float, x2: float, y2: float, *, width: float = 1.0, dash: str = "") -> str:
    """A line, dashed as in ``4 3`` where ``dash`` is given."""
    dashes = {"stroke_dasharray": dash} if dash else {}
    return _element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=_INK, stroke_width=width, **dashes)


def disc(x: float, y: float, *, radius: float = 4.0) -> str:
    """A filled circle."""
    return _element("circle", cx=x, cy=y, r=radius, fill=_INK)


def diamond(x: float, y: float, *, size: float = 5.0) -> str:
    """A hollow square on its corner."""
    corners = ((x, y - size), (x + size, y), (x, y + size), (x - size, y))
    points = " ".join(f"{_value(a)},{_value(b)}" for a, b in corners)
    return _element("polygon", points=points, fill=_PAPER, stroke=_INK, stroke_width=1.5)


def drawing(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """A whole document, which scales to the width of what shows it; ``title`` is what a screen reader says."""
    paper = _element("rect", width=width, height=height, fill=_PAPER)
    content = "\n".join([_element("title", escape(title)), paper, *parts])
    return _element(
        "svg",
        f"\n{content}\n",
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_value(width)} {_value(height)}",
        width="100%",
        style=f"max-width: {_value(width)}px",
        role="img",
        font_family="ui-monospace, monospace",
    )


@dataclass(frozen=True)
class LinearAxis:
    """Values from ``low`` to ``high`` along ``length`` units from ``start``; what lies outside is put on the border."""

    low: float
    high: float
    start: float
    length: float

    def at(self, value: float) -> float:
        """Where a value lies."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + share * self.length


@dataclass(frozen=True)
class LogAxis:
    """Positive values on a scale of ratios, see :class:`LinearAxis`."""

    low: float
    high: float
    start: float
    length: float

    def at(self, value: float) -> float:
        """Where a value lies."""
        inside = min(max(value, self.low), self.high)
        return self.start + math.log(inside / self.low) / math.log(self.high / self.low) * self.length

    def ticks(self, count_max: int = 8) -> list[float]:
        """Powers of ten with 2 and 5 between them; powers of ten alone where these are more than ``count_max``."""
        exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found: list[float] = []
        for steps in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1,)):
            values = [step * 10.0**exponent for exponent in exponents for step in steps]
            found = [value for value in values if self.low <= value <= self.high]
            if len(found) <= count_max:
                break
        return found

    @staticmethod
    def around(values: Iterable[float], start: float, length: float) -> LogAxis:
        """An axis that holds all values, 1 among them, with a little room at both ends."""
        known = [value for value in values if value > 0 and math.isfinite(value)]
        return LogAxis(min([1.0, *known]) / 1.15, max([1.0, *known]) * 1.15, start, length)
