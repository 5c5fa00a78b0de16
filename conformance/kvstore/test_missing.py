"""Missing ids: they read as documented, the same every time, and stay missing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, assert_same_bytes, examples, raises, requirement, succeeds
from conformance.kvstore import strategies
from conformance.kvstore.cases import (
    EXTREMES,
    FILE,
    WEIGHTS,
    assert_bits,
    assert_contents,
    contents,
    header,
    ids_of,
    random_rows,
    save,
    store_of,
    weights_of,
)
from twinproof.errors import TwinproofError


@requirement("KV-010", "Reading MUST NOT insert: ids, size and every row stay as they are after any read.")
@examples(40)
@given(strategies.batches)
def test_reading_never_inserts(kvstore: Any, asked: list[int]) -> None:
    store = store_of(kvstore)
    store.set_rows("t", random_rows(store, [1, 2, 3], 1))
    before = contents(store)
    ids = ids_of(asked)
    store.get("t", ids)
    store.get_rows("t", ids)
    store.get_state("t", "momentum1", ids)
    store.metadata("t", ids)
    store.contains("t", ids)
    assert_contents(store, before, where="after reads")
    assert_equal(store.stats().row_count, 3, where="row_count")


@requirement(
    "KV-011",
    "A missing id MUST read as its initial row: its key, the initial weight, and zeros in timestamp, count, used, "
    "state and padding.",
)
@examples(40)
@given(strategies.layouts(), strategies.ids)
def test_missing_row(kvstore: Any, arguments: tuple[int, torch.dtype, str, dict[str, torch.dtype]], key: int) -> None:
    layout = kvstore.RowLayout(*arguments)
    store = store_of(kvstore, layout)
    # Neighbours, so that a wrong row would have something to show.
    store.set_rows("t", random_rows(store, [k for k in (7, -7, 2**40) if k != key], 2))
    weight = store.get("t", ids_of([key])).contiguous().view(torch.uint8).numpy().tobytes()
    expected = header(key, 0, 0, used=False) + weight
    expected += bytes(layout.row_bytes - len(expected))
    assert_same_bytes(store.get_rows("t", ids_of([key]))[0].numpy().tobytes(), expected, where=f"missing {key}")


def uniform(seed: int, table: int, key: int, element: int, low: float, high: float) -> float:
    """The initializer's definition in plain integers, before the rounding to float32."""
    word = (1 << 64) - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    row = mix(mix((seed + golden * (table + 1)) & word) ^ (key & word))
    return low + (high - low) * ((mix((row + golden * (element + 1)) & word) >> 40) * 2.0**-24)


@requirement(
    "KV-012",
    "The initial weight MUST be the documented function of seed, table, id and element: the same in any batch, after "
    "any writes, in any store of that seed.",
)
@examples(40)
@given(
    st.sampled_from(WEIGHTS),
    st.lists(strategies.ids, min_size=1, max_size=6),
    st.integers(0, 2**64 - 1),
    st.integers(1, 9),
)
def test_initializer(kvstore: Any, dtype: torch.dtype, keys: list[int], seed: int, shards: int) -> None:
    bounds = kvstore.Initializer.uniform(-0.25, 0.5)
    layouts = {"a": kvstore.RowLayout(5, dtype), "b": kvstore.RowLayout(3, dtype)}
    store = store_of(kvstore, layouts, initializer=bounds, seed=seed, num_shards=shards)
    for number, (table, layout) in enumerate(layouts.items()):
        width = layout.embedding_dim
        exact = [[uniform(seed, number, key, e, -0.25, 0.5) for e in range(width)] for key in keys]
        expected = torch.tensor(exact, dtype=torch.float64).to(torch.float32).to(dtype)
        assert_bits(store.get(table, ids_of(keys)), expected, where=table)
        store.set(table, ids_of([keys[0] ^ 1]), weights_of(store, 1, 1, table))
        for position, key in enumerate(keys):
            if key != keys[0] ^ 1:
                assert_bits(store.get(table, ids_of([key]))[0], expected[position], where=f"{table} {key} alone")


@requirement("KV-013", "With the zeros initializer every missing weight MUST be zero, per table.")
def test_zeros_initializer(kvstore: Any) -> None:
    layouts = {"a": kvstore.RowLayout(4), "b": kvstore.RowLayout(4)}
    kinds = {"a": kvstore.Initializer.zeros(), "b": kvstore.Initializer.uniform(1.0, 2.0)}
    store = store_of(kvstore, layouts, initializer=kinds)
    assert_bits(store.get("a", ids_of(EXTREMES)), torch.zeros(len(EXTREMES), 4), where="a")
    found = store.get("b", ids_of(EXTREMES))
    assert_equal(bool(((found >= 1) & (found <= 2)).all()), True, where="b within its bounds")


