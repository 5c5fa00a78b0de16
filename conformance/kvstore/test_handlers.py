"""Handlers of signals that run in the middle of a verb: Python calls them when the call that it is in returns.

A handler may save, as that of a preempted job does, or raise, as Ctrl-C does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from conformance.harness import assert_equal, raises, requirement, succeeds
from conformance.kvstore.cases import between_tables, contents, ids_of, save, store_of
from twinproof.errors import DeltaBaseError

# What both implementations are made of, and of one the way to its operators. The other's rows are Python's own.
_WATCHED = ("twinproof.kvstore", "fastimpl.kvstore", "fastimpl.ops")


def _note(heard: list[str], name: str, table: str) -> None:
    heard.append(name)


class _Interruption(BaseException):
    """What a handler raises: no Exception, as KeyboardInterrupt."""


@contextmanager
def _handled(
    number: int, handler: Callable[[], None], watched: str | tuple[str, ...] = _WATCHED
) -> Iterator[list[int]]:
    """A handler that runs once, at the line of this number that is run inside; gives how many lines were."""
    seen, before = [0], sys.gettrace()

    def at_line(frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            seen[0] += 1
            if seen[0] == number:
                handler()
        return at_line

    def at_call(frame: Any, event: str, argument: Any) -> Any:
        return at_line if frame.f_globals.get("__name__", "").startswith(watched) else None

    sys.settrace(at_call)
    try:
        yield seen
    finally:
        sys.settrace(before)


def _line_count(verb: Callable[[], object]) -> int:
    with _handled(-1, lambda: None) as seen:
        verb()
    return seen[0]


def _raise() -> None:
    raise _Interruption


def _trained(kvstore: Any) -> Any:
    store = store_of(kvstore, kvstore.RowLayout(4, optimizer="adam"))
    store.apply_gradients("t", ids_of([1, 2]), torch.ones(2, 4), 0.1)
    return store


def _steps_of(kvstore: Any, source: Any) -> tuple[int, int]:
    """How often the row of id 1 was stepped, by its header, and the table's step."""
    return int(kvstore.unpack_header(source.get_rows("t", ids_of([1]))).counts), source.step_count("t")


@requirement(
    "KV-454",
    "The step of a table MUST be that of its rows wherever in a step a handler of a signal runs: in a snapshot that it "
    "takes, and in the store when it raises.",
)
def test_steps_and_rows(kvstore: Any) -> None:
    store = _trained(kvstore)
    step = partial(store.apply_gradients, "t", ids_of([1, 3]), torch.ones(2, 4), 0.1)
    line_count = _line_count(step)
    assert_equal(line_count > 10, True, where="lines of a step")
    for line in range(1, line_count + 1):
        found: list[tuple[int, int]] = []

        def look() -> None:
            with store.snapshot() as taken:
                found.append(_steps_of(kvstore, taken))  # noqa: B023

        before = _steps_of(kvstore, store)[0]
        with _handled(line, look):
            step()
        ((rows, told),) = found
        assert_equal(told, rows, where=f"a snapshot that a handler takes at line {line}")
        assert_equal(_steps_of(kvstore, store), (before + 1, before + 1), where=f"behind line {line}")
        with suppress(_Interruption), _handled(line, _raise):
            step()
        rows, told = _steps_of(kvstore, store)
        assert_equal(told, rows, where=f"the store, interrupted at line {line}")


def _copy(kvstore: Any, folder: Path) -> Any:
    store = store_of(kvstore, kvstore.RowLayout(4, optimizer="adam"))
    kvstore.load(store, folder / "full")
    return store


@requirement(
    "KV-455",
    "A clear that a handler of a signal interrupts MUST leave all rows or none, and none is no base of deltas.",
)
def test_interrupted_clear(kvstore: Any, tmp_path: Path) -> None:
    source = store_of(kvstore, kvstore.RowLayout(4, optimizer="adam"), track_changes=True)
    source.set("t", ids_of([1, 2, 3]), torch.ones(3, 4))
    mark = save(kvstore, source, tmp_path / "full").mark
    source.set("t", ids_of([4]), torch.ones(1, 4))
    save(kvstore, source, tmp_path / "delta", since=mark)
    for line in range(1, _line_count(partial(_copy(kvstore, tmp_path).clear, "t")) + 1):
        copy, where = _copy(kvstore, tmp_path), f"interrupted at line {line}"
        with suppress(_Interruption), _handled(line, _raise):
            copy.clear("t")
        if copy.size("t"):
            assert_equal(contents(copy), contents(_copy(kvstore, tmp_path)), where=where)
        else:
            with raises(DeltaBaseError, where=where):
                kvstore.load(copy, tmp_path / "delta")


