"""Calls of checkpoint's CUDA operators: strided tensors of every element width, from the middle of one on."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from perf.gpu.operators import Calls, OperatorCall

__all__ = ["CALLS"]

_DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)


def _strided(count: int, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor, int]]:
    """(label, tensor of about ``count`` elements, first element)."""
    side = max(4, math.isqrt(count))
    for dtype in _DTYPES:
        memory = torch.randint(0, 256, (side * (side + 3) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        values = memory.view(dtype).view(side, side + 3)
        yield f"{dtype}, transposed", values.t(), 0
        yield f"{dtype}, columns left out", values[:, 1:-2], side + 5
        cube = values[: side // 2 * 2, :side].view(2, side // 2, side).permute(1, 0, 2)
        yield f"{dtype}, three dimensions", cube, 1


def _gather(count: int, generator: torch.Generator) -> Iterator[OperatorCall]:
    for label, source, start in _strided(count, generator):
        dense = torch.zeros((source.numel() - start) * source.element_size(), dtype=torch.uint8)
        yield OperatorCall(label, (source, start, dense), 2 * dense.numel())


def _scatter(count: int, generator: torch.Generator) -> Iterator[OperatorCall]:
    for label, target, start in _strided(count, generator):
        size_bytes = (target.numel() - start) * target.element_size()
        dense = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)
        yield OperatorCall(label, (target, start, dense), 2 * dense.numel())


CALLS: dict[str, Calls] = {"checkpoint_gather": _gather, "checkpoint_scatter": _scatter}
