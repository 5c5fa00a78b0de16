"""Rows that are in no memory: what torch may do with them, and what it must be told that it cannot."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import AsyncStager

from conformance.harness import assert_equal, assert_same_tensor, raises, requirement, succeeds
from conformance.kvstore.cases import assert_bits, assert_contents, contents, filled, fresh, ids_of, random_rows
from twinproof.errors import CorruptionError, MissingKeyError, PlanError, UnsupportedError

KEYS = list(range(-9, 9))


def _saved(checkpoint: Any, state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=checkpoint.HuggingFaceStorageWriter(path, durable=False), no_dist=True)


def _load(checkpoint: Any, targets: dict[str, Any], path: Path, planner: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = checkpoint.HuggingFaceStorageReader(path)
        dcp.load(targets, storage_reader=reader, planner=planner, no_dist=True)


def _nest(views: dict[str, Any], others: dict[str, Any], nested: bool) -> dict[str, Any]:
    return {"beside": others, "model": {"rows": views}} if nested else views | others


def _views_of(kvstore: Any, store: Any, whole: bool) -> list[tuple[str, tuple[torch.Tensor, str]]]:
    """Name in a state dict -> ids and the name of a view, of all that there is of each table."""
    found = []
    for table in store.tables:
        names = {"metadata": "metadata", "weight": "row" if whole else "weight"}
        if not whole:
            names |= {state: state for state in store.layout(table).state_slots}
        found += [(f"{table}.{name}", (store.ids(table), view)) for name, view in names.items()]
    return found


def _listed(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _refused(lazy: Any) -> dict[str, Callable[[], Any]]:
    full = lazy.full_tensor()
    return {
        "new_empty": lambda: lazy.new_empty([]),
        "empty_like": lambda: torch.empty_like(lazy),
        "copy_": lambda: lazy.copy_(full),
        "zero_": lambda: lazy.zero_(),
        "out": lambda: torch.neg(full, out=lazy),
        "device": lambda: lazy.to("meta"),
        "storage": lambda: lazy.untyped_storage(),
        "typed storage": lambda: lazy.storage(),
        "shared": lambda: lazy.share_memory_(),
        "dlpack": lambda: torch.from_dlpack(lazy),
    }


@requirement(
    "KV-150",
    "What torch makes of lazy rows MUST be their values or a named error: memory of their kind, writes in place, other "
    "devices, storages, and one rank's rows copied into plain memory MUST be refused.",
)
def test_operations(kvstore: Any) -> None:
    for whole, snapshot in ((True, True), (False, False)):
        store = filled(kvstore, KEYS, return_whole_row=whole)
        state = store.state_dict(snapshot=snapshot, chunk_rows=5)
        for name, lazy in state.items():
            full = lazy.full_tensor()
            for way, act in _refused(lazy).items():
                with raises(UnsupportedError, mentions=("got: ", "expected: "), where=f"{way} of {name}"):
                    act()
            values = {
                "clone": lazy.clone().full_tensor(),
                "deepcopy": copy.deepcopy(lazy).full_tensor(),
                "to": lazy.to(torch.float64).full_tensor().nan_to_num(),
                "same": lazy.cpu().detach().full_tensor(),
                "turned": torch.flip(lazy, (0,)).flip(0),
                "copied": torch.zeros_like(full).copy_(lazy),
            }
            for way, value in values.items():
                expected = full.to(torch.float64).nan_to_num() if way == "to" else full
                assert_bits(value, expected, where=f"{way} of {name}")
            lazy.place(lazy.shape[0] + 3, 2)
            said = (f"{lazy.shape[0]} of {lazy.shape[0] + 3} rows",)
            with raises(UnsupportedError, mentions=said, where=f"a part of {name} into plain memory"):
                torch.zeros_like(full).copy_(lazy)
            assert_equal((lazy.clone().global_row_count, lazy.clone().row_offset), (lazy.shape[0] + 3, 2), where=name)


@requirement(
    "KV-470",
    "What asks lazy rows for memory of Python's or NumPy's MUST be refused by name, of views and of their copies in "
    "memory; full_tensor() and numpy(force=True) MUST answer it.",
)
def test_arrays(kvstore: Any) -> None:
    for name, lazy in filled(kvstore, KEYS).state_dict(chunk_rows=5).items():
        for kind, rows in (("a view", lazy), ("a copy", lazy.clone())):
            ways: dict[str, Callable[[], object]] = {
                "numpy": rows.numpy,
                # What ``numpy.asarray`` calls.
                "asarray": rows.__array__,
                "tolist": rows.tolist,
            }
            for way, act in ways.items():
                with raises(UnsupportedError, mentions=("full_tensor()",), where=f"{way} of {name}, {kind}"):
                    act()
            assert_equal(len(rows.full_tensor().tolist()), rows.shape[0], where=f"{name}, {kind}")
            # NumPy has no bfloat16.
            if rows.dtype != torch.bfloat16:
                forced = torch.from_numpy(rows.numpy(force=True))
                assert_same_tensor(forced, rows.full_tensor(), where=f"{name}, {kind}, by force")


@requirement(
    "KV-426",
    "Lazy rows at any index MUST be the rows' values at that index, all rows by an ellipsis or by no index among them, "
    "as one plain tensor.",
)
@pytest.mark.parametrize("index", [..., (), (..., slice(None)), slice(None), (..., 0), -1, None, [1, 0]], ids=str)
def test_indices(kvstore: Any, index: Any) -> None:
    for name, lazy in filled(kvstore, KEYS).state_dict(chunk_rows=5).items():
        if isinstance(index, list) and lazy.shape[0] < 2:
            continue
        with succeeds("an index", where=f"{name}[{index}]"):
            found = lazy[index]
        assert_equal(type(found).__name__, "Tensor", where=f"class of {name}[{index}]")
        assert_bits(found, lazy.full_tensor()[index], where=f"{name}[{index}]")


def _writes(lazy: Any) -> dict[str, Callable[[], Any]]:
    """Ways to write that reach the rows in a list, by an index, or by no operation at all."""
    full, other = lazy.full_tensor(), torch.zeros(3)

    def by_data() -> None:
        lazy.data = full

    def by_index() -> None:
        lazy[0] = 0

    return {
        "_foreach_zero_": lambda: torch._foreach_zero_([lazy]),
        "_foreach_copy_": lambda: torch._foreach_copy_([other, lazy], [other, full]),
        "_foreach_add_": lambda: torch._foreach_add_([lazy], 1),
        "_foreach_add_ of two": lambda: torch._foreach_add_((lazy,), (full,), alpha=2),
        "a list of out": lambda: torch.split_with_sizes_copy(full, [full.shape[0]], out=[lazy]),
        "data": by_data,
        "an index": by_index,
    }


@requirement(
    "KV-345",
    "Writes to lazy rows in a list of tensors, by an index or by ``.data`` MUST be refused by name; lists that are "
    "read alone MUST give their values, and no part of several ranks' rows may go into plain memory.",
)
def test_lists_of_tensors(kvstore: Any) -> None:
    for whole, snapshot in ((True, True), (False, False)):
        store = filled(kvstore, KEYS, return_whole_row=whole)
        before = contents(store)
        for name, lazy in store.state_dict(snapshot=snapshot, chunk_rows=5).items():
            full = lazy.full_tensor()
            for way, act in _writes(lazy).items():
                with raises(UnsupportedError, where=f"{way} of {name}"):
                    act()
                assert_bits(lazy.full_tensor(), full, where=f"{name} after {way}")
            copied = [torch.zeros_like(full), torch.zeros_like(full)]
            torch._foreach_copy_(copied, [lazy, full])
            for values in (*copied, torch.cat([lazy, lazy])[: full.shape[0]], lazy.data.full_tensor()):
                assert_bits(values, full, where=f"{name}, read")
            lazy.place(lazy.shape[0] + 3, 2)
            with raises(UnsupportedError, where=f"a part of {name} into plain memory"):
                torch._foreach_copy_(copied, [full, lazy])
        assert_contents(store, before, where=f"{whole=}, {snapshot=}")


@requirement(
    "KV-151",
    "A view of a moment MUST take its rows along when it is cloned, copied deep or pickled; a view of a store is a "
    "reference, which torch.save MUST refuse. A store, a snapshot and a round MUST be neither copied nor pickled.",
)
def test_travelling(kvstore: Any) -> None:
    store = filled(kvstore, KEYS, return_whole_row=True)
    state, live = store.state_dict(chunk_rows=5), store.state_dict(snapshot=False)
    expected = {name: value.full_tensor() for name, value in state.items()}
    travelled = [pickle.loads(pickle.dumps(state)), copy.deepcopy(state), copy.deepcopy(live)]
    travelled.append({name: pickle.loads(pickle.dumps(copy.copy(value.clone()))) for name, value in state.items()})
    before = contents(store)
    for table in "ab":
        store.set_rows(table, random_rows(store, KEYS, 44, table))
        store.delete(table, ids_of(KEYS[:4]))
    for number, copied in enumerate(travelled):
        for name, value in copied.items():
            assert_bits(value.full_tensor(), expected[name], where=f"{name} of copy {number}")
            assert_bits(value.narrow(0, 1, 0), expected[name][1:1], where="nothing")
        other = fresh(kvstore)
        other.load_state_dict(copied)
        assert_contents(other, before, where=f"loaded from copy {number}")
    with store.snapshot() as moment:
        policy = kvstore.EvictionPolicy.count(1)
        for what in (store, moment, store.start_eviction("a", policy=policy)):
            for act in (pickle.dumps, copy.deepcopy):
                with raises(UnsupportedError, mentions=(type(what).__name__,), where="a store, a moment or a round"):
                    act(what)
    with raises(UnsupportedError, where="a reference"):
        torch.save(live, io.BytesIO())
    view = travelled[0]["a.weight"]
    with raises(MissingKeyError, where="an id that stayed behind"):
        view.get_weights_by_ids(ids_of([12345]))
    with raises(UnsupportedError, where="bytes that stayed behind"):
        kvstore.KVTensor(travelled[0]["a.momentum1"].source, ids_of(KEYS), "row")[:1]


@requirement(
    "KV-152",
    "dcp.load into views MUST load all that they show, timestamps, counts and the step included, or be a named error: "
    "with torch's planner, into a moment, and from a checkpoint of other ids or numbers of rows.",
)
def test_loading(kvstore: Any, checkpoint: Any, tmp_path: Path) -> None:
    for whole in (True, False):
        store, path = filled(kvstore, KEYS, return_whole_row=whole), tmp_path / str(whole)
        store.set_step_count("a", 41)
        expected = contents(store)
        _saved(checkpoint, store.state_dict(chunk_rows=5), path)
        for planner, state in ((None, store.state_dict(snapshot=False)), (kvstore.KVLoadPlanner(), store.state_dict())):
            with raises(UnsupportedError, where="views that cannot be loaded into"):
                _load(checkpoint, state, path, planner)
        for table in "ab":
            store.set_rows(table, random_rows(store, store.ids(table).tolist(), 9, table))
            store.apply_gradients(table, store.ids(table), torch.ones_like(store.get(table, store.ids(table))), 0.1)
        store.set_step_count("a", 2)
        _load(checkpoint, store.state_dict(snapshot=False, chunk_rows=3), path, kvstore.KVLoadPlanner())
        assert_contents(store, expected, where=f"loaded back, whole={whole}")
        assert_equal(store.step_count("a"), 41, where="step")
        shifted = filled(kvstore, [key + 1 for key in KEYS], return_whole_row=whole)
        with raises(CorruptionError, where="other ids"):
            _load(checkpoint, shifted.state_dict(snapshot=False), path, kvstore.KVLoadPlanner())
        fewer = filled(kvstore, KEYS[:-1], return_whole_row=whole)
        with raises(PlanError, where="fewer rows"):
            _load(checkpoint, fewer.state_dict(snapshot=False), path, kvstore.KVLoadPlanner())
        renamed = {f"{name}?": value for name, value in store.state_dict(snapshot=False).items()}
        with raises(MissingKeyError, where="names that are not there"):
            _load(checkpoint, renamed, path, kvstore.KVLoadPlanner())
        _load(checkpoint, renamed, path, kvstore.KVLoadPlanner(allow_partial_load=True))


def _unfit(state: dict[str, torch.Tensor], whole: bool) -> dict[str, dict[str, torch.Tensor]]:
    """What a checkpoint may hold that fits views of the same rows but for one value, most often the last."""
    ids, counts = state["b.weight_id"].clone(), state["a.bucket"].clone()
    ids[-1] += 7
    counts[-1] += 1
    found = {
        "another id": {"b.weight_id": ids},
        "another count": {"a.bucket": counts},
        "a step below zero": {"a.step": torch.tensor([[-1]])},
    }
    if whole:
        rows = state["b.weight"].clone()
        rows[-1, 0] ^= 1
        found["another key"] = {"b.weight": rows}
    return found


@requirement(
    "KV-342",
    "dcp.load into views of other ids, counts or keys than the checkpoint's, or of a step that is none, MUST leave "
    "rows, headers and steps as they were, whichever reader it is and in whatever order the names stand.",
)
def test_loading_what_does_not_fit(kvstore: Any, checkpoint: Any, tmp_path: Path) -> None:
    kinds = {
        "ours": (checkpoint.HuggingFaceStorageWriter, checkpoint.HuggingFaceStorageReader),
        "torch": (dcp.FileSystemWriter, dcp.FileSystemReader),
    }
    for whole, (kind, (writer, reader)) in product((True, False), kinds.items()):
        store = filled(kvstore, KEYS, return_whole_row=whole)
        state = {name: value.full_tensor() for name, value in store.state_dict().items()}
        for table in "ab":
            store.set_rows(table, random_rows(store, store.ids(table).tolist(), 9, table))
        store.set_step_count("a", 2)
        before = contents(store)
        for what, values in _unfit(state, whole).items():
            where, path = f"{what}, {kind}, {whole=}", tmp_path / f"{kind} {whole} {what}"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.save(state | values, storage_writer=writer(path), no_dist=True)
                for order in (1, -1):
                    targets = dict(list(store.state_dict(snapshot=False, chunk_rows=3).items())[::order])
                    with raises(CorruptionError, where=where):
                        planner = kvstore.KVLoadPlanner()
                        dcp.load(targets, storage_reader=reader(path), planner=planner, no_dist=True)
                    assert_contents(store, before, where=where)
                    assert_equal((store.step_count("a"), store.step_count("b")), (2, 0), where=f"{where}: steps")


class _Reader:
    """A load whose tensors arrive as it is told, each with what a checkpoint has under its name."""

    def __init__(self, kvstore: Any, targets: dict[str, Any], metadata: Any) -> None:
        self._planner = kvstore.KVLoadPlanner()
        self._planner.set_up_planner(dict(targets), metadata, True)
        self.items = self._planner.finish_plan(self._planner.create_local_plan()).items

    def commit(self, item: Any, values: dict[str, torch.Tensor]) -> None:
        memory = self._planner.resolve_tensor(item)
        value = values[item.dest_index.fqn].narrow(0, item.storage_offsets[0], item.lengths[0])
        # Columns that were cut apart come as they are.
        found = value.clone() if value.shape != memory.shape else memory.copy_(value)
        self._planner.commit_tensor(item, found)


def _unfit_value(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """What a checkpoint may have under a name of a view that is refused."""
    value = state[name].clone()
    if name.endswith((".weight_id", ".bucket")):
        value[-1] += 7
    elif name.endswith(".step"):
        value -= 100
    elif value.dtype == torch.uint8:
        value[-1, 0] ^= 1
    else:
        # Columns that were cut apart.
        return value.repeat(1, 2)
    return value


@requirement(
    "KV-380",
    "A load through views of which a tensor is refused MUST write nothing, wherever that tensor stands among the "
    "others, in whatever order they arrive, also where the reader goes on with the rest; one that is read again and "
    "fits then MUST be all that was missing.",
)
@pytest.mark.parametrize("whole", [True, False])
def test_refused_among_others(kvstore: Any, checkpoint: Any, tmp_path: Path, whole: bool) -> None:
    store = filled(kvstore, KEYS, return_whole_row=whole)
    store.set_step_count("a", 41)
    expected, state = contents(store), {name: value.full_tensor() for name, value in store.state_dict().items()}
    state["bias"] = torch.arange(3.0)
    _saved(checkpoint, state, tmp_path / "ck")
    metadata = checkpoint.HuggingFaceStorageReader(tmp_path / "ck").read_metadata()
    for table in "ab":
        store.set_rows(table, random_rows(store, store.ids(table).tolist(), 9, table))
    store.set_step_count("a", 2)
    targets = {**store.state_dict(snapshot=False), "bias": torch.zeros(3)}
    before = contents(store)
    for name in [name for name in targets if name != "bias"]:
        value = _unfit_value(state, name)
        for place in range(len(targets)):
            reader, where = _Reader(kvstore, targets, metadata), f"{name} at place {place}, {whole=}"
            (unfit,) = [item for item in reader.items if item.dest_index.fqn == name]
            rest = [item for item in reader.items if item is not unfit]
            rest = rest[place:] + rest[:place]
            for item in rest[:place]:
                reader.commit(item, state)
            with raises((CorruptionError, PlanError), where=where):
                reader.commit(unfit, {name: value})
            for item in rest[place:]:
                reader.commit(item, state)
            assert_contents(store, before, where=where)
            assert_equal((store.step_count("a"), store.step_count("b")), (2, 0), where=f"{where}: steps")
        reader.commit(unfit, state)
        assert_contents(store, expected, where=f"{name} is read again")
        assert_equal(store.step_count("a"), 41, where=f"{name} is read again: step")
        store.set_step_count("a", 2)
        for table, rows in before.items():
            store.set_rows(table, random_rows(store, list(rows), 9, table))


@requirement(
    "KV-143",
    "Staging views of a store for an asynchronous save MUST take one snapshot for all of them, read no row, and give "
    "the snapshot back when the save is done; a view of a moment MUST stay itself.",
)
def test_staging(kvstore: Any, checkpoint: Any, tmp_path: Path) -> None:
    store = filled(kvstore, KEYS)
    expected = {name: value.full_tensor() for name, value in store.state_dict().items()}
    live, moment = store.state_dict(snapshot=False, chunk_rows=5), store.state_dict()
    assert_equal(store.stats().snapshot_count, 1, where="snapshots before")
    writer = checkpoint.HuggingFaceStorageWriter(tmp_path / "ck", durable=False)
    assert_equal(isinstance(writer, AsyncStager), True, where="the writer stages")
    assert_equal(writer.should_synchronize_after_execute, False, where="complete when it returns")
    staged = writer.stage(moment)
    assert_equal([name for name in moment if staged[name] is not moment[name]], [], where="what was copied of a moment")
    staged = writer.stage(live)
    assert_equal(store.stats().snapshot_count, 2, where="snapshots of a staged state dict")
    kinds = {type(value).__name__ for name, value in staged.items() if name.endswith("weight")}
    assert_equal(kinds, {"KVTensor"}, where="rows stay in the store")
    del staged, moment
    threads = set(threading.enumerate())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        future: Any = dcp.async_save(live, storage_writer=writer, no_dist=True)
        for table in "ab":
            store.clear(table)
        future.result()
    # A thread lets go of what it saved a moment after it has set the result.
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=20)
    del future, live
    gc.collect()
    assert_equal(store.stats().snapshot_count, 0, where="snapshots when all is done")
    targets = {name: torch.zeros_like(value) for name, value in expected.items()}
    _load(checkpoint, targets, tmp_path / "ck", None)
    for name, value in expected.items():
        assert_bits(targets[name], value, where=name)


@requirement(
    "KV-249",
    "A planner that loads a second time MUST load what it is given then, and leave what it loaded before alone.",
)
def test_planner_again(kvstore: Any, checkpoint: Any, tmp_path: Path) -> None:
    for whole in (True, False):
        first, second = (filled(kvstore, KEYS, return_whole_row=whole) for _ in range(2))
        expected, planner = contents(first), kvstore.KVLoadPlanner()
        _saved(checkpoint, first.state_dict(), tmp_path / str(whole))
        for turn, store in enumerate((first, second, first)):
            for each in (first, second):
                each.set("b", each.ids("b"), torch.full((each.size("b"), 4), float(turn)))
            others = [(each, contents(each)) for each in (first, second) if each is not store]
            _load(checkpoint, store.state_dict(snapshot=False), tmp_path / str(whole), planner)
            assert_contents(store, expected, where=f"load {turn}, whole={whole}")
            for each, before in others:
                assert_contents(each, before, where=f"the other store after load {turn}, whole={whole}")


@requirement(
    "KV-440",
    "A planner that loads again MUST load other rows, other tables and other checkpoints than before: all of what it "
    "is given then, and nothing of what it was given before.",
)
@pytest.mark.parametrize("whole", [True, False])
def test_planner_of_others(kvstore: Any, checkpoint: Any, tmp_path: Path, whole: bool) -> None:
    kept = {name: filled(kvstore, keys, return_whole_row=whole) for name, keys in (("many", KEYS), ("few", KEYS[:5]))}
    for name, store in kept.items():
        _saved(checkpoint, store.state_dict(), tmp_path / name)
    planner = kvstore.KVLoadPlanner()
    for turn, (name, tables) in enumerate(product(("many", "few", "many"), (("b",), ("a", "b"), ("a",)))):
        expected, store = contents(kept[name]), filled(kvstore, kept[name].ids("a").tolist(), return_whole_row=whole)
        for table in store.tables:
            ids = store.ids(table)
            store.set(table, ids, torch.full_like(store.get(table, ids), 7.0))
        before = contents(store)
        chosen = {k: v for k, v in store.state_dict(snapshot=False).items() if k.partition(".")[0] in tables}
        with succeeds("a load", where=f"{name} {tables}, load {turn}"):
            _load(checkpoint, chosen, tmp_path / name, planner)
        asked = {table: (expected if table in tables else before)[table] for table in store.tables}
        assert_contents(store, asked, where=f"{name} {tables}, load {turn}, whole={whole}")


@requirement(
    "KV-369",
    "A planner whose load was refused MUST load what it is given next, and write nothing more of the load that was "
    "refused.",
)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("table", ["a", "b"])
def test_planner_behind_a_refusal(kvstore: Any, checkpoint: Any, tmp_path: Path, table: str, whole: bool) -> None:
    first, second, other = (filled(kvstore, KEYS, return_whole_row=whole) for _ in range(3))
    # Of the other table everything was read before this one is refused, or is to come.
    other.delete(table, ids_of(KEYS[1:2]))
    other.set_rows(table, random_rows(other, [999], 3, table))
    beside = "b" if table == "a" else "a"
    other.set_rows(beside, random_rows(other, other.ids(beside).tolist(), 4, beside))
    expected, kept, planner = contents(first), contents(other), kvstore.KVLoadPlanner()
    _saved(checkpoint, first.state_dict(), tmp_path / "ck")
    for turn in range(2):
        with raises((CorruptionError, PlanError), where=f"other ids, load {turn}"):
            _load(checkpoint, other.state_dict(snapshot=False), tmp_path / "ck", planner)
        second.set("b", second.ids("b"), torch.full((second.size("b"), 4), float(turn)))
        _load(checkpoint, second.state_dict(snapshot=False), tmp_path / "ck", planner)
        assert_contents(second, expected, where=f"the store that was loaded behind it, load {turn}")
        assert_contents(other, kept, where=f"the store whose load was refused, load {turn}")


@requirement(
    "KV-276",
    "A planner MUST load views, plain tensors and objects of one state dict, nested or not, in any order of its names "
    "and with whatever else the checkpoint has: rows, timestamps, counts, the step, tensors and objects.",
)
def test_loading_beside_others(kvstore: Any, tmp_path: Path) -> None:
    store = filled(kvstore, range(-3, 3))
    beside = {
        "bias": torch.arange(5.0),
        "empty": torch.zeros(0),
        "epoch": 3,
        "notes": {"words": ["a", "b"], "rate": 0.5},
    }
    # What is asked for beside the rows, and whether the names of their views stand the other way round.
    asked = (
        ((), True),
        (("bias", "empty"), False),
        (("epoch", "notes"), False),
        (("epoch",), True),
        (tuple(beside), True),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for nested, whole in ((False, False), (False, True), (True, False)):
            store.set_return_whole_row(whole)
            store.set_step_count("a", 41)
            expected, path = contents(store), tmp_path / f"{nested}-{whole}"
            state = _nest(store.state_dict(chunk_rows=5), beside, nested)
            dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
            for names, turned in asked:
                for table in "ab":
                    # Other headers, too.
                    keys = store.ids(table).tolist()
                    store.set_rows(table, random_rows(store, keys[1:] + keys[:1], 9, table))
                store.set_step_count("a", 2)
                views = list(store.state_dict(snapshot=False, chunk_rows=3).items())
                blank = {"bias": torch.zeros(5), "empty": torch.zeros(0), "epoch": 0, "notes": {"words": [], "rate": 0}}
                others = {name: blank[name] for name in names}
                targets = _nest(dict(reversed(views) if turned else views), others, nested)
                reader = dcp.FileSystemReader(path)
                dcp.load(targets, storage_reader=reader, planner=kvstore.KVLoadPlanner(), no_dist=True)
                where = f"{nested=} {whole=} {turned=}, beside {names}"
                assert_contents(store, expected, where=where)
                assert_equal(store.step_count("a"), 41, where=f"{where}: step")
                # Rows that are not there yet: headers are theirs once they are.
                empty, views = fresh(kvstore), _views_of(kvstore, store, whole)
                new = {name: kvstore.KVTensor(empty, *which, chunk_rows=3, table=name[0]) for name, which in views}
                new = dict(reversed(new.items())) if turned else new
                reader = dcp.FileSystemReader(path)
                dcp.load(_nest(new, {}, nested), storage_reader=reader, planner=kvstore.KVLoadPlanner(), no_dist=True)
                assert_contents(empty, expected, where=f"{where}, in an empty store")
                for name in names:
                    found = (targets["beside"] if nested else targets)[name]
                    assert_equal(_listed(found), _listed(beside[name]), where=f"{where}: {name}")


def _said(value: Any) -> dict[str, Any]:
    """What lazy rows say of themselves, and what a checkpoint is handed."""
    fields = ("shape", "dtype", "global_row_count", "row_offset", "chunk_rows", "table", "view_name")
    said = {field: getattr(value, field, None) for field in fields}
    chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in value.global_chunks()]
    return said | {"chunks": chunks, "ids": value.ids.tolist() if hasattr(value, "ids") else None}


@requirement(
    "KV-293",
    "A view that was copied, staged or sent in any way MUST say of itself what it was made with: ids, table, name, "
    "dtype, shape, place among the rows of all ranks, and rows of a chunk.",
)
def test_copies_say_the_same(kvstore: Any, checkpoint: Any, tmp_path: Path) -> None:
    writer = checkpoint.HuggingFaceStorageWriter(tmp_path / "ck", durable=False)
    ways: dict[str, Callable[[Any], Any]] = {
        "clone": torch.clone,
        "deepcopy": copy.deepcopy,
        "copy": copy.copy,
        "detach": torch.detach,
        "to": lambda lazy: lazy.to(lazy.dtype, copy=True),
        "pickle": lambda lazy: pickle.loads(pickle.dumps(lazy)),
        "pickled clone": lambda lazy: pickle.loads(pickle.dumps(lazy.clone(), protocol=2)),
        "clone of what was sent": lambda lazy: pickle.loads(pickle.dumps(copy.deepcopy(lazy))).clone(),
        "staged": lambda lazy: writer.stage({"rows": lazy})["rows"],
        "staged clone": lambda lazy: copy.deepcopy(writer.stage({"rows": lazy})["rows"]),
    }
    store = filled(kvstore, KEYS)
    store.set_step_count("b", 3)
    for whole in (True, False):
        store.set_return_whole_row(whole)
        for snapshot in (True, False):
            for name, lazy in store.state_dict(snapshot=snapshot, chunk_rows=5).items():
                lazy.place(lazy.shape[0] + 11, 7)
                expected = _said(lazy)
                for way, act in ways.items():
                    assert_equal(_said(act(lazy)), expected, where=f"{way} of {name}, {whole=} {snapshot=}")
                wide = _said(lazy.to(torch.float64))
                kept = {field: wide[field] for field in ("shape", "global_row_count", "row_offset", "chunk_rows")}
                assert_equal(kept, {field: expected[field] for field in kept}, where=f"wider {name}, {snapshot=}")


@requirement(
    "KV-354",
    "A tensor without memory of its own, as the lazy rows of a state dict, MUST be refused where rows are to be read "
    "into it: what was read would go to a copy, and the tensor stay as it is.",
)
def test_read_into_lazy_rows(kvstore: Any) -> None:
    store, ids = filled(kvstore, KEYS), ids_of(KEYS)
    lazy = {"live": store.state_dict(snapshot=False), "of a moment": store.state_dict()}
    whole = kvstore.KVTensor(store, ids, "row", table="a")
    for what, state in lazy.items():
        weight = state["a.weight"]
        for name, out in (("rows", weight), ("a copy of rows", weight.clone())):
            with raises(UnsupportedError, mentions=["where: out"], where=f"get into {name}, {what}"):
                store.get("a", ids, out=out)
        with raises(UnsupportedError, mentions=["where: out"], where=f"get_rows into lazy rows, {what}"):
            store.get_rows("a", ids, out=kvstore.KVTensor(store, ids, "row", table="a"))
        with raises(UnsupportedError, mentions=["where: out"], where=f"read_rows_into lazy rows, {what}"):
            whole.read_rows_into(0, len(KEYS), whole.clone())
    out = torch.zeros(len(KEYS), 6, dtype=torch.float16)
    assert_equal(store.get("a", ids, out=out) is out, True, where="a plain tensor is filled and returned")
    assert_bits(out, store.get("a", ids), where="a plain tensor")
    kept = torch.nn.Parameter(torch.zeros(len(KEYS), 6, dtype=torch.float16), requires_grad=False)
    with succeeds("get", where="a parameter is a plain tensor"):
        store.get("a", ids, out=kept)
    assert_bits(kept.detach(), out, where="a parameter")


@requirement(
    "KV-449",
    "Staged views of several stores MUST be of a moment of their own store, one for each, where tables have the same "
    "names; and what is asked of one writer again MUST be staged anew.",
)
def test_staging_of_several_stores(kvstore: Any, checkpoint: Any, tmp_path: Path) -> None:
    stores = {name: filled(kvstore, range(number, number + 3)) for number, name in enumerate(("x", "y"))}
    writer = checkpoint.HuggingFaceStorageWriter(tmp_path / "ck", durable=False)
    for turn in range(2):
        views = {name: store.state_dict(snapshot=False) for name, store in stores.items()}
        expected = {name: {key: view.full_tensor() for key, view in state.items()} for name, state in views.items()}
        staged = writer.stage({f"{name}.{key}": view for name, state in views.items() for key, view in state.items()})
        counts = [store.stats().snapshot_count for store in stores.values()]
        assert_equal(counts, [1, 1], where=f"turn {turn}: snapshots of each store")
        for store in stores.values():
            store.set_rows("a", random_rows(store, [0, 1, 2, 3], turn + 5, "a"))
        for name, tensors in expected.items():
            for key, tensor in tensors.items():
                assert_bits(staged[f"{name}.{key}"].full_tensor(), tensor, where=f"turn {turn}: {name}.{key}")
        del staged, views


@requirement(
    "KV-493",
    "A save of lazy rows in chunks MUST look at no caller's locals but torch's own: one that has torch's writer of "
    "HF files by the name that torch gives it is not refused for it, and what a caller has and lets go is gone.",
)
def test_locals_of_callers(kvstore: Any, tmp_path: Path) -> None:
    store = filled(kvstore, KEYS)
    rows = kvstore.KVTensor(store, store.ids("a"), "weight", table="a", chunk_rows=2)
    # As a program may call it that saves in two ways.
    storage_writer = HuggingFaceStorageWriter(str(tmp_path / "other"))
    let_go = torch.ones(3)
    watched = weakref.ref(let_go)
    with warnings.catch_warnings(), succeeds("a save", where=f"beside {type(storage_writer).__name__}"):
        warnings.simplefilter("ignore")
        dcp.save({"rows": rows}, storage_writer=dcp.FileSystemWriter(tmp_path / "ck"), no_dist=True)
    del let_go
    assert_equal(watched() is None, True, where="a tensor that its caller has let go")
