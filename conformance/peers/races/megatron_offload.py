"""Megatron's HybridDeviceOptimizer in a small training loop: ``megatron_offload.py MODE [FILE]``.

MODE: plain (32-bit parameters); half (bfloat16 parameters that are updated in float32); serial (no streams). FILE is
its ``hybrid_optimizer.py``, by default that of the installed ``megatron-core``. Of Megatron nothing else is loaded: the
file imports torch alone.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

_FILE = "megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py"


def installed() -> Path | None:
    """The file of the installed package, or None."""
    try:
        found = Path(str(importlib.metadata.distribution("megatron-core").locate_file(_FILE)))
    except importlib.metadata.PackageNotFoundError:
        return None
    return found if found.is_file() else None


def _loaded(path: Path) -> Any:
    spec: Any = importlib.util.spec_from_file_location("hybrid_optimizer", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["hybrid_optimizer"] = module
    spec.loader.exec_module(module)
    return module


def main(mode: str, path: Path) -> None:
    """Four steps."""
    dtype = torch.bfloat16 if mode == "half" else torch.float32
    layers = [
        torch.nn.Linear(64, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 64),
    ]
    model = torch.nn.Sequential(*layers).cuda().to(dtype)
    optimizer = _loaded(path).HybridDeviceOptimizer(
        list(model.parameters()),
        offload_fraction=0.5,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=mode == "half",
        overlap_cpu_optimizer_d2h_h2d=mode != "serial",
        lr=0.1,
    )
    for _ in range(4):
        loss: Any = model(torch.randn(8, 64, device="cuda").to(dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    file = Path(sys.argv[2]) if len(sys.argv) > 2 else installed()
    if file is None:
        raise SystemExit("megatron-core is not installed")
    main(sys.argv[1], file)
