"""Options that there are not, shapes and memory that cannot be meant, files that lack something: refused by name."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import MetadataIndex

import refimpl.kvstore as reference
from conformance.harness import assert_equal, raises, requirement, succeeds
from conformance.kvstore.cases import (
    FILE,
    assert_bits,
    assert_contents,
    between_tables,
    contents,
    filled,
    fresh,
    ids_of,
    random_rows,
    save,
    store_of,
)
from twinproof.errors import (
    ConfigError,
    CorruptionError,
    FormatError,
    MissingKeyError,
    PlanError,
    ShapeError,
    StoreClosedError,
    TwinproofError,
    UnsupportedError,
)
from twinproof.kvstore.views import LazyRows


@requirement(
    "KV-381",
    "A store without tables, and tables that are no mapping, MUST be refused when the store is made, with what tables "
    "are.",
)
def test_stores_without_tables(kvstore: Any) -> None:
    layout = kvstore.RowLayout(4)
    no_tables: tuple[Any, ...] = ({}, None, [("t", layout)], (layout,), "t", layout)
    for layouts in no_tables:
        with raises(ConfigError, mentions=("where: layouts", "at least one table", "RowLayout"), where=f"{layouts}"):
            kvstore.KVStore(layouts)


@requirement(
    "KV-386",
    "A policy of a kind, and buckets of a hash mode, that there are not MUST be refused when they are made, with what "
    "was given and what there is.",
)
def test_kinds_that_there_are_not(kvstore: Any) -> None:
    for kind in ("lru", "", "TTL", None, 1):
        with raises(ConfigError, mentions=("where: kind", f"got: {kind}", "ttl_count"), where=f"policy {kind!r}"):
            kvstore.EvictionPolicy(kind)
    for mode, size in (("hash", None), ("Chunk", 4), ("", None), (None, None), (0, 4)):
        said = ("where: hash_mode", f"got: {mode}", "interleave")
        with raises(ConfigError, mentions=said, where=f"buckets by {mode!r}"):
            kvstore.Buckets(2, mode, size)
        with raises(ConfigError, mentions=said, where=f"sorted by {mode!r}"):
            kvstore.sort_ids_by_bucket(ids_of([1]), 0, 2, 2, hash_mode=mode, bucket_size=size)


@requirement(
    "KV-382",
    "Ids to be sorted by bucket MUST be taken as [n] and as [n, 1], with the same result, and refused with their shape "
    "in every other.",
)
def test_shapes_of_sorted_ids(kvstore: Any) -> None:
    ids = ids_of([5, 2, 9, 4, 0, 7])
    expected = kvstore.sort_ids_by_bucket(ids, 0, 2, 2)
    for told, right in zip(kvstore.sort_ids_by_bucket(ids.reshape(6, 1), 0, 2, 2), expected, strict=True):
        assert_bits(told, right, where="a column")
    for shape in ((3, 2), (1, 6), (6, 1, 1), (1, 6, 1), (2, 3, 1)):
        with raises(ShapeError, mentions=("where: ids", str(shape)), where=f"{shape}"):
            kvstore.sort_ids_by_bucket(ids.reshape(shape), 0, 2, 2)
    with raises(ShapeError, mentions=("where: ids", "got: ()"), where="a single id"):
        kvstore.sort_ids_by_bucket(ids[0], 0, 2, 2)


def _negative(value: torch.Tensor) -> torch.Tensor:
    """The same values, which torch shows as the negative of what lies in memory."""
    return torch._neg_view((-value).contiguous())


def _of_memory(kvstore: Any, store: Any) -> dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], Any]]]:
    """Arguments that are read or filled where they lie, and the calls that take them."""
    ids, values, words = ids_of([1, 5]), torch.full((2, 6), 3.0), torch.full((2, 1), 7)
    view, fill = kvstore.KVTensor(store, ids, "weight"), torch.ones(2, 6)
    return {
        "ids of set": (ids, lambda it: store.set("t", it, values)),
        "ids of get": (ids, lambda it: store.get("t", it)),
        "ids of delete": (ids, lambda it: store.delete("t", it)),
        "ids of a view": (ids, lambda it: kvstore.KVTensor(store, it)),
        "ids to sort": (ids, kvstore.sort_ids_by_bucket),
        "weights": (values, lambda it: store.set("t", ids, it)),
        "a state": (values, lambda it: store.set_state("t", "momentum1", ids, it)),
        "gradients": (values, lambda it: store.apply_gradients("t", ids, it, 0.1)),
        "scores": (values[:, 0].contiguous(), lambda it: store.set_scores("t", ids, it)),
        "words": (words, lambda it: store.set_metadata("t", ids, it)),
        "a view's rows": (values, lambda it: view.set_range(0, 0, 2, it)),
        "memory for rows": (fill, lambda it: store.get("t", ids, out=it)),
    }


@requirement(
    "KV-383",
    "What torch shows as the negative of its memory, as imaginary parts of conjugates are, MUST be refused by every "
    "call that reads or fills memory as it lies, and nothing MUST change.",
)
def test_negatives_of_memory(kvstore: Any) -> None:
    store = store_of(kvstore)
    store.set_rows("t", random_rows(store, [1, 2, 5], 4))
    before = contents(store)
    for name, (right, call) in _of_memory(kvstore, store).items():
        with raises(ShapeError, mentions=("contiguous()", "where: "), where=name):
            call(_negative(right))
        assert_contents(store, before, where=f"after {name}")
    imaginary = torch.full((1, 1), 2 + 3j).conj().imag
    narrow = store_of(kvstore, kvstore.RowLayout(1))
    with raises(ShapeError, mentions=("contiguous()", "where: weights"), where="an imaginary part"):
        narrow.set("t", ids_of([4]), imaginary)
    narrow.set("t", ids_of([4]), imaginary.resolve_neg())
    assert_equal(narrow.get("t", ids_of([4])).tolist(), [[-3.0]], where="its values")


@requirement(
    "KV-384",
    "A state dict MUST be refused that lacks weights or ids of a table, with the names that it lacks, or whose step is "
    "none or several numbers, and nothing MUST change, with weights_only as far as it asks.",
)
def test_state_dicts_that_lack_something(kvstore: Any) -> None:
    source, store = store_of(kvstore), store_of(kvstore)
    source.set_rows("t", random_rows(source, [1, 2], 4))
    source.set_step_count("t", 3)
    store.set_rows("t", random_rows(store, [2, 7], 5))
    before, state = contents(store), dict(source.state_dict())
    for weights_only in (False, True):
        for gone in (("t.weight",), ("t.weight_id",), ("t.weight", "t.weight_id")):
            rest = {name: value for name, value in state.items() if name not in gone}
            where = f"without {gone}, weights_only={weights_only}"
            with raises(MissingKeyError, mentions=("state dict", f"got: {[*gone]}", "where: t"), where=where):
                store.load_state_dict(rest, weights_only=weights_only, clear=True)
            assert_contents(store, before, where=where)
    for steps in ([], [3, 4], [3, 3], [-1]):
        with raises(CorruptionError, mentions=("where: t.step", f"got: {steps}"), where=f"steps {steps}"):
            store.load_state_dict(state | {"t.step": ids_of(steps)}, clear=True)
        assert_contents(store, before, where=f"after steps {steps}")
        assert_equal(store.step_count("t"), 0, where=f"step after {steps}")
    store.load_state_dict(state | {"t.step": torch.tensor(9)}, clear=True)
    assert_equal(store.step_count("t"), 9, where="one number of any shape")


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Without torch's warning that this process is alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _Own(LazyRows):
    """Rows of a caller's own kind."""

    def read_rows(self, start: int, length: int) -> torch.Tensor:
        return torch.zeros(length, *self.shape[1:])


