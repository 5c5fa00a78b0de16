"""The store: ``refimpl.kvstore``'s verbs and checks, with rows in C++. One operator call for each batch.

A snapshot keeps the rows that change after it, at the moment they change; taking one costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fastimpl import ops
from fastimpl.kvstore.native import check_status, format_words, hyper_values, plan_words
from fastimpl.ops import KVFilling, KVHandle
from twinproof.errors import ConfigError, StoreClosedError
from twinproof.kvstore.base import KVStoreBase
from twinproof.kvstore.config import EvictionPolicy, StoreOptions, StoreStats
from twinproof.kvstore.eviction import RoundPlan
from twinproof.kvstore.reading import SnapshotBase, TrackedSource
from twinproof.optimizers import Hyper

__all__ = ["KVStore", "Snapshot"]

Result = TypeVar("Result")
ROWS_MAX = 2**32 - 16


class _NativeSource(TrackedSource):
    """Reading through a handle."""

    def _hold(self, options: StoreOptions, handle: KVHandle) -> None:
        self.options, self._handle = options, handle
        self._indices = {table: index for index, table in enumerate(options.layouts)}
        self._closed = False

    def _call(self, table: str, verb: Callable[..., Result], *arguments: Any) -> Result:
        if self._closed:
            raise StoreClosedError("the store or snapshot was closed", where=table)
        try:
            return verb(self._indices[table], *arguments)
        except RuntimeError as error:
            # Another thread closed it meanwhile.
            if "handle: dead" in str(error):
                raise StoreClosedError("the store or snapshot was closed", where=table) from None
            raise

    def _read(self, table: str, ids: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        result = torch.empty(ids.numel(), end - begin, dtype=torch.uint8)
        self._call(table, self._handle.read, ids, begin, end, result)
        return result

    def _read_into(self, table: str, ids: torch.Tensor, begin: int, end: int, out: torch.Tensor) -> torch.Tensor:
        self._call(table, self._handle.read, ids, begin, end, out)
        return out

    def _find(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        return self._call(table, self._handle.contains, ids)

    def _ids(self, table: str, begin: int, last: int) -> torch.Tensor:
        return self._call(table, self._handle.ids, begin, last)

    def _size(self, table: str) -> int:
        return self._call(table, self._handle.size)

    def _changes(self, table: str, since: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._call(table, self._handle.changes, since)

    def mark(self) -> int:
        return self._call(self.tables[0], lambda index: self._handle.mark())

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._handle.close()


class Snapshot(_NativeSource, SnapshotBase):
    """One moment of every table of a store."""

    def __init__(self, options: StoreOptions, handle: KVHandle, steps: dict[str, int]) -> None:
        self._hold(options, handle)
        self._steps = steps


class KVStore(_NativeSource, KVStoreBase):
    __doc__ = KVStoreBase.__doc__

    def _open(self) -> None:
        self._hold(self.options, KVHandle.create(format_words(self.options), self.options.num_shards))

    def _change(self, table: str, verb: Callable[..., int], *arguments: Any) -> None:
        check_status(self._call(table, verb, *arguments), table, self.options.capacities[table])

    def _change_and_count(self, table: str, verb: Callable[..., tuple[int, int]], *arguments: Any) -> int:
        status, count = self._call(table, verb, *arguments)
        check_status(status, table)
        return count

    def _write(self, table: str, ids: torch.Tensor, values: torch.Tensor, begin: int, now: int, *, visit: bool) -> None:
        self._change(table, self._handle.write, ids, values, begin, now, visit)

    def _keys(self, rows: torch.Tensor) -> torch.Tensor:
        return ops.row_keys(rows)

    def _write_rows(self, table: str, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self._change(table, self._handle.write_rows, ids, rows)

    def _write_metadata(self, table: str, ids: torch.Tensor, words: torch.Tensor, mask: int) -> None:
        self._change(table, self._handle.write_metadata, ids, words.contiguous(), mask)

    def _update(self, table: str, ids: torch.Tensor, grads: torch.Tensor, hyper: Hyper, now: int) -> None:
        self._change(table, self._handle.update, ids, grads, hyper_values(hyper), now)

    def _delete(self, table: str, ids: torch.Tensor) -> int:
        return self._change_and_count(table, self._handle.delete, ids)

    def clear(self, table: str) -> None:
        self.layout(table)
        self._change(table, self._handle.clear)

    def _begin_round(self, table: str, policy: EvictionPolicy, now: int) -> RoundPlan:
        keep_count = policy.keep_count if policy.kind == "score" else 0
        ids, (mark, has_cutoff, score, key) = self._call(table, self._handle.begin_round, min(keep_count, ROWS_MAX))
        return RoundPlan(table, policy, now, mark, ids, (score, key) if has_cutoff else None)

    def _evict_some(self, plan: RoundPlan, ids: torch.Tensor) -> int:
        return self._change_and_count(plan.table, self._handle.evict, ids, plan_words(plan))

    def snapshot(self) -> Snapshot:
        taken = self._call(self.tables[0], lambda index: self._handle.snapshot())
        if taken is None:
            check_status(-1, "snapshot")
        assert taken is not None
        return Snapshot(self.options, taken, dict(self._steps))

    def reserve(self, table: str, row_count: int) -> None:
        self.layout(table)
        if type(row_count) is not int or not 0 <= row_count <= ROWS_MAX:
            raise ConfigError("not a number of rows", got=row_count, expected="an int >= 0", where="row_count")
        self._change(table, self._handle.reserve, row_count)

    def open_filling(self, table: str, row_count: int, ahead: int) -> KVFilling | None:
        """Rows that wait for an empty table, see ``KVHandle.fill``; None where memory ran out."""
        return self._call(table, self._handle.fill, row_count, ahead)

    def fail_allocations(self, table: str, after_count: int) -> None:
        """For tests: the table's allocation after ``after_count`` more fails, and every later one; -1 ends it."""
        self._call(table, self._handle.fail_after, after_count)

    def stats(self) -> StoreStats:
        counts, snapshot_count = self._call(self.tables[0], lambda index: self._handle.stats())
        rows, blocks, row_bytes, held_bytes, map_bytes, evicted = counts.reshape(-1, 6).sum(dim=0).tolist()
        return StoreStats(rows, blocks, row_bytes, held_bytes, map_bytes, snapshot_count, evicted)
