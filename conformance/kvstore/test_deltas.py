"""Deltas and their bases: a delta loads on the rows it was taken from, or not at all."""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, assert_same_bytes, examples, raises, requirement, succeeds
from conformance.kvstore.cases import (
    FILE,
    assert_contents,
    between_tables,
    contents,
    filled,
    fresh,
    ids_of,
    random_rows,
    save,
    store_of,
    weights_of,
)
from conformance.provers.faults import Interruption, each_moment, interrupted
from twinproof.errors import ConfigError, DeltaBaseError, TwinproofError


def chain(kvstore: Any, folder: Path, length: int, **options: Any) -> tuple[Any, list[Path], list[Any]]:
    """A store, its full save and deltas after it, and what it held at each."""
    store = filled(kvstore, range(-4, 5), track_changes=True, **options)
    paths, held = [folder / "full"], [contents(store)]
    mark = save(kvstore, store, paths[0]).mark
    for number in range(length):
        store.set("a", ids_of([number, 50 + number]), weights_of(store, 2, number, "a"))
        store.delete("b", ids_of([number]))
        paths.append(folder / f"delta-{number}")
        mark = save(kvstore, store, paths[-1], since=mark, form=["rows", "separate"][number % 2]).mark
        held.append(contents(store))
    return store, paths, held


@requirement(
    "KV-125",
    "A delta MUST load where the last load was its base, and be refused by name anywhere else, the store staying as it "
    "was: left-out, repeated and reordered deltas, and those of another run.",
)
@examples(20)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_order_of_deltas(kvstore: Any, tmp_path_factory: Any, order: list[int]) -> None:
    folder = tmp_path_factory.mktemp("kv")
    _, paths, held = chain(kvstore, folder, 3)
    store, at = fresh(kvstore), None
    for step in order:
        before, where = contents(store), f"{step} after {at}"
        if step == 0:
            # A full save replaces what it lists; start anew, so that it is all there is.
            store = fresh(kvstore)
        if step in (0, (at if at is not None else -9) + 1):
            kvstore.load(store, paths[step])
            at = step
            assert_contents(store, held[step], where=where)
        else:
            with raises(DeltaBaseError, where=where):
                kvstore.load(store, paths[step])
            assert_contents(store, before, where=where)


@requirement(
    "KV-126",
    "A delta of another run, whose rows differ, MUST be refused; one of a run that resumed from the base MUST load.",
)
def test_runs(kvstore: Any, tmp_path: Path) -> None:
    _, paths, held = chain(kvstore, tmp_path / "one", 2)
    other = filled(kvstore, range(-4, 5), track_changes=True)
    other.set_rows("a", random_rows(other, [3], 77, "a"))
    foreign = [tmp_path / "other-full", tmp_path / "other-delta"]
    mark = save(kvstore, other, foreign[0]).mark
    other.delete("a", ids_of([1]))
    save(kvstore, other, foreign[1], since=mark)
    store = fresh(kvstore)
    with raises(DeltaBaseError, where="into an empty store"):
        kvstore.load(store, paths[1])
    assert_equal(contents(store), {"a": {}, "b": {}}, where="still empty")
    kvstore.load(store, paths[0])
    with raises(DeltaBaseError, where="another run's delta"):
        kvstore.load(store, foreign[1])
    assert_contents(store, held[0], where="after a refusal")
    resumed = fresh(kvstore, track_changes=True)
    for path in paths[:2]:
        kvstore.load(resumed, path)
    mark = resumed.mark()
    resumed.set("b", ids_of([9]), weights_of(resumed, 1, 5, "b"))
    save(kvstore, resumed, tmp_path / "resumed", since=mark)
    kvstore.load(store, paths[1])
    kvstore.load(store, tmp_path / "resumed")
    assert_contents(store, contents(resumed), where="the delta of the run that resumed")
    with raises(DeltaBaseError, where="what the first run did instead"):
        kvstore.load(store, paths[2])


