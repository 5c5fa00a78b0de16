"""The fused optimizers by name: their states, their codes in C++, their classes in torch and torchrec, hyperparameters.

Prevents a name that means different states in the row, in a sharded table and in C++. The formulas are the
implementations': ``refimpl.optimizers`` has the plain ones.
"""

from __future__ import annotations

import functools
import math
import struct
import weakref
from dataclasses import dataclass
from typing import Any

from twinproof.errors import ConfigError, check_number

__all__ = [
    "FUSED_OPTIMIZERS",
    "OPTIMIZERS",
    "STEP_MAX",
    "AdamHyper",
    "Hyper",
    "MasterOf",
    "OptimizerKind",
    "StateKind",
    "clear_gradients",
    "trained_params",
]


class MasterOf:
    """Which parameter of the model a master is stepped for; the master holds it as ``master_of``.

    Prevents that who drives an optimizer by the model's parameters takes masters for somebody else's. A copy of an
    optimizer is of no model.
    """

    def __init__(self, param: Any = None) -> None:
        self._param = None if param is None else weakref.ref(param)

    def __reduce__(self) -> Any:
        return MasterOf, ()

    @property
    def param(self) -> Any:
        """None where it is gone."""
        return None if self._param is None else self._param()


def trained_params(optimizer: Any) -> list[Any]:
    """The parameters that an optimizer trains, in its order: of a master the one that it is rounded into."""
    return [_trained(param) for group in getattr(optimizer, "param_groups", ()) for param in group["params"]]


def clear_gradients(optimizer: Any) -> None:
    """``zero_grad``, which a training step cannot do without. Raises ConfigError without an optimizer."""
    if optimizer is None:
        expected = "an optimizer of the dense parameters, or model.eval()"
        raise ConfigError("a step in training without an optimizer", got=None, expected=expected, where="optimizer")
    optimizer.zero_grad()


def _trained(param: Any) -> Any:
    master_of = getattr(param, "master_of", None)
    found = master_of.param if isinstance(master_of, MasterOf) else None
    return param if found is None else found


@dataclass(frozen=True)
class StateKind:
    """One state: one element for each row, or one for each element of the weight; ``is_float32`` where no other dtype
    is allowed.
    """

    name: str
    is_row_wise: bool = False
    is_float32: bool = False


@dataclass(frozen=True)
class OptimizerKind:
    """One optimizer: its code in C++, the name of its class in torch or torchrec, and its states in the row's order."""

    name: str
    code: int
    class_name: str
    states: tuple[StateKind, ...] = ()

    def widths(self, columns: int) -> dict[str, int]:
        """State name -> elements of a row of that many columns, by name."""
        return {state.name: 1 if state.is_row_wise else columns for state in sorted(self.states, key=lambda s: s.name)}


OPTIMIZERS = {
    kind.name: kind
    for kind in (
        OptimizerKind("none", 0, ""),
        OptimizerKind("sgd", 1, "SGD"),
        OptimizerKind("adagrad", 2, "Adagrad", (StateKind("momentum1"),)),
        OptimizerKind("rowwise_adagrad", 3, "RowWiseAdagrad", (StateKind("momentum1", True, True),)),
        OptimizerKind("adam", 4, "Adam", (StateKind("momentum1"), StateKind("momentum2"))),
        # FBGEMM puts the row-wise momentum2 first.
        OptimizerKind(
            "partial_rowwise_adam", 5, "PartialRowWiseAdam", (StateKind("momentum2", True), StateKind("momentum1"))
        ),
        OptimizerKind("lamb", 6, "LAMB", (StateKind("momentum1"), StateKind("momentum2"))),
    )
}
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
# Steps are counted in tensors, too.
STEP_MAX = 2**63 - 1
FUSED_OPTIMIZERS = tuple(name for name in OPTIMIZERS if name != "none")


@dataclass(frozen=True)
class Hyper:
    """Hyperparameters of one step: ``step`` counts from 1.

    Raises:
        ConfigError: a value that float32, in which steps are computed, does not hold as a finite one, a negative eps,
            a beta outside [0, 1), a step below 1 or above ``STEP_MAX``.
    """

    lr: float
    step: int = 1
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "beta1", "beta2"):
            if type(getattr(self, name)) is not float:
                object.__setattr__(self, name, check_number(getattr(self, name), name))
        if not (abs(self.lr) <= FLOAT32_MAX and 0 <= self.eps <= FLOAT32_MAX):
            raise ConfigError(
                "not a learning rate or eps",
                got=(self.lr, self.eps),
                expected="finite in float32, eps >= 0",
                where="lr, eps",
            )
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ConfigError("not betas", got=(self.beta1, self.beta2), expected="0 <= beta < 1", where="betas")
        if type(self.step) is not int or not 1 <= self.step <= STEP_MAX:
            raise ConfigError("not a step", got=self.step, expected=f"an int from 1 to {STEP_MAX}", where="step")

    @property
    def step_size(self) -> float:
        """Lr / (1 - beta1 ** step), in float64."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def root_correction(self) -> float:
        """sqrt(1 - beta2 ** step), in float64."""
        return math.sqrt(1 - self.beta2**self.step)


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
