"""The safetensors container: dtypes and canonical header bytes.

Prevents files that only their own writer can read. Format: the safetensors README and facts/checkpoint.md 3. This
module exists once, for both implementations.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from twinproof.errors import ConfigError, UnsupportedError

__all__ = ["DTYPES", "UNPAIRED_F4", "Entry", "FileLayout", "dtype_name", "lay_out", "torch_dtype"]

logger = logging.getLogger("twinproof.checkpoint")

METADATA_KEY = "__metadata__"
HEADER_BYTES_MAX = 100_000_000  # The safetensors library's own cap, for writing and reading.
HEADER_BYTES_REMOTE = 25_000_000  # huggingface_hub's parser of remote headers reads no more.
PAGE_BYTES = 4096
LENGTH_BYTES = 8

# Format name -> (bits per element, torch dtype or None), in the order in which the library's writer sorts tensors.
DTYPES: dict[str, tuple[int, torch.dtype | None]] = {
    "U64": (64, torch.uint64),
    "I64": (64, torch.int64),
    "F64": (64, torch.float64),
    "C64": (64, torch.complex64),
    "F32": (32, torch.float32),
    "U32": (32, torch.uint32),
    "I32": (32, torch.int32),
    "BF16": (16, torch.bfloat16),
    "F16": (16, torch.float16),
    "U16": (16, torch.uint16),
    "I16": (16, torch.int16),
    "F8_E5M2FNUZ": (8, torch.float8_e5m2fnuz),
    "F8_E4M3FNUZ": (8, torch.float8_e4m3fnuz),
    "F8_E8M0": (8, torch.float8_e8m0fnu),
    "F8_E4M3": (8, torch.float8_e4m3fn),
    "F8_E5M2": (8, torch.float8_e5m2),
    "I8": (8, torch.int8),
    "U8": (8, torch.uint8),
    "F6_E3M2": (6, None),
    "F6_E2M3": (6, None),
    "F4": (4, torch.float4_e2m1fn_x2),
    "BOOL": (8, torch.bool),
}
_RANK = {name: rank for rank, name in enumerate(DTYPES)}
_NAMES = {dtype: name for name, (_, dtype) in DTYPES.items() if dtype is not None}


UNPAIRED_F4 = "F4 of odd width"


class Entry(NamedTuple):
    """One tensor of a header. ``shape`` counts format elements, ``begin`` and ``end`` bytes of the data section."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def kind(self) -> str:
        """The dtype as torch may hold it: half a ``float4_e2m1fn_x2`` is a tensor that only the format can express."""
        return UNPAIRED_F4 if self.dtype == "F4" and (not self.shape or self.shape[-1] % 2) else self.dtype

    def torch_dtype(self, where: str) -> torch.dtype:
        """The torch dtype, or UnsupportedError where torch has none."""
        dtype = torch_dtype(self.kind)
        if dtype is None:
            raise UnsupportedError("no torch dtype holds this tensor", got=self.kind, where=where)
        return dtype

    def torch_shape(self) -> tuple[int, ...]:
        """The shape torch shows: two F4 elements are one ``float4_e2m1fn_x2``."""
        return (*self.shape[:-1], self.shape[-1] // 2) if self.kind == "F4" else self.shape


@dataclass(frozen=True)
class FileLayout:
    """Where everything of one file goes: the length-prefixed header, and file offset and byte count of each tensor."""

    header: bytes
    begins: dict[str, int]
    file_bytes: int


def torch_dtype(kind: str) -> torch.dtype | None:
    """The torch dtype of a format dtype, None for F6 and for unpaired F4."""
    return DTYPES.get(kind, (0, None))[1]


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """The format's name of a torch dtype. Raises UnsupportedError for one that the format lacks."""
    if dtype not in _NAMES:
        raise UnsupportedError(
            "safetensors has no dtype for this tensor", got=dtype, expected=sorted(_RANK), where=where
        )
    return _NAMES[dtype]


def check_name(name: object) -> str:
    """A name that the format can hold, else UnsupportedError."""
    if not isinstance(name, str):
        raise UnsupportedError("tensor names are strings", got=type(name).__name__, where=repr(name))
    if name == METADATA_KEY:
        raise UnsupportedError("this tensor name is reserved by the format", got=name)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UnsupportedError("tensor names must be valid Unicode", got=ascii(name)) from None
    return name


def check_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """User metadata as the format wants it: str -> str, keys sorted. Raises ConfigError."""
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ConfigError("metadata maps str to str", got={key: value}, where="metadata")
    return dict(sorted((metadata or {}).items()))


def format_shape(name: str, dtype: torch.dtype, shape: Sequence[int]) -> list[int]:
    """The shape that the header shows for a torch tensor."""
    if dtype is not torch.float4_e2m1fn_x2:
        return list(shape)
    if not shape:
        raise UnsupportedError("a 0-dim float4 tensor has no whole number of format elements", where=name)
    return [*shape[:-1], shape[-1] * 2]


def lay_out(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]],
    metadata: Mapping[str, str] | None = None,
    *,
    page_align: bool = False,
) -> FileLayout:
    """Lay out one file exactly as ``safetensors.serialize`` does: dtype rank, then name; header padded with spaces.

    Args:
        tensors: (name, torch dtype, torch shape).
        metadata: written first, keys sorted; nothing is added.
        page_align: pad so that the data section starts at a multiple of 4096 (still a valid file).

    Raises:
        UnsupportedError: name or dtype that the format lacks. ConfigError: a header above 100 MB.
    """
    ranked = sorted((_RANK[dtype_name(d, n)], check_name(n), d, s) for n, d, s in tensors)
    header: dict[str, Any] = {METADATA_KEY: check_metadata(metadata)} if metadata is not None else {}
    relative: dict[str, int] = {}
    position = 0
    for _, name, dtype, shape in ranked:
        end = position + math.prod(shape) * dtype.itemsize
        shown = format_shape(name, dtype, shape)
        header[name] = {"dtype": _NAMES[dtype], "shape": shown, "data_offsets": [position, end]}
        relative[name] = position
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    unit = PAGE_BYTES if page_align else LENGTH_BYTES
    text += b" " * (-(len(text) + LENGTH_BYTES) % unit)
    if len(text) > HEADER_BYTES_MAX:
        raise ConfigError("header too long for one file", got=len(text), expected=f"<= {HEADER_BYTES_MAX} bytes")
    if len(text) > HEADER_BYTES_REMOTE:
        logger.warning("a header of %d bytes: model hubs' remote parsers stop at %d", len(text), HEADER_BYTES_REMOTE)
    start = LENGTH_BYTES + len(text)
    begins = {name: start + offset for name, offset in relative.items()}
    return FileLayout(len(text).to_bytes(LENGTH_BYTES, "little") + text, begins, start + position)
