"""The training pipelines as plain loops: what each schedule computes, and nothing of how it overlaps.

Exact ones (Base, SparseDist, FusedSparseDist and their evaluations) are one loop; they differ in how many batches they
hold ahead. SemiSync looks a batch up before the update of the one before it.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from twinproof.errors import ConfigError
from twinproof.pipeline.schedules_arguments import (
    BaseArguments,
    EvalArguments,
    EvalFusedArguments,
    FusedArguments,
    PrefetchArguments,
    SemiSyncArguments,
    SparseDistArguments,
)
from twinproof.pipeline.schedules_base import In, Out, PipelineBase
from twinproof.pipeline.schedules_flights import Flight, cut_off, move_batch
from twinproof.pipeline.schedules_stages import LookupStages

__all__ = [
    "EvalPipelineFusedSparseDist",
    "EvalPipelineSparseDist",
    "OneStale",
    "PrefetchTrainPipelineSparseDist",
    "TrainPipelineBase",
    "TrainPipelineFusedSparseDist",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
]

logger = logging.getLogger("twinproof.pipeline")


class OneStale(SemiSyncArguments[In, Out]):
    """What both SemiSync pipelines share: when they are stale, the cut lookups, and the dense step they mean."""

    def is_semi_sync(self) -> bool:
        """Whether the next batch is looked up before this one's update."""
        return len(self._queue) > 0 and self.processed_count >= self._start_batch

    def attach(self, model: torch.nn.Module | None = None, sparse_dist: bool = True) -> None:
        """As ``PipelineBase.attach``."""
        super().attach(model, sparse_dist)
        stale = [call.name for call in self._calls if call.is_late(self._optimizer)]
        if stale:
            logger.warning("parameters of the optimizer are read one update stale in %s", stale)

    def embedding_backward(self, context: Any) -> None:
        """The tables' update, from the gradients that the forward's copies of the lookups have got."""
        for looked_up, leaf in self._found(context).pairs:
            if leaf.grad is not None:
                looked_up.backward(leaf.grad)

    def _cut(self, flight: Flight) -> None:
        """The forward sees the lookups cut off from their tables."""
        for call in self._calls:
            flight.results[call.name] = cut_off(flight.results[call.name], flight.pairs)

    def _step_dense(self) -> None:
        """One optimizer step, with the gradients of the step before if they are stashed; the first has none."""
        if not self._stashes or self.processed_count < self._start_batch:
            self._optimizer_step()
            return
        given, self._stash = self._stash, {}
        for param in (param for group in self._optimizer.param_groups for param in group["params"]):
            self._stash[param], param.grad = param.grad, None if given is None else given.get(param)
        if given is not None:
            self._optimizer_step()


class _Loop(PipelineBase[In, Out]):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self._engine is not None:
            self.detach()
            raise ConfigError("plain loops have no streams", got=type(self._engine).__name__, where="engine")

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=True)

    def _flight_of(self, batch: Any) -> Flight:
        return Flight(move_batch(batch, self._moved, self._device))

    def _arrived(self, batch: Any) -> Flight:
        return Flight(batch)

    @property
    def _count_to_begin(self) -> int:
        return self._count_before_forward

    def _update(self, flight: Flight, losses: torch.Tensor) -> None:
        """Backward with the tables' update, replicas, dense update."""
        self._backward(losses)
        self._update_tables(flight)
        self.sync_embeddings(self._model, self._dmp_collection_sync_interval_batches, flight.context)
        self._reduce_dense()
        self._step_dense()

    def _update_tables(self, flight: Flight) -> None:
        """Behind a backward that did not reach them."""


class _Exact(_Loop[In, Out]):
    """One batch after the other: ids, rows, forward, backward with the tables' update, dense update."""

    def _step(self, flight: Flight) -> Any:
        training = self._model.training and self.trains
        if training:
            self._optimizer.zero_grad()
        with torch.set_grad_enabled(training and torch.is_grad_enabled()):
            self._exchange(flight)
            if flight.failure is not None:
                raise flight.failure
            self._look_up_now(flight)
            self._wait_for_batch()
            losses, output = self._run_forward(flight)
        self._pull_behind_forward()
        if training:
            self._update(flight, losses)
        return output

    def _look_up_now(self, flight: Flight) -> None:
        self._look_up(flight)


