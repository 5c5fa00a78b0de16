"""Faults that ``test_sharded`` must notice."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

from conformance.harness import fault, mutated, patched, wrap
from conformance.pipeline.planted.planting import exchanges, lookups


@fault(kills="PIPE-079", at=lookups("update"))
def row_state_of_whole_table(original: Any, engine: Any, tables: Any, *rest: Any) -> None:
    """A row's mean is over more columns than its block has."""
    before = [{name: state.clone() for name, state in table.states.items()} for table in tables]
    original(engine, tables, *rest)
    for table, states in zip(tables, before, strict=True):
        for name, old in states.items():
            state = table.states[name]
            state.copy_(old + (state - old) * 0.5)


@fault(kills=("PIPE-078", "PIPE-077"), at=exchanges("gradients"))
def gradient_summed_over_ranks(original: Any, exchange: Any, ctx: Any, grad: torch.Tensor) -> Any:
    """Gradients are sums over ranks, not means."""
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


partial_sums_descending = patched(
    "Partial sums are added by descending rank.",
    wrap("refimpl.pipeline:ToldEverything.assembled", _descending),
    wrap("fastimpl.pipeline.columns:Columns.assemble", _descending_places),
    kills="PIPE-077",
)


@fault(kills=("PIPE-077", "PIPE-112"), at="twinproof.pipeline.sharding:Layout.means")
def cut_mean_not_divided(original: Any, layout: Any) -> list[int]:
    """Means of row-wise tables are sums."""
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


column_blocks_on_top = patched(
    "Column blocks all begin at 0.",
    wrap("refimpl.pipeline:ToldEverything._slots", _first_columns),
    wrap("fastimpl.pipeline.columns:Columns._places", _first_places),
    kills="PIPE-078",
)


def _last_rank_missed(original: Any, *given: Any) -> Any:
    blocks = original(*given)
    return [*blocks[:-1], torch.zeros_like(blocks[-1])] if len(blocks) > 1 else blocks


def _last_words_missed(original: Any, columns: Any, grad: torch.Tensor, *given: Any) -> torch.Tensor:
    words: torch.Tensor = original(columns, grad, *given)
    if len(columns.widths) > 1:
        words[grad.shape[0] * sum(columns.widths[:-1]) :] = 0
    return words


last_rank_gets_no_gradient = patched(
    "The last rank's tables stay.",
    wrap("refimpl.pipeline:ToldEverything.taken_apart", _last_rank_missed),
    wrap("fastimpl.pipeline.columns:Columns.take_apart", _last_words_missed),
    kills="PIPE-080",
)


@fault(kills="PIPE-084", at=exchanges("columns"))
def columns_sent_in_half(original: Any, exchange: Any, ctx: Any, outputs: Any) -> torch.Tensor:
    """Pooled columns travel in bfloat16."""
    result: torch.Tensor = original(exchange, ctx, [part.to(torch.bfloat16).float() for part in outputs])
    return result


@fault(kills="PIPE-082", at="twinproof.pipeline.sharded:_Exchanged.backward")
def step_not_counted_without_tables(original: Any, ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
    """A rank that holds no table counts no steps."""
    ctx.optimizer.step_count += bool(ctx.exchange.layout.groups)
    parts = ctx.exchange.gradients(ctx.context, grads[0].contiguous())
    return None, None, None, None, None, *parts, *(torch.zeros_like(each) for each in ctx.passing)


@fault(kills="PIPE-086", at="fastimpl.pipeline.exchange:AllToAll._cut")
def weights_of_cut_bags_stay(original: Any, exchange: Any, route: Any, cut: Any, bags: Any, stride: int) -> Any:
    """Weights of row-wise bags do not move with their ids."""
    found = original(exchange, route, cut, bags, stride)
    return dataclasses.replace(found, weights=bags.weights)


@fault(kills=("PIPE-078", "PIPE-086"), at="fastimpl.pipeline.input_dist:InputDist._arrange")
def received_ids_not_in_order(original: Any, dist: Any, requests: Any, sizes: Any, ends: Any) -> Any:
    """Received ids are not brought into the order of features."""
    # Received ids of each feature begin with another than the first rank's.
    found = original(dist, requests, sizes, ends)
    for group, bags in zip(dist.layout.groups, found, strict=True):
        count = len(group.slots)
        bags.indices = torch.cat([bags.feature(f, count).indices.roll(1) for f in range(count)])
    return found


refused_backwards_are_counted = patched(
    "A backward of a cut collection that its lookups refuse is a step.",
    mutated("twinproof.pipeline.sharded:_Exchanged.backward", "tuple(ctx.saved_tensors)", "pass"),
    kills="PIPE-760",
)
