"""What is no store, no tensor, no number or no name of the right kind is refused by name, by whichever call."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, assert_flags_are_no_text, raises, requirement, succeeds
from conformance.kvstore.cases import assert_contents, contents, ids_of, random_rows, save, store_of
from twinproof.errors import ConfigError, MissingKeyError, ShapeError, TwinproofError, UnsupportedError

Call = Callable[[Any], Any]


@requirement("KV-230", "save, load and the modules MUST refuse what is no store with what it was and what they take.")
@pytest.mark.parametrize("verb", ["save", "load", "KVEmbedding", "KVEmbeddingBag"])
@pytest.mark.parametrize("store", ["name", {"t": 4}])
def test_stores(kvstore: Any, tmp_path: Path, verb: str, store: Any) -> None:
    arguments = (store, tmp_path / "ck") if verb in ("save", "load") else (store,)
    with raises(ConfigError, mentions=("where: store", type(store).__name__, "a KVStore"), where=verb):
        getattr(kvstore, verb)(*arguments)


def _stored(kvstore: Any) -> Any:
    store = store_of(kvstore, track_changes=True)
    store.set_rows("t", random_rows(store, [1, 2, 3], 4))
    return store


def _of_tensors(kvstore: Any, store: Any) -> Iterator[tuple[str, str, torch.Tensor, Call]]:
    """Calls that are given a tensor: the verb, the argument, what is right, and the call."""
    ids, values, words = ids_of([1, 5]), torch.zeros(2, 6), torch.zeros(2, 1, dtype=torch.int64)
    rows, scores, flat = torch.zeros(2, store.layout("t").row_bytes, dtype=torch.uint8), torch.zeros(2), ids_of([0, 1])
    view, bag = kvstore.KVTensor(store, ids, "weight"), kvstore.KVEmbeddingBag(store)
    wrapper = kvstore.KVTensorWrapper([2, 6], torch.float32, 0, sorted_indices=ids)
    wrapper.set_dram_db_wrapper(store)
    whole = {"t.weight": values, "t.weight_id": ids, "t.momentum1": values, "t.momentum2": values}
    by_ids: dict[str, Call] = {
        "set": lambda it: store.set("t", it, values),
        "set_state": lambda it: store.set_state("t", "momentum1", it, values),
        "set_scores": lambda it: store.set_scores("t", it, scores),
        "set_metadata": lambda it: store.set_metadata("t", it, words),
        "apply_gradients": lambda it: store.apply_gradients("t", it, values, 0.1),
        "place": lambda it: store.place("t", it, values, 16),
        "delete": lambda it: store.delete("t", it),
        "prefetch": lambda it: store.prefetch("t", it),
        "get": lambda it: store.get("t", it),
        "get_rows": lambda it: store.get_rows("t", it),
        "get_state": lambda it: store.get_state("t", "momentum1", it),
        "metadata": lambda it: store.metadata("t", it),
        "get_scores": lambda it: store.get_scores("t", it),
        "contains": lambda it: store.contains("t", it),
        "KVTensor": lambda it: kvstore.KVTensor(store, it),
        "set_weights_and_ids": lambda it: view.set_weights_and_ids(values, it),
        "get_weights_by_ids": lambda it: view.get_weights_by_ids(it),
        "set_weights_and_ids of a wrapper": lambda it: wrapper.set_weights_and_ids(values, it),
        "get_weights_by_ids of a wrapper": lambda it: wrapper.get_weights_by_ids(it),
        "sort_ids_by_bucket": kvstore.sort_ids_by_bucket,
        "bucket_of": lambda it: kvstore.bucket_of(it, kvstore.Buckets(2)),
    }
    yield from ((verb, "ids", ids, call) for verb, call in by_ids.items())
    yield "KVEmbedding", "input", ids, kvstore.KVEmbedding(store)
    yield "KVEmbeddingBag", "input", ids, lambda it: bag(it, flat)
    yield "KVEmbeddingBag", "offsets", flat, lambda it: bag(ids, it)
    yield (
        "KVTensorWrapper",
        "sorted_indices",
        ids,
        lambda it: kvstore.KVTensorWrapper([2, 6], torch.float32, 0, sorted_indices=it),
    )
    yield "set", "weights", values, lambda it: store.set("t", ids, it)
    yield "set_rows", "rows", rows, lambda it: store.set_rows("t", it)
    yield "set_state", "values", values, lambda it: store.set_state("t", "momentum1", ids, it)
    yield "set_scores", "scores", scores, lambda it: store.set_scores("t", ids, it)
    yield "set_metadata", "words", words, lambda it: store.set_metadata("t", ids, it)
    yield "apply_gradients", "grads", values, lambda it: store.apply_gradients("t", ids, it, 0.1)
    yield "get", "out", values, lambda it: store.get("t", ids, out=it)
    yield "get_rows", "out", rows, lambda it: store.get_rows("t", ids, out=it)
    yield "set_range", "values", values, lambda it: view.set_range(0, 0, 2, it)
    yield "set_range of a wrapper", "weights", values, lambda it: wrapper.set_range(0, 0, 2, it)
    for name in whole:
        yield "load_state_dict", name, whole[name], partial(_loaded_with, store, whole, name)
    for name, right in (("t.metadata", words), ("t.step", ids_of([3]))):
        yield "load_state_dict", name, right, partial(_loaded_with, store, whole, name)


def _loaded_with(store: Any, state: dict[str, Any], name: str, value: Any) -> Any:
    return store.load_state_dict(state | {name: value})


# What may be left out is not given as None.
_OPTIONAL = ("out", "offsets", "sorted_indices", "t.metadata", "t.step")


@requirement(
    "KV-283",
    "Every call that is given a tensor MUST refuse what is none, a dtype that it does not take and memory that is not "
    "there with a named error that names the argument and what it was, and change nothing.",
)
def test_tensors(kvstore: Any) -> None:
    store = _stored(kvstore)
    before, mark = contents(store), store.mark()
    for verb, name, right, call in _of_tensors(kvstore, store):
        wrong: dict[str, Any] = {
            "list": right.tolist(),
            "str": "some",
            "dtype": right.to(torch.complex64),
            "meta": right.to("meta"),
        }
        if name not in _OPTIONAL:
            wrong["NoneType"] = None
        if (verb, name) in (("KVEmbeddingBag", "input"), ("bucket_of", "ids")):
            # Offsets lie where the ids do; a bucket is a number of an id wherever that is.
            del wrong["meta"]
        for kind, value in wrong.items():
            where = f"{verb}, {name} is a {kind}"
            told = kind if kind in ("list", "str", "NoneType") else {"dtype": "complex64", "meta": "meta"}[kind]
            with raises(TwinproofError, mentions=(f"where: {name}", told), where=where):
                call(value)
    whole = {"t.weight": torch.zeros(2, 6), "t.weight_id": ids_of([1, 5])}
    whole |= {"t.momentum1": whole["t.weight"], "t.momentum2": whole["t.weight"]}
    for name, width, dtype in (("t.momentum1", 6, torch.float32), ("t.metadata", 1, torch.int64)):
        for shape in ((3, width), (2, width + 1), (2,)):
            mentions = (f"where: {name}", str(shape), str((2, width)))
            with raises(TwinproofError, mentions=mentions, where=f"{name}, {shape}"):
                store.load_state_dict(whole | {name: torch.zeros(shape, dtype=dtype)})
    assert_contents(store, before, where="after refusals")
    assert_equal(store.mark(), mark, where="mark after refusals")


@requirement(
    "KV-371",
    "Values, states, rows and memory given beside ids MUST be refused by name where they have a row or a column more "
    "or less, or another number of dimensions, and neither they nor the store MUST change.",
)
def test_shapes_beside_ids(kvstore: Any) -> None:
    store = _stored(kvstore)
    before = contents(store)
    for verb, name, right, call in _of_tensors(kvstore, store):
        # Of buckets ids of other shapes are asked, too.
        if name == "ids" and verb not in ("bucket_of", "sort_ids_by_bucket"):
            told = (f"got: {tuple(right.unsqueeze(0).shape)}", "expected: [n]")
            with raises(ShapeError, mentions=told, where=f"{verb}, ids of two dimensions"):
                call(right.unsqueeze(0))
        # Ids and where bags begin are of any length; so are rows that bring their ids.
        if name in ("ids", "input", "offsets", "sorted_indices", "t.weight_id", "t.step"):
            continue
        wrong = {"a dimension more": right.unsqueeze(0), "no dimension": right.flatten()[0]}
        if verb != "set_rows":
            wrong |= {"a row more": torch.cat([right, right[:1]]), "a row less": right[:1].clone()}
        if right.dim() == 2:
            wrong |= {"a column more": right.repeat(1, 2)[:, : right.shape[1] + 1].contiguous()}
            wrong |= {"a column less": right[:, 1:].contiguous()}
        for what, value in wrong.items():
            kept = value.clone()
            with raises(ShapeError, mentions=(str(tuple(value.shape)),), where=f"{verb}, {name} with {what}"):
                call(value)
            assert_equal(torch.equal(value, kept), True, where=f"{verb}, {name} with {what}: what was given")
    assert_contents(store, before, where="after refusals")


def _of_tables(kvstore: Any, store: Any) -> dict[str, Call]:
    """Calls that are given the name of a table."""
    ids, values, policy = ids_of([1, 5]), torch.zeros(2, 6), kvstore.EvictionPolicy.count(2)
    rows = store.get_rows("t", ids)
    return {
        "set": lambda it: store.set(it, ids, values),
        "set_rows": lambda it: store.set_rows(it, rows),
        "set_state": lambda it: store.set_state(it, "momentum1", ids, values),
        "set_scores": lambda it: store.set_scores(it, ids, torch.zeros(2)),
        "set_metadata": lambda it: store.set_metadata(it, ids, torch.zeros(2, 1, dtype=torch.int64)),
        "apply_gradients": lambda it: store.apply_gradients(it, ids, values, 0.1),
        "set_step_count": lambda it: store.set_step_count(it, 1),
        "place": lambda it: store.place(it, ids, values, 16),
        "delete": lambda it: store.delete(it, ids),
        "clear": lambda it: store.clear(it),
        "reserve": lambda it: store.reserve(it, 4),
        "prefetch": lambda it: store.prefetch(it, ids),
        "get": lambda it: store.get(it, ids),
        "get_rows": lambda it: store.get_rows(it, ids),
        "get_state": lambda it: store.get_state(it, "momentum1", ids),
        "metadata": lambda it: store.metadata(it, ids),
        "get_scores": lambda it: store.get_scores(it, ids),
        "contains": lambda it: store.contains(it, ids),
        "ids": lambda it: store.ids(it),
        "size": lambda it: store.size(it),
        "layout": lambda it: store.layout(it),
        "slot": lambda it: store.slot(it, "momentum1"),
        "step_count": lambda it: store.step_count(it),
        "changes": lambda it: store.changes(it, 0),
        "start_eviction": lambda it: store.start_eviction(it, policy=policy),
        "BackgroundEvictor": lambda it: kvstore.BackgroundEvictor(store, it, trigger_rows=1, policy=policy),
        "KVTensor": lambda it: kvstore.KVTensor(store, ids, table=it),
        "KVEmbedding": lambda it: kvstore.KVEmbedding(store, table=it),
        "state_dict": lambda it: store.state_dict(tables=(it,)),
    }


def _of_numbers(kvstore: Any, store: Any, folder: Path) -> Iterator[tuple[str, str, list[Any], Call]]:
    """Calls that are given a number or a name: the verb, the option, wrong values, and the call."""
    ids, values, counts = ids_of([1, 5]), torch.zeros(2, 6), [0, -1, 1.5, True, "4"]
    policy, few, wrapper = kvstore.EvictionPolicy.count(2), [-1, 3, 1.5, True, "1"], kvstore.KVTensorWrapper
    yield "save", "form", ["columns", 3], lambda it: save(kvstore, store, folder / "x", form=it)
    yield "save", "chunk_rows", counts, lambda it: save(kvstore, store, folder / "x", chunk_rows=it)
    yield "save", "since", [-1, 1.5, True, 10**9], lambda it: save(kvstore, store, folder / "x", since=it)
    yield "load", "chunk_rows", counts, lambda it: kvstore.load(store, folder / "ck", chunk_rows=it)
    yield (
        "load",
        "owned",
        [(1, 0), (0, 9), (-1, 1), (0,), "01", 1],
        lambda it: kvstore.load(store, folder / "ck", owned=it),
    )
    yield (
        "start_eviction",
        "slice_rows",
        counts,
        lambda it: store.start_eviction("t", policy=policy, slice_rows=it),
    )
    for name in ("trigger_rows", "trigger_bytes", "trigger_steps"):
        yield "BackgroundEvictor", name, counts, partial(_evictor_with, kvstore, store, policy, name)
    yield "reserve", "row_count", [-1, 1.5, True, "4"], lambda it: store.reserve("t", it)
    yield "set", "count", few, lambda it: store.set("t", ids, values, count=it)
    yield "get", "count", few, lambda it: store.get("t", ids, count=it)
    yield "ids", "begin", [1.5, "4", 2**63, True], lambda it: store.ids("t", it)
    yield "ids", "last", [1.5, "4", -(2**63) - 1, True], lambda it: store.ids("t", 0, it)
    yield "changes", "since", [-1, 1.5, True, 10**9], lambda it: store.changes("t", it)
    for verb, call in _of_tables(kvstore, store).items():
        yield verb, "table", ["u", 3], call
    of_tables: dict[str, Call] = {
        "load": lambda it: kvstore.load(store, folder / "ck", tables=it),
        "state_dict": lambda it: store.state_dict(tables=it),
        "load_state_dict": lambda it: store.load_state_dict({}, tables=it),
    }
    for verb, call in of_tables.items():
        yield verb, "tables", ["t", 3], call
    yield "save", "buckets", [2, "2"], lambda it: save(kvstore, store, folder / "x", buckets=it)
    yield "load", "path", [None, 3, b"ck"], lambda it: kvstore.load(store, it)
    yield "SavedRows", "path", [None, 3, b"ck"], kvstore.SavedRows
    yield "KVTensor", "chunk_rows", counts, lambda it: kvstore.KVTensor(store, ids, chunk_rows=it)
    yield "state_dict", "chunk_rows", counts, lambda it: store.state_dict(chunk_rows=it)
    yield "KVTensor", "view", ["momentum3", 3], lambda it: kvstore.KVTensor(store, ids, it)
    yield "KVEmbeddingBag", "mode", ["max", 3], lambda it: kvstore.KVEmbeddingBag(store, mode=it)
    yield (
        "KVTensorWrapper",
        "shape",
        [[3], [1, -1], [1, 2, 3], [1.5, 2], ["1", 2], 3, "ab"],
        lambda it: wrapper(it, torch.float32, 0),
    )
    yield "KVTensorWrapper", "dtype", ["float32", 3], lambda it: wrapper([1, 2], it, 0)
    yield "KVTensorWrapper", "row_offset", [1.5, "4", 2**63], lambda it: wrapper([1, 2], torch.float32, it)
    yield (
        "KVTensorWrapper",
        "width_offset",
        [-1, 1.5, True],
        lambda it: wrapper([1, 2], torch.float32, 0, width_offset=it),
    )
    layout = kvstore.RowLayout(4)
    for name in ("initializer", "eviction", "capacity", "cache_rows"):
        yield "KVStore", name, [{"u": None}, {"t": None, "u": None}], partial(_store_with, kvstore, layout, name)
    yield "sort_ids_by_bucket", "bucket_start", [-1, 3, 1.5], lambda it: kvstore.sort_ids_by_bucket(ids, it, 2, 2)
    yield "sort_ids_by_bucket", "bucket_end", [-1, 3, 1.5], lambda it: kvstore.sort_ids_by_bucket(ids, 0, it, 2)
    yield "rank_buckets", "total_count", [1.5, True], lambda it: kvstore.rank_buckets(it, 2, 0)
    yield "rank_buckets", "world_size", [2.5, True], lambda it: kvstore.rank_buckets(4, it, 0)
    yield "rank_buckets", "rank", [0.5, True], lambda it: kvstore.rank_buckets(4, 2, it)


def _store_with(kvstore: Any, layout: Any, name: str, value: Any) -> Any:
    return kvstore.KVStore({"t": layout}, **{name: value})


def _evictor_with(kvstore: Any, store: Any, policy: Any, name: str, value: Any) -> Any:
    return kvstore.BackgroundEvictor(store, "t", policy=policy, **{name: value})


@requirement(
    "KV-284",
    "Every call MUST refuse a number or a name that an option cannot have, of another type or outside its range, with "
    "a named error that names the option and the value and says what it takes, and change nothing.",
)
def test_numbers(kvstore: Any, tmp_path: Path) -> None:
    store = _stored(kvstore)
    save(kvstore, store, tmp_path / "ck", buckets=kvstore.Buckets(2))
    before, mark = contents(store), store.mark()
    for verb, name, wrong, call in _of_numbers(kvstore, store, tmp_path):
        for value in wrong:
            where = f"{verb}, {name} is {value!r}"
            told = sorted(value) if isinstance(value, dict) else value
            told = type(value).__name__ if name == "buckets" else repr(value) if name == "path" else told
            mentions = (f"where: {name}", "expected: ", f"got: {told}")
            with raises(TwinproofError, mentions=mentions, where=where):
                call(value)
    assert_contents(store, before, where="after refusals")
    assert_equal(store.mark(), mark, where="mark after refusals")
    assert_equal((tmp_path / "x").exists(), False, where="a save that was refused")
    for layouts in ({"": kvstore.RowLayout(4)}, {"t": 4}, {3: kvstore.RowLayout(4)}):
        told = f"got: {next(iter(layouts.items()))}"
        with raises(TwinproofError, mentions=("where: layouts", "expected: ", told), where=f"{layouts}"):
            kvstore.KVStore(layouts)
    part = kvstore.KVTensorWrapper([1, 6], torch.float32, 0, only_load_weight=True)
    row_bytes = store.layout("t").row_bytes
    with raises(TwinproofError, mentions=("got: (16, 40)", f"expected: (0, {row_bytes})"), where="only_load_weight"):
        part.set_dram_db_wrapper(store)


@requirement(
    "KV-328",
    "A flag of a store, of its verbs, of a load, a view or a wrapper that is text MUST be refused by its name, and "
    'change nothing: "false" is true.',
)
def test_flags(kvstore: Any, tmp_path: Path) -> None:
    kind, store = kvstore.KVStore, _stored(kvstore)
    save(kvstore, store, tmp_path / "ck")
    before, mark = contents(store), store.mark()
    state = store.state_dict()
    calls: dict[str, tuple[Call, Call]] = {
        "KVStore": (kind, partial(kind, {"t": kvstore.RowLayout(4)})),
        "add_listener": (kind.add_listener, partial(store.add_listener, print)),
        "load_state_dict": (kind.load_state_dict, partial(store.load_state_dict, state)),
        "set_return_whole_row": (kind.set_return_whole_row, store.set_return_whole_row),
        "state_dict": (kind.state_dict, store.state_dict),
        "load": (kvstore.load, partial(kvstore.load, store, tmp_path / "ck")),
        "KVTensor": (kvstore.KVTensor, partial(kvstore.KVTensor, store, ids_of([1]))),
        "KVTensorWrapper": (kvstore.KVTensorWrapper, partial(kvstore.KVTensorWrapper, [1, 6], torch.float32, 0)),
    }
    for name, (call, using) in calls.items():
        assert_flags_are_no_text(call, using, where=name)
    assert_contents(store, before, where="after refusals")
    assert_equal(store.mark(), mark, where="mark after refusals")


@requirement(
    "KV-329",
    "Thresholds of a policy, numbers of a step, optimizers and dtypes of a layout and lists of tables that are of "
    "another type MUST be refused by their name.",
)
def test_options(kvstore: Any) -> None:
    store, ids, values = _stored(kvstore), ids_of([1, 5]), torch.zeros(2, 6)
    before = contents(store)
    many = ["0.5", None, [0.5], torch.zeros(2)]
    calls: dict[str, tuple[Call, list[Any]]] = {
        "decay": (lambda it: kvstore.EvictionPolicy.count(2, it), many),
        "l2_threshold": (kvstore.EvictionPolicy.l2, many),
        "lr": (lambda it: store.apply_gradients("t", ids, values, it), many),
        "eps": (lambda it: store.apply_gradients("t", ids, values, 0.1, eps=it), many),
        "beta1": (lambda it: store.apply_gradients("t", ids, values, 0.1, beta1=it), many),
        "beta2": (lambda it: store.apply_gradients("t", ids, values, 0.1, beta2=it), many),
        "optimizer": (lambda it: kvstore.RowLayout(4, optimizer=it), [["adam"], {"adam": 1}, None, 4]),
        "tables": (lambda it: store.state_dict(tables=it), ["t", 3]),
        "state_dtypes": (
            lambda it: kvstore.RowLayout(4, optimizer="adam", state_dtypes=it),
            ["float16", torch.float16, ["momentum1"], True],
        ),
    }
    for name, (call, wrong) in calls.items():
        for value in wrong:
            with raises(ConfigError, mentions=(f"where: {name}", "got: "), where=f"{name}={value!r}"):
                call(value)
    assert_contents(store, before, where="after refusals")
    with succeeds("apply_gradients", where="a rate that is a tensor of one number"):
        store.apply_gradients("t", ids, values, torch.tensor(0.5))


@requirement(
    "KV-330",
    "Metadata of a user's that brings what a saved store says of itself MUST be refused, and nothing be written; other "
    "metadata MUST be kept.",
)
def test_metadata(kvstore: Any, tmp_path: Path) -> None:
    store = _stored(kvstore)
    for key in ("kvstore.version", "kvstore.content"):
        with raises(ConfigError, mentions=("where: metadata", key), where=key):
            save(kvstore, store, tmp_path / "ck", metadata={key: "1", "mine": "2"})
        assert_equal((tmp_path / "ck").exists(), False, where=key)
    save(kvstore, store, tmp_path / "ck", metadata={"mine": "2"})
    fresh = store_of(kvstore)
    kvstore.load(fresh, tmp_path / "ck")
    assert_contents(fresh, contents(store))
    found = kvstore.SavedRows(tmp_path / "ck").catalog.metadata
    assert_equal(found.get("mine"), "2", where="the user's metadata")


def _of_kinds(kvstore: Any, store: Any, folder: Path) -> Iterator[tuple[str, str, list[Any], Call]]:
    """Calls that are given an object of ours, or names: the verb, the argument, what is none, and the call."""
    ids, state, wrapper = ids_of([1, 5]), store.state_dict(), kvstore.KVTensorWrapper
    policy, view = kvstore.EvictionPolicy.count(1), pickle.loads(pickle.dumps(kvstore.KVTensor(store, ids)))
    buckets: list[Any] = [3, "interleave", (3,), {}]
    yield "save", "buckets", buckets, lambda it: save(kvstore, store, folder / "x", buckets=it)
    yield "state_dict", "buckets", buckets, lambda it: store.state_dict(buckets=it)
    yield "bucket_of", "buckets", buckets, lambda it: kvstore.bucket_of(ids, it)
    # Of one name each letter would be a name.
    names: list[Any] = ["t", "", 3]
    yield "state_dict", "tables", names, lambda it: store.state_dict(tables=it)
    yield "load", "tables", names, lambda it: kvstore.load(store, folder / "ck", tables=it)
    yield "load_state_dict", "tables", names, lambda it: store.load_state_dict(state, tables=it)
    yield "state_dict", "table", [3, ["t"], None], lambda it: store.state_dict(tables=(it,))
    others: list[Any] = ["t", 3, {"t": 1}, kvstore.RowLayout(4)]
    yield "KVTensor", "source", [*others, None], lambda it: kvstore.KVTensor(it, ids)
    yield "attach", "source", [*others, None], view.attach
    yield "KVTensorWrapper", "snapshot_handle", others, lambda it: wrapper([1, 6], torch.float32, 0, it)
    set_store = wrapper([1, 6], torch.float32, 0).set_dram_db_wrapper
    yield "set_dram_db_wrapper", "db", [*others, None, store.snapshot()], set_store
    yield (
        "BackgroundEvictor",
        "store",
        [*others, None],
        lambda it: kvstore.BackgroundEvictor(it, "t", trigger_rows=1, policy=policy),
    )
    yield "load_state_dict", "state", [3, "t", None, [state]], store.load_state_dict


@requirement(
    "KV-311",
    "What is no buckets, no source of rows, no names of tables or no state dict MUST be refused by the name of its "
    "argument, and so MUST a wrapper's snapshot of other rows than its store's; nothing is changed.",
)
def test_kinds(kvstore: Any, tmp_path: Path) -> None:
    store = _stored(kvstore)
    save(kvstore, store, tmp_path / "ck", buckets=kvstore.Buckets(2))
    before, mark = contents(store), store.mark()
    for verb, name, wrong, call in _of_kinds(kvstore, store, tmp_path):
        for value in wrong:
            mentions = (f"where: {name}", "expected: ", "got: ")
            with raises(TwinproofError, mentions=mentions, where=f"{verb}, {name} is {value!r}"):
                call(value)
    for layouts in ({"t": kvstore.RowLayout(6, torch.float16)}, {"u": store.layout("t")}):
        with store_of(kvstore, layouts).snapshot() as other:
            wrapper = kvstore.KVTensorWrapper([1, 6], torch.float32, 0, other)
            with raises(ConfigError, where=f"a snapshot of {[*layouts]}"):
                wrapper.set_dram_db_wrapper(store)
    assert_contents(store, before, where="after refusals")
    assert_equal(store.mark(), mark, where="mark after refusals")
    assert_equal((tmp_path / "x").exists(), False, where="a save that was refused")


@requirement(
    "KV-313",
    "A state dict or a save that is refused MUST give back the moment that it took, even while its error is kept.",
)
def test_moments_of_refusals(kvstore: Any, tmp_path: Path) -> None:
    store, outside = _stored(kvstore), kvstore.Buckets(1, "chunk", 2)
    calls: dict[str, Callable[[], Any]] = {
        "state_dict": lambda: store.state_dict(buckets=outside),
        "save": lambda: save(kvstore, store, tmp_path / "ck", buckets=outside),
        "a save of a future mark": lambda: save(kvstore, store, tmp_path / "ck", since=10**6),
        "a table that there is not": lambda: store.state_dict(tables=("t", "u")),
        "chunks of no rows": lambda: store.state_dict(chunk_rows=0),
    }
    for name, call in calls.items():
        with raises(ConfigError, where=name) as caught:
            call()
        assert_equal(store.stats().snapshot_count, 0, where=f"{name}: moments beside {type(caught.error).__name__}")


@requirement(
    "KV-355",
    "Names that are no text, ranges of bytes that are no whole numbers, values that are not in memory, listeners that "
    "cannot be called and a clock that tells no seconds MUST be refused by name, before anything is written.",
)
def test_what_is_none(kvstore: Any) -> None:
    told: list[Any] = [1000]
    store = store_of(kvstore, track_changes=True, clock=lambda: told[0])
    store.set_rows("t", random_rows(store, [1, 2, 3], 4))
    before, mark, ids, zeros = contents(store), store.mark(), ids_of([1, 5]), torch.zeros(2, 6)
    for verb, call in _of_tables(kvstore, store).items():
        for table in (["t"], {"t": 1}):
            with raises(ConfigError, mentions=["where: table", f"got: {table}"], where=f"{verb} of the table {table}"):
                call(table)
    of_states: dict[str, Call] = {
        "set_state": lambda it: store.set_state("t", it, ids, zeros),
        "get_state": lambda it: store.get_state("t", it, ids),
        "slot": lambda it: store.slot("t", it),
        "KVTensor": lambda it: kvstore.KVTensor(store, ids, it),
    }
    for verb, call in of_states.items():
        with raises(ConfigError, mentions=["got: ['momentum1']"], where=f"{verb} of a list"):
            call(["momentum1"])
    of_numbers: dict[str, Call] = {
        "offset_bytes": lambda it: store.get_rows("t", ids, offset_bytes=it, width_bytes=4),
        "width_bytes": lambda it: store.get_rows("t", ids, width_bytes=it),
        "begin": lambda it: store.place("t", ids, zeros, it),
    }
    for name, call in of_numbers.items():
        for value in (16.0, "16", True):
            with raises(ConfigError, mentions=[f"where: {name}", f"got: {value}"], where=f"{name} is {value!r}"):
                call(value)
    values = {"meta": zeros.to("meta"), "[n]": zeros[:, 0], "[n, w, 1]": zeros[..., None], "sparse": zeros.to_sparse()}
    with warnings.catch_warnings():
        # A kind of tensor that torch may change yet.
        warnings.simplefilter("ignore")
        # torch is asked for no strides here: it has none.
        values["sparse rows"] = zeros.to_sparse_csr()
    for what, wrong in values.items():
        with raises((ShapeError, UnsupportedError), mentions=["where: values"], where=f"place {what}"):
            store.place("t", ids, wrong, 16)
    for listener in (3, None, "print"):
        with raises(ConfigError, mentions=["where: listener", f"got: {listener}"], where=f"add_listener({listener!r})"):
            store.add_listener(listener)
    for seconds in (None, float("nan"), float("inf"), "noon"):
        told[0] = seconds
        writes: list[Call] = [lambda it: store.set("t", ids, it), lambda it: store.apply_gradients("t", ids, it, 0.1)]
        for write in writes:
            with raises(ConfigError, mentions=["where: clock", f"got: {seconds}"], where=f"a clock says {seconds}"):
                write(zeros)
    assert_contents(store, before, where="after refusals")
    assert_equal(store.mark(), mark, where="mark after refusals")
    told[0] = 7.9
    for what, right in (("strided", torch.arange(12.0).reshape(6, 2).t()), ("negative", torch._neg_view(zeros + 1))):
        store.place("t", ids, right, 16)
        assert_equal(store.get("t", ids).tolist(), right.tolist(), where=f"{what} values")
    assert_equal(int(store.metadata("t", ids)[1]) & (2**32 - 1), 7, where="a clock of fractions of seconds")


def _named(call: Callable[..., Any], *rest: Any) -> Call:
    """A call that is given a name before all else."""
    return lambda name: call(name, *rest)


def _of_sources(kvstore: Any, store: Any, folder: Path) -> Iterator[tuple[str, type[Exception], Call]]:
    """Calls that are given the name of a table or of what a row holds, of every source of rows; and their error."""
    ids = ids_of([1, 2])
    saved = {name: kvstore.SavedRows(folder / name) for name in ("ck", "delta")}
    held = kvstore.KVTensor(store, ids, table="t").clone().source
    for name, source in {"store": store, "moment": store.snapshot(), "held": held, **saved}.items():
        for verb in ("get", "get_rows", "metadata", "get_scores", "contains"):
            yield f"{verb} of {name}", ConfigError, _named(getattr(source, verb), ids)
        for verb in ("ids", "size", "layout"):
            yield f"{verb} of {name}", ConfigError, getattr(source, verb)
        yield f"get_state of {name}", ConfigError, _named(source.get_state, "momentum1", ids)
        yield f"a state of {name}", ConfigError, partial(_state_of, source, ids)
        yield f"slot of {name}", ConfigError, _named(source.slot, "momentum1")
        yield f"slot of a state of {name}", ConfigError, partial(source.slot, "t")
        yield f"a view of {name}", ConfigError, partial(kvstore.KVTensor, source, ids, table="t")
    for name, found in saved.items():
        for verb, rest in {"saved_table": 0, "deleted": 0, "file_of": 0, "rows": 2, "read_ids": 2}.items():
            yield f"{verb} of {name}", MissingKeyError, _named(getattr(found, verb), *(0, 1)[:rest])
        for verb in ("chunks", "between"):
            yield f"{verb} of {name}", MissingKeyError, _named(getattr(found, verb), 0, 1, 1)


def _state_of(source: Any, ids: torch.Tensor, state: Any) -> torch.Tensor:
    found: torch.Tensor = source.get_state("t", state, ids)
    return found


def _of_options(kvstore: Any, store: Any, folder: Path) -> Iterator[tuple[str, type[Exception], Call]]:
    """Calls that are given a name of a table among others, or that of an option; and their error."""
    state = store.state_dict()
    # Some of these look first at what they load from.
    yield "load", TwinproofError, lambda it: kvstore.load(store, folder / "ck", tables=("t", it))
    yield "load of one", TwinproofError, lambda it: kvstore.load(store, folder / "ck", tables=(it,))
    yield "load_state_dict", TwinproofError, lambda it: store.load_state_dict(state, tables=("t", it))
    yield "state_dict", ConfigError, lambda it: store.state_dict(tables=("t", it))
    yield "save", ConfigError, lambda it: save(kvstore, store, folder / "x", form=it)
    yield "a policy", ConfigError, kvstore.EvictionPolicy
    yield "an initializer", ConfigError, kvstore.Initializer
    yield "Buckets", ConfigError, partial(kvstore.Buckets, 2)
    yield "a store's device", ConfigError, lambda it: store_of(kvstore, device=it)
    yield "a store's rows", ConfigError, lambda it: store_of(kvstore, row_memory=it)


@requirement(
    "KV-378",
    "What is no name of a table, of a file's tensor, of a state or of an option, be it text, of another type or not to "
    "be hashed, MUST be refused with the error that the call promises and with what it was, whatever the source.",
)
def test_names(kvstore: Any, tmp_path: Path) -> None:
    store = _stored(kvstore)
    save(kvstore, store, tmp_path / "ck", buckets=kvstore.Buckets(2))
    save(kvstore, store, tmp_path / "delta", since=0)
    before, mark = contents(store), store.mark()
    others: list[Any] = ["u", "", b"t", 3, None, 1.5, ["t"], {"t": 1}, {"t"}, ("t",), torch.zeros(2), float("nan")]
    calls = [*_of_sources(kvstore, store, tmp_path), *_of_options(kvstore, store, tmp_path)]
    for verb, error, call in calls:
        for name in others:
            with raises(error, mentions=("got: ",), where=f"{verb} given {name!r}"):
                call(name)
    assert_contents(store, before, where="after refusals")
    assert_equal(store.mark(), mark, where="mark after refusals")


@requirement(
    "KV-379",
    "Places among rows that are no whole numbers MUST be refused by the name of the argument, by views and wrappers, "
    "and nothing be written or placed; what is a whole number to torch MUST be taken.",
)
def test_places_of_rows(kvstore: Any) -> None:
    store, ids, ones = _stored(kvstore), ids_of([1, 2]), torch.ones(1, 6)
    before, mark = contents(store), store.mark()
    view, wrapper = kvstore.KVTensor(store, ids, "weight"), kvstore.KVTensorWrapper([3, 6], torch.float32, 0)
    wrapper.set_dram_db_wrapper(store)
    numbers: list[Any] = ["1", None, 1.5, [0], torch.zeros(2), float("nan"), b"0"]
    for what, rows in (("a view", view), ("a wrapper", wrapper)):
        for place, name in enumerate(("dim", "start", "length")):
            for value in numbers:
                given: list[Any] = [0, 0, 1]
                given[place] = value
                for act, rest in ((rows.narrow, ()), (rows.set_range, (ones,))):
                    with raises(ConfigError, mentions=(f"where: {name}", "got: "), where=f"{what}, {name}={value!r}"):
                        act(*given, *rest)
        with succeeds("narrow", where=f"{what} from a tensor of one number"):
            found = rows.narrow(0, torch.tensor(1), 1)
        assert_equal(found.tolist(), rows.narrow(0, 1, 1).tolist(), where=what)
    for value in numbers:
        for name, given in (("global_row_count", [value, 0]), ("row_offset", [4, value])):
            with raises(ConfigError, mentions=(f"where: {name}", "got: "), where=f"place, {name}={value!r}"):
                view.place(*given)
    assert_equal((view.global_row_count, view.row_offset), (2, 0), where="the view's place")
    assert_contents(store, before, where="after refusals")
    assert_equal(store.mark(), mark, where="mark after refusals")


@requirement(
    "KV-469",
    "Ids and offsets of a lookup that are nested or sparse MUST be refused by name of the argument and the kind.",
)
def test_nested_ids(kvstore: Any) -> None:
    store = _stored(kvstore)
    before, ids = contents(store), ids_of([1, 2])
    bag, rows = kvstore.KVEmbeddingBag(store), kvstore.KVEmbedding(store)
    with warnings.catch_warnings():
        # Kinds of tensors that torch may change yet.
        warnings.simplefilter("ignore")
        kinds = {
            "jagged": torch.nested.nested_tensor([ids, ids[:1]], layout=torch.jagged),
            "nested": torch.nested.nested_tensor([ids, ids[:1]]),
            "sparse_coo": ids.to_sparse(),
            "sparse_csr": ids[None].to_sparse_csr(),
        }
    for name, given in kinds.items():
        said = "got: a nested tensor" if given.is_nested else f"got: torch.{name}"
        calls: list[tuple[str, Callable[[], object]]] = [
            ("input", partial(bag, given)),
            ("input", partial(rows, given)),
            ("input", partial(bag, given, ids_of([0]))),
            ("offsets", partial(bag, ids, given)),
        ]
        for place, (where, call) in enumerate(calls):
            with raises(ShapeError, mentions=(said, "expected: ", f"where: {where}"), where=f"{name}, call {place}"):
                call()
    assert_contents(store, before, where="after refusals")
