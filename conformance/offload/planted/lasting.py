"""Faults of what lasts too long, or not long enough, and of a host that does or waits for too much."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import PlantedBug, swap, wrap
from conformance.offload.planted.ordering import altered

BOTH = ("fastimpl", "refimpl")
BASE = "twinproof.offload.offloader:OptimizerStateOffloader"
FAST = "fastimpl.offload.transfers:StreamedTransfers"
_KEPT: list[Any] = []


def _bug(id: str, sentence: str, requirements: tuple[str, ...], patch: Any, target: Any = BOTH) -> PlantedBug:
    return PlantedBug(id, sentence, requirements, target, patch)


def _home_of_all(original: Any, offloader: Any, number: int, chunk: Any, arithmetic: Any) -> None:
    offloader._slots_home = offloader.engine.current()
    original(offloader, number, chunk, arithmetic)


def _once(original: Any, listing: Any, groups: Any, moving: Any) -> None:
    # A group that has grown or shrunk is noticed; another order is not.
    if [len(group["params"]) for group in groups] != list(map(len, listing._ids)) or not listing._moving:
        original(listing, groups, moving)


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


def _host_memory_kept(original: Any, plan: Any, size_bytes: int) -> Any:
    memory = original(plan, size_bytes)
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


def _looks_around(original: Any, transfers: Any) -> None:
    for _ in transfers.plan.bundles:
        for _, _, tensor in transfers.plan.bound():
            transfers.is_on_host(tensor)
    original(transfers)


def _pooled(original: Any, offloader: Any) -> None:
    if offloader._slots:
        offloader.__dict__["_pool"] = offloader._slots
    original(offloader)


def _left_behind(original: Any, offloader: Any) -> None:
    original(offloader)
    offloader.__dict__.setdefault("_left", []).append(offloader.engine.device_empty(2048))


PLANTED = (
    _bug(
        "unwatched_threads_pass",
        "A step in a thread that nobody watches goes through, and proves nothing.",
        ("OPT-241",),
        swap("conformance.provers.virtual_device.engine:VirtualEngine.check_thread", lambda engine: None),
    ),
    _bug(
        "slots_pooled",
        "The slots of a step are held until the next one has its own.",
        ("OPT-236",),
        wrap(f"{FAST}._drop_fetched", _pooled),
        "fastimpl",
    ),
    _bug(
        "blocks_left_behind",
        "Every prefetch leaves 2 KiB on the device, between the activations of its time.",
        ("OPT-242",),
        wrap(f"{FAST}.fetch", _left_behind),
        "fastimpl",
    ),
    _bug(
        "copy_in_under_a_copy_out",
        "A slot is filled while the chunk that used it is still copied out.",
        ("OPT-237",),
        altered("_fetch", "wait", 2),
        "fastimpl",
    ),
    _bug(
        "slots_given_back_to_another_stream",
        "Slots that were prefetched on one stream are not kept for the stream that steps.",
        ("OPT-233",),
        wrap(f"{FAST}._update_chunk", _home_of_all),
        "fastimpl",
    ),
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
        wrap("twinproof.offload.plan:MovePlan.host_empty", _host_memory_kept),
    ),
    _bug(
        "gradients_of_masters_kept",
        "The float32 gradients of masters live on after the step.",
        ("OPT-235",),
        wrap("twinproof.offload.masters:MasterWeights.end", _gradients_kept),
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
        wrap(f"{FAST}.fetch", _looks_around),
        "fastimpl",
    ),
    _bug(
        "unlisted_kept",
        "A parameter that left its group is offloaded for ever.",
        ("OPT-243",),
        swap("twinproof.offload.plan:MovePlan._forget_unlisted", lambda plan, transfers: None),
    ),
    _bug(
        "order_remembered",
        "Where a parameter stands in its group is looked up once, and only a group of another length looked at again.",
        ("OPT-243",),
        wrap("fastimpl.offload.positions:GroupPositions.refresh", _once),
        "fastimpl",
    ),
)
