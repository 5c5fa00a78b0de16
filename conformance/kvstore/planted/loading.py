"""Faults in loads: room that is not looked for, bases that are not compared, dtypes that are taken as they come."""

from __future__ import annotations

import dataclasses
from typing import Any

from conformance.harness import PlantedBug, wrap
from conformance.kvstore.planted.planting import exported, loaded, shared
from twinproof.kvstore.disk import SavedRows


def _nothing(original: Any, *arguments: Any) -> None:
    return None


def _removed_afterwards(original: Any, store: Any, path: Any, **options: Any) -> Any:
    gone = {table: SavedRows(path).deleted(table) for table in SavedRows(path).tables}
    with wrap("twinproof.kvstore.store:KVStore.delete", _kept(gone)):
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


def _any_base_of_the_kind(original: Any, store: Any, table: str, bases: Any, where: str) -> None:
    if store.fingerprints.loaded(store, table) == "empty":
        original(store, table, bases, where)


def _by_ids_alone(original: Any, source: Any, table: str, ids: Any) -> int:
    return int(ids.sum()) % 2**64


def _with_the_mark(original: Any, rows: Any, removed: Any, row_count: int, bases: Any) -> str:
    _Calls.count += 1
    return str(original(rows, removed, row_count + _Calls.count, bases))


def _own_bases(original: Any, store: Any, by_rank: Any, since: Any) -> Any:
    names, bases, steps = original(store, by_rank, since)
    if len(by_rank) == 1:
        return names, bases, steps
    return names, dict.fromkeys(bases, ()), steps


def _shown_early(original: Any, waiting: Any, saved: Any, chunks: range) -> None:
    original(waiting, saved, chunks[:-1])
    waiting.publish()
    original(waiting, saved, chunks[-1:])


def _believed(original: Any, waiting: Any) -> bool:
    original(waiting)
    return True


def _each_alone(original: Any, files: Any, saved: Any, table: str, begin: int, end: int, chunk_rows: int) -> Any:
    first, behind = saved.saved_table(table).rows_of(begin, end)
    for start in range(first, behind, chunk_rows):
        yield saved.rows(table, start, min(chunk_rows, behind - start))


class _Calls:
    count = 0


def _old_keys_needed(original: Any, metadata: Any, path: str) -> Any:
    content = original(metadata, path)
    return dataclasses.replace(content, kind="full") if content.version == 2 else content


PLANTED = (
    PlantedBug(
        "tables_shown_before_the_last_check",
        "A table that is filled is shown when its last chunk is still to come.",
        ("KV-137",),
        "fastimpl",
        wrap("fastimpl.kvstore.filling:WaitingRows.read", _shown_early),
    ),
    PlantedBug(
        "tables_written_meanwhile",
        "Rows that wait for a table which is not empty any more are forgotten.",
        ("KV-138",),
        "fastimpl",
        wrap("fastimpl.kvstore.filling:WaitingRows.publish", _believed),
    ),
    shared(
        "chunks_each_alone",
        "Ids are compared within a chunk only.",
        ("KV-139",),
        loaded(_each_alone),
    ),
    shared(
        "deltas_on_any_base",
        "Once anything was loaded, any delta is taken.",
        ("KV-125",),
        wrap("twinproof.kvstore.disk:check_base", _any_base_of_the_kind),
    ),
    shared(
        "moments_of_ids",
        "A moment is named by its ids, so that another run's delta passes.",
        ("KV-126",),
        wrap("twinproof.kvstore.deltas:digest_rows", _by_ids_alone),
    ),
    shared(
        "bases_of_ranks_lost",
        "A save by several ranks does not name its base, because their marks differ.",
        ("KV-130",),
        wrap("twinproof.kvstore.disk:named", _own_bases),
    ),
    shared(
        "names_of_histories",
        "The name of a moment depends on what was saved before.",
        ("KV-127",),
        wrap("twinproof.kvstore.deltas:fingerprint_of", _with_the_mark),
    ),
    shared(
        "old_deltas_keep_what_they_remove",
        "Removed ids of a version 2 delta stay.",
        ("KV-128",),
        wrap("twinproof.kvstore.disk:read_content", _old_keys_needed),
    ),
    shared(
        "integers_taken_for_states",
        "Values of any dtype are converted to the row's.",
        ("KV-115",),
        wrap("twinproof.kvstore.statedict:_check_values", _any_dtype),
    ),
    shared(
        "only_rows_are_counted",
        "Values of another width than the row's are found when they are written.",
        ("KV-116",),
        wrap("twinproof.kvstore.statedict:_check_values", _rows_alone),
    ),
    shared(
        "capacity_met_on_the_way",
        "A load looks at the capacity chunk by chunk.",
        ("KV-112",),
        wrap("twinproof.kvstore.disk:check_load_fits", _nothing),
    ),
    shared(
        "chunks_evict_each_other",
        "A later chunk of a load evicts the rows of an earlier one.",
        ("KV-113",),
        wrap("twinproof.kvstore.disk:evict_for_load", _nothing),
    ),
    exported(
        "removals_after_writes",
        "A delta's removals come after its rows, so that a full table loses others.",
        ("KV-114",),
        "load",
        _removed_afterwards,
    ),
)
