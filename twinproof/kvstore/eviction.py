"""Eviction rounds: a plan made at one moment, carried out in slices, by hand or by a background thread.

Prevents rounds that evict by stale statistics: a row that was written after its round began stays. Training waits for a
slice at most, never for a round: between slices the store is free.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

from twinproof.errors import ConfigError, StoreClosedError, UnsupportedError
from twinproof.kvstore.options import EvictionPolicy, EvictionStats, StoreStats
from twinproof.kvstore.rows import RoundPlan, RowEngine

__all__ = ["BackgroundEvictor", "EvictableStore", "EvictionRound"]


class EvictionRound:
    """One round: ``step`` looks at the next slice, ``run`` at all that is left; between steps the store is free.

    Args:
        engine: the rows.
        plan: what the engine began.
        slice_rows: rows looked at in a step, at least 1.

    ``pause`` makes ``step`` do nothing until ``resume``; both in any order and number. ``cancel`` ends the round.
    """

    def __init__(self, engine: RowEngine, plan: RoundPlan, slice_rows: int = 4096) -> None:
        if type(slice_rows) is not int or slice_rows < 1:
            raise ConfigError("not a slice", got=slice_rows, expected="rows >= 1", where="slice_rows")
        self._engine, self._plan, self._slice_rows = engine, plan, slice_rows
        self._lock = threading.Lock()
        self._going = threading.Event()
        self._going.set()
        self._processed_count = self._evicted_count = 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "a round is neither copied nor pickled",
            got=type(self).__name__,
            expected="start_eviction()",
            where="pickle",
        )

    @property
    def done(self) -> bool:
        """Whether every row was looked at, or the round was cancelled."""
        return self._processed_count >= self._plan.ids.numel()

    @property
    def stats(self) -> EvictionStats:
        """What it did so far."""
        return EvictionStats(self._processed_count, self._evicted_count)

    def pause(self) -> None:
        """Make the following steps do nothing; who is in ``run`` waits."""
        self._going.clear()

    def resume(self) -> None:
        """Undo ``pause``."""
        self._going.set()

    def cancel(self) -> None:
        """End the round; rows not yet looked at stay."""
        with self._lock:
            self._plan = replace(self._plan, ids=self._plan.ids[: self._processed_count])
        self._going.set()

    def step(self) -> bool:
        """Look at the next slice; whether there is more to do. A paused round does nothing and has more to do."""
        with self._lock:
            if not self._going.is_set() or self.done:
                return not self.done
            ids = self._plan.ids[self._processed_count : self._processed_count + self._slice_rows]
            self._evicted_count += self._engine.evict_some(self._plan, ids)
            self._processed_count += ids.numel()
            return not self.done

    def run(self) -> EvictionStats:
        """Look at all that is left, even if it was paused; what the round did. Waits while another thread pauses it."""
        self.resume()
        while self.step():
            self._going.wait()
        return self.stats


class EvictableStore(Protocol):
    """What the evictor asks of a store; see ``KVStore``."""

    def start_eviction(self, table: str, *, policy: EvictionPolicy | None, slice_rows: int) -> EvictionRound:
        """A round over the rows of this moment."""

    def size(self, table: str) -> int:
        """The number of rows of the table."""

    def stats(self) -> StoreStats:
        """Exact counters."""

    def add_listener(self, listener: Callable[[str], None], *, steps: bool = False) -> None:
        """Call ``listener(table)`` after writes, or after steps."""

    def remove_listener(self, listener: Callable[[str], None]) -> None:
        """Undo ``add_listener``."""


class BackgroundEvictor:
    """Runs an eviction round over a table when one of the triggers given says so; a context manager.

    A round that cannot bring the table below a threshold is not repeated before the next write.

    Args:
        store: the store.
        table: the table that is watched.
        trigger_rows: after a write that left the table with more rows than this.
        trigger_bytes: after a write to the table that left the store with more bytes of rows, of all tables, than this.
        trigger_steps: after every so many calls of ``apply_gradients`` on the table.
        policy: instead of the table's own.
        slice_rows: rows looked at while the store is held.

    Raises:
        ConfigError: no policy, or numbers out of range.
    """

    def __init__(
        self,
        store: EvictableStore,
        table: str,
        *,
        trigger_rows: int | None = None,
        trigger_bytes: int | None = None,
        trigger_steps: int | None = None,
        policy: EvictionPolicy | None = None,
        slice_rows: int = 1024,
    ) -> None:
        if not hasattr(store, "start_eviction"):
            raise ConfigError("not a store", got=type(store).__name__, expected="a KVStore", where="store")
        triggers = {"trigger_rows": trigger_rows, "trigger_bytes": trigger_bytes, "trigger_steps": trigger_steps}
        for name, value in triggers.items():
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError("not a threshold", got=value, expected="an int >= 1", where=name)
        if all(value is None for value in triggers.values()):
            raise ConfigError("nothing would ever run a round", got=None, expected=sorted(triggers), where="triggers")
        # A round that is thrown away checks the policy and the slice here, not in the thread.
        store.start_eviction(table, policy=policy, slice_rows=slice_rows)
        self._store, self._table, self._step_count = store, table, 0
        self._trigger_rows, self._trigger_bytes, self._trigger_steps = trigger_rows, trigger_bytes, trigger_steps
        self._policy, self._slice_rows = policy, slice_rows
        self._condition = threading.Condition()
        self._due = self._busy = self._closed = False
        self._failure: BaseException | None = None
        self._is_told = False
        self.rounds: list[EvictionStats] = []
        self._thread = threading.Thread(target=self._work, name=f"kvstore-evict-{table}", daemon=True)
        self._thread.start()
        if trigger_rows is not None or trigger_bytes is not None:
            store.add_listener(self._written)
        if trigger_steps is not None:
            store.add_listener(self._stepped, steps=True)

    def _written(self, table: str) -> None:
        if table == self._table and (self._has_many_rows() or self._has_many_bytes()):
            self._make_due()

    def _has_many_rows(self) -> bool:
        return self._trigger_rows is not None and self._store.size(self._table) > self._trigger_rows

    def _has_many_bytes(self) -> bool:
        return self._trigger_bytes is not None and self._store.stats().row_bytes > self._trigger_bytes

    def _stepped(self, table: str) -> None:
        if table != self._table:
            return
        # It listens to steps only then.
        assert self._trigger_steps is not None
        self._step_count += 1
        if self._step_count % self._trigger_steps == 0:
            self._make_due()

    def _make_due(self) -> None:
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
            except BaseException as error:
                # Of any class: whoever waits would wait for ever for a thread that has ended.
                self._failure, self._is_told = error, False

    def _round(self) -> None:
        found = self._store.start_eviction(self._table, policy=self._policy, slice_rows=self._slice_rows)
        while not self._closed and found.step():
            pass
        self.rounds.append(found.stats)

    def wait(self) -> list[EvictionStats]:
        """Wait until nothing is due; the rounds so far.

        Raises what a round raised; ConfigError in a forked process, where the thread does not live.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._is_over() or not (self._due or self._busy))
        if self._is_over() and not self._closed:
            raise ConfigError(
                "a forked process has no thread of this evictor, and nothing is evicted",
                got=f"process {os.getpid()}",
                expected="an evictor that was made in this process",
                where=self._table,
            )
        if self._failure is not None:
            self._is_told = True
            raise self._failure
        return list(self.rounds)

    def _is_over(self) -> bool:
        return self._closed or not self._thread.is_alive()

    def close(self) -> None:
        """End after the slice that is running; twice is harmless. Raises what a round raised and nobody waited for."""
        self._end()
        self._tell()

    def _tell(self) -> None:
        failure, was_told, self._is_told = self._failure, self._is_told, True
        # A store that was closed has nothing to evict.
        if failure is not None and not was_told and not isinstance(failure, StoreClosedError):
            raise failure

    def _end(self) -> None:
        self._store.remove_listener(self._written)
        self._store.remove_listener(self._stepped)
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join()

    def __enter__(self) -> BackgroundEvictor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        if error is None:
            self._tell()
