"""The training pipelines, overlapped: which stage is issued when. What a stage is, and its edges, say ``stages``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fastimpl.pipeline.flights import StreamedFlight, versions_of
from fastimpl.pipeline.stages import Streamed
from twinproof.pipeline import schedules
from twinproof.pipeline.rewrite import Call
from twinproof.pipeline.schedules import OneStale
from twinproof.pipeline.schedules_arguments import (
    BaseArguments,
    EvalArguments,
    EvalFusedArguments,
    FusedArguments,
    PrefetchArguments,
    SparseDistArguments,
)
from twinproof.pipeline.schedules_base import In, Out
from twinproof.pipeline.schedules_stages import LookupStages

__all__ = [
    "EvalPipelineFusedSparseDist",
    "EvalPipelineSparseDist",
    "PrefetchTrainPipelineSparseDist",
    "TrainPipelineBase",
    "TrainPipelineFusedSparseDist",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
]


class _Exact(Streamed[In, Out]):
    """Base and SparseDist: the lookup belongs to the forward."""

    sends_ahead = False

    def _begin(self, flight: StreamedFlight) -> None:
        if self.sends_ahead:
            self._exchange(flight)
            self._start_ahead()
        else:
            self._pull_until(self._count_before_forward)

    def _step(self, flight: StreamedFlight) -> Any:
        training = self._model.training and self.trains
        if training:
            self._optimizer.zero_grad()
        self._look_up_on(self._engine.current(), flight, self._calls)
        if flight.failure is not None:
            raise flight.failure
        losses, output = self._forward_on_current(flight)
        self._pull_behind_forward()
        self._behind_forward()
        if training:
            self._update(flight, losses)
            self._update_dense()
        return output

    def _behind_forward(self) -> None:
        """The next batch's ids travel while this one's backward runs."""
        if self.sends_ahead:
            self._exchange_following()


class _NoGradient(Streamed[In, Out]):
    """Evaluation, whatever the model's mode."""

    trains = False

    @contextmanager
    def _mode(self) -> Iterator[None]:
        with torch.no_grad():
            yield


class TrainPipelineBase(BaseArguments[In, Out], _Exact[In, Out]):
    __doc__ = schedules.TrainPipelineBase.__doc__

    ahead_count = 1


class TrainPipelineSparseDist(SparseDistArguments[In, Out], _Exact[In, Out]):
    __doc__ = schedules.TrainPipelineSparseDist.__doc__

    ahead_count = 2
    sends_ahead = True


class PrefetchTrainPipelineSparseDist(PrefetchArguments[In, Out], _Exact[In, Out]):
    __doc__ = schedules.PrefetchTrainPipelineSparseDist.__doc__

    ahead_count = 2
    sends_ahead = True

    def _begin(self, flight: StreamedFlight) -> None:
        super()._begin(flight)
        self._exchange_following()

    def _behind_forward(self) -> None:
        following = self._following()
        if following is not None:
            self._prefetch(following)


class EvalPipelineSparseDist(EvalArguments[In, Out], _NoGradient[In, Out], _Exact[In, Out]):
    __doc__ = schedules.EvalPipelineSparseDist.__doc__

    ahead_count = 2
    sends_ahead = True


class _LooksUp(LookupStages[In, Out], Streamed[In, Out]):
    """The lookup is issued before the forward, and perhaps before the step that it belongs to."""

    # Whether a lookup that is issued now may be overtaken by an update.
    _is_early = False

    def wait_embedding_lookup(self) -> None:
        """The caller's stream runs behind the current batch's lookups."""
        if self._queue:
            self._engine.wait(self._engine.current(), self._queue[0].looked_up)

    def _stream(self) -> Any:
        return self._lookup_stream

    def _missing(self, flight: StreamedFlight) -> list[Call]:
        missing = [call for call in self._calls if call.name not in flight.results]
        return [call for call in missing if self._may_hoist(call)] if self._is_early else missing

    def _look_up_missing(self, flight: StreamedFlight) -> None:
        self._look_up_on(self._stream(), flight, self._missing(flight))

    def _look_up_early(self, flight: StreamedFlight) -> None:
        if flight.failure is None and self._missing(flight):
            self.start_embedding_lookup(flight.batch, flight.context)

    def _hoist(self, flight: StreamedFlight) -> None:
        """Look up in the step before; what may be told to be outdated by its next turn is known."""
        self._is_early = True
        try:
            self._look_up_early(flight)
        finally:
            self._is_early = False
        seen = [call for call in self._calls if call.name in flight.results]
        flight.seen = {call.name: versions_of(call.module) for call in seen}

    def _hold_edits(self, flight: StreamedFlight) -> None:
        """An edit on the caller's stream must not overtake the reads of a hoisted lookup."""
        self._engine.wait(self._engine.current(), flight.looked_up)

    def _forget_outdated(self, flight: StreamedFlight) -> None:
        """A hoisted lookup is done again where tables or the mode changed since, on every rank."""
        changed = flight.with_grad is not None and flight.with_grad != (self._model.training and self.trains)
        for call in self._calls:
            if call.name in flight.results:
                changed |= flight.seen.get(call.name) != versions_of(call.module)
        if not self._agree(int(not changed)):
            flight.results.clear()

    def _may_hoist(self, call: Call) -> bool:
        """What the optimizer updates is looked up behind it; rows of a store have no version to tell of edits."""
        stores = any(sharding.kind == "key_value" for sharding in getattr(call.module, "plan", ()))
        return not stores and not self._is_late(call)


