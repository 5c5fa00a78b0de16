"""Faults that ``test_staging`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.checkpoint.planted.planting import nothing
from conformance.harness import fault, patched, swap

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
    swap("fastimpl.checkpoint.device_copies:CudaCopies.wait", nothing),
    kills="CKPT-110",
)
