"""The gates of a bench as plots: value with interval, the bound that it must reach, and the control that must not.

Every row has one scale, in logarithms: the bound in the middle, better to the right, whatever the gate counts. A
control on the right side of the bound was let through, which makes a gate worthless.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from conformance.harness.page.markup import Markup, badge, element, head_of, joined

__all__ = ["gates", "gates_line"]

_ORDER = ("fail", "implausible", "undecided", "pass")
_PAIRED = ("claim", "limit", "regression")
_WIDTH, _HEIGHT = 240.0, 30.0
# Of log10(value / bound); what lies beyond is drawn at the edge, as an arrow.
_SPAN = 1.0
# A difference from 1 that a whole interval does not exceed is not worth a word.
_SAME_WITHIN = 0.03
_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def gates_line(bench: Sequence[dict[str, Any]]) -> tuple[int, str] | None:
    """Exit code and sentence of all evidence: 0 where gates were decided and none failed; None without evidence."""
    counts = Counter(outcome["result"] for evidence in bench for outcome in evidence["outcomes"])
    if not bench:
        return None
    failed, total = counts["fail"] + counts["implausible"], sum(counts.values())
    if failed:
        return 1, f"{failed} of {total} gates failed, {counts['undecided']} undecided"
    if not counts["pass"]:
        return 1, f"none of {total} gates was decided; that proves nothing"
    return 0, f"{counts['pass']} of {total} gates reached, {counts['undecided']} undecided"


def gates(bench: Sequence[dict[str, Any]]) -> Markup | None:
    """A table for each evidence file, with failed gates first; None without evidence."""
    if not bench:
        return None
    legend = element(
        "p",
        "Each plot has the bound in the middle and better to the right, on a scale from a tenth to ten times. ",
        element("b", "●"),
        " is the subject with its interval, ",
        element("b", "□"),
        " the control, a deliberate violation that the gate must refuse: it belongs to the left.",
        class_="aside",
    )
    tables = (_evidence(evidence) for evidence in bench)
    title = element("h2", "Gates of the bench", id="gates")
    return element("section", title, legend, *tables, aria_labelledby="gates")


def _evidence(evidence: dict[str, Any]) -> Markup:
    found = gates_line([evidence])
    assert found is not None
    facts = evidence.get("environment") or {}
    cpu = facts.get("cpu") or {}
    words = [evidence.get("implementation"), evidence.get("form"), evidence.get("created"), cpu.get("model")]
    title = element("h3", badge("fail" if found[0] else "pass", found[1]))
    about = element("p", ", ".join(str(word) for word in words if word), class_="aside")
    columns = (("gate", "c-gate"), ("result", "c-narrow"), (_axis(), "c-plot"), ("in numbers", ""))
    ordered = sorted(evidence["outcomes"], key=lambda outcome: _ORDER.index(outcome["result"]))
    stems = {name: str(shape.get("component", "")) for name, shape in (evidence.get("workloads") or {}).items()}
    rows = (_row(outcome, stems.get(outcome["workload"], "")) for outcome in ordered)
    table = element("table", head_of(*columns), element("tbody", *rows), class_="gates")
    return joined([title, about, table])


def _row(outcome: dict[str, Any], stem: str) -> Markup:
    subject, control, bound = outcome["subject"], outcome["control"], outcome["bound"]
    is_paired = outcome["kind"] in _PAIRED
    marks: list[str] = [badge(outcome["result"])]
    if control["result"] in ("pass", "implausible"):
        marks += [" ", badge("fail", "control let through")]
    if outcome["kind"] == "claim":
        marks += [element("div", _compared(subject), class_="aside")]
    name = element("div", element("code", outcome["gate"], class_="id"), " ", outcome["kind"])
    numbers = [
        element("div", element("strong", _figure(subject)), f", {'at least' if is_paired else 'at most'} {_si(bound)}"),
        element("div", f"control {_figure(control)}", class_="aside"),
        element("div", outcome["reason"], class_="aside"),
    ]
    word = {"fail": "failed", "implausible": "failed", "pass": "passed"}.get(outcome["result"], outcome["result"])
    return element(
        "tr",
        element("th", name, element("span", outcome["sentence"], class_="sentence"), scope="row"),
        element("td", *marks, data_head="result"),
        element("td", _plot(outcome, is_paired), data_head="plot"),
        element("td", *numbers, data_head="numbers"),
        data_outcomes=word,
        data_stem=stem,
    )


def _compared(ruling: dict[str, Any]) -> str:
    """What the interval of a ratio of times says beside the peer."""
    low, high = ruling.get("low"), ruling.get("high")
    if low is None or high is None:
        return "not compared with the peer"
    upper, lower = 1 + _SAME_WITHIN, 1 / (1 + _SAME_WITHIN)
    if low >= upper:
        return "faster than the peer"
    if high <= lower:
        return "slower than the peer"
    return "same as the peer" if lower < low and high < upper else "undecided beside the peer"


def _figure(ruling: dict[str, Any]) -> str:
    value, low, high = (ruling.get(name) for name in ("value", "low", "high"))
    if value is None:
        return "not measured"
    return _si(value) if low is None or high is None else f"{_si(value)} [{_si(low)}, {_si(high)}]"


def _si(value: float) -> str:
    """Three digits; thousands and more with a prefix."""
    for size, unit in _UNITS:
        if math.isfinite(value) and abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def _place(value: float | None, bound: float, is_paired: bool) -> float | None:
    """Where a value is drawn, from 0 to the width; None where a logarithm says nothing."""
    if value is None or not (math.isfinite(value) and value > 0 and bound > 0):
        return None
    return _x(math.log10(value / bound) * (1 if is_paired else -1))


def _plot(outcome: dict[str, Any], is_paired: bool) -> Markup:
    bound = outcome["bound"]
    parts = [
        element("rect", x=0, y=0, width=f"{_WIDTH / 2:.0f}", height=f"{_HEIGHT:.0f}", class_="refused"),
        element("line", x1=f"{_x(0):.0f}", x2=f"{_x(0):.0f}", y1=0, y2=f"{_HEIGHT:.0f}", class_="bound"),
        *(
            element("line", x1=f"{_x(share):.1f}", x2=f"{_x(share):.1f}", y1=26, y2=f"{_HEIGHT:.0f}", class_="tick")
            for share in (-_SPAN, -_SPAN / 2, _SPAN / 2, _SPAN)
        ),
    ]
    for who, y in (("subject", 10.0), ("control", 22.0)):
        parts += _marks(outcome[who], bound, is_paired, who, y)
    text = f"{outcome['gate']}: subject {_figure(outcome['subject'])}, bound {_si(bound)}, "
    label = f"{text}control {_figure(outcome['control'])}"
    box = f"-6 0 {_WIDTH + 12:.0f} {_HEIGHT:.0f}"
    return element("svg", *parts, viewBox=box, class_="gate", role="img", aria_label=label)


def _axis() -> Markup:
    """The scale over the plots: shares of the bound, in words that need no colour."""
    ticks = {-_SPAN: "10 × worse", 0.0: "bound", _SPAN: "10 × better"}
    anchors = {-_SPAN: "start", _SPAN: "end"}
    texts = (
        element("text", text, x=f"{_x(share):.1f}", y=12, text_anchor=anchors.get(share, "middle"))
        for share, text in ticks.items()
    )
    box = f"-6 0 {_WIDTH + 12:.0f} 16"
    return element("svg", *texts, viewBox=box, class_="gate", role="img", aria_label="worse, bound, better")


def _x(share: float) -> float:
    """Where a decimal logarithm of value / bound is drawn."""
    return _WIDTH * (0.5 + max(-_SPAN, min(_SPAN, share)) / (2 * _SPAN))


def _marks(ruling: dict[str, Any], bound: float, is_paired: bool, who: str, y: float) -> Iterator[Markup]:
    at, low, high = (_place(ruling.get(name), bound, is_paired) for name in ("value", "low", "high"))
    if at is None:
        return
    if low is not None and high is not None:
        yield element("line", x1=f"{low:.1f}", x2=f"{high:.1f}", y1=y, y2=y, class_=f"interval {who}")
    if at <= 0 or at >= _WIDTH:
        turn = -6 if at <= 0 else 6
        points = f"{at:.1f},{y - 4} {at + turn:.1f},{y} {at:.1f},{y + 4}"
        yield element("polygon", points=points, class_=f"value {who}")
    elif who == "subject":
        yield element("circle", cx=f"{at:.1f}", cy=y, r=4, class_="value subject")
    else:
        yield element("rect", x=f"{at - 3.5:.1f}", y=y - 3.5, width=7, height=7, class_="value control")
