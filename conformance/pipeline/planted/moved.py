"""Faults that ``test_moved`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault


@fault(kills="PIPE-308", at="fastimpl.pipeline.stages:StreamedStages.wait_for_lookup")
def edits_overtake_hoisted_lookups(original: Any, stages: Any, batch: Any) -> None:
    """An edit does not wait for a lookup that was done ahead."""


@fault(kills="PIPE-309", at="twinproof.pipeline.driver:Pipeline.pull_behind_forward")
def late_error_undoes_the_step(original: Any, schedule: Any) -> None:
    """A loader's error behind the forward stops the step."""
    if schedule.options.enqueues_behind_forward:
        schedule._pull_until(schedule.ahead_count + 1)
