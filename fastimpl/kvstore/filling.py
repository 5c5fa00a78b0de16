"""An empty table is filled beside itself: its rows are read once, checked as they pass, and shown in one step.

Prevents a second reading, of which the first only checks; and half a table for those who read meanwhile.
"""

from __future__ import annotations

import os
from collections import deque

from fastimpl.kvstore.native import AllocationError, check_status
from fastimpl.kvstore.store import KVStore
from fastimpl.ops import KVFilling
from fastimpl.regimes import regime
from twinproof.errors import CorruptionError
from twinproof.kvstore import store as shared
from twinproof.kvstore.disk import SavedRows

__all__ = ["WaitingRows", "fill"]

_REFUSED = 1
_SPOKEN_ROWS = regime(4096, 2)  # In memory at once where something is wrong.


class WaitingRows:
    """See ``twinproof.kvstore.disk.PendingRows``."""

    def __init__(self, table: str, filling: KVFilling) -> None:
        self._table, self._filling = table, filling

    def publish(self) -> bool:
        status = self._filling.publish()
        if status == _REFUSED:
            return False
        check_status(status, self._table)
        return True

    def close(self) -> None:
        self._filling.close()

    def read(self, saved: SavedRows, parts: range) -> None:
        """Read and check parts of the table's saved rows, in order. Raises as ``saved.rows``, and AllocationError."""
        table, found = self._table, saved.saved_table(self._table)
        record = saved.catalog.tensors[f"{table}.rows"].chunks[0]
        ends, bucket_size = found.bucket_ends, saved.buckets.bucket_size or 0
        descriptor = os.open(record.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for start in parts:
                ids = saved.read_ids(table, start, min(parts.step, parts.stop - start))
                begin = record.begin + start * found.layout.row_bytes
                status = self._filling.add(descriptor, begin, ids, ends, start, bucket_size)
                if status == _REFUSED:
                    # What is wrong is said by those who read rows and check then; the seam to the part before, too.
                    wrong = saved.between(table, max(parts.start, start - 1), start + ids.numel(), _SPOKEN_ROWS)
                    deque(wrong, maxlen=0)
                    got, where = "other rows when read again", f"{saved.path}: {table}"
                    raise CorruptionError(
                        "rows that change while they are read", got=got, expected="the same", where=where
                    )
                check_status(status, table)
        finally:
            os.close(descriptor)


def fill(
    part_rows: int, store: shared.KVStore, saved: SavedRows, table: str, rows: range, weights_only: bool, ahead: int
) -> WaitingRows | None:
    """See ``twinproof.kvstore.disk.RowFiles.fill``; ``part_rows``: how many are read in one call."""
    layout = store.layout(table)
    is_converted = saved.saved_table(table).layout != layout or (weights_only and layout.state_slots)
    if not isinstance(store, KVStore) or not store.can_fill or saved.form != "rows" or is_converted:
        return None
    filling = store.open_filling(table, len(rows), ahead)
    if filling is None:
        raise AllocationError("out of memory", got=None, expected="memory for rows", where=table)
    waiting = WaitingRows(table, filling)
    try:
        waiting.read(saved, range(rows.start, rows.stop, part_rows))
    except BaseException:
        waiting.close()
        raise
    return waiting