@requirement(
    "KV-127",
    "Moments MUST have names that depend on contents alone: equal contents are equal bytes, with tracked changes too, "
    "and a store that tracks nothing names nothing.",
)
def test_names(kvstore: Any, tmp_path: Path) -> None:
    stores = [filled(kvstore, range(-4, 5), track_changes=True, num_shards=shards) for shards in (1, 8)]
    for key in (3, -4, 0):
        stores[1].set_rows("a", stores[0].get_rows("a", ids_of([key])))
    for number, store in enumerate(stores):
        save(kvstore, store, tmp_path / f"{number}", buckets=kvstore.Buckets(3))
    assert_same_bytes(tmp_path / "1" / FILE, tmp_path / "0" / FILE, where="files of equal contents")
    save(kvstore, filled(kvstore, range(-4, 5)), tmp_path / "plain", buckets=kvstore.Buckets(3))
    found = {}
    for name in ("0", "plain"):
        raw = (tmp_path / name / FILE).read_bytes()
        metadata = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
        found[name] = json.loads(metadata["kvstore.content"])
    assert_equal((found["plain"]["moments"], found["plain"]["bases"]), ({}, {}), where="nothing is tracked")
    assert_equal((sorted(found["0"]["moments"]), found["0"]["bases"]), (["a", "b"], {}), where="a full save")


@requirement(
    "KV-128",
    "Files of version 2, which name no moments, MUST load: a full one and a delta, assembled here byte by byte.",
)
def test_version_two(kvstore: Any, tmp_path: Path) -> None:
    rows = [
        bytes.fromhex("feffffffffffffff 05000000 02000080 0000803f 00000040 00004040 00008040"),
        bytes.fromhex("0700000000000000 06000000 01000080 000080bf 000000c0 000040c0 000080c0"),
    ]
    layout = '{"embedding_dim":4,"optimizer":"none","state_dtypes":{},"weight_dtype":"float32"}'

    def write(name: str, kind: str, row: list[bytes], counts: list[int], deleted: list[int] | None) -> Path:
        content = f'{{"buckets":[2,"interleave",null],"form":"rows","kind":"{kind}","layouts":{{"t":{layout}}}}}'
        number = len(row)
        parts = [
            ("t.rows", "U8", [number, 32], b"".join(row)),
            ("t.ids", "I64", [number], b"".join(each[:8] for each in row)),
            ("t.bucket_counts", "I64", [2], b"".join(count.to_bytes(8, "little") for count in counts)),
        ]
        if deleted is not None:
            removed = b"".join(key.to_bytes(8, "little", signed=True) for key in deleted)
            parts.append(("t.deleted", "I64", [len(deleted)], removed))
        header: dict[str, Any] = {"__metadata__": {"format": "pt", "kvstore.content": content, "kvstore.version": "2"}}
        at = 0
        for tensor, dtype, shape, data in parts:
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
            at += len(data)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(part[3] for part in parts))
        return path

    store = store_of(kvstore, kvstore.RowLayout(4))
    kvstore.load(store, write("full", "full", rows, [1, 1], None))
    assert_contents(store, {"t": {-2: rows[0], 7: rows[1]}}, where="full")
    changed = rows[1][:16] + torch.full((4,), 9.0).numpy().tobytes()
    kvstore.load(store, write("delta", "delta", [changed], [0, 1], [-2, 100]))
    assert_contents(store, {"t": {7: changed}}, where="delta")


def save_chain(rank: Any, path: str, total: int) -> None:
    """Save this rank's buckets in full, and once more what changed."""
    kvstore = rank.component("kvstore")
    begin, end = kvstore.rank_buckets(total, rank.world_size, rank.rank)
    mine = [key for key in range(-20, 20) if begin <= key % total < end]
    store = store_of(kvstore, kvstore.RowLayout(6), track_changes=True)
    store.set_rows("t", random_rows(store, mine, 1))
    # Marks differ by rank, names do not.
    for key in mine[: rank.rank + 1]:
        store.set("t", ids_of([key]), weights_of(store, 1, 2))
    buckets = kvstore.Buckets(total)
    mark = save(kvstore, store, Path(path) / "full", buckets=buckets).mark
    store.delete("t", ids_of(mine[:1]))
    store.set("t", ids_of(mine[1:3]), weights_of(store, 2, 3))
    save(kvstore, store, Path(path) / "delta", since=mark, buckets=buckets)


def load_chain(rank: Any, path: str) -> dict[int, bytes]:
    """What this rank loads of both."""
    kvstore = rank.component("kvstore")
    store = store_of(kvstore, kvstore.RowLayout(6))
    kvstore.load(store, Path(path) / "full")
    kvstore.load(store, Path(path) / "delta")
    return contents(store)["t"]


