"""Faults that ``test_callers`` must notice."""

from __future__ import annotations

import dataclasses
import gc
import inspect
from typing import Any

import torch

from conformance.harness import fault, mutated, patched


@fault(kills="PIPE-147", at=("refimpl.pipeline:move_batch", "fastimpl.pipeline.stages:move_batch"))
def dataclasses_stay(original: Any, batch: Any, *args: Any) -> Any:
    """A batch without a to() of its own stays."""
    return batch if dataclasses.is_dataclass(batch) else original(batch, *args)


@fault(kills="PIPE-150", at="twinproof.pipeline.driver:Pipeline._next")
def same_batch_skipped(original: Any, schedule: Any) -> Any:
    """A batch that comes twice is taken once."""
    batch = original(schedule)
    if batch is schedule.__dict__.get("_last_pulled"):
        batch = original(schedule)
    schedule._last_pulled = batch
    return batch


@fault(kills="PIPE-151", at="twinproof.pipeline.driver:Pipeline.run_forward")
def loss_by_first_size(original: Any, schedule: Any, batch: Any) -> Any:
    """The loss is scaled as if every batch had the first one's size."""
    loss, output = original(schedule, batch)
    first = schedule.__dict__.setdefault("_first_size", output.shape[0])
    return loss * (output.shape[0] / first), output


@fault(kills="PIPE-152", at="twinproof.pipeline.driver:Pipeline._step_dense")
def first_learning_rate_kept(original: Any, schedule: Any) -> None:
    """The dense part steps with the rate it began with."""
    group = schedule._optimizer.param_groups[0]
    now, group["lr"] = group["lr"], schedule.__dict__.setdefault("_first_rate", group["lr"])
    original(schedule)
    group["lr"] = now


@fault(kills="PIPE-153", at="twinproof.pipeline.driver:Pipeline._step_dense")
def optimizer_hooks_bypassed(original: Any, schedule: Any) -> None:
    """The optimizer's hooks do not fire."""
    with torch.no_grad():
        inspect.unwrap(type(schedule._optimizer).step)(schedule._optimizer)


@fault(kills="PIPE-153", at="twinproof.pipeline.driver:Pipeline.run_forward")
def custom_forward_ignored(original: Any, schedule: Any, batch: Any) -> Any:
    """The model is called, though a forward was given."""
    schedule._forward = None
    return original(schedule, batch)


@fault(kills="PIPE-154", at="twinproof.pipeline.driver:Pipeline.__init__")
def one_queue_for_all(original: Any, schedule: Any, model: Any, *args: Any, **options: Any) -> None:
    """Pipelines share their batches."""
    original(schedule, model, *args, **options)
    others = [other for other in gc.get_objects() if type(other) is type(schedule) and other is not schedule]
    for other in others:
        schedule._queue = other._queue


@fault(kills="PIPE-155", at="twinproof.pipeline.driver:Pipeline.attach")
def attached_to_the_first(original: Any, schedule: Any, model: Any = None, **options: Any) -> None:
    """attach() takes no other model."""
    original(schedule, schedule.__dict__.setdefault("_first_model", schedule._model), **options)


prepared_again = patched(
    "A dataclass is made anew where it is moved, by its constructor.",
    mutated(
        "twinproof.pipeline.stages:move_batch",
        "moved = copy.copy(batch)",
        "moved = dataclasses.replace(batch, **{f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)})",
    ),
    kills="PIPE-440",
)
moved_in_place = patched(
    "A dataclass of the caller's is changed where it is moved.",
    mutated("twinproof.pipeline.stages:move_batch", "copy.copy(batch)", "batch"),
    kills="PIPE-440",
)

arguments_without_defaults = patched(
    "Every argument of a model behind the batch is None where a lookup is made ahead.",
    mutated("twinproof.pipeline.tracing:Tracer.create_args_for_root", "= defaults[name]", "= None"),
    kills="PIPE-509",
)
