"""What was closed, sent on, emptied or left behind is used once more; and stores that others stand in for."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import refimpl.kvstore as reference
from conformance.harness import assert_equal, raises, requirement, succeeds
from conformance.kvstore.cases import Clock, assert_bits, assert_contents, contents, ids_of, random_rows, store_of
from twinproof.errors import ConfigError, DetachedStoreError, MissingKeyError, UnsupportedError
from twinproof.kvstore import store as shared
from twinproof.kvstore.store import LockedRows
from twinproof.kvstore.views import LazyRows


class _CountedRows(reference.DictRows):
    """Rows that count how often they are closed."""

    closed_count = 0

    def close(self) -> None:
        self.closed_count += 1
        super().close()


class _CountedStore(shared.KVStore, engine=lambda options: LockedRows(_CountedRows(options))):
    """A store of them."""


@requirement(
    "KV-394",
    "A store and a snapshot MUST be closed any number of times, in any order, and rows behind a lock be given back "
    "once.",
)
def test_closed_again(kvstore: Any) -> None:
    for kind in (kvstore.KVStore, _CountedStore):
        for first in ("store", "snapshot"):
            store = kind({"t": kvstore.RowLayout(6)}, clock=lambda: 1000)
            store.set("t", ids_of([1, 2]), torch.ones(2, 6))
            taken = store.snapshot()
            pair = [store, taken] if first == "store" else [taken, store]
            for number in range(3):
                for each in pair:
                    with succeeds("close()", where=f"{kind.__name__}, {first} first, time {number}"):
                        each.close()
            if kind is _CountedStore:
                rows: Any = store._engine
                assert_equal(rows._rows.closed_count, 1, where=f"how often rows were given back, {first} first")


@requirement(
    "KV-396",
    "A view of a store that was pickled MUST be pickled again by any protocol before it is attached, and be the same "
    "view when it is attached at last.",
)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_sent_on_unattached(kvstore: Any, protocol: int) -> None:
    store, keys = store_of(kvstore), [1, 5, 9]
    store.set_rows("t", random_rows(store, keys, 4))
    for name in ("row", "weight", "metadata", "momentum1"):
        view = kvstore.KVTensor(store, ids_of(keys), name)
        found = pickle.loads(pickle.dumps(view))
        for number in range(2):
            with succeeds("a pickle", where=f"{name}, sent on {number}"):
                found = pickle.loads(pickle.dumps(found, protocol=protocol))
        with raises(DetachedStoreError, where=f"{name}, not attached"):
            found.full_tensor()
        assert_bits(found.attach(store).full_tensor(), view.full_tensor(), where=f"{name}, attached")


def _of_another_time(view: Any) -> Any:
    """The view as it was pickled when views did not keep the layout of their rows."""
    rebuild, arguments = view.__reduce_ex__(4)
    return rebuild(
        *pickle.loads(pickle.dumps(arguments[:3])), {k: v for k, v in arguments[3].items() if k != "_layout"}
    )


@requirement(
    "KV-397",
    "A view that was pickled when views did not keep the layout of their rows MUST be attached to rows in which what "
    "it shows has its width and dtype, of whatever optimizer, and be refused by name where it has not.",
)
def test_views_of_another_time(kvstore: Any) -> None:
    store, keys = store_of(kvstore), [1, 5, 9]
    store.set_rows("t", random_rows(store, keys, 4))
    other = store_of(kvstore, kvstore.RowLayout(6, optimizer="lamb"))
    wide = store_of(kvstore, kvstore.RowLayout(12, optimizer="adam"))
    for name in ("row", "weight", "metadata", "momentum1"):
        view = kvstore.KVTensor(store, ids_of(keys), name)
        for kind, source in (("the same rows", store), ("rows of another optimizer", other)):
            with succeeds("attach()", where=f"{name}, {kind}"):
                found = _of_another_time(view).attach(source)
            expected = kvstore.KVTensor(source, ids_of(keys), name).full_tensor()
            assert_bits(found.full_tensor(), expected, where=f"{name}, {kind}")
        if name != "metadata":
            with raises(ConfigError, mentions=("rows of another layout", "where: t"), where=f"{name}, wide rows"):
                _of_another_time(view).attach(wide)


@requirement(
    "KV-398",
    "A copy in memory of a view of no ids MUST have the rows of none: it MUST refuse each id by name, find none, and "
    "give no rows for none.",
)
def test_copies_of_no_rows(kvstore: Any) -> None:
    store = store_of(kvstore)
    store.set_rows("t", random_rows(store, [1, 5], 4))
    for name, width in (("row", store.layout("t").row_bytes), ("weight", 6), ("metadata", 1)):
        view = kvstore.KVTensor(store, ids_of([]), name)
        copies = {"clone": view.clone(), "pickled": pickle.loads(pickle.dumps(view.clone()))}
        for way, copy in copies.items():
            for ids in ([1], [5, 7], [-(2**63)]):
                with raises(MissingKeyError, mentions=(f"got: {ids}", "where: t"), where=f"{name}, {way}, {ids}"):
                    copy.get_weights_by_ids(ids_of(ids))
                assert_equal(copy.source.contains("t", ids_of(ids)).any().item(), False, where=f"{way} of {ids}")
            assert_equal(tuple(copy.get_weights_by_ids(ids_of([])).shape), (0, width), where=f"{name}, {way}")
            assert_equal((copy.source.size("t"), copy.source.ids("t").tolist()), (0, []), where=f"{name}, {way}")


@requirement(
    "KV-452",
    "A copy in memory of a view MUST name its ids once each, ascending, all or those of a range with both its ends, in "
    "whatever order and however often the view has them.",
)
@pytest.mark.parametrize("way", ["clone", "pickled"])
def test_ids_of_copies(kvstore: Any, way: str) -> None:
    store = store_of(kvstore)
    store.set_rows("t", random_rows(store, [-3, 1, 5, 9], 4))
    view = kvstore.KVTensor(store, ids_of([5, -3, 9, 5, 1]), "weight")
    copy = view.clone() if way == "clone" else pickle.loads(pickle.dumps(view.clone()))
    store.clear("t")
    assert_equal(copy.source.ids("t").tolist(), [-3, 1, 5, 9], where=f"{way}: all ids")
    assert_equal(copy.source.size("t"), 4, where=f"{way}: rows")
    for begin, last, expected in ((-3, 5, [-3, 1, 5]), (-2, 8, [1, 5]), (9, 9, [9]), (6, 8, [])):
        assert_equal(copy.source.ids("t", begin, last).tolist(), expected, where=f"{way}: ids from {begin} to {last}")


class _Silent(LazyRows):
    """Rows of a caller's own kind, that does not say how they are read."""


