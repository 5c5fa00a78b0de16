"""Embedding tables cut among ranks, with the optimizer in the backward: what every exchange must amount to.

Here every rank is told everything. ``fastimpl`` sends each rank what it needs, and no more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from refimpl.kvstore.state import gathered
from refimpl.pipeline.awaitables import Awaitable, Ready
from refimpl.pipeline.bags import TableBatchedEmbeddingBags
from refimpl.pipeline.data import KeyedJaggedTensor
from refimpl.pipeline.jagged import Bags, joined, offsets_of
from refimpl.pipeline.sharded_base import ShardedContext, ShardedEmbeddingBagCollectionBase
from refimpl.pipeline.shards import Shard

__all__ = ["ShardedEmbeddingBagCollection"]


def _kept(bags: Bags, keep: torch.Tensor, first_row: int) -> Bags:
    """The bags without the ids that are not kept, and rows counted from ``first_row``."""
    lengths = torch.zeros(bags.offsets.numel() - 1, dtype=torch.int64).index_add_(0, bags.bag_of_each(), keep.long())
    weights = None if bags.weights is None else bags.weights[keep]
    return Bags(bags.indices[keep] - first_row, offsets_of(lengths), weights)


class ShardedEmbeddingBagCollection(ShardedEmbeddingBagCollectionBase):
    __doc__ = ShardedEmbeddingBagCollectionBase.__doc__

    bags_type = TableBatchedEmbeddingBags

    def input_dist(self, ctx: ShardedContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[list[Bags]]]:
        everyone: list[Bags] = gathered(lambda: self._local_bags(features), self.process_group)
        ctx.bags = everyone[self.rank]
        count = len(self.feature_names)
        ctx.strides = [(bags.offsets.numel() - 1) // count for bags in everyone]
        whole = [joined([bags.feature(index, count) for bags in everyone]) for index in range(count)]
        parts = [joined([self._part(whole[slot.feature], slot.shard) for slot in group.slots]) for group in self.groups]
        return Ready(Ready(parts))

    def _part(self, bags: Bags, shard: Shard) -> Bags:
        """What one shard looks up of one feature's bags."""
        if shard.kind == "row_wise":
            return _kept(bags, (bags.indices >= shard.rows[0]) & (bags.indices < shard.rows[1]), shard.rows[0])
        if shard.kind == "key_value":
            return _kept(bags, self.owner_of(bags.indices, shard.table) == self.rank, 0)
        return bags

    def _exchange(self, ctx: ShardedContext, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        empty = torch.zeros(sum(ctx.strides), 0)
        everyone = gathered(lambda: torch.cat([empty, *outputs], dim=1), self.process_group)
        begin = sum(ctx.strides[: self.rank])
        return self.columns.assemble([whole[begin : begin + ctx.strides[self.rank]] for whole in everyone], ctx.bags)

    def _exchange_back(self, ctx: ShardedContext, grad: torch.Tensor) -> list[torch.Tensor]:
        everyone = gathered(lambda: self.columns.take_apart(grad, ctx.bags, self.world_size), self.process_group)
        mine = torch.cat([blocks[self.rank] for blocks in everyone])
        return list(torch.split(mine, [group.width for group in self.groups], dim=1))

    def _sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        parts = gathered(lambda: value, self.process_group)
        total = torch.zeros_like(value)
        for part in parts:
            total = total + part
        return total