class _LooksUp(LookupStages[In, Out], _Loop[In, Out]):
    """The lookup is a stage that a subclass may override."""

    def _look_up_now(self, flight: Flight) -> None:
        self.start_embedding_lookup(flight.batch, flight.context)
        self.wait_embedding_lookup()

    def _look_up_missing(self, flight: Flight) -> None:
        self._look_up(flight)


class TrainPipelineBase(BaseArguments[In, Out], _Exact[In, Out]):
    __doc__ = f"""Nothing overlaps but the copy of the next batch. {PipelineBase.__doc__}"""

    ahead_count = 1


class TrainPipelineSparseDist(SparseDistArguments[In, Out], _Exact[In, Out]):
    __doc__ = f"""The exchange of ids overlaps the step before. {PipelineBase.__doc__}"""

    ahead_count = 2


class PrefetchTrainPipelineSparseDist(PrefetchArguments[In, Out], _Exact[In, Out]):
    __doc__ = f"""As ``TrainPipelineSparseDist``, with the rows of key-value tables read while the step before runs.

    torchrec's prefetches into a cache on the device; rows that the step before updates are read again here, so that
    nothing is stale. {PipelineBase.__doc__}"""

    ahead_count = 2


class TrainPipelineFusedSparseDist(FusedArguments[In, Out], _LooksUp[In, Out], _Exact[In, Out]):
    __doc__ = f"""The lookup, too, overlaps the dense optimizer of the step before (torchrec PR 2916).

    Args of its own, which move work and never change a result:
        emb_lookup_stream: "data_dist", "new" or "current". ``use_emb_lookup_stream`` is the PR's name for "new".
        embedding_lookup_after_data_dist: look up behind the start of the next batch's exchange.
        embedding_lookup_before_optimizer: look the next batch up before the dense optimizer; modules whose parameters
            the optimizer updates are looked up behind it. ``embedding_lookup_after_opt=False`` is the PR's name.
        defer_dp_lookup: what the optimizer updates is always looked up behind it; both values are the same here.
    {PipelineBase.__doc__}"""

    ahead_count = 2


class EvalPipelineSparseDist(EvalArguments[In, Out], _Exact[In, Out]):
    __doc__ = f"""Forward only, without gradient, whatever the model's mode. {PipelineBase.__doc__}"""

    ahead_count = 2
    trains = False


class EvalPipelineFusedSparseDist(EvalFusedArguments[In, Out], _LooksUp[In, Out], _Exact[In, Out]):
    __doc__ = f"""As ``EvalPipelineSparseDist``, with the lookup issued early.

    Takes the arguments of ``TrainPipelineFusedSparseDist``, but for those about the optimizer, and
        enable_embedding_lookup_prefetch: look the next batch up behind this one's forward, which may overlap it.
    {PipelineBase.__doc__}"""

    ahead_count = 2
    trains = False


class TrainPipelineSemiSync(OneStale[In, Out], _LooksUp[In, Out]):
    __doc__ = f"""From ``start_batch`` on, a batch is looked up before the update of the one before it.

    What a lookup reads is one update stale then: tables, and whatever of data-parallel tables and feature processors
    the optimizer updates. The rest of the dense part is not, and before ``start_batch`` every bit is the exact loop's.

    Args of its own:
        stash_gradients: the dense part, too, steps with the gradients of the step before; the first such step does not
            step, and the last gradients are never applied.
        strict: refuse an optimizer that updates what a lookup reads, rather than say so in the log.
    {PipelineBase.__doc__}"""

    ahead_count = 3

    def _step(self, flight: Flight) -> Any:
        self._prepare(flight)
        if flight.failure is not None:
            raise flight.failure
        training = self._model.training
        if training:
            self._optimizer.zero_grad()
            self._cut(flight)
        with torch.set_grad_enabled(training and torch.is_grad_enabled()):
            self._wait_for_batch()
            losses, output = self._run_forward(flight)
        following = self._queue[1] if len(self._queue) > 1 else None
        if following is not None and self.is_semi_sync():
            self._prepare(following)
        if training:
            self._update(flight, losses)
        return output

    def _update_tables(self, flight: Flight) -> None:
        self.embedding_backward(flight.context)

    def _prepare(self, flight: Flight) -> None:
        """Look a batch up, unless it was; what was looked up in evaluation has no way back, and tables are the same."""
        if flight.with_grad is not None:
            if flight.with_grad >= self._model.training:
                return
            flight.forget()
        with torch.set_grad_enabled(self._model.training and torch.is_grad_enabled()):
            self._exchange(flight)
            if flight.failure is None:
                self._look_up_now(flight)
                flight.with_grad = self._model.training
