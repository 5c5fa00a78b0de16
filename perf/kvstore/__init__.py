"""The jobs of the row store's bench; ``workloads.toml`` says on which shapes, ``gates.toml`` what must come out.

A workload's shape is [rows of a batch, words of a row]; ``tensor_count`` batches make up the store.
"""

from collections.abc import Callable

from conformance.harness import Rank
from perf.harness.paired import Round
from perf.harness.workloads import Workload
from perf.kvstore.batches import measure_gets, measure_sets
from perf.kvstore.saving import measure_saves, measure_sorts

# Called on every rank of the workload as (rank, workload, empty folder, round count, seed).
JOBS: dict[str, Callable[[Rank, Workload, str, int, int], list[Round]]] = {
    "get": measure_gets,
    "set": measure_sets,
    "save": measure_saves,
    "sort": measure_sorts,
}

__all__ = ["JOBS"]
