"""``twinproof bench pipeline --table``: measures the seed's table, prints it, and keeps every sample as evidence."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from conformance.harness import RankPool
from perf.harness.paired import Round, merge_ranks, ratios
from perf.harness.results import collect, facts_of, write_evidence
from perf.harness.verdicts import interval_of
from perf.harness.workloads import Workload, read_workloads
from perf.pipeline import JOBS
from perf.pipeline.devices import reason_against_gpu
from perf.pipeline.meters import meter_for

__all__ = ["print_table", "table_lines"]

# The seed's own size needs 82 GB for tables and their optimizer's state.
_ON_GPU, _ON_CPU = "seed-table-gpu-200x100k", "seed-table-20x20k"
_PEER = "sparse-dist"
_TIMEOUT_S = 600.0


def table_lines(workload: Workload, rounds: Sequence[Round], device: str) -> list[str]:
    """A row for each schedule and lookup stream: P50 and P90 of step times, speed beside SparseDist, peaks."""
    meter = meter_for(device)
    lines = [
        f"{workload}  ({len(rounds)} steps of each)",
        f"allocated: {meter.allocated}",
        f"reserved: {meter.reserved}; both of the largest rank, at their peak",
    ]
    if device == "cpu":
        why = reason_against_gpu() or "the CPU was asked for"
        lines.append(f"On the CPU, where nothing overlaps: {why}. ci/gpu measures the seed's own size.")
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


def print_table(*, folder: Path, seed: int, evidence: Path | None, say: Callable[[str], None]) -> None:
    """Measure on the GPU if there is one, else on the CPU at a small size."""
    device = "cuda" if reason_against_gpu() is None else "cpu"
    workloads = read_workloads()
    workload = workloads[_ON_GPU if device == "cuda" else _ON_CPU]
    facts = facts_of(folder, "fastimpl")
    with RankPool("fastimpl") as pool, tempfile.TemporaryDirectory(prefix="twinproof-bench-", dir=folder) as inner:
        arguments = (workload, inner, workload.round_count, seed)
        by_rank = pool.run(JOBS[workload.job], workload.rank_count, *arguments, timeout_s=_TIMEOUT_S)
    rounds = merge_ranks(by_rank)
    say("\n".join(table_lines(workload, rounds, device)))
    if evidence is None:
        return
    found = collect(
        implementation="fastimpl",
        form="full",
        seed=seed,
        facts=facts,
        workloads=workloads,
        rounds={workload.name: rounds},
        outcomes=[],
        details={"allocated": meter_for(device).allocated, "reserved": meter_for(device).reserved},
    )
    write_evidence(found, evidence)
    say(f"evidence: {evidence}")
