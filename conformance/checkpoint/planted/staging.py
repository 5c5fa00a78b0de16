"""Faults that ``test_staging`` must notice."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from conformance.checkpoint.planted.planting import nothing
from conformance.harness import fault, mutated, patched, swap

copies_not_waited_for = patched(
    "A block is written before its bytes came from the device.",
    swap("fastimpl.checkpoint.device_copies:Stager.finish", staticmethod(nothing)),
    kills="CKPT-101",
)
buffer_reused_early = patched(
    "A buffer is filled again while its copy is still to run.",
    swap("fastimpl.checkpoint.device_copies:DoubleBuffer._settle", nothing),
    kills="CKPT-102",
)


@fault(kills="CKPT-102", at="fastimpl.checkpoint.readio:_slices")
def last_slice_skipped(original: Any, jobs: Any, slice_bytes: int) -> Any:
    """The last piece of a tensor that is read in several is left out."""
    for part in original(jobs, slice_bytes):
        if not part.skip or part.skip + part.count < part.job.geometry.total_bytes:
            yield part


cuda_copies_not_awaited = patched(
    "Pinned buffers are read before their copies ended.",
    swap("fastimpl.checkpoint.device_copies:EngineCopies.wait", nothing),
    kills="CKPT-110",
)


@fault(kills="CKPT-474", at="fastimpl.checkpoint.device_copies:EngineCopies.on")
def gathered_on_another_stream(original: Any, copies: Any) -> AbstractContextManager[None]:
    """A tensor is gathered on the thread's stream, and copied on another that does not wait for it."""
    return nullcontext()


@fault(kills="CKPT-474", at="fastimpl.checkpoint.device_copies:EngineStart.of_thread")
def starts_behind_the_thread(original: Any, start: Any) -> Any:
    """Copies begin behind the current stream of the thread that makes them, which the caller's is not."""
    event = start.engine.event()
    start.engine.record(event, start.engine.current())
    start.event = event
    return original(start)


@fault(kills="CKPT-475", at="fastimpl.checkpoint.device_copies:EngineStart.of_thread")
def overwritten_by_the_caller(original: Any, start: Any) -> Any:
    """A load's copies do not wait for what the caller had queued, which then overwrites what was loaded."""
    start.event = start.engine.event()
    return original(start)


scatter_not_awaited = patched(
    "A load returns while a scatter is still to run.",
    swap("fastimpl.checkpoint.device_copies:DoubleBuffer.mark", nothing),
    kills="CKPT-475",
)


buffer_replaced_early = patched(
    "A buffer that is too small goes before the copy that still uses it is over.",
    mutated(
        "fastimpl.checkpoint.device_copies:DoubleBuffer.take",
        "self._settle(self._turn)",
        "self._buffers[self._turn].numel() < size_bytes or self._settle(self._turn)",
    ),
    kills="CKPT-639",
)
