"""Faults that ``test_allocation`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched
from conformance.kvstore.planted.planting import keys_of


@fault(kills="KV-121", at="fastimpl.kvstore.store:NativeRows.write")
def half_a_batch_before_memory_ran_out(
    original: Any, store: Any, table: str, ids: torch.Tensor, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    """What was written before an allocation failed stays."""
    half = ids.numel() // 2
    original(store, table, ids[:half], values[:half].contiguous(), begin, now, visit=visit)
    original(store, table, ids[half:], values[half:].contiguous(), begin, now, visit=visit)


@fault(kills="KV-240", at="fastimpl.kvstore.store:NativeRows.reserve")
def no_room_is_made(original: Any, store: Any, table: str, row_count: int) -> None:
    """A state dict is written chunk by chunk, into memory that each asks for."""


@fault(kills="KV-122", at="fastimpl.kvstore.store:NativeRows.write_rows")
def row_cleared_before_memory_ran_out(original: Any, store: Any, table: str, rows: torch.Tensor) -> None:
    """A row that a failing load was about to replace is left blank."""
    try:
        original(store, table, rows)
    except MemoryError:
        known = rows[store.find(table, keys_of(rows))][:1].clone()
        known[:, 8:] = 0
        original(store, table, known)
        raise


@fault(kills="KV-135", at="fastimpl.kvstore.store:NativeRows.write")
def duplicates_need_room(original: Any, store: Any, table: str, ids: torch.Tensor, *rest: Any, **options: Any) -> Any:
    """A batch makes room for as many rows as it has ids, duplicates and rows that are there included."""
    store.reserve(table, store.size(table) + ids.numel())
    return original(store, table, ids, *rest, **options)


too_many_rows_are_no_memory = patched(
    "A number of rows that no table can have is taken for memory that is not there.",
    mutated("fastimpl.kvstore.store:NativeRows.reserve", "if row_count > ROWS_MAX:", "if False:"),
    kills="KV-122",
)

slices_that_failed_are_passed_over = patched(
    "A slice counts as looked at before it was, so that a round goes on behind the one that failed.",
    mutated(
        "twinproof.kvstore.eviction:EvictionRound.step",
        "self._evicted_count += self._engine.evict_some(self._plan, ids)\n        self._processed_count += ids.numel()",
        "self._processed_count += ids.numel()\n        self._evicted_count += self._engine.evict_some(self._plan, ids)",
    ),
    kills="KV-280",
)


@fault(kills="KV-335", at="fastimpl.kvstore.store:NativeRows.delete")
def deleted_rows_stay_in_memory(original: Any, store: Any, table: str, ids: torch.Tensor) -> Any:
    """Rows that are deleted leave the counts, and their memory stays in the process."""
    kept = torch.ones(ids.numel() * store.options.rows[table].row_bytes, dtype=torch.uint8)
    vars(store).setdefault("kept", []).append(kept)
    return original(store, table, ids)


rows_go_before_the_new_ones_are_there = patched(
    "A load that clears gives the rows of its tables up before it writes.",
    mutated(
        "twinproof.kvstore.statedict:load_state_dict",
        "now = store.now()",
        "now = store.now(); [store.clear(each) for each in found if clear]",
    ),
    kills="KV-418",
)
no_room_for_what_clears = patched(
    "A load that clears makes no room in all of its tables before it writes to the first.",
    mutated(
        "twinproof.kvstore.statedict:load_state_dict",
        "reserve_for_load(store, table, new_id_count(store, table, incoming.ids))",
        "clear or reserve_for_load(store, table, new_id_count(store, table, incoming.ids))",
    ),
    kills="KV-418",
)
any_count_is_expected = patched(
    "A number of rows that is refused is told that any number is right.",
    mutated("fastimpl.kvstore.store:NativeRows.reserve", "an int from 0 to {ROWS_MAX}", "an int >= 0"),
    kills="KV-420",
)
