"""What an asynchronous save reads while training goes on: copies of tensors, moments of rows that are in no memory.

Torch's own stager copies the storages of tensors whose ``data_ptr()`` is not 0, and takes new, unfilled memory for
those of all others; conjugated views lose their conjugation. Here a tensor is copied by its value, or handed on.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

__all__ = ["Stageable", "staged"]


@runtime_checkable
class Stageable(Protocol):
    """A tensor that knows a form of itself which later writes do not change."""

    def staged(self, memo: dict[int, Any]) -> torch.Tensor:
        """That form; ``memo`` belongs to one state dict, so that what its tensors share is taken once."""
        ...


def staged(state_dict: Any) -> Any:
    """The same structure with tensors on the CPU that nothing else writes to.

    Tensors that are one memory stay one. What the format refuses (meta, sparse, quantized tensors, objects) is handed
    on, so that the plan refuses it on every rank.
    """
    return _staged(state_dict, {}, {})


def _staged(value: Any, seen: dict[Any, Any], memo: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return _tensor(value, seen, memo)
    if isinstance(value, Mapping):
        return {key: _staged(each, seen, memo) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_staged(each, seen, memo) for each in value)
    return copy.deepcopy(value)


def _tensor(value: torch.Tensor, seen: dict[Any, Any], memo: dict[int, Any]) -> torch.Tensor:
    key = _identity(value)
    if key not in seen:
        # The original stays alive as long as its key counts.
        seen[key] = (_copied(value, memo), value)
    result: torch.Tensor = seen[key][0]
    return result


def _identity(value: torch.Tensor) -> Any:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.is_meta:
        return id(value)
    flags = value.is_conj(), value.is_neg(), value.dtype, value.device
    return (value.data_ptr(), tuple(value.shape), value.stride(), flags) if value.data_ptr() else id(value)


def _own_names(cls: type) -> set[str]:
    return {name for each in cls.__mro__ if each not in torch.Tensor.__mro__ for name in vars(each)}


def _attributes_copied(value: torch.Tensor) -> torch.Tensor:
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        staged_dict: Any = stager.stage({"value": value})
        result: torch.Tensor = staged_dict["value"]
        return result
    finally:
        stager.close()


def _copied(value: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if isinstance(value, Stageable):
        return value.staged(memo)
    if isinstance(value, ShardedTensor):
        return copy.deepcopy(value) if value.device.type == "cpu" else value.cpu()
    if hasattr(value, "__create_write_items__") and not isinstance(value, DTensor):
        # A tensor that plans its own save knows how to copy itself, or keeps what it plans in attributes.
        return copy.deepcopy(value) if "__deepcopy__" in _own_names(type(value)) else _attributes_copied(value)
    if value.is_meta or value.layout is not torch.strided or value.is_quantized:
        return value
    return value.detach().to("cpu", copy=True)
