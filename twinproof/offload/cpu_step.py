"""What both offloaders need to step on the CPU: refusals, what is to be updated, states of a first step.

Prevents updates that are refused half-way: everything that a step cannot do is found before anything changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from twinproof.errors import ConfigError, UnsupportedError
from twinproof.offload.adam import AdamHyper
from twinproof.offload.masters import MasterWeights
from twinproof.offload.states import MASTER, Bundle, local_of

__all__ = ["Update", "check_cpu_step", "narrowed", "prepare_states", "updates_of"]

GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
# Options of torch that only mean something where the optimizer itself steps, each with what to do instead.
FOREIGN = {
    "fused": "fused=False: the update on the CPU is fused already, and a GradScaler has to unscale before it",
    "capturable": "capturable=False: a graph cannot hold work of the CPU",
    "differentiable": "differentiable=False",
}


def check_cpu_step(optimizer: Optimizer) -> None:
    """Refuse what ``step_device="cpu"`` cannot step.

    Raises:
        UnsupportedError: an optimizer other than ``Adam`` and ``AdamW``.
        ConfigError: an option that has no meaning there, hyperparameters on a device, parameters that are not float32.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise UnsupportedError(
            "not an optimizer that steps on the CPU",
            got=type(optimizer).__name__,
            expected=("Adam", "AdamW"),
            where="step_device='cpu'",
        )
    for number, group in enumerate(optimizer.param_groups):
        where = f"step_device='cpu', group {number}"
        for option, instead in FOREIGN.items():
            if group.get(option):
                raise ConfigError(f"{option} has no meaning there", got=f"{option}=True", expected=instead, where=where)
        for option in ("lr", "betas"):
            values = group[option] if option == "betas" else (group[option],)
            if any(isinstance(value, torch.Tensor) and (option == "betas" or value.is_cuda) for value in values):
                raise ConfigError(f"{option} has to be on the host", got=values, expected="numbers", where=where)
        for param in group["params"]:
            if param.dtype is not torch.float32:
                raise ConfigError(
                    "the CPU steps float32 weights: give others masters, by master_weights=MasterWeights(...)",
                    got=f"{param.dtype} of shape {tuple(param.shape)}",
                    expected=torch.float32,
                    where=where,
                )


@dataclass(frozen=True)
class Update:
    """One parameter that has a gradient, by local shards.

    ``weight`` is the model's, on the device; ``grad`` has its shape and strides. ``has_master``: the float32 weights
    are on the host; otherwise ``weight`` itself is float32 and has to be brought.
    """

    bundle: Bundle
    group: dict[str, Any]
    weight: torch.Tensor
    grad: torch.Tensor
    has_master: bool

    @property
    def state_names(self) -> tuple[str, ...]:
        """Of the moments."""
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if self.group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def states(self, optimizer: Optimizer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """exp_avg, exp_avg_sq, and max_exp_avg_sq or None."""
        state = optimizer.state[self.bundle.param]
        largest = local_of(state["max_exp_avg_sq"]) if self.group["amsgrad"] else None
        return local_of(state["exp_avg"]), local_of(state["exp_avg_sq"]), largest

    def advance(self, optimizer: Optimizer) -> AdamHyper:
        """Count a step, as torch does, and say with which numbers it is to be made."""
        count = optimizer.state[self.bundle.param]["step"]
        count += 1
        group = self.group
        return AdamHyper.of(
            lr=float(group["lr"]),
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=float(count),
            decoupled=group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)),
            maximize=group["maximize"],
        )


def updates_of(optimizer: Optimizer, bundles: Iterable[Bundle], masters: MasterWeights | None) -> list[Update]:
    """What a step has to do for these bundles; parameters without a gradient are left out.

    Raises:
        UnsupportedError: a sparse gradient, one of another dtype, a parameter with gaps in its memory, or loaded
            states that are not float32; nothing has changed then.
    """
    check_cpu_step(optimizer)
    group_of = {param: group for group in optimizer.param_groups for param in group["params"]}
    found: list[Update] = []
    for bundle in bundles:
        model = bundle.param if masters is None else masters.pairs[bundle.param]
        if bundle.param not in group_of or model.grad is None:
            continue
        where = f"parameter of shape {tuple(model.shape)}"
        grad, weight = local_of(model.grad), local_of(model.detach())
        if grad.layout is not torch.strided or grad.dtype not in GRADIENTS:
            raise UnsupportedError(
                "not a gradient that the CPU steps with", got=(grad.layout, grad.dtype), expected=GRADIENTS, where=where
            )
        if not weight.is_contiguous() and torch.empty_like(weight, device="meta").stride() != weight.stride():
            raise UnsupportedError("a parameter with gaps in its memory", got=weight.stride(), where=where)
        update = Update(bundle, group_of[bundle.param], weight, _in_order(grad, weight), MASTER in bundle.places)
        state = optimizer.state.get(bundle.param, {})
        wrong = [n for n in update.state_names if state and (n not in state or state[n].dtype is not torch.float32)]
        if wrong:
            raise UnsupportedError(
                "the CPU steps float32 moments", got=f"{wrong} missing or of another dtype", where=where
            )
        found.append(update)
    return found


def _in_order(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if grad.stride() == weight.stride():
        return grad
    return torch.empty_like(weight, dtype=grad.dtype).copy_(grad)


def prepare_states(optimizer: Optimizer, update: Update, home: Callable[[str], torch.Tensor | None]) -> None:
    """Make the states of a first step in host memory. ``home``: the place of a state, None where none was foreseen."""
    param = update.bundle.param
    if optimizer.state.get(param):
        return
    scalar = torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
    state: dict[str, Any] = {"step": torch.tensor(0.0, dtype=scalar)}
    for name in update.state_names:
        place = home(name)
        memory = torch.empty_like(update.weight, dtype=torch.float32, device="cpu") if place is None else place
        state[name] = memory.zero_()
        if hasattr(param, "_local_tensor"):
            state[name] = torch.empty_like(param.detach())
            state[name]._local_tensor = memory
    optimizer.state[param] = state


@contextmanager
def narrowed(optimizer: Optimizer, params: set[torch.Tensor]) -> Iterator[None]:
    """The optimizer has these parameters only; the others and their groups come back."""
    groups = optimizer.param_groups
    some = [{**group, "params": [param for param in group["params"] if param in params]} for group in groups]
    try:
        optimizer.param_groups = [group for group in some if group["params"]]
        yield
    finally:
        optimizer.param_groups = groups
