"""Eviction rounds: a plan made at one moment, carried out in slices, by hand or by a background thread.

Prevents rounds that evict by stale statistics: a row that was written after its round began stays.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from twinproof.errors import ConfigError
from twinproof.kvstore.config import EvictionStats
from twinproof.kvstore.rows import RoundPlan, RowEngine

__all__ = ["EvictionRound"]


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
        self._paused = False
        self._processed_count = self._evicted_count = 0

    @property
    def done(self) -> bool:
        """Whether every row was looked at, or the round was cancelled."""
        return self._processed_count >= self._plan.ids.numel()

    @property
    def stats(self) -> EvictionStats:
        """What it did so far."""
        return EvictionStats(self._processed_count, self._evicted_count)

    def pause(self) -> None:
        """Make the following steps do nothing."""
        self._paused = True

    def resume(self) -> None:
        """Undo ``pause``."""
        self._paused = False

    def cancel(self) -> None:
        """End the round; rows not yet looked at stay."""
        with self._lock:
            self._plan = replace(self._plan, ids=self._plan.ids[: self._processed_count])

    def step(self) -> bool:
        """Look at the next slice; whether there is more to do. A paused round does nothing and has more to do."""
        with self._lock:
            if self._paused or self.done:
                return not self.done
            ids = self._plan.ids[self._processed_count : self._processed_count + self._slice_rows]
            self._evicted_count += self._engine.evict_some(self._plan, ids)
            self._processed_count += ids.numel()
            return not self.done

    def run(self) -> EvictionStats:
        """Look at all that is left, even if it was paused; what the round did."""
        self.resume()
        while self.step():
            pass
        return self.stats
