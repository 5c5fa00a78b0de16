"""Files that one process writes or reads alone, and torch's shard folders: made, and merged into final files.

A shard folder has one file per rank and output file, ``shard-RRRRR-model-IIIII-of-NNNNN.safetensors``, whose metadata
``DCP_SHARDING_INFO`` says where each tensor lies. Ours adds ``global_shape`` to each entry, so that a missing last
shard is an error and not a shorter tensor. How bytes are read and written is the business of what is passed in.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from twinproof.checkpoint.catalog import (
    Catalog,
    Chunk,
    Crc32,
    LoadEngine,
    LoadJob,
    Meter,
    Part,
    StoredRange,
    check_key,
    check_parts,
    crc32,
    metadata_of,
    states_sums,
    sums_of,
    to_text,
    verify_catalog,
)
from twinproof.checkpoint.format import (
    SHARDING_KEY,
    FileLayout,
    StrPath,
    check_unchanged,
    file_name,
    lay_out,
    layout_of,
    local_path,
    read_header,
    torch_dtype,
    waited,
)
from twinproof.checkpoint.plan import (
    FORMAT_METADATA,
    WriterOptions,
    assign_files,
    check_count,
    check_mapping,
    exported_dtype,
)
from twinproof.checkpoint.planners import check_planned
from twinproof.checkpoint.publish import (
    StagedFolder,
    Staging,
    build_index,
    gather_first,
    rank_count_of,
    reading,
    scatter,
    several_ranks,
    together,
    warn_of_leftovers,
    write_file,
)
from twinproof.checkpoint.whole import read_catalog
from twinproof.errors import ConfigError, PlanError, UnsupportedError, check_flags, check_kind

__all__ = ["FileBytes", "Merge", "MergeJob", "consolidate", "load_file", "save_file", "write_shards"]

BACKENDS = ("mmap", "pread")

FileBytes = Callable[[Mapping[str, torch.Tensor], FileLayout], Iterable[bytes | memoryview]]


# One file.


def save_file(
    tensors: Mapping[str, torch.Tensor],
    filename: StrPath,
    metadata: Mapping[str, str] | None,
    file_bytes: FileBytes,
    *,
    checksums: bool = False,
    crc: Crc32 = crc32,
) -> None:
    """Check the tensors, then write them to one file that appears at one instant, durably.

    With ``checksums`` the file's metadata holds the sum of each tensor; without, the bytes are the library's own.

    Raises:
        UnsupportedError, UnstorableError, ConfigError, StorageError.
    """
    path = os.fspath(local_path(filename, "filename"))
    check_flags(checksums=checksums)
    check_key(metadata)
    check_kind(tensors, Mapping, "tensors", "name -> tensor")
    layout = layout_of(tensors, metadata)
    if checksums:
        layout = layout_of(tensors, {**(metadata or {}), **metadata_of(tensors, crc)})
    if os.path.islink(path):
        # The link stays, as where others open the path and write.
        path = os.path.realpath(path)
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise ConfigError(
            "what is there is no file, and would be replaced by one",
            got="a device, a pipe or a socket",
            expected="the path of a file, or of nothing",
            where=path,
        )
    parent, name = os.path.split(os.path.abspath(path))
    with contextlib.suppress(OSError):  # A folder that cannot be listed may still be written to.
        warn_of_leftovers(Path(parent), name)
    write_file(path, file_bytes(tensors, layout), durable=True)


def check_backend(backend: str) -> None:
    """Demand a way of reading that the safetensors library knows. Raises ConfigError."""
    if backend not in BACKENDS:
        raise ConfigError("not a backend", got=backend, expected=BACKENDS, where="backend")


def load_file(
    filename: StrPath, device: str | int | torch.device, backend: str, engine: LoadEngine, thread_count: int = 1
) -> dict[str, torch.Tensor]:
    """Every tensor of one file in the order of the data, in memory of its own on ``device``.

    Raises:
        FormatError, UnsupportedError, ConfigError, CorruptionError, StorageError, FileNotFoundError.
    """
    begun_s = time.perf_counter()
    check_backend(backend)
    path = os.fspath(local_path(filename, "filename"))
    header = read_header(path)
    result: dict[str, torch.Tensor] = {}
    ranges = []
    for name, entry in sorted(header.entries.items(), key=lambda item: item[1].begin):
        dtype, shape = entry.torch_dtype(f"{path}: tensor {name!r}"), entry.torch_shape()
        result[name] = torch.empty(shape, dtype=dtype, device=device)
        start = (0,) * len(shape)
        chunk = Chunk(start, shape, path, header.data_start + entry.begin)
        ranges.append(StoredRange(name, chunk, dtype, start, shape, result[name]))
    with reading([path], lambda: check_unchanged(path, header)):
        engine.read(LoadJob(ranges, thread_count, begun_s))
    check_unchanged(path, header)
    return result


# Shard files.


class _Shard(NamedTuple):
    """One local chunk: name, offsets in the global tensor, global shape, local data."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    data: torch.Tensor


