"""The engine of the virtual device: streams are names, events are clocks, copies wait in queues."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from conformance.provers.virtual_device.clocks import HOST, Clock
from conformance.provers.virtual_device.tracker import Memory, Tracker, here
from twinproof.errors import UnsupportedError

__all__ = ["DEFAULT", "Costs", "Event", "VirtualClock", "VirtualEngine"]

DEFAULT = "default"
_POISON = 0xFF  # NaN in every float dtype, -1 in every integer one.


@dataclass(frozen=True)
class Costs:
    """Seconds of the virtual clock: of a byte on the link, each way, and of an op by its name and bytes touched."""

    h2d_s_per_byte: float = 0.0
    d2h_s_per_byte: float = 0.0
    op_s: Callable[[str, int], float] = lambda name, size_bytes: 0.0


@dataclass
class Event:
    """What the recording stream knew, when it was over on the virtual clock, and its place in the queue."""

    clock: Clock | None = None
    time_s: float = 0.0
    stream: str = ""
    position: int = 0


@dataclass
class _Queue:
    """Copies and waits of one stream that have not been carried out yet; ``done`` counts those that have."""

    items: deque[Callable[[], None]] = field(default_factory=deque)
    done: int = 0

    @property
    def given(self) -> int:
        return self.done + len(self.items)


class VirtualEngine:
    """A ``twinproof.engine.Engine`` whose every edge is seen.

    Args:
        tracker: where accesses go.
        late: carry copies out as late as edges allow; False: at once.
        seed: with ``late``, carry some out earlier, at random.
        costs: of the virtual clock.

    Attributes:
        moved_bytes: by direction, ``h2d``, ``d2h`` and ``d2d``.
        copy_count, call_count: copies, and the calls that asked for them.
        time_s: by stream, and of the host.
        threads: those that are watched; once there is one, calls from others raise UnsupportedError. The host is one
            clock: threads take turns, and whoever starts and joins them orders what they do.
    """

    stands_for_device = True

    def __init__(self, tracker: Tracker, *, late: bool = False, seed: int | None = None, costs: Costs) -> None:
        self.device = torch.device("cpu")
        self.tracker, self.late, self.costs = tracker, late, costs
        self.moved_bytes = {"h2d": 0, "d2h": 0, "d2d": 0}
        self.copy_count = self.call_count = self.host_wait_count = 0
        self.time_s: dict[str, float] = {HOST: 0.0}
        self.link_free_s = {"h2d": 0.0, "d2h": 0.0}
        self.capturing = False
        self._random = None if seed is None else random.Random(seed)
        self.threads: set[int] = set()
        self._stacks: dict[int, list[str]] = {}
        self._names = {DEFAULT, HOST}
        self.priorities: dict[str, int] = {}
        self._queues: dict[str, _Queue] = {}
        self.busy_s: dict[str, float] = {}

    def stream(self, name: str, priority: int = 0) -> str:
        """A new stream; a name that is taken gets a number. A priority is noted, and orders nothing."""
        made, number = name, 1
        while made in self._names:
            number += 1
            made = f"{name}-{number}"
        self._names.add(made)
        self.priorities[made] = priority
        return made

    @property
    def stream_count(self) -> int:
        """Streams made so far."""
        return len(self._names) - 2

    def event(self) -> Event:
        """Never recorded yet."""
        return Event()

    def check_thread(self) -> None:
        """Raise UnsupportedError in a thread whose ops nobody sees."""
        thread = threading.current_thread()
        if self.threads and thread.ident not in self.threads:
            raise UnsupportedError(
                "a thread that the virtual device does not watch",
                got=thread.name,
                expected="VirtualDevice.in_thread() entered there",
                where=here(),
            )

    def forget_thread(self, ident: int) -> None:
        """A thread is not watched any more; another may get its number."""
        self.threads.discard(ident)
        self._stacks.pop(ident, None)

    @property
    def _stack(self) -> list[str]:
        self.check_thread()
        return self._stacks.setdefault(threading.get_ident(), [DEFAULT])

    def current(self) -> str:
        """The innermost ``on`` of this thread."""
        return self._stack[-1]

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Ops go to ``stream``."""
        if stream not in self._names:
            raise ValueError(f"not a stream of this engine: {stream!r}")
        self._stack.append(stream)
        try:
            yield
        finally:
            self._stack.pop()

    def record(self, event: Event, stream: str) -> None:
        """Remember what ``stream`` knows."""
        self.check_thread()
        clock = self.tracker.clocks[stream]
        clock.join(self.tracker.clocks[HOST])
        event.clock, event.time_s = Clock(clock), max(self.time_s.get(stream, 0.0), self.time_s[HOST])
        event.stream, event.position = stream, self._queue(stream).given

    def wait(self, stream: str, event: Event) -> None:
        """``stream`` learns what the event knows."""
        self.check_thread()
        if event.clock is None:
            return
        self.tracker.clocks[stream].join(event.clock)
        self.time_s[stream] = max(self.time_s.get(stream, 0.0), event.time_s)
        source, position = event.stream, event.position
        self._enqueue(stream, lambda: self._run(source, position))

    def synchronize(self, event: Event) -> None:
        """The host learns what the event knows."""
        self.check_thread()
        if event.clock is None:
            return
        self.host_wait_count += 1
        self.tracker.clocks[HOST].join(event.clock)
        self.time_s[HOST] = max(self.time_s[HOST], event.time_s)
        self._run(event.stream, event.position)

    def synchronize_stream(self, stream: str) -> None:
        """The host waits for all that a stream was given, as a blocking copy or ``item`` does."""
        event = self.event()
        self.record(event, stream)
        self.synchronize(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy; it is an access of both sides by the current stream."""
        self.call_count += 1
        self._copy(target, source)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        stream, where = self.current(), f"copy at {here()}"
        self.tracker.sweep()
        to, of = (self.tracker.memory_of(side, stream=stream) for side in (target, source))
        if to.on_host and of.on_host:
            # No stream is asked: the host does it, now.
            stream = HOST
        tick = self.tracker.clocks.advance(stream)
        self.tracker.access(source, of, stream=stream, tick=tick, writes=False, what=where)
        self.tracker.access(target, to, stream=stream, tick=tick, writes=True, what=where)
        if stream != HOST:
            self._account(stream, to, of, target.numel() * target.element_size())
        # The queue may outlive the caller's references, as a copy engine does: only keep() may rely on that.
        into, out = target.detach(), source.detach()
        if stream == HOST:
            _copy_bytes(into, out)
            return
        self._enqueue(stream, lambda: _copy_bytes(into, out))

    def copy_many(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Each by itself is late, or early, and an access of its own; ``call_count`` counts one call."""
        self.call_count += 1
        for target, source in zip(targets, sources, strict=True):
            self._copy(target, source)

    def _account(self, stream: str, to: Memory, of: Memory, size_bytes: int) -> None:
        way = {(True, False): "d2h", (False, True): "h2d"}.get((to.on_host, of.on_host), "d2d")
        self.moved_bytes[way] += size_bytes
        self.copy_count += 1
        if way == "d2d":
            self.spend(stream, self.costs.op_s("copy", 2 * size_bytes))
            return
        cost = size_bytes * (self.costs.h2d_s_per_byte if way == "h2d" else self.costs.d2h_s_per_byte)
        begin = max(self.time_s.get(stream, 0.0), self.time_s[HOST], self.link_free_s[way])
        self.time_s[stream] = self.link_free_s[way] = begin + cost
        self.busy_s[way] = self.busy_s.get(way, 0.0) + cost

    def spend(self, stream: str, cost_s: float) -> None:
        """Let an op of ``stream`` take its time."""
        self.time_s[stream] = max(self.time_s.get(stream, 0.0), self.time_s[HOST]) + cost_s
        self.busy_s[stream] = self.busy_s.get(stream, 0.0) + cost_s

    def follow(self, stream: str, other: str) -> None:
        """Let ``stream`` go on when ``other`` is over, in knowledge and in time."""
        self.tracker.clocks[stream].join(self.tracker.clocks[other])
        self.time_s[stream] = max(self.time_s.get(stream, 0.0), self.time_s.get(other, 0.0))

    @property
    def makespan_s(self) -> float:
        """When the last op is over."""
        return max(self.time_s.values())

    def keep(self, tensor: torch.Tensor, stream: str) -> None:
        """Releasing the memory waits for ``stream``."""
        self.tracker.memory_of(tensor, stream=self.current()).kept_for.add(stream)

    def device_empty(self, size_bytes: int) -> torch.Tensor:
        """Poisoned memory of the current stream."""
        return self._poisoned(size_bytes, on_host=False)

    def host_empty(self, size_bytes: int) -> torch.Tensor:
        """Poisoned host memory."""
        return self._poisoned(size_bytes, on_host=True)

    def _poisoned(self, size_bytes: int, *, on_host: bool) -> torch.Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            memory = torch.full((size_bytes,), _POISON, dtype=torch.uint8, device="cpu")
        self.tracker.sweep()
        home = HOST if on_host else self.current()
        found = self.tracker.memory_of(memory, stream=home, on_host=on_host)
        # The block may have been somebody else's until the home stream gave it up: others come after that.
        tick = self.tracker.clocks.advance(home)
        self.tracker.access(memory, found, stream=home, tick=tick, writes=True, what=f"allocation at {here()}")
        return memory

    def holds(self, tensor: torch.Tensor) -> bool:
        """All but what is known as host memory."""
        memory = self.tracker.knows(tensor)
        return memory is None or not memory.on_host

    def is_capturing(self) -> bool:
        """As the test sets it."""
        self.check_thread()
        return self.capturing

    def stage(self, name: str) -> AbstractContextManager[None]:
        """For a recorder in front of this engine."""
        return nullcontext()

    def settle(self, stream: str) -> None:
        """Carry out all that ``stream`` was given: an op that is about to run on it sees the result."""
        self._run(stream, self._queue(stream).given)

    def settle_all(self) -> None:
        """Carry everything out; called when the program is over."""
        for stream in list(self._queues):
            self.settle(stream)

    def _queue(self, stream: str) -> _Queue:
        return self._queues.setdefault(stream, _Queue())

    def _enqueue(self, stream: str, work: Callable[[], None]) -> None:
        self._queue(stream).items.append(work)
        if not self.late:
            self.settle(stream)
        elif self._random is not None:
            some = self._random.choice(list(self._queues))
            self._run(some, self._queue(some).done + self._random.randint(0, 2))

    def _run(self, stream: str, position: int) -> None:
        queue = self._queue(stream)
        while queue.items and queue.done < position:
            queue.done += 1
            queue.items.popleft()()


class VirtualClock:
    """The virtual clock, as a recorder of stages reads it (``fastimpl.pipeline.recording.StreamClock``)."""

    def __init__(self, engine: VirtualEngine) -> None:
        self.engine = engine

    def lane(self, name: str) -> str:
        """Every stream works by itself."""
        return name

    def mark(self, stream: str) -> float:
        """When the stream could begin with something new."""
        return max(self.engine.time_s.get(stream, 0.0), self.engine.time_s[HOST])

    def seconds(self, begin: float, end: float) -> float:
        """The difference."""
        return end - begin

    def host_s(self) -> float:
        """Enqueueing takes no time here."""
        return 0.0


def _copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        target.copy_(source)
