"""Faults that ``test_second_uses`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched

masters_of_64_bits = patched(
    "Parameters of 64 bits get masters that do not hold them.",
    mutated("twinproof.offload.states:MasterWeights.__init__", " or param.dtype.itemsize > 4", ""),
    kills="OPT-486",
)

own_masters_loaded_twice = patched(
    "A load writes float32 parameters once more with what they were just loaded with.",
    mutated("twinproof.offload.states:MasterWeights.load", "if param is not master:", "if True:"),
    kills="OPT-487",
)

gradients_given_once = patched(
    "Masters are given a gradient of the model once, although they lost it since.",
    mutated("twinproof.offload.states:_take_grad", "master.given = None", "pass"),
    kills="OPT-488",
)

large_states_one_by_one = patched(
    "Large states are copied one by one also where no device has memory of its own.",
    mutated("fastimpl.offload.packing:_split", " or not engine.stands_for_device", ""),
    kills="OPT-489",
    of="fastimpl",
)

classes_of_parameters_not_looked_at = patched(
    "A parameter of a class of its own is given to the kernel.",
    mutated(
        "fastimpl.offload.slot_step:_why_not_param",
        "if not (_is_plain(param) and _is_plain(grad)):",
        "if not _is_plain(grad):",
    ),
    kills="OPT-490",
    of="fastimpl",
)

counters_are_tensors = patched(
    "A counter is taken for a tensor.",
    mutated("fastimpl.offload.slot_step:_add", "not isinstance(step, torch.Tensor) or ", ""),
    kills="OPT-491",
    of="fastimpl",
)


@fault(kills="OPT-492", at="inspect:getsource", of="fastimpl")
def offload_promises_of_a_library(original: Any, module: Any) -> str:
    """The component promises what its library does, whether it was built or not."""
    return str(original(module)).replace("if ops.available() else ()", "if True else ()")


rest_of_a_step_is_everything = patched(
    "What is not stepped on the CPU is stepped by torch together with what is.",
    mutated("twinproof.offload.states:narrowed", "if param in params]", "if True]"),
    kills="OPT-494",
)
