"""Faults of schedules: lost batches, stale rows, missing edges, modes mixed up."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import Any

from conformance.pipeline.planted.planting import exported, shared, shared_swap
from twinproof.pipeline.stages import Placed

_BASE = "twinproof.pipeline.driver:Pipeline"


def _none_ends(original: Any, schedule: Any) -> Any:
    batch = next(schedule._dataloader_iter)
    if batch is None:
        raise StopIteration
    schedule.pulled_count += 1
    return batch


def _asked_again(original: Any, schedule: Any, loader: Any) -> Any:
    schedule._dataloader_exhausted = False
    return original(schedule, loader)


def _never_again(original: Any, schedule: Any, loader: Any) -> Any:
    schedule._dataloader_iter = loader
    return original(schedule, loader)


def _last_dropped(original: Any, schedule: Any, loader: Any) -> Any:
    schedule._execute_all = False
    return original(schedule, loader)


def _all_executed(original: Any, schedule: Any, loader: Any) -> Any:
    schedule._execute_all = True
    return original(schedule, loader)


def _lost_on_error(original: Any, schedule: Any, loader: Any) -> Any:
    try:
        return original(schedule, loader)
    except StopIteration:
        raise
    except BaseException:
        schedule._queue.clear()
        schedule._held.clear()
        raise


def _held_dropped(original: Any, schedule: Any, loader: Any) -> bool:
    found: bool = original(schedule, loader)
    if schedule._dataloader_exhausted:
        schedule._held.clear()
    return found


def _always_training(original: Any, schedule: Any, loader: Any) -> Any:
    before = schedule._model.training
    schedule._model.train()
    try:
        return original(schedule, loader)
    finally:
        schedule._model.train(before)


class _Accumulating:
    """An optimizer that never clears gradients."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def zero_grad(self) -> None:
        """Nothing."""


def _accumulating(original: Any, schedule: Any, loader: Any) -> Any:
    if not isinstance(schedule._optimizer, _Accumulating):
        schedule._optimizer = _Accumulating(schedule._optimizer)
    return original(schedule, loader)


def _counted_when_pulled(original: Any, schedule: Any, loader: Any) -> Any:
    output = original(schedule, loader)
    schedule.processed_count = schedule.pulled_count
    return output


def _one_more(original: Any, schedule: Any, loader: Any) -> Any:
    schedule.ahead_count = type(schedule).ahead_count + 1
    return original(schedule, loader)


def _goes_on(original: Any, schedule: Any, batch: Any) -> None:
    original(schedule, batch)
    schedule._failed = False


def _counted_failure(original: Any, schedule: Any, batch: Any) -> None:
    original(schedule, batch)
    for call in schedule.calls:
        call.module.fused_optimizer.step_count += 1


def _outputs_kept(original: Any, schedule: Any, loader: Any) -> Any:
    output = original(schedule, loader)
    schedule.__dict__.setdefault("_kept", []).append(output)
    return output


def _batch_kept(original: Any, schedule: Any, loader: Any) -> Any:
    schedule._last = schedule._queue[0].batch if schedule._queue else None
    return original(schedule, loader)


def _left_attached(original: Any, attachment: Any) -> None:
    """Forwards stay replaced."""


def _fresh(original: Any, schedule: Any, *args: Any, start_batch: int = 0, **options: Any) -> None:
    original(schedule, *args, start_batch=10**9, **options)


def _leaking(original: Any, schedule: Any, *args: Any, **options: Any) -> None:
    original(schedule, *args, **options)
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def _any_placement(*args: Any) -> Placed:
    return Placed()


def _calls_once(original: Any, model: Any, **options: Any) -> Any:
    with contextlib.suppress(Exception):
        return original(model, **options)
    return []


def _first_steps_too(original: Any, schedule: Any) -> None:
    if schedule._stashes and schedule._stash is None:
        schedule._optimizer.step()
    original(schedule)


def _never_strict(original: Any, schedule: Any, *args: Any, **options: Any) -> None:
    schedule.options = dataclasses.replace(schedule.options, strict=False)
    original(schedule, *args, **options)


def _held_after_failure(original: Any, schedule: Any, batch: Any) -> None:
    was_in_flight = batch in schedule._queue
    original(schedule, batch)
    if was_in_flight:
        schedule._queue.appendleft(batch)


