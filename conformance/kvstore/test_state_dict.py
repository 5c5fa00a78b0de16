"""State dicts that do not fit: every dtype, shape and kind of value is looked at before the first row is written."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from conformance.harness import assert_equal, assert_same_tensor, examples, raises, requirement, succeeds
from conformance.kvstore.cases import (
    WEIGHTS,
    assert_bits,
    assert_contents,
    contents,
    ids_of,
    random_rows,
    save,
    store_of,
)
from twinproof.errors import (
    ConfigError,
    MissingKeyError,
    ShapeError,
    StoreClosedError,
    TwinproofError,
    UnsupportedError,
)

DTYPES = (torch.float64, torch.int64, torch.int32, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn)
NAMES = ("weight", "momentum1", "momentum2", "metadata")


def separate(kvstore: Any, keys: list[int]) -> dict[str, Any]:
    """A state dict in the separate form, plain tensors."""
    store = store_of(kvstore)
    store.set_rows("t", random_rows(store, keys, 1))
    return {name: value.full_tensor() for name, value in store.state_dict().items()}


@requirement(
    "KV-115",
    "A state dict whose weight, state or metadata is of a dtype that the row cannot take by rounding MUST be refused "
    "by name, and leave the store as it was.",
)
@examples(40)
@given(st.sampled_from(NAMES), st.sampled_from((*DTYPES, *WEIGHTS)), st.booleans())
def test_dtypes(kvstore: Any, name: str, dtype: torch.dtype, weights_only: bool) -> None:
    state, other = separate(kvstore, [1, 2, 3]), store_of(kvstore)
    other.set_rows("t", random_rows(other, [2, 9], 5))
    before, field = contents(other), f"t.{name}"
    wrong = state | {field: torch.ones(state[field].shape).to(dtype)}
    is_left_out = weights_only and name.startswith("momentum")
    if is_left_out or (dtype is torch.int64 if name == "metadata" else dtype in WEIGHTS):
        other.load_state_dict(wrong, weights_only=weights_only)
        assert_equal(other.ids("t").tolist(), [1, 2, 3, 9], where=f"{field} as {dtype}")
        return
    with raises(UnsupportedError, mentions=[field], where=f"{field} as {dtype}"):
        other.load_state_dict(wrong, weights_only=weights_only)
    assert_contents(other, before, where=f"{field} as {dtype}")


@requirement(
    "KV-116",
    "A state dict with values of another shape or device, or values that are no tensors, MUST be refused before the "
    "first row is written.",
)
def test_shapes(kvstore: Any) -> None:
    state, other = separate(kvstore, [1, 2, 3]), store_of(kvstore)
    other.set_rows("t", random_rows(other, [2, 9], 5))
    before = contents(other)
    for name in (*NAMES, "weight_id"):
        value = state[f"t.{name}"]
        wrong = {
            "a row less": value[:2],
            "a row more": torch.cat([value, value[:1] + 100]),
            "no tensor": value.tolist(),
            "elsewhere": value.to("meta"),
        }
        if name != "weight_id":
            wrong |= {"flat": value.reshape(-1), "wider": torch.cat([value, value], dim=1), "deeper": value[None]}
        for how, values in wrong.items():
            with raises((ShapeError, UnsupportedError), where=f"{name}: {how}"):
                other.load_state_dict(state | {f"t.{name}": values})
            assert_contents(other, before, where=f"{name}: {how}")
    other.load_state_dict(state)
    assert_equal(other.contains("t", ids_of([1, 2, 3])).tolist(), [True] * 3, where="the right one")


@requirement(
    "KV-237",
    "A state dict of either form MUST be loaded whole, and ids that are not its rows' refused, however many rows are "
    "looked at and written at once.",
)
def test_rows_at_once(kvstore: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 11
    for whole in (False, True):
        store = store_of(kvstore, return_whole_row=whole)
        store.set_rows("t", random_rows(store, range(count), 1))
        state, expected = {name: v.full_tensor() for name, v in store.state_dict().items()}, contents(store)
        for at_once in (1, 2, 3, 5, count - 1, count, count + 1):
            monkeypatch.setattr("twinproof.kvstore.statedict.LOAD_CHUNK_ROWS", at_once)
            other, where = store_of(kvstore, return_whole_row=whole), f"{at_once} rows at once, whole {whole}"
            with succeeds("load_state_dict", where=where):
                other.load_state_dict(state)
            assert_contents(other, expected, where=where)
            if whole:
                for place in range(count):
                    ids = state["t.weight_id"].clone()
                    ids[place] += 100
                    empty = store_of(kvstore, return_whole_row=True)
                    with raises(TwinproofError, where=f"{where}, id {place}"):
                        empty.load_state_dict(state | {"t.weight_id": ids})
                    assert_contents(empty, {"t": {}}, where=f"{where}, id {place}")


@requirement(
    "KV-238",
    "Words of metadata that are set MUST be what is read again but for the bit of rows in use, which stays; ids "
    "without a row stay missing.",
)
def test_words_are_set(kvstore: Any) -> None:
    store = store_of(kvstore)
    store.set_rows("t", random_rows(store, [1, 2, 3], 1))
    weights = store.get("t", ids_of([1, 2, 3]))
    used = -(2**63)
    for words in ([0, 1, 2**63 - 1], [used, used + 5, -1], [7 << 32, 1 << 62, 2**32 - 1]):
        given_words = torch.tensor([*words, 9], dtype=torch.int64)[:, None]
        store.set_metadata("t", ids_of([1, 2, 3, 50]), given_words)
        found = store.metadata("t", ids_of([1, 2, 3]))[:, 0].tolist()
        assert_equal(found, [word | used for word in words], where=f"words after {words}")
        assert_equal(store.contains("t", ids_of([1, 2, 3, 50])).tolist(), [True] * 3 + [False], where=f"{words}")
    assert_same_tensor(store.get("t", ids_of([1, 2, 3])), weights, where="weights")


@requirement(
    "KV-217",
    "A state dict of views of the store itself MUST be loaded as the rows are when the load begins, also where the "
    "load clears their table, and where it writes the table that they are of before it reads them.",
)
def test_rows_of_its_own(kvstore: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinproof.kvstore.statedict.LOAD_CHUNK_ROWS", 2)
    layout, swapped = kvstore.RowLayout(6, optimizer="adam"), {"a": "b", "b": "a"}
    for whole in (False, True):
        for clear in (False, True):
            store, where = store_of(kvstore, {"a": layout, "b": layout}, return_whole_row=whole), f"{whole=}, {clear=}"
            store.set_rows("a", random_rows(store, [1, 2, 3, 4, 5], 1, "a"))
            store.set_rows("b", random_rows(store, [3, 4, 5, 1, 2], 2, "b"))
            before = contents(store)
            store.load_state_dict(store.state_dict(snapshot=False), clear=clear)
            assert_contents(store, before, where=where)
            state = store.state_dict(snapshot=False)
            store.load_state_dict({swapped[name[0]] + name[1:]: value for name, value in state.items()}, clear=clear)
            assert_contents(store, {"a": before["b"], "b": before["a"]}, where=f"{where}, tables swapped")
            assert_equal(store.stats().snapshot_count, 0, where=f"{where}: moments that are left")


def _without_memory(value: torch.Tensor) -> dict[str, Any]:
    """The same values as tensors of kinds that no row can be read from."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {
            "coo": value.to_sparse(),
            "csr": value.to_sparse_csr(),
            "csc": value.to_sparse_csc(),
            "nested": torch.nested.nested_tensor(list(value)),
            "fake": FakeTensorMode().from_tensor(value),
        }
        if value.dtype is torch.float32:
            found["mkldnn"] = value.to_mkldnn()
    return found


