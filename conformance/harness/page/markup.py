"""Markup that cannot be broken by what it shows: a text is escaped unless an element of ours made it.

Texts come from implementations under test. Characters that no reader sees, or that turn a line round, are written as
escapes; long texts are cut and say so.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

__all__ = ["BAD", "SYMBOLS", "Markup", "badge", "element", "head_of", "joined", "plain", "quoted", "shortened"]

TEXT_MAX = 6000
BAD = ("failed", "error", "survived", "no kill")
# A shape beside each word: the page is read in print, in grey and by the colour-blind.
SYMBOLS = {
    "passed": "✓",
    "killed": "✓",
    "pass": "✓",
    "failed": "✗",
    "error": "!",
    "survived": "✗",
    "fail": "✗",
    "no kill": "!",
    "implausible": "!",
    "undecided": "?",
    "xfailed": "~",
    "skipped": "–",
    "none": "·",
    "absent": "·",
    "nothing ran": "?",
    "not finished": "!",
    "no verdict": "·",
}
WORDS = {
    "absent": "not in it",
    "xfailed": "known deviation",
    "none": "not run",
    "pass": "reached",
    "fail": "not reached",
}
_NO_END = frozenset({"br", "input", "meta"})


class Markup(str):
    """Text that is HTML already; every other ``str`` is escaped where it is put into an element."""

    __slots__ = ()


def plain(text: object) -> str:
    """A text with its unprintable characters written as escapes, line ends and tabs kept."""
    found = str(text)
    if found.isprintable():
        return found
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode("ascii") for c in found)


def shortened(text: object) -> str:
    """A text of at most ``TEXT_MAX`` characters; what was cut is counted."""
    found = str(text)
    if len(found) <= TEXT_MAX:
        return found
    return f"{found[:TEXT_MAX]}\n... and {len(found) - TEXT_MAX} more characters, which the JSON report has"


def _escaped(value: str) -> str:
    return value if isinstance(value, Markup) else escape(plain(value), quote=True)


def element(name: str, /, *children: str | None, **attributes: str | float | bool | None) -> Markup:
    """One element. ``class_`` is ``class``, ``data_x`` is ``data-x``; None and False leave an attribute out."""
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        title = key.rstrip("_").replace("_", "-")
        words.append(title if value is True else f'{title}="{_escaped(str(value))}"')
    if name in _NO_END:
        return Markup(f"<{' '.join(words)}>")
    inner = "".join(_escaped(child) for child in children if child is not None)
    return Markup(f"<{' '.join(words)}>{inner}</{name}>")


def head_of(*columns: tuple[str, str]) -> Markup:
    """The head of a table: titles, and classes that give the columns their widths."""
    cells = (element("th", title, class_=class_ or None, scope="col") for title, class_ in columns)
    return element("thead", element("tr", *cells))


def joined(parts: Iterable[str], between: str = "") -> Markup:
    """Parts one after the other."""
    return Markup(_escaped(between).join(_escaped(part) for part in parts))


def badge(outcome: str, text: str | None = None) -> Markup:
    """An outcome as symbol and word."""
    symbol = element("span", SYMBOLS.get(outcome, "·"), aria_hidden="true")
    return element("span", symbol, " ", text or WORDS.get(outcome, outcome), class_=f"badge {css(outcome)}")


def css(outcome: str) -> str:
    """The class of an outcome; anything else than a known word has none of its own."""
    return f"is-{outcome.replace(' ', '-')}" if outcome in SYMBOLS else "is-unknown"


def quoted(text: object) -> Markup:
    """A text as it was written, cut where it is long."""
    return element("pre", shortened(text))
