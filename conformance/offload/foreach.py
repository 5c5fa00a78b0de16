"""One step of torch's optimizers as its foreach path rounds it on CUDA, in plain torch on the CPU.

Written from torch's Python and headers, call by call (2.11.0 and 2.13.0: ``_multi_tensor_adam``, ``_multi_tensor_sgd``,
``_multi_tensor_adagrad``; ``DeviceAddCmulCdiv.cuh``, ``ForeachFunctors.cuh``, ``Lerp.h``). A fused multiply-add is made
of float64: the product is exact there, and the sum is rounded to odd, so that rounding it again to float32 is right.
"""

from __future__ import annotations

import math
from typing import Any

import torch

__all__ = ["foreach_step", "fused_multiply_add"]

Tensor = torch.Tensor


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64).float()


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` of float32 tensors, rounded once."""
    product, wide = a.double() * b.double(), c.double()
    total = product + wide
    part = total - product
    lost = (product - (total - part)) + (wide - part)
    is_even = (total.contiguous().view(torch.int64) & 1) == 0
    toward = torch.where(lost > 0, math.inf, -math.inf).double()
    is_inexact = (lost != 0) & total.isfinite() & lost.isfinite()
    return torch.where(is_inexact & is_even, torch.nextafter(total, toward), total).float()


def _root(value: Tensor) -> Tensor:
    return value.double().sqrt().float()


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() / b.double()).float()


class _Calls:
    """The ``_foreach_*`` functions, whose results are stored in a dtype and widened again."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def stored(self, value: Tensor) -> Tensor:
        return value.to(self.dtype).float()

    def add(self, a: Tensor, b: Tensor, alpha: float) -> Tensor:
        return self.stored(fused_multiply_add(_number(alpha).expand_as(b), b, a))

    def mul(self, a: Tensor, by: float) -> Tensor:
        return self.stored(a * _number(by))

    def lerp(self, a: Tensor, b: Tensor, weight: float) -> Tensor:
        w = _number(weight)
        if abs(float(w)) < 0.5:
            return self.stored(fused_multiply_add(w.expand_as(a), b - a, a))
        return self.stored(fused_multiply_add(-(1 - w).expand_as(a), b - a, b))

    def addcmul(self, a: Tensor, b: Tensor, c: Tensor, value: float) -> Tensor:
        scale = _number(value)
        if float(scale) == 1:
            return self.stored(fused_multiply_add(b, c, a))
        return self.stored(fused_multiply_add(scale.expand_as(a), b * c, a))

    def addcdiv(self, a: Tensor, b: Tensor, c: Tensor, value: float = 1.0) -> Tensor:
        return self.stored(fused_multiply_add(_number(value).expand_as(a), _ratio(b, c), a))


def foreach_step(optimizer: str, options: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
    """One step of one parameter, in place.

    Args:
        optimizer: ``SGD``, ``Adam``, ``AdamW`` or ``Adagrad``.
        options: of its group, complete.
        param: float32, bfloat16 or float16. Written.
        grad: of the same dtype.
        state: as torch keeps it, made before; ``step`` is a number. Written.
    """
    calls, weight, slope = _Calls(param.dtype), param.detach().float(), grad.float()
    decay, lr = options["weight_decay"], options["lr"]
    if options["maximize"]:
        slope = -slope
    if decay != 0 and options.get("decoupled_weight_decay", optimizer == "AdamW"):
        weight = calls.mul(weight, 1 - lr * decay)
    elif decay != 0:
        slope = calls.add(slope, weight, decay)
    step = {"SGD": _sgd, "Adagrad": _adagrad}.get(optimizer, _adam)
    new_weight, new_state = step(calls, options, weight, slope, {name: _wide(value) for name, value in state.items()})
    with torch.no_grad():
        param.copy_(new_weight.to(param.dtype))
    for name, value in new_state.items():
        if isinstance(value, Tensor):
            state[name].copy_(value.to(param.dtype))
        else:
            state[name] = value


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) else value


def _sgd(
    calls: _Calls, options: dict[str, Any], weight: Tensor, slope: Tensor, state: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    if options["momentum"] == 0:
        return calls.add(weight, slope, -options["lr"]), {}
    buffer = calls.add(calls.mul(state["momentum_buffer"], options["momentum"]), slope, 1 - options["dampening"])
    slope = calls.add(slope, buffer, options["momentum"]) if options["nesterov"] else buffer
    return calls.add(weight, slope, -options["lr"]), {"momentum_buffer": buffer}


def _adagrad(
    calls: _Calls, options: dict[str, Any], weight: Tensor, slope: Tensor, state: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    count = state["step"] + 1
    total = calls.addcmul(state["sum"], slope, slope, 1)
    deviation = calls.stored(calls.stored(_root(total)) + _number(options["eps"]))
    slope = calls.mul(slope, -options["lr"] / (1 + (count - 1) * options["lr_decay"]))
    return calls.addcdiv(weight, slope, deviation), {"sum": total, "step": count}


def _adam(
    calls: _Calls, options: dict[str, Any], weight: Tensor, slope: Tensor, state: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    (beta1, beta2), count = options["betas"], state["step"] + 1
    first = calls.lerp(state["exp_avg"], slope, 1 - beta1)
    second = calls.addcmul(calls.mul(state["exp_avg_sq"], beta2), slope, slope, 1 - beta2)
    found = {"exp_avg": first, "exp_avg_sq": second, "step": count}
    square = second
    if options["amsgrad"]:
        square = found["max_exp_avg_sq"] = torch.maximum(state["max_exp_avg_sq"], second)
    root = _number((1 - beta2**count) ** 0.5)
    denominator = calls.stored(calls.stored(_ratio(calls.stored(_root(square)), root)) + _number(options["eps"]))
    return calls.addcdiv(weight, first, denominator, (options["lr"] / (1 - beta1**count)) * -1), found
