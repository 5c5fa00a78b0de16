"""What the GPU did meanwhile, so that a throttled clock is not reported as a slow kernel.

Reads NVML through nvidia-ml-py (module ``pynvml``). No library, no driver or no GPU is an explicit :class:`Unavailable`
with its reason; nothing here raises for that, and nothing ever sets a clock.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Gpu", "GpuSample", "Unavailable", "counts_between", "open_gpu", "throttled", "used_bytes"]

# Where NVML's counts of the link start again.
_PCIE_WRAP_BYTES = 1 << 32
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
    """One reading.

    PCIe rates are NVML's own averages over its last 20 ms, in bytes per second. PCIe bytes are counts since the driver
    was loaded, as the device sees them: it sends (tx) what goes to the host. They are None where a device counts none.
    """

    memory_used_bytes: int
    memory_total_bytes: int
    sm_clock_mhz: int
    memory_clock_mhz: int
    throttle_reasons: tuple[str, ...]
    pcie_tx_bytes_per_s: int
    pcie_rx_bytes_per_s: int
    pcie_tx_bytes: int | None = None
    pcie_rx_bytes: int | None = None


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
        sent, received = self._pcie_counts()
        return GpuSample(
            memory_used_bytes=int(memory.used),
            memory_total_bytes=int(memory.total),
            sm_clock_mhz=int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            memory_clock_mhz=int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            throttle_reasons=tuple(text for bit, text in _THROTTLE_BITS.items() if bits & bit),
            pcie_tx_bytes_per_s=int(tx),
            pcie_rx_bytes_per_s=int(rx),
            pcie_tx_bytes=sent,
            pcie_rx_bytes=received,
        )

    def used_bytes(self) -> int:
        """Memory of the device that is taken, by whomever."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def _pcie_counts(self) -> tuple[int | None, int | None]:
        """Bytes sent and received; None for each that this library, driver or device does not count."""
        nvml = self._nvml
        fields = [getattr(nvml, f"NVML_FI_DEV_PCIE_COUNT_{way}_BYTES", None) for way in ("TX", "RX")]
        if None in fields:
            return None, None
        try:
            sent, received = nvml.nvmlDeviceGetFieldValues(self._handle, fields)
        except nvml.NVMLError:
            return None, None
        return self._value_of(sent), self._value_of(received)

    def _value_of(self, field: Any) -> int | None:
        # A field says for itself whether it could be read, and which member of its union holds the value.
        members = {1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal"}
        if field.nvmlReturn != 0 or field.valueType not in members:
            return None
        return int(getattr(field.value, members[field.valueType]))

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


def used_bytes(*, library: Any = None) -> int | None:
    """Memory of the first device that is taken; None where NVML is not there to ask."""
    with open_gpu(library=library) as gpu:
        return gpu.used_bytes() if isinstance(gpu, Gpu) else None


def counts_between(before: GpuSample, after: GpuSample) -> dict[str, float]:
    """What one run used of the device, by the names that gates know.

    ``nvml_used_bytes`` is taken when it ends, ``nvml_growth_bytes`` more than when it began. ``pcie_tx_bytes`` and
    ``pcie_rx_bytes`` are left out where the device counts none: a gate stays undecided then. Their counts start again
    at 2**32, as an H200 showed; a run that moves less than 4 GiB each way is counted whole.
    """
    found = {
        "nvml_used_bytes": float(after.memory_used_bytes),
        "nvml_growth_bytes": float(after.memory_used_bytes - before.memory_used_bytes),
        "pcie_tx_bytes_per_s": float(after.pcie_tx_bytes_per_s),
        "pcie_rx_bytes_per_s": float(after.pcie_rx_bytes_per_s),
    }
    for name in ("pcie_tx_bytes", "pcie_rx_bytes"):
        first, last = getattr(before, name), getattr(after, name)
        if first is None or last is None:
            continue
        found[name] = float((last - first) % _PCIE_WRAP_BYTES if max(first, last) < _PCIE_WRAP_BYTES else last - first)
    return found


def throttled(samples: Sequence[GpuSample]) -> tuple[str, ...]:
    """Reasons seen in any sample; pairs around which there were some are to be dropped."""
    return tuple(sorted({reason for sample in samples for reason in sample.throttle_reasons}))
