"""Key -> whole row: metaheader, weight and optimizer state, in plain PyTorch.

The meaning of ``fastimpl.kvstore``: the same names, the same bytes. A table is a dictionary of rows; a snapshot copies
the dictionaries; a save gathers the rows and keeps them as three tensors. Layouts, options, checks, views and
everything about checkpoints are ``twinproof.kvstore``'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from safetensors import safe_open

from refimpl.checkpoint import HuggingFaceStorageWriter
from refimpl.optimizers import Hyper, reduce_duplicates, row_sum, update
from twinproof.errors import CapacityError
from twinproof.kvstore import disk, store
from twinproof.kvstore.disk import LoadReport, SavedRows, SavePart, SaveReport
from twinproof.kvstore.eviction import BackgroundEvictor
from twinproof.kvstore.modules import KVEmbedding, KVEmbeddingBag, KVTensorWrapper
from twinproof.kvstore.options import (
    HEADER_BYTES,
    METADATA_OFFSET,
    EvictionPolicy,
    EvictionStats,
    Header,
    Initializer,
    RowLayout,
    StateSlot,
    StoreOptions,
    StoreStats,
    as_bytes,
    from_bytes,
    pack_header,
    signed64,
    unpack_header,
)
from twinproof.kvstore.rows import Buckets, RoundPlan, assemble_rows, bucket_of, check_buckets, rank_buckets, separate
from twinproof.kvstore.statedict import KVLoadPlanner
from twinproof.kvstore.store import LockedRows
from twinproof.kvstore.views import KVTensor

__all__ = [
    "BackgroundEvictor", "Buckets", "EvictionPolicy", "EvictionStats", "Header", "Initializer", "KVEmbedding",
    "KVEmbeddingBag", "KVLoadPlanner", "KVStore", "KVTensor", "KVTensorWrapper", "LoadReport", "RowLayout",
    "SaveReport", "SavedRows", "StateSlot", "StoreStats", "bucket_of", "load", "pack_header", "rank_buckets", "save",
    "sort_ids_by_bucket", "unpack_header",
]  # fmt: skip

# What the suite may ask beyond the contract: the reference is one lock around a dictionary.
CAPABILITIES: frozenset[str] = frozenset()

USED, MOST = -(2**63), 2**63 - 1
GOLDEN = 0x9E3779B97F4A7C15


# Rows of ids that were never written. ``Initializer`` defines the formula; words of 64 bits wrap, as int64 does.
def mixed(words: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64, of each word."""
    words = (words ^ shifted(words, 30)) * signed64(0xBF58476D1CE4E5B9)
    words = (words ^ shifted(words, 27)) * signed64(0x94D049BB133111EB)
    return words ^ shifted(words, 31)


