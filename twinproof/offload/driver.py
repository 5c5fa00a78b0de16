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

from twinproof.errors import ConfigError, OffloadConflictError, UnsupportedError
from twinproof.offload.kinds import CPU_STEP, arithmetic_of, known_kind

__all__ = ["StepDriver", "check_attachment", "check_devices", "check_gradients"]

_ATTACHED = "_twinproof_offloader"


def check_attachment(optimizer: Optimizer) -> None:
    """Refuse an optimizer that is offloaded already, by us or by itself.

    Raises:
        OffloadConflictError: names both.
    """
    other = getattr(optimizer, _ATTACHED, None)
    kind = type(optimizer)
    if other is None and not any(base.__name__ in CPU_STEP for base in kind.__mro__):
        return
    found = f"{kind.__name__}, attached to {type(other).__module__}.{type(other).__name__}" if other else kind.__name__
    raise OffloadConflictError(
        "this optimizer is offloaded already", got=found, expected="a plain torch.optim optimizer", where="optimizer"
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


class StepDriver:
    """Replaces ``optimizer.step`` until ``detach``.

    Args:
        optimizer: one of torch's, or one that derives from torch's ``Optimizer``.
        owner: the offloader, for messages.
        run: called once for each logical step with the optimizer's arithmetic, a function without arguments.

    A closure of one of torch's optimizers is evaluated before the step begins, once. An optimizer of another kind gets
    all arguments of its step itself: it may evaluate the closure as often as it likes, with its state on the device.
    """

    def __init__(self, optimizer: Optimizer, owner: Any, run: Callable[[Callable[[], None]], None]) -> None:
        self.optimizer, self.run = optimizer, run
        self.attached = True
        self._arithmetic = arithmetic_of(type(optimizer))
        self._is_known = known_kind(type(optimizer)) is not None
        self._before: Any = optimizer.__dict__.get("step")
        self._after = self._make()
        optimizer.step = self._after  # type: ignore[method-assign]
        setattr(optimizer, _ATTACHED, owner)

    def _make(self) -> Any:
        def step(optimizer: Optimizer, *arguments: Any, **options: Any) -> Any:
            optimizer._opt_called = True  # type: ignore[attr-defined]
            if not self.attached:
                return self._arithmetic(optimizer, *arguments, **options)
            if self._is_known:
                return self._step_known(*arguments, **options)
            results: list[Any] = []
            self.run(lambda: results.append(self._arithmetic(optimizer, *arguments, **options)))
            return results[0]

        hooked: Any = Optimizer.profile_hook_step(step)
        # Schedulers look for this mark and warn when somebody else's step is on top of theirs.
        hooked._wrapped_by_lr_sched = True
        return MethodType(hooked, self.optimizer)

    def _step_known(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.run(lambda: self._arithmetic(self.optimizer))
        return loss

    def detach(self) -> None:
        """Give ``optimizer.step`` back. A scheduler that wrapped ours meanwhile keeps it, as a plain step."""
        self.attached = False
        setattr(self.optimizer, _ATTACHED, None)
        if self.optimizer.__dict__.get("step") is self._after:
            if self._before is None:
                del self.optimizer.step
            else:
                self.optimizer.step = self._before  # type: ignore[method-assign]
