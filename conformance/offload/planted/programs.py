"""Faults that only a program of several verbs shows."""

from __future__ import annotations

from typing import Any

from conformance.harness import PlantedBug, wrap

BASE = "twinproof.offload.offloader"


def _fetched_before(original: Any, offloader: Any, state_dict: Any) -> None:
    offloader.transfers._drop_fetched = lambda: None
    try:
        original(offloader, state_dict)
    finally:
        del offloader.transfers._drop_fetched
    for chunk in offloader.transfers._chunks:
        chunk.version = chunk.memory._version


def _written_at_once(original: Any, offloader: Any, state_dict: Any) -> None:
    offloader.settle_for_writing = offloader.settle
    try:
        original(offloader, state_dict)
    finally:
        del offloader.settle_for_writing


def _options_merged(original: Any, plan: Any, state_dict: Any) -> None:
    before = [dict(group) for group in plan.optimizer.param_groups]
    original(plan, state_dict)
    for group, old in zip(plan.optimizer.param_groups, before, strict=True):
        group.update({key: value for key, value in old.items() if key not in group})


PLANTED = (
    PlantedBug(
        "prefetched_before_the_load",
        "A step uses what was prefetched before a load.",
        ("OPT-030",),
        "fastimpl",
        wrap(f"{BASE}:OptimizerStateOffloader.load_state_dict", _fetched_before),
    ),
    PlantedBug(
        "loaded_under_a_copy_in",
        "A load writes host memory that a prefetch still reads.",
        ("OPT-030",),
        "fastimpl",
        wrap(f"{BASE}:OptimizerStateOffloader.load_state_dict", _written_at_once),
    ),
    PlantedBug(
        "loaded_options_merged",
        "A load keeps options that the saved groups do not have.",
        ("OPT-088",),
        ("fastimpl", "refimpl"),
        wrap(f"{BASE}:load_states", _options_merged),
    ),
)
