"""Get and set: what was written is what is read, bit for bit, and nothing else changes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from conformance.harness import assert_equal, assert_same_bytes, examples, raises, requirement, succeeds
from conformance.kvstore import strategies
from conformance.kvstore.cases import (
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
from twinproof.errors import ShapeError


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


@requirement(
    "KV-014",
    "Of duplicates in a batch the last MUST win, the store grow by distinct ids, and counts grow by occurrences, "
    "saturating at 2**31 - 1.",
)
@examples(60)
@example([3, 3, 3, 3])
@example([3, 0, 3, 3])
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


@requirement("KV-111", "Rows and ranges of rows MUST be read into out, which is returned, as they are read without it.")
def test_out(kvstore: Any) -> None:
    store = store_of(kvstore)
    store.set_rows("t", random_rows(store, [4, 5, -9], 1))
    ids, row_bytes = ids_of([-9, 77, 4, 4]), store.layout("t").row_bytes
    for begin, width in ((0, row_bytes), (8, 16)):
        out = torch.full((4, width), 9, dtype=torch.uint8)
        returned = store.get_rows("t", ids, offset_bytes=begin, width_bytes=width, out=out)
        assert_equal(returned is out, True, where="out is returned")
        assert_bits(out, store.get_rows("t", ids, offset_bytes=begin, width_bytes=width), where="read")


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


@requirement(
    "KV-338",
    "What stride a dimension of one element has, where it means nothing, MUST NOT matter to what a store is given.",
)
def test_strides_of_one(kvstore: Any) -> None:
    store = store_of(kvstore, kvstore.RowLayout(1, optimizer="adam"))

    def of_one(value: Any, dtype: torch.dtype, rank: int) -> torch.Tensor:
        return torch.tensor([value, *[-5] * 5], dtype=dtype).as_strided((1,) * rank, (5,) * rank)

    ids = of_one(7, torch.int64, 1)
    with succeeds("writes", where="strides of one"):
        store.set("t", ids, of_one(2.5, torch.float32, 2))
        store.set_state("t", "momentum1", ids, of_one(0.5, torch.float32, 2))
        store.set_metadata("t", ids, of_one(3 << 32 | 9, torch.int64, 2))
    assert_equal(store.get("t", ids).tolist(), [[2.5]], where="weight")
    assert_equal(store.get_state("t", "momentum1", ids).tolist(), [[0.5]], where="state")
    assert_equal(store.metadata("t", ids).tolist(), [[3 << 32 | 9 | -(2**63)]], where="metadata")
