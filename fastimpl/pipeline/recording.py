"""An engine that notes what a pipeline asks of another one: the program behind an overlap report.

Nothing is asked of the model: stages are named where the pipeline enqueues them, through ``Engine.stage``. What no
engine is asked for is not seen: edges that autograd and NCCL make by themselves. Autograd's begin and end on the
stream of the backward, which is why the tables' update is part of the stage "backward".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from fastimpl.pipeline.overlap import HostWait, Instruction, Record, StepEnd, Wait, Work
from twinproof.engine import check_engine
from twinproof.errors import ConfigError, check_flags

__all__ = ["CudaClock", "HostClock", "Recorder", "StreamClock"]

_OTHER = "other"
# What takes a tensor's values, or a copy of it, to the host, which waits for them.
_READS = {"item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__float__", "__int__", "__index__"}


class StreamClock(Protocol):
    """How long streams work, and the host."""

    def lane(self, name: str) -> str:
        """What does the work of the stream of this name."""

    def mark(self, stream: Any) -> Any:
        """The moment at which the stream is done with what it has been given."""

    def seconds(self, begin: Any, end: Any) -> float:
        """From one mark to another of the same stream."""

    def host_s(self) -> float:
        """Seconds, from any zero; constant where the host's own time does not count."""


def _check_clock(clock: Any) -> StreamClock:
    """Demand all that a clock has: most of it is asked for in the middle of a step. Raises ConfigError."""
    missing = [name for name in vars(StreamClock) if not name.startswith("_") and not hasattr(clock, name)]
    if missing or isinstance(clock, type):
        got = f"{type(clock).__name__} without {', '.join(missing)}" if missing else f"the class {clock.__name__}"
        raise ConfigError("not a clock", got=got, expected="fastimpl.pipeline.recording.StreamClock", where="clock")
    return clock  # type: ignore[no-any-return]


class HostClock:
    """Streams that are none: the host does everything at once, and works where it would wait."""

    def lane(self, name: str) -> str:
        """The host."""
        return "host"

    def mark(self, stream: Any) -> float:
        """Now."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """The difference."""
        return end - begin

    def host_s(self) -> float:
        """It is the stream's already."""
        return 0.0


class CudaClock:
    """Timing events on the streams themselves."""

    def lane(self, name: str) -> str:
        """The stream."""
        return name

    def mark(self, stream: Any) -> Any:
        """A timing event."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Waits for the second."""
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1000

    def host_s(self) -> float:
        """The host takes its time to enqueue."""
        return time.perf_counter()


@dataclass(frozen=True)
class _Segment:
    """Work of a stream that goes on."""

    stream: Any
    begun: Any
    issued_s: float


