"""Refusals and removals: misuse raises and changes nothing, inputs stay the caller's, flags mean what they say."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import given

from conformance.harness import assert_equal, examples, raises, requirement, succeeds
from conformance.kvstore import strategies
from conformance.kvstore.cases import (
    assert_bits,
    assert_contents,
    contents,
    ids_of,
    random_rows,
    save,
    store_of,
    weights_of,
)
from twinproof.errors import ConfigError, ShapeError, StoreClosedError, TwinproofError, UnsupportedError


@requirement("KV-022", "No input MUST ever be changed or kept: not ids, weights, rows, states or gradients.")
def test_inputs_stay(kvstore: Any) -> None:
    store = store_of(kvstore)
    rows = random_rows(store, [1, 2], 1)
    rows[:, 15] &= 0x7F
    inputs = {
        "ids": ids_of([1, 2]),
        "weights": weights_of(store, 2, 1),
        "rows": rows,
        "state": weights_of(store, 2, 2),
        "scores": torch.tensor([-1.0, 2.0]),
    }
    copies = {name: value.clone() for name, value in inputs.items()}
    view = kvstore.KVTensor(store, ids_of([1, 2]))
    acts: list[Callable[[], Any]] = [
        lambda: store.set("t", inputs["ids"], inputs["weights"]),
        lambda: store.set_rows("t", inputs["rows"]),
        lambda: store.set_state("t", "momentum1", inputs["ids"], inputs["state"]),
        lambda: store.set_scores("t", inputs["ids"], inputs["scores"]),
        lambda: store.apply_gradients("t", inputs["ids"], inputs["weights"], 0.1),
        lambda: view.set_range(0, 0, 2, inputs["rows"]),
        lambda: store.load_state_dict({"t.weight": inputs["rows"], "t.weight_id": inputs["ids"]}),
        lambda: store.get("t", inputs["ids"]),
        lambda: store.delete("t", inputs["ids"]),
    ]
    for act in acts:
        act()
        for name, value in inputs.items():
            assert_bits(value, copies[name], where=name)
    store.set_rows("t", inputs["rows"])
    held = contents(store)
    inputs["rows"].zero_()
    inputs["weights"].zero_()
    assert_contents(store, held, where="after the caller changed its own tensors")


def misuses(store: Any) -> dict[str, Any]:
    """Calls that must be refused, by name."""
    ids, weights = ids_of([1, 5]), torch.zeros(2, 6)
    row_bytes = store.layout("t").row_bytes
    return {
        "narrow weights": lambda: store.set("t", ids, torch.zeros(2, 5)),
        "wide weights": lambda: store.set("t", ids, torch.zeros(2, 7)),
        "few weights": lambda: store.set("t", ids, torch.zeros(1, 6)),
        "flat weights": lambda: store.set("t", ids, torch.zeros(12)),
        "weights of another dtype": lambda: store.set("t", ids, weights.double()),
        "half weights": lambda: store.set("t", ids, weights.half()),
        "strided weights": lambda: store.set("t", ids, torch.zeros(6, 2).t()),
        "strided ids": lambda: store.set("t", ids_of([1, 2, 5, 6])[::2], weights),
        "meta weights": lambda: store.set("t", ids, weights.to("meta")),
        "float ids": lambda: store.set("t", ids.double(), weights),
        "bool ids": lambda: store.set("t", ids.bool(), weights),
        "ids in a column": lambda: store.set("t", ids.reshape(2, 1), weights),
        "a list of ids": lambda: store.set("t", [1, 5], weights),
        "no such table": lambda: store.set("u", ids, weights),
        "a count too large": lambda: store.set("t", ids, weights, count=3),
        "a negative count": lambda: store.set("t", ids, weights, count=-1),
        "short rows": lambda: store.set_rows("t", torch.zeros(2, row_bytes - 1, dtype=torch.uint8)),
        "int8 rows": lambda: store.set_rows("t", torch.zeros(2, row_bytes, dtype=torch.int8)),
        "no such state": lambda: store.set_state("t", "momentum3", ids, weights),
        "narrow state": lambda: store.set_state("t", "momentum1", ids, torch.zeros(2, 1)),
        "half state": lambda: store.set_state("t", "momentum1", ids, weights.half()),
        "narrow gradients": lambda: store.apply_gradients("t", ids, torch.zeros(2, 5), 0.1),
        "gradients without end": lambda: store.apply_gradients("t", ids, weights, float("nan")),
        "step zero": lambda: store.apply_gradients("t", ids, weights, 0.1, 0),
        "scores too few": lambda: store.set_scores("t", ids, torch.zeros(1)),
        "integer scores": lambda: store.set_scores("t", ids, ids),
        "out of another width": lambda: store.get("t", ids, out=torch.zeros(2, 5)),
        "rows into floats": lambda: store.get_rows("t", ids, out=torch.zeros(2, 5)),
        "deleting by floats": lambda: store.delete("t", ids.double()),
    }


@requirement(
    "KV-023",
    "A wrong width, dtype, device, stride, rank, length, table or option MUST raise and leave the store as it was.",
)
def test_misuse(kvstore: Any) -> None:
    store = store_of(kvstore)
    store.set_rows("t", random_rows(store, [1, 2, 3], 4))
    before = contents(store)
    for name, call in misuses(store).items():
        with raises((ConfigError, ShapeError, UnsupportedError), where=name):
            call()
        assert_contents(store, before, where=name)


@requirement("KV-024", "Rows or values wider than the row MUST be refused on every way in.")
def test_too_wide(kvstore: Any) -> None:
    store = store_of(kvstore)
    row_bytes = store.layout("t").row_bytes
    wide = torch.zeros(1, row_bytes + 4, dtype=torch.uint8)
    before = contents(store)
    views = {name: kvstore.KVTensor(store, ids_of([0]), name) for name in ("row", "weight", "momentum1", "momentum2")}
    with raises(TwinproofError, where="set_rows"):
        store.set_rows("t", wide)
    for name, view in views.items():
        values = torch.zeros(1, view.shape[1] + 1, dtype=view.dtype)
        with raises(TwinproofError, where=f"set_range of {name}"):
            view.set_range(0, 0, 1, values)
        with raises(TwinproofError, where=f"set_weights_and_ids of {name}"):
            view.set_weights_and_ids(values, ids_of([0]))
    with raises(TwinproofError, where="load_state_dict"):
        store.load_state_dict({"t.weight": wide, "t.weight_id": ids_of([0])})
    assert_contents(store, before, where="after refusals")


@requirement("KV-081", "Deleting MUST remove exactly the rows named, count them once, and pass over the others.")
@examples(40)
@given(strategies.close_batches, strategies.close_batches)
def test_delete(kvstore: Any, kept: list[int], gone: list[int]) -> None:
    store = store_of(kvstore)
    keys = list(dict.fromkeys([*kept, *gone[::2]]))
    store.set_rows("t", random_rows(store, keys, 1))
    before = contents(store)
    assert_equal(store.delete("t", ids_of(gone)), len(set(gone) & set(keys)), where="deleted")
    rest = {key: row for key, row in before["t"].items() if key not in gone}
    assert_contents(store, {"t": rest}, where="after delete")
    assert_equal(store.contains("t", ids_of(keys)).tolist(), [k not in gone for k in keys], where="contains")


@requirement("KV-082", "After close every verb MUST raise StoreClosedError; closing again MUST be harmless.")
def test_close(kvstore: Any) -> None:
    store = store_of(kvstore)
    ids = ids_of([1])
    store.set("t", ids, torch.zeros(1, 6))
    rows, policy, state = store.get_rows("t", ids), kvstore.EvictionPolicy.count(2), store_of(kvstore).state_dict()
    begun, view = store.start_eviction("t", policy=policy), kvstore.KVTensor(store, ids, "weight")
    module = kvstore.KVEmbedding(store)
    with store:
        pass
    store.close()
    calls: dict[str, Callable[[], Any]] = {
        "get": lambda: store.get("t", ids),
        "set": lambda: store.set("t", ids, torch.zeros(1, 6)),
        "ids": lambda: store.ids("t"),
        "size": lambda: store.size("t"),
        "delete": lambda: store.delete("t", ids),
        "snapshot": lambda: store.snapshot(),
        "stats": lambda: store.stats(),
        "set_rows": lambda: store.set_rows("t", rows),
        "set_state": lambda: store.set_state("t", "momentum1", ids, torch.zeros(1, 6)),
        "set_scores": lambda: store.set_scores("t", ids, torch.zeros(1)),
        "set_metadata": lambda: store.set_metadata("t", ids, torch.zeros(1, 1, dtype=torch.int64)),
        "apply_gradients": lambda: store.apply_gradients("t", ids, torch.zeros(1, 6), 0.1),
        "clear": lambda: store.clear("t"),
        "reserve": lambda: store.reserve("t", 4),
        "prefetch": lambda: store.prefetch("t", ids),
        "get of nothing": lambda: store.get("t", ids[:0]),
        "get_rows": lambda: store.get_rows("t", ids),
        "get_state": lambda: store.get_state("t", "momentum1", ids),
        "metadata": lambda: store.metadata("t", ids),
        "get_scores": lambda: store.get_scores("t", ids),
        "contains": lambda: store.contains("t", ids),
        "mark": lambda: store.mark(),
        "evict": lambda: store.evict("t", policy=policy),
        "a round": lambda: begun.step(),
        "state_dict": lambda: store.state_dict(),
        "views of the store": lambda: store.state_dict(snapshot=False),
        "load_state_dict": lambda: store.load_state_dict(state),
        "a view": lambda: view.full_tensor(),
        "a module": lambda: module(ids),
    }
    for name, call in calls.items():
        with raises(StoreClosedError, where=name):
            call()


@requirement(
    "KV-083",
    "return_whole_row MUST need optimizer_in_row, be off by default and switchable; without optimizer_in_row a row "
    "MUST hold header and weight only, and its states MUST be refused.",
)
def test_flags(kvstore: Any) -> None:
    layout = kvstore.RowLayout(6, optimizer="adam")
    with raises(ConfigError, mentions=["optimizer"]):
        kvstore.KVStore({"t": layout}, return_whole_row=True)
    plain = kvstore.KVStore({"t": layout})
    assert_equal((plain.options.optimizer_in_row, plain.return_whole_row), (False, False), where="defaults")
    with raises(ConfigError, mentions=["optimizer"]):
        plain.set_return_whole_row(True)
    assert_equal(plain.get_rows("t", ids_of([1])).shape[1], 16 + 8 * 4, where="row without state")
    with raises(ConfigError, where="get_state"):
        plain.get_state("t", "momentum1", ids_of([1]))
    with raises(ConfigError, where="apply_gradients"):
        plain.apply_gradients("t", ids_of([1]), torch.zeros(1, 6), 0.1)
    store = store_of(kvstore)
    for flag, width in ((True, store.layout("t").row_bytes), (False, 6)):
        store.set_return_whole_row(flag)
        assert_equal(store.state_dict()["t.weight"].shape[1], width, where=f"return_whole_row={flag}")


@requirement(
    "KV-372",
    "Whether whole rows are returned MUST be as the store was told, at its construction or later, for rows of any "
    "optimizer and of none, and MUST decide the form of its state dict.",
)
def test_whole_rows_as_told(kvstore: Any) -> None:
    for optimizer, first in itertools.product(("none", "sgd", "adam", "rowwise_adagrad"), (True, False)):
        layout = kvstore.RowLayout(6, optimizer=optimizer)
        store = store_of(kvstore, layout, return_whole_row=first)
        for number, told in enumerate((first, not first, first)):
            if number:
                store.set_return_whole_row(told)
            where = f"{optimizer}, made with {first}, told {told}"
            assert_equal(store.return_whole_row, told, where=where)
            weight = store.state_dict()["t.weight"]
            expected = (torch.uint8, layout.row_bytes) if told else (torch.float32, 6)
            assert_equal((weight.dtype, weight.shape[1]), expected, where=where)


@requirement(
    "KV-129",
    "Options MUST be taken by name alone: a call that gives one by position is refused and changes nothing.",
)
def test_options_by_position(kvstore: Any, tmp_path: Path) -> None:
    layouts, ids = {"t": kvstore.RowLayout(6)}, ids_of([1, 2])
    store = store_of(kvstore)
    store.set_rows("t", random_rows(store, [1, 2, 3], 4))
    before, policy = contents(store), kvstore.EvictionPolicy.count(100)
    calls: dict[str, Callable[[], Any]] = {
        "KVStore": lambda: kvstore.KVStore(layouts, 4),
        "KVStore with two": lambda: kvstore.KVStore(layouts, True, False),
        "get": lambda: store.get("t", ids, torch.zeros(2, 6)),
        "get_rows": lambda: store.get_rows("t", ids, 16),
        "set": lambda: store.set("t", ids, torch.zeros(2, 6), 1),
        "start_eviction": lambda: store.start_eviction("t", policy),
        "evict": lambda: store.evict("t", policy),
        "state_dict": lambda: store.state_dict(kvstore.Buckets(2)),
        "load_state_dict": lambda: store.load_state_dict({}, True),
        "BackgroundEvictor": lambda: kvstore.BackgroundEvictor(store, "t", 1),
        "KVTensor": lambda: kvstore.KVTensor(store, ids, "row", False, "t"),
        "save": lambda: kvstore.save(store, tmp_path / "ck", kvstore.Buckets(2)),
        "load": lambda: kvstore.load(store, tmp_path / "ck", True),
    }
    for name, call in calls.items():
        with raises(TypeError, where=name):
            call()
        assert_contents(store, before, where=name)
    assert_equal(list(tmp_path.iterdir()), [], where="nothing is saved")


@requirement(
    "KV-296",
    "A call that is refused, and one that only makes room or reads, MUST leave the mark where it was.",
)
def test_marks_that_stay(kvstore: Any, tmp_path: Path) -> None:
    def tracked() -> Any:
        return store_of(kvstore, capacity=8, track_changes=True)

    source, keys = tracked(), list(range(20))
    source.set_rows("t", random_rows(source, range(6), 1))
    save(kvstore, source, tmp_path / "full")
    store = tracked()
    kvstore.load(store, tmp_path / "full")
    wide = store_of(kvstore)
    wide.set_rows("t", random_rows(wide, keys, 4))
    save(kvstore, wide, tmp_path / "wide")
    too_many: dict[str, Callable[[], Any]] = {
        "set": lambda: store.set("t", ids_of(keys), weights_of(store, 20, 2)),
        "set_rows": lambda: store.set_rows("t", random_rows(store, keys, 3)),
        "set_state": lambda: store.set_state("t", "momentum1", ids_of(keys), torch.ones(20, 6)),
        "apply_gradients": lambda: store.apply_gradients("t", ids_of(keys), torch.ones(20, 6), 0.5),
        "load_state_dict": lambda: store.load_state_dict(wide.state_dict()),
        "load": lambda: kvstore.load(store, tmp_path / "wide"),
        "a wrong dtype": lambda: store.set("t", ids_of([1]), torch.ones(1, 6, dtype=torch.float16)),
        "a wrong table": lambda: store.delete("u", ids_of([1])),
    }
    reads: dict[str, Callable[[], Any]] = {
        "reserve": lambda: store.reserve("t", 100),
        "prefetch": lambda: store.prefetch("t", ids_of(keys)),
        "get": lambda: store.get("t", ids_of(keys)),
        "a snapshot": lambda: store.snapshot().close(),
        "a state dict": lambda: store.state_dict(),
        "a save": lambda: save(kvstore, store, tmp_path / "again"),
        "a round that is begun": lambda: store.start_eviction("t", policy=kvstore.EvictionPolicy.count(9)),
    }
    mark = store.mark()
    for name, act in too_many.items():
        with raises(TwinproofError, where=name):
            act()
        assert_equal(store.mark(), mark, where=f"mark after {name}, which was refused")
    for name, act in reads.items():
        act()
        assert_equal(store.mark(), mark, where=f"mark after {name}")
    store.delete("t", ids_of([2]))
    assert_equal(store.mark() > mark, True, where="mark after a change")


def _refused(kvstore: Any, store: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """Calls that look at a store, or at its present rows, and are refused on the way, by name."""
    few, ids = kvstore.Buckets(2, "chunk", 10), ids_of([1, 500])
    module, view = kvstore.KVEmbedding(store, buckets=few), kvstore.KVTensor(store, ids, "weight")
    wide = store_of(kvstore, kvstore.RowLayout(8, optimizer="adam"))
    wide.set("t", ids, weights_of(wide, 2, 1))
    save(kvstore, wide, folder / "wide")
    mine = {f"t.{name}": kvstore.KVTensor(store, ids, name) for name in ("weight", "momentum1")}
    calls: dict[str, Callable[[], Any]] = {
        "the state dict of a module": module.state_dict,
        "a save of ids outside": lambda: save(kvstore, store, folder / "no", buckets=few),
        "a save in no form": lambda: save(kvstore, store, folder / "no", form="columns"),
        "a save of no changes": lambda: save(kvstore, store, folder / "no", since=0),
        "a save over another": lambda: save(kvstore, store, folder / "wide", overwrite="never"),
        "a load of wide rows": lambda: kvstore.load(store, folder / "wide"),
        "a load of nothing": lambda: kvstore.load(store, folder / "nothing"),
        "wide rows": lambda: store.load_state_dict(wide.state_dict(), clear=True),
        "its own rows, a state short": lambda: store.load_state_dict(mine | {"t.weight_id": ids}),
        "its own rows, an id twice": lambda: store.load_state_dict(mine | {"t.weight_id": ids_of([1, 1])}),
        "a part behind the end": lambda: view.narrow(0, 1, 2),
        "a view of no such thing": lambda: kvstore.KVTensor(store, ids, "momentum3"),
        "an eviction by what it has not": lambda: store.evict("u", policy=kvstore.EvictionPolicy.count(2)),
    }
    wrong: dict[str, dict[str, Any]] = {
        "ids outside": {"buckets": few},
        "no buckets": {"buckets": 2},
        "no such table": {"tables": ("u",)},
        "chunks of nothing": {"chunk_rows": 0},
        "no group": {"process_group": "world"},
    }
    for name, options in wrong.items():
        for snapshot in (False, True):
            called = partial(store.state_dict, snapshot=snapshot, **options)
            calls[f"a state dict with {name}, snapshot={snapshot}"] = called
    return calls


@requirement(
    "KV-416",
    "A call that is refused MUST leave open what the caller has open, and hold nothing of its own: the store, its "
    "moments and views of either are read and written behind it as before, and no moment is left.",
)
def test_open_after_refusals(kvstore: Any, tmp_path: Path) -> None:
    store, ids = store_of(kvstore), ids_of([1, 500])
    store.set_rows("t", random_rows(store, [1, 500], 4))
    moment, before = store.snapshot(), contents(store)
    views = [kvstore.KVTensor(source, ids, "row") for source in (store, moment)]
    rows = views[0].full_tensor()
    for name, call in _refused(kvstore, store, tmp_path).items():
        with raises((TwinproofError, FileNotFoundError), where=name):
            call()
        with succeeds("what was open", where=f"after {name}"):
            for source in (store, moment):
                assert_contents(source, before, where=f"{type(source).__name__} after {name}")
            for view in views:
                assert_bits(view.full_tensor(), rows, where=f"a view after {name}")
            store.set_rows("t", rows)
            store.state_dict(snapshot=False)["t.weight"].full_tensor()
            assert_equal(store.stats().snapshot_count, 1, where=f"moments after {name}")
