"""The operators of checkpoints, typed: rectangles of tensors in files, and tensors of any strides.

A *descriptor* says how part of a rectangle of a row-major tensor lies in a file, in int64 words ``[ndim, base, skip,
count, shape..., offsets..., sizes...]``. ``base`` is the file offset of the tensor, ``skip`` and ``count`` select bytes
of the rectangle, the innermost dimension counts bytes. Several descriptors may follow each other; the dense buffer then
holds their bytes one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = [
    "crc32",
    "crc32_between",
    "dequantize_fp8",
    "dequantize_mxfp4",
    "place_rectangles",
    "read_rectangle",
    "register_fakes",
    "strided_gather",
    "strided_scatter",
    "take_rectangles",
]


def register_fakes() -> None:
    """Shapes of what the operators return, for tracing."""
    without_result = ("place", "take", "gather", "scatter", "dequantize_fp8", "dequantize_mxfp4")
    for name in (f"checkpoint_{each}" for each in without_result):
        # These return nothing: under fake tensors there is nothing to make.
        torch.library.register_fake(f"twinproof::{name}", lambda *args: None)
    torch.library.register_fake("twinproof::checkpoint_read", lambda file, dense, window, words: words.new_empty(3))
    torch.library.register_fake("twinproof::checkpoint_crc32", lambda data, cuts: cuts.new_empty(cuts.numel() - 1))


def place_rectangles(window: torch.Tensor, window_start: int, dense: torch.Tensor, descriptors: torch.Tensor) -> None:
    """Copy dense bytes of rectangles to where they lie in a window of the file.

    Args:
        window: uint8 [n], CPU; file bytes ``window_start`` and on. Written.
        window_start: file offset of ``window[0]``.
        dense: uint8 [sum of counts].
        descriptors: int64, see the module.

    Raises:
        RuntimeError: shapes or descriptors that do not fit; nothing is written then.
    """
    torch.ops.twinproof.checkpoint_place(window, window_start, dense, descriptors)
    torch.autograd.graph.increment_version(window)


def take_rectangles(window: torch.Tensor, window_start: int, dense: torch.Tensor, descriptors: torch.Tensor) -> None:
    """The inverse of ``place_rectangles``: ``dense`` is written."""
    torch.ops.twinproof.checkpoint_take(window, window_start, dense, descriptors)
    torch.autograd.graph.increment_version(dense)


def read_rectangle(
    file: int, dense: torch.Tensor, window: torch.Tensor, descriptor: torch.Tensor
) -> tuple[int, int, int]:
    """Read part of a rectangle from a file, gaps between its rows included, and keep the rectangle.

    Args:
        file: open file descriptor.
        dense: uint8 [count of the descriptor], CPU. Written.
        window: uint8 scratch; one read fills at most this much. Written.
        descriptor: int64, one descriptor; its base is a file offset.

    Returns:
        (status, calls, bytes): status is 0, an errno, or -1 where the file ends early.
    """
    status, calls, read_bytes = torch.ops.twinproof.checkpoint_read(file, dense, window, descriptor).tolist()
    torch.autograd.graph.increment_version([dense, window])
    return status, calls, read_bytes


def crc32_between(data: torch.Tensor, cuts: Sequence[int]) -> list[int]:
    """The CRC-32 of the bytes between each cut and the next, as ``zlib.crc32`` gives it.

    Args:
        data: uint8 [n], contiguous, CPU.
        cuts: ascending offsets in ``data``, at least one.

    Raises:
        RuntimeError: cuts that do not ascend or lie outside.
    """
    sums: list[int] = torch.ops.twinproof.checkpoint_crc32(data, torch.tensor(cuts, device="cpu")).tolist()
    return sums


def crc32(data: torch.Tensor) -> int:
    """``zlib.crc32`` of a contiguous uint8 CPU tensor [n]."""
    return crc32_between(data, (0, data.numel()))[0]


def strided_gather(source: torch.Tensor, start: int, dense: torch.Tensor) -> None:
    """Copy elements ``start`` and on, in row-major order, of a tensor of any strides into dense bytes.

    Args:
        source: any dtype of 1, 2, 4 or 8 bytes, CPU or CUDA.
        start: flat index of the first element.
        dense: uint8 [whole elements], same device. Written.
    """
    torch.ops.twinproof.checkpoint_gather(source, start, dense)
    torch.autograd.graph.increment_version(dense)


def strided_scatter(target: torch.Tensor, start: int, dense: torch.Tensor) -> None:
    """The inverse of ``strided_gather``: ``target`` is written."""
    torch.ops.twinproof.checkpoint_scatter(target, start, dense)
    torch.autograd.graph.increment_version(target)


def dequantize_fp8(
    values: torch.Tensor,
    table: torch.Tensor,
    scales: torch.Tensor,
    first: tuple[int, int],
    block_size: int,
    out: torch.Tensor,
) -> None:
    """Multiply 8-bit floats by the scales of their blocks, in float32, rounded to the dtype of ``out``.

    Args:
        values: uint8 [rows, columns], dense, CPU.
        table: float32 [256], what each byte stands for.
        scales: float32 [block rows, block columns], of the blocks that the values touch.
        first: row and column of the first value in its block.
        block_size: rows and columns of a block.
        out: float32, float16 or bfloat16 [rows, columns], rows dense. Written.

    Raises:
        RuntimeError: shapes or dtypes that do not fit; nothing is written then.
    """
    torch.ops.twinproof.checkpoint_dequantize_fp8(values, table, scales, *first, block_size, out)
    torch.autograd.graph.increment_version(out)


def dequantize_mxfp4(values: torch.Tensor, scales: torch.Tensor, skip: int, out: torch.Tensor) -> None:
    """Two 4-bit floats a byte, the low one first, times the power of two of their group.

    Args:
        values: uint8 [rows, groups, bytes], dense, CPU.
        scales: uint8 [rows, groups], exponents with bias 127; 255 makes NaN.
        skip: values of a row before the first that is wanted.
        out: float32, float16 or bfloat16 [rows, values], rows dense. Written.

    Raises:
        RuntimeError: shapes or dtypes that do not fit; nothing is written then.
    """
    torch.ops.twinproof.checkpoint_dequantize_mxfp4(values, scales, skip, out)
    torch.autograd.graph.increment_version(out)
