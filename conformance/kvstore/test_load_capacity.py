"""Loads into tables with a capacity: one batch, whatever the chunks are; all of it or nothing."""

from __future__ import annotations

import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from conformance.harness import assert_equal, raises, requirement, succeeds
from conformance.kvstore.cases import (
    Clock,
    assert_contents,
    between_tables,
    contents,
    ids_of,
    random_rows,
    save,
    store_of,
)
from twinproof.errors import CapacityError


def aged(kvstore: Any, ages: dict[int, int], **options: Any) -> Any:
    """A store with one row for each id, written at the given second."""
    clock = Clock()
    store = store_of(kvstore, clock=clock, **options)
    for key, second in ages.items():
        clock.now = second
        store.set("t", ids_of([key]), torch.full((1, 6), float(key)))
    return store


@requirement(
    "KV-112",
    "A load of more rows than a table may hold MUST be refused before the first is written, in either form and from a "
    "state dict, whatever the chunks are.",
)
def test_load_that_cannot_fit(kvstore: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("twinproof.kvstore.statedict.LOAD_CHUNK_ROWS", 2)
    source = store_of(kvstore)
    source.set_rows("t", random_rows(source, range(100, 109), 1))
    full = aged(kvstore, {key: 10 + key for key in range(5)}, capacity=5)
    before, stats = contents(full), full.stats()
    for form in ("rows", "separate"):
        save(kvstore, source, tmp_path / form, form=form)
        for chunk in (1, 2, 5, 6, 9, 50):
            with raises(CapacityError, where=f"{form} in chunks of {chunk}"):
                kvstore.load(full, tmp_path / form, chunk_rows=chunk)
            assert_contents(full, before, where=f"{form} in chunks of {chunk}")
    for whole in (True, False):
        source.set_return_whole_row(whole)
        with raises(CapacityError, where=f"state dict, whole={whole}"):
            full.load_state_dict(source.state_dict())
        assert_contents(full, before, where=f"state dict, whole={whole}")
    assert_equal(full.stats(), stats, where="counters")


@requirement(
    "KV-113",
    "A load into a table with a capacity MUST keep every row that it lists, and of the others those that one write of "
    "all its rows would keep, whatever the chunks are.",
)
@pytest.mark.parametrize("by", ["nothing", "ttl", "count", "ttl_count", "l2", "timestamp", "score"])
def test_load_makes_room(kvstore: Any, tmp_path: Path, monkeypatch: Any, by: str) -> None:
    policies = {
        "ttl": kvstore.EvictionPolicy.ttl(10**6),
        "count": kvstore.EvictionPolicy.count(1),
        "ttl_count": kvstore.EvictionPolicy.ttl_count(10**6, 1),
        "l2": kvstore.EvictionPolicy.l2(0.5),
        "timestamp": kvstore.EvictionPolicy.older_than(1),
        "score": kvstore.EvictionPolicy.score(6),
    }
    options = {"capacity": 6, "eviction": policies.get(by)}
    # The listed rows are older than all others, so that a later chunk would rather evict an earlier one.
    source, there = aged(kvstore, {7: 1, 8: 2, 9: 3, 2: 4}), {1: 50, 2: 60, 3: 40, 4: 55, 5: 45, 6: 65}
    save(kvstore, source, tmp_path / "ck", buckets=kvstore.Buckets(3))

    def full() -> Any:
        store = aged(kvstore, there, **options)
        # The oldest are those that were written most often.
        store.set_metadata("t", ids_of([3, 1]), torch.tensor([[9 << 32 | 40], [8 << 32 | 50]]))
        return store

    expected = full()
    expected.set_rows("t", source.get_rows("t", source.ids("t")))
    for chunk in (1, 2, 3, 4, 9):
        monkeypatch.setattr("twinproof.kvstore.statedict.LOAD_CHUNK_ROWS", chunk)
        for way in ("load", "load_state_dict"):
            store = full()
            if way == "load":
                kvstore.load(store, tmp_path / "ck", chunk_rows=chunk)
            else:
                source.set_return_whole_row(True)
                store.load_state_dict(source.state_dict())
            assert_contents(store, contents(expected), where=f"{way} in chunks of {chunk}")


@requirement(
    "KV-363",
    "A load MUST be one batch of a table with a capacity also where somebody has written to it while another table's "
    "rows were written, whether it was empty or not.",
)
@pytest.mark.parametrize("there", [[], [80]])
def test_written_while_loaded(kvstore: Any, tmp_path: Path, there: list[int]) -> None:
    two = dict.fromkeys(("t", "u"), kvstore.RowLayout(6, optimizer="adam"))
    source = aged(kvstore, {7: 1, 8: 2, 9: 3, 2: 4}, layout=two)
    source.set_rows("u", source.get_rows("t", source.ids("t")))
    save(kvstore, source, tmp_path / "ck")
    for chunk in (1, 2, 3, 9):
        clock = Clock()
        clock.now = 100
        store = store_of(kvstore, two, clock=clock, capacity=5)
        store.set("u", ids_of(there), torch.zeros(len(there), 6))

        def write(table: str, store: Any = store) -> None:
            if table == "t":
                store.set("u", ids_of([90, 91]), torch.ones(2, 6))

        with between_tables(write):
            report = kvstore.load(store, tmp_path / "ck", chunk_rows=chunk)
        assert_equal(report.row_counts, {"t": 4, "u": 4}, where=f"what is said to be loaded, in chunks of {chunk}")
        kept = store.ids("u").tolist()
        assert_equal(sorted(set(kept) - {80, 90, 91}), [2, 7, 8, 9], where=f"loaded rows, in chunks of {chunk}")
        assert_equal(len(kept), 5, where=f"rows, in chunks of {chunk}")


@requirement(
    "KV-114",
    "A delta MUST load into a full table where what it removes makes room for what it brings: nothing else goes.",
)
def test_removals_make_room(kvstore: Any, tmp_path: Path) -> None:
    store = aged(kvstore, {key: 10 + key for key in range(5)}, track_changes=True)
    save(kvstore, store, tmp_path / "full")
    mark = store.mark()
    store.delete("t", ids_of([3, 4]))
    store.set_rows("t", random_rows(store, [70, 71], 1))
    save(kvstore, store, tmp_path / "delta", since=mark)
    other = store_of(kvstore, capacity=5)
    kvstore.load(other, tmp_path / "full")
    kvstore.load(other, tmp_path / "delta", chunk_rows=1)
    assert_contents(other, contents(store), where="after the delta")


@requirement(
    "KV-343",
    "A load through views MUST be one batch of a table with a capacity, whatever its chunks are: refused before the "
    "first write where the views have more ids than fit; else all their rows stay, and those go that one write evicts.",
)
def test_views_make_room(kvstore: Any, tmp_path: Path) -> None:
    source = aged(kvstore, {7: 1, 8: 2, 9: 3, 2: 4})
    there = {1: 50, 2: 60, 3: 40, 4: 55, 5: 45, 6: 65}
    for whole in (True, False):
        source.set_return_whole_row(whole)
        state = source.state_dict(chunk_rows=1)
        keys = state["t.weight_id"].full_tensor()[:, 0]
        shown = {"weight": "row"} if whole else {name: name for name in ("weight", "momentum1", "momentum2")}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / str(whole)), no_dist=True)
        for capacity, chunk in product((3, 4, 6, 8), (1, 3, 9)):
            where = f"{whole=}, {capacity=}, chunks of {chunk}"
            store, expected = (aged(kvstore, there, capacity=capacity) for _ in range(2))
            views = {
                f"t.{name}": kvstore.KVTensor(store, keys, view, chunk_rows=chunk)
                for name, view in {"metadata": "metadata", **shown}.items()
            }
            if capacity < keys.numel():
                with raises(CapacityError, where=where):
                    _load_views(kvstore, views, tmp_path / str(whole))
            else:
                _load_views(kvstore, views, tmp_path / str(whole))
                expected.set_rows("t", source.get_rows("t", keys))
            assert_contents(store, contents(expected), where=where)


