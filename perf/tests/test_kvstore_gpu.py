"""The row store's gates for a GPU, as far as a machine without one can tell: they are undecided, and their jobs run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fastimpl import ops
from perf.harness.gates import read_gates
from perf.harness.judge import Machine, Result, judge
from perf.harness.workloads import read_workloads
from perf.kvstore import JOBS, kernels

WORKLOADS = read_workloads()
GATES = [gate for gate in read_gates(WORKLOADS) if gate.hardware == ("cuda",) and gate.id.startswith("kv-")]


def test_gates_are_judged_on_a_gpu_only() -> None:
    assert [(gate.id, gate.floor) for gate in GATES] == [
        ("kv-gpu-get-256", 0.5),
        ("kv-gpu-get-1056", 0.5),
        ("kv-gpu-export", 0.6),
        ("kv-gpu-insert", 0.35),
        ("kv-gpu-host-rows", 0.8),
    ]
    for gate in GATES:
        workload = WORKLOADS[gate.workloads["full"]]
        sample = {"ours": {"seconds": 1.0}, "copy": {"seconds": 0.9}, "four-times": {"seconds": 4.0}}
        rounds = {workload.name: [sample] * 9}
        outcome = judge(gate, "full", WORKLOADS, rounds, Machine(("cpu", "cuda"), "ext4"))
        assert (outcome.result, outcome.control.result) == (Result.PASS, Result.FAIL), outcome.reason
        assert judge(gate, "full", WORKLOADS, rounds, Machine(("cpu",), "ext4")).result is Result.UNDECIDED


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, which would be measured")
def test_without_a_gpu_nothing_is_measured() -> None:
    jobs = [workload for workload in WORKLOADS.values() if workload.component == "kvstore" and "gpu" in workload.job]
    assert {workload.job for workload in jobs} == {f"gpu-kernel-{name}" for name in kernels.KERNELS}
    rank: Any = None
    assert [JOBS[workload.job](rank, workload, "", 3, 0) for workload in jobs] == [[]] * len(jobs)


@pytest.mark.skipif(not ops.available(), reason="no library was built")
@pytest.mark.parametrize("name", kernels.KERNELS)
def test_jobs_run_beside_a_copy_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_CALLS", 2)
    copied: list[int] = []
    real = torch.ones

    def counted(*size: int, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.uint8:
            copied.append(size[0])
        return real(*size, **options)

    monkeypatch.setattr(torch, "ones", counted)
    workload = replace(WORKLOADS[f"gpu-kernel-{name}-256"], shape=(10, 64), tensor_count=3)
    rounds = kernels.rounds_of(torch.device("cpu"), name, workload, 2, 0)
    assert [set(found) for found in rounds] == [{"ours", "copy", "four-times"}] * 2
    assert all(sample["seconds"] > 0 for found in rounds for sample in found.values())
    # An id and a row that is read and written; a new row is made of its weights, 56 of them. Rows alone cross the link.
    moved = {
        "get": 10 * (8 + 512),
        "export": 30 * (8 + 512),
        "insert": 10 * (8 + 4 * 56 + 256),
        "host": 10 * 512,
    }[name]
    assert copied == [moved // 2]
