"""The runs of one implementation in order of time: what each said, and what changed since the one before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conformance.harness.page.markup import SYMBOLS, Markup, badge, element, head_of
from conformance.harness.page.sides import Side, counts_of, stems_of
from conformance.harness.report import BAD, verdict

__all__ = ["glyphs", "history"]

_NAMED_MAX = 12
_RUNS_SHOWN = 12


def glyphs(side: Side, identifier: str) -> Markup | None:
    """The outcomes of a requirement in the last runs, the newest at the right; None where one run is all there is."""
    found = [outcomes.get(identifier) for outcomes in side.outcomes]
    outcomes = [outcome for outcome in found if outcome is not None][-_RUNS_SHOWN:]
    if len(outcomes) < 2:
        return None
    words = f"the last {len(outcomes)} runs, oldest first: {', '.join(outcomes)}"
    text = "".join(SYMBOLS.get(outcome, "·") for outcome in outcomes)
    return element("div", text, class_="glyphs", title=words, aria_label=words, role="img")


def history(sides: Sequence[Side]) -> Markup | None:
    """A table of runs for each side that has several; None where none has."""
    found = [side for side in sides if len(side.runs) > 1]
    if not found:
        return None
    parts = [part for side in found for part in _side(side)]
    return element("section", element("h2", "Runs over time", id="history"), *parts, aria_labelledby="history")


def _side(side: Side) -> list[Markup]:
    stems = stems_of([entry for run in side.runs for entry in run["requirements"]])
    rows = []
    # What a run leaves out keeps the outcome that it had.
    known: dict[str, str] = {}
    for run, outcomes in zip(side.runs, side.outcomes, strict=True):
        rows.append(_row(run, stems, _changes(known, outcomes)))
        known |= outcomes
    columns = [("run", "c-time"), ("verdict", "c-narrow"), *((stem, "") for stem in stems)]
    columns.append(("changed since the run before", "c-changed"))
    table = element("table", head_of(*columns), element("tbody", *reversed(rows)), class_="runs")
    text = "Requirements that hold (filled) and that fail (outlined), a column for each run, the oldest at the left."
    return [element("h3", side.name), _plot(side), element("p", text, class_="aside"), table]


def _row(run: dict[str, Any], stems: Sequence[str], changes: list[Markup]) -> Markup:
    found = verdict(run)
    word = "passed" if found.exit_code == 0 else "failed"
    cells = []
    for stem in stems:
        entries = [entry for entry in run["requirements"] if entry["stem"] == stem]
        text = f"{counts_of(entries, ['passed'])} of {len(entries)}" if entries else "–"
        cells.append(element("td", text, data_head=stem))
    version = element("span", run["implementation"]["version"], class_="aside")
    title = element("th", element("time", run["started"]), " ", version, scope="row")
    last = element("td", *changes, data_head="changed")
    return element("tr", title, element("td", badge(word, found.word), data_head="verdict"), *cells, last)


def _changes(before: dict[str, str], now: dict[str, str]) -> list[Markup]:
    if not before:
        return [element("span", "the first run here", class_="aside")]
    both = [name for name in sorted(now) if name in before and now[name] != before[name]]
    groups = {
        "failed": [name for name in both if now[name] in BAD],
        "passed": [name for name in both if now[name] == "passed"],
        "skipped": [name for name in both if now[name] not in (*BAD, "passed")],
    }
    titles = {"failed": "fails now", "passed": "holds now", "skipped": "not proven now"}
    lines = [
        element("div", badge(word, f"{len(names)} {titles[word]}"), " ", ", ".join(names[:_NAMED_MAX]), _rest(names))
        for word, names in groups.items()
        if names
    ]
    fresh = sum(name not in before for name in now)
    if fresh:
        lines.append(element("div", f"{fresh} not run before", class_="aside"))
    return lines or [element("span", "nothing", class_="aside")]


def _rest(names: list[str]) -> str | None:
    return f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else None


def _plot(side: Side) -> Markup:
    """How many requirements hold and how many fail, a column for each run, the oldest first."""
    height, width, gap = 60.0, 22.0, 6.0
    most = max(1, *map(len, side.outcomes))
    parts = []
    for number, run in enumerate(side.runs):
        entries, y = run["requirements"], height
        for name, among in (("passed", ["passed"]), ("failed", BAD)):
            count = counts_of(entries, among)
            if not count:
                continue
            size = max(height * count / most, 3.0)
            y -= size
            place = {"x": f"{number * (width + gap):.0f}", "y": f"{y:.1f}", "width": f"{width:.0f}"}
            title = element("title", f"{run['started']}: {count} {name}")
            parts.append(element("rect", title, height=f"{size:.1f}", class_=f"part-{name}", **place))
    total = len(side.runs) * (width + gap)
    label = f"requirements of {side.name} that hold and that fail, a column for each of {len(side.runs)} runs"
    box = f"0 -4 {total:.0f} {height + 4:.0f}"
    return element("svg", *parts, viewBox=box, class_="columns", role="img", aria_label=label, width=f"{total:.0f}")
