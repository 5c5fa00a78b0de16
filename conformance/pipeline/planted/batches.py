"""Faults in batches, collections and plans."""

from __future__ import annotations

from typing import Any

import torch

from conformance.pipeline.planted.planting import exported, shared, shared_swap
from twinproof.pipeline import modules


def _weights_lost(original: Any, batch: Any, indices: Any) -> Any:
    found = original(batch, indices)
    found._weights = None
    return found


def _detached(original: Any, batch: Any, move: Any) -> Any:
    return original(batch, lambda value: move(value).detach())


def _in_their_order(original: Any, tensors: Any, groups: Any) -> Any:
    order = [key for tensor in tensors for key in tensor.keys()]  # noqa: SIM118
    return original(tensors, [sorted(group, key=order.index) for group in groups if set(group) <= set(order)])


_BACKWARD = modules.Pooled.backward


def _once_more(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
    found = _BACKWARD(ctx, *grads)
    return (*found[:4], *(grad * (1 + (grad.abs().amax(1, keepdim=True) > 1)) for grad in found[4:]))


def _plain_names(tables: Any) -> list[str]:
    return [f"{name}{i}" for i, table in enumerate(tables) for name in table.feature_names]


def _next_position(original: Any, weights: torch.Tensor, *rest: Any) -> torch.Tensor:
    result: torch.Tensor = original(weights.roll(-1), *rest)
    return result


def _accepted(*args: Any, **options: Any) -> None:
    return None


PLANTED = (
    exported(
        "moved_weights_are_detached",
        "A batch that is moved has weights that no gradient reaches.",
        ("PIPE-118",),
        ("KeyedJaggedTensor._map", _detached),
    ),
    exported(
        "permute_loses_weights",
        "A permuted batch has no weights.",
        ("PIPE-100",),
        ("KeyedJaggedTensor.permute", _weights_lost),
    ),
    shared_swap(
        "batch_not_checked",
        "Parts that disagree make a batch.",
        ("PIPE-101",),
        "twinproof.pipeline.batches:KeyedJaggedTensor._check_features",
        _accepted,
    ),
    exported(
        "regroup_keeps_order",
        "Groups keep the tensors' order.",
        ("PIPE-102",),
        ("KeyedTensor.regroup", _in_their_order),
    ),
    shared_swap(
        "dense_gradient_twice",
        "Dense gradients of some rows are added twice.",
        ("PIPE-110",),
        "twinproof.pipeline.modules:Pooled.backward",
        staticmethod(_once_more),
    ),
    shared_swap(
        "names_without_tables",
        "Shared features are not told apart.",
        ("PIPE-110",),
        "twinproof.pipeline.modules:embedding_names",
        _plain_names,
    ),
    shared(
        "positions_count_from_one",
        "The first id of a bag has the second weight.",
        ("PIPE-111", "PIPE-106"),
        "twinproof.pipeline.modules:_of_positions",
        _next_position,
    ),
    shared_swap(
        "plans_not_checked",
        "Plans that do not fit are taken.",
        ("PIPE-105",),
        "twinproof.pipeline.sharding:check_plan",
        _accepted,
    ),
)
