"""The state machine as one requirement: any program of verbs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import settings

from conformance.harness import examples, requirement, run_machine
from conformance.kvstore.machine import StoreMachine


@requirement(
    "KV-028",
    "After any program of writes, scores, optimizer steps, deletes, evictions by any policy, snapshots, saves, loads "
    "and calls that memory was short for the store MUST hold exactly the rows of a dictionary that went through the "
    "same.",
)
def test_any_program(kvstore: Any, tmp_path: Path) -> None:
    class Machine(StoreMachine):
        pass

    Machine.kvstore, Machine.root = kvstore, tmp_path
    run_machine(Machine, settings=settings(examples(40), stateful_step_count=20))
