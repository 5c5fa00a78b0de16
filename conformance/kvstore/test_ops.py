"""Operators of the row store that take no handle: registered as torch expects, and refusing what does not fit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
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
    "rows without a header": lambda ops: ops.saved_rows_fit(
        torch.zeros(1, 15, dtype=torch.uint8), ids_of([1]), ids_of([1]), 0, 0
    ),
    "a negative bucket size": lambda ops: ops.saved_rows_fit(*saved_rows(), 0, -1),
    "no buckets": lambda ops: ops.sort_ids(ids_of(KEYS), 0, 0, 0, 0),
    "buckets of -1 ids": lambda ops: ops.sort_ids(ids_of(KEYS), 2, -1, 0, 2),
    "buckets before the first": lambda ops: ops.sort_ids(ids_of(KEYS), 2, 0, -1, 2),
    "buckets that end before they begin": lambda ops: ops.sort_ids(ids_of(KEYS), 2, 0, 2, 1),
    "buckets that are not there": lambda ops: ops.sort_ids(ids_of(KEYS), 2, 0, 0, 3),
    "memory with gaps": lambda ops: ops.file_read(0, 0, torch.zeros(8, dtype=torch.uint8)[::2]),
}


@requirement("KV-134", "Such an operator MUST refuse tensors and numbers that do not fit each other.", needs=NEEDS)
@pytest.mark.parametrize("misuse", list(MISUSES))
def test_misuse(kvstore: Any, misuse: str) -> None:
    from fastimpl import ops

    with raises(RuntimeError, where=misuse):
        MISUSES[misuse](ops)


def _formats(**changes: int) -> torch.Tensor:
    """A table of rows of 64 bytes, four numbers of float32 and two states of as many; some words of it changed."""
    from fastimpl.kvstore.native import TABLE_VERSION, TableMessage, messages

    words: dict[str, Any] = dict.fromkeys(TableMessage._fields, 0)
    words |= {"version": TABLE_VERSION, "row_bytes": 64, "embedding_dim": 4, "optimizer": 4, "capacity": -1}
    words |= {"momentum1_offset_bytes": 32, "momentum1_count": 4, "momentum2_offset_bytes": 48, "momentum2_count": 4}
    return messages(TableMessage(**(words | changes)))


# Of a table that is not sound: a word of its message.
UNSOUND = [
    *({"version": number} for number in (-1, 0, 1 << 40)),
    *({"row_bytes": number} for number in (-1, 15, 63, 1 << 40)),
    *({"embedding_dim": number} for number in (-1, 0, 13, 64, 1 << 62)),
    *({"weight_type": number} for number in (-1, 3)),
    *({"optimizer": number} for number in (-1, 99)),
    *({"cache_rows": number} for number in (-1, 1 << 32)),
    *({f"{name}_count": number} for name in ("momentum1", "momentum2") for number in (-1, 2, 5)),
    *({f"{name}_type": number} for name in ("momentum1", "momentum2") for number in (-1, 3)),
    *({f"{name}_offset_bytes": number} for name in ("momentum1", "momentum2") for number in (31, 49, 1 << 62)),
]


@requirement(
    "KV-213",
    "The operator that makes a store MUST take a table whose slots lie in its row, and refuse one with any word that "
    "means nothing, another version, and numbers of words, tables or shards that cannot be.",
    needs=NEEDS,
)
def test_tables_that_are_not_sound(kvstore: Any) -> None:
    from fastimpl import ops

    ops.KVHandle.create(_formats(), 1).close()
    ops.KVHandle.create(_formats(momentum1_count=1, momentum2_count=0, momentum2_offset_bytes=-1), 4096).close()
    for changes in UNSOUND:
        with raises(RuntimeError, where=str(changes)):
            ops.KVHandle.create(_formats(**changes), 1)
    good = _formats()
    for name, words in {
        "no table": good[:0],
        "a word less": good[:, :-1].contiguous(),
        "words of int32": good.int(),
        "words in a row": good[0],
        "the second table of another version": torch.cat([good, _formats(version=0)]),
    }.items():
        with raises(RuntimeError, where=name):
            ops.KVHandle.create(words, 1)
    for shard_count in (-1, 0, 4097):
        with raises(RuntimeError, where=f"{shard_count} shards"):
            ops.KVHandle.create(good, shard_count)


def _wrong_calls(ops: Any, store: Any, taken: Any) -> dict[str, Callable[[], object]]:
    """Calls of operators of a store of one table, rows of 64 bytes, whose arguments do not fit; by what is wrong."""
    from fastimpl.kvstore.native import EVICTION_VERSION, EvictionMessage, messages

    ids, rows, hyper = ids_of([1, 2]), torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(8, dtype=torch.float64)
    out, grads, words = torch.zeros(2, 16), torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)
    zeros: list[Any] = [0] * (len(EvictionMessage._fields) - 1)
    plan = messages(EvictionMessage(EVICTION_VERSION, *zeros))
    filling, narrow = store.fill(0, 2, 0), rows[:, :8].contiguous()
    calls: dict[str, Callable[[], object]] = {}
    for table in (-1, 1, 2**63 - 1):
        calls |= {
            f"read of table {table}": partial(store.read, table, ids, 0, 64, out),
            f"write to table {table}": partial(store.write, table, ids, narrow, 16, 0, True),
            f"delete in table {table}": partial(store.delete, table, ids),
            f"size of table {table}": partial(store.size, table),
            f"step of table {table}": partial(store.step, table),
            f"a step for table {table}": partial(store.set_step, table, 5),
        }
    for name, wrong in {
        "ids of int32": ids.int(),
        "ids in two dimensions": ids.view(2, 1),
        "ids with gaps": torch.zeros(4, dtype=torch.int64)[::2],
    }.items():
        calls |= {
            f"read of {name}": partial(store.read, 0, wrong, 0, 64, out),
            f"contains of {name}": partial(store.contains, 0, wrong),
            f"delete of {name}": partial(store.delete, 0, wrong),
        }
    for begin, end in ((-1, 63), (32, 16), (1, 65), (0, 2**62)):
        calls[f"read of bytes {begin} to {end}"] = partial(store.read, 0, ids, begin, end, out)
    for begin in (-1, 0, 15, 57, 64, 2**63 - 1, -(2**63)):
        calls[f"write at byte {begin}"] = partial(store.write, 0, ids, narrow, begin, 0, True)
    calls |= {
        "read into too little": lambda: store.read(0, ids, 0, 64, out[:1]),
        "read into gaps": lambda: store.read(0, ids, 0, 32, out[:, ::2]),
        "fewer values than ids": lambda: store.write(0, ids, narrow[:1], 16, 0, True),
        "values of int8": lambda: store.write(0, ids, narrow.to(torch.int8), 16, 0, True),
        "fewer rows than ids": lambda: store.write_rows(0, ids, rows[:1]),
        "rows of 63 bytes": lambda: store.write_rows(0, ids, rows[:, :63].contiguous()),
        "fewer words than ids": lambda: store.write_metadata(0, ids, words[:1], -1),
        "fewer gradients than ids": lambda: store.update(0, ids, grads[:1], hyper, 0, 1),
        "gradients of three numbers": lambda: store.update(0, ids, grads[:, :3].contiguous(), hyper, 0, 1),
        "gradients of float64": lambda: store.update(0, ids, grads.double(), hyper, 0, 1),
        "seven hyperparameters": lambda: store.update(0, ids, grads, hyper[:7], 0, 1),
        "a plan of another version": lambda: store.evict(0, ids, plan + (plan == EVICTION_VERSION)),
        "a plan of no policy": lambda: store.evict(0, ids, _changed(plan, 1, 99)),
        "a plan of policy -1": lambda: store.evict(0, ids, _changed(plan, 1, -1)),
        "a plan of no row": lambda: store.evict(0, ids, plan[:0]),
        "a plan of one word": lambda: store.evict(0, ids, plan[:, :1].contiguous()),
        "memory for -1 rows": lambda: store.reserve(0, -1),
        "a filling of -1 rows": lambda: store.fill(0, -1, 0),
        "a filling -1 changes ahead": lambda: store.fill(0, 1, -1),
        "a filling of a filling": lambda: ops.KVHandle(filling.tensor).fill(0, 1, 0),
        "a filling of a snapshot": lambda: taken.fill(0, 1, 0),
        "a store that is filled": lambda: ops.KVFilling(store.tensor).add(0, 0, ids, ids, 0, 0),
        "a store that is published": lambda: ops.KVFilling(store.tensor).publish(),
        "rows that begin before the file": lambda: filling.add(0, -1, ids, ids, 0, 0),
        "rows that begin before the first": lambda: filling.add(0, 0, ids, ids, -1, 0),
        "buckets of -1 ids": lambda: filling.add(0, 0, ids, ids, 0, -1),
        "a filling without buckets": lambda: filling.add(0, 0, ids, ids[:0], 0, 0),
        "write to a snapshot": lambda: taken.write(0, ids, narrow, 16, 0, True),
        "clear of a snapshot": lambda: taken.clear(0),
        "a step for a snapshot": lambda: taken.set_step(0, 5),
        "round of a snapshot": lambda: taken.begin_round(0, 0),
        "snapshot of a snapshot": lambda: taken.snapshot(),
        "a copy of a handle": lambda: ops.KVHandle(store.tensor.clone()).size(0),
        "a handle of other words": lambda: ops.KVHandle(_changed(store.tensor.clone(), 0, 1)).size(0),
        "a handle of two words": lambda: ops.KVHandle(store.tensor[:2]).size(0),
        "a handle of int32": lambda: ops.KVHandle(store.tensor.int()).size(0),
        "a handle with gaps": lambda: ops.KVHandle(torch.zeros(6, dtype=torch.int64)[::2]).size(0),
    }
    return calls


def _changed(words: torch.Tensor, index: int, value: int) -> torch.Tensor:
    words = words.clone()
    words.view(-1)[index] = value
    return words


@requirement(
    "KV-214",
    "An operator of a store MUST refuse arguments that fit neither each other nor the store, numbers near the ends of "
    "their range included, and change nothing; a handle that is a copy, or dead, MUST be refused by name.",
    needs=NEEDS,
)
def test_misuse_of_stores(kvstore: Any) -> None:
    from fastimpl import ops

    store: Any = ops.KVHandle.create(_formats(), 2)
    ids = ids_of([1, 2, 3])
    rows = torch.frombuffer(bytearray(b"".join(header(key, 7, 1) + bytes(range(48)) for key in ids)), dtype=torch.uint8)
    assert_equal(store.write_rows(0, ids, rows.view(3, 64).clone()), 0, where="status")
    taken: Any = store.snapshot()
    before, found = torch.zeros(3, 64, dtype=torch.uint8), torch.zeros(3, 64, dtype=torch.uint8)
    store.read(0, ids, 0, 64, before)
    mark = store.mark()
    for what, call in _wrong_calls(ops, store, taken).items():
        with raises(RuntimeError, where=what):
            call()
        for source in (store, taken):
            source.read(0, ids, 0, 64, found)
            assert_bits(found, before, where=f"rows behind {what}")
            found_now = (source.size(0), source.mark(), source.step(0))
            assert_equal(found_now, (3, mark, 0), where=f"rows, mark and step behind {what}")
    for row_count in (2**32 - 15, 2**62):
        assert_equal(store.reserve(0, row_count) == 0, False, where=f"memory for {row_count} rows")
    taken.close()
    store.close()
    with raises(RuntimeError, mentions=["dead"], where="a store that was closed"):
        store.size(0)
