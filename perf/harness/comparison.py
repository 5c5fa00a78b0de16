"""Two sides against each other, through what each measured beside it: seconds of different runs are never compared.

A machine that is slower today slows the peer as well; the ratio to the peer of the same rounds is what carries over
(duet benchmarking). Regression gates say how much loss is too much; every other pair that both sides judged may lose
as much as they allow. Counts and memory are compared as they are: their worst round before, and after.

A side is one run or several. Several are paired in the order in which they were made, and each pair is one sample: a
machine that drifts changes both runs of a pair alike, and what differs from run to run widens the interval.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from perf.harness.formulas import evaluate_bound
from perf.harness.gates import Control, Gate, Kind
from perf.harness.judge import Result, Ruling, count_of, judge_ratio
from perf.harness.paired import ratios
from perf.harness.results import Evidence, differences, hardware_of, title_of
from perf.harness.verdicts import PAIRS_MIN, SAME_WITHIN, Interval, interval_of
from twinproof.errors import ConfigError

__all__ = [
    "KEPT_MIN",
    "Change",
    "compare_evidence",
    "compare_sides",
    "judge_regression",
    "notes",
    "summary",
    "unmatched",
]

# The share of its ratio to the peer that a gate without a bound of its own keeps from one run to the next. A count may
# grow by the rest of it: a tenth of what its gate allows.
KEPT_MIN = 0.9
# What a workload is; how many rounds and contenders it has is how it was measured.
_SHAPE = ("job", "shape", "tensor_count", "file_count", "rank_count", "shard_dim")
_FAILED = (Result.FAIL, Result.IMPLAUSIBLE)
Side = Sequence[Evidence]


@dataclass(frozen=True)
class Change:
    """One gate on both sides. ``text`` is the line to print and begins with ``word``.

    Attributes:
        word: ``same``, ``faster``, ``slower`` or ``ok`` (less than ``same``, and within what may be lost) of a ratio;
            ``same``, ``less``, ``more`` or ``ok`` of a count; ``undecided``; ``fails`` or ``mended`` of a verdict.
        text: the line to print.
        failed: whether something got worse.
    """

    word: str
    text: str
    failed: bool


def compare_evidence(before: Evidence, after: Evidence, gates: Sequence[Gate]) -> list[Change]:
    """:func:`compare_sides` of one run each."""
    return compare_sides([before], [after], gates)


def compare_sides(before: Side, after: Side, gates: Sequence[Gate]) -> list[Change]:
    """Every gate that both sides measured, then those whose verdict became or stopped being a failure.

    Regression gates come first. A claim or a limit is compared where both sides judged it and no earlier gate has
    compared the same pair.

    Raises:
        ConfigError: the sides have no gate in common, other forms, or not as many runs each; or a side's runs differ in
            machine, form or shapes.
    """
    before, after = _ordered(before, "before"), _ordered(after, "after")
    if before[0].form != after[0].form:
        raise ConfigError(
            "runs of other forms share no shape", got=after[0].form, expected=before[0].form, where="after"
        )
    if len(before) != len(after):
        raise ConfigError("not as many runs on both sides", got=len(after), expected=len(before), where="after")
    changes = [_changed(gate, before, after) for gate in _common(before, after, gates)]
    if not changes:
        message = "the runs have no gated workload in common"
        raise ConfigError(message, got=_measured(after[-1]), expected=_measured(before[-1]), where="after")
    return changes + list(_verdicts(before, after))


def _ordered(side: Side, where: str) -> Side:
    if not side:
        raise ConfigError("no evidence", got=0, expected="one run or more", where=where)
    first = side[0]
    for other in side[1:]:
        elsewhere = _other_machines(first, other)
        if elsewhere or other.form != first.form:
            got = elsewhere or f"{hardware_of(other)}, {other.form}"
            raise ConfigError("runs that do not belong together", got=got, expected=hardware_of(first), where=where)
        changed = [name for name in other.workloads if not _is_same_shape(first, other, name)]
        if other.workloads.keys() != first.workloads.keys() or changed:
            odd = sorted(other.workloads.keys() ^ first.workloads.keys()) or changed
            raise ConfigError("runs of one side with other workloads", got=odd, expected="the same in all", where=where)
    moments = Counter(run.created for run in side if run.created)
    twice = [moment for moment, count in moments.items() if count > 1]
    if twice:
        raise ConfigError("one run stands twice in a side", got=twice, expected="runs of their own", where=where)
    return sorted(side, key=lambda run: run.created)


def _other_machines(before: Evidence, after: Evidence) -> str:
    """What makes times of two runs incomparable, in a few words; nothing where nothing does."""
    found = differences(before, after)
    if "machine" in found:
        return f"other machines: {' and '.join(found['machine'])}"
    return f"other machines of one name, by {', '.join(found)}" if found else ""


def _is_same_shape(before: Evidence, after: Evidence, name: str) -> bool:
    old, new = ({key: run.workloads.get(name, {}).get(key) for key in _SHAPE} for run in (before, after))
    # Read from a file, a shape is a list.
    return {**old, "shape": [*(old["shape"] or ())]} == {**new, "shape": [*(new["shape"] or ())]}


def _judged(side: Side) -> set[str]:
    return {found["gate"] for run in side for found in run.outcomes}


def _measured(run: Evidence) -> list[str]:
    """The workloads of which the run has samples; one that could not be measured has none."""
    return [name for name, rounds in run.rounds.items() if rounds]


def _is_measured(gate: Gate, run: Evidence) -> bool:
    """Whether the run has a sample of the gate's own pair, or of its subject."""
    rounds = run.rounds.get(gate.workloads.get(run.form, ""), [])
    who = [gate.subject, *([] if gate.peer is None else [gate.peer])]
    return any(all(gate.metric in found.get(name, {}) for name in who) for found in rounds)


