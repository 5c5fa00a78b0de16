"""Faults that ``test_machine`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault


@fault(kills="PIPE-310", at="twinproof.pipeline.driver:Pipeline._drop")
def failed_batch_held(original: Any, schedule: Any, batch: Any) -> None:
    """After a failed step its batch is in flight again."""
    was_in_flight = batch in schedule._queue
    original(schedule, batch)
    if was_in_flight:
        schedule._queue.appendleft(batch)
