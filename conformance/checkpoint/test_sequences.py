"""Several saves and loads with the same objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import settings

from conformance.checkpoint.sequences import SequenceMachine
from conformance.harness import examples, requirement, run_machine


@requirement(
    "CKPT-500",
    "One writer and one reader MUST serve any sequence of saves and loads of other states, orders, shapes, shardings "
    "and folders as fresh ones would, saves that fail on one rank among them, and hold no state and no file.",
)
def test_any_sequence(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    class Machine(SequenceMachine):
        pool, root = rank_pool, tmp_path

    run_machine(Machine, settings=settings(examples(5), stateful_step_count=5))
