"""Layout: the bytes of a row, against literals and closed forms that do not come from the code under test."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, assert_same_bytes, examples, raises, requirement, succeeds
from conformance.kvstore import strategies
from conformance.kvstore.cases import (
    EXTREMES,
    FILE,
    Clock,
    assert_bits,
    header,
    ids_of,
    random_row,
    random_rows,
    rows_tensor,
    save,
    store_of,
    weights_of,
)
from conformance.kvstore.model import slots
from twinproof.errors import ConfigError, FormatError, ShapeError, UnsupportedError

COUNTS = (0, 1, 5, 2**31 - 2, 2**31 - 1)
TIMES = (0, 1, 2**31, 2**32 - 1)


def fields(kvstore: Any, key: int, timestamp: int, count: int, used: bool) -> Any:
    return kvstore.Header(ids_of([key]), ids_of([timestamp]), ids_of([count]), torch.tensor([used]))


@requirement(
    "KV-001",
    "The header MUST be 16 bytes: key, timestamp, 31-bit count and used bit, little-endian, for every extreme.",
)
def test_header_fields(kvstore: Any) -> None:
    for key in EXTREMES:
        for timestamp in TIMES:
            for count in COUNTS:
                for used in (False, True):
                    packed = kvstore.pack_header(fields(kvstore, key, timestamp, count, used))
                    expected = header(key, timestamp, count, used)
                    assert_same_bytes(packed.numpy().tobytes(), expected, where=str((key, timestamp, count, used)))
                    found = kvstore.unpack_header(packed)
                    got = [int(v[0]) for v in (found.ids, found.timestamps, found.counts, found.used)]
                    assert_equal(got, [key, timestamp, count, int(used)], where="unpacked")


@requirement("KV-002", "Changing one field of a header MUST leave the bits of the other three as they are.")
@examples(50)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1), st.booleans())
def test_fields_are_independent(kvstore: Any, key: int, timestamp: int, count: int, used: bool) -> None:
    base = kvstore.pack_header(fields(kvstore, key, timestamp, count, used)).numpy().tobytes()
    other_time = kvstore.pack_header(fields(kvstore, key, timestamp ^ 0xFFFFFFFF, count, used)).numpy().tobytes()
    other_count = kvstore.pack_header(fields(kvstore, key, timestamp, count ^ 0x7FFFFFFF, used)).numpy().tobytes()
    other_used = kvstore.pack_header(fields(kvstore, key, timestamp, count, not used)).numpy().tobytes()
    assert_same_bytes(other_time[:8] + other_time[12:], base[:8] + base[12:], where="another timestamp")
    assert_same_bytes(other_count[:12], base[:12], where="another count")
    assert_equal(other_count[15] & 0x80, base[15] & 0x80, where="used beside another count")
    assert_same_bytes(other_used[:15], base[:15], where="another used bit")


@requirement(
    "KV-348",
    "A header's numbers MUST be packed as what they are, int32 or int64 in any mixture; fields of other dtypes or "
    "lengths, and rows too short for a header, MUST be refused by name.",
)
def test_fields_of_headers(kvstore: Any) -> None:
    whole = {"ids": ids_of([5, -1, 7]), "timestamps": ids_of([9, 2**31 - 1, 0]), "counts": ids_of([3, 0, 2**31 - 1])}
    used = torch.tensor([True, False, True])
    expected = kvstore.pack_header(kvstore.Header(**whole, used=used))
    for narrow in (names for count in (1, 2, 3) for names in combinations(whole, count)):
        mixed = whole | {name: whole[name].to(torch.int32) for name in narrow}
        with succeeds("pack_header", where=f"int32 {narrow}"):
            packed = kvstore.pack_header(kvstore.Header(**mixed, used=used))
        assert_bits(packed, expected, where=f"int32 {narrow}")
    fields = {**whole, "used": used}
    for name, value in fields.items():
        for wrong in (
            value.to(torch.float32),
            value.to(torch.int16),
            value[:2],
            value[:, None].clone(),
            value.tolist(),
        ):
            with raises((ShapeError, UnsupportedError), where=f"{name}: {wrong}"):
                kvstore.pack_header(kvstore.Header(**fields | {name: wrong}))
    for rows in (expected[:, :15], expected.view(torch.int64), expected[0], expected.tolist()):
        with raises((ShapeError, UnsupportedError), mentions=("got: ", "expected: "), where=f"header of {rows}"):
            kvstore.unpack_header(rows)


@requirement(
    "KV-003",
    "A score MUST keep the bits of every non-negative float32, denormals, infinity and NaN payloads included, lose its "
    "sign, and leave key, timestamp and used alone.",
)
def test_scores(kvstore: Any) -> None:
    words = [0, 1, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC12345, 0x7FFFFFFF]
    scores = torch.tensor(words, dtype=torch.int32).view(torch.float32)
    store = store_of(kvstore, clock=Clock(77))
    keys = [k * 3 - 9 for k in range(len(words))]
    ids = ids_of(keys)
    store.set("t", ids, weights_of(store, len(words), 1))
    for sign in (1.0, -1.0):
        store.set_scores("t", ids, torch.copysign(scores, torch.tensor(sign)))
        assert_bits(store.get_scores("t", ids), scores, where=f"sign {sign}")
        expected = b"".join(header(key, 77, word) for key, word in zip(keys, words, strict=True))
        assert_same_bytes(store.get_rows("t", ids)[:, :16].contiguous().numpy().tobytes(), expected, where="headers")


@requirement("KV-004", "The header MUST take 16 bytes before the weight for every weight dtype.")
def test_header_takes_sixteen_bytes(kvstore: Any) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        layout = kvstore.RowLayout(4, dtype)
        store = store_of(kvstore, layout)
        weights = weights_of(store, 1, 3)
        store.set("t", ids_of([5]), weights)
        row = store.get_rows("t", ids_of([5]))[0].numpy().tobytes()
        assert_equal(len(row), 16 + 4 * dtype.itemsize, where=f"row bytes of {dtype}")
        assert_same_bytes(row[16:], weights.view(torch.uint8).numpy().tobytes(), where=f"weight of {dtype}")


# FBGEMM: D -> bytes of (fp32 row-wise Adagrad, partial row-wise Adam, Adam; the same three in fp16).
ROW_BYTES = {
    32: (160, 288, 400, 88, 216, 336),
    64: (288, 544, 784, 152, 408, 656),
    128: (544, 1056, 1552, 280, 792, 1296),
    256: (1056, 2080, 3088, 536, 1560, 2576),
}


def up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple


@requirement(
    "KV-005",
    "Row bytes and state offsets MUST be FBGEMM's closed forms, states disjoint and inside the row, with momentum2 "
    "first for partial row-wise Adam.",
)
@examples(150)
@given(strategies.layouts())
def test_closed_forms(kvstore: Any, arguments: tuple[int, torch.dtype, str, dict[str, torch.dtype]]) -> None:
    dim, dtype, optimizer, states = arguments
    layout = kvstore.RowLayout(dim, dtype, optimizer, states)
    begin = 16 + up(dim, 4) * dtype.itemsize
    sizes_bytes = {name: states.get(name, torch.float32).itemsize for name in ("momentum1", "momentum2")}
    expected = slots(optimizer, dim, begin, **sizes_bytes)
    got = {n: (s.offset_bytes, s.count * s.dtype.itemsize) for n, s in layout.state_slots.items()}
    assert_equal(got, expected, where=f"slots of {arguments}")
    end = max((offset + size for offset, size in expected.values()), default=begin)
    elements = up(math.ceil((end - begin) / dtype.itemsize), 4)
    assert_equal(layout.row_bytes, begin + elements * dtype.itemsize, where=f"row bytes of {arguments}")
    for width, sizes in ROW_BYTES.items():
        names = ("rowwise_adagrad", "partial_rowwise_adam", "adam")
        found = [kvstore.RowLayout(width, d, n).row_bytes for d in (torch.float32, torch.float16) for n in names]
        assert_equal(tuple(found), sizes, where=f"D = {width}")


@requirement("KV-006", "The weight and every state MUST begin at a multiple of their itemsize.")
@examples(100)
@given(strategies.layouts())
def test_alignment(kvstore: Any, arguments: tuple[int, torch.dtype, str, dict[str, torch.dtype]]) -> None:
    layout = kvstore.RowLayout(*arguments)
    offsets = {name: slot.offset_bytes % slot.dtype.itemsize for name, slot in layout.state_slots.items()}
    assert_equal(offsets, dict.fromkeys(offsets, 0), where=str(arguments))
    assert_equal(layout.row_bytes % layout.weight_dtype.itemsize, 0, where=str(arguments))


@requirement(
    "KV-007",
    "Padding MUST be zero after every kind of write, also in a row that takes the place of another, and whatever "
    "padding the caller's rows carry.",
)
def test_padding_is_zero(kvstore: Any) -> None:
    layout = kvstore.RowLayout(5, torch.float16, "partial_rowwise_adam", {"momentum2": torch.float16})
    store = store_of(kvstore, layout)
    dirty = torch.full((3, layout.row_bytes), 0xFF, dtype=torch.uint8)
    dirty[:, :16] = rows_tensor([header(k, 1, 1) for k in range(3)], 16)
    store.set_rows("t", dirty)
    store.delete("t", ids_of([1, 2]))
    store.set("t", ids_of([8]), weights_of(store, 1, 1))
    store.set_state("t", "momentum1", ids_of([9]), torch.ones(1, 5))
    store.apply_gradients("t", ids_of([0, 10]), torch.ones(2, 5), 0.1)
    for key in store.ids("t").tolist():
        row = store.get_rows("t", ids_of([key]))[0].numpy().tobytes()
        # D = 5 in float16: weight 16-26, padding to 32; momentum2 32-34, padding to 36; momentum1 36-56; 56 % 8 = 0.
        assert_same_bytes(row[26:32] + row[34:36], bytes(8), where=f"padding of row {key}")
        assert_equal(len(row), 56, where="row bytes")


@requirement(
    "KV-306",
    "Padding MUST be zero whatever columns of rows are written, through views, wrappers, state dicts and files too, "
    "and values beside it what was written.",
)
def test_padding_of_columns(kvstore: Any, tmp_path: Path) -> None:
    layout = kvstore.RowLayout(5, torch.float16, "partial_rowwise_adam", {"momentum2": torch.float16})
    size, keys = layout.row_bytes, ids_of([3, -4])
    is_value = torch.zeros(size, dtype=torch.bool)
    for begin, end in layout.value_ranges:
        is_value[begin:end] = True

    def made(**options: Any) -> Any:
        store = store_of(kvstore, layout, **options)
        store.set_rows("t", random_rows(store, [3], 1))
        return store

    def wrapper(store: Any, width: int, offset: int, **options: Any) -> Any:
        found = kvstore.KVTensorWrapper(
            [2, width], torch.uint8, 0, sorted_indices=keys, width_offset=offset, table="t", **options
        )
        found.set_dram_db_wrapper(store)
        return found

    # Next to where values and padding begin and end.
    edges = {edge for values in layout.value_ranges for edge in values} | {size}
    cuts = sorted(cut for cut in {edge + d for edge in edges for d in (-1, 0, 1)} if 16 <= cut <= size)
    for begin, end in combinations(cuts, 2):
        store = made()
        expected = store.get_rows("t", keys)
        wrapper(store, end - begin, begin - 16).set_range(0, 0, 2, torch.full((2, end - begin), 0x55).byte())
        expected[:, begin:end] = torch.where(is_value[begin:end], 0x55, 0).byte()
        assert_bits(store.get_rows("t", keys)[:, 16:], expected[:, 16:], where=f"bytes {begin} to {end} written")
    rows = torch.full((2, size), 0x55, dtype=torch.uint8)
    rows[:, :16] = rows_tensor([header(key, 7, 2) for key in keys.tolist()], 16)
    clean = torch.where(is_value, rows, 0).byte()
    only = clean.clone()
    only[:, 16 + layout.weight_bytes :] = 0

    def from_file(store: Any, is_empty: bool) -> None:
        source, folder = made(), tmp_path / f"{is_empty}"
        source.set_rows("t", clean)
        save(kvstore, source, folder)
        raw = (folder / FILE).read_bytes()
        # The ids that a file lists ascend.
        stored = source.get_rows("t", source.ids("t"))
        assert_equal(raw.count(stored.numpy().tobytes()), 1, where="rows in a file")
        (folder / FILE).write_bytes(raw.replace(stored.numpy().tobytes(), rows.flip(0).contiguous().numpy().tobytes()))
        if is_empty:
            store.clear("t")
        kvstore.load(store, folder)

    ways: dict[str, Callable[[Any], Any]] = {
        "set_rows": lambda store: store.set_rows("t", rows),
        "a view": lambda store: kvstore.KVTensor(store, keys).set_range(0, 0, 2, rows),
        "a wrapper of whole rows": lambda store: wrapper(store, size, 0).set_range(0, 0, 2, rows),
        "a state dict": lambda store: store.load_state_dict({"t.weight": rows, "t.weight_id": keys}),
        "a file, into an empty table": lambda store: from_file(store, True),
        "a file, over rows": lambda store: from_file(store, False),
    }
    for name, act in ways.items():
        store = made(return_whole_row=True)
        act(store)
        assert_bits(store.get_rows("t", keys), clean, where=name)
    store = store_of(kvstore, layout, return_whole_row=True)
    wrapper(store, size, 0, only_load_weight=True).set_range(0, 0, 2, rows)
    assert_bits(store.get_rows("t", keys)[:, 16:], only[:, 16:], where="only weights")


@requirement("KV-055", "A row MUST be the bytes that FBGEMM's format documents, to the last one.")
def test_golden_row(kvstore: Any) -> None:
    golden = bytes.fromhex(
        "feffffffffffffff 04030201 02000080"  # key -2, timestamp 0x01020304, count 2, used
        "0000803f 000000c0 0000003f 00000080 00004040 000000000000000000000000"  # 1, -2, .5, -0, 3, padding
        "0000803e 000000000000000000000000"  # momentum1 .25, padding to four elements
    )
    store = store_of(kvstore, kvstore.RowLayout(5, optimizer="rowwise_adagrad"), clock=Clock(0x01020304))
    weights = torch.tensor([[1.0, -2.0, 0.5, -0.0, 3.0]])
    store.set("t", ids_of([-2, -2]), torch.cat([weights + 1, weights]))
    store.set_state("t", "momentum1", ids_of([-2]), torch.tensor([[0.25]]))
    assert_same_bytes(store.get_rows("t", ids_of([-2]))[0].numpy().tobytes(), golden, where="row")


@requirement("KV-078", "Tables of different widths and optimizers in one store MUST each keep their own offsets.")
def test_mixed_tables(kvstore: Any) -> None:
    layouts = {
        "a": kvstore.RowLayout(3, torch.float16, "adam", {"momentum1": torch.float16}),
        "b": kvstore.RowLayout(40, torch.float32, "rowwise_adagrad"),
        "c": kvstore.RowLayout(8, torch.bfloat16),
    }
    store = store_of(kvstore, layouts)
    expected = {table: random_row(layout, 11, 5, 6, 9) for table, layout in layouts.items()}
    for table, row in expected.items():
        store.set_rows(table, rows_tensor([row], layouts[table].row_bytes))
    for table, row in expected.items():
        assert_same_bytes(store.get_rows(table, ids_of([11]))[0].numpy().tobytes(), row, where=table)
        weight = store.get(table, ids_of([11])).contiguous().view(torch.uint8).numpy().tobytes()
        assert_same_bytes(weight, row[16 : 16 + len(weight)], where=f"weight of {table}")
    momentum2 = store.get_state("a", "momentum2", ids_of([11])).view(torch.uint8).numpy().tobytes()
    # D = 3 in float16: weight 16-22, padding to 24; momentum1 24-30; momentum2 aligned to 32.
    assert_same_bytes(momentum2, expected["a"][32:44], where="momentum2 of a")


@requirement("KV-079", "A layout MUST survive its JSON, and anything that is not a layout MUST be refused by name.")
@examples(60)
@given(strategies.layouts())
def test_json(kvstore: Any, arguments: tuple[int, torch.dtype, str, dict[str, torch.dtype]]) -> None:
    layout = kvstore.RowLayout(*arguments)
    assert_equal(kvstore.RowLayout.from_json(layout.to_json()), layout, where="round trip")
    for wrong in ("{}", "[]", "3", layout.to_json()[:-1] + ',"more":1}', layout.to_json().replace("weight", "wait")):
        with raises(FormatError, where=wrong):
            kvstore.RowLayout.from_json(wrong)


@requirement("KV-080", "A layout that cannot be honoured MUST be refused at construction.")
def test_refused_layouts(kvstore: Any) -> None:
    for arguments in (
        (0,),
        (-4,),
        (2.0,),
        (4, torch.float64),
        (4, torch.int32),
        (4, torch.float32, "madgrad"),
        (4, torch.float32, "sgd", {"momentum1": torch.float32}),
        (4, torch.float32, "adam", {"momentum3": torch.float32}),
        (4, torch.float32, "rowwise_adagrad", {"momentum1": torch.float16}),
        (4, torch.float32, "adam", {"momentum1": torch.int8}),
    ):
        with raises(ConfigError, where=str(arguments)):
            kvstore.RowLayout(*arguments)


def test_struct_is_little_endian() -> None:
    """The helper that assembles expected headers says what the text says."""
    assert_same_bytes(header(1, 2, 3), struct.pack("<q", 1) + b"\x02\0\0\0\x03\0\0\x80")
