"""The formats: safetensors headers, written and strictly parsed; names of files; tensors as raw memory.

Prevents files that only their own writer can read, and readers that believe a header: every length, shape and offset is
checked against the file before anything is allocated. The verdict on a header is the safetensors library's own, but for
duplicate keys, which that library lets pass. No C++ code parses headers. The format is described by the README of the
safetensors project, the names of files by ``torch.distributed.checkpoint._hf_utils``.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from twinproof.errors import (
    ConfigError,
    CorruptionError,
    FormatError,
    MissingCheckpointError,
    NoDataError,
    UnstorableError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from twinproof.checkpoint.catalog import Catalog

__all__ = [
    "DTYPES",
    "INDEX_NAME",
    "NATIVE_METADATA_NAME",
    "SHARDING_KEY",
    "SINGLE_NAME",
    "STEP_NAME",
    "UNPAIRED_F4",
    "Entry",
    "FileLayout",
    "Header",
    "HeaderCache",
    "StrPath",
    "as_bits",
    "buffer_of",
    "check_fillable",
    "check_put_aside",
    "check_storable",
    "check_unchanged",
    "copies_put_aside",
    "dense_bytes",
    "dtype_name",
    "file_name",
    "has_memory",
    "is_checkpoint_name",
    "lay_out",
    "layout_of",
    "local_path",
    "no_files",
    "overlaps_itself",
    "parse_header",
    "parse_json_object",
    "read_header",
    "torch_dtype",
    "waited",
    "with_options",
    "with_unlisted",
]

logger = logging.getLogger("twinproof.checkpoint")

StrPath = str | os.PathLike[str]

INDEX_NAME = "model.safetensors.index.json"
NATIVE_METADATA_NAME = ".metadata"
SINGLE_NAME = "model.safetensors"
SUFFIX = ".safetensors"
_OWN_NAMES = re.compile(r"(shard-\d{5}-)?model-\d{5}-of-\d{5}\.safetensors")
# As a manager writes it: ``step-07`` is none of its folders, and is not found again under the number 7.
STEP_NAME = re.compile(r"step-(0|[1-9][0-9]*)")
_NATIVE_NAMES = re.compile(r"\.metadata(\.tmp)?|__\d+_\d+\.distcp")

METADATA_KEY = "__metadata__"
SHARDING_KEY = "DCP_SHARDING_INFO"
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
            raise UnsupportedError(
                "no torch dtype holds this tensor", got=self.kind, expected="no F6, and F4 of even width", where=where
            )
        return dtype

    def torch_shape(self) -> tuple[int, ...]:
        """The shape torch shows: two F4 elements are one ``float4_e2m1fn_x2``."""
        return (*self.shape[:-1], self.shape[-1] // 2) if self.kind == "F4" else self.shape


@dataclass(frozen=True)
class FileLayout:
    """Where everything of one file goes: the length-prefixed header, the file offset of each tensor in file order.

    ``metadata`` and ``page_align`` are what was asked for.
    """

    header: bytes
    begins: dict[str, int]
    file_bytes: int
    metadata: Mapping[str, str] | None = None
    page_align: bool = False


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
        raise UnsupportedError("not a tensor's name", got=type(name).__name__, expected="strings", where=repr(name))
    if name == METADATA_KEY:
        raise UnsupportedError(
            "this tensor name is reserved by the format", got=name, expected="another name", where="tensor name"
        )
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UnsupportedError(
            "tensor names must be valid Unicode", got=ascii(name), expected="no lone surrogate", where="tensor name"
        ) from None
    return name


def check_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """User metadata as the format wants it: str -> str, keys sorted. Raises ConfigError."""
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ConfigError(
                "metadata maps str to str", got={key: value}, expected="text, key and value", where="metadata"
            )
    return dict(sorted((metadata or {}).items()))


def format_shape(name: str, dtype: torch.dtype, shape: Sequence[int]) -> list[int]:
    """The shape that the header shows for a torch tensor."""
    if dtype is not torch.float4_e2m1fn_x2:
        return list(shape)
    if not shape:
        raise UnsupportedError(
            "a 0-dim float4 tensor has no whole number of format elements",
            got=list(shape),
            expected="at least one dimension",
            where=name,
        )
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
    text = _padded(text, page_align=page_align)
    if len(text) > HEADER_BYTES_MAX:
        raise ConfigError(
            "header too long for one file", got=len(text), expected=f"<= {HEADER_BYTES_MAX} bytes", where="header"
        )
    if len(text) > HEADER_BYTES_REMOTE:
        logger.warning("a header of %d bytes: model hubs' remote parsers stop at %d", len(text), HEADER_BYTES_REMOTE)
    start = LENGTH_BYTES + len(text)
    begins = {name: start + offset for name, offset in relative.items()}
    prefix = len(text).to_bytes(LENGTH_BYTES, "little")
    return FileLayout(prefix + text, begins, start + position, metadata, page_align)


def _padded(text: bytes, *, page_align: bool) -> bytes:
    return text + b" " * (-(len(text) + LENGTH_BYTES) % (PAGE_BYTES if page_align else LENGTH_BYTES))


def layout_of(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None, *, page_align: bool = False
) -> FileLayout:
    """The layout of a file with these tensors. Raises UnstorableError, UnsupportedError, ConfigError."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise UnstorableError(
                "safetensors holds tensors only", got=type(tensor).__name__, expected="tensors", where=repr(name)
            )
        check_storable(tensor, name)
    return lay_out([(name, t.dtype, t.shape) for name, t in tensors.items()], metadata, page_align=page_align)


