"""Autograd's own rule of streams: a backward op runs on the stream of its forward op, and waits for what fed it.

On a device torch's engine does this in C++. Here all tensors hold host memory, so that it does not. It is done again:
a node waits for each node that feeds it, root nodes wait for the caller's stream, and the caller's stream joins the
streams of nodes that feed nobody before final callbacks run and when ``backward`` returns. Gradients of leaves are
accumulated on the stream that was current when the leaf's node was made: at its first use under grad. Where several
nodes feed one, the engine adds their gradients on the stream of the one that is fed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from conformance.provers.race.points import Point
from conformance.provers.virtual_device.device import tensors_in
from conformance.provers.virtual_device.engine import Event, VirtualEngine

__all__ = ["Backward"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _Run:
    """One call of ``backward``: who has fed whom, and where each node ended."""

    def __init__(self, caller: str, begun: Event) -> None:
        self.caller, self.begun = caller, begun
        # Within the backward of another graph: the node that called.
        self.around: Any = torch._C._current_autograd_node()
        self.roots: set[Any] = set()
        self.nodes: set[Any] = set()
        self.leaves: list[Any] = []
        self.last: Any = None
        self.streams: dict[Any, str] = {}
        self.ended: dict[Any, Event] = {}
        self.waited: set[tuple[str, int]] = set()
        self.is_joined = False
        self.fed_by: dict[Any, list[Any]] = {}
        # Inputs of nodes that have a gradient; those of the running node's that the engine is about to add to, by the
        # gradient; the node that it adds for.
        self.filled: set[tuple[Any, int]] = set()
        self.adding: dict[int, list[Any]] = {}
        self.adding_for: Any = None

    def explore(self, roots: Iterable[tuple[Any, int]], inputs: Sequence[Any]) -> None:
        """Follow the graph from its roots; nodes of ``inputs`` are the leaves, where there are any."""
        self.filled = set(roots)
        self.roots = {node for node, _ in self.filled}
        self.nodes, open_nodes = set(self.roots), list(self.roots)
        while open_nodes:
            node = open_nodes.pop()
            following = {one for one, _ in node.next_functions if one is not None}
            if not following:
                # One that gets no gradient runs as well, and its stream is joined like that of any other.
                self.leaves.append(node)
            open_nodes += following - self.nodes
            self.nodes |= following
        if inputs:
            # Torch joins the streams of nodes whose gradients are captured, and runs no other leaf.
            self.leaves = [node for node in self.nodes if any(_is_node_of(node, one) for one in inputs)]

    def events_before(self, node: Any) -> list[Event]:
        """What the gradients of a node come behind."""
        before = [self.ended[one] for one in self.fed_by.get(node, ())]
        return [*before, self.begun] if node in self.roots else before


def _is_node_of(node: Any, given: Any) -> bool:
    """Whether a gradient with respect to ``given`` (a tensor or an edge of the graph) is one that ``node`` gets."""
    if isinstance(given, torch.autograd.graph.GradientEdge):
        return given.node is node
    return _leaf_of(node) is given if given.is_leaf else given.grad_fn is node


def _leaf_of(node: Any) -> torch.Tensor | None:
    """The leaf that a node accumulates into; None for other nodes."""
    return node.variable if isinstance(node, torch._C._functions.AccumulateGrad) else None  # type: ignore[attr-defined]


def _roots(given: Iterable[Any]) -> Iterator[tuple[Any, int]]:
    """Edges where backward begins; the node of a leaf may be made here."""
    for one in given:
        if isinstance(one, torch.autograd.graph.GradientEdge):
            yield one.node, one.output_nr
        elif one.requires_grad:
            # Others are refused by torch.
            with torch.utils._python_dispatch._disable_current_modes():
                edge = torch.autograd.graph.get_gradient_edge(one)
            yield edge.node, edge.output_nr


class Backward:
    """Streams of autograd's nodes, for all threads of a watched program.

    Torch's node takes the stream that is current when it is made, and keeps it for its life (``InputMetadata`` in
    ``torch/csrc/autograd/input_metadata.cpp``). So the stream is noted on the node itself, in its ``metadata``: the
    node of a leaf, too, which lives as long as a graph that holds it.
    """

    def __init__(self, engine: VirtualEngine, is_on_device: Callable[[torch.Tensor], bool]) -> None:
        self._engine, self._is_on_device = engine, is_on_device
        self._local = threading.local()
        # Nodes may outlive a watch: its notes are not the next one's.
        self._note = object()

    @property
    def _runs(self) -> list[_Run]:
        runs: list[_Run] = self._local.__dict__.setdefault("runs", [])
        return runs

    @property
    def _forward(self) -> dict[int, tuple[str, Point]]:
        """Ops of this thread, by the number of the node that autograd made last: numbers begin anew in a thread."""
        forward: dict[int, tuple[str, Point]] = self._local.__dict__.setdefault("forward", {})
        return forward

    def note_forward(self, stream: str, point: Callable[[], Point]) -> None:
        """An op of the forward pass: the node that autograd has just made belongs to ``stream``."""
        key = torch.autograd._get_sequence_nr() - 1
        if key not in self._forward:
            self._forward[key] = stream, point()

    def note_nodes(self, result: Any, point: Callable[[], Point], *, is_function: bool = False) -> None:
        """A call has returned: nodes that it has made are noted, with the stream of their op.

        Args:
            result: what holds the tensors that the call has made or written.
            point: the program point, of a node that no op has announced.
            is_function: an ``autograd.Function`` was applied; its node is made behind the ops of its forward.
        """
        if not torch.is_grad_enabled():
            return
        with torch._C.DisableTorchFunction():
            # A leaf has none, and a subclass may call itself no leaf and have none either.
            found: list[Any] = [one.grad_fn for one in _tensors(result) if one.requires_grad]
            open_nodes = [node for node in found if node is not None]
            made = {node for node in open_nodes if is_function and self._note not in node.metadata}
            while open_nodes:
                node = open_nodes.pop()
                if self._note in node.metadata:
                    continue
                node.metadata[self._note] = self._place(node, point, by_number=node not in made)
                open_nodes += [following for following, _ in node.next_functions if following is not None]

    def _place(self, node: Any, point: Callable[[], Point], *, by_number: bool) -> tuple[str | None, Point | None]:
        leaf = _leaf_of(node)
        if leaf is not None:
            # A node without a tensor of the device has no stream: it runs on the current one of its caller.
            is_the_hosts = type(leaf) in _PLAIN and leaf.layout is torch.strided and not self._is_on_device(leaf)
            return (None if is_the_hosts else self._engine.current()), None
        announced = self._forward.pop(node._sequence_nr(), None)
        if by_number and announced is not None:
            return announced
        return self._engine.current(), point()

    def _noted(self, node: Any) -> tuple[str | None, Point | None] | None:
        noted: tuple[str | None, Point | None] | None = node.metadata.get(self._note)
        # What was called past torch's functions (a compiled module) is known by its number, in its own thread.
        return self._forward.get(node._sequence_nr()) if noted is None else noted

    def forward_point(self) -> Point | None:
        """Where the forward op of the running node is."""
        node: Any = torch._C._current_autograd_node()
        noted = None if node is None else self._noted(node)
        return None if noted is None else noted[1]

    def in_node(self) -> bool:
        """Whether autograd runs a node in this thread."""
        return bool(self._runs) and torch._C._current_autograd_node() is not None

    def stream(self) -> str:
        """Where the running node runs; the caller's stream before the first and behind the last."""
        run = self._runs[-1]
        node: Any = torch._C._current_autograd_node()
        if node is None or node is run.around:
            if run.last is not None:
                # A final callback: torch joins before it calls them (``GraphTask::exec_post_processing``).
                self._join(run)
            return run.caller
        if node is not run.last:
            self._switch(run, node)
        return run.streams[node if run.adding_for is None else run.adding_for]

    def _switch(self, run: _Run, node: Any) -> None:
        run.last, run.adding, run.adding_for, run.is_joined = node, {}, None, False
        self._begin(run, node)

    def _begin(self, run: _Run, node: Any) -> None:
        """The stream of a node waits for what the node has got so far."""
        stream = run.streams[node] = self._stream_of(run, node)
        for event in run.events_before(node):
            if event.stream != stream and (stream, id(event)) not in run.waited:
                run.waited.add((stream, id(event)))
                self._engine.wait(stream, event)

    def _hooks(self, run: _Run) -> list[Any]:
        """Handles of hooks behind each node, unless all are on one stream, where there is nothing to wait for."""
        if len({run.caller, *(self._stream_of(run, node) for node in run.nodes)}) == 1:
            return []
        return [node.register_hook(self._behind(run, node)) for node in run.nodes if _leaf_of(node) is None]

    def _behind(self, run: _Run, node: Any) -> Callable[[Any, Any], None]:
        """What is called behind a node: it hands its gradients on, in order, and the engine adds some to others."""

        def hook(handed_on: Sequence[torch.Tensor | None], _: Any) -> None:
            if not self._runs or self._runs[-1] is not run:
                return  # Another run on the same graph.
            if node is not run.last:
                self._switch(run, node)
            event = run.ended[node] = self._engine.event()
            self._engine.record(event, run.streams[node])
            for gradient, edge in zip(handed_on, node.next_functions, strict=False):
                if gradient is None or edge[0] is None:
                    continue
                run.fed_by.setdefault(edge[0], []).append(node)
                self._keep(gradient, self._stream_of(run, edge[0]))
                if edge in run.filled:
                    run.adding.setdefault(id(gradient), []).append(edge[0])
                run.filled.add(edge)

        return hook

    def _keep(self, gradient: torch.Tensor, stream: str) -> None:
        """Torch records what it hands to a node with the node's stream; what the forward pass has saved it does not."""
        with torch._C.DisableTorchFunction():
            for part in _parts(gradient):
                if self._is_on_device(part):
                    self._engine.keep(part, stream)

    def note_operands(self, name: str, operands: Iterable[torch.Tensor]) -> None:
        """An op is about to run: of the engine, perhaps, which adds a gradient of the running node to another's.

        ``InputBuffer::add`` in ``torch/csrc/autograd/input_buffer.cpp``: the stream of the node that is fed waits for
        both, and adds.
        """
        run = self._runs[-1] if self._runs else None
        if run is None or not run.adding or name not in ("aten::add", "aten::add_"):
            return
        if torch._C._current_autograd_node() is not run.last:
            return
        nodes = next((run.adding[id(one)] for one in operands if run.adding.get(id(one))), None)
        if nodes is None and run.adding_for is None:
            # Of a subclass, which is added part by part.
            nodes = next(iter(run.adding.values()))
        if nodes:
            run.adding_for = nodes.pop(0)
            self._begin(run, run.adding_for)

    def _stream_of(self, run: _Run, node: Any) -> str:
        noted = self._noted(node)
        return run.caller if noted is None or noted[0] is None else noted[0]

    def _join(self, run: _Run) -> None:
        """The caller's stream waits for the leaves', each of which has waited for its gradient, used or not."""
        if run.is_joined:
            return
        run.is_joined = True
        for leaf in run.leaves:
            self._begin(run, leaf)
        for stream in sorted({run.streams[leaf] for leaf in run.leaves} - {run.caller}):
            event = self._engine.event()
            self._engine.record(event, stream)
            self._engine.wait(run.caller, event)

    @contextmanager
    def running(
        self, roots: Iterable[Any], gradients: Iterable[torch.Tensor | None], inputs: Sequence[Any]
    ) -> Iterator[None]:
        """Around a call of autograd's engine; the caller's stream is the current one."""
        caller, begun = self._engine.current(), self._engine.event()
        self._engine.record(begun, caller)
        run = _Run(caller, begun)
        with torch._C.DisableTorchFunction():
            edges = list(_roots(roots))
            run.explore(edges, inputs)
        for edge, gradient in zip(edges, gradients, strict=False):
            if gradient is not None:
                self._keep(gradient, self._stream_of(run, edge[0]))
        hooks = self._hooks(run)
        self._runs.append(run)
        try:
            yield
        finally:
            self._runs.pop()
            for hook in hooks:
                hook.remove()
        # Torch joins nothing behind an error.
        self._join(run)


def _parts(tensor: Any) -> Iterator[torch.Tensor]:
    """Tensors whose memory a tensor has: those inside of a subclass that wraps others."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    else:
        yield from tensors_in(tensor)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in a result, of whatever layout or class."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
