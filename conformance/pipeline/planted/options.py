"""Faults that ``test_options`` must notice."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from conformance.harness import fault, mutated, patched, swap


def _never_late(schedule: Any) -> int:
    return int(schedule.ahead_count) + 1


never_behind_forward = patched(
    "enqueue_batch_after_forward is taken and ignored.",
    swap("twinproof.pipeline.driver:Pipeline._count_before_forward", property(_never_late)),
    kills="PIPE-284",
)


@fault(kills="PIPE-285", at="twinproof.pipeline.driver:Pipeline._create_context")
def context_type_ignored(original: Any, schedule: Any) -> None:
    """context_type is ignored."""
    schedule._next_index += 0


@fault(kills="PIPE-286", at="twinproof.pipeline.stages:Attachment.__init__")
def postproc_runs_twice(original: Any, attachment: Any, calls: Any, result_of: Any) -> None:
    """A module that ran ahead runs in the model again."""
    original(attachment, calls, result_of)
    for call in calls:
        for module in call.postprocs.values():
            module.__dict__.pop("forward", None)


@fault(kills="PIPE-287", at="twinproof.pipeline.driver:Pipeline.sync_embeddings")
def interval_ignored(original: Any, schedule: Any, model: Any, interval: Any, context: Any = None) -> None:
    """Replicas are averaged for each batch."""
    original(schedule, model, None if interval is None else 1, context)


@fault(kills="PIPE-288", at="fastimpl.pipeline.stages:StreamedStages.copy")
def never_in_place(original: Any, stages: Any, batch: Any) -> Any:
    """enable_inplace_copy_batch is taken and ignored."""
    options, stages._options = stages._options, dataclasses.replace(stages._options, copies_in_place=False)
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, stages, "_options", options)
        return original(stages, batch)


@fault(kills="PIPE-289", at="twinproof.pipeline.driver:EvalPipelineFusedSparseDist.__init__", of="fastimpl")
def evaluation_never_prefetches(original: Any, schedule: Any, *args: Any, **options: Any) -> None:
    """enable_embedding_lookup_prefetch is taken and ignored."""
    options.pop("enable_embedding_lookup_prefetch", None)
    original(schedule, *args, **options)


error_kept_by_reset = patched(
    "reset() keeps what a loader raised behind the last forward.",
    mutated(
        "twinproof.pipeline.driver:Pipeline.reset",
        "self._deferred.clear()",
        "pass",
    ),
    kills="PIPE-396",
)

counted_through_a_reset = patched(
    "reset() counts batches on.",
    mutated("twinproof.pipeline.driver:Pipeline.reset", "self._next_index = 0", "pass"),
    kills="PIPE-407",
)

forwards_of_others_dropped = patched(
    "detach() drops a forward that somebody put on a module.",
    mutated("twinproof.pipeline.stages:Attachment.close", "prepared.replaced is not None", "False"),
    kills="PIPE-398",
)
own_forward_ahead = patched(
    "What runs ahead is the forward of a module's class, whatever somebody put on the module.",
    mutated("twinproof.pipeline.stages:FromBatch._called", "if forward is None", "if True"),
    kills="PIPE-398",
)

let_go_while_copied = patched(
    "What a loader gave is let go while it is copied.",
    mutated(
        "fastimpl.pipeline.stages:StreamedStages._moved",
        "StreamedBatch(moved, batch, engine)",
        "StreamedBatch(moved, None, engine)",
    ),
    kills="PIPE-399",
)


made_elsewhere_not_waited_for = patched(
    "What a loader made on the device is read without a wait for whoever makes it.",
    mutated("fastimpl.pipeline.stages:StreamedStages._moved", "engine.wait(self._memcpy, made.moved)", "pass"),
    kills="PIPE-369",
)
jagged_asked_to_go = patched(
    "JaggedTensors and KeyedTensors are asked to go by themselves.",
    mutated("twinproof.pipeline.stages:move_batch", "isinstance(batch, (JaggedTensor, KeyedTensor))", "batch is None"),
    kills="PIPE-429",
)

twice_called_ahead = patched(
    "A module that is called twice runs ahead.",
    mutated("twinproof.pipeline.stages:_postprocs_of", "names.count(name) == 1", "names"),
    kills="PIPE-456",
)
forwards_put_meanwhile_dropped = patched(
    "detach() drops whatever forward it finds on a module.",
    mutated(
        "twinproof.pipeline.stages:Attachment.close",
        'if vars(module).get("forward") is prepared:',
        'if "forward" in vars(module):',
    ),
    kills=("PIPE-500", "PIPE-501"),
)
closed_forwards_say_nothing_prepared = patched(
    "What a pipeline put on a module is of no use after detach().",
    mutated("twinproof.pipeline.stages:Attachment.close", "prepared.close()", "pass"),
    kills="PIPE-500",
)
contexts_demanded = patched(
    "Replicas are averaged with a context alone.",
    mutated(
        "twinproof.pipeline.driver:Pipeline.sync_embeddings",
        "counted = self._current if context is None else context",
        "counted = context",
    ),
    kills="PIPE-637",
)
results_of_nothing = patched(
    "Under torchrec's name nothing ran ahead.",
    mutated("twinproof.pipeline.stages:BatchContext.postproc_fwd_results", "return self.prepared", "return {}"),
    kills="PIPE-637",
)
