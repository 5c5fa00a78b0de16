"""Argument checks of every verb, before anything is touched; shared by both versions.

Prevents half-applied batches and reads of memory that is not there: width, dtype, device, stride, rank and length are
checked here and nowhere later, and a refusal leaves the store as it was.
"""

from __future__ import annotations

from typing import Any

import torch

from twinproof.errors import ConfigError, ShapeError, UnsupportedError

__all__ = ["check_count", "check_ids", "check_matrix", "check_rows", "column"]

_ID_DTYPES = (torch.int64, torch.int32)


def check_plain(value: Any, where: str) -> torch.Tensor:
    """A dense contiguous CPU tensor, else ShapeError or UnsupportedError."""
    if not isinstance(value, torch.Tensor):
        raise UnsupportedError("not a tensor", got=type(value).__name__, expected="torch.Tensor", where=where)
    if value.device.type != "cpu":
        raise ShapeError("a tensor on another device than the store", got=value.device, expected="cpu", where=where)
    if value.layout is not torch.strided or not value.is_contiguous() or value.is_conj() or value.is_neg():
        raise ShapeError("not contiguous; call .contiguous()", got=tuple(value.stride()), where=where)
    return value.detach()


def check_ids(ids: Any, where: str = "ids") -> torch.Tensor:
    """Ids as int64 [n], from int32 or int64 [n]; every value is an id. Raises ShapeError, UnsupportedError."""
    plain = check_plain(ids, where)
    if plain.dtype not in _ID_DTYPES:
        raise UnsupportedError("not a dtype of ids", got=plain.dtype, expected=_ID_DTYPES, where=where)
    if plain.dim() != 1:
        raise ShapeError("ids are one-dimensional", got=tuple(plain.shape), expected="[n]", where=where)
    return plain.to(torch.int64)


def check_matrix(
    values: Any, row_count: int | None, width: int, dtype: torch.dtype | tuple[torch.dtype, ...], where: str
) -> torch.Tensor:
    """Values [row_count, width] of the dtype. Raises ShapeError, UnsupportedError."""
    plain = check_plain(values, where)
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if plain.dtype not in dtypes:
        raise UnsupportedError("another dtype than the store's", got=plain.dtype, expected=dtypes, where=where)
    expected = ("n" if row_count is None else row_count, width)
    if plain.dim() != 2 or plain.shape[1] != width or (row_count is not None and plain.shape[0] != row_count):
        raise ShapeError("another shape than expected", got=tuple(plain.shape), expected=expected, where=where)
    return plain


def check_rows(rows: Any, row_bytes: int, where: str = "rows") -> torch.Tensor:
    """Whole rows, uint8 [n, row_bytes]. Raises ShapeError, UnsupportedError."""
    return check_matrix(rows, None, row_bytes, torch.uint8, where)


def check_count(count: Any, length: int, where: str = "count") -> int:
    """The first ``count`` of ``length`` entries; None is all. Raises ConfigError."""
    if count is None:
        return length
    if type(count) is not int or not 0 <= count <= length:
        raise ConfigError("not a count of the entries", got=count, expected=f"0 to {length}", where=where)
    return count


def column(value: torch.Tensor) -> torch.Tensor:
    """A vector [n] as a column [n, 1]."""
    return value.reshape(-1, 1)