@requirement(
    "KV-344",
    "Values of a kind that has no plain memory (sparse, nested, wrapped) MUST be refused by name before a row goes, "
    "whatever the load clears or evicts; negative views and expanded values MUST be loaded as what they say.",
)
def test_kinds_of_tensors(kvstore: Any) -> None:
    expected = store_of(kvstore)
    state = separate(kvstore, [1, 2, 3])
    # Numbers alone: a negative view of random bits has other payloads of NaN.
    state |= {name: torch.arange(value.numel()).to(value).reshape(value.shape) for name, value in state.items()}
    expected.load_state_dict(state)
    for clear, capacity in ((True, None), (False, None), (False, 3)):
        where = f"{clear=}, {capacity=}"
        for field in (*NAMES, "weight_id"):
            other = store_of(kvstore, capacity=capacity)
            other.set_rows("t", random_rows(other, [2, 9], 5))
            before = contents(other)
            for kind, value in _without_memory(state[f"t.{field}"]).items():
                with raises(UnsupportedError, mentions=[f"t.{field}"], where=f"{kind} {field}, {where}"):
                    other.load_state_dict(state | {f"t.{field}": value}, clear=clear)
                assert_contents(other, before, where=f"{kind} {field}, {where}")
            negative = torch._neg_view(-state[f"t.{field}"])
            with succeeds("load_state_dict", where=f"negative {field}, {where}"):
                other.load_state_dict(state | {f"t.{field}": negative}, clear=True)
            assert_contents(other, contents(expected), where=f"negative {field}, {where}")
    same = state["t.weight"][:1].expand(3, -1)
    expected.load_state_dict(state | {"t.weight": same})
    assert_same_tensor(expected.get("t", ids_of([0, 1, 2])), same.contiguous(), where="one row for all")