@requirement(
    "KV-364",
    "One load through views of several stores, whose tables have the same name, MUST be one batch of each table.",
)
def test_views_of_several_stores(kvstore: Any, tmp_path: Path) -> None:
    stores = {
        name: aged(kvstore, {first + i: i for i in range(3)}, capacity=4) for name, first in (("a", 1), ("b", 11))
    }
    held = {name: contents(store) for name, store in stores.items()}

    def shown(*, snapshot: bool) -> dict[str, Any]:
        return {
            f"{name}.{key}": view
            for name, store in stores.items()
            for key, view in store.state_dict(snapshot=snapshot).items()
        }

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(shown(snapshot=True), storage_writer=dcp.FileSystemWriter(tmp_path / "ck"), no_dist=True)
    for store in stores.values():
        store.set("t", store.ids("t"), torch.zeros(3, 6))
    with succeeds("a load", where="into two stores of three rows, of which each may have four"):
        _load_views(kvstore, shown(snapshot=False), tmp_path / "ck")
    for name, store in stores.items():
        assert_contents(store, held[name], where=name)


def _load_views(kvstore: Any, views: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = dcp.FileSystemReader(path)
        dcp.load(dict(views), storage_reader=reader, planner=kvstore.KVLoadPlanner(), no_dist=True)
