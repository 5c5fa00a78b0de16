"""What runs eviction rounds by itself: steps of training, and memory."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, raises, requirement, succeeds
from conformance.harness.planted import active_bug
from conformance.kvstore.cases import assert_bits, contents, ids_of, random_rows, save, store_of
from twinproof.errors import ConfigError, StoreClosedError


def _stored(kvstore: Any, optimizer: str = "sgd") -> Any:
    layout = kvstore.RowLayout(4, optimizer=optimizer)
    store = store_of(kvstore, {"t": layout, "u": layout})
    store.set("t", ids_of(range(100)), torch.zeros(100, 4))
    return store


def _step(store: Any, table: str, first: int) -> None:
    keys = ids_of(range(first, first + 10))
    store.apply_gradients(table, keys, torch.ones(10, 4), 0.1)


@requirement(
    "KV-154",
    "A background evictor with trigger_steps MUST run one round after every so many optimizer steps of its table since "
    "it was made, and after nothing else.",
)
def test_steps(kvstore: Any) -> None:
    store, policy = _stored(kvstore), kvstore.EvictionPolicy.count(2)
    # Steps are counted from here on, whatever number the table's have.
    store.set_step_count("t", 70)
    with kvstore.BackgroundEvictor(store, "t", trigger_steps=3, policy=policy) as evictor:
        for _ in range(5):
            _step(store, "u", 0)
            store.set("t", ids_of(range(500, 505)), torch.zeros(5, 4))
            store.get("t", ids_of(range(10)))
        assert_equal(len(evictor.wait()), 0, where="rounds without a step")
        for number, expected in ((1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 2)):
            _step(store, "t", 0)
            assert_equal(len(evictor.wait()), expected, where=f"rounds after {number} steps")
        assert_equal(store.ids("t").tolist(), [*range(10), *range(500, 505)], where="kept: written twice or more")
    _step(store, "t", 0)
    assert_equal(len(evictor.rounds), 2, where="rounds after close")


@requirement(
    "KV-155",
    "A background evictor with trigger_bytes MUST run a round after a write to its table that left the store's rows "
    "with more bytes than that, to the byte, and after nothing else; without any trigger it MUST be refused.",
)
def test_bytes(kvstore: Any) -> None:
    store, policy = _stored(kvstore), kvstore.EvictionPolicy.count(2)
    row_bytes = store.layout("t").row_bytes
    with kvstore.BackgroundEvictor(store, "t", trigger_bytes=110 * row_bytes, policy=policy) as evictor:
        _step(store, "u", 0)
        _step(store, "t", 0)
        assert_equal(len(evictor.wait()), 0, where="rounds at the threshold")
        _step(store, "u", 10)
        assert_equal(len(evictor.wait()), 0, where="rounds after a write to another table")
        store.set("t", ids_of([0]), torch.zeros(1, 4))
        assert_equal(len(evictor.wait()), 1, where="rounds beyond the threshold")
        assert_equal(store.ids("t").tolist(), list(range(10)), where="kept")
        store.set("t", ids_of(range(79)), torch.zeros(79, 4))
        assert_equal(len(evictor.wait()), 1, where="rounds below it again")
        store.set("u", ids_of(range(20, 32)), torch.zeros(12, 4))
        store.set("t", ids_of([1000]), torch.zeros(1, 4))
        assert_equal(len(evictor.wait()), 2, where="rounds beyond it again")
    for wrong in ({}, {"trigger_steps": 0}, {"trigger_bytes": -1}, {"trigger_rows": 1.5}):
        with raises(ConfigError, where=str(wrong)):
            kvstore.BackgroundEvictor(store, "t", policy=policy, **wrong)


@requirement(
    "KV-236",
    "Each listener of a store MUST hear each write or each step of any table once, in the order in which they were "
    "added, until it is removed; the others stay, and one that is not there is passed over.",
)
def test_listeners(kvstore: Any) -> None:
    store = _stored(kvstore)
    heard: list[tuple[str, str]] = []
    listeners = {name: lambda table, name=name: heard.append((name, table)) for name in ("w1", "w2", "s1", "s2")}
    for name, listener in listeners.items():
        store.add_listener(listener, steps=name.startswith("s"))
    left = [*listeners]
    for gone in (None, "s1", "w2", "w2", "s2", "w1"):
        if gone is not None:
            store.remove_listener(listeners[gone])
            left = [name for name in left if name != gone]
        heard.clear()
        store.set("u", ids_of([1]), torch.zeros(1, 4))
        store.get("t", ids_of([1]))
        _step(store, "t", 0)
        writes, steps = ([name for name in left if name[0] == kind] for kind in "ws")
        expected = [(name, table) for table in "ut" for name in writes] + [(name, "t") for name in steps]
        assert_equal(heard, expected, where=f"without {gone}")


@requirement(
    "KV-310",
    "What a listener adds or removes while it is told MUST be heard, or not, from the next write on: this one is told "
    "to all that listened when it was done, once, and one that listens twice is told twice until it is removed.",
)
@pytest.mark.parametrize("steps", [False, True])
def test_listeners_that_change(kvstore: Any, steps: bool) -> None:
    store = _stored(kvstore)
    heard: list[str] = []

    def hears(name: str) -> Callable[[str], None]:
        return lambda table: heard.append(name)

    late, middle, twice, last = (hears(name) for name in ("late", "middle", "twice", "last"))

    def first(table: str) -> None:
        heard.append("first")
        store.remove_listener(first)
        store.remove_listener(last)
        store.add_listener(late, steps=steps)

    for listener in (first, middle, twice, last, twice):
        store.add_listener(listener, steps=steps)
    for expected in (["first", "middle", "twice", "last", "twice"], ["middle", "twice", "twice", "late"]):
        heard.clear()
        _step(store, "t", 0)
        assert_equal(heard, expected, where=f"{steps=}")
    store.add_listener(twice, steps=not steps)
    store.remove_listener(twice)
    heard.clear()
    _step(store, "t", 0)
    assert_equal(heard, ["middle", "late"], where=f"one that is removed from both, {steps=}")


@requirement(
    "KV-251",
    "Waiting for a background evictor MUST end only when no round is running, with the rounds that ran.",
)
def test_waiting_in_a_round(kvstore: Any) -> None:
    store, count = _stored(kvstore), 2000
    begin, running = store.start_eviction, threading.Event()

    def start_eviction(*arguments: Any, **options: Any) -> Any:
        found = begin(*arguments, **options)
        if threading.current_thread() is not threading.main_thread():
            running.set()
        return found

    store.start_eviction = start_eviction
    policy = kvstore.EvictionPolicy.count(2)
    # A round of so many slices that it is running still when the main thread goes on.
    with kvstore.BackgroundEvictor(store, "t", trigger_rows=100, policy=policy, slice_rows=1) as evictor:
        store.set("t", ids_of(range(count)), torch.zeros(count, 4))
        assert_equal(running.wait(20), True, where="a round begins")
        rounds = evictor.wait()
        assert_equal([stats.processed_count for stats in rounds], [count], where="rounds")
        assert_equal(store.ids("t").tolist(), list(range(100)), where="kept: written twice")


@requirement(
    "KV-267",
    "What triggers a round while one is running MUST be followed by another round, whatever the trigger is.",
)
def test_triggers_in_a_round(kvstore: Any) -> None:
    for trigger in ("trigger_rows", "trigger_bytes", "trigger_steps"):
        store, late = _stored(kvstore), [5000]
        store.set("t", ids_of(range(100)), torch.zeros(100, 4))
        begin = store.start_eviction

        def start_eviction(
            *arguments: Any, store: Any = store, begin: Any = begin, late: Any = late, **options: Any
        ) -> Any:
            found = begin(*arguments, **options)
            # In the thread of the round: after it began, and before it ends.
            if threading.current_thread() is not threading.main_thread() and late:
                _step(store, "t", late.pop())
            return found

        store.start_eviction = start_eviction
        threshold = {"trigger_rows": 100, "trigger_bytes": store.stats().row_bytes, "trigger_steps": 1}[trigger]
        policy = kvstore.EvictionPolicy.count(2)
        with kvstore.BackgroundEvictor(store, "t", policy=policy, **{trigger: threshold}) as evictor:
            _step(store, "t", 2000)
            found = [(stats.processed_count, stats.evicted_count) for stats in evictor.wait()]
        # Rows that came after a round began are the next one's.
        assert_equal(found, [(110, 10), (110, 10)], where=f"{trigger}: rounds")
        assert_equal(store.ids("t").tolist(), list(range(100)), where=f"{trigger}: kept")


@requirement(
    "KV-270",
    "A background evictor that is closed in a round MUST tell what that round did until then, with the rounds before.",
)
def test_closed_in_a_round(kvstore: Any) -> None:
    store, begun, is_late = _stored(kvstore), threading.Event(), threading.Event()
    begin = store.start_eviction

    def start_eviction(*arguments: Any, **options: Any) -> Any:
        found = begin(*arguments, **options)
        step = found.step

        def first_alone() -> bool:
            # A round that goes on until it is closed, and has looked at one slice by then.
            if not begun.is_set():
                step()
                begun.set()
            return not is_late.is_set()

        found.step = first_alone
        return found

    store.start_eviction = start_eviction
    policy = kvstore.EvictionPolicy.count(2)
    evictor = kvstore.BackgroundEvictor(store, "t", trigger_rows=100, policy=policy, slice_rows=3)
    store.set("t", ids_of([1000]), torch.zeros(1, 4))
    assert_equal(begun.wait(20), True, where="a round begins")
    closing = threading.Thread(target=evictor.close, daemon=True)
    closing.start()
    closing.join(20)
    ends = not closing.is_alive()
    # Who closes it waits no longer, whatever this test finds.
    is_late.set()
    closing.join()
    assert_equal(ends, True, where="a round that was closed ends")
    found = [(stats.processed_count, stats.evicted_count) for stats in evictor.rounds]
    assert_equal(found, [(3, 3)], where="what the round did")


@requirement(
    "KV-271",
    "After a round that failed a background evictor MUST go on with the next that is due, and tell of the failure "
    "whenever it is waited for.",
)
def test_round_after_a_failure(kvstore: Any) -> None:
    store, failures = _stored(kvstore), [ValueError("a round")]
    store.set("t", ids_of(range(100)), torch.zeros(100, 4))
    begin = store.start_eviction

    def start_eviction(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() and failures:
            raise failures.pop()
        return begin(*arguments, **options)

    store.start_eviction = start_eviction
    with kvstore.BackgroundEvictor(store, "t", trigger_rows=100, policy=kvstore.EvictionPolicy.count(2)) as evictor:
        for first, size, rounds in ((1000, 110, 0), (2000, 100, 1)):
            store.set("t", ids_of(range(first, first + 10)), torch.zeros(10, 4))
            with raises(ValueError, where="a round that failed"):
                evictor.wait()
            assert_equal((store.size("t"), len(evictor.rounds)), (size, rounds), where=f"after rows from {first}")


@requirement(
    "KV-425",
    "What a round raised and nobody waited for MUST be raised where a background evictor is closed, by itself or by "
    "leaving its block, once; behind an error that leaves the block, and not where the store was closed before.",
)
@pytest.mark.parametrize("how", ["close", "leave", "leave with an error", "store closed"])
def test_failures_nobody_waited_for(kvstore: Any, how: str) -> None:
    store, begin = _stored(kvstore), threading.Event()
    start = store.start_eviction

    def start_eviction(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return start(*arguments, **options)
        begin.set()
        if how == "store closed":
            raise StoreClosedError("the store was closed", got="closed", expected="open", where="t")
        raise MemoryError("a round")

    def fail(evictor: Any) -> None:
        store.set("t", ids_of([1]), torch.zeros(1, 4))
        assert_equal(begin.wait(60), True, where="a round that began")
        if how == "leave with an error":
            raise KeyError("of the block")

    store.start_eviction = start_eviction
    evictor = kvstore.BackgroundEvictor(store, "t", trigger_rows=1, policy=kvstore.EvictionPolicy.count(2))
    if how in ("close", "store closed"):
        fail(evictor)
        with raises(MemoryError, where=how) if how == "close" else succeeds("closing", where=how):
            evictor.close()
    else:
        with raises(MemoryError if how == "leave" else KeyError, where=how), evictor:
            fail(evictor)
    for again in ("again", "once more"):
        is_untold = how == "leave with an error" and again == "again"
        with raises(MemoryError, where=again) if is_untold else succeeds(f"closing {again}", where=how):
            evictor.close()


@requirement(
    "KV-255",
    "Listeners MUST hear of a write or a step when it is done: rows, headers, marks and steps that they ask for are "
    "those after it.",
)
def test_what_listeners_see(kvstore: Any) -> None:
    store, seen = _stored(kvstore), []

    def look(table: str) -> None:
        taken = store.snapshot()
        seen.append((store.get(table, ids_of([1, 2000])), store.size(table), taken.step_count(table), store.mark()))
        taken.close()

    for steps in (False, True):
        store.add_listener(look, steps=steps)
    acts: dict[str, Callable[[], Any]] = {
        "set": lambda: store.set("t", ids_of([2000]), torch.ones(1, 4)),
        "set_rows": lambda: store.set_rows("u", random_rows(store, [1, 2000], 3, "u")),
        "step": lambda: store.apply_gradients("t", ids_of([1, 7000]), torch.ones(2, 4), 0.5, 11),
    }
    for name, act in acts.items():
        seen.clear()
        act()
        table = "u" if name == "set_rows" else "t"
        now = (store.size(table), store.step_count(table), store.mark())
        assert_equal([found[1:] for found in seen], [now] * (2 if name == "step" else 1), where=name)
        for rows, *_ in seen:
            assert_bits(rows, store.get(table, ids_of([1, 2000])), where=f"{name}: rows")


def _writes(kvstore: Any, store: Any, folder: Path) -> tuple[dict[str, Callable[[], Any]], dict[str, Any]]:
    """Calls that may insert rows of table "t", and calls that do not."""
    ids, ones, other = ids_of([1, 2000]), torch.ones(2, 4), _stored(kvstore, "adagrad")
    other.set("t", ids_of(range(3000, 3005)), torch.ones(5, 4))
    view = kvstore.KVTensor(store, ids_of([5000]), "weight", table="t")
    rows = kvstore.KVTensor(store, ids_of([5001]), "row", table="t")
    wrapper = kvstore.KVTensorWrapper([1, 4], torch.float32, 0, sorted_indices=ids_of([5002]), table="t")
    wrapper.set_dram_db_wrapper(store)
    module = kvstore.KVEmbedding(store, table="t")
    only, empty = {"tables": ("t",)}, kvstore.EvictionPolicy.count(0)
    for form in ("rows", "separate"):
        save(kvstore, other, folder / form, form=form)
    begun = store.start_eviction("t", policy=empty)

    def loaded(form: str, is_empty: bool) -> None:
        if is_empty:
            store.clear("t")
        kvstore.load(store, folder / form, **only)

    def loaded_state(whole: bool, clear: bool) -> None:
        other.set_return_whole_row(whole)
        store.load_state_dict(other.state_dict(), clear=clear, **only)

    loud: dict[str, Callable[[], Any]] = {
        "set": lambda: store.set("t", ids, ones),
        "set_rows": lambda: store.set_rows("t", random_rows(store, [1, 4000], 3)),
        "set_state": lambda: store.set_state("t", "momentum1", ids_of([1, 4001]), ones),
        "apply_gradients": lambda: store.apply_gradients("t", ids, ones, 0.5, 11),
        "a module": lambda: module(ids_of([1, 2001])).sum().backward(),
        "a view of weights": lambda: view.set_range(0, 0, 1, ones[:1]),
        "a view of rows": lambda: rows.set_range(0, 0, 1, rows.full_tensor()),
        "a wrapper": lambda: wrapper.set_range(0, 0, 1, ones[:1]),
    }
    for flag in (False, True):
        for form in ("rows", "separate"):
            loud[f"load {form}, into no rows {flag}"] = partial(loaded, form, flag)
        for clear in (False, True):
            loud[f"load_state_dict, whole rows {flag}, {clear=}"] = partial(loaded_state, flag, clear)
    quiet = {
        "get": lambda: store.get("t", ids),
        "set_scores": lambda: store.set_scores("t", ids, torch.ones(2)),
        "set_metadata": lambda: store.set_metadata("t", ids, torch.ones(2, 1, dtype=torch.int64)),
        "set_step_count": lambda: store.set_step_count("t", 4),
        "reserve": lambda: store.reserve("t", 10),
        "prefetch": lambda: store.prefetch("t", ids),
        "state_dict": lambda: store.state_dict(),
        "save": lambda: save(kvstore, store, folder / "quiet"),
        "snapshot": lambda: store.snapshot().close(),
        "evict": lambda: store.evict("t", policy=empty),
        "a round": lambda: begun.run(),
        "delete": lambda: store.delete("t", ids),
        "clear": lambda: store.clear("t"),
    }
    return loud, quiet


@requirement(
    "KV-282",
    "Listeners MUST hear of a table after every verb, load, view or module that may have inserted rows of it, at last "
    "when all of them are there, and of nothing else.",
)
def test_what_is_told(kvstore: Any, tmp_path: Path) -> None:
    store, heard = _stored(kvstore, "adagrad"), []
    loud, quiet = _writes(kvstore, store, tmp_path)
    store.add_listener(lambda table: heard.append((table, contents(store))))
    for name, act in loud.items():
        heard.clear()
        act()
        assert_equal({table for table, _ in heard}, {"t"}, where=f"{name}: tables that are told")
        assert_equal(heard[-1][1], contents(store), where=f"{name}: rows when it is told")
    for name, act in quiet.items():
        heard.clear()
        act()
        assert_equal([table for table, _ in heard], [], where=f"{name}: tables that are told")


@requirement("KV-256", "A store MUST let go of a background evictor that was closed, whatever triggered its rounds.")
def test_closed_evictors(kvstore: Any) -> None:
    store = _stored(kvstore)
    left = {}
    for trigger in ("trigger_rows", "trigger_bytes", "trigger_steps"):
        evictor = kvstore.BackgroundEvictor(store, "t", policy=kvstore.EvictionPolicy.count(1), **{trigger: 1})
        _step(store, "t", 0)
        evictor.close()
        left[trigger] = weakref.ref(evictor)
        del evictor
    gc.collect()
    assert_equal(
        [trigger for trigger, found in left.items() if found() is not None], [], where="evictors that are left"
    )


# Programs, one for each ending, that end in a round of their evictor, which goes on until it is closed. Each says which
# threads are left; they are forked from one, which says how each has ended.
_ENDS_IN_A_ROUND = """
import atexit, os, signal, sys, threading
atexit.register(lambda: print([each.name for each in threading.enumerate() if "evict" in each.name], flush=True))
import torch
from conformance.harness.implementation import component
from conformance.harness.planted import activate, find_bug
impl, *planted = sys.argv[1:]
kvstore = component(impl, "kvstore")
if planted:
    bug = activate(planted[0], find_bug(*planted))
    bug.__enter__()
