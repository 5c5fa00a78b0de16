"""Who writes which bytes of a save: long runs those who have them, what several have those who write least."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import assert_equal, assert_le, requirement, succeeds

BLOCK_BYTES = 64 << 10
# A name, its rows, how many ranks have rows of it (0: every rank has all of it).
Tensors = list[tuple[str, int, int]]


def _plan(tensors: Tensors, rank_count: int) -> Any:
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
    return plan_blocks(Arrangement(made, {"f": layout}), rank_count, BlockRules.of(BLOCK_BYTES), holders)


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
