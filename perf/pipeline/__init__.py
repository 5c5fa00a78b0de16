"""The jobs of the pipeline's bench; ``workloads.py`` says on which shapes, ``gates.py`` what must come out.

A workload's shape is [rows of a table, dim], ``tensor_count`` is the number of tables; a batch has 4096 bags of each.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from conformance.harness import Rank
from perf.harness.paired import Round
from perf.harness.workloads import Workload
from perf.pipeline.calls import measure_calls
from perf.pipeline.gpu import CONFIGS, measure_config
from perf.pipeline.kernels import KERNELS, measure_kernel
from perf.pipeline.pr2916_lines import table_lines
from perf.pipeline.pr2916_table import measure_table
from perf.pipeline.pretend import measure_step
from perf.pipeline.sparse_nn import SparseJob, measure_sparse_nn
from perf.pipeline.tables import Plan
from perf.pipeline.training import measure_training

_PLANS = {
    "train-sgd": Plan("sgd"),
    "train-adagrad": Plan("adagrad"),
    "train-rowwise": Plan("rowwise_adagrad"),
    "train-rowwise-half": Plan("rowwise_adagrad", dtype=torch.float16),
    "train-rowwise-zipf": Plan("rowwise_adagrad", is_zipf=True),
    "train-rowwise-one": Plan("rowwise_adagrad", pooling=1),
}

# Called on every rank of the workload as (rank, workload, empty folder, round count, seed).
JOBS: dict[str, Callable[[Rank, Workload, str, int, int], list[Round]]] = {
    **{name: partial(measure_training, plan) for name, plan in _PLANS.items()},
    "sparse-nn": partial(measure_sparse_nn, SparseJob(batch=1024, step_count=4, optimizer="adagrad")),
    "sparse-nn-rowwise": partial(measure_sparse_nn, SparseJob(batch=1024, step_count=4, optimizer="rowwise_adagrad")),
    # So small that what is left is the host's own work.
    "sparse-nn-tiny": partial(measure_sparse_nn, SparseJob(batch=4, step_count=50, optimizer="adagrad")),
    # Batch and width of the over-arch: those of torchrec PR 2916 on a GPU.
    "seed-table-gpu": partial(measure_table, "cuda", 8192, 1000),
    "seed-table": partial(measure_table, "cpu", 512, 128),
    **{f"gpu-config-{name}": partial(measure_config, name) for name in CONFIGS},
    **{f"gpu-kernel-{name}": partial(measure_kernel, name) for name in KERNELS},
    "pretend-step": partial(measure_step, False),
    "pretend-mixed-step": partial(measure_step, True),
    "host-calls": measure_calls,
}

# Where the bench's own table says too little: job -> lines of a workload and its rounds.
LINES: dict[str, Callable[[Workload, Sequence[Round]], list[str]]] = dict.fromkeys(
    ("seed-table-gpu", "seed-table"), table_lines
)

__all__ = ["JOBS", "LINES"]
