"""Which chunks one kernel updates in their slots, with the bits of torch's own step, and why torch updates the others.

Prevents other bits without a word: the kernel has the roundings of torch's foreach path on CUDA. What torch would step
in another way, or with options that the kernel lacks, is left to torch, and the reason can be read in ``stats()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fastimpl import ops
from fastimpl.offload.positions import Places
from twinproof.offload.driver import MovePlan
from twinproof.offload.states import is_dense, local_of, made_as

__all__ = ["FUSED", "KINDS", "SlotUpdates", "hyper_of", "kind_of"]

# As ``SlotKind`` has them: code, and the names of the states in torch's order.
KINDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "sgd": (0, ()),
    "momentum": (1, ("momentum_buffer",)),
    "adam": (2, ("exp_avg", "exp_avg_sq")),
    "amsgrad": (3, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    "adagrad": (4, ("sum",)),
}
FUSED = "fused"
_MAXIMIZE, _DECOUPLED, _COUPLED, _NESTEROV = 1, 2, 4, 8
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Torch's order of operations was read, and its machine code looked at, in these versions.
_READ = ((2, 11), (2, 13))
_OTHER_PATHS = ("fused", "capturable", "differentiable")
_NUMBERS = ("lr", "weight_decay", "eps", "momentum", "dampening", "lr_decay")


def kind_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> str | None:
    """A key of ``KINDS``, or None: an optimizer of another class, a derived one among them."""
    if type(optimizer) is torch.optim.SGD:
        return "momentum" if group["momentum"] else "sgd"
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        return "amsgrad" if group["amsgrad"] else "adam"
    return "adagrad" if type(optimizer) is torch.optim.Adagrad else None


def hyper_of(kind: str, group: dict[str, Any], step: float, *, decoupled: bool) -> list[float]:
    """``SlotHyper`` of a group's step, which counts from 1: torch's numbers, by the same expressions."""
    lr, decay = group["lr"], group["weight_decay"]
    flags = _MAXIMIZE if group["maximize"] else 0
    if decay != 0:
        flags |= _DECOUPLED if decoupled else _COUPLED
    if kind in ("sgd", "momentum"):
        flags |= _NESTEROV if group["nesterov"] else 0
        return [1.0, decay, 0.0, group["momentum"], 1 - group["dampening"], 1.0, -lr, 0.0, flags]
    if kind == "adagrad":
        return [1.0, decay, 0.0, 1.0, 1.0, 1.0, -lr / (1 + (step - 1) * group["lr_decay"]), group["eps"], flags]
    beta1, beta2 = group["betas"]
    root = (1 - beta2**step) ** 0.5
    size = (lr / (1 - beta1**step)) * -1
    return [1 - lr * decay, decay, 1 - beta1, beta2, 1 - beta2, root, size, group["eps"], flags]


def _why_not_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> str:
    """What of a group's options torch steps in another way; empty if nothing."""
    kind = kind_of(optimizer, group)
    if kind is None:
        return f"no kernel for {type(optimizer).__name__}"
    for option in _OTHER_PATHS:
        if group.get(option):
            return f"{option}=True"
    if group.get("foreach") is False:
        return "foreach=False"
    # Torch chooses that path by itself only where neither of the two was given.
    if group.get("foreach") is None and group.get("fused") is False:
        return "fused=False"
    for name in _NUMBERS:
        if isinstance(group.get(name), torch.Tensor):
            return f"{name} is a tensor"
    if any(isinstance(beta, torch.Tensor) for beta in group.get("betas", ())):
        return "betas are tensors"
    if group.get("nesterov") and not group["weight_decay"] and not group["maximize"]:
        return "nesterov=True without weight decay writes to the gradients"
    return ""


def _is_plain(tensor: torch.Tensor) -> bool:
    # A derived class may change what torch does; one of a device that is written in Python says that it is none.
    kind = made_as(tensor)
    return kind in _PLAIN or getattr(kind, "is_plain_memory", False) is True


def _shards_of(tensor: Any) -> tuple[Any, ...] | None:
    """Of a DTensor: how its shards lie, its mesh first, to be compared; None for any other tensor."""
    # Most are plain, of which a step may ask thousands: an attribute that is not there takes ten times as long.
    if made_as(tensor) in _PLAIN or not hasattr(tensor, "_local_tensor"):
        return None
    return tensor.device_mesh, tensor.placements, tensor.shape


def _why_not_param(param: torch.Tensor, grad: torch.Tensor, *, is_rounded: bool) -> str:
    """Why torch's foreach path would not take a parameter; ``is_rounded``: its gradient gets its dtype first.

    Of a DTensor that path steps the shard, like a tensor of its own, as long as no shard has to be exchanged.
    """
    shards = _shards_of(param)
    if shards != _shards_of(grad) or (shards and any(placement.is_partial() for placement in shards[1])):
        return "a gradient that is sharded in another way than its parameter"
    if shards is not None:
        param, grad = local_of(param), local_of(grad)
    if not (_is_plain(param) and _is_plain(grad)):
        return f"a parameter of class {made_as(param).__name__}, a gradient of class {type(grad).__name__}"
    if param.dim() == 0 or param.dtype not in _DTYPES:
        return f"a parameter of {param.dtype} with {param.dim()} dimensions"
    if not is_rounded and grad.dtype != param.dtype:
        return f"a gradient of {grad.dtype} for a parameter of {param.dtype}"
    if grad.stride() != param.stride() or not is_dense(param):
        return "a parameter with gaps, or a gradient with other strides"
    return ""


def order_is_read(release: str) -> bool:
    """Whether the order of operations of a release of torch, such as ``"2.11.0+cu130"``, was read."""
    first, last = _READ
    return first <= tuple(int(part) for part in release.split("+")[0].split(".")[:2]) <= last


