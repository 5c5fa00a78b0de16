"""Faults that ``test_replicated`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched
from conformance.pipeline.planted.planting import exchanges


@fault(kills=("PIPE-087", "PIPE-106"), at=exchanges("sum_over_ranks"))
def replicas_keep_own_gradient(original: Any, exchange: Any, value: torch.Tensor) -> torch.Tensor:
    """Replicated parameters get their own rank's gradient, and drift apart."""
    original(exchange, value)
    return value


@fault(kills="PIPE-087", at=exchanges("sum_over_ranks"))
def replicas_gradient_summed(original: Any, exchange: Any, value: torch.Tensor) -> torch.Tensor:
    """Their gradient is a sum."""
    total: torch.Tensor = original(exchange, value) * exchange.layout.world_size
    return total


@fault(kills="PIPE-090", at=exchanges("gradients"))
def group_of_one_differs(original: Any, exchange: Any, ctx: Any, grad: torch.Tensor) -> Any:
    """One rank scales as two."""
    return original(exchange, ctx, grad if exchange.layout.process_group is None else grad * 0.5)


@fault(kills="PIPE-034", at="twinproof.pipeline.modules:_check_now")
def bad_ids_sent_as_zero(original: Any, bags: Any, counts: Any, names: Any, bounds_check: str, engine: Any) -> Any:
    """A bad id of one rank is row 0."""
    return original(bags, counts, names, "ignore", engine)


refused_batches_are_asked = patched(
    "A rank whose batch was refused asks it for its features all the same, where a plan has replicated tables too.",
    mutated(
        "fastimpl.pipeline.input_dist:InputDist.__init__",
        "route.takes_some and segments is not None",
        "route.takes_some",
    ),
    kills="PIPE-551",
    of="fastimpl",
)
