"""What this machine can do at most, measured in the same run, so that a share of it means the same everywhere."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from perf.harness.paired import interleave, seconds_of
from twinproof.checkpoint.format import buffer_of

__all__ = ["Roofline", "measure_roofline"]

_ROW_FLOATS = 256


@dataclass(frozen=True)
class Roofline:
    """Bytes per second of one thread: a plain copy, a gather of random 1 KiB rows, writes of the buffer to a file."""

    copy_bytes_per_s: float
    gather_bytes_per_s: float
    pwrite_bytes_per_s: float

    def as_dict(self) -> dict[str, float]:
        """For the evidence file."""
        return asdict(self)


def measure_roofline(folder: Path, *, size_bytes: int = 64 << 20, round_count: int = 5) -> Roofline:
    """Measure all three on buffers of ``size_bytes``; the file lies in ``folder`` and is removed."""
    row_count = size_bytes // (4 * _ROW_FLOATS)
    source = torch.ones(row_count, _ROW_FLOATS)
    target = torch.empty_like(source)
    rows = torch.randperm(row_count, generator=torch.Generator().manual_seed(0))
    path = folder / "roofline.bin"
    data = buffer_of(source)

    def write() -> None:
        # A fresh file each time: pages that exist already are written much faster than a checkpoint's ever are.
        path.unlink(missing_ok=True)
        with path.open("wb", buffering=0) as file:
            for start in range(0, len(data), 8 << 20):
                os.pwrite(file.fileno(), data[start : start + (8 << 20)], start)

    jobs: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "gather": lambda: torch.index_select(source, 0, rows, out=target),
        "pwrite": write,
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        contenders = {name: seconds_of(job) for name, job in jobs.items()}
        rounds = interleave(contenders, round_count=round_count, seed=0)
    finally:
        torch.set_num_threads(threads)
        path.unlink(missing_ok=True)
    rates = {name: size_bytes / statistics.median(r[name]["seconds"] for r in rounds) for name in jobs}
    return Roofline(rates["copy"], rates["gather"], rates["pwrite"])
