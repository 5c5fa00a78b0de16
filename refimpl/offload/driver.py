"""Takes the place of ``optimizer.step``, so that the user's loop, schedulers and scalers do not change.

Prevents wrappers that lose the learning rate (facts/offload.md 3.13) and hooks that run once for each chunk: the step
hooks, the profiler's record and a closure belong to the logical step; the optimizer's own arithmetic runs under them
as often as there are chunks. Where a call site is lost, nothing is offloaded, and ``stats`` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from refimpl.errors import ConfigError, OffloadConflictError, UnsupportedError

__all__ = ["StepDriver", "arithmetic_of", "check_devices", "check_gradients", "check_optimizer"]

# Whole parameters can be stepped in any partition, bit for bit (facts/offload.md 6.1). LBFGS couples them.
SUPPORTED = (
    "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD", "Adafactor",
    "Muon",
)  # fmt: skip
# Optimizers that step on the CPU and keep their state there already: torchao, DeepSpeed, Megatron.
CPU_STEP = (
    "CPUOffloadOptimizer",
    "DeepSpeedCPUAdam",
    "DeepSpeedCPUAdagrad",
    "DeepSpeedCPULion",
    "HybridDeviceOptimizer",
)
_ATTACHED = "_twinproof_offloader"


def check_optimizer(optimizer: Any) -> None:
    """Refuse what cannot be attached to.

    Raises:
        OffloadConflictError: something else offloads this optimizer already; names both.
        UnsupportedError: an optimizer whose state is not known to move exactly.
    """
    other = getattr(optimizer, _ATTACHED, None)
    kind = type(optimizer)
    if other is not None or any(base.__name__ in CPU_STEP for base in kind.__mro__):
        found = (
            f"{kind.__name__}, attached to {type(other).__module__}.{type(other).__name__}" if other else kind.__name__
        )
        raise OffloadConflictError(
            "this optimizer is offloaded already",
            got=found,
            expected="a plain torch.optim optimizer",
            where="optimizer",
        )
    if kind not in {getattr(torch.optim, name, None) for name in SUPPORTED}:
        raise UnsupportedError(
            "not an optimizer whose state is known to move exactly",
            got=kind.__name__,
            expected=SUPPORTED,
            where="optimizer",
        )


def check_devices(devices: set[torch.device], step_device: str) -> None:
    """Refuse parameters that no engine of ours serves.

    Raises:
        OffloadConflictError: they are on the CPU, and so is their state. ConfigError: several devices.
    """
    if step_device == "device" and all(device.type == "cpu" for device in devices):
        raise OffloadConflictError(
            "the parameters are on the CPU, where their state is already: nothing to offload",
            got="parameters on cpu",
            expected="an accelerator, or an engine that stands in for one",
            where="step_device='device'",
        )
    if len(devices) > 1:
        raise ConfigError("one offloader serves one device", got=sorted(map(str, devices)), where="optimizer")


def check_gradients(params: Iterable[torch.Tensor]) -> None:
    """Refuse sparse ones: a momentum of them is sparse itself, and has no place of a known size.

    Raises:
        UnsupportedError: naming the gradient.
    """
    for param in params:
        grad = param.grad
        if grad is not None and grad.layout is not torch.strided:
            raise UnsupportedError(
                "sparse gradients are not supported",
                got=grad.layout,
                expected=torch.strided,
                where=f"gradient of shape {tuple(param.shape)}",
            )


def arithmetic_of(kind: type[Optimizer]) -> Callable[..., Any]:
    """The optimizer's own step, without torch's wrapper that runs hooks and the profiler."""
    step: Any = kind.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    found: Callable[..., Any] = step
    return found


class StepDriver:
    """Replaces ``optimizer.step`` until ``detach``.

    Args:
        optimizer: of a supported kind.
        owner: the offloader, for messages.
        run: called once for each logical step with the optimizer's arithmetic, a function without arguments.
    """

    def __init__(self, optimizer: Optimizer, owner: Any, run: Callable[[Callable[[], None]], None]) -> None:
        self.optimizer, self.run = optimizer, run
        self.attached = True
        self._arithmetic = arithmetic_of(type(optimizer))
        self._before: Any = optimizer.__dict__.get("step")
        self._after = self._make()
        optimizer.step = self._after  # type: ignore[method-assign]
        setattr(optimizer, _ATTACHED, owner)

    def _make(self) -> Any:
        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            optimizer._opt_called = True  # type: ignore[attr-defined]
            if not self.attached:
                return self._arithmetic(optimizer, closure)
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self.run(lambda: self._arithmetic(optimizer))
            return loss

        hooked: Any = Optimizer.profile_hook_step(step)
        # Schedulers look for this mark and warn when somebody else's step is on top of theirs.
        hooked._wrapped_by_lr_sched = True
        return MethodType(hooked, self.optimizer)

    def detach(self) -> None:
        """Give ``optimizer.step`` back. A scheduler that wrapped ours meanwhile keeps it, as a plain step."""
        self.attached = False
        setattr(self.optimizer, _ATTACHED, None)
        if self.optimizer.__dict__.get("step") is self._after:
            if self._before is None:
                del self.optimizer.step
            else:
                self.optimizer.step = self._before  # type: ignore[method-assign]
