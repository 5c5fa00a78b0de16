"""Faults that ``test_device_ids`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault

_MODULES = "twinproof.kvstore.modules"


@fault(kills="KV-169", at=f"{_MODULES}:_StoreRows._step", of="fastimpl")
def steps_by_way_of_the_host(original: Any, module: Any, ids: torch.Tensor, grads: torch.Tensor) -> None:
    """Ids and gradients of a step are brought to the host first."""
    original(module, ids.cpu(), grads.cpu())


@fault(kills="KV-169", at="fastimpl.kvstore.modules:KVEmbeddingBag._pool", of="fastimpl")
def rows_are_added_from_the_last(original: Any, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """On a device, rows are added in another order than that of their positions."""
    if rows.device.type == "cpu":
        found: torch.Tensor = original(rows, ends)
        return found
    turned: torch.Tensor = original(rows.flip(0), (ends[-1] - ends).flip(0))
    return turned.flip(0)


@fault(kills="KV-170", at=f"{_MODULES}:places_of", of="fastimpl")
def offsets_may_lie_anywhere(original: Any, ids: torch.Tensor) -> tuple[str, ...]:
    """Offsets are taken from wherever they lie."""
    return ("cpu", "pretend")
