"""The training pipelines, overlapped: which stage is issued when. What a stage is, and its edges, say ``stages``.

H copies a batch to the device, S exchanges sizes and I ids, L looks up and O sends pooled columns, F and B are forward
and backward, T updates the tables inside of B, P is the dense optimizer. A batch is i; i+1 is the one behind it. What
is issued before ``p.take`` may raise a loader's error, which leaves every batch in its place.
"""

from __future__ import annotations

from typing import Any

from fastimpl.pipeline.stages import StreamedBatch, StreamedStages, undone_on_error, versions_of
from twinproof.pipeline import driver
from twinproof.pipeline.driver import In, LookupPipeline, Out, Pipeline
from twinproof.pipeline.stages import Call

__all__ = [
    "EvalPipelineFusedSparseDist",
    "EvalPipelineSparseDist",
    "PrefetchTrainPipelineSparseDist",
    "TrainPipelineBase",
    "TrainPipelineFusedSparseDist",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
]

AnyPipeline = Pipeline[Any, Any]
AnyLookups = LookupPipeline[Any, Any]


def base(p: AnyPipeline, _: StreamedStages, batch: StreamedBatch) -> Any:
    """Base: only copies overlap."""
    p.pull()  # H of i+1, under this step
    trains = p.take(batch)
    p.look_up(batch)  # S I L O of i
    p.raise_failure(batch)
    losses, output = p.run_forward(batch)  # F of i
    if trains:
        p.run_backward(batch, losses)  # B T of i
        p.run_optimizer()  # P of i
    return output


def sparse_dist(p: AnyPipeline, _: StreamedStages, batch: StreamedBatch) -> Any:
    """SparseDist and its evaluation: ids travel under the step before."""
    p.exchange(batch)  # S I of i, unless the step before did it
    start_ahead(p)  # S of i+1, H of i+2
    trains = p.take(batch)
    p.look_up(batch)  # L O of i
    p.raise_failure(batch)
    losses, output = p.run_forward(batch)  # F of i
    p.pull_behind_forward()
    p.exchange_following()  # I of i+1, under B
    if trains:
        p.run_backward(batch, losses)  # B T of i
        p.run_optimizer()  # P of i
    return output


def prefetch(p: AnyPipeline, s: StreamedStages, batch: StreamedBatch) -> Any:
    """Prefetch: rows of key-value tables, too, are read under the step before."""
    p.exchange(batch)  # S I of i, unless the step before did it
    start_ahead(p)  # S of i+1, H of i+2
    p.exchange_following()  # I of i+1
    trains = p.take(batch)
    p.look_up(batch)  # L O of i
    p.raise_failure(batch)
    losses, output = p.run_forward(batch)  # F of i
    p.pull_behind_forward()
    following = p.following()
    if following is not None:
        s.prefetch(p, following)  # the rows of i+1, under B
    if trains:
        p.run_backward(batch, losses)  # B T of i
        p.run_optimizer()  # P of i
    return output


def fused(p: AnyLookups, s: StreamedStages, batch: StreamedBatch) -> Any:
    """Fused: the lookup begins the step, under the end of the step before; or it was done before that step's P."""
    hoists = p.options.placed.before_optimizer
    trains = begin_with_lookup(p, s, batch, hoists=hoists)  # S I L O of i, S of i+1, H of i+2
    p.wait_embedding_lookup()
    losses, output = p.run_forward(batch)  # F of i
    p.pull_behind_forward()
    p.exchange_following()  # I of i+1, under B
    if not trains:
        return output
    p.run_backward(batch, losses)  # B T of i
    following = p.following()
    if hoists and following is not None:
        hoist(p, following)  # L O of i+1, under P
    p.run_optimizer()  # P of i
    if hoists and following is not None:
        # Edits on the caller's stream follow the lookup that they must not overtake.
        s.wait_for_lookup(following)
    return output


def fused_evaluation(p: driver.EvalPipelineFusedSparseDist[Any, Any], s: StreamedStages, batch: StreamedBatch) -> Any:
    """Evaluation of Fused: the next batch's lookup may overlap this one's forward."""
    begin_with_lookup(p, s, batch, hoists=p.prefetches)  # S I L O of i, S of i+1, H of i+2
    p.wait_embedding_lookup()
    _, output = p.run_forward(batch)  # F of i
    p.pull_behind_forward()
    p.exchange_following()  # I of i+1
    following = p.following()
    if p.prefetches and following is not None:
        hoist(p, following)  # L O of i+1, under F
        s.wait_for_lookup(following)
    return output