def _unreadable(kvstore: Any, way: str, folder: Path) -> dict[str, Any]:
    """A state dict of table "t" whose rows nobody can read any more; its ids are plain."""
    source = store_of(kvstore)
    source.set_rows("t", random_rows(source, range(100, 105), 1))
    names, ids = {"t.weight": "weight", "t.momentum1": "momentum1", "t.momentum2": "momentum2"}, source.ids("t")
    if way == "metadata of a closed store":
        state = {name: value.full_tensor() for name, value in source.state_dict().items()}
        state["t.metadata"] = kvstore.KVTensor(source, ids, "metadata")
    elif way == "files that went":
        save(kvstore, source, folder / "ck", form="separate")
        saved = kvstore.SavedRows(folder / "ck")
        state = {name: kvstore.KVTensor(saved, ids, view) for name, view in names.items()}
        shutil.rmtree(folder / "ck")
    else:
        moment = source.snapshot() if way == "a closed moment" else source
        state = {name: kvstore.KVTensor(moment, ids, view) for name, view in names.items()}
        moment.close()
    source.close()
    return state | {"t.weight_id": ids}


@requirement(
    "KV-362",
    "A state dict whose rows cannot be read, as those of a closed store or moment, or of files that went, MUST be "
    "refused before a row is written, evicted or cleared, in every table and whichever tensor it is.",
)
@pytest.mark.parametrize("way", ["a closed store", "a closed moment", "files that went", "metadata of a closed store"])
def test_unreadable_rows(kvstore: Any, tmp_path: Path, way: str) -> None:
    state = _unreadable(kvstore, way, tmp_path)
    layout = kvstore.RowLayout(6, optimizer="adam")
    store = store_of(kvstore, {"s": layout, "t": layout}, capacity=10)
    for table in store.tables:
        store.set_rows(table, random_rows(store, range(8), 2, table))
    other = store_of(kvstore, {"s": layout})
    other.set_rows("s", random_rows(other, range(50, 60), 3, "s"))
    before = contents(store)
    for clear in (True, False):
        with raises((StoreClosedError, FileNotFoundError), where=f"{way}, clear={clear}"):
            store.load_state_dict(other.state_dict() | state, clear=clear)
        assert_contents(store, before, where=f"after {way}, clear={clear}")
    module = kvstore.KVEmbedding(store, table="t")
    with raises((StoreClosedError, FileNotFoundError), where=f"{way}, of a module"):
        module.load_state_dict({name.removeprefix("t."): value for name, value in state.items()})
    assert_contents(store, before, where=f"after {way}, of a module")


@requirement("KV-365", "A module over a table whose name has dots MUST load what its state dict gives.")
@pytest.mark.parametrize("kind", ["KVEmbeddingBag", "KVEmbedding"])
def test_names_with_dots(kvstore: Any, kind: str) -> None:
    stores = [store_of(kvstore, {"user.id.0": kvstore.RowLayout(6, optimizer="adam")}) for _ in range(2)]
    stores[0].set_rows("user.id.0", random_rows(stores[0], range(4), 1, "user.id.0"))
    made = [torch.nn.ModuleDict({"part": getattr(kvstore, kind)(store)}) for store in stores]
    with succeeds("a load", where=kind):
        made[1].load_state_dict(made[0].state_dict())
    assert_contents(stores[1], contents(stores[0]), where=kind)


@requirement(
    "KV-366",
    "A state dict of which any part is a view of a store that was closed MUST be refused before a row is removed or "
    "written: weights, states, metadata and whole rows alike.",
)
@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize("field", [*NAMES, "whole"])
def test_parts_of_closed_stores(kvstore: Any, field: str, clear: bool) -> None:
    # Of two tables the first one's parts are all at hand, and would be written.
    layouts = {name: kvstore.RowLayout(6, optimizer="adam") for name in "st"}
    source, store = (store_of(kvstore, layouts, return_whole_row=field == "whole") for _ in range(2))
    for table in layouts:
        source.set_rows(table, random_rows(source, range(5), 1, table))
        store.set_rows(table, random_rows(store, range(3, 9), 2, table))
    state = source.state_dict(snapshot=False)
    kept = "weight" if field == "whole" else field
    plain = {name: value if name == f"t.{kept}" else value.full_tensor() for name, value in state.items()}
    source.close()
    before = contents(store)
    with raises(StoreClosedError, where=field):
        store.load_state_dict(plain, clear=clear)
    assert_contents(store, before, where=field)


def _states_of_another(kvstore: Any, way: str, keys: list[int]) -> dict[str, Any]:
    """A state dict of table "t" whose states "momentum1" and "momentum2" are none of Adam's, in the separate form."""
    source = store_of(kvstore, kvstore.RowLayout(6, optimizer=OTHERS.get(way, "adam")))
    source.set_rows("t", random_rows(source, keys, 1))
    state: dict[str, Any] = source.state_dict()
    if way in OTHERS:
        return state
    for name in ("t.momentum1", "t.momentum2"):
        state[name] = {"numbers": torch.ones(3, 6, dtype=torch.int32), "no tensors": "none", "fewer": torch.ones(1, 6)}[
            way
        ]
    return state


