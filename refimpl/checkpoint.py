"""HF-format (safetensors) checkpoints through ``torch.distributed.checkpoint``: what a save and a load mean.

A save gathers every chunk on one process, puts the tensors together there, and has the safetensors library make each
file. A load has that library read whole files and copies the asked-for rectangles into the targets. A consolidation
reads and makes files in the same two ways. Nothing here knows an offset: the bytes are that library's own.

Planners, the two classes that DCP drives, checks, layout and publication are ``twinproof.checkpoint``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import safetensors
import torch
import torch.distributed as dist

from twinproof.checkpoint import catalog, dcp, manager, shards
from twinproof.checkpoint.format import Entry, FileLayout, StrPath, as_bits, check_storable, with_options
from twinproof.checkpoint.manager import StateDictAdapter
from twinproof.checkpoint.native import CheckpointFormat, detect_format, load_training, save_training
from twinproof.checkpoint.plan import (
    Arrangement,
    GlobalPlan,
    SaveJob,
    WriterOptions,
    exported_dtype,
)
from twinproof.checkpoint.planners import HuggingFaceLoadPlanner, HuggingFaceSavePlanner
from twinproof.checkpoint.publish import StagedFolder, gather_first
from twinproof.errors import CorruptionError

# What the suite may ask beyond the contract: the reference moves whole tensors through one rank and counts nothing.
CAPABILITIES: frozenset[str] = frozenset()

__all__ = [
    "CheckpointFormat",
    "CheckpointManager",
    "HuggingFaceLoadPlanner",
    "HuggingFaceSavePlanner",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "QuantizedHuggingFaceStorageReader",
    "StateDictAdapter",
    "consolidate_safetensors_files",
    "consolidate_safetensors_files_on_every_rank",
    "detect_format",
    "load_file",
    "load_training",
    "save_file",
    "save_training",
]

# A rectangle of a tensor: the tensor's name, offsets in it, and values as integers of the same width.
Part = tuple[str, tuple[int, ...], torch.Tensor]


def file_bytes(tensors: Mapping[str, torch.Tensor], layout: FileLayout) -> Iterator[bytes]:
    """One file with these tensors, made by the safetensors library, whatever their device, strides and dtype."""
    # The library is given addresses, so the dense copies must live until it is done.
    dense = {name: as_bits(tensor).cpu().contiguous() for name, tensor in tensors.items()}
    specs = {
        name: safetensors.TensorSpec(
            dtype=str(tensors[name].dtype).removeprefix("torch."),
            shape=list(tensors[name].shape),
            data_ptr=bits.data_ptr(),
            data_len=bits.numel() * bits.element_size(),
        )
        for name, bits in dense.items()
    }
    metadata = None if layout.metadata is None else dict(layout.metadata)
    yield with_options(bytes(safetensors.serialize(specs, metadata)), layout)


def read_tensors(file: str, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Tensors of one file by name, as the safetensors library finds them there. Raises CorruptionError, OSError."""
    with open(file, "rb") as opened:
        content = opened.read()
    deserialize: Any = safetensors.deserialize
    try:
        stored = dict(deserialize(content))
    except safetensors.SafetensorError:
        # Its header was right when the folder was looked at.
        raise CorruptionError(
            "the file became shorter while it was read", got=len(content), expected="its full length", where=file
        ) from None
    return {name: _tensor_of(stored[name], f"{file}: tensor {name!r}") for name in names}


def _tensor_of(stored: Mapping[str, Any], where: str) -> torch.Tensor:
    entry = Entry(stored["dtype"], tuple(stored["shape"]), 0, len(stored["data"]))
    if not stored["data"]:
        return torch.empty(entry.torch_shape(), dtype=entry.torch_dtype(where), device="cpu")
    values = torch.frombuffer(stored["data"], dtype=torch.uint8)
    return values.view(entry.torch_dtype(where)).reshape(entry.torch_shape())


