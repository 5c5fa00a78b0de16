"""Steps of an optimizer: its own arithmetic, those that others put in its place, and those that are being made."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

__all__ = ["arithmetic_of", "has_step_of_others", "outside_of_graphs", "steps_that_run"]

T = TypeVar("T")


def arithmetic_of(kind: type[Optimizer]) -> Callable[..., Any]:
    """The optimizer's own step, without torch's wrapper that runs hooks and the profiler."""
    step: Any = kind.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    found: Callable[..., Any] = step
    return found


@torch._disable_dynamo
def _called(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    return function(*arguments, **options)


def outside_of_graphs(function: Callable[..., T]) -> Callable[..., T]:
    """The function, which a compiler does not look into: it would take moves and bindings for arithmetic.

    Torch's own decorator would make a cycle of it, and keep what it holds until a garbage collection.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> T:
        found: T = _called(function, *arguments, **options)
        return found

    return call


def has_step_of_others(optimizer: Optimizer) -> bool:
    """Whether somebody put a step of their own in the place of the class's; a scheduler's only counts, and is none."""
    found = optimizer.__dict__.get("step")
    if found is None:
        return False
    found = getattr(found, "__func__", found)
    while getattr(found, "_wrapped_by_lr_sched", False) or getattr(found, "hooked", False):
        found = found.__wrapped__
    return found is not arithmetic_of(type(optimizer))


# Of torch's wrapper that runs the hooks of a step; every wrapper shares it.
_RUNS_HOOKS = Optimizer.profile_hook_step(lambda *_: None).__code__


def steps_that_run(optimizer: Optimizer) -> int:
    """How many steps of the optimizer are being made, one inside of another; 0 where a compiler hides them."""
    count, frame = 0, inspect.currentframe()
    while frame is not None:
        count += frame.f_code is _RUNS_HOOKS and frame.f_locals["args"][0] is optimizer
        frame = frame.f_back
    return count
