"""Chunks that several ranks hold: who they are, and whether their bytes agree.

Prevents one rank writing a replicated gigabyte alone (torch's dedup keeps whole items), and replicas that drifted apart
unnoticed (facts/checkpoint.md D23).
"""

from __future__ import annotations

import array
import zlib
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

from torch.distributed.checkpoint.planner import WriteItem

from fastimpl.checkpoint.source import Source
from refimpl.checkpoint.arrange import Arrangement
from refimpl.checkpoint.memory import buffer_of
from refimpl.errors import DistributedError

__all__ = ["Chunk", "checksums", "chunk_key", "compare_checksums", "find_holders"]

Chunk = tuple[str, tuple[int, ...]]
_STEP_BYTES = 8 << 20


def chunk_key(name: str, offsets: Sequence[int]) -> int:
    """64 bits that stand for a chunk in what ranks send up. A rank that lacks a chunk it is asked for fails by name."""
    text = f"{name}\0{','.join(map(str, offsets))}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def find_holders(arrangement: Arrangement, held: Sequence[bytes]) -> dict[Chunk, list[int]]:
    """Chunks that more than one rank holds, with those ranks in order, from every rank's packed keys."""
    ranks: dict[int, list[int]] = {}
    for rank, packed in enumerate(held):
        for key in array.array("Q", packed):
            ranks.setdefault(key, []).append(rank)
    several = {key: found for key, found in ranks.items() if len(found) > 1}
    if not several:
        return {}
    chunks = [(name, tuple(box.offsets)) for name, tensor in arrangement.tensors.items() for _, _, box in tensor.parts]
    keyed = ((chunk, several.get(chunk_key(*chunk))) for chunk in chunks)
    return {chunk: found for chunk, found in keyed if found is not None}


def checksums(items: Sequence[WriteItem], source_of: Callable[[WriteItem], Source]) -> dict[Chunk, int]:
    """CRC-32 of every local chunk's bytes as they would stand in the file."""
    sums = {}
    for item in items:
        source, value = source_of(item), 0
        for begin in range(0, source.size_bytes, _STEP_BYTES):
            value = zlib.crc32(buffer_of(source.read(begin, min(begin + _STEP_BYTES, source.size_bytes))), value)
        sums[item.index.fqn, tuple(item.index.offset or ())] = value
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
