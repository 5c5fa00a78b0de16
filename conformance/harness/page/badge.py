"""A badge for a README: the verdict of the reports in a few words, as a small picture of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conformance.harness.page.markup import Markup, element
from conformance.harness.page.sides import sides_of

__all__ = ["to_badge"]

_NAME = "twinproof"
# Of the widest letters at this size; a text that is narrower has a little more room.
_LETTER_PX, _SIDE_PX, _HEIGHT_PX = 7, 8, 20
_COLOURS = {"passed": "#1a7f37", "failed": "#b3261e"}


def to_badge(reports: Sequence[dict[str, Any]]) -> str:
    """An SVG that says the verdict and how many requirements hold.

    Of several runs of one implementation the newest of each component counts; of several implementations the worst
    decides.
    """
    sides = sides_of(reports)
    found = max((side.verdict for side in sides), key=lambda each: each.exit_code)
    entries = [entry for side in sides for entry in side.requirements.values()]
    held = sum(entry["outcome"] == "passed" for entry in entries)
    counts = found.word in _COLOURS and bool(entries)
    words = f"{found.word}, {held} of {len(entries)}" if counts else found.word
    left, right = (2 * _SIDE_PX + _LETTER_PX * len(text) for text in (_NAME, words))
    return (
        element(
            "svg",
            element("title", f"{_NAME}: {words}"),
            element("rect", width=left, height=_HEIGHT_PX, fill="#444"),
            element("rect", x=left, width=right, height=_HEIGHT_PX, fill=_COLOURS.get(found.word, "#666")),
            _text(left / 2, _NAME),
            _text(left + right / 2, words),
            xmlns="http://www.w3.org/2000/svg",
            width=left + right,
            height=_HEIGHT_PX,
            role="img",
            aria_label=f"{_NAME}: {words}",
        )
        + "\n"
    )


def _text(middle: float, words: str) -> Markup:
    place: dict[str, str | float] = {"x": middle, "y": 14, "fill": "#fff", "text_anchor": "middle"}
    return element("text", words, **place, font_family="Verdana, sans-serif", font_size=11)
