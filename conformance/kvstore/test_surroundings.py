"""What the process is beside the store: defaults that a caller has set for its model, and where it stands."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from conformance.harness import assert_equal, requirement, succeeds
from conformance.harness.surroundings import SURROUNDINGS as OF_A_PROCESS
from conformance.kvstore.cases import assert_bits, contents, filled, fresh, ids_of, save, store_of

SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    **OF_A_PROCESS,
    # Where a model is made that has no memory yet; the memory of a GPU is as little the CPU's.
    "another device": partial(torch.device, "meta"),
}
# What takes gradients.
TRAINING = ("a bag", "a bag with offsets", "an embedding")


def _plain(value: Any) -> Any:
    """Tensors as what they are and their bytes, in whatever they stand."""
    if isinstance(value, torch.Tensor):
        kind = (value.dtype, value.device.type, tuple(value.shape))
        is_here = value.device.type == "cpu"
        return *kind, value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if is_here else None
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def _round_in_thread(kvstore: Any, it: SimpleNamespace) -> Any:
    """What a round removes that a thread runs, which has no mode of its own."""
    policy = kvstore.EvictionPolicy.count(2)
    with kvstore.BackgroundEvictor(it.store, "b", trigger_rows=1, policy=policy, slice_rows=1) as evictor:
        it.store.set("b", it.ids, it.some)
        return [stats.evicted_count for stats in evictor.wait()], it.store.ids("b")


def _verbs(kvstore: Any, it: SimpleNamespace) -> dict[str, Callable[[], Any]]:
    """Every verb of a store, its rows and moments."""
    store, ids, some = it.store, it.ids, it.some
    return {
        "rows": lambda: contents(store),
        "set": lambda: store.set("b", ids, some),
        "get": lambda: [store.get("b", ids), store.get("a", ids, count=2), store.get_rows("a", ids)],
        "apply_gradients": lambda: store.apply_gradients("b", ids, some, 0.5),
        "states": lambda: [store.set_state("b", "momentum1", ids, some), store.get_state("b", "momentum1", ids)],
        "scores": lambda: [store.set_scores("b", ids, some[:, 0].contiguous()), store.get_scores("b", ids)],
        "metadata": lambda: [store.set_metadata("a", ids, it.words), store.metadata("a", ids)],
        "lists": lambda: [store.ids("a", -3, 4), store.contains("a", ids), store.changes("b", 0)],
        "evict": lambda: [store.evict("b", policy=policy)["b"].evicted_count for policy in it.policies],
        "evict in a thread": lambda: _round_in_thread(kvstore, it),
        "delete": lambda: [store.delete("a", ids[:1]), store.size("a")],
        "buckets": lambda: [*kvstore.sort_ids_by_bucket(ids, total_buckets=3), kvstore.bucket_of(ids, it.buckets)],
        "headers": lambda: vars(kvstore.unpack_header(kvstore.pack_header(it.header))),
        "views": lambda: [
            kvstore.KVTensor(store, ids, name, table="b").full_tensor() for name in ("row", "weight", "metadata")
        ],
        "a wrapper": lambda: it.wrapper.narrow(0, 1, 2),
        "a moment": lambda: contents(store.snapshot()),
        "a full table": lambda: [it.small.set("t", ids, some), it.small.ids("t")],
    }


def _journeys(kvstore: Any, checkpoint: Any, it: SimpleNamespace) -> dict[str, Callable[[], Any]]:
    """Ways of rows into files and other stores."""
    store, folder = it.store, it.folder

    def loaded(name: str, **options: Any) -> Any:
        other = fresh(kvstore, track_changes=True)
        if options:
            other.set("b", it.ids, it.some)
        kvstore.load(other, folder / name, **options)
        return other

    def delta() -> Any:
        other, mark = loaded("rows"), store.mark()
        store.set("b", it.ids[:2], it.some[:2])
        store.delete("b", it.ids[2:])
        save(kvstore, store, folder / "delta", since=mark, buckets=it.buckets)
        kvstore.load(other, folder / "delta")
        return contents(other)

    def by_state_dict(whole: bool, how: Callable[[Any], Any]) -> Any:
        other = fresh(kvstore)
        store.set_return_whole_row(whole)
        state = how(store.state_dict(buckets=it.buckets))
        other.load_state_dict(state)
        return contents(other), {name: value.full_tensor() for name, value in state.items()}

    def by_torch() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            writer = checkpoint.HuggingFaceStorageWriter(folder / "torch", durable=False)
            dcp.save(store.state_dict(), storage_writer=writer, no_dist=True)
            reader = checkpoint.HuggingFaceStorageReader(folder / "torch")
            views = store.state_dict(snapshot=False)
            dcp.load(views, storage_reader=reader, planner=kvstore.KVLoadPlanner(), no_dist=True)
        return contents(store)

    def by_id() -> Any:
        saved = kvstore.SavedRows(folder / "rows")
        return [saved.get("b", it.ids), saved.contains("b", it.ids), saved.ids("a", -3, 4), contents(saved)]

    return {
        "save": lambda: save(kvstore, store, folder / "rows", buckets=it.buckets).row_counts,
        "save apart": lambda: save(kvstore, store, folder / "apart", form="separate").row_counts,
        "load": lambda: [contents(loaded(name)) for name in ("rows", "apart")],
        "load over rows": lambda: [contents(loaded(name, chunk_rows=3)) for name in ("rows", "apart")],
        "saved rows": by_id,
        "a delta": delta,
        "state dicts": lambda: [by_state_dict(whole, dict) for whole in (False, True)],
        "pickled": lambda: by_state_dict(False, lambda state: pickle.loads(pickle.dumps(state))),
        "copied": lambda: by_state_dict(True, copy.deepcopy),
        "through torch": by_torch,
    }


def _modules(it: SimpleNamespace) -> dict[str, Callable[[], Any]]:
    def trained(module: Any, *arguments: Any) -> Any:
        found = module(*arguments)
        found.sum().backward()
        return found, contents(module.store), module.step_count

    def moved() -> Any:
        it.other.load_state_dict(it.embedding.state_dict())
        return contents(it.other.store)

    batch = it.ids.reshape(2, 2)
    return {
        "looked up": lambda: [it.bag(batch), it.bag(it.ids, it.offsets), it.embedding(batch)],
        "a module's state": moved,
        # Last, since it is left out where there are no gradients.
        "a bag": lambda: trained(it.bag, batch),
        "a bag with offsets": lambda: trained(it.bag, it.ids, it.offsets),
        "an embedding": lambda: trained(it.embedding, batch),
    }


def _made(kvstore: Any, folder: Path, within: Callable[[], AbstractContextManager[Any]]) -> SimpleNamespace:
    """Stores, modules and wrappers that are made there; rows and arguments come from outside."""
    source = filled(kvstore, range(-6, 6))
    layout = kvstore.RowLayout(4, torch.float16, "adam")
    ids = ids_of([5, -4, 100, 5])
    numbers = torch.tensor([3, 0, 2**31 - 1, 9])
    it = SimpleNamespace(
        folder=folder,
        ids=ids,
        some=torch.arange(16, dtype=torch.float32).reshape(4, 4) / 8,
        words=torch.tensor([[7], [1 << 40], [3], [9 << 32 | 5]]),
        offsets=torch.tensor([0, 0, 3]),
        header=kvstore.Header(ids, numbers, numbers, numbers > 2),
        buckets=kvstore.Buckets(3),
        policies=[
            kvstore.EvictionPolicy.l2(0.01),
            kvstore.EvictionPolicy.score(9),
            kvstore.EvictionPolicy.count(1, 0.5),
        ],
    )
    with within(), succeeds("making stores", where=folder.name):
        it.store = fresh(kvstore, track_changes=True)
        it.small = store_of(kvstore, kvstore.RowLayout(4), capacity=3, eviction=kvstore.EvictionPolicy.count(1))
        it.wrapper = kvstore.KVTensorWrapper([3, 4], torch.float32, 0, table="b")
        it.wrapper.set_dram_db_wrapper(it.store)
        classes = {"bag": kvstore.KVEmbeddingBag, "embedding": kvstore.KVEmbedding, "other": kvstore.KVEmbedding}
        for name, module in classes.items():
            setattr(it, name, module(store_of(kvstore, layout, initializer=kvstore.Initializer.uniform(-2, 3))))
    it.embedding.store.apply_gradients("t", ids[:2], it.some[:2], 0.25)
    for table in source.tables:
        it.store.set_rows(table, source.get_rows(table, source.ids(table)))
    return it


def _found(kvstore: Any, checkpoint: Any, folder: Path, made: Any, used: Any, left_out: tuple[str, ...]) -> Any:
    """What each act gives, by name."""
    folder.mkdir()
    it = _made(kvstore, folder, made)
    acts = _verbs(kvstore, it) | _journeys(kvstore, checkpoint, it) | _modules(it)
    found = {}
    for name, act in acts.items():
        if name in left_out:
            continue
        with used(), succeeds(name, where=folder.name):
            value = act()
        found[name] = _plain(value)
    return found


@requirement(
    "KV-275",
    "The default dtype, the default device, the mode of gradients, mixed precision and deterministic algorithms MUST "
    "change nothing that a store, its views, files and modules do, whether they were made there or are used there.",
)
def test_surroundings(kvstore: Any, checkpoint: Any, tmp_path: Path) -> None:
    expected = _found(kvstore, checkpoint, tmp_path / "plain", nullcontext, nullcontext, ())
    for name, there in SURROUNDINGS.items():
        without = TRAINING if name in ("inference", "no gradients") else ()
        for how, made, used, left_out in (("made", there, nullcontext, ()), ("used", nullcontext, there, without)):
            found = _found(kvstore, checkpoint, tmp_path / f"{how} in {name}", made, used, left_out)
            for act, value in found.items():
                assert_equal(value, expected[act], where=f"{how} in {name}: {act}")


@requirement(
    "KV-272",
    "Saved rows and views of them MUST be those of the folder that was named when they were opened, also where the "
    "name was relative and the working folder is another since, here and in another process.",
)
def test_working_folder(kvstore: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    stores = {}
    for seed, folder in enumerate((here, there), start=1):
        folder.mkdir()
        stores[folder] = filled(kvstore, range(seed, seed + 6))
        save(kvstore, stores[folder], folder / "ck")
    expected = contents(stores[here])
    keys = ids_of(list(expected["b"]))
    rows = stores[here].get_rows("b", keys)
    # A link is followed before "..", as the system does it.
    (there / "link").symlink_to(here / "ck")
    for start, name in (
        (here, "ck"),
        (here, "./ck"),
        (there, "../here/ck"),
        (there, "link/../ck"),
        (there, here / "ck"),
    ):
        monkeypatch.chdir(start)
        saved = kvstore.SavedRows(name)
        view = kvstore.KVTensor(saved, keys, table="b")
        sent = [pickle.dumps(view)]
        for other in (there, tmp_path):
            os.chdir(other)
            where = f"{name} opened in {start.name}, read in {other.name}"
            sent += [pickle.dumps(view), pickle.dumps(kvstore.KVTensor(saved, keys, table="b"))]
            for number, raw in enumerate(sent):
                with succeeds("reading", where=f"{where}: view {number} that travelled"):
                    found = pickle.loads(raw).full_tensor()
                assert_bits(found, rows, where=f"{where}: view {number} that travelled")
            with succeeds("reading", where=where):
                found = contents(saved)
            assert_equal(found, expected, where=where)
            assert_bits(view.full_tensor(), rows, where=f"{where}: a view")
