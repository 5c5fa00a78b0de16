"""Comparers that cannot be fooled by values that print alike: NaN payloads, signed zeros, dtypes, shapes, short files.

Every comparer raises :class:`Mismatch` with got / expected / where, so that the message is enough without a debugger,
and so that the kill matrix can tell a comparison that spoke up from a test that merely crashed. ``torch`` is imported
only when a tensor is compared: the plugin that lives beside this module must stay cheap for suites that never use it.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Mismatch",
    "assert_equal",
    "assert_le",
    "assert_same_bytes",
    "assert_same_tensor",
    "assert_same_tensors",
    "unravel",
]

_CHUNK_BYTES = 1 << 20
_HEX_BYTES = 16


class Mismatch(AssertionError):
    """A comparison of the suite that did not hold; the only exception that kills a planted bug.

    Args:
        message: one sentence that names the difference.
        got: what the implementation produced.
        expected: what the requirement demands.
        where: file, tensor, index, rank or call at fault.
    """

    def __init__(self, message: str, *, got: Any = None, expected: Any = None, where: Any = None) -> None:
        self.message, self.got, self.expected, self.where = message, got, expected, where
        lines = [message, f"  got:      {got}", f"  expected: {expected}"]
        if where not in (None, ""):
            lines.append(f"  where:    {where}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        details = _portable(self.got), _portable(self.expected), _portable(self.where)
        return _rebuild, (type(self), self.message, *details)


def _portable(value: Any) -> Any:
    # A mismatch travels between ranks; an arbitrary object may not, and its text is all that anybody reads there.
    return value if isinstance(value, str | int | float | bytes | bool | type(None)) else repr(value)


def _rebuild(cls: type[Mismatch], message: str, got: Any, expected: Any, where: Any) -> Mismatch:
    return cls(message, got=got, expected=expected, where=where)


def _view(data: bytes | bytearray | memoryview | str | os.PathLike[str]) -> bytes | memoryview | mmap.mmap:
    if isinstance(data, bytes):
        return data
    if isinstance(data, bytearray | memoryview):
        return memoryview(data).cast("B")
    path = Path(data)
    if path.stat().st_size == 0:
        return b""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _hex_around(data: bytes | memoryview | mmap.mmap, offset: int) -> str:
    start = max(0, offset - _HEX_BYTES // 2)
    piece = bytes(data[start : start + _HEX_BYTES])
    return f"{len(data)} bytes, at {start}: {piece.hex(' ') or '(end)'}"


def _first_difference(got: bytes | memoryview | mmap.mmap, expected: bytes | memoryview | mmap.mmap) -> int | None:
    shorter = min(len(got), len(expected))
    for start in range(0, shorter, _CHUNK_BYTES):
        stop = min(start + _CHUNK_BYTES, shorter)
        a, b = bytes(got[start:stop]), bytes(expected[start:stop])
        if a != b:
            return start + next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    return None if len(got) == len(expected) else shorter


def assert_same_bytes(
    got: bytes | bytearray | memoryview | str | os.PathLike[str],
    expected: bytes | bytearray | memoryview | str | os.PathLike[str],
    *,
    where: str = "",
) -> None:
    """Demand the same bytes; a ``str`` or path names a file.

    Raises:
        Mismatch: with the first differing offset and the bytes around it; a shorter side differs where it ends.
    """
    __tracebackhide__ = True
    a, b = _view(got), _view(expected)
    offset = _first_difference(a, b)
    if offset is not None:
        name = where or (str(got) if isinstance(got, str | os.PathLike) else "")
        raise Mismatch(
            f"bytes differ first at offset {offset}",
            got=_hex_around(a, offset),
            expected=_hex_around(b, offset),
            where=f"{name}[{offset}]" if name else f"offset {offset}",
        )


def _element_bytes(tensor: Tensor) -> Tensor:
    """The elements of ``tensor`` as a contiguous uint8 matrix [numel, itemsize], whatever its dtype."""
    import torch

    plain = tensor.detach()
    if plain.device.type != "cpu":
        plain = plain.cpu()
    if plain.is_complex():
        plain = plain.resolve_conj()
    if plain.element_size() == 1:
        # Copies of the packed four-bit type do not exist; its bytes are viewed before anything is moved.
        return plain.view(torch.uint8).contiguous().reshape(-1, 1)
    dense = plain.resolve_neg().contiguous()
    # A dimension of one element may have any stride, which a view of another width refuses.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).reshape(-1, plain.element_size())


def _local(tensor: Any, where: str) -> Tensor:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise Mismatch("not a tensor", got=type(tensor).__name__, expected="torch.Tensor", where=where)
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


def _element(tensor: Tensor, matrix: Tensor, position: int) -> str:
    raw = "0x" + bytes(matrix[position].tolist())[::-1].hex()
    try:
        value = tensor.detach().reshape(-1)[position].item()
    except NotImplementedError:
        # The packed types have no Python value.
        return raw
    return f"{value!r} ({raw})"


def assert_same_tensor(got: Any, expected: Any, *, where: str = "") -> None:
    """Demand the same dtype, shape and bytes, NaN payloads and signed zeros included; device and strides are free.

    A DTensor is compared by its local shard.

    Raises:
        Mismatch: with the number of wrong elements and the first index with both values.
    """
    __tracebackhide__ = True
    a, b = _local(got, where), _local(expected, where)
    if a.dtype != b.dtype:
        raise Mismatch("dtypes differ", got=a.dtype, expected=b.dtype, where=where)
    if a.shape != b.shape:
        raise Mismatch("shapes differ", got=tuple(a.shape), expected=tuple(b.shape), where=where)
    left, right = _element_bytes(a), _element_bytes(b)
    if left.equal(right):
        return
    wrong = (left != right).any(dim=1)
    position = int(wrong.nonzero()[0])
    index = unravel(position, tuple(a.shape))
    raise Mismatch(
        f"{int(wrong.sum())} of {a.numel()} elements differ ({a.dtype}, shape {tuple(a.shape)})",
        got=_element(a, left, position),
        expected=_element(b, right, position),
        where=f"{where}[{', '.join(map(str, index))}]",
    )


def unravel(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of the element at ``position`` in row-major order."""
    index = []
    for size in reversed(shape):
        position, remainder = divmod(position, size)
        index.append(remainder)
    return tuple(reversed(index))


