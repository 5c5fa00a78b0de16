"""Faults that ``test_load_capacity`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched, wrap
from twinproof.kvstore.disk import SavedRows


def _nothing(original: Any, *arguments: Any) -> None:
    return None


capacity_met_on_the_way = patched(
    "A load checks the capacity chunk by chunk instead of beforehand.",
    wrap("twinproof.kvstore.disk:check_load_fits", _nothing),
    kills="KV-112",
)
chunks_evict_each_other = patched(
    "A later chunk of a load evicts the rows of an earlier one.",
    wrap("twinproof.kvstore.disk:evict_for_load", _nothing),
    kills="KV-113",
)


def _kept(gone: dict[str, Any]) -> Any:
    def around(original: Any, store: Any, table: str, ids: Any) -> int:
        listed = gone.get(table)
        return 0 if listed is not None and ids.equal(listed) else int(original(store, table, ids))

    return around


@fault(kills="KV-114", at="load")
def removals_after_writes(original: Any, store: Any, path: Any, **options: Any) -> Any:
    """A delta's removals come after its rows, so that a full table loses others."""
    gone = {table: SavedRows(path).deleted(table) for table in SavedRows(path).tables}
    with wrap("twinproof.kvstore.store:KVStore.delete", _kept(gone)):
        report = original(store, path, **options)
    for table, ids in gone.items():
        store.delete(table, ids)
    return report


_KINDS = '("score", "count", "ttl_count")'
oldest_instead_of_rarest = patched(
    "A load makes room by time under ttl_count.",
    mutated("twinproof.kvstore.deltas:evict_for_load", _KINDS, '("score", "count")'),
    kills="KV-113",
)
oldest_instead_of_lowest = patched(
    "A load makes room by time under score.",
    mutated("twinproof.kvstore.deltas:evict_for_load", _KINDS, '("count", "ttl_count")'),
    kills="KV-113",
)
views_beyond_the_capacity = patched(
    "A load through views of more ids than a table may hold keeps some of them.",
    mutated(
        "twinproof.kvstore.statedict:KVLoadPlanner.create_local_plan",
        "check_load_fits(store, table, ids.numel())",
        "pass",
    ),
    kills="KV-343",
)
views_evict_each_other = patched(
    "A chunk of a load through views evicts the rows of another.",
    mutated("twinproof.kvstore.statedict:KVLoadPlanner._write", "evict_for_load(store, table, ids)", "pass"),
    kills="KV-343",
)

room_is_made_for_what_was_there = patched(
    "A table that was empty when it was read makes no room, whatever was written to it since.",
    mutated(
        "twinproof.kvstore.disk:_Load.write",
        "self._ids(table)[0] if ids is None else ids",
        "self._ids(table)[0][:0] if ids is None else ids",
    ),
    kills="KV-363",
    of="fastimpl",
)
tables_of_a_name_are_one = patched(
    "Tables of two stores that have the same name are taken for one.",
    mutated("twinproof.kvstore.statedict:_written_ids", "(id(view.source), view.table)", "(0, view.table)"),
    kills="KV-364",
)
