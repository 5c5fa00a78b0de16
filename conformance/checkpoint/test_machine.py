"""The state machine as one requirement: any program of saves, loads and consolidations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import settings

from conformance.checkpoint.machine import CheckpointMachine
from conformance.harness import examples, requirement, run_machine


@requirement(
    "CKPT-100",
    "After any program of saves, overwrites, refusals, loads and merges each folder MUST hold its last state.",
)
def test_any_program(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    class Machine(CheckpointMachine):
        pool, root = rank_pool, tmp_path

    run_machine(Machine, settings=settings(examples(12), stateful_step_count=8))
