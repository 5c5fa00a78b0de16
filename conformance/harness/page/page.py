"""The page: one verdict, then what failed, then everything else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from conformance.harness.page.failures import failures, not_killed
from conformance.harness.page.gates import gates, gates_line
from conformance.harness.page.history import history
from conformance.harness.page.markup import Markup, badge, element, joined
from conformance.harness.page.requirements import components, requirements
from conformance.harness.page.sides import Side, sides_of, stems_of
from conformance.harness.page.sources import Sources
from conformance.harness.report import ReportError

__all__ = ["to_html"]

_HERE = Path(__file__).parent
_FILTERS = {
    "": "every outcome",
    "failed error": "failed",
    "passed": "holds",
    "skipped none absent": "not run",
    "xfailed": "known deviation",
    "survived": "planted bug not killed",
    "undecided": "undecided gate",
    "differs": "implementations differ",
}


def to_html(sources: Sources) -> str:
    """The page, as a complete HTML document that asks for nothing from elsewhere.

    Raises:
        ReportError: without a report and without evidence of a bench, a page would say nothing.
    """
    if not sources.reports and not sources.bench:
        raise ReportError("got neither a report nor evidence of a bench, expected at least one")
    sides = sides_of(sources.reports)
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    title = " and ".join(side.label for side in sides) or "gates of a bench"
    # Only this style and this script: what a report shows could not run even if it were not escaped.
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{_words(sides, sources)}: {title}"),
        element("style", Markup(style)),
    )
    body = element("body", *_body(sides, sources), element("script", Markup(script)))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _words(sides: Sequence[Side], sources: Sources) -> str:
    found = [side.verdict.word for side in sides]
    bench = gates_line(sources.bench)
    if bench is not None:
        found.append("gates failed" if bench[0] else "gates reached")
    return ", ".join(found)


def _body(sides: Sequence[Side], sources: Sources) -> Iterator[Markup]:
    sections = {
        "failures": failures(sides),
        "planted": not_killed(sides),
        "gates": gates(sources.bench),
        "history": history(sides),
        "requirements": requirements(sides, sources.mutants) if sides else None,
        "deviations": _deviations(sides),
    }
    names = {"failures": "failures", "planted": "planted bugs", "gates": "gates", "history": "runs over time"}
    names |= {"requirements": "all requirements", "deviations": "known deviations", "environment": "environment"}
    links = [element("a", names[name], href=f"#{name}") for name in [*sections, "environment"] if sections.get(name, 1)]
    yield element("header", *_verdicts(sides, sources), element("nav", *links, aria_label="parts of this page"))
    parts = [components(sides, sources.mutants)] if sides else []
    parts += [section for name, section in sections.items() if section is not None and name != "requirements"]
    # The filter stands before what it filters; environment and deviations are looked up last.
    order = [*parts[:1], _filter(sides, sources), *parts[1:]]
    if sections["requirements"] is not None:
        place = len(order) - (sections["deviations"] is not None)
        order.insert(place, sections["requirements"])
    yield element("main", *order, _environment(sides))


def _verdicts(sides: Sequence[Side], sources: Sources) -> Iterator[Markup]:
    level = "h1"
    for side in sides:
        found = side.verdict
        kind = "passed" if found.exit_code == 0 else "failed"
        text = element("span", f" {side.label}: {found.sentence}")
        yield element(level, badge(kind, found.word), text, class_=f"verdict {kind}", data_exit_code=found.exit_code)
        yield element("p", _context(side), class_="aside")
        level = "h1" if level == "h1" and len(sides) > 1 else level
    bench = gates_line(sources.bench)
    if bench is not None:
        kind = "failed" if bench[0] else "passed"
        word = "gates failed" if bench[0] else "gates reached"
        tag = "h1" if not sides else "p"
        yield element(tag, badge(kind, word), f" {bench[1]}", class_=f"verdict {kind}", data_gates_exit_code=bench[0])


def _context(side: Side) -> str:
    run = side.runs[-1]
    versions, cpu = run["environment"]["versions"], run["environment"]["cpu"]
    words = [run["started"], f"{run['duration_s']:.0f} s", f"profile {run['profile']}", f"seed {run['seed']}"]
    words += [f"torch {versions['torch']}", f"{cpu['count']} x {cpu['model']}"]
    return ", ".join(words)


def _filter(sides: Sequence[Side], sources: Sources) -> Markup:
    """Search and filters; hidden where no script could carry them out."""
    stems = stems_of([entry for side in sides for entry in side.requirements.values()])
    outcomes = {value: text for value, text in _FILTERS.items() if value != "differs" or len(sides) > 1}
    if not sources.bench:
        outcomes.pop("undecided")
    search = element("input", type="search", id="search", placeholder="id, words, error", autocomplete="off")
    outcome = element(
        "select", *(element("option", text, value=value) for value, text in outcomes.items()), id="outcome"
    )
    options = [element("option", "every component", value=""), *(element("option", stem) for stem in stems)]
    shown = element("output", id="shown", aria_live="polite")
    return element(
        "form",
        element("label", "Search ", search),
        element("label", "Outcome ", outcome),
        element("label", "Component ", element("select", *options, id="stem")),
        shown,
        id="filter",
        role="search",
        hidden=True,
    )


def _deviations(sides: Sequence[Side]) -> Markup | None:
    entries = [(side, entry) for side in sides for run in side.current for entry in run["deviations"]]
    if not entries:
        return None
    items = (
        element(
            "li",
            element("code", entry["requirement"]),
            f" {entry['kind']}: {entry['reason']} ({entry['tracker']})",
            f" {side.label}" if len(sides) > 1 else None,
        )
        for side, entry in entries
    )
    title = element("h2", "Known deviations", id="deviations")
    return element("section", title, element("ul", *items), aria_labelledby="deviations")


def _environment(sides: Sequence[Side]) -> Markup:
    parts = []
    for side in sides:
        for run in side.current:
            facts = {**run["implementation"], **run["environment"]}
            rows = (
                element(
                    "tr",
                    element("th", name, class_="c-fact", scope="row"),
                    element("td", element("code", _text(value))),
                )
                for name, value in facts.items()
            )
            title = element("summary", f"{side.label}, run of {run['started']}")
            parts.append(element("details", title, element("table", element("tbody", *rows), class_="facts")))
    return element("section", element("h2", "Environment", id="environment"), joined(parts))


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_text(inner)}" for name, inner in value.items())
    return " | ".join(_text(inner) for inner in value) if isinstance(value, list) else str(value)
