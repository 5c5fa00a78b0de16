"""Two runs against each other, through what both measured beside it: seconds of different runs are never compared.

A machine that is slower today slows the peer as well; the ratio to the peer of the same rounds is what carries over
(duet benchmarking). Regression gates say how much loss is too much; every other pair that both runs judged may lose
as much as they allow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from perf.harness.formulas import evaluate_bound
from perf.harness.gates import Control, Gate, Kind
from perf.harness.judge import Result, Ruling, judge_ratio
from perf.harness.paired import ratios
from perf.harness.results import Evidence
from perf.harness.verdicts import SAME_WITHIN, Interval, interval_of
from twinproof.errors import ConfigError

__all__ = ["KEPT_MIN", "Change", "compare_evidence", "judge_regression"]

# The share of its ratio to the peer that a gate without a bound of its own keeps from one run to the next.
KEPT_MIN = 0.9


@dataclass(frozen=True)
class Change:
    """One ratio in both runs. ``text`` is the line to print."""

    text: str
    failed: bool


def compare_evidence(before: Evidence, after: Evidence, gates: Sequence[Gate]) -> list[Change]:
    """Every pair that both runs measured, then gates that the second run failed.

    Regression gates come first. A claim or a limit is compared where both runs judged it and no earlier gate has
    compared the same pair.

    Raises:
        ConfigError: when the runs have no pair in common: nothing was compared.
    """
    changes = []
    for gate in _common(before, after, gates):
        workload = gate.workloads[after.form]
        if before.workloads[workload] != after.workloads[workload]:
            changes.append(Change(f"undecided  {gate.id}: the shape of {workload} changed", False))
            continue
        ruling = judge_regression(gate, before, after)
        value = "" if ruling.value is None else f" {ruling.value:.3f} [{ruling.low:.3f}, {ruling.high:.3f}]"
        changes.append(Change(f"{_word(ruling):10} {gate.id}{value}: {ruling.reason}", ruling.result is Result.FAIL))
    if not changes:
        raise ConfigError("the runs have no gated workload in common", got=[*before.rounds], expected=[*after.rounds])
    for outcome in after.outcomes:
        if outcome["result"] in (Result.FAIL, Result.IMPLAUSIBLE):
            changes.append(Change(f"{outcome['result']:10} {outcome['gate']}: {outcome['reason']}", True))
    return changes


def _common(before: Evidence, after: Evidence, gates: Sequence[Gate]) -> Iterator[Gate]:
    """The gates to compare, the first of each pair."""
    judged = {found["gate"] for found in before.outcomes} & {found["gate"] for found in after.outcomes}
    seen = set()
    for gate in sorted(gates, key=lambda gate: gate.kind is not Kind.REGRESSION):
        workload = gate.workloads.get(after.form)
        pair = (workload, gate.subject, gate.peer, gate.metric)
        is_chosen = gate.kind is Kind.REGRESSION or (gate.kind.is_paired and gate.id in judged)
        if is_chosen and workload in before.rounds and workload in after.rounds and pair not in seen:
            seen.add(pair)
            yield gate


def _word(ruling: Ruling) -> str:
    if ruling.result is Result.FAIL:
        return "slower"
    if ruling.result is not Result.PASS:
        return str(ruling.result.value)
    assert ruling.low is not None
    assert ruling.high is not None
    if ruling.low >= 1 + SAME_WITHIN:
        return "faster"
    return "same" if ruling.low > 1 / (1 + SAME_WITHIN) and ruling.high < 1 + SAME_WITHIN else "ok"


def judge_regression(gate: Gate, before: Evidence, after: Evidence, *, who: Control | None = None) -> Ruling:
    """The ratio to the peer now / the same ratio then. ``who`` takes the subject's place in the second run."""
    subject, peer = gate.subject, gate.peer
    assert peer is not None
    now = who or Control(subject, peer)
    assert now.peer is not None
    workload = gate.workloads[after.form]
    old_ratios = ratios(before.rounds[workload], peer, subject, key=gate.metric)
    new_ratios = ratios(after.rounds[workload], now.peer, now.subject, key=gate.metric)
    old, new = interval_of(old_ratios), interval_of(new_ratios)
    if before.machine != after.machine:
        return Ruling(Result.UNDECIDED, f"other machines: {before.machine} and {after.machine}")
    if old is None or new is None:
        return Ruling(Result.UNDECIDED, "too few pairs")
    if old_ratios == new_ratios:
        return Ruling(Result.PASS, "the same samples", 1.0, 1.0, 1.0)
    floor = gate.floor if gate.kind is Kind.REGRESSION else KEPT_MIN
    assert floor is not None
    change = Interval(
        new.median / old.median, new.low / old.high, new.high / old.low, min(old.pair_count, new.pair_count), new.method
    )
    return judge_ratio(change, evaluate_bound(floor, {}), None)
