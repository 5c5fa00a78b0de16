"""What torch's allocators and its sync debug mode say of a GPU; behind one class, so that CI puts another there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch

from perf.harness.nvml import used_bytes

__all__ = ["CudaMeter", "Meter"]


class Meter(Protocol):
    """Bytes of device and pinned memory, and waits of the host."""

    def settle(self) -> None:
        """Give cached memory back and forget peaks."""

    def active_bytes(self) -> int:
        """In use, or still needed by work that was queued."""

    def peak_bytes(self) -> int:
        """The most that was active since ``settle``."""

    def reserved_bytes(self) -> int:
        """Taken from the device, in use or not."""

    def used_bytes(self) -> int | None:
        """Taken of the whole device, as NVML counts: what torch does not count is in it. None without NVML."""

    def pinned_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory of torch's own allocator of pinned memory."""

    def pinned_bytes(self) -> int:
        """In use of torch's own allocator of pinned memory, rounded as it rounds; what it keeps for later is not."""

    def waits_in(self, job: Callable[[], Any]) -> int:
        """How often the host waited for the device in a job, but for events that it asked for."""


class CudaMeter:
    """``torch.cuda``."""

    def settle(self) -> None:
        """Of the current device."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def active_bytes(self) -> int:
        """``memory_allocated`` falls before recorded streams are done with a block."""
        return int(torch.cuda.memory_stats()["active_bytes.all.current"])

    def peak_bytes(self) -> int:
        """Of the same."""
        return int(torch.cuda.memory_stats()["active_bytes.all.peak"])

    def reserved_bytes(self) -> int:
        """As torch counts."""
        return int(torch.cuda.memory_reserved())

    def used_bytes(self) -> int | None:
        """Of the first device; what other processes take is in it."""
        return used_bytes()

    def pinned_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rounded up to a power of two."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def pinned_bytes(self) -> int:
        """As torch counts, after rounding."""
        # Of what it owns, nothing is new where blocks of an earlier round lie in its cache.
        return int(torch.cuda.host_memory_stats()["active_bytes.current"])

    def waits_in(self, job: Callable[[], Any]) -> int:
        """Each is a warning of torch."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                job()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        return sum("synchroniz" in str(warning.message) for warning in found)
