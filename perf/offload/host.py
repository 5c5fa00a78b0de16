"""AdamW stepped in host memory in one pass, against the best sequences of torch; and many small tensors that move."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from conformance.harness import Mismatch, Rank, assert_within_derived
from fastimpl.offload.packing import SlabLayout, pack, unpack
from perf.harness.paired import Round, interleave, seconds_of
from perf.harness.workloads import Workload
from perf.peers.deepspeed_adam import deepspeed_step
from twinproof.engine import InlineEngine

__all__ = ["measure_adam_bf16", "measure_adam_fp32", "measure_small"]

_CHECKED = 4  # Steps after which values are compared, on the first tensor.


def _random(workload: Workload, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(workload.shape, generator=generator).to(dtype) for _ in range(workload.tensor_count)]


def _with_gradients(values: list[torch.Tensor], grads: list[torch.Tensor]) -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(value) for value in values]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


def measure_adam_fp32(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """``ours``; torch's AdamW ``fused`` and ``foreach``; ``copy``: as many bytes read and written as a step moves.

    And ``deepspeed``, where it is installed.
    """
    offload, grads = rank.component("offload"), _random(workload, 1)
    ours = torch.optim.AdamW(_with_gradients(_random(workload, 0), grads), lr=1e-3)
    fused = torch.optim.AdamW(_with_gradients(_random(workload, 0), grads), lr=1e-3, fused=True)
    foreach = torch.optim.AdamW(_with_gradients(_random(workload, 0), grads), lr=1e-3, foreach=True)
    peer = deepspeed_step(_with_gradients(_random(workload, 0), grads), lr=1e-3)
    half = [torch.ones(14 * workload.payload_bytes // 4, dtype=torch.uint8) for _ in range(2)]
    with offload.OptimizerStateOffloader(ours, step_device="cpu"):
        jobs: dict[str, Callable[[], Any]] = {
            "ours": ours.step,
            "fused": fused.step,
            "foreach": foreach.step,
            "copy": partial(half[0].copy_, half[1]),
            **({} if peer is None else {"deepspeed": peer}),
        }
        rounds = _interleaved(workload, jobs, round_count, seed)
    _check(offload, workload, torch.float32)
    return rounds


def measure_adam_bf16(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """``ours``; the ``sequence`` around torch's fused AdamW, memory made before; ``foreach``; ``deepspeed``."""
    offload, grads = rank.component("offload"), _random(workload, 1, torch.bfloat16)
    params = _with_gradients(_random(workload, 0, torch.bfloat16), grads)
    masters = offload.MasterWeights(params)
    ours = torch.optim.AdamW(masters.parameters(), lr=1e-3)

    def step() -> None:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        ours.step()

    with offload.OptimizerStateOffloader(ours, step_device="cpu", master_weights=masters):
        jobs: dict[str, Callable[[], Any]] = {
            "ours": step,
            "sequence": _sequence(workload, grads, fused=True),
            "foreach": _sequence(workload, grads, foreach=True),
        }
        peer = _sequence_of_deepspeed(workload, grads)
        if peer is not None:
            jobs["deepspeed"] = peer
        rounds = _interleaved(workload, jobs, round_count, seed)
    _check(offload, workload, torch.bfloat16)
    return rounds


def _sequence(workload: Workload, grads: list[torch.Tensor], **how: Any) -> Callable[[], None]:
    weights = _random(workload, 0, torch.bfloat16)
    params = _with_gradients([weight.float() for weight in weights], [grad.float() for grad in grads])
    return _around(torch.optim.AdamW(params, lr=1e-3, **how).step, params, grads, weights)


def _sequence_of_deepspeed(workload: Workload, grads: list[torch.Tensor]) -> Callable[[], None] | None:
    weights = _random(workload, 0, torch.bfloat16)
    params = _with_gradients([weight.float() for weight in weights], [grad.float() for grad in grads])
    step = deepspeed_step(params, lr=1e-3)
    return None if step is None else _around(step, params, grads, weights)


