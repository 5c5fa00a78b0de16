"""Memory that cannot be had: every allocation of every verb fails once, and nothing has happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, assert_le, raises, requirement
from conformance.kvstore.cases import Clock, assert_bits, ids_of, random_rows, save, store_of, weights_of
from twinproof.errors import ConfigError, TwinproofError

ROWS, NEW = 600, 3000


def filled(kvstore: Any) -> Any:
    """A store of 600 rows that tracks its changes."""
    store = store_of(kvstore, kvstore.RowLayout(6, optimizer="adagrad"), track_changes=True, clock=Clock())
    store.set("t", ids_of(range(ROWS)), weights_of(store, ROWS, 1))
    return store


def image(store: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and rows of the table; thousands of rows are looked at hundreds of times here."""
    ids = store.ids("t")
    return ids, store.get_rows("t", ids)


def assert_image(store: Any, expected: tuple[torch.Tensor, torch.Tensor], where: str) -> None:
    """Demand exactly these rows."""
    found = image(store)
    assert_bits(found[0], expected[0], where=f"{where}: ids")
    assert_bits(found[1], expected[1], where=f"{where}: rows")


def verbs(kvstore: Any) -> dict[str, Callable[[Any], Any]]:
    """Everything that writes, with batches that make the table grow."""
    ids, like = ids_of(range(-20, NEW)), filled(kvstore)
    weights, ones = weights_of(like, ids.numel(), 2), torch.ones(ids.numel(), 6)
    rows = random_rows(like, range(5000, 5000 + NEW), 2)
    whole = {"t.weight": rows, "t.weight_id": ids_of(range(5000, 5000 + NEW))}
    return {
        "set": lambda store: store.set("t", ids, weights),
        "set_rows": lambda store: store.set_rows("t", rows),
        "set_state": lambda store: store.set_state("t", "momentum1", ids, ones),
        "set_scores": lambda store: store.set_scores("t", ids, torch.ones(ids.numel())),
        "apply_gradients": lambda store: store.apply_gradients("t", ids, ones, 0.5),
        "delete": lambda store: store.delete("t", ids_of(range(0, ROWS, 2))),
        "clear": lambda store: store.clear("t"),
        "evict": lambda store: store.evict("t", policy=kvstore.EvictionPolicy.count(2)),
        "reserve": lambda store: store.reserve("t", 50_000),
        "snapshot": lambda store: store.snapshot().close(),
        "state_dict": lambda store: store.state_dict(),
        "load_state_dict": lambda store: store.load_state_dict(whole),
    }


def check(store: Any, snapshot: Any, before: Any, where: str) -> None:
    """Store, mark, snapshot and counters are as they were."""
    assert_image(store, before[0], where=where)
    assert_equal(store.mark(), before[1], where=f"{where}: mark")
    stats = store.stats()
    assert_equal((stats.row_count, stats.block_count), (store.size("t"),) * 2, where=f"{where}: blocks")
    if snapshot is not None:
        assert_image(snapshot, before[0], where=f"{where}: snapshot")


def failures_of(kvstore: Any, name: str, verb: Callable[[Any], Any], snapshots: int, expected: Any) -> int:
    """Run the verb with its first, second, ... allocation failing until it has enough; how often it failed."""
    for count in range(2000):
        store, where = filled(kvstore), f"{name} beside {snapshots} snapshots, allocation {count}"
        taken = [store.snapshot() for _ in range(snapshots)]
        before, mark = image(store), store.mark()
        store.fail_allocations("t", count)
        try:
            verb(store)
        except MemoryError as error:
            assert_equal(isinstance(error, TwinproofError), True, where=f"{where}: {type(error).__name__} is named")
        else:
            store.fail_allocations("t", -1)
            assert_image(store, expected, where=where)
            return count
        store.fail_allocations("t", -1)
        for snapshot in taken or [None]:
            check(store, snapshot, (before, mark), where)
        verb(store)
        assert_image(store, expected, where=f"{where}, tried again")
        for snapshot in taken:
            assert_image(snapshot, before, where=f"{where}, tried again: snapshot")
    raise AssertionError(f"{name} allocates without end")


