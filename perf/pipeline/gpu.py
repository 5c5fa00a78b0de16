"""The pipeline's gates on a GPU: what Fused saves beside SparseDist, and what it could.

Config a: a dense optimizer of products of matrices (Muon), at least 12 % of a SparseDist step. Config b: one that is
bound by memory, as the lookup is: there is nothing to win but the gaps. Config c: a step so short that the host, which
waits for sizes and ids, leaves the device idle. One rank: what can be hidden is the dense optimizer, the lookup and the
host's gaps. How much of lookup and optimizer a device hides at all is measured beside it, on two streams and no
pipeline: kernels that fill the device do not run at the same time, whatever streams they are on. The jobs run on the
CPU too, without meaning, as they do in CI.
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
from perf.harness.paired import Round, Sample, interleave
from perf.harness.workloads import Workload
from perf.pipeline.devices import reason_against_gpu
from perf.pipeline.meters import meter_for
from perf.pipeline.pr2916_model import SeedModel, Sizes, loader_of, make_model
from perf.pipeline.pr2916_table import CONTENDERS, CONTROLS, Turns, by_step
from twinproof.engine import CudaEngine, InlineEngine

__all__ = ["CONFIGS", "Bare", "Config", "measure_config", "schedules"]

_RECORDED, _WARM_UP = 10, 5
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
    """Batch, width of the over-arch, and the dense optimizer.

    ``share_min``: of a SparseDist step that the dense optimizer must take, or else this is another config.
    """

    batch: int
    width: int
    optimizer: Callable[[SeedModel], torch.optim.Optimizer]
    share_min: float = 0.0


CONFIGS = {
    "a": Config(batch=4096, width=2048, optimizer=_muon, share_min=0.12),
    "b": Config(batch=4096, width=4096, optimizer=_adamw),
    "c": Config(batch=512, width=256, optimizer=_sgd),
}


def measure_config(name: str, rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Nothing is measured without a GPU and its kernels, which leaves the gate undecided."""
    if reason_against_gpu() is not None:
        return []
    return schedules("cuda", CONFIGS[name], workload, round_count, seed)


def schedules(device: str, config: Config, workload: Workload, round_count: int, seed: int) -> list[Round]:
    """``seconds`` of steps of schedules, and of what follows from them, by step.

    ``one-stream``: a lookup and the dense optimizer's step behind each other, and nothing else. ``two-streams``: both
    at once. ``hideable``: the difference. ``saved``: SparseDist less Fused. ``saved-by-blocking``: the same of a Fused
    whose host waits. ``idle``: what the caller's stream has nothing to do in a SparseDist step.
    """
    rows, dim = workload.shape
    sizes = Sizes(workload.tensor_count, rows, dim, config.batch, pooling=10, width=config.width)
    model, _ = make_model(sizes, device=device)
    optimizer = config.optimizer(model)
    loader = loader_of(sizes, seed + 1, is_pinned=device == "cuda")
    turns = Turns(model, optimizer, loader, device, meter_for(device))
    report = _report(turns)
    dense = _duration(report, "dense_optimizer")
    if dense < config.share_min * report.step_s:
        raise Mismatch("another config", got=dense / report.step_s, expected=f">= {config.share_min} of a step")
    names = [name for name in workload.contenders if name in CONTENDERS or name in CONTROLS]
    runs: dict[str, Callable[[], Sample]] = {name: partial(turns.take, name) for name in names}
    bare = Bare(model, optimizer, next(loader), device)
    runs |= {"one-stream": partial(turns.timed, bare.one_stream), "two-streams": partial(turns.timed, bare.two_streams)}
    with open_gpu() as gpu:
        taken = interleave(runs, round_count=round_count, seed=seed, gpu=gpu)
    on_default = report.serial_s - sum(_duration(report, stage) for stage in ("batch_copy", "input_dist"))
    return [_with_derived(found, report.step_s - on_default) for found in by_step(taken)]


class Bare:
    """Lookups of one batch and the dense optimizer's step, with no pipeline around them."""

    def __init__(self, model: SeedModel, optimizer: torch.optim.Optimizer, batch: Any, device: str) -> None:
        self._optimizer, self._ready = optimizer, []
        for module, ids in ((model.plain, batch.plain), (model.weighted, batch.weighted)):
            made: Any = module
            context = made.create_context()
            self._ready.append((made, context, made.input_dist(context, ids.to(device)).wait().wait()))
        trained = [param for group in optimizer.param_groups for param in group["params"]]
        # So small that what is trained stays finite, however often it is stepped.
        self._gradients = [(param, torch.full_like(param, 1e-6)) for param in trained]
        self._side: Any = torch.cuda.Stream() if device == "cuda" else None  # type: ignore[no-untyped-call]

    def _look_up(self) -> None:
        with torch.no_grad():
            for module, context, ids in self._ready:
                module.compute(context, ids)

    def _step(self) -> None:
        for param, gradient in self._gradients:
            param.grad = gradient
        self._optimizer.step()

    def one_stream(self) -> None:
        """Lookup, then step."""
        self._look_up()
        self._step()

    def two_streams(self) -> None:
        """The lookup on a stream of its own, given to the device behind the step: then most of it was hidden."""
        if self._side is None:
            self.one_stream()
            return
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        self._step()
        with torch.cuda.stream(self._side):
            self._look_up()
        current.wait_stream(self._side)


def _with_derived(found: Round, idle_s: float) -> Round:
    seconds = {name: sample["seconds"] for name, sample in found.items()}
    derived = {
        "saved": seconds["sparse-dist"] - seconds["fused:data_dist"],
        "saved-by-blocking": seconds["sparse-dist"] - seconds["blocking"],
        "hideable": seconds["one-stream"] - seconds["two-streams"],
        "idle": idle_s,
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
