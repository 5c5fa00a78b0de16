"""Snapshots and growth: one moment stays that moment, and rows stay theirs while the table grows."""

from __future__ import annotations

import gc
from itertools import permutations
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, assert_le, examples, raises, requirement
from conformance.kvstore import strategies
from conformance.kvstore.cases import (
    EXTREMES,
    assert_bits,
    assert_contents,
    contents,
    ids_of,
    random_rows,
    store_of,
    weights_of,
)
from twinproof.errors import ConfigError, StoreClosedError


@requirement(
    "KV-064",
    "A snapshot MUST show the moment it was taken, in every read, while sets, steps, deletes, evictions and growth go "
    "on; several MUST be independent, and closing MUST release one.",
)
@examples(25)
@given(strategies.close_batches, strategies.close_batches)
def test_isolation(kvstore: Any, first: list[int], second: list[int]) -> None:
    store = store_of(kvstore)
    change = kvstore.EvictionPolicy.count(2)
    moments = []
    for seed, keys in enumerate((first, second, first[::2])):
        store.set("t", ids_of(keys), weights_of(store, len(keys), seed))
        moments.append((store.snapshot(), contents(store)))
        # Nobody is old enough to go.
        store.evict("t", policy=kvstore.EvictionPolicy.ttl_count(10**6, 9, 0.5))
        store.apply_gradients("t", ids_of(second), torch.ones(len(second), 6), 0.25)
        store.set_state("t", "momentum2", ids_of(first), torch.full((len(first), 6), 3.0))
        store.set_rows("t", random_rows(store, range(1000, 1100), seed))
        store.set_scores("t", ids_of(keys), torch.ones(len(keys)))
        store.delete("t", ids_of(keys[::3]))
        store.evict("t", policy=change)
    assert_equal(store.stats().snapshot_count, 3, where="alive")
    for number, (taken, expected) in enumerate(moments):
        assert_contents(taken, expected, where=f"snapshot {number}")
        ids = ids_of([*expected["t"], 10**9])
        rows = taken.get_rows("t", ids)
        assert_bits(taken.get("t", ids), rows[:, 16:40].contiguous().view(torch.float32), where="weights")
        assert_bits(taken.metadata("t", ids), rows[:, 8:16].contiguous().view(torch.int64), where="metadata")
        assert_equal(taken.contains("t", ids).tolist(), [True] * len(expected["t"]) + [False], where="contains")
        taken.close()
        assert_equal(store.stats().snapshot_count, 2 - number, where="after close")
    with raises(StoreClosedError, where="a closed snapshot"):
        moments[0][0].get("t", ids_of([1]))


