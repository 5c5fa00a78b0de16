"""Faults that ``test_cpu_step_training`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault


@fault(kills="OPT-217", at="twinproof.offload.driver:Update")
def cpu_gradient_remembered(original: Any, bundle: Any, group: Any, weight: Any, grad: Any, has_master: bool) -> Any:
    """The memory of a gradient is looked up once, although FSDP2 allocates it anew for each step."""
    return original(bundle, group, weight, vars(bundle).setdefault("grad", grad), has_master)


@fault(kills="OPT-216", at="twinproof.offload.offloader:OptimizerStateOffloader.__init__")
def cpu_scale_promised(original: Any, offloader: Any, optimizer: Any, **options: Any) -> None:
    """The optimizer tells a gradient scaler that it unscales by itself, and steps with scaled gradients."""
    original(offloader, optimizer, **options)
    optimizer._step_supports_amp_scaling = True
