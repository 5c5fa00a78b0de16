"""Packed strided shards, as of fused QKV weights: by managers, save_training and load_training, and torch's planner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.tensor import DTensor

from conformance.checkpoint.cases import load_ranks, mesh_of, random_bits, save, save_ranks
from conformance.checkpoint.trainer import alone
from conformance.harness import Rank, assert_equal, assert_same_tensor, raises, requirement, succeeds
from conformance.kvstore.cases import ids_of, random_rows, store_of
from twinproof.errors import PlanError

_ROWS = (8, 7)
_SAVED_BY = {
    "load_training": "save_training",
    "manager": "manager",
    "HF manager": "HF manager",
    "quantized HF manager": "HF manager",
}
_LOADED_BY = {
    "save_training": "load_training",
    "manager": "manager",
    "async manager": "manager",
    "HF manager": "HF manager",
}


def _full(rows: int) -> torch.Tensor:
    return random_bits(torch.float32, (rows, 3), rows)


def _packed(rank: Rank, full: torch.Tensor) -> DTensor:
    """This rank's share of both halves of a tensor."""
    from torch.distributed.tensor.placement_types import _StridedShard

    shares = [half.chunk(rank.world_size)[rank.rank : rank.rank + 1] for half in full.chunk(2)]
    local = torch.cat([share for found in shares for share in found])
    given: dict[str, Any] = {"shape": full.shape, "stride": full.stride(), "run_check": False}
    made: DTensor = DTensor.from_local(local, mesh_of(rank), [_StridedShard(0, split_factor=2)], **given)
    return made


