"""Faults that ``test_stages`` must notice."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from conformance.harness import fault, mutated, patched, swap


@fault(kills="PIPE-311", at="twinproof.pipeline.driver:Pipeline._receive")
def sent_again(original: Any, schedule: Any, batch: Any) -> None:
    """What was sent by hand is sent again."""
    original(schedule, batch)
    batch.was_sent = batch.was_received = False


@fault(kills="PIPE-300", at="twinproof.pipeline.driver:Pipeline.run_forward")
def losses_always(original: Any, schedule: Any, batch: Any) -> Any:
    """Losses are looked at in evaluation."""
    losses, output = original(schedule, batch)
    if losses is None:
        losses, output = torch.zeros(1), output + float("nan")
    return losses, output


@fault(kills="PIPE-301", at="twinproof.pipeline.driver:cut_off")
def lazy_results_lost(original: Any, result: Any, pairs: Any) -> Any:
    """Gradients of lazy results never reach the tables."""
    found = original(result, pairs)
    if hasattr(type(result), "wait"):
        # What the lazy result's columns would give the tables is lost.
        pairs.clear()
    return found


def _no_subscript(kind: type, item: Any) -> Any:
    raise TypeError("not a generic class")


not_generic = patched(
    "Pipelines are not generic.",
    swap("twinproof.pipeline.driver:Pipeline.__class_getitem__", classmethod(_no_subscript)),
    kills="PIPE-302",
)


@fault(kills="PIPE-303", at="twinproof.pipeline.driver:Pipeline.exchange")
def stages_twice(original: Any, schedule: Any, batch: Any) -> None:
    """A stage is called twice."""
    original(schedule, batch)
    if batch.failure is None:
        schedule.wait_sparse_data_dist(batch.context)


@fault(kills="PIPE-304", at="twinproof.pipeline.driver:Pipeline.copy_batch_to_gpu")
def own_pulls_uncounted(original: Any, schedule: Any, loader: Any) -> Any:
    """Own pulls do not count."""
    before = schedule.pulled_count
    found = original(schedule, loader)
    schedule.pulled_count = min(schedule.pulled_count, before)
    return found


@fault(kills="PIPE-305", at="twinproof.pipeline.driver:check_overrides")
def overrides_not_checked(original: Any, kind: Any) -> None:
    """Methods that nobody calls may be overridden."""


@fault(kills="PIPE-306", at="twinproof.pipeline.torchrec_models:QueueView.__delitem__")
def queues_apart(original: Any, view: Any, index: Any) -> None:
    """Removing a batch and its context removes two batches."""
    view._left.clear()
    with contextlib.suppress(IndexError):
        original(view, index)


@fault(kills="PIPE-406", at="twinproof.pipeline.torchrec_models:QueueView._items")
def next_in_its_place(original: Any, view: Any) -> Any:
    """Behind the removal of a batch, what stands in its context's place is the context of the next."""
    return list(view._queue)


left_by_reset = patched(
    "reset() keeps what was taken out of one queue only.",
    mutated("twinproof.pipeline.torchrec_models:QueueView.clear", "left.clear()", "pass"),
    kills="PIPE-406",
)


@fault(kills="PIPE-307", at="twinproof.pipeline.driver:Pipeline.attach")
def sent_when_attached(original: Any, schedule: Any, model: Any = None, sparse_dist: bool = True) -> None:
    """attach() always sends."""
    original(schedule, model, True)


contexts_by_equality = patched(
    "A batch is found by a context that equals its own.",
    mutated("twinproof.pipeline.driver:Pipeline._found", "given_context is context", "given_context == context"),
    kills="PIPE-480",
)
averages_counted_through_a_reset = patched(
    "Averages of replicas are counted by all steps, and not by batches since reset().",
    mutated(
        "twinproof.pipeline.driver:Pipeline.sync_embeddings",
        "counted.index % interval_batches",
        "self.processed_count % interval_batches",
    ),
    kills="PIPE-481",
)
evaluation_never_late = patched(
    "The evaluation of Fused takes enqueue_batch_after_forward and ignores it.",
    mutated(
        "twinproof.pipeline.driver:EvalPipelineFusedSparseDist.__init__",
        "enable_inplace_copy_batch,\n        enqueue_batch_after_forward,",
        "enable_inplace_copy_batch,\n        False,",
    ),
    kills="PIPE-482",
)


prefetch_never_in_place = patched(
    "The prefetch pipeline takes enable_inplace_copy_batch and ignores it.",
    mutated(
        "twinproof.pipeline.driver:PrefetchTrainPipelineSparseDist.__init__",
        "copies_in_place=enable_inplace_copy_batch",
        "copies_in_place=False",
    ),
    kills="PIPE-484",
)
evaluation_always_whole = patched(
    "The evaluation takes execute_all_batches and ignores it.",
    mutated(
        "twinproof.pipeline.driver:EvalPipelineSparseDist.__init__",
        "options = Options(\n        execute_all_batches,",
        "options = Options(\n        True,",
    ),
    kills="PIPE-484",
)
appended_without_a_number = patched(
    "Batches that are appended do not count.",
    mutated("twinproof.pipeline.driver:Pipeline._adopted", "self._next_index += 1", "pass"),
    kills="PIPE-485",
)
copies_lose_their_forward = patched(
    "The copy of a driven module has its class's forward, though the module has one of its own.",
    mutated("twinproof.pipeline.stages:Prepared.__reduce__", "self.replaced is not None", "False"),
    kills="PIPE-492",
)
first_of_what_is_left = patched(
    "popleft takes what the other queue has lost for the first.",
    mutated(
        "twinproof.pipeline.torchrec_models:QueueView.popleft",
        "found = self[0]",
        "if self._left:\n        return getattr(self._left.pop(0), self._attribute)\n    found = self[0]",
    ),
    kills="PIPE-545",
)
what_is_left_first = patched(
    "What the other queue has lost stands in front, wherever it was.",
    mutated(
        "twinproof.pipeline.torchrec_models:QueueView._items",
        "sorted([*self._left, *self._queue], key=lambda batch: batch.index)",
        "[*self._left, *self._queue]",
    ),
    kills="PIPE-545",
)

calls_behind_late_ones_run_ahead = patched(
    "A call that could run ahead does, behind one of the same module that cannot.",
    mutated("twinproof.pipeline.stages:_calls_in", " or (name in left and not why)", ""),
    kills="PIPE-557",
)
late_calls_are_no_second_ones = patched(
    "A call that cannot run ahead is not counted behind one that does.",
    mutated("twinproof.pipeline.stages:_calls_in", "if name in calls or", "if name in calls and not why or"),
    kills="PIPE-557",
)