@requirement(
    "KV-474",
    "A clear that fails by an Exception MUST leave what the table was loaded from a base of deltas, and a table that "
    "was never loaded one of deltas on an empty table.",
)
@pytest.mark.parametrize("is_loaded", [True, False])
def test_failed_clear(kvstore: Any, tmp_path: Path, is_loaded: bool) -> None:
    source = store_of(kvstore, kvstore.RowLayout(4, optimizer="adam"), track_changes=True)
    mark = source.mark()
    if is_loaded:
        source.set("t", ids_of([1, 2, 3]), torch.ones(3, 4))
        mark = save(kvstore, source, tmp_path / "full").mark
    source.set("t", ids_of([4]), torch.ones(1, 4))
    save(kvstore, source, tmp_path / "delta", since=mark)
    copy = store_of(kvstore, kvstore.RowLayout(4, optimizer="adam"))
    if is_loaded:
        kvstore.load(copy, tmp_path / "full")
    failing = mock.patch.object(copy._engine, "clear", side_effect=MemoryError("no memory"))
    with failing, raises(MemoryError, mentions=("no memory",), where="a clear"):
        copy.clear("t")
    with succeeds("a load of a delta", where="behind a clear that failed"):
        kvstore.load(copy, tmp_path / "delta")
    assert_equal(contents(copy), contents(source), where="behind the delta")


@requirement(
    "KV-481",
    "While a load writes the rows of one table, those that it has written before MUST have their steps already.",
)
@pytest.mark.parametrize("held", [[], [7]])
def test_steps_of_loads(kvstore: Any, tmp_path: Path, held: list[int]) -> None:
    layouts = {name: kvstore.RowLayout(4, optimizer="adam") for name in "ab"}
    source, copy = store_of(kvstore, layouts), store_of(kvstore, layouts)
    for table, step in (("a", 3), ("b", 8)):
        source.set(table, ids_of([1, 2]), torch.ones(2, 4))
        source.set_step_count(table, step)
        copy.set(table, ids_of(held), torch.ones(len(held), 4))
    save(kvstore, source, tmp_path / "full")
    found: list[tuple[str, int]] = []
    with between_tables(lambda table: found.append((table, copy.step_count("a")))):
        kvstore.load(copy, tmp_path / "full")
    assert_equal([step for table, step in found if table == "b"], [3], where="the first table's step")
    assert_equal(copy.step_count("b"), 8, where="the second's")


@requirement(
    "KV-482",
    "A load of some buckets that a handler of a signal ends while it notes what was loaded MUST be no base of a delta "
    "of other buckets: a delta that is taken MUST leave no holes.",
)
def test_interrupted_parts(kvstore: Any, tmp_path: Path) -> None:
    buckets, keys = kvstore.Buckets(4), ids_of(range(12))
    source = store_of(kvstore, kvstore.RowLayout(4), track_changes=True)
    source.set("t", keys, torch.ones(12, 4))
    mark = save(kvstore, source, tmp_path / "full", buckets=buckets).mark
    source.set("t", keys[:4], torch.full((4, 4), 2.0))
    save(kvstore, source, tmp_path / "delta", buckets=buckets, since=mark)
    wanted, taken = contents(source)["t"], 0
    notes = "twinproof.kvstore.deltas"
    for line in range(1, 1000):
        copy, where = store_of(kvstore, kvstore.RowLayout(4)), f"a load that ends at line {line} of its notes"
        with suppress(_Interruption), _handled(line, _raise, notes) as seen:
            kvstore.load(copy, tmp_path / "full", owned=(0, 2))
        for owned in ((0, 4), (0, 2)):
            with suppress(DeltaBaseError):
                kvstore.load(copy, tmp_path / "delta", owned=owned)
                held = {key: row for key, row in wanted.items() if owned[0] <= key % 4 < owned[1]}
                assert_equal(contents(copy)["t"], held, where=f"{where}: a delta of {owned}")
                taken += 1
        if seen[0] < line:
            break
    assert_equal((line > 10, taken > 0), (True, True), where="lines, and deltas that were taken")


@requirement(
    "KV-483",
    "A listener that a handler of a signal or another thread adds or removes while one is added, removed or told MUST "
    "hear, or not, of the next write on, and the others stay as they are.",
)
@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("way", ["add", "remove", "tell"])
@pytest.mark.parametrize("within", ["add", "remove"])
def test_listeners_meanwhile(kvstore: Any, way: str, within: str, steps: bool) -> None:
    for line in range(1, 1000):
        store, heard = store_of(kvstore, kvstore.RowLayout(4, optimizer="adam")), list[str]()
        hearing = {name: partial(_note, heard, name) for name in ("stays", "other", "mine")}
        write = partial(store.apply_gradients, "t", ids_of([1]), torch.ones(1, 4), 0.1)
        verbs = {"add": partial(store.add_listener, steps=steps), "remove": store.remove_listener}
        acts = {name: partial(verb, hearing["mine"]) for name, verb in verbs.items()} | {"tell": write}
        left = ["stays"]
        verbs["add"](hearing["stays"])
        for name, act in (("other", within), ("mine", way)):
            if act == "remove":
                verbs["add"](hearing[name])
            if act == "add":
                left.append(name)
        with _handled(line, partial(verbs[within], hearing["other"]), "twinproof.kvstore.store") as seen:
            acts[way]()
        if seen[0] < line:
            break
        heard.clear()
        write()
        assert_equal(sorted(heard), sorted(left), where=f"{within} at line {line} of {way}")
    assert_equal(line > 2, True, where="lines")
