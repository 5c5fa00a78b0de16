"""The training pipelines as plain loops: what each schedule computes, and nothing of how it overlaps.

Exact ones (Base, SparseDist, FusedSparseDist and their evaluations) are one loop; they differ in how many batches they
hold ahead. SemiSync looks a batch up before the update of the one before it.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from refimpl.errors import ConfigError
from refimpl.pipeline.rewrite import Call
from refimpl.pipeline.schedules_base import Flight, PipelineBase, as_leaf, move_batch

__all__ = [
    "EvalPipelineFusedSparseDist",
    "EvalPipelineSparseDist",
    "OneStale",
    "Placement",
    "PrefetchTrainPipelineSparseDist",
    "TrainPipelineBase",
    "TrainPipelineFusedSparseDist",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
]

logger = logging.getLogger("refimpl.pipeline")

LOOKUP_STREAMS = ("data_dist", "new", "current")


def check_placement(
    emb_lookup_stream: str,
    use_emb_lookup_stream: bool | None,
    after_dist: bool,
    before_optimizer: bool,
    after_opt: bool,
) -> str:
    """The lookup stream that is meant; the seed's two names are taken too. Raises ConfigError for what contradicts."""
    if emb_lookup_stream not in LOOKUP_STREAMS:
        raise ConfigError("not a lookup stream", got=emb_lookup_stream, expected=LOOKUP_STREAMS)
    if before_optimizer and (after_dist or after_opt):
        placements = {
            "embedding_lookup_before_optimizer": before_optimizer,
            "embedding_lookup_after_data_dist": after_dist,
            "embedding_lookup_after_opt": after_opt,
        }
        raise ConfigError("placements of the lookup that contradict", got=placements)
    if use_emb_lookup_stream is None:
        return emb_lookup_stream
    return "new" if use_emb_lookup_stream else "data_dist"


class Placement:
    """Where a Fused pipeline looks up: options of both implementations, which move work and never change a result."""

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
        self._chosen = check_placement(
            emb_lookup_stream,
            use_emb_lookup_stream,
            embedding_lookup_after_data_dist,
            embedding_lookup_before_optimizer,
            embedding_lookup_after_opt,
        )
        self._after_dist, self._hoists = embedding_lookup_after_data_dist, embedding_lookup_before_optimizer
        super().__init__(*args, **options)


class OneStale:
    """Options of both SemiSync pipelines, and the dense step they mean."""

    _calls: list[Call]
    _optimizer: torch.optim.Optimizer
    processed_count: int

    def __init__(
        self,
        *args: Any,
        start_batch: int = 900,
        stash_gradients: bool = False,
        strict: bool = False,
        **options: Any,
    ) -> None:
        self._start_batch, self._stashes, self._strict = start_batch, stash_gradients, strict
        self._stash: dict[torch.Tensor, torch.Tensor | None] | None = None
        super().__init__(*args, **options)

    def attach(self, model: torch.nn.Module | None = None) -> None:
        """As ``PipelineBase.attach``. Raises ConfigError if ``strict`` and the optimizer updates what lookups read."""
        super().attach(model)  # type: ignore[misc]
        stale = [call.name for call in self._calls if call.is_late(self._optimizer)]
        if stale and self._strict:
            self.detach()  # type: ignore[attr-defined]
            raise ConfigError("parameters of the optimizer would be read one update stale", got=stale, where="strict")
        if stale:
            logger.warning("parameters of the optimizer are read one update stale in %s", stale)

    def _step_dense(self) -> None:
        """One optimizer step, with the gradients of the step before if they are stashed; the first has none."""
        if not self._stashes or self.processed_count < self._start_batch:
            self._optimizer.step()
            return
        given, self._stash = self._stash, {}
        for param in (param for group in self._optimizer.param_groups for param in group["params"]):
            self._stash[param], param.grad = param.grad, None if given is None else given.get(param)
        if given is not None:
            self._optimizer.step()


