"""A checksum for every tensor: made while a checkpoint is written, compared when it is verified, read or merged.

A checksum is the CRC-32 of zlib's polynomial over a tensor's bytes as they lie in the file. Ranks write pieces of one
tensor, so each sums the pieces that it writes, and ``combine`` gives the sum of neighbours. An index holds them in its
``metadata``, a single file in its own: under ``CHECKSUMS_KEY``, eight hexadecimal digits for each name.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from twinproof.checkpoint.catalog import (
    CHECKSUMS_KEY,
    Catalog,
    Chunk,
    Meter,
    Progress,
    StoredRange,
    TensorRecord,
    read_catalog,
)
from twinproof.checkpoint.format import DTYPES, UNPAIRED_F4, as_bits, buffer_of, parse_json_object
from twinproof.errors import ConfigError, CorruptionError, FormatError, PlanError
from twinproof.regimes import regime

__all__ = [
    "Crc32",
    "Part",
    "Verified",
    "check_key",
    "check_loaded",
    "check_parts",
    "check_present",
    "combine",
    "crc32",
    "expected_sums",
    "joined",
    "metadata_of",
    "parts_of",
    "payload_bytes",
    "sums_of",
    "to_text",
    "verify",
    "verify_catalog",
]

logger = logging.getLogger("twinproof.checkpoint")

PIECE_BYTES = regime(8 << 20, 96)  # What one thread holds while it verifies.
_POLYNOMIAL = 0xEDB88320  # Bit-reversed: the highest bit is x to the power of 0.
_ONE = 1 << 31
_DIGITS = re.compile(r"[0-9a-f]{8}")

Crc32 = Callable[[torch.Tensor], int]  # The CRC-32 of a contiguous uint8 CPU tensor.


def crc32(data: torch.Tensor) -> int:
    """Zlib's own sum of a contiguous CPU tensor's bytes."""
    return zlib.crc32(buffer_of(data))


# Sums of neighbouring pieces.


def _product(a: int, b: int) -> int:
    """The product of two polynomials modulo CRC-32's."""
    result = 0
    while a:
        if a & _ONE:
            result ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return result


@functools.lru_cache(maxsize=1024)
def _power(size_bytes: int) -> int:
    """X to the power of the bits in so many bytes."""
    result, square = _ONE, 1 << 23  # x to the power of 8.
    while size_bytes:
        if size_bytes & 1:
            result = _product(square, result)
        square = _product(square, square)
        size_bytes >>= 1
    return result


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two pieces one after the other, from those of the pieces; zlib's ``crc32_combine``."""
    return _product(_power(second_bytes), first) ^ second


class Part(NamedTuple):
    """The sum of some bytes of a stored chunk: its file and file offset, then the place of the bytes inside it."""

    file: str
    begin: int
    offset: int
    size_bytes: int
    crc: int


def joined(parts: Iterable[Part]) -> list[Part]:
    """The same sums with neighbours combined, in order."""
    result: list[Part] = []
    for part in sorted(parts):
        last = result[-1] if result else None
        if last is not None and last[:2] == part[:2] and last.offset + last.size_bytes == part.offset:
            crc = combine(last.crc, part.crc, part.size_bytes)
            result[-1] = Part(*last[:3], last.size_bytes + part.size_bytes, crc)
        else:
            result.append(part)
    return result


