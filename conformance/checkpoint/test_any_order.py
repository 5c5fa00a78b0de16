"""The order of names in what a checkpoint says of itself: headers, sharding information, checksums, the index."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from conformance.checkpoint.cases import INDEX, assert_loads, mesh_of, random_bits, save_ranks, sharded
from conformance.harness import Rank, assert_equal, requirement, succeeds
from twinproof.checkpoint.catalog import verify

_SHAPES: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "w": (torch.float32, (9, 6)),
    "a": (torch.bfloat16, (5,)),
    "none": (torch.float32, (0, 3)),
    "b": (torch.int64, (4, 2)),
    "flag": (torch.bool, ()),
}


def _state() -> dict[str, torch.Tensor]:
    return {name: random_bits(dtype, shape, 1) for name, (dtype, shape) in _SHAPES.items()}


def _save_on(rank: Rank, path: str, in_shards: bool) -> None:
    mesh = mesh_of(rank)
    parts = {name: sharded(value, mesh, [Shard(0) if value.dim() else Replicate()]) for name, value in _state().items()}
    options = {"enable_consolidation": False} if in_shards else {"max_shard_size": 100}
    save_ranks(rank, parts, Path(path), checksums=True, **options)


Order = Callable[[list[str]], list[str]]


def _ordered(value: Any, order: Order) -> Any:
    """The same JSON with the members of every object in another order; text that is JSON itself likewise."""
    if isinstance(value, dict):
        return {name: _ordered(value[name], order) for name in order(list(value))}
    if isinstance(value, str) and value.startswith("{"):
        return json.dumps(_ordered(json.loads(value), order))
    return value


def _reorder(folder: Path, order: Order) -> None:
    for path in folder.iterdir():
        content = path.read_bytes()
        if path.name == INDEX:
            path.write_text(json.dumps(_ordered(json.loads(content), order)))
            continue
        start = 8 + int.from_bytes(content[:8], "little")
        text = json.dumps(_ordered(json.loads(content[8:start]), order)).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[start:])


@requirement(
    "CKPT-630",
    "Values, checksums and merged files MUST NOT depend on the order of names in headers, sharding information, "
    "checksums or the index.",
)
@pytest.mark.parametrize("in_shards", [False, True], ids=["files", "shards"])
def test_orders(checkpoint: Any, rank_pool: Any, tmp_path: Path, in_shards: bool) -> None:
    rank_pool.run(_save_on, 2, str(tmp_path / "ck"), in_shards)
    choose = random.Random(3)
    orders: list[Order] = [sorted, lambda names: sorted(names, reverse=True)]
    orders += [lambda names: choose.sample(names, len(names))] * 3
    merged: dict[str, bytes] | None = None
    for number, order in enumerate(orders):
        folder, target = tmp_path / f"ck-{number}", tmp_path / f"merged-{number}"
        folder.mkdir()
        for path in (tmp_path / "ck").iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        _reorder(folder, order)
        with succeeds("a load", where=f"order {number}"):
            assert_loads(checkpoint, folder, _state(), verify_checksums=True)
        with succeeds("a verification", where=f"order {number}"):
            assert_equal(len(verify(folder).checked), len(_SHAPES), where=f"tensors verified in order {number}")
        with succeeds("a merge", where=f"order {number}"):
            checkpoint.consolidate_safetensors_files(folder, target, dict(zip(_SHAPES, (1, 2, 1, 2, 1), strict=True)))
        found = {path.name: path.read_bytes() for path in target.iterdir()}
        merged = merged or found
        assert_equal([name for name in found if found[name] != merged.get(name)], [], where=f"merged from {number}")
