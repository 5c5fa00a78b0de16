"""Eviction: exactly the rows of the predicate, fresh rows afterwards, nothing leaked, nothing stale."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, assert_le, assert_same_bytes, examples, raises, requirement
from conformance.kvstore.cases import (
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
from twinproof.errors import CapacityError, ConfigError

NOW = 10_000
stamps = st.sampled_from([NOW - 101, NOW - 100, NOW - 99, NOW, 0, 1])
counts = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 2**31 - 1])
fields = st.lists(st.tuples(stamps, counts), min_size=0, max_size=12)


def store_with(kvstore: Any, rows: list[tuple[int, int]], **options: Any) -> Any:
    """A store at NOW, unless it gets another clock, whose row k has the k-th (timestamp, count)."""
    store = store_of(kvstore, **{"clock": Clock(NOW), **options})
    layout = store.layout("t")
    raw = [random_row(layout, key, stamp, count, key) for key, (stamp, count) in enumerate(rows)]
    store.set_rows("t", rows_tensor(raw, layout.row_bytes))
    return store


@requirement(
    "KV-056",
    "ttl, count, both, l2, timestamp and score MUST each evict exactly the rows of their predicate, strict where it "
    "says so; 0 means never; counts are decayed, rounded down, in the rows that stay.",
)
@examples(80)
@given(fields, st.sampled_from([0, 99, 100, 101]), st.integers(0, 5), st.sampled_from([1.0, 0.5, 0.9, 0.0]))
def test_predicates(kvstore: Any, rows: list[tuple[int, int]], ttl: int, threshold: int, decay: float) -> None:
    policy = kvstore.EvictionPolicy

    def old(row: tuple[int, int]) -> bool:
        return ttl > 0 and NOW - row[0] > ttl

    def rare(row: tuple[int, int]) -> bool:
        return math.floor(row[1] * decay) < threshold

    cases = {
        "ttl": (policy.ttl(ttl), old, 1.0),
        "count": (policy.count(threshold, decay), rare, decay),
        "ttl_count": (policy.ttl_count(ttl, threshold, decay), lambda row: old(row) and rare(row), decay),
        "timestamp": (policy.older_than(NOW - ttl), lambda row: row[0] < NOW - ttl, 1.0),
    }
    for name, (chosen, predicate, factor) in cases.items():
        store = store_with(kvstore, rows, eviction=chosen)
        before = contents(store)
        stats = store.evict()["t"]
        kept = {key: row for key, row in enumerate(rows) if not predicate(row)}
        assert_equal((stats.processed_count, stats.evicted_count), (len(rows), len(rows) - len(kept)), where=name)
        expected = {
            key: header(key, stamp, math.floor(count * factor)) + before["t"][key][16:]
            for key, (stamp, count) in kept.items()
        }
        assert_contents(store, {"t": expected}, where=name)


@requirement(
    "KV-341",
    "A row that is stamped ahead of the clock, as by a host whose clock is fast, MUST be young to every policy that "
    "looks at ages, however far ahead it is and however short the time to live.",
)
def test_ahead_of_the_clock(kvstore: Any) -> None:
    policy = kvstore.EvictionPolicy
    rows = [(stamp, 1) for stamp in (0, NOW - 1, NOW, NOW + 1, NOW + 100, 2**31, 2**32 - NOW, 2**32 - 1)]
    for ttl in (1, 99, 2**31 - 1, 2**32 - 1):
        for name, chosen in (("ttl", policy.ttl(ttl)), ("ttl_count", policy.ttl_count(ttl, 5))):
            store = store_with(kvstore, rows, eviction=chosen)
            store.evict()
            kept = [key for key, (stamp, _) in enumerate(rows) if NOW - stamp <= ttl]
            assert_equal(sorted(store.ids("t").tolist()), kept, where=f"{name} of {ttl} s")


@requirement("KV-088", "l2 MUST evict exactly the rows whose sum of squares in float64 is below the squared threshold.")
def test_l2(kvstore: Any) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        store = store_of(kvstore, kvstore.RowLayout(3, dtype))
        values = [
            [3.0, 4.0, 0.0],
            [3.0, 3.9375, 0.0],
            [0.0, 0.0, 0.0],
            [0.0, -5.0, 0.0],
            [math.nan, 0, 0],
            [-3, -4, 0.5],
        ]
        store.set("t", ids_of(range(6)), torch.tensor(values).to(dtype))
        stats = store.evict("t", policy=kvstore.EvictionPolicy.l2(5.0))["t"]
        assert_equal(store.ids("t").tolist(), [0, 3, 4, 5], where=f"kept in {dtype}")
        assert_equal(stats.evicted_count, 2, where="evicted")
        store.evict("t", policy=kvstore.EvictionPolicy.l2(0.0))
        assert_equal(store.size("t"), 4, where="threshold 0 never evicts")


@requirement(
    "KV-089",
    "score MUST keep the rows of highest score, ties by the higher id, and under it set MUST leave scores alone.",
)
@examples(40)
@given(st.lists(st.sampled_from([0.0, 1e-45, 0.5, 1.0, math.inf]), max_size=12), st.integers(0, 12))
def test_scores(kvstore: Any, scores: list[float], keep: int) -> None:
    store = store_of(kvstore, eviction=kvstore.EvictionPolicy.score(keep))
    ids = ids_of(range(len(scores)))
    store.set("t", ids, weights_of(store, len(scores), 1))
    assert_bits(store.get_scores("t", ids), torch.zeros(len(scores)), where="fresh scores")
    store.set_scores("t", ids, torch.tensor(scores))
    store.set("t", ids, weights_of(store, len(scores), 2))
    assert_bits(store.get_scores("t", ids), torch.tensor(scores), where="scores after set")
    store.evict()
    ranked = sorted(range(len(scores)), key=lambda key: (scores[key], key))
    kept = sorted(ranked[-keep:]) if keep else sorted(ranked)
    assert_equal(store.ids("t").tolist(), kept, where=f"kept {keep} of {scores}")


@requirement(
    "KV-215",
    "score MUST keep exactly the best rows, for every number of rows to keep next to how many there are, of equal "
    "scores those of higher ids, in slices of any size; at 0 and from all on it MUST keep all.",
)
def test_best_rows(kvstore: Any) -> None:
    scores = [0.5, 2.0, 0.5, 0.0, 1e-45, 0.5, 0.0, 2.0, 0.0]
    ids, count = ids_of(range(len(scores))), len(scores)
    ranked = sorted(range(count), key=lambda key: (scores[key], key))
    for keep in range(count + 2):
        for slice_rows in (1, 3, count):
            store = store_of(kvstore, eviction=kvstore.EvictionPolicy.score(keep))
            store.set("t", ids, weights_of(store, count, 1))
            store.set_scores("t", ids, torch.tensor(scores))
            stats = store.start_eviction("t", slice_rows=slice_rows).run()
            kept = sorted(ranked[-keep:]) if keep else sorted(ranked)
            where = f"{keep} of {count} kept, {slice_rows} rows a slice"
            assert_equal(store.ids("t").tolist(), kept, where=where)
            assert_equal((stats.processed_count, stats.evicted_count), (count, count - len(kept)), where=where)


@requirement(
    "KV-057",
    "An evicted or deleted id MUST read as missing; written again its row MUST be fresh: state zero, its own count, "
    "no byte of the old row.",
)
def test_fresh_after_eviction(kvstore: Any) -> None:
    store, clock = store_of(kvstore), Clock(1)
    untouched = store_of(kvstore)
    store.options.clock.now = 5000
    ids = ids_of(range(40))
    store.set_rows("t", random_rows(store, range(40), 1))
    store.evict("t", policy=kvstore.EvictionPolicy.ttl(1))
    assert_equal(store.size("t"), 0, where="all evicted")
    assert_bits(store.get_rows("t", ids), untouched.get_rows("t", ids), where="reads as missing")
    weights = weights_of(store, 40, 2)
    store.set("t", ids.flip(0).contiguous(), weights)
    for key, weight in zip(reversed(range(40)), weights, strict=True):
        row = store.get_rows("t", ids_of([key]))[0].numpy().tobytes()
        expected = header(key, 5000, 1) + weight.view(torch.uint8).numpy().tobytes()
        expected += bytes(len(row) - len(expected))
        assert_same_bytes(row, expected, where=f"row {key}")
    assert_equal(clock.now, 1, where="helper")


@requirement("KV-058", "Allocated blocks MUST be as many as rows after any operation, refused ones included.")
@examples(30)
@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(-9, 9), max_size=9)), max_size=12))
def test_no_leak(kvstore: Any, program: list[tuple[int, list[int]]]) -> None:
    store = store_of(kvstore, capacity=12)
    for verb, keys in program:
        ids = ids_of(keys)
        if verb == 0:
            store.set("t", ids, weights_of(store, len(keys), 1))
        elif verb == 1:
            store.set_rows("t", random_rows(store, keys, 1))
        elif verb == 2:
            store.delete("t", ids)
        elif verb == 3:
            store.evict("t", policy=kvstore.EvictionPolicy.count(2))
        elif verb == 4:
            store.apply_gradients("t", ids, torch.ones(len(keys), 6), 0.1)
        else:
            with raises(CapacityError):
                store.set("t", ids_of(range(13)), torch.zeros(13, 6))
        stats = store.stats()
        assert_equal((stats.block_count, stats.row_count), (store.ids("t").numel(),) * 2, where=f"after {verb} {keys}")


@requirement(
    "KV-059", "A row that is written after its round began MUST stay, whatever its statistics were at the beginning."
)
def test_stale_statistics(kvstore: Any) -> None:
    store = store_with(kvstore, [(0, 1)] * 9)
    round_ = store.start_eviction("t", policy=kvstore.EvictionPolicy.older_than(NOW), slice_rows=3)
    store.set("t", ids_of([4]), weights_of(store, 1, 1))
    round_.step()
    store.set_rows("t", rows_tensor([random_row(store.layout("t"), 7, 0, 1, 3)], store.layout("t").row_bytes))
    store.delete("t", ids_of([5, 8]))
    store.set("t", ids_of([8, 100]), weights_of(store, 2, 5))
    stats = round_.run()
    assert_equal(store.ids("t").tolist(), [4, 7, 8, 100], where="kept")
    assert_equal((stats.processed_count, stats.evicted_count), (9, 5), where="stats")


@requirement(
    "KV-060",
    "Steps, pauses, resumptions and cancellation in any order MUST end, never look at a row twice, and count right.",
)
@examples(50)
@given(st.lists(st.sampled_from(["step", "pause", "resume", "cancel", "write"]), max_size=14), st.integers(1, 5))
def test_rounds(kvstore: Any, program: list[str], slice_rows: int) -> None:
    store = store_with(kvstore, [(0, k) for k in range(12)])
    round_ = store.start_eviction("t", policy=kvstore.EvictionPolicy.count(6, 0.5), slice_rows=slice_rows)
    size, paused = 12, False
    for verb in program:
        before = round_.stats
        if verb == "write":
            store.set("t", ids_of([500]), weights_of(store, 1, 1))
            size += 500 not in store.ids("t").tolist()
        else:
            getattr(round_, verb)()
        paused = verb == "pause" or (paused and verb not in ("resume",))
        moved = round_.stats.processed_count - before.processed_count
        expected = min(slice_rows, 12 - before.processed_count) if verb == "step" and not paused else 0
        if not round_.done or verb != "step":
            assert_equal(moved, expected, where=f"rows looked at by {verb}")
    cancelled = "cancel" in program
    stats = round_.run()
    assert_equal(round_.done, True, where="done")
    if not cancelled:
        assert_equal((stats.processed_count, stats.evicted_count), (12, 12), where="all looked at")
    assert_le(stats.evicted_count, stats.processed_count, where="evicted")
    left = [key for key in store.ids("t").tolist() if key < 12]
    assert_equal(len(left), 12 - stats.evicted_count, where="size change")


@requirement(
    "KV-339",
    "Rounds that are under way together MUST each go by their own policy and clock, slice by slice in turn, though "
    "they began at one moment.",
)
@pytest.mark.parametrize("slice_rows", [1, 5, 100])
def test_rounds_in_turn(kvstore: Any, slice_rows: int) -> None:
    policy = kvstore.EvictionPolicy
    rows = [(NOW - 25 * (key % 7), 1 + key % 5) for key in range(12)]
    norms = store_with(kvstore, rows).get("t", torch.arange(12)).double().norm(dim=1)
    rules = {
        "ttl": (policy.ttl(100), 0),
        "ttl, later": (policy.ttl(100), 60),
        "count": (policy.count(3), 0),
        "both": (policy.ttl_count(50, 5), 0),
        "timestamp": (policy.older_than(NOW - 70), 0),
        "l2": (policy.l2(float(norms.median())), 0),
        "score": (policy.score(7), 0),
    }

    def begun(*names: str) -> tuple[Any, list[Any]]:
        clock, rounds = Clock(NOW), []
        store = store_with(kvstore, rows, clock=clock)
        for name in names:
            clock.now = NOW + rules[name][1]
            rounds.append(store.start_eviction("t", policy=rules[name][0], slice_rows=slice_rows))
        return store, rounds

    alone = {}
    for name in rules:
        store, rounds = begun(name)
        rounds[0].run()
        alone[name] = set(store.ids("t").tolist())
        assert_equal(0 < len(alone[name]) < 12, True, where=f"{name}: some rows go")
    for first in rules:
        for second in rules:
            store, rounds = begun(first, second)
            while not all(each.done for each in rounds):
                for each in rounds:
                    each.step()
            left = sorted(alone[first] & alone[second])
            assert_equal(store.ids("t").tolist(), left, where=f"{first} beside {second}: rows that stay")


@requirement("KV-062", "Evicting half and inserting as many again MUST NOT allocate more.")
def test_memory_is_reused(kvstore: Any) -> None:
    store = store_of(kvstore)
    store.set("t", ids_of(range(4000)), torch.zeros(4000, 6))
    before = store.stats().allocated_bytes
    for turn in range(4):
        first = 4000 + turn * 2000
        store.delete("t", store.ids("t")[:2000])
        store.set("t", ids_of(range(first, first + 2000)), torch.zeros(2000, 6))
        assert_le(store.stats().allocated_bytes, before, where=f"turn {turn}")


@requirement("KV-063", "A round over an empty table, and one that evicts every row, MUST work.")
def test_empty_rounds(kvstore: Any) -> None:
    store = store_of(kvstore)
    policy = kvstore.EvictionPolicy.count(1000)
    empty = store.evict("t", policy=policy)["t"]
    assert_equal((empty.processed_count, empty.evicted_count), (0, 0), where="empty")
    store.set("t", ids_of(range(50)), torch.zeros(50, 6))
    full = store.evict("t", policy=policy)["t"]
    assert_equal((full.processed_count, full.evicted_count, store.size("t")), (50, 50, 0), where="all")
    assert_equal(store.stats().evicted_count, 50, where="stats")
    with raises(ConfigError, where="no policy"):
        store.evict("t")
    assert_equal(store.evict(), {}, where="no table has a policy")


@requirement(
    "KV-289",
    "run() of a round that another thread pauses MUST wait until it is resumed or cancelled, without asking meanwhile.",
)
@pytest.mark.parametrize("end", ["resume", "cancel"])
def test_run_of_a_paused_round(kvstore: Any, end: str) -> None:
    store = store_of(kvstore, kvstore.RowLayout(4), clock=Clock())
    store.set("t", ids_of(range(12)), weights_of(store, 12, 1))
    eviction = store.start_eviction("t", policy=kvstore.EvictionPolicy.count(9), slice_rows=5)
    step, paused, asked = eviction.step, threading.Event(), []

    def first_step_is_paused() -> bool:
        asked.append(True)
        more: bool = step()
        if len(asked) == 1:
            eviction.pause()
            paused.set()
        return more

    eviction.step = first_step_is_paused
    runner = threading.Thread(target=eviction.run, daemon=True)
    runner.start()
    paused.wait(30)
    # Who asks again and again does so a thousand times in this while.
    runner.join(0.1)
    found = runner.is_alive(), len(asked)
    # The thread ends before anything is compared: one that is left to ask on slows down all tests after this one.
    getattr(eviction, end)()
    runner.join(30)
    assert_equal((found[0], found[1] <= 2), (True, True), where=f"asked {found[1]} times while paused")
    assert_equal(runner.is_alive(), False, where=f"after {end}")
    assert_equal(eviction.stats.processed_count, 12 if end == "resume" else 5, where="rows looked at")


@requirement(
    "KV-090",
    "A table with a capacity MUST never hold more: the oldest rows go, ties by lower id, never one of the batch; a "
    "batch that cannot fit MUST be refused whole.",
)
@examples(40)
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 12), max_size=6)), max_size=10))
def test_capacity(kvstore: Any, program: list[tuple[int, list[int]]]) -> None:
    clock = Clock(1)
    store = store_of(kvstore, capacity=5, clock=clock)
    model: dict[int, int] = {}
    for seconds, keys in program:
        clock.now += seconds
        if len(set(keys)) > 5:
            before = contents(store)
            with raises(CapacityError):
                store.set("t", ids_of(keys), weights_of(store, len(keys), 1))
            assert_contents(store, before, where="after a refusal")
            continue
        store.set("t", ids_of(keys), weights_of(store, len(keys), 1))
        model |= dict.fromkeys(keys, clock.now)
        candidates = sorted((stamp, key) for key, stamp in model.items() if key not in keys)
        for _, key in candidates[: max(0, len(model) - 5)]:
            del model[key]
        assert_equal(store.ids("t").tolist(), sorted(model), where=f"after {keys} at {clock.now}")


@requirement(
    "KV-261",
    "A round that is cancelled MUST look at no other row, at whichever slice it is, and tell what it did until then.",
)
def test_cancelled_rounds(kvstore: Any) -> None:
    for steps in range(5):
        store = store_of(kvstore)
        store.set("t", ids_of(range(10)), weights_of(store, 10, 1))
        round_ = store.start_eviction("t", policy=kvstore.EvictionPolicy.count(5), slice_rows=3)
        for _ in range(steps):
            round_.step()
        round_.cancel()
        looked = min(3 * steps, 10)
        where = f"cancelled after {steps} slices"
        assert_equal((round_.done, round_.step()), (True, False), where=where)
        stats = round_.run()
        assert_equal((stats.processed_count, stats.evicted_count), (looked, looked), where=where)
        assert_equal(store.ids("t").tolist(), list(range(looked, 10)), where=where)


@requirement(
    "KV-262",
    "Evicting MUST run a round of the table that is named, or of each that has a policy, the one that is given before "
    "the table's own; a table that has none and is named MUST be refused.",
)
def test_which_tables(kvstore: Any) -> None:
    layout, own = kvstore.RowLayout(4), kvstore.EvictionPolicy.count(2)
    policies = {"a": own, "b": None, "c": kvstore.EvictionPolicy.count(1)}
    for table in (None, "a", "b", "c"):
        for policy in (None, kvstore.EvictionPolicy.count(3)):
            store = store_of(kvstore, dict.fromkeys("abc", layout), eviction=policies)
            for name in "abc":
                store.set(name, ids_of([1, 2, 2]), weights_of(store, 3, 1, name))
            where = f"table {table}, policy {policy}"
            chosen = {name: policy or policies[name] for name in ([table] if table else "abc")}
            if table == "b" and policy is None:
                with raises(ConfigError, where=where):
                    store.evict(table)
                continue
            found = store.evict(table, policy=policy)
            gone = {name: min(2, each.count_threshold - 1) for name, each in chosen.items() if each is not None}
            assert_equal({name: stats.evicted_count for name, stats in found.items()}, gone, where=where)
            assert_equal(
                {name: store.size(name) for name in "abc"}, {n: 2 - gone.get(n, 0) for n in "abc"}, where=where
            )


@requirement(
    "KV-265",
    "A row that the very first change after a round's beginning wrote MUST stay, by whichever verb, although the "
    "policy would still evict it; all others MUST go.",
)
def test_first_write_of_a_round(kvstore: Any) -> None:
    one = ids_of([2])
    verbs: dict[str, Callable[[Any], Any]] = {
        "set": lambda store: store.set("t", one, torch.zeros(1, 6)),
        "set_rows": lambda store: store.set_rows("t", store.get_rows("t", one)),
        "set_state": lambda store: store.set_state("t", "momentum1", one, torch.ones(1, 6)),
        "set_scores": lambda store: store.set_scores("t", one, torch.zeros(1)),
        "set_metadata": lambda store: store.set_metadata("t", one, store.metadata("t", one)),
        "apply_gradients": lambda store: store.apply_gradients("t", one, torch.zeros(1, 6), 0.1),
    }
    for name, verb in verbs.items():
        for policy in (kvstore.EvictionPolicy.count(1000), kvstore.EvictionPolicy.l2(1e6)):
            store = store_of(kvstore)
            store.set("t", ids_of(range(5)), torch.zeros(5, 6))
            round_ = store.start_eviction("t", policy=policy, slice_rows=2)
            verb(store)
            stats = round_.run()
            where = f"{name} under {policy.kind}"
            assert_equal((stats.processed_count, stats.evicted_count), (5, 4), where=where)
            assert_equal(store.ids("t").tolist(), [2], where=where)


# Out of order, so that no order of ids or of places is theirs.
HIGH_STAMPS = (2**31 + 1, 1, 2**32 - 1, 2**31 - 1, 0, 2**32 - 2, 2**31, 2**31 - 2)
HIGH_COUNTS = (2**30, 2**31 - 1, 1, 2**24 + 1, 2**31 - 2, 0, 2**30 - 1, 2**24)
HIGH = list(zip(HIGH_STAMPS, HIGH_COUNTS, strict=True))


@requirement(
    "KV-277",
    "Rounds and full tables MUST tell rows apart by all 32 bits of their timestamps and all 31 of their counts: the "
    "oldest, the rarest and the lowest are so next to 2**31, to 2**32 seconds and to the highest count, too.",
)
def test_high_numbers(kvstore: Any, tmp_path: Path) -> None:
    policy, now = kvstore.EvictionPolicy, 2**32 - 1

    def filled(**options: Any) -> Any:
        store = store_with(kvstore, HIGH, **options)
        store.options.clock.now = now
        return store

    rounds: list[tuple[Any, list[int]]] = []
    for bound in HIGH_STAMPS:
        rounds.append((policy.older_than(bound), [key for key, (stamp, _) in enumerate(HIGH) if stamp < bound]))
        rounds.append((policy.ttl(bound), [key for key, (stamp, _) in enumerate(HIGH) if 0 < bound < now - stamp]))
    for bound in HIGH_COUNTS:
        rounds.append((policy.count(bound), [key for key, (_, count) in enumerate(HIGH) if count < bound]))
        gone = [key for key, (stamp, count) in enumerate(HIGH) if now - stamp > 2**31 and count // 2 < bound]
        rounds.append((policy.ttl_count(2**31, bound, 0.5), gone))
    ranked = {
        "age": sorted(range(len(HIGH)), key=lambda key: (HIGH_STAMPS[key], key)),
        "count": sorted(range(len(HIGH)), key=lambda key: (HIGH_COUNTS[key], key)),
    }
    rounds += [(policy.score(keep), ranked["count"][: len(HIGH) - keep]) for keep in range(1, len(HIGH))]
    for chosen, gone in rounds:
        store = filled()
        store.evict("t", policy=chosen)
        kept = [key for key in range(len(HIGH)) if key not in gone]
        assert_equal(store.ids("t").tolist(), kept, where=f"{chosen}")
    source = store_of(kvstore)
    for count in range(1, len(HIGH)):
        keys = list(range(100, 100 + count))
        source.clear("t")
        source.set_rows("t", random_rows(source, keys, 1))
        save(kvstore, source, tmp_path / "ck")
        ways: dict[str, Callable[[Any], Any]] = {
            "set": lambda store: store.set("t", source.ids("t"), source.get("t", source.ids("t"))),
            "set_rows": lambda store: store.set_rows("t", source.get_rows("t", source.ids("t"))),
            "load": lambda store: kvstore.load(store, tmp_path / "ck"),
        }
        for by, own in (("age", None), ("count", policy.count(1)), ("count", policy.score(3))):
            for way, write in ways.items():
                store = filled(capacity=len(HIGH), eviction=own)
                write(store)
                kept = sorted(ranked[by][count:]) + keys
                assert_equal(store.ids("t").tolist(), kept, where=f"{count} rows come by {way}, by {by}")
