"""Faults of dense gradients on several ranks: not reduced, refused wrongly, or a mean that is none."""

from __future__ import annotations

from typing import Any

import torch

from conformance.pipeline.planted.planting import shared

_DENSE = "twinproof.pipeline.rewrite:DenseGradients"


def _unseen(original: Any, dense: Any) -> None:
    """Nobody is asked."""


def _too_strict(original: Any, dense: Any, model: Any, optimizer: Any, **options: Any) -> None:
    original(dense, model, optimizer, **options)
    dense.params = [param for param in model.parameters() if param.requires_grad]
    dense.names = ["a parameter"] * len(dense.params)


def _not_reduced(original: Any, dense: Any, group: Any, world_size: int) -> None:
    """Every rank keeps its own."""


def _absent_left_out(original: Any, dense: Any, group: Any, world_size: int) -> None:
    # The mean over those that have one.
    if world_size > 1:
        counts = torch.tensor([float(param.grad is not None) for param in dense.params])
        torch.distributed.all_reduce(counts, group=group)
        original(dense, group, world_size)
        for param, count in zip(dense.params, counts.tolist(), strict=True):
            if param.grad is not None:
                param.grad.mul_(world_size / count)


PLANTED = (
    shared(
        "dense_trains_apart",
        "Nobody has to reduce (torchrec).",
        ("PIPE-290",),
        f"{_DENSE}.check",
        _unseen,
    ),
    shared("reduced_ones_refused", "What is reduced is refused.", ("PIPE-291",), f"{_DENSE}.__init__", _too_strict),
    shared("dense_not_reduced", "Asked for, and not done.", ("PIPE-292", "PIPE-293"), f"{_DENSE}.reduce", _not_reduced),
    shared(
        "absent_gradients_left_out",
        "A rank without a gradient does not count.",
        ("PIPE-292",),
        f"{_DENSE}.reduce",
        _absent_left_out,
    ),
)
