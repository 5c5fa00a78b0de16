"""Each gate's ratio over many runs, and where it stepped: a test whose rate of false alarms is derived, not chosen.

When nothing changed, the runs of a series could have come in any order. So the largest difference of means over all
places is compared with that of random orders of the same values: the share of orders that reach it is the chance of a
false alarm, whatever the noise looks like. With several series the chance is divided among them (Bonferroni), so that
a whole table cries wolf in at most ``FALSE_ALARMS`` of the cases.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from perf.harness.gates import Kind
from perf.harness.results import Evidence, differences, hardware_of
from perf.harness.svg import LogAxis, disc, drawing, line, text

__all__ = [
    "FALSE_ALARMS",
    "Point",
    "Series",
    "Step",
    "find_step",
    "history_lines",
    "history_plot",
    "runs_min",
    "series",
    "without_ratio",
]

FALSE_ALARMS = 0.05
_ORDERS_MIN = 9999
_SHOWN_MAX = 8


@dataclass(frozen=True)
class Point:
    """A gate in one run: its ratio with its interval, when it was measured, and at which commit."""

    created: str
    commit: str
    value: float
    low: float
    high: float

    @property
    def label(self) -> str:
        """Time and commit, as a column is called."""
        return f"{self.created[:16]} {self.commit}".strip()


@dataclass(frozen=True)
class Series:
    """One gate on one machine, in one form and shape, in order of time."""

    machine: str
    implementation: str
    component: str
    form: str
    gate: str
    workload: str
    bound: float
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Step:
    """Where a series stepped: the first point after it, how many times as large the median is, and the chance."""

    index: int
    factor: float
    chance: float


def series(runs: Iterable[Evidence]) -> list[Series]:
    """Every ratio that any run has judged, by machine, form, gate and shape; runs in order of time."""
    found: dict[tuple[str, ...], Series] = {}
    machines: dict[str, Evidence] = {}
    for run in sorted(runs, key=lambda run: run.created):
        machine = _machine(run, machines)
        for outcome in run.outcomes:
            subject = outcome["subject"]
            if not Kind(outcome["kind"]).is_paired or subject["value"] is None:
                continue
            gate, workload = outcome["gate"], outcome["workload"]
            shape = run.workloads.get(workload, {})
            size = "x".join(str(size) for size in (shape.get("tensor_count"), *shape.get("shape", ())))
            key = (machine, run.implementation, run.form, gate, workload, size)
            commit = run.environment.get("commit") or ""
            point = Point(run.created, commit, subject["value"], subject["low"], subject["high"])
            past = found[key].points if key in found else ()
            component = shape.get("component", "")
            found[key] = Series(key[0], key[1], component, run.form, gate, workload, outcome["bound"], (*past, point))
    return list(found.values())


def without_ratio(runs: Iterable[Evidence]) -> Iterator[str]:
    """A line for each run that no series has a point of."""
    for run in runs:
        if not series([run]):
            yield f"no ratio in the run of {run.implementation}, {run.form} form, {run.created[:16]}: it is not shown"


def _machine(run: Evidence, known: dict[str, Evidence]) -> str:
    """The name of the run's machine; of another one of the same name also what differs. Adds a new one to ``known``."""
    for name, first in known.items():
        if not differences(first, run):
            return name
    name = hardware_of(run)
    if name in known:
        name += "".join(f", {what} {said}" for what, (_, said) in differences(known[name], run).items())
    known.setdefault(name, run)
    return name


