"""What large checkpoints cost grows with their tensors, files and ranks, and with no product of these."""

from __future__ import annotations

import builtins
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from conformance.checkpoint.cases import load_ranks, mesh_of, save_ranks
from conformance.harness import Rank, assert_equal, assert_le, requirement, succeeds
from twinproof.checkpoint import catalog, planners
from twinproof.errors import PlanError


def _shard_folder(checkpoint: Any, folder: Path, file_count: int, tensor_count: int) -> Path:
    """Row ``n`` of every tensor in file ``n``, with checksums."""
    folder.mkdir()
    names = [f"t{number}" for number in range(tensor_count)]
    for row in range(file_count):
        said = {name: {"saved_offsets": [row, 0], "global_shape": [file_count, 3]} for name in names}
        tensors = {name: torch.full((1, 3), float(row + place)) for place, name in enumerate(names)}
        path = folder / f"shard-{row + 1:05d}-model-00001-of-00001.safetensors"
        checkpoint.save_file(tensors, path, {"DCP_SHARDING_INFO": json.dumps(said)}, checksums=True)
    return folder


@requirement(
    "CKPT-870",
    "What is compared with the checksums of shard files while they are merged MUST grow with their number, and not "
    "with its square.",
)
def test_many_shard_files(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, own = [0], catalog.joined

    def counted(parts: Any) -> Any:
        found = list(parts)
        seen[0] += len(found)
        return own(found)

    monkeypatch.setattr(catalog, "joined", counted)
    counts = []
    for file_count in (4, 8):
        source = _shard_folder(checkpoint, tmp_path / f"{file_count}", file_count, 3)
        seen[0] = 0
        checkpoint.consolidate_safetensors_files(source, tmp_path / f"{file_count} merged")
        counts.append(seen[0])
    assert_le(counts[1], 2 * counts[0], where="sums that are put in order for twice as many files")


@requirement(
    "CKPT-871",
    "A verification MUST open a file no more often for many tensors than for few.",
)
@pytest.mark.parametrize("thread_count", [1, 3])
def test_files_of_many_tensors(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thread_count: int
) -> None:
    opens: list[str] = []

    def counted(own: Any) -> Any:
        def opened(path: Any, *given: Any, **options: Any) -> Any:
            opens.append(os.fspath(path) if isinstance(path, str | os.PathLike) else "")
            return own(path, *given, **options)

        return opened

    for tensor_count in (2, 16):
        folder = _shard_folder(checkpoint, tmp_path / f"{tensor_count}", 2, tensor_count)
        with monkeypatch.context() as patch:
            patch.setattr(builtins, "open", counted(builtins.open))
            patch.setattr(os, "open", counted(os.open))
            opens.clear()
            found = catalog.verify(folder, thread_count=thread_count)
        most = max(sum(path == os.fspath(each) for path in opens) for each in folder.iterdir())
        where = f"{tensor_count} tensors, {thread_count} threads"
        # One time is for the header.
        assert_le(most, 1 + thread_count, where=f"opens of a file with {where}")
        assert_equal(len(found.checked), tensor_count, where=f"tensors that were verified, of {where}")


def _packed(rank: Rank, path: str, factor: int) -> list[int]:
    """How often the blocks of a packed shard of so many blocks were looked for, by a save and by a load."""
    from torch.distributed.tensor.placement_types import _StridedShard

    checkpoint, counts, own = rank.component("checkpoint"), [0, 0], planners.local_boxes
    full = torch.arange(4.0 * factor).reshape(2 * factor, 2)
    local = torch.cat([block[rank.rank : rank.rank + 1] for block in full.chunk(factor)])
    given: dict[str, Any] = {"shape": full.shape, "stride": full.stride(), "run_check": False}
    value, target = (
        DTensor.from_local(each, mesh_of(rank), [_StridedShard(0, split_factor=factor)], **given)
        for each in (local, torch.zeros_like(local))
    )

    def counted(tensor: Any) -> Any:
        counts[number] += 1
        return own(tensor)

    with mock.patch.object(planners, "local_boxes", counted):
        number = 0
        save_ranks(rank, {"qkv": value}, Path(path), planner=checkpoint.HuggingFaceSavePlanner())
        number = 1
        load_ranks(rank, {"qkv": target}, Path(path), planner=checkpoint.HuggingFaceLoadPlanner())
    assert_equal(target.to_local().tolist(), local.tolist(), where=f"rank {rank.rank}: {factor} blocks")
    return counts


@requirement(
    "CKPT-872",
    "The blocks of a packed shard MUST be found once for a save and once for a load, however many there are.",
)
def test_many_blocks(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    few, many = (rank_pool.run(_packed, 2, str(tmp_path / f"{factor}"), factor) for factor in (2, 8))
    assert_equal(many, few, where="looks at 8 blocks a rank, and at 2; of a save and a load")


@requirement(
    "CKPT-873",
    "Boxes that are the cells of a grid, as of a tensor that is sharded by rows and by columns, MUST be taken as a "
    "tiling without comparing each with those beside it.",
)
def test_grids(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, own = [0], catalog._overlap

    def counted(*given: Any) -> bool:
        looks[0] += 1
        return own(*given)

    monkeypatch.setattr(catalog, "_overlap", counted)
    for shape in ([8, 64], [64, 8], [8, 8, 8]):
        cells: list[Any] = [((), ())]
        for size in shape:
            width = size // 4
            cells = [((*at, begin), (*sizes, width)) for at, sizes in cells for begin in range(0, size, width)]
        looks[0] = 0
        with succeeds("check_tiling", where=f"{shape}"):
            catalog.check_tiling(shape, [catalog.Box(*cell) for cell in cells], PlanError, "t")
        assert_equal(looks[0], 0, where=f"pairs that are compared of {len(cells)} cells of {shape}")


class _Counting:
    """A planner's ``resolve_data``, which counts by name."""

    def __init__(self, planner: Any) -> None:
        self.counts: dict[str, int] = {}
        self._own = planner.resolve_data
        planner.resolve_data = self

    def __call__(self, item: Any) -> Any:
        self.counts[item.index.fqn] = self.counts.get(item.index.fqn, 0) + 1
        return self._own(item)


def _save_counted(rank: Rank, path: str) -> list[dict[str, int]]:
    checkpoint, found = rank.component("checkpoint"), []
    state = {f"r{rank.rank}": torch.ones(4), "both": torch.ones(3)}
    for checks in (False, True):
        planner = checkpoint.HuggingFaceSavePlanner()
        counting = _Counting(planner)
        with checkpoint.HuggingFaceStorageWriter(f"{path}-{checks}", check_replicas=checks) as writer:
            dcp.save(state, storage_writer=writer, planner=planner)
        found.append({name: count for name, count in counting.counts.items() if name != "both"})
        if checks:
            assert_le(1, counting.counts.get("both", 0), where=f"rank {rank.rank}: looks at what both have")
    return found


@requirement(
    "CKPT-874",
    "With check_replicas a rank MUST read nothing for the comparison that no other rank has.",
)
def test_own_chunks(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for rank, (plain, checked) in enumerate(rank_pool.run(_save_counted, 2, str(tmp_path / "ck"))):
        assert_equal(checked, plain, where=f"rank {rank}: how often its own tensors were asked for")
