"""Cases of the store's requirements: stores with a clock of their own, random rows, contents as plain bytes, saves.

Rows are assembled here with ``struct`` from numbers, never by the packer under test.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from conformance.harness import assert_equal, assert_same_bytes
from twinproof.kvstore import disk
from twinproof.optimizers import OPTIMIZERS as KINDS

EXTREMES = (0, 1, -1, 2**31, -(2**31), 2**32, 2**62, 2**63 - 1, -(2**63), -(2**63) + 1)
OPTIMIZERS = tuple(KINDS)
WEIGHTS = (torch.float32, torch.float16, torch.bfloat16)
FILE = "model-00001-of-00001.safetensors"
# A batch of fewer ids is the work of one thread.
SERIAL_IDS = 512
# More bytes of rows are written past the caches.
STREAMED_BYTES = 4 << 20
# Fewer saved rows are no range of their own for a thread that checks them.
CHECKED_ROWS = 4096
_BITS = {2: torch.int16, 4: torch.int32}

Contents = dict[str, dict[int, bytes]]


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self, now: int = 1000) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now


def store_of(kvstore: Any, layout: Any = None, **options: Any) -> Any:
    """A store with one table "t" (or the layouts given), its optimizer in the row, and a clock at 1000."""
    chosen = kvstore.RowLayout(6, optimizer="adam") if layout is None else layout
    layouts = chosen if isinstance(chosen, dict) else {"t": chosen}
    settings = {"optimizer_in_row": True, "clock": Clock(), "seed": 7} | options
    return kvstore.KVStore(layouts, **settings)


def ids_of(values: Sequence[int]) -> torch.Tensor:
    """Ids as the store wants them."""
    return torch.tensor(list(values), dtype=torch.int64)


def random_bits(dtype: torch.dtype, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Random bits: NaN payloads, signed zeros, infinities and subnormals included."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator, dtype=torch.uint8)
    # A few elements of each exceptional kind; random bits alone seldom have them. Where they stand changes from
    # row to row, so that short rows differ too.
    values = raw.view(_BITS[dtype.itemsize]).reshape(-1)
    sign = -(1 << (8 * dtype.itemsize - 1))
    for position, bits in enumerate((0, sign, 1, sign + 1)):
        values[(5 * position + seed) % 17 :: 17 + position] = bits
    return values.view(dtype).reshape(tuple(shape))


def weights_of(store: Any, count: int, seed: int, table: str = "t") -> torch.Tensor:
    """Random weights for a table."""
    layout = store.layout(table)
    return random_bits(layout.weight_dtype, (count, layout.embedding_dim), seed)


def header(key: int, timestamp: int, count: int, used: bool = True) -> bytes:
    """A metaheader, by the documented layout."""
    return struct.pack("<qII", key, timestamp, count | (0x80000000 if used else 0))


def random_row(layout: Any, key: int, timestamp: int, count: int, seed: int) -> bytes:
    """A whole row: header, random weight and states, zero padding."""
    return bytes(_rows_of(layout, [header(key, timestamp, count)], seed).numpy())


def _rows_of(layout: Any, headers: Sequence[bytes], seed: int) -> torch.Tensor:
    """Whole rows below these headers, uint8 [n, row_bytes]: random weights and states, zero padding."""
    rows = torch.zeros(len(headers), layout.row_bytes, dtype=torch.uint8)
    rows[:, :16] = torch.frombuffer(bytearray(b"".join(headers)), dtype=torch.uint8).reshape(-1, 16)
    slots = [(16, layout.embedding_dim, layout.weight_dtype)]
    slots += [(slot.offset_bytes, slot.count, slot.dtype) for slot in layout.state_slots.values()]
    for number, (offset, count, dtype) in enumerate(slots):
        values = random_bits(dtype, (len(headers), count), seed * 31 + number).view(torch.uint8)
        rows[:, offset : offset + values.shape[1]] = values
    return rows


def rows_tensor(rows: Sequence[bytes], row_bytes: int) -> torch.Tensor:
    """Rows as uint8 [n, row_bytes]."""
    if not rows:
        return torch.zeros(0, row_bytes, dtype=torch.uint8)
    return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).reshape(len(rows), row_bytes)


def stamp_and_count(place: int, seed: int) -> tuple[int, int]:
    """Timestamp and count of the row at a place of ``random_rows``: of another seed they are others."""
    return 900 + place + seed % 89, 1 + (place + seed) % 7


def random_rows(store: Any, ids: Sequence[int], seed: int, table: str = "t") -> torch.Tensor:
    """Whole rows for distinct or repeated ids, each with its own header and values."""
    layout = store.layout(table)
    if not ids:
        return torch.zeros(0, layout.row_bytes, dtype=torch.uint8)
    return _rows_of(layout, [header(key, *stamp_and_count(n, seed)) for n, key in enumerate(ids)], seed)


def contents(store: Any) -> Contents:
    """Everything a store or snapshot holds: table -> id -> row bytes."""
    result: Contents = {}
    for table in store.tables:
        ids = store.ids(table)
        rows = store.get_rows(table, ids)
        result[table] = {key: row.numpy().tobytes() for key, row in zip(ids.tolist(), rows, strict=True)}
    return result


def assert_contents(store: Any, expected: Contents, where: str = "") -> None:
    """Demand exactly these rows."""
    found = contents(store)
    for table in expected:
        assert_equal(sorted(found[table]), sorted(expected[table]), where=f"{where} ids of {table}")
        for key, row in expected[table].items():
            assert_same_bytes(found[table][key], row, where=f"{where} row {key} of {table}")
        assert_equal(store.size(table), len(expected[table]), where=f"{where} size of {table}")


def assert_bits(got: torch.Tensor, expected: torch.Tensor, where: str = "") -> None:
    """Equal dtype, shape and bytes."""
    assert_equal((got.dtype, tuple(got.shape)), (expected.dtype, tuple(expected.shape)), where=where)
    pair = [value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for value in (got, expected)]
    assert_same_bytes(pair[0], pair[1], where=where)


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


def between_tables(act: Callable[[str], None]) -> AbstractContextManager[Any]:
    """Call ``act(table)`` when a load has written a table's rows, before it writes the next; listeners hear later."""
    write = disk._Load.write

    def written(job: Any, table: str, *rest: Any) -> Any:
        found = write(job, table, *rest)
        act(table)
        return found

    return mock.patch.object(disk._Load, "write", written)


def save(kvstore: Any, store: Any, path: Path, **options: Any) -> Any:
    """Save without waiting for the disk."""
    return kvstore.save(store, path, durable=False, **options)