def with_options(content: bytes, layout: FileLayout) -> bytes:
    """A file as the safetensors library writes it, with what that library leaves open.

    Its order of several metadata keys is random: here they are sorted. Its data begins at a multiple of 8: with
    ``page_align`` at a multiple of 4096. A file that needs neither is returned as it is.
    """
    if len(layout.metadata or {}) < 2 and not layout.page_align:
        return content
    start = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
    header = json.loads(content[LENGTH_BYTES:start])
    if METADATA_KEY in header:
        header[METADATA_KEY] = dict(sorted(header[METADATA_KEY].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = _padded(text, page_align=layout.page_align)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text + content[start:]


# Names of files.


def file_name(index: int, count: int, shard: int | None = None) -> str:
    """``model-00001-of-00002.safetensors``; with ``shard``, torch's name for one rank's part. Both count from 1."""
    name = f"model-{index:05d}-of-{count:05d}{SUFFIX}"
    return name if shard is None else f"shard-{shard:05d}-{name}"


def is_checkpoint_name(name: str) -> bool:
    """Whether a save replaces a file of this name: torch's numbered names, the single file, the index, torch's format.

    A folder holds one checkpoint: one in torch's own format would otherwise stay beside the new one.
    """
    own = name in (INDEX_NAME, SINGLE_NAME) or _OWN_NAMES.fullmatch(name) is not None
    return own or _NATIVE_NAMES.fullmatch(name) is not None


def local_path(path: str | os.PathLike[str], where: str = "path") -> Path:
    """A local path; a URL is refused rather than made into a folder called ``s3:``. Raises ConfigError."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text:
        raise ConfigError("not a path", got=repr(path)[:200], expected="a str or a Path", where=where)
    if "\0" in text:
        raise ConfigError("no file has a name with a NUL", got=repr(text)[:200], expected="no NUL", where=where)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise ConfigError(
            "only local paths are supported", got=text, expected="a folder of a mounted file system", where=where
        )
    return Path(text)


def copies_put_aside(path: StrPath) -> list[Path]:
    """Hidden copies of a checkpoint that is gone, the newest first; none while it is there.

    Where a file system cannot exchange two folders, a save renames the old one before the new one: a crash in between.
    """
    place = Path(os.path.realpath(path))
    if place.exists() or not place.parent.is_dir():
        return []
    hidden = re.compile(re.escape(f".{place.name}.previous-") + "[0-9a-f]{12}")
    found = [place.parent / name for name in os.listdir(place.parent) if hidden.fullmatch(name)]
    folders = [copy for copy in found if copy.is_dir() and not copy.is_symlink()]
    return sorted(folders, key=lambda copy: copy.stat().st_mtime, reverse=True)


def check_put_aside(path: StrPath) -> None:
    """Say where the only copy of a checkpoint is, if it is put aside. Raises MissingCheckpointError."""
    copies = copies_put_aside(path)
    if copies:
        raise MissingCheckpointError(
            "the checkpoint is put aside: a crash cut a save short that was replacing it",
            got=os.fspath(copies[0]),
            expected="it, renamed back",
            where=os.fspath(path),
        )


# Tensors as raw memory, without numpy: values move as bits, so every dtype and every NaN payload survives.

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_storable(tensor: torch.Tensor, where: str) -> None:
    """Raise UnstorableError for a tensor without plain memory: meta (NoDataError), sparse, quantized, a wrapper."""
    if tensor.is_meta:
        raise NoDataError(
            "a meta tensor has no data to store", got=list(tensor.shape), expected="a tensor with memory", where=where
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        got = f"{tensor.device.type} tensor, layout {tensor.layout}"
        raise UnstorableError(
            "a tensor without dense memory cannot be stored", got=got, expected="strided", where=where
        )
    plain = waited(tensor)
    # A wrapper may answer what is asked of it with values of its own, as torchao's quantized weights do.
    if not has_memory(plain) and (type(plain) in (torch.Tensor, torch.nn.Parameter) or not has_memory(as_bits(plain))):
        raise UnstorableError(
            "a tensor without memory of its own cannot be stored",
            got=f"{type(tensor).__name__} {list(tensor.shape)}",
            expected="its values: of a DTensor to_local() or full_tensor(), of a wrapper what it wraps",
            where=where,
        )


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a collective is still to fill, when it has; any other as it is."""
    found: Any = tensor
    plain: torch.Tensor = found.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
    return plain


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether its elements have a place: not of a tensor whose storage was freed, or that wraps others."""
    return tensor.numel() == 0 or tensor.data_ptr() != 0


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as integers of the same width: same shape, strides and memory (lazy conjugates resolved).

    torch cannot copy every dtype (float4, float8_e8m0fnu), but it can copy integers of every width.
    """
    return waited(tensor.detach()).resolve_conj().resolve_neg().view(_BITS[tensor.dtype.itemsize])


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor lie in one place of memory: expanded, unfolded, made by ``as_strided``."""
    if tensor.numel() < 2:
        return False
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    reach, is_nested = 0, True
    for stride, size in dims:
        is_nested &= stride > reach
        reach += stride * (size - 1)
    if is_nested or dims[0][0] == 0:
        return not is_nested
    # Rows that lie between each other may still be disjoint: only their places tell.
    places = torch.zeros(1, dtype=torch.int64, device="cpu")
    for stride, size in dims:
        places = (places[:, None] + stride * torch.arange(size, device="cpu")).flatten()
    return bool((places.sort().values.diff() == 0).any())


def check_fillable(target: torch.Tensor, name: str) -> None:
    """Demand a target with a place in memory of its own for each value. Raises UnsupportedError."""
    if target.layout != torch.strided or target.is_quantized:
        got, expected = f"{target.dtype}, layout {target.layout}", "strided, and not quantized"
        raise UnsupportedError("a target without dense memory cannot be filled", got=got, expected=expected, where=name)
    # What a wrapper is asked for may be a copy of what it wraps: it would be filled, and forgotten.
    if not has_memory(target):
        got, expected = f"{type(target).__name__} {list(target.shape)}", "a plain tensor, or what the wrapper wraps"
        raise UnsupportedError(
            "a target without memory of its own cannot be filled", got=got, expected=expected, where=name
        )
    # Values would overwrite each other, in an order that nobody knows.
    if overlaps_itself(target):
        raise UnsupportedError(
            "the target holds several values in one place of memory",
            got=f"shape {list(target.shape)}, strides {list(target.stride())}",
            expected="a place for each value: a clone of it",
            where=name,
        )


def dense_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor as one row, uint8 [bytes], in its own memory."""
    bits = as_bits(tensor)
    # A dimension of one element may have any stride, which a view of another width refuses.
    return bits.as_strided((bits.numel(),), (1,)).view(torch.uint8)


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """Writable view of a contiguous CPU tensor's bytes. The caller keeps the tensor alive."""
    size_bytes = tensor.numel() * tensor.element_size()
    if not size_bytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size_bytes).from_address(tensor.data_ptr())).cast("B")


