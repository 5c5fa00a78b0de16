"""What a folder holds, every tensor with its dtype, global shape and file ranges; and whether its bytes are as saved.

Reads the index where there is one, plain HF folders, single files and torch's shard folders (``DCP_SHARDING_INFO``).
Prevents answers from stale or missing files, and silent zeros where a shard is missing. An index whose names lead out
of its folder is refused.

A checksum is the CRC-32 of zlib's polynomial over a tensor's bytes as they lie in the file: made while a checkpoint is
written, compared when it is verified, read or merged. Ranks write pieces of one tensor, so each sums the pieces that it
writes, and ``combine`` gives the sum of neighbours. An index holds them in its ``metadata``, a single file in its own:
under ``CHECKSUMS_KEY``, eight hexadecimal digits for each name.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import stat
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from operator import add
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from twinproof import regime
from twinproof.checkpoint.format import (
    DTYPES,
    INDEX_NAME,
    SHARDING_KEY,
    SUFFIX,
    UNPAIRED_F4,
    Header,
    HeaderCache,
    as_bits,
    buffer_of,
    check_put_aside,
    check_unchanged,
    dense_bytes,
    no_files,
    parse_json_object,
    read_header,
    torch_dtype,
    with_unlisted,
)
from twinproof.errors import ConfigError, CorruptionError, FormatError, PlanError, TwinproofError, check_kind

__all__ = [
    "CHECKSUMS_KEY",
    "Box",
    "Catalog",
    "Chunk",
    "Crc32",
    "LoadEngine",
    "LoadJob",
    "MetadataChunks",
    "Meter",
    "Part",
    "Progress",
    "Sharding",
    "StoredChunk",
    "StoredRange",
    "TensorRecord",
    "UnreadMetadata",
    "Verified",
    "check_key",
    "check_loaded",
    "check_parts",
    "check_present",
    "check_tiling",
    "combine",
    "crc32",
    "cut_rectangle",
    "expected_sums",
    "is_simple_tiling",
    "joined",
    "list_files",
    "metadata_of",
    "parse_sharding",
    "parts_of",
    "payload_bytes",
    "read_catalog",
    "read_index",
    "states_sums",
    "stored_ranges",
    "sums_of",
    "to_text",
    "verify",
    "verify_catalog",
]

INDEX_BYTES_MAX = 1 << 30
CHUNKS_LEAVE_A_GAP = "chunks leave a gap"
CHECKSUMS_KEY = "twinproof.crc32"  # In the metadata of an index, and of a file; see ``checksums``.

# Rectangles that tile a tensor: the one check that no byte is missing and none is written twice.

PlainBox = tuple[tuple[int, ...], tuple[int, ...]]  # A Box without its names: (offsets, sizes).


class Box(NamedTuple):
    """A rectangle of a tensor, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def _overlap(a: Box, b: Box) -> bool:
    return all(
        ao < bo + bs and bo < ao + az for ao, az, bo, bs in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )


def _first_overlap(boxes: list[Box], dim: int) -> tuple[Box, Box] | None:
    # Sweep along one dimension; only boxes that the sweep line still crosses are compared.
    active: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.offsets[dim]):
        active = [other for other in active if other.offsets[dim] + other.sizes[dim] > box.offsets[dim]]
        for other in active:
            if _overlap(box, other):
                return other, box
        active.append(box)
    return None


def _is_chain(shape: tuple[int, ...], boxes: Sequence[PlainBox]) -> bool:
    # Nearly every tiling is a split of one dimension; this linear check answers for those.
    first_offsets, first_sizes = boxes[0]
    split = next((d for d, size in enumerate(first_sizes) if size != shape[d]), None)
    if split is None:
        return len(boxes) == 1 and not any(first_offsets)
    position = 0
    head, tail = shape[:split], shape[split + 1 :]
    before, after = (0,) * len(head), (0,) * len(tail)
    for offsets, sizes in sorted(boxes):
        if offsets != (*before, position, *after) or sizes != (*head, sizes[split], *tail):
            return False
        position += sizes[split]
    return position == shape[split]