class _Loop(PipelineBase[Flight]):
    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=True)

    def _flight_of(self, batch: Any) -> Flight:
        return Flight(move_batch(batch, self._moved, self._device))


class _Exact(_Loop):
    """One batch after the other: ids, rows, forward, backward with the tables' update, dense update."""

    def _step(self, flight: Flight) -> Any:
        training = self._model.training
        if training:
            self._optimizer.zero_grad()
        with torch.set_grad_enabled(training and torch.is_grad_enabled()):
            self._send(flight)
            self._receive(flight)
            self._look_up(flight)
            loss, output = self._run_forward(flight)
        if training:
            loss.backward()  # type: ignore[no-untyped-call]
            self._step_dense()
        return output


class TrainPipelineBase(_Exact):
    __doc__ = f"""Nothing overlaps but the copy of the next batch. {PipelineBase.__doc__}"""

    ahead_count = 1


class TrainPipelineSparseDist(_Exact):
    __doc__ = f"""The exchange of ids overlaps the step before. {PipelineBase.__doc__}"""

    ahead_count = 2


class PrefetchTrainPipelineSparseDist(_Exact):
    __doc__ = f"""As ``TrainPipelineSparseDist``, with the rows of key-value tables read while the step before runs.

    torchrec's prefetches into a cache on the device; rows that the step before updates are read again here, so that
    nothing is stale. {PipelineBase.__doc__}"""

    ahead_count = 2


class TrainPipelineFusedSparseDist(Placement, _Exact):
    __doc__ = f"""The lookup, too, overlaps the dense optimizer of the step before (torchrec PR 2916).

    Args of its own, which move work and never change a result:
        emb_lookup_stream: "data_dist", "new" or "current". ``use_emb_lookup_stream`` is the seed's name for "new".
        embedding_lookup_after_data_dist: look up behind the start of the next batch's exchange.
        embedding_lookup_before_optimizer: look the next batch up before the dense optimizer; modules whose parameters
            the optimizer updates are looked up behind it. ``embedding_lookup_after_opt`` is the seed's opposite of it.
    {PipelineBase.__doc__}"""

    ahead_count = 2


class EvalPipelineSparseDist(_Exact):
    __doc__ = f"""Forward only, without gradient, whatever the model's mode. {PipelineBase.__doc__}"""

    ahead_count = 2

    def _step(self, flight: Flight) -> Any:
        with torch.no_grad():
            self._send(flight)
            self._receive(flight)
            self._look_up(flight)
            return self._run_forward(flight)[1]


class EvalPipelineFusedSparseDist(EvalPipelineSparseDist):
    __doc__ = f"""As ``EvalPipelineSparseDist``, with the lookup issued early. {PipelineBase.__doc__}"""


class TrainPipelineSemiSync(OneStale, _Loop):
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
        training = self._model.training
        looked_up = dict(flight.results)
        if training:
            self._optimizer.zero_grad()
            flight.results = {name: as_leaf(result) for name, result in looked_up.items()}
            leaves = dict(flight.results)
        with torch.set_grad_enabled(training and torch.is_grad_enabled()):
            loss, output = self._run_forward(flight)
        following = self._queue[1] if len(self._queue) > 1 else None
        if following is not None and self.processed_count >= self._start_batch:
            self._prepare(following)
        if training:
            loss.backward()  # type: ignore[no-untyped-call]
            self._update_tables(looked_up, leaves)
            self._step_dense()
        return output

    def _prepare(self, flight: Flight) -> None:
        """Look a batch up, unless it was; what was looked up in evaluation has no way back, and tables are the same."""
        if flight.with_grad is None or flight.with_grad < self._model.training:
            flight.with_grad = self._model.training
            with torch.set_grad_enabled(self._model.training and torch.is_grad_enabled()):
                self._send(flight)
                self._receive(flight)
                self._look_up(flight)

    def _update_tables(self, looked_up: dict[str, Any], leaves: dict[str, Any]) -> None:
        for name, result in looked_up.items():
            grad = leaves[name].values().grad
            if grad is not None:
                result.values().backward(grad)
