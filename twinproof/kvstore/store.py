"""The reference store: one dictionary of rows for each table, each row an immutable ``bytes``.

A snapshot is a shallow copy of the dictionaries: what the store writes later are other bytes.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter

import torch

from refimpl.optimizers import Hyper, reduce_duplicates, update
from twinproof.checkpoint.format import buffer_of
from twinproof.errors import CapacityError, ConfigError, StoreClosedError
from twinproof.kvstore.base import KVStoreBase
from twinproof.kvstore.config import EvictionPolicy, StoreOptions, StoreStats
from twinproof.kvstore.eviction import RoundPlan, condemned, decayed
from twinproof.kvstore.initial import initial_rows
from twinproof.kvstore.layout import HEADER_BYTES, Header, RowLayout, as_bytes, from_bytes, pack_header, unpack_header
from twinproof.kvstore.reading import METADATA_OFFSET, SnapshotBase, TrackedSource

__all__ = ["KVStore", "Snapshot"]

Rows = dict[int, bytes]
_USED = -(2**63)


def _matrix(rows: list[bytes], width: int) -> torch.Tensor:
    if not rows or not width:
        return torch.zeros(len(rows), width, dtype=torch.uint8)
    return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).reshape(len(rows), width)


def _split(rows: torch.Tensor) -> list[bytes]:
    dense = rows.contiguous()
    # Memory is read as it lies: numpy need not be installed.
    raw, width = bytes(buffer_of(dense)), dense.shape[1]
    return [raw[begin : begin + width] for begin in range(0, len(raw), width)] if width else [b""] * len(dense)


def canonical(layout: RowLayout, rows: torch.Tensor) -> torch.Tensor:
    """A copy of whole rows as a store keeps them: used, with zero padding."""
    result = torch.zeros_like(rows)
    for begin, end in layout.value_ranges:
        result[:, begin:end] = rows[:, begin:end]
    result[:, HEADER_BYTES - 1] |= 0x80
    return result


class _DictSource(TrackedSource):
    """Reading from dictionaries of rows."""

    def _hold(self, options: StoreOptions, rows: dict[str, Rows]) -> None:
        self.options, self._rows = options, rows
        self._version = 0
        # The version of each row's last change, and of each removal that no row has followed.
        self._changed: dict[str, dict[int, int]] = {table: {} for table in rows}
        self._removed: dict[str, dict[int, int]] = {table: {} for table in rows}
        self._lock = threading.RLock()
        self._closed = False

    def _table(self, table: str) -> Rows:
        if self._closed:
            raise StoreClosedError("the store or snapshot was closed", where=table)
        return self._rows[table]

    def _read(self, table: str, ids: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        with self._lock:
            found = [self._table(table).get(key) for key in ids.tolist()]
        missing = [position for position, row in enumerate(found) if row is None]
        for position, row in zip(missing, _split(initial_rows(self.options, table, ids[missing])), strict=True):
            found[position] = row
        return _matrix([row[begin:end] for row in found if row is not None], end - begin)

    def _find(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        with self._lock:
            rows = self._table(table)
            return torch.tensor([key in rows for key in ids.tolist()], dtype=torch.bool)

    def _ids(self, table: str, begin: int, last: int) -> torch.Tensor:
        with self._lock:
            return torch.tensor(sorted(k for k in self._table(table) if begin <= k <= last), dtype=torch.int64)

    def _size(self, table: str) -> int:
        with self._lock:
            return len(self._table(table))

    def _changes(self, table: str, since: int) -> tuple[torch.Tensor, torch.Tensor]:
        with self._lock:
            self._table(table)
            pair = [sorted(k for k, v in d[table].items() if v > since) for d in (self._changed, self._removed)]
            return torch.tensor(pair[0], dtype=torch.int64), torch.tensor(pair[1], dtype=torch.int64)

    def mark(self) -> int:
        return self._version


class Snapshot(_DictSource, SnapshotBase):
    """Shallow copies of the dictionaries."""

    def __init__(self, store: KVStore) -> None:
        self._hold(store.options, {table: dict(rows) for table, rows in store._rows.items()})
        self._version = store._version
        self._changed = {table: dict(versions) for table, versions in store._changed.items()}
        self._removed = {table: dict(versions) for table, versions in store._removed.items()}

    def close(self) -> None:
        self._closed = True
        self._rows, self._changed, self._removed = {}, {}, {}


class KVStore(_DictSource, KVStoreBase):
    __doc__ = KVStoreBase.__doc__

    def _open(self) -> None:
        self._hold(self.options, {table: {} for table in self.tables})
        self._snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        self._evicted_count = 0

    def _put(self, table: str, ids: list[int], rows: torch.Tensor) -> None:
        """The one place where rows are stored; of duplicates the last wins."""
        self._version += 1
        for key, row in zip(ids, _split(rows), strict=True):
            self._table(table)[key] = row
            self._changed[table][key] = self._version
            self._removed[table].pop(key, None)

    def _remove(self, table: str, ids: list[int]) -> int:
        """The one place where rows go."""
        self._version += 1
        present = [key for key in dict.fromkeys(ids) if self._table(table).pop(key, None) is not None]
        for key in present:
            del self._changed[table][key]
            if self.options.track_changes:
                self._removed[table][key] = self._version
        return len(present)

    def _write(self, table: str, ids: torch.Tensor, values: torch.Tensor, begin: int, now: int, *, visit: bool) -> None:
        with self._lock:
            self._check_capacity(table, ids)
            last = {key: position for position, key in enumerate(ids.tolist())}
            unique = torch.tensor(list(last), dtype=torch.int64)
            rows = self._opened(table, unique, now)
            rows[:, begin : begin + values.shape[1]] = values[list(last.values())]
            if visit:
                self._visit(table, rows, Counter(ids.tolist()), now)
            self._put(table, unique.tolist(), rows)
            self._shrink(table, set(last))

    def _opened(self, table: str, ids: torch.Tensor, now: int) -> torch.Tensor:
        """The rows of distinct ids; missing ones as they begin: initial, used, stamped, count 0."""
        rows = self._read(table, ids, 0, self.options.rows[table].row_bytes)
        new = ~self._find(table, ids)
        zeros = torch.zeros_like(ids)
        rows[new, :HEADER_BYTES] = pack_header(Header(ids, zeros + now, zeros, zeros == 0))[new]
        return rows

    def _visit(self, table: str, rows: torch.Tensor, occurrences: Counter[int], now: int) -> None:
        header = unpack_header(rows)
        policy = self.options.evictions[table]
        counts = header.counts
        if policy is None or policy.kind != "score":
            counts = counts + torch.tensor([occurrences[key] for key in header.ids.tolist()], dtype=torch.int64)
        stamped = Header(header.ids, torch.full_like(header.ids, now), counts, header.used)
        rows[:, :HEADER_BYTES] = pack_header(stamped)

    def _write_rows(self, table: str, ids: torch.Tensor, rows: torch.Tensor) -> None:
        with self._lock:
            self._check_capacity(table, ids)
            self._put(table, ids.tolist(), canonical(self.options.rows[table], rows))
            self._shrink(table, set(ids.tolist()))

    def _write_metadata(self, table: str, ids: torch.Tensor, words: torch.Tensor, mask: int) -> None:
        with self._lock:
            last = dict(zip(ids.tolist(), words.tolist(), strict=True))
            present = torch.tensor([key for key in last if key in self._table(table)], dtype=torch.int64)
            rows = self._read(table, present, 0, self.options.rows[table].row_bytes)
            old = from_bytes(rows[:, METADATA_OFFSET:HEADER_BYTES], torch.int64)[:, 0]
            new = torch.tensor([last[key] for key in present.tolist()], dtype=torch.int64)
            merged = (old & ~mask) | (new & mask) | _USED
            rows[:, METADATA_OFFSET:HEADER_BYTES] = as_bytes(merged.reshape(-1, 1))
            self._put(table, present.tolist(), rows)

    def _update(self, table: str, ids: torch.Tensor, grads: torch.Tensor, hyper: Hyper, now: int) -> None:
        layout = self.options.rows[table]
        unique, sums = reduce_duplicates(ids, grads)
        with self._lock:
            self._check_capacity(table, ids)
            rows = self._opened(table, unique, now)
            ranges = {name: (slot.offset_bytes, slot.end_bytes) for name, slot in layout.state_slots.items()}
            states = {name: from_bytes(rows[:, a:b], layout.state_slots[name].dtype) for name, (a, b) in ranges.items()}
            weight_end = HEADER_BYTES + layout.weight_bytes
            weight = from_bytes(rows[:, HEADER_BYTES:weight_end], layout.weight_dtype)
            weight, states = update(layout.optimizer, weight, sums, states, hyper)
            rows[:, HEADER_BYTES:weight_end] = as_bytes(weight)
            for name, (begin, end) in ranges.items():
                rows[:, begin:end] = as_bytes(states[name])
            self._visit(table, rows, Counter(ids.tolist()), now)
            self._put(table, unique.tolist(), rows)
            self._shrink(table, set(unique.tolist()))

    def _delete(self, table: str, ids: torch.Tensor) -> int:
        with self._lock:
            return self._remove(table, ids.tolist())

    def clear(self, table: str) -> None:
        self.layout(table)
        with self._lock:
            self._remove(table, list(self._table(table)))

    def _check_capacity(self, table: str, ids: torch.Tensor) -> None:
        self._table(table)
        capacity, distinct = self.options.capacities[table], int(torch.unique(ids).numel())
        if capacity is not None and distinct > capacity:
            raise CapacityError("a batch larger than the table", got=distinct, expected=f"<= {capacity}", where=table)

    def _shrink(self, table: str, batch: set[int]) -> None:
        """Evict what a write put beyond the capacity, never a row of its batch."""
        capacity, rows = self.options.capacities[table], self._table(table)
        excess = 0 if capacity is None else len(rows) - capacity
        if excess <= 0:
            return
        keys = [key for key in rows if key not in batch]
        header = unpack_header(_matrix([rows[key][:HEADER_BYTES] for key in keys], HEADER_BYTES))
        policy = self.options.evictions[table]
        by_count = policy is not None and policy.kind in ("score", "count", "ttl_count")
        ranks = (header.counts if by_count else header.timestamps).tolist()
        order = sorted(zip(ranks, keys, strict=True))
        self._evicted_count += self._remove(table, [key for _, key in order[:excess]])

    def _begin_round(self, table: str, policy: EvictionPolicy, now: int) -> RoundPlan:
        with self._lock:
            ids = self._ids(table, -(2**63), 2**63 - 1)
            cutoff = None
            if policy.kind == "score" and 0 < policy.keep_count < ids.numel():
                scores = unpack_header(self._read(table, ids, 0, HEADER_BYTES)).counts.tolist()
                cutoff = sorted(zip(scores, ids.tolist(), strict=True))[-policy.keep_count]
            return RoundPlan(table, policy, now, self._version, ids, cutoff)

    def _evict_some(self, plan: RoundPlan, ids: torch.Tensor) -> int:
        with self._lock:
            changed = self._changed[plan.table]
            # A row that was removed, or written after the round began, is no business of this round.
            stale = torch.tensor([key for key in ids.tolist() if changed.get(key, plan.mark + 1) <= plan.mark])
            stale = stale.to(torch.int64)
            layout = self.layout(plan.table)
            rows = self._read(plan.table, stale, 0, layout.row_bytes)
            gone = condemned(plan, layout, rows)
            header = unpack_header(rows)
            fewer = decayed(plan.policy, header.counts)
            rows[:, :HEADER_BYTES] = pack_header(Header(header.ids, header.timestamps, fewer, header.used))
            kept = ~gone & (fewer != header.counts)
            self._put(plan.table, stale[kept].tolist(), rows[kept])
            evicted_count = self._remove(plan.table, stale[gone].tolist())
            self._evicted_count += evicted_count
            return evicted_count

    def snapshot(self) -> Snapshot:
        with self._lock:
            self._table(self.tables[0])
            taken = Snapshot(self)
            taken._steps = dict(self._steps)
            self._snapshots.add(taken)
            return taken

    def reserve(self, table: str, row_count: int) -> None:
        self.layout(table)
        if type(row_count) is not int or row_count < 0:
            raise ConfigError("not a number of rows", got=row_count, expected="an int >= 0", where="row_count")
        self._table(table)

    def stats(self) -> StoreStats:
        with self._lock:
            counts = {table: len(self._table(table)) for table in self.tables}
            row_bytes = sum(counts[table] * self.options.rows[table].row_bytes for table in counts)
            total = sum(counts.values())
            alive = sum(not taken._closed for taken in self._snapshots)
            return StoreStats(total, total, row_bytes, row_bytes, 0, alive, self._evicted_count)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._rows = {}
