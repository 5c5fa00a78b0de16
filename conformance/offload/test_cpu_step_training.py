"""Steps on the CPU in the loops that people train with: under a GradScaler, and under FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import Rank, assert_equal, assert_same_tensor, requirement
from conformance.offload.cases import SHAPES, CpuArm, proven, values
from conformance.provers.virtual_device import VirtualDevice
from refimpl.optimizers import adam_step
from twinproof.optimizers import AdamHyper


@requirement(
    "OPT-216",
    "Under a GradScaler a step on the CPU MUST take unscaled gradients, and one that it skips MUST change nothing.",
)
def test_grad_scaler(offload: Any) -> None:
    # The scaler asks the device whether to step.
    with proven(late=True, this_branch_only=True) as device:
        arm, scaler, scale = CpuArm(offload, device, chunk_bytes=1), torch.amp.GradScaler("cpu", init_scale=4.0), 4.0
        for number in range(4):
            overflows = number == 1
            grads = [values(shape, 1000 * number + i) for i, shape in enumerate(SHAPES)]
            for param, grad in zip(arm.params, grads, strict=True):
                with _disable_current_modes():
                    # A power of two, so that nothing is rounded.
                    param.grad = grad * scale
            if overflows:
                assert arm.params[2].grad is not None
                arm.params[2].grad[0] = float("inf")
            scaler.scale(torch.ones(1))
            scaler.step(arm.optimizer)
            scaler.update()
            arm.step_count += 1
            scale = scale / 2 if overflows else scale
            with _disable_current_modes():
                for i, grad in enumerate(grads):
                    if not overflows:
                        arm.expect(i, grad)
            arm.check()
            assert_equal(arm.offloader.residency().device_bytes, 0, where=f"states on the device after {number}")
        arm.offloader.close()


def _local(value: Any) -> Any:
    return value.to_local().detach() if isinstance(value, DTensor) else value


def _model(rank: Rank) -> torch.nn.Module:
    torch.manual_seed(0)
    # Nine rows on two ranks: shards of different size.
    model = torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
    mesh = init_device_mesh("cpu", (rank.world_size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _backward(model: torch.nn.Module, step: int) -> None:
    loss = model(values((5, 8), 1000 + step)).square().mean()
    loss.backward()


def _train_fsdp(rank: Rank) -> None:
    offload = rank.component("offload")
    model, formula = _model(rank), _model(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    # The communication of FSDP runs outside of the proof; the step of the optimizer is what is proven here.
    device = VirtualDevice(late=True)
    with device:
        offloader = offload.OptimizerStateOffloader(optimizer, engine=device.engine, chunk_bytes=256, step_device="cpu")
    weights = [_local(param) for param in formula.parameters()]
    moments = [[torch.zeros_like(weight) for _ in range(2)] for weight in weights]
    for step in range(3):
        _backward(model, step)
        with device:
            optimizer.step()
        optimizer.zero_grad()
        _backward(formula, step)
        hyper = AdamHyper.of(lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, step=step + 1, decoupled=True)
        for param, weight, pair in zip(formula.parameters(), weights, moments, strict=True):
            adam_step(hyper, _local(param.grad), weight, *pair)
            param.grad = None
    with device:
        state = offloader.snapshot()["state"]
    device.check()
    for i, (param, weight) in enumerate(zip(model.parameters(), weights, strict=True)):
        assert_same_tensor(_local(param), weight, where=f"shard of parameter {i}")
        for name, moment in zip(("exp_avg", "exp_avg_sq"), moments[i], strict=True):
            assert_equal(isinstance(state[i][name], DTensor), True, where=f"{name} is a DTensor")
            assert_same_tensor(_local(state[i][name]), moment, where=f"{name} of parameter {i}")


@requirement("OPT-217", "A model under FSDP2 that is stepped on the CPU MUST have the formula's bits on every rank.")
def test_fsdp(rank_pool: Any) -> None:
    rank_pool.run(_train_fsdp, 2)
