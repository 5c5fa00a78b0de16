"""Which optimizers can be attached to, in what they may be wrapped, and which of them can be stepped in parts.

Prevents an optimizer that is refused though its bits would be right, and one that is cut into parts though its
parameters depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from twinproof.errors import ConfigError, UnsupportedError

__all__ = ["CPU_STEP", "arithmetic_of", "known_kind", "unwrapped"]

# Whole parameters can be stepped in any partition, bit for bit, and their states be foreseen.
KNOWN = (
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
# Where Megatron's wrappers keep the float32 masters that their inner optimizer steps.
_MASTER_GROUPS = ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")


def arithmetic_of(kind: type[Optimizer]) -> Callable[..., Any]:
    """The optimizer's own step, without torch's wrapper that runs hooks and the profiler."""
    step: Any = kind.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    found: Callable[..., Any] = step
    return found


def known_kind(kind: type[Optimizer]) -> type[Optimizer] | None:
    """The optimizer of torch whose arithmetic this is, itself or what it inherits it from; None for any other.

    One of another kind is stepped as a whole, with everything on the device: its parameters may depend on each other.
    """
    for base in kind.__mro__:
        if base.__name__ in KNOWN and base is getattr(torch.optim, base.__name__, None):
            steps = arithmetic_of(kind) is arithmetic_of(base)
            starts = getattr(kind, "_init_group", None) is getattr(base, "_init_group", None)
            return base if steps and starts else None
    return None


def unwrapped(given: Any) -> tuple[Optimizer, list[torch.Tensor]]:
    """The optimizer that steps, and the float32 masters that its wrapper keeps among its parameters.

    Wrappers: whatever has the optimizer as its ``optimizer``, as accelerate's ``AcceleratedOptimizer`` and Megatron's
    ``DistributedOptimizer`` do.

    Raises:
        ConfigError: a wrapper that calls a step which it took from the optimizer earlier.
        UnsupportedError: what is no torch optimizer, several in one, and one that steps sparse gradients only.
    """
    inner = getattr(given, "optimizer", None)
    wraps = isinstance(inner, Optimizer)
    if wraps and getattr(given, "_optimizer_original_step_method", None) is not None:
        raise ConfigError(
            "this wrapper calls the step that it took from the optimizer when it was made",
            got=type(given).__name__,
            expected="an offloader that is attached before the optimizer is wrapped",
            where="optimizer",
        )
    if hasattr(given, "chained_optimizers"):
        raise UnsupportedError(
            "several optimizers in one",
            got=type(given).__name__,
            expected="an offloader for each of chained_optimizers",
            where="optimizer",
        )
    found = inner if wraps else given
    if not isinstance(found, Optimizer) or isinstance(found, torch.optim.SparseAdam):
        raise UnsupportedError(
            "not an optimizer whose state can be moved",
            got=type(given).__name__,
            expected="a torch.optim.Optimizer of dense gradients, or a wrapper with one as its .optimizer",
            where="optimizer",
        )
    groups = [group for name in _MASTER_GROUPS for group in getattr(given, name, None) or ()] if wraps else []
    return found, [master for group in groups for master in group if master is not None]