def is_simple_tiling(shape: Sequence[int], boxes: Sequence[PlainBox]) -> bool:
    """Whether the boxes split one dimension and cover the shape exactly once. Fast; False proves nothing."""
    shape = tuple(shape)
    return bool(shape) and bool(boxes) and _rank_fits(shape, boxes) and _is_chain(shape, boxes)


def check_tiling(shape: Sequence[int], boxes: Sequence[Box], error: type[TwinproofError], where: str) -> None:
    """Raise ``error`` unless the boxes cover ``shape`` exactly once. Empty boxes need only lie inside.

    Raises:
        error: naming the tensor and the box at fault.
    """
    shape = tuple(shape)
    filled = [box for box in boxes if 0 not in box.sizes]
    if is_simple_tiling(shape, filled):
        return
    for box in boxes:
        inside = len(box.offsets) == len(box.sizes) == len(shape) and all(
            o >= 0 and s >= 0 and o + s <= n for o, s, n in zip(box.offsets, box.sizes, shape, strict=True)
        )
        if not inside:
            raise error("a chunk lies outside the tensor", got=box, expected=f"inside {list(shape)}", where=where)
    if shape and filled and _is_grid(shape, filled):
        return
    dim = max(range(len(shape)), key=lambda d: shape[d], default=0)
    clash = _first_overlap(filled, dim) if shape else (filled[0], filled[1]) if len(filled) > 1 else None
    if clash is not None:
        raise error("two chunks overlap", got=clash, expected="chunks apart from each other", where=where)
    volume = sum(math.prod(box.sizes) for box in filled)
    if volume != math.prod(shape):
        raise error(
            CHUNKS_LEAVE_A_GAP,
            got=f"{volume} elements",
            expected=f"{math.prod(shape)} elements of {list(shape)}",
            where=where,
        )


def _is_grid(shape: tuple[int, ...], boxes: Sequence[PlainBox]) -> bool:
    # What is cut along several dimensions, as by FSDP beside tensor parallelism: each cell is a box, once.
    cells = {offsets for offsets, _ in boxes}
    cuts = [sorted(set(column)) for column in zip(*cells, strict=True)]
    if not all(column[0] == 0 for column in cuts) or not len(cells) == len(boxes) == math.prod(map(len, cuts)):
        return False
    ends = [dict(zip(column, [*column[1:], size], strict=True)) for column, size in zip(cuts, shape, strict=True)]
    return all(
        end[offset] == offset + size
        for offsets, sizes in boxes
        for end, offset, size in zip(ends, offsets, sizes, strict=True)
    )


def _rank_fits(shape: tuple[int, ...], boxes: Sequence[PlainBox]) -> bool:
    rank = len(shape)
    return all(len(offsets) == rank == len(sizes) for offsets, sizes in boxes)


# Where the tensors of a shard file lie in the global tensors.

_TORCH_ENTRY = re.compile(r'"([^"\\]*)": \{"saved_offsets": \[([0-9]{1,18}(?:, [0-9]{1,18})*)\]\}')

Offsets = tuple[int, ...]


class Sharding(NamedTuple):
    """Offsets of each tensor of a file, and the global shapes that the file declares."""

    offsets: dict[str, Offsets]
    shapes: dict[str, Offsets]