torch.set_num_threads(1)
for how in ("end", "exit", "raise", "fork"):
    program = os.fork()
    if program == 0:
        signal.alarm(200)
        break
    print(how, os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]), flush=True)
else:
    os._exit(0)
store, begun = kvstore.KVStore({"t": kvstore.RowLayout(4)}), threading.Event()
begin = store.start_eviction
def start_eviction(*arguments, **options):
    found, many = begin(*arguments, **options), torch.ones(1 << 23)
    def step():
        # A slice that the program ends in, and that has operators left to come back from.
        begun.set()
        while not evictor._worker.closed:
            many.sum()
        return bool(sum(many.sum() for _ in range(150)) > 0)
    found.step = step
    return found
store.start_eviction = start_eviction
evictor = kvstore.BackgroundEvictor(store, "t", trigger_rows=1, policy=kvstore.EvictionPolicy.count(1))
store.set("t", torch.arange(9), torch.ones(9, 4))
if not begun.wait(60):
    os._exit(99)
if how == "raise":
    raise LookupError("of the program")
if how == "exit":
    sys.exit(3)
if how == "fork":
    held, let_go = threading.Event(), threading.Event()
    def hold():
        with evictor._worker.condition:
            held.set()
            let_go.wait(60)
    threading.Thread(target=hold).start()
    held.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        sys.exit(5)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    let_go.set()
    sys.exit(status)
