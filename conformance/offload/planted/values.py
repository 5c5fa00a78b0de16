"""Faults that ``test_values`` must notice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from conformance.harness import fault, patched, swap, wrap
from conformance.offload.planted.planting import altered
from twinproof.errors import TwinproofError


@fault(kills="OPT-006", at="twinproof.offload.offloader:OptimizerStateOffloader._run")
def first_groups_options(original: Any, offloader: Any, arithmetic: Any) -> Any:
    """All groups use the first one's options."""
    groups = offloader.optimizer.param_groups
    now = [dict(group) for group in groups]
    for group in groups[1:]:
        group.update({key: value for key, value in groups[0].items() if key != "params"})
    try:
        return original(offloader, arithmetic)
    finally:
        for group, current in zip(groups, now, strict=True):
            group.update(current)


@fault(kills="OPT-002", at="twinproof.offload.offloader:OptimizerStateOffloader._run")
def always_single_tensor(original: Any, offloader: Any, arithmetic: Any) -> Any:
    """Fused and foreach optimizers run their single-tensor code."""
    groups = offloader.optimizer.param_groups
    now = [(group.get("foreach"), group.get("fused")) for group in groups]
    for group in groups:
        group.update(foreach=False, fused=False)
    try:
        return original(offloader, arithmetic)
    finally:
        for group, (foreach, fused) in zip(groups, now, strict=True):
            group.update(foreach=foreach, fused=fused)


@fault(kills="OPT-011", at="twinproof.offload.offloader:OptimizerStateOffloader._run")
def overflow_unseen(original: Any, offloader: Any, arithmetic: Any) -> Any:
    """A scaler's overflow flag does not reach the step."""
    found = getattr(offloader.optimizer, "found_inf", None)
    if found is not None:
        offloader.optimizer.found_inf = torch.zeros_like(found)
    return original(offloader, arithmetic)


@fault(kills="OPT-009", at="twinproof.offload.offloader:OptimizerStateOffloader.offload")
def gradients_dropped(original: Any, offloader: Any) -> Any:
    """offload() takes the gradients with it."""
    # The gradients are dropped with the state's residency.
    for group in offloader.optimizer.param_groups:
        for param in group["params"]:
            param.grad = None
    return original(offloader)


@fault(kills=("OPT-001", "OPT-020"), at="twinproof.offload.driver:make_bundle")
def places_overlap(original: Any, param: Any, tensors: Any) -> Any:
    """Two states of a parameter share memory."""
    bundle = original(param, tensors)
    for name, place in bundle.places.items():
        bundle.places[name] = type(place)(place.offset_bytes // 2, place.dtype, place.shape, place.strides)
    return bundle


@fault(kills="OPT-016", at="fastimpl.offload.transfers:StreamedTransfers._update")
def empty_params_dropped(original: Any, transfers: Any, params: Any, arithmetic: Any) -> Any:
    """Empty parameters are left out of every chunk."""
    return original(transfers, {param for param in params if param.numel()}, arithmetic)


@fault(kills="OPT-027", at="twinproof.offload.driver:arithmetic_of")
def hooks_for_each_chunk(original: Any, kind: Any) -> Any:
    """Step hooks run for each chunk."""
    return kind.step


@fault(kills="OPT-026", at="twinproof.offload.driver:StepDriver._make", of="fastimpl")
def closure_for_each_chunk(original: Any, driver: Any) -> Any:
    """A closure runs for each chunk."""
    made = original(driver)
    arithmetic, optimizer = driver._arithmetic, driver.optimizer

    def step(closure: Any = None) -> Any:
        value = [None]

        def each(some: Any = optimizer) -> None:
            if closure is not None:
                value[0] = closure()
            arithmetic(some)

        driver.run(each)
        return value[0]

    step.__func__ = made.__func__  # type: ignore[attr-defined]
    return step


@fault(kills="OPT-021", at="twinproof.offload.driver:select")
def fraction_by_count(original: Any, bundles: Any, fraction: float) -> Any:
    """The fraction counts parameters instead of bytes."""
    return list(bundles)[: round(fraction * len(bundles) / 2)]


@fault(kills=("OPT-024", "OPT-040", "OPT-255"))
def anything_attached() -> Iterator[None]:
    """No optimizer is refused."""

    def any_kind(original: Any, given: Any) -> Any:
        try:
            return original(given)
        except TwinproofError:
            return torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1), []

    with (
        wrap("twinproof.offload.offloader:unwrapped", any_kind)(),
        swap("twinproof.offload.offloader:check_attachment", lambda optimizer: None)(),
    ):
        yield


@fault(kills="OPT-017", at="twinproof.offload.states:dense_strides")
def strides_lost(original: Any, tensor: torch.Tensor) -> tuple[int, ...]:
    """State comes back contiguous."""
    return tuple(torch.empty(tensor.shape, device="meta").stride())


@fault(kills="OPT-003", at="twinproof.offload.offloader:OptimizerStateOffloader._run")
def options_of_attachment(original: Any, offloader: Any, arithmetic: Any) -> Any:
    """The learning rate is that of attachment."""
    groups = offloader.optimizer.param_groups
    first = offloader.__dict__.setdefault("_first", [{k: v for k, v in g.items() if k != "params"} for g in groups])
    now = [dict(group) for group in groups]
    for group, then in zip(groups, first, strict=False):
        group.update(then)
    try:
        return original(offloader, arithmetic)
    finally:
        for group, current in zip(groups, now, strict=True):
            group.update(current)


@fault(kills="OPT-015", at="twinproof.offload.driver:copied")
def values_quieted(original: Any, value: Any) -> Any:
    """NaN payloads and signed zeros are lost in a load."""
    return value.detach() + 0 if isinstance(value, torch.Tensor) else original(value)


slot_written_while_in_use = patched(
    "A slot is filled before the copy out of the chunk that used it.",
    altered("_fetch", "wait", 2),
    kills=("OPT-006", "OPT-007"),
)


@fault(kills=("OPT-016", "OPT-017"), at="conformance.provers.virtual_device.engine:VirtualEngine.keep", of="fastimpl")
def slots_not_kept(original: Any, engine: Any, tensor: Any, stream: Any) -> Any:
    """Slots go back to the allocator while copies still use them."""
