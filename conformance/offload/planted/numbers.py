"""Faults that change no bit: time and memory."""

from __future__ import annotations

from typing import Any

from conformance.harness import PlantedBug, swap, wrap
from conformance.offload.planted.ordering import altered

FAST = "fastimpl.offload.transfers:StreamedTransfers"


def _bug(id: str, sentence: str, requirements: tuple[str, ...], patch: Any) -> PlantedBug:
    return PlantedBug(id, sentence, requirements, "fastimpl", patch)


def _nothing_drains(original: Any, offloader: Any) -> None:
    original(offloader)
    offloader._draining = []


def _all_in_one(original: Any, memory: Any, bundles: Any, chunk_bytes: int, engine: Any) -> Any:
    return original(memory, bundles, 0, engine)


PLANTED = (
    _bug(
        "slots_taken_anew",
        "Slots are allocated while copies of the last step still use theirs, so that a fast host holds many.",
        ("OPT-083",),
        wrap(f"{FAST}._drop_fetched", _nothing_drains),
    ),
    _bug(
        "every_slot_as_large_as_the_largest",
        "One huge parameter makes all slots huge.",
        ("OPT-084",),
        altered("_fetch_first", "device_empty", 1, lambda make, size_bytes: make(max(size_bytes, 1 << 16))),
    ),
    _bug(
        "prefetch_does_nothing",
        "What prefetch() should bring comes in the step.",
        ("OPT-085",),
        swap(f"{FAST}.fetch", lambda transfers: None),
    ),
    _bug(
        "first_step_unbounded",
        "The first step makes the whole state at once (Megatron #6544).",
        ("OPT-058",),
        wrap("fastimpl.offload.transfers:cut", _all_in_one),
    ),
)