"""


@requirement(
    "KV-427",
    "A program that ends while a background evictor is in a round, by itself, with a status, by an error or in a "
    "forked process, MUST end with its own status and words, when the evictor's thread has ended.",
)
@pytest.mark.night
def test_programs_that_end(impl: Any, kvstore: Any) -> None:
    planted = active_bug()
    arguments = [impl.__name__, *((planted[0], planted[1].id) if planted is not None else ())]
    # What measures processes would be in the forked ones, too, whose locks another thread may have held.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    paths = {**inherited, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, "-P", "-W", "ignore", "-c", _ENDS_IN_A_ROUND, *arguments]
    ended = subprocess.run(program, capture_output=True, text=True, env=paths, timeout=600)
    expected = ["[]", "end 0", "[]", "exit 3", "[]", "raise 1", "[]", "[]", "fork 5"]
    assert_equal(ended.stdout.splitlines(), expected, where="threads that are left, and the status of each program")
    words = [line for line in ended.stderr.splitlines() if line and not line.startswith((" ", "Traceback"))]
    assert_equal(words, ["LookupError: of the program"], where="words of all programs")


def _dropped_evictor(kvstore: Any, how: str, is_late: threading.Event) -> tuple[Any, threading.Thread]:
    """A store whose evictor nobody has, and its thread, idle or in or behind a round, when that has begun."""
    store, begun, known = _stored(kvstore), threading.Event(), threading.enumerate()
    begin = store.start_eviction

    def step() -> bool:
        begun.set()
        if how == "late":
            is_late.wait(60)
            raise LookupError("of a round")
        return not is_late.is_set()

    def start_eviction(*arguments: Any, **options: Any) -> Any:
        found = begin(*arguments, **options)
        if threading.current_thread() is not threading.main_thread():
            if how in ("in a round", "late"):
                found.step = step
            elif how != "idle":
                raise LookupError("of a round")
        return found

    store.start_eviction = start_eviction
    evictor = kvstore.BackgroundEvictor(store, "t", trigger_rows=1, policy=kvstore.EvictionPolicy.count(9))
    (thread,) = (each for each in threading.enumerate() if each not in known)
    if how in ("in a round", "late", "idle"):
        del evictor
        gc.collect()
    store.set("t", ids_of([1]), torch.zeros(1, 4))
    if how in ("in a round", "late"):
        assert_equal(begun.wait(60), True, where="a round of an evictor that only its store has")
    elif how == "idle":
        while store.size("t") and thread.is_alive():
            gc.collect()
        assert_equal(store.size("t"), 0, where="rows that an evictor leaves which only its store has")
    elif how == "told":
        with raises(LookupError, where="a round that failed"):
            evictor.wait()
    else:
        with evictor._worker.condition:
            evictor._worker.condition.wait_for(lambda: evictor._failure is not None, 60)
    return store, thread


@requirement(
    "KV-428",
    "A background evictor that nobody closed MUST go on while its store lives, and end with it: both are freed and the "
    "thread ends, idle, in a round after its slice, or behind one that failed, which is logged unless it was told; so "
    "is one that fails when nobody has the evictor any more.",
)
@pytest.mark.parametrize("how", ["idle", "in a round", "late", "told", "untold"])
def test_dropped_evictors(kvstore: Any, how: str, caplog: pytest.LogCaptureFixture) -> None:
    is_late = threading.Event()
    store, thread = _dropped_evictor(kvstore, how, is_late)
    left = weakref.ref(store)
    del store
    gc.collect()
    if how == "late":
        is_late.set()
    thread.join(2)
    found = (thread.is_alive(), left() is not None)
    is_late.set()
    assert_equal(found, (False, False), where="whether the thread lives, and the store")
    words = [record.getMessage() for record in caplog.records if "nobody asked" in record.getMessage()]
    expected = [True] if how in ("late", "untold") else []
    assert_equal(["LookupError: of a round" in each for each in words], expected, where="the log")


def _waits_in_a_child(evictor: Any) -> str:
    """What wait() and close() of an evictor are in a forked process; that they take for ever is an answer."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Of threads in the process that forks: that is what is asked for.
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        signal.alarm(2)
        answer = "nothing"
        try:
            evictor.wait()
        except BaseException as error:
            answer = type(error).__name__
        try:
            evictor.close()
        except BaseException as error:
            answer += f", closed with {type(error).__name__}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as told:
        answer = told.read().decode()
    os.waitpid(child, 0)
    return answer or "no end"


