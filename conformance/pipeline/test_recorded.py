"""What a recorder remembers of its engine, and what a picture shows of work that lies beside its steps."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, cast

import torch

from conformance.harness import assert_equal, raises, requirement, succeeds
from twinproof.engine import InlineEngine
from twinproof.errors import ConfigError


class Streams(InlineEngine):
    """Streams that are things of their own, and memory of which some is the device's."""

    stands_for_device = True

    def __init__(self, there: torch.Tensor) -> None:
        super().__init__()
        self.there, self.asked, self.entered = there, list[tuple[Any, ...]](), ["host"]

    def stream(self, *given: Any) -> Any:
        """One more."""
        self.asked.append(given)
        return object()

    def current(self) -> Any:
        """The one that was entered last."""
        return self.entered[-1]

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Entered until then."""
        self.entered.append(stream)
        yield
        self.entered.pop()

    def event(self) -> Any:
        """A thing."""
        return object()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it is that memory."""
        return tensor is self.there


class Counting:
    """A clock on which every look takes a second."""

    now_s = 0.0

    def lane(self, name: str) -> str:
        """The stream."""
        return name

    def mark(self, stream: Any) -> float:
        """A second later."""
        self.now_s += 1.0
        return self.now_s

    def seconds(self, begin: float, end: float) -> float:
        """The difference."""
        return end - begin

    def host_s(self) -> float:
        """Of no account."""
        return 0.0


@requirement(
    "PIPE-598",
    "A recorder MUST ask its engine for streams as it was asked, with a priority where one was given, tell the work of "
    "streams of one name apart, and count a wait of the host for values of the device alone.",
    needs=("streams",),
)
def test_streams_and_reads(pipeline: Any) -> None:
    from fastimpl.pipeline.overlap import HostWait, Work
    from fastimpl.pipeline.recording import Recorder

    there, here = torch.ones(2), torch.ones(2)
    engine = Streams(there)
    recorder = Recorder(engine, Counting(), sees_reads=True)
    streams = [
        recorder.stream("mine"),
        recorder.stream("other", -1),
        recorder.stream("mine"),
        recorder.stream("mine", 0),
    ]
    assert_equal(engine.asked, [("mine",), ("other", -1), ("mine",), ("mine",)], where="what the engine is asked for")
    for read, expected in ((here, 0), (there, 1)):
        recorder.forget()
        with recorder.step():
            for stream in streams:
                with recorder.stage("lookup"), recorder.on(stream):
                    pass
            read.tolist()
        program = recorder.program()
        names = [each.stream for each in program if isinstance(each, Work) and each.stage == "lookup"]
        of_streams = [name for name in dict.fromkeys(names) if name != "default"]
        assert_equal(of_streams, ["mine", "other", "mine-2", "mine-3"], where="streams of the work")
        assert_equal(sum(isinstance(each, HostWait) for each in program), expected, where="waits of the host")


@requirement(
    "PIPE-599",
    "A picture MUST show each work of its steps once: what was done before the first of them at the left, and nothing "
    "of other steps there; boxes have their name, a letter or nothing, as they have room.",
    needs=("streams",),
)
def test_work_beside_the_steps(pipeline: Any) -> None:
    from fastimpl.pipeline.overlap import Record, StepEnd, Wait, Work, overlap_report, replay
    from fastimpl.pipeline.overlap_views import to_svg

    seconds = {"forward": 1.0, "lookup": 0.1, "dense_optimizer": 0.002}
    program = list[Any]()
    for step in range(6):
        program += [Work("batch_copy", step, "copies", 0.25), Record(step, "copies"), Wait(step, "main")]
        program += [Work(stage, step, "main", length) for stage, length in seconds.items()]
        program += [StepEnd(step)]
    report = overlap_report(program, schedule="mine", device="none", margin_count=1)
    picture = to_svg([(report, replay(program))])
    boxes = re.findall(
        r'<g><title>(\w+), step (\d): [^<]*</title><rect x="([\d.]+)"[^>]*/>(?:<text[^>]*>([^<]*)</text>)?</g>', picture
    )
    found = dict[str, list[tuple[int, bool, str]]]()
    for stage, step, x, word in boxes:
        # Labels of the lanes are 90 wide, and what was done before is in the 110 behind them.
        found.setdefault(stage, []).append((int(step), float(x) < 200, word))
    assert_equal(sorted(found["forward"]), [(step, False, "forward") for step in (2, 3, 4)], where="work with room")
    assert_equal(sorted(found["lookup"]), [(step, False, "L") for step in (2, 3, 4)], where="room for a letter")
    assert_equal(sorted(found["dense_optimizer"]), [(step, False, "") for step in (2, 3, 4)], where="no room")
    assert_equal(sorted(each[:2] for each in found["batch_copy"]), [(s, True) for s in (2, 3, 4)], where="done before")


