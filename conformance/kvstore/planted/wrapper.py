"""Faults that ``test_wrapper`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched
from conformance.kvstore.planted.planting import engines, missing


@fault(kills="KV-156", at="twinproof.kvstore.modules:KVTensorWrapper.get_weights_by_ids")
def wrapper_shows_local_keys(original: Any, wrapper: Any, ids: Any) -> Any:
    """Whole rows that a wrapper reads keep the store's own key, as upstream's did until resharding broke."""
    rows = original(wrapper, ids)
    if rows.dtype == torch.uint8 and rows.numel():
        rows[:, :8] = (ids + wrapper._row_offset).reshape(-1, 1).view(torch.uint8)
    return rows


@fault(kills="KV-157", at="twinproof.kvstore.modules:KVTensorWrapper.set_weights_and_ids")
def wrapper_replaces_keys(original: Any, wrapper: Any, weights: Any, ids: Any) -> Any:
    """A wrapper replaces the keys of rows that are written by the ids, as upstream's does."""
    if weights.dtype == torch.uint8 and weights.shape[0] == ids.numel():
        weights = torch.cat([ids.reshape(-1, 1).view(torch.uint8), weights[:, 8:]], dim=1)
    return original(wrapper, weights, ids)


@fault(kills="KV-243", at=engines("write"))
def rest_of_weights_zero(
    original: Any, store: Any, table: str, ids: torch.Tensor, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    """A write that begins where the weight does leaves zeros in the columns of a new row that it does not name."""
    new, behind = ids[missing(store, table, ids)], 16 + values.shape[1]
    original(store, table, ids, values, begin, now, visit=visit)
    rest = 16 + store.options.rows[table].weight_bytes - behind
    if begin == 16 and rest > 0:
        original(store, table, new, torch.zeros(new.numel(), rest, dtype=torch.uint8), behind, now, visit=False)


@fault(kills="KV-266", at="twinproof.kvstore.modules:KVTensorWrapper._opened")
def columns_of_the_first_call(original: Any, wrapper: Any) -> Any:
    """A wrapper keeps the columns that its first call found, whatever its store returns afterwards."""
    store, table, *found = original(wrapper)
    wrapper.__dict__.setdefault("_found", found)
    return store, table, *wrapper._found


table_of_the_first_store = patched(
    "A wrapper takes the name of the first store's only table for the one that was asked for.",
    mutated(
        "twinproof.kvstore.modules:KVTensorWrapper.set_dram_db_wrapper",
        "layout = db.layout(table_of(db.tables, self._table))",
        "self._table = table_of(db.tables, self._table); layout = db.layout(self._table)",
    ),
    kills="KV-268",
)
refused_stores_kept = patched(
    "A wrapper keeps a store that it refuses.",
    mutated(
        "twinproof.kvstore.modules:KVTensorWrapper.set_dram_db_wrapper",
        "layout = db.layout(",
        "self._store = db; layout = db.layout(",
    ),
    kills="KV-268",
)

offsets_wrap_around = patched(
    "Ids that leave int64 with the offset begin anew at its other end, where other rows are.",
    mutated("twinproof.kvstore.modules:KVTensorWrapper._stored", "if outside.numel():", "if False:"),
    kills="KV-317",
)
last_id_left_out = patched(
    "An id that the offset leaves as it is counts as one that left int64.",
    mutated("twinproof.kvstore.modules:KVTensorWrapper._stored", "found < ids", "found <= ids"),
    kills="KV-317",
)
