"""Save and load: the same rows, in any form, any chunks, any world; all of it or nothing."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, assert_same_bytes, examples, raises, requirement, succeeds
from conformance.kvstore import strategies
from conformance.kvstore.cases import (
    FILE,
    OPTIMIZERS,
    Clock,
    assert_bits,
    assert_contents,
    contents,
    filled,
    fresh,
    ids_of,
    layouts_of,
    random_rows,
    save,
    store_of,
    weights_of,
)
from twinproof.errors import ConfigError, CorruptionError, DistributedError, TwinproofError


@requirement("KV-042", "What is saved and loaded into an empty store MUST be the same rows, to the byte.")
@examples(25)
@given(strategies.batches, st.integers(1, 6), st.sampled_from(["rows", "separate"]))
def test_round_trip(kvstore: Any, tmp_path_factory: Any, keys: list[int], buckets: int, form: str) -> None:
    path = tmp_path_factory.mktemp("kv") / "ck"
    store, other = filled(kvstore, list(dict.fromkeys(keys))), fresh(kvstore)
    report = save(kvstore, store, path, buckets=kvstore.Buckets(buckets), form=form)
    loaded = kvstore.load(other, path)
    assert_contents(other, contents(store), where=form)
    sizes = {table: store.size(table) for table in "ab"}
    assert_equal((report.row_counts, loaded.row_counts), (sizes, sizes), where="reports")


@requirement(
    "KV-043", "Chunks of any size, in save, load and state dicts, loaded once or twice, MUST give the same rows."
)
def test_chunks(kvstore: Any, tmp_path: Path) -> None:
    keys = list(range(-11, 12))
    store = filled(kvstore, keys, return_whole_row=True)
    expected = contents(store)
    plain = save(kvstore, store, tmp_path / "whole", buckets=kvstore.Buckets(3))
    assert_equal(plain.row_counts["a"], len(keys), where="rows")
    for chunk in (1, 7, len(keys) - 1, len(keys), len(keys) + 1):
        save(kvstore, store, tmp_path / f"{chunk}", buckets=kvstore.Buckets(3), chunk_rows=chunk)
        assert_same_bytes(tmp_path / f"{chunk}" / FILE, tmp_path / "whole" / FILE, where=f"chunks of {chunk}")
        other = fresh(kvstore)
        for _ in range(2):
            kvstore.load(other, tmp_path / "whole", chunk_rows=chunk)
            assert_contents(other, expected, where=f"loaded in chunks of {chunk}")
        target = fresh(kvstore)
        state = store.state_dict(chunk_rows=chunk)
        for table in "ab":
            view = kvstore.KVTensor(target, state[f"{table}.weight_id"].full_tensor()[:, 0], table=table)
            for start, rows in reversed(list(state[f"{table}.weight"].chunks())):
                view.set_range(0, start, rows.shape[0], rows)
        assert_contents(target, expected, where=f"written in chunks of {chunk}, backwards")


@requirement(
    "KV-044",
    "The key in a row's header MUST be the truth: an id list that disagrees, or names an id twice, MUST be refused "
    "before anything is written.",
)
def test_keys_are_the_truth(kvstore: Any, tmp_path: Path) -> None:
    store, other = filled(kvstore, return_whole_row=True), filled(kvstore, [1, 2, 3])
    state = {name: value.full_tensor() for name, value in store.state_dict().items()}
    before = contents(other)
    count = state["a.weight_id"].shape[0]
    wrong = {
        "placeholder zeros": torch.zeros(count, 1, dtype=torch.int64),
        "permuted": state["a.weight_id"].flip(0).contiguous(),
        "off by one": state["a.weight_id"] + 1,
    }
    for name, ids in wrong.items():
        with raises(CorruptionError, where=name):
            other.load_state_dict(state | {"a.weight_id": ids})
        assert_contents(other, before, where=name)
    doubled = {name: torch.cat([value, value[:1]]) for name, value in state.items() if name.startswith("a.")}
    with raises(CorruptionError, where="an id twice"):
        other.load_state_dict(state | doubled)
    assert_contents(other, before, where="an id twice")
    save(kvstore, store, tmp_path / "ck")
    tampered = contents(store)["a"][0][:8]
    path = tmp_path / "ck" / FILE
    raw = bytearray(path.read_bytes())
    raw[raw.index(tampered + contents(store)["a"][0][8:16])] ^= 1
    path.write_bytes(raw)
    with raises(CorruptionError, where="a file whose key was changed"):
        kvstore.load(other, tmp_path / "ck")
    assert_contents(other, before, where="a file whose key was changed")


@requirement(
    "KV-045",
    "In whole-row mode the rows alone MUST restore weight and state; optimizer views MUST be ignored, in any order.",
)
def test_order_of_tensors(kvstore: Any) -> None:
    store = filled(kvstore, return_whole_row=True)
    state = store.state_dict()
    expected = contents(store)
    rows_only = {name: value for name, value in state.items() if name.endswith(("weight", "weight_id"))}
    noise = {
        name: torch.full_like(value.full_tensor(), 9)
        for name, value in state.items()
        if name.rpartition(".")[2].startswith("momentum")
    }
    for given_state in (rows_only, dict(reversed(state.items())), state | noise):
        other = fresh(kvstore)
        other.load_state_dict(given_state)
        assert_contents(other, expected, where=str(list(given_state)))
    target = filled(kvstore)
    for order in (1, -1):
        live = target.state_dict(snapshot=False)
        live |= {
            n: kvstore.KVTensor(target, v.ids, v.view_name, True, table=v.table) for n, v in live.items() if n in noise
        }
        for name in sorted(noise)[::order]:
            skipped = live[name].set_range(0, 0, live[name].shape[0], noise[name])
            assert_equal(skipped, live[name].shape[0], where=f"skipped by {name}")
        assert_contents(target, contents(filled(kvstore)), where="after writes to read-only views")


@requirement("KV-047", "Loading over rows MUST replace exactly the listed ids, keep the others, and leak nothing.")
@examples(25)
@given(strategies.close_batches, strategies.close_batches)
def test_load_over(kvstore: Any, tmp_path_factory: Any, saved: list[int], there: list[int]) -> None:
    path = tmp_path_factory.mktemp("kv") / "ck"
    store = filled(kvstore, list(dict.fromkeys(saved)))
    other = store_of(kvstore, layouts_of(kvstore))
    for table in "ab":
        other.set_rows(table, random_rows(other, list(dict.fromkeys(there)), 50, table))
    before, listed = contents(other), contents(store)
    save(kvstore, store, path)
    kvstore.load(other, path)
    assert_contents(other, {table: before[table] | listed[table] for table in "ab"}, where="merged")
    stats = other.stats()
    assert_equal(stats.block_count, sum(map(len, contents(other).values())), where="blocks")


@requirement(
    "KV-049",
    "With weights_only weights MUST be equal, states zero and sizes equal; without it, rows of another optimizer or "
    "without state MUST be refused.",
)
def test_weights_only(kvstore: Any, tmp_path: Path) -> None:
    store = filled(kvstore)
    small = kvstore.KVStore(dict(layouts_of(kvstore)), clock=Clock())
    for form in ("rows", "separate"):
        save(kvstore, store, tmp_path / form, form=form)
        for other in (fresh(kvstore), small):
            kvstore.load(other, tmp_path / form, weights_only=True)
            for table in "ab":
                ids = store.ids(table)
                assert_bits(other.ids(table), ids, where="ids")
                assert_bits(other.get(table, ids), store.get(table, ids), where=f"weights of {table}")
                assert_bits(other.metadata(table, ids), store.metadata(table, ids), where=f"metadata of {table}")
                for name, slot in other.layout(table).state_slots.items():
                    zero = torch.zeros(ids.numel(), slot.count, dtype=slot.dtype)
                    assert_bits(other.get_state(table, name, ids), zero, where=f"{name} of {table}")
    saved = sum(small.layout(t).row_bytes * small.size(t) for t in "ab")
    assert_equal(small.stats().row_bytes, saved, where="rows without state")
    with raises(ConfigError, mentions=["weights_only"]):
        kvstore.load(kvstore.KVStore(layouts_of(kvstore)), tmp_path / "rows")
    save(kvstore, small, tmp_path / "small")
    with raises(ConfigError, mentions=["weights_only"]):
        kvstore.load(fresh(kvstore), tmp_path / "small")


def _load_file(kvstore: Any, path: Path, store: Any, weights_only: bool) -> None:
    kvstore.load(store, path, weights_only=weights_only)


def _load_state(state: dict[str, Any], store: Any, weights_only: bool) -> None:
    store.load_state_dict(state, weights_only=weights_only)


@requirement(
    "KV-307",
    "Rows of every optimizer MUST be refused by tables of every other one whose state they are not, also where the "
    "states have the same names and widths, from files and as whole rows; with weights_only they MUST load.",
)
def test_pairs_of_optimizers(kvstore: Any, tmp_path: Path) -> None:
    def made(optimizer: str) -> Any:
        store = store_of(kvstore, kvstore.RowLayout(4, optimizer=optimizer), return_whole_row=True)
        store.set_rows("t", random_rows(store, [50], 2))
        return store

    sources = {name: store_of(kvstore, kvstore.RowLayout(4, optimizer=name)) for name in OPTIMIZERS}
    for name, source in sources.items():
        source.set_rows("t", random_rows(source, [1, 2, 3], 1))
        source.set_return_whole_row(True)
        save(kvstore, source, tmp_path / name)
    for (name, source), other in product(sources.items(), OPTIMIZERS):
        has_state = bool(source.layout("t").state_slots) or bool(sources[other].layout("t").state_slots)
        state = source.state_dict()
        ways: dict[str, Callable[..., Any]] = {
            "file": partial(_load_file, kvstore, tmp_path / name),
            "state dict": partial(_load_state, state),
        }
        for way, load in ways.items():
            target, where = made(other), f"{way} of {name} into {other}"
            before = contents(target)
            if name != other and has_state:
                with raises(ConfigError, mentions=(f"got: {name}", f"expected: {other}", "weights_only"), where=where):
                    load(target, False)
                assert_contents(target, before, where=where)
                with succeeds("load", where=f"{where}, weights only"):
                    load(target, True)
            else:
                with succeeds("load", where=where):
                    load(target, False)
            ids = source.ids("t")
            assert_bits(target.get("t", ids), source.get("t", ids), where=f"{where}: weights")


@requirement(
    "KV-050", "Loading into another dtype MUST round to nearest even, and back from a wider one MUST be exact."
)
def test_other_dtypes(kvstore: Any, tmp_path: Path) -> None:
    layouts = {d: kvstore.RowLayout(5, d, "adam") for d in (torch.float32, torch.float16, torch.bfloat16)}
    generator = torch.Generator().manual_seed(3)
    for source, layout in layouts.items():
        store = store_of(kvstore, layout)
        ids = ids_of(range(30))
        weights = (torch.randn(30, 5, generator=generator) * 10).to(source)
        store.set("t", ids, weights)
        store.set_state("t", "momentum2", ids, torch.rand(30, 5, generator=generator))
        for form in ("rows", "separate"):
            path = tmp_path / f"{source}-{form}"
            save(kvstore, store, path, form=form)
            for target, other_layout in layouts.items():
                other = store_of(kvstore, other_layout)
                kvstore.load(other, path)
                assert_bits(other.get("t", ids), weights.to(target), where=f"{source} to {target}, {form}")
                momentum = store.get_state("t", "momentum2", ids)
                assert_bits(other.get_state("t", "momentum2", ids), momentum, where=f"momentum2, {source} to {target}")


@requirement(
    "KV-051",
    "Rows that W ranks saved MUST load on any W' ranks: each id on the rank that owns its bucket and nowhere else, "
    "their union the same rows, and no rank reading rows of other ranks' buckets.",
)
def test_reshard(kvstore: Any, tmp_path: Path, monkeypatch: Any) -> None:
    store, total = filled(kvstore, range(-60, 60)), 10
    save(kvstore, store, tmp_path / "ck", buckets=kvstore.Buckets(total))
    expected = contents(store)
    for world_size in (1, 2, 3, 4, 7, 8):
        union: dict[str, dict[int, bytes]] = {"a": {}, "b": {}}
        for rank in range(world_size):
            begin, end = kvstore.rank_buckets(total, world_size, rank)
            part = fresh(kvstore)
            kvstore.load(part, tmp_path / "ck", owned=(begin, end))
            for table, rows in contents(part).items():
                assert_equal(
                    all(begin <= key % total < end for key in rows), True, where=f"rank {rank} of {world_size}"
                )
                assert_equal(set(rows) & set(union[table]), set(), where="ids on two ranks")
                union[table] |= rows
        for table in "ab":
            assert_equal(sorted(union[table]), sorted(expected[table]), where=f"ids over {world_size} ranks")
            assert_equal(union[table], expected[table], where=f"rows over {world_size} ranks")
    saved = kvstore.SavedRows(tmp_path / "ck")
    begin, end = 3, 5
    keys = [key for ids, _ in saved.chunks("a", begin, end, 4) for key in ids.tolist()]
    assert_equal(keys, sorted((k for k in expected["a"] if begin <= k % total < end), key=lambda k: (k % total, k)))


def save_part(rank: Any, path: str, total: int) -> None:
    """Save this rank's buckets."""
    kvstore = rank.component("kvstore")
    begin, end = kvstore.rank_buckets(total, rank.world_size, rank.rank)
    store = filled(kvstore, [key for key in range(-40, 40) if begin <= key % total < end])
    store.set_rows("b", random_rows(store, store.ids("a").tolist(), 2, "b"))
    save(kvstore, store, Path(path), buckets=kvstore.Buckets(total), chunk_rows=7)


