"""Checkpoints whose weights are block-quantized, read as floating point: any slice, bounded memory.

Two layouts are known. *fp8*: ``X.weight`` [M, N] of an 8-bit float beside ``X.weight_scale_inv`` [ceil(M / s), ceil(N /
s)]; each s x s block is multiplied by its scale (DeepSeek-V3, s = 128). *MXFP4*: ``X_blocks`` uint8 [..., G, B], two
4-bit floats a byte, the low one first, beside ``X_scales`` uint8 [..., G], powers of two with bias 127 (OCP MX v1.0;
gpt-oss); read as [..., 2 G B]. Names and layouts are those of torch's ``QuantizedHuggingFaceStorageReader``.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from twinproof.checkpoint import dcp
from twinproof.checkpoint.catalog import (
    Catalog,
    Chunk,
    LoadJob,
    StoredRange,
    TensorRecord,
    cut_rectangle,
    stored_ranges,
)
from twinproof.checkpoint.checksums import check_loaded
from twinproof.checkpoint.format import StrPath, torch_dtype
from twinproof.checkpoint.plan import check_count
from twinproof.engine import Engine, engine_for
from twinproof.errors import ConfigError, CorruptionError, PlanError, UnsupportedError
from twinproof.regimes import regime

__all__ = ["Dequantize", "Piece", "Quantized", "QuantizedHuggingFaceStorageReader", "find_quantized"]

PIECE_BYTES = regime(
    1 << 20, 24
)  # Stored bytes that a thread reads and converts at once: they stay in the core's cache.
FP8, MXFP4 = "fp8", "mxfp4"
_TARGETS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")


@dataclass(frozen=True)
class Piece:
    """Stored values of one rectangle, and the scales of the blocks that it touches.

    Attributes:
        kind: ``fp8`` or ``mxfp4``.
        values: [rows, columns] of an 8-bit float; or uint8 [..., groups, bytes].
        scales: [block rows, block columns] of any float; or uint8 [..., groups].
        first: row and column of the first value in its block; or (0, first value in its group).
        block_size: rows and columns of a block; values of a group.
    """

    kind: str
    values: torch.Tensor
    scales: torch.Tensor
    first: tuple[int, int]
    block_size: int


# Writes the values of a piece, as float32 numbers rounded to the dtype of ``out``; ``out`` has any strides.
Dequantize = Callable[[Piece, torch.Tensor], None]


@dataclass(frozen=True)
class Quantized:
    """A quantized tensor of a catalog: its scales, and what it is when it is read."""

    kind: str
    scales: str
    shape: tuple[int, ...]
    group: int  # Stored bytes of a group in the last two dimensions, of MXFP4; 0 else.

    def seen(self, chunk: Chunk) -> Chunk:
        """The chunk in coordinates of the values."""
        if self.kind == FP8:
            return chunk
        *offsets, first, _ = chunk.offsets
        *sizes, count, _ = chunk.sizes
        values = 2 * self.group
        return Chunk((*offsets, first * values), (*sizes, count * values), chunk.file, chunk.begin)


def find_quantized(catalog: Catalog, block_size: int) -> dict[str, Quantized]:
    """Every tensor that has scales beside it, by name.

    Raises:
        UnsupportedError: scales beside a tensor that is neither a matrix of an 8-bit float nor MXFP4.
        CorruptionError: scales whose shape does not fit.
    """
    found: dict[str, Quantized] = {}
    for name in catalog.tensors:
        for suffix, stored, make in ((".weight_scale_inv", ".weight", _fp8), ("_scales", "_blocks", _mxfp4)):
            values = name.removesuffix(suffix) + stored
            if name.endswith(suffix) and values in catalog.tensors:
                found[values] = make(catalog, values, name, block_size)
    return found


def _fp8(catalog: Catalog, values: str, scales: str, block_size: int) -> Quantized:
    record, scale = catalog.tensors[values], catalog.tensors[scales]
    if record.dtype not in _FP8 or len(record.shape) != 2:
        got = f"{record.dtype} {list(record.shape)}"
        raise UnsupportedError("not a block-quantized matrix", got=got, expected=_FP8, where=catalog.where(values))
    expected = tuple(-(-size // block_size) for size in record.shape)
    _check_scales(catalog, scales, scale, expected)
    return Quantized(FP8, scales, tuple(record.shape), 0)


def _mxfp4(catalog: Catalog, values: str, scales: str, block_size: int) -> Quantized:
    del block_size  # The stored shape says it.
    record, scale = catalog.tensors[values], catalog.tensors[scales]
    if record.dtype != "U8" or len(record.shape) < 2:
        got = f"{record.dtype} {list(record.shape)}"
        raise UnsupportedError("not MXFP4 blocks", got=got, expected="U8 [..., G, B]", where=catalog.where(values))
    *before, groups, group = record.shape
    if any(chunk.sizes[-1] != group for chunk in record.chunks):
        raise UnsupportedError("a group is cut", got="its bytes in several chunks", where=catalog.where(values))
    _check_scales(catalog, scales, scale, (*before, groups))
    return Quantized(MXFP4, scales, (*before, 2 * groups * group), group)


def _check_scales(catalog: Catalog, name: str, scale: TensorRecord, expected: Sequence[int]) -> None:
    if tuple(scale.shape) != tuple(expected):
        raise CorruptionError(
            "the scales do not fit the values",
            got=list(scale.shape),
            expected=list(expected),
            where=catalog.where(name),
        )


class QuantizedHuggingFaceStorageReader(dcp.HuggingFaceStorageReader):
    """A ``StorageReader`` for ``dcp.load`` that gives block-quantized weights as floating point.

    A value is its stored number times its scale, rounded to float32 once, then to ``target_dtype``, then to the dtype
    of the target. Tensors without scales are converted as ``Tensor.to`` does. A scale of MXFP4 that is 255 makes NaN.

    Args:
        path: a folder or one file, as ``HuggingFaceStorageReader``; no index is needed.
        thread_count: threads of this rank.
        target_dtype: float32, bfloat16, float16 or float64.
        block_size: rows and columns of a block of 8-bit floats.
        verify_checksums: as ``HuggingFaceStorageReader``; stored values and scales are read once more for it.

    Raises:
        ConfigError: another dtype or size. ``dcp.load`` raises UnsupportedError and CorruptionError of what it finds.
    """

    _dequantize: ClassVar[Dequantize]

    def __init_subclass__(cls, *, dequantize: Dequantize | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if dequantize is not None:
            cls._dequantize = staticmethod(dequantize)

    def __init__(
        self,
        path: StrPath,
        thread_count: int = 1,
        target_dtype: torch.dtype = torch.float32,
        block_size: int = 128,
        *,
        verify_checksums: bool = False,
    ) -> None:
        super().__init__(path, thread_count, cast=True, verify_checksums=verify_checksums)
        if target_dtype not in _TARGETS:
            raise ConfigError("not a target dtype", got=target_dtype, expected=_TARGETS, where="target_dtype")
        self.target_dtype = target_dtype
        self.block_size = check_count(block_size, "block_size")
        self.quantized: dict[str, Quantized] = {}

    def _read_metadata(self) -> Metadata:
        metadata = super()._read_metadata()
        self.quantized = find_quantized(self.catalog, self.block_size)
        for name, form in self.quantized.items():
            chunks: Any = dcp.MetadataChunks([form.seen(chunk) for chunk in self.catalog.tensors[name].chunks])
            properties = TensorProperties(dtype=self.target_dtype)
            metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size(form.shape), chunks)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take the catalog that read_metadata made."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self.quantized = find_quantized(self.catalog, self.block_size)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill every target in place; nothing is written before all targets were checked."""
        mine = [item for item in plan.items if item.storage_index.fqn in self.quantized]
        plain = dataclasses.replace(plan, items=[i for i in plan.items if i.storage_index.fqn not in self.quantized])
        targets = [(item, self._target(item, planner)) for item in mine]
        # Every thread has a current stream of its own: what goes to a device goes behind the caller's.
        engines = {target.device: engine_for(target.device) for _, target in targets}
        streams = {device: (engine, engine.current()) for device, engine in engines.items()}
        future = super().read_data(plain, planner)
        pieces = [piece for item, target in targets for piece in self._pieces(item, target)]
        with ThreadPoolExecutor(self.thread_count, thread_name_prefix="checkpoint-dequantize") as pool:
            for _ in pool.map(partial(self._load, streams), pieces):
                pass
        if self.verify_checksums and mine:
            stored = list(self._stored_whole(mine))
            compared = check_loaded(self.catalog, stored, type(self)._crc32, self.path, self.thread_count)
            self.unverified = tuple(sorted({*self.unverified, *compared}))
        read = {item.storage_index.fqn for item in mine}
        names = read | {self.quantized[name].scales for name in read}
        self.catalog.check_unchanged(chunk.file for name in names for chunk in self.catalog.tensors[name].chunks)
        for item, target in targets:
            planner.commit_tensor(item, target)
        return future

    def _target(self, item: ReadItem, planner: LoadPlanner) -> torch.Tensor:
        target: torch.Tensor = planner.resolve_tensor(item).detach()
        name = item.storage_index.fqn
        if target.is_meta or not target.is_floating_point():
            got = "meta target" if target.is_meta else target.dtype
            raise UnsupportedError("a quantized tensor is read as floating point", got=got, where=name)
        if target.size() != item.lengths:
            raise PlanError(
                "target and read item differ in shape",
                got=tuple(target.size()),
                expected=tuple(item.lengths),
                where=name,
            )
        return target

    def _pieces(self, item: ReadItem, target: torch.Tensor) -> Iterator[_Part]:
        name = item.storage_index.fqn
        chunk = self._seen_chunk(item.storage_index)
        offsets = tuple(a + b for a, b in zip(chunk.offsets, item.storage_offsets, strict=True))
        value_bytes = 1.0 if self.quantized[name].kind == FP8 else 0.5
        for begin, sizes in cut_rectangle(tuple(item.lengths), max(1, int(PIECE_BYTES / value_bytes))):
            index = tuple(slice(first, first + size) for first, size in zip(begin, sizes, strict=True))
            at = tuple(a + b for a, b in zip(offsets, begin, strict=True))
            yield _Part(name, at, sizes, target[index])

    def _stored_whole(self, items: Sequence[ReadItem]) -> Iterator[StoredRange]:
        # What a checksum can be compared with: chunks that were read whole, and scales, which belong to all of them.
        nowhere = torch.empty(0, device="meta")
        parts = {
            item.storage_index.fqn
            for item in items
            if self._seen_chunk(item.storage_index).sizes != tuple(item.lengths)
        }
        for name in dict.fromkeys(item.storage_index.fqn for item in items):
            for stored in (name, self.quantized[name].scales):
                record = self.catalog.tensors[stored]
                dtype = torch_dtype(record.dtype)
                assert dtype is not None
                for chunk in record.chunks:
                    sizes = () if name in parts else chunk.sizes
                    yield StoredRange(stored, chunk, dtype, (0,) * len(sizes), sizes, nowhere)

    def _seen_chunk(self, index: MetadataIndex) -> Chunk:
        form, record = self.quantized[index.fqn], self.catalog.tensors[index.fqn]
        wanted = tuple(index.offset or (0,) * len(form.shape))
        for chunk in map(form.seen, record.chunks):
            if chunk.offsets == wanted:
                return chunk
        raise PlanError("the checkpoint has no chunk at this offset", got=wanted, where=index.fqn)

    def _load(self, streams: Mapping[torch.device, tuple[Engine, Any]], part: _Part) -> None:
        form = self.quantized[part.name]
        if form.kind == FP8:
            first = tuple(offset % self.block_size for offset in part.offsets)
            block = self.block_size
            stored = part.offsets, part.sizes
        else:
            block = 2 * form.group
            *before, begin = part.offsets
            *counts, count = part.sizes
            groups = begin // block, -(-(begin + count) // block)
            first = 0, begin % block
            stored = (*before, groups[0], 0), (*counts, groups[1] - groups[0], form.group)
        divisor = self.block_size if form.kind == FP8 else 1
        of_scales = stored if form.kind == FP8 else (stored[0][:-1], stored[1][:-1])
        low = tuple(offset // divisor for offset in of_scales[0])
        high = tuple(-(-(o + s) // divisor) for o, s in zip(*of_scales, strict=True))
        values, value_ranges = stored_ranges(part.name, self.catalog.tensors[part.name], *stored)
        scales, scale_ranges = stored_ranges(
            form.scales, self.catalog.tensors[form.scales], low, tuple(h - o for h, o in zip(high, low, strict=True))
        )
        self._engine.read(LoadJob([*value_ranges, *scale_ranges], 1, time.perf_counter()))
        piece = Piece(form.kind, values, scales, (first[0], first[1]), block)
        # Rounded to the target dtype on the way, as a tensor of that dtype would be.
        is_seen = part.target.dtype == self.target_dtype or self.target_dtype == torch.float32
        is_direct = is_seen and part.target.is_cpu
        out = part.target if is_direct else torch.empty(part.sizes, dtype=self.target_dtype)
        type(self)._dequantize(piece, out)
        if not is_direct:
            engine, stream = streams[part.target.device]
            with engine.on(stream):
                part.target.copy_(out)


@dataclass(frozen=True)
class _Part:
    """A rectangle of a quantized tensor in coordinates of its values, and where it goes."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    target: torch.Tensor