@requirement(
    "KV-432",
    "In a forked process, where its thread does not live, a background evictor MUST refuse to be waited for, by name, "
    "and be closed; that of the parent goes on.",
)
def test_forked_evictors(kvstore: Any) -> None:
    store = _stored(kvstore)
    with kvstore.BackgroundEvictor(store, "t", trigger_rows=1, policy=kvstore.EvictionPolicy.count(9)) as evictor:
        evictor._make_due()
        assert_equal(_waits_in_a_child(evictor), "ConfigError", where="wait() in the child")
        store.set("t", ids_of([1]), torch.zeros(1, 4))
        assert_equal(len(evictor.wait()) > 0, True, where="rounds of the parent")


@requirement(
    "KV-433",
    "What a listener of writes or steps raises MUST be raised by the verb when every other listener was told, a "
    "background evictor of writes or steps among them.",
)
@pytest.mark.parametrize("steps", [False, True], ids=["writes", "steps"])
def test_listeners_that_raise(kvstore: Any, steps: bool) -> None:
    def fails(table: str) -> None:
        raise LookupError(table)

    store, heard = _stored(kvstore), list[str]()
    store.add_listener(fails, steps=steps)
    for name, kind in (("written", False), ("stepped", True)):
        store.add_listener(lambda _, name=name: heard.append(name), steps=kind)
    with raises(LookupError, where="a step"):
        _step(store, "t", 0)
    assert_equal(heard, ["written", "stepped"], where="who was told")


@requirement(
    "KV-446",
    "A background evictor MUST tell what its last 1,000 rounds did one by one, hold no more of them, and count all: "
    "round_count rounds, and in totals the rows that they looked at and evicted.",
)
def test_many_rounds(kvstore: Any) -> None:
    store = store_of(kvstore, kvstore.RowLayout(4))
    with kvstore.BackgroundEvictor(store, "t", trigger_rows=1, policy=kvstore.EvictionPolicy.count(2)) as evictor:
        for number in range(1, 1004):
            # Two rows, and a third one in the first rounds; whatever was written once goes.
            keys = range(3 if number <= 3 else 2)
            store.set("t", ids_of(keys), torch.zeros(len(keys), 4))
            evictor.wait()
    found = (evictor.round_count, evictor.totals.processed_count, evictor.totals.evicted_count)
    assert_equal(found, (1003, 2009, 2009), where="all rounds")
    assert_equal([stats.evicted_count for stats in evictor.rounds], [2] * 1000, where="the last 1,000")
    evictor.rounds.clear()
    assert_equal((len(evictor.rounds), len(evictor._worker.rounds)), (1000, 1000), where="what is held")
