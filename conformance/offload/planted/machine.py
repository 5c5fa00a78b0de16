"""Faults that ``test_machine`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched


@fault(kills="OPT-030", at="twinproof.offload.offloader:OptimizerStateOffloader.load_state_dict", of="fastimpl")
def prefetched_before_the_load(original: Any, offloader: Any, state_dict: Any) -> None:
    """A step uses what was prefetched before a load."""
    offloader.transfers._drop_fetched = lambda: None
    try:
        original(offloader, state_dict)
    finally:
        del offloader.transfers._drop_fetched
    for chunk in offloader.transfers._chunks:
        chunk.version = offloader.transfers._version_of(chunk)


@fault(kills="OPT-030", at="twinproof.offload.offloader:OptimizerStateOffloader.load_state_dict", of="fastimpl")
def loaded_under_a_copy_in(original: Any, offloader: Any, state_dict: Any) -> None:
    """A load writes host memory that a prefetch still reads."""
    offloader.settle_for_writing = offloader.settle
    try:
        original(offloader, state_dict)
    finally:
        del offloader.settle_for_writing


@fault(kills="OPT-260", at="twinproof.offload.offloader:OptimizerStateOffloader.offload")
def copied_once(original: Any, offloader: Any, *flags: Any, **named: Any) -> None:
    """A second offload() before the release takes what the first copied for what is there now."""
    copied_out = offloader._copied_out
    if offloader.options.release == "at_offload" or not copied_out._noted:
        original(offloader, *flags, **named)
        return
    before = set(copied_out._noted)
    copied_out.note(offloader.plan, offloader.transfers, lambda bundle, name: (bundle.param, name) in before)


columns_taken_for_rows = patched(
    "Gradients and weights of a step on the CPU lie by rows, whatever their parameters do.",
    mutated("fastimpl.offload.packing:view_like", "like.stride()", "torch.empty(like.shape, device='meta').stride()"),
    kills="OPT-377",
)


@fault(kills="OPT-377", at="twinproof.offload.driver:Update.advance")
def rate_of_a_tensor_kept(original: Any, update: Any, optimizer: Any) -> Any:
    """A step on the CPU reads a learning rate that is a tensor once, and not what is written there later."""
    rate = update.group["lr"]
    if not isinstance(rate, torch.Tensor):
        return original(update, optimizer)
    first = vars(update.bundle).setdefault("rate", (rate, float(rate)))
    update.group["lr"] = first[1] if first[0] is rate else float(rate)
    try:
        return original(update, optimizer)
    finally:
        update.group["lr"] = rate


options_of_the_old_group = patched(
    "A parameter that changes its group is planned for with the options of the old one.",
    mutated(
        "twinproof.offload.driver:MovePlan._adopt_listed",
        "is_turned = self._flags.get(param, options) != options",
        "is_turned = bool(self._listed) and [f for _, f in self._listed] != list(map(options_on, "
        "self.optimizer.param_groups))",
    ),
    kills="OPT-384",
)

known_for_ever = patched(
    "A parameter that left and comes back is taken for one that has its places.",
    mutated("twinproof.offload.driver:MovePlan._forget_unlisted", "self.known &= listed", "pass"),
    kills="OPT-384",
)
