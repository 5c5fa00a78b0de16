"""Who writes which bytes: aligned blocks of the final files, each with one owner, and what the others send to it.

Prevents writers that share a page, tiny writes, and plans that grow with the square of the rank count.

- A run of at least ``direct_bytes`` is written by a rank that holds it, straight from its memory.
- Everything shorter is cut into aligned blocks. One rank owns a block; the other holders send it their bytes.
- Borders between owners are multiples of ``align_bytes``.

The coordinator computes this once. Each rank gets its own part only, as packed integers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from fastimpl.checkpoint.geometry import Geometry, geometry
from fastimpl.checkpoint.pause import collector_paused
from fastimpl.regimes import regime
from twinproof.checkpoint.format import PAGE_BYTES
from twinproof.checkpoint.plan import Arrangement, GlobalTensor

__all__ = ["Block", "BlockRules", "Holders", "SavePieces", "first_file", "plan_blocks"]

# Of a block on one rank: from here on, what is sent costs more than an uneven share.
_MUCH_BYTES = regime(64 << 10, 32)

# (name, offsets of the chunk) -> every rank that holds the chunk. A chunk that only its planned rank holds is absent.
Holders = Mapping[tuple[str, tuple[int, ...]], Sequence[int]]


@dataclass(frozen=True)
class BlockRules:
    """Sizes that shape the writes.

    Attributes:
        align_bytes: owners never share an aligned unit of this size.
        block_bytes: exchanged blocks are aligned units of this size; bounds the memory of a save.
        direct_bytes: the shortest run that its holder writes itself.
        direct_max_bytes: the longest single write.
        absorb_bytes: shared gaps shorter than this go to the neighbour that writes directly.
        sequential: one owner per file, blocks in file order, for targets without random access.
    """

    align_bytes: int
    block_bytes: int
    direct_bytes: int
    direct_max_bytes: int
    absorb_bytes: int
    sequential: bool

    @classmethod
    def of(cls, block_bytes: int, *, sequential: bool = False) -> BlockRules:
        """The rules that go with a block size: at 8 MiB, runs of 4 MiB are direct and no write exceeds 16 MiB."""
        align_bytes = min(PAGE_BYTES, block_bytes)
        return cls(
            align_bytes, block_bytes, max(block_bytes // 2, align_bytes), 2 * block_bytes, block_bytes // 8, sequential
        )


@dataclass
class Block:
    """One write: file range, owner, the exchange round (-1: nothing comes from elsewhere), bytes by sending rank."""

    file: int
    start: int
    end: int
    owner: int
    turn: int = -1
    message_words: dict[int, int] = field(default_factory=dict)
    message_bytes: dict[int, int] = field(default_factory=dict)


@dataclass
class SavePieces:
    """The whole plan: all blocks, and per rank its pieces as (item, file offset of the tensor, block number).

    ``item`` is the position in the rank's own plan, or ``-1 - i`` for entry i of its ``replicas``: chunks that torch's
    dedup took out of its plan and that it supplies all the same.
    """

    blocks: list[Block]
    pieces: list[list[tuple[int, int, int]]]
    replicas: list[dict[tuple[str, tuple[int, ...]], int]]


class _Part:
    """One chunk with its geometry and the ranks that could supply it."""

    __slots__ = ("base", "first", "geometry", "holders", "offsets", "position", "rank", "tensor")

    def __init__(
        self,
        tensor: GlobalTensor,
        rank: int,
        position: int,
        geo: Geometry,
        offsets: tuple[int, ...],
        holders: Sequence[int],
    ) -> None:
        self.tensor, self.rank, self.position, self.geometry, self.offsets, self.holders = (
            tensor,
            rank,
            position,
            geo,
            offsets,
            holders,
        )
        self.base = tensor.begin
        self.first = self.base + geo.first


def _parts(tensors: Sequence[GlobalTensor], holders: Holders) -> list[_Part]:
    parts = []
    for tensor in tensors:
        shape, itemsize = tensor.shape, tensor.dtype.itemsize
        for rank, position, (offsets, sizes) in tensor.parts:
            if 0 not in sizes:
                found = holders.get((tensor.name, tuple(offsets)), ()) if holders else ()
                parts.append(
                    _Part(tensor, rank, position, geometry(shape, offsets, sizes, itemsize), tuple(offsets), found)
                )
    return parts


def _floor(value: int, unit: int) -> int:
    return value - value % unit


class _Balance:
    """Bytes that each rank writes, so that what several ranks could write goes to the least loaded of them."""

    def __init__(self, rank_count: int) -> None:
        self.load_bytes = [0] * rank_count

    def count_held(self, parts: Sequence[_Part], rules: BlockRules) -> None:
        """Runs that only one rank can write directly; known before any choice is made."""
        for part in parts:
            if not part.holders and part.geometry.run_bytes >= rules.direct_bytes:
                self.load_bytes[part.rank] += part.geometry.total_bytes

    def count_blocks(self, blocks: Iterable[Block]) -> None:
        """The blocks that have an owner, exactly; forgets what was counted before."""
        self.load_bytes = [0] * len(self.load_bytes)
        for block in blocks:
            if block.owner >= 0:
                self.load_bytes[block.owner] += block.end - block.start

    def least(self, ranks: Sequence[int]) -> Sequence[int]:
        """The ranks, least loaded first."""
        return sorted(ranks, key=lambda rank: (self.load_bytes[rank], rank))

    def choose(self, block: Block, shared: Sequence[tuple[_Part, int]]) -> None:
        """Give a shared block to the least loaded of its holders. Where much would travel, only large holders count."""
        if block.owner < 0:
            held: dict[int, int] = {}
            for part, size_bytes in shared:
                for rank in part.holders or (part.rank,):
                    held[rank] = held.get(rank, 0) + size_bytes
            most = max(held.values(), default=0)
            candidates = [
                rank for rank, size_bytes in held.items() if most < _MUCH_BYTES or 2 * size_bytes >= most
            ] or [0]
            block.owner = min(candidates, key=lambda rank: (self.load_bytes[rank], rank))
            self.load_bytes[block.owner] += block.end - block.start


def _direct_runs(parts: Sequence[_Part], rules: BlockRules, balance: _Balance) -> list[tuple[int, int, int]]:
    # Runs long enough to be written by a holder; a replicated run is shared out among the least loaded who hold it.
    runs = []
    for part in parts:
        if part.geometry.run_bytes < rules.direct_bytes:
            continue
        owners = part.holders or (part.rank,)
        for begin, end in part.geometry.runs():
            share = max(-(-(end - begin) // len(owners)), rules.direct_bytes)
            cuts = [*range(begin, end, share), end]
            for (start, stop), owner in zip(pairwise(cuts), balance.least(owners), strict=False):
                runs.append((part.base + start, part.base + stop, owner))
                if part.holders:
                    balance.load_bytes[owner] += stop - start
    return sorted(runs)


def _segments(
    runs: Sequence[tuple[int, int, int]], file_bytes: int, rules: BlockRules
) -> list[tuple[int, int, int | None]]:
    """Cover the file: (start, end, owner), owner None where runs are short. Inner borders are aligned down."""
    segments: list[tuple[int, int, int | None]] = []
    position = 0
    for begin, end, owner in runs:
        begin = _floor(begin, rules.align_bytes)
        end = end if end == file_bytes else _floor(end, rules.align_bytes)
        if begin - position >= rules.absorb_bytes:
            segments.append((position, begin, None))
            position = begin
        if end > position:
            segments.append((position, end, owner))
            position = end
    if segments and file_bytes - position < rules.absorb_bytes:
        last_begin, _, last_owner = segments.pop()
        segments.append((last_begin, file_bytes, last_owner))
    else:
        segments.append((position, file_bytes, None))
    return segments


def _cut(file: int, segments: Sequence[tuple[int, int, int | None]], rules: BlockRules) -> list[Block]:
    blocks = []
    for start, end, owner in segments:
        if owner is None:
            unit = rules.block_bytes
            cuts = [start, *range(_floor(start, unit) + unit, end, unit), end]
        else:
            count = -(-(end - start) // rules.direct_max_bytes)
            unit = -(-(end - start) // count // rules.align_bytes) * rules.align_bytes
            cuts = [*range(start, end, unit), end]
        blocks += [Block(file, a, b, -1 if owner is None else owner) for a, b in pairwise(cuts)]
    return blocks


def _share(parts: Sequence[_Part], blocks: list[Block]) -> list[list[tuple[_Part, int]]]:
    """For each block of one file, the chunks that lie in it with their byte counts."""
    starts = [block.start for block in blocks]
    shared: list[list[tuple[_Part, int]]] = [[] for _ in blocks]
    for part in parts:
        number, before, total = bisect_right(starts, part.first) - 1, 0, part.geometry.total_bytes
        while before < total:
            upto = part.geometry.held_before(blocks[number].end - part.base)
            if upto > before:
                shared[number].append((part, upto - before))
            number, before = number + 1, upto
    return shared


@collector_paused()
def plan_blocks(arrangement: Arrangement, rank_count: int, rules: BlockRules, holders: Holders) -> SavePieces:
    """Plan every write and every message of a save. A pure function of its arguments.

    Args:
        arrangement: the final files.
        rank_count: ranks that save.
        rules: sizes.
        holders: replicated chunks, see ``Holders``.
    """
    plan = SavePieces([], [[] for _ in range(rank_count)], [{} for _ in range(rank_count)])
    balance = _Balance(rank_count)
    by_file: dict[str, list[GlobalTensor]] = {file: [] for file in arrangement.files}
    for tensor in arrangement.tensors.values():
        by_file[tensor.file].append(tensor)
    parts_by_file = [_parts(tensors, holders) for tensors in by_file.values()]
    for parts in parts_by_file:
        balance.count_held(parts, rules)
    pending = []
    for number, (parts, layout) in enumerate(zip(parts_by_file, arrangement.files.values(), strict=True)):
        if rank_count == 1:
            segments: list[tuple[int, int, int | None]] = [(0, layout.file_bytes, 0)]
        elif rules.sequential:
            segments = [(0, layout.file_bytes, None)]
        else:
            segments = _segments(_direct_runs(parts, rules, balance), layout.file_bytes, rules)
        pending.append((parts, _cut(number, segments, rules)))
    balance.count_blocks(block for _, blocks in pending for block in blocks)
    for parts, blocks in pending:
        shared = _share(parts, blocks)
        if rules.sequential:
            _one_owner(blocks, balance)
        _emit(plan, blocks, shared, balance)
    _schedule(plan.blocks, rank_count, len(arrangement.files), rules)
    return plan


def _schedule(blocks: Sequence[Block], rank_count: int, file_count: int, rules: BlockRules) -> None:
    """Number each owner's exchanged blocks. Owners begin at different files: writers to one inode wait."""
    by_owner: dict[int, list[Block]] = {}
    for block in blocks:
        if block.message_bytes:
            by_owner.setdefault(block.owner, []).append(block)
    for owner, mine in by_owner.items():
        first = 0 if rules.sequential else first_file(owner, rank_count, file_count)
        mine.sort(key=lambda block: (block.file < first, block.file, block.start))
        for turn, block in enumerate(mine):
            block.turn = turn


