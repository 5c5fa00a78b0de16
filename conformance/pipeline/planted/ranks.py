"""Faults in what moves between ranks."""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any

import torch

from conformance.harness import PlantedBug, swap, wrap
from conformance.pipeline.planted.planting import BOTH, exchanges, fast, shared, shared_swap

_SHARDED = "twinproof.pipeline.sharded"


def _not_mean(original: Any, exchange: Any, ctx: Any, grad: torch.Tensor) -> Any:
    return [part * exchange.layout.world_size for part in original(exchange, ctx, grad)]


def _turned(layout: Any) -> Any:
    turned = copy.copy(layout)
    turned.rank_groups = layout.rank_groups[::-1]
    return turned


def _descending(original: Any, exchange: Any, blocks: Any, bags: Any) -> torch.Tensor:
    """The ranks' blocks in descending order, with their places."""
    layout, exchange.layout = exchange.layout, _turned(exchange.layout)
    try:
        result: torch.Tensor = original(exchange, list(blocks)[::-1], bags)
    finally:
        exchange.layout = layout
    return result


def _descending_places(original: Any, columns: Any, blocks: Any, bags: Any) -> torch.Tensor:
    places = columns.places
    columns.places = places[::-1]
    try:
        result: torch.Tensor = original(columns, list(blocks)[::-1], bags)
    finally:
        columns.places = places
    return result


def _no_means(original: Any, layout: Any) -> list[int]:
    return []


def _first_columns(original: Any, exchange: Any, rank: int) -> Any:
    return [
        (slot, slice(begin, begin + slot.shard.width), here)
        for slot, _, here in original(exchange, rank)
        for begin in [exchange.layout.begins[slot.feature]]
    ]


def _first_places(original: Any, columns: Any, rank: int) -> Any:
    places, at = [], 0
    for slot in columns.slots[rank]:
        begin, width = columns.begins[slot.feature], slot.shard.width
        places.append((slot.is_partial, slice(begin, begin + width), slice(at, at + width)))
        at += width
    return places


def _last_rank_missed(original: Any, *given: Any) -> Any:
    blocks = original(*given)
    return [*blocks[:-1], torch.zeros_like(blocks[-1])] if len(blocks) > 1 else blocks


def _in_half(original: Any, exchange: Any, ctx: Any, outputs: Any) -> torch.Tensor:
    result: torch.Tensor = original(exchange, ctx, [part.to(torch.bfloat16).float() for part in outputs])
    return result


def _local_only(original: Any, exchange: Any, value: torch.Tensor) -> torch.Tensor:
    original(exchange, value)
    return value


