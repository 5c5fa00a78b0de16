"""One rank's part of the plan, as packed integers.

Prevents plans that cost more to pickle than to make: columns of differences compress to a few bytes per item.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import sub

from fastimpl.checkpoint.pause import collector_paused
from fastimpl.checkpoint.plan import Block, SavePieces
from twinproof.checkpoint.format import FileLayout

__all__ = [
    "HEADER_WORDS",
    "STATUS_FAILED",
    "STATUS_OK",
    "OwnBlock",
    "PackedPlan",
    "Piece",
    "RankPlan",
    "message_size_bytes",
    "pack_plans",
    "unpack_plan",
]

HEADER_WORDS = 2  # Of an exchanged message: status, number of descriptor words.
STATUS_OK, STATUS_FAILED = 0, 1


def message_size_bytes(descriptor_words: int, data_bytes: int) -> int:
    """Length of one exchanged message: header and descriptors as int64, then data padded to whole words."""
    return 8 * (HEADER_WORDS + descriptor_words) + data_bytes + -data_bytes % 8


@dataclass(frozen=True)
class OwnBlock:
    """A block as one rank sees it. ``senders``, of blocks that this rank owns: (rank, message bytes)."""

    file: int
    start: int
    end: int
    owner: int
    turn: int
    senders: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Piece:
    """Bytes of one local chunk that lie in one block; ``begin`` is the file offset of the whole tensor."""

    item: int
    begin: int
    block: int


@dataclass(frozen=True)
class RankPlan:
    """What one rank does in a save. ``headers``: by file number, for the owners of the blocks that hold them."""

    blocks: list[OwnBlock]
    pieces: list[Piece]
    replicas: tuple[tuple[str, tuple[int, ...]], ...]
    headers: dict[int, bytes]
    turn_count: int


@dataclass(frozen=True)
class PackedPlan:
    """A RankPlan as it travels."""

    blocks: bytes
    senders: bytes
    pieces: bytes
    replicas: tuple[tuple[str, tuple[int, ...]], ...]
    headers: dict[int, bytes]
    turn_count: int

    @property
    def size_bytes(self) -> int:
        """Bytes that the coordinator sends for this rank, file headers not counted: those are payload."""
        return (
            len(self.blocks) + len(self.senders) + len(self.pieces) + sum(len(n) + 8 * len(o) for n, o in self.replicas)
        )


def _pack(rows: Sequence[Sequence[int]]) -> bytes:
    flat = array("q", [len(rows)])
    for column in zip(*rows, strict=True):
        flat.append(column[0])
        flat.extend(map(sub, column[1:], column))
    return zlib.compress(flat.tobytes(), 1)


def _unpack(packed: bytes, column_count: int) -> list[tuple[int, ...]]:
    flat = array("q")
    flat.frombytes(zlib.decompress(packed))
    length = flat[0]
    columns = [accumulate(flat[1 + i * length : 1 + (i + 1) * length]) for i in range(column_count)]
    return list(zip(*columns, strict=True))


@collector_paused()
def pack_plans(plan: SavePieces, layouts: Sequence[FileLayout]) -> list[PackedPlan]:
    """Each rank's message; it holds nothing of other ranks' items."""
    owned: list[list[int]] = [[] for _ in plan.pieces]
    for number, block in enumerate(plan.blocks):
        owned[block.owner].append(number)
    turn_count = max((block.turn for block in plan.blocks), default=-1) + 1
    return [_pack_rank(plan, rank, own, layouts, turn_count) for rank, own in enumerate(owned)]


def _pack_rank(
    plan: SavePieces, rank: int, own: list[int], layouts: Sequence[FileLayout], turn_count: int
) -> PackedPlan:
    order = sorted({*own, *(number for _, _, number in plan.pieces[rank])})
    local = {number: i for i, number in enumerate(order)}
    rows, senders = [], []
    headers: dict[int, bytes] = {}
    for block in (plan.blocks[number] for number in order):
        mine = block.owner == rank
        rows.append(
            (
                block.file,
                block.start,
                block.end - block.start,
                block.owner,
                block.turn,
                len(block.message_bytes) if mine else 0,
            )
        )
        if mine:
            senders += _senders(block)
            if block.start < len(layouts[block.file].header):
                headers[block.file] = layouts[block.file].header
    pieces = sorted((local[number], begin, item) for item, begin, number in plan.pieces[rank])
    return PackedPlan(_pack(rows), _pack(senders), _pack(pieces), tuple(plan.replicas[rank]), headers, turn_count)


def _senders(block: Block) -> list[tuple[int, int]]:
    return [
        (rank, message_size_bytes(block.message_words[rank], size))
        for rank, size in sorted(block.message_bytes.items())
    ]


def unpack_plan(packed: PackedPlan) -> RankPlan:
    """The inverse of packing, on the rank that received it."""
    senders = iter(_unpack(packed.senders, 2)) if packed.senders else iter(())
    blocks = []
    for file, start, length, owner, turn, sender_count in _unpack(packed.blocks, 6):
        mine = tuple((rank, size) for rank, size in (next(senders) for _ in range(sender_count)))
        blocks.append(OwnBlock(file, start, start + length, owner, turn, mine))
    pieces = [Piece(item, begin, block) for block, begin, item in _unpack(packed.pieces, 3)]
    return RankPlan(blocks, pieces, packed.replicas, packed.headers, packed.turn_count)
