"""Bags of ids: how their rows are pooled, and how gradients come back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from twinproof.errors import ShapeError

__all__ = ["Bags", "check_ids", "joined", "offsets_of", "pool", "spread"]


_IDS = (torch.int64, torch.int32)


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """Int64 [n + 1]: 0, then the running sums of lengths [n]."""
    return torch.nn.functional.pad(lengths.to(torch.int64).cumsum(0), (1, 0))


class Bags:
    """Bags of F features, feature-major: ``indices`` int64 [N], ``offsets`` int64 [F * B + 1], ``weights`` or None."""

    def __init__(self, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        self.indices, self.offsets, self.weights = indices, offsets, weights

    def feature(self, index: int, feature_count: int) -> Bags:
        """The bags of one feature."""
        stride = (self.offsets.numel() - 1) // feature_count
        ends = self.offsets[index * stride : (index + 1) * stride + 1]
        ids = slice(int(ends[0]), int(ends[-1]))
        return Bags(self.indices[ids], ends - ends[0], None if self.weights is None else self.weights[ids])

    def detached(self) -> Bags:
        """The same, whose weights get no gradient."""
        return Bags(self.indices, self.offsets, None if self.weights is None else self.weights.detach())

    def wants_gradient(self) -> bool:
        """Whether the weights require a gradient."""
        return self.weights is not None and self.weights.requires_grad

    def bag_of_each(self) -> torch.Tensor:
        """The bag of each id, int64 [N]."""
        return torch.arange(self.offsets.numel() - 1).repeat_interleave(self.offsets.diff())

    def lengths(self) -> torch.Tensor:
        """Ids of each bag, at least 1, as float32 [B, 1]: what a mean divides by."""
        return self.lengths_of(0, 1)

    def lengths_of(self, index: int, feature_count: int) -> torch.Tensor:
        """``lengths`` of one feature's bags, without a look at how many ids it has."""
        stride = (self.offsets.numel() - 1) // feature_count
        ends = self.offsets[index * stride : (index + 1) * stride + 1]
        return ends.diff().clamp(min=1).to(torch.float32)[:, None]


def check_ids(bags: Bags) -> None:
    """Demand what a lookup can read: flat int64 or int32 ids, and one weight for each. Raises ShapeError."""
    if bags.indices.dim() != 1 or bags.indices.dtype not in _IDS:
        found = (tuple(bags.indices.shape), bags.indices.dtype)
        raise ShapeError("ids that are looked up are int64 or int32, and flat", got=found, where="values")
    if bags.weights is not None and bags.weights.shape != bags.indices.shape:
        raise ShapeError("one weight for each id", got=tuple(bags.weights.shape), expected=bags.indices.numel())


def joined(parts: Sequence[Bags]) -> Bags:
    """Bags one after the other: of one part or more, which have weights all or none."""
    weights = [part.weights for part in parts if part.weights is not None]
    return Bags(
        torch.cat([part.indices for part in parts]),
        offsets_of(torch.cat([part.offsets.diff() for part in parts])),
        torch.cat(weights) if weights else None,
    )


def pool(rows: torch.Tensor, bags: Bags, mean: bool) -> torch.Tensor:
    """Float32 [B, D] from the rows [N, D] of one feature's ids: added from +0 in ascending position.

    A weighted row is multiplied before it is added, each rounded once; a mean is the sum divided by the number of ids.
    """
    terms = rows.to(torch.float32)
    if bags.weights is not None:
        terms = bags.weights[:, None] * terms
    sums = torch.zeros(bags.offsets.numel() - 1, rows.shape[1]).index_add_(0, bags.bag_of_each(), terms)
    return sums / bags.lengths() if mean else sums


def spread(grad: torch.Tensor, bags: Bags, mean: bool) -> torch.Tensor:
    """``pool`` backwards: the gradient [N, D] of each id's row, from that of the bags [B, D]."""
    grads = (grad / bags.lengths() if mean else grad)[bags.bag_of_each()]
    return grads if bags.weights is None else bags.weights[:, None] * grads
