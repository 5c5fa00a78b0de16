"""Faults in what moves between ranks."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import swap, wrap
from conformance.pipeline.planted.planting import exported, fast, shared, shared_swap
from refimpl.optimizers import row_sum

COLUMNS = "twinproof.pipeline.columns:Columns"
SHARDED = "ShardedEmbeddingBagCollection"
_BASE = "twinproof.pipeline.sharded_base"


def _not_mean(original: Any, columns: Any, grad: torch.Tensor, bags: Any, divisor: int) -> Any:
    return original(columns, grad, bags, 1)


def _descending(original: Any, columns: Any, blocks: Any, bags: Any) -> torch.Tensor:
    """Partial sums of the ranks in descending order: the blocks' places are turned with them."""
    places = columns.places
    columns.places = places[::-1]
    try:
        result: torch.Tensor = original(columns, list(blocks)[::-1], bags)
    finally:
        columns.places = places
    return result


def _no_means(original: Any, columns: Any) -> list[int]:
    return []


def _first_columns(original: Any, columns: Any, rank: int) -> Any:
    from twinproof.pipeline.lookups import is_partial

    places, at = [], 0
    for slot in columns.slots[rank]:
        begin, width = columns.begins[slot.feature], slot.shard.width
        places.append((is_partial(slot.shard), slice(begin, begin + width), slice(at, at + width)))
        at += width
    return places


def _last_rank_missed(original: Any, columns: Any, grad: torch.Tensor, bags: Any, divisor: int) -> Any:
    blocks = original(columns, grad, bags, divisor)
    return [*blocks[:-1], torch.zeros_like(blocks[-1])] if len(blocks) > 1 else blocks


def _in_half(original: Any, columns: Any, blocks: Any, bags: Any) -> torch.Tensor:
    result: torch.Tensor = original(columns, [block.to(torch.bfloat16).float() for block in blocks], bags)
    return result


def _local_only(original: Any, module: Any, value: torch.Tensor) -> torch.Tensor:
    original(module, value)
    return value


