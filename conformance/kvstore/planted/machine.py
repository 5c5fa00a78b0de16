"""Faults that ``test_machine`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault
from conformance.kvstore.planted.planting import engines


@fault(kills="KV-028", at=engines("write"))
def set_clears_optimizer_state(
    original: Any, store: Any, table: str, ids: torch.Tensor, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    """Setting weights of a row that exists resets its state."""
    original(store, table, ids, values, begin, now, visit=visit)
    row = store.options.rows[table]
    if visit and row.state_slots:
        zeros = torch.zeros(ids.numel(), row.row_bytes - row.state_begin_bytes, dtype=torch.uint8)
        original(store, table, ids, zeros, row.state_begin_bytes, now, visit=False)