def parse_sharding(header: Header, file: str) -> Sharding | None:
    """The sharding information of a header, None in a final file. Raises FormatError."""
    text = header.metadata.get(SHARDING_KEY)
    if text is None:
        return None
    where = f"{file}: {SHARDING_KEY}"
    offsets = _as_torch_writes_it(text)
    shapes: dict[str, Offsets] = {}
    if offsets is None:
        info = parse_json_object(text.encode(), where)
        offsets = {name: _numbers(info[name], "saved_offsets", where) for name in info}
        shapes = {n: _numbers(value, "global_shape", where) for n, value in info.items() if "global_shape" in value}
    missing = header.entries.keys() - offsets.keys()
    if missing:
        raise FormatError("tensors without offsets", got=sorted(missing)[:20], expected="offsets of each", where=where)
    for name, entry in header.entries.items():
        if len(offsets[name]) != len(entry.shape):
            place = f"{file}: tensor {name!r}"
            raise FormatError(
                "saved_offsets do not fit the tensor",
                got=offsets[name],
                expected=f"{len(entry.shape)} integers",
                where=place,
            )
    return Sharding(offsets, shapes)


def _as_torch_writes_it(text: str) -> dict[str, Offsets] | None:
    # One expression finds all entries; only if they put together again are the very text is the shortcut taken.
    found = _TORCH_ENTRY.findall(text)
    again = ", ".join([f'"{name}": {{"saved_offsets": [{numbers}]}}' for name, numbers in found])
    if not found or "{" + again + "}" != text:
        return None
    texts = {numbers for _, numbers in found}
    if any(number != "0" and number.startswith("0") for numbers in texts for number in numbers.split(", ")):
        return None
    parsed = {numbers: tuple(map(int, numbers.split(", "))) for numbers in texts}
    result = {name: parsed[numbers] for name, numbers in found}
    return result if len(result) == len(found) else None


def _numbers(info: Any, key: str, where: str) -> Offsets:
    numbers = info.get(key) if isinstance(info, dict) else None
    if not isinstance(numbers, list) or not all(type(n) is int for n in numbers):
        raise FormatError(f"no {key}", got=str(info)[:200], expected="a list of sizes", where=where)
    return tuple(numbers)


# The index.


def _check_member(folder: Path, name: str, where: str) -> None:
    if not name.endswith(SUFFIX):
        raise FormatError("the index names another kind of file", got=name, expected=f"*{SUFFIX}", where=where)
    if name != os.path.basename(name) or re.search(r"[\\:\0]", name) or name.startswith(".."):
        raise FormatError(
            "the index names a path outside its folder", got=name, expected="a plain file name", where=where
        )
    path = os.path.join(folder, name)
    try:
        # One call for each file, but for links: of thousands of files each call is a request to a file server.
        status = os.lstat(path)
        is_link = stat.S_ISLNK(status.st_mode)
        if is_link:
            status = os.stat(path)
    except FileNotFoundError:
        raise CorruptionError("the index names a missing file", got=name, expected="it there", where=where) from None
    except (OSError, ValueError) as error:
        raise FormatError(
            "the index names what cannot be opened", got=f"{name!r}: {error}", expected="a file beside it", where=where
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise FormatError("the index names what is no file", got=name, expected="a regular file", where=where)
    # Hub caches link every file to a blob store beside the snapshot; a link that leaves that tree is an escape.
    if is_link and not _link_stays_near(folder, name):
        got, expected = f"{name} -> {os.path.realpath(path)}", "a link to this folder, or to the cache's blobs"
        raise FormatError("the index names a link that leaves its folder", got=got, expected=expected, where=where)


def _link_stays_near(folder: Path, name: str) -> bool:
    target = (folder / name).resolve()
    home = folder.resolve()
    return target.parent == home or any(_is_blob_of(inside, target) for inside in (home, *home.parents))


def _is_blob_of(home: Path, target: Path) -> bool:
    # A snapshot has folders of its own where a model is made of several, as those of diffusers are.
    hub = home.parent.parent
    return home.parent.name == "snapshots" and target.parent == hub / "blobs"


class Index(NamedTuple):
    """An index: the file of each tensor, and what its metadata says of sizes and checksums, None where nothing."""

    weight_map: dict[str, str]
    total_size: int | None
    checksums: Any = None


def read_index(folder: Path) -> Index | None:
    """The index of a folder, or None where it has none. Its checksums are looked at where they are needed.

    Raises:
        FormatError: malformed index, or a value that leads out of the folder.
        CorruptionError: a file that the index names is missing.
    """
    path = folder / INDEX_NAME
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    where = os.fspath(path)
    if not stat.S_ISREG(status.st_mode) or status.st_size > INDEX_BYTES_MAX:
        got, expected = f"{stat.filemode(status.st_mode)}, {status.st_size}", f"a file of <= {INDEX_BYTES_MAX} bytes"
        raise FormatError("the index is no file of sensible size", got=got, expected=expected, where=where)
    content = parse_json_object(path.read_bytes(), where)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict):
        raise FormatError("no weight_map", got=type(weight_map).__name__, expected="name -> file name", where=where)
    for name in weight_map.values():
        if not isinstance(name, str):
            raise FormatError("a value of weight_map is no file name", got=name, expected="text", where=where)
    for name in sorted(set(weight_map.values())):
        _check_member(folder, name, where)
    declared = content.get("metadata")
    metadata = declared if isinstance(declared, dict) else {}
    total = metadata.get("total_size")
    # Some writers record the total as a float; a value of another kind says nothing.
    total = int(total) if isinstance(total, (int, float)) and not isinstance(total, bool) else None
    return Index(weight_map, total, metadata.get(CHECKSUMS_KEY))


