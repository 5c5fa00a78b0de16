"""The operators under the checkpoint component: registered as torch expects, and refusing what would corrupt."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import (
    assert_equal,
    assert_refused,
    assert_same_tensor,
    examples,
    raises,
    requirement,
    succeeds,
)

NEEDS = ("staged_copies",)


def _place_arguments() -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]:
    # A 3 x 8-byte tensor at file offset 16, of which columns 2..6 are moved, seen through a window that starts at 16.
    words = torch.tensor([2, 16, 0, 12, 3, 8, 0, 2, 3, 4])
    return torch.zeros(24, dtype=torch.uint8), 16, torch.arange(12, dtype=torch.uint8), words


def _fp8_arguments() -> tuple[Any, ...]:
    values = torch.arange(15, dtype=torch.uint8).reshape(3, 5)
    return values, torch.arange(256.0), torch.ones(2, 3), 1, 0, 2, torch.zeros(3, 5, dtype=torch.bfloat16)


def _mxfp4_arguments() -> tuple[Any, ...]:
    values, scales = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4), torch.full((2, 3), 127, dtype=torch.uint8)
    return values, scales, 5, torch.zeros(2, 17)


@requirement("CKPT-103", "Every operator MUST pass torch.library.opcheck.", needs=NEEDS)
def test_opcheck(checkpoint: Any) -> None:
    window, start, dense, words = _place_arguments()
    strided = torch.arange(24.0).reshape(4, 6).t()
    buffer = torch.zeros(40, dtype=torch.uint8)
    operators = torch.ops.twinproof
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (operators.checkpoint_place, (window, start, dense, words)),
        (operators.checkpoint_take, (window, start, dense, words)),
        (operators.checkpoint_crc32, (window, torch.tensor([0, 5, 24]))),
        (operators.checkpoint_gather, (strided, 3, buffer)),
        (operators.checkpoint_scatter, (strided, 3, buffer)),
        (operators.checkpoint_dequantize_fp8, _fp8_arguments()),
        (operators.checkpoint_dequantize_mxfp4, _mxfp4_arguments()),
    ]
    with open(os.devnull, "rb") as file:
        read = (file.fileno(), torch.zeros(12, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8), words)
        calls.append((operators.checkpoint_read, read))
        _check(calls)


def _check(calls: list[tuple[Any, tuple[Any, ...]]]) -> None:
    for operator, arguments in calls:
        outcome = torch.library.opcheck(operator.default, arguments, raise_exception=False)
        assert_equal(
            {name: str(result) for name, result in outcome.items() if result != "SUCCESS"}, {}, where=str(operator)
        )


@requirement(
    "CKPT-104", "Moving a rectangle to a window and back MUST touch its bytes only, as indexing does.", needs=NEEDS
)
@examples(60)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_rectangles(checkpoint: Any, shape: list[int], data: st.DataObject) -> None:
    from fastimpl import ops
    from fastimpl.checkpoint.geometry import geometry

    offsets = [data.draw(st.integers(0, size - 1)) for size in shape]
    sizes = [data.draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True)]
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape) + 1
    slices = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
    geo = geometry(shape, offsets, sizes, 4)
    skip = data.draw(st.integers(0, geo.total_bytes - 1))
    count = data.draw(st.integers(0, geo.total_bytes - skip))
    dense = whole[slices].contiguous().view(-1).view(torch.uint8)[skip : skip + count].clone()
    window = torch.zeros(whole.numel() * 4, dtype=torch.uint8)
    words = torch.tensor(geo.descriptor(100, skip, count))
    ops.place_rectangles(window, 100, dense, words)
    flags = torch.zeros(geo.total_bytes, dtype=torch.uint8)
    flags[skip : skip + count] = 255
    expected = torch.zeros_like(whole)
    masked = whole[slices].contiguous().view(-1).view(torch.uint8) & flags
    expected[slices] = masked.view(torch.int32).reshape(sizes)
    assert_same_tensor(window.view(torch.int32).reshape(shape), expected, where="window")
    back = torch.full_like(dense, 7)
    ops.take_rectangles(window, 100, back, words)
    assert_same_tensor(back, dense, where="taken back")


@requirement(
    "CKPT-105", "An operator MUST refuse descriptors and sizes that do not fit, and then change nothing.", needs=NEEDS
)
@pytest.mark.parametrize(
    "change",
    [{1: 19}, {1: 13}, {2: -1}, {3: 13}, {0: 0}, {0: 99}, {4: 0}, {6: 3}, {7: 5}, {8: 4}, {9: 9}, {5: 1 << 62, 4: 8}],
    ids=str,
)
def test_misuse(checkpoint: Any, change: dict[int, int]) -> None:
    from fastimpl import ops

    window, start, dense, words = _place_arguments()
    for index, value in change.items():
        words[index] = value
    with raises(RuntimeError, where=str(change)):
        ops.place_rectangles(window, start, dense, words)
    assert_same_tensor(window, torch.zeros(24, dtype=torch.uint8), where="window after a refusal")


_FP8_MISUSE: list[tuple[int, Any]] = [
    (0, torch.zeros(3, 5)),
    (0, torch.zeros(5, 3, dtype=torch.uint8).t()),
    (1, torch.zeros(255)),
    (1, torch.zeros(256, dtype=torch.float64)),
    (2, torch.ones(1, 3)),
    (2, torch.ones(2, 2)),
    (3, 2),
    (3, -1),
    (4, 2),
    (5, 0),
    (6, torch.zeros(3, 6)),
    (6, torch.zeros(3, 5, dtype=torch.float64)),
    (6, torch.zeros(5, 3).t()),
]
_MXFP4_MISUSE: list[tuple[int, Any]] = [
    (0, torch.zeros(2, 12, dtype=torch.uint8)),
    (1, torch.zeros(2, 2, dtype=torch.uint8)),
    (1, torch.zeros(1, 3, dtype=torch.uint8)),
    (2, -1),
    (2, 8),
    (3, torch.zeros(2, 20)),
    (3, torch.zeros(3, 17)),
]


@requirement(
    "CKPT-456", "A conversion of quantized values MUST refuse what does not fit, and then write nothing.", needs=NEEDS
)
def test_misused_conversions(checkpoint: Any) -> None:
    operators = torch.ops.twinproof
    for operator, make, cases in (
        (operators.checkpoint_dequantize_fp8, _fp8_arguments, _FP8_MISUSE),
        (operators.checkpoint_dequantize_mxfp4, _mxfp4_arguments, _MXFP4_MISUSE),
    ):
        for position, value in cases:
            arguments = list(make())
            arguments[position] = value.clone() if isinstance(value, torch.Tensor) else value
            where = f"{operator} argument {position}: {value}"
            with raises(RuntimeError, where=where):
                operator(*arguments)
            assert_equal(int(arguments[-1].count_nonzero()), 0, where=where)


@requirement("CKPT-106", "An operator's write MUST be seen by autograd's version counter.", needs=NEEDS)
def test_versions(checkpoint: Any) -> None:
    from fastimpl import ops

    window, start, dense, words = _place_arguments()
    before = window._version, dense._version
    ops.place_rectangles(window, start, dense, words)
    ops.take_rectangles(window, start, dense, words)
    assert_equal((window._version > before[0], dense._version > before[1]), (True, True), where="versions")


def _changed(tensor: torch.Tensor, *at: tuple[int, int]) -> torch.Tensor:
    """A copy with other numbers at some places."""
    copy = tensor.clone()
    for place, number in at:
        copy[place] = number
    return copy


def _wrong_moves() -> dict[str, tuple[Any, ...]]:
    """Calls that copy rectangles, whose arguments do not fit."""
    operators, (window, start, dense, words) = torch.ops.twinproof, _place_arguments()
    changes: dict[str, dict[int, Any]] = {
        "a window of int8": {0: window.to(torch.int8)},
        "a window in two dimensions": {0: window.view(2, 12)},
        "a window with gaps": {0: torch.zeros(48, dtype=torch.uint8)[::2]},
        "dense bytes in two dimensions": {2: dense.view(2, 6)},
        "more dense bytes than are moved": {2: torch.zeros(13, dtype=torch.uint8)},
        "words of int32": {3: words.int()},
        "words with gaps": {3: words.repeat_interleave(2)[::2]},
        "no word": {3: words[:0]},
        "three words": {3: words[:3]},
        "a word less": {3: words[:-1]},
        "two descriptors for one": {3: torch.cat([words, words])},
        "more bytes skipped than there are": {3: _changed(words, (2, 13), (3, 0)), 2: dense[:0]},
        "bytes skipped beyond any": {3: _changed(words, (2, 2**62))},
        "-1 bytes": {3: _changed(words, (3, -1))},
        "a base at the end of its range": {3: _changed(words, (1, 2**63 - 1))},
        "a base at the beginning of its range": {3: _changed(words, (1, -(2**63)))},
        "a window far behind": {1: 2**63 - 1},
        "a window far before": {1: -(2**63)},
    }
    calls: dict[str, tuple[Any, ...]] = {}
    for name in ("place", "take"):
        operator = getattr(operators, f"checkpoint_{name}")
        for what, change in changes.items():
            arguments = (change.get(i, value) for i, value in enumerate((window, start, dense, words)))
            calls[f"{name}: {what}"] = (operator, *arguments)
    # No file: all of this is refused before one is read.
    for what, change in {
        "more dense bytes than are read": {1: torch.zeros(13, dtype=torch.uint8)},
        "no room to read into": {2: window[:0]},
        "two descriptors": {3: torch.cat([words, words])},
        "a base at the end of its range": {3: _changed(words, (1, 2**63 - 1))},
    }.items():
        arguments = (change.get(i, value) for i, value in enumerate((-1, dense, window, words)))
        calls[f"read: {what}"] = (operators.checkpoint_read, *arguments)
    return calls


def _wrong_numbers() -> dict[str, tuple[Any, ...]]:
    """Calls of the other operators, whose arguments do not fit."""
    operators, data, strided = torch.ops.twinproof, torch.arange(24, dtype=torch.uint8), torch.arange(24.0).view(4, 6)
    calls: dict[str, tuple[Any, ...]] = {}
    for what, cuts in {
        "cuts of int32": torch.tensor([0, 5], dtype=torch.int32),
        "cuts with gaps": torch.tensor([0, 1, 5, 6])[::2],
        "cuts in two dimensions": torch.tensor([[0, 5]]),
        "no cut": torch.tensor([], dtype=torch.int64),
        "a cut before the first byte": torch.tensor([-1, 5]),
        "cuts that descend": torch.tensor([5, 3]),
        "a cut behind the last byte": torch.tensor([0, 25]),
    }.items():
        calls[f"crc32: {what}"] = (operators.checkpoint_crc32, data, cuts)
    for name in ("gather", "scatter"):
        operator = getattr(operators, f"checkpoint_{name}")
        calls |= {
            f"{name}: a part of an element": (operator, strided, 0, data[:5]),
            f"{name}: an element before the first": (operator, strided, -1, data[:4]),
            f"{name}: a start behind the last": (operator, strided, 25, data[:0]),
            f"{name}: elements behind the last": (operator, strided, 23, data[:8]),
            f"{name}: elements of 16 bytes": (operator, torch.zeros(2, dtype=torch.complex128), 0, data[:16]),
        }
    for what, out in {
        "one dimension": torch.zeros(15),
        "rows with gaps": torch.zeros(3, 10)[:, ::2],
        "rows that are the same": torch.zeros(1, 5, dtype=torch.float64).expand(3, 5),
    }.items():
        calls[f"fp8: {what} to write"] = (operators.checkpoint_dequantize_fp8, *_fp8_arguments()[:-1], out)
        calls[f"mxfp4: {what} to write"] = (operators.checkpoint_dequantize_mxfp4, *_mxfp4_arguments()[:-1], out)
    for rows, columns in ((2, 5), (4, 5), (3, 4), (3, 6)):
        out = torch.zeros(rows, columns)
        calls[f"fp8: {rows} x {columns} to write"] = (operators.checkpoint_dequantize_fp8, *_fp8_arguments()[:-1], out)
    values, scales, *_ = _mxfp4_arguments()
    for skip in (-1, 25, 2**63 - 1):
        arguments = (values, scales, skip, torch.zeros(2, 0))
        calls[f"mxfp4: {skip} of 24 values skipped"] = (operators.checkpoint_dequantize_mxfp4, *arguments)
    return calls


@requirement(
    "CKPT-503",
    "Every operator of checkpoints MUST refuse tensors and numbers that do not fit each other, near the ends of their "
    "range too, and then change nothing; nothing to do is no misfit.",
    needs=NEEDS,
)
def test_misfits(checkpoint: Any) -> None:
    for what, (operator, *arguments) in {**_wrong_moves(), **_wrong_numbers()}.items():
        assert_refused(operator, arguments, where=what)
    operators, nothing = torch.ops.twinproof, torch.zeros(0, dtype=torch.uint8)
    operators.checkpoint_place(nothing, 0, nothing, torch.tensor([], dtype=torch.int64))
    operators.checkpoint_gather(torch.arange(3.0), 3, nothing)
    assert_equal(operators.checkpoint_crc32(nothing, torch.tensor([0])).tolist(), [], where="sums of nothing")
    values, table, scales, *more, _ = _fp8_arguments()
    for rows, columns in ((0, 5), (3, 0)):
        operators.checkpoint_dequantize_fp8(values[:rows, :columns], table, scales, *more, torch.zeros(rows, columns))
        values4, scales4, skip, _ = _mxfp4_arguments()
        operators.checkpoint_dequantize_mxfp4(values4[:rows], scales4[:rows], skip, torch.zeros(min(rows, 2), columns))


@requirement(
    "CKPT-551",
    "Every operator MUST count elements, places in a tensor and places in a file in 64 bits.",
    needs=NEEDS,
)
def test_far_places(checkpoint: Any) -> None:
    from fastimpl import ops

    ops.available()
    for far in (1 << 31, 1 << 32, 1 << 33, (1 << 40) + (1 << 32)):
        # Columns 2 to 6 of the last three rows of a tensor of rows of 8 bytes, whose last rows lie that far.
        rows, skip = far // 8 + 3, far // 8 * 4
        words = torch.tensor([2, 24, skip, 12, rows, 8, 0, 2, rows, 4])
        window, dense = torch.zeros(24, dtype=torch.uint8), torch.arange(1, 13, dtype=torch.uint8)
        with succeeds("placing", where=f"{far}"):
            ops.place_rectangles(window, 24 + far, dense, words)
        expected = torch.zeros(3, 8, dtype=torch.uint8)
        expected[:, 2:6] = dense.view(3, 4)
        assert_same_tensor(window, expected.view(-1), where=f"placed at {far}")
        back = torch.zeros_like(dense)
        ops.take_rectangles(window, 24 + far, back, words)
        assert_same_tensor(back, dense, where=f"taken at {far}")
        # Elements of an expanded tensor, of which memory holds five.
        many, count = torch.arange(5, dtype=torch.int16).expand(far // 5 + 2, 5), 7
        start = far // 5 * 5 + 3
        got = torch.zeros(2 * count, dtype=torch.uint8)
        ops.strided_gather(many, start, got)
        numbers = torch.arange(3, 3 + count, dtype=torch.int16) % 5
        assert_same_tensor(got.view(torch.int16), numbers, where=f"gathered at {start}")
