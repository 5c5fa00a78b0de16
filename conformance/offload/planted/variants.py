"""Faults that ``test_variants`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched, wrap


def _with(options: dict[str, Any]) -> Any:
    """Steps with other options than the groups have."""

    def around(original: Any, offloader: Any, arithmetic: Any) -> Any:
        groups = offloader.optimizer.param_groups
        before = [{key: group[key] for key in options if key in group} for group in groups]
        for group, old in zip(groups, before, strict=True):
            group.update({key: options[key] for key in old})
        try:
            return original(offloader, arithmetic)
        finally:
            for group, old in zip(groups, before, strict=True):
                group.update(old)

    return wrap("twinproof.offload.offloader:OptimizerStateOffloader._run", around)


maximize_lost = patched("An optimizer with maximize=True minimizes.", _with({"maximize": False}), kills="OPT-028")


@fault(kills="OPT-004", at="twinproof.offload.offloader:OptimizerStateOffloader._run")
def rate_copied(original: Any, offloader: Any, arithmetic: Any) -> Any:
    """A learning rate that is a tensor is copied in the first step."""
    for group in offloader.optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"] = group["lr"].detach().clone()
    return original(offloader, arithmetic)


@fault(kills="OPT-013", at="twinproof.offload.driver:make_bundle", of="refimpl")
def doubles_halved(original: Any, param: Any, tensors: Any) -> Any:
    """States of float64 lie in host memory as float32."""
    bundle = original(param, tensors)
    for name, place in bundle.places.items():
        if place.dtype is torch.float64:
            bundle.places[name] = type(place)(place.offset_bytes, torch.float32, place.shape, place.strides)
    return bundle


@fault(kills="OPT-022", at="twinproof.offload.driver:select")
def smallest_move_first(original: Any, bundles: Any, fraction: float) -> Any:
    """The smallest parameters are selected first, instead of in order."""
    return original(sorted(bundles, key=lambda bundle: bundle.payload_bytes), fraction)


@fault(kills="OPT-018", at="twinproof.offload.driver:MovePlan.adopt")
def listed_once(original: Any, plan: Any, transfers: Any) -> Any:
    """A parameter that is listed twice is stepped once."""
    for group in plan.optimizer.param_groups:
        group["params"] = list(dict.fromkeys(group["params"]))
    return original(plan, transfers)


@fault(kills="OPT-023", at="refimpl.offload:rebind")
def real_part_only(original: Any, optimizer: Any, bundle: Any, name: str, memory: torch.Tensor) -> None:
    """Complex states lose their imaginary part on the way."""
    if memory.is_complex():
        memory.imag.zero_()
    original(optimizer, bundle, name, memory)


@fault(kills="OPT-010", at="twinproof.offload.offloader:OptimizerStateOffloader._run")
def clipped_again(original: Any, offloader: Any, arithmetic: Any) -> Any:
    """Gradients are altered in the step."""
    for param in offloader.plan.known:
        if param.grad is not None:
            param.grad.clamp_(-0.001, 0.001)
    return original(offloader, arithmetic)


_FACTORS = "twinproof.offload.driver:_adafactor_states"
columns_of_matrices_alone = patched(
    "The column factor that is foreseen for Adafactor has no leading dimensions.",
    mutated(_FACTORS, "(*shape[:-2], 1, shape[-1])", "(1, shape[-1])"),
    kills="OPT-496",
)
matrices_taken_for_vectors = patched(
    "Adafactor's states of a matrix are foreseen as those of a vector.",
    mutated(_FACTORS, "len(shape) < 2", "len(shape) < 3"),
    kills="OPT-496",
)
averages_foreseen_flat = patched(
    "The average that is foreseen for ASGD has one dimension.",
    mutated("twinproof.offload.driver:expected_states", '{"ax": probe.detach()}', '{"ax": probe.detach().reshape(-1)}'),
    kills="OPT-496",
)

_SELECT = "twinproof.offload.states:select"
some_foreseen_for_all = patched(
    "States are taken for foreseen where only some parameters have masters.",
    mutated(_SELECT, "all(bundle.payload_bytes", "any(bundle.payload_bytes"),
    kills="OPT-497",
)
nothing_foreseen_weighs_nothing = patched(
    "A parameter of which nothing is foreseen weighs nothing.",
    mutated(_SELECT, "all(bundle.payload_bytes for bundle in bundles)", "True"),
    kills="OPT-497",
)
nothing_foreseen_never_moves = patched(
    "Of an unknown optimizer only what has a master moves.",
    mutated(
        "twinproof.offload.driver:MovePlan._adopt_listed",
        "if tensors or (not self.is_separable and local_of(param).numel()):",
        "if tensors or (self.masters is None and not self.is_separable and local_of(param).numel()):",
    ),
    kills="OPT-497",
)

complex_moments_refused = patched(
    "A moment of complex numbers is taken for one of whole numbers.",
    mutated(
        "twinproof.offload.driver:_check_kind",
        "(value.is_floating_point() or value.is_complex())",
        "value.is_floating_point()",
    ),
    kills="OPT-023",
)