# The catalog.


class Chunk(NamedTuple):
    """One rectangle as it lies in a file: ``begin`` is a file offset, the rest counts torch elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int


# A shard folder has a chunk per tensor and file; this makes one in half the time of calling the class.
_chunk = partial(tuple.__new__, Chunk)


@dataclass
class TensorRecord:
    """One tensor of a checkpoint: format dtype name, global torch shape, chunks that tile it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk]


@dataclass(frozen=True)
class StoredChunk:
    """Where a chunk lies: file, bytes [offset, offset + length) of it, its shape, its dtype (None: torch has none)."""

    relative_path: str
    offset: int
    length: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None


@dataclass(eq=False)
class Catalog(Mapping[MetadataIndex, StoredChunk]):
    """All tensors of a checkpoint folder or file, the user metadata, and the files in reading order.

    ``checksums`` is what the index says of them, as it stands there; ``checksums.expected_sums`` checks it.
    ``passed_over`` names files beside an index that hold its tensors too.

    As a mapping it is what DCP calls storage data: the chunks by tensor name and offsets.
    """

    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    headers: dict[str, Header] = field(default_factory=dict)
    checksums: Any = None
    passed_over: tuple[str, ...] = ()

    def __getitem__(self, index: MetadataIndex) -> StoredChunk:
        record = self.tensors.get(index.fqn)
        if record is not None:
            at = tuple(index.offset or (0,) * len(record.shape))
            for chunk in record.chunks:
                if chunk.offsets == at:
                    return _stored(chunk, record.dtype)
        raise KeyError(index)

    def __iter__(self) -> Iterator[MetadataIndex]:
        for name, record in self.tensors.items():
            for chunk in record.chunks:
                yield MetadataIndex(name, chunk.offsets)

    def __len__(self) -> int:
        return sum(len(record.chunks) for record in self.tensors.values())

    def __bool__(self) -> bool:
        return True

    def check_unchanged(self, files: Iterable[str] | None = None) -> None:
        """Demand that these files, or all, are still those whose headers were read. Raises CorruptionError."""
        for file in self.headers if files is None else dict.fromkeys(files):
            check_unchanged(file, self.headers[file])

    def where(self, name: str) -> str:
        """Place of a tensor, for messages."""
        return f"{self.tensors[name].chunks[0].file}: tensor {name!r}"


def _stored(chunk: Chunk, dtype: str) -> StoredChunk:
    length = math.prod(chunk.sizes) * _bits(dtype) // 8
    return StoredChunk(chunk.file, chunk.begin, length, chunk.sizes, torch_dtype(dtype))