@requirement(
    "KV-385",
    "A load through views MUST refuse by name an object where rows are expected, and rows of a kind that nothing can "
    "be loaded into, before it writes a row.",
)
@pytest.mark.parametrize("kept", ["text", 5])
def test_no_rows_in_a_checkpoint(kvstore: Any, tmp_path: Path, kept: Any) -> None:
    store = store_of(kvstore)
    store.set_rows("t", random_rows(store, [1, 2], 4))
    views = store.state_dict(snapshot=False)
    state = {name: value.full_tensor() for name, value in views.items()}
    with _alone():
        dcp.save(state | {"t.weight": kept}, checkpoint_id=tmp_path / "object", no_dist=True)
        dcp.save(state | {"own": torch.ones(2, 6)}, checkpoint_id=tmp_path / "own", no_dist=True)
    store.set("t", ids_of([1]), torch.ones(1, 6))
    before = contents(store)
    with _alone(), raises(PlanError, mentions=("where: t.weight", "BytesStorageMetadata"), where="an object"):
        dcp.load(dict(views), checkpoint_id=tmp_path / "object", planner=kvstore.KVLoadPlanner(), no_dist=True)
    assert_contents(store, before, where="after an object")
    own = _Own._make((2, 6), torch.float32, None)
    with _alone(), raises(UnsupportedError, mentions=("where: load", "_Own"), where="rows of a kind of its own"):
        dcp.load(views | {"own": own}, checkpoint_id=tmp_path / "own", planner=kvstore.KVLoadPlanner(), no_dist=True)
    assert_contents(store, before, where="after rows of a kind of its own")


