"""Faults that ``test_waiting`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, patched
from conformance.offload.planted.planting import altered

copy_in_under_a_copy_out = patched(
    "A slot is filled while the chunk that used it is still copied out.", altered("_fetch", "wait", 2), kills="OPT-237"
)


@fault(kills="OPT-240", at="twinproof.offload.offloader:OptimizerStateOffloader._run")
def update_dithered(original: Any, offloader: Any, arithmetic: Any) -> None:
    """An update is rounded at random, so that no two runs are equal."""
    original(offloader, arithmetic)
    param = offloader.optimizer.param_groups[0]["params"][0]
    with torch.no_grad():
        param.add_(torch.rand_like(param), alpha=1e-3)


@fault(kills="OPT-239", at="fastimpl.offload.transfers:StreamedTransfers.settle")
def reads_wait_for_the_device(original: Any, offloader: Any) -> None:
    """A read of host memory waits for the whole compute stream."""
    event = offloader.engine.event()
    offloader.engine.record(event, offloader.engine.current())
    offloader.engine.synchronize(event)
    original(offloader)


@fault(kills="OPT-238", at="fastimpl.offload.transfers:StreamedTransfers.fetch")
def prefetch_looks_at_everything(original: Any, transfers: Any) -> None:
    """prefetch() looks at every tensor once for each parameter."""
    for _ in transfers.plan.bundles:
        for _, _, tensor in transfers.plan.bound():
            transfers.is_on_host(tensor)
    original(transfers)