@requirement(
    "KV-121",
    "Where any allocation for rows, maps or snapshots fails, the verb MUST raise a named MemoryError and leave store, "
    "snapshots and counters as they were, ready for another try.",
    needs=("injected_allocation_failure",),
)
def test_failing_allocations(kvstore: Any) -> None:
    failed = {}
    for name, verb in verbs(kvstore).items():
        done = filled(kvstore)
        verb(done)
        for snapshots in (0, 2):
            failed[name, snapshots] = failures_of(kvstore, name, verb, snapshots, image(done))
    # What allocates nothing proves nothing: growth and copies for snapshots do.
    for name in ("set", "set_rows", "set_state", "apply_gradients", "reserve", "load_state_dict"):
        assert_equal(failed[name, 0] > 0, True, where=f"{name} grows the table")
    for name in ("set", "set_scores", "apply_gradients", "delete", "evict", "clear"):
        assert_equal(failed[name, 2] > 0, True, where=f"{name} copies rows for a snapshot")


@pytest.mark.night
@requirement(
    "KV-240",
    "Where memory for the rows of a state dict of any length is short, and no snapshot lives, load_state_dict without "
    "clear MUST leave every table as it was, ready for another try; of a full table rows that make room may have gone.",
    needs=("injected_allocation_failure", "large_batches"),
)
@pytest.mark.parametrize("table", ["t", "u"])
def test_failing_long_state_dict(kvstore: Any, table: str) -> None:
    # More than two of the chunks in which it writes; the second table has no room for what is there as well.
    layouts, count = {"t": kvstore.RowLayout(1), "u": kvstore.RowLayout(1)}, 140_000
    source = store_of(kvstore, layouts)
    for name in layouts:
        source.set(name, torch.arange(count), torch.arange(count).float()[:, None])
    state = source.state_dict()
    for failures in range(2000):
        store, where = store_of(kvstore, layouts, capacity={"t": None, "u": count}), f"{table}, allocation {failures}"
        for name in layouts:
            store.set(name, torch.arange(-3, 3), torch.full((6, 1), -1.0))
        store.fail_allocations(table, failures)
        try:
            store.load_state_dict(state)
        except MemoryError:
            store.fail_allocations(table, -1)
            for name in layouts:
                assert_bits(store.ids(name), torch.arange(-3, 3), where=f"{where}: ids of {name}")
                assert_bits(store.get(name, store.ids(name)), torch.full((6, 1), -1.0), where=f"{where}: {name}")
            store.load_state_dict(state)
        else:
            break
    store.fail_allocations(table, -1)
    assert_equal(failures > 0, True, where="a load that grows the table allocates")
    assert_equal([store.size("t"), store.size("u")], [count + 3, count], where="rows")


@requirement(
    "KV-122",
    "Where an allocation fails within a load, beside a snapshot too, each row MUST be the old one or the new one, the "
    "store MUST go on, and loading again MUST complete it.",
    needs=("injected_allocation_failure",),
)
@pytest.mark.parametrize("snapshot_count", [0, 1])
def test_failing_load(kvstore: Any, tmp_path: Path, snapshot_count: int) -> None:
    source = filled(kvstore)
    source.set_rows("t", random_rows(source, range(300, NEW), 4))
    save(kvstore, source, tmp_path / "ck")
    merged, count = filled(kvstore), 0
    kvstore.load(merged, tmp_path / "ck")
    while True:
        store, where = filled(kvstore), f"allocation {count}"
        # Room for the load's rows is made first; a snapshot's copies are made as rows are replaced.
        old, taken = image(store), [store.snapshot() for _ in range(snapshot_count)]
        store.fail_allocations("t", count)
        try:
            kvstore.load(store, tmp_path / "ck", chunk_rows=500)
        except MemoryError:
            store.fail_allocations("t", -1)
            ids, rows = image(store)
            is_old = (rows == filled(kvstore).get_rows("t", ids)).all(dim=1) & torch.isin(ids, old[0])
            is_new = (rows == source.get_rows("t", ids)).all(dim=1)
            assert_equal(ids[~(is_old | is_new)].tolist(), [], where=f"{where}: rows that are neither old nor new")
            assert_equal(torch.isin(old[0], ids).all().item(), True, where=f"{where}: no row is lost")
            kvstore.load(store, tmp_path / "ck", chunk_rows=500)
            assert_image(store, image(merged), f"{where}: loaded again")
            for snapshot in taken:
                assert_image(snapshot, old, f"{where}: the snapshot")
            count += 1
        else:
            break
    assert_equal(count > 0, True, where="a load that grows the table allocates")
    with raises(MemoryError, where="reserve"):
        store.reserve("t", 2**32 - 16)
    for absurd in (2**32 - 15, 2**63, 2**70):
        with raises(ConfigError, mentions=(f"got: {absurd}", "where: row_count"), where=f"reserve({absurd})"):
            store.reserve("t", absurd)


