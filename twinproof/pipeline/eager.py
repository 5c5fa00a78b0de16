"""Lookups in a compiled model: they run as they are, between compiled graphs.

Prevents what tracing a lookup leaves: shapes, steps and learning rates that are fixed in a graph, and a graph for each
list of lengths. What a lookup reads of its ids, and an optimizer in the backward, are not for a graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["eagerly"]

P = ParamSpec("P")
R = TypeVar("R")


def eagerly(method: Callable[P, R]) -> Callable[P, R]:
    """The method, which ``torch.compile`` does not look into: one graph break, and no cost elsewhere."""

    @functools.wraps(method)
    def call(*args: P.args, **options: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            # Found here and not above: it imports the compiler, which an eager model never needs.
            disabled: Callable[P, R] = torch.compiler.disable(method)  # type: ignore[no-untyped-call]
            return disabled(*args, **options)
        return method(*args, **options)

    return call
