"""Calls of offload's CUDA operators: many tensors of mixed sizes, packed and unpacked."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from perf.gpu.operators import Calls, OperatorCall

__all__ = ["CALLS"]

_DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)
# Elements of one tensor: around a word, and what a launch's blocks share.
_SIZES = (1, 7, 16, 1_000, 65_537)


def _lists(count: int, generator: torch.Generator) -> Iterator[tuple[str, list[torch.Tensor], list[int], int]]:
    """(label, tensors of together about ``count`` elements, offsets, bytes of the slab): aligned, and not."""
    for label, align in (("aligned", 256), ("unaligned", 1)):
        tensors: list[torch.Tensor] = []
        offsets, at, left = [], 3 if align == 1 else 0, count
        while left > 0:
            size = min(left, _SIZES[len(tensors) % len(_SIZES)])
            dtype = _DTYPES[len(tensors) % len(_DTYPES)]
            made = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator)
            tensors.append(made.view(dtype))
            offsets.append(at)
            at = -(-(at + made.numel()) // align) * align
            left -= size
        yield label, tensors, offsets, at


def _pack(count: int, generator: torch.Generator) -> Iterator[OperatorCall]:
    for label, tensors, offsets, size_bytes in _lists(count, generator):
        slab = torch.zeros(size_bytes, dtype=torch.uint8)
        yield OperatorCall(label, (tensors, slab, offsets), 2 * sum(tensor.nbytes for tensor in tensors))


def _unpack(count: int, generator: torch.Generator) -> Iterator[OperatorCall]:
    for label, tensors, offsets, size_bytes in _lists(count, generator):
        slab = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)
        targets = [torch.zeros_like(tensor) for tensor in tensors]
        yield OperatorCall(label, (targets, slab, offsets), 2 * sum(tensor.nbytes for tensor in tensors))


CALLS: dict[str, Calls] = {"offload_pack": _pack, "offload_unpack": _unpack}
