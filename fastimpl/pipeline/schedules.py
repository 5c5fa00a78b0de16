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
from refimpl.pipeline.schedules import OneStale, Placement
from refimpl.pipeline.schedules_base import as_leaf

__all__ = [
    "EvalPipelineFusedSparseDist",
    "EvalPipelineSparseDist",
    "PrefetchTrainPipelineSparseDist",
    "TrainPipelineBase",
    "TrainPipelineFusedSparseDist",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
]


class _Exact(Streamed):
    """Base and SparseDist: the lookup belongs to the forward."""

    sends_ahead = False

    def _begin(self, flight: StreamedFlight) -> None:
        if self.sends_ahead:
            self._exchange(flight)
            self._start_ahead()
        else:
            self._pull_until(self.ahead_count + 1)

    def _step(self, flight: StreamedFlight) -> Any:
        training = self._model.training
        if training:
            self._optimizer.zero_grad()
        self._look_up_on(self._engine.current(), flight, self._calls)
        if flight.failure is not None:
            raise flight.failure
        loss, output = self._forward_on_current(flight)
        self._behind_forward()
        if training:
            self._backward(loss)
            self._update_dense()
        return output

    def _behind_forward(self) -> None:
        """The next batch's ids travel while this one's backward runs."""
        if self.sends_ahead:
            self._exchange_following()


class TrainPipelineBase(_Exact):
    __doc__ = schedules.TrainPipelineBase.__doc__

    ahead_count = 1


class TrainPipelineSparseDist(_Exact):
    __doc__ = schedules.TrainPipelineSparseDist.__doc__

    ahead_count = 2
    sends_ahead = True


class PrefetchTrainPipelineSparseDist(TrainPipelineSparseDist):
    __doc__ = schedules.PrefetchTrainPipelineSparseDist.__doc__

    def _begin(self, flight: StreamedFlight) -> None:
        super()._begin(flight)
        self._exchange_following()

    def _behind_forward(self) -> None:
        following = self._following()
        if following is not None:
            self._prefetch(following)


class TrainPipelineFusedSparseDist(Placement, Streamed):
    __doc__ = schedules.TrainPipelineFusedSparseDist.__doc__

    ahead_count = 2

    def _make_lookup_stream(self) -> Any:
        return self._engine.stream("emb_lookup") if self._chosen == "new" else self._dist

    def _stream(self) -> Any:
        return self._engine.current() if self._chosen == "current" else self._lookup_stream

    def _begin(self, flight: StreamedFlight) -> None:
        if self._hoists:
            self._forget_outdated(flight)
        with self._undone_on_error(flight):
            if not self._after_dist:
                self._look_up_early(flight)
            self._start_ahead()
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
        self._exchange_following()
        if not training:
            return output
        self._backward(loss)
        following = self._following()
        if self._hoists and following is not None:
            hoisted = [call for call in self._calls if self._may_hoist(call)]
            self._look_up_on(self._stream(), following, hoisted)
            following.seen = {call.name: versions_of(call.module) for call in hoisted}
        self._update_dense()
        if self._hoists and following is not None:
            # Behind the optimizer, which it may overlap; an edit on the caller's stream must not overtake its reads.
            self._engine.wait(self._engine.current(), following.looked_up)
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
        self._exchange_following()
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
        self._exchange_following()
        return output


class TrainPipelineSemiSync(OneStale, Streamed):
    __doc__ = schedules.TrainPipelineSemiSync.__doc__

    ahead_count = 3

    def _make_lookup_stream(self) -> Any:
        return self._engine.stream("emb_lookup")

    def _begin(self, flight: StreamedFlight) -> None:
        with self._undone_on_error(flight):
            self._prepare(flight)
            self._start_ahead()

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
            with self._engine.stage("backward"):
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
        self._note_update()
