"""Faults in loads: room that is not looked for, bases that are not compared, dtypes that are taken as they come."""

from __future__ import annotations

from typing import Any

from conformance.harness import wrap
from conformance.kvstore.planted.planting import exported, shared
from refimpl.kvstore.saved import SavedRows


def _nothing(original: Any, *arguments: Any) -> None:
    return None


def _removed_afterwards(original: Any, store: Any, path: Any, **options: Any) -> Any:
    gone = {table: SavedRows(path).deleted(table) for table in SavedRows(path).tables}
    with wrap("refimpl.kvstore.base:KVStoreBase.delete", _kept(gone)):
        report = original(store, path, **options)
    for table, ids in gone.items():
        store.delete(table, ids)
    return report


def _kept(gone: dict[str, Any]) -> Any:
    def around(original: Any, store: Any, table: str, ids: Any) -> int:
        listed = gone.get(table)
        return 0 if listed is not None and ids.equal(listed) else int(original(store, table, ids))

    return around


def _any_dtype(original: Any, value: Any, shape: Any, dtypes: Any, where: str) -> None:
    original(value, shape, (*dtypes, getattr(value, "dtype", None)), where)


def _rows_alone(original: Any, value: Any, shape: Any, dtypes: Any, where: str) -> None:
    width = value.shape[1] if getattr(value, "dim", int)() == 2 else shape[1]
    original(value, (shape[0], width), dtypes, where)


PLANTED = (
    shared(
        "integers_taken_for_states",
        "Values of any dtype are converted to the row's.",
        ("KV-115",),
        wrap("refimpl.kvstore.state:_check_values", _any_dtype),
    ),
    shared(
        "only_rows_are_counted",
        "Values of another width than the row's are found when they are written.",
        ("KV-116",),
        wrap("refimpl.kvstore.state:_check_values", _rows_alone),
    ),
    shared(
        "capacity_met_on_the_way",
        "A load looks at the capacity chunk by chunk.",
        ("KV-112",),
        wrap("refimpl.kvstore.files:check_room", _nothing),
    ),
    shared(
        "chunks_evict_each_other",
        "A later chunk of a load evicts the rows of an earlier one.",
        ("KV-113",),
        wrap("refimpl.kvstore.files:make_room", _nothing),
    ),
    exported(
        "removals_after_writes",
        "A delta's removals come after its rows, so that a full table loses others.",
        ("KV-114",),
        "load",
        _removed_afterwards,
    ),
)