def _common(before: Side, after: Side, gates: Sequence[Gate]) -> Iterator[Gate]:
    """The gates to compare: of regression gates and of pairs, the first of each pair; every count."""
    judged = _judged(before) & _judged(after)
    seen = set()
    for gate in sorted(gates, key=lambda gate: gate.kind is not Kind.REGRESSION):
        if gate.kind is not Kind.REGRESSION and gate.id not in judged:
            continue
        if not all(_is_measured(gate, run) for run in (*before, *after)):
            continue
        pair = (gate.workloads.get(after[0].form), gate.subject, gate.peer, gate.metric)
        if not gate.kind.is_paired or pair not in seen:
            seen.add(pair)
            yield gate


def _changed(gate: Gate, before: Side, after: Side) -> Change:
    workload = gate.workloads[after[0].form]
    if not _is_same_shape(before[0], after[0], workload):
        return Change("undecided", f"undecided  {gate.id}: the shape of {workload} changed", False)
    if not gate.kind.is_paired:
        return _changed_count(gate, before, after)
    ruling = _judge_change(gate, before, after)
    value = "" if ruling.value is None else f" {ruling.value:.3f} [{ruling.low:.3f}, {ruling.high:.3f}]"
    word = _word(ruling)
    return Change(word, f"{word:10} {gate.id}{value}: {ruling.reason}", ruling.result is Result.FAIL)


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
    return _judge_change(gate, [before], [after], who=who)


def _judge_change(gate: Gate, before: Side, after: Side, *, who: Control | None = None) -> Ruling:
    assert gate.peer is not None
    then, now = Control(gate.subject, gate.peer), who or Control(gate.subject, gate.peer)
    elsewhere = _other_machines(before[0], after[0])
    if elsewhere:
        return Ruling(Result.UNDECIDED, elsewhere)
    old = [_ratios(gate, run, then) for run in before]
    new = [_ratios(gate, run, now) for run in after]
    if any(interval_of(found) is None for found in (*old, *new)):
        return Ruling(Result.UNDECIDED, "too few pairs")
    if old == new:
        return Ruling(Result.PASS, "the same samples", 1.0, 1.0, 1.0)
    change = _between(old[0], new[0]) if len(old) == 1 else _over_runs(old, new)
    if change is None:
        return Ruling(Result.UNDECIDED, f"{len(old)} pairs of runs are too few; one, or at least {PAIRS_MIN}")
    floor = gate.floor if gate.kind is Kind.REGRESSION else KEPT_MIN
    assert floor is not None
    return judge_ratio(change, evaluate_bound(floor, {}), None)


def _ratios(gate: Gate, run: Evidence, who: Control) -> list[float]:
    assert who.peer is not None
    return ratios(run.rounds[gate.workloads[run.form]], who.peer, who.subject, key=gate.metric)


def _between(old: Sequence[float], new: Sequence[float]) -> Interval:
    """Of one run each: the widest that both intervals allow."""
    then, now = interval_of(old), interval_of(new)
    assert then is not None
    assert now is not None
    count = min(then.pair_count, now.pair_count)
    return Interval(now.median / then.median, now.low / then.high, now.high / then.low, count, now.method)


def _over_runs(old: Sequence[Sequence[float]], new: Sequence[Sequence[float]]) -> Interval | None:
    """Of pairs of runs: each gives one ratio of medians."""
    return interval_of([statistics.median(now) / statistics.median(then) for then, now in zip(old, new, strict=True)])


def _changed_count(gate: Gate, before: Side, after: Side) -> Change:
    """Counts do not depend on the machine's speed, and are compared across machines; memory is not."""

    def line(word: str, reason: str, *, failed: bool = False) -> Change:
        return Change(word, f"{word:10} {gate.id} {then:.6g} -> {now:.6g} {gate.metric}: {reason}", failed)

    counts = [max(_counts(gate, side), default=None) for side in (before, after)]
    if None in counts:
        return Change("undecided", f"undecided  {gate.id}: the workload that is subtracted was not measured", False)
    then, now = (float(count) for count in counts if count is not None)
    elsewhere = _other_machines(before[0], after[0])
    if gate.kind is Kind.MEMORY and elsewhere:
        return line("undecided", elsewhere)
    bound = next(found["bound"] for run in after for found in run.outcomes if found["gate"] == gate.id)
    allowed = (1 - KEPT_MIN) * bound
    if now - then > allowed:
        return line("more", f"more than {allowed:.4g} more, a tenth of what its gate allows", failed=True)
    if abs(now - then) <= SAME_WITHIN * max(abs(then), abs(now)):
        return line("same", "the worst round")
    if now < then:
        return line("less", "the worst round")
    return line("ok", f"at most {allowed:.4g} more, a tenth of what its gate allows")


