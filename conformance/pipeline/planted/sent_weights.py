"""Faults that ``test_sent_weights`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched
from conformance.pipeline.planted.planting import exchanges


@fault(kills="PIPE-118", at="KeyedJaggedTensor._map")
def moved_weights_are_detached(original: Any, batch: Any, move: Any) -> Any:
    """A batch that is moved has weights that no gradient reaches."""
    return original(batch, lambda value: move(value).detach())


@fault(kills="PIPE-113", at=exchanges("weight_gradients"))
def gradients_of_weights_stay_divided(original: Any, exchange: Any, ctx: Any, grads: torch.Tensor) -> torch.Tensor:
    """What comes home is divided by the number of ranks."""
    found: torch.Tensor = original(exchange, ctx, grads) / exchange.layout.world_size
    return found


@fault(kills="PIPE-114", at=exchanges("weight_gradients"))
def no_gradients_of_weights_without_tables(original: Any, exchange: Any, ctx: Any, grads: torch.Tensor) -> torch.Tensor:
    """A rank that holds no table gets no gradient of its weights."""
    found: torch.Tensor = original(exchange, ctx, grads)
    return found if exchange.layout.groups else torch.zeros_like(found)


@fault(kills="PIPE-113", at="fastimpl.pipeline.input_dist:WayHome.by_rank")
def gradients_of_weights_sent_by_slot(original: Any, way: Any, grads: torch.Tensor) -> torch.Tensor:
    """Gradients of weights go back in the order of lookups, not of ranks."""
    return grads


@fault(kills="PIPE-115", at="twinproof.pipeline.modules:KeyValueBags._weight_gradients")
def key_value_weights_weighed_again(original: Any, module: Any, bags: Any, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of a weight at a key-value table is multiplied by the weight."""
    found: torch.Tensor = original(module, bags, grad) * bags.weights
    return found


rows_of_the_next_batch = patched(
    "Rows that were read ahead are taken by whoever looks up as many ids.",
    mutated(
        "fastimpl.pipeline.prefetch:PrefetchedRows.read", "ahead.ids is not ids", "ahead.ids.numel() != ids.numel()"
    ),
    kills="PIPE-493",
)

cut_features_side_by_side = patched(
    "Positions of features that are cut are counted as if they stood side by side in the batch.",
    mutated(
        "fastimpl.pipeline.exchange:AllToAll._segments",
        "positions=where[part.positions]",
        "positions=part.positions + bags.offsets[cut.features[0] * stride]",
    ),
    kills="PIPE-498",
    of="fastimpl",
)

no_weights_of_no_ids = patched(
    "A lookup that received no ids received no weights.",
    mutated(
        "fastimpl.pipeline.input_dist:InputDist._bags",
        "None if weights is None else weights[part]",
        "weights[part] if weights is not None and count else None",
    ),
    kills="PIPE-623",
    of="fastimpl",
)