def assert_same_tensors(got: Mapping[str, Any], expected: Mapping[str, Any], *, where: str = "") -> None:
    """Demand the same names and, per name, the same tensor. The order of names is free.

    Raises:
        Mismatch: listing missing and unexpected names, or the first tensor that differs.
    """
    __tracebackhide__ = True
    missing, extra = sorted(expected.keys() - got.keys()), sorted(got.keys() - expected.keys())
    if missing or extra:
        message = f"names differ: missing {missing}, unexpected {extra}"
        raise Mismatch(message, got=f"{len(got)} names", expected=f"{len(expected)} names", where=where)
    for name in sorted(expected):
        assert_same_tensor(got[name], expected[name], where=f"{where}:{name}" if where else name)


def assert_equal(got: Any, expected: Any, *, where: str = "") -> None:
    """Demand ``got == expected`` for values that are no tensors; names the first place that differs.

    Raises:
        Mismatch: when they differ.
        TypeError: for tensors, whose ``==`` answers another question.
    """
    __tracebackhide__ = True
    # Tensors are recognised by what only they have, so that comparing plain values does not import torch.
    if any(hasattr(value, "storage_offset") for value in (got, expected)):
        raise TypeError("assert_equal compares plain values; use assert_same_tensor for tensors")
    if not got == expected:
        raise Mismatch(f"values differ{_place(got, expected)}", got=repr(got), expected=repr(expected), where=where)


def _place(got: Any, expected: Any) -> str:
    if isinstance(got, Mapping) and isinstance(expected, Mapping):
        keys = sorted({*got, *expected}, key=str)
        wrong = [key for key in keys if key not in got or key not in expected or got[key] != expected[key]]
        return f" at key {wrong[0]!r}" if wrong else ""
    if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        pairs = itertools.zip_longest(got, expected, fillvalue=_MISSING)
        wrong = [index for index, (a, b) in enumerate(pairs) if a != b]
        return f" at index {wrong[0]}" if wrong else ""
    return ""


_MISSING = object()


def assert_le(got: float, bound: float, *, where: str = "") -> None:
    """Demand ``got <= bound``; NaN is never within a bound."""
    __tracebackhide__ = True
    if not got <= bound:
        raise Mismatch("a bound is exceeded", got=got, expected=f"<= {bound}", where=where)
