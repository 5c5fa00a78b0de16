"""Eviction in the background: a thread that runs rounds in slices whenever a table has grown past a threshold.

Training waits for a slice at most, never for a round: between slices the store is free.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING

from refimpl.errors import ConfigError
from refimpl.kvstore.config import EvictionPolicy, EvictionStats

if TYPE_CHECKING:
    from refimpl.kvstore.base import KVStoreBase

__all__ = ["BackgroundEvictor"]


class BackgroundEvictor:
    """Runs an eviction round when a write has left a table with more than ``trigger_rows`` rows; a context manager.

    A round that cannot bring the table below the threshold is not repeated before the next write.

    Args:
        store: the store.
        table: the table that is watched.
        trigger_rows: rows that the table may have, at least 1.
        policy: instead of the table's own.
        slice_rows: rows looked at while the store is held.

    Raises:
        ConfigError: no policy, or numbers out of range.
    """

    def __init__(
        self,
        store: KVStoreBase,
        table: str,
        *,
        trigger_rows: int,
        policy: EvictionPolicy | None = None,
        slice_rows: int = 1024,
    ) -> None:
        if type(trigger_rows) is not int or trigger_rows < 1:
            raise ConfigError("not a threshold", got=trigger_rows, expected="rows >= 1", where="trigger_rows")
        # A round that is thrown away checks the policy and the slice here, not in the thread.
        store.start_eviction(table, policy=policy, slice_rows=slice_rows)
        self._store, self._table, self._trigger_rows = store, table, trigger_rows
        self._policy, self._slice_rows = policy, slice_rows
        self._condition = threading.Condition()
        self._due = self._busy = self._closed = False
        self._failure: Exception | None = None
        self.rounds: list[EvictionStats] = []
        self._thread = threading.Thread(target=self._work, name=f"kvstore-evict-{table}", daemon=True)
        self._thread.start()
        store.add_listener(self._written)

    def _written(self, table: str) -> None:
        if table == self._table and self._store.size(table) > self._trigger_rows:
            with self._condition:
                self._due = True
                self._condition.notify_all()

    def _work(self) -> None:
        while True:
            with self._condition:
                self._busy = False
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._due or self._closed)
                if self._closed:
                    return
                self._due, self._busy = False, True
            try:
                self._round()
            except Exception as error:
                self._failure = error

    def _round(self) -> None:
        found = self._store.start_eviction(self._table, policy=self._policy, slice_rows=self._slice_rows)
        while not self._closed and found.step():
            pass
        self.rounds.append(found.stats)

    def wait(self) -> list[EvictionStats]:
        """Wait until nothing is due; the rounds so far. Raises what a round raised."""
        with self._condition:
            self._condition.wait_for(lambda: self._closed or not (self._due or self._busy))
        if self._failure is not None:
            raise self._failure
        return list(self.rounds)

    def close(self) -> None:
        """End after the slice that is running; twice is harmless."""
        self._store.remove_listener(self._written)
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join()

    def __enter__(self) -> BackgroundEvictor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
