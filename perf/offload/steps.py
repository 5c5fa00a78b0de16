"""Steps and snapshots on the CPU: what attachment costs, and what a copy of the state costs. No device is involved."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from conformance.harness import Mismatch, Rank
from perf.harness.paired import Round, interleave, seconds_of
from perf.harness.workloads import Workload
from twinproof.engine import InlineEngine

__all__ = ["measure_small_steps", "measure_snapshots", "measure_steps"]

_STEPS = 4  # Of one sample.


def _optimizer(workload: Workload, **options: Any) -> torch.optim.Optimizer:
    generator = torch.Generator().manual_seed(0)
    params = [
        torch.nn.Parameter(torch.randn(workload.shape, generator=generator)) for _ in range(workload.tensor_count)
    ]
    for param in params:
        param.grad = torch.randn(workload.shape, generator=generator)
    optimizer = torch.optim.AdamW(params, lr=1e-3, **options)
    optimizer.step()
    return optimizer


def _offloader(rank: Rank, optimizer: torch.optim.Optimizer, fraction: float) -> Any:
    kind = rank.component("offload").OptimizerStateOffloader
    return kind(optimizer, fraction=fraction, engine=InlineEngine())


def measure_steps(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """AdamW alone (``plain``), with nothing selected to move (``attached``), with everything (``offloaded``)."""
    optimizers = {who: _optimizer(workload) for who in workload.contenders}
    offloaders = {
        who: _offloader(rank, optimizers[who], fraction)
        for who, fraction in (("attached", 0.0), ("offloaded", 1.0))
        if who in optimizers
    }

    def steps(optimizer: torch.optim.Optimizer) -> None:
        for _ in range(_STEPS):
            optimizer.step()

    runs = {who: seconds_of(partial(steps, optimizer)) for who, optimizer in optimizers.items()}
    rounds = interleave(runs, round_count=round_count, seed=seed)
    _check_same(optimizers)
    for offloader in offloaders.values():
        offloader.close()
    return rounds


def measure_small_steps(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """A fused step of many small states: ``plain``, ``ours``, and a ``loop`` of ``.to`` around it, in and out."""
    optimizers = {who: _optimizer(workload, fused=True) for who in workload.contenders}
    offloader = _offloader(rank, optimizers["ours"], 1.0)

    def move() -> None:
        for state in optimizers["loop"].state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].to("cpu", copy=True)

    def loop() -> None:
        move()
        optimizers["loop"].step()
        move()

    jobs: dict[str, Callable[[], Any]] = {who: optimizer.step for who, optimizer in optimizers.items()}
    jobs["loop"] = loop
    runs = {who: seconds_of(jobs[who]) for who in workload.contenders}
    rounds = interleave(runs, round_count=round_count, seed=seed)
    _check_same(optimizers)
    offloader.close()
    return rounds


def _check_same(optimizers: dict[str, torch.optim.Optimizer]) -> None:
    first, *others = optimizers.items()
    for who, optimizer in others:
        for mine, theirs in zip(optimizer.param_groups[0]["params"], first[1].param_groups[0]["params"], strict=True):
            if not torch.equal(mine, theirs):
                raise Mismatch(f"{who} stepped to other values than {first[0]}")


def measure_snapshots(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """A snapshot (``ours``), a plain copy of as many bytes into fresh memory (``copy``), and pickling (``pickled``)."""
    optimizer = _optimizer(workload)
    offloader = _offloader(rank, optimizer, 1.0)
    whole = torch.ones(2 * workload.payload_bytes, dtype=torch.uint8)
    jobs: dict[str, Callable[[], Any]] = {
        "ours": offloader.snapshot,
        "copy": whole.clone,
        "pickled": lambda: pickle.loads(pickle.dumps(offloader.snapshot())),
    }
    runs = {who: seconds_of(partial(_run_and_drop, jobs[who])) for who in workload.contenders}
    rounds = interleave(runs, round_count=round_count, seed=seed)
    offloader.close()
    return rounds


def _run_and_drop(job: Callable[[], Any]) -> None:
    """The memory is given back inside of the measurement, for every contender alike."""
    job()
