"""The stages of a step on streams, with an event for every edge between them: see docs/pipeline-stages.md.

Each edge is an event, though stream order would often do: the order of streams is not what holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch

from fastimpl.pipeline.input_dist import fuse_input_dists
from twinproof.engine import Engine, check_engine, engine_for
from twinproof.pipeline.driver import Pipeline
from twinproof.pipeline.stages import BatchContext, Call, Options, looked_up, move_batch
from twinproof.pipeline.tracing import Known, version_of

__all__ = ["StreamedBatch", "StreamedStages", "tensors_in", "versions_of"]

Method = TypeVar("Method", bound=Callable[..., Any])


class StreamedBatch(BatchContext):
    """One batch on its way over streams.

    Attributes:
        host_batch: what the loader gave, held while it is copied.
        moved, sent, looked_up: events: on the device, ids exchanged, looked up.
        given: what each module's exchange gave.
        seen: versions of the tables that were looked up in the step before the batch's own.
        postponed: names of the modules that must not be looked up now.
    """

    def __init__(self, batch: Any, host_batch: Any, engine: Engine) -> None:
        super().__init__(batch)
        self.host_batch = host_batch
        self.moved, self.sent, self.looked_up = engine.event(), engine.event(), engine.event()
        self.given: dict[str, Any] = {}
        self.seen: dict[str, Any] = {}
        self.postponed: frozenset[str] = frozenset()

    def forget(self) -> None:
        """Nothing was sent or looked up."""
        super().forget()
        self.given.clear()
        self.seen.clear()


# Of names, lengths and flags a batch has thousands, and none of them holds a tensor.
_PLAIN = frozenset({str, int, float, bool, type(None)})


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a batch, a message or a result.

    What keeps its memory for a stream, or is waited for, is made of its attributes: torchrec's types are known so too.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            if type(part) not in _PLAIN:
                yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif hasattr(type(value), "record_stream") or hasattr(type(value), "wait"):
        yield from tensors_in([part for part in vars(value).values() if not isinstance(part, torch.nn.Module)])
    elif dataclasses.is_dataclass(value):
        yield from tensors_in([getattr(value, field.name) for field in dataclasses.fields(value)])


def versions_of(module: Any) -> tuple[tuple[Known, Any], ...]:
    """Which tensors a lookup of the module reads, and how often each was written. It holds none of them."""
    if hasattr(module, "local_weights"):
        # Ours: what its own listing adds to these are parameters of the same memory, with the versions of the weights.
        tensors = [*module.local_weights(), *_held_tensors(module)]
    else:
        tensors = [*module.buffers(), *module.parameters()]
    return tuple(map(version_of, tensors))


def _held_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Buffers and parameters in one walk; torch's own listings take one each, and name everything."""
    for part in module.modules():
        for tensor in (*part._buffers.values(), *part._parameters.values()):
            if tensor is not None:
                yield tensor


def _named(name: str) -> Callable[[Method], Method]:
    """What the method enqueues is of this stage, for reports."""

    def around(method: Method) -> Method:
        @functools.wraps(method)
        def run(self: Any, *args: Any, **options: Any) -> Any:
            with self._engine.stage(name):
                return method(self, *args, **options)

        return cast("Method", run)

    return around


