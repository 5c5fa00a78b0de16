"""``KVEmbeddingBag`` whose rows are added in C++, in the order of positions wherever they lie.

Torch's own addition by index takes rows of a device in any order.
"""

from __future__ import annotations

from typing import Any

import torch

from fastimpl import ops
from twinproof.kvstore import modules

__all__ = ["KVEmbeddingBag"]


class _Sums(torch.autograd.Function):
    """Sums of bags [bags, D]; each row's gradient is its bag's."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.ends, ctx.row_count = ends, rows.shape[0]
        places = torch.arange(rows.shape[0], device=rows.device)
        sums = rows.new_empty(ends.numel() - 1, rows.shape[1])
        ops.pool_bags([rows.contiguous()], [0], places, ends, None, [False], sums)
        return sums

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].repeat_interleave(ctx.ends.diff(), dim=0, output_size=ctx.row_count), None


class KVEmbeddingBag(modules.KVEmbeddingBag):
    __doc__ = modules.KVEmbeddingBag.__doc__

    @staticmethod
    def _pool(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        sums: torch.Tensor = _Sums.apply(rows, ends)  # type: ignore[no-untyped-call]
        return sums
