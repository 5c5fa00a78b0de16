"""Rows of ids that were never written: the initializer's formula in torch. See ``Initializer`` for the definition."""

from __future__ import annotations

import torch

from twinproof.kvstore.config import Initializer, signed64

__all__ = ["GOLDEN", "initial_weights", "mix"]


GOLDEN = signed64(0x9E3779B97F4A7C15)


def _shift(words: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift to the right; torch's own is arithmetic."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def mix(words: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 on int64 words that wrap."""
    words = (words ^ _shift(words, 30)) * signed64(0xBF58476D1CE4E5B9)
    words = (words ^ _shift(words, 27)) * signed64(0x94D049BB133111EB)
    return words ^ _shift(words, 31)


def initial_weights(
    initializer: Initializer, seed: int, table_index: int, ids: torch.Tensor, embedding_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """The weights [n, embedding_dim] of ids int64 [n] that were never written."""
    if initializer.kind == "zeros":
        return torch.zeros(ids.numel(), embedding_dim, dtype=dtype)
    table = mix(torch.tensor([signed64(seed + GOLDEN * (table_index + 1))]))
    row = mix(table ^ ids)
    elements = torch.arange(1, embedding_dim + 1) * GOLDEN
    words = mix(row[:, None] + elements[None, :])
    unit = _shift(words, 40).to(torch.float64) * 2.0**-24
    return (initializer.low + initializer.span * unit).to(torch.float32).to(dtype)