@requirement(
    "KV-387",
    "Lazy rows MUST come in memory of another dtype wherever the CPU is named with it, a part that is asked for "
    "without its place MUST be the first, and torch's own writer of HF files MUST be refused where it would keep one "
    "chunk of several, and not where there is one.",
)
def test_lazy_rows_among_torchs(kvstore: Any, tmp_path: Path) -> None:
    store = store_of(kvstore)
    store.set("t", ids_of(range(5)), torch.arange(30.0).reshape(5, 6))
    view, whole = (kvstore.KVTensor(store, ids_of(range(5)), "weight", chunk_rows=rows) for rows in (2, 5))
    expected = view.full_tensor()
    moves: dict[str, Callable[[], Any]] = {
        "by name": lambda: view.to("cpu", torch.float64),
        "by keyword": lambda: view.to(device=torch.device("cpu"), dtype=torch.float64),
        "by another tensor": lambda: view.to(torch.zeros(1, dtype=torch.float64)),
    }
    for name, move in moves.items():
        with succeeds("to the CPU", where=name):
            moved = move()
        assert_bits(moved.full_tensor(), expected.to(torch.float64), where=f"to the CPU {name}")
    assert_bits(view.__get_tensor_shard__(MetadataIndex("t.weight")), expected[:2], where="without a place")
    for start in (0, 2, 4):
        index = MetadataIndex("t.weight", torch.Size((start, 0)))
        assert_bits(view.__get_tensor_shard__(index), expected[start : start + 2], where=f"from {start}")
    with _alone(), raises(UnsupportedError, mentions=("got: rows", "where: save"), where="several chunks"):
        dcp.save({"rows": view}, storage_writer=HuggingFaceStorageWriter(str(tmp_path / "several")), no_dist=True)
    with _alone():
        dcp.save({"rows": whole}, storage_writer=HuggingFaceStorageWriter(str(tmp_path / "one")), no_dist=True)
    (file,) = (tmp_path / "one").glob("*.safetensors")
    assert_bits(safetensors.torch.load_file(file)["rows"], expected, where="one chunk")


def _store_in_chunks(kvstore: Any) -> Any:
    store = store_of(kvstore, kvstore.RowLayout(4), seed=3)
    store.set_rows("t", random_rows(store, [0, 3, 9, 10, 17, 25, 29], 1))
    return store