PLANTED = (
    shared(
        "failed_batch_held",
        "After a failed step its batch is in flight again.",
        ("PIPE-310",),
        f"{_BASE}._drop",
        _held_after_failure,
    ),
    shared(
        "none_ends_the_loader", "None is taken for the end (torchrec).", ("PIPE-030",), f"{_BASE}._next", _none_ends
    ),
    shared(
        "ended_loader_asked_again",
        "A loader that ended is asked again.",
        ("PIPE-122",),
        f"{_BASE}.progress",
        _asked_again,
    ),
    shared(
        "second_iterator_ignored",
        "After an end another iterator is ignored (torchrec).",
        ("PIPE-124",),
        f"{_BASE}.progress",
        _never_again,
    ),
    shared(
        "last_batches_dropped",
        "Batches in flight are lost at the end (torchrec).",
        ("PIPE-122",),
        f"{_BASE}.progress",
        _last_dropped,
    ),
    shared(
        "all_batches_always",
        "execute_all_batches=False is not honoured.",
        ("PIPE-026",),
        f"{_BASE}.progress",
        _all_executed,
    ),
    shared(
        "batches_lost_on_loader_error",
        "What was pulled is lost with a loader's error.",
        ("PIPE-033", "PIPE-126", "PIPE-148"),
        f"{_BASE}._next_batch",
        _lost_on_error,
    ),
    shared(
        "held_batches_dropped",
        "What was pulled when another rank ended is lost.",
        ("PIPE-127",),
        f"{_BASE}.enqueue_batch",
        _held_dropped,
    ),
    shared("evaluation_trains", "Evaluation updates.", ("PIPE-048", "PIPE-149"), f"{_BASE}.progress", _always_training),
    shared(
        "gradients_accumulate",
        "Gradients are never cleared.",
        ("PIPE-120", "PIPE-121"),
        f"{_BASE}.progress",
        _accumulating,
    ),
    shared(
        "processed_is_pulled",
        "Pulled batches count as processed.",
        ("PIPE-123",),
        f"{_BASE}.progress",
        _counted_when_pulled,
    ),
    shared("pulled_too_far", "One batch more is pulled.", ("PIPE-123",), f"{_BASE}.progress", _one_more),
    shared("failed_ranks_go_on", "A failed step of ranks is forgotten.", ("PIPE-039",), f"{_BASE}._drop", _goes_on),
    shared(
        "failed_step_counted",
        "A failed step counts for the tables.",
        ("PIPE-035", "PIPE-037"),
        f"{_BASE}._drop",
        _counted_failure,
    ),
    shared("outputs_kept", "Every output is kept.", ("PIPE-103",), f"{_BASE}.progress", _outputs_kept),
    shared("last_batch_kept", "A batch is kept for a step more.", ("PIPE-131",), f"{_BASE}.progress", _batch_kept),
    shared(
        "forward_not_restored",
        "detach() leaves the driven forward.",
        ("PIPE-042",),
        "twinproof.pipeline.rewrite:Attachment.close",
        _left_attached,
    ),
    shared("threads_left", "Every attachment leaves a thread.", ("PIPE-055",), f"{_BASE}.attach", _leaking),
    exported(
        "semi_sync_never_stale", "SemiSync never begins.", ("PIPE-130",), ("TrainPipelineSemiSync.__init__", _fresh)
    ),
    shared(
        "stash_steps_at_once",
        "The first stashed step steps.",
        ("PIPE-136",),
        "twinproof.pipeline.schedules:TrainPipelineSemiSync._step_dense",
        _first_steps_too,
    ),
    shared(
        "strict_forgotten",
        "strict is not heeded.",
        ("PIPE-137",),
        f"{_BASE}.attach",
        _never_strict,
    ),
    shared_swap(
        "placements_not_checked",
        "Contradicting placements are taken.",
        ("PIPE-125",),
        "twinproof.pipeline.schedules:check_placement",
        _any_placement,
    ),
    shared(
        "second_call_missed",
        "A module called twice is not noticed.",
        ("PIPE-042",),
        f"{_BASE.split(':')[0]}:find_calls",
        _calls_once,
    ),
)
