"""Whether chunks that several ranks hold have the same bytes.

Prevents replicas that drifted apart unnoticed (facts/checkpoint.md D23): without the check one of them is stored.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from twinproof.checkpoint.memory import as_bits, buffer_of, check_storable
from twinproof.errors import DistributedError

__all__ = ["checksums", "compare_checksums"]

Chunk = tuple[str, tuple[int, ...]]


def checksums(items: Sequence[WriteItem], planner: SavePlanner) -> dict[Chunk, int]:
    """CRC-32 of every local chunk's bytes. One chunk is copied at a time, where its memory is not one row."""
    sums = {}
    for item in items:
        value = planner.resolve_data(item)
        assert isinstance(value, torch.Tensor)
        check_storable(value, item.index.fqn)
        data = as_bits(value).cpu().contiguous()
        sums[item.index.fqn, tuple(item.index.offset or ())] = zlib.crc32(buffer_of(data))
    return sums


def compare_checksums(everyone: Sequence[Mapping[Chunk, int]]) -> None:
    """Raise DistributedError, the same on every rank, for the first chunk on which two ranks differ."""
    seen: dict[Chunk, tuple[int, int]] = {}
    for rank, sums in enumerate(everyone):
        for chunk, value in sums.items():
            first = seen.setdefault(chunk, (rank, value))
            if first[1] != value:
                raise DistributedError(
                    "replicas differ", got=f"rank {rank}", expected=f"the bytes of rank {first[0]}", where=chunk[0]
                )
