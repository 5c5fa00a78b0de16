"""The training pipelines, overlapped: which stage is issued when. What a stage is, and its edges, say ``stages``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fastimpl.pipeline.flights import StreamedFlight, versions_of
from fastimpl.pipeline.stages import Streamed
from refimpl.pipeline import schedules
from refimpl.pipeline.rewrite import Call
from refimpl.pipeline.schedules import check_placement
from refimpl.pipeline.schedules_base import as_leaf

__all__ = [
    "EvalPipelineFusedSparseDist",
    "EvalPipelineSparseDist",
    "TrainPipelineBase",
    "TrainPipelineFusedSparseDist",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
]


class _Exact(Streamed):
    """Base and SparseDist: the lookup belongs to the forward."""

    sends_ahead = False

    def _fill(self) -> None:
        while not self._queue and self._pull():
            pass

    def _begin(self, flight: StreamedFlight) -> None:
        if self.sends_ahead:
            self._exchange(flight)
            while len(self._queue) < self.ahead_count and self._pull():
                pass
            following = self._following()
            if following is not None:
                self._start(following)
        while len(self._queue) <= self.ahead_count and self._pull():
            pass

    def _step(self, flight: StreamedFlight) -> Any:
        training = self._model.training
        if training:
            self._optimizer.zero_grad()
        self._look_up_on(self._engine.current(), flight, self._calls)
        if flight.failure is not None:
            raise flight.failure
        loss, output = self._forward_on_current(flight)
        following = self._following()
        if self.sends_ahead and following is not None:
            self._exchange(following)
        if training:
            self._backward(loss)
            self._update_dense()
        return output


class TrainPipelineBase(_Exact):
    __doc__ = schedules.TrainPipelineBase.__doc__

    ahead_count = 1


class TrainPipelineSparseDist(_Exact):
    __doc__ = schedules.TrainPipelineSparseDist.__doc__

    ahead_count = 2
    sends_ahead = True


class TrainPipelineFusedSparseDist(Streamed):
    __doc__ = schedules.TrainPipelineFusedSparseDist.__doc__

    ahead_count = 2

    def __init__(
        self,
        *args: Any,
        emb_lookup_stream: str = "data_dist",
        embedding_lookup_after_data_dist: bool = False,
        embedding_lookup_before_optimizer: bool = False,
        use_emb_lookup_stream: bool | None = None,
        embedding_lookup_after_opt: bool = False,
        **options: Any,
    ) -> None:
        chosen = check_placement(
            emb_lookup_stream,
            use_emb_lookup_stream,
            embedding_lookup_after_data_dist,
            embedding_lookup_before_optimizer,
            embedding_lookup_after_opt,
        )
        super().__init__(*args, **options)
        self._after_dist, self._hoists = embedding_lookup_after_data_dist, embedding_lookup_before_optimizer
        self._chosen = chosen
        if chosen == "new":
            self._lookup_stream = self._engine.stream("emb_lookup")

    def _stream(self) -> Any:
        return self._engine.current() if self._chosen == "current" else self._lookup_stream

    def _fill(self) -> None:
        while not self._queue and self._pull():
            pass

    def _begin(self, flight: StreamedFlight) -> None:
        if self._hoists:
            self._forget_outdated(flight)
        with self._undone_on_error(flight):
            if not self._after_dist:
                self._look_up_early(flight)
            while len(self._queue) < self.ahead_count and self._pull():
                pass
            following = self._following()
            if following is not None:
                self._start(following)
            while len(self._queue) <= self.ahead_count and self._pull():
                pass
            self._look_up_early(flight)

    def _look_up_early(self, flight: StreamedFlight) -> None:
        missing = [call for call in self._calls if call.name not in flight.results]
        self._look_up_on(self._stream(), flight, missing)

    def _forget_outdated(self, flight: StreamedFlight) -> None:
        """A lookup hoisted before the optimizer is done again where tables or the mode changed since, on every rank."""
        changed = flight.with_grad is not None and flight.with_grad != self._model.training
        for call in self._calls:
            if call.name in flight.results:
                changed |= flight.seen[call.name] != versions_of(call.module)
        if not self._agree(int(not changed)):
            flight.results.clear()

    def _step(self, flight: StreamedFlight) -> Any:
        training = self._model.training
        if training:
            self._optimizer.zero_grad()
        loss, output = self._forward_on_current(flight)
        following = self._following()
        if following is not None:
            self._exchange(following)
        if not training:
            return output
        self._backward(loss)
        if self._hoists and following is not None:
            self._look_up_on(self._stream(), following, [call for call in self._calls if self._may_hoist(call)])
        self._update_dense()
        return output

    def _may_hoist(self, call: Call) -> bool:
        """What the optimizer updates is looked up behind it; rows of a store have no version to tell of edits."""
        stores = any(sharding.kind == "key_value" for sharding in getattr(call.module, "plan", ()))
        return not stores and not self._is_late(call)


class EvalPipelineSparseDist(_Exact):
    __doc__ = schedules.EvalPipelineSparseDist.__doc__

    ahead_count = 2
    sends_ahead = True

    @contextmanager
    def _mode(self) -> Iterator[None]:
        with torch.no_grad():
            yield

    def _step(self, flight: StreamedFlight) -> Any:
        self._look_up_on(self._engine.current(), flight, self._calls)
        if flight.failure is not None:
            raise flight.failure
        _, output = self._forward_on_current(flight)
        following = self._following()
        if following is not None:
            self._exchange(following)
        return output


class EvalPipelineFusedSparseDist(EvalPipelineSparseDist):
    __doc__ = schedules.EvalPipelineFusedSparseDist.__doc__

    def _begin(self, flight: StreamedFlight) -> None:
        with self._undone_on_error(flight):
            if not flight.results:
                self._look_up_on(self._lookup_stream, flight, self._calls)
            super()._begin(flight)

    def _step(self, flight: StreamedFlight) -> Any:
        _, output = self._forward_on_current(flight)
        following = self._following()
        if following is not None:
            self._exchange(following)
        return output


class TrainPipelineSemiSync(Streamed):
    __doc__ = schedules.TrainPipelineSemiSync.__doc__

    ahead_count = 3

    def __init__(self, *args: Any, start_batch: int = 900, **options: Any) -> None:
        self._start_batch = start_batch
        super().__init__(*args, **options)
        self._lookup_stream = self._engine.stream("emb_lookup")

    def _fill(self) -> None:
        while not self._queue and self._pull():
            pass

    def _begin(self, flight: StreamedFlight) -> None:
        with self._undone_on_error(flight):
            self._prepare(flight)
            for _ in range(2):
                following = self._following()
                if following is not None:
                    self._start(following)
                while len(self._queue) <= self.ahead_count and self._pull():
                    pass

    def _prepare(self, flight: StreamedFlight) -> None:
        """Look a batch up, unless it was; what was looked up in evaluation has no way back, and tables are the same."""
        if flight.with_grad is None or flight.with_grad < self._model.training:
            self._look_up_on(self._lookup_stream, flight, self._calls)

    def _step(self, flight: StreamedFlight) -> Any:
        training, looked_up = self._model.training, dict(flight.results)
        if training:
            self._optimizer.zero_grad()
            self._engine.wait(self._engine.current(), flight.looked_up)
            flight.results = {name: as_leaf(result) for name, result in looked_up.items()}
        leaves = dict(flight.results)
        loss, output = self._forward_on_current(flight)
        following = self._following()
        if following is not None:
            self._exchange(following)
            if self.processed_count >= self._start_batch:
                self._prepare(following)
        if training:
            loss.backward()  # type: ignore[no-untyped-call]
            self._update_tables(looked_up, leaves)
            self._update_dense()
        return output

    def _update_tables(self, looked_up: dict[str, Any], leaves: dict[str, Any]) -> None:
        """T, behind the next batch's lookup, which ran on the same stream."""
        for name, result in looked_up.items():
            grad = leaves[name].values().grad
            if grad is not None:
                result.values().backward(grad)
        self._engine.record(self._updated, self._engine.current())
        self._versions = {call.name: versions_of(call.module) for call in self._calls}
