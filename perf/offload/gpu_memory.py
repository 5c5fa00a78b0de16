"""What offloading costs the host and keeps on a GPU: G6-G10 of docs/offload-limits.md. No GPU has run this."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from conformance.harness import Rank
from fastimpl.streams import CudaEngine
from perf.harness.paired import Round, Sample, interleave
from perf.harness.workloads import Workload
from perf.offload.gpu import STATES, make_optimizer, timed, wait
from perf.offload.meters import CudaMeter, Meter

__all__ = ["host", "measure_host", "measure_memory", "measure_snapshots_on_gpu", "memory", "snapshots"]

_CYCLES = 50  # After which nothing may have grown since the second.

Program = Callable[[Any, Meter, Any, Workload, int, int], list[Round]]


def _on_gpu(program: Program, rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Nothing is measured without a GPU, which leaves the gate undecided."""
    if not torch.cuda.is_available():
        return []
    kind = rank.component("offload").OptimizerStateOffloader
    return program(CudaEngine(), CudaMeter(), kind, workload, round_count, seed)


def _states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [state[name] for state in optimizer.state.values() for name in STATES]


def _grown(meter: Meter, used_bytes: int | None) -> Sample:
    """What the device has lost since, by NVML; nothing where NVML is not there."""
    now = meter.used_bytes()
    return {} if now is None or used_bytes is None else {"nvml_growth_bytes": float(now - used_bytes)}


def host(engine: Any, meter: Meter, kind: Any, workload: Workload, round_count: int, seed: int) -> list[Round]:
    """The host's time, and its waits, to queue: ``ours``, both verbs; ``launches``, a copy for each tensor each way.

    ``loop`` moves each tensor by a pageable ``.to``, which waits.
    """
    optimizer, other = make_optimizer(engine, workload), make_optimizer(engine, workload)
    offloader = kind(optimizer, engine=engine, chunk_bytes=2 * workload.payload_bytes)
    tensors = _states(other)
    homes = [engine.host_empty(tensor.nbytes).view(tensor.dtype).view(tensor.shape) for tensor in tensors]

    def verbs() -> None:
        offloader.offload()
        offloader.prefetch()

    def launches() -> None:
        for home, tensor in zip(homes, tensors, strict=True):
            engine.copy(home, tensor)
        for home, tensor in zip(homes, tensors, strict=True):
            engine.copy(tensor, home)

    def loop() -> None:
        for tensor in tensors:
            tensor.to("cpu", copy=True).to(engine.device, copy=True)

    def queued(job: Callable[[], Any], prepare: Callable[[], Any]) -> Sample:
        prepare()
        wait(engine)
        begun = time.perf_counter()
        job()
        seconds = time.perf_counter() - begun
        prepare()
        wait(engine)
        return {"seconds": seconds, "wait_count": float(meter.waits_in(job))}

    jobs: dict[str, Callable[[], Sample]] = {
        "ours": partial(queued, verbs, lambda: offloader.to_device(offloader.bundles)),
        "launches": partial(queued, launches, lambda: None),
        "loop": partial(queued, loop, lambda: None),
    }
    rounds = interleave({who: jobs[who] for who in workload.contenders}, round_count=round_count, seed=seed)
    offloader.close()
    return rounds


def memory(engine: Any, meter: Meter, kind: Any, workload: Workload, round_count: int, seed: int) -> list[Round]:
    """Peak, growth and pinned bytes of steps: ``ours``; ``whole``, all states at once; ``careless``, see below."""
    chunk_bytes = 2 * workload.tensor_bytes

    def stepped(chunk: int) -> Sample:
        optimizer = make_optimizer(engine, workload)
        payload = sum(tensor.nbytes for tensor in _states(optimizer))
        before, pinned = meter.active_bytes(), meter.pinned_bytes()
        offloader = kind(optimizer, engine=engine, chunk_bytes=chunk)
        offloader.settle()
        # The first step makes what lasts; the peak is that of all the others.
        optimizer.step()
        offloader.settle()
        meter.settle()
        base, saved = meter.active_bytes(), before - meter.active_bytes()
        optimizer.step()
        offloader.settle()
        reserved, used = meter.reserved_bytes(), meter.used_bytes()
        begun = time.perf_counter()
        for _ in range(_CYCLES - 2):
            optimizer.step()
        offloader.settle()
        found = {
            **_grown(meter, used),
            "seconds": time.perf_counter() - begun,
            "peak_bytes": float(meter.peak_bytes() - base),
            "growth_bytes": float(meter.reserved_bytes() - reserved),
            "pinned_bytes": float(offloader.stats().host_bytes + meter.pinned_bytes() - pinned),
            "saved_bytes": float(saved),
            "payload_bytes": float(payload),
        }
        offloader.close()
        return found

    def careless() -> Sample:
        """Streams are made anew for each step, and each state has pinned memory of its own, rounded by torch."""
        optimizer = make_optimizer(engine, workload)
        meter.settle()
        pinned, reserved, used = meter.pinned_bytes(), meter.reserved_bytes(), meter.used_bytes()
        begun = time.perf_counter()
        homes = [meter.pinned_like(state).copy_(state) for state in _states(optimizer)]
        for _ in range(_CYCLES):
            with engine.on(engine.stream("anew")):
                for home in homes:
                    here = engine.device_empty(home.nbytes)
                    engine.copy(here, home.view(-1).view(torch.uint8))
        wait(engine)
        return {
            **_grown(meter, used),
            "seconds": time.perf_counter() - begun,
            "growth_bytes": float(meter.reserved_bytes() - reserved),
            "pinned_bytes": float(meter.pinned_bytes() - pinned),
        }

    jobs: dict[str, Callable[[], Sample]] = {
        "ours": partial(stepped, chunk_bytes),
        "whole": partial(stepped, 0),
        "careless": careless,
    }
    return interleave({who: jobs[who] for who in workload.contenders}, round_count=round_count, seed=seed)


def snapshots(engine: Any, meter: Meter, kind: Any, workload: Workload, round_count: int, seed: int) -> list[Round]:
    """A state dict while offloaded: ``ours``; a host ``copy`` of as many bytes; ``pickled``; ``brought`` back first."""
    optimizer = make_optimizer(engine, workload)
    offloader = kind(optimizer, engine=engine, chunk_bytes=2 * workload.tensor_bytes)
    whole = torch.ones(2 * workload.payload_bytes, dtype=torch.uint8)

    def brought() -> None:
        offloader.to_device(offloader.bundles)
        offloader.snapshot()
        offloader.offload()
        offloader.settle()

    def measured(job: Callable[[], Any]) -> Sample:
        offloader.settle()
        meter.settle()
        base = meter.active_bytes()
        found = timed(engine, job)
        return {**found, "peak_bytes": float(meter.peak_bytes() - base)}

    jobs = {
        "ours": offloader.snapshot,
        "copy": whole.clone,
        "pickled": lambda: pickle.loads(pickle.dumps(offloader.snapshot())),
        "brought": brought,
    }
    runs = {who: partial(measured, jobs[who]) for who in workload.contenders}
    rounds = interleave(runs, round_count=round_count, seed=seed)
    offloader.close()
    return rounds


measure_host = partial(_on_gpu, host)
measure_memory = partial(_on_gpu, memory)
measure_snapshots_on_gpu = partial(_on_gpu, snapshots)