@requirement(
    "KV-130",
    "Ranks that save together MUST name their moments alike: a delta of W ranks loads on its base over W' ranks.",
)
def test_ranks_name_alike(kvstore: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(save_chain, 2, str(tmp_path), 5)
    alone = store_of(kvstore, kvstore.RowLayout(6))
    with raises(DeltaBaseError, where="without its base"):
        kvstore.load(alone, tmp_path / "delta")
    kvstore.load(alone, tmp_path / "full")
    kvstore.load(alone, tmp_path / "delta")
    assert_equal(alone.size("t"), 38, where="rows after the delta")
    parts = rank_pool.run(load_chain, 3, str(tmp_path))
    union = {key: row for part in parts for key, row in part.items()}
    assert_equal((sum(map(len, parts)), union), (38, contents(alone)["t"]), where="rows over three ranks")


@requirement(
    "KV-244",
    "A load of a part of the buckets MUST bring and remove ids of that part alone, and report how many of each, into "
    "empty tables and beside the rows of the other parts.",
)
def test_parts_of_a_delta(kvstore: Any, tmp_path: Path) -> None:
    total, keys = 3, range(-9, 9)
    store = filled(kvstore, keys, track_changes=True)
    buckets = kvstore.Buckets(total)
    mark = save(kvstore, store, tmp_path / "full", buckets=buckets).mark
    before = contents(store)["a"]
    store.delete("a", ids_of(range(-9, 0)))
    store.set("a", ids_of(range(5, 14)), weights_of(store, 9, 3, "a"))
    save(kvstore, store, tmp_path / "delta", since=mark, buckets=buckets)
    after = contents(store)["a"]
    for begin, end in ((0, 0), (0, 1), (1, 3), (2, 3), (0, 3)):
        mine = {key for key in range(-9, 14) if begin <= key % total < end}
        alone, every = fresh(kvstore), fresh(kvstore)
        report = kvstore.load(alone, tmp_path / "full", owned=(begin, end))
        where = f"buckets {begin} to {end}"
        assert_equal(report.row_counts["a"], len(mine & set(before)), where=f"{where}: rows of the full save")
        kvstore.load(every, tmp_path / "full")
        for other, others in ((alone, {}), (every, {key: row for key, row in before.items() if key not in mine})):
            report = kvstore.load(other, tmp_path / "delta", owned=(begin, end))
            found = (report.row_counts["a"], report.deleted_counts["a"])
            assert_equal(found, (len(mine & set(range(5, 14))), len(mine & set(range(-9, 0)))), where=where)
            assert_equal(contents(other)["a"], {k: r for k, r in after.items() if k in mine} | others, where=where)


def _content(path: Path) -> dict[str, Any]:
    raw = (path / FILE).read_bytes()
    metadata = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    content: dict[str, Any] = json.loads(metadata["kvstore.content"])
    return content


@requirement(
    "KV-245",
    "A delta of a store that was loaded MUST name what was loaded as its base where the table held just that, and no "
    "base where it held other rows too, or states or values that the load left out or rounded.",
)
def test_bases_of_loads(kvstore: Any, tmp_path: Path) -> None:
    def tracked(dtype: torch.dtype = torch.float32) -> Any:
        return store_of(kvstore, kvstore.RowLayout(4, dtype, "adagrad"), track_changes=True)

    source = tracked()
    source.set_rows("t", random_rows(source, range(6), 1))
    save(kvstore, source, tmp_path / "full")
    name = _content(tmp_path / "full")["moments"]["t"]
    beside = tracked()
    beside.set("t", ids_of([50]), torch.ones(1, 4))
    covered = tracked()
    covered.set("t", ids_of([3]), torch.ones(1, 4))
    cases: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
        "just that": (tracked(), {}, [name]),
        "rows that it replaces": (covered, {}, [name]),
        "rows beside": (beside, {}, []),
        "weights only": (tracked(), {"weights_only": True}, []),
        "rounded": (tracked(torch.bfloat16), {}, []),
    }
    for case, (store, options, bases) in cases.items():
        kvstore.load(store, tmp_path / "full", **options)
        mark = store.mark()
        store.delete("t", ids_of([2]))
        save(kvstore, store, tmp_path / case, since=mark)
        assert_equal(_content(tmp_path / case)["bases"].get("t", []), bases, where=case)


