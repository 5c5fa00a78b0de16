"""Operators of the row store that take no handle: registered as torch expects, and refusing what does not fit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, raises, requirement
from conformance.kvstore.cases import assert_bits, header, ids_of

NEEDS = ("operators",)
KEYS = (4, -6, 2**63 - 1, -(2**63))


def saved_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Used rows of 24 bytes in the order of two buckets, their keys, and the rows up to the end of each bucket."""
    ids = ids_of([-(2**63), -6, 4, 2**63 - 1])
    rows = b"".join(header(key, 7, 1) + bytes(range(8)) for key in ids.tolist())
    return torch.frombuffer(bytearray(rows), dtype=torch.uint8).reshape(4, 24), ids, ids_of([3, 4])


@requirement(
    "KV-132",
    "Every operator of the row store that takes no handle MUST pass torch.library.opcheck, and version counters see "
    "its writes.",
    needs=NEEDS,
)
def test_opcheck(kvstore: Any) -> None:
    from fastimpl import ops

    rows, ids, ends = saved_rows()
    operators, dense = torch.ops.twinproof, torch.zeros(12, dtype=torch.uint8)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (operators.kvstore_sort_ids, (ids_of(KEYS), 2, 0, 0, 2)),
        (operators.kvstore_keys, (rows,)),
        (operators.kvstore_saved_fit, (rows, ids, ends, 0, 0)),
    ]
    with tempfile.TemporaryFile() as file:
        file.write(bytes(range(20)))
        file.flush()
        calls.append((operators.kvstore_read_file, (file.fileno(), 5, dense)))
        for operator, arguments in calls:
            outcome = torch.library.opcheck(operator.default, arguments, raise_exception=False)
            failed = {name: str(result) for name, result in outcome.items() if result != "SUCCESS"}
            assert_equal(failed, {}, where=str(operator))
        before = dense._version
        assert_equal(ops.file_read(file.fileno(), 8, dense), True, where="a file that is long enough")
    assert_equal(dense._version > before, True, where="file_read: version of what it wrote")
    assert_bits(dense, torch.arange(8, 20, dtype=torch.uint8), where="file_read: bytes")


def _fit(row: int = 0, byte: int = 0, value: int = 0, *, start: int = 0, ends: tuple[int, int] = (3, 4)) -> bool:
    """Whether saved rows still fit after one byte of one row has changed."""
    from fastimpl import ops

    rows, ids, _ = saved_rows()
    rows[row, byte] = value
    return ops.saved_rows_fit(rows, ids, ids_of(ends), start, 0)


@requirement(
    "KV-133",
    "Saved rows MUST be taken as they are only where every key is the id, every row is in use, and buckets and order "
    "are those that were saved.",
    needs=NEEDS,
)
def test_saved_rows_fit(kvstore: Any) -> None:
    from fastimpl import ops

    rows, ids, ends = saved_rows()
    assert_bits(ops.row_keys(rows), ids, where="keys of the rows")
    for first in range(4):
        part = rows[first:], ids[first:]
        assert_equal(ops.saved_rows_fit(*part, ends, first, 0), True, where=f"from row {first} on")
    for row in range(4):
        assert_equal(_fit(row, 3, 0x55), False, where=f"another key in row {row}")
        assert_equal(_fit(row, 15, 0x00), False, where=f"row {row} is not in use")
    assert_equal(_fit(start=1), False, where="rows that stand one place later")
    assert_equal(_fit(ends=(2, 4)), False, where="a bucket that ends one row earlier")
    order = torch.tensor([1, 0, 2, 3])
    assert_equal(ops.saved_rows_fit(rows[order], ids[order], ends, 0, 0), False, where="ids that do not ascend")
    same = torch.tensor([0, 0, 2, 3])
    assert_equal(ops.saved_rows_fit(rows[same], ids[same], ends, 0, 0), False, where="an id that comes twice")


MISUSES: dict[str, Callable[[Any], object]] = {
    "rows of 15 bytes": lambda ops: ops.row_keys(torch.zeros(2, 15, dtype=torch.uint8)),
    "rows of int8": lambda ops: ops.row_keys(torch.zeros(2, 16, dtype=torch.int8)),
    "rows with gaps": lambda ops: ops.row_keys(torch.zeros(2, 32, dtype=torch.uint8)[:, :24]),
    "fewer ids than rows": lambda ops: ops.saved_rows_fit(saved_rows()[0], ids_of([1]), ids_of([4]), 0, 0),
    "no bucket": lambda ops: ops.saved_rows_fit(*saved_rows()[:2], ids_of([]), 0, 0),
    "a negative start": lambda ops: ops.saved_rows_fit(*saved_rows(), -1, 0),
    "buckets that are not there": lambda ops: ops.sort_ids(ids_of(KEYS), 2, 0, 0, 3),
    "memory with gaps": lambda ops: ops.file_read(0, 0, torch.zeros(8, dtype=torch.uint8)[::2]),
}


@requirement("KV-134", "Such an operator MUST refuse tensors and numbers that do not fit each other.", needs=NEEDS)
@pytest.mark.parametrize("misuse", list(MISUSES))
def test_misuse(kvstore: Any, misuse: str) -> None:
    from fastimpl import ops

    with raises(RuntimeError, where=misuse):
        MISUSES[misuse](ops)
