"""Eviction rounds: a plan made at one moment, carried out in slices, by hand or by a background thread.

Prevents rounds that evict by stale statistics: a row that was written after its round began stays.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from refimpl.optimizers import row_sum
from twinproof.errors import ConfigError
from twinproof.kvstore.config import EvictionPolicy, EvictionStats
from twinproof.kvstore.layout import HEADER_BYTES, RowLayout, from_bytes, unpack_header

if TYPE_CHECKING:
    from twinproof.kvstore.base import KVStoreBase

__all__ = ["EvictionRound", "RoundPlan", "condemned", "decayed"]


@dataclass(frozen=True)
class RoundPlan:
    """One round over one table.

    ``ids``: int64 [n], the rows of the moment it began, ascending. ``now``: the clock then. ``mark``: rows written
    after it stay. ``cutoff``: for the score policy, the lowest (score bits, id) that is kept, None when all are.
    """

    table: str
    policy: EvictionPolicy
    now: int
    mark: int
    ids: torch.Tensor
    cutoff: tuple[int, int] | None = None


def decayed(policy: EvictionPolicy, counts: torch.Tensor) -> torch.Tensor:
    """``floor(count * decay)`` in float64, for the policies that look at counts; else the counts as they are."""
    if policy.kind not in ("count", "ttl_count") or policy.decay == 1.0:
        return counts
    return (counts.to(torch.float64) * policy.decay).floor().to(torch.int64)


def condemned(plan: RoundPlan, layout: RowLayout, rows: torch.Tensor) -> torch.Tensor:
    """Bool [n]: which rows, uint8 [n, row_bytes], the policy evicts. The predicates of ``EvictionPolicy``."""
    policy, header = plan.policy, unpack_header(rows)
    nothing = torch.zeros(rows.shape[0], dtype=torch.bool)
    old = (plan.now - header.timestamps > policy.ttl_seconds) if policy.ttl_seconds else nothing
    rare = decayed(policy, header.counts) < policy.count_threshold
    if policy.kind == "ttl":
        return old
    if policy.kind == "count":
        return rare
    if policy.kind == "ttl_count":
        return old & rare
    if policy.kind == "timestamp":
        return header.timestamps < policy.timestamp_threshold
    if policy.kind == "l2":
        raw = rows[:, HEADER_BYTES : HEADER_BYTES + layout.weight_bytes]
        wide = from_bytes(raw, layout.weight_dtype).to(torch.float64)
        return row_sum(wide * wide)[:, 0] < policy.l2_threshold * policy.l2_threshold
    if plan.cutoff is None:
        return nothing
    score, key = plan.cutoff
    return (header.counts < score) | ((header.counts == score) & (header.ids < key))


class EvictionRound:
    """One round: ``step`` looks at the next slice, ``run`` at all that is left; between steps the store is free.

    Args:
        store: the store.
        plan: from the store.
        slice_rows: rows looked at in a step, at least 1.

    ``pause`` makes ``step`` do nothing until ``resume``; both in any order and number. ``cancel`` ends the round.
    """

    def __init__(self, store: KVStoreBase, plan: RoundPlan, slice_rows: int = 4096) -> None:
        if type(slice_rows) is not int or slice_rows < 1:
            raise ConfigError("not a slice", got=slice_rows, expected="rows >= 1", where="slice_rows")
        self._store, self._plan, self._slice_rows = store, plan, slice_rows
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
            kept = self._plan.ids[: self._processed_count]
            self._plan = RoundPlan(**{**vars(self._plan), "ids": kept})

    def step(self) -> bool:
        """Look at the next slice; whether there is more to do. A paused round does nothing and has more to do."""
        with self._lock:
            if self._paused or self.done:
                return not self.done
            ids = self._plan.ids[self._processed_count : self._processed_count + self._slice_rows]
            self._evicted_count += self._store._evict_some(self._plan, ids)
            self._processed_count += ids.numel()
            return not self.done

    def run(self) -> EvictionStats:
        """Look at all that is left, even if it was paused; what the round did."""
        self.resume()
        while self.step():
            pass
        return self.stats
