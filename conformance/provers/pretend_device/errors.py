"""What a GPU refuses. Each is a mismatch, so that a planted bug that mixes places is killed by it, by name."""

from __future__ import annotations

from conformance.harness.compare import Mismatch

__all__ = ["HostReadError", "MixedPlacesError", "NoKernelError"]


class MixedPlacesError(Mismatch, RuntimeError):
    """One operator was given memory of the host and of the device."""


class NoKernelError(Mismatch, NotImplementedError):
    """An operator without a CUDA kernel was given memory of the device."""


class HostReadError(Mismatch, TypeError):
    """The host was to read memory of the device as its own."""
