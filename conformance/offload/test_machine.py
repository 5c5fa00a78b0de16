"""The state machine as one requirement: any program."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

from conformance.harness import examples, requirement, run_machine
from conformance.offload.machine import OffloadMachine


@requirement(
    "OPT-030",
    "After any program of steps, verbs, loads, new groups and closings the parameters, states and options MUST be the "
    "plain optimizer's, bit for bit, with every access ordered.",
)
def test_any_program(offload: Any) -> None:
    class Machine(OffloadMachine):
        pass

    Machine.offload = offload
    run_machine(Machine, settings=settings(examples(60), stateful_step_count=30))