def runs_min(false_alarms: float = FALSE_ALARMS) -> int:
    """The fewest runs among which even the clearest step can be told from chance."""
    count = 2
    # A step in the middle: of all ways to choose the half before it, this one and its mirror image look alike.
    while 2 / math.comb(count, count // 2) > false_alarms:
        count += 1
    return count


def find_step(values: Sequence[float], *, false_alarms: float = FALSE_ALARMS, seed: int = 0) -> Step | None:
    """The place where positive ``values`` stepped, or None where chance explains it with more than ``false_alarms``.

    Args:
        values: ratios in order of time.
        false_alarms: in this share of series without a step, at most, one is reported.
        seed: of the random orders.
    """
    count = len(values)
    if count < runs_min(false_alarms):
        return None
    logs = torch.tensor([math.log(value) for value in values], dtype=torch.float64)
    order_count = max(_ORDERS_MIN, math.ceil(50 / false_alarms))
    keys = torch.rand(order_count, count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    largest = _differences(logs[keys.argsort(dim=1)]).amax(dim=1)
    seen = _differences(logs[None])[0]
    reached = int((largest >= float(seen.max()) - 1e-12).sum())
    # The order that was seen is one of those that are possible: never a chance of 0.
    chance = (1 + reached) / (1 + order_count)
    if chance > false_alarms:
        return None
    index = int(seen.argmax()) + 1
    return Step(index, statistics.median(values[index:]) / statistics.median(values[:index]), chance)


def _differences(logs: torch.Tensor) -> torch.Tensor:
    """|mean before - mean after| for every place between two runs, scaled to one variance: [n, k] to [n, k - 1]."""
    count = logs.shape[1]
    before = torch.arange(1, count, dtype=logs.dtype)
    sums = (logs - logs.mean(dim=1, keepdim=True)).cumsum(dim=1)[:, :-1]
    return sums.abs() * (count / (before * (count - before))).sqrt()


def _steps(found: Sequence[Series]) -> dict[int, tuple[Step | None, int]]:
    """By number of the series: its step, and how many runs it would take to see one."""
    tested = sum(len(each.points) >= runs_min() for each in found)
    share = FALSE_ALARMS / max(tested, 1)
    values = ([point.value for point in each.points] for each in found)
    return {number: (find_step(each, false_alarms=share), runs_min(share)) for number, each in enumerate(values)}


def _runs(count: int) -> str:
    return f"{count} run{'' if count == 1 else 's'}"


def _verdict(each: Series, step: Step | None, needed: int) -> str:
    if step is None:
        return "no step" if len(each.points) >= needed else f"{_runs(len(each.points))}; a step shows in {needed}"
    at = each.points[step.index].label
    return f"STEP to {step.factor:.3f} times at {at} (chance {step.chance:.1g})"


def history_lines(found: Sequence[Series]) -> Iterator[str]:
    """A table for each implementation, machine and form: a row for a gate, its last runs, its bound, and its step."""
    steps = _steps(found)
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for number, each in enumerate(found):
        groups.setdefault((each.component, each.implementation, each.machine, each.form), []).append(number)
    for (component, implementation, machine, form), numbers in groups.items():
        runs = sorted({(point.created, point.commit) for number in numbers for point in found[number].points})
        shown = runs[-_SHOWN_MAX:]
        last = f", the last {len(shown)}" if shown != runs else ""
        yield f"{component} of {implementation} on {machine}, {form} form: {_runs(len(runs))}{last}"
        first = len(runs) - len(shown) + 1
        yield from (
            f"  run {number}: {when[:16]} {commit}".rstrip() for number, (when, commit) in enumerate(shown, first)
        )
        yield (
            f"  {'gate':32}"
            + "".join(f"{'run ' + str(first + n):>9}" for n in range(len(shown)))
            + f"{'floor':>9}  step"
        )
        for number in numbers:
            each = found[number]
            by_run = {(point.created, point.commit): point.value for point in each.points}
            cells = "".join(f"{by_run[run]:9.3g}" if run in by_run else f"{'-':>9}" for run in shown)
            yield f"  {each.gate:32}{cells}{each.bound:9.3g}  {_verdict(each, *steps[number])}"
        yield ""


_WIDTH, _LEFT, _RIGHT, _PANEL = 900, 70, 30, 130


def history_plot(found: Sequence[Series]) -> str:
    """A self-contained SVG: a panel for each series, points with intervals, the floor, the step."""
    steps = _steps(found)
    parts = [text(12, 20, "Ratios over runs: circle and whisker measured, dashed line the floor", is_bold=True)]
    top = 34.0
    for number, each in enumerate(found):
        parts += _panel(each, steps[number], top)
        top += _PANEL
    return drawing(_WIDTH, top + 8, f"Ratios of {len(found)} gates over their runs", parts)


def _panel(each: Series, step: tuple[Step | None, int], top: float) -> Iterator[str]:
    values = [value for point in each.points for value in (point.low, point.high, point.value)]
    # Upside down: what is larger lies higher.
    axis = LogAxis.around([*values, each.bound], 0, 64)
    base = top + 92

    def height(value: float) -> float:
        return base - axis.at(value)

    width = _WIDTH - _LEFT - _RIGHT
    places = [_LEFT + (number + 0.5) * width / len(each.points) for number in range(len(each.points))]
    yield text(12, top + 14, f"{each.gate}: {_verdict(each, *step)}", is_bold=step[0] is not None)
    yield text(_WIDTH - 12, top + 14, f"{each.implementation}, {each.machine}, {each.form}", anchor="end", size=10)
    yield line(_LEFT, base, _WIDTH - _RIGHT, base, width=0.5)
    for tick in axis.ticks(3):
        yield text(_LEFT - 8, height(tick) + 4, f"{tick:g}", anchor="end", size=10)
        yield line(_LEFT, height(tick), _WIDTH - _RIGHT, height(tick), width=0.2)
    yield line(_LEFT, height(each.bound), _WIDTH - _RIGHT, height(each.bound), dash="6 4")
    for x, point in zip(places, each.points, strict=True):
        yield line(x, height(point.low), x, height(point.high), width=1.5)
        yield disc(x, height(point.value))
    if step[0] is not None:
        x = (places[step[0].index - 1] + places[step[0].index]) / 2
        yield line(x, top + 22, x, base + 6, width=2, dash="1 3")
    yield text(_LEFT, base + 16, each.points[0].label, size=10)
    if len(each.points) > 1:
        yield text(_WIDTH - _RIGHT, base + 16, each.points[-1].label, anchor="end", size=10)
