"""Faults that ``test_streams`` must notice."""

from __future__ import annotations

import dataclasses
from typing import Any

from conformance.harness import fault, mutated, patched
from conformance.offload.planted.planting import altered

no_wait_for_the_copy_in = patched(
    "The update does not wait for its chunk to arrive.",
    altered("_update_chunk", "wait"),
    kills=("OPT-065", "OPT-066", "OPT-001"),
)
copy_out_before_the_update = patched(
    "The copy out does not wait for the update.", altered("_send", "wait"), kills=("OPT-066", "OPT-020", "OPT-042")
)
event_on_the_wrong_stream = patched(
    "The event behind the update is recorded on the copy stream.",
    altered("_send", "record", 1, lambda record, event, stream: record(event, "offload-d2h")),
    kills=("OPT-066", "OPT-002"),
)


@fault(kills="OPT-059", at="fastimpl.offload.transfers:StreamedTransfers.step")
def streams_made_each_step(original: Any, offloader: Any, *arguments: Any) -> Any:
    """Every step makes a new pair of streams."""
    offloader._in, offloader._out = offloader.engine.stream("in"), offloader.engine.stream("out")
    return original(offloader, *arguments)


@fault(kills="OPT-057", at="fastimpl.offload.transfers:StreamedTransfers._fetch_first")
def everything_fetched_at_once(original: Any, transfers: Any) -> Any:
    """All chunks are on the device at the same time."""
    transfers.plan.options = dataclasses.replace(transfers.plan.options, slots=1 << 20)
    return original(transfers)


@fault(kills="OPT-056", at="fastimpl.offload.transfers:StreamedTransfers._drop_fetched")
def slots_kept_between_steps(original: Any, offloader: Any) -> None:
    """The staging slots stay allocated."""
    offloader._fetched = 0


@fault(kills="OPT-069", at="fastimpl.offload.transfers:StreamedTransfers.step")
def host_waits_each_step(original: Any, offloader: Any, *arguments: Any) -> Any:
    """Every step ends with a wait of the host."""
    result = original(offloader, *arguments)
    offloader.settle()
    return result


@fault(kills="OPT-076", at="fastimpl.offload.transfers:StreamedTransfers.step")
def call_site_lost(original: Any, transfers: Any, arithmetic: Any, step_whole: Any) -> bool:
    """The step runs and nothing is moved (Megatron #4716)."""
    arithmetic()
    return False


@fault(kills="OPT-078", at="fastimpl.offload.transfers:cut")
def a_copy_for_each_tensor(original: Any, memory: Any, bundles: Any, chunk_bytes: int, engine: Any) -> Any:
    """Parameters are moved one by one."""
    return original(memory, bundles, 1, engine)


nothing_is_one_parameter = patched(
    "chunk_bytes of 0 is a size like others, and each parameter a chunk.",
    mutated("twinproof.offload.states:chunks_of", "(chunk_bytes and size", "(size"),
    kills="OPT-392",
)