def assemble(shape: Sequence[int], dtype: torch.dtype, parts: Iterable[Part]) -> torch.Tensor:
    """The tensor that the parts tile."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    for _, offsets, bits in parts:
        as_bits(tensor)[_rectangle(offsets, bits.shape)] = bits
    return tensor


def _rectangle(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


class GatherAndSave:
    """The ``SaveEngine`` that sends every chunk to the coordinator, which makes all files."""

    def announce(self, items: Sequence[object]) -> None:
        """Nothing: the coordinator needs no more than the plans."""

    def instruct(self, plan: GlobalPlan) -> list[Arrangement | None]:
        """The coordinator, rank 0, makes all files; the others only send."""
        return [plan.arrangement, *[None] * (plan.rank_count - 1)]

    def prepare(
        self, job: SaveJob, instruction: Arrangement | None, folder: StagedFolder
    ) -> tuple[SaveJob, Arrangement | None, StagedFolder, list[Part]]:
        """This rank's chunks as they are stored."""
        mine = [_part(name, offsets, value, job.options) for name, offsets, value in job.chunks()]
        return job, instruction, folder, mine

    def write(self, prepared: tuple[SaveJob, Arrangement | None, StagedFolder, list[Part]]) -> list[catalog.Part]:
        """Gather, put together, save."""
        job, instruction, folder, mine = prepared
        gathered = gather_first(mine, job.group)
        if instruction is None:
            return []
        by_name: dict[str, list[Part]] = {}
        for part in (part for parts in gathered for part in parts):
            by_name.setdefault(part[0], []).append(part)
        meter = catalog.Meter(job.options.progress, sum(layout.file_bytes for layout in instruction.files.values()))
        sums: list[catalog.Part] = []
        for file, layout in instruction.files.items():
            wanted = [tensor for tensor in instruction.tensors.values() if tensor.file == file]
            tensors = {t.name: assemble(t.shape, t.dtype, by_name.get(t.name, ())) for t in wanted}
            folder.put(file, file_bytes(tensors, layout))
            sums += catalog.parts_of(file, layout.begins, tensors) if job.options.checksums else []
            meter.add(layout.file_bytes)
        return sums

    file_bytes = staticmethod(file_bytes)


def _part(name: str, offsets: tuple[int, ...], value: torch.Tensor, options: WriterOptions) -> Part:
    check_storable(value, name)
    value = value.detach().to("cpu", exported_dtype(name, value.dtype, options))
    return name, offsets, as_bits(value).contiguous()


class ReadWholeFiles:
    """The ``LoadEngine`` that reads each file whole and copies what is asked for."""

    def read(self, job: catalog.LoadJob) -> None:
        """Fill every target in place; another dtype is converted as ``Tensor.copy_`` does."""
        for file in dict.fromkeys(wanted.chunk.file for wanted in job.ranges):
            ranges = [wanted for wanted in job.ranges if wanted.chunk.file == file]
            stored = read_tensors(file, {wanted.name for wanted in ranges})
            for wanted in ranges:
                values = stored[wanted.name][_rectangle(wanted.offsets, wanted.sizes)]
                target = wanted.target
                if target.dtype == values.dtype and not target.is_conj() and not target.is_neg():
                    as_bits(target).copy_(as_bits(values))
                else:
                    target.copy_(values)
            job.meter.add(sum(wanted.size_bytes for wanted in ranges))


def merge(job: shards.MergeJob, folder: StagedFolder) -> list[catalog.Part]:
    """Put the tensors of shard files together, one output file after the other; rank 0 alone does it."""
    sums: list[catalog.Part] = []
    for file, layout in job.layouts.items() if job.rank == 0 else ():
        records = {name: job.catalog.tensors[name] for name in layout.begins}
        chunks = [(name, chunk) for name, record in records.items() for chunk in record.chunks]
        by_name: dict[str, list[Part]] = {}
        for source in dict.fromkeys(chunk.file for _, chunk in chunks):
            here = [(name, chunk.offsets) for name, chunk in chunks if chunk.file == source]
            stored = read_tensors(source, [name for name, _ in here])
            begins = {name: chunk.begin for name, chunk in chunks if chunk.file == source}
            sums += catalog.parts_of(source, begins, stored) if job.checksums else []
            for name, offsets in here:
                by_name.setdefault(name, []).append((name, offsets, as_bits(stored[name])))
        dtypes = {name: shards.record_dtype(job.catalog, name) for name in records}
        tensors = {n: assemble(record.shape, dtypes[n], by_name.get(n, ())) for n, record in records.items()}
        folder.put(file, file_bytes(tensors, layout))
        sums += catalog.parts_of(file, layout.begins, tensors) if job.checksums else []
    return sums


