"""The optimizer in the backward as torch's parameters name it: torchrec's ``apply_optimizer_in_backward``.

Prevents an optimizer that was asked for and is silently another one: tables that are cut take the one that their
parameters carry, or say why they cannot.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from twinproof.errors import ConfigError
from twinproof.optimizers import FUSED_OPTIMIZERS, OPTIMIZERS
from twinproof.pipeline.config import FusedOptimizer

__all__ = ["apply_optimizer_in_backward", "carry_over", "optimizer_in_backward"]

# By name: row-wise ones are no classes of torch's.
_KINDS = {OPTIMIZERS[name].class_name: name for name in FUSED_OPTIMIZERS}
_TAKEN = ("params", "lr", "eps", "betas", "foreach", "fused", "capturable", "differentiable")


def apply_optimizer_in_backward(
    optimizer_class: type[torch.optim.Optimizer], params: Iterable[torch.nn.Parameter], optimizer_kwargs: dict[str, Any]
) -> None:
    """Have each parameter stepped by an optimizer of its own as soon as its gradient is there, which is then None.

    Of a collection that is cut afterwards, the optimizer moves into the backward of the cut tables.
    """
    with warnings.catch_warnings():
        # The package around torch's own function scripts others of its optimizers when it is first imported.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(optimizer_class, params, optimizer_kwargs)


def optimizer_in_backward(params: Sequence[torch.nn.Parameter]) -> FusedOptimizer | None:
    """The optimizer that all of these parameters carry, with its own hyperparameters; None where none carries any.

    Raises:
        ConfigError: some carry one and some none, several, or different ones; one without a fused formula.
    """
    carried = [getattr(param, "_in_backward_optimizers", []) for param in params]
    if not any(carried):
        return None
    if any(len(some) != 1 for some in carried):
        got = [len(some) for some in carried]
        raise ConfigError("tables that are cut together carry one optimizer each, or none does", got=got)
    found = [_as_fused(some[0]) for some in carried]
    if any(one != found[0] for one in found):
        raise ConfigError(
            "tables that are cut together have one optimizer", got=found, where="apply_optimizer_in_backward"
        )
    return found[0]


def _as_fused(optimizer: torch.optim.Optimizer) -> FusedOptimizer:
    name, (group,) = type(optimizer).__name__, optimizer.param_groups
    if name not in _KINDS:
        raise ConfigError("no formula of this optimizer runs in the backward", got=name, expected=tuple(_KINDS))
    others = {key: value for key, value in group.items() if key not in _TAKEN and value}
    if others:
        raise ConfigError("not taken by an optimizer in the backward", got=others, where=name)
    parts: dict[str, float] = {key: float(group[key]) for key in ("lr", "eps") if key in group}
    if "betas" in group:
        parts |= {"beta1": float(group["betas"][0]), "beta2": float(group["betas"][1])}
    return FusedOptimizer(_KINDS[name], **parts)


def carry_over(source: torch.nn.Parameter, target: torch.nn.Parameter) -> None:
    """Have the target carry what the source does."""
    classes, options = getattr(source, "_optimizer_classes", []), getattr(source, "_optimizer_kwargs", [])
    for kind, given in zip(classes, options, strict=True):
        apply_optimizer_in_backward(kind, [target], given)
