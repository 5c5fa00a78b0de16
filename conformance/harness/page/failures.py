"""What went wrong, first and whole: failures by their first difference, and planted bugs that nobody noticed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.harness.page.markup import Markup, badge, element, joined, quoted
from conformance.harness.page.sides import Side
from conformance.harness.report import BAD

__all__ = ["failures", "not_killed"]

_ROWS = ("message", "got", "expected", "where", "error")
_TITLES = {"message": "difference"}
_CASES_MAX = 20
_NO_CAUSE = "an older report, which does not say the difference"


@dataclass(frozen=True)
class _Failed:
    """A requirement that does not hold, of one implementation, with its failed tests."""

    side: Side
    entry: dict[str, Any]
    tests: tuple[dict[str, Any], ...]

    @property
    def cause(self) -> str:
        return str(self.tests[0].get("failure", {}).get("cause") or _NO_CAUSE)


def _failed(sides: Sequence[Side]) -> Iterator[_Failed]:
    for side in sides:
        for entry in side.requirements.values():
            tests = tuple(test for test in entry["tests"] if test["outcome"] in BAD)
            if tests:
                yield _Failed(side, entry, tests)


def failures(sides: Sequence[Side]) -> Markup | None:
    """The failures in groups of one cause, the largest group first; None where there is none."""
    groups: dict[str, list[_Failed]] = {}
    for found in _failed(sides):
        groups.setdefault(found.cause, []).append(found)
    if not groups:
        return None
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    total = sum(map(len, groups.values()))
    title = f"{total} failed requirement{'s' * (total != 1)}, by first difference"
    parts = [element("h2", title, id="failures")]
    if any("#" in cause for cause in groups):
        parts.append(element("p", "# stands for any number: failures of one cause are one group.", class_="aside"))
    if len(ordered) > 1:
        parts.append(_overview(ordered))
    parts += [_group(number, cause, found, len(sides) > 1) for number, (cause, found) in enumerate(ordered, 1)]
    return element("section", *parts, class_="failures", aria_labelledby="failures")


def _overview(ordered: list[tuple[str, list[_Failed]]]) -> Markup:
    lines = (
        element("li", element("a", cause, href=f"#cause-{number}"), f" ({len(found)})")
        for number, (cause, found) in enumerate(ordered, 1)
    )
    return element("ol", *lines, class_="overview")


def _group(number: int, cause: str, found: list[_Failed], several: bool) -> Markup:
    title = element(
        "h3",
        f"{number}. ",
        element("code", cause),
        f" in {len(found)} requirement{'s' * (len(found) != 1)}",
        id=f"cause-{number}",
    )
    cards = (_card(one, several, is_open=place == 0) for place, one in enumerate(found))
    return element("section", title, *cards, class_="group")


def _card(found: _Failed, several: bool, *, is_open: bool) -> Markup:
    entry, first = found.entry, found.tests[0]
    head = [badge(first["outcome"]), " ", element("code", entry["id"], class_="id"), " "]
    if several:
        head += [element("span", found.side.label, class_="side"), " "]
    head.append(element("span", entry["sentence"], class_="sentence"))
    others = found.tests[1:]
    parts = [_case(first)]
    if others:
        more = [element("li", element("code", test["nodeid"]), ": ", _short(test)) for test in others[:_CASES_MAX]]
        if len(others) > _CASES_MAX:
            more.append(element("li", f"and {len(others) - _CASES_MAX} more"))
        parts.append(element("p", f"{len(others)} more of its {len(entry['tests'])} tests failed:"))
        parts.append(element("ul", *more))
    return element(
        "details",
        element("summary", *head),
        *parts,
        open=is_open,
        class_="card",
        data_stem=entry["stem"],
        data_outcomes=str(entry["outcome"]),
        data_id=entry["id"],
    )


def _short(test: dict[str, Any]) -> str:
    failure = test.get("failure", {})
    return str(failure.get("message") or failure.get("error") or test["message"]).split("\n")[0][:200]


def _case(test: dict[str, Any]) -> Markup:
    """Got, expected, where, the minimal program and the command of one failed test."""
    failure = test.get("failure")
    if failure is None:
        return joined([element("p", element("code", test["nodeid"])), quoted(test["message"])])
    rows = [
        element("div", element("dt", _TITLES.get(name, name)), element("dd", quoted(failure[name])))
        for name in _ROWS
        if failure.get(name)
    ]
    if failure.get("program"):
        rows.append(element("div", element("dt", "minimal program"), element("dd", quoted(failure["program"]))))
    rows.append(element("div", element("dt", "repeat it"), element("dd", quoted(failure["command"]), class_="command")))
    return element("dl", *rows)


def not_killed(sides: Sequence[Side]) -> Markup | None:
    """Planted bugs that a requirement should have noticed and did not; None where there is none."""
    found = [
        (side, entry, bug)
        for side in sides
        for entry in side.requirements.values()
        for bug in entry["planted"]
        if bug["verdict"] in ("survived", "no kill")
    ]
    if not found:
        return None
    explained = {
        "survived": "no test of the requirement noticed it",
        "no kill": "it crashed or raised, where a comparison should have spoken up",
    }
    items = (
        element(
            "li",
            badge(bug["verdict"]),
            " ",
            element("code", bug["bug"], class_="id"),
            f": {bug['sentence']} ",
            element("a", entry["id"], href=f"#{entry['id']}"),
            f" should have noticed; {explained[bug['verdict']]}.",
            f" ({side.label})" if len(sides) > 1 else None,
        )
        for side, entry, bug in found
    )
    title = f"{len(found)} planted bug{'s' * (len(found) != 1)} not killed"
    return element("section", element("h2", title, id="planted"), element("ul", *items), aria_labelledby="planted")