class StreamedStages:
    """``Stages`` on three or four streams: the caller's, the copies', the exchanges', and perhaps the lookups' own.

    ``Options.placed.stream`` says where lookups run: "current" is the caller's stream, "data_dist" the exchanges'.
    """

    def __init__(self, device: torch.device, options: Options) -> None:
        self._device, self._options = device, options
        self._engine = engine_for(device) if options.engine is None else check_engine(options.engine)
        self._memcpy = self._engine.stream("memcpy")
        self._dist = self._engine.stream("data_dist")
        self._lookup = self._own_stream() if options.placed.stream == "new" else self._dist
        self._updated, self._stepped, self._edited = (self._engine.event() for _ in range(3))
        self._versions: dict[str, Any] = {}

    def _own_stream(self) -> Any:
        """The lookups' own stream."""
        priority = self._options.placed.priority
        return self._engine.stream("emb_lookup", priority) if priority else self._engine.stream("emb_lookup")

    @_named("batch_copy")
    def copy(self, batch: Any) -> StreamedBatch:
        """H: the batch on the device. The host's copy is held until the batch is done."""
        engine = self._engine
        if not engine.stands_for_device:
            return StreamedBatch(move_batch(batch, lambda part: part.to(self._device), self._device), batch, engine)
        if self._options.copies_in_place:
            return self._copied_in_place(batch)
        caller = engine.current()
        with engine.on(self._memcpy):
            return self._moved(batch, move_batch(batch, self._copied, self._device), caller)

    def _copied_in_place(self, batch: Any) -> StreamedBatch:
        """H into memory of the caller's stream, which may still be at work on what was there before."""
        moved = move_batch(batch, self._copied_into_ours, self._device, self._memcpy)
        return self._moved(batch, moved, self._engine.current())

    def _moved(self, batch: Any, moved: Any, caller: Any) -> StreamedBatch:
        """The end of H: behind the copies, and behind the caller's stream where a loader gives what it made there."""
        engine = self._engine
        made, given = StreamedBatch(moved, batch, engine), {id(tensor) for tensor in tensors_in(batch)}
        if any(id(tensor) in given and engine.holds(tensor) for tensor in tensors_in(moved)):
            engine.record(made.moved, caller)
            engine.wait(self._memcpy, made.moved)
        engine.record(made.moved, self._memcpy)
        return made

    def _copied_into_ours(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._engine.holds(tensor) and tensor.device == self._engine.device:
            return tensor
        engine, target, free = self._engine, self._memory_for(tensor), self._engine.event()
        # Behind the allocation, whose memory may have been in use until there.
        engine.record(free, engine.current())
        engine.wait(self._memcpy, free)
        engine.keep(target, self._memcpy)
        with engine.on(self._memcpy):
            engine.copy(target, tensor.contiguous())
        return target

    def _memory_for(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = self._engine.device_empty(tensor.numel() * tensor.element_size())
        target: torch.Tensor = memory.view(tensor.dtype).view(tensor.shape)
        return target

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._engine.holds(tensor) and tensor.device == self._engine.device:
            return tensor
        target = self._memory_for(tensor)
        self._engine.copy(target, tensor.contiguous())
        return target

    def adopt(self, batch: Any) -> StreamedBatch:
        """A batch that somebody moved on the caller's stream."""
        made = StreamedBatch(batch, batch, self._engine)
        self._engine.record(made.moved, self._engine.current())
        return made

    def _hand_over(self, value: Any, stream: Any) -> None:
        """Memory of one stream that another is about to use."""
        if not self._engine.stands_for_device:
            return
        for tensor in tensors_in(value):
            if self._engine.holds(tensor):
                self._engine.keep(tensor, stream)

    @_named("input_dist")
    def send(self, batch: StreamedBatch, work: Callable[[], None]) -> None:
        """S, behind H: sizes of all modules in one exchange."""
        self._engine.wait(self._dist, batch.moved)
        with self._engine.on(self._dist):
            self._hand_over(batch.batch, self._dist)
            work()
            fuse_input_dists(list(batch.dists.values()))

    @_named("input_dist")
    def receive(self, work: Callable[[], None]) -> None:
        """I: wait for sizes, send ids."""
        with self._engine.on(self._dist):
            work()

    @_named("input_dist")
    def take_ids(self, batch: StreamedBatch, calls: list[Call]) -> None:
        """The end of I."""
        with self._engine.on(self._dist):
            for call in calls:
                if call.name not in batch.given:
                    batch.given[call.name] = batch.inputs[call.name].wait()
            self._engine.record(batch.sent, self._dist)

    def _lookup_stream(self) -> Any:
        return self._engine.current() if self._options.placed.stream == "current" else self._lookup

    @_named("lookup")
    def look_up(self, batch: StreamedBatch, calls: list[Call], late: list[Call]) -> None:
        """L and O, behind I and T, and behind P where P updates what is read."""
        wanted = [call for call in calls if call.name not in batch.postponed]
        if not wanted:
            return
        engine, stream = self._engine, self._lookup_stream()
        self.take_ids(batch, wanted)
        for event in (batch.sent, self._updated):
            engine.wait(stream, event)
        if any(call in late for call in wanted):
            engine.wait(stream, self._stepped)
        self._wait_for_edits(stream, wanted)
        with engine.on(stream):
            for call in wanted:
                given, ctx = batch.given[call.name], batch.contexts[call.name]
                self._hand_over([given, ctx], stream)
                with self._limited(call.module):
                    batch.results[call.name] = looked_up(call.module, ctx, given)
                batch.dists.pop(call.name, None)
            engine.record(batch.looked_up, stream)

    def _limited(self, module: Any) -> contextlib.AbstractContextManager[None]:
        """Around a lookup: the grid that was asked for, where the module is ours."""
        max_blocks, limited = self._options.placed.max_blocks, getattr(module, "limited_lookups", None)
        return contextlib.nullcontext() if max_blocks is None or limited is None else limited(max_blocks)

    def _wait_for_edits(self, stream: Any, calls: list[Call]) -> None:
        """Tables that somebody else wrote, on the caller's stream, since the last update."""
        if not self._engine.stands_for_device:
            return
        changed = any(self._versions.get(call.name) != versions_of(call.module) for call in calls)
        if changed:
            self._engine.record(self._edited, self._engine.current())
            self._engine.wait(stream, self._edited)

    @_named("prefetch")
    def prefetch(self, p: Pipeline[Any, Any], batch: StreamedBatch) -> None:
        """R: rows of key-value tables, read ahead of L; what T updates meanwhile is read again by the tables."""
        calls = [call for call in p.calls if hasattr(call.module, "prefetch_rows")]
        if batch.failure is not None or not calls:
            return
        with p.failure_noted(batch):
            self.take_ids(batch, calls)
            for call in calls:
                call.module.prefetch_rows(batch.contexts[call.name], batch.given[call.name])

    def wait_for_lookup(self, batch: StreamedBatch) -> None:
        """The caller's stream runs behind the batch's lookups: for the forward, and for edits of what they read."""
        self._engine.wait(self._engine.current(), batch.looked_up)

    @_named("forward")
    def forward(self, batch: StreamedBatch, work: Callable[[], Any]) -> Any:
        """F, behind H and L; behind P by the caller's own stream, which P runs on."""
        engine, current = self._engine, self._engine.current()
        for event in (batch.moved, batch.looked_up):
            engine.wait(current, event)
        self._hand_over([batch.batch, batch.results, batch.prepared], current)
        return work()

    @_named("backward")
    def backward(self, work: Callable[[], None]) -> None:
        """B and T; autograd joins the lookup's stream into the current one at the end."""
        work()

    def tables_updated(self, calls: list[Call]) -> None:
        """T is done; edits after it are told by the tables' versions."""
        self._engine.record(self._updated, self._engine.current())
        if self._engine.stands_for_device:
            self._versions = {call.name: versions_of(call.module) for call in calls}

    @_named("dense_optimizer")
    def optimize(self, late: list[Call], work: Callable[[], None]) -> None:
        """P. Gradients of what a lookup reads were made on the lookup's stream."""
        for call in late if self._engine.stands_for_device else ():
            listed = getattr(call.module, "listed_parameters", call.module.parameters)
            self._hand_over([param.grad for param in listed()], self._engine.current())
        work()
        self._engine.record(self._stepped, self._engine.current())


@contextlib.contextmanager
def undone_on_error(stages: StreamedStages, batch: StreamedBatch) -> Iterator[None]:
    """Rows looked up in a call that its loader ended or failed would be stale by the next, perhaps of another mode."""
    before = dict(batch.results), batch.with_grad
    try:
        yield
    except BaseException:
        batch.results, batch.with_grad = before
        # Edits that the caller makes now must not overtake a lookup, though nobody reads what it found.
        stages.wait_for_lookup(batch)
        raise
