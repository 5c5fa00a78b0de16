"""What an offloader tells about itself."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OffloadStats", "Residency"]


@dataclass(frozen=True)
class Residency:
    """Bytes of what was selected to move: on the device, on the host, and on the way between them."""

    device_bytes: int
    host_bytes: int
    in_flight_bytes: int = 0


@dataclass
class OffloadStats:
    """Exact counts since attachment.

    ``payload_bytes`` of the selected tensors that exist, ``host_bytes`` of host memory held for them; a step moves the
    payload both ways, so ``h2d_bytes`` and ``d2h_bytes`` that stand still mean a lost call site (facts/offload.md 0).
    """

    step_count: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    payload_bytes: int = 0
    host_bytes: int = 0
    chunk_count: int = 0
