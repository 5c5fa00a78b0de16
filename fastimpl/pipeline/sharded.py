"""Embedding tables cut among ranks: each rank is sent what it looks up, and sends back what it looked up.

A step costs two collectives forward (ids, pooled columns) and one backward, whatever the plan mixes, and one small
exchange of sizes that modules share (``fuse_input_dists``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from fastimpl import ops
from fastimpl.pipeline.bags import TableBatchedEmbeddingBags
from fastimpl.pipeline.input_dist import InputDist, Segments, WayHome
from fastimpl.pipeline.prefetch import PrefetchedBags, prefetch
from fastimpl.pipeline.route import Cut, Route
from twinproof.pipeline.awaitables import Awaitable
from twinproof.pipeline.data import KeyedJaggedTensor
from twinproof.pipeline.jagged import Bags
from twinproof.pipeline.sharded_base import ShardedContext, ShardedEmbeddingBagCollectionBase

__all__ = ["ShardedEmbeddingBagCollection"]


class ShardedEmbeddingBagCollection(ShardedEmbeddingBagCollectionBase):
    __doc__ = ShardedEmbeddingBagCollectionBase.__doc__

    bags_type = TableBatchedEmbeddingBags
    key_value_type = PrefetchedBags

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.route = Route(self.rank_groups, len(self.feature_names))
        self.segment_count = len(self.feature_names) + self.world_size * sum(len(c.features) for c in self.route.cuts)

    def input_dist(self, ctx: ShardedContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[list[Bags]]]:
        try:
            ctx.bags = self._local_bags(features)
            segments = self._segments(ctx.bags.detached(), wants_gradient=ctx.bags.wants_gradient())
            return InputDist(self, ctx, segments)
        except Exception as error:
            if self.world_size == 1:
                raise
            # The others wait for this rank: they are told, and all raise.
            return InputDist(self, ctx, None, error)

    def prefetch_rows(self, ctx: ShardedContext, dist_input: list[Bags]) -> None:
        """Read the rows of key-value tables that ``compute`` will want; the context holds them, for one batch."""
        ctx.prefetched = prefetch([group.module for group in self.groups], dist_input)

    def _segments(self, bags: Bags, *, wants_gradient: bool) -> Segments:
        """Every feature whole, then the cut ones by rank."""
        stride = (bags.offsets.numel() - 1) // len(self.feature_names)
        positions = torch.arange(bags.indices.numel()) if wants_gradient else None
        result = Segments(bags.offsets.diff(), bags.indices.contiguous(), bags.weights, stride, positions)
        for cut in self.route.cuts:
            part = self._cut(cut, self._features_of(bags, cut.features), stride)
            if positions is not None:
                where = self._features_of(Bags(positions, bags.offsets), cut.features).indices
                part = replace(part, positions=where[part.positions])
            result = result.then(part)
        return result

    def _cut(self, cut: Cut, bags: Bags, stride: int) -> Segments:
        if cut.kind == "row_wise":
            # Blocks as ``shards_of`` cuts them.
            sizes = [-(-self.tables[table].num_embeddings // self.world_size) for table in cut.tables]
            blocks: torch.Tensor | None = torch.tensor(sizes)
            owners = None
        else:
            blocks, owners = None, self.owner_of(bags.indices, cut.tables[0])
        lengths, ids, weights, positions = ops.bucketize(
            bags.indices.contiguous(), bags.offsets, bags.weights, blocks, self.world_size, destinations=owners
        )
        return Segments(lengths, ids, weights, stride, positions)

    def _exchange(self, ctx: ShardedContext, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        strides, stride = ctx.strides, ctx.strides[self.rank]
        widths = [sum(group.width for group in groups) for groups in self.rank_groups]
        mine = outputs[0] if len(outputs) == 1 else torch.cat([torch.zeros(sum(strides), 0), *outputs], dim=1)
        sent = [samples * widths[self.rank] for samples in strides]
        flat = self._all_to_all(mine.reshape(-1), [stride * width for width in widths], sent)
        parts = torch.split(flat, [stride * width for width in widths])
        blocks = [part.view(stride, width) for part, width in zip(parts, widths, strict=True)]
        return self.columns.assemble(blocks, ctx.bags)

    def _exchange_back(self, ctx: ShardedContext, grad: torch.Tensor) -> list[torch.Tensor]:
        strides = ctx.strides
        widths = [sum(group.width for group in groups) for groups in self.rank_groups]
        blocks = self.columns.take_apart(grad, ctx.bags, self.world_size)
        words = blocks[0].reshape(-1) if len(blocks) == 1 else torch.cat([block.reshape(-1) for block in blocks])
        sent = [strides[self.rank] * width for width in widths]
        flat = self._all_to_all(words, [samples * widths[self.rank] for samples in strides], sent)
        mine = flat.view(sum(strides), widths[self.rank])
        return list(torch.split(mine, [group.width for group in self.groups], dim=1))

    def _exchange_weight_gradients(self, ctx: ShardedContext, grads: torch.Tensor) -> torch.Tensor:
        way: WayHome = ctx.way_home
        home = self._all_to_all(way.by_rank(grads), way.sent, way.received)
        total = torch.zeros(ctx.bags.indices.numel())
        # Without positions nobody asks for the sums.
        return total if way.positions is None else total.index_add_(0, way.positions, home)

    def _all_to_all(self, data: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        if self.world_size == 1:
            return data
        result = torch.empty(sum(received), dtype=data.dtype, device=data.device)
        dist.all_to_all_single(result, data.contiguous(), received, sent, group=self.process_group)
        return result

    def _sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        if self.world_size == 1:
            return torch.zeros_like(value) + value
        # A rank adds one block of all ranks' values, in ascending rank, and every rank gets every block: the bytes of
        # an all-reduce, without its order of sums.
        block = -(-value.numel() // self.world_size)
        padded = torch.nn.functional.pad(value, (0, block * self.world_size - value.numel()))
        parts = torch.empty_like(padded)
        dist.all_to_all_single(parts, padded, group=self.process_group)
        total = torch.zeros(block, dtype=value.dtype, device=value.device)
        for part in torch.split(parts, block):
            total += part
        result = torch.empty_like(padded)
        # torch 2.13 renames it and warns about the old name; 2.11 does not know the new one.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(result, total, group=self.process_group)
        return result[: value.numel()]