@dataclass
class _Call:
    """Parameters of one kind and one dtype: one call."""

    params: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    states: tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]] = field(
        default_factory=lambda: ([], [], [])
    )
    steps: list[torch.Tensor] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    wrappers: list[torch.Tensor] = field(default_factory=list)
    """The DTensors among the parameters: of those, ``params`` has the shards."""


class SlotUpdates:
    """The way in which the chunks of each step are updated.

    Args:
        plan: what moves; its counts get ``updates``.
    """

    def __init__(self, plan: MovePlan) -> None:
        self.plan = plan
        self._reasons: list[str] = []
        self._ways: list[set[str]] = []

    def begin(self) -> None:
        """Look at every group, once a step: torch takes another path for all of a group when one parameter needs it."""
        groups = self.plan.optimizer.param_groups
        reason = self._why_nowhere()
        self._reasons = [reason or self._why_not(group) for group in groups]
        self._ways = [set() for _ in groups]

    def end(self) -> None:
        """Say which ways were taken."""
        self.plan.counts.updates = tuple(" and ".join(sorted(ways)) for ways in self._ways)

    def run(self, places: Places) -> bool:
        """Update all of a chunk, where it is now; False, and nothing done, if that is torch's to do.

        Args:
            places: of its parameters, by group.
        """
        reason, calls = self._plan_calls(places)
        for number, _ in places:
            self._ways[number].add(f"torch: {self._reasons[number] or reason}" if calls is None else FUSED)
        if calls is None:
            return False
        for (kind, _), call in calls.items():
            self._call(kind, call)
        return True

    def _why_nowhere(self) -> str:
        wanted, device = self.plan.options.fused_update, self.plan.engine.device
        if wanted is False:
            return "fused_update=False"
        if not ops.available():
            return "no library"
        if wanted is None and device.type != "cuda":
            return f"torch rounds otherwise on {device.type}"
        if wanted is None and not order_is_read(torch.__version__):
            return f"the order of operations of torch {torch.__version__} was not read"
        return ""

    def _why_not(self, group: dict[str, Any]) -> str:
        found = _why_not_group(self.plan.optimizer, group)
        masters = {} if self.plan.masters is None else self.plan.masters.pairs
        for param in () if found else group["params"]:
            model = masters.get(param, param)
            if model.grad is None:
                continue
            found = _why_not_param(param, model.grad, is_rounded=model is not param)
            if found:
                break
        shards = () if found else map(_shards_of, group["params"])
        if len({None if each is None else each[0] for each in shards}) > 1:
            # torch refuses a list of them.
            return "DTensors beside other tensors, or on several meshes"
        return found

    def _plan_calls(self, places: Places) -> tuple[str, dict[tuple[str, torch.dtype], _Call] | None]:
        """The calls that update a chunk, or why torch has to do it. Changes nothing."""
        optimizer = self.plan.optimizer
        calls: dict[tuple[str, torch.dtype], _Call] = {}
        listed: set[torch.Tensor] = set()
        for number, positions in places:
            if self._reasons[number]:
                return f"a chunk with group {number}", None
            group = optimizer.param_groups[number]
            kind = str(kind_of(optimizer, group))
            names = KINDS[kind][1]
            for position in positions:
                param = group["params"][position]
                if param in listed:
                    return "a parameter that is listed twice", None
                listed.add(param)
                if param.grad is None:
                    continue
                state = optimizer.state.get(param, {})
                call = calls.setdefault((kind, param.dtype), _Call())
                reason = _add(call, number, param, [state.get(name) for name in names], state.get("step"), kind)
                if reason:
                    return reason, None
        return "", calls

    def _call(self, kind: str, call: _Call) -> None:
        optimizer = self.plan.optimizer
        if call.steps:
            # As torch counts.
            torch._foreach_add_(call.steps, torch.tensor(1.0, device="cpu"), alpha=1.0)
        counts = [float(step) for step in call.steps] or [0.0] * len(call.params)
        numbers: dict[tuple[int, float], int] = {}
        hypers: list[float] = []
        places: list[int] = []
        for number, count in zip(call.groups, counts, strict=True):
            key = (number, count)
            if key not in numbers:
                numbers[key] = len(numbers)
                group = optimizer.param_groups[number]
                decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
                hypers += map(float, hyper_of(kind, group, count, decoupled=decoupled))
            places.append(numbers[key])
        ops.slot_step(KINDS[kind][0], call.params, call.grads, call.states, places, hypers)
        # A write to a shard is one to its DTensor, which autograd has to see.
        torch.autograd.graph.increment_version(call.wrappers)


def _add(call: _Call, number: int, param: torch.Tensor, states: Sequence[Any], step: Any, kind: str) -> str:
    """Take a parameter into a call; why not, if its states are not there or of another form."""
    if any(state is None for state in states):
        return "torch makes the states"
    shards, local = _shards_of(param), param
    if any(_shards_of(state) != shards for state in states):
        return "states that are sharded in another way than their parameter"
    if shards is not None:
        local, states = local_of(param), [local_of(state) for state in states]
    form = (True, local.dtype, local.shape, local.stride())
    if any((_is_plain(state), state.dtype, state.shape, state.stride()) != form for state in states):
        return "states of another form than their parameter"
    if kind not in ("sgd", "momentum"):
        if not isinstance(step, torch.Tensor) or not step.is_cpu:
            return "a counter that is not on the host"
        call.steps.append(step)
    if shards is not None:
        call.wrappers.append(param)
    call.params.append(local.detach())
    call.grads.append(local_of(param.grad) if shards is not None else param.grad)  # type: ignore[arg-type]
    for column, state in zip(call.states, states, strict=False):
        column.append(state)
    call.groups.append(number)
    return ""