def _bits(dtype: str) -> int:
    # A catalog counts torch elements: two F4 make one, and an odd one stands alone.
    return {"F4": 8, UNPAIRED_F4: 4}.get(dtype) or DTYPES[dtype][0]


def list_files(path: Path) -> list[Path]:
    """The files of a folder without index. Raises MissingCheckpointError, and CorruptionError for a number left out."""
    names = sorted(name for name in os.listdir(path) if name.endswith(SUFFIX) and not name.startswith("."))
    if not names:
        raise no_files(path)
    _check_numbering(path, names)
    return [path / name for name in names]


def _check_numbering(path: Path, names: list[str]) -> None:
    # Without an index, the "-of-N" of numbered names is the only evidence of a file that is missing.
    groups: dict[tuple[str, str], set[int]] = {}
    for name in names:
        match = re.fullmatch(r"(.*?)-(\d{5})-of-(\d{5})\.safetensors", name)
        if match and not match[1].startswith("shard-"):
            groups.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (stem, count), seen in groups.items():
        missing = sorted(set(range(1, int(count) + 1)) - seen)
        if missing:
            raise CorruptionError(
                "numbered files are missing and there is no index",
                got=sorted(seen)[:20],
                expected=f"1..{int(count)}",
                where=f"{path}/{stem}-*",
            )


class _Builder:
    def __init__(self) -> None:
        self.catalog = Catalog()
        self.declared: dict[str, tuple[int, ...]] = {}
        self.sharded: set[str] = set()

    def add_file(self, file: str, header: Header, only: set[str] | None) -> None:
        info = parse_sharding(header, file)
        self.catalog.headers[file] = header
        for key, value in header.metadata.items():
            if key not in (SHARDING_KEY, CHECKSUMS_KEY):
                self.catalog.metadata.setdefault(key, value)
        if info is not None:
            for name in filter(info.shapes.__contains__, header.entries):
                self._note_shape(name, info.shapes[name], file)
        tensors, data_start = self.catalog.tensors, header.data_start
        for name, entry in header.entries.items():
            if only is not None and name not in only:
                continue
            kind, shape, begin, _ = entry
            if kind == "F4":
                kind, shape = entry.kind, entry.torch_shape()
            offsets = (0,) * len(shape) if info is None else info.offsets[name]
            chunk = _chunk((offsets, shape, file, data_start + begin))
            record = tensors.get(name)
            if record is None:
                tensors[name] = TensorRecord(kind, shape, [chunk])
                continue
            if info is None or kind != record.dtype or len(shape) != len(record.shape) or name not in self.sharded:
                self._disagree(name, record, kind, shape, info is None, file)
            record.chunks.append(chunk)
        # Only now: a tensor that an earlier file holds whole is no shard because of this file.
        self.sharded.update(header.entries if info is not None else ())

    def _note_shape(self, name: str, declared: tuple[int, ...], file: str) -> None:
        if self.declared.setdefault(name, declared) != declared:
            raise CorruptionError(
                "files disagree about the global shape",
                got=declared,
                expected=self.declared[name],
                where=f"{file}: tensor {name!r}",
            )

    @staticmethod
    def _disagree(name: str, record: TensorRecord, dtype: str, shape: tuple[int, ...], whole: bool, file: str) -> None:
        where, files = f"{file}: tensor {name!r}", [record.chunks[0].file, file]
        if whole or (dtype == record.dtype and len(shape) == len(record.shape)):
            raise CorruptionError("one tensor stands in two files", got=files, expected="one of them", where=where)
        raise CorruptionError(
            "files disagree about dtype or rank",
            got=f"{dtype} {list(shape)}",
            expected=f"{record.dtype}, rank {len(record.shape)}",
            where=where,
        )

    def finish(self) -> Catalog:
        for name in filter(self.sharded.__contains__, self.catalog.tensors):
            record = self.catalog.tensors[name]
            boxes = [(chunk[0], chunk[1]) for chunk in record.chunks]
            # The last chunk of a simple tiling ends where the tensor does; anything else is looked at in full.
            record.shape = self.declared.get(name) or tuple(map(add, *max(boxes)))
            if is_simple_tiling(record.shape, boxes):
                continue
            ends = [tuple(map(add, offsets, sizes)) for offsets, sizes in boxes]
            record.shape = self.declared.get(name) or tuple(map(max, zip(*ends, strict=True)))
            check_tiling(record.shape, [Box(*box) for box in boxes], CorruptionError, self.catalog.where(name))
        return self.catalog


