"""Faults that ``test_wrapper`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault


@fault(kills="KV-156", at="twinproof.kvstore.modules:KVTensorWrapper.get_weights_by_ids")
def wrapper_shows_local_keys(original: Any, wrapper: Any, ids: Any) -> Any:
    """Whole rows that a wrapper reads keep the store's own key, as upstream's did until resharding broke."""
    rows = original(wrapper, ids)
    if rows.dtype == torch.uint8 and rows.numel():
        rows[:, :8] = (ids + wrapper._row_offset).reshape(-1, 1).view(torch.uint8)
    return rows


@fault(kills="KV-157", at="twinproof.kvstore.modules:KVTensorWrapper.set_weights_and_ids")
def wrapper_replaces_keys(original: Any, wrapper: Any, weights: Any, ids: Any) -> Any:
    """A wrapper replaces the keys of rows that are written by the ids, as upstream's does."""
    if weights.dtype == torch.uint8 and weights.shape[0] == ids.numel():
        weights = torch.cat([ids.reshape(-1, 1).view(torch.uint8), weights[:, 8:]], dim=1)
    return original(wrapper, weights, ids)