class _Reads(TorchFunctionMode):
    """Where the host reads values of the device, it waits for the current stream: said through the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS and args and self.recorder.holds(args[0]):
            self.recorder.synchronize_stream(self.recorder.current())
        return func(*args, **(kwargs or {}))


class Recorder:
    """An ``Engine`` in front of another; hand it to a pipeline, and run each ``progress`` inside ``step()``.

    Args:
        engine: does the work.
        clock: tells how long it takes.
        sees_reads: waits of the host for values of the device are seen where Python asks for them (``tolist`` and its
            like), at a microsecond or two for every call of torch. Without it they count as the host's own time.

    Raises:
        ConfigError: what is no engine, or no clock, with what it lacks.
    """

    def __init__(self, engine: Any, clock: StreamClock, *, sees_reads: bool = False) -> None:
        check_flags(sees_reads=sees_reads)
        self._engine, self._clock, self._sees_reads = check_engine(engine), _check_clock(clock), sees_reads
        self._names: list[tuple[Any, str]] = []
        self._labels = [_OTHER]
        self._open: dict[str, _Segment] = {}
        # What makes each instruction, and whether it is an edge, which takes no time.
        self._made: list[tuple[bool, Callable[[], Instruction]]] = []
        # Events are kept, so that no other gets the number of one that is gone.
        self._events: dict[int, tuple[Any, int]] = {}
        self._record_count = self._step = 0
        self._begun_s, self._blocked_s = clock.host_s(), 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def program(self) -> list[Instruction]:
        """What was seen so far; waits for the device."""
        return [make() for _, make in self._made]

    @property
    def label(self) -> str:
        """The stage of what is enqueued now."""
        return self._labels[-1]

    @property
    def step_count(self) -> int:
        """Steps that are over."""
        return self._step

    def forget(self) -> None:
        """Begin anew, between two steps; edges from what was before are no more."""
        self._made.clear()
        self._events.clear()
        self._step, self._begun_s, self._blocked_s = 0, self._clock.host_s(), 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """One call of ``progress``. One that raises is no step: its work and the host's time in it do not count."""
        begun, begun_s = len(self._made), self._own_s()
        self._begin(self._engine.current())
        try:
            with _Reads(self) if self._sees_reads else nullcontext():
                yield
            self._cut()
        except BaseException:
            # Edges stay: later work may wait for an event of this call.
            self._made[begun:] = [each for each in self._made[begun:] if each[0]]
            self._blocked_s += self._own_s() - begun_s
            raise
        finally:
            self._open.clear()
        number, issued_s = self._step, self._own_s()
        self._add(lambda: StepEnd(number, issued_s))
        self._step += 1

    def _add(self, make: Callable[[], Instruction], *, is_edge: bool = False) -> None:
        self._made.append((is_edge, make))

    def stream(self, name: str, priority: int = 0) -> Any:
        """A stream of the engine, remembered by its name, with a number where that is taken."""
        made = self._engine.stream(name, priority) if priority else self._engine.stream(name)
        taken = sum(known.split("-")[0] == name for _, known in self._names)
        self._names.append((made, f"{name}-{taken + 1}" if taken else name))
        return made

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What is enqueued inside is of this stage; stages may lie inside of others."""
        self._cut()
        self._labels.append(name)
        try:
            with self._engine.stage(name):
                yield
        finally:
            self._cut()
            self._labels.pop()

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Ops go to ``stream``."""
        lane = self._lane(stream)
        is_new = lane not in self._open
        with self._engine.on(stream):
            if is_new:
                self._begin(stream)
            try:
                yield
            finally:
                if is_new:
                    self._cut(lane)
                    self._open.pop(lane, None)

    def record(self, event: Any, stream: Any) -> None:
        """An event, behind the work so far."""
        lane = self._lane(stream)
        self._cut(lane)
        self._engine.record(event, stream)
        if event is not None:
            self._record_count += 1
            number = self._record_count
            self._events[id(event)] = (event, number)
            self._add(lambda: Record(number, lane), is_edge=True)

    def wait(self, stream: Any, event: Any) -> None:
        """An edge, before the work to come."""
        lane = self._lane(stream)
        self._cut(lane)
        self._engine.wait(stream, event)
        if id(event) in self._events:
            number = self._events[id(event)][1]
            self._add(lambda: Wait(number, lane), is_edge=True)
        if lane in self._open:
            self._begin(stream)

    def synchronize(self, event: Any) -> None:
        """The host waits."""
        self._cut()
        known, step, issued_s = self._events.get(id(event)), self._step, self._own_s()
        begun_s = self._clock.host_s()
        self._engine.synchronize(event)
        self._blocked_s += self._clock.host_s() - begun_s
        if known is not None:
            self._add(lambda: HostWait(known[1], step, issued_s))
        for segment in list(self._open.values()):
            self._begin(segment.stream)

    def synchronize_stream(self, stream: Any) -> None:
        """The host waits for all that a stream was given."""
        event = self._engine.event()
        self.record(event, stream)
        self.synchronize(event)

    def _own_s(self) -> float:
        """The host's time so far, less what it waited."""
        return self._clock.host_s() - self._begun_s - self._blocked_s

    def _lane(self, stream: Any) -> str:
        for known, name in self._names:
            if known == stream:
                return self._clock.lane(name)
        return self._clock.lane("default")

    def _begin(self, stream: Any) -> None:
        self._open[self._lane(stream)] = _Segment(stream, self._clock.mark(stream), self._own_s())

    def _cut(self, lane: str | None = None) -> None:
        """End what was begun, in one lane or in all, as work of the present stage, and go on."""
        for name in [lane] if lane is not None else list(self._open):
            if name in self._open:
                self._end(name, self._open[name])

    def _end(self, lane: str, segment: _Segment) -> None:
        now, stage, step = self._clock.mark(segment.stream), self.label, self._step
        seconds = self._clock.seconds
        self._add(lambda: Work(stage, step, lane, seconds(segment.begun, now), segment.issued_s))
        self._open[lane] = _Segment(segment.stream, now, self._own_s())