def _shard(item: WriteItem, planner: SavePlanner, options: WriterOptions) -> _Shard:
    value = planner.resolve_data(item)
    assert isinstance(value, torch.Tensor)
    assert item.tensor_data is not None
    check_planned(item, value)
    value = waited(value.detach()).to(exported_dtype(item.index.fqn, value.dtype, options))
    return _Shard(item.index.fqn, tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.size), value)


def _metadata(shards: Sequence[_Shard], options: WriterOptions) -> dict[str, str]:
    info = {s.name: {"saved_offsets": list(s.offsets), "global_shape": list(s.shape)} for s in shards}
    return {**options.file_metadata, SHARDING_KEY: json.dumps(info), "DCP_VERSION": "1.0"}


def write_shards(
    folder: StagedFolder,
    file_bytes: FileBytes,
    rank: int,
    items: Sequence[WriteItem],
    planner: SavePlanner,
    options: WriterOptions,
    crc: Crc32 = crc32,
    is_needed: bool = False,
) -> dict[str, tuple[str, int]]:
    """Write this rank's shard files; returns the file of each tensor, and its offset there.

    With ``is_needed`` a rank without tensors writes a file without tensors.

    Raises:
        PlanError: two chunks of one tensor on a rank, or values that are not what was planned. StorageError.
    """
    mapping = options.mapping
    groups: dict[int, list[_Shard]] = {1: []} if is_needed else {}
    for shard in [_shard(item, planner, options) for item in items]:
        groups.setdefault(1 if mapping is None else mapping[shard.name], []).append(shard)
    count = 1 if mapping is None else max(mapping.values(), default=1)
    files = []
    for index, members in sorted(groups.items()):
        if len({s.name for s in members}) != len(members):
            raise PlanError(
                "the shard layout holds one chunk of a tensor per rank",
                got="several",
                expected="one",
                where=f"rank {rank}",
            )
        tensors = {s.name: s.data for s in members}
        metadata = _metadata(members, options)
        if options.checksums:
            metadata |= metadata_of(tensors, crc)
        layout = layout_of(tensors, metadata, page_align=options.page_align)
        files.append((file_name(index, count, rank + 1), tensors, layout))
    meter = Meter(options.progress, sum(layout.file_bytes for _, _, layout in files))
    for file, tensors, layout in files:
        folder.put(file, file_bytes(tensors, layout))
        meter.add(layout.file_bytes)
    return {name: (file, begin) for file, _, layout in files for name, begin in layout.begins.items()}


# Consolidation.


@dataclass(frozen=True)
class MergeJob:
    """A consolidation: what is stored, and the layout of each output file. The same on every rank but for ``rank``."""

    catalog: Catalog
    layouts: Mapping[str, FileLayout]
    rank: int
    rank_count: int
    thread_count: int
    checksums: bool = False


class Merge(Protocol):
    """Brings the tensors of shard files into final files that nobody sees yet; called on every rank."""

    def __call__(self, job: MergeJob, folder: StagedFolder) -> Sequence[Part]:
        """Write this rank's part of every output file; with ``job.checksums``, say the sums of what it moved.

        The parts of all ranks hold every byte of every stored chunk once, under the path of its input file, and every
        byte of every written tensor once, under the name of its output file. Raises StorageError, CorruptionError.
        """
        ...


