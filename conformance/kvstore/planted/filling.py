"""Faults that ``test_filling`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault
from conformance.kvstore.planted.planting import CHUNKS


@fault(kills="KV-137", at="fastimpl.kvstore.filling:WaitingRows.read")
def tables_shown_before_the_last_check(original: Any, waiting: Any, saved: Any, chunks: range) -> None:
    """A table that is filled is shown when its last chunk is still to come."""
    original(waiting, saved, chunks[:-1])
    waiting.publish()
    original(waiting, saved, chunks[-1:])


@fault(kills="KV-138", at="fastimpl.kvstore.filling:WaitingRows.publish")
def tables_written_meanwhile(original: Any, waiting: Any) -> bool:
    """Rows that wait for a table which is not empty any more are forgotten."""
    original(waiting)
    return True


@fault(kills="KV-139", at=CHUNKS)
def chunks_each_alone(original: Any, files: Any, saved: Any, table: str, begin: int, end: int, chunk_rows: int) -> Any:
    """Ids are compared within a chunk only."""
    first, behind = saved.saved_table(table).rows_of(begin, end)
    for start in range(first, behind, chunk_rows):
        yield saved.rows(table, start, min(chunk_rows, behind - start))
