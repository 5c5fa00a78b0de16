"""DeepSpeed's CPU Adam on float32 parameters: one pass of C++ with vector instructions, compiled when first made."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["deepspeed_step"]


def deepspeed_step(params: Sequence[torch.Tensor], **options: Any) -> Callable[[], Any] | None:
    """A step of AdamW; None where DeepSpeed is not installed."""
    try:
        kind = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    except ImportError:
        return None
    step: Callable[[], Any] = kind(list(params), weight_decay=0.01, **options).step
    return step
