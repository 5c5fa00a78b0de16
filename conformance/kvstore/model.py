"""What a store must hold, in other words than its own: a row of plain Python values, and textbook optimizers."""

from __future__ import annotations

import math
from typing import Any

import torch

from conformance.kvstore.cases import header

# None of them is a default, which whoever forgets to hand them on would take.
LR, EPS, BETA1, BETA2 = 0.05, 1e-3, 0.75, 0.96875


class Row:
    """One row of the model: the header's fields, and the bytes behind the header."""

    def __init__(self, timestamp: int, count: int, body: bytes) -> None:
        self.timestamp, self.count, self.body = timestamp, count, bytearray(body)

    def raw(self, key: int) -> bytes:
        """The whole row."""
        return header(key, self.timestamp, self.count) + bytes(self.body)


def slots(optimizer: str, dim: int, begin: int, *, momentum1: int, momentum2: int) -> dict[str, tuple[int, int]]:
    """State name -> where its bytes begin in a row, and their number; momenta by the bytes of an element."""
    second = math.ceil((begin + dim * momentum1) / momentum2) * momentum2
    both = {"momentum1": (begin, dim * momentum1), "momentum2": (second, dim * momentum2)}
    behind_one = begin + math.ceil(momentum2 / 4) * 4
    return {
        "none": {},
        "sgd": {},
        "adagrad": {"momentum1": (begin, dim * momentum1)},
        "rowwise_adagrad": {"momentum1": (begin, 4)},
        "adam": both,
        "lamb": both,
        "partial_rowwise_adam": {"momentum2": (begin, momentum2), "momentum1": (behind_one, dim * momentum1)},
    }[optimizer]


def dense_steps(optimizer: str, weight: torch.Tensor, grads: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Steps of textbook formulas on a dense table, in the dtype."""
    w = weight.to(dtype)
    m1, m2 = torch.zeros_like(w), torch.zeros_like(w)
    for step, grad in enumerate(grads, start=1):
        g = grad.to(dtype)
        square = (g * g).mean(dim=1, keepdim=True).expand_as(g) if "rowwise" in optimizer else g * g
        if optimizer == "sgd":
            w = w - LR * g
        elif "adagrad" in optimizer:
            m2 = m2 + square
            w = w - LR * g / (m2.sqrt() + EPS)
        else:
            m1 = BETA1 * m1 + (1 - BETA1) * g
            m2 = BETA2 * m2 + (1 - BETA2) * square
            change = LR / (1 - BETA1**step) * m1 / (m2.sqrt() / (1 - BETA2**step) ** 0.5 + EPS)
            w = (
                w
                - (LR * w.norm(dim=1, keepdim=True) / change.norm(dim=1, keepdim=True) if optimizer == "lamb" else 1)
                * change
            )
    return w


def root(values: torch.Tensor) -> torch.Tensor:
    """The correctly rounded float32 square root, which torch's own is not always."""
    return values.double().sqrt().float()


def f32(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def lanes_sum(values: torch.Tensor) -> torch.Tensor:
    """The documented order of a row's sum: eight lanes, then halves."""
    lanes = [f32(0.0)] * 8
    for element, value in enumerate(values):
        lanes[element % 8] = lanes[element % 8] + value
    for half in (4, 2, 1):
        lanes = [lanes[k] + lanes[k + half] for k in range(half)]
    return lanes[0]


def one_step(
    optimizer: str,
    w: torch.Tensor,
    g: torch.Tensor,
    m1: torch.Tensor,
    m2: torch.Tensor,
    step: int,
    lr: float = LR,
    *,
    eps: float = 1e-8,
    beta1: float = 0.9,
    beta2: float = 0.999,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One step of one row, one float32 operation after the other; by the defaults of a store unless told."""
    mean = (lanes_sum(g * g) / f32(g.numel())).reshape(1)
    if optimizer == "sgd":
        return w - f32(lr) * g, m1, m2
    if "adagrad" in optimizer:
        m1 = m1 + (mean if "rowwise" in optimizer else g * g)
        divisor = root(m1) + f32(eps)
        # FBGEMM's order: a row has one factor of its gradients.
        return w - ((f32(lr) / divisor) * g if "rowwise" in optimizer else (f32(lr) * g) / divisor), m1, m2
    m1 = f32(beta1) * m1 + f32(1 - beta1) * g
    m2 = f32(beta2) * m2 + f32(1 - beta2) * (mean if "rowwise" in optimizer else g * g)
    denominator = root(m2) / f32((1 - beta2**step) ** 0.5) + f32(eps)
    change = (f32(lr / (1 - beta1**step)) * m1) / denominator
    if optimizer == "lamb":
        norm, length = root(lanes_sum(w * w)), root(lanes_sum(change * change))
        change = ((f32(lr) * norm) / length if norm > 0 and length > 0 else f32(1.0)) * change
    return w - change, m1, m2


def stepped_body(layout: Any, body: bytes, grads: list[torch.Tensor], step: int, lr: float) -> bytes:
    """The bytes of a row behind its header after one step; gradients of duplicates are summed in their order."""
    total = grads[0].float()
    for grad in grads[1:]:
        total = total + grad.float()
    raw = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    parts = [(0, layout.weight_bytes, layout.weight_dtype)]
    # By name: the row-wise one of two may lie first.
    slots = [layout.state_slots[name] for name in sorted(layout.state_slots)]
    parts += [(slot.offset_bytes - 16, slot.end_bytes - 16, slot.dtype) for slot in slots]
    values = [raw[begin:end].clone().view(dtype).float() for begin, end, dtype in parts]
    values += [torch.zeros(1)] * (3 - len(values))
    found = one_step(layout.optimizer, values[0], total, values[1], values[2], step, lr)
    for (begin, end, dtype), value in zip(parts, found, strict=False):
        raw[begin:end] = value.to(dtype).contiguous().view(torch.uint8)
    return raw.numpy().tobytes()
