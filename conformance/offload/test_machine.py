"""The state machine as one requirement: any program."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

from conformance.harness import examples, requirement, run_machine
from conformance.offload.corners import CornersMachine
from conformance.offload.edits import EditsMachine
from conformance.offload.machine import OffloadMachine, ReleasingMachine


@requirement(
    "OPT-030",
    "After any program of steps, verbs, loads, new groups and closings the parameters, states and options MUST be the "
    "plain optimizer's, bit for bit, with every access ordered.",
)
def test_any_program(offload: Any, device: str) -> None:
    class Machine(OffloadMachine):
        pass

    Machine.offload, Machine.suite_device = offload, device
    run_machine(Machine, settings=settings(examples(60), stateful_step_count=30))


@requirement(
    "OPT-260",
    "After any such program with optimizers of other makers, and with release on request, parameters, states and "
    "options MUST be the plain optimizer's, whatever is written, stepped or copied again before the release.",
)
def test_any_program_with_releases(offload: Any, device: str) -> None:
    class Machine(ReleasingMachine):
        pass

    Machine.offload, Machine.suite_device = offload, device
    run_machine(Machine, settings=settings(examples(40), stateful_step_count=20))


@requirement(
    "OPT-377",
    "After any such program with steps on the CPU, parameters that lie by columns, learning rates that are tensors, "
    "and parameters that take each other's places, everything MUST be that of the plain optimizer, which on the CPU "
    "is the formula.",
)
def test_any_program_in_corners(offload: Any, device: str) -> None:
    class Machine(CornersMachine):
        pass

    Machine.offload, Machine.suite_device = offload, device
    run_machine(Machine, settings=settings(examples(12), stateful_step_count=20))


@requirement(
    "OPT-384",
    "After any program in which parameters change their groups, leave them and come back, groups go and turn options "
    "that bring states, and states are written, replaced and moved by kind, everything MUST be that of the plain "
    "optimizer, and all states of listed parameters move.",
)
def test_any_program_of_edits(offload: Any, device: str) -> None:
    class Machine(EditsMachine):
        pass

    Machine.offload, Machine.suite_device = offload, device
    run_machine(Machine, settings=settings(examples(8), stateful_step_count=1))