@requirement(
    "KV-388",
    "A store saved in buckets of consecutive ids MUST load into empty tables and beside rows, each bucket alone too, "
    "and an id behind its bucket MUST be refused before a row is written.",
)
@pytest.mark.parametrize("form", ["rows", "separate"])
def test_buckets_of_consecutive_ids(kvstore: Any, tmp_path: Path, form: str) -> None:
    source, buckets = _store_in_chunks(kvstore), kvstore.Buckets(3, "chunk", 10)
    save(kvstore, source, tmp_path / "ck", form=form, buckets=buckets)
    expected = contents(source)["t"]
    for kept in ([], [500]):
        for first, behind in ((0, 3), (0, 1), (1, 2), (2, 3)):
            store, where = store_of(kvstore, kvstore.RowLayout(4)), f"beside {kept}, buckets {first} to {behind}"
            store.set_rows("t", random_rows(store, kept, 2))
            rows = contents(store)["t"] | {key: row for key, row in expected.items() if first <= key // 10 < behind}
            with succeeds("load", where=where):
                kvstore.load(store, tmp_path / "ck", owned=(first, behind), chunk_rows=2)
            assert_contents(store, {"t": rows}, where=where)
    file = tmp_path / "ck" / FILE
    raw = file.read_bytes()
    # Id 9, which is the last of its bucket, becomes 11, in its header and in the list of ids.
    wrong = raw.replace((9).to_bytes(8, "little"), (11).to_bytes(8, "little"))
    file.write_bytes(wrong)
    for kept in ([], [500]):
        store = store_of(kvstore, kvstore.RowLayout(4))
        store.set_rows("t", random_rows(store, kept, 2))
        before = contents(store)
        with raises(CorruptionError, mentions=("bucket order",), where=f"beside {kept}"):
            kvstore.load(store, tmp_path / "ck")
        assert_contents(store, before, where=f"beside {kept}")


def _rewritten(source: Path, target: Path, **changes: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    """Write the same saved store to another file, with a tensor of table t made another, or left out."""
    with safetensors.safe_open(source, framework="pt") as opened:
        tensors, content = safetensors.torch.load_file(source), dict(opened.metadata())
    for name, make in changes.items():
        found = tensors.pop(f"t.{name}")
        if make is not None:
            tensors[f"t.{name}"] = make(found).contiguous()
    safetensors.torch.save_file(tensors, target, content)


@requirement(
    "KV-389",
    "A saved store MUST be refused where a tensor of a table is missing, has another dtype or other dimensions, or "
    "where its content is no mapping, with the name of what is wrong, before a row is written.",
)
@pytest.mark.parametrize("form", ["rows", "separate"])
def test_tensors_of_saved_stores(kvstore: Any, tmp_path: Path, form: str) -> None:
    source, store = store_of(kvstore, track_changes=True), store_of(kvstore)
    source.set_rows("t", random_rows(source, range(6), 1))
    mark = save(kvstore, source, tmp_path / "full", form=form).mark
    source.delete("t", ids_of([2]))
    save(kvstore, source, tmp_path / "delta", form=form, since=mark)
    kvstore.load(store, tmp_path / "full")
    before, target = contents(store), tmp_path / "other.safetensors"
    names = ["rows"] if form == "rows" else ["weight", "metadata", "momentum1", "momentum2"]
    for name in ("ids", "bucket_counts", "deleted", *names):
        wrong: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "another dtype": lambda it: it.to(torch.int16),
            "a dimension more": lambda it: it.unsqueeze(0),
            "a dimension at the end": lambda it: it.unsqueeze(-1),
            "all in one": lambda it: it.flatten() if it.dim() == 2 else it.reshape(1, -1),
        }
        _rewritten(tmp_path / "delta" / FILE, target, **{name: None})
        with raises(MissingKeyError, mentions=(f"got: t.{name}", "where: "), where=f"without {name}"):
            kvstore.load(store, target)
        for what, make in wrong.items():
            _rewritten(tmp_path / "delta" / FILE, target, **{name: make})
            with raises(CorruptionError, mentions=(f"where: t.{name}",), where=f"{name}, {what}"):
                kvstore.load(store, target)
        assert_contents(store, before, where=f"after {name}")
    for text, kind in (("[]", "list"), ('"layouts"', "str"), ("null", "NoneType"), ("5", "int")):
        tensors = safetensors.torch.load_file(tmp_path / "delta" / FILE)
        safetensors.torch.save_file(tensors, target, {"kvstore.version": "4", "kvstore.content": text})
        with raises(FormatError, mentions=(f"got: {kind}", "not the content"), where=f"content {text}"):
            kvstore.load(store, target)
    _rewritten(tmp_path / "delta" / FILE, target)
    assert_equal(kvstore.load(store, target).deleted_counts, {"t": 1}, where="as it was")


@requirement(
    "KV-390",
    "Saved rows whose file became shorter since they were opened MUST be refused by name where they are read, and MUST "
    "be no bytes that nobody wrote.",
    needs=("streamed_saves",),
)
@pytest.mark.parametrize("form", ["rows", "separate"])
def test_files_that_become_shorter(kvstore: Any, tmp_path: Path, form: str) -> None:
    source = filled(kvstore, range(20))
    save(kvstore, source, tmp_path / "ck", form=form)
    file, saved = tmp_path / "ck" / FILE, kvstore.SavedRows(tmp_path / "ck")
    raw, last = file.read_bytes(), source.ids("b").tolist()[-1]

    def cut(table: str) -> None:
        os.truncate(file, _end_of(raw, "b.ids") - 3)

    store = filled(kvstore, [500])
    said = "a load during which the file becomes shorter"
    with between_tables(cut), raises(CorruptionError, mentions=(FILE,), where=said):
        kvstore.load(store, tmp_path / "ck")
    assert_equal(set(contents(store)["b"]) <= {500, *range(20)}, True, where="ids after the load")
    reads: dict[str, Callable[[], Any]] = {
        "ids": lambda: saved.read_ids("b", 0, 19),
        "rows": lambda: saved.rows("b", 0, 19),
        "weights": lambda: saved.get("b", ids_of([last])),
        "ids of the table": lambda: saved.ids("b"),
    }
    for name, read in reads.items():
        with raises(CorruptionError, mentions=("where: ",), where=name):
            read()


def _end_of(raw: bytes, name: str) -> int:
    length = int.from_bytes(raw[:8], "little")
    end: int = 8 + length + json.loads(raw[8 : 8 + length])[name]["data_offsets"][1]
    return end


@requirement(
    "KV-391",
    "Whoever waits for the rounds of a background evictor MUST be let go when it is closed, also in the middle of a "
    "round and where another is due.",
)
def test_waiting_for_a_closed_evictor(kvstore: Any) -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    ended: list[str] = []

    def clock() -> int:
        # The evictor's own thread asks when it begins a round.
        if threading.current_thread().name == "kvstore-evict-t":
            begun.set()
            may_go_on.wait(60)
        return 1000

    store = store_of(kvstore, clock=clock)
    evictor = kvstore.BackgroundEvictor(store, "t", trigger_rows=1, policy=kvstore.EvictionPolicy.ttl(5))
    store.set("t", ids_of([1, 2, 3]), torch.ones(3, 6))
    assert_equal(begun.wait(60), True, where="a round begins")
    store.set("t", ids_of([4]), torch.ones(1, 6))
    waiter = threading.Thread(target=lambda: ended.append(f"{evictor.wait()}"), daemon=True)
    closer = threading.Thread(target=evictor.close, daemon=True)
    waiter.start()
    closer.start()
    waiter.join(2)
    let_go = list(ended)
    may_go_on.set()
    closer.join(60)
    assert_equal(let_go, ["[]"], where="who waited while it was closed: the rounds so far")
    assert_equal((closer.is_alive(), len(evictor.wait())), (False, 1), where="who waits afterwards")


@requirement(
    "KV-392",
    "What one implementation saved MUST load with its load into a store of any other implementation, empty or beside "
    "rows, as with the load of that one.",
)
@pytest.mark.parametrize("form", ["rows", "separate"])
def test_stores_of_the_reference(kvstore: Any, tmp_path: Path, form: str) -> None:
    source = filled(kvstore, range(9))
    save(kvstore, source, tmp_path / "ck", form=form, buckets=kvstore.Buckets(2))
    expected = contents(source)
    for kept in ([], [500]):
        store = filled(reference, kept) if kept else fresh(reference)
        beside = contents(store)
        with succeeds("load", where=f"{form}, beside {kept}"):
            kvstore.load(store, tmp_path / "ck", chunk_rows=2)
        wanted = {table: beside[table] | rows for table, rows in expected.items()}
        assert_contents(store, wanted, where=f"{form}, beside {kept}")


@requirement(
    "KV-393",
    "A load into an empty table for whose rows no memory can be had MUST say so by name and leave every table empty, "
    "whichever allocation fails; with memory it MUST be whole.",
    # On a device the allocation that fails may be for the other table.
    needs=("injected_allocation_failure", "operators"),
)
def test_no_memory_for_an_empty_table(kvstore: Any, tmp_path: Path) -> None:
    source, failures = filled(kvstore, range(20)), 0
    save(kvstore, source, tmp_path / "ck")
    expected = contents(source)
    for table in "ab":
        for count in range(100):
            store, where = fresh(kvstore), f"allocation {count} of {table}"
            store.fail_allocations(table, count)
            try:
                kvstore.load(store, tmp_path / "ck")
            except Exception as error:
                named = isinstance(error, TwinproofError) and isinstance(error, MemoryError)
                assert_equal((named, f"where: {table}" in str(error)), (True, True), where=f"{where}: {error!r}")
                failures += 1
                store.fail_allocations(table, -1)
                assert_contents(store, {"a": {}, "b": {}}, where=where)
                kvstore.load(store, tmp_path / "ck")
                assert_contents(store, expected, where=f"{where}: loaded again")
            else:
                break
    assert_equal(failures > 1, True, where="a load allocates")


@requirement(
    "KV-395",
    "Values that are placed into rows MUST be refused by name where they are of another number of ids, none and one "
    "among them, and nothing MUST change.",
)
def test_values_of_other_ids(kvstore: Any) -> None:
    store = store_of(kvstore)
    store.set_rows("t", random_rows(store, [1, 2, 5], 4))
    before = contents(store)
    for keys in ([], [1], [1, 5], [1, 2, 7]):
        for count in range(5):
            if count == len(keys):
                continue
            said, where = ("where: values", f"got: {count}", f"expected: {len(keys)}"), f"{count} values of ids {keys}"
            with raises(ShapeError, mentions=said, where=where):
                store.place("t", ids_of(keys), torch.ones(count, 6), 16)
            assert_contents(store, before, where=where)
    store.place("t", ids_of([5, 7]), torch.full((2, 6), 3.0), 16)
    assert_equal(store.get("t", ids_of([7, 5]))[:, 0].tolist(), [3.0, 3.0], where="values of as many ids")


@requirement(
    "KV-399",
    "Complex values that torch shows as the conjugates of their memory MUST be refused where memory is taken as it "
    "lies, with nothing changed, and the same values in memory MUST be written.",
)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_conjugates_of_memory(kvstore: Any, dtype: torch.dtype) -> None:
    store = store_of(kvstore, kvstore.RowLayout(8))
    store.set_rows("t", random_rows(store, [0, 1, 2], 4))
    before = contents(store)
    wrapper = kvstore.KVTensorWrapper([3, 2], dtype, 0)
    wrapper.set_dram_db_wrapper(store)
    values = torch.full((2, 2), 2 + 3j, dtype=dtype).conj()
    calls: dict[str, Callable[[], Any]] = {
        "set_range": lambda: wrapper.set_range(0, 1, 2, values),
        "set_weights_and_ids": lambda: wrapper.set_weights_and_ids(values, ids_of([1, 2])),
    }
    for name, call in calls.items():
        with raises(ShapeError, mentions=("contiguous()", "where: weights"), where=name):
            call()
        assert_contents(store, before, where=f"after {name}")
    wrapper.set_range(0, 1, 2, values.resolve_conj())
    assert_bits(wrapper.narrow(0, 1, 2), values.resolve_conj(), where="the same values in memory")


@requirement(
    "KV-402",
    "Saved rows MUST name the file in which each of their tensors is, of one file as of several, and refuse by name "
    "what is none of their tensors.",
)
@pytest.mark.parametrize("form", ["rows", "separate"])
def test_files_of_tensors(kvstore: Any, tmp_path: Path, form: str) -> None:
    source = filled(kvstore, range(5))
    for name, options in (("one", {}), ("several", {"max_shard_size": 200})):
        save(kvstore, source, tmp_path / name, form=form, **options)
        saved, seen = kvstore.SavedRows(tmp_path / name), set()
        for file in sorted((tmp_path / name).glob("*.safetensors")):
            with safetensors.safe_open(file, framework="pt") as opened:
                keys = list(opened.keys())
            for key in keys:
                with succeeds("file_of()", where=f"{name}: {key}"):
                    seen.add(saved.file_of(key))
                assert_equal(saved.file_of(key), str(file), where=f"{name}: {key}")
        assert_equal(len(seen) > 1, name == "several", where=f"files of {name}")
        for key in ("a", "a.weights", "", None):
            with raises(MissingKeyError, mentions=(f"got: {key}",), where=f"{name}: {key!r}"):
                saved.file_of(key)


def _in_two_shards(source: Path, target: Path, split: str, first: int) -> None:
    """A saved store again, its tensors in one file of shards, but for the rows from ``first`` on of one of them."""
    with safetensors.safe_open(source, framework="pt") as opened:
        tensors, content = safetensors.torch.load_file(source), dict(opened.metadata())
    target.mkdir()
    rows = tensors.pop(split)
    parts = [{**tensors, split: rows[:first].contiguous()}, {split: rows[first:].contiguous()}]
    for number, part in enumerate(parts):
        info = {name: {"saved_offsets": [0] * value.dim()} for name, value in part.items()}
        if number:
            info[split]["saved_offsets"][0] = first
        file = target / f"shard-0000{number}-model-00001-of-00001.safetensors"
        safetensors.torch.save_file(part, file, content | {"DCP_SHARDING_INFO": json.dumps(info)})


@requirement(
    "KV-403",
    "A saved store of which a tensor lies in several pieces, as in shards that nobody put together, MUST be refused "
    "with the name of the tensor before a row is written.",
)
@pytest.mark.parametrize("form", ["rows", "separate"])
def test_tensors_in_pieces(kvstore: Any, tmp_path: Path, form: str) -> None:
    source, store = store_of(kvstore), store_of(kvstore)
    source.set_rows("t", random_rows(source, range(6), 1))
    save(kvstore, source, tmp_path / "ck", form=form, buckets=kvstore.Buckets(2))
    store.set_rows("t", random_rows(store, [2, 9], 5))
    before = contents(store)
    names = ["rows"] if form == "rows" else ["weight", "metadata", "momentum1", "momentum2"]
    for name in ("ids", "bucket_counts", *names):
        _in_two_shards(tmp_path / "ck" / FILE, tmp_path / name, f"t.{name}", 1)
        with raises(CorruptionError, mentions=(f"where: t.{name}", "not a tensor of this kind"), where=name):
            kvstore.load(store, tmp_path / name)
        assert_contents(store, before, where=f"after {name}")


@requirement(
    "KV-404",
    "Saved rows that another writer changed since they were opened, in a file of the same size and time, MUST be "
    "refused by name where a row has another id than it had, and others read as they are.",
)
@pytest.mark.parametrize("form", ["rows", "separate"])
def test_files_of_the_same_time(kvstore: Any, tmp_path: Path, form: str) -> None:
    source = store_of(kvstore)
    source.set_rows("t", random_rows(source, [3, 9, 20], 1))
    save(kvstore, source, tmp_path / "ck", form=form)
    saved, file = kvstore.SavedRows(tmp_path / "ck"), tmp_path / "ck" / FILE
    expected = source.get("t", ids_of([3, 9, 20]))
    assert_bits(saved.get("t", ids_of([3, 9, 20])), expected, where="as they were saved")
    status = file.stat()
    file.write_bytes(file.read_bytes().replace((9).to_bytes(8, "little"), (11).to_bytes(8, "little")))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    for ids in ([9], [3, 9], [9, 20]):
        said = ("another row than before", "got: 11", "expected: 9", "where: ")
        with raises(CorruptionError, mentions=said, where=f"ids {ids}"):
            saved.get("t", ids_of(ids))
    assert_bits(saved.get("t", ids_of([20, 3])), expected[[2, 0]], where="rows of the same ids")


@requirement(
    "KV-405",
    "A load into an empty table that met wrong rows MUST be refused by name and leave the table empty, also where "
    "somebody has put the file right by the time at which it is looked at what is wrong.",
    # A device reads rows before it looks at them, and finds that the file is another.
    needs=("streamed_saves", "operators"),
)
def test_files_that_are_put_right(kvstore: Any, tmp_path: Path) -> None:
    source, store = store_of(kvstore), store_of(kvstore)
    source.set_rows("t", random_rows(source, [3, 9, 20], 1))
    save(kvstore, source, tmp_path / "ck")
    file = tmp_path / "ck" / FILE
    right, between = file.read_bytes(), kvstore.SavedRows.between

    def put_right(saved: Any, *arguments: Any) -> Any:
        # In place: the file stays the one that was opened.
        with open(file, "r+b") as opened:
            opened.write(right)
        return between(saved, *arguments)

    # The key in the header of a row, which stands before the ids.
    file.write_bytes(right.replace((9).to_bytes(8, "little"), (11).to_bytes(8, "little"), 1))
    with mock.patch.object(kvstore.SavedRows, "between", put_right):
        said = ("change while they are read", str(tmp_path / "ck"))
        with raises(CorruptionError, mentions=said, where="a file that was put right"):
            kvstore.load(store, tmp_path / "ck")
    assert_contents(store, {"t": {}}, where="after the load")
    kvstore.load(store, tmp_path / "ck")
    assert_contents(store, contents(source), where="loaded again")


@requirement(
    "KV-406",
    "A load through the planner for views that has no views MUST be torch's own: of plain tensors by their names, and "
    "of a checkpoint of torch's older names for what is nested.",
)
def test_plans_without_views(kvstore: Any, tmp_path: Path) -> None:
    store = store_of(kvstore)
    store.set_rows("t", random_rows(store, [1, 2], 4))
    state = {name: value.full_tensor() for name, value in store.state_dict().items()}
    notes = {"epoch": 7, "run": {"seed": 3}}
    with _alone():
        dcp.save(state, checkpoint_id=tmp_path / "plain", no_dist=True)
        older = DefaultSavePlanner(flatten_state_dict=False)
        dcp.save(state | {"notes": notes}, checkpoint_id=tmp_path / "older", planner=older, no_dist=True)
    for name, some in (("plain", ["t.weight_id"]), ("plain", [*state]), ("older", ["t.weight_id", "t.step"])):
        target: dict[str, Any] = {key: torch.zeros_like(state[key]) for key in some}
        if name == "older":
            target["notes"] = {"epoch": 0, "run": {"seed": 0}}
        with _alone(), succeeds("a load", where=f"{name}: {some}"):
            dcp.load(target, checkpoint_id=tmp_path / name, planner=kvstore.KVLoadPlanner(), no_dist=True)
        for key in some:
            assert_bits(target[key], state[key], where=f"{name}: {key}")
        if name == "older":
            assert_equal(target["notes"], notes, where="what is nested")


@requirement(
    "KV-407",
    "A store on a device MUST be refused when it is made with what is missing: a GPU, or a library that was built for "
    "one, also where there is a GPU.",
    needs=("operators",),
)
@pytest.mark.parametrize(("has_gpu", "is_built"), [(False, False), (False, True), (True, False)])
def test_what_a_device_lacks(kvstore: Any, has_gpu: bool, is_built: bool) -> None:
    from fastimpl import ops

    operators = ["kvstore_create", "kvstore_read"] if is_built else ["adam_step"]
    said = "torch.cuda.is_available() is False" if is_built else "built without CUDA"
    with (
        mock.patch.object(ops, "cuda_operators", return_value=operators),
        mock.patch.object(torch.cuda, "is_available", return_value=has_gpu),
        raises(ConfigError, mentions=("no CUDA device", said, "where: device"), where=f"{has_gpu}, {is_built}"),
    ):
        store_of(kvstore, device="cuda")


@requirement(
    "KV-408",
    "What torch says in a call of a store that is open MUST come as it is, as an error of a device does, and only a "
    "store that was closed MUST be called closed.",
    needs=("operators",),
)
def test_errors_of_torch(kvstore: Any) -> None:
    from fastimpl.ops import KVHandle

    store, ids = store_of(kvstore), ids_of([1])
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    calls: dict[str, Callable[[], Any]] = {
        "read": lambda: store.get("t", ids),
        "write": lambda: store.set("t", ids, torch.ones(1, 6)),
        "contains": lambda: store.contains("t", ids),
        "size": lambda: store.size("t"),
        "delete": lambda: store.delete("t", ids),
        "mark": store.mark,
    }
    for name, call in calls.items():
        with mock.patch.object(KVHandle, name, side_effect=error):
            with raises(RuntimeError, mentions=("illegal memory access",), where=name) as found:
                call()
            assert_equal(found.error is error, True, where=f"{name}: the error itself")
        # What torch says of a handle that another thread has closed meanwhile.
        dead = RuntimeError("handle: dead, its store or snapshot was closed")
        with mock.patch.object(KVHandle, name, side_effect=dead), raises(StoreClosedError, where=f"{name}, meanwhile"):
            call()
    store.set("t", ids, torch.ones(1, 6))
    assert_equal(store.size("t"), 1, where="the store afterwards")