# Strict parsing.

_DEPTH_MAX = 127  # The library's JSON parser gives up beyond.
_FIELD_COUNT = 3  # dtype, shape, data_offsets; others are allowed and ignored.
_METADATA_FIRST = re.compile(rb'[ \t\r\n]*\{[ \t\r\n]*"__metadata__"[ \t\r\n]*:[ \t\r\n]*')
_LONG_NUMBER = re.compile(rb"\d{300}")


HeaderCache = dict[tuple[bytes, int], dict[str, Entry]]


@dataclass(frozen=True)
class Header:
    """A parsed header: ``data_start`` is the file offset of the data section, ``file_bytes`` the whole file.

    ``modified_ns`` is when the file was last written, which tells it from one that took its name later.
    """

    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int
    file_bytes: int
    modified_ns: int


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        got = next(n for n in names if names.count(n) > 1)
        raise FormatError("a key stands twice", got=got, expected="distinct keys", where="JSON")
    return result


def _no_constant(text: str) -> Any:
    raise FormatError("not a JSON number", got=text, expected="a finite number", where="JSON")


class _Signed(int):
    """An integer written with a minus sign: no size, even when it is zero."""


def _careful_int(text: str) -> int:
    _careful_float(text)
    return _Signed(text) if text.startswith("-") else int(text)


