"""Checkpoints of tensors on the pretend device, by tests that name the host's: what a planner looks up lies there.

A save then reads memory of the device, and a load fills it, as where a model is on a GPU; the memory behind is that of
the test's own tensors, so that tests run unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint import default_planner

from conformance.provers.pretend_device import PretendTensor
from twinproof.kvstore.views import LazyRows

__all__ = ["bind_lookups", "there"]

_look_up = default_planner.find_state_dict_object


def there(value: Any) -> Any:
    """The same memory as that of the device, where a device can have it."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.is_meta:
        return value
    # A view that is conjugated lazily is a flag of the host's tensor; other kinds of tensors know themselves.
    if value.device.type != "cpu" or value.is_quantized or value.is_conj() or value.is_neg():
        return value
    return PretendTensor(value.detach())


def _look_up_there(state_dict: Any, index: Any) -> Any:
    found = _look_up(state_dict, index)
    # Rows that are read when asked are handed out in memory of the host, wherever their store is.
    return found if isinstance(state_dict[index.fqn], LazyRows) else there(found)


def bind_lookups() -> None:
    """Let torch's planners, and those made of them, look up memory of the device, for the rest of the process."""
    default_planner.find_state_dict_object = _look_up_there
