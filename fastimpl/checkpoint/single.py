"""One file of one process: its bytes as they lie in memory, and its tensors filled by ranges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from fastimpl import ops
from fastimpl.checkpoint.reader import ReadRanges
from twinproof.checkpoint import shards
from twinproof.checkpoint.format import FileLayout, StrPath, as_bits, buffer_of

__all__ = ["file_bytes", "load_file", "save_file"]


def file_bytes(tensors: Mapping[str, torch.Tensor], layout: FileLayout) -> Iterator[memoryview]:
    """The planned header, then each tensor's memory; of a tensor that is no dense CPU memory one copy at a time."""
    yield memoryview(layout.header)
    for name in layout.begins:
        bits = as_bits(tensors[name]).cpu().contiguous()
        yield buffer_of(bits)


def save_file(
    tensors: Mapping[str, torch.Tensor],
    filename: StrPath,
    metadata: Mapping[str, str] | None = None,
    *,
    checksums: bool = False,
) -> None:
    """See ``refimpl.checkpoint.save_file``. No second copy of the file is made in memory."""
    shards.save_file(tensors, filename, metadata, file_bytes, checksums=checksums, crc=ops.crc32)


def load_file(
    filename: StrPath, device: str | int | torch.device = "cpu", *, backend: str = "mmap"
) -> dict[str, torch.Tensor]:
    """See ``refimpl.checkpoint.load_file``. Tensors of other devices are filled through pinned buffers."""
    return shards.load_file(filename, device, backend, ReadRanges(), thread_count=min(4, torch.get_num_threads()))
