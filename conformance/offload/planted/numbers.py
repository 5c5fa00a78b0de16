"""Faults that ``test_numbers`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, patched
from conformance.offload.planted.planting import altered


@fault(kills="OPT-083", at="fastimpl.offload.transfers:StreamedTransfers._drop_fetched")
def slots_taken_anew(original: Any, offloader: Any) -> None:
    """Slots are allocated while copies of the last step still use theirs, so that a fast host holds many."""
    original(offloader)
    offloader._draining = []


every_slot_as_large_as_the_largest = patched(
    "One huge parameter makes all slots huge.",
    altered("_fetch_first", "device_empty", 1, lambda make, size_bytes: make(max(size_bytes, 1 << 16))),
    kills="OPT-084",
)


@fault(kills="OPT-085", at="fastimpl.offload.transfers:StreamedTransfers.fetch")
def prefetch_does_nothing(original: Any, transfers: Any) -> Any:
    """prefetch() does nothing, and the step waits for its copies."""


@fault(kills="OPT-058", at="fastimpl.offload.transfers:cut")
def first_step_unbounded(original: Any, memory: Any, bundles: Any, chunk_bytes: int, engine: Any) -> Any:
    """The first step makes the whole state at once (Megatron #6544)."""
    return original(memory, bundles, 0, engine)


@fault(kills="OPT-079", at="fastimpl.offload.transfers:StreamedTransfers.step")
def nothing_overlaps(original: Any, offloader: Any, *arguments: Any) -> Any:
    """Copies run on the stream of the update."""
    offloader._in = offloader._out = offloader.engine.current()
    return original(offloader, *arguments)