def _careful_float(text: str) -> float:
    value = float(text)
    if value in (math.inf, -math.inf):
        raise FormatError("a number beyond every range", got=text[:40], expected="a finite float64", where="JSON")
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
        raise FormatError(error.message, got=error.got, expected=error.expected, where=where) from None
    except (ValueError, RecursionError) as error:
        raise FormatError("not valid UTF-8 JSON", got=str(error)[:200], expected="a JSON object", where=where) from None
    if not isinstance(value, dict):
        raise FormatError("not a JSON object", got=type(value).__name__, expected="name -> value", where=where)
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
        raise FormatError(
            "a lone surrogate in a string", got=str(error), expected="text that UTF-8 encodes", where=where
        ) from None


def _parse_entry(name: str, fields: Any, where: str) -> Entry:
    place = f"{where}: tensor {name!r}"
    try:
        dtype, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
        bits = DTYPES[dtype][0]
        count = 1
        for size in shape:
            if type(size) is not int or not 0 <= size < 2**63:
                raise FormatError("a dimension is not a size", got=size, expected="0 <= size < 2**63", where=place)
            count *= size or 1
        if type(shape) is not list or type(begin) is not int or type(end) is not int:
            got, expected = str(fields)[:200], "lists of integers"
            raise FormatError("not a shape and data_offsets", got=got, expected=expected, where=place)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(
            "not a tensor entry", got=str(fields)[:200], expected="dtype, shape, data_offsets", where=place
        ) from None
    if len(fields) > _FIELD_COUNT:
        _check_ignored(fields, 2, place)
    if count >= 2**60:
        raise FormatError("the element count overflows", got=shape, expected="< 2**60 elements", where=place)
    need = (0 if 0 in shape else count) * bits
    if need % 8:
        raise FormatError(
            "a sub-byte tensor must fill whole bytes", got=shape, expected="a multiple of 8 bits", where=place
        )
    if end - begin != need // 8:
        raise FormatError("byte range and shape disagree", got=[begin, end], expected=f"{need // 8} bytes", where=place)
    return Entry(dtype, tuple(shape), begin, end)


def _parse_metadata(metadata: Any, where: str) -> dict[str, str]:
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(type(v) is str for v in metadata.values()):
        raise FormatError("__metadata__ of another kind", got=str(metadata)[:200], expected="str -> str", where=where)
    _check_unicode("".join((*metadata, *metadata.values())), where)
    return metadata


def _check_cover(entries: dict[str, Entry], data_bytes: int, where: str) -> None:
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        place = f"{where}: tensor {name!r}"
        if entry.begin < position:
            raise FormatError("the data section has an overlap", got=entry.begin, expected=position, where=place)
        if entry.begin > position:
            raise FormatError("the data section has a hole", got=entry.begin, expected=position, where=place)
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
    rest = text[end + 1 :]
    # Behind a comma that stands last nothing would be left that is wrong.
    is_split = text[end : end + 1] == "," and rest.lstrip()[:1] != "}"
    return (metadata, b"{" + rest.encode()) if is_split else None


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
        raise FormatError("a key stands twice", got=METADATA_KEY, expected="distinct keys", where=where)
    checked = _parse_metadata(metadata, where)
    entries = {name: _parse_entry(name, fields, where) for name, fields in value.items()}
    _check_unicode("".join(value), where)
    _check_cover(entries, data_bytes, where)
    if cache is not None:
        cache[rest, data_bytes] = entries
    return entries, checked


