"""DTensor parameters on two ranks, stepped on the CPU: each rank steps its own shards."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from conformance.harness import Rank, assert_equal, assert_same_tensor, requirement
from conformance.offload.cases import values
from conformance.provers.virtual_device import VirtualDevice
from refimpl.optimizers import adam_step
from twinproof.optimizers import AdamHyper


def _local(value: Any) -> Any:
    return value.to_local().detach() if isinstance(value, DTensor) else value


def _step_shards(rank: Rank) -> None:
    offload = rank.component("offload")
    mesh = init_device_mesh("cpu", (rank.world_size,))
    # Seven rows on two ranks: shards of different size; one row: a rank with nothing.
    forms: list[tuple[tuple[int, int], Any]] = [
        ((7, 6), Shard(0)),
        ((7, 6), Shard(1)),
        ((7, 6), Replicate()),
        ((1, 5), Shard(0)),
    ]

    def spread(form: tuple[tuple[int, int], Any], seed: int) -> DTensor:
        return distribute_tensor(values(form[0], seed), mesh, [form[1]], src_data_rank=None)

    params = [torch.nn.Parameter(spread(form, i)) for i, form in enumerate(forms)]
    weights = [_local(param).clone() for param in params]
    moments = [[torch.zeros_like(weight) for _ in range(2)] for weight in weights]
    optimizer = torch.optim.AdamW(params, lr=0.1)
    device = VirtualDevice(late=True)
    with device:
        offloader = offload.OptimizerStateOffloader(optimizer, engine=device.engine, chunk_bytes=256, step_device="cpu")
        for step in range(3):
            for i, form in enumerate(forms):
                params[i].grad = spread(form, 100 * step + i)
            optimizer.step()
        state = offloader.snapshot()["state"]
    device.check()
    for step in range(3):
        hyper = AdamHyper.of(lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, step=step + 1, decoupled=True)
        for i, form in enumerate(forms):
            adam_step(hyper, _local(spread(form, 100 * step + i)), weights[i], *moments[i])
    for i, (param, weight) in enumerate(zip(params, weights, strict=True)):
        assert_same_tensor(_local(param), weight, where=f"shard of parameter {i}")
        for name, moment in zip(("exp_avg", "exp_avg_sq"), moments[i], strict=True):
            assert_equal(isinstance(state[i][name], DTensor), True, where=f"{name} is a DTensor")
            assert_same_tensor(_local(state[i][name]), moment, where=f"{name} of parameter {i}")


@requirement("OPT-215", "DTensor parameters MUST be stepped on the CPU by local shard, with states that are DTensors.")
def test_shards(rank_pool: Any) -> None:
    rank_pool.run(_step_shards, 2)