def _summed(original: Any, exchange: Any, value: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = original(exchange, value) * exchange.layout.world_size
    return total


def _only_with_tables(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
    ctx.optimizer.step_count += bool(ctx.exchange.layout.groups)
    parts = ctx.exchange.gradients(ctx.context, grads[0].contiguous())
    return None, None, None, None, None, *parts, *(torch.zeros_like(each) for each in ctx.passing)


def _group_counts_more(original: Any, exchange: Any, ctx: Any, grad: torch.Tensor) -> Any:
    return original(exchange, ctx, grad if exchange.layout.process_group is None else grad * 0.5)


def _ignored(original: Any, bags: Any, counts: Any, names: Any, bounds_check: str, engine: Any) -> Any:
    return original(bags, counts, names, "ignore", engine)


def _by_id(original: Any, kind: Any, ids: torch.Tensor, table: Any, sharding: Any, world: int) -> torch.Tensor:
    owners: torch.Tensor = (ids // 2).remainder(world)
    return owners


def _weights_stay(original: Any, exchange: Any, cut: Any, bags: Any, stride: int) -> Any:
    from dataclasses import replace

    found = original(exchange, cut, bags, stride)
    return replace(found, weights=bags.weights)


def _by_rank_first(original: Any, dist: Any, requests: Any, sizes: Any, ends: Any) -> Any:
    """Received ids of each feature begin with another than the first rank's."""
    found = original(dist, requests, sizes, ends)
    for group, bags in zip(dist.layout.groups, found, strict=True):
        count = len(group.slots)
        bags.indices = torch.cat([bags.feature(f, count).indices.roll(1) for f in range(count)])
    return found


def _stays_divided(original: Any, exchange: Any, ctx: Any, grads: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = original(exchange, ctx, grads) / exchange.layout.world_size
    return found


def _none_without_tables(original: Any, exchange: Any, ctx: Any, grads: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = original(exchange, ctx, grads)
    return found if exchange.layout.groups else torch.zeros_like(found)


def _by_slot(original: Any, way: Any, grads: torch.Tensor) -> torch.Tensor:
    return grads


def _weighed_again(original: Any, module: Any, bags: Any, grad: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = original(module, bags, grad) * bags.weights
    return found


@contextlib.contextmanager
def _in_both(fault: Any, method: str, places: Any, other: str) -> Any:
    """The same fault, in the words of either program: of ``ToldEverything`` and of ``Columns``."""
    with (
        wrap(f"refimpl.pipeline:ToldEverything.{method}", fault),
        wrap(f"fastimpl.pipeline.columns:Columns.{other}", places),
    ):
        yield


PLANTED = (
    exchanges(
        "gradients_of_weights_stay_divided",
        "What comes home is divided by the number of ranks.",
        ("PIPE-113",),
        "weight_gradients",
        _stays_divided,
    ),
    exchanges(
        "no_gradients_of_weights_without_tables",
        "A rank that holds no table gets no gradient of its weights.",
        ("PIPE-114",),
        "weight_gradients",
        _none_without_tables,
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
    exchanges(
        "gradient_summed_over_ranks",
        "Gradients are sums over ranks, not means.",
        ("PIPE-078", "PIPE-077"),
        "gradients",
        _not_mean,
    ),
    PlantedBug(
        "partial_sums_descending",
        "Partial sums are added by descending rank.",
        ("PIPE-077",),
        BOTH,
        functools.partial(_in_both, _descending, "assembled", _descending_places, "assemble"),
    ),
    shared(
        "cut_mean_not_divided",
        "Means of row-wise tables are sums.",
        ("PIPE-077", "PIPE-112"),
        "twinproof.pipeline.sharding:Layout.means",
        _no_means,
    ),
    PlantedBug(
        "column_blocks_on_top",
        "Column blocks all begin at 0.",
        ("PIPE-078",),
        BOTH,
        functools.partial(_in_both, _first_columns, "_slots", _first_places, "_places"),
    ),
    PlantedBug(
        "last_rank_gets_no_gradient",
        "The last rank's tables stay.",
        ("PIPE-080",),
        BOTH,
        functools.partial(_in_both, _last_rank_missed, "taken_apart", _last_rank_missed, "take_apart"),
    ),
    exchanges("columns_sent_in_half", "Pooled columns travel in bfloat16.", ("PIPE-084",), "columns", _in_half),
    exchanges(
        "replicas_keep_own_gradient",
        "Replicated parameters get their own rank's gradient, and drift apart.",
        ("PIPE-087", "PIPE-106"),
        "sum_over_ranks",
        _local_only,
    ),
    exchanges("replicas_gradient_summed", "Their gradient is a sum.", ("PIPE-087",), "sum_over_ranks", _summed),
    shared_swap(
        "step_not_counted_without_tables",
        "A rank that holds no table counts no steps.",
        ("PIPE-082",),
        f"{_SHARDED}:_Exchanged.backward",
        staticmethod(_only_with_tables),
    ),
    exchanges(
        "group_of_one_differs",
        "One rank scales as two.",
        ("PIPE-090",),
        "gradients",
        _group_counts_more,
    ),
    shared(
        "bad_ids_sent_as_zero", "A bad id of one rank is row 0.", ("PIPE-034",), f"{_SHARDED}:check_bounds", _ignored
    ),
    shared(
        "owner_by_id",
        "The owner of a key is found without its bucket.",
        ("PIPE-112",),
        "twinproof.pipeline.sharding:KeyValue.owners",
        _by_id,
    ),
    fast(
        "weights_of_cut_bags_stay",
        "Weights of row-wise bags do not move with their ids.",
        ("PIPE-086",),
        wrap("fastimpl.pipeline.exchange:AllToAll._cut", _weights_stay),
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
