"""The bench's output as text: every contender's time and ratio, then every gate."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from perf.harness.gates import Kind
from perf.harness.judge import Outcome, Result, Ruling
from perf.harness.paired import Round, ratios
from perf.harness.verdicts import compare, digits
from perf.harness.workloads import Workload

__all__ = ["gate_lines", "workload_lines"]

_SHOWN = ("written_bytes", "read_bytes", "write_calls", "rss_growth_bytes", "plan_bytes")
_WORDS = {Result.PASS: "pass", Result.FAIL: "FAIL", Result.IMPLAUSIBLE: "FAIL (implausible)"}


def workload_lines(workload: Workload, rounds: Sequence[Round]) -> list[str]:
    """Median seconds of each contender, how many times our time it takes, and what it counted."""
    lines = [f"{workload}  ({len(rounds)} rounds)"]
    for who in workload.contenders:
        samples = [found[who] for found in rounds if who in found]
        if not samples:
            lines.append(f"  {who:16} was not measured here; it may not be installed")
            continue
        if not all("seconds" in sample for sample in samples):
            # What counts events says nothing of time.
            counted = [f"{name} {max(s[name] for s in samples):.0f}" for name in samples[0]]
            lines.append(f"  {who:16} not timed  {', '.join(counted)}")
            continue
        seconds = statistics.median(sample["seconds"] for sample in samples)
        ours = _ours_for(who, workload)
        against = "" if ours is None or who == ours else _ratio(rounds, who, ours)
        counted = [_count(name, max(s[name] for s in samples)) for name in _SHOWN if all(name in s for s in samples)]
        lines.append(f"  {who:16} {digits(seconds, 4):>9} s  {against:44} {', '.join(counted)}")
    return lines


def _ours_for(who: str, workload: Workload) -> str | None:
    # A contender "torch@64" is compared with "ours@64", when that was measured.
    suffix = who[who.index("@") :] if "@" in who else ""
    return f"ours{suffix}" if f"ours{suffix}" in workload.contenders else None


def _ratio(rounds: Sequence[Round], who: str, ours: str) -> str:
    found = compare(ratios(rounds, who, ours))
    if found.interval is None:
        return f"{found.verdict.value}: {found.reason}"
    return f"ours {found.interval} times as fast: {found.verdict.value}"


def _count(name: str, value: float) -> str:
    label = name.removesuffix("_bytes").replace("_", " ")
    return f"{label} {value / 2**20:.2f} MiB" if name.endswith("_bytes") else f"{label} {value:.0f}"


def gate_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """One line per gate: value, bound, result, and what its control came to."""
    lines = ["gates"]
    for outcome in outcomes:
        at_least = Kind(outcome.kind).is_paired
        bound = f"{'>=' if at_least else '<='} {_number(outcome.bound)}"
        result = _WORDS.get(outcome.result, outcome.result.value)
        head = f"  {result:10} {outcome.gate:30} {outcome.workload:24} {_ruled(outcome.subject)} (must be {bound})"
        lines.append(f"{head}; control {_ruled(outcome.control)}: {_refused(outcome.control)}")
        if outcome.result is not Result.PASS:
            lines.append(f"             {outcome.sentence} Here: {outcome.reason}.")
    return lines


def _refused(control: Ruling) -> str:
    return "refused" if control.result is Result.FAIL else control.result.value


def _ruled(ruling: Ruling) -> str:
    if ruling.value is None:
        return "-"
    if ruling.low is None or ruling.high is None:
        return _number(ruling.value)
    return f"{_number(ruling.value)} [{_number(ruling.low)}, {_number(ruling.high)}]"


def _number(value: float) -> str:
    return f"{value / 2**20:.1f} Mi" if abs(value) >= 1 << 20 else f"{value:.4g}"
