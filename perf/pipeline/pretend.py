"""What a step of each schedule makes the host wait for, copies and launches, counted on the pretend device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch

from conformance.harness import Rank
from conformance.harness.devices import kernel_sources
from conformance.provers.pretend_device import Counts, PretendDevice, PretendEngine
from fastimpl import pipeline
from perf.harness.paired import Round, Sample, interleave
from perf.harness.workloads import Workload
from perf.pipeline.pr2916_model import Batch, Sizes, loader_of, make_model

__all__ = ["measure_step", "sample_of"]

_WARM_UP, _STEPS = 4, 4
_SCHEDULES = {
    "base": "TrainPipelineBase",
    "sparse-dist": "TrainPipelineSparseDist",
    "fused": "TrainPipelineFusedSparseDist",
    "semi-sync": "TrainPipelineSemiSync",
    "careless": "TrainPipelineSparseDist",
}


def measure_step(
    is_mixed: bool, rank: Rank, workload: Workload, folder: str, round_count: int, seed: int
) -> list[Round]:
    """Counts of a step of each schedule, batches in pinned memory; ``careless`` looks at each batch's lengths.

    Half of the tables are weighted: two modules, table-wise or mixed, on one rank. Host waits inside of operators are
    known from the launchers' sources; where these are not at hand, ``wait_count`` is absent.
    """
    rows, dim = workload.shape
    sizes = Sizes(workload.tensor_count, rows, dim, batch=16, pooling=3, width=32)
    runs: dict[str, Callable[[], Sample]] = {
        name: partial(_run, name, sizes, seed, is_mixed=is_mixed) for name in workload.contenders
    }
    return interleave(runs, round_count=round_count, seed=seed, warm_up=False)


def sample_of(counts: Counts, step_count: int) -> Sample:
    """Per step; ``wait_count`` only where the waits of operators are known."""
    found = {
        "launch_count": counts.launches,
        "pageable_count": counts.to_device.pageable_count,
        "to_device_bytes": counts.to_device.size_bytes,
        "to_device_count": counts.to_device.count,
        "to_host_bytes": counts.to_host.size_bytes,
        "to_host_count": counts.to_host.count,
    }
    if kernel_sources() is not None:
        found["wait_count"] = counts.host_waits
    return {name: value / step_count for name, value in found.items()}


def _pinned(device: PretendDevice, batch: Batch) -> Batch:
    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        memory = device.pinned_empty(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        return memory.copy_(tensor)

    parts = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(
        batch,
        **{name: pinned(part) if isinstance(part, torch.Tensor) else part._map(pinned) for name, part in parts.items()},
    )


def _careless_forward(model: Any, batch: Batch) -> Any:
    for ids in (batch.plain, batch.weighted):
        lengths = ids.lengths().tolist()
        torch.tensor(lengths, device=batch.dense.device).sum()
    return model(batch)


def _run(name: str, sizes: Sizes, seed: int, *, is_mixed: bool) -> Sample:
    device = PretendDevice(sources=kernel_sources())
    model, optimizer = make_model(sizes, device=device.device, is_mixed=is_mixed)
    options: dict[str, Any] = {"start_batch": 0} if name == "semi-sync" else {}
    if name == "careless":
        options["custom_model_fwd"] = partial(_careless_forward, model)
    schedule: Any = getattr(pipeline, _SCHEDULES[name])(
        model, optimizer, device.device, engine=PretendEngine(), **options
    )
    loader: Iterator[Batch] = (_pinned(device, batch) for batch in loader_of(sizes, seed))
    for _ in range(_WARM_UP):
        schedule.progress(loader)
    batches = [next(loader) for _ in range(_STEPS)]
    ahead = iter(batches)
    with device:
        for _ in range(_STEPS):
            schedule.progress(ahead)
    device.check()
    found = sample_of(device.counts(), _STEPS)
    given = sum(part.nbytes for batch in batches for part in _parts(batch)) / _STEPS
    return {**found, "extra_to_device_bytes": found["to_device_bytes"] - given}


def _parts(batch: Batch) -> Iterator[torch.Tensor]:
    """What a batch is made of."""
    yield from (batch.dense, batch.target)
    for ids in (batch.plain, batch.weighted):
        known = (ids.values(), ids.weights_or_none(), ids.lengths_or_none(), ids.offsets_or_none())
        yield from (part for part in known if part is not None)
