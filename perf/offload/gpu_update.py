"""The update of a chunk in its slot on a GPU, beside a copy of the device of the same run."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import Mismatch, Rank
from fastimpl import ops
from fastimpl.offload.slot_step import KINDS, hyper_of
from fastimpl.streams import CudaEngine
from perf.harness.nvml import open_gpu
from perf.harness.paired import Round, interleave
from perf.harness.workloads import Workload
from perf.offload.gpu import STATES, make_params, timed

__all__ = ["measure_updates", "updates"]

_MOVED = 7  # Float32 numbers an element: weight and two moments are read and written, the gradient is read.


def measure_updates(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Nothing is measured without a GPU, which leaves the gate undecided."""
    if not torch.cuda.is_available() or not ops.available():
        return []
    return updates(CudaEngine(), workload, round_count, seed)


class _InSlots:
    """What the offloader does with a chunk that is in its slot: one call for all of it."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self.optimizer, self.count = torch.optim.AdamW(params), 1
        self.optimizer.step()
        states = [self.optimizer.state[param] for param in params]
        self.lists = ([p.detach() for p in params], [p.grad for p in params])
        self.states = [[state[name] for state in states] for name in STATES]

    def step(self) -> None:
        """The next step."""
        self.count += 1
        params, grads = self.lists
        hyper = hyper_of("adam", self.optimizer.param_groups[0], self.count, decoupled=True)
        ops.slot_step(KINDS["adam"][0], params, grads, [*self.states, []], [0] * len(params), hyper)  # type: ignore[arg-type]


def updates(engine: Any, workload: Workload, round_count: int, seed: int) -> list[Round]:
    """A step of AdamW on memory of the device: ``ours``; torch's ``foreach``; a ``copy`` of as many bytes.

    Raises:
        Mismatch: on a GPU, other bits than torch's.
    """
    ours = _InSlots(make_params(engine, workload))
    theirs = torch.optim.AdamW(make_params(engine, workload), foreach=True)
    theirs.step()
    halves = [
        torch.ones(_MOVED * workload.payload_bytes // 2, dtype=torch.uint8, device=engine.device) for _ in range(2)
    ]
    jobs = {"ours": ours.step, "foreach": theirs.step, "copy": lambda: halves[0].copy_(halves[1])}
    runs = {who: (lambda job=jobs[who]: timed(engine, job)) for who in workload.contenders}
    with open_gpu() as gpu:
        rounds = interleave(runs, round_count=round_count, seed=seed, gpu=gpu)
    is_exact = engine.device.type == "cuda"
    for mine, other in zip(ours.lists[0], theirs.param_groups[0]["params"], strict=True):
        # Steps are interleaved, so that both made as many. Torch's CPU rounds otherwise.
        if not (torch.equal(mine, other) if is_exact else torch.allclose(mine, other, rtol=1e-4, atol=1e-6)):
            raise Mismatch("an update in a slot is not torch's", where=f"parameter of shape {tuple(mine.shape)}")
    return rounds
