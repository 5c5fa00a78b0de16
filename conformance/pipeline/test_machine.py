"""The state machine as one requirement: any program of what may happen to a schedule."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

from conformance.harness import examples, requirement, run_machine
from conformance.pipeline.machine import ScheduleMachine


@requirement(
    "PIPE-310",
    "Through any program of steps, modes, edits, loads, detach and attach, iterators and their ends, loader errors, "
    "failing forwards and resets, every schedule MUST hold the loop's bits after each event, and count right.",
)
def test_any_program(pipeline: Any) -> None:
    class Machine(ScheduleMachine):
        pass

    Machine.pipeline = pipeline
    run_machine(Machine, settings=settings(examples(100), stateful_step_count=20))
