"""Where the work is cut: sizes next to every threshold, seams of threads and of loads, rows of older moments."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, assert_same_bytes, raises, requirement, succeeds
from conformance.harness.threads import torch_threads
from conformance.kvstore.cases import (
    CHECKED_ROWS,
    FILE,
    SERIAL_IDS,
    STREAMED_BYTES,
    Clock,
    assert_bits,
    assert_contents,
    contents,
    header,
    ids_of,
    random_row,
    random_rows,
    rows_tensor,
    save,
    store_of,
    weights_of,
)
from twinproof.errors import CapacityError, TwinproofError

LARGE = ("large_batches",)


@requirement(
    "KV-190",
    "A round MUST leave the count of a row that was written after the round began as that write left it, whichever "
    "slice the row is in.",
)
@pytest.mark.parametrize("kind", ["count", "ttl_count"])
def test_decay_of_newer_rows(kvstore: Any, kind: str) -> None:
    store = store_of(kvstore, clock=Clock(10_000))
    layout = store.layout("t")
    store.set_rows(
        "t", rows_tensor([random_row(layout, key, 10, 40 + key, key) for key in range(12)], layout.row_bytes)
    )
    policies = {"count": kvstore.EvictionPolicy.count(3, 0.5), "ttl_count": kvstore.EvictionPolicy.ttl_count(5, 3, 0.5)}
    expected = {key: (10, (40 + key) // 2) for key in range(12)}
    round_ = store.start_eviction("t", policy=policies[kind], slice_rows=4)
    store.set("t", ids_of([1, 6]), weights_of(store, 2, 1))
    expected |= {1: (10_000, 42), 6: (10_000, 47)}
    round_.step()
    store.set_rows("t", rows_tensor([random_row(layout, key, 77, 9, key) for key in (2, 7)], layout.row_bytes))
    expected |= {2: (77, 9), 7: (77, 9)}
    round_.step()
    store.set_scores("t", ids_of([11]), torch.tensor([7e-45]))
    store.delete("t", ids_of([10]))
    store.set("t", ids_of([10]), weights_of(store, 1, 2))
    expected |= {10: (10_000, 1), 11: (10, 5)}
    stats = round_.run()
    found = store.get_rows("t", ids_of(range(12)))[:, :16].contiguous().numpy().tobytes()
    assert_same_bytes(found, b"".join(header(key, *fields) for key, fields in expected.items()), where="headers")
    assert_equal((stats.processed_count, stats.evicted_count), (12, 0), where="stats")


@requirement(
    "KV-191",
    "A snapshot MUST go on showing, in every read, the rows that a full table pushed out after it, whichever verb "
    "pushed them, and rows that were pushed out before and came back.",
)
def test_pushed_out_under_a_snapshot(kvstore: Any) -> None:
    clock = Clock(1)
    store = store_of(kvstore, capacity=5, clock=clock)
    store.set("t", ids_of(range(5)), weights_of(store, 5, 1))
    moments = [(store.snapshot(), contents(store))]
    changes: dict[str, Any] = {
        "set": lambda: store.set("t", ids_of([10, 11]), weights_of(store, 2, 2)),
        "set_rows": lambda: store.set_rows("t", random_rows(store, [20, 21], 3)),
        "apply_gradients": lambda: store.apply_gradients("t", ids_of([30, 30]), torch.ones(2, 6), 0.5),
        "set_state": lambda: store.set_state("t", "momentum1", ids_of([40]), torch.ones(1, 6)),
        "came back": lambda: store.set("t", ids_of(range(5)), weights_of(store, 5, 4)),
    }
    for change in changes.values():
        clock.now += 1
        change()
        moments.append((store.snapshot(), contents(store)))
    assert_equal(store.size("t"), 5, where="rows")
    for number, (taken, expected) in enumerate(moments):
        where = f"snapshot {number} of {len(moments)}"
        assert_contents(taken, expected, where=where)
        assert_equal(taken.contains("t", ids_of(list(expected["t"]))).all().item(), True, where=f"{where}: contains")
        taken.close()


@requirement(
    "KV-192",
    "Changes since any mark MUST be right, each id once, in the store and in its snapshots, however many rows went and "
    "came back since: beyond any log of them that is made shorter, for ids that went twice and three times.",
)
def test_many_removals(kvstore: Any) -> None:
    store = store_of(kvstore, kvstore.RowLayout(1), track_changes=True)
    count = 1100
    moments: list[tuple[str, Any, set[int]]] = []
    present: set[int] = set()
    log: list[tuple[int, int]] = []

    def write(keys: range) -> None:
        store.set("t", ids_of(keys), torch.zeros(len(keys), 1))
        present.update(keys)

    def remove(keys: range) -> None:
        there = sorted(present & set(keys))
        assert_equal(store.delete("t", ids_of(keys)), len(there), where=f"rows that {keys} removed")
        log.extend((len(moments), key) for key in there)
        present.difference_update(keys)

    def look(name: str) -> None:
        moments.append((name, store.snapshot(), set(present)))

    write(range(count))
    look("all there")
    for turn in range(4):
        # Id 0 goes twice and stays away, id 1 three times, and so on.
        remove(range(count))
        look(f"gone {turn}")
        write(range(turn, count))
        look(f"back {turn}")
    assert_equal(len(log) > 4096, True, where="a log of removals that is longer than its limit")
    remove(range(100, 200))
    look("the log made shorter")
    write(range(150, 170))
    remove(range(900, count))
    look("the end")
    for now, (name, snapshot, there) in enumerate(moments):
        for then, (since_name, since, _) in enumerate(moments[: now + 1]):
            where = f"{name}, since {since_name}"
            expected = {key for moment, key in log if then < moment <= now} - there
            for source in (snapshot, store) if now == len(moments) - 1 else (snapshot,):
                changed, removed = source.changes("t", since.mark())
                assert_equal(removed.tolist(), sorted(expected), where=where)
                assert_equal(changed.tolist(), sorted(set(changed.tolist()) & there), where=f"{where}: changed")


@requirement(
    "KV-193",
    "Whole rows MUST be stored used, with zero padding and their values as they are, on either side of every size at "
    "which they are written in another way, in batches and in loads, whatever their padding and used bit were.",
)
@pytest.mark.parametrize(
    ("dim", "dtype", "optimizer"),
    [
        (1001, torch.float16, "partial_rowwise_adam"),
        (1021, torch.bfloat16, "rowwise_adagrad"),
        (515, torch.bfloat16, "adam"),
        (1000, torch.float32, "sgd"),
    ],
)
def test_streamed_rows(kvstore: Any, tmp_path: Path, dim: int, dtype: torch.dtype, optimizer: str) -> None:
    layout = kvstore.RowLayout(dim, dtype, optimizer)
    # Blocks of rows are multiples of 64 bytes, with a version of 8 bytes behind the row.
    limit = STREAMED_BYTES // (-(-(layout.row_bytes + 8) // 64) * 64)
    known = torch.zeros(layout.row_bytes, dtype=torch.uint8)
    for begin, end in layout.value_ranges:
        known[begin:end] = 255
    known[:16] = 255
    row = random_rows(store_of(kvstore, layout), [3], 5)[0]
    dirty = row | ~known
    dirty[15] &= 0x7F
    clean = row & known
    clean[15] |= 0x80
    for count in (1, limit, limit + 1):
        rows = dirty.repeat(count, 1)
        rows[:, :8] = torch.arange(count).reshape(-1, 1).view(torch.uint8)
        store = store_of(kvstore, layout)
        store.set_rows("t", rows)
        expected = clean.repeat(count, 1)
        expected[:, :8] = rows[:, :8]
        assert_bits(
            store.get_rows("t", torch.arange(count)), expected, where=f"{count} rows of {layout.row_bytes} bytes"
        )
    few = store_of(kvstore, layout)
    few.set_rows("t", rows[:9])
    save(kvstore, few, tmp_path / "ck")
    raw = bytearray((tmp_path / "ck" / FILE).read_bytes())
    length = int.from_bytes(raw[:8], "little")
    begin, end = json.loads(raw[8 : 8 + length])["t.rows"]["data_offsets"]
    ruined = rows[:9] | torch.tensor([0] * 15 + [0x80] + [0] * (layout.row_bytes - 16), dtype=torch.uint8)
    raw[8 + length + begin : 8 + length + end] = ruined.numpy().tobytes()
    (tmp_path / "ck" / FILE).write_bytes(raw)
    for keys in ([], [5, 100]):
        store = store_of(kvstore, layout)
        store.set("t", ids_of(keys), weights_of(store, len(keys), 1))
        kvstore.load(store, tmp_path / "ck", chunk_rows=4)
        assert_bits(store.get_rows("t", torch.arange(9)), expected[:9], where=f"loaded beside {keys}")


@requirement(
    "KV-219",
    "Bytes of rows MUST be read right from any byte of a row into any byte of memory, in batches of sizes next to that "
    "from which they are written past the caches.",
)
def test_streamed_reads(kvstore: Any) -> None:
    store = store_of(kvstore, kvstore.RowLayout(1020, torch.float16, "rowwise_adagrad"), num_shards=2)
    width = 2016
    most = STREAMED_BYTES // width + 1
    ids, row_bytes = torch.arange(most), store.layout("t").row_bytes
    rows = random_rows(store, [7], 3).repeat(most, 1)
    rows[:, :8] = ids.reshape(-1, 1).view(torch.uint8)
    store.set_rows("t", rows)
    memory = torch.empty(most * width + 64, dtype=torch.uint8)
    for count in (most - 1, most):
        for offset in (0, 8, 16, 17, row_bytes - width):
            for shift in (0, 1, 8):
                out = memory[shift : shift + count * width].view(count, width)
                store.get_rows("t", ids[:count], offset_bytes=offset, width_bytes=width, out=out)
                where = f"{count} rows from byte {offset} to byte {shift} of memory"
                assert_bits(out, rows[:count, offset : offset + width].contiguous(), where=where)


@requirement(
    "KV-194",
    "Of duplicates the last MUST win, occurrences be counted and gradients be added in the order of the batch, for any "
    "number of threads and shards, in batches of sizes next to those that are cut for threads.",
)
@pytest.mark.parametrize("count", [SERIAL_IDS - 1, SERIAL_IDS, SERIAL_IDS + 1, 2 * SERIAL_IDS + 1])
def test_duplicates_at_seams(kvstore: Any, count: int) -> None:
    # Each id stands in every part, the first and the last of each part among them.
    keys = [(position * 37) % 101 for position in range(count)]
    ids, weights = ids_of(keys), torch.arange(count, dtype=torch.float32).reshape(-1, 1).expand(-1, 2).contiguous()
    # Sums of these depend on their order.
    grads = torch.tensor([1e8, 1.0, -1e8, 3.0])[torch.arange(count) * 7 % 4].reshape(-1, 1).expand(-1, 2).contiguous()
    last = {key: float(position) for position, key in enumerate(keys)}
    sums = {key: torch.zeros(()) for key in last}
    for position, key in enumerate(keys):
        sums[key] = sums[key] + grads[position, 0]
    order = sorted(last)
    stepped = torch.stack([torch.tensor(last[key]) - sums[key] for key in order]).reshape(-1, 1).expand(-1, 2)
    for thread_count, shards in ((1, 4), (2, 1), (2, 5), (3, 8)):
        store = store_of(kvstore, kvstore.RowLayout(2, optimizer="sgd"), num_shards=shards, clock=Clock(50))
        where = f"{count} ids, {thread_count} threads, {shards} shards"
        with torch_threads(thread_count):
            store.set("t", ids, weights)
            found = store.get("t", ids)
            assert_bits(found[:, 0].contiguous(), torch.tensor([last[key] for key in keys]), where=f"{where}: set")
            store.apply_gradients("t", ids, grads, 1.0)
            assert_bits(store.get("t", ids_of(order)), stepped.contiguous(), where=f"{where}: step")
            headers = store.get_rows("t", ids_of(order))[:, :16].contiguous().numpy().tobytes()
            expected = b"".join(header(key, 50, 2 * keys.count(key)) for key in order)
            assert_same_bytes(headers, expected, where=f"{where}: headers")
            rows = random_rows(store, keys, 7)
            store.set_rows("t", rows)
            kept = torch.stack([rows[int(last[key])] for key in order])
            assert_bits(store.get_rows("t", ids_of(order)), kept, where=f"{where}: set_rows")


@requirement(
    "KV-195",
    "Ids MUST be listed each once, ascending, by range, by moment and by change, with any number of threads, in tables "
    "so large that threads share them.",
    needs=LARGE,
)
def test_listing_at_seams(kvstore: Any) -> None:
    # Two threads share a table from 65536 rows each on, also when the ten have gone; a snapshot sees other rows in one
    # half than in the other.
    count = 2 * 65536 + 10
    store = store_of(kvstore, kvstore.RowLayout(1), track_changes=True)
    ids = torch.arange(count) * 3 - count
    store.set("t", ids, torch.zeros(count, 1))
    with store.snapshot() as taken:
        mark = store.mark()
        gone, new = ids[65536 - 5 : 65536 + 5], torch.arange(5) * 3 + 1
        store.delete("t", gone)
        store.set("t", new, torch.zeros(5, 1))
        now = torch.cat([ids[: 65536 - 5], ids[65536 + 5 :], new]).sort().values
        for thread_count in (1, 2, 3):
            with torch_threads(thread_count):
                where = f"{thread_count} threads"
                assert_bits(store.ids("t"), now, where=f"{where}, now")
                assert_bits(taken.ids("t"), ids, where=f"{where}, of the snapshot")
                # Threads pass over rows outside of the range in the first part, in the last, in all and in none.
                for begin, behind in ((70000, count), (0, 60000), (40000, 90000), (5, 6), (65536, 65536), (1, count)):
                    for source, held in ((store, now), (taken, ids)):
                        first, last = int(held[begin]), int(held[min(behind, held.numel()) - 1])
                        listed = source.ids("t", first, last)
                        assert_bits(listed, held[begin:behind], where=f"{where}, from {first} to {last}")
                changed, removed = store.changes("t", mark)
                assert_bits(changed, new.sort().values, where=f"{where}, changed")
                assert_bits(removed, gone, where=f"{where}, removed")
                order, counts = kvstore.sort_ids_by_bucket(now.flip(0).contiguous(), total_buckets=2)
                split = now.remainder(2).sort(stable=True).indices
                assert_bits(order[:, 0].contiguous(), now[split], where=f"{where}, by bucket")
                assert_equal(counts[:, 0].tolist(), [int((now % 2 == b).sum()) for b in (0, 1)], where=where)


@requirement(
    "KV-196",
    "Saved rows that stand twice or out of order MUST be refused wherever threads that check them meet, before "
    "anything is written, and right ones be loaded, with buckets that begin at such a place too.",
    needs=LARGE,
)
def test_checks_at_seams(kvstore: Any, tmp_path: Path) -> None:
    count = 3 * CHECKED_ROWS
    source = store_of(kvstore, kvstore.RowLayout(1))
    source.set("t", torch.arange(count), torch.zeros(count, 1))
    row_bytes, everything = source.layout("t").row_bytes, source.get_rows("t", torch.arange(count))
    for buckets in (kvstore.Buckets(1), kvstore.Buckets(3)):
        save(kvstore, source, tmp_path / "ck", buckets=buckets)
        raw = (tmp_path / "ck" / FILE).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        entries = json.loads(raw[8 : 8 + length])
        places = {name: 8 + length + entries[f"t.{name}"]["data_offsets"][0] for name in ("rows", "ids")}
        for thread_count in (1, 2, 3):
            with torch_threads(thread_count):
                for keys in ([], [-1]):
                    where = f"{buckets.total_count} buckets, {thread_count} threads, beside {keys}"
                    store = store_of(kvstore, kvstore.RowLayout(1))
                    store.set("t", ids_of(keys), torch.zeros(len(keys), 1))
                    with succeeds("a load", where):
                        kvstore.load(store, tmp_path / "ck")
                    assert_bits(store.get_rows("t", torch.arange(count)), everything, where=where)
        # A row at a seam is once more the row before it.
        for position in (CHECKED_ROWS, 2 * CHECKED_ROWS):
            bad = bytearray(raw)
            for name, width in (("rows", row_bytes), ("ids", 8)):
                at = places[name] + position * width
                bad[at : at + width] = bad[at - width : at]
            (tmp_path / "ck" / FILE).write_bytes(bad)
            for thread_count in (1, 2, 3):
                with torch_threads(thread_count):
                    for keys in ([], [-1]):
                        where = f"row {position} twice, {buckets.total_count} buckets, {thread_count} threads, {keys}"
                        store = store_of(kvstore, kvstore.RowLayout(1))
                        store.set("t", ids_of(keys), torch.zeros(len(keys), 1))
                        before = contents(store)
                        with raises(TwinproofError, where=where):
                            kvstore.load(store, tmp_path / "ck")
                        assert_contents(store, before, where=where)


@requirement(
    "KV-197",
    "l2 MUST square its threshold in float64: a row whose norm is within one unit in the last place of the threshold "
    "goes or stays as that product says.",
)
def test_l2_at_rounding_thresholds(kvstore: Any) -> None:
    values = torch.rand(40, 2, generator=torch.Generator().manual_seed(3)) * 3
    values[:8, 1] = 0  # The square of one float32 is exact in float64, but not in float32.
    store = store_of(kvstore, kvstore.RowLayout(2))
    for key, (a, b) in enumerate(values.tolist()):
        square = a * a + b * b
        root = math.sqrt(square)
        for threshold in (root, math.nextafter(root, math.inf), math.nextafter(root, 0), math.sqrt(2.0), 0.3):
            store.set("t", ids_of([key]), values[key : key + 1])
            store.evict("t", policy=kvstore.EvictionPolicy.l2(threshold))
            kept = not square < threshold * threshold
            assert_equal(store.size("t"), int(kept), where=f"row {a!r}, {b!r} under {threshold!r}")
            store.delete("t", ids_of([key]))


@requirement(
    "KV-198",
    "A step MUST round weights and states to 16 bits to nearest even for every exponent and every pattern of bits, and "
    "keep NaNs NaNs whatever their payload.",
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_rounding(kvstore: Any, dtype: torch.dtype) -> None:
    low = torch.tensor([0, 0x1000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], dtype=torch.int32)
    grads = ((torch.arange(65536, dtype=torch.int32) << 16)[:, None] | low).view(torch.float32).reshape(-1, 512)
    for dtypes in ({}, {"momentum1": dtype}):
        layout = kvstore.RowLayout(512, dtype, "adagrad" if dtypes else "sgd", dtypes)
        store, ids = store_of(kvstore, layout), torch.arange(grads.shape[0])
        store.set("t", ids, torch.zeros(grads.shape, dtype=dtype))
        store.apply_gradients("t", ids, grads, 1.0)
        if dtypes:
            got, expected = store.get_state("t", "momentum1", ids), (grads * grads).to(dtype)
        else:
            got, expected = store.get("t", ids), (0 - grads).to(dtype)
        assert_bits(got.isnan(), expected.isnan(), where=f"NaNs, states {dtypes}")
        numbers = [value.masked_fill(value.isnan(), 0) for value in (got, expected)]
        assert_bits(numbers[0], numbers[1], where=f"numbers, states {dtypes}")


class _Ended(BaseException):
    """What is no Exception, as a task that was cancelled or a process that is to end."""


@requirement(
    "KV-199",
    "What a round of a background evictor raises, of any class, MUST be raised by wait, which MUST NOT wait for ever.",
)
@pytest.mark.parametrize("kind", [_Ended, ValueError, MemoryError])
def test_any_error_of_an_evictor(kvstore: Any, kind: type[BaseException]) -> None:
    store = store_of(kvstore, kvstore.RowLayout(2))
    policy = kvstore.EvictionPolicy.ttl(1)
    begin, ended = store.start_eviction, threading.Event()

    def start_eviction(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return begin(*arguments, **options)
        raise kind("of a round")

    store.start_eviction = start_eviction
    evictor = kvstore.BackgroundEvictor(store, "t", trigger_rows=1, policy=policy)
    found: list[BaseException] = []

    def wait() -> None:
        try:
            evictor.wait()
        except BaseException as error:
            found.append(error)
        ended.set()

    store.set("t", ids_of([1, 2]), torch.zeros(2, 2))
    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    assert_equal(ended.wait(20), True, where="wait ends")
    assert_equal([type(error) for error in found], [kind], where="what wait raises")
    evictor.close()


@requirement(
    "KV-200",
    "A file of rows MUST be read right by any number of threads, in sizes next to those that threads share, and the "
    "operator that reads it MUST say that it ends too early, wherever, or cannot be read.",
    needs=("operators",),
)
def test_read_operator(kvstore: Any, tmp_path: Path) -> None:
    from fastimpl import ops

    ops.available()
    share, path = 1 << 20, tmp_path / "file"
    data = torch.randint(0, 256, (3 * share + 100,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for size in (1, share - 1, share, 2 * share - 1, 2 * share, 2 * share + 1, 3 * share + 1):
        for begin in (0, 99):
            for missing in (0, 1, size // 2, size):
                path.write_bytes(data[: begin + size - missing].numpy().tobytes())
                for thread_count in (1, 2, 3):
                    dense = torch.zeros(size, dtype=torch.uint8)
                    with path.open("rb") as file, torch_threads(thread_count):
                        is_read = ops.file_read(file.fileno(), begin, dense)
                    where = f"{size} bytes from {begin}, {missing} missing, {thread_count} threads"
                    assert_equal(is_read, missing == 0, where=where)
                    if is_read:
                        assert_bits(dense, data[begin : begin + size], where=where)
    with path.open("ab") as file:
        assert_equal(ops.file_read(file.fileno(), 0, torch.zeros(9, dtype=torch.uint8)), False, where="cannot be read")


@requirement(
    "KV-201",
    "A batch that is refused because a table cannot hold it MUST change nothing, by whichever verb: no row, header, "
    "counter, snapshot or list of changes.",
)
def test_refused_batches(kvstore: Any) -> None:
    clock = Clock(5)
    store = store_of(kvstore, capacity=4, track_changes=True, clock=clock)
    store.set("t", ids_of([1, 2, 3]), weights_of(store, 3, 1))
    keys = [2, 10, 11, 12, 13, 2]
    # The rows that the batch would write first are there, the others would be new.
    verbs: dict[str, Callable[[], object]] = {
        "set": lambda: store.set("t", ids_of(keys), weights_of(store, 6, 2)),
        "set_rows": lambda: store.set_rows("t", random_rows(store, keys, 3)),
        "set_state": lambda: store.set_state("t", "momentum1", ids_of(keys), torch.ones(6, 6)),
        "apply_gradients": lambda: store.apply_gradients("t", ids_of(keys), torch.ones(6, 6), 0.5),
    }
    for taken in (None, store.snapshot()):
        for name, verb in verbs.items():
            clock.now += 1
            before, mark, stats, step = contents(store), store.mark(), store.stats(), store.step_count("t")
            where = f"{name}, snapshot {taken is not None}"
            with raises(CapacityError, where=where):
                verb()
            assert_contents(store, before, where=where)
            assert_equal([part.tolist() for part in store.changes("t", mark)], [[], []], where=f"{where}: changes")
            counted = (stats.row_count, stats.block_count, stats.evicted_count, stats.snapshot_count)
            now = store.stats()
            found = (now.row_count, now.block_count, now.evicted_count, now.snapshot_count)
            assert_equal(found, counted, where=f"{where}: counters")
            assert_equal(store.step_count("t"), step, where=f"{where}: step")
            if taken is not None:
                assert_contents(taken, before, where=f"{where}: the snapshot")
    store.set("t", ids_of([50, 51, 52, 53]), weights_of(store, 4, 4))
    assert_equal(store.ids("t").tolist(), [50, 51, 52, 53], where="a batch that fits")


def _around(count: int) -> list[int]:
    """Rows at once: few, as many as there are, one less and more, and all with room to spare."""
    return sorted({1, 2, 3, max(1, count - 1), max(1, count), count + 1, 1000})


@requirement(
    "KV-211",
    "A load MUST bring the same rows whatever number of them is read at once, as many as there are and one less or "
    "more: in both forms, all buckets or some, into an empty table and beside other rows.",
)
@pytest.mark.parametrize("form", ["rows", "separate"])
def test_loads_by_chunks(kvstore: Any, tmp_path: Path, form: str) -> None:
    buckets = kvstore.Buckets(3)
    for count in (1, 2, 7):
        source = store_of(kvstore)
        source.set_rows("t", random_rows(source, range(count), count))
        save(kvstore, source, tmp_path / f"{count}", form=form, buckets=buckets)
        for begin, end in ((0, 3), (1, 3)):
            there = {key: row for key, row in contents(source)["t"].items() if begin <= key % 3 < end}
            for at_once in _around(len(there)):
                for kept in ([], [50, 0]):
                    store = store_of(kvstore)
                    store.set_rows("t", random_rows(store, kept, 3))
                    expected = {"t": contents(store)["t"] | there}
                    report = kvstore.load(store, tmp_path / f"{count}", chunk_rows=at_once, owned=(begin, end))
                    where = f"buckets {begin} to {end} of {count} rows, {at_once} at once, beside {kept}"
                    assert_equal(report.row_counts, {"t": len(there)}, where=where)
                    assert_contents(store, expected, where=where)


@requirement(
    "KV-212",
    "Chunks of rows that are handed to a checkpoint MUST be all rows in their order, none of them larger than the "
    "bound of bytes, or than a row; a bound of rows less or more a byte included.",
)
def test_chunks_by_bytes(kvstore: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (1, 6, 7):
        store = store_of(kvstore, return_whole_row=True)
        store.set_rows("t", random_rows(store, range(count), 1))
        for name in ("t.weight", "t.weight_id", "t.momentum1"):
            monkeypatch.setattr("twinproof.kvstore.views.CHUNK_BYTES", 1 << 20)
            whole = store.state_dict()[name].full_tensor()
            row_bytes = whole.nbytes // count
            for rows in (0, *_around(count)):
                for more in (-1, 0, 1):
                    bound = max(1, rows * row_bytes + more)
                    monkeypatch.setattr("twinproof.kvstore.views.CHUNK_BYTES", bound)
                    chunks = list(store.state_dict()[name].chunks())
                    where = f"{name}, {count} rows of {row_bytes} bytes, {bound} bytes at once"
                    assert_bits(torch.cat([chunk for _, chunk in chunks]), whole, where=where)
                    # As many as fit, and the rest.
                    fit = max(1, bound // row_bytes)
                    sizes = [min(fit, count - start) for start in range(0, count, fit)]
                    assert_equal([chunk.shape[0] for _, chunk in chunks], sizes, where=where)
                    assert_equal([start for start, _ in chunks], list(range(0, count, fit)), where=where)
