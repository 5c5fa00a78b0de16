"""Limits of options, refusals that say what was asked for, and numbers that others read: seconds, names of contents."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from conformance.harness import assert_equal, assert_le, raises, requirement, succeeds
from conformance.kvstore.cases import (
    FILE,
    Clock,
    assert_bits,
    assert_contents,
    contents,
    filled,
    fresh,
    ids_of,
    random_rows,
    save,
    store_of,
    weights_of,
)
from twinproof.errors import ConfigError, MissingKeyError, ShapeError


@requirement("KV-220", "The seconds in a report MUST be those of the call: none negative, and together no more.")
def test_seconds(kvstore: Any, tmp_path: Path) -> None:
    store = filled(kvstore)
    acts: dict[str, Callable[[], Any]] = {
        "save": lambda: save(kvstore, store, tmp_path / "ck"),
        "load": lambda: kvstore.load(fresh(kvstore), tmp_path / "ck"),
    }
    for name, act in acts.items():
        # Each look at the clock is three times as late as the one before: no phase can be mistaken for another.
        with mock.patch("time.perf_counter", side_effect=(3.0**n for n in range(-40, 600))) as clock:
            seconds = act().phase_seconds
            elapsed = 3.0 ** (clock.call_count - 41) - 3.0**-40
        for phase, value in seconds.items():
            assert_le(3.0**-40, value, where=f"{phase} of a {name}")
        assert_le(sum(seconds.values()), elapsed, where=f"phases of a {name}")


@requirement(
    "KV-221", "Buckets MUST take counts from 1 to 2**31 - 1, and sizes from 1 to 2**63 - 1 of chunks alone; no others."
)
def test_limits_of_buckets(kvstore: Any) -> None:
    for count in (1, 2, 2**31 - 1):
        with succeeds("Buckets", where=f"{count} buckets"):
            assert_equal(kvstore.Buckets(count).total_count, count, where="total_count")
    for size in (1, 2**63 - 1):
        with succeeds("Buckets", where=f"chunks of {size} ids"):
            assert_equal(kvstore.Buckets(2, "chunk", size).bucket_size, size, where="bucket_size")
    for wrong in (0, -1, 2**31, 1.0, True):
        with raises(ConfigError, mentions=("total_count", repr(wrong)), where=f"{wrong} buckets"):
            kvstore.Buckets(wrong)
    for wrong in (0, -1, 2**63, 1.0, True):
        with raises(ConfigError, mentions=("bucket_size", repr(wrong)), where=f"chunks of {wrong} ids"):
            kvstore.Buckets(2, "chunk", wrong)
    for mode, given in (("interleave", 1), ("chunk", None)):
        with raises(ConfigError, mentions=("bucket_size",), where=f"{mode} with a size of {given}"):
            kvstore.Buckets(2, mode, given)


@requirement(
    "KV-222",
    "A state dict that lacks optimizer states MUST be refused with the names of exactly those, and load with "
    "weights_only=True.",
)
@pytest.mark.parametrize("lacking", [("momentum1",), ("momentum2",), ("momentum1", "momentum2")])
def test_absent_states(kvstore: Any, lacking: tuple[str, ...]) -> None:
    source, store = store_of(kvstore), store_of(kvstore)
    source.set_rows("t", random_rows(source, [1, 2, 3], 1))
    store.set_rows("t", random_rows(store, [2, 9], 5))
    state = {name: value.full_tensor() for name, value in source.state_dict().items()}
    for name in lacking:
        del state[f"t.{name}"]
    before = contents(store)
    with raises(MissingKeyError, mentions=(repr(list(lacking)), "weights_only=True"), where=f"without {lacking}"):
        store.load_state_dict(state)
    assert_contents(store, before, where="after the refusal")
    store.load_state_dict(state, weights_only=True)
    assert_equal(sorted(store.ids("t").tolist()), [1, 2, 3, 9], where="ids that were loaded")


@requirement("KV-223", "A range that a view does not have MUST be refused with what was asked for and what is there.")
def test_ranges(kvstore: Any) -> None:
    store = store_of(kvstore)
    rows = random_rows(store, [3, 4, 5, 6], 1)
    store.set_rows("t", rows)
    wrapper = kvstore.KVTensorWrapper([4, rows.shape[1]], torch.uint8, 0, table="t")
    store.set_return_whole_row(True)
    wrapper.set_dram_db_wrapper(store)
    for name, view in (("wrapper", wrapper), ("view", kvstore.KVTensor(store, ids_of([3, 4, 5, 6]), "row"))):
        for start, length in ((-1, 2), (0, -1), (0, 5), (3, 2), (5, 0)):
            said = (repr((start, length)), "within 4 rows")
            with raises(ShapeError, mentions=said, where=f"{name} {start} {length}"):
                view.narrow(0, start, length)
        for dim in (1, -1):
            with raises(ShapeError, mentions=("dim", f"got: {dim};", "expected: 0;"), where=f"{name} along {dim}"):
                view.narrow(dim, 0, 1)
        for start, length in ((0, 0), (4, 0), (3, 1), (0, 4)):
            with succeeds("narrow", where=f"{name} {start} {length}"):
                assert_equal(view.narrow(0, start, length).shape[0], length, where=f"{name} {start} {length}")


_VALUES = (
    *(torch.uint8, torch.bool, torch.int16, torch.float16, torch.bfloat16, torch.int32, torch.float32),
    *(torch.int64, torch.float64, torch.complex64, torch.complex128),
)
_HEADER = 16


def _borders(size: int, width: int) -> list[int]:
    """Where ``width`` bytes may begin: next to the borders of a row of ``size`` bytes, on either side."""
    edges = {-width, 0, _HEADER - width, _HEADER, size - width, size}
    return sorted({edge + d for edge in edges for d in (-1, 0, 1)})


def _place_everywhere(store: Any, ids: torch.Tensor, dtype: torch.dtype, where: str) -> None:
    """Place values of every width at all borders: those in the row are there, and others leave it as it was."""
    size = store.layout("t").row_bytes
    most = (size - _HEADER) // dtype.itemsize
    for width in sorted({0, 1, 2, most - 1, most, most + 1, size // dtype.itemsize + 1}):
        many = width * dtype.itemsize
        # Bytes of ones are true, and values of every dtype.
        values = torch.ones(ids.numel() * many, dtype=torch.uint8).view(dtype).reshape(ids.numel(), width)
        for begin in _borders(size, many):
            before, mark = store.get_rows("t", ids), store.mark()
            told = f"{where}: {width} values of {dtype} at {begin}"
            if begin >= _HEADER and begin + many <= size:
                with succeeds("place", where=told):
                    store.place("t", ids, values, begin)
                expected = before.clone()
                expected[:, begin : begin + many] = 1
                assert_bits(store.get_rows("t", ids)[:, _HEADER:], expected[:, _HEADER:], where=told)
                store.set_rows("t", before)
                continue
            with raises(ShapeError, mentions=(f"got: {(begin, many)}", "where: t"), where=told):
                store.place("t", ids, values, begin)
            assert_bits(store.get_rows("t", ids), before, where=f"{told}: rows")
            assert_equal(store.mark(), mark, where=f"{told}: mark")


@requirement(
    "KV-376",
    "Bytes of rows that lie in part outside of them MUST be refused by name, whichever dtype and number of values they "
    "are counted in, and nothing be written; those that end where the row ends MUST be read and written.",
)
@pytest.mark.parametrize("dim", [1, 6])
def test_ranges_of_bytes(kvstore: Any, dim: int) -> None:
    # Rows without padding.
    layout = kvstore.RowLayout(4 * dim, optimizer="adam")
    store, ids = store_of(kvstore, layout, track_changes=True), ids_of([3, 4, 5])
    size = layout.row_bytes
    assert_equal(sum(end - begin for begin, end in layout.value_ranges), size, where="bytes without padding")
    store.set_rows("t", random_rows(store, [3, 4, 5], 1))
    for dtype in _VALUES:
        _place_everywhere(store, ids, dtype, "rows that are there")
    before = contents(store)
    for dtype in _VALUES:
        for key in ([9], []):
            values = torch.zeros(len(key), (size - _HEADER) // dtype.itemsize + 1, dtype=dtype)
            with raises(ShapeError, where=f"{values.shape[1]} values of {dtype} for {key}"):
                store.place("t", ids_of(key), values, _HEADER)
    assert_contents(store, before, where="ids that were not there")
    for width in (0, 1, 8, size - 1, size, size + 1):
        for begin in _borders(size, width):
            where = f"{width} bytes from {begin}"
            if begin >= 0 and begin + width <= size:
                found = store.get_rows("t", ids, offset_bytes=begin, width_bytes=width)
                whole = store.get_rows("t", ids)[:, begin : begin + width]
                assert_bits(found, whole, where=where)
                continue
            out = torch.full((3, width), 7, dtype=torch.uint8)
            for memory in (None, out):
                with raises(ShapeError, mentions=("where: t", f"within {size} bytes"), where=where):
                    store.get_rows("t", ids, offset_bytes=begin, width_bytes=width, out=memory)
            assert_equal(bool((out == 7).all()), True, where=f"{where}: memory")


@requirement(
    "KV-377",
    "Columns of a wrapper that lie in part outside of the rows MUST be refused by name, in whichever dtype they are "
    "counted, when it is given its store, and at each read and write once the store shows other columns.",
)
def test_columns_outside(kvstore: Any) -> None:
    store, ids = store_of(kvstore), ids_of([3, 4])
    store.set_rows("t", random_rows(store, [3, 4], 1))
    size, before = store.layout("t").row_bytes, contents(store)

    def wrapper(width: int, dtype: torch.dtype, offset: int) -> Any:
        return kvstore.KVTensorWrapper([2, width], dtype, 0, sorted_indices=ids, width_offset=offset)

    for dtype in _VALUES:
        for whole in (True, False):
            store.set_return_whole_row(whole)
            most = (size - (0 if whole else _HEADER)) // dtype.itemsize
            for width, offset in ((most + 1, 0), (1, most), (most, 1), (0, most + 1), (2, most - 1)):
                with raises(ConfigError, mentions=(f"within {size} bytes",), where=f"{width} of {dtype} at {offset}"):
                    wrapper(width, dtype, offset).set_dram_db_wrapper(store)
            for width, offset in ((most, 0), (1, most - 1), (0, most)):
                with succeeds("set_dram_db_wrapper", where=f"{width} of {dtype} at {offset}, {whole=}"):
                    wrapper(width, dtype, offset).set_dram_db_wrapper(store)
        # Behind the header the same columns stand further back.
        store.set_return_whole_row(True)
        last = wrapper(1, dtype, size // dtype.itemsize - 1)
        first = wrapper(1, dtype, 0)
        for each in (last, first):
            each.set_dram_db_wrapper(store)
        value = torch.ones(2, 1, dtype=dtype)
        with raises(ShapeError, where=f"the header as {dtype}"):
            first.set_range(0, 0, 2, value)
        store.set_return_whole_row(False)
        acts: list[Callable[[], Any]] = [partial(last.narrow, 0, 0, 2), partial(last.get_weights_by_ids, ids)]
        acts += [partial(last.set_range, 0, 0, 2, value), partial(last.set_weights_and_ids, value, ids)]
        for number, act in enumerate(acts):
            with raises(ShapeError, mentions=("where: t",), where=f"call {number}, {dtype} behind the row's end"):
                act()
        assert_contents(store, before, where=f"columns of {dtype}")


def _names(path: Path) -> dict[str, str]:
    """The names of contents in a saved file, by table."""
    raw = (path / FILE).read_bytes()
    metadata = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    names: dict[str, str] = json.loads(metadata["kvstore.content"])["moments"]
    return names


def _mixed(words: list[int]) -> int:
    """The digest of one row of 64-bit words, in plain integers."""
    found = 0
    for word in words:
        found = (found ^ word) * 0x9E3779B97F4A7C15 % 2**64
        # As signed numbers are shifted.
        signed = found - 2**64 if found >= 2**63 else found
        found = (signed ^ (signed >> 29)) % 2**64
    return found * 0x9E3779B97F4A7C15 % 2**64


@requirement("KV-224", "The name of contents MUST be one hash of their rows, the same in every release.")
def test_names_are_documented(kvstore: Any, tmp_path: Path) -> None:
    store = store_of(kvstore, track_changes=True)
    rows = random_rows(store, [-5, 0, 3, 2**40], 1)
    store.set_rows("t", rows)
    save(kvstore, store, tmp_path / "ck")
    width = min(64, rows.shape[1]) // 8
    words = [
        [int.from_bytes(bytes(row[8 * at : 8 * at + 8].tolist()), "little") for at in range(width)] for row in rows
    ]
    digest = sum(map(_mixed, words)) % 2**64
    expected = hashlib.sha256(f"{digest} 0 {len(words)} ".encode()).hexdigest()[:32]
    assert_equal(_names(tmp_path / "ck"), {"t": expected}, where="names in the file")


@requirement("KV-226", "The name of contents MUST NOT depend on how many rows are read at once.")
def test_names_by_chunks(kvstore: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (1, 6, 7):
        store = store_of(kvstore, track_changes=True)
        store.set_rows("t", random_rows(store, range(count), 1))
        names = []
        for at_once in (1000, 1, 2, 3, count - 1, count, count + 1):
            monkeypatch.setattr("twinproof.kvstore.deltas.CHUNK_ROWS", max(1, at_once))
            save(kvstore, store, tmp_path / "ck")
            names.append(_names(tmp_path / "ck"))
            assert_equal(names[-1], names[0], where=f"{count} rows, {at_once} at once")


@requirement(
    "KV-225",
    "A load that makes room in a table without a policy MUST remove what was used longest ago, however often it was.",
)
def test_room_by_age(kvstore: Any, tmp_path: Path) -> None:
    clock = Clock()
    store, source = store_of(kvstore, clock=clock, capacity=4), store_of(kvstore)
    for second, (key, count) in enumerate({1: 5, 2: 1, 3: 9, 4: 2}.items()):
        clock.now = 10 + second
        for _ in range(count):
            store.apply_gradients("t", ids_of([key]), torch.ones(1, 6), 0.1)
    source.set_rows("t", random_rows(source, [8, 9], 1))
    save(kvstore, source, tmp_path / "ck")
    kvstore.load(store, tmp_path / "ck")
    assert_equal(sorted(store.ids("t").tolist()), [3, 4, 8, 9], where="ids after the load")


@requirement(
    "KV-227", "A view MUST stand anywhere among the rows of all ranks where it fits, and be told where it does not."
)
def test_places_of_views(kvstore: Any) -> None:
    store = store_of(kvstore)
    view = kvstore.KVTensor(store, ids_of([3, 4, 5]))
    for row_count, offset in ((3, 0), (4, 0), (4, 1), (9, 6)):
        with succeeds("place", where=f"row {offset} of {row_count}"):
            view.place(row_count, offset)
        assert_equal((view.global_row_count, view.row_offset), (row_count, offset), where="place")
    for row_count, offset in ((2, 0), (4, 2), (9, 7), (9, -1)):
        with raises(ConfigError, mentions=(f"got: ({offset}, 3)", f"expected: {row_count}"), where=f"{offset}"):
            view.place(row_count, offset)


# What is just inside and just outside of what an option takes; of the latter, words of the message.
LIMITS: dict[str, tuple[list[Any], list[Any], str]] = {
    "num_shards": ([1, 2, 4095, 4096], [0, -1, 4097, 1.0, True], "1 to 4096"),
    "seed": ([-(2**63), -1, 0, 2**63, 2**64 - 1], [-(2**63) - 1, 2**64, 1.0, True], "64 bits"),
    "capacity": ([None, 1, 2, 2**31, 2**63 - 1], [0, -1, 1.0, True, 2**63], f"1 to {2**63 - 1} rows"),
    "cache_rows": ([0], [-1, 1, 2**31 + 1, 0.0, False], "cache|rows"),
    "clock": ([lambda: 5], [5, "now"], "a callable"),
    "eviction": ([None], ["ttl", 3], "EvictionPolicy"),
    "initializer": ([], ["zeros", 7], "initializer"),
}
POLICIES: dict[str, tuple[list[Any], list[Any], str]] = {
    "ttl_seconds": ([0, 1, 2**70], [-1, 1.0, True], "an int >= 0"),
    "count_threshold": ([0, 1, 2**70], [-1, 1.0, True], "an int >= 0"),
    "timestamp_threshold": ([0, 1, 2**70], [-1, 1.0, True], "an int >= 0"),
    "keep_count": ([0, 1, 2**70], [-1, 1.0, True], "an int >= 0"),
    "decay": ([0.0, 0.5, 1.0], [-1e-9, 1 + 1e-9, math.nan], "0 <= decay <= 1"),
    "l2_threshold": ([0.0, 1e300], [-1e-9, math.inf, math.nan], ">= 0, finite"),
}
BOUNDS: list[tuple[float, float, bool]] = [
    *((0.0, 0.0, True), (-1.0, 2.0, True), (1e-9, 1e-9, True), (-1e38, 1e38, True)),
    *((1.0, 0.5, False), (1.0, 1 - 1e-3, False), (-3e38, 3e38, False), (0.0, math.inf, False), (math.nan, 1.0, False)),
]


@requirement(
    "KV-233",
    "Every option of a store MUST take all values of its range, both ends among them, and refuse the next ones beyond "
    "by name, with what was given and what is expected.",
)
def test_limits_of_options(kvstore: Any) -> None:
    for name, (taken, refused, words) in LIMITS.items():
        for value in taken:
            with succeeds("a store", where=f"{name}={value}"):
                store_of(kvstore, **{name: value}).close()
        for value in refused:
            with raises(ConfigError, mentions=(f"got: {value}",), where=f"{name}={value!r}") as error:
                store_of(kvstore, **{name: value})
            text = str(error.error)
            assert_equal(any(word in text for word in words.split("|")), True, where=f"{name}={value!r}: {text}")
    for name, (taken, refused, words) in POLICIES.items():
        for value in taken:
            with succeeds("a policy", where=f"{name}={value}"):
                for kind in ("ttl", "count", "ttl_count", "l2", "timestamp", "score"):
                    with store_of(kvstore, eviction=kvstore.EvictionPolicy(kind, **{name: value})) as store:
                        store.set("t", ids_of([1, 2]), torch.ones(2, 6))
                        store.evict()
        for value in refused:
            with raises(ConfigError, mentions=(f"got: {value}", words, name), where=f"{name}={value!r}"):
                kvstore.EvictionPolicy("ttl_count", **{name: value})
    for low, high, is_taken in BOUNDS:
        if is_taken:
            found = kvstore.Initializer.uniform(low, high)
            expected = torch.tensor([low, high], dtype=torch.float32).tolist()
            assert_equal([found.low, found.high], expected, where=f"uniform from {low} to {high}")
            assert_equal(found.span, (torch.tensor(high).float() - torch.tensor(low).float()).item(), where="span")
        else:
            with raises(ConfigError, where=f"uniform from {low} to {high}"):
                kvstore.Initializer.uniform(low, high)
    with raises(ConfigError, mentions=("got: normal", "zeros", "uniform")):
        kvstore.Initializer("normal")
    store = store_of(kvstore, eviction=kvstore.EvictionPolicy.ttl(3))
    for wrong in (0, -1, 1.0, True):
        with raises(ConfigError, mentions=(f"got: {wrong!r}", "rows >= 1")):
            store.start_eviction("t", slice_rows=wrong)


LARGEST = torch.finfo(torch.float32).max
HYPER: dict[str, tuple[list[Any], list[Any]]] = {
    "lr": ([0.0, -0.5, 1, LARGEST, -LARGEST], [2 * LARGEST, -2 * LARGEST, 1e300, math.inf, -math.inf, math.nan]),
    "eps": ([0, 1e-300, LARGEST], [-1e-300, 2 * LARGEST, math.inf, math.nan]),
    "beta1": ([0.0, 1 - 2**-20], [1.0, 1, -1e-9, math.nan, math.inf]),
    "beta2": ([0.0, 1 - 2**-20], [1.0, 1, -1e-9, math.nan, math.inf]),
    "step": ([1, 2**63 - 1], [0, -1, 2**63, 1.0, True]),
}


@requirement(
    "KV-334",
    "A step MUST take every hyperparameter of its range, both ends among them, and refuse by name, changing nothing, "
    "the next ones beyond, and what float32 does not hold.",
)
def test_limits_of_steps(kvstore: Any) -> None:
    store, ids = store_of(kvstore, kvstore.RowLayout(4, optimizer="adam")), ids_of([3, 1])
    store.set("t", ids, weights_of(store, 2, 1))
    usual = {"lr": 0.1, "step": 1, "eps": 1e-8, "beta1": 0.9, "beta2": 0.99}
    for name, (taken, refused) in HYPER.items():
        for value in taken:
            with succeeds("a step", where=f"{name}={value!r}"):
                store.apply_gradients("t", ids, torch.zeros(2, 4), **{**usual, name: value})
        before = contents(store), store.step_count("t")
        for value in refused:
            with raises(ConfigError, mentions=(name.rstrip("12"), f"{value!r}"), where=f"{name}={value!r}"):
                store.apply_gradients("t", ids, torch.ones(2, 4), **{**usual, name: value})
        assert_equal((contents(store), store.step_count("t")), before, where=f"after what {name} may not be")


@requirement(
    "KV-423",
    "What is larger than there can be MUST be refused by name with the most that there can be, before a store is made: "
    "buckets, their sizes, capacities, and rows of 2**40 bytes.",
)
def test_largest_of_options(kvstore: Any) -> None:
    float32, count = torch.float32, (2**40 - 16) // 4
    layouts = {"weights": (count, float32, "none"), "states": (count // 2, float32, "adagrad")}
    for name, (width, *rest) in layouts.items():
        with succeeds("RowLayout", where=f"{name}, the widest row"):
            assert_equal(kvstore.RowLayout(width - 4, *rest).row_bytes, 2**40 - 16, where=f"{name}: bytes of a row")
        for wide in (width, 2**62, 2**70):
            most = (" bytes; ", f"fewer than {2**40} bytes", "embedding_dim")
            with raises(ConfigError, mentions=most, where=f"{name} of a row of {wide} values"):
                kvstore.RowLayout(wide, *rest)
    refused: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
        "buckets": (lambda: kvstore.Buckets(2**31), (f"from 1 to {2**31 - 1}", "total_count")),
        "sizes": (lambda: kvstore.Buckets(2, "chunk", 2**63), (f"from 1 to {2**63 - 1}", "bucket_size")),
        "no sizes": (lambda: kvstore.Buckets(2, "interleave", 1), ("expected: None", "bucket_size")),
        "capacity": (lambda: store_of(kvstore, capacity=2**63), (f"1 to {2**63 - 1} rows", "capacity['t']")),
    }
    for name, (act, said) in refused.items():
        with raises(ConfigError, mentions=said, where=name):
            act()