@requirement(
    "KV-241",
    "Closing a snapshot MUST change nothing that the store or another snapshot shows, in whichever order they are "
    "closed, of rows that came, changed, went and came back before, between and after their moments.",
)
def test_closing_orders(kvstore: Any) -> None:
    # In each of three spans a row is left alone, written or removed; at first every other is there.
    spans, keys = 3, range(2 * 3**3)
    for order in permutations(range(spans)):
        store = store_of(kvstore, kvstore.RowLayout(2), track_changes=True)
        store.set("t", ids_of(keys[::2]), weights_of(store, len(keys) // 2, 9))
        taken = []
        for span in range(spans):
            snapshot = store.snapshot()
            taken.append((snapshot, contents(snapshot), [found.tolist() for found in snapshot.changes("t", 0)]))
            what = {key: key // 2 // 3**span % 3 for key in keys}
            written = [key for key in keys if what[key] == 1]
            store.set("t", ids_of(written), weights_of(store, len(written), span))
            store.delete("t", ids_of([key for key in keys if what[key] == 2]))
        now = contents(store)
        for closed, number in enumerate(order, start=1):
            taken[number][0].close()
            where = f"closed {order[:closed]}"
            assert_contents(store, now, where=where)
            for left in order[closed:]:
                snapshot, expected, changes = taken[left]
                assert_contents(snapshot, expected, where=f"{where}, snapshot {left}")
                there = [key in expected["t"] for key in keys]
                assert_equal(snapshot.contains("t", ids_of(keys)).tolist(), there, where=f"{where}, snapshot {left}")
                found = [found.tolist() for found in snapshot.changes("t", 0)]
                assert_equal(found, changes, where=f"{where}, changes of snapshot {left}")


@requirement(
    "KV-242",
    "Rows that stay MUST keep every byte when most rows of a table go, however many stay and however wide they are; "
    "so MUST rows that come after it.",
)
def test_rows_that_stay(kvstore: Any) -> None:
    for dim in (1, 40):
        for left in (1, 13, 14, 84, 85, 86, 170, 255, 340, 341):
            store = store_of(kvstore, kvstore.RowLayout(dim))
            ids = torch.arange(1000)
            weights = weights_of(store, 1000, left)
            store.set("t", ids, weights)
            store.delete("t", ids[left:].contiguous())
            where = f"{left} rows of {dim} left"
            assert_bits(store.get("t", ids[:left].contiguous()), weights[:left], where=where)
            store.set("t", ids, weights)
            assert_bits(store.get("t", ids), weights, where=f"{where}, and all of them again")


@requirement(
    "KV-061",
    "What a state dict lists MUST be readable, row by row, as it was when the state dict was made, although rows are "
    "evicted, deleted and replaced while it is saved.",
)
def test_eviction_during_save(kvstore: Any) -> None:
    store = store_of(kvstore, return_whole_row=True)
    store.set_rows("t", random_rows(store, range(60), 1))
    before = contents(store)
    state = store.state_dict(chunk_rows=7)
    found: dict[int, bytes] = {}
    for start, rows in state["t.weight"].chunks():
        keys = state["t.weight_id"].narrow(0, start, rows.shape[0])[:, 0]
        found |= {int(key): row.numpy().tobytes() for key, row in zip(keys, rows, strict=True)}
        store.delete("t", ids_of(range(start, start + 20)))
        store.evict("t", policy=kvstore.EvictionPolicy.count(start))
        store.set("t", ids_of([59, 58, 1000 + start]), weights_of(store, 3, start))
    assert_equal(sorted(found), sorted(before["t"]), where="ids")
    for key, row in before["t"].items():
        assert_equal(found[key], row, where=f"row {key}")
    del state
    gc.collect()
    assert_equal(store.stats().snapshot_count, 0, where="the state dict's snapshot is released")


@requirement(
    "KV-071",
    "Growth by any number of rows MUST keep every row, and views made before it MUST go on showing their ids.",
)
def test_growth(kvstore: Any) -> None:
    store = store_of(kvstore, kvstore.RowLayout(2))
    early, weights = ids_of(EXTREMES), weights_of(store, len(EXTREMES), 1)
    store.set("t", early, weights)
    view = kvstore.KVTensor(store, early, "weight")
    everything = {int(key): weight for key, weight in zip(early, weights, strict=True)}
    for turn in range(8):
        keys = [k * 2**turn + 17 for k in range(10 * 2**turn)]
        fresh = weights_of(store, len(keys), turn + 2)
        store.set("t", ids_of(keys), fresh)
        everything |= dict(zip(keys, fresh, strict=True))
        expected = torch.stack([everything[int(key)] for key in early])
        assert_bits(view.full_tensor(), expected, where=f"view after {len(everything)} rows")
    ids = sorted(everything)
    assert_equal(store.ids("t").tolist(), ids, where="ids")
    assert_bits(store.get("t", ids_of(ids)), torch.stack([everything[key] for key in ids]), where="weights")


@requirement(
    "KV-072",
    "After reserve(n), n inserts MUST NOT allocate; a negative or absurd n MUST be refused; counters MUST add up.",
)
def test_reserve(kvstore: Any) -> None:
    store = store_of(kvstore)
    row_bytes = store.layout("t").row_bytes
    store.reserve("t", 5000)
    assert_equal(store.size("t"), 0, where="reserving inserts nothing")
    before = store.stats().allocated_bytes
    for first in range(0, 5000, 1000):
        store.set("t", ids_of(range(first, first + 1000)), torch.zeros(1000, 6))
        stats = store.stats()
        assert_equal(stats.row_bytes, (first + 1000) * row_bytes, where="row_bytes")
        assert_equal(stats.row_count, first + 1000, where="row_count")
        assert_le(stats.row_bytes, stats.allocated_bytes, where="allocated_bytes hold the rows")
        assert_le(stats.allocated_bytes, max(before, stats.row_bytes), where=f"allocated after {first + 1000} rows")
    for wrong in (-1, 2.5, "many"):
        with raises(ConfigError, where=f"reserve({wrong!r})"):
            store.reserve("t", wrong)


@requirement(
    "KV-091",
    "Changes since a mark MUST be exactly the ids whose rows were written after it and the ids that went, in a store "
    "and in its snapshots; without tracking they MUST be refused.",
)
@examples(40)
@given(st.lists(st.tuples(st.sampled_from(["set", "delete", "evict", "scores"]), strategies.close_batches), max_size=8))
def test_changes(kvstore: Any, program: list[tuple[str, list[int]]]) -> None:
    store = store_of(kvstore, track_changes=True)
    store.set("t", ids_of(range(-3, 4)), weights_of(store, 7, 1))
    mark, before = store.mark(), set(range(-3, 4))
    touched: set[int] = set()
    for verb, keys in program:
        if verb == "set":
            store.set("t", ids_of(keys), weights_of(store, len(keys), 2))
            touched |= set(keys)
        elif verb == "delete":
            store.delete("t", ids_of(keys))
        elif verb == "scores":
            touched |= set(keys) & set(store.ids("t").tolist())
            store.set_scores("t", ids_of(keys), torch.ones(len(keys)))
        else:
            store.evict("t", policy=kvstore.EvictionPolicy.count(2))
    present = set(store.ids("t").tolist())
    for source in (store, store.snapshot()):
        changed, removed = source.changes("t", mark)
        assert_equal(changed.tolist(), sorted(touched & present), where="changed")
        assert_equal(sorted(set(removed.tolist()) & before), sorted(before - present), where="removed")
        assert_equal(set(removed.tolist()) & present, set(), where="removed ids are not there")
    assert_equal([part.tolist() for part in store.changes("t", store.mark())], [[], []], where="since now")
    with raises(ConfigError, where="no tracking"):
        store_of(kvstore).changes("t", 0)