def _check_members(weight_map: dict[str, str], headers: dict[str, Header], folder: Path) -> None:
    for name, file in weight_map.items():
        if name not in headers[file].entries:
            where = f"{folder / INDEX_NAME}: {file}"
            raise CorruptionError("a file lacks a tensor of the index", got=name, expected="it there", where=where)


def read_catalog(path: str | os.PathLike[str]) -> Catalog:
    """Read the headers of a checkpoint. No tensor data is read.

    Args:
        path: a folder, or one ``.safetensors`` file.

    Raises:
        FileNotFoundError: nothing there; MissingCheckpointError: its only copy is put aside, or other files are there.
        FormatError: a malformed header, index or sharding information.
        CorruptionError: files that contradict the index or each other, shards beside an index, gaps, overlaps.
    """
    path, builder = Path(path), _Builder()
    cache: HeaderCache = {}
    is_folder = path.is_dir()
    if not is_folder:
        check_put_aside(path)
    index = read_index(path) if is_folder else None
    if index is None:
        for file in list_files(path) if is_folder else [path]:
            builder.add_file(str(file), read_header(file, cache), None)
        return builder.finish()
    weight_map = index.weight_map
    builder.catalog.checksums = index.checksums
    headers = {member: read_header(os.path.join(path, member), cache) for member in sorted(set(weight_map.values()))}
    _check_members(weight_map, headers, path)
    wanted: dict[str, set[str]] = {member: set() for member in headers}
    for name, member in weight_map.items():
        wanted[member].add(name)
    for member, header in headers.items():
        builder.add_file(os.path.join(path, member), header, wanted[member])
    return with_unlisted(path, builder.finish())


# Reading what a catalog lists.


@dataclass(frozen=True)
class StoredRange:
    """Values to load: the rectangle ``offsets``, ``sizes`` of a stored chunk, into ``target``.

    Attributes:
        name: of the tensor, in the file too.
        dtype: the stored one.
        target: the caller's memory; shape ``sizes``, any strides, any device. Of another dtype only for a cast.
    """

    name: str
    chunk: Chunk
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    target: torch.Tensor

    @property
    def size_bytes(self) -> int:
        """Stored bytes of the rectangle."""
        return math.prod(self.sizes) * self.dtype.itemsize


Progress = Callable[[int, int], None]  # Called with the bytes that are done, and all that will be.


class Meter:
    """Counts this process's bytes while they are moved, from any thread, and tells how far it is.

    Args:
        progress: called after each piece, by one thread at a time; what it raises ends the work. None: nobody asks.
        total_bytes: all that will be moved.
    """

    def __init__(self, progress: Progress | None = None, total_bytes: int = 0) -> None:
        self._progress, self._total_bytes, self._done_bytes = progress, total_bytes, 0
        self._lock = threading.Lock()

    def add(self, size_bytes: int) -> None:
        """Count a piece."""
        if self._progress is not None:
            with self._lock:
                self._done_bytes += size_bytes
                self._progress(self._done_bytes, self._total_bytes)


@dataclass(frozen=True)
class LoadJob:
    """One load of this process; ``begun_s`` is ``time.perf_counter()`` when it began."""

    ranges: Sequence[StoredRange]
    thread_count: int
    begun_s: float
    meter: Meter = field(default_factory=Meter)


