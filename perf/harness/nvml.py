"""What the GPU did meanwhile, so that a throttled clock is not reported as a slow kernel.

Reads NVML through nvidia-ml-py (module ``pynvml``). No library, no driver or no GPU is an explicit :class:`Unavailable`
with its reason; nothing here raises for that, and nothing ever sets a clock.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Gpu", "GpuSample", "Unavailable", "open_gpu", "throttled"]

# nvmlClocksEventReasons bits that mean the clock was held down by power, heat or the board; idling is none of them.
_THROTTLE_BITS = {
    0x0000000000000004: "power cap",
    0x0000000000000008: "hardware slowdown",
    0x0000000000000020: "thermal (software)",
    0x0000000000000040: "thermal (hardware)",
    0x0000000000000080: "power brake",
}


@dataclass(frozen=True)
class Unavailable:
    """Why there is nothing to read; entered and left as a GPU is."""

    reason: str

    def __enter__(self) -> Unavailable:
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to close."""


@dataclass(frozen=True)
class GpuSample:
    """One reading. PCIe rates are NVML's own averages over its last 20 ms, in bytes per second."""

    memory_used_bytes: int
    memory_total_bytes: int
    sm_clock_mhz: int
    memory_clock_mhz: int
    throttle_reasons: tuple[str, ...]
    pcie_tx_bytes_per_s: int
    pcie_rx_bytes_per_s: int


class Gpu:
    """One device of an initialised NVML; a context manager that shuts NVML down.

    Args:
        library: the ``pynvml`` module, or an object with the same functions.
        index: which device.
    """

    def __init__(self, library: Any, index: int = 0) -> None:
        self._nvml = library
        self._handle = library.nvmlDeviceGetHandleByIndex(index)
        self.name: str = library.nvmlDeviceGetName(self._handle)

    def sample(self) -> GpuSample:
        """Read everything once."""
        nvml, handle = self._nvml, self._handle
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        bits = int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        # NVML counts PCIe in KB/s.
        tx = 1000 * nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES)
        rx = 1000 * nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES)
        return GpuSample(
            memory_used_bytes=int(memory.used),
            memory_total_bytes=int(memory.total),
            sm_clock_mhz=int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            memory_clock_mhz=int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            throttle_reasons=tuple(text for bit, text in _THROTTLE_BITS.items() if bits & bit),
            pcie_tx_bytes_per_s=int(tx),
            pcie_rx_bytes_per_s=int(rx),
        )

    def close(self) -> None:
        """Shut NVML down."""
        self._nvml.nvmlShutdown()

    def __enter__(self) -> Gpu:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_gpu(index: int = 0, *, library: Any = None) -> Gpu | Unavailable:
    """The device, or why there is none.

    Args:
        index: which device.
        library: stands for ``pynvml``; tests pass a fake one.
    """
    if library is None:
        try:
            library = importlib.import_module("pynvml")
        except ImportError:
            return Unavailable("nvidia-ml-py is not installed")
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        return Unavailable(f"NVML does not start: {error}")
    try:
        return Gpu(library, index)
    except library.NVMLError as error:
        library.nvmlShutdown()
        return Unavailable(f"no device {index}: {error}")


def throttled(samples: Sequence[GpuSample]) -> tuple[str, ...]:
    """Reasons seen in any sample; pairs around which there were some are to be dropped."""
    return tuple(sorted({reason for sample in samples for reason in sample.throttle_reasons}))
