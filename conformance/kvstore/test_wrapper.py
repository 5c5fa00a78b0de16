"""FBGEMM's KVTensorWrapper, for code that was written against it."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from conformance.harness import assert_equal, raises, requirement, succeeds
from conformance.kvstore.cases import assert_bits, assert_contents, contents, header, ids_of, random_rows, store_of
from twinproof.errors import (
    ConfigError,
    CorruptionError,
    DetachedStoreError,
    ShapeError,
    TwinproofError,
    UnsupportedError,
)

KEYS = [4, -2, 2**40, 0]
NAMES = (
    *("shape", "dtype", "row_offset", "snapshot_handle", "sorted_indices", "width_offset", "checkpoint_handle"),
    *("read_only", "only_load_weight"),
)


def _store(kvstore: Any, whole: bool, offset: int) -> Any:
    store = store_of(kvstore, kvstore.RowLayout(8, torch.float16, "adam"), return_whole_row=whole)
    store.set_rows("t", random_rows(store, [key + offset for key in KEYS], 3))
    return store


def _refusal(act: Callable[..., Any], *arguments: Any) -> type[TwinproofError] | None:
    """The class of the error with which a call is refused; None where it is not."""
    try:
        act(*arguments)
    except TwinproofError as error:
        return type(error)
    return None


def _wrapper(kvstore: Any, store: Any, width: int, dtype: torch.dtype, offset: int, **options: Any) -> Any:
    made = kvstore.KVTensorWrapper([4, width], dtype, offset, sorted_indices=ids_of(KEYS), **options)
    made.set_dram_db_wrapper(store)
    return made


@requirement(
    "KV-156",
    "KVTensorWrapper MUST take FBGEMM's arguments in their places and read and write the columns and rows they name: "
    "whole rows with the id as key, weights, and states in their own dtype; it MUST change no input, and nothing when "
    "it is read-only.",
)
def test_wrapper(kvstore: Any) -> None:
    parameters = list(inspect.signature(kvstore.KVTensorWrapper).parameters)
    assert_equal(parameters[: len(NAMES)], list(NAMES), where="arguments")
    for offset in (0, 100):
        store = _store(kvstore, True, offset)
        row_bytes, mine = store.layout("t").row_bytes, ids_of([key + offset for key in KEYS])
        whole = _wrapper(kvstore, store, row_bytes, torch.uint8, offset)
        rows = store.get_rows("t", mine)
        rows[:, :8] = ids_of(KEYS).reshape(-1, 1).view(torch.uint8)
        assert_bits(whole.narrow(0, 1, 2), rows[1:3], where="whole rows")
        assert_equal((whole.shape, whole.strides), ((4, row_bytes), (row_bytes, 1)), where="shape and strides")
        assert_equal((whole.dtype_str, whole.device_str, whole.layout_str), ("uint8", "cpu", "Strided"), where="names")
        before, snapshot = contents(store), store.snapshot()
        other = _store(kvstore, True, offset)
        other.clear("t")
        target = _wrapper(kvstore, other, row_bytes, torch.uint8, offset)
        written = rows.clone()
        target.set_range(0, 0, 4, written)
        assert_contents(other, before, where="whole rows written")
        assert_bits(written, rows, where="the caller's rows")
        weight = _wrapper(kvstore, store, 8, torch.float16, offset, width_offset=8)
        weight.set_weights_and_ids(torch.ones(2, 8, dtype=torch.float16), ids_of(KEYS[:2]))
        assert_bits(store.get("t", mine)[:2], torch.ones(2, 8, dtype=torch.float16), where="weights written")
        old = _wrapper(kvstore, store, 8, torch.float16, offset, width_offset=8, snapshot_handle=snapshot)
        assert_bits(old.narrow(0, 0, 4), other.get("t", mine), where="weights of a snapshot")
        light = _wrapper(kvstore, store, row_bytes, torch.uint8, offset, only_load_weight=True)
        light.set_range(0, 0, 4, rows)
        assert_bits(store.get("t", mine), other.get("t", mine), where="only weights")
        states = contents(store)
        still = _wrapper(kvstore, store, row_bytes, torch.uint8, offset, read_only=True)
        still.set_range(0, 0, 4, rows)
        assert_contents(store, states, where="read-only")
        apart = _store(kvstore, False, offset)
        slot = apart.layout("t").state_slots["momentum2"]
        place = (slot.offset_bytes - 16) // 4
        state = _wrapper(kvstore, apart, slot.count, slot.dtype, offset, width_offset=place)
        assert_bits(state.narrow(0, 0, 4), apart.get_state("t", "momentum2", mine), where="a state in its dtype")
        plain = kvstore.KVTensorWrapper([3, 8], torch.float16, offset)
        plain.set_embedding_rocks_dp_wrapper(apart)
        expected = apart.get("t", ids_of(range(offset, offset + 3)))
        assert_bits(plain.narrow(0, 0, 3), expected, where="ids in a row")


@requirement(
    "KV-243",
    "A write of any columns of an id without a row MUST make a row whose other columns are as a row begins: the "
    "initial weight, zero states, the time, and no count.",
)
def test_columns_of_new_rows(kvstore: Any) -> None:
    store = store_of(kvstore, kvstore.RowLayout(4, torch.float16, "adam"))
    row_bytes = store.layout("t").row_bytes
    ranges = [(begin, end) for begin in range(16, row_bytes, 2) for end in range(begin + 2, row_bytes + 1, 2)]
    expected = store.get_rows("t", torch.arange(len(ranges)))
    for key, (begin, end) in enumerate(ranges):
        columns = kvstore.KVTensorWrapper(
            [1, (end - begin) // 2], torch.float16, key, width_offset=(begin - 16) // 2, sorted_indices=ids_of([0])
        )
        columns.set_dram_db_wrapper(store)
        values = torch.full((1, (end - begin) // 2), 7.0, dtype=torch.float16)
        columns.set_range(0, 0, 1, values)
        expected[key, begin:end] = values.view(torch.uint8)
        expected[key, :16] = torch.frombuffer(bytearray(header(key, 1000, 0)), dtype=torch.uint8)
    for key, found in enumerate(store.get_rows("t", torch.arange(len(ranges)))):
        assert_bits(found, expected[key], where=f"bytes {ranges[key]} written")


@requirement(
    "KV-266",
    "The columns of a KVTensorWrapper MUST begin at the row's first byte while its store returns whole rows, and "
    "behind the header while it does not, also where that changes after it was given the store.",
)
def test_columns_when_the_form_changes(kvstore: Any) -> None:
    mine = ids_of([key + 100 for key in KEYS])
    for first in (False, True):
        store = _store(kvstore, first, 100)
        # 16 bytes behind where columns begin: the weights of whole rows, and what follows the weights of others.
        columns = _wrapper(kvstore, store, 8, torch.float16, 100, width_offset=8)
        for whole in (first, not first, first):
            store.set_return_whole_row(whole)
            begin = 16 if whole else 32
            expected = store.get_rows("t", mine)
            shown = expected[:, begin : begin + 16].contiguous().view(torch.float16)
            assert_bits(columns.narrow(0, 0, 4), shown, where=f"read, {first=} {whole=}")
            values = torch.full((4, 8), 7.0 + whole, dtype=torch.float16)
            columns.set_range(0, 0, 4, values)
            expected[:, begin : begin + 16] = values.view(torch.uint8)
            assert_bits(store.get_rows("t", mine), expected, where=f"written, {first=} {whole=}")


@requirement(
    "KV-268",
    "A KVTensorWrapper that is given another store MUST show and write that one's rows, of the table that was named or "
    "of its only one; a store that it refuses MUST change nothing.",
)
def test_another_store(kvstore: Any) -> None:
    layouts = {"t": kvstore.RowLayout(8), "u": kvstore.RowLayout(8), "narrow": kvstore.RowLayout(4)}
    stores = {name: store_of(kvstore, {name: layout}) for name, layout in layouts.items()}
    for seed, (name, store) in enumerate(stores.items()):
        store.set_rows(name, random_rows(store, KEYS, seed, name))
    columns = kvstore.KVTensorWrapper([4, 8], torch.float32, 0, sorted_indices=ids_of(KEYS))
    for name in ("narrow", "t", "narrow", "u", "t"):
        if name == "narrow":
            assert_equal(
                _refusal(columns.set_dram_db_wrapper, stores[name]), ConfigError, where="columns outside its rows"
            )
            continue
        before = {other: contents(store) for other, store in stores.items() if other != name}
        assert_equal(_refusal(columns.set_dram_db_wrapper, stores[name]), None, where=f"{name} given")
        assert_bits(columns.narrow(0, 0, 4), stores[name].get(name, ids_of(KEYS)), where=f"{name} read")
        columns.set_range(0, 1, 1, torch.full((1, 8), 3.0))
        assert_bits(stores[name].get(name, ids_of(KEYS[1:2])), torch.full((1, 8), 3.0), where=f"{name} written")
        for other, expected in before.items():
            assert_contents(stores[other], expected, where=f"{other} after a write to {name}")
        assert_equal(
            _refusal(columns.set_dram_db_wrapper, stores["narrow"]), ConfigError, where="columns outside its rows"
        )
        written = _refusal(columns.set_range, 0, 0, 1, torch.full((1, 8), 4.0))
        assert_equal(written, None, where=f"{name} written after a refusal")
        assert_bits(stores[name].get(name, ids_of(KEYS[:1])), torch.full((1, 8), 4.0), where=f"{name} after a refusal")


@requirement(
    "KV-317",
    "Ids that leave int64 with a wrapper's ``row_offset`` MUST be refused, and never be those of other rows; the last "
    "that stay MUST be taken.",
)
def test_offsets_beyond_int64(kvstore: Any) -> None:
    first, last = -(2**63), 2**63 - 1
    for offset, inside, outside in (
        (last, [0, -1, first], [1, last]),
        (first, [0, 1, last], [-1, first]),
        (1, [first, 0, last - 1], [last]),
        (-1, [first + 1, 0, last], [first]),
        (0, [first, 0, last], []),
    ):
        store = store_of(kvstore, kvstore.RowLayout(8))
        columns = kvstore.KVTensorWrapper([len(inside), 8], torch.float32, offset, sorted_indices=ids_of(inside))
        columns.set_dram_db_wrapper(store)
        values = torch.arange(8.0 * len(inside)).reshape(-1, 8)
        with succeeds("set_range", where=f"{inside} + {offset}"):
            columns.set_range(0, 0, len(inside), values)
        mine = ids_of([key + offset for key in inside])
        assert_bits(store.get("t", mine), values, where=f"{inside} + {offset} written")
        assert_bits(columns.narrow(0, 0, len(inside)), values, where=f"{inside} + {offset} read")
        before = contents(store)
        for key in outside:
            ids = ids_of([0, key])
            for how in (
                partial(columns.get_weights_by_ids, ids),
                partial(columns.set_weights_and_ids, torch.ones(2, 8), ids),
            ):
                with raises(ConfigError, mentions=("where: row_offset", f"got: [{key}]"), where=f"{key} + {offset}"):
                    how()
        assert_contents(store, before, where=f"beyond {offset}")


@requirement(
    "KV-157",
    "A KVTensorWrapper MUST refuse by name what it cannot honour: no store, other shapes and columns, checkpoint "
    "handles, keys that are not the ids, and travelling without its store.",
)
def test_refusals(kvstore: Any) -> None:
    store = _store(kvstore, True, 0)
    row_bytes = store.layout("t").row_bytes
    wrapper = kvstore.KVTensorWrapper
    with raises(DetachedStoreError, where="no store"):
        wrapper([4, 8], torch.float16, 0).narrow(0, 0, 1)
    for arguments, options, error in (
        (([4], torch.float16, 0), {}, ShapeError),
        (([4, 8], 5, 0), {}, ConfigError),
        (([4, 8], torch.float16, 0), {"checkpoint_handle": object()}, UnsupportedError),
        (([4, 8], torch.float16, 0), {"sorted_indices": ids_of([1])}, ShapeError),
        (([4, 8], torch.float16, 0), {"width_offset": -1}, ConfigError),
    ):
        with raises(error, where=f"{arguments} {options}"):
            wrapper(*arguments, **options)
    for made in (
        wrapper([4, row_bytes], torch.uint8, 0, width_offset=1),
        wrapper([4, 8], torch.float16, 0, table="u"),
        wrapper([4, 8], torch.float16, 0, only_load_weight=True),
    ):
        with raises(ConfigError, where="what the store's rows do not have"):
            made.set_dram_db_wrapper(store)
    whole = _wrapper(kvstore, store, row_bytes, torch.uint8, 0)
    rows, before = whole.narrow(0, 0, 4), contents(store)
    with raises(CorruptionError, where="keys that are not the ids"):
        whole.set_range(0, 0, 4, rows.flip(0).contiguous())
    acts: list[Any] = [
        lambda: whole.narrow(1, 0, 1),
        lambda: whole.narrow(0, 3, 2),
        lambda: whole.set_range(0, 0, 3, rows),
    ]
    for act in acts:
        with raises(ShapeError, where="ranges and shapes"):
            act()
    with raises(UnsupportedError, where="pickled"):
        pickle.dumps(whole)
    assert_contents(store, before, where="after refusals")
