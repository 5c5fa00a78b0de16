"""Faults that ``test_surroundings`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched

counts_on_the_default_device = patched(
    "The count of a first step on the CPU lies on the default device of the process.",
    mutated("twinproof.offload.driver:prepare_states", 'dtype=scalar, device="cpu"', "dtype=scalar"),
    kills="OPT-378",
)

closures_without_gradients = patched(
    "A closure is evaluated in the grad mode of the caller.",
    mutated(
        "twinproof.offload.driver:StepDriver._step_known",
        "torch.enable_grad()",
        "torch.autograd.profiler.record_function('closure')",
    ),
    kills="OPT-348",
)
counts_in_single_precision = patched(
    "The count of a first step on the CPU is float32 whatever the default dtype is.",
    mutated("twinproof.offload.driver:prepare_states", "torch.float64 if", "torch.float32 if"),
    kills="OPT-348",
)


@fault(kills="OPT-450", at="twinproof.offload.offloader:OptimizerStateOffloader.__init__", of="fastimpl")
def attached_in_the_mode_of_the_caller(original: Any, offloader: Any, *arguments: Any, **options: Any) -> None:
    """Host memory of an offloader that is made in inference mode is of that mode."""
    original.__wrapped__(offloader, *arguments, **options)


@fault(kills="OPT-450", at="twinproof.offload.offloader:OptimizerStateOffloader.to_device")
def brought_in_the_mode_of_the_caller(original: Any, offloader: Any, *arguments: Any, **options: Any) -> None:
    """What is brought to the device in inference mode is of that mode."""
    original.__wrapped__(offloader, *arguments, **options)


@fault(kills="OPT-450", at="twinproof.offload.offloader:OptimizerStateOffloader.load_state_dict")
def loaded_in_the_mode_of_the_caller(original: Any, offloader: Any, state_dict: Any) -> None:
    """What is loaded in inference mode is of that mode."""
    original.__wrapped__(offloader, state_dict)
