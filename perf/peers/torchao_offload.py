"""torchao's ``CPUOffloadOptimizer`` at its best: fused AdamW on the CPU, gradients leaving while the backward runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["torchao_steps"]


def torchao_steps(
    params: Sequence[torch.Tensor], **options: Any
) -> tuple[Callable[[], None], Callable[[], Any]] | None:
    """Two calls: gradients are there, and the step. None where torchao is not installed, or has no device to serve."""
    try:
        kind = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    optimizer = kind(list(params), torch.optim.AdamW, fused=True, **options)

    def announce() -> None:
        # What a backward pass does once it has accumulated a gradient.
        for param in params:
            for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(param)

    return announce, optimizer.step
