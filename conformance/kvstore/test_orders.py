"""What lives on beside a store, in any order of what a user may do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import settings

from conformance.harness import examples, requirement, run_machine
from conformance.kvstore.orders import OrdersMachine


@requirement(
    "KV-210",
    "Snapshots, views, state dicts, eviction rounds, marks and deltas that live on beside a store MUST each show what "
    "they promised after every write, removal, load and resharding, and after every call that memory was short for, in "
    "any order, and the store's counts be exact.",
)
def test_any_order(kvstore: Any, tmp_path: Path) -> None:
    class Machine(OrdersMachine):
        pass

    Machine.kvstore, Machine.root = kvstore, tmp_path
    run_machine(Machine, settings=settings(examples(40), stateful_step_count=25))
