"""Byte ranges of what is saved: tensors of any form, and rows that are read when they are due."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

from conformance.checkpoint.cases import FILE, PT, Tiled, oracle, random_bits, save, save_ranks, tiled
from conformance.harness import (
    Rank,
    assert_equal,
    assert_le,
    assert_same_bytes,
    assert_same_tensor,
    examples,
    raises,
    requirement,
    succeeds,
)
from twinproof.errors import PlanError


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


def _forms() -> dict[str, torch.Tensor]:
    plain = random_bits(torch.int16, (5, 7), 1)
    complex_ = random_bits(torch.int32, (4, 6), 2).to(torch.complex64)
    return {
        "dense": plain,
        "turned": plain.t(),
        "every second": plain[::2, 1::3],
        "expanded": plain[1].expand(3, 7),
        "scalar": plain[2, 3],
        "bytes": random_bits(torch.uint8, (3, 5), 3).t(),
        "conjugate": complex_.conj(),
        "negative": complex_.conj().imag,
    }


@requirement(
    "CKPT-508",
    "Any range of the bytes of a tensor MUST be read right, whatever its form: dense, strided, expanded, conjugated, "
    "negated, without dimensions, and of another dtype in the file.",
    needs=("counted_io",),
)
def test_ranges_of_tensors(checkpoint: Any) -> None:
    from fastimpl.checkpoint.source import Source

    for name, value in _forms().items():
        for dtype in [value.dtype, *([] if value.is_complex() else [torch.float64])]:
            source, expected = Source(value, dtype), _bytes(value.resolve_conj().resolve_neg().to(dtype))
            is_plain = name in ("dense", "scalar") and dtype == value.dtype
            assert_equal(source.is_view, is_plain, where=f"{name} as {dtype}: is_view")
            ranges = [
                (begin, end) for begin in range(0, len(expected), 3) for end in range(begin, len(expected) + 1, 5)
            ]
            for begin, end in [*ranges, (0, len(expected)), (len(expected), len(expected))]:
                where = f"{name} as {dtype}, {begin} to {end}"
                got = source.read(begin, end)
                assert_same_tensor(got, expected[begin:end], where=where)
                assert_equal(
                    is_plain and end > begin and got.data_ptr() != value.data_ptr() + begin, False, where=where
                )


class _Reader:
    """Rows [offset, offset + rows) of a global tensor, which are made when they are asked for."""

    def __init__(self, rows: torch.Tensor, row_offset: int) -> None:
        self.rows, self.row_offset = rows, row_offset
        self.asked: list[tuple[int, int]] = []

    def read_rows(self, start: int, length: int) -> torch.Tensor:
        self.asked.append((start, length))
        return self.rows[start : start + length].clone()


class _Filler(_Reader):
    """The same, straight into memory of the caller."""

    filled: tuple[int, int] | None = None

    def read_rows_into(self, start: int, length: int, out: torch.Tensor) -> None:
        self.filled = start, length
        assert_equal((out.dtype, out.size(0)), (torch.uint8, length), where="memory for rows")
        out.copy_(self.rows[start : start + length].contiguous().view(length, -1).view(torch.uint8))


@requirement(
    "CKPT-509",
    "Any range of the bytes of rows that are read when they are due MUST be read right, whole rows in place where the "
    "reader can, each row once but those that the range cuts; rows of another shape or dtype MUST be refused.",
    needs=("counted_io",),
)
@examples(150)
@given(
    row_shape=st.sampled_from(((), (3,), (2, 3))),
    sizes=st.tuples(st.integers(0, 4), st.integers(1, 7)),
    ends=st.tuples(st.integers(0, 200), st.integers(0, 200)),
    row_offset=st.sampled_from((0, 1, 3, 11)),
    is_cast=st.booleans(),
    fills=st.booleans(),
)
def test_ranges_of_rows(
    checkpoint: Any,
    row_shape: tuple[int, ...],
    sizes: tuple[int, int],
    ends: tuple[int, int],
    row_offset: int,
    is_cast: bool,
    fills: bool,
) -> None:
    from fastimpl.checkpoint.source import LazySource

    skipped, count = sizes
    # The chunk is a part of what the reader has, which is a part of the tensor.
    rows = random_bits(torch.int16, (skipped + count + 1, *row_shape), 1)
    reader = (_Filler if fills else _Reader)(rows, row_offset)
    dtype = torch.float32 if is_cast else torch.int16
    offsets = (row_offset + skipped, *(0 for _ in row_shape))
    source = LazySource(reader, offsets, (count, *row_shape), torch.int16, dtype)
    expected = _bytes(rows[skipped : skipped + count].to(dtype))
    row_bytes = len(expected) // count
    begin, end = sorted(at % (len(expected) + 1) for at in ends)
    assert_same_tensor(source.dense(begin, end), expected[begin:end], where="dense")
    reader.asked.clear()
    out = torch.zeros(end - begin, dtype=torch.uint8)
    source.fill(begin, end, out)
    assert_same_tensor(out, expected[begin:end], where="filled")
    first, last = -(-begin // row_bytes), end // row_bytes
    if isinstance(reader, _Filler) and not is_cast and first < last:
        assert_equal(reader.filled, (skipped + first, last - first), where="rows in place")
        cut = [(skipped + first - 1, 1)] if begin % row_bytes else []
        assert_equal(
            reader.asked, [*cut, *([(skipped + last, 1)] if end % row_bytes else [])], where="rows that are cut"
        )
    for wrong in (rows.to(torch.int32), rows.unsqueeze(-1), rows[:skipped]):
        strange = LazySource(_Reader(wrong, row_offset), offsets, (count, *row_shape), torch.int16, dtype)
        for skip in range(count):
            with raises(PlanError, mentions=["int16", f"{[count - skip, *row_shape]}", f"{wrong.dtype}"]):
                strange.dense(skip * row_bytes, len(expected))


class _CountedRows(Tiled):
    """Rows that are read when they are due; how many at a time is noted."""

    row_offset = 0
    asked: list[int]

    def read_rows(self, start: int, length: int) -> torch.Tensor:
        self.asked.append(length)
        return self.parts[0, 0][start : start + length]


@requirement(
    "CKPT-633",
    "A save MUST ask a tensor that reads its rows when they are due for no more than fill two blocks, and never for "
    "all of its part at once, whatever the number of threads.",
    needs=("bounded_memory",),
)
def test_rows_by_the_block(checkpoint: Any, tmp_path: Path) -> None:
    whole, block_bytes = random_bits(torch.float32, (1000, 16), 1), 4096
    for thread_count in (1, 3):
        rows: Any = torch.Tensor._make_subclass(_CountedRows, torch.empty(0))
        rows.parts, rows.whole, rows.asked = {(0, 0): whole}, whole.shape, []
        path = tmp_path / f"{thread_count}"
        save(checkpoint, {"w": rows}, path, block_bytes=block_bytes, thread_count=thread_count)
        assert_same_bytes(path / FILE, oracle({"w": whole}, PT), where="file")
        # A block may begin and end inside a row.
        most = 2 * block_bytes // (16 * 4) + 1
        assert_le(max(rows.asked, default=1000), most, where=f"rows that are asked for at once, {thread_count} threads")
        assert_le(1000, sum(rows.asked), where="rows that were asked for")


class _Unsendable(LookupError):
    """Holds what no other process can have."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.held = threading.Lock()


