"""Dense gradients of several ranks: who reduces them, and their mean where the pipeline is asked for it.

Prevents ranks that train apart: a model whose dense parameters nobody reduces is refused before its first update.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from twinproof.errors import ConfigError
from twinproof.pipeline.rewrite import is_sharded

__all__ = ["DenseGradients"]


def _is_dtensor(param: torch.Tensor) -> bool:
    # Without the module nobody can have made one.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(param, module.DTensor)


def _is_fully_sharded(module: torch.nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def _is_replicated(module: torch.nn.Module) -> bool:
    """Whether torch's composable ``replicate`` was applied."""
    contract = sys.modules.get("torch.distributed._composable.contract")
    registry = None if contract is None else contract._get_registry(module)
    return registry is not None and "replicate" in registry


def _wrapped(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters that a data-parallel wrapper in the model reduces."""
    for module in model.modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            ignored = set(module.parameters_to_ignore)
            yield from (param for name, param in module.module.named_parameters() if name not in ignored)
        elif _is_fully_sharded(module) or _is_replicated(module):
            yield from module.parameters()


def _has_hook(param: torch.Tensor) -> bool:
    return bool(param._backward_hooks) or bool(getattr(param, "_post_accumulate_grad_hooks", None))


class DenseGradients:
    """The dense parameters that an optimizer updates, of one model.

    Args:
        model: in which sharded modules reduce by themselves.
        optimizer: whose parameters count.
        foreign: whether parameters count that the model does not have, as where a custom forward is called.

    Attributes:
        params: those that no wrapper reduces, in the optimizer's order.
        names: of each.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any, *, foreign: bool) -> None:
        names = {id(param): name for name, param in model.named_parameters()}
        sharded = {id(param) for module in model.modules() if is_sharded(module) for param in module.parameters()}
        wrapped = {id(param) for param in _wrapped(model)} | sharded
        self.params: list[torch.Tensor] = []
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            mine = id(param) in names or (foreign and type(param) is torch.nn.Parameter)
            if mine and param.requires_grad and id(param) not in wrapped and not _is_dtensor(param):
                self.params.append(param)
        self.names = [names.get(id(param), "a parameter that is not the model's") for param in self.params]

    def check(self) -> None:
        """Raises ConfigError if nothing is seen to reduce the gradient of a parameter."""
        alone = [name for name, param in zip(self.names, self.params, strict=True) if not _has_hook(param)]
        if alone:
            raise ConfigError(
                "nobody reduces the dense gradients of several ranks, which would train apart",
                got=alone,
                expected="DistributedDataParallel, fully_shard, a gradient hook, or reduce_dense_gradients=True; "
                "reduce_dense_gradients=False where they are reduced in a way that cannot be seen",
                where="reduce_dense_gradients",
            )

    def reduce(self, process_group: Any, world_size: int) -> None:
        """The mean over ranks, in place. A parameter without gradient counts as 0, and has none if no rank has one."""
        if not self.params:
            return
        present = torch.tensor([param.grad is not None for param in self.params], dtype=torch.int64)
        present = present.to(self.params[0].device)
        dist.all_reduce(present, group=process_group)
        used = [param for param, count in zip(self.params, present.tolist(), strict=True) if count]
        for params in _alike(used):
            grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
            if any(grad.layout is not torch.strided for grad in grads):
                raise ConfigError("sparse gradients are not reduced", where="reduce_dense_gradients")
            flat = torch.cat([grad.reshape(-1) for grad in grads]).div_(world_size)
            dist.all_reduce(flat, group=process_group)
            parts = torch.split(flat, [param.numel() for param in params])
            for param, grad, part in zip(params, grads, parts, strict=True):
                param.grad = grad.copy_(part.view(grad.shape))


def _alike(params: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Parameters by dtype and device, in order."""
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for param in params:
        groups.setdefault((param.dtype, param.device), []).append(param)
    yield from groups.values()
