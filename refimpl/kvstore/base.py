"""The store's verbs, their checks, and the primitives that an implementation supplies.

``refimpl.kvstore.KVStore`` supplies them with a dictionary, ``fastimpl.kvstore.KVStore`` with C++: the checks, the
errors and everything made of several primitives stand here once.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch

from refimpl.errors import ConfigError, ShapeError
from refimpl.kvstore.checks import check_count, check_ids, check_matrix, check_rows
from refimpl.kvstore.config import Clock, EvictionPolicy, EvictionStats, Initializer, StoreOptions, StoreStats
from refimpl.kvstore.eviction import EvictionRound, RoundPlan
from refimpl.kvstore.layout import HEADER_BYTES, TIMESTAMP_MAX, RowLayout, unpack_header
from refimpl.kvstore.reading import RowSource
from refimpl.optimizers import Hyper

__all__ = ["KVStoreBase", "wall_clock"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def wall_clock() -> int:
    """Unix seconds."""
    return int(time.time())


class KVStoreBase(RowSource):
    """Key -> whole row, for several tables.

    Args:
        layouts: table name -> layout; the order fixes the table index of the initializer.
        optimizer_in_row: rows hold the optimizer state; else header and weight only.
        return_whole_row: state dicts and checkpoints carry whole rows (needs ``optimizer_in_row``).
        num_shards: parts of the map, for concurrency; never changes a result.
        seed: of the initializer.
        initializer: weights of missing ids; one, or one per table.
        eviction: the policy of ``evict()``; one, or one per table; None evicts nothing.
        clock: seconds for the timestamps of written rows; taken mod 2**32.
        capacity: rows at most, for each table or per table. A write beyond it evicts rows that are not in its batch:
            the lowest score under the score policy, the lowest count under count and ttl_count, else the oldest
            timestamp; ties by ascending id.
        track_changes: remember which rows change and which go, for delta checkpoints.
        device: "cpu".

    Every verb is atomic for each table, checks all arguments first and leaves the store as it was when it raises.
    Inputs are never changed and never kept. Ids are any int64.

    Raises:
        ConfigError: see ``StoreOptions``; ``return_whole_row`` without ``optimizer_in_row``.
    """

    def __init__(
        self,
        layouts: Mapping[str, RowLayout],
        *,
        optimizer_in_row: bool = False,
        return_whole_row: bool = False,
        num_shards: int = 8,
        seed: int = 0,
        initializer: Initializer | Mapping[str, Initializer] | None = None,
        eviction: EvictionPolicy | Mapping[str, EvictionPolicy | None] | None = None,
        clock: Clock = wall_clock,
        capacity: int | Mapping[str, int | None] | None = None,
        track_changes: bool = False,
        device: str = "cpu",
    ) -> None:
        self.options = StoreOptions.make(
            layouts,
            optimizer_in_row=optimizer_in_row,
            num_shards=num_shards,
            seed=seed,
            initializer=Initializer() if initializer is None else initializer,
            eviction=eviction,
            clock=clock,
            capacity=capacity,
            track_changes=track_changes,
            device=device,
        )
        self.return_whole_row = False
        self.set_return_whole_row(return_whole_row)
        self._open()

    # --- primitives: what a subclass supplies, beside the four of RowSource. Arguments are checked; each is atomic.

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
    def _changes(self, table: str, since: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids of rows that changed after mark ``since``, and ids that were removed after it; both ascending."""

    @abstractmethod
    def mark(self) -> int:
        """The present moment for ``changes``: an int that grows with every change."""

    @abstractmethod
    def snapshot(self) -> Any:
        """A point in time: a context manager and a read-only ``RowSource`` that later writes do not change.

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

    # --- verbs

    def _now(self) -> int:
        return int(self.options.clock()) & TIMESTAMP_MAX

    def set_return_whole_row(self, enabled: bool) -> None:
        """Switch what state dicts carry, as for a warm start. Raises ConfigError without ``optimizer_in_row``."""
        if enabled and not self.options.optimizer_in_row:
            raise ConfigError(
                "whole rows need the optimizer in the row", got="optimizer_in_row=False", where="return_whole_row"
            )
        self.return_whole_row = bool(enabled)

    def set(self, table: str, ids: torch.Tensor, weights: torch.Tensor, *, count: int | None = None) -> None:
        """Write weights [n, D] of the first ``count`` ids (None: all); optimizer state stays, of a new row it is zero.

        Of duplicates the last wins, and the header's count grows by occurrences. The timestamp becomes now.

        Raises:
            CapacityError: more distinct ids than the table may hold. ConfigError, ShapeError, UnsupportedError.
        """
        layout, checked = self.layout(table), check_ids(ids)
        values = check_matrix(weights, checked.numel(), layout.embedding_dim, layout.weight_dtype, "weights")
        used = check_count(count, checked.numel())
        self._write(table, checked[:used], _bytes(values[:used]), HEADER_BYTES, self._now(), visit=True)

    def set_rows(self, table: str, rows: torch.Tensor) -> None:
        """Write whole rows, uint8 [n, row_bytes]. The id is the key in each row's header.

        Timestamps and counts are taken from the rows; ``used`` is set in the store; padding is stored as zero.

        Raises:
            CapacityError, ConfigError, ShapeError, UnsupportedError.
        """
        checked = check_rows(rows, self.layout(table).row_bytes)
        self._write_rows(table, unpack_header(checked).ids, checked)

    def set_state(self, table: str, name: str, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Write one optimizer state, [n, count] in its dtype. Headers of rows that exist stay; of duplicates the last
        wins; a missing id gets a row with its initial weight.

        Raises:
            ConfigError: the stored row has no such state. CapacityError, ShapeError, UnsupportedError.
        """
        slot, checked = self.slot(table, name), check_ids(ids)
        raw = _bytes(check_matrix(values, checked.numel(), slot.count, slot.dtype, "values"))
        self._write(table, checked, raw, slot.offset_bytes, self._now(), visit=False)

    def set_scores(self, table: str, ids: torch.Tensor, scores: torch.Tensor) -> None:
        """Set the scores of rows that exist, float32 [n]; signs are dropped, missing ids are passed over.

        Of duplicates the last wins. Scores share their bits with the count: see ``EvictionPolicy.score``.
        """
        checked = check_ids(ids)
        if not isinstance(scores, torch.Tensor) or scores.shape != checked.shape:
            raise ShapeError("one score per id", got=getattr(scores, "shape", scores), expected=tuple(checked.shape))
        bits = check_matrix(scores.reshape(-1, 1), checked.numel(), 1, torch.float32, "scores").view(torch.int32)[:, 0]
        self.layout(table)
        self._write_metadata(table, checked, (bits.to(torch.int64) & (2**31 - 1)) << 32, (2**31 - 1) << 32)

    def set_metadata(self, table: str, ids: torch.Tensor, words: torch.Tensor) -> None:
        """Set timestamps and counts of rows that exist, int64 [n, 1] as ``metadata`` gives them; used stays set."""
        checked = check_ids(ids)
        self.layout(table)
        values = check_matrix(words, checked.numel(), 1, torch.int64, "words")[:, 0]
        self._write_metadata(table, checked, values, 2**63 - 1)

    def apply_gradients(
        self,
        table: str,
        ids: torch.Tensor,
        grads: torch.Tensor,
        lr: float,
        step: int = 1,
        *,
        eps: float = 1e-8,
        beta1: float = 0.9,
        beta2: float = 0.999,
    ) -> None:
        """One optimizer step on the rows of ids [n] with gradients [n, D] (float32, or the weight dtype).

        Duplicates are reduced first, in float32 and ascending position. Missing ids get rows: initial weight, zero
        state. Headers are visited as by ``set``. ``step`` counts from 1.

        Raises:
            ConfigError: the table has no optimizer, or its state is not in the row. CapacityError, ShapeError,
                UnsupportedError.
        """
        layout, checked = self.layout(table), check_ids(ids)
        if layout.optimizer == "none":
            raise ConfigError("this table's rows have no optimizer", got=layout, where=table)
        values = check_matrix(grads, checked.numel(), layout.embedding_dim, _FLOATS, "grads")
        hyper = Hyper(lr=lr, step=step, eps=eps, beta1=beta1, beta2=beta2)
        self._update(table, checked, values.to(torch.float32), hyper, self._now())

    def delete(self, table: str, ids: torch.Tensor) -> int:
        """Remove rows; returns how many there were. Missing ids are passed over."""
        self.layout(table)
        return self._delete(table, check_ids(ids))

    def start_eviction(
        self, table: str, *, policy: EvictionPolicy | None = None, slice_rows: int = 4096
    ) -> EvictionRound:
        """A round over the rows of this moment, in slices: see ``EvictionRound``. Raises ConfigError."""
        self.layout(table)
        chosen = policy if policy is not None else self.options.evictions[table]
        if not isinstance(chosen, EvictionPolicy):
            raise ConfigError("no eviction policy", got=chosen, expected="EvictionPolicy", where=table)
        return EvictionRound(self, self._begin_round(table, chosen, self._now()), slice_rows)

    def evict(self, table: str | None = None, *, policy: EvictionPolicy | None = None) -> dict[str, EvictionStats]:
        """One whole round, of one table or of every table that has a policy; what happened, by table.

        Args:
            table: None is all.
            policy: instead of the store's own.

        Raises:
            ConfigError: no policy for the table that was named.
        """
        names = [table] if table is not None else [t for t in self.tables if policy or self.options.evictions[t]]
        return {name: self.start_eviction(name, policy=policy).run() for name in names}

    def changes(self, table: str, since: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids of rows with any byte written after ``mark()`` gave ``since``, and ids removed after it; ascending.

        Raises:
            ConfigError: without ``track_changes``, or a mark from the future.
        """
        self.layout(table)
        if not self.options.track_changes:
            raise ConfigError("changes are not tracked", got=False, expected=True, where="track_changes")
        if type(since) is not int or not 0 <= since <= self.mark():
            raise ConfigError("not a mark of this store", got=since, expected=f"0 to {self.mark()}", where="since")
        return self._changes(table, since)

    def __enter__(self) -> KVStoreBase:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """[n, w] of any dtype as uint8 [n, w * itemsize], the same memory."""
    return values.contiguous().view(torch.uint8)