@requirement(
    "KV-102", "A row whose values are all zero, or -0.0, MUST be a row: found, listed, and read as it was set."
)
def test_zero_rows(kvstore: Any) -> None:
    store = store_of(kvstore, initializer=kvstore.Initializer.uniform(1, 2))
    weights = torch.zeros(2, 6)
    weights[1] = -0.0
    store.set("t", ids_of([4, 5]), weights)
    assert_bits(store.get("t", ids_of([4, 5])), weights, where="weights")
    assert_equal(store.contains("t", ids_of([4, 5, 6])).tolist(), [True, True, False], where="contains")
    assert_equal(store.ids("t").tolist(), [4, 5], where="ids")
    row = torch.zeros(1, store.layout("t").row_bytes, dtype=torch.uint8)
    store.set_rows("t", row)
    assert_equal(store.contains("t", ids_of([0])).tolist(), [True], where="a row of zero bytes")


@requirement(
    "KV-232",
    "What others compute by the initializer's definition, as a sharded table without a store does, MUST be what a "
    "store gives for ids that were never written, bit for bit.",
)
@examples(20)
@given(
    st.sampled_from(WEIGHTS),
    st.lists(strategies.ids, min_size=0, max_size=6),
    st.integers(-(2**63), 2**64 - 1),
    st.tuples(st.floats(-8, 8, width=32), st.floats(0, 8, width=32)),
)
def test_definition_in_words(
    kvstore: Any, dtype: torch.dtype, keys: list[int], seed: int, bounds: tuple[float, float]
) -> None:
    from twinproof.kvstore.options import initial_weights

    kinds = {"a": kvstore.Initializer.zeros(), "b": kvstore.Initializer.uniform(bounds[0], bounds[0] + bounds[1])}
    store = store_of(kvstore, {name: kvstore.RowLayout(5, dtype) for name in kinds}, initializer=kinds, seed=seed)
    for index, (table, kind) in enumerate(kinds.items()):
        made = initial_weights(kind, seed, index, ids_of(keys), 5, dtype)
        assert_bits(made, store.get(table, ids_of(keys)), where=f"{table}, {kind}")


@requirement(
    "KV-264",
    "Any bytes of the row of an id without a row MUST be those of its whole initial row, as bytes of a row that is "
    "there are those of that row.",
)
def test_parts_of_initial_rows(kvstore: Any) -> None:
    store = store_of(kvstore, kvstore.RowLayout(4, torch.float16, "adam"))
    store.set_rows("t", random_rows(store, [3], 1))
    ids, row_bytes = ids_of([3, 9, 3, -9]), store.layout("t").row_bytes
    whole = store.get_rows("t", ids)
    # What a read does not write stays as it was.
    memory = torch.full((4 * row_bytes,), 0x55, dtype=torch.uint8)
    for begin in range(row_bytes):
        for end in range(begin + 1, row_bytes + 1):
            width = end - begin
            out = memory[: 4 * width].view(4, width).fill_(0x55)
            store.get_rows("t", ids, offset_bytes=begin, width_bytes=width, out=out)
            assert_equal(torch.equal(out, whole[:, begin:end]), True, where=f"bytes {begin} to {end}")


@requirement(
    "KV-299",
    "A state that is written to ids without rows MUST make their rows, each with its initial weight and no other "
    "state, in bounded tables as in others, and leave the weights of rows that are there.",
)
def test_states_of_missing_rows(kvstore: Any) -> None:
    for capacity in (None, 8):
        store = store_of(kvstore, **({} if capacity is None else {"capacity": {"t": capacity}}))
        store.set_rows("t", random_rows(store, [5, 6], 1))
        ids, written = ids_of([6, 3, -2]), torch.arange(18.0).reshape(3, 6)
        expected = store.get_rows("t", ids)
        slot = store.layout("t").state_slots["momentum1"]
        expected[:, slot.offset_bytes : slot.end_bytes] = written.view(torch.uint8)
        store.set_state("t", "momentum1", ids, written)
        where = f"capacity {capacity}"
        assert_equal(sorted(store.ids("t").tolist()), [-2, 3, 5, 6], where=f"{where}: ids")
        # Headers of new rows are a writer's affair.
        assert_bits(store.get_rows("t", ids)[:, 16:], expected[:, 16:], where)


