"""Faults in what is stepped, what is moved, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from conformance.harness import PlantedBug, swap, wrap
from twinproof.errors import TwinproofError

BOTH = ("fastimpl", "refimpl")
BASE = "twinproof.offload.offloader:OptimizerStateOffloader"
STATES = "twinproof.offload.states"
FAST = "fastimpl.offload.transfers:StreamedTransfers"
_KEPT: list[Any] = []


def _bug(id: str, sentence: str, requirements: tuple[str, ...], patch: Any, target: Any = BOTH) -> PlantedBug:
    return PlantedBug(id, sentence, requirements, target, patch)


def _first_options(original: Any, offloader: Any, arithmetic: Any) -> Any:
    groups = offloader.optimizer.param_groups
    now = [dict(group) for group in groups]
    for group in groups[1:]:
        group.update({key: value for key, value in groups[0].items() if key != "params"})
    try:
        return original(offloader, arithmetic)
    finally:
        for group, current in zip(groups, now, strict=True):
            group.update(current)


def _single_tensor(original: Any, offloader: Any, arithmetic: Any) -> Any:
    groups = offloader.optimizer.param_groups
    now = [(group.get("foreach"), group.get("fused")) for group in groups]
    for group in groups:
        group.update(foreach=False, fused=False)
    try:
        return original(offloader, arithmetic)
    finally:
        for group, (foreach, fused) in zip(groups, now, strict=True):
            group.update(foreach=foreach, fused=fused)


def _overflow_unseen(original: Any, offloader: Any, arithmetic: Any) -> Any:
    found = getattr(offloader.optimizer, "found_inf", None)
    if found is not None:
        offloader.optimizer.found_inf = torch.zeros_like(found)
    return original(offloader, arithmetic)


def _never_steps_on_overflow(original: Any, offloader: Any) -> Any:
    # The gradients are dropped with the state's residency.
    for group in offloader.optimizer.param_groups:
        for param in group["params"]:
            param.grad = None
    return original(offloader)


def _overlapping(original: Any, param: Any, tensors: Any) -> Any:
    bundle = original(param, tensors)
    for name, place in bundle.places.items():
        bundle.places[name] = type(place)(place.offset_bytes // 2, place.dtype, place.shape, place.strides)
    return bundle


def _no_empty_params(original: Any, transfers: Any, params: Any, arithmetic: Any) -> Any:
    return original(transfers, {param for param in params if param.numel()}, arithmetic)


def _first_params_only(original: Any, plan: Any, transfers: Any) -> Any:
    if not plan.known:
        original(plan, transfers)


def _groups_left(original: Any, transfers: Any, params: Any, arithmetic: Any) -> Any:
    optimizer = transfers.plan.optimizer
    groups = optimizer.param_groups
    try:
        return original(transfers, params, arithmetic)
    except Exception:
        optimizer.param_groups = [dict(group) for group in groups]
        raise


def _steps_on_attachment(original: Any, offloader: Any, *arguments: Any, **options: Any) -> None:
    original(offloader, *arguments, **options)
    for group in offloader.optimizer.param_groups:
        for param in group["params"]:
            offloader.optimizer.state[param]["exp_avg"] = torch.zeros_like(param)


def _hooked_arithmetic(kind: Any) -> Any:
    return kind.step


def _closure_for_each_chunk(original: Any, driver: Any) -> Any:
    def run(run_once: Any) -> Any:
        return run_once

    made = original(driver)
    arithmetic, optimizer = driver._arithmetic, driver.optimizer

    def step(closure: Any = None) -> Any:
        value = [None]

        def each(*_: Any) -> None:
            if closure is not None:
                value[0] = closure()
            arithmetic(optimizer)

        driver.run(lambda: each())
        return value[0]

    del run
    step.__func__ = made.__func__  # type: ignore[attr-defined]
    return step


def _keeps_attached(original: Any, offloader: Any) -> None:
    offloader.settle()


def _by_count(bundles: Any, fraction: float) -> Any:
    return list(bundles)[: round(fraction * len(bundles) / 2)]


def _kept_for_ever(original: Any, offloader: Any, *arguments: Any, **options: Any) -> None:
    _KEPT.append(offloader)
    original(offloader, *arguments, **options)


@contextmanager
def _nothing_refused() -> Iterator[None]:
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


def _clamped(original: Any, offloader: Any, optimizer: Any, *, engine: Any = None, **options: Any) -> None:
    known = {"master_weights": options.get("master_weights"), "slots": 2}
    original(offloader, optimizer, engine=engine, **known)


class _FreshScalars:
    """Moves scalars as well, by making new ones."""

    @staticmethod
    def step(original: Any, offloader: Any, arithmetic: Any) -> Any:
        result = original(offloader, arithmetic)
        for state in offloader.optimizer.state.values():
            for name, value in list(state.items()):
                if isinstance(value, torch.Tensor) and value.dim() == 0:
                    state[name] = value.clone()
        return result


def _none_for_shards(original: Any, optimizer: Any, param: Any, group: Any) -> Any:
    return {} if hasattr(param, "_local_tensor") else original(optimizer, param, group)


PLANTED = (
    _bug(
        "sharded_states_left",
        "The states of DTensors stay on the device (pytorch #144397).",
        ("OPT-080", "OPT-081"),
        wrap("twinproof.offload.plan:expected_states", _none_for_shards),
    ),
    _bug(
        "first_groups_options",
        "All groups use the first one's options.",
        ("OPT-006",),
        wrap(f"{BASE}._run", _first_options),
    ),
    _bug(
        "always_single_tensor",
        "Fused optimizers are stepped unfused.",
        ("OPT-002",),
        wrap(f"{BASE}._run", _single_tensor),
    ),
    _bug(
        "overflow_unseen",
        "A scaler's overflow flag does not reach the step.",
        ("OPT-011",),
        wrap(f"{BASE}._run", _overflow_unseen),
    ),
    _bug(
        "gradients_dropped",
        "offload() takes the gradients with it.",
        ("OPT-009",),
        wrap(f"{BASE}.offload", _never_steps_on_overflow),
    ),
    _bug(
        "places_overlap",
        "Two states of a parameter share memory.",
        ("OPT-001", "OPT-020"),
        wrap("twinproof.offload.plan:make_bundle", _overlapping),
    ),
    _bug(
        "empty_params_dropped",
        "Empty parameters are in no part.",
        ("OPT-016",),
        wrap(f"{FAST}._update", _no_empty_params),
        "fastimpl",
    ),
    _bug(
        "new_params_unseen",
        "Parameters of a later group are not offloaded.",
        ("OPT-036",),
        wrap("twinproof.offload.plan:MovePlan.adopt", _first_params_only),
    ),
    _bug(
        "groups_not_restored",
        "An exception leaves other groups behind.",
        ("OPT-034",),
        wrap(f"{FAST}._update", _groups_left),
        "fastimpl",
    ),
    _bug(
        "state_made_by_attachment",
        "Attachment makes state.",
        ("OPT-031",),
        wrap(f"{BASE}.__init__", _steps_on_attachment),
    ),
    _bug(
        "hooks_for_each_chunk",
        "Step hooks run for each chunk.",
        ("OPT-027",),
        swap("twinproof.offload.driver:arithmetic_of", _hooked_arithmetic),
    ),
    _bug(
        "closure_for_each_chunk",
        "A closure runs for each chunk.",
        ("OPT-026",),
        wrap("twinproof.offload.driver:StepDriver._make", _closure_for_each_chunk),
        "fastimpl",
    ),
    _bug(
        "close_keeps_attached",
        "close() leaves the optimizer taken over.",
        ("OPT-038",),
        wrap(f"{BASE}.close", _keeps_attached),
    ),
    _bug(
        "fraction_by_count",
        "The fraction counts parameters.",
        ("OPT-021",),
        swap("twinproof.offload.plan:select", _by_count),
    ),
    _bug(
        "offloader_kept", "A global list keeps every offloader.", ("OPT-037",), wrap(f"{BASE}.__init__", _kept_for_ever)
    ),
    _bug(
        "anything_attached",
        "No optimizer is refused.",
        ("OPT-024", "OPT-040", "OPT-255"),
        _nothing_refused,
    ),
    _bug(
        "options_corrected",
        "Options out of range are replaced in silence.",
        ("OPT-074",),
        wrap(f"{BASE}.__init__", _clamped),
    ),
    _bug("scalars_replaced", "Scalar states are moved too.", ("OPT-029",), wrap(f"{BASE}._run", _FreshScalars.step)),
    _bug(
        "capture_ignored",
        "A step is recorded into a graph.",
        ("OPT-045",),
        swap("conformance.provers.virtual_device.engine:VirtualEngine.is_capturing", lambda engine: False),
    ),
)
