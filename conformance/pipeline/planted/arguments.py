"""Faults of constructor arguments: accepted and ignored, in another position, or with another meaning."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from conformance.harness import wrap
from conformance.pipeline.planted.planting import exported, fast, shared, shared_swap

_BASE = "twinproof.pipeline.driver:Pipeline"
_ARGUMENTS = "twinproof.pipeline.schedules"


def _older_name_ignored(original: Any, stream: str, use: Any, after_dist: bool, before: bool, after_opt: Any) -> Any:
    return original(stream, use, after_dist, before, after_opt or None)


def _stream_overridden(original: Any, stream: str, use: Any, after_dist: bool, before: bool, after_opt: Any) -> Any:
    return original(stream if use is None else "data_dist", use, after_dist, before, after_opt)


def _fifth_is_forward(
    original: Any, schedule: Any, model: Any, optimizer: Any, device: Any = "cpu", *args: Any, **options: Any
) -> None:
    # Our own order before torchrec's was taken over.
    if len(args) > 1 and "custom_model_fwd" not in options:
        args = (args[0], False, *args[2:])
        options["custom_model_fwd"] = None
    original(schedule, model, optimizer, device, *args, **options)


def _nothing_refused(original: Any, **given: bool) -> None:
    """Everything is taken."""


def _never_late(schedule: Any) -> int:
    return int(schedule.ahead_count) + 1


def _no_context(original: Any, schedule: Any) -> None:
    schedule._next_index += 0


def _model_calls_too(original: Any, attachment: Any, calls: Any, result_of: Any) -> None:
    original(attachment, calls, result_of)
    for call in calls:
        for module in call.postprocs.values():
            module.__dict__.pop("forward", None)


def _each_batch(original: Any, schedule: Any, model: Any, interval: Any, context: Any = None) -> None:
    original(schedule, model, None if interval is None else 1, context)


def _on_the_copying_stream(original: Any, stages: Any, batch: Any) -> Any:
    options, stages._options = stages._options, dataclasses.replace(stages._options, copies_in_place=False)
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, stages, "_options", options)
        return original(stages, batch)


def _never_prefetched(original: Any, schedule: Any, *args: Any, **options: Any) -> None:
    options.pop("enable_embedding_lookup_prefetch", None)
    original(schedule, *args, **options)


def _not_held(original: Any, stages: Any, batch: Any) -> None:
    """Edits go ahead."""


def _raised_at_once(original: Any, schedule: Any) -> None:
    if schedule.options.enqueues_behind_forward:
        schedule._pull_until(schedule.ahead_count + 1)


PLANTED = (
    fast(
        "edits_overtake_hoisted_lookups",
        "An edit does not wait for a lookup that was done ahead.",
        ("PIPE-308",),
        wrap("fastimpl.pipeline.stages:StreamedStages.wait_for_lookup", _not_held),
    ),
    shared(
        "late_error_undoes_the_step",
        "A loader's error behind the forward stops the step.",
        ("PIPE-309",),
        f"{_BASE}.pull_behind_forward",
        _raised_at_once,
    ),
    fast(
        "placement_ignored",
        "embedding_lookup_after_opt=False is taken and ignored.",
        ("PIPE-280",),
        wrap(f"{_ARGUMENTS}:check_placement", _older_name_ignored),
    ),
    shared(
        "one_stream_wins",
        "Of two names for the lookup's stream one wins silently.",
        ("PIPE-281",),
        f"{_ARGUMENTS}:check_placement",
        _stream_overridden,
    ),
    exported(
        "another_order",
        "Arguments stand in other positions than torchrec's.",
        ("PIPE-282",),
        ("TrainPipelineSparseDist.__init__", _fifth_is_forward),
    ),
    shared(
        "meaningless_arguments_taken",
        "Arguments without a meaning here are taken.",
        ("PIPE-283",),
        "twinproof.pipeline.stages:refuse",
        _nothing_refused,
    ),
    shared_swap(
        "never_behind_forward",
        "enqueue_batch_after_forward is taken and ignored.",
        ("PIPE-284",),
        f"{_BASE}._count_before_forward",
        property(_never_late),
    ),
    shared("context_type_ignored", "context_type is ignored.", ("PIPE-285",), f"{_BASE}._create_context", _no_context),
    shared(
        "postproc_runs_twice",
        "A module that ran ahead runs in the model again.",
        ("PIPE-286",),
        "twinproof.pipeline.rewrite:Attachment.__init__",
        _model_calls_too,
    ),
    shared(
        "interval_ignored",
        "Replicas are averaged for each batch.",
        ("PIPE-287",),
        f"{_BASE}.sync_embeddings",
        _each_batch,
    ),
    fast(
        "never_in_place",
        "enable_inplace_copy_batch is taken and ignored.",
        ("PIPE-288",),
        wrap("fastimpl.pipeline.stages:StreamedStages.copy", _on_the_copying_stream),
    ),
    fast(
        "evaluation_never_prefetches",
        "enable_embedding_lookup_prefetch is taken and ignored.",
        ("PIPE-289",),
        wrap(f"{_ARGUMENTS}:EvalPipelineFusedSparseDist.__init__", _never_prefetched),
    ),
)
