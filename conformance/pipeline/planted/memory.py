"""Faults that ``test_memory`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault


@fault(kills="PIPE-156", at="fastimpl.pipeline.schedules:look_up_early")
def lookup_outputs_held(original: Any, p: Any, batch: Any, calls: Any) -> None:
    """Lookup outputs outlive their step."""
    original(p, batch, calls)
    p.__dict__.setdefault("_outputs", []).append(dict(batch.results))


@fault(kills="PIPE-157", at="twinproof.pipeline.driver:Pipeline._drop")
def failures_held(original: Any, schedule: Any, batch: Any) -> None:
    """Failed batches are kept."""
    original(schedule, batch)
    schedule.__dict__.setdefault("_failures", []).append(batch)


@fault(kills="PIPE-103", at="twinproof.pipeline.driver:Pipeline.progress")
def outputs_kept(original: Any, schedule: Any, loader: Any) -> Any:
    """Every output is kept."""
    output = original(schedule, loader)
    schedule.__dict__.setdefault("_kept", []).append(output)
    return output


@fault(kills="PIPE-131", at="twinproof.pipeline.driver:Pipeline.progress")
def last_batch_kept(original: Any, schedule: Any, loader: Any) -> Any:
    """A batch is kept for a step more."""
    schedule._last = schedule._queue[0].batch if schedule._queue else None
    return original(schedule, loader)