def check_unchanged(path: str, header: Header) -> None:
    """Demand that a path still names the file whose header was read.

    Raises:
        CorruptionError: it was replaced or deleted meanwhile: what was read may be of both.
    """
    expected = header.file_bytes, header.modified_ns
    try:
        status = os.stat(path)
        found: object = (status.st_size, status.st_mtime_ns)
    except FileNotFoundError:
        found = "no file"
    if found != expected:
        raise CorruptionError(
            "the checkpoint was replaced while it was read; load it again", got=found, expected=expected, where=path
        )


def _read_at(descriptor: int, size_bytes: int, offset: int) -> bytes:
    # A call may give less than it was asked for, on a network file system for instance; only nothing is the end.
    pieces: list[bytes] = []
    while size_bytes:
        pieces.append(os.pread(descriptor, size_bytes, offset))
        if not pieces[-1]:
            break
        size_bytes, offset = size_bytes - len(pieces[-1]), offset + len(pieces[-1])
    return b"".join(pieces)


def read_header(path: str | os.PathLike[str], cache: HeaderCache | None = None) -> Header:
    """Read and check the header of one file. Raises FormatError; OSError where the file cannot be opened or read."""
    where = os.fspath(path)
    descriptor = os.open(where, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(
                "not a regular file", got=stat.filemode(status.st_mode), expected="a file's, as -rw-r--r--", where=where
            )
        prefix = _read_at(descriptor, LENGTH_BYTES, 0)
        if len(prefix) < LENGTH_BYTES:
            got, expected = f"{len(prefix)} bytes", f"at least {LENGTH_BYTES}"
            raise FormatError("too short for the length of a header", got=got, expected=expected, where=where)
        length = int.from_bytes(prefix, "little")
        limit = min(HEADER_BYTES_MAX, status.st_size - LENGTH_BYTES)
        if length > limit:
            raise FormatError(
                "header length beyond the file or the cap", got=length, expected=f"<= {limit}", where=where
            )
        raw = _read_at(descriptor, length, LENGTH_BYTES)
        if len(raw) != length:
            raise FormatError("header cut short", got=len(raw), expected=length, where=where)
    finally:
        os.close(descriptor)
    data_start = LENGTH_BYTES + length
    entries, metadata = parse_header(raw, status.st_size - data_start, where, cache)
    return Header(entries, metadata, data_start, status.st_size, status.st_mtime_ns)


# What else a folder has: files that hold what its index names in others, or other files than safetensors. Prevents that
# an old checkpoint is read in silence where a newer one was written over it: torch's writer of shards deletes nothing,
# and torch's reader, as transformers' of ``model.safetensors``, takes what the index does not name.


def with_unlisted(folder: Path, catalog: Catalog) -> Catalog:
    """The catalog of an index, which says what was passed over. Headers alone are read; what has none says nothing.

    Raises:
        CorruptionError: shards of its tensors: which of both is the checkpoint, nobody can say.
    """
    listed = {os.path.basename(file) for file in catalog.headers}
    names = {name for name in os.listdir(folder) if name.endswith(SUFFIX) and not name.startswith(".")}
    found = []
    for name in sorted(names - listed):
        try:
            header = read_header(folder / name)
        except (OSError, FormatError):
            continue
        if header.entries.keys().isdisjoint(catalog.tensors):
            continue
        if SHARDING_KEY in header.metadata:
            raise CorruptionError(
                "shards lie beside an index that has their tensors in other files",
                got=name,
                expected="shards, or the index and its files: the older ones deleted",
                where=os.fspath(folder),
            )
        found.append(name)
    if found:
        catalog.passed_over = tuple(found)
        logger.warning("%s: tensors of the index are also in %s, which it does not name: not read", folder, found[:20])
    return catalog


def no_files(folder: StrPath) -> MissingCheckpointError:
    """What a folder without safetensors files has instead, and who reads that."""
    names = sorted(os.listdir(folder))
    steps = sorted(filter(STEP_NAME.fullmatch, names), key=lambda name: int(name[5:]))
    got, expected = f"{names[:5]}", "safetensors files"
    if NATIVE_METADATA_NAME in names:
        got = f"a checkpoint in torch's format, with {NATIVE_METADATA_NAME}"
        expected += "; load_training, CheckpointManager and torch's dcp.load read torch's format"
    elif steps:
        got, expected = f"a folder of steps, the last of them {steps[-3:]}", "the folder of one of them"
    return MissingCheckpointError("no safetensors file", got=got, expected=expected, where=os.fspath(folder))