OTHERS = {"one number a row": "partial_rowwise_adam", "of one state": "adagrad", "of equal shape": "lamb"}


@requirement(
    "KV-435",
    "load_state_dict(weights_only=True) MUST NOT look at optimizer states: weights and metadata load from a state dict "
    "of any other optimizer, whatever its states are, and every state of the rows is zero.",
)
@pytest.mark.parametrize("way", [*OTHERS, "numbers", "no tensors", "fewer"])
def test_states_are_not_looked_at(kvstore: Any, way: str) -> None:
    keys, store = [1, 2, 3], store_of(kvstore)
    store.set_rows("t", random_rows(store, [2, 9], 5))
    state = _states_of_another(kvstore, way, keys)
    with succeeds("load_state_dict", where=way):
        store.load_state_dict(state, weights_only=True, clear=True)
    ids = ids_of(keys)
    assert_bits(store.get("t", ids), state["t.weight"].full_tensor(), where=f"{way}: weights")
    assert_bits(store.metadata("t", ids), state["t.metadata"].full_tensor(), where=f"{way}: metadata")
    for name in ("momentum1", "momentum2"):
        assert_bits(store.get_state("t", name, ids), torch.zeros(3, 6), where=f"{way}: {name}")


@requirement(
    "KV-436",
    "A state dict whose views are of another optimizer's states MUST be refused by name, both optimizers told, "
    "whether their shapes match or not and the rows are a store's, a moment's, saved or in memory; the store stays.",
)
@pytest.mark.parametrize("kind", ["adam", "lamb", "partial_rowwise_adam"])
def test_views_of_another_optimizer(kvstore: Any, tmp_path: Path, kind: str) -> None:
    source = store_of(kvstore, kvstore.RowLayout(6, optimizer=kind))
    source.set_rows("t", random_rows(source, [1, 2, 3], 1))
    save(kvstore, source, tmp_path / "ck")
    saved, ids = kvstore.SavedRows(tmp_path / "ck"), ids_of([1, 2, 3])
    views = ("weight", "momentum1", "momentum2", "metadata")
    ways = {
        "a store": source.state_dict(snapshot=False),
        "a moment": source.state_dict(),
        "saved": {f"t.{view}": kvstore.KVTensor(saved, ids, view) for view in views} | {"t.weight_id": ids},
        "in memory": {name: value.clone() for name, value in source.state_dict().items()},
    }
    for target in ("adam", "lamb", "partial_rowwise_adam"):
        for way, state in ways.items():
            store, where = store_of(kvstore, kvstore.RowLayout(6, optimizer=target)), f"{kind} to {target}, {way}"
            store.set_rows("t", random_rows(store, [2, 9], 5))
            before = contents(store)
            if target == kind:
                store.load_state_dict(state, clear=True)
                assert_contents(store, contents(source), where=where)
                continue
            with raises(ConfigError, mentions=[f"got: {kind};", f"expected: {target};", "t.momentum"], where=where):
                store.load_state_dict(state, clear=True)
            assert_contents(store, before, where=where)
            plain = {name: state[name].full_tensor() if name != "t.weight_id" else ids for name in state}
            if plain["t.momentum2"].shape[1] == store.layout("t").state_slots["momentum2"].count:
                with succeeds("load_state_dict", where=f"{where}: plain tensors, which know no optimizer"):
                    store.load_state_dict(plain, clear=True)


@requirement(
    "KV-492",
    "A module's load_state_dict without the optimizer's states MUST be an error that names them, the table, and the "
    "verb of the store that loads weights alone, as a module's has no option for it; that verb loads them.",
)
def test_modules_without_states(kvstore: Any) -> None:
    keys = [1, 2, 3]
    source, store = store_of(kvstore), store_of(kvstore)
    for each in (source, store):
        each.set_rows("t", random_rows(each, keys if each is source else [7], 1))
    before, state = contents(store), kvstore.KVEmbedding(source).state_dict()
    alone = {name: state[name].full_tensor() for name in ("weight", "weight_id")}
    said = ("['momentum1', 'momentum2']", "where: t", "the store's load_state_dict with weights_only=True")
    with raises(MissingKeyError, mentions=said, where="a module"):
        kvstore.KVEmbedding(store).load_state_dict(alone)
    assert_contents(store, before, where="behind it")
    with succeeds("load_state_dict", where="the verb that is named"):
        store.load_state_dict({f"t.{name}": value for name, value in alone.items()}, weights_only=True, clear=True)
    assert_bits(store.get("t", ids_of(keys)), source.get("t", ids_of(keys)), where="weights")
