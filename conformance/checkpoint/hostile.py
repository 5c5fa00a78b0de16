"""Files that are wrong, one fault each, and what a reader must say about them; also odd files that it must accept.

Prevents readers that believe a header: it has cost a MemoryError from a file of 8 bytes, tensors of silent zeros, and
paths that leave the folder. Every byte is spelled out here; nothing is made by the packer of an implementation.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from twinproof.errors import FormatError, TwinproofError

__all__ = ["ACCEPTED", "HEADER_BYTES_MAX", "AcceptedCase", "HostileCase", "entry", "in_file", "pack"]

FILE = "model.safetensors"
# The cap of the safetensors library, for reading and writing.
HEADER_BYTES_MAX = 100_000_000

Build = Callable[[Path], None]


@dataclass(frozen=True)
class HostileCase:
    """One way to be wrong.

    Args:
        name: what is wrong, as a test id.
        build: makes the folder's content.
        expect: the error, or the alternatives.
        mentions: what its message must name: the file, and the tensor where there is one.
        single: ``model.safetensors`` alone shows the fault, so ``load_file`` must raise as well.
    """

    name: str
    build: Build
    expect: type[TwinproofError] | tuple[type[TwinproofError], ...]
    mentions: tuple[str, ...]
    single: bool = True


@dataclass(frozen=True)
class AcceptedCase:
    """An odd but valid file: ``tensors`` maps each name to (format dtype, format shape, bytes), ``metadata`` is its
    own.
    """

    name: str
    content: bytes
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]]
    metadata: dict[str, str]


def pack(header: str | bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file of that header and data; ``length`` lies about the header's length."""
    text = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(name: str = "a", dtype: str = '"U8"', shape: str = "[2]", offsets: str = "[0,2]") -> str:
    """The JSON member of one tensor; the defaults are right for two data bytes."""
    return f'"{name}":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}'


def in_file(
    name: str, content: bytes, *mentions: str, expect: type[TwinproofError] = FormatError, file: str = FILE
) -> HostileCase:
    """A case whose folder holds one file of these bytes."""

    def build(folder: Path) -> None:
        (folder / file).write_bytes(content)

    return HostileCase(name, build, expect, (file, *mentions), single=file == FILE)


def _accepted(name: str, header: str, data: bytes, *tensors: tuple[str, str, tuple[int, ...], bytes]) -> AcceptedCase:
    found = {key: (dtype, shape, content) for key, dtype, shape, content in tensors}
    return AcceptedCase(name, pack(header, data), found, {})


_A = ("a", "U8", (2,), b"xy")

ACCEPTED: tuple[AcceptedCase, ...] = (
    _accepted("leading_whitespace", " \n\t\r{" + entry() + "}", b"xy", _A),
    _accepted("trailing_whitespace_of_every_kind", "{" + entry() + "} \n\t\r", b"xy", _A),
    _accepted("padded_to_a_page", ("{" + entry() + "}").ljust(4096 - 8), b"xy", _A),
    _accepted("header_not_padded_to_eight", "{" + entry() + "}" + " " * 3, b"xy", _A),
    _accepted(
        "whitespace_between_tokens",
        '{ "a" : { "dtype" : "U8" , "shape" : [ 2 ] , "data_offsets" : [ 0 , 2 ] } }',
        b"xy",
        _A,
    ),
    _accepted("fields_in_another_order", '{"a":{"data_offsets":[0,2],"shape":[2],"dtype":"U8"}}', b"xy", _A),
    _accepted(
        "unknown_field_in_an_entry",
        '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"note":{"by":["x",null,1.5]}}}',
        b"xy",
        _A,
    ),
    _accepted("empty_tensor_name", "{" + entry(name="") + "}", b"xy", ("", "U8", (2,), b"xy")),
    _accepted("nul_in_a_name", "{" + entry(name="a\\u0000b") + "}", b"xy", ("a\0b", "U8", (2,), b"xy")),
    _accepted(
        "escaped_pair_of_surrogates", "{" + entry(name="\\ud83d\\ude00") + "}", b"xy", ("\U0001f600", "U8", (2,), b"xy")
    ),
    _accepted(
        "name_with_slashes_and_dots", "{" + entry(name="../../etc/x") + "}", b"xy", ("../../etc/x", "U8", (2,), b"xy")
    ),
    _accepted("null_metadata", '{"__metadata__":null,' + entry() + "}", b"xy", _A),
    _accepted("empty_metadata", '{"__metadata__":{},' + entry() + "}", b"xy", _A),
    _accepted("no_tensor_at_all", "{}", b""),
    _accepted("scalar", "{" + entry(shape="[]", offsets="[0,1]") + "}", b"z", ("a", "U8", (), b"z")),
    _accepted("zero_elements", "{" + entry(shape="[0,5]", offsets="[0,0]") + "}", b"", ("a", "U8", (0, 5), b"")),
    _accepted(
        "tensors_listed_against_the_order_of_their_data",
        "{" + entry("b", offsets="[2,4]") + "," + entry("a") + "}",
        b"xyzw",
        _A,
        ("b", "U8", (2,), b"zw"),
    ),
    _accepted(
        "empty_tensors_between_others",
        "{" + entry() + "," + entry("e", shape="[0]", offsets="[2,2]") + "," + entry("b", offsets="[2,4]") + "}",
        b"xyzw",
        _A,
        ("e", "U8", (0,), b""),
        ("b", "U8", (2,), b"zw"),
    ),
    _accepted(
        "unaligned_data",
        "{" + entry("h", '"F16"', "[1]", "[1,3]") + "," + entry("a", shape="[1]", offsets="[0,1]") + "}",
        b"x\x00\x3c",
        ("a", "U8", (1,), b"x"),
        ("h", "F16", (1,), b"\x00\x3c"),
    ),
    _accepted("boolean_bytes", "{" + entry(dtype='"BOOL"') + "}", b"\x01\x00", ("a", "BOOL", (2,), b"\x01\x00")),
    AcceptedCase(
        "metadata_with_odd_keys",
        pack('{"__metadata__":{"":"","k\\n":"v"},' + entry() + "}", b"xy"),
        {"a": ("U8", (2,), b"xy")},
        {"": "", "k\n": "v"},
    ),
)
