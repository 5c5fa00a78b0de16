"""The jobs of the checkpoint bench; ``workloads.py`` says on which shapes, ``gates.py`` what must come out."""

from collections.abc import Callable

from conformance.harness import Rank
from perf.checkpoint.counting import measure_counts
from perf.checkpoint.folders import measure_consolidations, measure_openings
from perf.checkpoint.gpu_stage import measure_staging
from perf.checkpoint.loading import measure_fresh_loads
from perf.checkpoint.planning import measure_planning
from perf.checkpoint.quantized import measure_fp8_loads, measure_mxfp4_loads
from perf.checkpoint.saving import measure_loads, measure_saves
from perf.checkpoint.scale import measure_scale
from perf.harness.paired import Round
from perf.harness.workloads import Workload

# Called on every rank of the workload as (rank, workload, empty folder, round count, seed).
JOBS: dict[str, Callable[[Rank, Workload, str, int, int], list[Round]]] = {
    "save": measure_saves,
    "count": measure_counts,
    "load": measure_loads,
    "load-fresh": measure_fresh_loads,
    "load-fp8": measure_fp8_loads,
    "load-mxfp4": measure_mxfp4_loads,
    "consolidate": measure_consolidations,
    "open": measure_openings,
    "plan": measure_planning,
    "scale": measure_scale,
    "gpu_stage": measure_staging,
}

__all__ = ["JOBS"]
