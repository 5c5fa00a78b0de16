"""Faults that ``test_refusals`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched
from conformance.kvstore.planted.planting import engines
from twinproof.errors import CapacityError, ShapeError


@fault(kills="KV-024", at="twinproof.kvstore.views:check_matrix")
def view_writes_any_width(
    original: Any, values: Any, row_count: Any, width: int, dtype: Any, where: str
) -> torch.Tensor:
    """set_range takes values wider than the row."""
    try:
        result: torch.Tensor = original(values, row_count, width, dtype, where)
    except ShapeError:
        if values.dim() != 2 or values.shape[1] < width:
            raise
        result = values[:, :width].contiguous()
    return result


@fault(kills="KV-022", at=engines("write_rows"))
def used_bit_set_in_callers_tensor(original: Any, store: Any, table: str, rows: torch.Tensor) -> None:
    """Loading whole rows changes the caller's tensor."""
    rows[:, 15] |= 0x80
    original(store, table, rows)


@fault(kills="KV-023", at="KVStore.set")
def misuse_noticed_too_late(original: Any, store: Any, table: str, ids: Any, weights: Any, **options: Any) -> None:
    """A batch of the wrong shape raises after something was written."""
    try:
        original(store, table, ids, weights, **options)
    except ShapeError:
        if table in store.tables:
            layout = store.layout(table)
            original(store, table, torch.tensor([1]), torch.ones(1, layout.embedding_dim, dtype=layout.weight_dtype))
        raise


@fault(kills="KV-129", at="KVStore.__init__")
def options_by_position(original: Any, store: Any, layouts: Any, *positional: Any, **options: Any) -> None:
    """Options are taken by position, so that a caller of another version sets the wrong one."""
    names = ("optimizer_in_row", "return_whole_row", "num_shards")
    original(store, layouts, **dict(zip(names, positional, strict=False)), **options)


@fault(kills="KV-081", at=engines("delete"))
def delete_counts_repeats(original: Any, store: Any, table: str, ids: torch.Tensor) -> int:
    """Deleting counts an id as often as it is named."""
    there = int(store.find(table, ids).sum())
    original(store, table, ids)
    return there


@fault(kills="KV-083", at="KVStore.set_return_whole_row")
def whole_rows_without_optimizer(original: Any, store: Any, enabled: bool) -> None:
    """return_whole_row is accepted without optimizer_in_row."""
    store.return_whole_row = bool(enabled)


@fault(kills="KV-082", at=engines("close"))
def closed_store_answers(original: Any, store: Any) -> None:
    """A closed store goes on answering."""


@fault(kills="KV-296", at=engines("reserve"))
def room_counts_as_a_change(original: Any, store: Any, table: str, row_count: int) -> None:
    """Making room moves the mark on, and the next delta has lost its base."""
    original(store, table, row_count)
    nothing = torch.zeros(0, dtype=torch.int64)
    store.write_metadata(table, nothing, nothing, 0)


@fault(kills="KV-296", at=engines("update"))
def refused_steps_count_as_changes(original: Any, store: Any, table: str, *arguments: Any) -> None:
    """A step that a full table refuses moves the mark on."""
    try:
        original(store, table, *arguments)
    except CapacityError:
        nothing = torch.zeros(0, dtype=torch.int64)
        store.write_metadata(table, nothing, nothing, 0)
        raise


stateless_rows_are_weights = patched(
    "Whole rows that have no states are returned as weights, whatever the store was told when it was made.",
    mutated(
        "twinproof.kvstore.store:KVStore.__init__",
        "bool(return_whole_row)",
        "bool(return_whole_row) and any(layout.state_slots for layout in options.rows.values())",
    ),
    kills="KV-372",
)


_STATE = "twinproof.kvstore.statedict:state_dict"
refused_views_close_the_store = patched(
    "A state dict that is refused closes what it has looked at, also where that is the store itself.",
    mutated(_STATE, "for taken in moment if snapshot else ():", "for taken in moment:"),
    kills="KV-416",
)
refused_moments_left = patched(
    "A state dict that is refused keeps its moment for as long as the error is kept.",
    mutated(_STATE, "taken.close()", "store.__dict__.setdefault('_kept', []).append(taken)"),
    kills="KV-416",
)
