"""The operators of a lookup on a GPU, beside a copy of as many bytes in the same run.

``ours`` is one call of the operator, ``copy`` a copy on the device that reads and writes what the call has to,
``four-times`` the operator four times over, which no gate may let pass. Samples are seconds between two events, of
several calls, so that the host's own work is hidden behind the device's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from conformance.harness import Rank
from fastimpl import ops
from perf.gpu.beside import beside_a_copy
from perf.harness.paired import Round
from perf.harness.workloads import Workload
from perf.pipeline.devices import reason_against_gpu

__all__ = ["KERNELS", "KernelJob", "measure_kernel", "rounds_of"]

_CALLS = 8
_ID_BYTES, _FLOAT_BYTES = 8, 4


@dataclass(frozen=True)
class KernelJob:
    """What is called: pooling, or the fused step with row-wise Adagrad.

    ``pooling``: ids of a bag. ``bags``: of each feature. Ids are drawn from all rows, so that few occur twice.
    """

    steps: bool = False
    dtype: torch.dtype = torch.float32
    pooling: int = 20
    bags: int = 8192


KERNELS = {
    "pool": KernelJob(),
    "pool-float16": KernelJob(dtype=torch.float16),
    "pool-bfloat16": KernelJob(dtype=torch.bfloat16),
    "pool-one": KernelJob(pooling=1, bags=163_840),
    "step": KernelJob(steps=True),
}


def measure_kernel(name: str, rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Nothing is measured without a GPU and its kernels, which leaves the gate undecided."""
    if reason_against_gpu() is not None:
        return []
    return rounds_of(torch.device("cuda"), KERNELS[name], workload, round_count, seed)


def rounds_of(device: torch.device, job: KernelJob, workload: Workload, round_count: int, seed: int) -> list[Round]:
    """``seconds`` of each contender, on tables of the workload's shape, one feature each."""
    call, moved_bytes = _call(device, job, workload, torch.Generator().manual_seed(seed))
    return beside_a_copy(
        call,
        moved_bytes,
        device,
        contenders=workload.contenders,
        round_count=round_count,
        seed=seed,
        call_count=_CALLS,
    )


def _call(
    device: torch.device, job: KernelJob, workload: Workload, generator: torch.Generator
) -> tuple[Callable[[], None], int]:
    """One call, and the least bytes that its task reads and writes."""
    (rows, dim), features = workload.shape, workload.tensor_count
    tables = [torch.ones(rows, dim, dtype=job.dtype, device=device) for _ in range(features)]
    count = features * job.bags * job.pooling
    ids = torch.randint(rows, (count,), generator=generator)
    indices, offsets = ids.to(device), torch.arange(0, count + 1, job.pooling, device=device)
    matrix = torch.ones(job.bags, features * dim, device=device)
    row_bytes = dim * job.dtype.itemsize
    given_bytes = _ID_BYTES * (indices.numel() + offsets.numel()) + matrix.nbytes
    bags = (list(range(features)), indices, offsets, None, [False] * features)
    if not job.steps:
        return partial(ops.pool_bags, tables, *bags, matrix), given_bytes + count * row_bytes
    momenta = [torch.zeros(rows, device=device) for _ in range(features)]
    none = [torch.empty(0, device=device) for _ in range(features)]
    distinct = sum(torch.unique(part).numel() for part in ids.chunk(features))
    step = partial(ops.step_bags, tables, momenta, none, *bags, matrix, "rowwise_adagrad", 1e-3)
    return step, given_bytes + 2 * distinct * (row_bytes + _FLOAT_BYTES)
