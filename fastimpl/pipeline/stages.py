"""The training pipelines, overlapped: stages on streams, and an event for every edge between them.

Stages of batch i: H copies it to the device, S exchanges sizes and I ids, L looks up and O sends pooled columns, F and
B are forward and backward, T updates the tables inside of B, P is the dense optimizer. Edges (facts/pipeline.md 2): S
waits H; L waits I and T of the batch before, and P where P updates what L reads; F waits H, L and P; T runs where L
ran, and B's end waits it. Each is an event, though stream order would often do: the order of streams is not what holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from fastimpl.pipeline.flights import StreamedFlight, tensors_in, versions_of
from fastimpl.pipeline.input_dist import fuse_input_dists
from fastimpl.streams import engine_for
from twinproof.pipeline.rewrite import Call
from twinproof.pipeline.schedules_base import In, Out, PipelineBase
from twinproof.pipeline.schedules_flights import looked_up, move_batch

__all__ = ["Streamed"]

Method = TypeVar("Method", bound=Callable[..., Any])


def _stage(name: str) -> Callable[[Method], Method]:
    """What the method enqueues is of this stage."""

    def named(method: Method) -> Method:
        @functools.wraps(method)
        def run(self: Any, *args: Any, **options: Any) -> Any:
            with self._engine.stage(name):
                return method(self, *args, **options)

        return cast("Method", run)

    return named


class Streamed(PipelineBase[In, Out]):
    """Stages on their streams; what follows when is the subclass's."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._engine = self._engine or engine_for(self._device)
        self._memcpy = self._engine.stream("memcpy")
        self._dist = self._engine.stream("data_dist")
        self._lookup_stream = self._make_lookup_stream()
        self._updated, self._stepped, self._edited = (self._engine.event() for _ in range(3))
        self._versions: dict[str, Any] = {}

    def _make_lookup_stream(self) -> Any:
        return self._dist

    @_stage("batch_copy")
    def _flight_of(self, batch: Any) -> StreamedFlight:
        """H: the batch on the device. The host's copy is held until the batch is done."""
        engine = self._engine
        if not engine.stands_for_device:
            return StreamedFlight(
                move_batch(batch, lambda tensor: tensor.to(self._device), self._device), batch, engine
            )
        if self._options.copies_in_place:
            return self._copied_in_place(batch)
        with engine.on(self._memcpy):
            flight = StreamedFlight(move_batch(batch, self._copied, self._device), batch, engine)
            engine.record(flight.moved, self._memcpy)
        return flight

    def _copied_in_place(self, batch: Any) -> StreamedFlight:
        """H into memory of the caller's stream, which may still be at work on what was there before."""
        engine = self._engine
        moved = move_batch(batch, self._copied_into_ours, self._device, self._memcpy)
        flight = StreamedFlight(moved, batch, engine)
        engine.record(flight.moved, self._memcpy)
        return flight

    def _copied_into_ours(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._engine.holds(tensor) and tensor.device == self._engine.device:
            return tensor
        engine, target, free = self._engine, self._room_for(tensor), self._engine.event()
        # Behind the allocation, whose memory may have been in use until there.
        engine.record(free, engine.current())
        engine.wait(self._memcpy, free)
        engine.keep(target, self._memcpy)
        with engine.on(self._memcpy):
            engine.copy(target, tensor.contiguous())
        return target

    def _room_for(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = self._engine.device_empty(tensor.numel() * tensor.element_size())
        target: torch.Tensor = memory.view(tensor.dtype).view(tensor.shape)
        return target

    def _arrived(self, batch: Any) -> StreamedFlight:
        """A batch that somebody moved on the caller's stream."""
        flight = StreamedFlight(batch, batch, self._engine)
        self._engine.record(flight.moved, self._engine.current())
        return flight

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._engine.holds(tensor) and tensor.device == self._engine.device:
            return tensor
        target = self._room_for(tensor)
        self._engine.copy(target, tensor.contiguous())
        return target

    def _hand_over(self, value: Any, stream: Any) -> None:
        """Memory of one stream that another is about to use."""
        if not self._engine.stands_for_device:
            return
        for tensor in tensors_in(value):
            if self._engine.holds(tensor):
                self._engine.keep(tensor, stream)

    @contextmanager
    def _mode(self) -> Iterator[None]:
        with torch.set_grad_enabled(self._model.training and torch.is_grad_enabled()):
            yield

    @_stage("input_dist")
    def start_sparse_data_dist(self, batch: Any, context: Any) -> None:
        """S: sizes of all modules in one exchange, behind H."""
        flight = None if batch is None else self._found(context)
        if flight is None or flight.was_sent:
            return
        self._engine.wait(self._dist, flight.moved)
        with self._engine.on(self._dist):
            self._hand_over(flight.batch, self._dist)
            self._send(flight)
            fuse_input_dists(list(flight.dists.values()))

    @_stage("input_dist")
    def wait_sparse_data_dist(self, context: Any) -> None:
        """I: wait for sizes, send ids."""
        if not self._found(context).was_received:
            with self._engine.on(self._dist):
                self._receive(self._found(context))

    @contextmanager
    def _undone_on_error(self, flight: StreamedFlight) -> Iterator[None]:
        """Rows looked up in a call that a loader ended would be stale by the next call, and perhaps of another mode."""
        before = dict(flight.results), flight.with_grad
        try:
            yield
        except BaseException:
            flight.results, flight.with_grad = before
            raise

    @_stage("lookup")
    def _look_up_on(self, stream: Any, flight: StreamedFlight, calls: list[Call]) -> None:
        """L and O, behind I and T, and behind P where P updates what is read."""
        self._exchange(flight)
        if flight.failure is not None or not calls:
            return
        engine = self._engine
        self._take_ids(flight, calls)
        for event in (flight.sent, self._updated):
            engine.wait(stream, event)
        if any(self._is_late(call) for call in calls):
            engine.wait(stream, self._stepped)
        self._wait_for_edits(stream, calls)
        with engine.on(stream), self._mode():
            for call in calls:
                given, ctx = flight.given[call.name], flight.contexts[call.name]
                self._hand_over([given, ctx], stream)
                flight.results[call.name] = looked_up(call.module, ctx, given)
                flight.dists.pop(call.name, None)
            engine.record(flight.looked_up, stream)
        flight.with_grad = self._model.training and self.trains

    @_stage("input_dist")
    def _take_ids(self, flight: StreamedFlight, calls: list[Call]) -> None:
        """The end of I."""
        with self._engine.on(self._dist):
            for call in calls:
                if call.name not in flight.given:
                    flight.given[call.name] = flight.inputs[call.name].wait()
            self._engine.record(flight.sent, self._dist)

    @_stage("prefetch")
    def _prefetch(self, flight: StreamedFlight) -> None:
        """R: rows of key-value tables, read ahead of L; what T updates meanwhile is read again by the tables."""
        calls = [call for call in self._calls if hasattr(call.module, "prefetch_rows")]
        if flight.failure is not None or not calls:
            return
        with self._noted(flight):
            self._take_ids(flight, calls)
            for call in calls:
                call.module.prefetch_rows(flight.contexts[call.name], flight.given[call.name])

    def _is_late(self, call: Call) -> bool:
        return self.trains and call.is_late(self._optimizer)

    def _wait_for_edits(self, stream: Any, calls: list[Call]) -> None:
        """Tables that somebody else wrote, on the caller's stream, since the last update."""
        if not self._engine.stands_for_device:
            return
        changed = any(self._versions.get(call.name) != versions_of(call.module) for call in calls)
        if changed:
            self._engine.record(self._edited, self._engine.current())
            self._engine.wait(stream, self._edited)

    @_stage("forward")
    def _forward_on_current(self, flight: StreamedFlight) -> tuple[torch.Tensor, Any]:
        """F, behind H and L; behind P by the caller's own stream, which P runs on."""
        engine, current = self._engine, self._engine.current()
        self._wait_for_batch()
        for event in (flight.moved, flight.looked_up):
            engine.wait(current, event)
        self._hand_over([flight.batch, flight.results, flight.prepared], current)
        with self._mode():
            return self._run_forward(flight)

    def _update(self, flight: StreamedFlight, losses: torch.Tensor) -> None:
        """B and T; autograd joins the lookup's stream into the current one at the end. Then replicas, if there are."""
        with self._engine.stage("backward"):
            self._backward(losses)
            self._update_tables(flight)
        self.sync_embeddings(self._model, self._dmp_collection_sync_interval_batches, flight.context)
        self._note_update()

    def _update_tables(self, flight: StreamedFlight) -> None:
        """T, where the backward did not reach the tables."""

    def _note_update(self) -> None:
        """T is done; edits after it are told by the tables' versions."""
        self._engine.record(self._updated, self._engine.current())
        if self._engine.stands_for_device:
            self._versions = {call.name: versions_of(call.module) for call in self._calls}

    @_stage("dense_optimizer")
    def _update_dense(self) -> None:
        """P. Gradients of what a lookup reads were made on the lookup's stream."""
        for call in self._calls:
            if self._is_late(call):
                self._hand_over([param.grad for param in call.module.parameters()], self._engine.current())
        self._reduce_dense()
        self._step_dense()
        self._engine.record(self._stepped, self._engine.current())

    def _following(self) -> StreamedFlight | None:
        return self._queue[1] if len(self._queue) > 1 else None

    def _exchange_following(self) -> None:
        following = self._following()
        if following is not None:
            self._exchange(following)

    @property
    def _count_to_begin(self) -> int:
        """Those ahead are pulled where their copies overlap."""
        return 1

    def _start_ahead(self) -> None:
        """S of the next batch, then H of the one behind it."""
        self._pull_until(min(self.ahead_count, self._count_before_forward))
        following = self._following()
        if following is not None:
            self._start(following)
        self._pull_until(self._count_before_forward)