def load_part(rank: Any, path: str) -> dict[str, dict[int, bytes]]:
    """What this rank loads."""
    kvstore = rank.component("kvstore")
    store = fresh(kvstore)
    kvstore.load(store, path, chunk_rows=5)
    return contents(store)


def save_foreign(rank: Any, path: str) -> str:
    """Save ids that are another rank's, on one rank only; the error's class on every rank."""
    kvstore = rank.component("kvstore")
    store = store_of(kvstore, kvstore.RowLayout(4))
    keys = [rank.rank, 1 - rank.rank] if rank.rank == 0 else [rank.rank]
    store.set("t", ids_of(keys), torch.zeros(len(keys), 4))
    try:
        save(kvstore, store, Path(path), buckets=kvstore.Buckets(2))
    except TwinproofError as error:
        return type(error).__name__
    return "no error"


@requirement(
    "KV-097",
    "Ranks that save together MUST write one checkpoint of all their rows, which any other number of ranks loads; an "
    "id in the wrong rank MUST fail on every rank, with nothing written.",
)
def test_ranks(kvstore: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(save_part, 2, str(tmp_path / "ck"), 5)
    whole = fresh(kvstore)
    kvstore.load(whole, tmp_path / "ck")
    assert_equal(whole.ids("a").tolist(), list(range(-40, 40)), where="ids")
    parts = rank_pool.run(load_part, 3, str(tmp_path / "ck"))
    for table, rows in contents(whole).items():
        union = {key: row for part in parts for key, row in part[table].items()}
        assert_equal(sum(len(part[table]) for part in parts), len(rows), where=f"rows of {table} over three ranks")
        assert_equal(union, rows, where=f"rows of {table}")
    failures = rank_pool.run(save_foreign, 2, str(tmp_path / "no"))
    assert_equal(failures, ["ConfigError", "DistributedError"], where="errors by rank")
    assert_equal(os.path.exists(tmp_path / "no"), False, where="nothing is written")


def save_lonely(rank: Any, path: str, owner: int) -> None:
    """Save a table whose rows are all of one rank, and one without rows; as a store and as a state dict."""
    kvstore, checkpoint = rank.component("kvstore"), rank.component("checkpoint")
    store = fresh(kvstore)
    if rank.rank == owner:
        store.set_rows("a", random_rows(store, range(2 * owner, 24, 4), 1, "a"))
    buckets = kvstore.Buckets(4)
    save(kvstore, store, Path(path) / "store", buckets=buckets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = checkpoint.HuggingFaceStorageWriter(Path(path) / "dict", durable=False)
        dcp.save(store.state_dict(buckets=buckets, chunk_rows=4), storage_writer=writer)


@requirement(
    "KV-253",
    "A rank without rows of a table that others have rows of MUST lose none of them, nor add any, whichever rank it "
    "is; a table that has rows on no rank MUST be there.",
)
@pytest.mark.parametrize("owner", [0, 1])
def test_rank_without_rows(kvstore: Any, checkpoint: Any, rank_pool: Any, tmp_path: Path, owner: int) -> None:
    with succeeds("a save by two ranks", where=f"rows of rank {owner}"):
        rank_pool.run(save_lonely, 2, str(tmp_path), owner)
    other, expected = fresh(kvstore), fresh(kvstore)
    expected.set_rows("a", random_rows(expected, range(2 * owner, 24, 4), 1, "a"))
    with succeeds("load", where=f"rows of rank {owner}"):
        kvstore.load(other, tmp_path / "store")
    assert_contents(other, contents(expected), where="saved")
    names = expected.state_dict()
    state = {name: torch.full(tuple(value.shape), 3, dtype=value.dtype) for name, value in names.items()}
    state |= {f"{table}.bucket": torch.zeros(4, 1, dtype=torch.int64) for table in "ab"}
    with warnings.catch_warnings(), succeeds("dcp.load", where=f"rows of rank {owner}"):
        warnings.simplefilter("ignore")
        reader = checkpoint.HuggingFaceStorageReader(tmp_path / "dict")
        dcp.load(state, storage_reader=reader, no_dist=True)
    again = fresh(kvstore)
    again.load_state_dict(state)
    assert_contents(again, contents(expected), where="from a state dict")


def save_apart(rank: Any, path: str) -> list[str]:
    """Ask for other things than the other rank does; what each way raises."""
    kvstore = rank.component("kvstore")
    chosen = kvstore.Buckets(4), kvstore.Buckets(4, "chunk", 10)
    store = store_of(kvstore, kvstore.RowLayout(4), track_changes=True)
    # These ids are of this rank's buckets, in either way.
    keys = [key for key in range(40) if key % 4 // 2 == key // 20 == rank.rank]
    store.set("t", ids_of(keys), torch.zeros(len(keys), 4))
    closed = store_of(kvstore, kvstore.RowLayout(4), track_changes=True)
    closed.close()
    ways: dict[str, Callable[[], Any]] = {
        "buckets": lambda: save(kvstore, store, Path(path), buckets=chosen[rank.rank]),
        "forms": lambda: save(kvstore, store, Path(path), buckets=chosen[0], form=["rows", "separate"][rank.rank]),
        "kinds": lambda: save(kvstore, store, Path(path), buckets=chosen[0], since=[None, 0][rank.rank]),
        "views": lambda: store.state_dict(buckets=chosen[rank.rank]),
        "no form": lambda: save(kvstore, store, Path(path), buckets=chosen[0], form=["rows", "?"][rank.rank]),
        "no chunk": lambda: save(kvstore, store, Path(path), buckets=chosen[0], chunk_rows=[None, 0][rank.rank]),
        "no store": lambda: save(kvstore, [store, {}][rank.rank], Path(path), buckets=chosen[0]),
        "no buckets": lambda: save(kvstore, store, Path(path), buckets=[chosen[0], 4][rank.rank]),
        "no option": lambda: save(kvstore, store, Path(path), buckets=chosen[0], block_bytes=[64, 63][rank.rank]),
        "no such option": lambda: save(kvstore, store, Path(path), buckets=chosen[0], **[{}, {"blocks": 1}][rank.rank]),
        "no export": lambda: save(
            kvstore, store, Path(path), buckets=chosen[0], export_dtype=[None, "float16"][rank.rank]
        ),
        "closed": lambda: save(kvstore, [store, closed][rank.rank], Path(path), buckets=chosen[0]),
        "views of closed": lambda: [store, closed][rank.rank].state_dict(buckets=chosen[0]),
        "views of no table": lambda: store.state_dict(buckets=chosen[0], tables=([("t",), ("u",)][rank.rank])),
        "views of no buckets": lambda: store.state_dict(buckets=[chosen[0], 4][rank.rank]),
        "views of a name": lambda: store.state_dict(buckets=chosen[0], tables=[("t",), "t"][rank.rank]),
        "views of no chunk": lambda: store.state_dict(buckets=chosen[0], chunk_rows=[None, 0][rank.rank]),
        "views of no flag": lambda: store.state_dict(buckets=chosen[0], snapshot=[True, "no"][rank.rank]),
    }
    return [f"{name}: {_error_of(way, store)}" for name, way in ways.items()]


def _error_of(way: Callable[[], Any], store: Any) -> str:
    try:
        way()
    except (TwinproofError, TypeError) as error:
        # While somebody holds the error, and all that it refers to.
        held_count = store.stats().snapshot_count
        if "ask for different" in str(error) and "; expected: " not in str(error):
            return str(error)
        return f"{type(error).__name__}, {held_count} snapshots held" if held_count else type(error).__name__
    return "no error"


@requirement(
    "KV-254",
    "Ranks that ask for different buckets, forms or kinds of a save, or for different views, and ranks of which one "
    "asks for what there is not, MUST all be refused, with nothing written and no snapshot held, by the error neither; "
    "the rank at fault by its own error.",
)
def test_ranks_that_disagree(kvstore: Any, rank_pool: Any, tmp_path: Path) -> None:
    with succeeds("two ranks", where="an answer of both"):
        found = rank_pool.run(save_apart, 2, str(tmp_path / "ck"), timeout_s=20)
    expected = [f"{name}: ConfigError" for name in ("buckets", "forms", "kinds", "views")]
    wrong = ["no form", "no chunk", "no store", "no buckets", "no option", "no such option", "no export", "closed"]
    wrong += [f"views of {what}" for what in ("closed", "no table", "no buckets", "a name", "no chunk", "no flag")]
    other = {"no such option": "TypeError", "closed": "StoreClosedError", "views of closed": "StoreClosedError"}
    by_rank = [
        [*expected, *(f"{name}: DistributedError" for name in wrong)],
        [*expected, *(f"{name}: {other.get(name, 'ConfigError')}" for name in wrong)],
    ]
    assert_equal(found, by_rank, where="by rank")
    assert_equal(os.path.exists(tmp_path / "ck"), False, where="nothing is written")


def save_in_groups(rank: Any, path: str) -> None:
    """Two ranks of three save their rows, and the third its own, each in a group of its own; then all load theirs."""
    kvstore = rank.component("kvstore")
    groups = [(dist.new_group(ranks), ranks) for ranks in ([2, 0], [1])]
    ((group, ranks),) = [found for found in groups if rank.rank in found[1]]
    # Torch gives ranks of a group in ascending order.
    place, world_size = dist.get_rank(group), len(ranks)
    store, again = (store_of(kvstore, kvstore.RowLayout(4, optimizer="adam")) for _ in range(2))
    keys = [key for key in range(40) if key % 4 * world_size // 4 == place]
    store.set("t", ids_of(keys), weights_of(store, 40, 1)[keys])
    folder = Path(path) / f"by {world_size}"
    save(kvstore, store, folder, buckets=kvstore.Buckets(4), process_group=group)
    kvstore.load(again, folder, process_group=group)
    assert_contents(again, contents(store), where=f"rank {rank.rank} loaded")
    views = store.state_dict(buckets=kvstore.Buckets(4), process_group=group)
    assert_equal(views["t.weight"].shape[0], len(keys), where=f"rank {rank.rank}: views")


@requirement(
    "KV-287",
    "A save in a group of some of the ranks MUST involve these alone, and MUST write what one process would.",
)
def test_some_ranks(kvstore: Any, rank_pool: Any, tmp_path: Path) -> None:
    with succeeds("three ranks", where="an answer of all"):
        rank_pool.run(save_in_groups, 3, str(tmp_path), timeout_s=20)
    store = store_of(kvstore, kvstore.RowLayout(4, optimizer="adam"))
    store.set("t", ids_of(range(40)), weights_of(store, 40, 1))
    for world_size in (1, 2):
        path = tmp_path / f"by {world_size}"
        again = store_of(kvstore, kvstore.RowLayout(4, optimizer="adam"))
        kvstore.load(again, path)
        assert_contents(again, contents(store), where=f"saved by {world_size}")
        assert_equal([name for name in os.listdir(path) if name.startswith(".")], [], where=f"left in {path}")


@requirement(
    "KV-332",
    "A load MUST convert weights and each state from their own dtype to that of the table, for every two dtypes of one "
    "width or of others, from rows, from values saved apart and from state dicts.",
)
def test_every_conversion(kvstore: Any, tmp_path: Path) -> None:
    full, half, brain, ids = torch.float32, torch.float16, torch.bfloat16, ids_of([7, 1, 4])
    # Every two dtypes meet in each place; the second and the fourth differ in one state alone.
    kinds = ((full, full, full), (half, half, brain), (brain, brain, half), (half, brain, brain), (brain, full, half))
    layouts = [
        kvstore.RowLayout(4, weight, optimizer="adam", state_dtypes={"momentum1": first, "momentum2": second})
        for weight, first, second in kinds
    ]
    for number, source in enumerate(layouts):
        store = store_of(kvstore, source)
        values = {name: torch.rand(3, 4, generator=torch.Generator().manual_seed(i)) for i, name in enumerate(_PARTS)}
        store.set("t", ids, values["weight"].to(source.weight_dtype))
        for name in _PARTS[1:]:
            store.set_state("t", name, ids, values[name].to(source.state_dtypes[name]))
        stored = _parts_of(store, ids)
        for form in ("rows", "separate"):
            save(kvstore, store, tmp_path / f"{number} {form}", form=form)
        for target in layouts:
            expected = {
                name: stored[name].to(torch.float32).to(dtype)
                for name, dtype in zip(_PARTS, (target.weight_dtype, *target.state_dtypes.values()), strict=True)
            }
            for form in ("rows", "separate", "state dict"):
                again = store_of(kvstore, target)
                if form == "state dict":
                    again.load_state_dict(store.state_dict())
                else:
                    kvstore.load(again, tmp_path / f"{number} {form}")
                for name, value in _parts_of(again, ids).items():
                    assert_bits(value, expected[name], where=f"{name} of {source} as {target}, by {form}")


_PARTS = ("weight", "momentum1", "momentum2")


def _parts_of(store: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"weight": store.get("t", ids), **{name: store.get_state("t", name, ids) for name in _PARTS[1:]}}


def module_states_in_groups(rank: Any) -> dict[str, Any]:
    """Where each rank's rows lie in the state dicts of its modules, of two ranks of three and of the third."""
    kvstore = rank.component("kvstore")
    groups = [(dist.new_group(ranks), ranks) for ranks in ([2, 0], [1])]
    ((group, ranks),) = [found for found in groups if rank.rank in found[1]]
    place, world_size = dist.get_rank(group), len(ranks)
    store = store_of(kvstore, kvstore.RowLayout(4, optimizer="adam"))
    keys = [key for key in range(40) if key % 4 * world_size // 4 == place]
    store.set("t", ids_of(keys), weights_of(store, 40, 1)[keys])
    found: dict[str, Any] = {}
    for kind in ("KVEmbeddingBag", "KVEmbedding"):
        module = getattr(kvstore, kind)(store, buckets=kvstore.Buckets(4), process_group=group)
        # The ranks of one group ask once more than those of the other, which must not matter to anybody.
        for _ in range(world_size):
            state = module.state_dict()
        found[kind] = (len(keys), state["weight"].global_row_count, state["weight"].row_offset)
    return found


@requirement(
    "KV-331",
    "Modules of rows MUST exchange their state dicts within their group alone, and MUST place their rows in it.",
)
def test_modules_of_some_ranks(kvstore: Any, rank_pool: Any) -> None:
    with succeeds("three ranks", where="state dicts of modules"):
        found = rank_pool.run(module_states_in_groups, 3, timeout_s=20)
    for rank, expected in enumerate([(20, 40, 0), (40, 40, 0), (20, 40, 20)]):
        assert_equal(found[rank], dict.fromkeys(("KVEmbeddingBag", "KVEmbedding"), expected), where=f"rank {rank}")


class _Unsendable(Exception):
    """Holds what no other process can have."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.held = threading.Lock()


def save_with_odd_error(rank: Any, path: str) -> list[str]:
    """One rank's store fails with such an error; what both raise, of a save and of a state dict."""
    kvstore = rank.component("kvstore")
    store = store_of(kvstore, kvstore.RowLayout(4))

    def snapshot(original: Any = store.snapshot) -> Any:
        taken = original()
        if rank.rank == 1:
            taken.ids = fails
        return taken

    def fails(table: str) -> torch.Tensor:
        raise _Unsendable("of this rank")

    store.snapshot = snapshot
    told = []
    for act in (lambda: save(kvstore, store, Path(path)), store.state_dict):
        try:
            act()
        except (DistributedError, _Unsendable) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


@requirement(
    "KV-288",
    "An error that cannot be pickled, on one rank of a save or a state dict, MUST be told to all ranks by its name and "
    "text, and keep none of them waiting.",
)
def test_errors_that_cannot_be_sent(kvstore: Any, rank_pool: Any, tmp_path: Path) -> None:
    with succeeds("two ranks", where="an answer of both"):
        by_rank = rank_pool.run(save_with_odd_error, 2, str(tmp_path / "ck"), timeout_s=20)
    for found in by_rank:
        assert_equal(len(found), 2, where="errors of a rank")
        for text in found:
            assert_equal("_Unsendable: of this rank" in text, True, where=text)


@requirement(
    "KV-252",
    "Whatever one rank meets while all agree on a save or a state dict, an error of any class MUST be told to the "
    "others, and be raised by all: as it is on that rank.",
)
@pytest.mark.parametrize("kind", [ValueError, RuntimeError, MemoryError, OSError, KeyError])
def test_any_error_is_told(kvstore: Any, tmp_path: Path, monkeypatch: Any, kind: type[Exception]) -> None:
    store = store_of(kvstore)
    told: list[Any] = []

    def fails(table: str) -> torch.Tensor:
        raise kind("of this rank")

    def snapshot(original: Any = store.snapshot) -> Any:
        taken = original()
        taken.ids = fails
        return taken

    def all_gather_object(results: list[Any], mine: Any, group: Any = None) -> None:
        told.append(mine)
        results[:] = [mine, ({}, None)]

    store.snapshot = snapshot
    for module in ("statedict", "disk"):
        monkeypatch.setattr(f"twinproof.kvstore.{module}.rank_and_world", lambda group: (0, 2))
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    acts = {"save": lambda: save(kvstore, store, tmp_path / "ck"), "state_dict": store.state_dict}
    for number, (name, act) in enumerate(acts.items(), start=1):
        with raises(kind, mentions=["of this rank"], where=f"{name}: this rank's error") as caught:
            act()
        assert_equal(caught.outer is caught.error, True, where=f"{name}: the error itself")
        assert_equal(len(told), number, where=f"{name}: what the others hear")


@requirement(
    "KV-054", "Timestamps and counts MUST survive save and load, so that the next eviction evicts the same rows."
)
def test_eviction_after_load(kvstore: Any, tmp_path: Path) -> None:
    for form in ("rows", "separate"):
        clock = Clock(100)
        store = store_of(kvstore, layouts_of(kvstore), clock=clock)
        for step in range(6):
            clock.now += 10
            store.set("a", ids_of([step, step // 2, 9]), weights_of(store, 3, step, "a"))
        save(kvstore, store, tmp_path / form, form=form)
        other = store_of(kvstore, layouts_of(kvstore), clock=clock)
        kvstore.load(other, tmp_path / form)
        assert_contents(other, contents(store), where=f"{form} loaded")
        clock.now += 5
        for policy in (kvstore.EvictionPolicy.ttl(30), kvstore.EvictionPolicy.count(2)):
            found = [each.evict("a", policy=policy)["a"] for each in (store, other)]
            assert_equal(found[1], found[0], where=f"{form} {policy.kind}")
            assert_contents(other, contents(store), where=f"{form} after {policy.kind}")


@requirement(
    "KV-103",
    "A state dict MUST go through torch's own save and load, with our writer and reader and with torch's, in whole-row "
    "mode and without, in chunks.",
)
def test_torch_checkpoint(kvstore: Any, checkpoint: Any, tmp_path: Path) -> None:
    folders = {
        "ours": (checkpoint.HuggingFaceStorageWriter, checkpoint.HuggingFaceStorageReader),
        "torch": (dcp.FileSystemWriter, dcp.FileSystemReader),
    }
    for name, (writer, reader) in folders.items():
        for whole in (True, False):
            store, path = filled(kvstore, range(-9, 9), return_whole_row=whole), tmp_path / f"{name}-{whole}"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.save(store.state_dict(chunk_rows=5), storage_writer=writer(path), no_dist=True)
                sizes = {table: store.size(table) for table in "ab"}
                ids = {f"{t}.weight_id": torch.zeros(size, 1, dtype=torch.int64) for t, size in sizes.items()}
                dcp.load(ids, storage_reader=reader(path), no_dist=True)
                other, targets = fresh(kvstore), {}
                for table in "ab":
                    keys = ids[f"{table}.weight_id"][:, 0].contiguous()
                    views = {"weight": "row" if whole else "weight"} | {n: n for n in store.layout(table).state_slots}
                    for field, view in views.items():
                        made = kvstore.KVTensor(other, keys, view, whole and view != "row", table=table, chunk_rows=4)
                        targets[f"{table}.{field}"] = made
                dcp.load(targets, storage_reader=reader(path), planner=kvstore.KVLoadPlanner(), no_dist=True)
            for table in "ab":
                keys = store.ids(table)
                begin = 0 if whole else 16
                got, expected = (each.get_rows(table, keys)[:, begin:] for each in (other, store))
                assert_bits(got, expected, where=f"{table} through {name}, whole={whole}")
