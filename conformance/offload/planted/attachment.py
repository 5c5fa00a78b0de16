"""Faults that ``test_attachment`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched
from conformance.offload.planted.planting import altered

host_read_before_it_was_written = patched(
    "A copy in does not wait for the copy out of what was on the device.", altered("_fetch", "wait", 1), kills="OPT-087"
)


@fault(kills="OPT-035", at="twinproof.offload.driver:MovePlan.adopt")
def taken_over_before_there_is_memory(original: Any, plan: Any, transfers: Any) -> Any:
    """Attachment that fails leaves a step that is not the optimizer's own."""
    if not plan.known:
        plan.optimizer.step = plan.optimizer.step
    return original(plan, transfers)


@fault(kills="OPT-244", at="twinproof.offload.driver:check_plain")
def quantized_taken_for_bytes(original: Any, value: Any, where: Any) -> Any:
    """A state of several tensors, as torchao's low-bit optimizers have, is moved as if it were one."""


@fault(kills="OPT-245", at="twinproof.offload.driver:MovePlan.host_empty")
def host_memory_rounded(original: Any, plan: Any, size_bytes: int) -> Any:
    """Each block of host memory is rounded up to a power of two (pytorch #150517)."""
    return original(plan, 1 << max(size_bytes - 1, 0).bit_length())[:size_bytes]


placeless_by_name = patched(
    "A state without a place is remembered by its name, so that those of its neighbours stay in the slot.",
    mutated(
        "fastimpl.offload.transfers:StreamedTransfers._settle_down",
        "if (id(bundle), name) not in self._strangers:",
        "if name not in {stranger for _, stranger in self._strangers}:",
    ),
    kills="OPT-433",
    of="fastimpl",
)

half_attached = patched(
    "Attachment whose first move fails leaves the optimizer taken over.",
    mutated(
        "twinproof.offload.offloader:OptimizerStateOffloader._detach",
        "self._driver.detach(lambda: None if masters is None else masters.attach(self.optimizer))",
        "pass",
    ),
    kills="OPT-443",
)

last_failure_told = patched(
    "Attachment whose way back fails, too, raises that in place of why it failed.",
    mutated("twinproof.offload.offloader:OptimizerStateOffloader.__init__", "raise error", "raise"),
    kills="OPT-453",
)

masters_let_go_first = patched(
    "Masters run with their plain optimizer no more when the first move fails.",
    mutated(
        "twinproof.offload.offloader:OptimizerStateOffloader.__init__",
        "self._others_depth = 0",
        "self._others_depth = 0 if master_weights is None else master_weights.detach() or 0",
    ),
    kills="OPT-443",
)


@fault(kills="OPT-445", at="twinproof.offload.offloader:OptimizerStateOffloader.__reduce_ex__")
def offloaders_copied(original: Any, offloader: Any, protocol: Any) -> Any:
    """A copy of an offloader holds everything and drives no step."""
    return object.__reduce_ex__(offloader, 4)