def _around(
    step: Callable[[], Any], params: list[torch.nn.Parameter], grads: list[torch.Tensor], weights: list[torch.Tensor]
) -> Callable[[], None]:
    @torch.no_grad()
    def run() -> None:
        for param, grad in zip(params, grads, strict=True):
            assert param.grad is not None
            param.grad.copy_(grad)
        step()
        for weight, param in zip(weights, params, strict=True):
            weight.copy_(param)

    return run


def _interleaved(workload: Workload, jobs: dict[str, Callable[[], Any]], round_count: int, seed: int) -> list[Round]:
    # A peer that is not installed has no job.
    runs = {who: seconds_of(partial(_run_and_drop, jobs[who])) for who in workload.contenders if who in jobs}
    return interleave(runs, round_count=round_count, seed=seed)


def _run_and_drop(job: Callable[[], Any]) -> None:
    job()


def _check(offload: Any, workload: Workload, dtype: torch.dtype) -> None:
    """What was measured errs at most twice as much as torch does: float32 masters after some steps, against float64."""
    start, grad = (torch.randn(4096, generator=torch.Generator().manual_seed(i)).to(dtype) for i in (2, 3))
    param = torch.nn.Parameter(start.clone())
    masters = None if dtype is torch.float32 else offload.MasterWeights([param])
    mine = param if masters is None else next(masters.parameters())
    arms = [mine, torch.nn.Parameter(start.float()), torch.nn.Parameter(start.double())]
    optimizers = [torch.optim.AdamW([arm], lr=1e-3) for arm in arms]
    with offload.OptimizerStateOffloader(optimizers[0], step_device="cpu", master_weights=masters):
        for _ in range(_CHECKED):
            param.grad = grad.clone()
            arms[1].grad, arms[2].grad = grad.float(), grad.double()
            for optimizer in optimizers:
                optimizer.step()
        got, plain, exact = (arm.detach().clone() for arm in arms)
    assert_within_derived(got, plain, exact, where=workload.name)


def measure_small(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Packed and unpacked (``ours``), ``.to`` in a loop, ``copy_`` in a loop into memory made before, and ``verbs``.

    ``verbs`` are an offloader's: all states to the device and home again, each bound anew both times.
    """
    optimizer = torch.optim.AdamW(_with_gradients(_random(workload, 0), _random(workload, 1)), lr=1e-3)
    optimizer.step()
    tensors = _random(workload, 2) + _random(workload, 3)
    homes, start = [tensor.clone() for tensor in tensors], [tensor.clone() for tensor in tensors]
    layout = SlabLayout()
    offsets = [layout.add(tensor) for tensor in tensors]
    slab = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    offloader = rank.component("offload").OptimizerStateOffloader(optimizer, engine=InlineEngine())
    before = offloader.snapshot()["state"]

    def ours() -> None:
        pack(tensors, slab, offsets)
        unpack(tensors, slab, offsets)

    def verbs() -> None:
        offloader.to_device(offloader.bundles)
        offloader.offload()

    def loop() -> None:
        moved = [tensor.to("cpu", copy=True) for tensor in tensors]
        for number, tensor in enumerate(moved):
            tensors[number] = tensor.to("cpu", copy=True)

    def copies() -> None:
        for home, tensor in zip(homes, tensors, strict=True):
            home.copy_(tensor)
        for home, tensor in zip(homes, tensors, strict=True):
            tensor.copy_(home)

    jobs = {"ours": ours, "loop": loop, "copies": copies, "verbs": verbs}
    rounds = _interleaved(workload, jobs, round_count, seed)
    if not all(map(torch.equal, tensors, start)):
        raise Mismatch("moving changed a tensor")
    after = offloader.snapshot()["state"]
    for number, state in before.items():
        for name in ("exp_avg", "exp_avg_sq"):
            if not torch.equal(after[number][name], state[name]):
                raise Mismatch("moving changed a state", got=after[number][name], expected=state[name], where=name)
    offloader.close()
    return rounds
