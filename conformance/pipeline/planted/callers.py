"""Faults that only show with other loaders, hooks, schedulers or pipelines than the usual ones."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
from typing import Any

import torch

from conformance.harness import PlantedBug, wrap
from conformance.pipeline.planted.planting import BOTH, fast, shared

_BASE = "twinproof.pipeline.driver:Pipeline"
_COLLECTION = "fastimpl.pipeline.exchange:ShardedEmbeddingBagCollection"


def _twice_is_once(original: Any, schedule: Any) -> Any:
    batch = original(schedule)
    if batch is schedule.__dict__.get("_last_pulled"):
        batch = original(schedule)
    schedule._last_pulled = batch
    return batch


def _by_first_size(original: Any, schedule: Any, batch: Any) -> Any:
    loss, output = original(schedule, batch)
    first = schedule.__dict__.setdefault("_first_size", output.shape[0])
    return loss * (output.shape[0] / first), output


def _first_rate(original: Any, schedule: Any) -> None:
    group = schedule._optimizer.param_groups[0]
    now, group["lr"] = group["lr"], schedule.__dict__.setdefault("_first_rate", group["lr"])
    original(schedule)
    group["lr"] = now


def _without_hooks(original: Any, schedule: Any) -> None:
    with torch.no_grad():
        inspect.unwrap(type(schedule._optimizer).step)(schedule._optimizer)


def _model_itself(original: Any, schedule: Any, batch: Any) -> Any:
    schedule._forward = None
    return original(schedule, batch)


def _in_one_queue(original: Any, schedule: Any, model: Any, *args: Any, **options: Any) -> None:
    original(schedule, model, *args, **options)
    others = [other for other in gc.get_objects() if type(other) is type(schedule) and other is not schedule]
    for other in others:
        schedule._queue = other._queue


def _first_model(original: Any, schedule: Any, model: Any = None, **options: Any) -> None:
    original(schedule, schedule.__dict__.setdefault("_first_model", schedule._model), **options)


def _outputs_held(original: Any, p: Any, batch: Any, calls: Any) -> None:
    original(p, batch, calls)
    p.__dict__.setdefault("_outputs", []).append(dict(batch.results))


def _failures_held(original: Any, schedule: Any, batch: Any) -> None:
    original(schedule, batch)
    schedule.__dict__.setdefault("_failures", []).append(batch)


def _no_stream_of_its_own(original: Any, stages: Any, device: Any, options: Any) -> None:
    placed = dataclasses.replace(options.placed, stream="data_dist")
    original(stages, device, dataclasses.replace(options, placed=placed) if options.placed.stream == "new" else options)


def _counted_ids(original: Any, collection: Any, ctx: Any, dist_input: Any) -> Any:
    for bags in dist_input:
        int(bags.offsets[-1])
    return original(collection, ctx, dist_input)


def _dataclasses_stay(original: Any, batch: Any, *args: Any) -> Any:
    return batch if dataclasses.is_dataclass(batch) else original(batch, *args)


@contextlib.contextmanager
def _both_moves() -> Any:
    with contextlib.ExitStack() as stack:
        for place in ("refimpl.pipeline", "fastimpl.pipeline.stages"):
            stack.enter_context(wrap(f"{place}:move_batch", _dataclasses_stay))
        yield


PLANTED = (
    PlantedBug("dataclasses_stay", "A batch without a to() of its own stays.", ("PIPE-147",), BOTH, _both_moves),
    shared(
        "same_batch_skipped", "A batch that comes twice is taken once.", ("PIPE-150",), f"{_BASE}._next", _twice_is_once
    ),
    shared(
        "loss_by_first_size",
        "The loss is scaled as if every batch had the first one's size.",
        ("PIPE-151",),
        f"{_BASE}.run_forward",
        _by_first_size,
    ),
    shared(
        "first_learning_rate_kept",
        "The dense part steps with the rate it began with.",
        ("PIPE-152",),
        f"{_BASE}._step_dense",
        _first_rate,
    ),
    shared(
        "optimizer_hooks_bypassed",
        "The optimizer's hooks do not fire.",
        ("PIPE-153",),
        f"{_BASE}._step_dense",
        _without_hooks,
    ),
    shared(
        "custom_forward_ignored",
        "The model is called, though a forward was given.",
        ("PIPE-153",),
        f"{_BASE}.run_forward",
        _model_itself,
    ),
    shared("one_queue_for_all", "Pipelines share their batches.", ("PIPE-154",), f"{_BASE}.__init__", _in_one_queue),
    shared("attached_to_the_first", "attach() takes no other model.", ("PIPE-155",), f"{_BASE}.attach", _first_model),
    fast(
        "lookup_outputs_held",
        "Lookup outputs outlive their step.",
        ("PIPE-156",),
        wrap("fastimpl.pipeline.schedules:look_up_early", _outputs_held),
    ),
    shared("failures_held", "Failed batches are kept.", ("PIPE-157",), f"{_BASE}._drop", _failures_held),
    fast(
        "lookup_stream_not_made",
        "A lookup stream that was asked for is not made.",
        ("PIPE-158", "PIPE-199"),
        wrap("fastimpl.pipeline.stages:StreamedStages.__init__", _no_stream_of_its_own),
    ),
    fast(
        "lookup_counts_ids",
        "The lookup reads on the host how many ids there are (torchrec).",
        ("PIPE-159",),
        wrap(f"{_COLLECTION}.compute", _counted_ids),
    ),
)