class Set:
    """A clock that goes when it is told to, from a zero of its own."""

    def __init__(self, zero_s: float) -> None:
        self.now_s = zero_s

    def lane(self, name: str) -> str:
        """The stream."""
        return name

    def mark(self, stream: Any) -> float:
        """Now."""
        return self.now_s

    def seconds(self, begin: float, end: float) -> float:
        """The difference."""
        return end - begin

    def host_s(self) -> float:
        """Now."""
        return self.now_s


def _failed_step(recorder: Any, clock: Set) -> None:
    """A step that takes a while and raises."""
    with contextlib.suppress(OSError), recorder.step(), recorder.stage("forward"):
        clock.now_s += 8.0
        raise OSError


def _steps(recorder: Any, clock: Set, engine: Any) -> Any:
    """The program of some steps, between whose stages the host works and waits, and the report's time of a step."""
    from fastimpl.pipeline.overlap import overlap_report

    for _ in range(4):
        clock.now_s += 0.25
        with recorder.step():
            for stage, seconds in (("lookup", 0.5), ("forward", 2.0)):
                with recorder.stage(stage):
                    clock.now_s += seconds
            engine.wait_s = 1.0
            recorder.synchronize(recorder.event())
    program = recorder.program()
    return program, overlap_report(program, schedule="mine", device="none", margin_count=0).step_s


class Slow(InlineEngine):
    """Waits take a while of the clock's time."""

    def __init__(self, clock: Set) -> None:
        super().__init__()
        self.clock, self.wait_s = clock, 0.0

    def synchronize(self, event: Any) -> None:
        """Later."""
        self.clock.now_s += self.wait_s


@requirement(
    "PIPE-622",
    "A recorder's program MUST begin with its making, or with the forget() that is later, whatever the clock's zero "
    "and however late that is, and count neither what the host waited nor a step that raised.",
    needs=("streams",),
)
def test_beginnings(pipeline: Any) -> None:
    from fastimpl.pipeline.overlap import Work
    from fastimpl.pipeline.recording import Recorder

    def made(zero_s: float, *, forgets: bool = False, fails: bool = False) -> Any:
        clock = Set(zero_s)
        engine = Slow(clock)
        recorder = Recorder(engine, clock)
        if forgets:
            _steps(recorder, clock, engine)
            clock.now_s += 64.0
            recorder.forget()
        if fails:
            _failed_step(recorder, clock)
        return _steps(recorder, clock, engine)

    program, step_s = made(0.0)
    assert_equal(next(each.issued_s for each in program if isinstance(each, Work)), 0.25, where="the first work")
    for zero_s in (0.0, 4096.0, -16.0):
        for options in ({}, {"forgets": True}, {"fails": True}, {"forgets": True, "fails": True}):
            with succeeds("a report", where=f"zero {zero_s}, {options}"):
                found = made(zero_s, **options)
            assert_equal(found, (program, step_s), where=f"zero {zero_s}, {options}")


@requirement(
    "PIPE-671",
    "What is no engine, or no clock, MUST be refused when a recorder is made of it, with what it lacks.",
    needs=("streams",),
)
def test_no_engines_and_clocks(pipeline: Any) -> None:
    from fastimpl.pipeline.recording import HostClock, Recorder

    for engine in (object(), None, 0, InlineEngine):
        said = f"got: {type(engine).__name__} without {'device' if engine is InlineEngine else ''}"
        with raises(ConfigError, mentions=("where: engine", said), where=repr(engine)):
            Recorder(engine, HostClock())
    for clock, said in ((object(), "object without lane, mark"), (None, "NoneType without lane"), (HostClock, "class")):
        with raises(ConfigError, mentions=("where: clock", said), where=repr(clock)):
            Recorder(InlineEngine(), cast("Any", clock))
    with raises(ConfigError, mentions=("where: sees_reads",)):
        Recorder(InlineEngine(), HostClock(), sees_reads=cast("Any", "false"))
    with succeeds("a recorder", where="in front of another one"):
        Recorder(Recorder(InlineEngine(), HostClock()), HostClock())
