"""The store's rows in C++. One operator call for each batch. Meaning: ``refimpl.kvstore.DictRows``.

A snapshot keeps the rows that change after it, at the moment they change; taking one costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fastimpl import ops
from fastimpl.kvstore.buckets import sort_ids
from fastimpl.kvstore.device import DeviceHandle
from fastimpl.kvstore.native import check_status, hyper_values, plan_message, table_messages
from fastimpl.ops import KVFilling, KVHandle
from twinproof.errors import ConfigError, StoreClosedError
from twinproof.kvstore import store
from twinproof.kvstore.options import METADATA_OFFSET, EvictionPolicy, StoreOptions, StoreStats, from_bytes
from twinproof.kvstore.rows import Buckets, RoundPlan, RowEngine
from twinproof.kvstore.store import LockedRows
from twinproof.optimizers import Hyper

__all__ = ["DeviceRows", "KVStore", "LockedDeviceRows", "NativeReader", "NativeRows", "device_rows", "rows_of"]

Result = TypeVar("Result")
ROWS_MAX = 2**32 - 16


class NativeReader:
    """The rows behind one handle: those of a store, or of one of its moments."""

    def __init__(self, options: StoreOptions, handle: KVHandle) -> None:
        self.options, self._handle = options, handle
        self._indices = {table: index for index, table in enumerate(options.layouts)}
        self._closed = False

    def _call(self, table: str, verb: Callable[..., Result], *arguments: Any) -> Result:
        if self._closed:
            raise StoreClosedError("the store or snapshot was closed", got="closed", expected="open", where=table)
        try:
            return verb(self._indices[table], *arguments)
        except RuntimeError as error:
            # Another thread closed it meanwhile.
            if "handle: dead" in str(error):
                raise StoreClosedError(
                    "the store or snapshot was closed", got="closed", expected="open", where=table
                ) from None
            raise

    def _call_all(self, verb: Callable[[], Result]) -> Result:
        return self._call(next(iter(self._indices)), lambda index: verb())

    def read(self, table: str, ids: torch.Tensor, begin: int, end: int, out: torch.Tensor) -> None:
        self._call(table, self._handle.read, ids, begin, end, out)

    def find(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        return self._call(table, self._handle.contains, ids)

    def ids(self, table: str, begin: int, last: int) -> torch.Tensor:
        return self._call(table, self._handle.ids, begin, last)

    def size(self, table: str) -> int:
        return self._call(table, self._handle.size)

    def changes(self, table: str, since: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self._call(table, self._handle.changes, since)

    def mark(self) -> int:
        return self._call_all(self._handle.mark)

    def step(self, table: str) -> int:
        return self._call(table, self._handle.step)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._handle.close()


class NativeRows(NativeReader):
    """The rows of a store."""

    def __init__(self, options: StoreOptions, handle: KVHandle | None = None) -> None:
        super().__init__(options, handle or KVHandle.create(table_messages(options), options.num_shards))

    def _change(self, table: str, verb: Callable[..., int], *arguments: Any) -> None:
        check_status(self._call(table, verb, *arguments), table, self.options.capacities[table])

    def _change_and_count(self, table: str, verb: Callable[..., tuple[int, int]], *arguments: Any) -> int:
        status, count = self._call(table, verb, *arguments)
        check_status(status, table)
        return count

    def write(self, table: str, ids: torch.Tensor, values: torch.Tensor, begin: int, now: int, *, visit: bool) -> None:
        self._change(table, self._handle.write, ids, values, begin, now, visit)

    def write_rows(self, table: str, rows: torch.Tensor) -> None:
        self._change(table, self._handle.write_rows, ops.row_keys(rows), rows)

    def write_metadata(self, table: str, ids: torch.Tensor, words: torch.Tensor, mask: int) -> None:
        self._change(table, self._handle.write_metadata, ids, words.contiguous(), mask)

    def update(self, table: str, ids: torch.Tensor, grads: torch.Tensor, hyper: Hyper, now: int) -> None:
        self._change(table, self._handle.update, ids, grads, hyper_values(hyper), now, hyper.step)

    def set_step(self, table: str, step: int) -> None:
        self._call(table, self._handle.set_step, step)

    def delete(self, table: str, ids: torch.Tensor) -> int:
        return self._change_and_count(table, self._handle.delete, ids)

    def clear(self, table: str) -> None:
        self._change(table, self._handle.clear)

    def begin_round(self, table: str, policy: EvictionPolicy, now: int) -> RoundPlan:
        keep_count = policy.keep_count if policy.kind == "score" else 0
        ids, (mark, has_cutoff, score, key) = self._call(table, self._handle.begin_round, min(keep_count, ROWS_MAX))
        return RoundPlan(table, policy, now, mark, ids, (score, key) if has_cutoff else None)

    def evict_some(self, plan: RoundPlan, ids: torch.Tensor) -> int:
        return self._change_and_count(plan.table, self._handle.evict, ids, plan_message(plan))

    def forget(self, mark: int) -> None:
        check_status(self._call_all(lambda: self._handle.forget(mark)), "changes")

    def snapshot(self) -> NativeReader:
        taken = self._call_all(self._handle.snapshot)
        if taken is None:
            check_status(-1, "snapshot")
        assert taken is not None
        return NativeReader(self.options, taken)

    def reserve(self, table: str, row_count: int) -> None:
        if row_count > ROWS_MAX:
            most = f"an int from 0 to {ROWS_MAX}"
            raise ConfigError("more rows than a table has places", got=row_count, expected=most, where="row_count")
        self._change(table, self._handle.reserve, row_count)

    def prefetch(self, table: str, ids: torch.Tensor) -> None:
        check_status(self._call(table, self._handle.prefetch, ids), table)

    def stats(self) -> StoreStats:
        counts, snapshot_count = self._call_all(self._handle.stats)
        rows, blocks, row_bytes, held_bytes, map_bytes, evicted, log_bytes = counts.reshape(-1, 7).sum(dim=0).tolist()
        return StoreStats(rows, blocks, row_bytes, held_bytes, map_bytes, snapshot_count, evicted, log_bytes)

    def sort_ids(self, ids: torch.Tensor, buckets: Buckets, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        return sort_ids(ids, buckets, begin, end)

    def open_filling(self, table: str, row_count: int, ahead: int) -> KVFilling | None:
        """Rows that wait for an empty table, see ``KVHandle.fill``; None where memory ran out."""
        return self._call(table, self._handle.fill, row_count, ahead)

    def fail_allocations(self, table: str, after_count: int) -> None:
        """The table's allocation after ``after_count`` more fails, and every later one; -1 ends it."""
        self._call(table, self._handle.fail_after, after_count)


