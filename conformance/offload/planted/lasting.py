"""Faults that ``test_lasting`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched


@fault(kills="OPT-236", at="fastimpl.offload.transfers:StreamedTransfers._drop_fetched")
def slots_pooled(original: Any, offloader: Any) -> None:
    """The slots of a step are held until the next one has its own."""
    if offloader._slots:
        offloader.__dict__["_pool"] = offloader._slots
    original(offloader)


@fault(kills="OPT-242", at="fastimpl.offload.transfers:StreamedTransfers.fetch")
def blocks_left_behind(original: Any, offloader: Any) -> None:
    """Every prefetch leaves 2 KiB on the device, between the activations of its time."""
    original(offloader)
    offloader.__dict__.setdefault("_left", []).append(offloader.engine.device_empty(2048))


@fault(kills="OPT-231", at="twinproof.offload.offloader:OptimizerStateOffloader._run")
def parameters_replaced(original: Any, offloader: Any, arithmetic: Any) -> None:
    """A step gives parameters new memory, and views that the user holds go stale in silence."""
    original(offloader, arithmetic)
    for group in offloader.optimizer.param_groups:
        for param in group["params"]:
            param.data = param.data.clone()


@fault(kills="OPT-232", at="fastimpl.offload.transfers:StreamedTransfers._drop_fetched")
def last_slot_trusted(original: Any, offloader: Any) -> None:
    """What a step left in a released block counts as fetched for the next one."""
    slots = offloader._slots
    original(offloader)
    if len(offloader._chunks) == 1:
        offloader._slots = slots


_KEPT: list[Any] = []


@fault(kills="OPT-234", at="twinproof.offload.driver:MovePlan.host_empty")
def host_memory_kept(original: Any, plan: Any, size_bytes: int) -> Any:
    """Host memory stays allocated after close()."""
    memory = original(plan, size_bytes)
    _KEPT.append(memory)
    return memory


@fault(kills="OPT-235", at="twinproof.offload.states:MasterWeights.end")
def gradients_of_masters_kept(original: Any, masters: Any, some: Any) -> None:
    """The float32 gradients of masters live on after the step."""
    some = list(some)
    masters.__dict__.setdefault("_kept", []).extend(master.grad for master in some)
    original(masters, some)


host_slots_stay = patched(
    "The host memory that gradients and weights of steps on the CPU pass through stays behind close().",
    mutated("fastimpl.offload.cpu_step:HostStep.release", "self._host = []", "pass"),
    kills="OPT-371",
)
counted_when_gone = patched(
    "Host memory is counted after close().",
    mutated(
        "twinproof.offload.offloader:OptimizerStateOffloader._come_back", "self.plan.counts.host_bytes = 0", "pass"
    ),
    kills="OPT-371",
)
counted_beside_the_old = patched(
    "Host memory for steps on the CPU that is made anew, larger, is counted beside the old.",
    mutated(
        "fastimpl.offload.cpu_step:HostStep._make_slots",
        "counts.host_bytes -= sum(slot.numel() for slot in self._host)",
        "pass",
    ),
    kills="OPT-373",
)
counted_when_unplaced = patched(
    "Host memory is counted on when the last parameter in it has gone.",
    mutated("fastimpl.offload.transfers:StreamedTransfers.unplace", "self.plan.counts.host_bytes -= sum(gone)", "pass"),
    kills="OPT-373",
)


always_the_engines = patched(
    "Host memory is the engine's, whatever pin_memory says.",
    mutated("twinproof.offload.driver:MovePlan.host_empty", "if self.options.pin_memory:", "if True:"),
    kills="OPT-393",
)

noted_after_the_end = patched(
    "A closed offloader keeps what it had noted to be let go.",
    mutated("twinproof.offload.offloader:OptimizerStateOffloader._come_back", "self._copied_out.clear()", "pass"),
    kills="OPT-394",
)
