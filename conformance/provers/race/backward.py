"""Autograd's own rule of streams: a backward op runs on the stream of its forward op, and waits for what fed it.

On a device torch's engine does this in C++. Here all tensors hold host memory, so that it does not. It is done again:
a node waits for each node that feeds it, root nodes wait for the caller's stream, and the caller's stream joins the
streams of nodes that feed nobody when ``backward`` returns. Gradients of leaves are accumulated on the stream that was
current when the leaf was first used in the forward pass.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from conformance.provers.race.points import Point
from conformance.provers.virtual_device.engine import Event, VirtualEngine

__all__ = ["Backward"]


class _Run:
    """One call of ``backward``: who feeds whom, and where each node ended."""

    def __init__(self, caller: str, begun: Event) -> None:
        self.caller, self.begun = caller, begun
        self.feeding: dict[Any, list[Any]] = {}
        self.roots: set[Any] = set()
        self.leaves: list[Any] = []
        self.ended: dict[Any, Event] = {}
        self.last: Any = None
        self.seen: dict[Any, str] = {}

    def explore(self, roots: Iterable[Any]) -> None:
        """Follow the graph from its roots."""
        self.roots = set(roots)
        open_nodes = list(self.roots)
        reached = set(open_nodes)
        while open_nodes:
            node = open_nodes.pop()
            # One that gets no gradient runs as well, and its stream is joined like that of any other.
            if all(following is None for following, _ in node.next_functions):
                self.leaves.append(node)
            for following, _ in node.next_functions:
                if following is None:
                    continue
                self.feeding.setdefault(following, []).append(node)
                if following not in reached:
                    reached.add(following)
                    open_nodes.append(following)

    def events_before(self, node: Any) -> Iterator[Event]:
        """What a node waits for; nodes that did nothing hand on what they waited for."""
        open_nodes, reached = [node], {node}
        while open_nodes:
            one = open_nodes.pop()
            if one in self.roots or one not in self.feeding:
                yield self.begun
            for before in self.feeding.get(one, ()):
                if before in self.ended:
                    yield self.ended[before]
                elif before not in reached:
                    reached.add(before)
                    open_nodes.append(before)


class Backward:
    """Streams of autograd's nodes, for all threads of a watched program."""

    def __init__(self, engine: VirtualEngine) -> None:
        self._engine = engine
        self._forward: dict[tuple[int, int], tuple[str, Point]] = {}
        self._accumulators: dict[int, tuple[Any, str]] = {}
        self._local = threading.local()

    @property
    def _runs(self) -> list[_Run]:
        runs: list[_Run] = self._local.__dict__.setdefault("runs", [])
        return runs

    def note_forward(self, tensors: Iterable[torch.Tensor], stream: str, point: Callable[[], Point]) -> None:
        """An op of the forward pass: the node that autograd has just made belongs to ``stream``."""
        key = threading.get_ident(), torch.autograd._get_sequence_nr() - 1
        if key not in self._forward:
            self._forward[key] = stream, point()
        for tensor in tensors:
            if tensor.requires_grad and tensor.is_leaf and id(tensor) not in self._accumulators:
                self._accumulators[id(tensor)] = weakref.ref(tensor, self._forgetting(id(tensor))), stream

    def _forgetting(self, key: int) -> Callable[[Any], None]:
        def forget(_: Any) -> None:
            self._accumulators.pop(key, None)

        return forget

    def forward_point(self) -> Point | None:
        """Where the forward op of the running node is."""
        node: Any = torch._C._current_autograd_node()
        known = None if node is None else self._forward.get((threading.get_ident(), node._sequence_nr()))
        return None if known is None else known[1]

    def in_node(self) -> bool:
        """Whether autograd runs a node in this thread."""
        return bool(self._runs) and torch._C._current_autograd_node() is not None

    def stream(self) -> str:
        """Where the running node runs; the caller's stream between nodes."""
        run = self._runs[-1]
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return run.caller
        if node is not run.last:
            self._switch(run, node)
        return run.seen[node]

    def _switch(self, run: _Run, node: Any) -> None:
        self._end(run)
        run.last = node
        if node in run.seen:
            return
        stream = run.seen[node] = self._stream_of(run, node)
        for event in list(run.events_before(node)):
            if event.stream != stream:
                self._engine.wait(stream, event)

    def _end(self, run: _Run) -> None:
        if run.last is not None:
            event = run.ended[run.last] = self._engine.event()
            self._engine.record(event, run.seen[run.last])

    def _stream_of(self, run: _Run, node: Any) -> str:
        variable = getattr(node, "variable", None)
        if variable is not None:
            known = self._accumulators.get(id(variable))
            return run.caller if known is None else known[1]
        forward = self._forward.get((threading.get_ident(), node._sequence_nr()))
        return run.caller if forward is None else forward[0]

    @contextmanager
    def running(self, roots: Iterable[torch.Tensor]) -> Iterator[None]:
        """Around a call of autograd's engine; the caller's stream is the current one."""
        caller, begun = self._engine.current(), self._engine.event()
        self._engine.record(begun, caller)
        run = _Run(caller, begun)
        run.explore(root.grad_fn for root in roots if root.grad_fn is not None)
        self._runs.append(run)
        try:
            yield
        finally:
            self._end(run)
            self._runs.pop()
            for stream in sorted({self._stream_of(run, leaf) for leaf in run.leaves} - {caller}):
                event = self._engine.event()
                self._engine.record(event, stream)
                self._engine.wait(caller, event)
            for node in run.leaves:
                # The graph is gone, and with it the node that accumulates; the next forward pass makes another.
                variable = getattr(node, "variable", None)
                if variable is not None:
                    self._accumulators.pop(id(variable), None)
