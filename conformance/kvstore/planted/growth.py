"""Faults that ``test_growth`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched, swap
from conformance.kvstore.planted.planting import as_rows, engines

rows_read_one_by_one = patched(
    "Each row of a saved store is read by itself.",
    swap("twinproof.kvstore.disk:_neighbours", lambda found: [(n, n + 1) for n in range(found.numel())]),
    kills="KV-460",
)


@fault(kills="KV-461", at="twinproof.kvstore.disk:SavedRows.check_order", of="fastimpl")
def ends_of_each_chunk(original: Any, saved: Any, table: str, ids: torch.Tensor, start: int) -> None:
    """The ends of the buckets are worked out for each chunk."""
    vars(saved.saved_table(table)).pop("bucket_ends", None)
    original(saved, table, ids, start)


@fault(kills="KV-462", at="twinproof.kvstore.disk:_SavedReader._order")
def rows_in_a_dictionary(original: Any, reader: Any, table: str) -> Any:
    """Positions of saved rows are kept in a dictionary."""
    known, order = original(reader, table)
    reader._positions = dict(zip(known.tolist(), order.tolist(), strict=True))
    return known, order


ids_copied_for_each_view = patched(
    "Each view of a state dict has a copy of the ids.",
    mutated("twinproof.kvstore.statedict:state_dict", "KVTensor.over(source, ids[:, 0]", "KVTensor(source, ids[:, 0]"),
    kills="KV-463",
)


@fault(kills="KV-451", at=engines("read"))
@as_rows
def rows_behind_many_missing(
    original: Any, engine: Any, table: str, ids: torch.Tensor, begin: int, end: int
) -> torch.Tensor:
    """A batch is read up to its 65,536th id."""
    rows: torch.Tensor = original(engine, table, ids, begin, end)
    rows[2**16 :] = 0
    return rows
