"""Chunks that several ranks hold, and who they are.

Prevents one rank writing a replicated gigabyte alone: torch's dedup keeps whole items.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from hashlib import blake2b

from fastimpl.checkpoint.pause import collector_paused
from twinproof.checkpoint.plan import Arrangement

__all__ = ["chunk_key", "find_holders"]

Chunk = tuple[str, tuple[int, ...]]


def chunk_key(name: str, offsets: Sequence[int], sizes: Sequence[int]) -> int:
    """64 bits that stand for a chunk in what ranks send up. A rank that lacks a chunk it is asked for fails by name."""
    text = f"{name}\0{','.join(map(str, (*offsets, *sizes)))}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


@collector_paused()
def find_holders(arrangement: Arrangement, held: Sequence[bytes]) -> dict[Chunk, list[int]]:
    """Chunks that more than one rank holds, with those ranks in order, from every rank's packed keys."""
    ranks: dict[int, list[int]] = {}
    for rank, packed in enumerate(held):
        for key in array.array("Q", packed):
            ranks.setdefault(key, []).append(rank)
    several = {key: found for key, found in ranks.items() if len(found) > 1}
    if not several:
        return {}
    holders: dict[Chunk, list[int]] = {}
    for name, tensor in arrangement.tensors.items():
        for _, _, (offsets, sizes) in tensor.parts:
            found = several.get(chunk_key(name, offsets, sizes))
            if found is not None:
                holders[name, tuple(offsets)] = found
    return holders
