"""The primitives that an implementation of the store supplies, beside those of ``RowSource`` and ``TrackedSource``.

``refimpl.kvstore.KVStore`` supplies them with a dictionary, ``fastimpl.kvstore.KVStore`` with C++: checks, errors and
everything made of several primitives stand once, in ``base``. Arguments arrive checked: a known table, contiguous CPU
tensors of the right dtype and width, int64 ids [n], ``now`` in 0..2**32 - 1. Each call is atomic for its table, raises
StoreClosedError after ``close``, and changes nothing when it raises.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from twinproof.kvstore.config import EvictionPolicy, StoreStats
from twinproof.kvstore.eviction import RoundPlan
from twinproof.kvstore.layout import unpack_header
from twinproof.kvstore.reading import SnapshotBase, TrackedSource
from twinproof.optimizers import Hyper

__all__ = ["RowStore"]


class RowStore(TrackedSource):
    """What a store can do to its rows."""

    @abstractmethod
    def _open(self) -> None:
        """Make the empty tables; the last step of construction, when ``options`` are there."""

    @abstractmethod
    def _write(self, table: str, ids: torch.Tensor, values: torch.Tensor, begin: int, now: int, *, visit: bool) -> None:
        """Place values, uint8 [n, w], at [begin, begin + w) of the ids' rows; of duplicates the last wins.

        A missing id gets a row first: its initial row, used, timestamp ``now``, count 0. With ``visit``, timestamps
        become ``now`` and counts grow by occurrences, saturating (not under the score policy); without, headers stay.
        Raises CapacityError before any change.
        """

    def _keys(self, rows: torch.Tensor) -> torch.Tensor:
        """The ids of whole rows, uint8 [n, row_bytes]: the keys in their headers."""
        return unpack_header(rows).ids

    @abstractmethod
    def _write_rows(self, table: str, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Replace whole rows, uint8 [n, row_bytes], whose keys are ``ids``; of duplicates the last wins.

        Header and values are taken as they are, but ``used`` is set and padding is zero.
        """

    @abstractmethod
    def _write_metadata(self, table: str, ids: torch.Tensor, words: torch.Tensor, mask: int) -> None:
        """Set the bits ``mask`` of bytes 8-15 of the rows that exist to ``words`` (int64 [n]); used stays set."""

    @abstractmethod
    def _update(self, table: str, ids: torch.Tensor, grads: torch.Tensor, hyper: Hyper, now: int) -> None:
        """Reduce duplicates, apply ``refimpl.optimizers.update`` to the rows, and visit them as ``_write`` does."""

    @abstractmethod
    def _delete(self, table: str, ids: torch.Tensor) -> int:
        """Remove rows; how many there were."""

    @abstractmethod
    def _begin_round(self, table: str, policy: EvictionPolicy, now: int) -> RoundPlan:
        """The rows of this moment, and what decides about them."""

    @abstractmethod
    def _evict_some(self, plan: RoundPlan, ids: torch.Tensor) -> int:
        """Evict those of the ids that the plan condemns and that were not written since; decay the others' counts."""

    @abstractmethod
    def snapshot(self) -> SnapshotBase:
        """A point in time: a context manager and a read-only ``TrackedSource`` that later writes do not change.

        Several may be alive; each holds its memory until it is closed.
        """

    @abstractmethod
    def reserve(self, table: str, row_count: int) -> None:
        """Make room, so that the table grows to ``row_count`` rows without allocating."""

    @abstractmethod
    def clear(self, table: str) -> None:
        """Remove every row of the table."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """Exact counters."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Twice is harmless; any other verb then raises StoreClosedError."""
