"""Which copies between host and device torch makes as one, and for which it uses memory of its own on the host."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["uses_host_temporary"]


def uses_host_temporary(target: torch.Tensor, source: torch.Tensor, *, from_host: bool, non_blocking: bool) -> bool:
    """Whether a copy between host and device touches the host's tensor at the time of the call and never again.

    As ``copy_requires_temporaries`` and ``copy_kernel_cuda`` (aten/src/ATen/native/cuda/Copy.cu) have it: tensors of
    the same dtype that are dense in the same order of dimensions, after broadcasting, are one ``cudaMemcpyAsync``. Of
    others both sides are made contiguous where they lie. A conversion is the host's unless the copy is non-blocking.
    """
    same_dtype = target.dtype == source.dtype
    # (size, stride of the target, stride of the expanded source) of each dimension that has a stride.
    dims = [
        (size, stride, own)
        for size, stride, own in zip(target.size(), target.stride(), _expanded_strides(source, target), strict=True)
        if size != 1
    ]
    if same_dtype and all(stride == own for _, stride, own in dims):
        in_order = sorted(((stride, size) for size, stride, _ in dims))
        if _is_dense((size, stride) for stride, size in in_order):
            return False
    host_side = ((size, own if from_host else stride) for size, stride, own in reversed(dims))
    return not (_is_dense(host_side) and (same_dtype or non_blocking))


def _expanded_strides(source: torch.Tensor, target: torch.Tensor) -> list[int]:
    """Of ``source.expand_as(target)``."""
    new = target.dim() - source.dim()
    kept = zip(source.size(), source.stride(), target.size()[new:], strict=True)
    return [0] * new + [stride if size == wanted else 0 for size, stride, wanted in kept]


def _is_dense(dims: Iterable[tuple[int, int]]) -> bool:
    """Whether (size, stride) from the innermost dimension on leave no gaps."""
    expected = 1
    for size, stride in dims:
        if stride != expected:
            return False
        expected *= size
    return True