class DeviceRows(NativeRows):
    """The rows of a store on a device: one call at a time, see ``LockedRows``."""

    def write_rows(self, table: str, rows: torch.Tensor) -> None:
        keys = from_bytes(rows[:, :METADATA_OFFSET], torch.int64)[:, 0]
        self._change(table, self._handle.write_rows, keys, rows)

    def sort_ids(self, ids: torch.Tensor, buckets: Buckets, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        return sort_ids(ids.cpu(), buckets, begin, end)


class LockedDeviceRows(LockedRows):
    """One call at a time."""

    def __init__(self, rows: DeviceRows) -> None:
        super().__init__(rows)
        self._on_device = rows

    def fail_allocations(self, table: str, after_count: int) -> None:
        """See ``NativeRows.fail_allocations``; of all tables."""
        with self._held(table):
            self._on_device.fail_allocations(table, after_count)


def device_rows(options: StoreOptions, handle: type[DeviceHandle] = DeviceHandle) -> DeviceRows:
    """The rows of a store on the current CUDA device, behind a handle of this type.

    Raises:
        ConfigError: no GPU, or a library without kernels for one.
    """
    if not torch.cuda.is_available() or "kvstore_create" not in ops.cuda_operators():
        raise ConfigError("no CUDA device for this store", got=_why_no_device(), expected="a GPU", where="device")
    return DeviceRows(options, handle.create(table_messages(options).to("cuda"), options.num_shards))


def _why_no_device() -> str:
    if "kvstore_create" not in ops.cuda_operators():
        return "a library that was built without CUDA"
    return "torch.cuda.is_available() is False"


def rows_of(options: StoreOptions) -> RowEngine:
    """The rows of a store where its options say. Raises ConfigError without a GPU."""
    return NativeRows(options) if options.device == "cpu" else LockedDeviceRows(device_rows(options))


class KVStore(store.KVStore, engine=rows_of, devices=("cpu", "cuda")):
    __doc__ = store.KVStore.__doc__

    @property
    def can_fill(self) -> bool:
        """Whether an empty table can be filled beside itself."""
        return isinstance(self._engine, NativeRows)

    def open_filling(self, table: str, row_count: int, ahead: int) -> KVFilling | None:
        """See ``NativeRows.open_filling``."""
        assert isinstance(self._engine, NativeRows)
        return self._engine.open_filling(table, row_count, ahead)

    def fail_allocations(self, table: str, after_count: int) -> None:
        """For tests: see ``NativeRows.fail_allocations``."""
        assert isinstance(self._engine, NativeRows | LockedDeviceRows)
        self._engine.fail_allocations(table, after_count)
