"""Faults that ``test_orders`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault
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


@fault(kills="KV-299", at=engines("write"))
def partial_write_of_a_missing_row_zeroes_it(
    original: Any,
    engine: Any,
    table: str,
    ids: torch.Tensor,
    values: torch.Tensor,
    begin: int,
    now: int,
    *,
    visit: bool,
) -> None:
    """A state that is written to a bounded table makes its missing rows with zero weights, not with initial ones."""
    missing = ids[~engine.find(table, ids)]
    original(engine, table, ids, values, begin, now, visit=visit)
    row = engine.options.rows[table]
    if not visit and begin > 16 and missing.numel() and engine.options.capacities[table] is not None:
        original(
            engine,
            table,
            missing,
            torch.zeros(missing.numel(), row.weight_bytes, dtype=torch.uint8),
            16,
            now,
            visit=False,
        )