def shifted(words: torch.Tensor, count: int) -> torch.Tensor:
    """Each word shifted to the right with zeros; torch's own shift keeps the sign."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def initial_weights(initializer: Initializer, seed: int, index: int, ids: torch.Tensor, width: int) -> torch.Tensor:
    """Float32 [n, width], of ids int64 [n]."""
    if initializer.kind == "zeros":
        return torch.zeros(ids.numel(), width, device="cpu")
    table = mixed(torch.tensor(signed64(seed + GOLDEN * (index + 1)), device="cpu"))
    steps = as_ids(signed64(GOLDEN * (element + 1)) for element in range(width))
    words = mixed(mixed(table ^ ids)[:, None] + steps)
    unit = shifted(words, 40).to(torch.float64) * 2.0**-24
    return (initializer.low + initializer.span * unit).to(torch.float32)


def initial_rows(options: StoreOptions, table: str, ids: torch.Tensor) -> torch.Tensor:
    """Whole rows, uint8 [n, row_bytes]: key and initial weight; timestamp, count, used bit and states are zero."""
    layout, index = options.rows[table], list(options.rows).index(table)
    weights = initial_weights(options.initializers[table], options.seed, index, ids, layout.embedding_dim)
    rows = torch.zeros(ids.numel(), layout.row_bytes, dtype=torch.uint8, device="cpu")
    rows[:, :METADATA_OFFSET] = as_bytes(ids[:, None])
    rows[:, HEADER_BYTES : HEADER_BYTES + layout.weight_bytes] = as_bytes(weights.to(layout.weight_dtype))
    return rows


# What an eviction round does; ``EvictionPolicy`` says it in words.
def decayed(policy: EvictionPolicy, counts: torch.Tensor) -> torch.Tensor:
    """``floor(count * decay)`` in float64, for the policies that look at counts; else the counts as they are."""
    if policy.kind not in ("count", "ttl_count") or policy.decay == 1.0:
        return counts
    return (counts.to(torch.float64) * policy.decay).floor().to(torch.int64)


def condemned(plan: RoundPlan, layout: RowLayout, rows: torch.Tensor) -> torch.Tensor:
    """Bool [n]: which rows, uint8 [n, row_bytes], the policy evicts."""
    policy, header = plan.policy, unpack_header(rows)
    nothing = torch.zeros_like(header.used)
    old = (plan.now - header.timestamps > min(policy.ttl_seconds, MOST)) if policy.ttl_seconds else nothing
    rare = decayed(policy, header.counts) < min(policy.count_threshold, MOST)
    if policy.kind == "ttl":
        return old
    if policy.kind == "count":
        return rare
    if policy.kind == "ttl_count":
        return old & rare
    if policy.kind == "timestamp":
        return header.timestamps < min(policy.timestamp_threshold, MOST)
    if policy.kind == "l2":
        wide = separate(layout, rows)["weight"].to(torch.float64)
        return row_sum(wide * wide)[:, 0] < policy.l2_threshold * policy.l2_threshold
    if plan.cutoff is None:
        return nothing
    score, key = plan.cutoff
    return (header.counts < score) | ((header.counts == score) & (header.ids < key))


def as_ids(keys: Iterable[int]) -> torch.Tensor:
    """Int64 [n]."""
    return torch.tensor(list(keys), dtype=torch.int64, device="cpu")


# Tables of rows, and their order by bucket.
def bucket(key: int, chosen: Buckets) -> int:
    """The bucket of one id."""
    return key % chosen.total_count if chosen.bucket_size is None else key // chosen.bucket_size


def sort_ids(ids: torch.Tensor, chosen: Buckets, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids by bucket, then by id, [n, 1]; how many each of the buckets [begin, end) has, [B, 1]. Raises ConfigError."""
    check_buckets(ids, chosen, begin, end)
    order = sorted(ids.tolist(), key=lambda key: (bucket(key, chosen), key))
    numbers = as_ids(bucket(key, chosen) - begin for key in order)
    return as_ids(order)[:, None], numbers.bincount(minlength=end - begin)[:, None]


def canonical(layout: RowLayout, rows: torch.Tensor) -> torch.Tensor:
    """A copy of whole rows as a store keeps them: used, with zero padding."""
    result = torch.zeros_like(rows)
    for begin, end in layout.value_ranges:
        result[:, begin:end] = rows[:, begin:end]
    result[:, HEADER_BYTES - 1] |= 0x80
    return result


