"""Room for a load in a table with a capacity: a load counts as one batch, whatever its chunks are.

Prevents half-loaded tables: a later chunk that does not fit, and chunks that evict the rows of earlier ones.
"""

from __future__ import annotations

import torch

from twinproof.errors import CapacityError
from twinproof.kvstore.rows import RowStore

__all__ = ["check_room", "make_room"]


def check_room(store: RowStore, table: str, row_count: int) -> None:
    """Demand that the table may hold this many distinct ids. Raises CapacityError."""
    capacity = store.options.capacities[table]
    if capacity is not None and row_count > capacity:
        raise CapacityError("a load larger than the table", got=row_count, expected=f"<= {capacity}", where=table)


def make_room(store: RowStore, table: str, ids: torch.Tensor) -> None:
    """Remove what a write of all ``ids`` (distinct int64 [n]) at once would evict: never one of them.

    The rows that go are those of ``KVStore``'s rule for ``capacity``.
    """
    capacity = store.options.capacities[table]
    if capacity is None:
        return
    excess = store.size(table) + int((~store.contains(table, ids)).sum()) - capacity
    if excess <= 0:
        return
    present = store.ids(table)
    others = present[~torch.isin(present, ids)]
    words = store.metadata(table, others)[:, 0]
    policy = store.options.evictions[table]
    by_count = policy is not None and policy.kind in ("score", "count", "ttl_count")
    # Ids ascend already, so that a stable sort leaves ties in their order.
    ranks = (words >> 32) & (2**31 - 1) if by_count else words & (2**32 - 1)
    store.delete(table, others[ranks.argsort(stable=True)[:excess]].contiguous())
