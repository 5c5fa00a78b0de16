"""What a table more costs the host in a step, in calls of Python's: where tables are many, a GPU waits for the host.

On one H200 a step of 100 tables and 512 samples kept the device busy for 1.7 ms of the host's 10.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from conformance.harness import Rank
from fastimpl import pipeline
from perf.harness.paired import Round, Sample, interleave
from perf.harness.workloads import Workload
from perf.pipeline.pr2916_model import Sizes, loader_of, make_model
from twinproof.engine import InlineEngine

__all__ = ["measure_calls"]

_WARM_UP, _STEPS = 4, 2
_SCHEDULES = {
    "base": "TrainPipelineBase",
    "sparse-dist": "TrainPipelineSparseDist",
    "fused": "TrainPipelineFusedSparseDist",
    "semi-sync": "TrainPipelineSemiSync",
    "careless": "TrainPipelineSparseDist",
}


class _StandIn(InlineEngine):
    """The CPU, for which the host does all that it does for a device."""

    stands_for_device = True


class _Calls:
    """Functions called, Python's and C's, of this thread."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, _frame: Any, event: str, _argument: Any) -> None:
        self.count += event in ("call", "c_call")


@contextmanager
def _counting() -> Iterator[_Calls]:
    calls, before = _Calls(), sys.getprofile()
    sys.setprofile(calls.note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def measure_calls(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """``calls_per_table`` of a step of each schedule: of all tables less half of them, by table.

    ``careless`` asks for every table's weight by torch's own ``get_buffer`` ten times, as a step once did.
    """
    runs = {name: partial(_run, name, workload, seed) for name in workload.contenders}
    return interleave(runs, round_count=round_count, seed=seed, warm_up=False)


def _run(name: str, workload: Workload, seed: int) -> Sample:
    whole, half = workload.tensor_count, workload.tensor_count // 2
    found = [_calls_of_step(name, workload, tables, seed) for tables in (whole, half)]
    return {"calls_per_table": (found[0] - found[1]) / (whole - half)}


def _calls_of_step(name: str, workload: Workload, tables: int, seed: int) -> float:
    rows, dim = workload.shape
    sizes = Sizes(tables, rows, dim, batch=2, pooling=1, width=8)
    model, optimizer = make_model(sizes)
    options = {"custom_model_fwd": partial(_careless_forward, model)} if name == "careless" else {}
    schedule: Any = getattr(pipeline, _SCHEDULES[name])(
        model, optimizer, torch.device("cpu"), reduce_dense_gradients=False, engine=_StandIn(), **options
    )
    loader = loader_of(sizes, seed)
    for _ in range(_WARM_UP):
        schedule.progress(loader)
    with _counting() as calls:
        for _ in range(_STEPS):
            schedule.progress(loader)
    return calls.count / _STEPS


def _careless_forward(model: Any, batch: Any) -> Any:
    for _ in range(10):
        for module in (model.plain, model.weighted):
            for lookup in module.lookups:
                for index in range(len(lookup.tables)):
                    lookup.get_buffer(f"weight_{index}")
    return model(batch)
