"""Adam and AdamW on host memory, for ``step_device="cpu"``: the formula, once, as a plain sequence of torch operations.

Prevents two versions that round differently. Every operation is a single float32 operation in the order written, with
no fused multiply-add; hyperparameters are computed in float64 and rounded to float32 once. What torch's ``AdamW``
computes, in the order of ``refimpl.optimizers.adam``; torch's own paths differ from each other in the last bits
(facts/offload.md 6.4), so agreement with them is a matter of error bounds, not of bits.
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass

import torch

__all__ = ["AdamHyper", "adam_step"]


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


@dataclass(frozen=True)
class AdamHyper:
    """Hyperparameters of one step, each a float32 value.

    ``keep`` is what decoupled decay leaves of a weight, 1 without it; ``coupled_decay`` is added to the gradient as so
    many weights where ``coupled``; ``root_correction`` is sqrt(1 - beta2 ** step).
    """

    keep: float
    coupled_decay: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    step_size: float
    root_correction: float
    eps: float
    maximize: bool
    coupled: bool

    @classmethod
    @functools.lru_cache(maxsize=64)  # Thousands of parameters share a few.
    def of(
        cls,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        step: float,
        decoupled: bool,
        maximize: bool = False,
    ) -> AdamHyper:
        """From an optimizer's options. ``step`` counts from 1; ``decoupled`` is AdamW's weight decay, else Adam's."""
        beta1, beta2 = betas
        return cls(
            keep=_float32(1 - lr * weight_decay if decoupled else 1.0),
            coupled_decay=_float32(0.0 if decoupled else weight_decay),
            beta1=_float32(beta1),
            one_minus_beta1=_float32(1 - beta1),
            beta2=_float32(beta2),
            one_minus_beta2=_float32(1 - beta2),
            step_size=_float32(lr / (1 - beta1**step)),
            root_correction=_float32(math.sqrt(1 - beta2**step)),
            eps=_float32(eps),
            maximize=maximize,
            coupled=not decoupled and weight_decay != 0,
        )

    @property
    def values(self) -> tuple[float, ...]:
        """The nine numbers, in their order."""
        return (
            self.keep, self.coupled_decay, self.beta1, self.one_minus_beta1, self.beta2, self.one_minus_beta2,
            self.step_size, self.root_correction, self.eps,
        )  # fmt: skip


def _root(values: torch.Tensor) -> torch.Tensor:
    # Correctly rounded, as IEEE 754 asks and processors do; torch's float32 sqrt is an ulp off for a fifth of values.
    return values.double().sqrt().float()


@torch.no_grad()
def adam_step(
    hyper: AdamHyper,
    grad: torch.Tensor,
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    max_exp_avg_sq: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
) -> None:
    """One step of one parameter, in place.

    Args:
        hyper: the step's hyperparameters.
        grad: any shape, float32, bfloat16 or float16; widened to float32.
        master: the float32 weights. Written.
        exp_avg: the float32 first moment. Written.
        exp_avg_sq: the float32 second moment. Written.
        max_exp_avg_sq: amsgrad's, or None. Written.
        weight: gets the new master, rounded to nearest even; or None. Written.
    """
    slope = -grad.float() if hyper.maximize else grad.float()
    start = master * hyper.keep
    if hyper.coupled:
        slope = slope + start * hyper.coupled_decay
    exp_avg.copy_(exp_avg * hyper.beta1 + slope * hyper.one_minus_beta1)
    exp_avg_sq.copy_(exp_avg_sq * hyper.beta2 + (slope * slope) * hyper.one_minus_beta2)
    second = exp_avg_sq
    if max_exp_avg_sq is not None:
        second = max_exp_avg_sq.copy_(torch.maximum(max_exp_avg_sq, exp_avg_sq))
    master.copy_(start - (exp_avg * hyper.step_size) / (_root(second) / hyper.root_correction + hyper.eps))
    if weight is not None:
        weight.copy_(master)
