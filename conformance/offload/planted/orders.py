"""Faults that ``test_orders`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault
from twinproof.offload.states import bindings


@fault(kills="OPT-340", at="twinproof.offload.driver:MovePlan._forget_unlisted")
def state_goes_with_its_parameter(original: Any, plan: Any, transfers: Any) -> None:
    """The state of a parameter that leaves its group is dropped, and missing when the parameter comes back."""
    before = [bundle.param for bundle in plan.bundles]
    original(plan, transfers)
    kept = {bundle.param for bundle in plan.bundles}
    for param in before:
        if param not in kept:
            plan.optimizer.state.pop(param, None)


@fault(kills="OPT-340", at="fastimpl.offload.transfers:StreamedTransfers._update_chunk")
def replaced_state_lost(original: Any, transfers: Any, number: int, chunk: Any, arithmetic: Any) -> None:
    """A step takes states from where they were copied to, also those that were replaced after that."""
    for bundle in chunk.bundles:
        for name, tensor in list(bindings(transfers.plan.optimizer, bundle)):
            if bundle.places[name].fits(tensor) and not transfers.is_on_host(tensor):
                transfers._bind(bundle, name, chunk.memory, 0)
    original(transfers, number, chunk, arithmetic)


@fault(kills=("OPT-342", "OPT-372"), at="fastimpl.offload.chunks:Chunk.forget_here")
def released_block_held(original: Any, chunk: Any) -> None:
    """A chunk goes on holding the block of the device from which its states have left."""


@fault(kills="OPT-341", at=("fastimpl.offload.transfers:StreamedTransfers.release", "refimpl.offload:Blocking.release"))
def memory_of_closed_held(original: Any, transfers: Any) -> None:
    """A closed offloader goes on holding its host memory, as long as somebody holds it."""
