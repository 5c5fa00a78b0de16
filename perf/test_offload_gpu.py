"""The GPU's gates on made-up samples, and their jobs on the CPU, where they run and mean nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fastimpl.offload import OptimizerStateOffloader
from fastimpl.streams import InlineEngine
from perf.harness.gates import Gate, read_gates
from perf.harness.judge import Machine, Result, judge
from perf.harness.paired import Round
from perf.harness.results import machine_of
from perf.harness.workloads import read_workloads
from perf.offload import JOBS, gpu

WORKLOADS = read_workloads()
GATES = [gate for gate in read_gates(WORKLOADS) if gate.hardware == ("cuda",) and gate.id.startswith("offload-")]


def _rounds(gate: Gate, ratio: float) -> list[Round]:
    """The peer takes a second, the subject as much more as ``ratio`` says, the control four times as long."""
    assert gate.peer is not None
    seconds = {gate.peer: 1.0, gate.subject: 1.0 / ratio, gate.control.subject: 4.0}
    return [{who: {"seconds": value * (1 + 1e-4 * i)} for who, value in seconds.items()} for i in range(9)]


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.id)
def test_gates_are_judged_on_a_gpu_only(gate: Gate) -> None:
    assert isinstance(gate.floor, float)
    name = gate.workloads["full"]
    for ratio, result in (
        (gate.floor * 1.02, Result.PASS),
        (gate.floor * 0.95, Result.FAIL),
        (3.0, Result.IMPLAUSIBLE),
    ):
        outcome = judge(gate, "full", WORKLOADS, {name: _rounds(gate, ratio)}, Machine(("cpu", "cuda"), "ext4"))
        assert (outcome.result, outcome.control.result) == (result, Result.FAIL)
    for rounds in ([], _rounds(gate, 1.0)):
        outcome = judge(gate, "full", WORKLOADS, {name: rounds}, Machine(("cpu",), "ext4"))
        assert outcome.result is Result.UNDECIDED


def test_a_machine_with_a_gpu_is_of_class_cuda() -> None:
    facts: dict[str, Any] = {"cpu": {"count": 2}, "gpus": [{"name": "NVIDIA H200"}], "file_system": {"type": "ext4"}}
    assert machine_of(facts).classes == ("cpu", "cuda", "nvidia-h200")
    assert machine_of({**facts, "gpus": []}).classes == ("cpu",)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, which would be measured")
def test_without_a_gpu_nothing_is_measured() -> None:
    jobs = {workload.name: workload for workload in WORKLOADS.values() if workload.job.startswith("gpu_")}
    assert len(jobs) == 4
    for workload in jobs.values():
        assert JOBS[workload.job](None, workload, "", 3, 0) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (gpu.moves, "offload-gpu-moves-1gib"),
        (gpu.steps, "offload-gpu-step-1gib"),
        (gpu.exposed, "offload-gpu-exposed-1gib"),
    ],
)
def test_jobs_run_on_the_cpu(program: Callable[..., list[Round]], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_SIDE", 64)
    workload = replace(WORKLOADS[name], shape=(16, 16), tensor_count=4)
    rounds = program(InlineEngine(), OptimizerStateOffloader, workload, 2, 0)
    assert [set(found) for found in rounds] == [set(workload.contenders)] * 2
