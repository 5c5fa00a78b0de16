"""Faults that ``test_checkpoint`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched
from conformance.offload.planted.planting import altered


@fault(kills="OPT-014", at="twinproof.offload.offloader:OptimizerStateOffloader.load_state_dict")
def load_casts(original: Any, offloader: Any, state_dict: dict[str, Any]) -> None:
    """A load goes through torch's, which casts to the parameter's dtype."""
    offloader.optimizer.load_state_dict(state_dict)


@fault(kills="OPT-050", at="twinproof.offload.offloader:OptimizerStateOffloader.snapshot")
def snapshot_is_live(original: Any, offloader: Any) -> dict[str, Any]:
    """A snapshot is the live state."""
    found: dict[str, Any] = offloader.optimizer.state_dict()
    return found


@fault(kills="OPT-047", at="torch.optim:Optimizer.register_state_dict_pre_hook")
def state_dict_brings_back(original: Any, optimizer: Any, hook: Any, **options: Any) -> Any:
    """A state dict brings everything back to the device."""

    def brings(*arguments: Any) -> Any:
        found = getattr(optimizer, "_twinproof_offloader", None)
        if found is not None:
            found.to_device(found.bundles)
        return hook(*arguments)

    return original(optimizer, brings, **options)


@fault(kills="OPT-053", at="twinproof.offload.offloader:OptimizerStateOffloader.load_state_dict")
def failed_load_half_done(original: Any, offloader: Any, state_dict: dict[str, Any]) -> Any:
    """A load that is refused has changed the groups."""
    for group, other in zip(offloader.optimizer.param_groups, state_dict["param_groups"], strict=False):
        group.update({key: value for key, value in other.items() if key != "params"})
    return original(offloader, state_dict)


@fault(kills="OPT-048", at="twinproof.offload.offloader:OptimizerStateOffloader.load_state_dict")
def counts_forgotten_on_load(original: Any, offloader: Any, state_dict: dict[str, Any]) -> Any:
    """Step counts start again after a load."""
    state = {
        number: {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) and v.dim() == 0 else v for k, v in one.items()}
        for number, one in state_dict["state"].items()
    }
    return original(offloader, {**state_dict, "state": state})


state_left_without_being_kept = patched(
    "What a load left on the device is released while it is copied out.", altered("to_host", "keep", 1), kills="OPT-048"
)


@fault(kills=("OPT-046", "OPT-050", "OPT-052"), at="fastimpl.offload.transfers:StreamedTransfers.settle")
def host_read_too_early(original: Any, offloader: Any) -> Any:
    """Host memory counts as filled as soon as the copy is queued."""


@fault(kills="OPT-375", at="twinproof.offload.offloader:OptimizerStateOffloader.snapshot")
def options_of_a_snapshot_are_live(original: Any, offloader: Any) -> dict[str, Any]:
    """A snapshot has copies of the states alone: options that are tensors or lists are the optimizer's own."""
    snapshot: dict[str, Any] = original(offloader)
    return {**snapshot, "param_groups": offloader.optimizer.state_dict()["param_groups"]}


options_of_a_load_are_taken = patched(
    "A load takes the options of the state dict themselves, where they are tensors or lists.",
    mutated("twinproof.offload.driver:_take_over", "{key: copied(value) for", "{key: value for"),
    kills="OPT-375",
)

counters_of_a_load_are_taken = patched(
    "A load takes counters of the state dict themselves.",
    mutated("twinproof.offload.driver:_settled", "found, leaves = copied(value),", "found, leaves = value,"),
    kills="OPT-375",
)
