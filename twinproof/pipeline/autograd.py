"""How lookups stand in graphs: of autograd, once, and of ``torch.compile``, not at all."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd.function import once_differentiable

__all__ = ["FirstDerivatives", "eagerly"]

P = ParamSpec("P")
R = TypeVar("R")


class FirstDerivatives(torch.autograd.Function):
    """A function whose backward no graph goes through: kernels and exchanges make gradients that know of no other.

    Under ``create_graph=True`` such gradients would be constants, and what is differentiated again lack their part. By
    torch's own means its error says so where somebody does, and nothing is refused where nobody does.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        made: Any = staticmethod(once_differentiable(cls.backward))
        cls.backward = made  # type: ignore[method-assign]


def eagerly(method: Callable[P, R]) -> Callable[P, R]:
    """The method, which ``torch.compile`` does not look into: one graph break, and no cost elsewhere.

    A traced lookup would fix shapes, steps and learning rates in a graph, and make a graph for each list of lengths.
    """

    @functools.wraps(method)
    def call(*args: P.args, **options: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            # Found here and not above: it imports the compiler, which an eager model never needs.
            disabled: Callable[P, R] = torch.compiler.disable(method)  # type: ignore[no-untyped-call]
            return disabled(*args, **options)
        return method(*args, **options)

    return call
