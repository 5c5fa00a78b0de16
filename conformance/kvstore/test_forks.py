"""A process that is forked while other threads are inside a store: in the child it answers, its rows between calls."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from conformance.harness import assert_equal, requirement
from conformance.kvstore.cases import ids_of, store_of
from twinproof.kvstore import eviction

COUNT, WIDTH = 2000, 16
KEYS = ids_of(range(COUNT))


def _store(kvstore: Any) -> Any:
    layouts = {"t": kvstore.RowLayout(WIDTH), "u": kvstore.RowLayout(WIDTH, optimizer="adagrad")}
    store = store_of(kvstore, layouts, track_changes=True, clock=lambda: 7)
    for table in "tu":
        store.set(table, KEYS, torch.zeros(COUNT, WIDTH))
    return store


def _inside(kvstore: Any, store: Any) -> dict[str, Callable[[int], Any]]:
    """What the threads do, over and over: calls of which each writes all rows of a table, or reads, or evicts none."""
    kept = kvstore.EvictionPolicy.count(1)
    return {
        "set": lambda number: store.set("t", KEYS, torch.full((COUNT, WIDTH), float(number % 1000))),
        "step": lambda number: store.apply_gradients("u", KEYS, torch.ones(COUNT, WIDTH), 0.1, None),
        "snapshot": lambda number: store.snapshot().close(),
        "round": lambda number: store.evict("t", policy=kept),
        "read": lambda number: store.get("t", KEYS),
    }


@contextmanager
def _busy(acts: dict[str, Callable[[int], Any]]) -> Iterator[None]:
    """Each in a thread of its own, one call after the other."""
    ends, failed = threading.Event(), list[str]()

    def go_on(name: str) -> None:
        number = 0
        try:
            while not ends.is_set():
                acts[name](number := number + 1)
        except BaseException as error:
            failed.append(f"{name}: {error!r}")

    threads = [threading.Thread(target=go_on, args=(name,), daemon=True) for name in acts]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    assert_equal(failed, [], where="the threads of the parent")


def _in_a_child(ask: Callable[[], str]) -> str:
    """What a forked process answers from a thread of its own; that it takes for ever is an answer."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Of threads in the process that forks: that is what is asked for.
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(5)
            # Torch's own threads do not live here.
            torch.set_num_threads(1)
            answer = list[str]()
            thread = threading.Thread(target=lambda: answer.append(ask()))
            thread.start()
            thread.join()
            os.write(writer, "".join(answer).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as told:
        found = told.read().decode()
    os.waitpid(child, 0)
    return found or "no end"


def _answers(kvstore: Any, store: Any, round_: Any, before: Any) -> str:
    """Whether rows are those of whole calls, and that every kind of verb answers, of a snapshot from before too."""
    mark = store.mark()
    whole = [
        int(before.get("t", KEYS).count_nonzero()),
        store.get("t", KEYS).unique().numel(),
        store.metadata("u", KEYS).unique().numel(),
        store.get("u", KEYS).unique().numel(),
    ]
    for number, act in enumerate(_inside(kvstore, store).values()):
        act(number)
    with store.snapshot() as taken:
        store.delete("t", KEYS[:3])
        sizes = [taken.size("t"), store.size("t"), store.changes("t", mark)[1].numel()]
    before.close()
    round_.run()
    store.clear("u")
    store.set_rows("t", store.get_rows("t", KEYS[:9]))
    store.set_step_count("u", 5)
    store.close()
    return f"{whole} {sizes} {round_.done}"


@requirement(
    "KV-447",
    "In a process that is forked while other threads are inside a store, every verb of it MUST answer, in any thread, "
    "and rows be those of whole calls alone, those of an open snapshot as they were; the parent's threads go on.",
)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_forked_inside(kvstore: Any) -> None:
    store = _store(kvstore)
    round_ = store.start_eviction("t", policy=kvstore.EvictionPolicy.count(1), slice_rows=COUNT // 3)
    with store.snapshot() as before, _busy(_inside(kvstore, store)):
        for number in range(6):
            found = _in_a_child(lambda: _answers(kvstore, store, round_, before))
            assert_equal(found, f"[0, 1, 1, 1] [{COUNT}, {COUNT - 3}, 3] True", where=f"child {number}")
        assert_equal(int(before.get("t", KEYS).count_nonzero()), 0, where="the parent's snapshot")
    assert_equal(round_.run().processed_count, COUNT, where="a round of the parent")
    assert_equal(store.get("t", KEYS).unique().numel(), 1, where="rows of the parent")


def _free_count(locks: list[Any]) -> int:
    """How many locks another thread could take."""
    found = list[int]()

    def look() -> None:
        free = [lock for lock in locks if lock.acquire(blocking=False)]
        for lock in free:
            lock.release()
        found.append(len(free))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


class _Handler:
    """A handler of a signal that raises once, where the locks are held: as a call begins, or one of C's returns."""

    def __init__(self, number: int) -> None:
        self.number, self.count = number, 0

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        # A generator goes on inside of its ``with``; a lock that nobody has any more is forgotten at any time.
        is_other = frame.f_code.co_flags & inspect.CO_GENERATOR or frame.f_code.co_name == "forget"
        is_place = event == "c_return" or (event == "call" and not is_other)
        if is_place and frame.f_globals.get("__name__") == eviction.__name__:
            self.count += 1
            if self.count == self.number:
                raise KeyboardInterrupt

    def during(self, act: Callable[[], None]) -> None:
        """Run it, and pass over what is raised, as Python does when a process is forked."""
        sys.setprofile(self)
        try:
            act()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)


def _forked(handler: _Handler, locks: list[Any]) -> int:
    """Fork a process that ends at once; what is raised meanwhile Python passes over. How many are free over it."""
    release, parent, free_counts = eviction._release, os.getpid(), list[int]()

    def released() -> None:
        # Behind the fork, and not when what was held in part is let go.
        if not free_counts and getattr(eviction._held, "is_whole", False) and os.getpid() == parent:
            free_counts.append(_free_count(locks))
        release()

    def fork() -> None:
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)

    with (
        warnings.catch_warnings(),
        mock.patch.object(sys, "unraisablehook", print),
        mock.patch.object(eviction, "_release", released),
    ):
        warnings.simplefilter("ignore")
        handler.during(fork)
    return (free_counts or [len(locks)])[0]


@requirement(
    "KV-489",
    "Where a handler of a signal raises while the locks of stores are taken for a fork, or let go behind it, all of "
    "them MUST be held over the fork and none behind it, but for those that the thread had before.",
)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("is_inside", [False, True])
def test_interrupted_fork(kvstore: Any, is_inside: bool) -> None:
    store = _store(kvstore)
    locks = [store._step_locks[table] for table in "tu"]
    # Of other stores there are any number, and each is a few places more.
    mine = {key: found for key, found in eviction._locks.items() if found() in locks}
    with locks[0] if is_inside else nullcontext(), mock.patch.dict(eviction._locks, mine, clear=True):
        free_count = _free_count(locks)
        for number in range(1, 10_000):
            handler = _Handler(number)
            assert_equal(_forked(handler, locks), 0, where=f"free over a fork, a handler at place {number}")
            assert_equal(_free_count(locks), free_count, where=f"free behind a fork, a handler at place {number}")
            if handler.count < number:
                break
    assert_equal(number > 4 * len(locks), True, where="places")
    assert_equal(_free_count(locks), 2, where="free at last")
