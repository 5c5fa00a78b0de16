"""Faults that ``test_embeddings`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, patched, swap
from conformance.pipeline.planted.planting import accepted, lookups
from twinproof.pipeline.jagged import Bags


@fault(kills="PIPE-110", at="twinproof.pipeline.modules:Pooled.backward")
def dense_gradient_twice(original: Any, ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
    """Dense gradients of some rows are added twice."""
    found = original(ctx, *grads)
    return (*found[:5], *(grad * (1 + (grad.abs().amax(1, keepdim=True) > 1)) for grad in found[5:]))


@fault(kills="PIPE-110", at="twinproof.pipeline.modules:embedding_names")
def names_without_tables(original: Any, tables: Any) -> list[str]:
    """Shared features are not told apart."""
    return [f"{name}{i}" for i, table in enumerate(tables) for name in table.feature_names]


@fault(kills=("PIPE-111", "PIPE-106"), at="twinproof.pipeline.modules:_of_positions")
def positions_count_from_one(original: Any, weights: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The first id of a bag has the second weight."""
    result: torch.Tensor = original(weights.roll(-1), *rest)
    return result


plans_not_checked = patched(
    "Plans that do not fit are taken.", swap("twinproof.pipeline.sharding:check_plan", accepted), kills="PIPE-105"
)

names_not_checked = patched(
    "Tables with names of torch's own are taken.",
    swap("twinproof.pipeline.modules:check_names", accepted),
    kills="PIPE-105",
)


@fault(kills="PIPE-110", at=lookups("update"))
def shared_feature_gradient_lost(
    original: Any, engine: Any, tables: Any, features: Any, bags: Bags, grad: torch.Tensor, *rest: Any
) -> None:
    """The last feature of a shared table loses gradients."""
    grads = grad.clone()
    if len(features) > len(tables):
        grads[:, -1:] = 0
    original(engine, tables, features, bags, grads, *rest)
