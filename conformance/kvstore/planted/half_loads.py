"""Faults that ``test_half_loads`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_DISK, _PLANNER = "twinproof.kvstore.disk", "twinproof.kvstore.statedict:KVLoadPlanner._write"
_STATE_DICT = "twinproof.kvstore.store:KVStore.load_state_dict"

room_for_empty_tables_alone = patched(
    "A load makes room in empty tables alone.",
    mutated(
        f"{_DISK}:_Load.read",
        "reserve_for_load(self.store, table, new_count, ",
        "self.store.size(table) or reserve_for_load(self.store, table, new_count, ",
    ),
    kills="KV-477",
    of="fastimpl",
)
room_for_no_views = patched(
    "A load through views asks for memory chunk by chunk.",
    mutated(_PLANNER, "reserve_for_load(store, table, new_id_count(store, table, ids))", "pass"),
    kills="KV-477",
    of="fastimpl",
)
chunks_are_told = patched(
    "A load tells of each chunk, too.",
    mutated(f"{_DISK}:_Load.write", ", tell=False", ""),
    kills="KV-478",
)
views_are_told = patched(
    "A load through views tells of each chunk of each, too.",
    mutated("twinproof.kvstore.views:KVTensor.accept", "tell=False", "tell=True"),
    kills="KV-478",
)
tables_behind_one_that_raises = patched(
    "Listeners of the second table are not told where one of the first raises.",
    mutated(
        "twinproof.kvstore.store:KVStore.tell_written",
        "for table in reversed(tables):\n            told.callback(_tell, self._listeners, table)",
        "for table in tables:\n            _tell(self._listeners, table)",
    ),
    kills="KV-478",
)
half_loads_are_not_told = patched(
    "A load that ends in the middle tells nobody.",
    mutated(
        f"{_DISK}:StoreFiles.load",
        "told.callback(lambda: store.tell_written(*begun))",
        "told.push(lambda kind, *_: kind is None and store.tell_written(*begun))",
    ),
    kills="KV-479",
)
half_state_dicts_are_not_told = patched(
    "A load of a state dict that ends in the middle tells nobody.",
    mutated(_STATE_DICT, "finally:", "except BaseException:\n        raise\n    else:"),
    kills="KV-479",
)
half_views_are_not_told = patched(
    "A load through views that ends in the middle tells nobody.",
    mutated(
        _PLANNER,
        "told.callback(store.tell_written, table)",
        "told.push(lambda kind, *_, of=store, name=table: kind is None and of.tell_written(name))",
    ),
    kills="KV-479",
)
