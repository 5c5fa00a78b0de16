"""What a folder holds: every tensor with its dtype, global shape and the file ranges of its chunks.

Reads the index where there is one, plain HF folders, single files and torch's shard folders (``DCP_SHARDING_INFO``).
Prevents answers from stale or missing files: facts/checkpoint.md D7-D10, D20, properties 30-34, 38, 45, 58.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import add
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from twinproof.checkpoint.files import INDEX_NAME, SUFFIX, read_index
from twinproof.checkpoint.layout import torch_dtype
from twinproof.checkpoint.parse import Header, HeaderCache, read_header
from twinproof.checkpoint.pause import collector_paused
from twinproof.checkpoint.sharding import SHARDING_KEY, parse_sharding
from twinproof.checkpoint.tiling import Box, check_tiling, is_simple_tiling
from twinproof.errors import CorruptionError

__all__ = ["Catalog", "Chunk", "StoredChunk", "TensorRecord", "read_catalog"]


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
    """Where a chunk lies: file, bytes [offset, offset + length) of it, the chunk's shape and dtype (None: F6)."""

    relative_path: str
    offset: int
    length: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None


@dataclass(eq=False)
class Catalog(Mapping[MetadataIndex, StoredChunk]):
    """All tensors of a checkpoint folder or file, the user metadata, and the files in reading order.

    As a mapping it is what DCP calls storage data: the chunks by tensor name and offsets.
    """

    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    headers: dict[str, Header] = field(default_factory=dict)

    def __getitem__(self, index: MetadataIndex) -> StoredChunk:
        record = self.tensors.get(index.fqn)
        for chunk in record.chunks if record is not None else ():
            if record is not None and chunk.offsets == tuple(index.offset or (0,) * len(record.shape)):
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

    def where(self, name: str) -> str:
        """Place of a tensor, for messages."""
        chunks = self.tensors[name].chunks
        return f"{chunks[0].file if chunks else '?'}: tensor {name!r}"


def _stored(chunk: Chunk, dtype: str) -> StoredChunk:
    found = torch_dtype(dtype)
    length = 0 if found is None else math.prod(chunk.sizes) * found.itemsize
    return StoredChunk(chunk.file, chunk.begin, length, chunk.sizes, found)


def _list_files(path: Path) -> list[Path]:
    names = sorted(name for name in os.listdir(path) if name.endswith(SUFFIX) and not name.startswith("."))
    if not names:
        raise FileNotFoundError(f"no safetensors file in {path}")
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
            if key != SHARDING_KEY:
                self.catalog.metadata.setdefault(key, value)
        if info is not None:
            self.sharded.update(header.entries)
            for name in header.entries.keys() & info.shapes.keys():
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
        where = f"{file}: tensor {name!r}"
        if whole or (dtype == record.dtype and len(shape) == len(record.shape)):
            raise CorruptionError("one tensor stands in two files", got=[record.chunks[0].file, file], where=where)
        raise CorruptionError(
            "files disagree about dtype or rank",
            got=f"{dtype} {list(shape)}",
            expected=f"{record.dtype}, rank {len(record.shape)}",
            where=where,
        )

    def finish(self) -> Catalog:
        for name in self.sharded & self.catalog.tensors.keys():
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
            raise CorruptionError(
                "the index names a tensor that its file lacks", got=name, where=f"{folder / INDEX_NAME}: {file}"
            )


@collector_paused()
def read_catalog(path: str | os.PathLike[str], files: Iterable[Path] | None = None) -> Catalog:
    """Read the headers of a checkpoint. No tensor data is read.

    Args:
        path: a folder, or one ``.safetensors`` file.
        files: read exactly these and no index.

    Raises:
        FileNotFoundError: nothing there.
        FormatError: a malformed header, index or sharding information.
        CorruptionError: files that contradict the index or each other, gaps, overlaps.
    """
    path, builder = Path(path), _Builder()
    cache: HeaderCache = {}
    if files is None and not path.is_dir():
        files = [path]
    index = read_index(path) if files is None else None
    if index is None:
        for file in _list_files(path) if files is None else files:
            builder.add_file(str(file), read_header(file, cache), None)
        return builder.finish()
    weight_map, _ = index
    headers = {member: read_header(path / member, cache) for member in sorted(set(weight_map.values()))}
    _check_members(weight_map, headers, path)
    wanted: dict[str, set[str]] = {member: set() for member in headers}
    for name, member in weight_map.items():
        wanted[member].add(name)
    for member, header in headers.items():
        builder.add_file(str(path / member), header, wanted[member])
    return builder.finish()
