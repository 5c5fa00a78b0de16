"""Faults that ``test_orders`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault


@fault(kills="PIPE-360", at="twinproof.pipeline.driver:Pipeline.attach")
def batches_in_flight_lost_to_another_model(
    original: Any, schedule: Any, model: Any = None, *rest: Any, **flags: Any
) -> Any:
    """Batches in flight are forgotten where another model takes the place of the first."""
    if model is not None and model is not schedule._model:
        schedule.batches.clear()
    return original(schedule, model, *rest, **flags)
