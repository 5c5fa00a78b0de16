"""Each rank is sent what it looks up, and sends back what it looked up: ``Exchange`` by planned all-to-all.

A step costs two collectives forward (ids, pooled columns) and one backward, whatever the plan mixes, and one small
exchange of sizes that modules share (``fuse_input_dists``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from fastimpl import ops
from fastimpl.pipeline.columns import Columns
from fastimpl.pipeline.input_dist import InputDist, Segments, WayHome
from fastimpl.pipeline.lookups import NativeLookup, TableBatchedEmbeddingBags
from fastimpl.pipeline.prefetch import PrefetchedRows, prefetch
from fastimpl.pipeline.route import Cut, Route
from twinproof.pipeline import sharded
from twinproof.pipeline.jagged import Bags
from twinproof.pipeline.sharding import Awaitable, Layout, ShardedContext

__all__ = ["AllToAll", "ShardedEmbeddingBagCollection"]


class AllToAll:
    """``Exchange`` that sends exactly what is needed."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self._columns = layout, Columns(layout)
        self._route, self._late_route = Route(layout), Route(layout, cuts_all=True)

    def input_dist(self, ctx: ShardedContext, select: Callable[[], Bags]) -> Awaitable[Awaitable[list[Bags]]]:
        """Lengths and ids of exactly the features that another rank holds."""
        route = self._route
        try:
            ctx.bags = select()
            # Where the host has yet to hear of the ids, it does not know either how many each feature has.
            route = self._late_route if ctx.late_checks else self._route
            segments = self._segments(route, ctx.bags.detached(), wants_gradient=ctx.bags.wants_gradient())
            return InputDist(self.layout, route, ctx, segments)
        except Exception as error:
            if self.layout.world_size == 1:
                raise
            # The others wait for this rank: they are told, and all raise.
            return InputDist(self.layout, route, ctx, None, error)

    def _segments(self, route: Route, bags: Bags, *, wants_gradient: bool) -> Segments:
        """Every feature whole, then the cut ones by rank."""
        weights = None if bags.weights is None else bags.weights.contiguous()
        bags = Bags(bags.indices.contiguous(), bags.offsets.contiguous(), weights, bags.sizes)
        stride = (bags.offsets.numel() - 1) // len(self.layout.feature_tables)
        positions = torch.arange(bags.indices.numel(), device=bags.indices.device) if wants_gradient else None
        result = Segments(bags.offsets.diff(), bags.indices, bags.weights, stride, positions)
        for cut in route.cuts:
            part = self._cut(route, cut, self.layout.features(bags, cut.features), stride)
            if positions is not None:
                where = self.layout.features(Bags(positions, bags.offsets), cut.features).indices
                part = replace(part, positions=where[part.positions])
            result = result.then(part)
        return result

    def _cut(self, route: Route, cut: Cut, bags: Bags, stride: int) -> Segments:
        blocks, owners = None, None
        if cut.block_rows is None:
            find = self.layout.checked_owners if route.cuts_all else self.layout.owners
            owners = find(bags.indices, cut.table)
        else:
            blocks = route.on(bags.indices.device).block_rows[cut.key]
        lengths, ids, weights, positions = ops.bucketize(
            bags.indices, bags.offsets, bags.weights, blocks, self.layout.world_size, destinations=owners
        )
        return Segments(lengths, ids, weights, stride, positions)

    def columns(self, ctx: ShardedContext, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Each rank's columns go home to the rank of their samples."""
        strides, stride, widths = ctx.strides, ctx.strides[self.layout.rank], self._columns.widths
        none = torch.zeros(sum(strides), 0, dtype=torch.float32, device=ctx.bags.offsets.device)
        mine = outputs[0] if len(outputs) == 1 else torch.cat([none, *outputs], dim=1)
        sent = [samples * widths[self.layout.rank] for samples in strides]
        flat = self._all_to_all(mine.reshape(-1), [stride * width for width in widths], sent)
        parts = torch.split(flat, [stride * width for width in widths])
        blocks = [part.view(stride, width) for part, width in zip(parts, widths, strict=True)]
        return self._columns.assemble(blocks, ctx.bags)

    def gradients(self, ctx: ShardedContext, grad: torch.Tensor) -> list[torch.Tensor]:
        """Each rank's part of the gradient goes to the rank that looked it up."""
        strides, widths = ctx.strides, self._columns.widths
        words = self._columns.take_apart(grad, ctx.bags, self.layout.world_size)
        sent = [strides[self.layout.rank] * width for width in widths]
        flat = self._all_to_all(words, [samples * widths[self.layout.rank] for samples in strides], sent)
        mine = flat.view(sum(strides), widths[self.layout.rank])
        return list(torch.split(mine, [group.width for group in self.layout.groups], dim=1))

    def weight_gradients(self, ctx: ShardedContext, grads: torch.Tensor) -> torch.Tensor:
        """The gradient of each weight goes home, the way that the weight has come."""
        way: WayHome = ctx.way_home
        home = self._all_to_all(way.by_rank(grads), way.sent, way.received)
        total = grads.new_zeros(ctx.bags.indices.numel())
        # Without positions nobody asks for the sums.
        return total if way.positions is None else total.index_add_(0, way.positions, home)

    def _all_to_all(self, data: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        if self.layout.world_size == 1:
            return data
        result = torch.empty(sum(received), dtype=data.dtype, device=data.device)
        dist.all_to_all_single(result, data.contiguous(), received, sent, group=self.layout.process_group)
        return result

    def sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """A block of all values on each rank, added there, and every block to every rank."""
        if self.layout.world_size == 1:
            return torch.zeros_like(value) + value
        # A rank adds one block of all ranks' values, in ascending rank, and every rank gets every block: the bytes of
        # an all-reduce, without its order of sums.
        block = -(-value.numel() // self.layout.world_size)
        padded = torch.nn.functional.pad(value, (0, block * self.layout.world_size - value.numel()))
        parts = torch.empty_like(padded)
        dist.all_to_all_single(parts, padded, group=self.layout.process_group)
        total = torch.zeros(block, dtype=value.dtype, device=value.device)
        for part in torch.split(parts, block):
            total += part
        result = torch.empty_like(padded)
        # torch 2.13 renames it and warns about the old name; 2.11 does not know the new one.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(result, total, group=self.layout.process_group)
        return result[: value.numel()]


class ShardedEmbeddingBagCollection(
    sharded.ShardedEmbeddingBagCollection,
    bags=TableBatchedEmbeddingBags,
    engine=NativeLookup,
    exchange=AllToAll,
    rows=PrefetchedRows,
):
    @contextlib.contextmanager
    def limited_lookups(self, max_blocks: int) -> Iterator[None]:
        """Pool with grids of at most so many blocks inside, which leaves room on the device."""
        engines = [self._engine, *(lookup._engine for lookup in self.lookups)]
        for engine in engines:
            engine.max_blocks = max_blocks
        try:
            yield
        finally:
            for engine in engines:
                engine.max_blocks = 0

    def prefetch_rows(self, ctx: ShardedContext, dist_input: list[Bags]) -> None:
        """Read the rows of key-value tables that ``compute`` will want; the context holds them, for one batch."""
        ctx.prefetched = prefetch(self.lookups, dist_input)
