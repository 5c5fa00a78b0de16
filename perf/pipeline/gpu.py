"""The pipeline's gates on a GPU: what Fused saves beside SparseDist, and what it could. No GPU has run this yet.

Config a: a dense optimizer of products of matrices (Muon), at least 12 % of a SparseDist step. Config b: one that is
bound by memory, as the lookup is: there is nothing to win but the gaps. Config c: a step so short that the host, which
waits for sizes and ids, leaves the device idle. One rank: what can be hidden is the dense optimizer, the lookup and the
host's gaps. The jobs run on the CPU too, without meaning, as they do in CI.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from conformance.harness import Mismatch, Rank
from fastimpl import pipeline
from fastimpl.pipeline.overlap import OverlapReport, overlap_report
from fastimpl.pipeline.recording import CudaClock, HostClock, Recorder
from perf.harness.nvml import open_gpu
from perf.harness.paired import Round, interleave
from perf.harness.workloads import Workload
from perf.pipeline.devices import reason_against_gpu
from perf.pipeline.meters import meter_for
from perf.pipeline.pr2916_model import SeedModel, Sizes, loader_of, make_model
from perf.pipeline.pr2916_table import CONTENDERS, CONTROLS, Turns, by_step
from twinproof.engine import CudaEngine, InlineEngine

__all__ = ["CONFIGS", "Config", "measure_config", "schedules"]

_RECORDED, _WARM_UP = 10, 5
_ITEM_BYTES = 4
# Instead of nothing or less, which has no ratio.
_NOTHING_S = 1e-9


def _muon(model: SeedModel) -> torch.optim.Optimizer:
    """Matrices of the over-arch only; nothing else is trained, so that one optimizer is the whole of it."""
    for name, param in model.named_parameters():
        param.requires_grad_(name.startswith("top.") and param.dim() == 2)
    return torch.optim.Muon([param for param in model.parameters() if param.requires_grad], lr=1e-3)


def _adamw(model: SeedModel) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def _sgd(model: SeedModel) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@dataclass(frozen=True)
class Config:
    """Batch, width of the over-arch, the dense optimizer, and bytes that it moves for each parameter.

    ``share_min``: of a SparseDist step that the dense optimizer must take, or else this is another config.
    """

    batch: int
    width: int
    optimizer: Callable[[SeedModel], torch.optim.Optimizer]
    bytes_per_param: int
    share_min: float = 0.0


CONFIGS = {
    # Momentum is read and written, the gradient read, the parameter read and written.
    "a": Config(batch=4096, width=2048, optimizer=_muon, bytes_per_param=20, share_min=0.12),
    "b": Config(batch=4096, width=4096, optimizer=_adamw, bytes_per_param=28),
    "c": Config(batch=512, width=256, optimizer=_sgd, bytes_per_param=12),
}


def measure_config(name: str, rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Nothing is measured without a GPU and its kernels, which leaves the gate undecided."""
    if reason_against_gpu() is not None:
        return []
    return schedules("cuda", CONFIGS[name], workload, round_count, seed)


def schedules(device: str, config: Config, workload: Workload, round_count: int, seed: int) -> list[Round]:
    """``seconds`` of steps of schedules, and of what follows from them, by step.

    ``saved``: SparseDist less Fused. ``saved-by-blocking``: the same of a Fused whose host waits. ``hideable``: the
    shorter of dense optimizer and lookup, less what both need of the memory's bandwidth beyond the longer. ``idle``:
    what the caller's stream has nothing to do in a SparseDist step.
    """
    rows, dim = workload.shape
    sizes = Sizes(workload.tensor_count, rows, dim, config.batch, pooling=10, width=config.width)
    model, _ = make_model(sizes, device=device)
    optimizer = config.optimizer(model)
    loader = loader_of(sizes, seed + 1, is_pinned=device == "cuda")
    turns = Turns(model, optimizer, loader, device, meter_for(device))
    report = _report(turns)
    lookup, dense = (_duration(report, stage) for stage in ("lookup", "dense_optimizer"))
    if dense < config.share_min * report.step_s:
        raise Mismatch("another config", got=dense / report.step_s, expected=f">= {config.share_min} of a step")
    names = [name for name in workload.contenders if name in CONTENDERS or name in CONTROLS]
    with open_gpu() as gpu:
        runs = {name: partial(turns.take, name) for name in names}
        taken = interleave(runs, round_count=round_count, seed=seed, gpu=gpu)
    joint_s = _joint_bytes(sizes, model, config) / _copy_rate(device)
    on_default = report.serial_s - sum(_duration(report, stage) for stage in ("batch_copy", "input_dist"))
    fixed = {
        "hideable": min(lookup, dense) - max(0.0, joint_s - max(lookup, dense)),
        "idle": report.step_s - on_default,
    }
    return [_with_derived(found, fixed) for found in by_step(taken)]


def _with_derived(found: Round, fixed: dict[str, float]) -> Round:
    seconds = {name: sample["seconds"] for name, sample in found.items()}
    derived = {
        "saved": seconds["sparse-dist"] - seconds["fused:data_dist"],
        "saved-by-blocking": seconds["sparse-dist"] - seconds["blocking"],
        **fixed,
    }
    return {**found, **{name: {"seconds": max(value, _NOTHING_S)} for name, value in derived.items()}}


def _report(turns: Turns) -> OverlapReport:
    """Durations of stages in SparseDist, where lookup and dense optimizer do not share the device."""
    on_gpu = turns.device == "cuda"
    recorder = Recorder(CudaEngine(), CudaClock(), sees_reads=True) if on_gpu else Recorder(InlineEngine(), HostClock())
    schedule: Any = pipeline.TrainPipelineSparseDist(
        turns.model, turns.optimizer, torch.device(turns.device), engine=recorder
    )
    for _ in range(_WARM_UP):
        schedule.progress(turns.loader)
    recorder.forget()
    for _ in range(_RECORDED):
        with recorder.step():
            schedule.progress(turns.loader)
    program = recorder.program()
    schedule.reset()
    schedule.detach()
    return overlap_report(program, schedule="SparseDist", device=turns.device)


def _duration(report: OverlapReport, stage: str) -> float:
    return sum(found.duration_s for found in report.stages if found.stage == stage)


def _joint_bytes(sizes: Sizes, model: SeedModel, config: Config) -> int:
    """Rows read and columns written by the lookup, and what the optimizer moves."""
    columns = sizes.table_count * sizes.dim
    lookup = sizes.batch * columns * (sizes.pooling + 1) * _ITEM_BYTES
    params = sum(param.numel() for param in model.parameters() if param.requires_grad)
    return lookup + params * config.bytes_per_param


def _copy_rate(device: str) -> float:
    """Bytes a second, read and written, of a copy on the device, in this run."""
    source = torch.ones(1 << 28 if device == "cuda" else 1 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    turns = [_copy_seconds(source, target) for _ in range(5)]
    return 2 * source.nbytes / min(turns[1:])


def _copy_seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    clock: Any = CudaClock() if source.is_cuda else HostClock()
    stream = torch.cuda.current_stream() if source.is_cuda else None
    begun = clock.mark(stream)
    target.copy_(source)
    seconds: float = clock.seconds(begun, clock.mark(stream))
    return seconds
