"""Faults that ``test_modes`` must notice."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from conformance.harness import fault, mutated, patched, swap, wrap
from conformance.pipeline.planted.planting import not_forgotten


@fault(kills=("PIPE-048", "PIPE-149"), at="twinproof.pipeline.driver:Pipeline.progress")
def evaluation_trains(original: Any, schedule: Any, loader: Any) -> Any:
    """Evaluation updates."""
    before = schedule._model.training
    schedule._model.train()
    try:
        return original(schedule, loader)
    finally:
        schedule._model.train(before)


@fault(kills="PIPE-042", at="twinproof.pipeline.stages:Attachment.close")
def forward_not_restored(original: Any, attachment: Any) -> None:
    """detach() leaves the driven forward."""


@fault(kills="PIPE-055", at="twinproof.pipeline.driver:Pipeline.attach")
def threads_left(original: Any, schedule: Any, *args: Any, **options: Any) -> None:
    """Every attachment leaves a thread."""
    original(schedule, *args, **options)
    threading.Thread(target=threading.Event().wait, daemon=True).start()


@fault(kills="PIPE-042", at="twinproof.pipeline.stages:find_calls")
def second_call_missed(original: Any, model: Any, **options: Any) -> Any:
    """A module called twice is not noticed."""
    with contextlib.suppress(Exception):
        return original(model, **options)
    return []


@fault(kills="PIPE-133", at="twinproof.pipeline.driver:Pipeline._recall", of="fastimpl")
def recall_raises(original: Any, schedule: Any, batch: Any) -> None:
    """A batch in flight whose exchange failed makes detach() fail."""
    for given in batch.dists.values():
        given.wait().wait()
    batch.forget()


lookup_outlives_loader_error = patched(
    "Rows looked up in a call that a loader ended are kept for the next.",
    swap("fastimpl.pipeline.schedules:undone_on_error", lambda *_: contextlib.nullcontext()),
    kills="PIPE-132",
)


hoisted_lookup_kept = patched(
    "A hoisted lookup outlives edits and modes.",
    wrap("fastimpl.pipeline.schedules:forget_outdated", not_forgotten),
    kills="PIPE-099",
)


last_module_decides = patched(
    "Only edits of the last module's tables are seen by hoisted lookups.",
    mutated("fastimpl.pipeline.schedules:forget_outdated", "changed |= batch.seen", "changed = batch.seen"),
    kills="PIPE-413",
)

first_module_decides = patched(
    "Only edits of the first module's tables are seen by hoisted lookups.",
    mutated("fastimpl.pipeline.schedules:forget_outdated", "for call in p.calls:", "for call in p.calls[:1]:"),
    kills="PIPE-413",
)

believed_looked_up = patched(
    "A batch whose lookups were forgotten is believed looked up.",
    mutated(
        "twinproof.pipeline.stages:BatchContext.forget", "self.failure = self.with_grad = None", "self.failure = None"
    ),
    kills="PIPE-415",
)

first_batch_stays = patched(
    "A batch that is put in the place of one in flight is dropped.",
    mutated(
        "twinproof.pipeline.driver:Pipeline._replace",
        "self._stages.adopt(batch)",
        "self._stages.adopt(in_flight.batch)",
    ),
    kills="PIPE-400",
)


@fault(kills="PIPE-443", at="twinproof.pipeline.stages:Prepared.__reduce__")
def copied_with_its_pipeline(original: Any, prepared: Any) -> Any:
    """A copy of a driven model hands out what a copy of its pipeline has prepared."""
    return object.__reduce_ex__(prepared, 2)


groups_are_copied = patched(
    "A copy of a cut collection copies its group of ranks, which cannot be.",
    mutated(
        "twinproof.pipeline.sharded:ShardedEmbeddingBagCollection.__deepcopy__",
        "memo[id(self.process_group)] = self.process_group",
        "pass",
    ),
    kills="PIPE-443",
)


@fault(kills="PIPE-444", at="twinproof.pipeline.driver:Pipeline.attach")
def refused_model_driven(original: Any, schedule: Any, model: Any = None, **options: Any) -> None:
    """A model that is refused is the pipeline's from then on."""
    schedule.detach()
    schedule._model = schedule._model if model is None else model
    original(schedule, model, **options)


failure_kept_by_detach = patched(
    "What the exchange of a batch raised is raised again where the batch is sent again.",
    mutated(
        "twinproof.pipeline.stages:BatchContext.forget", "self.failure = self.with_grad = None", "self.with_grad = None"
    ),
    kills="PIPE-457",
    of="fastimpl",
)
hoisted_in_training_kept = patched(
    "A lookup that was hoisted in training is kept for a step in evaluation, with its way back.",
    mutated("fastimpl.pipeline.schedules:forget_outdated", "batch.with_grad is not None and", "False and"),
    mutated("twinproof.pipeline.driver:Pipeline._result_of", "and not torch.is_grad_enabled()", "and False"),
    kills="PIPE-460",
    of="fastimpl",
)

versions_of_cut_tables_alone = patched(
    "Of a sharded collection the versions of its cut tables alone say whether a lookup is out of date.",
    mutated("fastimpl.pipeline.stages:versions_of", ", *_held_tensors(module)]", "]"),
    kills="PIPE-503",
    of="fastimpl",
)

graph_of_training_kept = patched(
    "A lookup that was made for training keeps its way back where the model calls it without gradients.",
    mutated("twinproof.pipeline.driver:Pipeline._result_of", "and not torch.is_grad_enabled()", "and False"),
    kills="PIPE-506",
)

looked_up_for_inference = patched(
    "What is looked up ahead inside inference mode is of that mode, and nothing outside may change it.",
    mutated("twinproof.pipeline.driver:LookupPipeline.look_up_ahead", ", made_for_training()", ""),
    kills="PIPE-703",
)
