"""The virtual device's engine with a trace, and with a current stream that follows autograd's nodes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from conformance.provers.race.backward import Backward
from conformance.provers.race.memory import Memories
from conformance.provers.race.points import Site, site_here
from conformance.provers.race.trace import LAUNCH_S, Box, Edge, Trace
from conformance.provers.virtual_device.clocks import HOST
from conformance.provers.virtual_device.engine import DEFAULT, Costs, Event, VirtualEngine

__all__ = ["RaceEngine"]

# On a thread's stack of streams: whatever stream autograd's running node has.
_NODE = "autograd's node"


class RaceEngine(VirtualEngine):
    """Streams are names; every op is carried out at once, and the order is that of clocks.

    Attributes:
        labels: stream -> words for people: where it was made.
    """

    def __init__(self, memories: Memories, trace: Trace) -> None:
        super().__init__(memories, costs=Costs())
        self.trace, self.backward = trace, Backward(self, memories.is_on_device)
        self.labels = {DEFAULT: "the default stream", HOST: "the host"}

    def new_stream(self, priority: int) -> str:
        """A stream of the program, named by the order in which they are made."""
        name = self.stream(f"stream-{self.stream_count + 1}", priority)
        self.labels[name] = f"{name} (made at {site_here('').point.short})"
        return name

    def label(self, stream: str) -> str:
        """Words for a stream."""
        return self.labels.get(stream, stream)

    def current(self) -> str:
        """The innermost stream of this thread; within ``backward``, that of the running node."""
        top = self._stack[-1]
        return self.backward.stream() if top == _NODE else top

    def set_current(self, stream: str) -> None:
        """Replace the innermost stream of this thread."""
        self._stack[-1] = stream

    def push(self, stream: str) -> None:
        """Begin a ``with`` of a stream."""
        self._stack.append(stream)

    def pop(self) -> None:
        """End it."""
        self._stack.pop()

    @contextmanager
    def following_nodes(self) -> Iterator[None]:
        """Within: the current stream is that of autograd's running node."""
        self._stack.append(_NODE)
        try:
            yield
        finally:
            self._stack.pop()

    def wait(self, stream: str, event: Event) -> None:
        """As the virtual engine's, with an edge in the trace."""
        super().wait(stream, event)
        if event.clock is not None and event.stream != stream:
            now = max(self.time_s.get(stream, 0.0), self.time_s[HOST])
            self.trace.edges.append(Edge(event.stream, event.time_s, stream, now, "wait"))

    def synchronize(self, event: Event) -> None:
        """As the virtual engine's, with an edge in the trace."""
        super().synchronize(event)
        if event.clock is not None:
            self.trace.edges.append(Edge(event.stream, event.time_s, HOST, self.time_s[HOST], "synchronize"))

    def synchronize_all(self) -> None:
        """The host waits for everything."""
        for stream in sorted(self._names - {HOST}):
            self.synchronize_stream(stream)

    def add_op(self, actor: str, tick: int, site: Site, cost_s: float) -> None:
        """Let an op take its time on its lane, and show it."""
        begin = max(self.time_s.get(actor, 0.0), self.time_s[HOST])
        self.time_s[actor] = begin + cost_s
        if actor != HOST:
            self.time_s[HOST] += LAUNCH_S
        self.trace.add(Box(actor, begin, begin + cost_s, site), tick)

    def is_watched(self) -> bool:
        """Whether the calling thread is."""
        return threading.get_ident() in self.threads
