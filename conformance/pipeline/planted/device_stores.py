"""Faults that ``test_device_stores`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault

_ROWS = "twinproof.pipeline.modules:StoreRows"


@fault(kills="PIPE-339", at="fastimpl.pipeline.prefetch:PrefetchedRows._read_again")
def rows_ahead_stay_as_they_were(original: Any, rows: Any, ahead: Any, stepped: torch.Tensor) -> None:
    """On a device, rows that were read ahead are not read again when they are stepped."""
    if stepped.device.type == "cpu":
        original(rows, ahead, stepped)


@fault(kills="PIPE-339", at=f"{_ROWS}.step")
def gradients_from_the_last(original: Any, rows: Any, ids: torch.Tensor, grads: torch.Tensor, hyper: Any) -> None:
    """On a device, gradients of an id are summed from the last to the first."""
    if ids.device.type != "cpu":
        order = torch.arange(ids.numel() - 1, -1, -1, device=ids.device)
        ids, grads = ids[order], grads[order]
    original(rows, ids, grads, hyper)


@fault(kills="PIPE-340", at=f"{_ROWS}.read")
def ids_go_through_the_host(original: Any, rows: Any, ids: torch.Tensor) -> torch.Tensor:
    """Rows are read with ids on the host, and sent to where the ids were."""
    found: torch.Tensor = original(rows, ids.cpu())
    return found.to(ids.device)


@fault(kills="PIPE-340", at="twinproof.pipeline.sharding:KeyValue.checked_owners")
def ends_of_ranks_are_sent(original: Any, kind: Any, ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Which rank a bucket is of is looked up in a list that is sent to the device each time."""
    found: torch.Tensor = original(kind, ids, *arguments)
    return found + torch.zeros(1, dtype=torch.int64).to(found.device)
