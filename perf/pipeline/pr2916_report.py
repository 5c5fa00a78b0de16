"""``twinproof bench pipeline --table``: measures the table of torchrec PR 2916 and keeps every sample."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from conformance.harness import RankPool
from perf.harness.paired import merge_ranks
from perf.harness.results import collect, facts_of, write_evidence
from perf.harness.workloads import read_workloads
from perf.pipeline import JOBS
from perf.pipeline.devices import reason_against_gpu
from perf.pipeline.meters import meter_for
from perf.pipeline.pr2916_lines import table_lines

__all__ = ["print_table"]

# The size of torchrec PR 2916 needs 82 GB for tables and their optimizer's state.
_ON_GPU, _ON_CPU = "seed-table-gpu-200x100k", "seed-table-20x20k"
_TIMEOUT_S = 600.0


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
    say("\n".join(table_lines(workload, rounds)))
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
