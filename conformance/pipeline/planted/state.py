"""Faults in what is saved, loaded and made at the beginning."""

from __future__ import annotations

from typing import Any

import torch

from conformance.pipeline.planted.planting import shared, shared_swap
from twinproof.pipeline.sharding import INIT_ROWS, Shard

STATE = "twinproof.pipeline.sharded:ShardedEmbeddingBagCollection"


def _step_lost(original: Any, module: Any, state: Any) -> None:
    step = module.fused_optimizer.step_count
    original(module, state)
    module.fused_optimizer.step_count = step


def _first_rows(original: Any, target: Any, value: Any, where: str) -> None:
    local = target.to_local()
    if local is None or hasattr(value, "to_local"):
        original(target, value, where)
    else:
        local.copy_(value[: local.shape[0], : local.shape[1]])


def _kept(original: Any, target: Any, value: Any, where: str) -> None:
    if not hasattr(value, "to_local"):
        original(target, value, where)


def _any_shape(original: Any, target: Any, value: Any, where: str) -> None:
    if tuple(value.shape) == tuple(target.shape):
        original(target, value, where)


def _local_rows(table: Any, index: int, shard: Shard, seed: int) -> torch.Tensor:
    from twinproof.kvstore.options import Initializer, initial_weights

    bound = table.num_embeddings**-0.5
    ids = torch.arange(min(INIT_ROWS, shard.rows[1] - shard.rows[0]))
    made = initial_weights(Initializer.uniform(-bound, bound), seed, index, ids, shard.width, table.dtype)
    return made.contiguous()


def _seed_forgotten(original: Any, module: Any, collection: Any, seed: int) -> Any:
    return original(module, collection, 0)


PLANTED = (
    shared(
        "seed_of_dense_tables_forgotten",
        "Data-parallel tables are made from another seed.",
        ("PIPE-108",),
        "twinproof.pipeline.sharded:ShardedEmbeddingBagCollection._make_tables",
        _seed_forgotten,
    ),
    shared(
        "step_not_loaded",
        "The step begins again after a load.",
        ("PIPE-060", "PIPE-146"),
        f"{STATE}.load_optimizer_state_dict",
        _step_lost,
    ),
    shared(
        "whole_tensor_cut_at_the_beginning",
        "A whole tensor gives every rank its first rows.",
        ("PIPE-059",),
        "twinproof.pipeline.statedict:copy_into",
        _first_rows,
    ),
    shared(
        "saved_parts_not_taken",
        "Parts that were saved are not loaded.",
        ("PIPE-059",),
        "twinproof.pipeline.statedict:copy_into",
        _kept,
    ),
    shared(
        "states_of_other_blocks_skipped",
        "States of other column blocks are left out in silence.",
        ("PIPE-107",),
        "twinproof.pipeline.statedict:copy_into",
        _any_shape,
    ),
    shared_swap(
        "first_weights_by_local_row",
        "First weights depend on the plan.",
        ("PIPE-108",),
        "twinproof.pipeline.sharded:initial_shard",
        _local_rows,
    ),
)
