"""Binds a tensor's values to other memory: the optimizer and the model see the same objects as before."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from twinproof.offload.states import MASTER, Bundle

__all__ = ["rebind"]


def rebind(optimizer: Optimizer, bundle: Bundle, name: str, memory: torch.Tensor) -> None:
    """Let a state, or a master, lie in ``memory``, which holds its values or soon will.

    A plain state is replaced in the optimizer; a parameter, and what a DTensor wraps, keep their identity.
    """
    holder: Any = bundle.param if name == MASTER else optimizer.state[bundle.param][name]
    if hasattr(holder, "_local_tensor"):
        holder._local_tensor = memory
    elif name == MASTER:
        holder.data = memory
    else:
        optimizer.state[bundle.param][name] = memory
