"""Faults that ``test_schedules`` must notice."""

from __future__ import annotations

import dataclasses
from typing import Any

from conformance.harness import fault, mutated, patched, wrap
from conformance.pipeline.planted.planting import never_late, not_forgotten
from twinproof.pipeline.stages import Placed


@fault(kills="PIPE-122", at="twinproof.pipeline.driver:Pipeline.progress")
def ended_loader_asked_again(original: Any, schedule: Any, loader: Any) -> Any:
    """A loader that ended is asked again."""
    schedule._dataloader_exhausted = False
    return original(schedule, loader)


@fault(kills="PIPE-124", at="twinproof.pipeline.driver:Pipeline._take_loader")
def second_iterator_ignored(original: Any, schedule: Any, loader: Any) -> None:
    """Another iterator than the first is ignored (torchrec)."""
    original(schedule, schedule.__dict__.setdefault("_first", loader))


@fault(kills="PIPE-122", at="twinproof.pipeline.driver:Pipeline.progress")
def last_batches_dropped(original: Any, schedule: Any, loader: Any) -> Any:
    """Batches in flight are lost at the end (torchrec)."""
    schedule._execute_all = False
    return original(schedule, loader)


@fault(kills="PIPE-026", at="twinproof.pipeline.driver:Pipeline.progress")
def all_batches_always(original: Any, schedule: Any, loader: Any) -> Any:
    """execute_all_batches=False is not honoured."""
    schedule._execute_all = True
    return original(schedule, loader)


class _Accumulating:
    """An optimizer that never clears gradients."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def zero_grad(self) -> None:
        """Nothing."""


@fault(kills=("PIPE-120", "PIPE-121"), at="twinproof.pipeline.driver:Pipeline.progress")
def gradients_accumulate(original: Any, schedule: Any, loader: Any) -> Any:
    """Gradients are never cleared."""
    if not isinstance(schedule._optimizer, _Accumulating):
        schedule._optimizer = _Accumulating(schedule._optimizer)
    return original(schedule, loader)


@fault(kills="PIPE-123", at="twinproof.pipeline.driver:Pipeline.progress")
def processed_is_pulled(original: Any, schedule: Any, loader: Any) -> Any:
    """Pulled batches count as processed."""
    output = original(schedule, loader)
    schedule.processed_count = schedule.pulled_count
    return output


@fault(kills="PIPE-123", at="twinproof.pipeline.driver:Pipeline.progress")
def pulled_too_far(original: Any, schedule: Any, loader: Any) -> Any:
    """One batch more is pulled."""
    schedule.ahead_count = type(schedule).ahead_count + 1
    return original(schedule, loader)


@fault(kills="PIPE-130", at="TrainPipelineSemiSync.__init__")
def semi_sync_never_stale(original: Any, schedule: Any, *args: Any, start_batch: int = 0, **options: Any) -> None:
    """SemiSync never begins."""
    original(schedule, *args, start_batch=10**9, **options)


@fault(kills="PIPE-136", at="twinproof.pipeline.driver:TrainPipelineSemiSync._step_dense")
def stash_steps_at_once(original: Any, schedule: Any) -> None:
    """The first stashed step steps."""
    if schedule._stashes and schedule._stash is None:
        schedule._optimizer.step()
    original(schedule)


@fault(kills="PIPE-137", at="twinproof.pipeline.driver:Pipeline.attach")
def strict_forgotten(original: Any, schedule: Any, *args: Any, **options: Any) -> None:
    """strict is not heeded."""  # noqa: D403
    schedule.options = dataclasses.replace(schedule.options, strict=False)
    original(schedule, *args, **options)


first_group_alone = patched(
    "Only the first group of the optimizer is looked at for what lookups read.",
    mutated(
        "twinproof.pipeline.stages:Call.is_late",
        "for param in trained_params(optimizer)",
        'for param in optimizer.param_groups[0]["params"]',
    ),
    kills="PIPE-137",
)
evaluation_asks_the_optimizer = patched(
    "An evaluation, too, is refused an optimizer that updates what a lookup reads.",
    mutated("twinproof.pipeline.driver:Pipeline.is_late", "self.trains and", ""),
    kills="PIPE-137",
)


@fault(kills="PIPE-125", at="twinproof.pipeline.driver:check_placement")
def placements_not_checked(original: Any, *args: Any) -> Placed:
    """Contradicting placements are taken."""
    return Placed()


# They are hoisted before the optimizer, and kept though the optimizer wrote what was read.
stale_feature_processors = patched(
    "Lookups of what the optimizer updates are hoisted.",
    wrap("twinproof.pipeline.stages:Call.is_late", never_late),
    wrap("fastimpl.pipeline.schedules:forget_outdated", not_forgotten),
    kills="PIPE-129",
    of="fastimpl",
)

stashed_as_often_as_listed = patched(
    "SemiSync stashes a gradient as often as a group lists its parameter.",
    mutated("twinproof.pipeline.driver:TrainPipelineSemiSync._step_dense", "dict.fromkeys(", "list("),
    kills="PIPE-508",
)
