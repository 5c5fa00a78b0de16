"""The batch types' machine as one requirement: any program of cuts, copies, moves and exchanges."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

from conformance.harness import examples, requirement, run_machine
from conformance.pipeline.batch_machine import BatchMachine


@requirement(
    "PIPE-364",
    "Through any program in which batches are made of what is known, cut, put together, copied, moved, pickled, filled "
    "again and exchanged, each MUST answer every question as its bags say, whatever it was asked before.",
)
def test_any_batch(pipeline: Any) -> None:
    class Machine(BatchMachine):
        pass

    Machine.pipeline = pipeline
    run_machine(Machine, settings=settings(examples(100), stateful_step_count=15))