@requirement(
    "KV-291",
    "A delta that was loaded MUST be named as a base only where the table held what the delta was saved beside.",
)
def test_bases_of_loaded_deltas(kvstore: Any, tmp_path: Path) -> None:
    def tracked() -> Any:
        return store_of(kvstore, kvstore.RowLayout(4, optimizer="adagrad"), track_changes=True)

    source = tracked()
    source.set_rows("t", random_rows(source, range(6), 1))
    save(kvstore, source, tmp_path / "full")
    mark = source.mark()
    source.delete("t", ids_of([2]))
    save(kvstore, source, tmp_path / "delta", since=mark)
    delta = _content(tmp_path / "delta")["moments"]["t"]
    for case, bases in (("just that", [delta]), ("beside a newer row", []), ("weights only", [])):
        store = tracked()
        kvstore.load(store, tmp_path / "full")
        if case == "beside a newer row":
            store.set("t", ids_of([60]), torch.ones(1, 4))
        kvstore.load(store, tmp_path / "delta", weights_only=case == "weights only")
        mark = store.mark()
        store.delete("t", ids_of([4]))
        save(kvstore, store, tmp_path / case, since=mark)
        assert_equal(_content(tmp_path / case)["bases"].get("t", []), bases, where=case)


@requirement(
    "KV-258",
    "A table whose load ended in the middle MUST take no delta, not that of what it held before either, until it is "
    "loaded whole.",
)
def test_load_that_ended(kvstore: Any, tmp_path: Path) -> None:
    _, paths, held = chain(kvstore, tmp_path, 1)
    save(kvstore, filled(kvstore, range(3, 12)), tmp_path / "other")
    for into in (fresh(kvstore), filled(kvstore, [50])):
        kvstore.load(into, paths[0])

        def end(table: str) -> None:
            raise InterruptedError(table)

        with between_tables(end), raises(InterruptedError, where="a load that ends when one table is written"):
            kvstore.load(into, tmp_path / "other", chunk_rows=2)
        before = contents(into)
        with raises(DeltaBaseError, where="a delta of what was loaded before"):
            kvstore.load(into, paths[1])
        assert_contents(into, before, where="after a refusal")
        for table in "ab":
            into.clear(table)
        for path in paths:
            kvstore.load(into, path)
        assert_contents(into, held[-1], where="loaded whole")


@requirement("KV-259", "A save that fails MUST be the base of no delta: what it would have named is in no file.")
def test_save_that_failed(kvstore: Any, tmp_path: Path) -> None:
    store = filled(kvstore, range(-4, 5), track_changes=True)
    (tmp_path / "file").write_bytes(b"")
    for wrong in ({"path": tmp_path / "file" / "ck"}, {"path": tmp_path / "ck", "no_such_option": 1}):
        with raises((OSError, TypeError, TwinproofError), where=str(wrong)):
            kvstore.save(store, durable=False, **wrong)
    mark = store.mark()
    store.delete("a", ids_of([1]))
    save(kvstore, store, tmp_path / "delta", since=mark)
    assert_equal(_content(tmp_path / "delta")["bases"], {}, where="bases")


