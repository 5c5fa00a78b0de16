"""Faults in what an asynchronous save copies before training goes on."""

from __future__ import annotations

from typing import Any

import torch

from conformance.checkpoint.planted.making import both
from conformance.harness import swap, wrap


def _storages(original: Any, value: Any, memo: Any) -> Any:
    """As torch's stager does: the storage is copied, and what stands beside it is forgotten."""
    if type(value) is torch.Tensor and (value.is_conj() or value.is_neg()):
        value = torch._conj(value) if value.is_conj() else torch._neg_view(value)
    return original(value, memo)


def _filled(original: Any, value: Any, memo: Any) -> Any:
    """As torch's stager does: what has no memory becomes memory."""
    return torch.zeros(value.shape) if value.is_meta else original(value, memo)


def _same_target(original: Any, reader: Any, plan: Any, planner: Any) -> Any:
    """What is loaded goes to a copy of the target when that is an optimizer's."""
    return [
        (item, target.clone() if "exp_avg" in item.dest_index.fqn else target)
        for item, target in original(reader, plan, planner)
    ]


PLANTED = (
    both(
        "optimizer_not_loaded",
        "Tensors of an optimizer are read into memory that nobody looks at.",
        ("CKPT-424",),
        wrap("twinproof.checkpoint.dcp:HuggingFaceStorageReader.targets", _same_target),
    ),
    both(
        "staged_by_reference",
        "An asynchronous save reads the training's own tensors.",
        ("CKPT-420", "CKPT-422", "CKPT-083"),
        swap("twinproof.checkpoint.dcp:staged", lambda state: state),
    ),
    both(
        "staged_by_storage",
        "An asynchronous save forgets that a tensor is conjugated or negated.",
        ("CKPT-422",),
        wrap("twinproof.checkpoint.planners:_copied", _storages),
    ),
    both(
        "meta_staged_as_memory",
        "A meta tensor is staged as memory that nobody filled.",
        ("CKPT-423",),
        wrap("twinproof.checkpoint.planners:_copied", _filled),
    ),
)
