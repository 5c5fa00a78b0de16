"""The GPU's gates on made-up samples, and their jobs on the CPU, where they run and mean nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from conformance.harness import Mismatch
from fastimpl.offload import OptimizerStateOffloader
from perf.harness.formulas import evaluate_bound
from perf.harness.gates import Gate, read_gates
from perf.harness.judge import Machine, Result, judge
from perf.harness.paired import Round
from perf.harness.results import machine_of
from perf.harness.workloads import read_workloads
from perf.offload import JOBS, gpu, gpu_memory, gpu_update
from twinproof.engine import InlineEngine

WORKLOADS = read_workloads()
GATES = [gate for gate in read_gates(WORKLOADS) if gate.hardware == ("cuda",) and gate.id.startswith("offload-")]


RATIOS = [gate for gate in GATES if gate.kind.is_paired]
COUNTS = [gate for gate in GATES if not gate.kind.is_paired]


def _rounds(gate: Gate, ratio: float) -> list[Round]:
    """The peer takes a second, the subject as much more as ``ratio`` says, the control four times as long."""
    assert gate.peer is not None
    seconds = {gate.control.subject: 4.0, gate.peer: 1.0, gate.subject: 1.0 / ratio}
    return [{who: {"seconds": value * (1 + 1e-4 * i)} for who, value in seconds.items()} for i in range(9)]


@pytest.mark.parametrize("gate", RATIOS, ids=lambda gate: gate.id)
def test_gates_are_judged_on_a_gpu_only(gate: Gate) -> None:
    assert isinstance(gate.floor, float)
    name = gate.workloads["full"]
    for ratio, result in (
        (gate.floor * 1.02, Result.PASS),
        (gate.floor * 0.95, Result.FAIL),
        (1000.0, Result.IMPLAUSIBLE),
    ):
        outcome = judge(gate, "full", WORKLOADS, {name: _rounds(gate, ratio)}, Machine(("cpu", "cuda"), "ext4"))
        assert (outcome.result, outcome.control.result) == (result, Result.FAIL)
    for rounds in ([], _rounds(gate, 1.0)):
        outcome = judge(gate, "full", WORKLOADS, {name: rounds}, Machine(("cpu",), "ext4"))
        assert outcome.result is Result.UNDECIDED


@pytest.mark.parametrize("gate", COUNTS, ids=lambda gate: gate.id)
def test_bytes_and_waits_are_judged_on_a_gpu_only(gate: Gate) -> None:
    assert gate.ceiling is not None
    name = gate.workloads["full"]
    bound = evaluate_bound(gate.ceiling, WORKLOADS[name].sizes())
    for value, result in ((bound, Result.PASS), (bound + 1, Result.FAIL)):
        found: Round = {gate.subject: {gate.metric: value}, gate.control.subject: {gate.metric: 2 * bound + 1}}
        # A share is of the peer's count.
        found |= {} if gate.peer is None else {gate.peer: {gate.metric: 1.0}}
        rounds = [found] * 3
        outcome = judge(gate, "full", WORKLOADS, {name: rounds}, Machine(("cpu", "cuda"), "ext4"))
        assert (outcome.result, outcome.control.result) == (result, Result.FAIL)
        outcome = judge(gate, "full", WORKLOADS, {name: rounds}, Machine(("cpu",), "ext4"))
        assert outcome.result is Result.UNDECIDED


def test_a_machine_with_a_gpu_is_of_class_cuda() -> None:
    facts: dict[str, Any] = {"cpu": {"count": 2}, "gpus": [{"name": "NVIDIA H200"}], "file_system": {"type": "ext4"}}
    assert machine_of(facts).classes == ("cpu", "cuda", "nvidia-h200")
    assert machine_of({**facts, "gpus": []}).classes == ("cpu",)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, which would be measured")
def test_without_a_gpu_nothing_is_measured() -> None:
    ours = [workload for workload in WORKLOADS.values() if workload.component == "offload"]
    jobs = {workload.name: workload for workload in ours if workload.job.startswith("gpu_")}
    assert len(jobs) == 8
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
    assert [set(found) for found in rounds] == [set(workload.contenders) - {"torchao"}] * 2


def test_updates_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = replace(WORKLOADS["offload-gpu-update-1gib"], shape=(16, 16), tensor_count=4)
    rounds = gpu_update.updates(InlineEngine(), workload, 2, 0)
    assert [set(found) for found in rounds] == [set(workload.contenders)] * 2
    # A step that is another step is noticed.
    monkeypatch.setattr(gpu_update, "hyper_of", lambda *_, **__: [1.0, 0.0, 0.2, 0.999, 0.001, 1.0, -0.001, 1e-8, 0.0])
    with pytest.raises(Mismatch):
        gpu_update.updates(InlineEngine(), workload, 2, 0)


class _Arena(InlineEngine):
    """Memory as a caching allocator has it, a pool for each stream; it is its own meter."""

    def __init__(self) -> None:
        super().__init__()
        self.active = self.peak = self.reserved = self.pinned = self.streams = 0
        self.where = "host"
        self.free: dict[str, list[int]] = {}

    def stream(self, name: str, priority: int = 0) -> Any:
        self.streams += 1
        return f"{name}-{self.streams}"

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self.where, before = stream, self.where
        yield
        self.where = before

    def device_empty(self, size_bytes: int) -> torch.Tensor:
        pool = self.free.setdefault(self.where, [])
        if size_bytes in pool:
            pool.remove(size_bytes)
        else:
            self.reserved += size_bytes
        self.active += size_bytes
        self.peak = max(self.peak, self.active)
        memory = super().device_empty(size_bytes)
        weakref.finalize(memory.untyped_storage(), self._give_back, pool, size_bytes)
        return memory

    def _give_back(self, pool: list[int], size_bytes: int) -> None:
        self.active -= size_bytes
        pool.append(size_bytes)

    def settle(self) -> None:
        self.reserved, self.free, self.peak = self.active, {}, self.active

    def active_bytes(self) -> int:
        return self.active

    def peak_bytes(self) -> int:
        return self.peak

    def reserved_bytes(self) -> int:
        return self.reserved

    def used_bytes(self) -> int:
        return self.reserved

    def pinned_like(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pinned += 1 << (tensor.nbytes - 1).bit_length()
        return torch.empty_like(tensor)

    def pinned_bytes(self) -> int:
        return self.pinned

    def waits_in(self, job: Callable[[], Any]) -> int:
        job()
        return 0


def _counted(program: Callable[..., list[Round]], name: str, shape: tuple[int, ...]) -> Round:
    workload, arena = replace(WORKLOADS[name], shape=shape, tensor_count=8), _Arena()
    found = program(arena, arena, OptimizerStateOffloader, workload, 2, 0)
    assert [set(one) for one in found] == [set(workload.contenders)] * 2
    return found[1]


def test_memory_is_told_from_too_much_of_it() -> None:
    found = _counted(gpu_memory.memory, "offload-gpu-memory-576mib", (24, 24))
    tensor_bytes = 4 * 24 * 24
    assert found["ours"]["peak_bytes"] == 4 * tensor_bytes
    assert found["whole"]["peak_bytes"] == 2 * 8 * tensor_bytes
    assert found["ours"]["growth_bytes"] == 0 < found["careless"]["growth_bytes"]
    assert found["ours"]["nvml_growth_bytes"] == 0 < found["careless"]["nvml_growth_bytes"]
    assert found["ours"]["pinned_bytes"] == found["ours"]["payload_bytes"] == 2 * 8 * tensor_bytes
    assert found["careless"]["pinned_bytes"] == 2 * 8 * 4096


def test_a_state_dict_is_told_from_one_that_is_brought_back() -> None:
    found = _counted(gpu_memory.snapshots, "offload-gpu-snapshot-1gib", (16, 16))
    assert found["ours"]["peak_bytes"] == 0
    assert found["brought"]["peak_bytes"] > 2 * 4 * 16 * 16


def test_queueing_is_measured() -> None:
    found = _counted(gpu_memory.host, "offload-gpu-host-1e3", (16, 16))
    assert all(sample["seconds"] > 0 for sample in found.values())
