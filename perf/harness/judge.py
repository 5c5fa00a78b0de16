"""From measurements and gates to outcomes, where "nobody looked" can never read as "passed".

Each gate is judged twice, on its subject and on its control. Refusing the control is part of passing; a control that
passes, or that could not be judged, makes the gate worthless and is said so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from perf.harness.formulas import evaluate_bound
from perf.harness.gates import Control, Gate, Kind
from perf.harness.paired import Round, ratios
from perf.harness.verdicts import Interval, interval_of
from perf.harness.workloads import Workload

__all__ = ["Machine", "Outcome", "Result", "Ruling", "count_of", "judge", "judge_ratio", "needs_more_samples"]


class Result(str, Enum):
    """Of a gate, or of its control."""

    PASS = "pass"
    FAIL = "fail"
    IMPLAUSIBLE = "implausible"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Machine:
    """Where it was measured: classes that gates may name, and the type of the file system."""

    classes: tuple[str, ...]
    filesystem: str


@dataclass(frozen=True)
class Ruling:
    """One judgement: the value, its interval if it has one, and the result with its reason."""

    result: Result
    reason: str
    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Outcome:
    """A gate's result in one form. ``bound`` is the number that had to be reached or kept."""

    gate: str
    kind: str
    sentence: str
    workload: str
    bound: float
    result: Result
    reason: str
    subject: Ruling
    control: Ruling

    @property
    def failed(self) -> bool:
        """Whether the promise is broken, or too good to be true, or its control was let through."""
        return self.result in (Result.FAIL, Result.IMPLAUSIBLE)

    def as_dict(self) -> dict[str, Any]:
        """For the evidence file."""
        return asdict(self)


def judge(
    gate: Gate,
    form: str,
    workloads: Mapping[str, Workload],
    measured: Mapping[str, Sequence[Round]],
    machine: Machine,
) -> Outcome:
    """Judge ``gate`` on the workload of ``form``.

    Args:
        gate: not of kind regression, which compares two evidence files.
        form: one of the gate's.
        workloads: by name.
        measured: rounds by workload name.
        machine: where.
    """
    workload = workloads[gate.workloads[form]]
    sizes = workload.sizes()
    floor = None if gate.floor is None else evaluate_bound(gate.floor, sizes)
    ceiling = None if gate.ceiling is None else evaluate_bound(gate.ceiling, sizes)

    def ruling(who: Control) -> Ruling:
        rounds = measured.get(workload.name, ())
        if gate.kind.is_paired:
            assert who.peer is not None
            assert floor is not None
            absent = [name for name in (who.subject, who.peer) if rounds and not any(name in found for found in rounds)]
            if absent:
                return Ruling(Result.UNDECIDED, f"{absent[0]} was not measured here; it may not be installed")
            found = interval_of(ratios(rounds, who.peer, who.subject, key=gate.metric))
            return judge_ratio(found, floor, ceiling)
        subtracted = None if gate.against is None else measured.get(gate.against[form], ())
        return _judge_count(gate, who, rounds, subtracted, floor, ceiling)

    subject, control = ruling(Control(gate.subject, gate.peer)), ruling(gate.control)
    result, reason = _settle(gate, machine, subject, control)
    bound = floor if gate.kind.is_paired else ceiling
    assert bound is not None
    return Outcome(gate.id, gate.kind.value, gate.sentence, workload.name, bound, result, reason, subject, control)


def judge_ratio(interval: Interval | None, floor: float, ceiling: float | None) -> Ruling:
    """The whole interval must reach the floor; a median above the ceiling means that work was skipped."""
    if interval is None:
        return Ruling(Result.UNDECIDED, "too few pairs")
    value, low, high = interval.median, interval.low, interval.high
    if high < floor:
        result, reason = Result.FAIL, f"the whole interval lies below {floor:.4g}"
    elif ceiling is not None and value > ceiling:
        result, reason = Result.IMPLAUSIBLE, f"more than {ceiling:.4g} is not plausible: was the work done?"
    elif low < floor:
        result, reason = Result.UNDECIDED, f"the interval contains {floor:.4g}"
    else:
        result, reason = Result.PASS, f"the whole interval reaches {floor:.4g}"
    return Ruling(result, reason, value, low, high)


def _judge_count(
    gate: Gate,
    who: Control,
    rounds: Sequence[Round],
    subtracted: Sequence[Round] | None,
    floor: float | None,
    ceiling: float | None,
) -> Ruling:
    """Counts are exact: the worst round decides, and no interval excuses it."""
    values = _counts(gate, who, rounds)
    if not values:
        return Ruling(Result.UNDECIDED, f"{gate.metric} of {who.subject} was not measured")
    worst, least = max(values), min(values)
    if subtracted is not None:
        base = _counts(gate, who, subtracted)
        if not base:
            return Ruling(Result.UNDECIDED, f"{gate.metric} of {who.subject} was not measured on the base workload")
        worst, least = worst - min(base), least - max(base)
    assert ceiling is not None
    if worst > ceiling:
        return Ruling(Result.FAIL, f"more than {ceiling:.6g}", worst)
    if floor is not None and least < floor:
        return Ruling(Result.IMPLAUSIBLE, f"less than {floor:.6g} is not plausible: was the work done?", least)
    return Ruling(Result.PASS, f"at most {ceiling:.6g}", worst)


def count_of(gate: Gate, who: Control, rounds: Sequence[Round], subtracted: Sequence[Round] | None) -> float | None:
    """What a gate on counts is judged by: the worst round, less the least of ``subtracted``; None: not measured."""
    values = _counts(gate, who, rounds)
    base = [0.0] if subtracted is None else _counts(gate, who, subtracted)
    return max(values) - min(base) if values and base else None


def _counts(gate: Gate, who: Control, rounds: Sequence[Round]) -> list[float]:
    if who.peer is not None:
        return [] if not rounds else _shares(gate.metric, who.subject, who.peer, rounds)
    return [found[who.subject][gate.metric] for found in rounds if gate.metric in found.get(who.subject, {})]


def _shares(metric: str, subject: str, peer: str, rounds: Sequence[Round]) -> list[float]:
    pairs = [(found.get(subject, {}), found.get(peer, {})) for found in rounds]
    return [mine[metric] / other[metric] for mine, other in pairs if metric in mine and other.get(metric, 0) > 0]


def _settle(gate: Gate, machine: Machine, subject: Ruling, control: Ruling) -> tuple[Result, str]:
    if not set(gate.hardware) & set(machine.classes):
        known, here = " or ".join(gate.hardware), ", ".join(machine.classes)
        return Result.UNDECIDED, f"the bound is known for {known}; this machine is {here}"
    if gate.filesystem not in (None, machine.filesystem):
        return Result.UNDECIDED, f"the bound holds on {gate.filesystem}; this is {machine.filesystem}"
    if control.result in (Result.PASS, Result.IMPLAUSIBLE):
        return Result.FAIL, f"the control {gate.control.subject} was let through: {control.reason}"
    if subject.result is Result.PASS and control.result is Result.UNDECIDED:
        return Result.UNDECIDED, f"the control {gate.control.subject} was not refused: {control.reason}"
    return subject.result, subject.reason


def needs_more_samples(outcome: Outcome, gate: Gate, machine: Machine) -> bool:
    """Whether noise, and not the machine or a missing count, left it undecided."""
    settled = _settle(gate, machine, Ruling(Result.PASS, ""), Ruling(Result.FAIL, ""))[0] is Result.PASS
    noisy = outcome.result is Result.UNDECIDED and outcome.subject.value is not None
    return noisy and settled and gate.kind in (Kind.CLAIM, Kind.LIMIT)
