"""The jobs of the offload bench; ``workloads.py`` says on which shapes, ``gates.py`` what must come out."""

from collections.abc import Callable

from conformance.harness import Rank
from perf.harness.paired import Round
from perf.harness.workloads import Workload
from perf.offload.gpu import measure_exposed, measure_moves, measure_steps_on_gpu
from perf.offload.gpu_memory import measure_host, measure_memory, measure_snapshots_on_gpu
from perf.offload.gpu_update import measure_updates
from perf.offload.host import measure_adam_bf16, measure_adam_fp32, measure_small
from perf.offload.pretend import measure_step
from perf.offload.steps import measure_small_steps, measure_snapshots, measure_steps

# Called on every rank of the workload as (rank, workload, empty folder, round count, seed).
JOBS: dict[str, Callable[[Rank, Workload, str, int, int], list[Round]]] = {
    "step": measure_steps,
    "snapshot": measure_snapshots,
    "adam_bf16": measure_adam_bf16,
    "adam_fp32": measure_adam_fp32,
    "small": measure_small,
    "small_steps": measure_small_steps,
    "gpu_moves": measure_moves,
    "gpu_steps": measure_steps_on_gpu,
    "gpu_exposed": measure_exposed,
    "gpu_host": measure_host,
    "gpu_memory": measure_memory,
    "gpu_snapshot": measure_snapshots_on_gpu,
    "gpu_update": measure_updates,
    "pretend_step": measure_step,
}

__all__ = ["JOBS"]