@requirement(
    "KV-263",
    "A table that was loaded from a state dict, or through views of it, MUST take no delta of what it was loaded from "
    "before; other tables go on taking theirs.",
)
def test_state_dict_between_deltas(kvstore: Any, checkpoint: Any, tmp_path: Path) -> None:
    _, paths, held = chain(kvstore, tmp_path, 1)
    other = filled(kvstore, range(30, 35))
    for tables, clear in ((("a",), True), (("b",), False), (("a", "b"), True), (("a", "b"), False)):
        store = fresh(kvstore)
        kvstore.load(store, paths[0])
        store.load_state_dict(other.state_dict(tables=tables), tables=tables, clear=clear)
        before = contents(store)
        with raises(DeltaBaseError, where=f"{tables} from a state dict"):
            kvstore.load(store, paths[1])
        assert_contents(store, before, where=f"{tables}: after a refusal")
        for table in {"a", "b"} - set(tables):
            kvstore.load(store, paths[1], tables=(table,))
            assert_equal(contents(store)[table], held[1][table], where=f"{table}: its delta")
    store = fresh(kvstore)
    kvstore.load(store, paths[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = checkpoint.HuggingFaceStorageWriter(tmp_path / "views", durable=False)
        dcp.save(store.state_dict(), storage_writer=writer, no_dist=True)
        store.set("a", store.ids("a"), weights_of(store, store.size("a"), 5, "a"))
        reader = checkpoint.HuggingFaceStorageReader(tmp_path / "views")
        views = store.state_dict(snapshot=False, tables=("a",))
        dcp.load(views, storage_reader=reader, planner=kvstore.KVLoadPlanner(), no_dist=True)
    with raises(DeltaBaseError, where="after dcp.load into views"):
        kvstore.load(store, paths[1], tables=("a",))
    kvstore.load(store, paths[1], tables=("b",))
    assert_equal(contents(store), {"a": held[0]["a"], "b": held[1]["b"]}, where="after dcp.load into views of a")


@requirement(
    "KV-295",
    "A delta MUST remove ids that are outside of all its buckets, too, once: with the bucket that is nearest.",
)
def test_removed_outside_of_all_buckets(kvstore: Any, tmp_path: Path) -> None:
    buckets, keys, outside = kvstore.Buckets(4, "chunk", 10), range(0, 40, 7), [-(2**63), -1, 40, 2**63 - 1]
    for held in (True, False):
        store = store_of(kvstore, kvstore.RowLayout(4), track_changes=True)
        store.set_rows("t", random_rows(store, [*keys, *(outside if held else [])], 1))
        mark = save(kvstore, store, tmp_path / f"{held}-full").mark
        if not held:
            # The save that refuses them is why they go.
            store.set_rows("t", random_rows(store, outside, 2))
            with raises(ConfigError, where="ids outside of all buckets"):
                save(kvstore, store, tmp_path / "refused", since=mark, buckets=buckets)
        store.delete("t", ids_of([7, *outside]))
        save(kvstore, store, tmp_path / f"{held}-delta", since=mark, buckets=buckets)
        for parts in ([(0, 4)], [(0, 1), (1, 3), (3, 4)]):
            others = [store_of(kvstore, kvstore.RowLayout(4)) for _ in parts]
            gone = 0
            for other, part in zip(others, parts, strict=True):
                kvstore.load(other, tmp_path / f"{held}-full")
                with succeeds("load", where=f"{held=}, part {part}"):
                    gone += kvstore.load(other, tmp_path / f"{held}-delta", owned=part).deleted_counts["t"]
            assert_equal(gone, 1 + 4 * held, where=f"{held=}, removed by {parts}")
            if len(parts) == 1:
                assert_contents(others[0], contents(store), where=f"{held=}")


@requirement(
    "KV-300",
    "A load that is refused before it writes, of a file, a state dict or through views, MUST leave which deltas the "
    "tables take: that of what they were loaded from before goes on loading.",
)
def test_bases_after_refusals(kvstore: Any, tmp_path: Path) -> None:
    _, paths, held = chain(kvstore, tmp_path, 1)
    store = fresh(kvstore, capacity=40)
    other, many = filled(kvstore, range(30, 35)), filled(kvstore, range(100))
    narrow = store_of(kvstore, {name: kvstore.RowLayout(2) for name in "ab"})
    for name, source in (("other", other), ("many", many), ("narrow", narrow)):
        save(kvstore, source, tmp_path / name)
    damaged = bytearray((tmp_path / "other" / FILE).read_bytes())
    damaged[-1:] = []
    (tmp_path / "damaged.safetensors").write_bytes(damaged)
    state, large = ({n: v.full_tensor() for n, v in each.state_dict().items()} for each in (other, many))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(other.state_dict(), storage_writer=dcp.FileSystemWriter(tmp_path / "views"), no_dist=True)
    views = {
        name: kvstore.KVTensor(store, ids_of([1, 2]), name[2:], table=name[0]) for name in ("a.weight", "b.weight")
    }

    def by_views() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader = dcp.FileSystemReader(tmp_path / "views")
            dcp.load(dict(views), storage_reader=reader, planner=kvstore.KVLoadPlanner(), no_dist=True)

    ways: dict[str, Any] = {
        "no file": lambda: kvstore.load(store, tmp_path / "nowhere"),
        "a damaged file": lambda: kvstore.load(store, tmp_path / "damaged.safetensors"),
        "too many rows": lambda: kvstore.load(store, tmp_path / "many"),
        "other layouts": lambda: kvstore.load(store, tmp_path / "narrow"),
        "no such table": lambda: kvstore.load(store, tmp_path / "other", tables=("a", "c")),
        "no buckets": lambda: kvstore.load(store, tmp_path / "other", owned=(0, 2)),
        "a state dict without ids": lambda: store.load_state_dict(dict(state, **{"b.weight_id": None})),
        "a state dict of too many rows": lambda: store.load_state_dict(large),
        "an id that stands twice": lambda: store.load_state_dict(
            state | {"b.weight_id": torch.zeros_like(state["b.weight_id"])}
        ),
        "a step below zero": lambda: store.load_state_dict(state | {"b.step": torch.tensor([[-1]])}),
        "views of fewer rows": by_views,
    }
    for tables in (("a", "b"), ("b",)):
        kvstore.load(store, paths[0])
        for name, way in ways.items():
            with raises((OSError, TwinproofError, dcp.api.CheckpointException), where=name):
                way()
            assert_contents(store, held[0], where=name)
        with succeeds("load", where=f"the delta of {tables}, after all that was refused"):
            kvstore.load(store, paths[1], tables=tables)
        for table in tables:
            assert_equal(contents(store)[table], held[1][table], where=f"{table} after its delta")
        for table in "ab":
            store.clear(table)


@requirement(
    "KV-308",
    "What is written or removed at any moment of a save MUST be in that save or in the next delta since the mark that "
    "it reports, and the moment of the save be that mark's.",
)
def test_written_while_saved(kvstore: Any, tmp_path: Path) -> None:
    def once(nth: int) -> Interruption:
        store, folder = filled(kvstore, range(-4, 5), track_changes=True), tmp_path / f"{nth}"
        held = [contents(store)]
        folder.mkdir()

        def act() -> None:
            held.append(contents(store))
            store.set("a", ids_of([3, 99]), weights_of(store, 2, nth, "a"))
            store.delete("b", ids_of([2]))

        with interrupted(folder, nth, act) as hook:
            report = save(kvstore, store, folder / "full")
        save(kvstore, store, folder / "delta", since=report.mark)
        other, where = fresh(kvstore), f"moment {nth}"
        kvstore.load(other, folder / "full")
        assert_equal(contents(other) in (held[0], contents(store)), True, where=f"{where}: rows of one moment")
        kvstore.load(other, folder / "delta")
        assert_contents(other, contents(store), where=f"{where}: with the delta")
        return hook

    each_moment(once)


@requirement(
    "KV-312",
    "A delta MUST load on every save of the moment that it follows, full saves and deltas, in whatever order they were "
    "made, and after a load of either too.",
)
def test_moments_of_several_saves(kvstore: Any, tmp_path: Path) -> None:
    def changed(store: Any, seed: int) -> None:
        store.set("a", ids_of([seed, 70 + seed]), weights_of(store, 2, seed, "a"))
        store.delete("b", ids_of([seed]))

    for kinds in (("delta", "full"), ("full", "delta"), ("delta", "full", "delta")):
        for is_loaded in (False, True):
            folder = tmp_path / f"{'-'.join(kinds)} {is_loaded}"
            store = filled(kvstore, range(-4, 5), track_changes=True)
            first = save(kvstore, store, folder / "first").mark
            changed(store, 1)
            for number, kind in enumerate(kinds):
                save(kvstore, store, folder / f"{number}", **({"since": first} if kind == "delta" else {}))
            if is_loaded:
                # Whoever goes on from what was loaded knows it by the names of both, too.
                store = fresh(kvstore, track_changes=True)
                for name in ("first", f"{kinds.index('delta')}"):
                    kvstore.load(store, folder / name)
                save(kvstore, store, folder / "again")
            mark = store.mark()
            changed(store, 2)
            save(kvstore, store, folder / "last", since=mark)
            ways = [["first", f"{n}"] if kind == "delta" else [f"{n}"] for n, kind in enumerate(kinds)]
            for names in ways + ([["again"]] if is_loaded else []):
                other = fresh(kvstore)
                for name in (*names, "last"):
                    with succeeds("load", where=f"{kinds}, {is_loaded=}: {name} of {names}"):
                        kvstore.load(other, folder / name)
                assert_contents(other, contents(store), where=f"{kinds}, {is_loaded=}: {names}")


@requirement(
    "KV-314",
    "A delta since the beginning MUST load into a table that is empty and was never loaded, and nowhere else; one "
    "since a moment that was neither saved nor loaded, and those after it, MUST load anywhere.",
)
def test_deltas_without_a_save(kvstore: Any, tmp_path: Path) -> None:
    store = filled(kvstore, range(-4, 5), track_changes=True)
    save(kvstore, store, tmp_path / "all", since=0)
    emptied, written = fresh(kvstore), filled(kvstore, [1])
    kvstore.load(emptied, tmp_path / "all")
    assert_contents(emptied, contents(store), where="since the beginning")
    for table in "ab":
        emptied.clear(table)
    for name, other in (("emptied", emptied), ("written", written)):
        before = contents(other)
        with raises(DeltaBaseError, where=f"since the beginning, into a table that was {name}"):
            kvstore.load(other, tmp_path / "all")
        assert_contents(other, before, where=name)
    store.set("a", ids_of([3]), weights_of(store, 1, 5, "a"))
    for number in range(2):
        mark = store.mark()
        store.set("a", ids_of([number, 60]), weights_of(store, 2, number, "a"))
        store.delete("b", ids_of([number]))
        save(kvstore, store, tmp_path / f"{number}", since=mark)
    for names in (["0", "1"], ["1"], ["1", "0", "1"]):
        for other in (fresh(kvstore), filled(kvstore, [1, 2])):
            for name in names:
                with succeeds("load", where=f"{name} of {names}, since a moment without a name"):
                    kvstore.load(other, tmp_path / name)
            found = other.get_rows("a", ids_of([1, 60]))
            assert_same_bytes(found.numpy().tobytes(), store.get_rows("a", ids_of([1, 60])).numpy().tobytes())


@requirement(
    "KV-333",
    "The mark that a save reports MUST be that of the moment it saves: what another thread writes from then on, "
    "however early, MUST be in the next delta.",
)
def test_written_behind_the_moment(kvstore: Any, tmp_path: Path) -> None:
    class WrittenBehind(kvstore.KVStore):  # type: ignore[misc]
        """A store that somebody else writes to as soon as a save has its moment."""

        behind: Any = None

        def snapshot(self) -> Any:
            made = super().snapshot()
            if self.behind is not None:
                self.behind()
            return made

    def written(number: int) -> None:
        store.set("t", ids_of([number, 50 + number]), weights_of(store, 2, number))
        store.delete("t", ids_of([number - 1]))

    layouts = {"t": kvstore.RowLayout(4, optimizer="adam")}
    store = WrittenBehind(layouts, optimizer_in_row=True, track_changes=True, clock=lambda: 7)
    store.set("t", ids_of([0, 9]), weights_of(store, 2, 1))
    again, marks = kvstore.KVStore(layouts, optimizer_in_row=True, track_changes=True, clock=lambda: 7), [None]
    for number in range(1, 4):
        expected = contents(store)
        store.behind = partial(written, number)
        marks.append(save(kvstore, store, tmp_path / f"{number}", since=marks[-1]).mark)
        store.behind = None
        kvstore.load(again, tmp_path / f"{number}")
        assert_contents(again, expected, where=f"after save {number}")


@requirement(
    "KV-356",
    "A table that was cleared after a load MUST refuse deltas on what it was loaded from until that is loaded again; "
    "its other tables MUST stay bases, and one that was never loaded MUST take a delta since the beginning.",
)
def test_cleared(kvstore: Any, tmp_path: Path) -> None:
    _, paths, held = chain(kvstore, tmp_path, 1)
    store = fresh(kvstore)
    kvstore.load(store, paths[0])
    store.clear("a")
    with raises(DeltaBaseError, mentions=["where: ", "got: None"], where="a delta on rows that went"):
        kvstore.load(store, paths[1])
    assert_contents(store, {"a": {}, "b": held[0]["b"]}, where="after the refusal")
    with succeeds("load", where="a delta of the other table"):
        kvstore.load(store, paths[1], tables=("b",))
    kvstore.load(store, paths[0])
    with succeeds("load", where="the chain begins anew"):
        kvstore.load(store, paths[1])
    assert_contents(store, held[1], where="the chain began anew")
    source, never = filled(kvstore, range(-4, 5), track_changes=True), filled(kvstore, [1])
    save(kvstore, source, tmp_path / "since", since=0)
    for table in "ab":
        never.clear(table)
    with succeeds("load", where="a delta since the beginning"):
        kvstore.load(never, tmp_path / "since")
    assert_contents(never, contents(source), where="since the beginning")