@requirement(
    "KV-135",
    "After reserve(n), batches of n distinct ids in all MUST NOT allocate memory for rows or maps, whatever duplicates "
    "they hold and however many threads insert.",
    needs=("injected_allocation_failure",),
)
@pytest.mark.parametrize("thread_count", [1, 2, 8])
def test_reserved_rows_need_no_memory(kvstore: Any, thread_count: int) -> None:
    count, generator = 20_000, torch.Generator().manual_seed(thread_count)
    before = torch.get_num_threads()
    torch.set_num_threads(thread_count)
    try:
        store, outcome = store_of(kvstore, kvstore.RowLayout(6), num_shards=64), "enough"
        store.reserve("t", count)
        reserved = store.stats()
        store.fail_allocations("t", 0)
        ids = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
        # Each batch has half of its ids twice, and rows that an earlier batch inserted.
        for begin in range(0, count, count // 2):
            part = torch.cat([ids[: begin + count // 2], ids[begin : begin + count // 2]])
            batch = part[torch.randperm(part.numel(), generator=generator)]
            try:
                store.set("t", batch, torch.ones(batch.numel(), 6))
            except MemoryError as error:
                outcome = f"{error} at {begin}"
        stats = store.stats()
    finally:
        torch.set_num_threads(before)
    assert_equal(outcome, "enough", where=f"memory on {thread_count} threads")
    assert_equal(stats.row_count, count, where="rows")
    assert_equal(
        (stats.allocated_bytes, stats.map_bytes), (reserved.allocated_bytes, reserved.map_bytes), where="bytes"
    )


@requirement(
    "KV-280",
    "A slice of an eviction round for which memory is short MUST count as not looked at; the round MUST go on with the "
    "same rows, and end as one that always had memory.",
    needs=("injected_allocation_failure",),
)
def test_rounds_go_on_after_a_failure(kvstore: Any) -> None:
    policy, slice_rows = kvstore.EvictionPolicy.count(2, 0.5), 7
    for failing in range(4):
        store = filled(kvstore)
        # Rows of ids that are multiples of 3 stay, with fewer counts.
        for _ in range(4):
            store.set("t", ids_of(range(0, ROWS, 3)), weights_of(store, ROWS // 3, 2))
        found = store.start_eviction("t", policy=policy, slice_rows=slice_rows)
        for _ in range(failing):
            found.step()
        # It has kept no row yet, so that the next slice needs memory.
        before, taken = image(store), store.snapshot()
        store.fail_allocations("t", 0)
        for _ in range(2):
            told = found.stats
            with raises(MemoryError, where=f"slice {failing}"):
                found.step()
            assert_equal((found.stats, found.done), (told, False), where=f"slice {failing}: what the round did")
        store.fail_allocations("t", -1)
        stats = found.run()
        assert_equal((stats.processed_count, stats.evicted_count), (ROWS, ROWS - ROWS // 3), where="in all")
        assert_equal(store.ids("t").tolist(), [*range(0, ROWS, 3)], where="rows that stay")
        counts = (store.metadata("t", store.ids("t"))[:, 0] >> 32) & (2**31 - 1)
        assert_equal(set(counts.tolist()), {2}, where="their counts: 5 and a half")
        assert_image(taken, before, where="the snapshot")


def _resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon:")).split()[1])


@requirement(
    "KV-335",
    "What a store says it has given back MUST be resident no more, of tables in one piece of memory and in several: "
    "the process holds what the store says, and no more.",
    needs=("large_batches",),
)
@pytest.mark.parametrize("count", [100_000, 300_000])
def test_given_back(kvstore: Any, count: int) -> None:
    ids, weights = ids_of(range(count)), torch.ones(count, 16)
    # What any of these calls keeps for itself is kept by the first store.
    for is_measured in (False, True):
        before = _resident_bytes()
        store = store_of(kvstore, kvstore.RowLayout(16, optimizer="adagrad"), num_shards=1)
        store.set("t", ids, weights)
        full, full_bytes = store.stats(), _resident_bytes() - before
        store.delete("t", ids[1000:])
        left, left_bytes = store.stats(), _resident_bytes() - before
        if is_measured:
            slack_bytes = 2 << 20
            for stats, resident_bytes, where in ((full, full_bytes, "all rows"), (left, left_bytes, "1000 rows")):
                said_bytes = stats.allocated_bytes + stats.map_bytes
                assert_le(resident_bytes, said_bytes + slack_bytes, where=f"resident bytes, {where} of {count}")
            assert_le(left.allocated_bytes, full.allocated_bytes // 10, where=f"bytes held for 1000 rows of {count}")
        store.close()
        # Else what its object holds would go while the next one is measured.
        del store


@requirement(
    "KV-418",
    "Where memory for the rows of a state dict is short, no snapshot lives and no capacity evicts, load_state_dict "
    "with clear MUST leave every table as it was, ready for another try: other rows go when the new ones are there.",
    needs=("injected_allocation_failure",),
)
@pytest.mark.parametrize("table", ["t", "u"])
def test_failing_clear(kvstore: Any, table: str) -> None:
    layouts = {name: kvstore.RowLayout(6, optimizer="adagrad") for name in "tu"}
    source = store_of(kvstore, layouts)
    for seed, name in enumerate(layouts):
        source.set_rows(name, random_rows(source, range(400, 1400), seed, name))
    state, wanted = source.state_dict(), {name: _rows_of(source, name) for name in layouts}
    for failures in range(2000):
        # All that there is for a while just fits.
        store, where = store_of(kvstore, layouts, capacity={"t": None, "u": 1400}, num_shards=2), f"{table}, {failures}"
        for seed, name in enumerate(layouts):
            store.set_rows(name, random_rows(store, range(ROWS), 7 + seed, name))
        before, has_failed = {name: _rows_of(store, name) for name in layouts}, False
        store.fail_allocations(table, failures)
        try:
            store.load_state_dict(state, clear=True)
        except MemoryError as error:
            has_failed = True
            assert_equal(isinstance(error, TwinproofError), True, where=f"{where}: {type(error).__name__} is named")
        store.fail_allocations(table, -1)
        if has_failed:
            for name in layouts:
                assert_equal(_rows_of(store, name) == before[name], True, where=f"{where}: {name} is as it was")
            store.load_state_dict(state, clear=True)
        for name in layouts:
            assert_equal(_rows_of(store, name) == wanted[name], True, where=f"{where}: {name} is what was saved")
        if not has_failed:
            break
    assert_equal(0 < failures < 1999, True, where="a load that grows the table allocates, and ends")


def _rows_of(store: Any, table: str) -> tuple[bytes, bytes]:
    ids = store.ids(table)
    return ids.numpy().tobytes(), store.get_rows(table, ids).numpy().tobytes()


@requirement(
    "KV-420",
    "reserve of more rows than a table can hold MUST be refused with the number that was asked for and the most that "
    "there can be, and change nothing.",
    needs=("injected_allocation_failure",),
)
@pytest.mark.parametrize("count", [2**32 - 15, 2**32, 2**33, 2**64])
def test_reserve_of_too_many(kvstore: Any, count: int) -> None:
    store = filled(kvstore)
    before, stats = image(store), store.stats()
    with raises(ConfigError, mentions=(f"got: {count}", f"from 0 to {2**32 - 16}", "row_count"), where=f"{count} rows"):
        store.reserve("t", count)
    assert_image(store, before, where=f"after reserve({count})")
    assert_equal(store.stats(), stats, where=f"memory after reserve({count})")
