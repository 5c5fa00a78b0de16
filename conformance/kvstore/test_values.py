"""B. Get and set: what was written is what is read, bit for bit, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, assert_same_bytes, examples, raises, requirement
from conformance.kvstore import strategies
from conformance.kvstore.support import (
    EXTREMES,
    OPTIMIZERS,
    WEIGHTS,
    Clock,
    assert_bits,
    assert_contents,
    contents,
    header,
    ids_of,
    random_row,
    random_rows,
    rows_tensor,
    store_of,
    weights_of,
)
from refimpl.errors import ConfigError, ShapeError, StoreClosedError, TwinproofError, UnsupportedError


@requirement("KV-008", "Weights MUST be read as they were set, bit for bit, for every weight dtype.")
def test_weights_round_trip(kvstore: Any) -> None:
    for dtype in WEIGHTS:
        for optimizer in OPTIMIZERS:
            store = store_of(kvstore, kvstore.RowLayout(9, dtype, optimizer))
            ids, weights = ids_of(range(-20, 20)), weights_of(store, 40, 3)
            store.set("t", ids, weights)
            assert_bits(store.get("t", ids), weights, where=f"{dtype} {optimizer}")
            assert_bits(store.get("t", ids.flip(0)), weights.flip(0), where=f"{dtype} {optimizer} backwards")


@requirement(
    "KV-009", "A whole row MUST be read as it was set, header included, but used, which MUST be set in the store."
)
@examples(40)
@given(strategies.layouts(), st.integers(0, 2**31 - 1), st.integers(0, 2**32 - 1))
def test_rows_round_trip(
    kvstore: Any, arguments: tuple[int, torch.dtype, str, dict[str, torch.dtype]], count: int, timestamp: int
) -> None:
    layout = kvstore.RowLayout(*arguments)
    store = store_of(kvstore, layout)
    row = random_row(layout, -3, timestamp, count, 5)
    unused = header(-3, timestamp, count, used=False) + row[16:]
    store.set_rows("t", rows_tensor([unused], layout.row_bytes))
    assert_same_bytes(store.get_rows("t", ids_of([-3]))[0].numpy().tobytes(), row, where=str(arguments))


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
    "KV-014",
    "Of duplicates in a batch the last MUST win, the store grow by distinct ids, and counts grow by occurrences, "
    "saturating at 2**31 - 1.",
)
@examples(60)
@given(strategies.close_batches)
def test_duplicates(kvstore: Any, keys: list[int]) -> None:
    clock = Clock(50)
    store = store_of(kvstore, clock=clock)
    layout = store.layout("t")
    store.set_rows("t", rows_tensor([random_row(layout, 3, 1, 2**31 - 3, 1)], layout.row_bytes))
    weights = weights_of(store, len(keys), 4)
    store.set("t", ids_of(keys), weights)
    assert_equal(store.size("t"), len({3, *keys}), where="size")
    for key in set(keys):
        last = len(keys) - 1 - keys[::-1].index(key)
        assert_bits(store.get("t", ids_of([key]))[0], weights[last], where=f"weight of {key}")
        count = min(2**31 - 1, keys.count(key) + (2**31 - 3 if key == 3 else 0))
        got = store.get_rows("t", ids_of([key]), width_bytes=16)[0].numpy().tobytes()
        assert_same_bytes(got, header(key, 50, count), where=f"header of {key}")


@requirement("KV-015", "Duplicates in a batch that is read MUST give identical rows, present or missing.")
@examples(30)
@given(strategies.close_batches)
def test_duplicate_reads(kvstore: Any, keys: list[int]) -> None:
    store = store_of(kvstore)
    store.set_rows("t", random_rows(store, [0, 1, 2, -1], 1))
    rows = store.get_rows("t", ids_of(keys * 2))
    for position, key in enumerate(keys * 2):
        assert_bits(rows[position], store.get_rows("t", ids_of([key]))[0], where=f"id {key} at {position}")


@requirement("KV-016", "A batch that is split anywhere and applied in order MUST leave what the whole batch leaves.")
@examples(50)
@given(st.lists(st.integers(-2, 2), max_size=12), st.integers(0, 12))
def test_split_batches(kvstore: Any, keys: list[int], cut: int) -> None:
    for verb in ("set", "set_rows", "set_state"):
        found = []
        for edges in ([0, len(keys)], [0, cut, max(cut, len(keys))]):
            store = store_of(kvstore)
            weights, rows = weights_of(store, len(keys), 8), random_rows(store, keys, 9)
            for begin, end in pairwise(edges):
                ids = ids_of(keys[begin:end])
                if verb == "set":
                    store.set("t", ids, weights[begin:end])
                elif verb == "set_rows":
                    store.set_rows("t", rows[begin:end])
                else:
                    store.set_state("t", "momentum1", ids, weights[begin:end])
            found.append(store)
        assert_contents(found[1], contents(found[0]), where=f"{verb} split at {cut}")


@requirement(
    "KV-017", "With count, entries past it MUST have no effect, and rows of out past it MUST stay as they were."
)
@examples(30)
@given(strategies.close_batches, st.data())
def test_count(kvstore: Any, keys: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(keys)))
    store, other = store_of(kvstore), store_of(kvstore)
    weights = weights_of(store, len(keys), 1)
    store.set("t", ids_of(keys), weights, count=count)
    other.set("t", ids_of(keys[:count]), weights[:count])
    assert_contents(store, contents(other), where=f"set of the first {count}")
    out = torch.full((len(keys), 6), 9.0)
    returned = store.get("t", ids_of(keys), out=out, count=count)
    assert_equal(returned is out, True, where="out is returned")
    assert_bits(out[:count], store.get("t", ids_of(keys[:count])), where="read")
    assert_bits(out[count:], torch.full((len(keys) - count, 6), 9.0), where="past count")


@requirement("KV-018", "An empty batch MUST change nothing and give results of the right shape and dtype.")
def test_empty_batch(kvstore: Any) -> None:
    store = store_of(kvstore)
    store.set_rows("t", random_rows(store, [4], 1))
    before, none, row_bytes = contents(store), ids_of([]), store.layout("t").row_bytes
    store.set("t", none, torch.zeros(0, 6))
    store.set_rows("t", torch.zeros(0, row_bytes, dtype=torch.uint8))
    store.set_state("t", "momentum1", none, torch.zeros(0, 6))
    store.apply_gradients("t", none, torch.zeros(0, 6), 0.1)
    assert_equal(store.delete("t", none), 0, where="deleted")
    assert_contents(store, before, where="after empty batches")
    assert_bits(store.get("t", none), torch.zeros(0, 6))
    assert_bits(store.get_rows("t", none), torch.zeros(0, row_bytes, dtype=torch.uint8))
    assert_bits(store.get_state("t", "momentum2", none), torch.zeros(0, 6))
    assert_bits(store.metadata("t", none), torch.zeros(0, 1, dtype=torch.int64))
    assert_bits(store.contains("t", none), torch.zeros(0, dtype=torch.bool))
    empty = store_of(kvstore)
    assert_bits(empty.ids("t"), torch.zeros(0, dtype=torch.int64), where="ids of an empty store")


@requirement("KV-019", "The order of distinct ids in a batch MUST NOT matter to what the store holds.")
@examples(40)
@given(st.lists(strategies.ids, max_size=12, unique=True), st.randoms(use_true_random=False))
def test_permuted_batches(kvstore: Any, keys: list[int], random: Any) -> None:
    order = list(range(len(keys)))
    random.shuffle(order)
    store, other = store_of(kvstore), store_of(kvstore)
    weights = weights_of(store, len(keys), 2)
    store.set("t", ids_of(keys), weights)
    other.set("t", ids_of([keys[k] for k in order]), weights[order].contiguous())
    assert_contents(other, contents(store), where=f"order {order}")


@requirement("KV-020", "Every int64 MUST be an id: negative and extremal ones are written, read, listed and deleted.")
def test_extremal_ids(kvstore: Any) -> None:
    for verb in ("set", "set_rows", "apply_gradients"):
        store = store_of(kvstore)
        ids, rows = ids_of(EXTREMES), random_rows(store, EXTREMES, 3)
        if verb == "set_rows":
            store.set_rows("t", rows)
            assert_bits(store.get_rows("t", ids), rows, where=verb)
        elif verb == "set":
            store.set("t", ids, weights_of(store, len(EXTREMES), 3))
            assert_bits(store.get("t", ids), weights_of(store, len(EXTREMES), 3), where=verb)
        else:
            store.apply_gradients("t", ids, torch.ones(len(EXTREMES), 6), 0.5)
        assert_equal(store.ids("t").tolist(), sorted(EXTREMES), where=f"ids after {verb}")
        assert_equal(store.contains("t", ids).tolist(), [True] * len(EXTREMES), where=verb)
        assert_equal(store.delete("t", ids), len(EXTREMES), where=f"deleted after {verb}")


@requirement("KV-021", "No id MUST be reserved: next to 2**k ids around every power of two are ordinary ids.")
def test_no_sentinel(kvstore: Any) -> None:
    powers = {sign * 2**k + d for k in range(63) for d in (-1, 0, 1) for sign in (1, -1)}
    keys = sorted({k for k in powers if -(2**63) <= k < 2**63} | set(EXTREMES))
    store = store_of(kvstore)
    weights = weights_of(store, len(keys), 6)
    store.set("t", ids_of(keys), weights)
    assert_equal(store.ids("t").tolist(), keys, where="ids")
    assert_bits(store.get("t", ids_of(keys)), weights, where="weights")


@requirement("KV-022", "No input MUST ever be changed or kept: not ids, weights, rows, states or gradients.")
def test_inputs_stay(kvstore: Any) -> None:
    store = store_of(kvstore)
    rows = random_rows(store, [1, 2], 1)
    rows[:, 15] &= 0x7F
    inputs = {
        "ids": ids_of([1, 2]),
        "weights": weights_of(store, 2, 1),
        "rows": rows,
        "state": weights_of(store, 2, 2),
        "scores": torch.tensor([-1.0, 2.0]),
    }
    copies = {name: value.clone() for name, value in inputs.items()}
    view = kvstore.KVTensor(store, ids_of([1, 2]))
    acts: list[Callable[[], Any]] = [
        lambda: store.set("t", inputs["ids"], inputs["weights"]),
        lambda: store.set_rows("t", inputs["rows"]),
        lambda: store.set_state("t", "momentum1", inputs["ids"], inputs["state"]),
        lambda: store.set_scores("t", inputs["ids"], inputs["scores"]),
        lambda: store.apply_gradients("t", inputs["ids"], inputs["weights"], 0.1),
        lambda: view.set_range(0, 0, 2, inputs["rows"]),
        lambda: store.load_state_dict({"t.weight": inputs["rows"], "t.weight_id": inputs["ids"]}),
        lambda: store.get("t", inputs["ids"]),
        lambda: store.delete("t", inputs["ids"]),
    ]
    for act in acts:
        act()
        for name, value in inputs.items():
            assert_bits(value, copies[name], where=name)
    store.set_rows("t", inputs["rows"])
    held = contents(store)
    inputs["rows"].zero_()
    inputs["weights"].zero_()
    assert_contents(store, held, where="after the caller changed its own tensors")


def misuses(store: Any) -> dict[str, Any]:
    """Calls that must be refused, by name."""
    ids, weights = ids_of([1, 5]), torch.zeros(2, 6)
    row_bytes = store.layout("t").row_bytes
    return {
        "narrow weights": lambda: store.set("t", ids, torch.zeros(2, 5)),
        "wide weights": lambda: store.set("t", ids, torch.zeros(2, 7)),
        "few weights": lambda: store.set("t", ids, torch.zeros(1, 6)),
        "flat weights": lambda: store.set("t", ids, torch.zeros(12)),
        "weights of another dtype": lambda: store.set("t", ids, weights.double()),
        "half weights": lambda: store.set("t", ids, weights.half()),
        "strided weights": lambda: store.set("t", ids, torch.zeros(6, 2).t()),
        "strided ids": lambda: store.set("t", ids_of([1, 2, 5, 6])[::2], weights),
        "meta weights": lambda: store.set("t", ids, weights.to("meta")),
        "float ids": lambda: store.set("t", ids.double(), weights),
        "bool ids": lambda: store.set("t", ids.bool(), weights),
        "ids in a column": lambda: store.set("t", ids.reshape(2, 1), weights),
        "a list of ids": lambda: store.set("t", [1, 5], weights),
        "no such table": lambda: store.set("u", ids, weights),
        "a count too large": lambda: store.set("t", ids, weights, count=3),
        "a negative count": lambda: store.set("t", ids, weights, count=-1),
        "short rows": lambda: store.set_rows("t", torch.zeros(2, row_bytes - 1, dtype=torch.uint8)),
        "int8 rows": lambda: store.set_rows("t", torch.zeros(2, row_bytes, dtype=torch.int8)),
        "no such state": lambda: store.set_state("t", "momentum3", ids, weights),
        "narrow state": lambda: store.set_state("t", "momentum1", ids, torch.zeros(2, 1)),
        "half state": lambda: store.set_state("t", "momentum1", ids, weights.half()),
        "narrow gradients": lambda: store.apply_gradients("t", ids, torch.zeros(2, 5), 0.1),
        "gradients without end": lambda: store.apply_gradients("t", ids, weights, float("nan")),
        "step zero": lambda: store.apply_gradients("t", ids, weights, 0.1, 0),
        "scores too few": lambda: store.set_scores("t", ids, torch.zeros(1)),
        "integer scores": lambda: store.set_scores("t", ids, ids),
        "out of another width": lambda: store.get("t", ids, out=torch.zeros(2, 5)),
        "deleting by floats": lambda: store.delete("t", ids.double()),
    }


@requirement(
    "KV-023",
    "A wrong width, dtype, device, stride, rank, length, table or option MUST raise and leave the store as it was.",
)
def test_misuse(kvstore: Any) -> None:
    store = store_of(kvstore)
    store.set_rows("t", random_rows(store, [1, 2, 3], 4))
    before = contents(store)
    for name, call in misuses(store).items():
        with raises((ConfigError, ShapeError, UnsupportedError), where=name):
            call()
        assert_contents(store, before, where=name)


@requirement("KV-024", "Rows or values wider than the row MUST be refused on every way in.")
def test_too_wide(kvstore: Any) -> None:
    store = store_of(kvstore)
    row_bytes = store.layout("t").row_bytes
    wide = torch.zeros(1, row_bytes + 4, dtype=torch.uint8)
    before = contents(store)
    views = {name: kvstore.KVTensor(store, ids_of([0]), name) for name in ("row", "weight", "momentum1", "momentum2")}
    with raises(TwinproofError, where="set_rows"):
        store.set_rows("t", wide)
    for name, view in views.items():
        values = torch.zeros(1, view.shape[1] + 1, dtype=view.dtype)
        with raises(TwinproofError, where=f"set_range of {name}"):
            view.set_range(0, 0, 1, values)
        with raises(TwinproofError, where=f"set_weights_and_ids of {name}"):
            view.set_weights_and_ids(values, ids_of([0]))
    with raises(TwinproofError, where="load_state_dict"):
        store.load_state_dict({"t.weight": wide, "t.weight_id": ids_of([0])})
    assert_contents(store, before, where="after refusals")


@requirement(
    "KV-025", "A range of the row MUST be the slice of the whole row, and a range outside the row MUST be refused."
)
@examples(40)
@given(st.data())
def test_ranges(kvstore: Any, data: st.DataObject) -> None:
    store = store_of(kvstore)
    keys = [1, -2, 3]
    store.set_rows("t", random_rows(store, keys, 5))
    row_bytes, ids = store.layout("t").row_bytes, ids_of([*keys, 99])
    begin = data.draw(st.integers(0, row_bytes))
    width = data.draw(st.integers(0, row_bytes - begin))
    part = store.get_rows("t", ids, offset_bytes=begin, width_bytes=width)
    assert_bits(part, store.get_rows("t", ids)[:, begin : begin + width], where=f"[{begin}, {begin + width})")
    for offset, size in ((-1, 4), (row_bytes, 1), (0, row_bytes + 1), (4, -1), (row_bytes + 1, 0)):
        with raises(ShapeError, where=f"offset {offset}, width {size}"):
            store.get_rows("t", ids, offset_bytes=offset, width_bytes=size)


@requirement(
    "KV-026", "A state MUST be the slice of the whole row at its offset, in its own dtype, for every pair of dtypes."
)
def test_states_are_slices(kvstore: Any) -> None:
    for weight in WEIGHTS:
        for state in WEIGHTS:
            layout = kvstore.RowLayout(7, weight, "partial_rowwise_adam", {"momentum1": state, "momentum2": state})
            store = store_of(kvstore, layout)
            rows, ids = random_rows(store, [1, 2, 3], 5), ids_of([3, 1])
            store.set_rows("t", rows)
            for name, slot in layout.state_slots.items():
                end = slot.offset_bytes + slot.count * slot.dtype.itemsize
                expected = rows[[2, 0], slot.offset_bytes : end].contiguous().view(state)
                assert_bits(store.get_state("t", name, ids), expected, where=f"{name} in {state} beside {weight}")
                view = kvstore.KVTensor(store, ids, name)
                assert_bits(view.full_tensor(), expected, where=f"view of {name} in {state}")


@requirement("KV-027", "int32 ids MUST mean what the same int64 ids mean.")
def test_int32_ids(kvstore: Any) -> None:
    keys = [0, -1, 2**31 - 1, -(2**31), 5, 5]
    store, other = store_of(kvstore), store_of(kvstore)
    weights = weights_of(store, len(keys), 1)
    store.set("t", ids_of(keys), weights)
    other.set("t", ids_of(keys).to(torch.int32), weights)
    assert_contents(other, contents(store), where="set")
    assert_bits(other.get("t", ids_of(keys).to(torch.int32)), store.get("t", ids_of(keys)), where="get")
    assert_equal(other.delete("t", ids_of([5, -1]).to(torch.int32)), 2, where="deleted")


@requirement("KV-081", "Deleting MUST remove exactly the rows named, count them once, and pass over the others.")
@examples(40)
@given(strategies.close_batches, strategies.close_batches)
def test_delete(kvstore: Any, kept: list[int], gone: list[int]) -> None:
    store = store_of(kvstore)
    keys = list(dict.fromkeys([*kept, *gone[::2]]))
    store.set_rows("t", random_rows(store, keys, 1))
    before = contents(store)
    assert_equal(store.delete("t", ids_of(gone)), len(set(gone) & set(keys)), where="deleted")
    rest = {key: row for key, row in before["t"].items() if key not in gone}
    assert_contents(store, {"t": rest}, where="after delete")
    assert_equal(store.contains("t", ids_of(keys)).tolist(), [k not in gone for k in keys], where="contains")


@requirement("KV-082", "After close every verb MUST raise StoreClosedError; closing again MUST be harmless.")
def test_close(kvstore: Any) -> None:
    store = store_of(kvstore)
    ids = ids_of([1])
    store.set("t", ids, torch.zeros(1, 6))
    with store:
        pass
    store.close()
    calls: dict[str, Callable[[], Any]] = {
        "get": lambda: store.get("t", ids),
        "set": lambda: store.set("t", ids, torch.zeros(1, 6)),
        "ids": lambda: store.ids("t"),
        "size": lambda: store.size("t"),
        "delete": lambda: store.delete("t", ids),
        "snapshot": lambda: store.snapshot(),
        "stats": lambda: store.stats(),
    }
    for name, call in calls.items():
        with raises(StoreClosedError, where=name):
            call()


@requirement(
    "KV-083",
    "return_whole_row MUST need optimizer_in_row, be off by default and switchable; without optimizer_in_row a row "
    "MUST hold header and weight only, and its states MUST be refused.",
)
def test_flags(kvstore: Any) -> None:
    layout = kvstore.RowLayout(6, optimizer="adam")
    with raises(ConfigError, mentions=["optimizer"]):
        kvstore.KVStore({"t": layout}, return_whole_row=True)
    plain = kvstore.KVStore({"t": layout})
    assert_equal((plain.options.optimizer_in_row, plain.return_whole_row), (False, False), where="defaults")
    with raises(ConfigError, mentions=["optimizer"]):
        plain.set_return_whole_row(True)
    assert_equal(plain.get_rows("t", ids_of([1])).shape[1], 16 + 8 * 4, where="row without state")
    with raises(ConfigError, where="get_state"):
        plain.get_state("t", "momentum1", ids_of([1]))
    with raises(ConfigError, where="apply_gradients"):
        plain.apply_gradients("t", ids_of([1]), torch.zeros(1, 6), 0.1)
    store = store_of(kvstore)
    for flag, width in ((True, store.layout("t").row_bytes), (False, 6)):
        store.set_return_whole_row(flag)
        assert_equal(store.state_dict()["t.weight"].shape[1], width, where=f"return_whole_row={flag}")


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