def record_dtype(catalog: Catalog, name: str) -> torch.dtype:
    """Torch dtype of a stored tensor; UnsupportedError for F6."""
    dtype = torch_dtype(catalog.tensors[name].dtype)
    if dtype is None:
        raise UnsupportedError(
            "no torch dtype holds this tensor",
            got=catalog.tensors[name].dtype,
            expected="no F6, and F4 of even width",
            where=catalog.where(name),
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


def _payload_bytes(catalog: Catalog, name: str) -> int:
    return math.prod(catalog.tensors[name].shape) * record_dtype(catalog, name).itemsize


def _laid_out(catalog: Catalog, mapping: Mapping[str, int] | None, max_shard_size: int | None) -> dict[str, FileLayout]:
    """The layout of each output file. Raises PlanError for tensors that the mapping lacks."""
    sizes = {name: _payload_bytes(catalog, name) for name in sorted(catalog.tensors)}
    files = assign_files(sizes, check_mapping(mapping), max_shard_size)
    layouts = {}
    for file, names in files.items():
        members = [(name, record_dtype(catalog, name), catalog.tensors[name].shape) for name in names]
        layouts[file] = lay_out(members, output_metadata(catalog))
    return layouts


def _index_of(catalog: Catalog, layouts: Mapping[str, FileLayout], *sums: Mapping[str, str]) -> bytes:
    """The index of the merged files, with checksums where given."""
    total_bytes = sum(_payload_bytes(catalog, name) for name in catalog.tensors)
    return build_index({name: file for file, layout in layouts.items() for name in layout.begins}, total_bytes, *sums)


def _checked_index(job: MergeJob, parts: Sequence[Part], source: Path) -> bytes:
    """The index with the sums of what was written, once what was read agrees. Raises CorruptionError, PlanError."""
    check_parts(job.catalog, parts, source)
    places = {
        name: (file, begin, _payload_bytes(job.catalog, name))
        for file, layout in job.layouts.items()
        for name, begin in layout.begins.items()
    }
    return _index_of(job.catalog, job.layouts, to_text(sums_of(places, parts)))


def _show(made: Sequence[Staging], job: MergeJob, everyone: Sequence[Sequence[Part]], source: Path) -> None:
    # Of the rank that made the folder; the others have made none.
    for staging in made:
        parts = [part for found in everyone for part in found]
        staging.publish(_checked_index(job, parts, source) if job.checksums else _index_of(job.catalog, job.layouts))


def _merged(merge: Merge, job: MergeJob, folder: StagedFolder) -> Sequence[Part]:
    with reading(job.catalog.headers, job.catalog.check_unchanged):
        return merge(job, folder)


def _checked(mapping: Mapping[str, int] | None, max_shard_size: int | None, num_threads: int) -> dict[str, int] | None:
    """The mapping. Raises ConfigError for what cannot be honoured."""
    if mapping is not None and max_shard_size is not None:
        raise ConfigError(
            "two rules for the files",
            got="both",
            expected="one of the mapping and max_shard_size",
            where="fqn_to_index_mapping, max_shard_size",
        )
    check_count(num_threads, "num_threads")
    return check_mapping(mapping)


def consolidate(
    merge: Merge,
    input_dir: StrPath,
    output_dir: StrPath,
    mapping: Mapping[str, int] | None,
    num_threads: int,
    *,
    max_shard_size: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    on_every_rank: bool = False,
    crc: Crc32 = crc32,
) -> None:
    """Merge a shard folder into final files, which appear at one instant; a final folder is verified and left alone.

    Where the shards have checksums, every byte is compared with them as it is read, and the result has checksums too.

    Args:
        merge: how the bytes are moved.
        input_dir: folder of the shards.
        output_dir: folder of the result; may hold ``input_dir``.
        mapping: tensor name -> output file from 1; None makes one file.
        num_threads: threads of this process, also of a verification.
        crc: sums a piece of a final folder that is verified.
        max_shard_size: bytes; split the output as ``HuggingFaceStorageWriter`` does.
        process_group: with ``on_every_rank``, the ranks that call this; None is the default group.
        on_every_rank: all ranks of the group call this and share the work; else this process does it alone.

    Raises:
        FormatError, PlanError, StorageError. DistributedError: another rank failed.
        ConfigError: ``mapping`` together with ``max_shard_size``.
        CorruptionError: shards with gaps or overlaps, or that were replaced meanwhile.
    """
    together_with = several_ranks(process_group) if on_every_rank else None
    rank = 0 if together_with is None else dist.get_rank(together_with)
    rank_count = rank_count_of(together_with)

    def begun() -> tuple[Path, Path, dict[str, int] | None, Catalog, bool]:
        given = _checked(mapping, max_shard_size, num_threads)
        source, target = local_path(input_dir, "input_dir"), local_path(output_dir, "output_dir")
        catalog = read_catalog(source)
        return source, target, given, catalog, is_final(catalog, source, target)

    source, target, given, catalog, is_done = together(begun, together_with)
    if is_done:
        together(lambda: verify_catalog(catalog, source, crc, num_threads) if rank == 0 else None, together_with)
        return
    made: list[Staging] = []
    try:
        layouts = together(lambda: _laid_out(catalog, given, max_shard_size), together_with)
        is_summed = together(lambda: states_sums(catalog), together_with)
        together(lambda: made.append(Staging(target)) if rank == 0 else None, together_with)
        folder = scatter([staging.folder for staging in made] * rank_count, together_with)
        job = MergeJob(catalog, layouts, rank, rank_count, num_threads, is_summed)
        parts = together(lambda: _merged(merge, job, StagedFolder(folder, durable=True)), together_with)
        together(catalog.check_unchanged, together_with)
        everyone = gather_first(parts, together_with) if is_summed else []
        together(lambda: _show(made, job, everyone, source), together_with)
    except BaseException:
        for staging in made:
            staging.discard()
        raise
