"""Rows of ids that were never written: the initializer's formula in torch. See ``Initializer`` for the definition."""

from __future__ import annotations

import torch

from twinproof.kvstore.config import Initializer, StoreOptions
from twinproof.kvstore.layout import HEADER_BYTES, Header, as_bytes, pack_header

__all__ = ["initial_rows", "initial_weights"]


def _signed(word: int) -> int:
    word &= 2**64 - 1
    return word - 2**64 if word >= 2**63 else word


GOLDEN = _signed(0x9E3779B97F4A7C15)


def _shift(words: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift to the right; torch's own is arithmetic."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def mix(words: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 on int64 words that wrap."""
    words = (words ^ _shift(words, 30)) * _signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shift(words, 27)) * _signed(0x94D049BB133111EB)
    return words ^ _shift(words, 31)


def initial_weights(
    initializer: Initializer, seed: int, table_index: int, ids: torch.Tensor, embedding_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """The weights [n, embedding_dim] of ids int64 [n] that were never written."""
    if initializer.kind == "zeros":
        return torch.zeros(ids.numel(), embedding_dim, dtype=dtype)
    table = mix(torch.tensor([_signed(seed + GOLDEN * (table_index + 1))]))
    row = mix(table ^ ids)
    elements = torch.arange(1, embedding_dim + 1) * GOLDEN
    words = mix(row[:, None] + elements[None, :])
    unit = _shift(words, 40).to(torch.float64) * 2.0**-24
    return (initializer.low + initializer.span * unit).to(torch.float32).to(dtype)


def initial_rows(options: StoreOptions, table: str, ids: torch.Tensor) -> torch.Tensor:
    """Whole rows, uint8 [n, row_bytes], of ids that were never written: key, initial weight, all else zero."""
    layout = options.rows[table]
    index = list(options.layouts).index(table)
    rows = torch.zeros(ids.numel(), layout.row_bytes, dtype=torch.uint8)
    nothing = torch.zeros_like(ids)
    rows[:, :HEADER_BYTES] = pack_header(Header(ids, nothing, nothing, nothing.bool()))
    weights = initial_weights(
        options.initializers[table], options.seed, index, ids, layout.embedding_dim, layout.weight_dtype
    )
    rows[:, HEADER_BYTES : HEADER_BYTES + layout.weight_bytes] = as_bytes(weights)
    return rows