class _Model(torch.nn.Module):
    """A weight and a bias, of which the optimizer has states of the same shapes."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(weight), torch.nn.Parameter(torch.ones(2))


def _trained(weight: torch.Tensor, momentum: torch.Tensor) -> tuple[_Model, torch.optim.Optimizer]:
    model = _Model(weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for param, state in zip(model.parameters(), (momentum, torch.zeros(2)), strict=True):
        optimizer.state[param]["momentum_buffer"] = state
    return model, optimizer


def _given(model: _Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model, "optimizers": optimizer, "interval": 1, "durable": False}


def _save(checkpoint: Any, way: str, folder: Path, trained: tuple[_Model, torch.optim.Optimizer]) -> None:
    if way == "save_training":
        checkpoint.save_training(folder / "step-1", *trained, 1, durable=False)
        return
    mode, is_hf = "async" if "async" in way else "disabled", "HF" in way
    with checkpoint.CheckpointManager(folder, **_given(*trained), async_mode=mode, last_save_in_hf=is_hf) as manager:
        manager.save(1, last_step=is_hf)


def _load(checkpoint: Any, way: str, folder: Path, trained: tuple[_Model, torch.optim.Optimizer]) -> None:
    if way == "load_training":
        checkpoint.load_training(folder / "step-1", *trained)
        return
    options: dict[str, Any] = {}
    if "HF" in way:
        options = {"initial_load_path": folder / "step-1", "initial_load_in_hf": True}
        options["initial_load_in_hf_quantized"] = "quantized" in way
        folder = folder / "none"
    with checkpoint.CheckpointManager(folder, **_given(*trained), **options) as manager:
        assert_equal(manager.load(), True, where=f"{way}: what load says")


def _momentum(trained: tuple[_Model, torch.optim.Optimizer]) -> torch.Tensor:
    found: torch.Tensor = trained[1].state[trained[0].weight]["momentum_buffer"]
    return found


def _loaded(rank: Rank, path: str, way: str) -> None:
    checkpoint = rank.component("checkpoint")
    for rows in _ROWS:
        full, folder = _full(rows), Path(path) / f"{rows}"
        _save(checkpoint, _SAVED_BY[way], folder, _trained(full.clone(), full + 1))
        target = _trained(_packed(rank, torch.zeros(rows, 3)), _packed(rank, torch.zeros(rows, 3)))
        with succeeds("a load", where=f"{way}, {rows} rows"):
            _load(checkpoint, way, folder, target)
        weight: Any = target[0].weight.detach()
        assert_same_tensor(weight.to_local(), _packed(rank, full).to_local(), where=f"{way}, rank {rank.rank}")
        if "HF" not in way:
            momentum: Any = _momentum(target)
            assert_same_tensor(momentum.to_local(), _packed(rank, full + 1).to_local(), where=f"{way}, momentum")


@requirement(
    "CKPT-940",
    "Packed strided shards, of a model and of its optimizer, MUST be filled with their own rows by load_training and "
    "by a manager, from its folder and from an initial HF checkpoint, quantized or not, whatever their layout was.",
)
@pytest.mark.parametrize("way", _SAVED_BY)
def test_loads(checkpoint: Any, rank_pool: Any, tmp_path: Path, way: str) -> None:
    rank_pool.run(_loaded, 2, str(tmp_path), way)


def _saved(rank: Rank, path: str, way: str) -> None:
    checkpoint = rank.component("checkpoint")
    for rows in _ROWS:
        full, folder = _full(rows), Path(path) / f"{rows}"
        with succeeds("a save", where=f"{way}, {rows} rows"):
            _save(checkpoint, way, folder, _trained(_packed(rank, full), _packed(rank, full + 1)))
        target = _trained(torch.zeros(rows, 3), torch.zeros(rows, 3))
        _load(checkpoint, _LOADED_BY[way], folder, target)
        assert_same_tensor(target[0].weight.detach(), full, where=f"{way}, {rows} rows")
        if "HF" not in way:
            assert_same_tensor(_momentum(target), full + 1, where=f"{way}, {rows} rows, momentum")


@requirement(
    "CKPT-941",
    "Packed strided shards, of a model and of its optimizer, MUST be saved by save_training and by a manager, at once, "
    "asynchronously and in HF's format, as the tensors they are.",
)
@pytest.mark.parametrize("way", _LOADED_BY)
def test_saves(checkpoint: Any, rank_pool: Any, tmp_path: Path, way: str) -> None:
    rank_pool.run(_saved, 2, str(tmp_path), way)


class _RowByRow(DefaultLoadPlanner):
    """A planner that knows nothing of placements, and asks for each row of a target where the target has it."""

    rows: tuple[int, ...] = ()
    # As if each row were a block.
    is_anywhere = False

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        plan, one = super().create_local_plan(), torch.Size((1, 3))
        first = plan.items[0]
        items = [self._item(first, row, one) for row in self.rows]
        return LoadPlan([item for item in plan.items if item.dest_index.fqn != "w"] + items)

    def _item(self, first: ReadItem, row: int, sizes: torch.Size) -> ReadItem:
        begin = row if self.is_anywhere else max(block for block in (0, 2, 4, 6) if block <= row)
        dest = MetadataIndex("w", torch.Size((begin, 0)))
        source = MetadataIndex("w", torch.Size((0, 0)))
        offsets = torch.Size((row - begin, 0)), torch.Size((row, 0))
        return ReadItem(first.type, dest, offsets[0], source, offsets[1], sizes)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        row = int(read_item.storage_offsets[0])
        local: torch.Tensor = self.state_dict["w"].to_local()
        return local[self.rows.index(row) : self.rows.index(row) + 1]


def _by_torch(rank: Rank, path: str) -> None:
    checkpoint, full, folder = rank.component("checkpoint"), _full(8), Path(path)
    stored = torch.arange(24.0).reshape(8, 3).to(torch.float8_e4m3fn)
    scaled = {"w.weight": stored, "w.weight_scale_inv": torch.full((1, 1), 0.5)}
    save_ranks(rank, {"w": full}, folder / "plain")
    save_ranks(rank, scaled, folder / "scaled")
    for name, values, made in (
        ("w", full, checkpoint.HuggingFaceStorageReader(folder / "plain")),
        ("w", full, checkpoint.QuantizedHuggingFaceStorageReader(folder / "plain")),
        ("w.weight", stored.float() / 2, checkpoint.QuantizedHuggingFaceStorageReader(folder / "scaled")),
    ):
        target, where = _packed(rank, torch.zeros(8, 3)), f"{name} by {type(made).__name__}, rank {rank.rank}"
        shown = ("packed shard", "(4, 3)", "DefaultLoadPlanner", "HuggingFaceLoadPlanner", f"where: {name}")
        with raises(PlanError, mentions=shown, where=where):
            dcp.load({name: target}, storage_reader=made)
        assert_same_tensor(target.to_local(), torch.zeros(4, 3), where=where)
        with succeeds("a load as the error says", where=where):
            dcp.load({name: target}, storage_reader=made, planner=checkpoint.HuggingFaceLoadPlanner())
        assert_same_tensor(target.to_local(), _packed(rank, values).to_local(), where=where)
    target, planner = _packed(rank, torch.zeros(8, 3)), _RowByRow()
    planner.rows = ((0, 1, 4, 5), (2, 3, 6, 7))[rank.rank]
    with succeeds("a planner that fills each block", where=f"rank {rank.rank}"):
        load_ranks(rank, {"w": target}, folder / "plain", planner=planner)
    assert_same_tensor(target.to_local(), _packed(rank, full).to_local(), where="by rows")


@requirement(
    "CKPT-942",
    "Packed strided shards that torch's planner takes for one block MUST be refused by the readers, plain and "
    "quantized, with the planner that fills them, before one has changed; a planner that fills each block MUST work.",
)
def test_readers_under_torchs_planner(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_by_torch, 2, str(tmp_path))


def _anywhere(rank: Rank, path: str) -> None:
    target, planner = _packed(rank, torch.zeros(8, 3)), _RowByRow()
    planner.rows, planner.is_anywhere = ((0, 1, 4, 5), (2, 3, 6, 7))[rank.rank], True
    row = planner.rows[1]
    shown = ("packed shard", f"(1, 3) at ({row}, 0)", "_RowByRow", "where: w")
    with raises(PlanError, mentions=shown, where=f"rank {rank.rank}"):
        load_ranks(rank, {"w": target}, Path(path), planner=planner)
    assert_same_tensor(target.to_local(), torch.zeros(4, 3), where=f"rank {rank.rank}")


@requirement(
    "CKPT-954",
    "A planner that asks for values of a packed shard at a place where none of its blocks begins MUST be refused by "
    "that place, before the target has changed.",
)
def test_places_without_blocks(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    save(checkpoint, {"w": _full(8)}, tmp_path / "plain")
    rank_pool.run(_anywhere, 2, str(tmp_path / "plain"))


def _beside_rows(rank: Rank, path: str) -> None:
    kvstore, full, folder = rank.component("kvstore"), _full(8), Path(path) / f"{rank.rank}"
    store, ids = store_of(kvstore), [3, 1, 2]
    rows = random_rows(store, ids, 4)
    store.set_rows("t", rows)
    own = [dist.new_group([each], backend="gloo") for each in range(rank.world_size)][rank.rank]
    with alone():
        dcp.save({"w": full, **store.state_dict(process_group=own)}, checkpoint_id=folder, no_dist=True)
    beside: dict[str, Any] = store.state_dict(process_group=own, snapshot=False)
    dist.destroy_process_group(own)
    for others in (beside, {}):
        target, where = _packed(rank, torch.zeros(8, 3)), f"beside {len(others)} targets, rank {rank.rank}"
        with succeeds("a load", where=where), alone():
            given = {"checkpoint_id": folder, "planner": kvstore.KVLoadPlanner(), "no_dist": True}
            dcp.load({"w": target, **others}, **given)
        assert_same_tensor(target.to_local(), _packed(rank, full).to_local(), where=where)
    assert_same_tensor(store.get_rows("t", ids_of(ids)), rows, where="the rows")


@requirement(
    "CKPT-943",
    "KVLoadPlanner MUST fill packed strided shards with their own rows, beside rows of a store and alone.",
)
def test_beside_rows(checkpoint: Any, kvstore: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_beside_rows, 2, str(tmp_path))
