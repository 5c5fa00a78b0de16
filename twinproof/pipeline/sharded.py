"""Embedding tables cut among ranks, with the optimizer in the backward: what every exchange must amount to.

Here every rank is told everything. ``fastimpl`` sends each rank what it needs, and no more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from twinproof.kvstore.statedict import gathered
from twinproof.pipeline.awaitables import Awaitable, Ready
from twinproof.pipeline.bags import TableBatchedEmbeddingBags
from twinproof.pipeline.data import KeyedJaggedTensor
from twinproof.pipeline.jagged import Bags, joined, offsets_of
from twinproof.pipeline.lookups import Group
from twinproof.pipeline.sharded_base import ShardedContext, ShardedEmbeddingBagCollectionBase
from twinproof.pipeline.shards import Shard

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
        def make() -> tuple[Bags, bool]:
            ctx.bags = self._local_bags(features)
            return ctx.bags.detached(), ctx.bags.wants_gradient()

        found = gathered(make, self.process_group)
        everyone = [bags for bags, _ in found]
        ctx.strides = [(bags.offsets.numel() - 1) // len(self.feature_names) for bags in everyone]
        if any(wanted for _, wanted in found):
            ctx.way_home = self._way_home(everyone)
        return Ready(Ready(self._parts(everyone, self.groups)))

    def _parts(self, everyone: Sequence[Bags], groups: Sequence[Group]) -> list[Bags]:
        """What the groups look up of all ranks' bags."""
        count = len(self.feature_names)
        whole = [joined([bags.feature(index, count) for bags in everyone]) for index in range(count)]
        return [joined([self._part(whole[slot.feature], slot.shard) for slot in group.slots]) for group in groups]

    def _way_home(self, everyone: Sequence[Bags]) -> tuple[list[torch.Tensor], list[int]]:
        """Which ids each rank looks up, in its order, as numbers among all ranks' ids; and where each rank's begin."""
        begins: list[int] = offsets_of(torch.tensor([bags.indices.numel() for bags in everyone])).tolist()
        # A number takes the way of its id's weight.
        numbered = [
            Bags(bags.indices, bags.offsets, torch.arange(begin, begin + bags.indices.numel()))
            for bags, begin in zip(everyone, begins, strict=False)
        ]
        none = torch.empty(0, dtype=torch.int64)
        found = [[part.weights for part in self._parts(numbered, groups)] for groups in self.rank_groups]
        return [torch.cat([none, *(numbers for numbers in some if numbers is not None)]) for some in found], begins

    def _part(self, bags: Bags, shard: Shard) -> Bags:
        """What one shard looks up of one feature's bags."""
        if shard.kind == "row_wise":
            return _kept(bags, (bags.indices >= shard.rows[0]) & (bags.indices < shard.rows[1]), shard.rows[0])
        if shard.kind == "key_value":
            return _kept(bags, self.owner_of(bags.indices, shard.table) == shard.rank, 0)
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

    def _exchange_weight_gradients(self, ctx: ShardedContext, grads: torch.Tensor) -> torch.Tensor:
        numbers, begins = ctx.way_home
        total = torch.zeros(begins[-1])
        for number, found in zip(numbers, gathered(lambda: grads, self.process_group), strict=True):
            total.index_add_(0, number, found)
        return total[begins[self.rank] : begins[self.rank + 1]]

    def _sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        parts = gathered(lambda: value, self.process_group)
        total = torch.zeros_like(value)
        for part in parts:
            total = total + part
        return total
