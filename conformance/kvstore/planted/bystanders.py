"""Faults that ``test_bystanders`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched
from conformance.kvstore.planted.planting import engines

names_of_all_forgotten = patched(
    "A load of some tables forgets what the others were loaded from.",
    mutated(
        "twinproof.kvstore.disk:StoreFiles.load",
        "store.fingerprints.set_loaded(table, None)",
        "[store.fingerprints.set_loaded(each, None) for each in store.tables]",
    ),
    kills="KV-292",
)


@fault(kills="KV-292", at="twinproof.kvstore.store:KVStore.load_state_dict")
def steps_of_all_loaded(original: Any, store: Any, state: Any, **options: Any) -> Any:
    """A state dict of one table sets the step of every table."""
    found = original(store, state, **options)
    for table in store.tables if found and not options.get("weights_only") else ():
        store.set_step_count(table, store.step_count(next(iter(found))))
    return found


@fault(kills="KV-292", at=engines("clear"))
def others_count_as_changed(original: Any, engine: Any, table: str) -> None:
    """When a table is cleared, the rows of the others count as changed."""
    original(engine, table)
    for other in engine.options.layouts:
        ids = engine.ids(other, -(2**63), 2**63 - 1)
        engine.write_metadata(other, ids, torch.zeros_like(ids), 0)
