"""Faults that ``test_orders`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched
from conformance.kvstore.planted.planting import engines


@fault(kills="KV-210", at=engines("snapshot"))
def snapshots_close_in_order(original: Any, engine: Any) -> Any:
    """A snapshot that is closed before an older one takes the older one's rows with it."""
    taken = original(engine)
    older = getattr(engine, "_older_snapshots", [])
    engine._older_snapshots = [*older, taken]
    close, read_ids = taken.close, taken.ids

    def closing() -> None:
        close()
        for other in older:
            other._lost = True

    def ids(table: str, begin: int, last: int) -> torch.Tensor:
        found: torch.Tensor = read_ids(table, begin, last)
        return found[:0] if getattr(taken, "_lost", False) else found

    taken.close, taken.ids = closing, ids
    return taken


dirt_between_values = patched(
    "Columns behind the weight are written with what stands in their padding.",
    mutated("twinproof.kvstore.store:KVStore.place", "without_padding(layout, raw, begin)", "raw"),
    kills="KV-210",
)