def _summed(original: Any, module: Any, value: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = original(module, value) * module.world_size
    return total


def _only_with_tables(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
    module = ctx.module
    module.fused_optimizer.step_count += bool(module.groups)
    parts = module._exchange_back(ctx.context, grads[0].contiguous())
    return None, None, None, None, *parts, *(torch.zeros_like(each) for each in ctx.passing)


def _group_counts_more(original: Any, module: Any, ctx: Any, grad: torch.Tensor) -> Any:
    return original(module, ctx, grad if module.process_group is None else grad * 0.5)


def _ignored(original: Any, bags: Any, counts: Any, names: Any, bounds_check: str, kernels: Any) -> Any:
    return original(bags, counts, names, "ignore", kernels)


def _by_id(original: Any, module: Any, ids: torch.Tensor, table: int) -> torch.Tensor:
    owners: torch.Tensor = (ids // 2).remainder(module.world_size)
    return owners


def _weights_stay(original: Any, module: Any, cut: Any, bags: Any, stride: int) -> Any:
    from dataclasses import replace

    found = original(module, cut, bags, stride)
    return replace(found, weights=bags.weights)


def _by_rank_first(original: Any, dist: Any, requests: Any, sizes: Any, ends: Any) -> Any:
    """Received ids of each feature begin with another than the first rank's."""
    found = original(dist, requests, sizes, ends)
    for group, bags in zip(dist._module.groups, found, strict=True):
        count = len(group.slots)
        bags.indices = torch.cat([bags.feature(f, count).indices.roll(1) for f in range(count)])
    return found


def _stays_divided(original: Any, module: Any, ctx: Any, grads: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = original(module, ctx, grads) / module.world_size
    return found


def _none_without_tables(original: Any, module: Any, ctx: Any, grads: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = original(module, ctx, grads)
    return found if module.groups else torch.zeros_like(found)


def _by_slot(original: Any, way: Any, grads: torch.Tensor) -> torch.Tensor:
    return grads


def _weighed_again(original: Any, module: Any, bags: Any, grad: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = row_sum(module._spread(bags, grad) * module._rows(bags))[:, 0]
    return found


PLANTED = (
    exported(
        "gradients_of_weights_stay_divided",
        "What comes home is divided by the number of ranks.",
        ("PIPE-113",),
        (f"{SHARDED}._exchange_weight_gradients", _stays_divided),
    ),
    exported(
        "no_gradients_of_weights_without_tables",
        "A rank that holds no table gets no gradient of its weights.",
        ("PIPE-114",),
        (f"{SHARDED}._exchange_weight_gradients", _none_without_tables),
    ),
    fast(
        "gradients_of_weights_sent_by_slot",
        "Gradients of weights go back in the order of lookups, not of ranks.",
        ("PIPE-113",),
        wrap("fastimpl.pipeline.input_dist:WayHome.by_rank", _by_slot),
    ),
    shared(
        "key_value_weights_weighed_again",
        "The gradient of a weight at a key-value table is multiplied by the weight.",
        ("PIPE-115",),
        "twinproof.pipeline.lookups:KeyValueBags._weight_gradients",
        _weighed_again,
    ),
    shared(
        "gradient_summed_over_ranks",
        "Gradients are sums over ranks, not means.",
        ("PIPE-078", "PIPE-077"),
        f"{COLUMNS}.take_apart",
        _not_mean,
    ),
    shared(
        "partial_sums_descending",
        "Partial sums are added by descending rank.",
        ("PIPE-077",),
        f"{COLUMNS}.assemble",
        _descending,
    ),
    shared(
        "cut_mean_not_divided",
        "Means of row-wise tables are sums.",
        ("PIPE-077", "PIPE-112"),
        f"{COLUMNS}._means",
        _no_means,
    ),
    shared(
        "column_blocks_on_top", "Column blocks all begin at 0.", ("PIPE-078",), f"{COLUMNS}._places", _first_columns
    ),
    shared(
        "last_rank_gets_no_gradient",
        "The last rank's tables stay.",
        ("PIPE-080",),
        f"{COLUMNS}.take_apart",
        _last_rank_missed,
    ),
    shared(
        "columns_sent_in_half", "Pooled columns travel in bfloat16.", ("PIPE-084",), f"{COLUMNS}.assemble", _in_half
    ),
    exported(
        "replicas_keep_own_gradient",
        "Replicated parameters get their own rank's gradient, and drift apart.",
        ("PIPE-087", "PIPE-106"),
        (f"{SHARDED}._sum_over_ranks", _local_only),
    ),
    exported(
        "replicas_gradient_summed", "Their gradient is a sum.", ("PIPE-087",), (f"{SHARDED}._sum_over_ranks", _summed)
    ),
    shared_swap(
        "step_not_counted_without_tables",
        "A rank that holds no table counts no steps.",
        ("PIPE-082",),
        "twinproof.pipeline.exchange:Exchange.backward",
        staticmethod(_only_with_tables),
    ),
    exported(
        "group_of_one_differs",
        "One rank scales as two.",
        ("PIPE-090",),
        (f"{SHARDED}._exchange_back", _group_counts_more),
    ),
    shared("bad_ids_sent_as_zero", "A bad id of one rank is row 0.", ("PIPE-034",), f"{_BASE}:check_bounds", _ignored),
    exported(
        "owner_by_id", "The owner of a key is found without its bucket.", ("PIPE-112",), (f"{SHARDED}.owner_of", _by_id)
    ),
    fast(
        "weights_of_cut_bags_stay",
        "Weights of row-wise bags do not move with their ids.",
        ("PIPE-086",),
        wrap("fastimpl.pipeline.sharded:ShardedEmbeddingBagCollection._cut", _weights_stay),
    ),
    fast(
        "received_ids_not_in_order",
        "Received ids are not brought into the order of features.",
        ("PIPE-078", "PIPE-086"),
        wrap("fastimpl.pipeline.input_dist:InputDist._arrange", _by_rank_first),
    ),
    fast(
        "every_module_exchanges_sizes",
        "Each module exchanges its own sizes.",
        ("PIPE-083",),
        swap("fastimpl.pipeline:fuse_input_dists", lambda dists: None),
    ),
)
