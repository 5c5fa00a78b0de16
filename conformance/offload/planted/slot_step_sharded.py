"""Faults that ``test_slot_step_sharded`` must notice."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Replicate

from conformance.harness import fault, mutated, patched


@fault(kills="OPT-343", at="fastimpl.offload.slot_step:_why_not_param")
def slot_shards_left_to_torch(original: Any, param: Any, grad: Any, **options: Any) -> str:
    """Each DTensor is left to torch."""
    return "a DTensor" if hasattr(param, "_local_tensor") else str(original(param, grad, **options))


@fault(kills="OPT-343", at="fastimpl.offload.slot_step:SlotUpdates._call")
def slot_shards_without_versions(original: Any, updates: Any, kind: str, call: Any) -> None:
    """Autograd does not see that the DTensor of a shard has changed."""
    call.wrappers.clear()
    original(updates, kind, call)


@fault(kills="OPT-344", at="fastimpl.offload.slot_step:SlotUpdates._why_not")
def slot_shards_beside_others(original: Any, updates: Any, group: Any) -> str:
    """A group of DTensors and other tensors is updated by the kernel."""
    found = str(original(updates, group))
    return "" if found.startswith("DTensors beside") else found


@fault(kills="OPT-344", at="fastimpl.offload.slot_step:_shards_of")
def slot_sums_that_are_not_made(original: Any, tensor: Any) -> Any:
    """A gradient that is still to be summed over the ranks is taken as it is."""
    found = original(tensor)
    if found is None:
        return None
    mesh, placements, shape = found
    return mesh, tuple(Replicate() if each.is_partial() else each for each in placements), shape


slot_sums_of_both = patched(
    "A parameter and a gradient that are both still to be summed are given to the kernel.",
    mutated(
        "fastimpl.offload.slot_step:_why_not_param",
        " or (shards and any(placement.is_partial() for placement in shards[1]))",
        "",
    ),
    kills="OPT-493",
    of="fastimpl",
)

slot_states_sharded_as_they_like = patched(
    "Nobody looks how states are sharded.",
    mutated("fastimpl.offload.slot_step:_add", "if any(_shards_of(state) != shards for state in states):", "if False:"),
    kills="OPT-493",
    of="fastimpl",
)
