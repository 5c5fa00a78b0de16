"""Faults that ``test_filling`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched
from conformance.kvstore.planted.planting import CHUNKS, engines


@fault(kills="KV-137", at="fastimpl.kvstore.filling:WaitingRows.read")
def tables_shown_before_the_last_check(original: Any, waiting: Any, saved: Any, chunks: range) -> None:
    """A table that a load fills is visible before its last chunk is checked."""
    original(waiting, saved, chunks[:-1])
    waiting.publish()
    original(waiting, saved, chunks[-1:])


@fault(kills="KV-138", at="fastimpl.kvstore.filling:WaitingRows.publish")
def tables_written_meanwhile(original: Any, waiting: Any) -> bool:
    """Loaded rows are dropped when their table was written to meanwhile."""
    original(waiting)
    return True


@fault(kills="KV-139", at=CHUNKS)
def chunks_each_alone(original: Any, files: Any, saved: Any, table: str, begin: int, end: int, chunk_rows: int) -> Any:
    """Ids are compared within a chunk only, not from one chunk to the next."""
    first, behind = saved.saved_table(table).rows_of(begin, end)
    for start in range(first, behind, chunk_rows):
        yield saved.rows(table, start, min(chunk_rows, behind - start))


@fault(kills="KV-138", at="fastimpl.kvstore.files:fill")
def filled_at_a_guessed_moment(
    original: Any, part_rows: int, store: Any, saved: Any, table: str, rows: range, weights_only: bool, ahead: int
) -> Any:
    """Loaded rows count as changed at the moment that was guessed when the load began."""
    guessed, loaded = store.mark() + 1 + ahead, saved.ids(table)
    engine, changes = store._engine, store._engine.changes

    def changed(name: str, since: int) -> Any:
        found, *rest = changes(name, since)
        return (found[~torch.isin(found, loaded)] if name == table and since >= guessed else found), *rest

    engine.changes = changed
    return original(part_rows, store, saved, table, rows, weights_only, ahead)


@fault(kills="KV-138", at=engines("snapshot"))
def loaded_rows_found_before(original: Any, store: Any) -> Any:
    """A snapshot of an empty table lists none of the rows that a load brings later, but finds them."""
    taken = original(store)
    find, empty = taken.find, {table for table in store.options.rows if store.size(table) == 0}
    taken.find = lambda table, ids: store.find(table, ids) if table in empty else find(table, ids)
    return taken


file_left_open = patched(
    "A load that finds a row wrong leaves its file open.",
    mutated(
        "fastimpl.kvstore.filling:WaitingRows.read",
        "os.close(descriptor)",
        "__import__('sys').exc_info()[0] is None and os.close(descriptor)",
    ),
    kills="KV-250",
)