def parts_of(file: str, begins: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> list[Part]:
    """The sums of whole tensors that lie in one file, by zlib."""
    found = []
    for name, begin in begins.items():
        data = _bytes(tensors[name])
        found.append(Part(file, begin, 0, data.numel(), crc32(data)))
    return found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return as_bits(tensor).cpu().contiguous().view(-1).view(torch.uint8)


def sums_of(chunks: Mapping[str, tuple[str, int, int]], parts: Iterable[Part]) -> dict[str, int]:
    """The sum of each chunk, from the sums of its parts.

    Args:
        chunks: name -> (file, file offset, bytes).
        parts: of all ranks.

    Raises:
        PlanError: parts that leave bytes out, or sum some twice.
    """
    found = {part[:2]: part for part in joined(part for part in parts if part.size_bytes)}
    sums = {}
    for name, (file, begin, size_bytes) in chunks.items():
        part = found.get((file, begin)) if size_bytes else Part(file, begin, 0, 0, 0)
        if part is None or part[2:4] != (0, size_bytes):
            got = None if part is None else f"{part.size_bytes} bytes from {part.offset}"
            raise PlanError("not every byte was summed once", got=got, expected=f"{size_bytes} bytes", where=name)
        sums[name] = part.crc
    return sums


# How sums are stored.


def to_text(sums: Mapping[str, int]) -> dict[str, str]:
    """Name -> eight hexadecimal digits, names sorted."""
    return {name: f"{crc:08x}" for name, crc in sorted(sums.items())}


def metadata_of(tensors: Mapping[str, torch.Tensor], crc: Crc32) -> dict[str, str]:
    """What a file of these tensors says of their sums, for its metadata."""
    sums = {name: crc(_bytes(tensor)) for name, tensor in tensors.items()}
    return {CHECKSUMS_KEY: json.dumps(to_text(sums), ensure_ascii=False, separators=(",", ":"))}


def check_key(metadata: Mapping[str, str] | None) -> None:
    """Refuse metadata that brings checksums of other bytes. Raises ConfigError."""
    if CHECKSUMS_KEY in (metadata or {}):
        raise ConfigError("this key is kept for checksums", got=CHECKSUMS_KEY, where="metadata")


def _parsed(value: Any, where: str) -> dict[str, int]:
    right = isinstance(value, dict) and all(isinstance(v, str) and _DIGITS.fullmatch(v) for v in value.values())
    if not right:
        raise FormatError("not checksums", got=str(value)[:200], expected="name -> 8 hexadecimal digits", where=where)
    return {name: int(text, 16) for name, text in value.items()}


def expected_sums(catalog: Catalog) -> dict[tuple[str, str], int]:
    """(file, name) -> the sum that the checkpoint states, for every chunk that has one.

    Raises:
        FormatError: something else stands where checksums should.
        CorruptionError: a checksum of a tensor that is not there, or two that differ.
    """
    found: dict[tuple[str, str], int] = {}
    for file, header in catalog.headers.items():
        if CHECKSUMS_KEY in header.metadata:
            where = f"{file}: {CHECKSUMS_KEY}"
            sums = _parsed(parse_json_object(header.metadata[CHECKSUMS_KEY].encode(), where), where)
            _check_names(sums, header.entries, where)
            found.update({(file, name): crc for name, crc in sums.items()})
    if catalog.checksums is not None:
        where = f"the index: {CHECKSUMS_KEY}"
        sums = _parsed(catalog.checksums, where)
        _check_names(sums, catalog.tensors, where)
        for name, crc in sums.items():
            key = catalog.tensors[name].chunks[0].file, name
            if found.setdefault(key, crc) != crc:
                raise CorruptionError(
                    "index and file state different checksums", got=to_text({name: crc}), where=catalog.where(name)
                )
    return found


def _check_names(sums: Mapping[str, int], known: Iterable[str], where: str) -> None:
    strange = sorted(sums.keys() - set(known))
    if strange:
        raise CorruptionError("checksums of tensors that are not there", got=strange[:20], where=where)


# Verification.


@dataclass(frozen=True)
class Verified:
    """What a verification looked at: tensors whose bytes agree, and those of which only the structure is right."""

    checked: tuple[str, ...]
    unchecked: tuple[str, ...]

    def __str__(self) -> str:
        if not self.checked:
            return "only the structure was verified: the checkpoint has no checksums"
        if self.unchecked:
            names = ", ".join(self.unchecked[:20])
            return f"{len(self.checked)} tensors verified; {len(self.unchecked)} have no checksum: {names}"
        return f"the bytes of all {len(self.checked)} tensors were verified"


def payload_bytes(record: TensorRecord, shape: Sequence[int] | None = None) -> int:
    """Stored bytes of a tensor, or of a chunk of it with this shape."""
    # A catalog counts torch elements: two F4 make one, and an odd one stands alone.
    bits = {"F4": 8, UNPAIRED_F4: 4}.get(record.dtype) or DTYPES[record.dtype][0]
    return math.prod(record.shape if shape is None else shape) * bits // 8


def verify(
    path: str | os.PathLike[str], *, crc: Crc32 = crc32, thread_count: int = 1, progress: Progress | None = None
) -> Verified:
    """Check a checkpoint's structure, then every byte that has a checksum, in bounded memory.

    Args:
        path: a folder, or one ``.safetensors`` file.
        crc: sums a piece.
        thread_count: threads that read; each holds 8 MiB.
        progress: called with the bytes that were summed, and all that will be.

    Raises:
        FormatError, FileNotFoundError. CorruptionError: names all tensors whose bytes do not agree.
    """
    return verify_catalog(read_catalog(path), path, crc, thread_count, progress)


def verify_catalog(
    catalog: Catalog,
    path: str | os.PathLike[str],
    crc: Crc32,
    thread_count: int = 1,
    progress: Progress | None = None,
) -> Verified:
    """``verify`` of a catalog that was read already."""
    expected = expected_sums(catalog)
    chunks = {(chunk.file, name): chunk for name, record in catalog.tensors.items() for chunk in record.chunks}
    wanted = {key: chunks[key] for key in expected if key in chunks}
    found = _summed(catalog, wanted, crc, thread_count, progress)
    catalog.check_unchanged()
    _compare(found, expected, path)
    unchecked = {name for file, name in chunks if (file, name) not in expected}
    return Verified(tuple(sorted({name for _, name in wanted} - unchecked)), tuple(sorted(unchecked)))


_Key = tuple[str, str]


def _summed(
    catalog: Catalog, chunks: Mapping[_Key, Chunk], crc: Crc32, thread_count: int = 1, progress: Progress | None = None
) -> dict[_Key, int]:
    """The sums of stored chunks, read in pieces from all threads."""
    sizes = {key: payload_bytes(catalog.tensors[key[1]], chunk.sizes) for key, chunk in chunks.items()}
    meter, local = Meter(progress, sum(sizes.values())), threading.local()
    tasks = [(key, at) for key in chunks for at in range(0, sizes[key], PIECE_BYTES)]

    def piece(task: tuple[_Key, int]) -> int:
        key, at = task
        if not hasattr(local, "memory"):
            local.memory = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        data = local.memory[: min(PIECE_BYTES, sizes[key] - at)]
        with open(chunks[key].file, "rb", buffering=0) as file:
            file.seek(chunks[key].begin + at)
            _fill(file, buffer_of(data), chunks[key].file)
        meter.add(data.numel())
        return crc(data)

    sums = dict.fromkeys(chunks, 0)
    with ThreadPoolExecutor(thread_count, thread_name_prefix="checkpoint-verify") as pool:
        for (key, at), found in zip(tasks, pool.map(piece, tasks), strict=True):
            sums[key] = combine(sums[key], found, min(PIECE_BYTES, sizes[key] - at))
    return sums


def _fill(file: Any, view: memoryview, path: str) -> None:
    while view:
        got = file.readinto(view)
        if not got:
            raise CorruptionError("the file became shorter while it was read", got=f"{len(view)} missing", where=path)
        view = view[got:]


def _compare(found: Mapping[_Key, int], expected: Mapping[_Key, int], path: str | os.PathLike[str]) -> None:
    wrong = {key: crc for key, crc in found.items() if crc != expected[key]}
    if wrong:
        raise CorruptionError(
            "bytes do not agree with their checksums",
            got={name: f"{crc:08x}" for (_, name), crc in sorted(wrong.items())},
            expected={name: f"{expected[file, name]:08x}" for file, name in sorted(wrong)},
            where=f"{os.fspath(path)}: {', '.join(sorted({Path(file).name for file, _ in wrong}))}",
        )


def check_parts(catalog: Catalog, parts: Iterable[Part], path: str | os.PathLike[str]) -> None:
    """Compare what was summed while chunks were read with what the checkpoint states.

    Raises:
        CorruptionError: names all tensors whose bytes do not agree. PlanError: a chunk was not read whole.
    """
    expected = expected_sums(catalog)
    read: dict[str, dict[str, tuple[str, int, int]]] = {}
    for name, record in catalog.tensors.items():
        for chunk in record.chunks:
            if (chunk.file, name) in expected:
                read.setdefault(chunk.file, {})[name] = chunk.file, chunk.begin, payload_bytes(record, chunk.sizes)
    parts = list(parts)
    found = {(file, name): crc for file, chunks in read.items() for name, crc in sums_of(chunks, parts).items()}
    _compare(found, expected, path)


def check_present(catalog: Catalog, path: str | os.PathLike[str]) -> None:
    """Demand that a checkpoint has checksums. Raises ConfigError."""
    if not expected_sums(catalog):
        raise ConfigError(
            "verify_checksums needs a checkpoint with checksums",
            got="none",
            expected="one that was saved with checksums=True, or verify_checksums=False",
            where=os.fspath(path),
        )


def check_loaded(
    catalog: Catalog, ranges: Sequence[StoredRange], crc: Crc32, path: str | os.PathLike[str], thread_count: int = 1
) -> tuple[str, ...]:
    """Compare the checksums of chunks that were loaded whole; returns the names of those that could not be compared.

    Bytes that lie in a dense CPU target as they were stored are summed there. Where they were converted, or lie
    elsewhere, the stored ones are read once more.

    Raises:
        CorruptionError: names all tensors whose bytes do not agree.
    """
    expected = expected_sums(catalog)
    here: dict[_Key, torch.Tensor] = {}
    again: dict[_Key, Chunk] = {}
    unverified = set()
    for wanted in ranges:
        key, target = (wanted.chunk.file, wanted.name), wanted.target
        if wanted.sizes != wanted.chunk.sizes or key not in expected:
            unverified.add(wanted.name)
        elif target.dtype == wanted.dtype and target.is_cpu and target.is_contiguous():
            here[key] = target
        else:
            again[key] = wanted.chunk
    with ThreadPoolExecutor(thread_count, thread_name_prefix="checkpoint-verify") as pool:
        found = dict(zip(here, pool.map(lambda target: crc(_bytes(target)), here.values()), strict=True))
    _compare(found | _summed(catalog, again, crc, thread_count), expected, path)
    names = tuple(sorted(unverified))
    if names:
        logger.warning(
            "%s: the checksums of %d tensors were not compared, because they were read in part or have none: %s",
            os.fspath(path),
            len(names),
            ", ".join(names[:20]),
        )
    return names