@dataclass(eq=False)
class DictReader:
    """The rows of one moment: of each table a dictionary, whose rows are never changed, only replaced."""

    options: StoreOptions
    tables: dict[str, dict[int, torch.Tensor]]
    # The version of each row's last change, and of each removal that no row has followed.
    changed: dict[str, dict[int, int]]
    removed: dict[str, dict[int, int]]
    steps: dict[str, int]
    version: int
    first_mark: int = 0

    def read(self, table: str, ids: torch.Tensor, begin: int, end: int, out: torch.Tensor) -> None:
        found = [self.tables[table].get(key) for key in ids.tolist()]
        missing = [position for position, row in enumerate(found) if row is None]
        for position, row in zip(missing, initial_rows(self.options, table, ids[missing]), strict=True):
            found[position] = row
        if found:
            out.copy_(torch.stack([row[begin:end] for row in found if row is not None]))

    def find(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        return torch.tensor([key in self.tables[table] for key in ids.tolist()], dtype=torch.bool, device="cpu")

    def ids(self, table: str, begin: int, last: int) -> torch.Tensor:
        return as_ids(sorted(key for key in self.tables[table] if begin <= key <= last))

    def size(self, table: str) -> int:
        return len(self.tables[table])

    def changes(self, table: str, since: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        both = (self.changed[table], self.removed[table])
        changed, removed = (as_ids(sorted(key for key in found if found[key] > since)) for found in both)
        return changed, removed, self.first_mark

    def mark(self) -> int:
        return self.version

    def step(self, table: str) -> int:
        return self.steps.get(table, 0)

    def close(self) -> None:
        self.tables, self.changed, self.removed = {}, {}, {}


class DictRows(DictReader):
    """The rows of a store."""

    def __init__(self, options: StoreOptions) -> None:
        names = tuple(options.rows)
        super().__init__(options, {t: {} for t in names}, {t: {} for t in names}, {t: {} for t in names}, {}, 0)
        self.evicted_count = 0

    def put(self, table: str, rows: torch.Tensor) -> None:
        """The one place where rows are stored, by the keys in their headers; of duplicates the last wins."""
        self.version += 1
        for key, row in zip(unpack_header(rows).ids.tolist(), rows.clone(), strict=True):
            self.tables[table][key] = row
            self.changed[table][key] = self.version
            self.removed[table].pop(key, None)

    def remove(self, table: str, keys: Iterable[int]) -> int:
        """The one place where rows go; how many there were."""
        self.version += 1
        present = [key for key in dict.fromkeys(keys) if self.tables[table].pop(key, None) is not None]
        for key in present:
            del self.changed[table][key]
            if self.options.track_changes:
                self.removed[table][key] = self.version
        return len(present)

    def whole(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Whole rows, uint8 [n, row_bytes], initial where an id is missing."""
        rows = torch.empty(ids.numel(), self.options.rows[table].row_bytes, dtype=torch.uint8, device="cpu")
        self.read(table, ids, 0, rows.shape[1], rows)
        return rows

    def opened(self, table: str, ids: torch.Tensor, now: int) -> torch.Tensor:
        """The rows of distinct ids; missing ones as they begin: initial, used, stamped, count 0."""
        rows, new = self.whole(table, ids), ~self.find(table, ids)
        zeros = torch.zeros_like(ids)
        rows[new, :HEADER_BYTES] = pack_header(Header(ids, zeros + now, zeros, zeros == 0))[new]
        return rows

    def visit(self, table: str, rows: torch.Tensor, ids: torch.Tensor, now: int) -> None:
        """Stamp rows, and count how often ``ids`` names each."""
        header, (named, times) = unpack_header(rows), torch.unique(ids, return_counts=True)
        policy, counts = self.options.evictions[table], header.counts
        if policy is None or policy.kind != "score":
            counts = counts + times[torch.searchsorted(named, header.ids)]
        rows[:, :HEADER_BYTES] = pack_header(Header(header.ids, torch.full_like(counts, now), counts, header.used))

    def write(self, table: str, ids: torch.Tensor, values: torch.Tensor, begin: int, now: int, *, visit: bool) -> None:
        self.check_capacity(table, ids)
        last = {key: position for position, key in enumerate(ids.tolist())}
        rows = self.opened(table, as_ids(last), now)
        rows[:, begin : begin + values.shape[1]] = values[list(last.values())]
        if visit:
            self.visit(table, rows, ids, now)
        self.put(table, rows)
        self.shrink(table, ids)

    def write_rows(self, table: str, rows: torch.Tensor) -> None:
        ids = unpack_header(rows).ids
        self.check_capacity(table, ids)
        self.put(table, canonical(self.options.rows[table], rows))
        self.shrink(table, ids)

    def write_metadata(self, table: str, ids: torch.Tensor, words: torch.Tensor, mask: int) -> None:
        last = dict(zip(ids.tolist(), words.tolist(), strict=True))
        present = as_ids(key for key in last if key in self.tables[table])
        rows, new = self.whole(table, present), as_ids(last[key] for key in present.tolist())
        old = from_bytes(rows[:, METADATA_OFFSET:HEADER_BYTES], torch.int64)[:, 0]
        rows[:, METADATA_OFFSET:HEADER_BYTES] = as_bytes(((old & ~mask) | (new & mask) | USED)[:, None])
        self.put(table, rows)

    def update(self, table: str, ids: torch.Tensor, grads: torch.Tensor, hyper: Hyper, now: int) -> None:
        self.check_capacity(table, ids)
        layout, (unique, sums) = self.options.rows[table], reduce_duplicates(ids, grads)
        rows = self.opened(table, unique, now)
        values = separate(layout, rows)
        weight, states = update(layout.optimizer, values.pop("weight"), sums, values, hyper)
        rows[:, HEADER_BYTES : HEADER_BYTES + layout.weight_bytes] = as_bytes(weight)
        for name, slot in layout.state_slots.items():
            rows[:, slot.offset_bytes : slot.end_bytes] = as_bytes(states[name])
        self.visit(table, rows, ids, now)
        self.put(table, rows)
        self.shrink(table, ids)
        self.set_step(table, hyper.step)

    def set_step(self, table: str, step: int) -> None:
        self.steps[table] = step

    def delete(self, table: str, ids: torch.Tensor) -> int:
        return self.remove(table, ids.tolist())

    def clear(self, table: str) -> None:
        self.remove(table, list(self.tables[table]))

    def check_capacity(self, table: str, ids: torch.Tensor) -> None:
        """Demand that the table may hold the distinct ids of a batch. Raises CapacityError."""
        capacity, distinct = self.options.capacities[table], len(set(ids.tolist()))
        if capacity is not None and distinct > capacity:
            raise CapacityError("a batch larger than the table", got=distinct, expected=f"<= {capacity}", where=table)

    def shrink(self, table: str, batch: torch.Tensor) -> None:
        """Evict what a write put beyond the capacity, never a row of its batch; see ``KVStore`` for the order."""
        capacity, present = self.options.capacities[table], self.tables[table]
        if capacity is None or len(present) <= capacity:
            return
        others = as_ids(present.keys() - set(batch.tolist()))
        header, policy = unpack_header(self.whole(table, others)), self.options.evictions[table]
        by_count = policy is not None and policy.kind in ("score", "count", "ttl_count")
        ranks = (header.counts if by_count else header.timestamps).tolist()
        order = sorted(zip(ranks, others.tolist(), strict=True))
        self.evicted_count += self.remove(table, [key for _, key in order[: len(present) - capacity]])

    def begin_round(self, table: str, policy: EvictionPolicy, now: int) -> RoundPlan:
        ids, cutoff = as_ids(sorted(self.tables[table])), None
        if policy.kind == "score" and 0 < policy.keep_count < ids.numel():
            scores = unpack_header(self.whole(table, ids)).counts.tolist()
            cutoff = sorted(zip(scores, ids.tolist(), strict=True))[-policy.keep_count]
        return RoundPlan(table, policy, now, self.version, ids, cutoff)

    def evict_some(self, plan: RoundPlan, ids: torch.Tensor) -> int:
        # A row that was removed, or written after the round began, is no business of this round.
        changed = self.changed[plan.table]
        stale = as_ids(key for key in ids.tolist() if changed.get(key, plan.mark + 1) <= plan.mark)
        rows = self.whole(plan.table, stale)
        gone, header = condemned(plan, self.options.rows[plan.table], rows), unpack_header(rows)
        fewer = decayed(plan.policy, header.counts)
        rows[:, :HEADER_BYTES] = pack_header(Header(header.ids, header.timestamps, fewer, header.used))
        self.put(plan.table, rows[~gone & (fewer != header.counts)])
        evicted_count = self.remove(plan.table, header.ids[gone].tolist())
        self.evicted_count += evicted_count
        return evicted_count

    def snapshot(self) -> DictReader:
        tables = {table: dict(rows) for table, rows in self.tables.items()}
        changed = {table: dict(versions) for table, versions in self.changed.items()}
        removed = {table: dict(versions) for table, versions in self.removed.items()}
        return DictReader(self.options, tables, changed, removed, dict(self.steps), self.version, self.first_mark)

    def forget(self, mark: int) -> None:
        """What went before a mark is no longer told."""
        self.first_mark = max(mark, self.first_mark)
        for table, found in self.removed.items():
            self.removed[table] = {key: version for key, version in found.items() if version > mark}

    def reserve(self, table: str, row_count: int) -> None:
        """A dictionary grows by itself."""

    def prefetch(self, table: str, ids: torch.Tensor) -> None:
        """All rows are near."""

    def stats(self) -> StoreStats:
        total = sum(map(len, self.tables.values()))
        row_bytes = sum(len(rows) * self.options.rows[table].row_bytes for table, rows in self.tables.items())
        log_bytes = 16 * sum(map(len, self.removed.values()))
        return StoreStats(total, total, row_bytes, row_bytes, 0, 0, self.evicted_count, log_bytes)

    sort_ids = staticmethod(sort_ids)


class KVStore(store.KVStore, engine=lambda options: LockedRows(DictRows(options))):
    __doc__ = store.KVStore.__doc__


# Rows in files: {table}.rows, {table}.ids, {table}.bucket_counts, or the parts of rows one by one.
def stored(saved: SavedRows, name: str, first: int, behind: int) -> torch.Tensor:
    """Rows [first, behind) of a tensor in a file."""
    # safetensors makes tensors where the process does by default.
    with torch.device("cpu"), safe_open(saved.file_of(name), framework="pt") as opened:
        found: torch.Tensor = opened.get_slice(name)[first:behind]
        return found.clone()


class WholeTensors:
    """A save gathers every rank's rows, a load takes those of its buckets."""

    writer_class = HuggingFaceStorageWriter

    def tensors(self, part: SavePart) -> dict[str, torch.Tensor]:
        chunks = torch.split(part.ids, part.chunk_rows or max(1, part.ids.numel()))
        rows = torch.cat([part.source.get_rows(part.table, ids.contiguous()) for ids in chunks])
        values = {"rows": rows}
        if part.form == "separate":
            values = separate(part.source.layout(part.table), rows)
            values["metadata"] = from_bytes(rows[:, METADATA_OFFSET:HEADER_BYTES], torch.int64)
        values |= {"ids": part.ids, "bucket_counts": part.bucket_counts}
        if part.deleted is not None:
            values["deleted"] = part.deleted
        every = part.of_all_ranks(values)
        # Mixed precision would have it that values of other dtypes are joined.
        with torch.autocast("cpu", enabled=False):
            return {f"{part.table}.{name}": torch.cat([found[name] for found in every]) for name in values}

    def open(self, path: str) -> SavedRows:
        return SavedRows(path)

    def chunks(
        self, saved: SavedRows, table: str, begin: int, end: int, chunk_rows: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        layout, ids = saved.layout(table), stored(saved, f"{table}.ids", 0, saved.size(table))
        names = ("rows",) if saved.form == "rows" else ("weight", "metadata", *layout.state_slots)
        saved.check_order(table, ids, 0)
        mine = [place for place, key in enumerate(ids.tolist()) if begin <= bucket(key, saved.buckets) < end]
        for start in range(0, len(mine), chunk_rows):
            first, behind = mine[start], mine[start : start + chunk_rows][-1] + 1
            values = {name: stored(saved, f"{table}.{name}", first, behind) for name in names}
            whole = saved.form == "rows"
            rows = values["rows"] if whole else assemble_rows(layout, ids[first:behind], values["metadata"], values)
            saved.check_rows(table, ids[first:behind], rows)
            yield ids[first:behind], rows

    def fill(
        self, store: store.KVStore, saved: SavedRows, table: str, rows: range, weights_only: bool, ahead: int
    ) -> None:
        """Rows are read twice: to be checked, and to be written."""


save, load = disk.StoreFiles(WholeTensors()).save, disk.StoreFiles(WholeTensors()).load
sort_ids_by_bucket = store.BucketSort(sort_ids).sort_ids_by_bucket
