"""Loads that end in the middle, or whose listeners raise: no half of a load is left, and who listens hears of all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from conformance.harness import assert_equal, raises, requirement, succeeds
from conformance.kvstore.cases import assert_contents, contents, ids_of, random_rows, save, store_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

OLD, NEW, STEP = range(40), range(20, 320), 7
WAYS = ("load", "load_state_dict", "views")


def _store(kvstore: Any, held: dict[str, range], **options: Any) -> Any:
    """Two tables whose rows have two states; ``held``: the ids of rows that are there."""
    layouts = {table: kvstore.RowLayout(6, optimizer="adam") for table in "ab"}
    store = store_of(kvstore, layouts, num_shards=2, **options)
    for seed, table in enumerate("ab"):
        store.set_rows(table, random_rows(store, held.get(table, range(0)), 11 + seed, table))
    return store


def _saved(kvstore: Any, folder: Path) -> Any:
    """A store of 300 rows a table, saved in both ways."""
    store = _store(kvstore, dict.fromkeys("ab", NEW), track_changes=True)
    for table in "ab":
        store.set_step_count(table, STEP)
    save(kvstore, store, folder / "rows")
    dcp.save(store.state_dict(chunk_rows=100), checkpoint_id=folder / "torch", no_dist=True)
    return store


def _loading(kvstore: Any, source: Any, store: Any, folder: Path, way: str) -> Callable[[], object]:
    """One way to load all that was saved, in chunks of 100 rows where it has chunks."""
    if way == "load":
        return partial(kvstore.load, store, folder / "rows", chunk_rows=100)
    if way == "load_state_dict":
        return partial(store.load_state_dict, source.state_dict())
    ids, names = ids_of(NEW), ("momentum1", "momentum2", "weight", "metadata")
    views = {
        f"{table}.{name}": kvstore.KVTensor(store, ids, name, table=table, chunk_rows=100)
        for table in "ab"
        for name in names
    }
    return partial(dcp.load, views, checkpoint_id=folder / "torch", planner=kvstore.KVLoadPlanner(), no_dist=True)


@requirement(
    "KV-477",
    "Where memory for the rows of a load is short, no snapshot lives, no capacity evicts and no delta removes, load "
    "and a load through views MUST leave every table as it was, ready for another try.",
    needs=("injected_allocation_failure",),
)
@pytest.mark.parametrize("failing", ["a", "b"])
@pytest.mark.parametrize(("way", "held"), [("load", "ab"), ("load", "a"), ("load", "b"), ("views", "ab")])
def test_short_memory(kvstore: Any, tmp_path: Path, way: str, held: str, failing: str) -> None:
    source = _saved(kvstore, tmp_path)
    for failures in range(2000):
        store, where = _store(kvstore, dict.fromkeys(held, OLD)), f"{way} beside {held}, {failing}, {failures}"
        before = contents(store), store.step_count("a"), store.step_count("b")
        store.fail_allocations(failing, failures)
        try:
            _loading(kvstore, source, store, tmp_path, way)()
        except (MemoryError, CheckpointException) as error:
            store.fail_allocations(failing, -1)
            causes = [failure for failure, _ in getattr(error, "failures", {0: (error, None)}).values()]
            assert_equal([isinstance(cause, MemoryError) for cause in causes], [True], where=f"{where}: {causes}")
            assert_contents(store, before[0], where=where)
            assert_equal((store.step_count("a"), store.step_count("b")), before[1:], where=f"{where}: steps")
            with succeeds("another try", where=where):
                _loading(kvstore, source, store, tmp_path, way)()
        else:
            break
    store.fail_allocations(failing, -1)
    assert_equal(0 < failures < 1999, True, where="a load that grows the table allocates, and ends")
    wanted = contents(_store(kvstore, dict.fromkeys(held, OLD)))
    assert_contents(store, {t: wanted[t] | rows for t, rows in contents(source).items()}, where="loaded at last")


@requirement(
    "KV-478",
    "A load of any kind MUST tell each listener of each table once, when all rows of all tables are there; what one "
    "raises MUST be raised when all were told of all tables, and what was loaded stays a base of deltas.",
)
@pytest.mark.parametrize("held", ["", "a", "ab"])
@pytest.mark.parametrize("way", WAYS)
def test_told_behind_all_rows(kvstore: Any, tmp_path: Path, way: str, held: str) -> None:
    source = _saved(kvstore, tmp_path)
    store, heard = _store(kvstore, dict.fromkeys(held, range(30, 40))), list[tuple[str, bool, str]]()
    wanted = contents(source)

    def fails(table: str) -> None:
        raise LookupError(table)

    for name in ("first", "last"):
        store.add_listener(lambda table, name=name: heard.append((name, contents(store) == wanted, table)))
        if name == "first":
            store.add_listener(fails)
    evicted = kvstore.BackgroundEvictor(store, "b", trigger_rows=1, policy=kvstore.EvictionPolicy.ttl(2**31))
    with raises(LookupError, where=way):
        _loading(kvstore, source, store, tmp_path, way)()
    assert_equal(heard, [(name, True, table) for table in "ab" for name in ("first", "last")], where=f"{way}: told")
    with evicted:
        assert_equal(len(evicted.wait()), 1, where=f"{way}: rounds of an evictor of the second table")
    store.remove_listener(fails)
    if way == "load":
        mark = source.mark()
        save(kvstore, source, tmp_path / "again")
        source.delete("a", ids_of([50]))
        save(kvstore, source, tmp_path / "delta", since=mark)
        with succeeds("a load of a delta", where="behind a listener that raised"):
            kvstore.load(store, tmp_path / "delta")
        assert_contents(store, contents(source), where="behind the delta")


class _Ended(BaseException):
    """What a handler of a signal raises."""


@requirement(
    "KV-479",
    "A load of any kind that ends in the middle MUST tell listeners of each table of which it may have written rows, "
    "once, and one that ends before it writes of none.",
)
@pytest.mark.parametrize("way", WAYS)
def test_told_of_half_loads(kvstore: Any, tmp_path: Path, way: str) -> None:
    source = _saved(kvstore, tmp_path)
    for number in range(1, 1000):
        store, heard, calls = _store(kvstore, dict.fromkeys("ab", OLD)), list[str](), [0]
        before = contents(store)
        store.add_listener(heard.append)

        def ending(write: Any, *values: Any, calls: list[int] = calls, number: int = number, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == number:
                raise _Ended
            return write(*values, **options)

        with suppress(_Ended, CheckpointException):
            patches = [
                mock.patch.object(store._engine, name, partial(ending, getattr(store._engine, name)))
                for name in ("reserve", "write", "write_rows")
            ]
            with patches[0], patches[1], patches[2]:
                _loading(kvstore, source, store, tmp_path, way)()
        written = [table for table, rows in contents(store).items() if rows != before[table]]
        assert_equal(set(heard) >= set(written), True, where=f"{way}, call {number}: told {heard} of {written}")
        assert_equal(len(heard), len(set(heard)), where=f"{way}, call {number}: told once")
        if number == 1:
            assert_equal(heard, [], where=f"{way}: told of nothing")
        if calls[0] < number:
            break
    assert_equal(number > 4, True, where=f"{way}: calls of the engine")