def _counts(gate: Gate, side: Side) -> Iterator[float]:
    for run in side:
        base = None if gate.against is None else run.rounds.get(gate.against[run.form], [])
        value = count_of(gate, Control(gate.subject, gate.peer), run.rounds[gate.workloads[run.form]], base)
        if value is not None:
            yield value


def _results(side: Side) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for run in side:
        for outcome in run.outcomes:
            found.setdefault(outcome["gate"], []).append(Result(outcome["result"]))
    return found


def _verdicts(before: Side, after: Side) -> Iterator[Change]:
    """Gates that fail in a run after and in none before, and the reverse."""
    then, now = _results(before), _results(after)
    reasons = {found["gate"]: found["reason"] for run in after for found in run.outcomes}
    kinds = {found["gate"]: found.get("kind") for run in after for found in run.outcomes}
    is_elsewhere = bool(_other_machines(before[0], after[0]))
    for gate, results in now.items():
        failed = any(result in _FAILED for result in results)
        had_failed = any(result in _FAILED for result in then.get(gate, ()))
        if failed and not had_failed:
            past = ", ".join(dict.fromkeys(result.value for result in then.get(gate, ()))) or "was not judged"
            # What a time is worth on another machine says nothing of the code.
            is_open = is_elsewhere and kinds[gate] != Kind.COUNTER.value
            word = "undecided" if is_open else "fails"
            where = " fails on another machine" if is_open else ""
            yield Change(word, f"{word:10} {gate}{where}: {reasons[gate]} (before: {past})", not is_open)
        elif had_failed and all(result is Result.PASS for result in results):
            yield Change("mended", f"{'mended':10} {gate}: {reasons[gate]} (before: fail)", False)


def unmatched(before: Side, after: Side, gates: Sequence[Gate]) -> list[str]:
    """Lines that name what was not compared, and why; and gates that fail on both sides, which is no change."""
    sides = {"before": before, "after": after}
    lines = []
    for (here, runs), (there, others) in zip(sides.items(), reversed(sides.items()), strict=True):
        only = _named(runs, lambda run: run.workloads) - _named(others, lambda run: run.workloads)
        if only:
            lines.append(f"only {here}: {', '.join(sorted(only))} (workloads)")
        shared = [gate for gate in gates if gate.workloads.get(runs[0].form) not in {None, *only}]
        half = [gate for gate in shared if _is_half(gate, runs) and not _is_half(gate, others)]
        ids = sorted({gate.id for gate in half if gate.id in _judged(runs) | _judged(others)})
        if ids:
            lines.append(f"measured {here} and not {there}: {', '.join(ids)}")
    neither = sorted(
        gate.id
        for gate in gates
        if gate.id in _judged(before) & _judged(after) and not _is_half(gate, before) and not _is_half(gate, after)
    )
    if neither:
        lines.append(f"measured on neither side: {', '.join(neither)}")
    then, now = _results(before), _results(after)
    still = [gate for gate in now if all(any(r in _FAILED for r in found.get(gate, ())) for found in (then, now))]
    if still:
        lines.append(f"fail on both sides, which is no change: {', '.join(still)}")
    return lines


def _is_half(gate: Gate, side: Side) -> bool:
    return all(_is_measured(gate, run) for run in side)


def _named(side: Side, names: Callable[[Evidence], Mapping[str, object]]) -> set[str]:
    return {name for run in side for name in names(run)}


def notes(before: Side, after: Side) -> list[str]:
    """What the two sides are, and what differs besides the code."""
    lines = [
        f"{name:7} {title_of(side[-1])}{_run_count(side)}" for name, side in (("before", before), ("after", after))
    ]
    elsewhere = _other_machines(before[0], after[0])
    if elsewhere:
        lines.append("other machines: a ratio of two programs differs between them, so times and memory are undecided")
        found = differences(before[0], after[0]).items()
        lines += [f"  {name}: {old} and {new}" for name, (old, new) in found if name != "machine"]
    if before[0].implementation != after[0].implementation:
        who = f"{before[0].implementation} and {after[0].implementation}"
        lines.append(f"other implementations, whose ratios are not changes of one: {who}")
    old, new = (side[0].environment.get("versions", {}) for side in (before, after))
    differ = [
        f"{name} {old.get(name)} and {new.get(name)}" for name in {**old, **new} if old.get(name) != new.get(name)
    ]
    if differ:
        lines.append(f"other versions, which change ratios as well: {', '.join(differ)}")
    return lines


def _run_count(side: Side) -> str:
    return "" if len(side) == 1 else f", the last of {len(side)} runs"


def summary(changes: Sequence[Change]) -> str:
    """How many lines have which word, in one line."""
    counts = Counter(change.word for change in changes)
    return f"{len(changes)} compared: {', '.join(f'{count} {word}' for word, count in counts.most_common())}"
