"""A process that is forked while other threads are inside a store: in the child it answers, its rows between calls."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, requirement
from conformance.kvstore.cases import ids_of, store_of

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
