"""What a step with an offloader makes the host wait for, copies and launches, counted on the pretend device."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from conformance.harness import Rank
from conformance.harness.devices import kernel_sources
from conformance.provers.pretend_device import PretendDevice, PretendEngine
from perf.harness.paired import Round, Sample, interleave
from perf.harness.workloads import Workload

__all__ = ["measure_step"]

_WARM_UP, _STEPS = 3, 4


def measure_step(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Counts of a step of fused AdamW, and of ``offload()`` and ``prefetch()`` behind it.

    ``careless`` sends every parameter to the host and back in each step; ``plain`` has no offloader: what ``ours``
    launches besides is the offloader's own. ``slots`` leaves the update of each chunk to one kernel.
    """
    runs = {name: partial(_run, rank, workload, name) for name in workload.contenders}
    return interleave(runs, round_count=round_count, seed=seed, warm_up=False)


def _run(rank: Rank, workload: Workload, name: str) -> Sample:
    device = PretendDevice(sources=kernel_sources())
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(workload.shape, generator=generator) for _ in range(workload.tensor_count)]
    params = [torch.nn.Parameter(value.to(device.device)) for value in values]
    for param in params:
        param.grad = torch.ones_like(param)
    in_slots = name == "slots"
    optimizer = torch.optim.AdamW(params, fused=None if in_slots else True)
    offloader: Any = None
    if name != "plain":
        options: dict[str, Any] = {"engine": PretendEngine(), "chunk_bytes": 4 * workload.tensor_bytes}
        options["fused_update"] = in_slots or None
        make = rank.component("offload").OptimizerStateOffloader
        offloader = make(optimizer, **options)

    def look() -> None:
        for param in params if name == "careless" else ():
            param.detach().cpu().to(device.device).abs()

    for _ in range(_WARM_UP):
        optimizer.step()
    with device:
        for _ in range(_STEPS):
            optimizer.step()
            look()
        stepped = device.mark
        if offloader is not None:
            offloader.offload()
            offloader.prefetch()
            look()
    device.check()
    counts, moved = device.counts(0, stepped), device.counts(stepped)
    return {
        "wait_count": counts.host_waits / _STEPS,
        "launch_count": counts.launches / _STEPS,
        "to_device_bytes": counts.to_device.size_bytes / _STEPS,
        "to_host_bytes": counts.to_host.size_bytes / _STEPS,
        "copy_count": (counts.to_device.count + counts.to_host.count) / _STEPS,
        "pageable_count": (counts.to_device.pageable_count + counts.to_host.pageable_count) / _STEPS,
        "verb_wait_count": float(moved.host_waits),
    }
