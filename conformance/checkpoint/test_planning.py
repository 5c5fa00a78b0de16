"""Who writes which bytes of a save: long runs those who have them, what several have those who write least."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.checkpoint.blocks import File, expected_writes, make_files
from conformance.harness import assert_equal, assert_le, examples, requirement, succeeds

BLOCK_BYTES = 64 << 10
# A name, its rows, how many ranks have rows of it (0: every rank has all of it).
Tensors = list[tuple[str, int, int]]


def _plan(tensors: Tensors, rank_count: int, block_bytes: int = BLOCK_BYTES) -> Any:
    """The plan of float32 matrices with 256 columns, cut by rows."""
    from fastimpl.checkpoint.plan import BlockRules, plan_blocks
    from twinproof.checkpoint.catalog import Box
    from twinproof.checkpoint.format import lay_out
    from twinproof.checkpoint.plan import Arrangement, GlobalTensor

    layout = lay_out([(name, torch.float32, (rows, 256)) for name, rows, _ in tensors], None)
    made: dict[str, Any] = {}
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for name, rows, parts in tensors:
        if parts:
            count = rows // parts
            boxes = [(rank, 0, Box((rank * count, 0), (count, 256))) for rank in range(parts)]
        else:
            boxes = [(0, 0, Box((0, 0), (rows, 256)))]
            holders[name, (0, 0)] = list(range(rank_count))
        made[name] = GlobalTensor(name, torch.float32, (rows, 256), boxes, "f", layout.begins[name])
    return plan_blocks(Arrangement(made, {"f": layout}), rank_count, BlockRules.of(block_bytes), holders)


@requirement(
    "CKPT-510",
    "A run of half a block or more MUST be written by the rank that has it, in writes of more than a block, whatever "
    "lies before it in the file.",
    needs=("counted_io",),
)
def test_long_runs(checkpoint: Any) -> None:
    # 1 KiB a row: of "a" each rank has 8 KiB, of "b" four blocks.
    plan = _plan([("a", 16, 2), ("b", 512, 2)], 2)
    lengths = [0, 0]
    for block in plan.blocks:
        lengths[block.owner] = max(lengths[block.owner], block.end - block.start)
    for rank, length in enumerate(lengths):
        assert_le(BLOCK_BYTES + 1, length, where=f"the longest write of rank {rank}")
    sent = sum(size for block in plan.blocks for size in block.message_bytes.values())
    assert_le(sent, 16 << 10, where="bytes that are sent, of 16 KiB in short runs")


@requirement(
    "CKPT-511",
    "What several ranks have MUST be written by those that write least, what each alone writes counted.",
    needs=("counted_io",),
)
def test_balance(checkpoint: Any) -> None:
    for busy in range(3):
        # Short runs that all three have, and one rank with a tensor of its own.
        shared: Tensors = [(f"a{number}", 16, 0) for number in range(8)]
        plan = _busy(shared, busy)
        own_bytes = [0, 0, 0]
        for block in plan.blocks:
            own_bytes[block.owner] += block.end - block.start
        least = sorted(range(3), key=lambda rank: own_bytes[rank])
        assert_equal(least[2], busy, where=f"the rank with most bytes of {own_bytes}")
        assert_le(own_bytes[busy], 513 << 10, where=f"bytes that rank {busy} writes beside its own, of {own_bytes}")


def _busy(shared: Tensors, rank: int) -> Any:
    from fastimpl.checkpoint.plan import BlockRules, plan_blocks
    from twinproof.checkpoint.catalog import Box
    from twinproof.checkpoint.format import lay_out
    from twinproof.checkpoint.plan import Arrangement, GlobalTensor

    made: dict[str, Any] = {}
    files: dict[str, Any] = {}
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for number, (name, rows, _) in enumerate([("own", 512, 1), *shared]):
        file = f"{number}"
        files[file] = lay_out([(name, torch.float32, (rows, 256))], None)
        boxes = [(rank if name == "own" else 0, number, Box((0, 0), (rows, 256)))]
        made[name] = GlobalTensor(name, torch.float32, (rows, 256), boxes, file, files[file].begins[name])
        if name != "own":
            holders[name, (0, 0)] = [0, 1, 2]
    return plan_blocks(Arrangement(made, files), 3, BlockRules.of(BLOCK_BYTES), holders)


@requirement("CKPT-512", "Files of any number of names MUST be read, 256 and 257 among them.")
def test_many_names(checkpoint: Any, tmp_path: Any) -> None:
    for count in (1, 255, 256, 257, 300):
        state = {f"t{number}": torch.tensor([number], dtype=torch.int16) for number in range(count)}
        checkpoint.save_file(state, tmp_path / "f.safetensors")
        with succeeds("load_file", where=f"{count} names"):
            found = checkpoint.load_file(tmp_path / "f.safetensors")
        assert_equal({name: int(value) for name, value in found.items()}, dict(zip(state, range(count), strict=True)))


@requirement(
    "CKPT-504",
    "A plan MUST be what its rules say, to the byte, for any tensors, cut in any way, that any ranks have: which "
    "writes there are, who makes each, what is its own, what others send to it, and in which order.",
    needs=("counted_io",),
)
@examples(150)
@given(
    seed=st.integers(0, 1 << 30),
    rank_count=st.sampled_from((1, 2, 2, 3, 4, 300)),
    file_count=st.integers(1, 6),
    units=st.tuples(st.sampled_from((8, 64)), st.sampled_from((1, 2, 8, 24))),
    much_bytes=st.sampled_from((64, 512, 64 << 10)),
    sequential=st.integers(0, 3).map(lambda value: value == 3),
)
def test_whole_plans(
    checkpoint: Any,
    seed: int,
    rank_count: int,
    file_count: int,
    units: tuple[int, int],
    much_bytes: int,
    sequential: bool,
) -> None:
    from fastimpl.checkpoint import plan as plans

    files = make_files(seed, file_count, rank_count)
    # A page would be more than all of it.
    align_bytes, count = units
    rules = plans.BlockRules.of(align_bytes * count, sequential=sequential)
    rules = replace(rules, align_bytes=align_bytes, direct_bytes=max(rules.block_bytes // 2, align_bytes))
    with mock.patch.object(plans, "_MUCH_BYTES", much_bytes):
        plan = plans.plan_blocks(_arrangement(files), rank_count, rules, _holders(files))
    expected = expected_writes(files, rules, rank_count, much_bytes)
    got = [(block.file, block.start, block.end, block.owner) for block in plan.blocks]
    assert_equal(got, expected, where="writes: file, first byte, end, rank")
    _assert_contents(plan, files, rank_count)
    for rank in range(rank_count):
        first = 0 if sequential else rank * file_count // rank_count
        mine = [block for block in plan.blocks if block.owner == rank]
        turns = sorted((block for block in mine if block.message_bytes), key=lambda block: block.turn)
        assert_equal([block.turn for block in turns], list(range(len(turns))), where=f"turns of rank {rank}")
        assert_equal({block.turn for block in mine if not block.message_bytes} <= {-1}, True, where="turns of others")
        # Beginning with a file of its own, to the end, then those before.
        order = sorted(
            turns,
            key=lambda block: (block.file - first if block.file >= first else file_count, block.file, block.start),
        )
        assert_equal([(b.file, b.start) for b in turns], [(b.file, b.start) for b in order], where=f"order of {rank}")


def _arrangement(files: list[File]) -> Any:
    from twinproof.checkpoint.plan import Arrangement, GlobalTensor

    made: dict[str, Any] = {}
    for number, file in enumerate(files):
        for part in file.parts:
            if part.name not in made:
                begin, dtype = file.layout.begins[part.name], file.dtypes[part.name]
                made[part.name] = GlobalTensor(part.name, dtype, part.shape, [], f"{number}", begin)
            made[part.name].parts.append((part.rank, part.position, part.box))
    return Arrangement(made, {f"{number}": file.layout for number, file in enumerate(files)})


def _holders(files: list[File]) -> dict[tuple[str, tuple[int, ...]], tuple[int, ...]]:
    several = [part for file in files for part in file.parts if len(part.holders) > 1]
    return {(part.name, part.box.offsets): part.holders for part in several}


def _assert_contents(plan: Any, files: list[File], rank_count: int) -> None:
    """Each write has what its owner has from its owner, the rest from the ranks that planned it; nothing else moves."""
    pieces: list[list[Any]] = [[] for _ in range(rank_count)]
    for number, block in enumerate(plan.blocks):
        file = files[block.file]
        sent: dict[int, int] = {}
        words: dict[int, int] = {}
        for index, size_bytes in file.bytes_in(block.start, block.end).items():
            part = file.parts[index]
            rank = block.owner if block.owner in part.holders else part.rank
            item: Any = part.position if rank == part.rank else (part.name, part.box.offsets)
            pieces[rank].append((str(item), file.layout.begins[part.name], number))
            if rank != block.owner:
                dimensions = [dim for dim, size in enumerate(part.shape) if part.box.sizes[dim] < size]
                sent[rank] = sent.get(rank, 0) + size_bytes
                words[rank] = words.get(rank, 0) + 4 + 3 * (1 + max(dimensions, default=0))
        assert_equal(block.message_bytes, sent, where=f"bytes that are sent for write {number}")
        assert_equal(block.message_words, words, where=f"words that are sent for write {number}")
    for rank, expected in enumerate(pieces):
        replicas = {-1 - place: key for key, place in plan.replicas[rank].items()}
        got = [(str(replicas.get(item, item)), begin, number) for item, begin, number in plan.pieces[rank]]
        assert_equal(sorted(got), sorted(expected), where=f"pieces of rank {rank}")
        assert_equal(sorted(replicas), list(range(-len(replicas), 0)), where=f"replicas of rank {rank}")


@requirement(
    "CKPT-505",
    "A block size MUST mean that writes begin at whole pages or blocks, that half a block is written by who has it, "
    "that no write is longer than two, and that an eighth of one is not worth a write.",
    needs=("counted_io",),
)
def test_sizes_of_a_block(checkpoint: Any) -> None:
    from fastimpl.checkpoint.plan import BlockRules

    for block_bytes, expected in {
        64: (64, 64, 64, 128, 8),
        4096: (4096, 4096, 4096, 8192, 512),
        8192: (4096, 8192, 4096, 16384, 1024),
        8 << 20: (4096, 8 << 20, 4 << 20, 16 << 20, 1 << 20),
    }.items():
        for sequential in (False, True):
            rules = BlockRules.of(block_bytes, sequential=sequential)
            got = (rules.align_bytes, rules.block_bytes, rules.direct_bytes, rules.direct_max_bytes, rules.absorb_bytes)
            assert_equal(
                [repr(size) for size in got], [repr(size) for size in expected], where=f"sizes at {block_bytes}"
            )
            assert_equal(rules.sequential, sequential, where="sequential")


@requirement(
    "CKPT-506",
    "What a rank is sent of a plan MUST be all that it needs and nothing of other ranks' items, in as many bytes as "
    "the figures of the save say.",
    needs=("counted_io",),
)
@examples(40)
@given(seed=st.integers(0, 1 << 30), rank_count=st.integers(1, 4), file_count=st.integers(1, 3))
def test_packed_plans(checkpoint: Any, seed: int, rank_count: int, file_count: int) -> None:
    from fastimpl.checkpoint.plan import BlockRules, plan_blocks
    from fastimpl.checkpoint.wire import pack_plans, unpack_plan

    files = make_files(seed, file_count, rank_count)
    plan = plan_blocks(_arrangement(files), rank_count, replace(BlockRules.of(256), align_bytes=64), _holders(files))
    packed = pack_plans(plan, [file.layout for file in files])
    assert_equal(len(packed), rank_count, where="parts of the plan")
    last = max((block.turn for block in plan.blocks), default=-1)
    for rank, part in enumerate(packed):
        got = unpack_plan(part)
        needed = {number for _, _, number in plan.pieces[rank]}
        needed |= {number for number, block in enumerate(plan.blocks) if block.owner == rank}
        own, expected = [plan.blocks[number] for number in sorted(needed)], []
        for block in own:
            # A message: two words, its descriptors, its bytes in whole words.
            lengths = {
                sender: 16 + 8 * words + (block.message_bytes[sender] + 7) // 8 * 8
                for sender, words in block.message_words.items()
            }
            senders = tuple(sorted(lengths.items())) if block.owner == rank else ()
            expected.append((block.file, block.start, block.end, block.owner, block.turn, senders))
        blocks = [(b.file, b.start, b.end, b.owner, b.turn, b.senders) for b in got.blocks]
        assert_equal(blocks, expected, where=f"blocks of rank {rank}")
        pieces = [(piece.item, piece.begin, sorted(needed)[piece.block]) for piece in got.pieces]
        assert_equal(sorted(pieces), sorted(plan.pieces[rank]), where=f"pieces of rank {rank}")
        assert_equal(list(got.replicas), list(plan.replicas[rank]), where=f"replicas of rank {rank}")
        heads = {
            b.file: files[b.file].layout.header for b in own if b.owner == rank and b.start < _header_bytes(files, b)
        }
        assert_equal(got.headers, heads, where=f"headers of rank {rank}")
        assert_equal(got.turn_count, last + 1, where="turns")
        size_bytes = len(part.blocks) + len(part.senders) + len(part.pieces)
        size_bytes += sum(len(name) + 8 * len(offsets) for name, offsets in part.replicas)
        assert_equal(part.size_bytes, size_bytes, where=f"bytes for rank {rank}")


def _header_bytes(files: list[File], block: Any) -> int:
    return len(files[block.file].layout.header)


@requirement(
    "CKPT-735",
    "Plans MUST hold for files and tensors of any size: places beyond 2, 4 and 1000 GiB, and steps of as much between "
    "them, are received as they were sent.",
    needs=("counted_io",),
)
def test_large_plans(checkpoint: Any) -> None:
    from fastimpl.checkpoint.wire import pack_plans, unpack_plan
    from twinproof.checkpoint.format import lay_out

    # 1 KiB a row.
    for gib in (1, 2, 3, 4, 1000):
        tensors: Tensors = [("a", gib << 20, 2), ("b", 4, 2), ("c", gib << 20, 0), ("d", 3, 0)]
        plan = _plan(tensors, 2, block_bytes=1 << 36)
        layout = lay_out([(name, torch.float32, (rows, 256)) for name, rows, _ in tensors], None)
        for rank, part in enumerate(pack_plans(plan, [layout])):
            got = unpack_plan(part)
            needed = {number for _, _, number in plan.pieces[rank]}
            needed |= {number for number, block in enumerate(plan.blocks) if block.owner == rank}
            expected = [(plan.blocks[number].start, plan.blocks[number].end) for number in sorted(needed)]
            found = [(block.start, block.end) for block in got.blocks]
            assert_equal(found, expected, where=f"{gib} GiB, blocks of rank {rank}")
            begins = sorted(begin for _, begin, _ in plan.pieces[rank])
            assert_equal(sorted(piece.begin for piece in got.pieces), begins, where=f"{gib} GiB, pieces of rank {rank}")


@requirement(
    "CKPT-548",
    "Where a rectangle's bytes lie in its tensor MUST be known for each of them: place, number before a place, first "
    "one, contiguous pieces, and whether some of them are in one.",
    needs=("counted_io",),
)
@examples(100)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5), st.integers(1, 6)), min_size=0, max_size=3),
    st.sampled_from((1, 2, 4)),
)
def test_geometry(checkpoint: Any, dims: list[tuple[int, int, int]], itemsize: int) -> None:
    from fastimpl.checkpoint.geometry import geometry

    offsets = [offset % shape for shape, offset, _ in dims]
    sizes = [min(size, shape - at) for (shape, _, size), at in zip(dims, offsets, strict=True)]
    shape = [length for length, _, _ in dims]
    inside = torch.zeros(shape, dtype=torch.bool)
    inside[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] = True
    bytes_inside = inside.reshape(-1).repeat_interleave(itemsize)
    places = bytes_inside.nonzero().view(-1).tolist()
    found = geometry(shape, offsets, sizes, itemsize)
    assert_equal([found.locate(at) for at in range(len(places))], places, where="places")
    assert_equal((found.first, found.total_bytes), (places[0], len(places)), where="first byte, and how many")
    held = [0, *bytes_inside.cumsum(0).tolist()]
    assert_equal([found.held_before(at) for at in range(len(held))], held, where="bytes before a place")
    assert_equal([found.held_before(at) for at in (-1, len(held) + 3)], [0, len(places)], where="outside")
    runs = [(begin, end) for begin, end in found.runs()]
    assert_equal([at for run in runs for at in range(*run)], places, where="pieces")
    assert_equal({end - begin for begin, end in runs}, {found.run_bytes}, where="lengths of pieces")
    for skip in range(len(places)):
        for count in range(1, min(len(places) - skip, 3 * found.run_bytes) + 1):
            is_one = any(begin <= places[skip] and places[skip + count - 1] < end for begin, end in runs)
            assert_equal(found.is_run(skip, count), is_one, where=f"{count} bytes from {skip}")