def semi_sync(p: driver.TrainPipelineSemiSync[Any, Any], s: StreamedStages, batch: StreamedBatch) -> Any:
    """SemiSync: the next batch's lookup runs under the forward and backward, and reads tables before T."""
    with undone_on_error(s, batch):
        look_up_once(p, batch)  # S I L O of i, unless the step before did it
        start_ahead(p)  # S of i+1, H of i+2 and i+3
        trains = p.take(batch)
    if trains:
        s.wait_for_lookup(batch)
        p.cut(batch)
    p.wait_embedding_lookup()
    losses, output = p.run_forward(batch)  # F of i
    following = p.following()
    if following is not None:
        p.exchange(following)  # I of i+1, under B
        if p.is_semi_sync():
            look_up_once(p, following)  # L O of i+1, under B
    if trains:
        p.run_backward(batch, losses)  # B of i, then T of i behind L of i+1
        p.run_optimizer()  # P of i
    elif following is not None:
        # No T of i brings the caller's stream behind L of i+1, which edits must not overtake.
        s.wait_for_lookup(following)
    return output


def start_ahead(p: AnyPipeline) -> None:
    """H and S of the next batch, then H of those behind it."""
    p.pull(p.ahead_count)
    following = p.following()
    if following is not None:
        p.start_exchange(following)
    p.pull()


def look_up_early(p: AnyLookups, batch: StreamedBatch, calls: list[Call]) -> None:
    """Issue L and O of those modules that were not looked up yet, ahead of what may raise a loader's error."""
    missing = {call.name for call in calls if call.name not in batch.results}
    if batch.failure is None and missing:
        batch.postponed = frozenset(call.name for call in p.calls) - missing
        try:
            p.look_up_ahead(batch)
        finally:
            batch.postponed = frozenset()


def look_up_once(p: driver.TrainPipelineSemiSync[Any, Any], batch: StreamedBatch) -> None:
    """S, I, L and O of a batch that was not looked up yet."""
    if p.needs_lookup(batch):
        p.exchange(batch)
        look_up_early(p, batch, p.calls)


def begin_with_lookup(p: AnyLookups, s: StreamedStages, batch: StreamedBatch, *, hoists: bool) -> bool:
    """The beginning of both Fused schedules, up to ``take``: L before or behind the start of the next exchange."""
    p.exchange(batch)
    if hoists:
        forget_outdated(p, batch)
    with undone_on_error(s, batch):
        if not p.options.placed.after_dist:
            look_up_early(p, batch, p.calls)
        start_ahead(p)
        look_up_early(p, batch, p.calls)
        return p.take(batch)


def may_hoist(p: AnyPipeline, call: Call) -> bool:
    """What the optimizer updates is looked up behind it; rows of a store have no version to tell of edits."""
    is_stored = any(sharding.rule.is_stored for sharding in getattr(call.module, "plan", ()))
    return not is_stored and not p.is_late(call)


def hoist(p: AnyLookups, batch: StreamedBatch) -> None:
    """Look up in the step before, and note what was read, to know at the batch's turn whether it is outdated."""
    look_up_early(p, batch, [call for call in p.calls if may_hoist(p, call)])
    batch.seen = {call.name: versions_of(call.module) for call in p.calls if call.name in batch.results}


def forget_outdated(p: AnyPipeline, batch: StreamedBatch) -> None:
    """A hoisted lookup is done again where tables or the mode changed since, on every rank."""
    changed = batch.with_grad is not None and batch.with_grad != p.is_training
    for call in p.calls:
        if call.name in batch.results:
            changed |= batch.seen.get(call.name) != versions_of(call.module)
    if not p.agree(int(not changed)):
        batch.results.clear()


class TrainPipelineBase(driver.TrainPipelineBase[In, Out], stages=StreamedStages, schedule=base): ...


class TrainPipelineSparseDist(driver.TrainPipelineSparseDist[In, Out], stages=StreamedStages, schedule=sparse_dist): ...


class PrefetchTrainPipelineSparseDist(
    driver.PrefetchTrainPipelineSparseDist[In, Out], stages=StreamedStages, schedule=prefetch
): ...


class TrainPipelineFusedSparseDist(
    driver.TrainPipelineFusedSparseDist[In, Out], stages=StreamedStages, schedule=fused
): ...


class TrainPipelineSemiSync(driver.TrainPipelineSemiSync[In, Out], stages=StreamedStages, schedule=semi_sync): ...


class EvalPipelineSparseDist(driver.EvalPipelineSparseDist[In, Out], stages=StreamedStages, schedule=sparse_dist): ...


class EvalPipelineFusedSparseDist(
    driver.EvalPipelineFusedSparseDist[In, Out], stages=StreamedStages, schedule=fused_evaluation
): ...
