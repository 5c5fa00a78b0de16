"""Two runs against each other, through what both measured beside it: seconds of different runs are never compared.

A machine that is slower today slows the peer as well; the ratio to the peer of the same rounds is what carries over
(duet benchmarking). Regression gates say which ratios matter and how much loss is too much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perf.harness.formulas import evaluate_bound
from perf.harness.gates import Control, Gate, Kind
from perf.harness.judge import Result, Ruling, judge_ratio
from perf.harness.paired import ratios
from perf.harness.results import Evidence
from perf.harness.verdicts import Interval, interval_of
from twinproof.errors import ConfigError

__all__ = ["Change", "compare_evidence", "judge_regression"]


@dataclass(frozen=True)
class Change:
    """One ratio in both runs. ``text`` is the line to print."""

    text: str
    failed: bool


def compare_evidence(before: Evidence, after: Evidence, gates: Sequence[Gate]) -> list[Change]:
    """Regression gates on both runs, then gates that the second run failed.

    Raises:
        ConfigError: when the runs have no regression gate's workload in common: nothing was compared.
    """
    changes = []
    for gate in gates:
        workload = gate.workloads.get(after.form)
        if gate.kind is not Kind.REGRESSION or workload not in before.rounds or workload not in after.rounds:
            continue
        if before.workloads[workload] != after.workloads[workload]:
            changes.append(Change(f"undecided  {gate.id}: the shape of {workload} changed", False))
            continue
        ruling = judge_regression(gate, before, after)
        value = "" if ruling.value is None else f" {ruling.value:.3f} [{ruling.low:.3f}, {ruling.high:.3f}]"
        word = {Result.PASS: "ok", Result.FAIL: "slower"}.get(ruling.result, ruling.result.value)
        changes.append(Change(f"{word:10} {gate.id}{value}: {ruling.reason}", ruling.result is Result.FAIL))
    if not changes:
        raise ConfigError("the runs have no gated workload in common", got=[*before.rounds], expected=[*after.rounds])
    for outcome in after.outcomes:
        if outcome["result"] in (Result.FAIL, Result.IMPLAUSIBLE):
            changes.append(Change(f"{outcome['result']:10} {outcome['gate']}: {outcome['reason']}", True))
    return changes


def judge_regression(gate: Gate, before: Evidence, after: Evidence, *, who: Control | None = None) -> Ruling:
    """The ratio to the peer now / the same ratio then. ``who`` takes the subject's place in the second run."""
    subject, peer = gate.subject, gate.peer
    assert peer is not None
    assert gate.floor is not None
    now = who or Control(subject, peer)
    assert now.peer is not None
    workload = gate.workloads[after.form]
    old = interval_of(ratios(before.rounds[workload], peer, subject, key=gate.metric))
    new = interval_of(ratios(after.rounds[workload], now.peer, now.subject, key=gate.metric))
    if before.machine != after.machine:
        return Ruling(Result.UNDECIDED, f"other machines: {before.machine} and {after.machine}")
    if old is None or new is None:
        return Ruling(Result.UNDECIDED, "too few pairs")
    change = Interval(
        new.median / old.median, new.low / old.high, new.high / old.low, min(old.pair_count, new.pair_count), new.method
    )
    return judge_ratio(change, evaluate_bound(gate.floor, {}), None)
