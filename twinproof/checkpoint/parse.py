"""Strict parsing of safetensors headers and of the JSON around them.

Prevents readers that believe a header: every length, shape and offset is checked against the file before anything is
allocated, and the verdict is the safetensors library's own, but for duplicate keys, which that library lets pass
(facts/checkpoint.md 3.3). No C++ code parses headers.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from dataclasses import dataclass
from typing import Any

from twinproof.checkpoint.layout import DTYPES, HEADER_BYTES_MAX, LENGTH_BYTES, METADATA_KEY, Entry
from twinproof.errors import FormatError

__all__ = ["Header", "HeaderCache", "parse_header", "parse_json_object", "read_header"]

_DEPTH_MAX = 127  # The library's JSON parser gives up beyond.
_FIELD_COUNT = 3  # dtype, shape, data_offsets; others are allowed and ignored.
_METADATA_FIRST = re.compile(rb'[ \t\r\n]*\{[ \t\r\n]*"__metadata__"[ \t\r\n]*:[ \t\r\n]*')
_LONG_NUMBER = re.compile(rb"\d{300}")


HeaderCache = dict[tuple[bytes, int], dict[str, Entry]]


@dataclass(frozen=True)
class Header:
    """A parsed header: ``data_start`` is the file offset of the data section, ``file_bytes`` the whole file."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int
    file_bytes: int


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise FormatError("a key stands twice", got=next(n for n in names if names.count(n) > 1))
    return result


def _no_constant(text: str) -> Any:
    raise FormatError("not a JSON number", got=text)


class _Signed(int):
    """An integer written with a minus sign: no size, even when it is zero."""


def _careful_int(text: str) -> int:
    _careful_float(text)
    return _Signed(text) if text.startswith("-") else int(text)


def _careful_float(text: str) -> float:
    value = float(text)
    if value in (math.inf, -math.inf):
        raise FormatError("a number beyond every range", got=text[:40])
    return value


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_careful_int, parse_float=_careful_float
)


def parse_json_object(raw: bytes, where: str) -> dict[str, Any]:
    """Strict UTF-8 JSON object: no duplicate key, no NaN, no number beyond every range. Raises FormatError."""
    try:
        text = raw.decode("utf-8")
        # The slow hook for every integer is only paid for where one could be signed or out of range.
        parse_int = _careful_int if b"-" in raw or _LONG_NUMBER.search(raw) else None
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_int=parse_int,
            parse_float=_careful_float,
        )
    except FormatError as error:
        raise FormatError(error.message, got=error.got, where=where) from None
    except (ValueError, RecursionError) as error:
        raise FormatError("not valid UTF-8 JSON", got=str(error)[:200], where=where) from None
    if not isinstance(value, dict):
        raise FormatError("not a JSON object", got=type(value).__name__, where=where)
    return value


def _check_ignored(value: Any, depth: int, where: str) -> None:
    # What nobody reads must still be JSON as the library's parser sees it: 127 levels, no lone surrogates.
    if isinstance(value, str):
        _check_unicode(value, where)
    elif isinstance(value, (dict, list)):
        if depth > _DEPTH_MAX:
            raise FormatError("nested too deeply", got=depth, expected=f"<= {_DEPTH_MAX}", where=where)
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            _check_ignored(inner, depth + 1, where)


def _check_unicode(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise FormatError("a lone surrogate in a string", got=str(error), where=where) from None


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
    if len(fields) > _FIELD_COUNT:
        _check_ignored(fields, 2, place)
    if count >= 2**60:
        raise FormatError("the element count overflows", got=shape, where=place)
    need = (0 if 0 in shape else count) * bits
    if need % 8:
        raise FormatError("a sub-byte tensor must fill whole bytes", got=shape, where=place)
    if end - begin != need // 8:
        raise FormatError("byte range and shape disagree", got=[begin, end], expected=f"{need // 8} bytes", where=place)
    return Entry(dtype, tuple(shape), begin, end)


def _parse_metadata(metadata: Any, where: str) -> dict[str, str]:
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(type(v) is str for v in metadata.values()):
        raise FormatError("__metadata__ maps str to str", got=str(metadata)[:200], where=where)
    _check_unicode("".join((*metadata, *metadata.values())), where)
    return metadata


def _check_cover(entries: dict[str, Entry], data_bytes: int, where: str) -> None:
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        place = f"{where}: tensor {name!r}"
        if entry.begin != position:
            kind = "overlap" if entry.begin < position else "hole"
            raise FormatError(f"the data section has a {kind}", got=entry.begin, expected=position, where=place)
        position = entry.end
        if position > data_bytes:
            raise FormatError("a tensor lies beyond the file", got=entry.end, expected=data_bytes, where=place)
    if position != data_bytes:
        raise FormatError(
            "tensors and file length disagree", got=f"{data_bytes} data bytes", expected=position, where=where
        )


def _split_metadata(raw: bytes) -> tuple[Any, bytes] | None:
    """Metadata that stands first, and the header without it; None where a header is not written so."""
    match = _METADATA_FIRST.match(raw)
    if match is None:
        return None
    try:
        text = raw[match.end() :].decode("utf-8")
        metadata, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None  # The whole header is parsed then, and refused with the right words.
    return (metadata, b"{" + text[end + 1 :].encode()) if text[end : end + 1] == "," else None


def parse_header(
    raw: bytes, data_bytes: int, where: str, cache: HeaderCache | None = None
) -> tuple[dict[str, Entry], dict[str, str]]:
    """Parse the JSON of a header and check that the tensors cover the data section exactly.

    Args:
        raw: the JSON bytes, padding included.
        data_bytes: length of the data section.
        where: file name for messages.
        cache: entries by header text. The shard files of one checkpoint often differ in their metadata only.

    Returns:
        Entries by name in file order of the header, and the string metadata.

    Raises:
        FormatError: anything that the specification forbids, duplicate keys included (the Rust core lets those pass).
    """
    split = _split_metadata(raw) if cache is not None else None
    metadata, rest = split if split is not None else (None, raw)
    known = cache.get((rest, data_bytes)) if cache is not None else None
    if known is not None:
        return known, _parse_metadata(metadata, where)
    value = parse_json_object(rest, where)
    if split is None:
        metadata = value.pop(METADATA_KEY, None)
    elif METADATA_KEY in value:
        raise FormatError("a key stands twice", got=METADATA_KEY, where=where)
    checked = _parse_metadata(metadata, where)
    entries = {name: _parse_entry(name, fields, where) for name, fields in value.items()}
    _check_unicode("".join(value), where)
    _check_cover(entries, data_bytes, where)
    if cache is not None:
        cache[rest, data_bytes] = entries
    return entries, checked


def read_header(path: str | os.PathLike[str], cache: HeaderCache | None = None) -> Header:
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
    entries, metadata = parse_header(raw, status.st_size - data_start, where, cache)
    return Header(entries, metadata, data_start, status.st_size)