class _Fused(_LooksUp[In, Out]):
    """Both Fused pipelines: streams, and the lookup at the beginning of the step."""

    ahead_count = 2
    # Whether a batch may have been looked up in the step before its own.
    _hoists = False

    def _make_lookup_stream(self) -> Any:
        return self._engine.stream("emb_lookup") if self._options.placed.stream == "new" else self._dist

    def _stream(self) -> Any:
        return self._engine.current() if self._options.placed.stream == "current" else self._lookup_stream

    def _begin(self, flight: StreamedFlight) -> None:
        self._exchange(flight)
        if self._hoists:
            self._forget_outdated(flight)
        with self._undone_on_error(flight):
            if not self._options.placed.after_dist:
                self._look_up_early(flight)
            self._start_ahead()
            self._look_up_early(flight)


class TrainPipelineFusedSparseDist(FusedArguments[In, Out], _Fused[In, Out]):
    __doc__ = schedules.TrainPipelineFusedSparseDist.__doc__

    @property
    def _hoists(self) -> bool:  # type: ignore[override]
        return self._options.placed.before_optimizer

    def _step(self, flight: StreamedFlight) -> Any:
        training = self._model.training
        if training:
            self._optimizer.zero_grad()
        self.wait_embedding_lookup()
        losses, output = self._forward_on_current(flight)
        self._pull_behind_forward()
        self._exchange_following()
        if not training:
            return output
        self._update(flight, losses)
        following = self._following()
        if self._hoists and following is not None:
            self._hoist(following)
        self._update_dense()
        if self._hoists and following is not None:
            # Behind the optimizer, which it may overlap.
            self._hold_edits(following)
        return output


class EvalPipelineFusedSparseDist(EvalFusedArguments[In, Out], _NoGradient[In, Out], _Fused[In, Out]):
    __doc__ = schedules.EvalPipelineFusedSparseDist.__doc__

    @property
    def _hoists(self) -> bool:  # type: ignore[override]
        return self._prefetches

    def _step(self, flight: StreamedFlight) -> Any:
        self.wait_embedding_lookup()
        _, output = self._forward_on_current(flight)
        self._pull_behind_forward()
        self._exchange_following()
        following = self._following()
        if self._hoists and following is not None:
            self._hoist(following)
            self._hold_edits(following)
        return output


class TrainPipelineSemiSync(OneStale[In, Out], _LooksUp[In, Out]):
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
        if flight.with_grad is not None:
            if flight.with_grad >= self._model.training:
                return
            flight.results.clear()
        self._exchange(flight)
        self._look_up_early(flight)

    def _step(self, flight: StreamedFlight) -> Any:
        training = self._model.training
        if training:
            self._optimizer.zero_grad()
            self._engine.wait(self._engine.current(), flight.looked_up)
            self._cut(flight)
        self.wait_embedding_lookup()
        losses, output = self._forward_on_current(flight)
        following = self._following()
        if following is not None:
            self._exchange(following)
            if self.is_semi_sync():
                self._prepare(following)
        if training:
            self._update(flight, losses)
            self._update_dense()
        return output

    def _update_tables(self, flight: StreamedFlight) -> None:
        """T, behind the next batch's lookup, which ran on the same stream."""
        self.embedding_backward(flight.context)
