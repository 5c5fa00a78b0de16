"""Keys, shards and buckets: every id in one place, and the same place every time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, examples, raises, requirement
from conformance.kvstore import strategies
from conformance.kvstore.cases import (
    EXTREMES,
    assert_bits,
    assert_contents,
    contents,
    ids_of,
    random_rows,
    store_of,
    weights_of,
)
from twinproof.errors import ConfigError


@requirement("KV-029", "The number of shards MUST NOT change any result.")
@examples(30)
@given(strategies.batches, st.integers(1, 64))
def test_shards(kvstore: Any, keys: list[int], shards: int) -> None:
    one, many = store_of(kvstore, num_shards=1), store_of(kvstore, num_shards=shards)
    for store in (one, many):
        store.set("t", ids_of(keys), weights_of(store, len(keys), 1))
        store.apply_gradients("t", ids_of(keys[:5]), weights_of(store, len(keys[:5]), 2).nan_to_num(0, 0, 0), 0.1)
        store.delete("t", ids_of(keys[2:4]))
    assert_contents(many, contents(one), where=f"{shards} shards")
    assert_equal(many.ids("t").tolist(), one.ids("t").tolist(), where="ids")
    missing = ids_of([*EXTREMES, 424242])
    assert_bits(many.get_rows("t", missing), one.get_rows("t", missing), where="present or missing")


@requirement("KV-031", "Ids in a range MUST be all ids of the table in it, both ends included, ascending, each once.")
@examples(50)
@given(strategies.batches, strategies.ids, strategies.ids)
def test_id_ranges(kvstore: Any, keys: list[int], begin: int, last: int) -> None:
    store = store_of(kvstore)
    store.set("t", ids_of(keys), weights_of(store, len(keys), 1))
    expected = sorted(key for key in set(keys) if begin <= key <= last)
    assert_equal(store.ids("t", begin, last).tolist(), expected, where=f"[{begin}, {last}]")
    assert_equal(store.ids("t").tolist(), sorted(set(keys)), where="all")


def chunk_ids(total: int, size: int) -> Any:
    return st.lists(st.integers(0, total * size - 1), max_size=40)


@requirement(
    "KV-032",
    "Sorting by bucket MUST give a permutation of the ids, buckets never descending, ids ascending inside a bucket, "
    "and the right count for each bucket.",
)
@examples(80)
@given(st.data(), st.integers(1, 9), st.sampled_from(["interleave", "chunk"]), st.integers(1, 7))
def test_bucket_sort(kvstore: Any, data: st.DataObject, total: int, mode: str, size: int) -> None:
    keys = data.draw(chunk_ids(total, size) if mode == "chunk" else strategies.batches)
    options: dict[str, Any] = {"hash_mode": mode, "bucket_size": size if mode == "chunk" else None}

    def bucket(key: int) -> int:
        return key // size if mode == "chunk" else key % total

    found, counts = kvstore.sort_ids_by_bucket(ids_of(keys), 0, total, total, **options)
    assert_equal((tuple(found.shape), tuple(counts.shape)), ((len(keys), 1), (total, 1)), where="shapes")
    assert_equal(found[:, 0].tolist(), sorted(keys, key=lambda key: (bucket(key), key)), where="order")
    expected = [sum(bucket(key) == b for key in keys) for b in range(total)]
    assert_equal(counts[:, 0].tolist(), expected, where="counts")


@requirement(
    "KV-216",
    "Sorting by bucket MUST count every id to its own bucket, the largest that there is among them, however large "
    "buckets are and however many of them lie behind all ids.",
)
def test_large_buckets(kvstore: Any) -> None:
    for total in (3, 256, 257, 600, 5000):
        for size in (2**50 + 1, 2**55, 2**62 - 1, 2**62, 2**63 - 1):
            cuts = [size * place for place in (0, 1, 2, 3, total - 1)] + [2**63]
            keys = {key for cut in cuts for key in (cut - 1, cut) if 0 <= key < 2**63 and key // size < total}
            found, counts = kvstore.sort_ids_by_bucket(
                ids_of(sorted(keys, reverse=True)), total_buckets=total, hash_mode="chunk", bucket_size=size
            )
            where = f"{total} buckets of {size}"
            assert_equal(found[:, 0].tolist(), sorted(keys), where=where)
            expected = dict(sorted(Counter(key // size for key in keys).items()))
            assert_equal({b: n for b, n in enumerate(counts[:, 0].tolist()) if n}, expected, where=f"{where}: counts")


@requirement(
    "KV-033",
    "An id of a bucket outside the rank's range MUST be refused; a rank without buckets MUST get shapes [0, 1].",
)
@examples(60)
@given(st.integers(1, 8), st.data())
def test_bucket_ranges(kvstore: Any, total: int, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, total))
    end = data.draw(st.integers(begin, total))
    for key in (0, total - 1, begin, end, -1, *EXTREMES):
        inside = begin <= key % total < end
        if inside:
            found, counts = kvstore.sort_ids_by_bucket(ids_of([key]), begin, end, total)
            assert_equal(found.tolist(), [[key]], where="id")
            assert_equal(counts[:, 0].tolist(), [int(b == key % total) for b in range(begin, end)], where="counts")
        else:
            told = (str(key), f"buckets {begin} to {end}")
            with raises(ConfigError, mentions=told, where=f"{key} outside [{begin}, {end}) of {total}"):
                kvstore.sort_ids_by_bucket(ids_of([key]), begin, end, total)
    found, counts = kvstore.sort_ids_by_bucket(ids_of([]), begin, begin, total)
    assert_equal((tuple(found.shape), tuple(counts.shape)), ((0, 1), (0, 1)), where="no buckets")
    for key in (-1, total * 5):
        with raises(ConfigError, where=f"{key} outside all chunks"):
            kvstore.sort_ids_by_bucket(ids_of([key]), 0, total, total, hash_mode="chunk", bucket_size=5)


@requirement(
    "KV-034", "The ranks' bucket ranges MUST tile all buckets in order, the first ranks having at most one more."
)
@examples(100)
@given(st.integers(0, 200), st.integers(1, 40))
def test_rank_ranges(kvstore: Any, total: int, world_size: int) -> None:
    ranges = [kvstore.rank_buckets(total, world_size, rank) for rank in range(world_size)]
    ends = [0, *(end for _, end in ranges)]
    assert_equal([begin for begin, _ in ranges], ends[:-1], where="begins")
    assert_equal(ends[-1], total, where="end")
    sizes = [end - begin for begin, end in ranges]
    share, extra = divmod(total, world_size)
    assert_equal(sizes, [share + 1] * extra + [share] * (world_size - extra), where="sizes")


@requirement(
    "KV-035",
    "An id MUST be the caller's own number everywhere: in headers, views, files and lists, on every rank and table.",
)
def test_no_local_ids(kvstore: Any, tmp_path: Path) -> None:
    keys, total = [key * 37 - 500 for key in range(30)] + [2**63 - 1, -(2**63)], 6
    store = store_of(kvstore, {"a": kvstore.RowLayout(4), "b": kvstore.RowLayout(4)})
    for table in "ab":
        store.set(table, ids_of(keys), weights_of(store, len(keys), 1, table))
    kvstore.save(store, tmp_path / "ck", buckets=kvstore.Buckets(total), durable=False)
    saved = kvstore.SavedRows(tmp_path / "ck")
    for table in "ab":
        for rank in range(4):
            owned = kvstore.rank_buckets(total, 4, rank)
            part = store_of(kvstore, {"a": kvstore.RowLayout(4), "b": kvstore.RowLayout(4)})
            kvstore.load(part, tmp_path / "ck", owned=owned)
            expected = sorted(key for key in keys if owned[0] <= key % total < owned[1])
            assert_equal(part.ids(table).tolist(), expected, where=f"ids of {table} on rank {rank}")
            view = kvstore.KVTensor(part, part.ids(table), table=table)
            found = kvstore.unpack_header(view.full_tensor()).ids
            assert_equal(found.tolist(), expected, where=f"keys of {table} on rank {rank}")
        assert_equal(saved.ids(table).tolist(), sorted(keys), where=f"saved ids of {table}")


@requirement("KV-036", "Tables of one store MUST never see each other's ids, in any verb.")
@examples(30)
@given(strategies.close_batches, strategies.close_batches)
def test_tables_are_apart(kvstore: Any, first: list[int], second: list[int]) -> None:
    layout = kvstore.RowLayout(6, optimizer="adam")
    both = store_of(kvstore, {"a": layout, "b": layout}, initializer=kvstore.Initializer.zeros())
    alone = {table: store_of(kvstore, {table: layout}, initializer=kvstore.Initializer.zeros()) for table in "ab"}
    for table, keys in (("a", first), ("b", second), ("a", second[:3])):
        for store in (both, alone[table]):
            store.set(table, ids_of(keys), weights_of(store, len(keys), 1, table))
    for store in (both, alone["a"]):
        store.delete("a", ids_of(first[:4]))
        store.evict("a", policy=kvstore.EvictionPolicy.count(2))
    for store in (both, alone["b"]):
        store.set_rows("b", random_rows(store, second[-2:], 3, "b"))
    assert_contents(both, {table: contents(alone[table])[table] for table in "ab"}, where="beside each other")


@requirement(
    "KV-234",
    "Ranges of buckets MUST be refused for fewer than no buckets, and for a rank that its world does not have.",
)
def test_refused_ranks(kvstore: Any) -> None:
    for world in ((-1, 1, 0), (4, 0, 0), (4, -1, 0), (4, -1, -2), (4, 2, 2), (4, 2, 3), (4, 2, -1)):
        with raises(ConfigError, mentions=(f"got: {world}",), where=f"{world}"):
            kvstore.rank_buckets(*world)
    for world, expected in {(0, 1, 0): (0, 0), (1, 1, 0): (0, 1), (4, 2, 0): (0, 2), (4, 2, 1): (2, 4)}.items():
        assert_equal(tuple(kvstore.rank_buckets(*world)), expected, where=f"{world}")
