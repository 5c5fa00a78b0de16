"""E. Save and load: the same rows, in any form, any chunks, any world; all of it or nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, assert_same_bytes, examples, raises, requirement
from conformance.kvstore import strategies
from conformance.kvstore.support import (
    EXTREMES,
    Clock,
    assert_bits,
    assert_contents,
    contents,
    ids_of,
    random_rows,
    store_of,
    weights_of,
)
from refimpl.errors import ConfigError, CorruptionError, MissingKeyError, TwinproofError

FILE = "model-00001-of-00001.safetensors"


def layouts_of(kvstore: Any) -> dict[str, Any]:
    """Two tables of different kinds."""
    return {
        "a": kvstore.RowLayout(6, torch.float16, "partial_rowwise_adam", {"momentum1": torch.bfloat16}),
        "b": kvstore.RowLayout(4, torch.float32, "adagrad"),
    }


def filled(kvstore: Any, keys: Any = EXTREMES, **options: Any) -> Any:
    """Two tables of random rows."""
    store = store_of(kvstore, layouts_of(kvstore), **options)
    store.set_rows("a", random_rows(store, list(keys), 1, "a"))
    store.set_rows("b", random_rows(store, list(keys)[1:], 2, "b"))
    return store


def fresh(kvstore: Any, **options: Any) -> Any:
    """The same tables, empty, of another seed and time."""
    return store_of(kvstore, layouts_of(kvstore), **({"seed": 1234, "clock": Clock(7)} | options))


def save(kvstore: Any, store: Any, path: Path, **options: Any) -> Any:
    return kvstore.save(store, path, durable=False, **options)


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


def torn_files(path: Path) -> dict[str, Any]:
    """Ways to ruin a checkpoint, by name."""
    raw = (path / FILE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])

    def rewritten(change: Any) -> bytes:
        copy = json.loads(json.dumps(header))
        change(copy)
        text = json.dumps(copy).encode()
        return len(text).to_bytes(8, "little") + text + raw[8 + length :]

    def content(name: str, value: Any) -> Any:
        def change(copy: Any) -> None:
            inner = json.loads(copy["__metadata__"]["kvstore.content"])
            inner[name] = value
            copy["__metadata__"]["kvstore.content"] = json.dumps(inner)

        return change

    rows_at = 8 + length + header["a.rows"]["data_offsets"][0]
    ids_at = 8 + length + header["a.ids"]["data_offsets"][0]
    counts_at = 8 + length + header["a.bucket_counts"]["data_offsets"][0]
    last = 8 + length + header["b.rows"]["data_offsets"][1] - header["b.rows"]["shape"][1]
    return {
        "truncated": raw[:-5],
        "truncated header": raw[:60],
        "empty": b"",
        "no metadata": rewritten(lambda copy: copy.pop("__metadata__")),
        "no version": rewritten(lambda copy: copy["__metadata__"].pop("kvstore.version")),
        "version zero": rewritten(lambda copy: copy["__metadata__"].update({"kvstore.version": "0"})),
        "newer version": rewritten(lambda copy: copy["__metadata__"].update({"kvstore.version": "3"})),
        "no JSON": rewritten(lambda copy: copy["__metadata__"].update({"kvstore.content": "{"})),
        "another kind": rewritten(content("kind", "half")),
        "no layouts": rewritten(content("layouts", {})),
        "too many buckets": rewritten(content("buckets", [7, "interleave", None])),
        "rows as floats": rewritten(lambda copy: copy["a.rows"].update({"dtype": "I8"})),
        "another id": raw[:ids_at] + b"\x55" + raw[ids_at + 1 :],
        "another key": raw[:rows_at] + b"\x55" + raw[rows_at + 1 :],
        "an unused last row": raw[: last + 15] + b"\x00" + raw[last + 16 :],
        "wrong counts": raw[:counts_at] + b"\x00" + raw[counts_at + 1 :],
    }


@requirement(
    "KV-048",
    "A torn, foreign, contradictory or newer file MUST be a named error, and leave the store as it was.",
)
def test_torn_files(kvstore: Any, tmp_path: Path) -> None:
    save(kvstore, filled(kvstore, range(20)), tmp_path / "ck", buckets=kvstore.Buckets(2))
    other = filled(kvstore, [1, 2, 3])
    before = contents(other)
    for name, raw in torn_files(tmp_path / "ck").items():
        (tmp_path / "ck" / FILE).write_bytes(raw)
        with raises(TwinproofError, where=name):
            kvstore.load(other, tmp_path / "ck", chunk_rows=4)
        assert_contents(other, before, where=name)
    with raises(FileNotFoundError, where="nothing there"):
        kvstore.load(other, tmp_path / "none")
    assert_contents(other, before, where="nothing there")


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
    assert_equal(failures, ["DistributedError"] * 2, where="errors by rank")
    assert_equal(os.path.exists(tmp_path / "no"), False, where="nothing is written")


@requirement(
    "KV-052", "Equal contents MUST be saved as equal bytes, whatever the order of insertion, shards and chunks were."
)
@examples(15)
@given(st.lists(strategies.ids, max_size=20, unique=True), st.randoms(use_true_random=False), st.integers(1, 9))
def test_deterministic(kvstore: Any, tmp_path_factory: Any, keys: list[int], random: Any, shards: int) -> None:
    folder, buckets = tmp_path_factory.mktemp("kv"), kvstore.Buckets(4)
    save(kvstore, filled(kvstore, keys), folder / "one", buckets=buckets)
    store, mixed = fresh(kvstore, num_shards=shards), list(keys)
    random.shuffle(mixed)
    source = filled(kvstore, keys)
    for key in [*mixed, *mixed[:3]]:
        for table in "ab":
            if key in source.ids(table).tolist():
                store.set_rows(table, source.get_rows(table, ids_of([key])))
    store.set("a", ids_of([77777]), weights_of(store, 1, 1, "a"))
    store.delete("a", ids_of([] if 77777 in keys else [77777]))
    save(kvstore, store, folder / "two", buckets=buckets, chunk_rows=3)
    assert_same_bytes(folder / "two" / FILE, folder / "one" / FILE, where="file")


@requirement("KV-053", "An empty store, a single row, and a store that was evicted empty MUST save and load.")
def test_small_stores(kvstore: Any, tmp_path: Path) -> None:
    evicted = filled(kvstore)
    evicted.evict(policy=kvstore.EvictionPolicy.count(2**31 - 1))
    stores = {"empty": fresh(kvstore), "single": filled(kvstore, [-5]), "evicted": evicted}
    for name, store in stores.items():
        for form in ("rows", "separate"):
            for buckets in (1, 6):
                path = tmp_path / f"{name}-{form}-{buckets}"
                save(kvstore, store, path, form=form, buckets=kvstore.Buckets(buckets))
                other = fresh(kvstore)
                kvstore.load(other, path)
                assert_contents(other, contents(store), where=path.name)


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
    "KV-098",
    "A full save and the deltas after it, loaded in order, MUST give the store of the last one: changed rows, new rows "
    "and removed rows; a delta MUST hold nothing else.",
)
@examples(20)
@given(st.lists(st.tuples(strategies.close_batches, strategies.close_batches), min_size=1, max_size=3))
def test_deltas(kvstore: Any, tmp_path_factory: Any, steps: list[tuple[list[int], list[int]]]) -> None:
    folder = tmp_path_factory.mktemp("kv")
    store = filled(kvstore, range(-4, 5), track_changes=True)
    report = save(kvstore, store, folder / "full", buckets=kvstore.Buckets(3))
    other = fresh(kvstore)
    kvstore.load(other, folder / "full")
    for number, (written, gone) in enumerate(steps):
        store.set("a", ids_of(written), weights_of(store, len(written), number, "a"))
        store.delete("a", ids_of(gone))
        report = save(
            kvstore,
            store,
            folder / f"{number}",
            since=report.mark,
            buckets=kvstore.Buckets(3),
            form=["rows", "separate"][number % 2],
        )
        assert_equal(report.row_counts, {"a": len(set(written) - set(gone)), "b": 0}, where="rows of the delta")
        kvstore.load(other, folder / f"{number}")
        assert_contents(other, contents(store), where=f"after delta {number}")


@requirement(
    "KV-099",
    "Files of the previous format version MUST load: version 1, one bucket, assembled here byte by byte.",
)
def test_version_one(kvstore: Any, tmp_path: Path) -> None:
    rows = [
        bytes.fromhex("feffffffffffffff 05000000 02000080 0000803f 00000040 00004040 00008040"),
        bytes.fromhex("0700000000000000 06000000 01000080 000080bf 000000c0 000040c0 000080c0"),
    ]
    layout = '{\\"embedding_dim\\":4,\\"optimizer\\":\\"none\\",\\"state_dtypes\\":{},\\"weight_dtype\\":\\"float32\\"}'
    text = (
        '{"__metadata__":{"format":"pt","kvstore.content":"{\\"layouts\\":{\\"t\\":' + layout + '}}",'
        '"kvstore.version":"1"},"t.ids":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},'
        '"t.rows":{"dtype":"U8","shape":[2,32],"data_offsets":[16,80]}}'
    )
    text += " " * (-len(text) % 8)
    ids = bytes.fromhex("feffffffffffffff 0700000000000000")
    data = len(text).to_bytes(8, "little") + text.encode() + ids + b"".join(rows)
    (tmp_path / "v1.safetensors").write_bytes(data)
    store = kvstore.KVStore({"t": kvstore.RowLayout(4)})
    kvstore.load(store, tmp_path / "v1.safetensors")
    assert_contents(store, {"t": {-2: rows[0], 7: rows[1]}}, where="version 1")


@requirement(
    "KV-100",
    "The schema on disk MUST be the documented one: rows in bucket order, ids ascending inside, counts by bucket.",
)
def test_schema(kvstore: Any, tmp_path: Path) -> None:
    store = store_of(kvstore, kvstore.RowLayout(4))
    keys = [5, -3, 8, 2, 0, 7]
    store.set_rows("t", random_rows(store, keys, 1))
    save(kvstore, store, tmp_path / "ck", buckets=kvstore.Buckets(3))
    raw = (tmp_path / "ck" / FILE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__")
    assert_equal(metadata["kvstore.version"], "2", where="version")
    shapes = {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}
    assert_equal(shapes, {"t.rows": ("U8", [6, 32]), "t.ids": ("I64", [6]), "t.bucket_counts": ("I64", [3])})

    def data(name: str) -> bytes:
        begin, end = header[name]["data_offsets"]
        return raw[8 + length + begin : 8 + length + end]

    order = [-3, 0, 7, 2, 5, 8]
    assert_same_bytes(data("t.ids"), b"".join(k.to_bytes(8, "little", signed=True) for k in order), where="ids")
    assert_same_bytes(data("t.bucket_counts"), b"".join(k.to_bytes(8, "little") for k in (2, 1, 3)), where="counts")
    assert_same_bytes(data("t.rows"), b"".join(contents(store)["t"][k] for k in order), where="rows")


@requirement("KV-101", "Tables that file and store do not share MUST be refused, unless they are named.")
def test_tables(kvstore: Any, tmp_path: Path) -> None:
    store = filled(kvstore)
    save(kvstore, store, tmp_path / "ck")
    part = store_of(kvstore, {"a": layouts_of(kvstore)["a"]})
    with raises(ConfigError, where="a table too many in the file"):
        kvstore.load(part, tmp_path / "ck")
    kvstore.load(part, tmp_path / "ck", tables=("a",))
    assert_contents(part, {"a": contents(store)["a"]}, where="one table")
    other = store_of(kvstore, layouts_of(kvstore) | {"c": kvstore.RowLayout(4)})
    with raises((ConfigError, MissingKeyError), where="a table that is not in the file"):
        kvstore.load(other, tmp_path / "ck", tables=("a", "c"))
    assert_equal(contents(other), {"a": {}, "b": {}, "c": {}}, where="nothing is loaded")
    narrow = store_of(kvstore, layouts_of(kvstore) | {"a": kvstore.RowLayout(7, torch.float16)})
    with raises(ConfigError, where="another width"):
        kvstore.load(narrow, tmp_path / "ck", weights_only=True)