class HuggingFaceStorageWriter(dcp.HuggingFaceStorageWriter, engine=GatherAndSave):
    """Saves through one process; see ``twinproof.checkpoint.dcp.HuggingFaceStorageWriter`` for the arguments."""


class HuggingFaceStorageReader(dcp.HuggingFaceStorageReader, engine=ReadWholeFiles):
    """Reads whole files; see ``twinproof.checkpoint.dcp.HuggingFaceStorageReader`` for the arguments."""


FP4 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], device="cpu").double()


def dequantize(piece: dcp.Piece, out: torch.Tensor) -> None:
    """Each stored number times the scale of its block, rounded to float32, then to the dtype of ``out``."""
    if piece.kind == dcp.FP8:
        rows, columns = (
            (torch.arange(count, device="cpu") + first) // piece.block_size
            for count, first in zip(piece.values.shape, piece.first, strict=True)
        )
        numbers = piece.values.float() * piece.scales.float()[rows][:, columns]
    else:
        nibbles = torch.stack([piece.values & 15, piece.values >> 4], dim=-1).flatten(-2)
        powers = torch.exp2(piece.scales.double() - 127).masked_fill(piece.scales == 255, torch.nan)
        numbers = (FP4[nibbles.long()] * powers[..., None]).flatten(-2).narrow(-1, piece.first[1], out.shape[-1])
    out.copy_(numbers.float())


class QuantizedHuggingFaceStorageReader(
    dcp.QuantizedHuggingFaceStorageReader, engine=ReadWholeFiles, dequantize=dequantize
):
    """Reads whole files; see ``twinproof.checkpoint.dcp`` for formats and arguments."""


class CheckpointManager(
    manager.CheckpointManager,
    writer=HuggingFaceStorageWriter,
    reader=HuggingFaceStorageReader,
    quantized_reader=QuantizedHuggingFaceStorageReader,
):
    """A trainer's policy; see ``twinproof.checkpoint.manager.CheckpointManager`` for the arguments."""


def save_file(
    tensors: Mapping[str, torch.Tensor],
    filename: StrPath,
    metadata: Mapping[str, str] | None = None,
    *,
    checksums: bool = False,
) -> None:
    """Write the same bytes as ``safetensors.torch.save_file``; see ``twinproof.checkpoint.shards.save_file``."""
    shards.save_file(tensors, filename, metadata, file_bytes, checksums=checksums)


def load_file(
    filename: StrPath, device: str | int | torch.device = "cpu", *, backend: str = "mmap"
) -> dict[str, torch.Tensor]:
    """Read every tensor of one file; see ``twinproof.checkpoint.shards.load_file``."""
    return shards.load_file(filename, device, backend, ReadWholeFiles())


def consolidate_safetensors_files(
    input_dir: StrPath, output_dir: StrPath, fqn_to_index_mapping: Mapping[str, int] | None = None, num_threads: int = 1
) -> None:
    """Merge shard files into final HF files and their index; see ``twinproof.checkpoint.shards.consolidate``."""
    shards.consolidate(merge, input_dir, output_dir, fqn_to_index_mapping, num_threads)


def consolidate_safetensors_files_on_every_rank(
    input_dir: StrPath,
    output_dir: StrPath,
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    num_threads: int = 1,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """As ``consolidate_safetensors_files``, called on every rank of ``process_group``. Here rank 0 does the work."""
    shards.consolidate(
        merge, input_dir, output_dir, fqn_to_index_mapping, num_threads, process_group=process_group, on_every_rank=True
    )