@requirement(
    "KV-316",
    "A batch in which one id has no answer MUST be refused wherever that id stands, and by its name alone: scores, "
    "saved rows and rows in memory of an id without a row, and buckets of an id outside of them.",
)
def test_one_among_others(kvstore: Any, tmp_path: Path) -> None:
    keys = [3, 1, 2, 1, 0]
    store = store_of(kvstore)
    store.set_rows("t", random_rows(store, sorted(set(keys)), 1))
    save(kvstore, store, tmp_path / "rows", form="rows")
    save(kvstore, store, tmp_path / "apart", form="separate")
    chunks, sort = kvstore.Buckets(2, "chunk", 4), kvstore.sort_ids_by_bucket
    asks: dict[str, Callable[[torch.Tensor], Any]] = {
        "scores": lambda ids: store.get_scores("t", ids),
        "scores of a moment": lambda ids: store.snapshot().get_scores("t", ids),
        "buckets": lambda ids: kvstore.bucket_of(ids, chunks),
        "ids by bucket": lambda ids: sort(ids, 0, 2, 2, hash_mode="chunk", bucket_size=4),
        "ids of some buckets": lambda ids: sort(ids, 0, 1, 2, hash_mode="chunk", bucket_size=4),
    }
    held = kvstore.KVTensor(store, ids_of([0, 1, 2, 3])).clone().source
    for name, source in (
        ("saved rows", kvstore.SavedRows(tmp_path / "rows")),
        ("values saved apart", kvstore.SavedRows(tmp_path / "apart")),
        ("rows in memory", held),
    ):
        asks |= {
            f"weights of {name}": partial(source.get, "t"),
            f"a state of {name}": partial(source.get_state, "t", "momentum1"),
            f"scores of {name}": partial(source.get_scores, "t"),
        }
    for name, ask in asks.items():
        with succeeds("asking", where=name):
            ask(ids_of(keys))
        for place in range(len(keys) + 1):
            batch = [*keys[:place], 77, *keys[place:]]
            with raises(TwinproofError, mentions=("got: [77]",), where=f"{name}: {batch}"):
                ask(ids_of(batch))


@requirement(
    "KV-490",
    "A store with the seed, initializer and tables, in their order, of one that saved MUST have its initial weights "
    "for ids without a row when it has loaded one of them, whatever tables stand behind; files MUST hold neither.",
)
@pytest.mark.parametrize("table", ["users", "items"])
def test_initial_weights_behind_a_load(kvstore: Any, tmp_path: Path, table: str) -> None:
    layout, asked = kvstore.RowLayout(5), ids_of([-3, 0, 9, 2**40])
    uniform = kvstore.Initializer.uniform(-0.5, 0.25)
    chosen = {"users": uniform, "items": kvstore.Initializer.uniform(0.0, 1.0)}
    layouts = dict.fromkeys(("users", "items"), layout)
    source = store_of(kvstore, layouts, initializer=chosen)
    for name in layouts:
        source.set(name, asked[:1], torch.full((1, 5), 4.0))
    save(kvstore, source, tmp_path / "ck")
    # It has one table more, behind those that were saved, and not all of these are loaded.
    server = store_of(kvstore, layouts | {"more": layout}, initializer=chosen | {"more": uniform})
    kvstore.load(server, tmp_path / "ck", tables=(table,))
    assert_bits(server.get(table, asked), source.get(table, asked), where=f"{table}: rows and initial weights")
    # As the pages say: of a table that comes first here, and not there, and of another seed.
    for where, other in (
        ("another seed", store_of(kvstore, layouts, initializer=chosen, seed=8)),
        ("another order", store_of(kvstore, {"x": layout} | layouts, initializer=chosen | {"x": uniform})),
    ):
        kvstore.load(other, tmp_path / "ck", tables=(table,))
        assert_bits(other.get(table, asked[:1]), source.get(table, asked[:1]), where=f"{where}: a row")
        is_same = bool((other.get(table, asked[1:]) == source.get(table, asked[1:])).any())
        assert_equal(is_same, False, where=f"{where}: initial weights that are the same")
        save(kvstore, _moved(kvstore, source, other), tmp_path / where)
        assert_equal(
            (tmp_path / where / FILE).read_bytes(), (tmp_path / "ck" / FILE).read_bytes(), where=f"{where}: files"
        )


def _moved(kvstore: Any, source: Any, other: Any) -> Any:
    """A store of the source's rows and tables with the other's seed."""
    made = store_of(kvstore, {name: source.layout(name) for name in source.tables}, seed=other.options.seed)
    for name in source.tables:
        made.set_rows(name, source.get_rows(name, source.ids(name)))
    return made
