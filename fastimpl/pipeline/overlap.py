"""What a pipeline hides: the program of a few steps, replayed with and without a stage, and the figures that follow.

A program is what a ``Recorder`` saw: work on streams, with its stage and duration, and the events that order it. A
replay carries it out on a clock: a stream does its work in order, an event holds up whoever waits for it, the host goes
on. That answers what a profile of one run cannot: how long a step were if a stage took no time. Work that contends for
memory or for multiprocessors keeps the duration that it was measured at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from twinproof.errors import ConfigError

__all__ = [
    "HostWait",
    "Instruction",
    "OverlapReport",
    "Record",
    "Span",
    "StageOverlap",
    "StepEnd",
    "Timeline",
    "Wait",
    "Work",
    "overlap_report",
    "replay",
]


@dataclass(frozen=True)
class Work:
    """Something that a stream does for ``duration_s``; the host had it ready ``issued_s`` after the beginning."""

    stage: str
    step: int
    stream: str
    duration_s: float
    issued_s: float = 0.0


@dataclass(frozen=True)
class Record:
    """Event number ``event`` is what the stream has been given so far."""

    event: int
    stream: str


@dataclass(frozen=True)
class Wait:
    """What the stream is given from here on follows the event."""

    event: int
    stream: str


@dataclass(frozen=True)
class HostWait:
    """The host waits for the event."""

    event: int
    step: int
    issued_s: float = 0.0


@dataclass(frozen=True)
class StepEnd:
    """``progress`` returned."""

    step: int
    issued_s: float = 0.0


Instruction = Work | Record | Wait | HostWait | StepEnd


@dataclass(frozen=True)
class Span:
    """Work with its place in time; seconds since the program began."""

    stage: str
    step: int
    stream: str
    begin_s: float
    end_s: float


@dataclass
class Timeline:
    """One replay.

    Attributes:
        spans: all work that takes time, as issued.
        edges: pairs of positions in ``spans``, on two streams, that an event orders.
        host_waits: when the host was held up, as spans of the stream "host".
        ends_s: for each step, when all that was issued by its end is over.
    """

    spans: list[Span] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    host_waits: list[Span] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)


class _Replay:
    """Clocks of the streams and the host; ``before``: the spans that the next work of a stream follows."""

    def __init__(self) -> None:
        self.made = Timeline()
        self.time_s: dict[str, float] = {}
        self.before: dict[str, tuple[int, ...]] = {}
        self.events: dict[int, tuple[float, tuple[int, ...]]] = {}
        self.host_s = self.blocked_s = 0.0

    def now(self, stream: str) -> float:
        return max(self.time_s.get(stream, 0.0), self.host_s)

    def carry_out(self, one: Instruction, without: str | None) -> None:
        if isinstance(one, (Work, HostWait, StepEnd)):
            self.host_s = max(self.host_s, one.issued_s + self.blocked_s)
        if isinstance(one, Work):
            self._work(one, 0.0 if one.stage == without else one.duration_s)
        elif isinstance(one, Record):
            self.events[one.event] = (self.now(one.stream), self.before.get(one.stream, ()))
        elif isinstance(one, Wait):
            time_s, spans = self.events[one.event]
            self.time_s[one.stream] = max(self.time_s.get(one.stream, 0.0), time_s)
            self.before[one.stream] = tuple(dict.fromkeys((*self.before.get(one.stream, ()), *spans)))
        elif isinstance(one, HostWait):
            begun, until = self.host_s, self.events[one.event][0]
            if until > begun:
                self.made.host_waits.append(Span("wait", one.step, "host", begun, until))
                self.host_s, self.blocked_s = until, self.blocked_s + until - begun
        else:
            self.made.ends_s.append(max(self.time_s.values(), default=self.host_s))

    def _work(self, one: Work, duration_s: float) -> None:
        if not duration_s:
            return
        begun, spans = self.now(one.stream), self.made.spans
        spans.append(Span(one.stage, one.step, one.stream, begun, begun + duration_s))
        number = len(spans) - 1
        for other in self.before.get(one.stream, ()):
            if spans[other].stream != one.stream:
                self.made.edges.append((other, number))
        self.before[one.stream], self.time_s[one.stream] = (number,), begun + duration_s


def replay(program: Iterable[Instruction], *, without: str | None = None) -> Timeline:
    """Carry a program out; ``without``: a stage whose work takes no time."""
    machine = _Replay()
    for one in program:
        machine.carry_out(one, without)
    return machine.made


@dataclass(frozen=True)
class StageOverlap:
    """One stage, per step of the steady state.

    Attributes:
        stage: its name.
        duration_s: seconds of work.
        hidden_fraction: the share of it during which another stream works too.
        exposed_s: what a step would be shorter if the stage took no time.
    """

    stage: str
    duration_s: float
    hidden_fraction: float
    exposed_s: float


@dataclass(frozen=True)
class OverlapReport:
    """A schedule in its steady state.

    Attributes:
        schedule: what was run.
        device: what it was run on, and what the durations are.
        step_count: steps that the figures are means of.
        step_s: from step to step.
        serial_s: the same work, one after the other.
        host_blocked_s: what the host waits in a step.
        stages: in order of first appearance.
    """

    schedule: str
    device: str
    step_count: int
    step_s: float
    serial_s: float
    host_blocked_s: float
    stages: tuple[StageOverlap, ...]


def overlap_report(
    program: Sequence[Instruction], *, schedule: str, device: str, margin_count: int = 2
) -> OverlapReport:
    """The figures of a program; ``margin_count`` steps at each end, whose neighbours were not recorded, do not count.

    Raises:
        ConfigError: fewer than two steps are left; a margin below 0.
    """
    if margin_count < 0:
        raise ConfigError("not a margin", got=margin_count, expected=">= 0", where="margin_count")
    whole = replay(program)
    count = len(whole.ends_s) - 2 * margin_count
    if count < 2:
        raise ConfigError("too few steps", got=len(whole.ends_s), expected=f">= {2 + 2 * margin_count}", where=schedule)
    steady = range(margin_count, margin_count + count)
    counted = [span for span in whole.spans if span.step in steady]
    stages = []
    for stage in dict.fromkeys(span.stage for span in counted):
        mine = [span for span in counted if span.stage == stage]
        duration_s, hidden_s = sum(span.end_s - span.begin_s for span in mine), _hidden_s(mine, whole.spans)
        exposed_s = _step_s(whole, steady) - _step_s(replay(program, without=stage), steady)
        stages.append(StageOverlap(stage, duration_s / count, hidden_s / duration_s, exposed_s))
    waits = [span.end_s - span.begin_s for span in whole.host_waits if span.step in steady]
    return OverlapReport(
        schedule=schedule,
        device=device,
        step_count=count,
        step_s=_step_s(whole, steady),
        serial_s=sum(stage.duration_s for stage in stages),
        host_blocked_s=sum(waits) / count,
        stages=tuple(stages),
    )


def _step_s(timeline: Timeline, steps: range) -> float:
    # The first step of all begins with the program.
    begun_s = timeline.ends_s[steps[0] - 1] if steps[0] else 0.0
    return (timeline.ends_s[steps[-1]] - begun_s) / len(steps)


def _hidden_s(mine: Sequence[Span], everything: Sequence[Span]) -> float:
    """How long, in all, another stream works while these do."""
    total, ordered = 0.0, sorted(everything, key=lambda found: found.begin_s)
    for span in mine:
        reached = span.begin_s
        for other in ordered:
            if other.stream != span.stream:
                begin, end = max(other.begin_s, reached), min(other.end_s, span.end_s)
                total, reached = total + max(0.0, end - begin), max(reached, end)
    return total
