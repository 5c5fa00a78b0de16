"""The table of torchrec PR 2916 as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from perf.harness.paired import Round, ratios
from perf.harness.verdicts import interval_of
from perf.harness.workloads import Workload
from perf.pipeline.devices import reason_against_gpu
from perf.pipeline.meters import meter_for

__all__ = ["table_lines"]

_PEER = "sparse-dist"


def table_lines(workload: Workload, rounds: Sequence[Round]) -> list[str]:
    """A row for each schedule and lookup stream: P50 and P90 of step times, speed beside SparseDist, peaks."""
    on_gpu = workload.job.endswith("gpu")
    meter, why_not = meter_for("cuda" if on_gpu else "cpu"), reason_against_gpu()
    if not rounds:
        return [str(workload), f"  was not measured: {why_not}"]
    lines = [
        f"{workload}  ({len(rounds)} steps of each)",
        f"allocated: {meter.allocated}",
        f"reserved: {meter.reserved}; both of the largest rank, at their peak",
    ]
    if not on_gpu and why_not is not None:
        lines.append(f"On the CPU, where nothing overlaps: {why_not}. ci/gpu measures the size of torchrec PR 2916.")
    lines += ["", f"  {'':32}{'P50 ms':>10}{'P90 ms':>10}  {'times SparseDist':24}{'allocated':>13}{'reserved':>13}"]
    for who in workload.contenders:
        samples = [found[who] for found in rounds]
        seconds = sorted(sample["seconds"] for sample in samples)
        times = "".join(f"{1000 * _quantile(seconds, share):10.2f}" for share in (0.5, 0.9))
        speed = interval_of(ratios(rounds, _PEER, who)) if who != _PEER else None
        peaks = [
            _peak([s[key] for s in samples if key in s]) for key in ("peak_allocated_bytes", "peak_reserved_bytes")
        ]
        lines.append(f"  {who:32}{times}  {speed or '-'!s:24}{peaks[0]:>13}{peaks[1]:>13}")
    return lines


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest that ``share`` of all do not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1]


def _peak(found: Sequence[float]) -> str:
    return f"{max(found) / 2**20:.1f} MiB" if found else "-"
