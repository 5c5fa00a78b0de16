"""Threads: real ones, started together by a barrier; a torn row, a lost row or a step backwards is seen by value."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.harness import Mismatch, assert_equal, requirement, succeeds, wrap
from conformance.kvstore.cases import assert_bits, assert_contents, contents, ids_of, random_rows, store_of

ROWS, WIDTH, TURNS = 24, 32, 40


def together(*jobs: Callable[[], object]) -> None:
    """Run the jobs in threads that start at once; the first error is raised here, a comparison before all others."""
    barrier, errors = threading.Barrier(len(jobs)), list[BaseException]()

    def run(job: Callable[[], object]) -> None:
        try:
            barrier.wait()
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda error: not isinstance(error, Mismatch)):
        raise error


def versioned(store: Any, version: int) -> torch.Tensor:
    """Weights whose every element encodes (id, version)."""
    width = store.layout("t").embedding_dim
    return (torch.arange(ROWS)[:, None] * 1000 + version).to(torch.float32).expand(ROWS, width).contiguous()


def check_rows(weights: torch.Tensor, seen: dict[int, int], who: str) -> None:
    """No row is a mixture, none belongs to another id, no version goes backwards."""
    for key, weight in enumerate(weights):
        values = torch.unique(weight)
        assert_equal(values.numel(), 1, where=f"{who}: row {key} is of one version")
        owner, version = divmod(int(values[0]), 1000)
        assert_equal(owner, key, where=f"{who}: row {key} is its own")
        assert_equal(version >= seen.get(key, 0), True, where=f"{who}: version {version} of row {key} after {seen}")
        seen[key] = version


@requirement(
    "KV-065",
    "While rows are set, read, grown and deleted in threads, no row that is read MUST be a mixture of two writes, and "
    "versions MUST never go backwards for one reader.",
)
def test_no_torn_rows(kvstore: Any) -> None:
    store = store_of(kvstore, kvstore.RowLayout(WIDTH))
    ids = ids_of(range(ROWS))
    store.set("t", ids, versioned(store, 0))
    finished = threading.Event()

    def write() -> None:
        try:
            for version in range(1, TURNS):
                store.set("t", ids, versioned(store, version))
        finally:
            finished.set()

    def churn() -> None:
        turn = 0
        while not finished.is_set():
            turn += 1
            other = ids_of(range(10_000 + turn * 50, 10_050 + turn * 50))
            store.set("t", other, torch.full((50, WIDTH), -1.0))
            store.delete("t", other)

    def read(name: str) -> None:
        seen: dict[int, int] = {}
        last = False
        while not last:
            last = finished.is_set()
            check_rows(store.get("t", ids), seen, name)

    together(write, churn, lambda: read("one"), lambda: read("two"))
    assert_bits(store.get("t", ids), versioned(store, TURNS - 1), where="at the end")
    assert_equal(store.size("t"), ROWS, where="size at the end")


@requirement(
    "KV-066",
    "Disjoint writers in threads MUST leave what one thread leaves; writers that race for the same missing ids MUST "
    "leave one row each, whole, with every occurrence counted.",
)
def test_writers(kvstore: Any) -> None:
    layout = kvstore.RowLayout(WIDTH, optimizer="adagrad")
    store, alone = store_of(kvstore, layout), store_of(kvstore, layout)

    def write(target: Any, part: int) -> None:
        for turn in range(6):
            ids = ids_of(range(part * 1000, part * 1000 + 150))
            target.set("t", ids, torch.full((150, WIDTH), float(turn)))
            target.apply_gradients("t", ids, torch.ones(150, WIDTH), 0.5)
            target.delete("t", ids[turn::7].contiguous())

    together(*[lambda part=part: write(store, part) for part in range(4)])
    for part in range(4):
        write(alone, part)
    assert_contents(store, contents(alone), where="disjoint writers")
    for turn in range(10):
        ids = ids_of(range(50_000 + turn * 100, 50_100 + turn * 100))
        race = [lambda v=v, ids=ids: store.set("t", ids, torch.full((100, WIDTH), float(v))) for v in (1, 2, 3)]
        together(*race)
        weights = store.get("t", ids)
        assert_equal(bool((weights == weights[:, :1]).all() and weights.ge(1).all()), True, where="whole rows")
        counts = (store.metadata("t", ids)[:, 0] >> 32) & (2**31 - 1)
        assert_equal(counts.tolist(), [3] * 100, where="occurrences")
    stats = store.stats()
    assert_equal((stats.row_count, stats.block_count), (store.size("t"),) * 2, where="one block for each row")


@requirement(
    "KV-067",
    "While whole rows are loaded, each row that is read MUST be the old one, the new one or missing, never a mixture.",
)
def test_load_beside_reads(kvstore: Any) -> None:
    store = store_of(kvstore, kvstore.RowLayout(WIDTH, optimizer="adam"))
    old, new = (random_rows(store, range(300), seed) for seed in (1, 2))
    missing = store.get_rows("t", ids_of(range(300)))
    store.set_rows("t", old[:150].contiguous())
    finished = threading.Event()

    def load() -> None:
        try:
            for first in range(0, 300, 20):
                store.set_rows("t", new[first : first + 20].contiguous())
        finally:
            finished.set()

    def read() -> None:
        last = False
        while not last:
            last = finished.is_set()
            rows = store.get_rows("t", ids_of(range(300)))
            known = [(rows == other).all(dim=1) for other in (old, new, missing)]
            assert_equal(int((known[0] | known[1] | known[2]).sum()), 300, where="rows that are no mixture")

    together(load, read, read)
    assert_bits(store.get_rows("t", ids_of(range(300))), new, where="at the end")


@requirement(
    "KV-095",
    "Snapshots that are taken while threads write MUST each hold, of every batch, all rows or none.",
)
def test_snapshots_beside_writes(kvstore: Any) -> None:
    store = store_of(kvstore, kvstore.RowLayout(4))
    ids = ids_of(range(200))
    store.set("t", ids, torch.zeros(200, 4))
    finished = threading.Event()

    def write() -> None:
        try:
            for version in range(1, TURNS):
                store.set("t", ids, torch.full((200, 4), float(version)))
        finally:
            finished.set()

    def look() -> None:
        last = False
        while not last:
            last = finished.is_set()
            with store.snapshot() as taken:
                first = taken.get("t", ids)
                assert_equal(torch.unique(first).numel(), 1, where="versions in one snapshot")
                assert_bits(taken.get("t", ids), first, where="read again")

    together(write, look, look)
    assert_equal(store.stats().snapshot_count, 0, where="snapshots alive")


@requirement(
    "KV-096",
    "An eviction round in slices beside writers MUST evict no row that is written after the round began.",
)
def test_eviction_beside_writes(kvstore: Any) -> None:
    store = store_of(kvstore, kvstore.RowLayout(4))
    store.set("t", ids_of(range(2000)), torch.zeros(2000, 4))
    round_ = store.start_eviction("t", policy=kvstore.EvictionPolicy.older_than(5000), slice_rows=16)
    kept = ids_of(range(0, 2000, 3))
    store.set("t", kept, torch.ones(kept.numel(), 4))

    def write() -> None:
        for turn in range(20):
            store.set("t", kept, torch.full((kept.numel(), 4), float(turn)))

    together(write, round_.run)
    assert_equal(store.ids("t").tolist(), kept.tolist(), where="kept")
    assert_equal(round_.stats.evicted_count, 2000 - kept.numel(), where="evicted")


@requirement(
    "KV-104",
    "A background evictor MUST evict exactly what a round does once a write has passed its threshold, do nothing below "
    "it, hold no row back that was written meanwhile, and end when it is closed.",
)
def test_background(kvstore: Any) -> None:
    store = store_of(kvstore, kvstore.RowLayout(4))
    store.set("t", ids_of(range(100)), torch.zeros(100, 4))
    policy = kvstore.EvictionPolicy.count(2)
    with kvstore.BackgroundEvictor(store, "t", trigger_rows=150, policy=policy, slice_rows=8) as evictor:
        store.set("t", ids_of(range(50)), torch.ones(50, 4))
        assert_equal((evictor.wait(), store.size("t")), ([], 100), where="below the threshold")
        store.set("t", ids_of([*range(200, 230), *range(200, 260)]), torch.ones(90, 4))
        rounds = evictor.wait()
        assert_equal(store.ids("t").tolist(), [*range(50), *range(200, 230)], where="kept")
        assert_equal([(r.processed_count, r.evicted_count) for r in rounds], [(160, 80)], where="rounds")
    store.set("t", ids_of(range(1000, 1300)), torch.ones(300, 4))
    assert_equal(store.size("t"), 380, where="after close")
    evictor.close()


class _Watched:
    """A lock that says when somebody has to wait for it."""

    def __init__(self, met: threading.Event) -> None:
        self._lock, self._met = threading.RLock(), met

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._met.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    acquire, release = __enter__, __exit__


@requirement(
    "KV-346",
    "The step that a snapshot tells of a table MUST be that of the rows it holds, also where another thread trains "
    "while it is taken, and where it is taken while another thread trains.",
)
@pytest.mark.parametrize("verb", ["update", "snapshot"])
def test_steps_of_moments(kvstore: Any, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    met, others, found = threading.Event(), list[threading.Thread](), list[tuple[int, int]]()
    monkeypatch.setattr("twinproof.kvstore.store.lock_over_forks", lambda rank: _Watched(met))
    store, ids = store_of(kvstore, kvstore.RowLayout(4, optimizer="adam")), ids_of([3, 1])

    def train() -> None:
        store.apply_gradients("t", ids, torch.ones(2, 4), 0.1, 1 + store.step_count("t"))

    def look() -> None:
        with store.snapshot() as taken:
            words = taken.metadata("t", ids)[:, 0]
            found.append((taken.step_count("t"), int(words[0] >> 32) & (2**31 - 1)))

    def beside() -> None:
        (look if verb == "update" else train)()
        met.set()

    def around(original: Any, *arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        if not others:
            # Behind the rows and before the step: whoever comes now either ends, or says that it has to wait.
            others.append(threading.Thread(target=beside))
            others[0].start()
            assert_equal(met.wait(20), True, where=f"another thread, while one is behind its {verb}")
        return result

    train()
    engines = ("twinproof.kvstore.store:LockedRows", "fastimpl.kvstore.store:NativeRows")
    with wrap(tuple(f"{engine}.{verb}" for engine in engines), around):
        (train if verb == "update" else look)()
        for thread in others:
            thread.join()
    look()
    for step, count in found:
        assert_equal(step, count, where=f"step and times that the rows were trained, of {found}")
    assert_equal(found[-1], (2, 2), where="at the end")


@requirement(
    "KV-349",
    "Steps that several threads take through modules over one table MUST be numbered one after the other, and none "
    "twice, also where a whole backward of another thread comes between the lookup and its step.",
)
def test_steps_of_threads(kvstore: Any) -> None:
    ids, others = ids_of([3, 1]), list[threading.Thread]()

    def trained(store: Any, scale: float) -> None:
        (kvstore.KVEmbedding(store, lr=0.1)(ids) * scale).sum().backward()

    def clock() -> int:
        # A step asks for the time when it has its gradients: the other thread is done before it goes on.
        if not others:
            others.append(threading.Thread(target=trained, args=(store, 3.0)))
            others[0].start()
            others[0].join(timeout=20)
            assert_equal(others[0].is_alive(), False, where="another thread waits")
        return 1000

    layout = kvstore.RowLayout(4, optimizer="adam")
    store, one_by_one = store_of(kvstore, layout, clock=clock), store_of(kvstore, layout)
    trained(store, 1.0)
    for scale in (3.0, 1.0):
        trained(one_by_one, scale)
    assert_equal(store.step_count("t"), 2, where="steps")
    assert_contents(store, contents(one_by_one), where="after both steps")
    store.apply_gradients("t", ids, torch.ones(2, 4), 0.1, None)
    one_by_one.apply_gradients("t", ids, torch.ones(2, 4), 0.1, 3)
    assert_equal(store.step_count("t"), 3, where="the step after the last")
    assert_contents(store, contents(one_by_one), where="the step after the last")


@requirement(
    "KV-368",
    "A round that several threads step MUST look at each of its rows once, and tell exactly what it did.",
)
def test_rounds_in_threads(kvstore: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    met, others = threading.Event(), list[threading.Thread]()
    monkeypatch.setattr("twinproof.kvstore.eviction.lock_over_forks", lambda rank: _Watched(met))
    store, count = store_of(kvstore), 3000
    store.set("t", ids_of(range(count)), torch.zeros(count, store.layout("t").embedding_dim))
    round_ = store.start_eviction("t", policy=kvstore.EvictionPolicy.count(5), slice_rows=7)

    def step() -> None:
        while round_.step():
            pass

    def beside() -> None:
        round_.step()
        met.set()

    def around(original: Any, *arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        if not others:
            # Behind a slice and before its count: whoever steps now either has done so, or says that it has to wait.
            others.append(threading.Thread(target=beside))
            others[0].start()
            assert_equal(met.wait(20), True, where="another thread, while one is behind its slice")
        return result

    engines = ("twinproof.kvstore.store:LockedRows", "fastimpl.kvstore.store:NativeRows")
    with wrap(tuple(f"{engine}.evict_some" for engine in engines), around):
        round_.step()
        for thread in others:
            thread.join()
    together(step, step, step, round_.run)
    assert_equal((round_.stats.processed_count, round_.stats.evicted_count), (count, count), where="rows looked at")
    assert_equal((round_.done, store.size("t")), (True, 0), where="at the end")


@requirement(
    "KV-370",
    "Stores that are loaded in threads at the same time MUST have the rows of their own files, in whatever chunks; so "
    "MUST stores that one file is loaded into.",
)
def test_loads_in_threads(kvstore: Any, tmp_path: Path) -> None:
    def made(*, offset: int) -> Any:
        store = store_of(kvstore)
        ids = torch.arange(ROWS * 8) + offset
        store.set("t", ids, ids[:, None].to(torch.float32).expand(-1, store.layout("t").embedding_dim).contiguous())
        return store

    sources = [made(offset=offset) for offset in (0, 10_000)]
    for number, source in enumerate(sources):
        kvstore.save(source, tmp_path / f"{number}")

    def load(number: int) -> None:
        for turn in range(4):
            # Into rows that are there, chunk by chunk.
            target = made(offset=50_000)
            with succeeds("a load", where=f"thread {number}, turn {turn}"):
                kvstore.load(target, tmp_path / f"{number}", chunk_rows=7)
            ids = sources[number].ids("t")
            assert_bits(target.get("t", ids), sources[number].get("t", ids), f"thread {number}, turn {turn}")

    together(*(partial(load, number) for number in (0, 1, 1)))
