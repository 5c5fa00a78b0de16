"""Faults of what lasts too long, or not long enough, and of a host that does or waits for too much."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import PlantedBug, wrap

BOTH = ("fastimpl", "refimpl")
BASE = "refimpl.offload.base:OffloaderBase"
FAST = "fastimpl.offload.offloader:OptimizerStateOffloader"
_KEPT: list[Any] = []


def _bug(id: str, sentence: str, requirements: tuple[str, ...], patch: Any, target: Any = BOTH) -> PlantedBug:
    return PlantedBug(id, sentence, requirements, target, patch)


def _params_replaced(original: Any, offloader: Any, arithmetic: Any) -> None:
    original(offloader, arithmetic)
    for group in offloader.optimizer.param_groups:
        for param in group["params"]:
            param.data = param.data.clone()


def _trusts_the_last_slot(original: Any, offloader: Any) -> None:
    slots = offloader._slots
    original(offloader)
    if len(offloader._chunks) == 1:
        offloader._slots = slots


def _host_memory_kept(original: Any, offloader: Any, size_bytes: int) -> Any:
    memory = original(offloader, size_bytes)
    _KEPT.append(memory)
    return memory


def _gradients_kept(original: Any, masters: Any, some: Any) -> None:
    some = list(some)
    masters.__dict__.setdefault("_kept", []).extend(master.grad for master in some)
    original(masters, some)


def _dithered(original: Any, offloader: Any, arithmetic: Any) -> None:
    original(offloader, arithmetic)
    param = offloader.optimizer.param_groups[0]["params"][0]
    with torch.no_grad():
        param.add_(torch.rand_like(param), alpha=1e-3)


def _waits_for_the_device(original: Any, offloader: Any) -> None:
    event = offloader.engine.event()
    offloader.engine.record(event, offloader.engine.current())
    offloader.engine.synchronize(event)
    original(offloader)


def _looks_around(original: Any, offloader: Any) -> None:
    for _ in offloader.bundles:
        offloader.residency()
    original(offloader)


PLANTED = (
    _bug(
        "parameters_replaced",
        "A step gives parameters new memory, and views that the user holds go stale in silence.",
        ("OPT-231",),
        wrap(f"{BASE}._run", _params_replaced),
    ),
    _bug(
        "last_slot_trusted",
        "What a step left in a released block counts as fetched for the next one.",
        ("OPT-232",),
        wrap(f"{FAST}._drop_fetched", _trusts_the_last_slot),
        "fastimpl",
    ),
    _bug(
        "host_memory_kept",
        "Host memory stays allocated after close().",
        ("OPT-234",),
        wrap(f"{BASE}.host_empty", _host_memory_kept),
    ),
    _bug(
        "gradients_of_masters_kept",
        "The float32 gradients of masters live on after the step.",
        ("OPT-235",),
        wrap("refimpl.offload.masters:MasterWeights.end", _gradients_kept),
    ),
    _bug(
        "update_dithered",
        "An update is rounded at random, so that no two runs are equal.",
        ("OPT-240",),
        wrap(f"{BASE}._run", _dithered),
    ),
    _bug(
        "reads_wait_for_the_device",
        "A read of host memory waits for the whole compute stream.",
        ("OPT-239",),
        wrap(f"{FAST}.settle", _waits_for_the_device),
        "fastimpl",
    ),
    _bug(
        "prefetch_looks_at_everything",
        "prefetch() looks at every tensor once for each parameter.",
        ("OPT-238",),
        wrap(f"{FAST}.prefetch", _looks_around),
        "fastimpl",
    ),
)
