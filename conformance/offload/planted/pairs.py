"""Faults that ``test_pairs`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched

gradients_given_again = patched(
    "A step that calls its base class's gets the gradients of its masters anew in the middle.",
    mutated("twinproof.offload.states:MasterWeights.start", "grad is not given", "grad is not None"),
    kills="OPT-422",
)

shares_of_empty_masters = patched(
    "A master without elements makes a share one of the parameters' bytes instead of all that moves.",
    mutated("twinproof.offload.driver:MovePlan._adopt_listed", "bool(local_of(param).numel())", "True"),
    kills="OPT-422",
)


@fault(kills="OPT-422", at=("fastimpl.offload.transfers:view_of", "refimpl.offload:view_of"))
def last_dimension_first(original: Any, memory: Any, place: Any, offset_bytes: int) -> Any:
    """Matrices in half precision lie in host memory by rows, in whatever order their strides are."""
    found = original(memory, place, offset_bytes)
    is_turned = found.dim() == 2 and found.dtype.itemsize == 2 and min(found.shape) > 1 and found.stride(0) == 1
    return found.as_strided(found.shape, (found.shape[1], 1)) if is_turned else found


back_on_the_device = patched(
    "A step on the CPU takes the state of a parameter that comes back to its group from where that lies.",
    mutated(
        "twinproof.offload.offloader:OptimizerStateOffloader._adopt",
        "self._is_brought |= self.plan.adopt(self.transfers)",
        "self.plan.adopt(self.transfers)",
    ),
    kills="OPT-423",
)

masters_without_dimensions = patched(
    "A master without dimensions moves for a step on the CPU, and its moments, which have no place, do not.",
    mutated(
        "twinproof.offload.driver:MovePlan._adopt_listed", 'tensors or self.options.step_device == "device"', "True"
    ),
    kills="OPT-423",
)

numbers_of_one_group = patched(
    "Parameters of one kernel call that have stepped as often have the numbers of one group.",
    mutated("fastimpl.offload.slot_step:SlotUpdates._call", "key = (number, count)", "key = (0, count)"),
    kills="OPT-423",
)


@fault(kills="OPT-424", at="twinproof.offload.offloader:OptimizerStateOffloader._run")
def refused_steps_counted(original: Any, offloader: Any, arithmetic: Any) -> None:
    """A step on the CPU that is refused is counted."""
    try:
        original(offloader, arithmetic)
    except Exception:
        offloader.plan.counts.step_count += offloader.options.step_device == "cpu"
        raise


masters_twice = patched(
    "Masters beside those that a wrapper keeps are refused for a step on the CPU alone.",
    mutated(
        "twinproof.offload.offloader:OptimizerStateOffloader.__init__",
        'master_weights is not None or step_device == "cpu"',
        'master_weights is not None and step_device == "cpu"',
    ),
    kills="OPT-424",
)

halves_of_masters_stepped = patched(
    "Half-precision parameters without masters are taken for a step on the CPU.",
    mutated("twinproof.offload.driver:check_cpu_step", "param.dtype is not torch.float32", "param.dtype.itemsize > 4"),
    kills="OPT-424",
)