class LoadEngine(Protocol):
    """Brings stored values into the caller's tensors.

    Headers were parsed and every target was checked before an engine is asked; it moves values and nothing else, and it
    leaves no file open. A plain engine may read whole files, a fast one reads the ranges alone.
    """

    def read(self, job: LoadJob) -> None:
        """Fill every target in place. Raises StorageError, CorruptionError; targets may then hold anything."""
        ...


def stored_ranges(
    name: str,
    record: TensorRecord,
    offsets: Sequence[int],
    sizes: Sequence[int],
    *,
    buffer: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[StoredRange]]:
    """Memory on the CPU for a rectangle of a stored tensor, and what fills it, one range a chunk.

    ``buffer``, uint8 of the rectangle's size, is that memory where it is given.
    """
    dtype = torch_dtype(record.dtype)
    assert dtype is not None  # Checked by the caller.
    shape, ranges = tuple(sizes), []
    memory = torch.empty(shape, dtype=dtype, device="cpu") if buffer is None else buffer.view(dtype).view(shape)
    for chunk in record.chunks:
        begin = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True)]
        ends = [min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)]
        if any(b >= e for b, e in zip(begin, ends, strict=True)):
            continue
        index = tuple(slice(b - o, e - o) for b, e, o in zip(begin, ends, offsets, strict=True))
        inside = tuple(b - o for b, o in zip(begin, chunk.offsets, strict=True))
        counts = tuple(e - b for b, e in zip(begin, ends, strict=True))
        ranges.append(StoredRange(name, chunk, dtype, inside, counts, memory[index]))
    return memory, ranges


