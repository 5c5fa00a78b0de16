"""The pipeline's GPU gates on made-up samples, and their jobs on the CPU, where they run and mean nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from conformance.harness import Mismatch
from fastimpl import ops
from perf.harness.gates import Gate, read_gates
from perf.harness.judge import Machine, Result, judge
from perf.harness.paired import Round
from perf.harness.workloads import read_workloads
from perf.pipeline import JOBS, devices, gpu, kernels, pr2916_table

WORKLOADS = read_workloads()
GATES = [gate for gate in read_gates(WORKLOADS) if gate.hardware == ("cuda",) and gate.id.startswith("pipe-")]


def _rounds(gate: Gate, value: float, refused: float) -> list[Round]:
    """Samples by which the gate comes to ``value`` and its control to ``refused``, where that is another contender."""
    assert gate.peer is not None
    assert gate.control.peer is not None
    if gate.kind.is_paired:
        found = {gate.subject: 1.0, gate.peer: value}
        found.setdefault(gate.control.peer, refused)
        found.setdefault(gate.control.subject, value / refused)
    else:
        found = {gate.peer: 1.0, gate.subject: value, gate.control.subject: refused}
    return [{who: {gate.metric: size * (1 + 1e-4 * i)} for who, size in found.items()} for i in range(9)]


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.id)
def test_gates_are_judged_on_a_gpu_only(gate: Gate) -> None:
    bound = gate.floor if gate.kind.is_paired else gate.ceiling
    assert isinstance(bound, float)
    name, better = gate.workloads["full"], 1.01 if gate.kind.is_paired else 0.99
    refused = bound / 2 if gate.kind.is_paired else bound * 2
    for value, result in ((bound * better, Result.PASS), (bound / better / better, Result.FAIL)):
        rounds = {name: _rounds(gate, value, refused)}
        outcome = judge(gate, "full", WORKLOADS, rounds, Machine(("cpu", "cuda"), "ext4"))
        assert (outcome.result, outcome.control.result) == (result, Result.FAIL)
        outcome = judge(gate, "full", WORKLOADS, rounds, Machine(("cpu",), "ext4"))
        assert outcome.result is Result.UNDECIDED
    outcome = judge(gate, "full", WORKLOADS, {name: []}, Machine(("cpu",), "ext4"))
    assert outcome.result is Result.UNDECIDED


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, which would be measured")
def test_without_a_gpu_nothing_is_measured() -> None:
    ours = [workload for workload in WORKLOADS.values() if workload.component == "pipeline"]
    jobs = [workload for workload in ours if workload.job.startswith(("gpu-config-", "gpu-kernel-"))]
    expected = {f"gpu-config-{name}" for name in gpu.CONFIGS} | {f"gpu-kernel-{name}" for name in kernels.KERNELS}
    assert {workload.job for workload in jobs} == expected
    rank: Any = None
    assert [JOBS[workload.job](rank, workload, "", 3, 0) for workload in jobs] == [[]] * len(jobs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, whose library may have all kernels")
@pytest.mark.skipif(not ops.available(), reason="no library was built")
def test_missing_kernels_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no GPU" in str(devices.reason_against_gpu())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices, "_NEEDED", ("pipeline_advise_huge_pages",))
    assert devices.reason_against_gpu() == "no CUDA kernel of pipeline_advise_huge_pages"
    monkeypatch.setattr(devices, "_NEEDED", ())
    assert devices.reason_against_gpu() is None


@pytest.mark.skipif(not ops.available(), reason="no library was built")
@pytest.mark.parametrize("name", sorted(gpu.CONFIGS))
def test_jobs_run_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pr2916_table, "_STEPS", 2)
    monkeypatch.setattr(pr2916_table, "_WARM_UP", 2)
    monkeypatch.setattr(gpu, "_RECORDED", 6)
    monkeypatch.setattr(gpu, "_WARM_UP", 1)
    workload = replace(WORKLOADS[f"gpu-config-{name}-100x100k"], shape=(16, 4), tensor_count=2)
    config = replace(gpu.CONFIGS[name], batch=4, width=4, share_min=0.0)
    rounds = gpu.schedules("cpu", config, workload, 1, 0)
    assert [set(found) for found in rounds] == [set(workload.contenders)] * 2
    assert all(sample["seconds"] > 0 for found in rounds for sample in found.values())
    if name == "a":
        with pytest.raises(Mismatch, match="another config"):
            gpu.schedules("cpu", replace(config, share_min=1.0), workload, 1, 0)


@pytest.mark.skipif(not ops.available(), reason="no library was built")
@pytest.mark.parametrize("name", sorted(kernels.KERNELS))
def test_operators_run_beside_a_copy_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_CALLS", 2)
    moved: list[int] = []
    real = torch.ones

    def counted(*size: int, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.uint8:
            moved.append(size[0])
        return real(*size, **options)

    monkeypatch.setattr(torch, "ones", counted)
    workload = replace(WORKLOADS[f"gpu-kernel-{name}-128"], shape=(50, 8), tensor_count=2)
    job = replace(kernels.KERNELS[name], bags=6, pooling=3)
    rounds = kernels.rounds_of(torch.device("cpu"), job, workload, 2, 0)
    assert [set(found) for found in rounds] == [{"ours", "copy", "four-times"}] * 2
    assert all(sample["seconds"] > 0 for found in rounds for sample in found.values())
    # 36 ids and 13 offsets, 6 bags of 16 columns; rows that are read, or read and written with a float each.
    given, row = 8 * (36 + 13) + 4 * 6 * 16, 8 * job.dtype.itemsize
    (half,) = moved
    if job.steps:
        assert given + 2 * (row + 4) * 2 < 2 * half <= given + 2 * (row + 4) * 36
    else:
        assert 2 * half == given + 36 * row
