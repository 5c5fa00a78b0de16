"""torchao's CPUOffloadOptimizer in a small training loop: ``torchao_offload.py MODE``.

MODE: plain; grads (gradients leave the device too); accumulate (two backward passes a step); skip (no step follows, as
after an overflow); eval (the model is used between backward and step).
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch


def main(mode: str) -> None:
    """Two steps."""
    offload: Any = importlib.import_module("torchao.optim.cpu_offload")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).cuda()
    optimizer = offload.CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=mode == "grads", minimal_size=0
    )

    def loss() -> Any:
        return model(torch.randn(8, 64, device="cuda")).square().mean()

    for _ in range(2):
        loss().backward()
        if mode == "accumulate":
            loss().backward()
        if mode == "skip":
            optimizer.zero_grad()
            continue
        if mode == "eval":
            with torch.no_grad():
                loss()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1])
