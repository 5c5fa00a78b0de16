"""The table of torchrec PR 2916: every schedule, for each lookup stream, with step times and peak memory.

All schedules drive one model in turns, so that the tables fit once: a schedule attaches, warms up, is timed for some
steps, and leaves. Turns are interleaved, in an order drawn for every round; steps are those of the steady state, where
those of the PR contained filling and draining. Every step's time is a sample, and is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from conformance.harness import Rank
from fastimpl import pipeline
from perf.harness.paired import Round, Sample, interleave
from perf.harness.workloads import Workload
from perf.pipeline.devices import reason_against_gpu
from perf.pipeline.meters import Meter, meter_for
from perf.pipeline.pr2916_model import Sizes, loader_of, make_model

__all__ = ["CONTENDERS", "CONTROLS", "Turns", "by_step", "measure_table"]

_FUSED = "TrainPipelineFusedSparseDist"
_STREAMS = ("data_dist", "current", "new")
# Name -> class and options. "before-optimizer" is the placement that the PR marks with an asterisk.
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "semi-sync": ("TrainPipelineSemiSync", {"start_batch": 0}),
    **{f"fused:{stream}": (_FUSED, {"emb_lookup_stream": stream}) for stream in _STREAMS},
    **{
        f"fused-before-optimizer:{stream}": (
            _FUSED,
            {"emb_lookup_stream": stream, "embedding_lookup_before_optimizer": True},
        )
        for stream in _STREAMS
    },
    "sparse-dist": ("TrainPipelineSparseDist", {}),
    "base": ("TrainPipelineBase", {}),
}
# What gates must refuse: SparseDist that holds an eighth of the tables' bytes besides, and Fused whose host waits for
# the device after every step.
CONTROLS = {"hoarder": "sparse-dist", "blocking": "fused:new"}
# As many as are in flight, and two more, for allocations that only a second round of them makes.
_WARM_UP, _STEADY, _STEPS = 5, 6, 10


@dataclass
class Turns:
    """One model, and how schedules take turns on it. ``hoard_bytes``: what the hoarder holds."""

    model: Any
    optimizer: torch.optim.Optimizer
    loader: Iterator[Any]
    device: str
    meter: Meter
    hoard_bytes: int = 0

    def take(self, name: str) -> Sample:
        """The seconds of each step, and peaks: of the whole turn on a GPU, on a host the least of some steps'."""
        kind, options = CONTENDERS[CONTROLS.get(name, name)]
        self.meter.start()
        with self.meter.watching():
            held = torch.empty(self.hoard_bytes if name == "hoarder" else 0, dtype=torch.uint8, device=self.device)
            # Whoever trains on several ranks reduces dense gradients; what is timed here is the schedule.
            given = {**options, "reduce_dense_gradients": False}
            schedule = getattr(pipeline, kind)(self.model, self.optimizer, torch.device(self.device), **given)
            for _ in range(_WARM_UP):
                schedule.progress(self.loader)
            for _ in range(_STEADY):
                self.meter.step(partial(schedule.progress, self.loader))

        def step() -> None:
            schedule.progress(self.loader)
            if name == "blocking" and self.device == "cuda":
                torch.cuda.synchronize()

        found = {**self.timed(step), **self.meter.peaks()}
        del held
        schedule.reset()
        schedule.detach()
        return found

    def timed(self, step: Callable[[], Any]) -> Sample:
        """Seconds of each of some steps, between one and the next, on the device's own clock where it has one."""
        marks = [self._mark()]
        for _ in range(_STEPS):
            step()
            marks.append(self._mark())
        if self.device == "cuda":
            marks[-1].synchronize()
            seconds = [a.elapsed_time(b) / 1000 for a, b in pairwise(marks)]
        else:
            seconds = [b - a for a, b in pairwise(marks)]
        return {"seconds": sum(seconds), **{_key(i): value for i, value in enumerate(seconds)}}

    def _mark(self) -> Any:
        if self.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _key(step: int) -> str:
    return f"step_{step}_seconds"


def measure_table(
    device: str,
    batch: int,
    width: int,
    rank: Rank,
    workload: Workload,
    folder: str,
    round_count: int,
    seed: int,
) -> list[Round]:
    """A round for each timed step of each schedule: ``seconds``, and the peaks of the turn that it belongs to.

    Nothing is measured where the device that is asked for, or its kernels, are missing.
    """
    if device == "cuda" and reason_against_gpu() is not None:
        return []
    torch.set_num_threads(1 if rank.world_size > 1 else torch.get_num_threads())
    rows, dim = workload.shape
    sizes = Sizes(workload.tensor_count, rows, dim, batch, pooling=10, width=width)
    meter = meter_for(device)
    with meter.watching():
        model, optimizer = make_model(sizes, world_size=rank.world_size, device=device)
    loader = loader_of(sizes, seed + 1 + rank.rank, is_pinned=device == "cuda")
    turns = Turns(model, optimizer, loader, device, meter, workload.payload_bytes // 8)
    taken = interleave(
        {name: partial(turns.take, name) for name in workload.contenders},
        round_count=round_count,
        seed=seed,
    )
    return by_step(taken)


def by_step(taken: Sequence[Round]) -> list[Round]:
    """A round of samples for each step; steps of one round of turns stand beside each other."""
    rounds = []
    for found in taken:
        for step in range(_STEPS):
            rounds.append({name: _sample(sample, step) for name, sample in found.items()})
    return rounds


def _sample(sample: Sample, step: int) -> Sample:
    peaks = {key: value for key, value in sample.items() if key.startswith("peak_")}
    return {"seconds": sample[_key(step)], **peaks}
