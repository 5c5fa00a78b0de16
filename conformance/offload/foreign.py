"""Optimizers and wrappers that torch does not have: small stand-ins with the interfaces of well-known ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = [
    "Chained",
    "Clipped",
    "Distributed",
    "Factored",
    "Flat",
    "FusedAdam",
    "Joint",
    "Prepared",
    "Renamed",
    "Shared",
    "Tied",
]


class Renamed(torch.optim.AdamW):
    """A subclass that inherits all arithmetic."""


class FusedAdam(torch.optim.Optimizer):
    """As TransformerEngine's: the count of steps in the group, moments in bf16, the master among the states."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        scale = 1.0 if grad_scaler is None else grad_scaler
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, grad = self.state[param], param.grad.float() / scale
                if not state:
                    state["exp_avg"] = torch.zeros_like(param, dtype=torch.bfloat16)
                    state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.bfloat16)
                    state["master_param"] = param.detach().float().clone()
                mean = state["exp_avg"].float().lerp(grad, 1 - first)
                square = state["exp_avg_sq"].float().mul(second).addcmul(grad, grad, value=1 - second)
                state["exp_avg"].copy_(mean)
                state["exp_avg_sq"].copy_(square)
                bias = (1 - second ** group["step"]) ** 0.5 / (1 - first ** group["step"])
                state["master_param"].addcdiv_(mean, square.sqrt() + group["eps"], value=-group["lr"] * bias)
                param.copy_(state["master_param"])


class Clipped(torch.optim.SGD):
    """Parameters that depend on each other: the norm of all gradients scales every update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if params:
            norm = torch.stack([p.grad.square().sum() for p in params]).sum().sqrt()
        for param in params:
            param.grad = param.grad / norm
        return super().step(closure)


class Factored(torch.optim.Optimizer):
    """States of other shapes than the parameter's: a row and a column."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                flat, state = param.grad.reshape(param.shape[0], -1), self.state[param]
                if not state:
                    state["row"], state["column"] = torch.ones_like(flat[:, 0]), torch.ones_like(flat[0])
                state["row"].mul_(0.9).add_(flat.square().mean(1))
                state["column"].mul_(0.9).add_(flat.square().mean(0))
                update = flat / torch.outer(state["row"], state["column"]).sqrt()
                param.sub_(update.reshape(param.shape), alpha=group["lr"])


class Shared(Factored):
    """Two states that are views of each other."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for state in self.state.values():
            state["head"] = state["row"][:1]


class Tied(Factored):
    """A state that lies in a parameter: its own, or the next one's, at either end; "nested" puts the next one there."""

    kin, at_end = "own", False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        params = [param for group in self.param_groups for param in group["params"]]
        home = params[1] if self.kin == "next" else params[0]
        flat = home.detach().view(-1)
        if self.kin == "nested":
            # Of all that begins before the state the parameter around it reaches furthest, and begins first.
            inner = params[1]
            inner.data = flat[1 : 1 + inner.numel()].view(inner.shape)
        self.state[params[0]]["tied"] = flat[-2:] if self.at_end else flat[:2]


class Joint(Factored):
    """One state that all parameters have; ``is_view``: each another part of it, with an element of the last one's."""

    is_view = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        params = [param for group in self.param_groups for param in group["params"]]
        memory = torch.ones(1 + len(params), device=params[0].device)
        for number, param in enumerate(params):
            self.state[param]["joint"] = memory[number : number + 2] if self.is_view else memory


class Flat(Factored):
    """Two states that lie side by side in one piece of memory, without a byte between them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"]):
            if param.grad is not None and not self.state[param]:
                flat = param.grad.reshape(param.shape[0], -1)
                memory = torch.ones(flat.shape[0] + flat.shape[1], device=param.device)
                self.state[param].update(row=memory[: flat.shape[0]], column=memory[flat.shape[0] :])
        super().step(closure)


class Distributed:
    """As Megatron's DistributedOptimizer: float32 masters in groups of its own, rounded into the model after a step."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self.model_params = list(params)
        masters = [torch.nn.Parameter(param.detach().float().clone()) for param in self.model_params]
        self.shard_fp32_from_float16_groups: list[list[Any]] = [masters]
        self.optimizer = torch.optim.AdamW(masters, lr=1e-2)

    def step(self) -> None:
        masters = self.shard_fp32_from_float16_groups[0]
        for param, master in zip(self.model_params, masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for param, master in zip(self.model_params, masters, strict=True):
                param.copy_(master)


class Prepared(torch.optim.Optimizer):
    """As accelerate's AcceleratedOptimizer: an optimizer that has one; with a scaler it keeps the step it found."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, scales: bool = False) -> None:
        self.optimizer = optimizer
        if scales:
            self._optimizer_original_step_method = optimizer.step

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Chained:
    """As Megatron's ChainedOptimizer."""

    def __init__(self, *optimizers: Any) -> None:
        self.chained_optimizers = list(optimizers)


class Container(torch.optim.Optimizer):
    """As torchtitan's OptimizersContainer, torchrec's CombinedOptimizer and a dict of them: an optimizer that has some.

    ``held`` are the attributes under which it has them; its groups are theirs.
    """

    def __init__(self, *optimizers: Any, **held: Any) -> None:
        super().__init__([param for each in optimizers for group in each.param_groups for param in group["params"]], {})
        vars(self).update(held)
