"""Faults that ``test_cuda`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault


@fault(kills="OPT-110", at="twinproof.engine:CudaEngine.wait", of="fastimpl")
def cuda_waits_for_nothing(original: Any, engine: Any, stream: Any, event: Any) -> Any:
    """On a GPU streams do not wait for events."""


@fault(kills="OPT-111", at="fastimpl.offload.transfers:StreamedTransfers._drop_fetched")
def a_slot_leaks_each_step(original: Any, offloader: Any, *arguments: Any) -> None:
    """A staging slot stays allocated after each step."""
    slots = offloader._slots[:1]
    original(offloader, *arguments)
    offloader.__dict__.setdefault("_kept", []).extend(slots)


@fault(kills="OPT-283", at="fastimpl.offload.slot_step:hyper_of")
def cuda_update_by_numbers_of_the_step_before(original: Any, kind: str, group: Any, step: float, **options: Any) -> Any:
    """An update in a slot has the numbers, and the rate, of the step before."""
    found = original(kind, group, max(step - 1, 1), **options)
    return [value * 0.999 if i == 6 else value for i, value in enumerate(found)]


@fault(kills="OPT-291", at="fastimpl.streams:CudaEngine.copy_many")
def cuda_copies_leave_out_the_last(original: Any, engine: Any, targets: Any, sources: Any) -> None:
    """Of many copies in one call the last is left out."""
    original(engine, targets[:-1], sources[:-1])
