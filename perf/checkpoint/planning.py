"""The coordinator's planning with simulated ranks, since thousands of ranks are planned for and two are there.

Contenders are ``who@ranks``. ``torch`` is its planner: dedup, global plan, validation. ``torch-pickled`` also pickles
every rank's plan, as its gather does. ``ours`` is everything that is added to torch's plan, the local part of one rank
included. ``quadratic`` looks through all items once per rank: what the linearity gate must refuse.
"""

from __future__ import annotations

import array
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from conformance.harness import Mismatch, Rank
from fastimpl.checkpoint import HuggingFaceStorageWriter
from fastimpl.checkpoint.pause import collector_paused
from fastimpl.checkpoint.plan import BlockRules, plan_blocks
from fastimpl.checkpoint.replicas import chunk_key, find_holders
from fastimpl.checkpoint.wire import PackedPlan, pack_plans, unpack_plan
from perf.harness.paired import Round, Sample, interleave, seconds_of
from perf.harness.workloads import Workload
from twinproof.checkpoint.plan import arrange

__all__ = ["measure_planning"]

_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class _Plans:
    """Local plans of all ranks, torch's global plan of them, the keys each rank sends, and torch's pickled bytes."""

    local: list[SavePlan]
    planned: list[SavePlan]
    held: list[bytes]
    pickled_bytes: int


def measure_planning(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Plan ``tensor_count`` tensors, sharded on rows over each contender's number of ranks."""
    # Everybody plans the same plans; making half a million write items takes longer than planning them.
    plans = {ranks: _make_plans(workload, ranks) for ranks in {int(who.split("@")[1]) for who in workload.contenders}}
    options = HuggingFaceStorageWriter(folder, save_distributed=False).options
    jobs: dict[str, Callable[[_Plans], int]] = {
        "torch": _torch,
        "torch-pickled": _torch_pickled,
        "quadratic": _quadratic,
        "ours": lambda found: _ours(found, options),
    }

    def run_of(who: str) -> Callable[[], Sample]:
        kind, _, ranks = who.partition("@")
        sizes: list[int] = []
        timed = seconds_of(lambda: sizes.append(jobs[kind](plans[int(ranks)])))
        item_count = int(ranks) * workload.tensor_count

        def run() -> Sample:
            sample = timed()
            return {**sample, "seconds_per_item": sample["seconds"] / item_count, "plan_bytes": float(sizes.pop())}

        return run

    return interleave({who: run_of(who) for who in workload.contenders}, round_count=round_count, seed=seed)


def _make_plans(workload: Workload, rank_count: int) -> _Plans:
    rows, columns = workload.shape
    share = rows // rank_count
    properties = TensorProperties(dtype=torch.float32)
    local = []
    for rank in range(rank_count):
        offsets, sizes = torch.Size((rank * share, 0)), torch.Size((share, columns))
        items = []
        for number in range(workload.tensor_count):
            index = MetadataIndex(f"model.layers.{number}.mlp.weight", offsets)
            data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, torch.Size(workload.shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        local.append(SavePlan(items))
    planned, _ = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(local)
    return _Plans(local, planned, [_keys(plan) for plan in local], sum(len(pickle.dumps(plan)) for plan in local))


def _keys(plan: SavePlan) -> bytes:
    keys = array.array("Q")
    for item in plan.items:
        assert item.tensor_data is not None
        keys.append(chunk_key(item.index.fqn, item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes))
    return keys.tobytes()


def _torch(plans: _Plans) -> int:
    # Dedup, global plan and validation; raises when torch finds its own plan invalid.
    DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans.local)
    return plans.pickled_bytes


def _torch_pickled(plans: _Plans) -> int:
    _torch(plans)
    return sum(len(pickle.dumps(plan)) for plan in plans.local)


def _ours(plans: _Plans, options: object) -> int:
    with collector_paused():
        arrangement = arrange(plans.planned, options)  # type: ignore[arg-type]
    holders = find_holders(arrangement, plans.held)
    pieces = plan_blocks(arrangement, len(plans.local), BlockRules.of(_BLOCK_BYTES), holders)
    packed = pack_plans(pieces, list(arrangement.files.values()))
    _keys(plans.local[0])
    _check_first(packed[0], plans)
    return sum(part.size_bytes for part in packed) + sum(map(len, plans.held))


def _check_first(packed: PackedPlan, plans: _Plans) -> None:
    """Rank 0 unpacks its part, as every rank does, and finds each of its items in it."""
    used = {piece.item for piece in unpack_plan(packed).pieces}
    if used != set(range(len(plans.planned[0].items))):
        raise Mismatch("the plan misses items", got=len(used), expected=len(plans.planned[0].items), where="rank 0")


def _quadratic(plans: _Plans) -> int:
    owners = [number for number, plan in enumerate(plans.local) for _ in plan.items]
    for rank in range(len(plans.local)):
        sum(1 for owner in owners if owner == rank)
    return plans.pickled_bytes
