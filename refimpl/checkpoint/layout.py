"""The safetensors container: dtypes, canonical header bytes, strict header parsing.

Prevents files that only their own writer can read, and readers that believe a header: every length, shape and offset
is checked against the file before anything is allocated. Format: the safetensors README and facts/checkpoint.md 3.
This module exists once; both implementations and no C++ code parse headers with it.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from refimpl.errors import ConfigError, FormatError, UnsupportedError

__all__ = ["DTYPES", "Entry", "FileLayout", "Header", "dtype_name", "lay_out", "parse_header", "read_header"]

METADATA_KEY = "__metadata__"
HEADER_BYTES_MAX = 100_000_000  # The safetensors library's own cap, for writing and reading.
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


class Entry(NamedTuple):
    """One tensor of a header. ``shape`` counts format elements, ``begin`` and ``end`` bytes of the data section."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def torch_dtype(self, where: str) -> torch.dtype:
        """The torch dtype, or UnsupportedError for F6, which torch cannot express."""
        dtype = DTYPES[self.dtype][1]
        if dtype is None:
            raise UnsupportedError("no torch dtype holds this tensor", got=self.dtype, where=where)
        return dtype

    def torch_shape(self) -> tuple[int, ...]:
        """The shape torch shows: two F4 elements are one ``float4_e2m1fn_x2``."""
        return (*self.shape[:-1], self.shape[-1] // 2) if self.dtype == "F4" else self.shape


@dataclass(frozen=True)
class Header:
    """A parsed header: ``data_start`` is the file offset of the data section, ``file_bytes`` the whole file."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int
    file_bytes: int


@dataclass(frozen=True)
class FileLayout:
    """Where everything of one file goes: the length-prefixed header, and file offset and byte count of each tensor."""

    header: bytes
    begins: dict[str, int]
    file_bytes: int


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
    start = LENGTH_BYTES + len(text)
    begins = {name: start + offset for name, offset in relative.items()}
    return FileLayout(len(text).to_bytes(LENGTH_BYTES, "little") + text, begins, start + position)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise FormatError("a key stands twice", got=next(n for n in names if names.count(n) > 1))
    return result


def _no_constant(text: str) -> Any:
    raise FormatError("not a JSON number", got=text)


def _no_minus(text: str) -> int:
    if text.startswith("-"):
        raise FormatError("a negative number", got=text[:40])
    return int(text)


def parse_json_object(raw: bytes, where: str) -> dict[str, Any]:
    """Strict UTF-8 JSON object: no duplicate key, no NaN, no negative integer. Raises FormatError."""
    try:
        text = raw.decode("utf-8")
        # Names rarely hold a minus sign, so the slow per-integer hook is only paid for where one stands somewhere.
        parse_int = _no_minus if b"-" in raw else None
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=parse_int)
    except FormatError as error:
        raise FormatError(error.message, got=error.got, where=where) from None
    except (ValueError, RecursionError) as error:
        raise FormatError("not valid UTF-8 JSON", got=str(error)[:200], where=where) from None
    if not isinstance(value, dict):
        raise FormatError("not a JSON object", got=type(value).__name__, where=where)
    return value


def _parse_entry(name: str, fields: Any, where: str) -> Entry:
    place = f"{where}: tensor {name!r}"
    try:
        dtype, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
        bits = DTYPES[dtype][0]
        count = 1
        for size in shape:
            if type(size) is not int or not 0 <= size < 2**63:
                raise FormatError("a dimension is not a size", got=size, where=place)
            count *= size or 1
        if type(shape) is not list or type(begin) is not int or type(end) is not int:
            raise FormatError("shape and data_offsets are lists of integers", got=fields, where=place)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(
            "not a tensor entry", got=str(fields)[:200], expected="dtype, shape, data_offsets", where=place
        ) from None
    if count >= 2**60:
        raise FormatError("the element count overflows", got=shape, where=place)
    need = (0 if 0 in shape else count) * bits
    if need % 8 or (dtype == "F4" and (not shape or shape[-1] % 2)):
        raise FormatError("a sub-byte tensor must fill whole bytes", got=shape, where=place)
    if end - begin != need // 8:
        raise FormatError("byte range and shape disagree", got=[begin, end], expected=f"{need // 8} bytes", where=place)
    return Entry(dtype, tuple(shape), begin, end)


def parse_header(raw: bytes, data_bytes: int, where: str) -> tuple[dict[str, Entry], dict[str, str]]:
    """Parse the JSON of a header and check that the tensors cover the data section exactly.

    Args:
        raw: the JSON bytes, padding included.
        data_bytes: length of the data section.
        where: file name for messages.

    Returns:
        Entries by name in file order of the header, and the string metadata.

    Raises:
        FormatError: anything that the specification forbids, duplicate keys included (the Rust core lets those pass).
    """
    value = parse_json_object(raw, where)
    metadata = value.pop(METADATA_KEY, None) or {}
    if not isinstance(metadata, dict) or not all(type(v) is str for v in metadata.values()):
        raise FormatError("__metadata__ maps str to str", got=str(metadata)[:200], where=where)
    entries = {name: _parse_entry(name, fields, where) for name, fields in value.items()}
    try:
        "".join((*value, *metadata, *metadata.values())).encode()
    except UnicodeEncodeError as error:
        raise FormatError("a lone surrogate in a string", got=str(error), where=where) from None
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.begin != position:
            kind = "overlap" if entry.begin < position else "hole"
            raise FormatError(
                f"the data section has a {kind}", got=entry.begin, expected=position, where=f"{where}: tensor {name!r}"
            )
        position = entry.end
    if position != data_bytes:
        raise FormatError(
            "tensors and file length disagree", got=f"{data_bytes} data bytes", expected=position, where=where
        )
    return entries, metadata


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header of one file. Raises FormatError; OSError where the file cannot be opened or read."""
    where = os.fspath(path)
    descriptor = os.open(where, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError("not a regular file", got=stat.filemode(status.st_mode), where=where)
        prefix = os.pread(descriptor, LENGTH_BYTES, 0)
        length = int.from_bytes(prefix, "little")
        limit = min(HEADER_BYTES_MAX, status.st_size - LENGTH_BYTES)
        if len(prefix) < LENGTH_BYTES or length > limit:
            raise FormatError(
                "header length beyond the file or the cap", got=length, expected=f"<= {limit}", where=where
            )
        raw = os.pread(descriptor, length, LENGTH_BYTES)
        if len(raw) != length:
            raise FormatError("header cut short", got=len(raw), expected=length, where=where)
    finally:
        os.close(descriptor)
    data_start = LENGTH_BYTES + length
    entries, metadata = parse_header(raw, status.st_size - data_start, where)
    return Header(entries, metadata, data_start, status.st_size)
