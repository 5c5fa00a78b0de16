"""pytest-benchmark's view of offload: steps of AdamW, plain and with everything offloaded, checked after timing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastimpl.offload import OptimizerStateOffloader
from twinproof.engine import InlineEngine


@pytest.mark.parametrize("fraction", [None, 0.0, 1.0], ids=["plain", "attached", "offloaded"])
def test_step(benchmark: Any, fraction: float | None) -> None:
    """16 MiB of parameters; on the CPU the transfers are copies."""
    params = [torch.nn.Parameter(torch.zeros(1024, 512)) for _ in range(8)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW(params, lr=1.0, weight_decay=0.0)
    if fraction is not None:
        OptimizerStateOffloader(optimizer, fraction=fraction, engine=InlineEngine())
    benchmark(optimizer.step)
    count = next(iter(optimizer.state.values()))["step"]
    # With a constant gradient each step moves every weight by the learning rate.
    assert torch.allclose(params[0], -count.expand_as(params[0]), rtol=1e-3)
