"""Views: the rows of their ids and no others, read-only where they say so, whole after a journey."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, assert_same_bytes, examples, raises, requirement, succeeds
from conformance.kvstore.cases import (
    assert_bits,
    assert_contents,
    contents,
    ids_of,
    random_bits,
    random_rows,
    rows_tensor,
    store_of,
)
from twinproof.errors import ConfigError, CorruptionError, DetachedStoreError, ShapeError, UnsupportedError

VIEWS = ("row", "weight", "metadata", "momentum1", "momentum2")
WRITABLE = ("row", "weight", "momentum1", "momentum2")
KEYS = [5, -2, 2**62, 0, -(2**63), 17]


def filled(kvstore: Any, keys: list[int] | None = None, **options: Any) -> Any:
    """A store with rows of random bits."""
    layout = kvstore.RowLayout(6, torch.float16, "partial_rowwise_adam", {"momentum1": torch.bfloat16})
    store = store_of(kvstore, layout, **options)
    store.set_rows("t", random_rows(store, KEYS if keys is None else keys, 3))
    return store


def values_for(view: Any, ids: list[int], seed: int) -> torch.Tensor:
    """Random values that the view may be given for these ids."""
    if view.view_name == "row":
        return random_rows(view.source, ids, seed)
    return random_bits(view.dtype, (len(ids), view.shape[1]), seed) if view.dtype != torch.int64 else view.full_tensor()


@requirement(
    "KV-037",
    "Every way of writing through a read-only view MUST leave the store as it was and return how many rows it skipped.",
)
def test_read_only(kvstore: Any) -> None:
    store = filled(kvstore)
    before, stats = contents(store), store.stats()
    for name in VIEWS:
        view = kvstore.KVTensor(store, ids_of(KEYS), name, read_only=True)
        values = values_for(view, KEYS, 9)
        assert_equal(view.read_only, True, where=name)
        assert_equal(view.set_range(0, 1, 3, values[1:4].contiguous()), 3, where=f"skipped by set_range of {name}")
        assert_equal(view.set_weights_and_ids(values, ids_of(KEYS)), 6, where=f"skipped by ids of {name}")
        assert_equal(view.set_range(0, 0, 0, values[:0].contiguous()), 0, where=f"nothing to skip of {name}")
        if name != "row":
            missing = ids_of([1000, 1001, 1002, 1003, 1004, 1005])
            assert_equal(view.set_weights_and_ids(values, missing), 6, where=f"skipped missing ids of {name}")
        assert_contents(store, before, where=f"after writes to {name}")
    assert_equal(store.stats(), stats, where="stats")


@requirement("KV-038", "Pickling a view MUST keep its ids, name, table, dtype, shape, place and read-only flag.")
def test_pickling(kvstore: Any) -> None:
    store = filled(kvstore)
    for name in VIEWS:
        for read_only in (False, True):
            view = kvstore.KVTensor(store, ids_of(KEYS), name, read_only, chunk_rows=4)
            view.place(20, 7)
            copy = pickle.loads(pickle.dumps(view))
            for field in ("table", "view_name", "read_only", "global_row_count", "row_offset", "chunk_rows"):
                assert_equal(getattr(copy, field), getattr(view, field), where=f"{field} of {name}")
            assert_equal((copy.dtype, copy.shape), (view.dtype, view.shape), where=name)
            assert_bits(copy.ids, ids_of(KEYS), where=f"ids of {name}")
            assert_bits(copy.attach(store).full_tensor(), view.full_tensor(), where=f"{name} attached")
            values = values_for(view, KEYS, 4)
            before = contents(store)
            skipped = copy.set_range(0, 0, 6, values)
            assert_equal(skipped, 6 if read_only or name == "metadata" else 0, where=f"skipped by {name}")
            if skipped:
                assert_contents(store, before, where=f"after a write to the copy of {name}")


@requirement("KV-039", "narrow MUST be the slice of the full tensor, and refuse other dims and ranges outside.")
@examples(40)
@given(st.sampled_from(VIEWS), st.integers(0, 6), st.data())
def test_narrow(kvstore: Any, name: str, start: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, 6 - start))
    view = kvstore.KVTensor(filled(kvstore), ids_of(KEYS), name)
    full = view.full_tensor()
    assert_equal(tuple(full.shape), tuple(view.shape), where="shape")
    assert_bits(view.narrow(0, start, length), full[start : start + length], where=f"{name}[{start}:+{length}]")
    for dim, first, count in ((1, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, 7), (0, 6, 1), (0, 0, -1)):
        with raises(ShapeError, where=f"narrow({dim}, {first}, {count})"):
            view.narrow(dim, first, count)
    chunks = torch.cat([rows for _, rows in kvstore.KVTensor(view.source, ids_of(KEYS), name, chunk_rows=4).chunks()])
    assert_bits(chunks, full, where="chunks")


@requirement(
    "KV-040",
    "Row i of a state dict's weights, ids, metadata and every state MUST belong to the same id, in whole-row mode and "
    "without, after rows came and went.",
)
def test_views_agree(kvstore: Any) -> None:
    for whole in (False, True):
        store = filled(kvstore, [*range(-20, 20)], return_whole_row=whole)
        store.delete("t", ids_of([-20, 3, 4]))
        store.set_rows("t", random_rows(store, [100, 101], 77))
        state = store.state_dict(buckets=kvstore.Buckets(5))
        ids = state["t.weight_id"].full_tensor()[:, 0]
        assert_equal(sorted(ids.tolist()), sorted({*range(-19, 20), 100, 101} - {3, 4}), where="ids")
        rows = store.get_rows("t", ids)
        assert_bits(state["t.metadata"].full_tensor(), rows[:, 8:16].contiguous().view(torch.int64), where="metadata")
        expected = rows if whole else store.get("t", ids)
        assert_bits(state["t.weight"].full_tensor(), expected, where=f"weight, whole={whole}")
        for name in ("momentum1", "momentum2"):
            assert_bits(state[f"t.{name}"].full_tensor(), store.get_state("t", name, ids), where=name)
            assert_equal(state[f"t.{name}"].read_only, True, where=f"{name} of a snapshot")


@requirement("KV-041", "The key in each row that a view shows MUST be the id of its place, in every way of reading it.")
def test_keys_are_ids(kvstore: Any) -> None:
    store = filled(kvstore)
    keys = [*KEYS, 12345]
    view = kvstore.KVTensor(store, ids_of(keys))
    expected = b"".join(key.to_bytes(8, "little", signed=True) for key in keys)
    reads = {
        "full_tensor": view.full_tensor(),
        "narrow": torch.cat([view.narrow(0, i, 1) for i in range(len(keys))]),
        "by ids": view.get_weights_by_ids(ids_of(keys)),
        "get_rows": store.get_rows("t", ids_of(keys)),
        "chunks": torch.cat([rows for _, rows in view.chunks()]),
    }
    for name, rows in reads.items():
        assert_same_bytes(rows[:, :8].contiguous().numpy().tobytes(), expected, where=name)


@requirement(
    "KV-084",
    "A write through a view MUST change exactly what the view shows of exactly its ids; whole rows whose keys are not "
    "the ids MUST be refused before anything is written.",
)
def test_writes(kvstore: Any) -> None:
    for name in WRITABLE:
        store, other = filled(kvstore), filled(kvstore)
        view = kvstore.KVTensor(store, ids_of(KEYS), name)
        values = values_for(view, KEYS, 12)
        assert_equal(view.set_range(0, 2, 3, values[2:5].contiguous()), 0, where="skipped")
        begin = {"row": 0, "weight": 16, **{n: s.offset_bytes for n, s in store.layout("t").state_slots.items()}}[name]
        expected = contents(other)
        for key, value in zip(KEYS[2:5], values[2:5], strict=True):
            raw = value.contiguous().view(torch.uint8).numpy().tobytes()
            row = expected["t"][key]
            expected["t"][key] = row[:begin] + raw + row[begin + len(raw) :]
        assert_contents(store, expected, where=name)
    store = filled(kvstore)
    before, rows = contents(store), random_rows(store, KEYS, 5)
    view = kvstore.KVTensor(store, ids_of(KEYS))
    acts: list[Callable[[], Any]] = [
        lambda: view.set_range(0, 0, 6, rows.flip(0).contiguous()),
        lambda: view.set_weights_and_ids(rows, ids_of([*KEYS[:5], 18])),
        lambda: view.set_weights_and_ids(rows, torch.zeros(6, dtype=torch.int64)),
    ]
    for act in acts:
        with raises(CorruptionError, where="keys that are not the ids"):
            act()
        assert_contents(store, before, where="after a refusal")


@requirement(
    "KV-085",
    "A view from another process MUST raise DetachedStoreError until it is attached, refuse a source of another "
    "layout, and find saved rows by itself.",
)
def test_detached(kvstore: Any, tmp_path: Any) -> None:
    store = filled(kvstore)
    copy = pickle.loads(pickle.dumps(kvstore.KVTensor(store, ids_of(KEYS), "momentum1")))
    zeros = torch.zeros(6, 6, dtype=torch.bfloat16)
    for act in (copy.full_tensor, lambda: copy.narrow(0, 0, 1), lambda: copy.set_range(0, 0, 6, zeros)):
        with raises(DetachedStoreError, mentions=["momentum1"], where="detached"):
            act()
    with raises(ConfigError, where="another layout"):
        copy.attach(store_of(kvstore, kvstore.RowLayout(7, torch.float16, "adam")))
    kvstore.save(store, tmp_path / "ck", durable=False)
    view = kvstore.KVTensor(kvstore.SavedRows(tmp_path / "ck"), ids_of(KEYS), "row")
    found = pickle.loads(pickle.dumps(view))
    assert_bits(found.full_tensor(), store.get_rows("t", ids_of(KEYS)), where="saved rows")
    assert_equal(found.set_range(0, 0, 6, found.full_tensor()), 6, where="saved rows are read-only")


@requirement(
    "KV-086",
    "Global sizes MUST be those of the rows that are saved: width in whole-row mode the row's bytes, not D, and the "
    "row count of the moment, not of an earlier one.",
)
def test_global_sizes(kvstore: Any) -> None:
    store = filled(kvstore, return_whole_row=True)
    first = store.state_dict(chunk_rows=2)
    store.set_rows("t", random_rows(store, [900, 901, 902], 1))
    second = store.state_dict(chunk_rows=4)
    for state, count, chunk in ((first, 6, 2), (second, 9, 4)):
        widths = {"weight": store.layout("t").row_bytes, "weight_id": 1, "metadata": 1, "momentum1": 6, "momentum2": 1}
        for name, width in widths.items():
            lazy = state[f"t.{name}"]
            items = lazy.__create_write_items__(name, lazy)
            sizes = {tuple(item.tensor_data.size) for item in items}
            assert_equal(sizes, {(count, width)}, where=f"global size of {name}")
            rows = [tuple(item.tensor_data.chunk.sizes) for item in items]
            assert_equal(sum(n for n, _ in rows), count, where=f"rows of {name}")
            if name == "weight":
                assert_equal(max(n for n, _ in rows), chunk, where="rows of a chunk")
            parts = [lazy.__get_tensor_shard__(item.index) for item in items]
            assert_bits(torch.cat(parts), lazy.full_tensor(), where=f"chunks of {name}")


@requirement("KV-087", "A view of several tables MUST say which; unknown tables, views and states MUST be refused.")
def test_refused_views(kvstore: Any) -> None:
    layouts = {"a": kvstore.RowLayout(4, optimizer="adam"), "b": kvstore.RowLayout(4)}
    store = store_of(kvstore, layouts)
    for arguments, options in (
        (("row",), {}),
        (("row",), {"table": "c"}),
        (("momentum1",), {"table": "b"}),
        (("header",), {"table": "a"}),
        (("row",), {"table": "a", "chunk_rows": 0}),
    ):
        with raises(ConfigError, where=f"{arguments} {options}"):
            kvstore.KVTensor(store, ids_of([1]), *arguments, **options)
    wrapper = kvstore.KVTensorWrapper([1, 4], torch.float32, 0)
    makers: dict[str, Callable[[], object]] = {
        "a view": lambda: kvstore.KVTensor(store, ids_of([1])),
        "a module": lambda: kvstore.KVEmbeddingBag(store),
        "a wrapper": lambda: wrapper.set_dram_db_wrapper(store),
    }
    for name, make in makers.items():
        with raises(ConfigError, mentions=("several tables", "('a', 'b')", "where: table"), where=name):
            make()
    raw = rows_tensor([bytes(16)], 16)
    assert_equal(raw.shape, (1, 16), where="helper")


@requirement(
    "KV-269",
    "A view that was attached MUST travel as a view of its new source: saved rows are found again by their path, a "
    "moment's come along, those of a store are left behind, and torch.save of them is refused.",
)
def test_attached_and_sent_on(kvstore: Any, tmp_path: Any) -> None:
    stores = [store_of(kvstore, kvstore.RowLayout(6, torch.float16, "adam")) for _ in range(2)]
    for seed, store in enumerate(stores):
        store.set_rows("t", random_rows(store, KEYS, seed))
        kvstore.save(store, tmp_path / str(seed), durable=False)
    saved = [kvstore.SavedRows(tmp_path / str(seed)) for seed in range(2)]
    expected = [store.get("t", ids_of(KEYS)) for store in stores]
    for first in (saved[0], stores[0]):
        view = pickle.loads(pickle.dumps(kvstore.KVTensor(first, ids_of(KEYS), "weight")))
        found = pickle.loads(pickle.dumps(view.attach(saved[1])))
        assert_bits(found.full_tensor(), expected[1], where="saved rows")
        with stores[1].snapshot() as moment:
            found = pickle.loads(pickle.dumps(view.attach(moment)))
        assert_bits(found.full_tensor(), expected[1], where="rows of a moment")
        view.attach(stores[1])
        with raises(DetachedStoreError, where="rows of a store"):
            pickle.loads(pickle.dumps(view)).full_tensor()
        with raises(UnsupportedError, where="torch.save"):
            torch.save(view, tmp_path / "view")


@requirement(
    "KV-273",
    "A view that is attached to a moment or to saved rows MUST be read-only: its writes skip every row.",
)
def test_attached_to_a_moment(kvstore: Any, tmp_path: Any) -> None:
    store = filled(kvstore)
    kvstore.save(store, tmp_path / "ck", durable=False)
    before = contents(store)
    with store.snapshot() as moment:
        for source in (moment, kvstore.SavedRows(tmp_path / "ck")):
            for name in VIEWS:
                view = pickle.loads(pickle.dumps(kvstore.KVTensor(store, ids_of(KEYS), name))).attach(source)
                assert_equal(view.read_only, True, where=f"{name} is read-only")
                assert_equal(view.set_range(0, 0, 6, values_for(view, KEYS, 4)), 6, where=f"skipped by {name}")
    assert_contents(store, before, where="after writes to views of moments")


@requirement(
    "KV-247",
    "A view that is given another source MUST show and write the same part of its rows, wherever it lies in them.",
)
def test_attached_to_another_layout(kvstore: Any) -> None:
    half, full = (store_of(kvstore, kvstore.RowLayout(6, dtype, "adam")) for dtype in (torch.float16, torch.float32))
    for store in (half, full):
        store.set_rows("t", random_rows(store, KEYS, 3))
    for source, target in ((half, full), (full, half)):
        for name in ("metadata", "momentum1", "momentum2"):
            view = pickle.loads(pickle.dumps(kvstore.KVTensor(source, ids_of(KEYS), name))).attach(target)
            expected = kvstore.KVTensor(target, ids_of(KEYS), name).full_tensor()
            assert_bits(view.full_tensor(), expected, where=f"{name} attached")
            out = torch.empty(6, view.shape[1] * view.dtype.itemsize, dtype=torch.uint8)
            view.read_rows_into(0, 6, out)
            assert_bits(out, expected.view(torch.uint8), where=f"{name} as bytes")
            if name != "metadata":
                weights, values = target.get("t", ids_of(KEYS)), random_bits(view.dtype, (6, 6), 8)
                view.set_range(0, 0, 6, values)
                assert_bits(target.get_state("t", name, ids_of(KEYS)), values, where=f"{name} written")
                assert_bits(target.get("t", ids_of(KEYS)), weights, where=f"weights after a write of {name}")


@requirement(
    "KV-260",
    "Views and wrappers MUST go on showing the ids that they were made with: neither a write to the tensor that they "
    "were given, nor one to a tensor that they hand out, MUST change them.",
)
def test_ids_are_their_own(kvstore: Any) -> None:
    store = filled(kvstore)
    for dtype in (torch.int64, torch.int32):
        keys = [5, 0, 17]
        given_ids = torch.tensor(keys, dtype=dtype)
        view = kvstore.KVTensor(store, given_ids, "weight")
        wrapper = kvstore.KVTensorWrapper([3, 6], torch.float16, 0, sorted_indices=given_ids)
        wrapper.set_dram_db_wrapper(store)
        given_ids.fill_(-2)
        view.ids.fill_(-2)
        expected = store.get("t", ids_of(keys))
        assert_bits(view.ids, ids_of(keys), where=f"ids of a view, {dtype}")
        assert_bits(view.full_tensor(), expected, where=f"rows of a view, {dtype}")
        view.full_tensor().fill_(3)
        assert_bits(view.narrow(0, 0, 3), expected, where=f"rows that were handed out, {dtype}")
        assert_bits(wrapper.narrow(0, 0, 3), expected, where=f"rows of a wrapper, {dtype}")


@requirement("KV-367", "What a part of a state dict hands out MUST be a copy: a write to it changes no later read.")
def test_parts_hand_out_copies(kvstore: Any) -> None:
    state = filled(kvstore).state_dict()
    for name in ("t.weight_id", "t.bucket", "t.metadata", "t.weight"):
        expected = state[name].full_tensor().clone()
        for handed_out in (state[name].full_tensor(), state[name].narrow(0, 0, 1)):
            handed_out.add_(1)
            assert_bits(state[name].full_tensor(), expected, where=f"{name} behind a write to what it handed out")


@requirement(
    "KV-315",
    "A write through a read-only view or wrapper MUST refuse whatever a writable one refuses: other shapes, dtypes, "
    "keys, ids and ranges; and skip what that takes.",
)
def test_refusals_of_read_only(kvstore: Any) -> None:
    store = filled(kvstore)
    rows, row_bytes = store.get_rows("t", ids_of(KEYS)), store.layout("t").row_bytes
    before = contents(store)
    for read_only in (True, False):
        view = kvstore.KVTensor(store, ids_of(KEYS), "row", read_only)
        weights = kvstore.KVTensor(store, ids_of(KEYS), "weight", read_only)
        store.set_return_whole_row(True)
        wrapper = kvstore.KVTensorWrapper(
            [6, row_bytes], torch.uint8, 0, sorted_indices=ids_of(KEYS), read_only=read_only
        )
        wrapper.set_dram_db_wrapper(store)
        for name, to in (("a view", view), ("a wrapper", wrapper)):
            wrong: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
                "other keys": (CorruptionError, partial(to.set_range, 0, 0, 6, rows.flip(0).contiguous())),
                "other ids": (CorruptionError, partial(to.set_weights_and_ids, rows, ids_of([*KEYS[:5], 18]))),
                "fewer rows": (ShapeError, partial(to.set_range, 0, 0, 6, rows[:5])),
                "narrower rows": (ShapeError, partial(to.set_range, 0, 0, 6, rows[:, :20].contiguous())),
                "strided rows": (ShapeError, partial(to.set_range, 0, 0, 3, rows[::2])),
                "a range outside": (ShapeError, partial(to.set_range, 0, 1, 6, rows)),
                "columns": (ShapeError, partial(to.set_range, 1, 0, 6, rows)),
                "another dtype": (UnsupportedError, partial(to.set_range, 0, 0, 6, rows.to(torch.int8))),
                "ids of floats": (UnsupportedError, partial(to.set_weights_and_ids, rows, ids_of(KEYS).double())),
            }
            for how, (kind, act) in wrong.items():
                with raises(kind, where=f"{name}, {read_only=}: {how}"):
                    act()
                assert_contents(store, before, where=f"{name}, {read_only=}: {how}")
            with succeeds("set_range", where=f"{name}, {read_only=}"):
                to.set_range(0, 0, 6, rows)
        with raises(ShapeError, where=f"weights, {read_only=}"):
            weights.set_range(0, 0, 6, torch.zeros(6, 5, dtype=torch.float16))
        with raises(UnsupportedError, where=f"weights, {read_only=}"):
            weights.set_range(0, 0, 6, torch.zeros(6, 6))
    assert_contents(store, before, where="rows that are written as they are")


@requirement(
    "KV-352",
    "A view of whole rows MUST NOT be attached to rows of another layout of the same width, nor a view of a state to "
    "those of another optimizer: that MUST be refused by the name of the table, and the view be as it was.",
)
def test_attached_to_other_values(kvstore: Any) -> None:
    layout, ids, half = kvstore.RowLayout, ids_of([1, 2]), {"momentum1": torch.float16, "momentum2": torch.float16}
    source = store_of(kvstore, layout(8, optimizer="adam"))
    source.set_rows("t", random_rows(source, [1, 2], 1))
    others = {
        "other optimizer": layout(8, optimizer="lamb"),
        "other width of weights": layout(24),
        "other states": layout(12, optimizer="adagrad"),
        "other dtypes": layout(16, torch.float16, "adam", half),
    }
    for what, other in others.items():
        target = store_of(kvstore, other)
        assert_equal(other.row_bytes, source.layout("t").row_bytes, where=f"{what}: bytes of a row")
        view = pickle.loads(pickle.dumps(kvstore.KVTensor(source, ids)))
        with raises(ConfigError, mentions=["where: t", str(other)], where=f"whole rows, {what}"):
            view.attach(target)
        with raises(DetachedStoreError, where=f"{what}: still without rows"):
            view.full_tensor()
        assert_bits(view.attach(source).full_tensor(), source.get_rows("t", ids), where=f"{what}: attached after all")
    for name, optimizer in (("momentum1", "adagrad"), ("momentum1", "lamb"), ("momentum2", "lamb")):
        target = store_of(kvstore, layout(8, optimizer=optimizer))
        view = pickle.loads(pickle.dumps(kvstore.KVTensor(source, ids, name)))
        with raises(ConfigError, mentions=["where: t", optimizer], where=f"{name} of {optimizer}"):
            view.attach(target)
    for name, optimizer in (("weight", "adagrad"), ("metadata", "none")):
        target = store_of(kvstore, layout(8, optimizer=optimizer))
        target.set_rows("t", random_rows(target, [1, 2], 2))
        expected = kvstore.KVTensor(target, ids, name).full_tensor()
        with succeeds("attach", where=f"{name} of {optimizer}"):
            view = pickle.loads(pickle.dumps(kvstore.KVTensor(source, ids, name))).attach(target)
        assert_bits(view.full_tensor(), expected, where=f"{name} of {optimizer}")


@requirement(
    "KV-419",
    "copy.copy of a view, and of any tensor of a state dict, MUST share its rows, as that of a tensor shares memory: "
    "of a store what is written later, both ways, and what is loaded; flags, place and source are each copy's own.",
)
def test_shallow_copies(kvstore: Any) -> None:
    for name in WRITABLE:
        store = filled(kvstore)
        view = kvstore.KVTensor(store, ids_of(KEYS), name, chunk_rows=4)
        with succeeds("copy.copy", where=f"of a view of {name}"):
            shared = copy.copy(view)
            assert_bits(shared.full_tensor(), view.full_tensor(), where=f"a copy of {name}")
        values = values_for(view, KEYS, 11)
        shared.set_range(0, 0, 6, values)
        assert_bits(view.full_tensor(), values, where=f"{name}, written by the copy")
        store.set_rows("t", random_rows(store, KEYS, 12))
        assert_bits(shared.full_tensor(), view.full_tensor(), where=f"{name}, written to the store")
        shared.place(20, 7)
        shared.read_only = True
        assert_equal((view.global_row_count, view.row_offset, view.read_only), (6, 0, False), where=f"{name}, own")
        assert_equal(copy.copy(shared).read_only, True, where=f"a copy of a read-only view of {name}")
        copy.copy(view).attach(filled(kvstore, KEYS[:3]))
        assert_equal(view.source is store, True, where=f"source of {name}")
    sent = pickle.loads(pickle.dumps(view))
    with raises(DetachedStoreError, where="a copy of a view without rows"):
        copy.copy(sent).full_tensor()
    # A state dict of the store takes what is loaded, its step among it; one of a moment stays that of the moment.
    live, moment = ({k: copy.copy(v) for k, v in store.state_dict(snapshot=s).items()} for s in (False, True))
    before = moment["t.weight"].full_tensor()
    live["t.step"].accept(0, torch.tensor([[41]]))
    assert_equal(store.step_count("t"), 41, where="a step that a copy took")
    store.set_rows("t", random_rows(store, KEYS, 13))
    expected = store.get("t", live["t.weight_id"].full_tensor()[:, 0])
    assert_bits(live["t.weight"].full_tensor(), expected, where="a copy of a live state dict")
    assert_bits(moment["t.weight"].full_tensor(), before, where="a copy of a moment")
