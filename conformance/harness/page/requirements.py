"""Every requirement with its sentence, by component and area, and the components as n of m."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from conformance.harness.page.history import glyphs
from conformance.harness.page.markup import Markup, badge, element, head_of, joined
from conformance.harness.page.sides import Side, counts_of, stems_of
from conformance.harness.report import BAD

__all__ = ["Mutants", "components", "requirements"]

Mutants = Mapping[str, tuple[int, int]]
_ASIDE = {"skipped": "skipped", "xfailed": "known to deviate", "none": "not run"}


def components(sides: Sequence[Side], mutants: Mutants) -> Markup:
    """A row for each component, with a cell of n of m for each side."""
    every = [entry for side in sides for entry in side.requirements.values()]
    with_bugs = any(entry["planted"] for entry in every)
    heads = ["component", *(side.label if len(sides) > 1 else "requirements that hold" for side in sides)]
    heads += ["planted bugs killed"] * with_bugs + ["mutants killed"] * bool(mutants)
    rows = []
    for stem in stems_of(every):
        cells = [_cell(side, stem) for side in sides]
        if with_bugs:
            cells.append(_bugs_cell(sides, stem))
        if mutants:
            cells.append(element("td", _score_text(_score(mutants, _files_of(stem, mutants))), data_head=heads[-1]))
        rows.append(element("tr", element("th", stem, scope="row"), *cells))
    table = element("table", head_of(*((title, "") for title in heads)), element("tbody", *rows), class_="components")
    return element("section", element("h2", "Components", id="components"), table, aria_labelledby="components")


def _cell(side: Side, stem: str) -> Markup:
    entries = [entry for entry in side.requirements.values() if entry["stem"] == stem]
    if not entries:
        return element("td", "not in this report", data_head=side.label)
    held, failed = counts_of(entries, ["passed"]), counts_of(entries, BAD)
    others = [f"{count} {text}" for name, text in _ASIDE.items() if (count := counts_of(entries, [name]))]
    notes = [badge("failed", f"{failed} failed")] if failed else []
    text = element("span", ", ".join(others), class_="aside") if others else None
    share = element("span", element("strong", f"{held} of {len(entries)}"), " ", _bar(entries), class_="share")
    return element("td", share, " ", *notes, " ", text, data_head=side.label)


def _bar(entries: Sequence[dict[str, Any]]) -> Markup:
    """A bar of outcomes; what failed is hatched, so that it is seen in grey."""
    width, x, parts = 120.0, 0.0, []
    for name, among in (("passed", ["passed"]), ("failed", BAD), ("skipped", ["skipped", "xfailed", "none"])):
        size = width * counts_of(entries, among) / len(entries)
        if size:
            # What failed is seen, however few they are.
            size = max(size, 3.0) if name == "failed" else size
            parts.append(element("rect", x=f"{x:.1f}", y=0, width=f"{size:.1f}", height=10, class_=f"part-{name}"))
            x += size
    return element("svg", *parts, viewBox=f"0 0 {max(x, width):.1f} 10", class_="bar", aria_hidden="true")


def _bugs_cell(sides: Sequence[Side], stem: str) -> Markup:
    bugs = Counter(
        bug["verdict"]
        for side in sides
        for entry in side.requirements.values()
        if entry["stem"] == stem
        for bug in entry["planted"]
    )
    alive = bugs["survived"] + bugs["no kill"]
    note = badge("survived", f"{alive} not killed") if alive else None
    text = f"{bugs['killed']} of {sum(bugs.values())}" if bugs else "none planted"
    return element("td", text, " " if note else None, note, data_head="planted bugs killed")


def _files_of(stem: str, mutants: Mutants) -> list[str]:
    return [name for name in mutants if stem in name.split("/")]


def _score(mutants: Mutants, files: Sequence[str]) -> tuple[int, int]:
    return sum(mutants[name][0] for name in files), sum(mutants[name][1] for name in files)


def _score_text(score: tuple[int, int]) -> str:
    killed, judged = score
    return f"{killed} of {judged} ({killed / judged:.0%})" if judged else "none judged"


def requirements(sides: Sequence[Side], mutants: Mutants) -> Markup:
    """All requirements: components, in them areas, in them a row each."""
    every: dict[str, dict[str, Any]] = {}
    for side in sides:
        for identifier, entry in side.requirements.items():
            every.setdefault(identifier, entry)
    areas = {module: text for side in sides for module, text in side.areas().items()}
    parts = [element("h2", f"All {len(every)} requirements", id="requirements")]
    for stem in stems_of([*every.values()]):
        parts.append(element("h3", stem, class_="stem", data_stem=stem))
        by_module: dict[str, list[str]] = {}
        for identifier in sorted(every):
            if every[identifier]["stem"] == stem:
                by_module.setdefault(every[identifier]["test"].split("::")[0], []).append(identifier)
        for module, identifiers in by_module.items():
            parts.append(_area(module, areas.get(module, ""), identifiers, every, sides, mutants))
    return element("section", *parts, aria_labelledby="requirements")


def _area(
    module: str,
    about: str,
    identifiers: Sequence[str],
    every: Mapping[str, dict[str, Any]],
    sides: Sequence[Side],
    mutants: Mutants,
) -> Markup:
    counts = []
    for side in sides:
        mine = [side.requirements[identifier] for identifier in identifiers if identifier in side.requirements]
        counts.append(f"{counts_of(mine, ['passed'])} of {len(mine)}" if mine else "–")
    name = module.rpartition(".")[2].removeprefix("test_").replace("_", " ")
    title = element("h4", element("b", name), f" {about} ", element("span", ", ".join(counts), class_="aside"))
    with_bugs = any(entry["planted"] for side in sides for entry in side.requirements.values())
    columns = [("id", "c-id"), ("requirement", ""), *((side.name, "c-side") for side in sides)]
    columns += [("planted bugs, mutants", "c-bugs")] * with_bugs
    rows = (_row(every[identifier], sides, mutants, with_bugs=with_bugs) for identifier in identifiers)
    table = element("table", head_of(*columns), element("tbody", *rows), class_="all")
    return element("section", title, table, class_="area", data_stem=every[identifiers[0]]["stem"])


def _row(entry: dict[str, Any], sides: Sequence[Side], mutants: Mutants, *, with_bugs: bool) -> Markup:
    identifier = entry["id"]
    found = [side.requirements.get(identifier) for side in sides]
    outcomes = [str(one["outcome"]) if one else "absent" for one in found]
    marks = [*outcomes, *(["differs"] if len(set(outcomes)) > 1 else [])]
    marks += ["survived"] if any(bug["verdict"] in ("survived", "no kill") for bug in _bugs(found)) else []
    reasons = dict.fromkeys(reason for one in found if one for reason in _reasons(one))
    notes = [element("div", reason, class_="aside") for reason in reasons]
    cells = [
        element("th", element("code", identifier), scope="row"),
        element("td", element("span", entry["sentence"], class_="sentence"), *notes),
    ]
    for side, one, outcome in zip(sides, found, outcomes, strict=True):
        cells.append(element("td", badge(outcome), *_beside(side, one), data_head=side.name))
    if with_bugs:
        cells.append(element("td", joined(_bug_lines(found, mutants))))
    return element("tr", *cells, id=identifier, data_outcomes=" ".join(marks), data_stem=entry["stem"])


def _beside(side: Side, one: dict[str, Any] | None) -> Iterator[Markup]:
    """How many tests a requirement has, and what it did in earlier runs."""
    if one is None:
        return
    count, failed = len(one["tests"]), sum(test["outcome"] in BAD for test in one["tests"])
    if count > 1:
        text = f"{failed} of {count} tests" if failed else f"{count} tests"
        yield element("div", text, class_="aside")
    earlier = glyphs(side, one["id"])
    if earlier is not None:
        yield earlier


def _reasons(one: dict[str, Any]) -> Iterator[str]:
    if one["outcome"] in ("skipped", "xfailed"):
        for test in one["tests"]:
            if test["message"] and test["outcome"] == one["outcome"]:
                yield f"{_ASIDE[one['outcome']]}: {test['message'].splitlines()[0][:300]}"


def _bugs(found: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
    return [bug for one in found if one for bug in one["planted"]]


def _bug_lines(found: Sequence[dict[str, Any] | None], mutants: Mutants) -> Iterator[Markup]:
    """The planted bugs with their verdicts, then the mutation score of the files that they lie in."""
    shown = set()
    for bug in _bugs(found):
        key = bug["bug"], bug["verdict"]
        if key not in shown:
            shown.add(key)
            yield element("div", badge(bug["verdict"]), " ", element("code", bug["bug"], title=bug["sentence"]))
    places = {place.partition(":")[0] for bug in _bugs(found) for place in bug.get("places", ())}
    files = [name for name in mutants if name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") in places]
    if files:
        names = ", ".join(files)
        yield element("div", f"mutants of {names}: {_score_text(_score(mutants, files))}", class_="aside")
