"""The GPU's gate of checkpoints on made-up samples, and its job on the CPU, where it runs and means nothing."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch

from conformance.harness import Mismatch
from fastimpl.checkpoint import HuggingFaceStorageWriter
from fastimpl.checkpoint.device_copies import EngineStart
from perf.checkpoint import JOBS, gpu_stage
from perf.harness.gates import read_gates
from perf.harness.judge import Machine, Result, judge
from perf.harness.paired import Round
from perf.harness.workloads import read_workloads
from twinproof.engine import InlineEngine

WORKLOADS = read_workloads()
NAME = "checkpoint-gpu-stage-1gib"
(GATE,) = (gate for gate in read_gates(WORKLOADS) if gate.hardware == ("cuda",) and gate.workloads.get("full") == NAME)


def _rounds(ratio: float) -> list[Round]:
    seconds = {"ours": 1.0 / ratio, "copy": 1.0, "loop": 4.0}
    return [{who: {"seconds": value * (1 + 1e-4 * i)} for who, value in seconds.items()} for i in range(9)]


def test_the_gate_is_judged_on_a_gpu_only() -> None:
    for ratio, result in ((0.82, Result.PASS), (0.76, Result.FAIL), (3.0, Result.IMPLAUSIBLE)):
        outcome = judge(GATE, "full", WORKLOADS, {NAME: _rounds(ratio)}, Machine(("cpu", "cuda"), "ext4"))
        assert (outcome.result, outcome.control.result) == (result, Result.FAIL)
        outcome = judge(GATE, "full", WORKLOADS, {NAME: _rounds(ratio)}, Machine(("cpu",), "ext4"))
        assert outcome.result is Result.UNDECIDED


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, which would be measured")
def test_without_a_gpu_nothing_is_measured() -> None:
    assert JOBS["gpu_stage"](None, WORKLOADS[NAME], "", 3, 0) == []  # type: ignore[arg-type]


def test_the_job_runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, workload = InlineEngine(), replace(WORKLOADS[NAME], shape=(100, 30), tensor_count=3)
    # Blocks end within a tensor, and with one.
    monkeypatch.setattr(gpu_stage, "BLOCK_BYTES", 4096)
    rounds = gpu_stage.staging(engine, lambda device: EngineStart(engine), workload, 2, 0)
    assert [set(found) for found in rounds] == [set(workload.contenders)] * 2

    class Forgetful(InlineEngine):
        def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
            super().copy(target[:-1], source[:-1])

    with pytest.raises(Mismatch):
        gpu_stage.staging(engine, lambda device: EngineStart(Forgetful()), workload, 2, 0)


def test_blocks_are_those_of_a_writer() -> None:
    default = inspect.signature(HuggingFaceStorageWriter.__init__).parameters["block_bytes"].default
    assert default == gpu_stage.BLOCK_BYTES
