"""A store on a device: its kernels and their host side, which run here on the CPU, and what a machine without one says.

The whole suite runs on it too, with ``--twinproof-device simt``.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import settings

from conformance.harness import assert_equal, examples, raises, requirement, run_machine, succeeds
from conformance.kvstore.cases import (
    Clock,
    assert_bits,
    contents,
    ids_of,
    random_rows,
    store_of,
    weights_of,
)
from conformance.kvstore.orders import OrdersMachine
from twinproof.errors import ConfigError, TwinproofError

NEEDS = ("operators",)


def on_device(kvstore: Any) -> Any:
    """The component with stores on the device that is run here."""
    from conformance.kvstore.simt import SimtStore

    names = ("Buckets", "EvictionPolicy", "KVTensor", "RowLayout", "SavedRows", "load", "save")
    return SimpleNamespace(KVStore=SimtStore, **{name: getattr(kvstore, name) for name in names})


@requirement("KV-162", "A device that the machine or the implementation does not have MUST be refused by name.")
def test_absent_devices(kvstore: Any) -> None:
    absent = ["mps", "cuda:0:1", "", "CPU", 0, None] + ([] if torch.cuda.is_available() else ["cuda"])
    for name in absent:
        with raises(ConfigError, where=f"{name!r}") as refused:
            store_of(kvstore, device=name)
        assert_equal("device" in str(refused.error), True, where=f"{name!r} is named")
    assert_equal(store_of(kvstore, device="cpu").options.device, "cpu", where="device")


@requirement(
    "KV-163",
    "A store on a device MUST hold exactly the rows of a dictionary after any program of writes, optimizer steps, "
    "deletes, evictions, snapshots, saves and loads, and views, rounds, marks and state dicts beside it show theirs.",
    needs=NEEDS,
)
def test_any_program(kvstore: Any, tmp_path: Path) -> None:
    stores = [store_of(component) for component in (on_device(kvstore), kvstore)]
    for store in stores:
        # Programs that are drawn seldom have two whole rows of one key in a batch.
        store.set_rows("t", random_rows(store, [1, 2, 1, 3, 2], 1))
    assert_equal(contents(stores[0]), contents(stores[1]), where="whole rows of one key")

    class Machine(OrdersMachine):
        pass

    Machine.kvstore, Machine.root = on_device(kvstore), tmp_path
    run_machine(Machine, settings=settings(examples(12), stateful_step_count=15))


@requirement(
    "KV-164",
    "A store on a device MUST grow to, and shrink from, thousands of rows with the rows, ids and counters of a store "
    "on the CPU, ids of any pattern included.",
    needs=NEEDS,
)
@pytest.mark.parametrize("pattern", range(6))
def test_growth(kvstore: Any, pattern: int) -> None:
    count = 1500
    generator = torch.Generator().manual_seed(pattern)
    families = (
        torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator),
        torch.arange(count) - 5,
        torch.arange(count) << 48,
        torch.arange(count) * 2**32 + 1,
        -(2**63) + torch.arange(count),
        torch.arange(count) ^ 0x5555,
    )
    ids = families[pattern]
    layout = kvstore.RowLayout(3, torch.float16, "adagrad")
    stores = [store_of(component, layout) for component in (on_device(kvstore), kvstore)]
    for store in stores:
        store.set_rows("t", random_rows(store, ids[:1000].tolist(), 1))
        store.set("t", ids[500:], weights_of(store, count - 500, 2))
        assert_equal(store.delete("t", ids[::3].clone()), len(ids[::3]), where="deleted")
        assert_equal(store.stats().row_count, store.size("t"), where="counters")
    mine, theirs = (store.get_rows("t", ids) for store in stores)
    assert_bits(mine, theirs, where="rows")
    assert_bits(stores[0].ids("t"), stores[1].ids("t"), where="ids")
    for store in stores:
        store.delete("t", ids[10:])
    assert_equal(contents(stores[0]), contents(stores[1]), where="what is left")


@requirement(
    "KV-165",
    "A store on a device that is full MUST evict the rows that a store on the CPU evicts, in the same order.",
    needs=NEEDS,
)
@pytest.mark.parametrize("kind", ["ttl", "count", "score", None])
def test_capacity(kvstore: Any, kind: str | None) -> None:
    policies = {
        "ttl": kvstore.EvictionPolicy.ttl(5),
        "count": kvstore.EvictionPolicy.count(2),
        "score": kvstore.EvictionPolicy.score(3),
        None: None,
    }
    # Some batches come before a timestamp needs its highest bit.
    clock = Clock(2**31 - 6)
    stores = [
        store_of(component, eviction=policies[kind], capacity=6, clock=clock)
        for component in (on_device(kvstore), kvstore)
    ]
    generator = torch.Generator().manual_seed(1)
    for batch in range(25):
        ids = torch.randint(-5, 5, (1 + batch % 4,), generator=generator)
        clock.now += batch % 2
        for store in stores:
            store.set("t", ids, weights_of(store, ids.numel(), batch))
            store.set_scores("t", ids[:1], torch.rand(1, generator=torch.Generator().manual_seed(batch)))
        assert_equal(contents(stores[0]), contents(stores[1]), where=f"after {batch + 1} batches")
        assert_equal(stores[0].stats().evicted_count, stores[1].stats().evicted_count, where="evicted")


def _verbs(kvstore: Any, store: Any) -> dict[str, Callable[[Any], Any]]:
    """What changes a table or needs memory, with batches that make it grow; a table that is full evicts."""
    ids, new = ids_of(range(-20, 900)), ids_of(range(5000, 5900))
    weights, rows = weights_of(store, ids.numel(), 2), random_rows(store, new.tolist(), 2)
    return {
        "set": lambda store: store.set("t", ids, weights),
        "set_rows": lambda store: store.set_rows("t", rows),
        "apply_gradients": lambda store: store.apply_gradients("t", ids, torch.ones(ids.numel(), 6), 0.5),
        "delete": lambda store: store.delete("t", ids_of(range(0, 300, 2))),
        "clear": lambda store: store.clear("t"),
        "evict": lambda store: store.evict("t", policy=kvstore.EvictionPolicy.count(2)),
        "reserve": lambda store: store.reserve("t", 50_000),
        "snapshot": lambda store: store.snapshot().close(),
    }


@requirement(
    "KV-166",
    "Where memory for rows, index or a snapshot fails on a device, the verb MUST raise a named MemoryError and leave "
    "rows and counters as they were, ready for another try.",
    needs=NEEDS,
)
@pytest.mark.parametrize("capacity", [None, 1000])
def test_failing_allocations(kvstore: Any, capacity: int | None) -> None:
    component = on_device(kvstore)
    layout = kvstore.RowLayout(6, optimizer="adagrad")

    def filled(component: Any) -> Any:
        store = store_of(component, layout, track_changes=True, capacity=capacity)
        store.set("t", ids_of(range(300)), weights_of(store, 300, 1))
        return store

    for name, verb in _verbs(kvstore, filled(kvstore)).items():
        expected = filled(kvstore)
        verb(expected)
        failed_count = 0
        while True:
            store, where = filled(component), f"{name}, allocation {failed_count}"
            before = contents(store)
            store.fail_allocations("t", failed_count)
            try:
                verb(store)
            except MemoryError as error:
                assert_equal(isinstance(error, TwinproofError), True, where=f"{where}: {type(error).__name__} is named")
            else:
                break
            store.fail_allocations("t", -1)
            assert_equal(contents(store), before, where=f"{where}: rows")
            assert_equal(store.stats().row_count, store.size("t"), where=f"{where}: counters")
            verb(store)
            assert_equal(contents(store), contents(expected), where=f"{where}, tried again")
            failed_count += 1
        assert_equal(contents(store), contents(expected), where=f"{name}: rows")
        needs_memory = name in ("set", "set_rows", "apply_gradients", "clear", "reserve", "snapshot")
        assert_equal(failed_count > 0, needs_memory, where=f"{name} allocates")


@requirement(
    "KV-285",
    "A snapshot of a store on a device, and a save of the store, MUST take memory for the rows that change meanwhile "
    "alone, and give it back when they end.",
    needs=NEEDS,
)
@pytest.mark.parametrize("memory", [{}, {"row_memory": "host", "cache_rows": {"t": 32}}])
def test_memory_of_a_snapshot(kvstore: Any, tmp_path: Path, memory: dict[str, Any]) -> None:
    from conformance.kvstore.simt import SimtHandle, held_bytes, store_in

    # Rows of 64 KiB; memory for rows comes in pieces of 16 MiB at most.
    layout, count, piece_bytes = kvstore.RowLayout(16_000), 300, 2**24
    store, ids = store_in({"t": layout}, SimtHandle, memory), ids_of(range(count))
    store.set("t", ids, torch.arange(float(count)).repeat_interleave(16_000).reshape(count, 16_000))

    def taken() -> int:
        gc.collect()
        return held_bytes(pinned=False) + held_bytes(pinned=True)

    before = taken()
    with store.snapshot() as moment:
        assert_equal(taken() - before < 2**16, True, where="a snapshot of rows that stay")
        for turn in range(3):
            store.set("t", ids[:20], torch.full((20, 16_000), -1.0 - turn))
        assert_equal(0 < taken() - before < piece_bytes + 2**16, True, where="a snapshot of rows of which 20 changed")
        assert_equal(moment.get("t", ids)[:, 7].tolist(), list(map(float, range(count))), where="rows as they were")
        assert_equal(store.get("t", ids[:21])[:, 7].tolist(), [-3.0] * 20 + [20.0], where="rows as they are")
        assert_equal(store.stats().allocated_bytes > moment.size("t") * layout.row_bytes, True, where="counted, too")
    del moment
    assert_equal(taken(), before, where="after the snapshot")
    taken_by_reads: list[int] = []
    read = SimtHandle.read

    def watched(handle: Any, *arguments: Any) -> None:
        taken_by_reads.append(held_bytes(pinned=False) + held_bytes(pinned=True) - before)
        read(handle, *arguments)

    with mock.patch.object(SimtHandle, "read", watched):
        kvstore.save(store, tmp_path / "saved")
    assert_equal(0 < max(taken_by_reads) < 2**16, True, where=f"reads of a save: {max(taken_by_reads)} bytes")


def _changes(kvstore: Any, store: Any) -> dict[str, Callable[[Any], Any]]:
    """What changes rows that a snapshot shows, by slabs and indexes of what is kept."""
    ids = ids_of(range(-20, 150))
    weights, rows = weights_of(store, ids.numel(), 2), random_rows(store, range(40, 200), 2)
    return {
        "set": lambda store: store.set("t", ids, weights),
        "set_rows": lambda store: store.set_rows("t", rows),
        "set_scores": lambda store: store.set_scores("t", ids[:60], torch.ones(60)),
        "set_metadata": lambda store: store.set_metadata("t", ids[:60], torch.ones(60, 1, dtype=torch.int64)),
        "set_state": lambda store: store.set_state("t", "momentum1", ids, torch.ones(ids.numel(), 6)),
        "evict": lambda store: store.evict("t", policy=kvstore.EvictionPolicy.older_than(2000)),
        # Nobody is old enough to go.
        "decay": lambda store: store.evict("t", policy=kvstore.EvictionPolicy.ttl_count(10**6, 9, 0.5)),
        "apply_gradients": lambda store: store.apply_gradients("t", ids, torch.ones(ids.numel(), 6), 0.5),
        "delete": lambda store: store.delete("t", ids_of(range(0, 60, 2))),
        "clear": lambda store: store.clear("t"),
    }


@requirement(
    "KV-286",
    "Where memory for what snapshots of a store on a device keep fails, the change MUST raise a named MemoryError and "
    "leave store and snapshots as they were, ready for another try.",
    needs=NEEDS,
)
def test_failing_snapshots(kvstore: Any) -> None:
    component, layout = on_device(kvstore), kvstore.RowLayout(6, optimizer="adagrad")

    def filled(component: Any) -> Any:
        store = store_of(component, layout, track_changes=True)
        store.set("t", ids_of(range(60)), weights_of(store, 60, 1))
        return store

    for name, verb in _changes(kvstore, filled(kvstore)).items():
        expected = filled(kvstore)
        before = contents(expected)
        verb(expected)
        for failed_count in itertools.count():
            store, where = filled(component), f"{name}, allocation {failed_count}"
            with store.snapshot() as first, store.snapshot() as second:
                store.fail_allocations("t", failed_count)
                try:
                    verb(store)
                except MemoryError as error:
                    assert_equal(isinstance(error, TwinproofError), True, where=f"{where}: {type(error).__name__}")
                    store.fail_allocations("t", -1)
                    assert_equal(contents(store), before, where=f"{where}: rows")
                    for moment in (first, second):
                        assert_equal(contents(moment), before, where=f"{where}: a snapshot of a change that failed")
                    verb(store)
                    is_done = False
                else:
                    store.fail_allocations("t", -1)
                    is_done = True
                assert_equal(contents(store), contents(expected), where=f"{where}: rows in the end")
                for moment in (first, second):
                    assert_equal(contents(moment), before, where=f"{where}: a snapshot")
            if is_done:
                break
        assert_equal(failed_count > 1, True, where=f"{name} allocates for both snapshots")


@requirement(
    "KV-411",
    "Rows on a device MUST be made where there is a GPU and a library that was built for one, on that device, with the "
    "rows of any other store.",
    needs=NEEDS,
)
def test_device_that_is_there(kvstore: Any) -> None:
    from conformance.kvstore.simt import SimtHandle, load_operators
    from fastimpl import ops
    from fastimpl.kvstore import store as native
    from fastimpl.kvstore.native import table_messages

    load_operators()
    plain, places = store_of(kvstore), list[str]()
    plain.set_rows("t", random_rows(plain, [3, 1, 2], 4))
    ids, messages = plain.ids("t"), table_messages(plain.options)

    def moved(place: str) -> torch.Tensor:
        # The stand-in's device is the CPU.
        places.append(place)
        return messages

    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(ops, "cuda_operators", return_value=["kvstore_create"]),
        mock.patch.object(native, "table_messages", return_value=SimpleNamespace(to=moved)),
        succeeds("rows on a device", where="a GPU and a library for it"),
    ):
        rows = native.device_rows(plain.options, SimtHandle)
    assert_equal(places, ["cuda"], where="where they are made")
    rows.write_rows("t", plain.get_rows("t", ids))
    found = torch.empty(3, plain.layout("t").row_bytes, dtype=torch.uint8)
    rows.read("t", ids, 0, found.shape[1], found)
    assert_bits(found, plain.get_rows("t", ids), where="rows on the device")
    rows.close()
