"""Shard folders that torch already wrote, made into final HF files: the reference goes tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from twinproof.checkpoint.catalog import Catalog, read_catalog
from twinproof.checkpoint.files import assign_files, build_index, check_mapping, local_path
from twinproof.checkpoint.layout import torch_dtype
from twinproof.checkpoint.memory import as_bits
from twinproof.checkpoint.options import FORMAT_METADATA, check_count
from twinproof.checkpoint.outcome import raise_first
from twinproof.checkpoint.publish import Staging
from twinproof.checkpoint.reader import read_chunk
from twinproof.checkpoint.sharding import SHARDING_KEY
from twinproof.checkpoint.single import layout_of, write_tensors
from twinproof.errors import UnsupportedError

__all__ = ["consolidate_safetensors_files", "consolidate_safetensors_files_on_every_rank"]


def record_dtype(catalog: Catalog, name: str) -> torch.dtype:
    """Torch dtype of a stored tensor; UnsupportedError for F6."""
    dtype = torch_dtype(catalog.tensors[name].dtype)
    if dtype is None:
        raise UnsupportedError(
            "no torch dtype holds this tensor", got=catalog.tensors[name].dtype, where=catalog.where(name)
        )
    return dtype


def is_final(catalog: Catalog, input_dir: Path, output_dir: Path) -> bool:
    """Whether the folder already holds whole tensors and is to become itself: then nothing is left to do."""
    same = os.path.realpath(input_dir) == os.path.realpath(output_dir)
    return same and not any(SHARDING_KEY in header.metadata for header in catalog.headers.values())


def output_metadata(catalog: Catalog) -> dict[str, str]:
    """User metadata of the shards, without torch's own keys, and with ``format``."""
    kept = {key: value for key, value in catalog.metadata.items() if key not in (SHARDING_KEY, "DCP_VERSION")}
    return {**kept, **FORMAT_METADATA}


def output_files(
    catalog: Catalog, mapping: Mapping[str, int] | None, max_shard_size: int | None = None
) -> dict[str, list[str]]:
    """Output file -> tensor names. Raises PlanError for tensors that the mapping lacks."""
    sizes = {name: payload_bytes(catalog, name) for name in sorted(catalog.tensors)}
    return assign_files(sizes, check_mapping(mapping), max_shard_size)


def payload_bytes(catalog: Catalog, name: str) -> int:
    """Bytes of one tensor."""
    return torch.Size(catalog.tensors[name].shape).numel() * record_dtype(catalog, name).itemsize


def _assemble(catalog: Catalog, name: str) -> torch.Tensor:
    record, dtype = catalog.tensors[name], record_dtype(catalog, name)
    tensor = torch.empty(record.shape, dtype=dtype)
    for chunk in record.chunks:
        slices = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
        as_bits(tensor)[slices] = as_bits(read_chunk(chunk, dtype))
    return tensor


def index_of(catalog: Catalog, files: Mapping[str, list[str]]) -> bytes:
    """The index of a consolidated folder."""
    total = sum(payload_bytes(catalog, name) for names in files.values() for name in names)
    return build_index({name: file for file, names in files.items() for name in names}, total)


def consolidate_safetensors_files(
    input_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    num_threads: int = 1,
) -> None:
    """Merge shard files into final HF files and their index, as torch's function of this name.

    The output appears at one instant; a folder that is already final and is its own output is verified and left alone.

    Args:
        input_dir: folder of shard files.
        output_dir: folder of the result; may hold ``input_dir``.
        fqn_to_index_mapping: tensor name -> output file from 1; None makes one file.
        num_threads: threads of this process.

    Raises:
        FormatError, CorruptionError: input that is malformed, has gaps or overlaps. PlanError: names without an index.
        StorageError: the file system refused; the output folder is as before.
    """
    source, target = local_path(input_dir, "input_dir"), local_path(output_dir, "output_dir")
    check_count(num_threads, "num_threads")
    catalog = read_catalog(source)
    if is_final(catalog, source, target):
        return
    files = output_files(catalog, fqn_to_index_mapping)
    staging = Staging(target)
    try:
        for file, names in files.items():
            tensors = {name: _assemble(catalog, name) for name in names}
            layout = layout_of(tensors, output_metadata(catalog))
            write_tensors(str(staging.folder / file), tensors, layout, durable=True)
        staging.publish(index_of(catalog, files))
    except BaseException:
        staging.discard()
        raise


def consolidate_safetensors_files_on_every_rank(
    input_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    num_threads: int = 1,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """As ``consolidate_safetensors_files``, called on every rank of ``process_group``. Here rank 0 does the work.

    Raises:
        DistributedError: rank 0 failed, on every other rank; rank 0 raises its own error.
    """
    if not (dist.is_available() and dist.is_initialized()):
        consolidate_safetensors_files(input_dir, output_dir, fqn_to_index_mapping, num_threads)
        return
    failure: Exception | None = None
    if dist.get_rank(process_group) == 0:
        try:
            consolidate_safetensors_files(input_dir, output_dir, fqn_to_index_mapping, num_threads)
        except Exception as error:
            failure = error
    outcome: list[Exception | None] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(outcome, failure, group=process_group)
    if failure is not None:
        raise failure
    raise_first(outcome)
