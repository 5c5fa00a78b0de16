"""Faults that ``test_places`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched, swap
from twinproof.offload.states import MASTER


@fault(kills="OPT-270", at="refimpl.offload:rebind")
def states_stay_on_the_host(original: Any, optimizer: Any, bundle: Any, name: str, memory: torch.Tensor) -> None:
    """States are bound to a copy on the host where they should be on the device."""
    original(optimizer, bundle, name, memory if name == MASTER else memory.cpu())


@fault(kills="OPT-270", at="fastimpl.offload.transfers:StreamedTransfers._show_as_planned")
def chunks_stay_on_the_host(original: Any, transfers: Any, chunk: Any, slot: torch.Tensor) -> Any:
    """The states of a chunk are bound to a copy on the host where they should be in the slot."""
    return original(transfers, chunk, slot.cpu())


@fault(kills="OPT-271", at="twinproof.offload.driver:MovePlan.host_empty")
def pageable_homes(original: Any, plan: Any, size_bytes: int) -> torch.Tensor:
    """States live in memory that is not pinned."""
    return torch.empty(size_bytes, dtype=torch.uint8)


@fault(kills="OPT-346", at="twinproof.offload.offloader:OptimizerStateOffloader._state_of_a_copy")
def copies_with_states_of_the_host(original: Any, offloader: Any) -> Any:
    """A copy has the states where they lie between steps."""
    return torch.optim.Optimizer.__getstate__(offloader.optimizer)


@fault(kills="OPT-347", at="twinproof.offload.offloader:OptimizerStateOffloader._run")
def states_of_a_cpu_step_left_on_the_device(original: Any, offloader: Any, arithmetic: Any) -> None:
    """A step on the CPU begins with states on the device, where a copy was made."""
    offloader._is_brought = False
    original(offloader, arithmetic)


counters_stay_on_the_device = patched(
    "A loaded counter stays on the device where it was saved, and each step waits for it.",
    mutated("twinproof.offload.driver:_settled", "return found.cpu()", "return found"),
    kills="OPT-349",
)

counters_beside_masters = patched(
    "Counters that torch's load put beside masters on the host stay there.",
    swap("twinproof.offload.offloader:place_scalars", lambda plan: None),
    kills="OPT-454",
)

counters_of_fused_alone = patched(
    "Counters of a capturable optimizer do.",
    mutated("twinproof.offload.driver:lies_on_device", 'or group.get("capturable")', ""),
    kills="OPT-454",
)

counters_by_options_of_before = patched(
    "A load places counters by the options that the group had before.",
    mutated(
        "twinproof.offload.driver:_take_over",
        "group.update(options)",
        "before = dict(group); group.update(options); group = before",
    ),
    kills="OPT-523",
)
