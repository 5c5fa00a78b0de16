"""Faults in the variants of an optimizer's arithmetic, in what parameters there are, and in which ones move."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import PlantedBug, wrap

BOTH = ("fastimpl", "refimpl")
BASE = "twinproof.offload.offloader:OptimizerStateOffloader"


def _bug(id: str, sentence: str, requirements: tuple[str, ...], patch: Any, target: Any = BOTH) -> PlantedBug:
    return PlantedBug(id, sentence, requirements, target, patch)


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

    return wrap(f"{BASE}._run", around)


def _rate_as_number(original: Any, offloader: Any, arithmetic: Any) -> Any:
    for group in offloader.optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"] = group["lr"].detach().clone()
    return original(offloader, arithmetic)


def _in_half(original: Any, param: Any, tensors: Any) -> Any:
    bundle = original(param, tensors)
    for name, place in bundle.places.items():
        if place.dtype is torch.float64:
            bundle.places[name] = type(place)(place.offset_bytes, torch.float32, place.shape, place.strides)
    return bundle


def _smallest_first(original: Any, bundles: Any, fraction: float) -> Any:
    return original(sorted(bundles, key=lambda bundle: bundle.payload_bytes), fraction)


def _listed_again(original: Any, plan: Any, transfers: Any) -> None:
    for group in plan.optimizer.param_groups:
        group["params"] = list(dict.fromkeys(group["params"]))
    original(plan, transfers)


def _real_part(original: Any, optimizer: Any, bundle: Any, name: str, memory: torch.Tensor) -> None:
    if memory.is_complex():
        memory.imag.zero_()
    original(optimizer, bundle, name, memory)


def _gradients_clipped_again(original: Any, offloader: Any, arithmetic: Any) -> Any:
    for param in offloader.plan.known:
        if param.grad is not None:
            param.grad.clamp_(-0.001, 0.001)
    return original(offloader, arithmetic)


PLANTED = (
    _bug("maximize_lost", "What maximizes is minimized.", ("OPT-028",), _with({"maximize": False})),
    _bug(
        "rate_copied",
        "A learning rate that is a tensor is copied in the first step.",
        ("OPT-004",),
        wrap(f"{BASE}._run", _rate_as_number),
    ),
    _bug(
        "doubles_halved",
        "States of float64 lie in host memory as float32.",
        ("OPT-013",),
        wrap("twinproof.offload.plan:make_bundle", _in_half),
        "refimpl",
    ),
    _bug(
        "smallest_move_first",
        "The selection sorts by size.",
        ("OPT-022",),
        wrap("twinproof.offload.plan:select", _smallest_first),
    ),
    _bug(
        "listed_once",
        "A parameter that is listed twice is stepped once.",
        ("OPT-018",),
        wrap("twinproof.offload.plan:MovePlan.adopt", _listed_again),
    ),
    _bug(
        "real_part_only",
        "Complex states lose their imaginary part on the way.",
        ("OPT-023",),
        wrap("refimpl.offload:rebind", _real_part),
        "refimpl",
    ),
    _bug(
        "clipped_again",
        "Gradients are altered in the step.",
        ("OPT-010",),
        wrap(f"{BASE}._run", _gradients_clipped_again),
    ),
)
