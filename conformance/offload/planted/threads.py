"""Faults that ``test_threads`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault


@fault(kills="OPT-241", at="conformance.provers.virtual_device.engine:VirtualEngine.check_thread")
def unwatched_threads_pass(original: Any, engine: Any) -> Any:
    """The virtual device accepts calls from threads that it does not watch."""


@fault(kills="OPT-233", at="fastimpl.offload.transfers:StreamedTransfers._update_chunk")
def slots_given_back_to_another_stream(original: Any, offloader: Any, number: int, chunk: Any, arithmetic: Any) -> None:
    """Slots that were prefetched on one stream are not kept for the stream that steps."""
    offloader._slots_home = offloader.engine.current()
    original(offloader, number, chunk, arithmetic)
