"""Faults that ``test_release`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched
from twinproof.offload.states import copied, is_movable


@fault(kills="OPT-250", at="twinproof.offload.offloader:OptimizerStateOffloader.offload")
def flags_ignored(original: Any, offloader: Any, states: bool = True, masters: bool = True, **flags: Any) -> None:
    """offload() ignores its flags."""
    original(offloader)
    if not states and flags.get("offload_optimizer_states"):
        original(offloader, states, **flags)


@fault(kills="OPT-251", at="twinproof.offload.offloader:OptimizerStateOffloader.offload")
def released_at_once(original: Any, offloader: Any, *flags: Any, **named: Any) -> None:
    """offload() releases the device's memory at once."""
    original(offloader, *flags, **named)
    offloader._copied_out.release(offloader.plan, offloader.transfers)


@fault(kills="OPT-251", at="twinproof.offload.offloader:_CopiedOut.release")
def written_in_between(original: Any, copied_out: Any, plan: Any, transfers: Any) -> None:
    """A write between offload() and the release is lost."""

    class Same:
        """Equal to every version."""

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = object.__hash__

    copied_out._noted = {key: (tensor, Same()) for key, (tensor, _) in copied_out._noted.items()}
    original(copied_out, plan, transfers)


@fault(kills="OPT-259", at="twinproof.offload.offloader:OptimizerStateOffloader.offload")
def masters_rounded(original: Any, offloader: Any, *flags: Any, **named: Any) -> None:
    """Masters lose bits when they are copied."""
    original(offloader, *flags, **named)
    if offloader.masters is not None and offloader.options.release == "on_request":
        with torch.no_grad():
            for master in offloader.masters.parameters():
                master.copy_(master.bfloat16())


@fault(kills=("OPT-260", "OPT-261"), at="twinproof.offload.driver:_settled")
def loaded_states_stay_on_the_host(original: Any, plan: Any, group: Any, name: str, value: Any, *, moves: bool) -> Any:
    """A load leaves states in host memory, where a step on request does not look for them."""
    is_left = moves and is_movable(value) and plan.options.release == "on_request"
    return copied(value) if is_left else original(plan, group, name, value, moves=moves)


forgets_the_other_kind = patched(
    "offload() of one kind forgets that the other kind was copied out before.",
    mutated("twinproof.offload.offloader:_CopiedOut.note", "for bundle,", "self._noted = {}\n    for bundle,"),
    kills="OPT-362",
)

place_of_another_as_padding = patched(
    "A hole of one place between neighbours counts as padding, and what it has in host memory is written over.",
    mutated("fastimpl.offload.packing:_runs", ">= ALIGN_BYTES", "> ALIGN_BYTES"),
    kills="OPT-362",
)

other_tensor_of_the_same_version = patched(
    "What was bound between offload() and the release is taken for what was copied where it has seen as many writes.",
    mutated("twinproof.offload.offloader:_CopiedOut._seen", "tensor.data_ptr(), ", "0, "),
    kills="OPT-383",
)

transposes_of_what_was_copied = patched(
    "What is bound between offload() and the release is what was copied wherever it begins where that lies.",
    mutated("twinproof.offload.offloader:_CopiedOut._seen", "data_ptr(), form, ", "data_ptr(), 0, "),
    kills="OPT-591",
)

cast_at_the_release = patched(
    "What is bound between offload() and the release goes to the place that was made for another form.",
    mutated("twinproof.offload.offloader:_CopiedOut.release", "plan.refit(transfers)", "pass"),
    kills="OPT-591",
)

copies_that_went_with_their_place = patched(
    "A state beside one that got a new place is bound there, where nothing was copied.",
    mutated("twinproof.offload.offloader:_CopiedOut.release", "id(bundle) in copied and ", ""),
    kills="OPT-591",
)

bound_copies_are_made_again = patched(
    "What was copied to the host is copied once more when it is to be bound there.",
    mutated("twinproof.offload.offloader:OptimizerStateOffloader.to_host", "copies=copies", "copies=True"),
    kills="OPT-501",
)


@fault(kills="OPT-502", at="twinproof.offload.offloader:OptimizerStateOffloader.reload_offloaded_states")
def the_long_name_brings_nothing(original: Any, offloader: Any) -> None:
    """Of Megatron's two names for it, one leaves states on the host until the step."""
