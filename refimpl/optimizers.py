"""The formulas of the fused optimizers, once, for the rows of a store and for sharded tables.

Prevents two versions that round differently: every operation is a single float32 operation in the order written, with
no fused multiply-add or reciprocal, so that divisors lie where values do; hyperparameters are computed in float64 and
rounded to float32 once. FBGEMM's formulas, with the bias corrections of ``torch.optim.Adam``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from twinproof.errors import ConfigError
from twinproof.optimizers import AdamHyper, Hyper

__all__ = ["FORMULAS", "Hyper", "adam_step", "reduce_duplicates", "row_sum", "update"]

LANES = 8

States = dict[str, torch.Tensor]


def row_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum of each row of [n, D] as [n, 1], in the dtype given and in one fixed order.

    Eight running sums, element e into sum e mod 8 in ascending order; then sums 4-7 are added to 0-3, 2-3 to 0-1, and
    1 to 0. Eight lanes are what a vector unit adds at once, so that the fast version has the same bits.
    """
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % LANES))
    lanes = values.new_zeros(values.shape[0], LANES)
    for begin in range(0, padded.shape[1], LANES):
        lanes = lanes + padded[:, begin : begin + LANES]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes


def reduce_duplicates(ids: torch.Tensor, grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct ids, ascending, and the sum of the gradients of each, as float32 [u, D].

    Each sum starts at +0 and adds in ascending position.
    """
    unique, inverse = torch.unique(ids, return_inverse=True)
    sums = grads.new_zeros(unique.numel(), grads.shape[1], dtype=torch.float32)
    return unique, sums.index_add_(0, inverse, grads.to(torch.float32))


def _float32(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def sgd(weight: torch.Tensor, grad: torch.Tensor, states: States, hyper: Hyper) -> tuple[torch.Tensor, States]:
    """``w -= lr * g``."""
    return weight - _float32(hyper.lr) * grad, {}


def _root(values: torch.Tensor) -> torch.Tensor:
    # Correctly rounded, as IEEE 754 asks and processors do; torch's float32 sqrt is an ulp off for a fifth of values.
    return values.double().sqrt().float()


def adagrad(weight: torch.Tensor, grad: torch.Tensor, states: States, hyper: Hyper) -> tuple[torch.Tensor, States]:
    """``m1 += g * g``; ``w -= (lr * g) / (sqrt(m1) + eps)``."""
    momentum1 = states["momentum1"] + grad * grad
    step = (_float32(hyper.lr) * grad) / (_root(momentum1) + _float32(hyper.eps))
    return weight - step, {"momentum1": momentum1}


def rowwise_adagrad(
    weight: torch.Tensor, grad: torch.Tensor, states: States, hyper: Hyper
) -> tuple[torch.Tensor, States]:
    """Adagrad with one ``m1`` a row, fed with its mean of ``g * g``; ``w -= (lr / (sqrt(m1) + eps)) * g``."""
    momentum1 = states["momentum1"] + row_sum(grad * grad) / grad.new_tensor(grad.shape[1])
    factor = _float32(hyper.lr) / (_root(momentum1) + _float32(hyper.eps))
    return weight - factor * grad, {"momentum1": momentum1}


def _adam_step(grad: torch.Tensor, square: torch.Tensor, states: States, hyper: Hyper) -> tuple[torch.Tensor, States]:
    momentum1 = _float32(hyper.beta1) * states["momentum1"] + _float32(1 - hyper.beta1) * grad
    momentum2 = _float32(hyper.beta2) * states["momentum2"] + _float32(1 - hyper.beta2) * square
    denominator = _root(momentum2) / grad.new_tensor(hyper.root_correction) + _float32(hyper.eps)
    step = (_float32(hyper.step_size) * momentum1) / denominator
    return step, {"momentum1": momentum1, "momentum2": momentum2}


def adam(weight: torch.Tensor, grad: torch.Tensor, states: States, hyper: Hyper) -> tuple[torch.Tensor, States]:
    """``m1 = b1 * m1 + (1-b1) * g``; ``m2 = b2 * m2 + (1-b2) * (g * g)``; ``w -= (a * m1) / (sqrt(m2) / c + eps)``.

    a is ``Hyper.step_size``, c ``Hyper.root_correction``.
    """
    step, advanced = _adam_step(grad, grad * grad, states, hyper)
    return weight - step, advanced


def partial_rowwise_adam(
    weight: torch.Tensor, grad: torch.Tensor, states: States, hyper: Hyper
) -> tuple[torch.Tensor, States]:
    """Adam with one ``m2`` a row, fed with the mean of ``g * g`` over the row."""
    step, advanced = _adam_step(grad, row_sum(grad * grad) / grad.new_tensor(grad.shape[1]), states, hyper)
    return weight - step, advanced


def lamb(weight: torch.Tensor, grad: torch.Tensor, states: States, hyper: Hyper) -> tuple[torch.Tensor, States]:
    """Adam, each row's step s scaled to the norm of its weights: ``w -= (lr * |w|) / |s| * s`` (arXiv 1904.00962).

    The scale is 1 where either norm is zero or not a number.
    """
    step, advanced = _adam_step(grad, grad * grad, states, hyper)
    norm, length = _root(row_sum(weight * weight)), _root(row_sum(step * step))
    scale = torch.where((norm > 0) & (length > 0), (_float32(hyper.lr) * norm) / length, 1.0)
    return weight - scale * step, advanced


FORMULAS = {
    "sgd": sgd,
    "adagrad": adagrad,
    "rowwise_adagrad": rowwise_adagrad,
    "adam": adam,
    "partial_rowwise_adam": partial_rowwise_adam,
    "lamb": lamb,
}


def update(
    optimizer: str, weight: torch.Tensor, grad: torch.Tensor, states: Mapping[str, torch.Tensor], hyper: Hyper
) -> tuple[torch.Tensor, States]:
    """One step of rows whose duplicates were already reduced.

    Args:
        optimizer: one of ``FORMULAS``.
        weight: [n, D] of any float dtype; widened to float32, and the result rounded back to nearest even.
        grad: float32 [n, D].
        states: name -> [n, D] or [n, 1] of any float dtype, treated like the weight.
        hyper: the step's hyperparameters.

    Returns:
        The new weight and states, of the dtypes given; nothing is changed in place.

    Raises:
        ConfigError: an optimizer without a formula.
    """
    if optimizer not in FORMULAS:
        raise ConfigError("no such optimizer", got=optimizer, expected=sorted(FORMULAS), where="optimizer")
    wide = {name: state.to(torch.float32) for name, state in states.items()}
    new_weight, new_states = FORMULAS[optimizer](weight.to(torch.float32), grad, wide, hyper)
    return new_weight.to(weight.dtype), {name: value.to(states[name].dtype) for name, value in new_states.items()}


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
    """One step of ``torch.optim.Adam`` or ``AdamW`` on one parameter in host memory, in place.

    Each operation is a single float32 operation in the order written. torch's own paths differ from each other in the
    last bits, so agreement with them is a matter of error bounds.

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
