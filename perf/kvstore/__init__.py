"""The jobs of the row store's bench; ``workloads.py`` says on which shapes, ``gates.py`` what must come out.

A workload's shape is [rows of a batch, words of a row]; ``tensor_count`` batches make up the store.
"""

from collections.abc import Callable
from functools import partial

from conformance.harness import Rank
from perf.harness.paired import Round
from perf.harness.workloads import Workload
from perf.kvstore.batches import measure_fresh_sets, measure_gets, measure_sets, measure_zipf_gets
from perf.kvstore.databases import measure_database_gets, measure_database_sets
from perf.kvstore.kernels import KERNELS, measure_kernel
from perf.kvstore.maps import measure_overhead, measure_sorts
from perf.kvstore.readers import measure_readers
from perf.kvstore.saving import measure_loads, measure_saves

# Called on every rank of the workload as (rank, workload, empty folder, round count, seed).
JOBS: dict[str, Callable[[Rank, Workload, str, int, int], list[Round]]] = {
    "get": measure_gets,
    "get-zipf": measure_zipf_gets,
    "set": measure_sets,
    "set-fresh": measure_fresh_sets,
    "read-together": measure_readers,
    "save": measure_saves,
    "load": measure_loads,
    "sort": measure_sorts,
    "overhead": measure_overhead,
    "get-databases": measure_database_gets,
    "set-databases": measure_database_sets,
    **{f"gpu-kernel-{name}": partial(measure_kernel, name) for name in KERNELS},
}

__all__ = ["JOBS"]
