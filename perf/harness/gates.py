"""Gates as data: each says what must come out of which workload, and which contender must fail it.

Prevents a gate that cannot fail, a threshold that drifted in code, and a speed-up too good to be true. A gate judges
its ``subject``; judged on its ``control`` instead it must fail.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.harness.paired import Round, ratios
from perf.harness.verdicts import interval_of
from perf.harness.workloads import Workload, check_keys, read_toml
from refimpl.errors import FormatError

__all__ = ["GATES", "Gate", "Outcome", "evaluate", "formula", "judge", "read_gates"]

GATES = Path(__file__).parent.parent / "gates.toml"
KINDS = ("counter", "claim", "limit", "memory", "regression")
_REQUIRED = {"id", "kind", "workload", "subject", "control", "measure"}
_OPTIONAL = {"reference", "floor", "ceiling", "at_most"}
_OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True)
class Gate:
    """One gate.

    Attributes:
        id: what reports call it.
        kind: ``claim``, ``limit`` and ``regression`` compare times by ratio; ``counter`` and ``memory`` bound a count.
        workload: the base name; its short and test forms have a suffix.
        subject, reference: contenders. A ratio is reference / subject.
        control: the contender that must fail.
        measure: key of the samples.
        floor, ceiling: least ratio, and the one beyond which it is implausible.
        at_most: a formula of the workload's sizes.
    """

    id: str
    kind: str
    workload: str
    subject: str
    control: str
    measure: str
    reference: str | None = None
    floor: float | None = None
    ceiling: float | None = None
    at_most: str | None = None


@dataclass(frozen=True)
class Outcome:
    """``status`` is pass, fail or undecided; ``text`` says got and bound."""

    gate: Gate
    status: str
    got: float | None
    text: str


def formula(text: str, sizes: Mapping[str, float]) -> float:
    """Value of an arithmetic formula of numbers and sizes. Raises FormatError for anything else."""

    def value(node: ast.AST) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return float(node.value)
        if isinstance(node, ast.Name) and node.id in sizes:
            return sizes[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise FormatError("not a formula of sizes", got=text, expected=f"numbers, + - * / and {sorted(sizes)}")

    try:
        return value(ast.parse(text, mode="eval").body)
    except SyntaxError as error:
        raise FormatError("not a formula", got=text) from error


def read_gates(path: Path = GATES) -> tuple[Gate, ...]:
    """All gates. Raises FormatError: an unknown key or kind, a missing bound, an id twice."""
    gates: dict[str, Gate] = {}
    for number, entry in enumerate(read_toml(path, "gate"), 1):
        where = f"{path}: gate {number} ({entry.get('id')})"
        check_keys(entry, _REQUIRED, _OPTIONAL, where)
        gate = _gate(entry, where)
        if gate.id in gates:
            raise FormatError("an id twice", got=gate.id, where=path)
        gates[gate.id] = gate
    return tuple(gates.values())


def _gate(entry: dict[str, Any], where: str) -> Gate:
    texts = _REQUIRED | {"reference", "at_most"}
    wrong = [key for key, value in entry.items() if (key in texts) is not isinstance(value, str)]
    if wrong or entry["kind"] not in KINDS:
        raise FormatError("a value of the wrong kind", got={key: entry[key] for key in wrong or ["kind"]}, where=where)
    gate = Gate(**entry)
    by_ratio = gate.kind in ("claim", "limit", "regression")
    if by_ratio and (gate.reference is None or gate.floor is None or gate.at_most is not None):
        raise FormatError("a ratio needs reference and floor", got=entry, where=where)
    if not by_ratio and (gate.at_most is None or gate.floor is not None):
        raise FormatError("a count needs at_most", got=entry, where=where)
    return gate


def judge(gate: Gate, workload: Workload, rounds: Sequence[Round], *, control: bool = False) -> Outcome:
    """Judge the subject, or the control. What was not measured is undecided, never passed."""
    subject = gate.control if control else gate.subject
    if gate.at_most is not None:
        return _judge_count(gate, workload, rounds, subject)
    assert gate.reference is not None
    assert gate.floor is not None
    interval = interval_of(ratios(rounds, gate.reference, subject, key=gate.measure))
    if interval is None:
        return Outcome(gate, "undecided", None, "too few pairs")
    text = f"{interval} times, at least {gate.floor:g}"
    if gate.ceiling is not None and interval.median > gate.ceiling:
        return Outcome(gate, "fail", interval.median, f"{text}: beyond {gate.ceiling:g} it is not plausible")
    if interval.high < gate.floor:
        return Outcome(gate, "fail", interval.median, text)
    status = "pass" if interval.low >= gate.floor else "undecided"
    return Outcome(gate, status, interval.median, text)


def _judge_count(gate: Gate, workload: Workload, rounds: Sequence[Round], subject: str) -> Outcome:
    assert gate.at_most is not None
    values = [found[subject][gate.measure] for found in rounds if gate.measure in found.get(subject, {})]
    if not values:
        return Outcome(gate, "undecided", None, f"{gate.measure} of {subject} was not measured")
    bound = formula(gate.at_most, workload.sizes())
    # A count is exact, so its smallest value is the program's own; what others do to the process only adds.
    got = min(values)
    return Outcome(gate, "pass" if got <= bound else "fail", got, f"{got:.0f}, at most {bound:.0f} ({gate.at_most})")


def evaluate(
    gates: Sequence[Gate], workloads: Mapping[str, Workload], results: Mapping[str, Sequence[Round]], form: str
) -> list[Outcome]:
    """Judge every gate whose workload was measured in this form and whose subject ran in it."""
    outcomes = []
    for gate in gates:
        name = gate.workload if form == "full" else f"{gate.workload}-{form}"
        if name in results and gate.subject in workloads[name].contenders:
            outcomes.append(judge(gate, workloads[name], results[name]))
    return outcomes