def cut_rectangle(sizes: tuple[int, ...], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Rectangles of at most ``limit`` values, in row-major order; none if empty."""
    if 0 in sizes:
        return
    inner = math.prod(sizes[1:])
    if math.prod(sizes) <= limit:
        yield (0,) * len(sizes), sizes
    elif inner <= limit:
        step = limit // inner
        for begin in range(0, sizes[0], step):
            yield (begin, *(0,) * (len(sizes) - 1)), (min(step, sizes[0] - begin), *sizes[1:])
    else:
        for begin in range(sizes[0]):
            for rest, counts in cut_rectangle(sizes[1:], limit):
                yield (begin, *rest), (1, *counts)


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


@lru_cache(maxsize=1024)
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
    return dense_bytes(as_bits(tensor).cpu().contiguous())


def sums_of(chunks: Mapping[str, tuple[str, int, int]], parts: Iterable[Part]) -> dict[str, int]:
    """The sum of each chunk, from the sums of its parts.

    Args:
        chunks: name -> (file, file offset, bytes).
        parts: of all ranks.

    Raises:
        PlanError: parts that leave bytes out, or sum some twice.
    """
    found: dict[tuple[str, int], list[Part]] = {}
    for part in joined(part for part in parts if part.size_bytes):
        found.setdefault((part.file, part.begin), []).append(part)
    sums = {}
    for name, (file, begin, size_bytes) in chunks.items():
        pieces = found.get((file, begin), []) if size_bytes else [Part(file, begin, 0, 0, 0)]
        if [part[2:4] for part in pieces] != [(0, size_bytes)]:
            got = [f"{part.size_bytes} bytes from {part.offset}" for part in pieces]
            raise PlanError("not every byte was summed once", got=got, expected=f"{size_bytes} bytes", where=name)
        sums[name] = pieces[0].crc
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
    """Refuse metadata that is no mapping, or brings checksums of other bytes. Raises ConfigError."""
    if metadata is not None:
        check_kind(metadata, Mapping, "metadata", "str -> str")
    if CHECKSUMS_KEY in (metadata or {}):
        raise ConfigError("this key is kept for checksums", got=CHECKSUMS_KEY, expected="other keys", where="metadata")


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
                got, expected = to_text({name: crc}), to_text({name: found[key]})
                raise CorruptionError(
                    "index and file state different checksums", got=got, expected=expected, where=catalog.where(name)
                )
    return found


def states_sums(catalog: Catalog) -> bool:
    """Whether the checkpoint states a sum of any tensor that it lists. Raises as ``expected_sums`` does."""
    expected = expected_sums(catalog)
    return any((chunk.file, name) in expected for name, record in catalog.tensors.items() for chunk in record.chunks)


def _check_names(sums: Mapping[str, int], known: Iterable[str], where: str) -> None:
    strange = sorted(sums.keys() - set(known))
    if strange:
        raise CorruptionError("checksums of no tensor", got=strange[:20], expected="names of tensors", where=where)


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
    return math.prod(record.shape if shape is None else shape) * _bits(record.dtype) // 8


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
    # In the order of the files: each is opened once by a thread, and not for each of its tensors.
    order = sorted(chunks, key=lambda key: (chunks[key].file, chunks[key].begin))
    tasks = [(key, at) for key in order for at in range(0, sizes[key], PIECE_BYTES)]
    opened: dict[int, Any] = {}

    def file_of(path: str) -> Any:
        file = opened.pop(threading.get_ident(), None)
        if file is None or file.name != path:
            if file is not None:
                file.close()
            file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed with the next one, or below.
        opened[threading.get_ident()] = file
        return file

    def piece(task: tuple[_Key, int]) -> int:
        key, at = task
        if not hasattr(local, "memory"):
            local.memory = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu")
        data = local.memory[: min(PIECE_BYTES, sizes[key] - at)]
        file = file_of(chunks[key].file)
        file.seek(chunks[key].begin + at)
        _fill(file, buffer_of(data), chunks[key].file)
        meter.add(data.numel())
        return crc(data)

    sums = dict.fromkeys(chunks, 0)
    try:
        with ThreadPoolExecutor(thread_count, thread_name_prefix="checkpoint-verify") as pool:
            for (key, at), found in zip(tasks, pool.map(piece, tasks), strict=True):
                sums[key] = combine(sums[key], found, min(PIECE_BYTES, sizes[key] - at))
    finally:
        for file in opened.values():
            file.close()
    return sums


def _fill(file: Any, view: memoryview, path: str) -> None:
    while view:
        got = file.readinto(view)
        if not got:
            raise CorruptionError(
                "the file became shorter while it was read", got="its end", expected=f"{len(view)} bytes", where=path
            )
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
    by_file: dict[str, list[Part]] = {}
    for part in parts:
        by_file.setdefault(part.file, []).append(part)
    found = {
        (file, name): crc
        for file, chunks in read.items()
        for name, crc in sums_of(chunks, by_file.get(file, ())).items()
    }
    _compare(found, expected, path)


def check_present(catalog: Catalog, path: str | os.PathLike[str]) -> None:
    """Demand that a checkpoint has checksums. Raises ConfigError."""
    if not states_sums(catalog):
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


class MetadataChunks(Sequence[ChunkStorageMetadata]):
    """The chunks of a tensor as DCP wants them, made when a planner looks: most tensors of a shard folder never are."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self._made: list[ChunkStorageMetadata] | None = None

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        # Planners do this several times for each tensor; what a Sequence inherits asks for one index after the other.
        return iter(self._all())

    def _all(self) -> list[ChunkStorageMetadata]:
        if self._made is None:
            self._made = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in self._chunks]
        return self._made


class UnreadMetadata(Metadata):
    """Stands for metadata that could not be read; any look at it raises the error."""

    def __init__(self, error: Exception) -> None:
        super().__init__({})
        self.error = error

    def __getattribute__(self, name: str) -> Any:
        if name in ("state_dict_metadata", "planner_data", "storage_data"):
            raise self.error
        return super().__getattribute__(name)