class _LostRows(Tiled):
    """Rows that are read when they are due, and cannot be."""

    row_offset = 0
    error: type[Exception] = LookupError

    def read_rows(self, start: int, length: int) -> torch.Tensor:
        raise self.error("rows are gone")

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        raise self.error("rows are gone")


def _save_lost(rank: Rank, path: str, failing: int, error: type[Exception] = LookupError) -> list[str]:
    """Rows of two ranks that share every block; those of one cannot be read. What each rank raised."""
    value = random_bits(torch.float32, (8, 3), 1)
    part: Any = tiled(value, [((0, 0), (4, 3)), ((4, 0), (4, 3))], rank.rank, 2)
    if rank.rank == failing:
        lost: Any = torch.Tensor._make_subclass(_LostRows, torch.empty(0))
        lost.parts, lost.whole, lost.row_offset, lost.error = part.parts, part.whole, 4 * rank.rank, error
        part = lost
    try:
        save_ranks(rank, {"w": part}, Path(path))
    except CheckpointException as failed:
        return [f"{type(found[0]).__name__}: {found[0]}" for _, found in sorted(failed.failures.items())]
    return []


@requirement(
    "CKPT-557",
    "Where rows of one rank cannot be read while they are sent or written, that rank MUST raise its own error, the "
    "others a DistributedError, and nothing MUST become visible.",
)
def test_lost_rows(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for failing in (0, 1):
        for found in rank_pool.run(_save_lost, 2, str(tmp_path / "ck"), failing):
            assert_equal(len(found), 2, where=f"rank {failing} fails: failures")
            assert_equal(found[failing], "LookupError: rows are gone", where=f"rank {failing} fails: its own error")
            kind = found[1 - failing].partition(":")[0]
            assert_equal(kind, "DistributedError", where=f"rank {failing} fails: the other's error")
        assert_equal(list(tmp_path.iterdir()), [], where=f"rank {failing} fails: what became visible")


@requirement(
    "CKPT-651",
    "An error that cannot be pickled, on one rank of a save, MUST be told to all ranks, with its name, text and rank, "
    "and keep none of them waiting.",
)
def test_errors_that_cannot_be_sent(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for failing in (0, 1):
        with succeeds("two ranks", where=f"rank {failing} fails: an answer of both"):
            by_rank = rank_pool.run(_save_lost, 2, str(tmp_path / "ck"), failing, _Unsendable, timeout_s=20)
        for found in by_rank:
            assert_equal(len(found), 2, where=f"rank {failing} fails: failures")
            said = "_Unsendable: rows are gone" in found[failing], f"rank {failing}" in found[1 - failing]
            assert_equal(said, (True, True), where=f"rank {failing} fails: {found}")
        assert_equal(list(tmp_path.iterdir()), [], where=f"rank {failing} fails: what became visible")