def first_file(rank: int, rank_count: int, file_count: int) -> int:
    """The file at which a rank begins to write."""
    return rank * file_count // rank_count


def _one_owner(blocks: list[Block], balance: _Balance) -> None:
    owner = min(range(len(balance.load_bytes)), key=lambda rank: (balance.load_bytes[rank], rank))
    for block in blocks:
        block.owner = owner
        balance.load_bytes[owner] += block.end - block.start


def _emit(plan: SavePieces, blocks: list[Block], shared: list[list[tuple[_Part, int]]], balance: _Balance) -> None:
    for block, content in zip(blocks, shared, strict=True):
        number = len(plan.blocks)
        plan.blocks.append(block)
        balance.choose(block, content)
        owner = block.owner
        for part, size_bytes in content:
            rank = owner if owner in part.holders else part.rank
            item = part.position
            if rank != part.rank:
                held = plan.replicas[rank]
                item = -1 - held.setdefault((part.tensor.name, part.offsets), len(held))
            plan.pieces[rank].append((item, part.base, number))
            if rank != owner:
                words = 4 + 3 * len(part.geometry.shape)
                block.message_words[rank] = block.message_words.get(rank, 0) + words
                block.message_bytes[rank] = block.message_bytes.get(rank, 0) + size_bytes