@requirement(
    "KV-410",
    "Rows of a kind that does not say how they are read MUST raise NotImplementedError wherever they are read, and "
    "give no values.",
)
def test_rows_that_nobody_reads() -> None:
    rows = _Silent._make((3, 2), torch.float32, 2)
    reads: dict[str, Callable[[], Any]] = {
        "full_tensor": rows.full_tensor,
        "narrow": lambda: rows.narrow(0, 1, 2),
        "chunks": lambda: list(rows.chunks()),
        "clone": rows.clone,
        "a sum": lambda: rows + 1,
    }
    for name, read in reads.items():
        with raises(NotImplementedError, where=name):
            read()
    assert_equal((tuple(rows.shape), len(rows.global_chunks())), ((3, 2), 2), where="what is known without reading")


class _StandIn:
    """What a module asks of a store, and no more: a store of one table that somebody wraps."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.tables = store.tables
        self.steps: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("layout", "get", "step_count", "set_step_count"):
            return getattr(self._store, name)
        raise AttributeError(name)

    def apply_gradients(self, table: str, ids: Any, grads: Any, lr: float, step: Any = 1, **options: Any) -> None:
        self.steps.append(step)
        self._store.apply_gradients(table, ids, grads, lr, step, **options)


@requirement(
    "KV-400",
    "A module over an object that stands in for a store MUST train it as it does a store, telling it the number of "
    "each step, and MUST refuse a state dict by name where the object gives none.",
)
@pytest.mark.parametrize("kind", ["KVEmbedding", "KVEmbeddingBag"])
def test_stand_ins(kvstore: Any, kind: str) -> None:
    stores = [store_of(kvstore) for _ in range(2)]
    stand_in = _StandIn(stores[0])
    modules = [getattr(kvstore, kind)(store, lr=0.1) for store in (stand_in, stores[1])]
    for number in range(3):
        for module in modules:
            module(ids_of([number, 7, 7, -1]).reshape(2, 2)).square().sum().backward()
    assert_equal(stand_in.steps, [1, 2, 3], where="the steps that it was told")
    assert_contents(stores[0], contents(stores[1]), where="rows of the store behind it")
    for name, model in (("alone", modules[0]), ("in a model", torch.nn.Sequential(modules[0]))):
        with raises(UnsupportedError, mentions=("gives no state dict", "got: _StandIn", "where: "), where=name):
            model.state_dict()


@requirement(
    "KV-401",
    "A module that is loaded without strictness by whoever holds it MUST report no name as missing and keep its rows "
    "where those of the state dict lack weights or ids; with strictness it MUST report each that is missing.",
)
def test_loads_without_strictness(kvstore: Any) -> None:
    source, store = store_of(kvstore), store_of(kvstore)
    source.set_rows("t", random_rows(source, [1, 2], 4))
    store.set_rows("t", random_rows(store, [2, 7], 5))
    module, before = kvstore.KVEmbedding(store), contents(store)
    state = {f"m.{name}": value for name, value in kvstore.KVEmbedding(source).state_dict().items()}
    for gone in (("m.weight",), ("m.weight_id",), ("m.weight", "m.weight_id")):
        given = {name: value for name, value in state.items() if name not in gone}
        for strict in (False, True):
            missing: list[str] = []
            module._load_from_state_dict(given, "m.", {}, strict, missing, [], [])
            assert_equal(missing, [*gone] if strict else [], where=f"missing without {gone}, strict={strict}")
            assert_contents(store, before, where=f"without {gone}, strict={strict}")
    module._load_from_state_dict(state, "m.", {}, False, [], [], [])
    assert_contents(store, contents(source), where="a whole state dict, without strictness")


@requirement(
    "KV-412",
    "An evictor in the background that is given no policy MUST evict by the table's own, and one for a table without "
    "any MUST be refused by name.",
)
def test_evictor_of_the_tables_policy(kvstore: Any) -> None:
    clock, policies = Clock(100), {"t": kvstore.EvictionPolicy.ttl(5)}
    with kvstore.KVStore({"t": kvstore.RowLayout(6)}, eviction=policies, clock=clock) as store:
        store.set("t", ids_of([1, 2]), torch.ones(2, 6))
        clock.now = 200
        with succeeds("an evictor", where="the table's own policy"):
            evictor = kvstore.BackgroundEvictor(store, "t", trigger_rows=1)
        with evictor:
            store.set("t", ids_of([3]), torch.ones(1, 6))
            evictor.wait()
        assert_equal(store.ids("t").tolist(), [3], where="rows that are young")
    bare = kvstore.KVStore({"t": kvstore.RowLayout(6)}, clock=clock)
    with bare, raises(ConfigError, mentions=("policy",), where="no policy"):
        kvstore.BackgroundEvictor(bare, "t", trigger_rows=1)


@requirement(
    "KV-413",
    "What a state dict has without memory MUST give memory for as many rows as were saved, which the store takes; a "
    "row MUST say where its weights begin.",
)
def test_memory_for_saved_rows(kvstore: Any) -> None:
    source, store = store_of(kvstore), store_of(kvstore)
    source.set_rows("t", random_rows(source, [1, 2, 5], 4))
    state = {}
    for name, lazy in store.state_dict().items():
        saved = source.state_dict()[name].full_tensor()
        with succeeds("memory_for", where=name):
            memory = lazy.memory_for(saved.shape)
        assert_equal((memory.shape, memory.dtype, memory.device.type), (saved.shape, saved.dtype, "cpu"), where=name)
        state[name] = memory.copy_(saved)
    store.load_state_dict(state)
    assert_contents(store, contents(source), where="loaded")
    assert_equal(store.layout("t").header_bytes, 16, where="header_bytes")


@requirement(
    "KV-409",
    "Where no library was built, the component MUST be the reference's, name by name, and promise nothing beyond the "
    "contract.",
    needs=("operators",),
)
def test_without_a_library() -> None:
    from fastimpl import kvstore as built
    from fastimpl import ops

    made: dict[str, Any] = {"__name__": "kvstore_without_a_library"}
    with mock.patch.object(ops, "available", return_value=False), succeeds("an import", where="no library"):
        exec(compile(inspect.getsource(built), str(built.__file__), "exec"), made)
    assert_equal(made["CAPABILITIES"], frozenset(), where="CAPABILITIES")
    others = [name for name in built.__all__ if made[name] is not getattr(reference, name)]
    assert_equal(others, [], where="names that are not the reference's")


@requirement(
    "KV-476",
    "A state dict MUST take for a state what is a view of no state, as of weights, or one that was pickled when views "
    "did not keep the layout of their rows, where width and dtype are right: nobody knows whose it is.",
)
def test_states_of_nobody_knows_whom(kvstore: Any) -> None:
    keys, other = [1, 5, 9], store_of(kvstore, kvstore.RowLayout(6, optimizer="lamb"))
    other.set_rows("t", random_rows(other, keys, 5))
    views = {name: kvstore.KVTensor(other, ids_of(keys), name) for name in ("weight", "momentum1")}
    given = {"a view of weights": views["weight"], "an old one": _of_another_time(views["momentum1"]).attach(other)}
    given["an old one"] = _of_another_time(views["momentum1"])
    given["an old one"]._source = other
    source, store = store_of(kvstore), store_of(kvstore)
    source.set_rows("t", random_rows(source, keys, 4))
    for where, view in given.items():
        with succeeds("a load", where=where):
            store.load_state_dict(dict(source.state_dict()) | {"t.momentum1": view}, clear=True)
        found = kvstore.KVTensor(store, ids_of(keys), "momentum1").full_tensor()
        assert_bits(found, view.full_tensor(), where=where)
