"""What sharded tables are, whatever moves between ranks: plan, lookups, replicated parameters, state.

Gradients are means over ranks, as DDP's and torchrec's: each rank's is divided by W before it is sent.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from twinproof.errors import ConfigError, UnsupportedError
from twinproof.kvstore.rows import bucket_of, rank_buckets
from twinproof.kvstore.statedict import rank_and_world
from twinproof.pipeline.awaitables import Awaitable, Ready
from twinproof.pipeline.bags import InBackwardOptimizer, check_bounds, lookup
from twinproof.pipeline.columns import Columns
from twinproof.pipeline.config import FusedOptimizer, TableSharding
from twinproof.pipeline.data import KeyedJaggedTensor, KeyedTensor
from twinproof.pipeline.eager import eagerly
from twinproof.pipeline.embeddings import EmbeddingBagCollectionBase, Pooled, table_module
from twinproof.pipeline.exchange import Exchange, Replicated, SentWeights, ShardedContext
from twinproof.pipeline.in_backward import carry_over, optimizer_in_backward
from twinproof.pipeline.jagged import Bags, joined
from twinproof.pipeline.lookups import KeyValueBags, groups_of, make_group
from twinproof.pipeline.processors import (
    FeatureProcessedEmbeddingBagCollection,
    position_processors,
    position_weights_of,
)
from twinproof.pipeline.selection import select
from twinproof.pipeline.sharded_state import CutTable, ShardedState
from twinproof.pipeline.shards import Shard, initial_shard, shards_of, slots_of

__all__ = ["ShardedContext", "ShardedEmbeddingBagCollectionBase"]


class ShardedEmbeddingBagCollectionBase(ShardedState, torch.nn.Module):
    """Tables cut among the ranks of a group, with the optimizer in the backward: torchrec's class, explicit plans only.

    Args:
        module: the collection to cut, the same on every rank; its weights are copied. On "meta" they are made here,
            the same for every plan. A feature-processed collection keeps its processors as dense parameters.
        plan: table -> ``table_wise(rank)``, ``row_wise()``, ``column_wise(ranks)``, ``data_parallel()`` or
            ``key_value(store, buckets)``.
        optimizer: what the backward runs on all but data-parallel tables, which are dense parameters. None is the one
            that ``apply_optimizer_in_backward`` gave the collection's parameters, or row-wise Adagrad.
        process_group: the ranks; None is all of them, or none where torch.distributed is not in use.
        bounds_check: see ``TableBatchedEmbeddingBags``; under "fatal" every rank raises.
        seed: of weights made here.

    Every rank makes the same calls in the same order. Ranks may have batches of different size, or none. One backward
    is one step; a row's gradient is the mean over ranks, its duplicates added by feature, rank, sample and position.
    Column-wise tables with an optimizer that keeps one value for a row keep one for each column block, and so differ
    from the uncut table by design (facts/pipeline.md 0.16). Weights of a batch that require a gradient get that of
    their own rank's loss, by one more exchange in every rank's backward; torchrec gives them none.

    Attributes:
        fused_optimizer: a handle for schedulers on the optimizer in the backward; see ``InBackwardOptimizer``.

    Raises:
        ConfigError: a plan or an optimizer that does not fit; feature processors on other than table- and column-wise
            tables. UnsupportedError: not a collection of bags.
        IdRangeError: an id outside its table.
    """

    bags_type: Any
    key_value_type: Any = KeyValueBags

    def __init__(
        self,
        module: Any,
        plan: Mapping[str, TableSharding],
        *,
        optimizer: FusedOptimizer | None = None,
        process_group: Any = None,
        bounds_check: str = "fatal",
        seed: int = 0,
    ) -> None:
        super().__init__()
        processed = isinstance(module, FeatureProcessedEmbeddingBagCollection)
        collection: Any = module._embedding_bag_collection if processed else module
        if not isinstance(collection, EmbeddingBagCollectionBase):
            expected = "an EmbeddingBagCollection of ours, which takes torchrec's configurations"
            raise UnsupportedError("not a collection that is cut here", got=type(module).__name__, expected=expected)
        self.feature_processors = position_processors(module._feature_processors) if processed else None
        self.tables, self.bounds_check = tuple(collection.embedding_bag_configs()), bounds_check
        self.plan = [plan[table.name] for table in self.tables] if set(plan) >= set(self._names()) else []
        self.process_group = process_group
        self.rank, self.world_size = rank_and_world(process_group)
        self.shards = shards_of(self.tables, plan, self.world_size)
        self._check_processed()
        self.is_weighted = collection.is_weighted() and not processed
        self.feature_names, self._embedding_names = list(collection.feature_names), collection.embedding_names()
        self._feature_tables = [i for i, table in enumerate(self.tables) for _ in table.feature_names]
        self.fused_optimizer = InBackwardOptimizer(self._optimizer_of(collection, optimizer))
        slots = slots_of(self.tables, self.shards)
        self.rank_groups = [groups_of(self.shards, slots, rank) for rank in range(self.world_size)]
        self._replicate(collection, seed)
        self.columns = Columns(self.tables, self.rank_groups, self._dense)

        def weight_of(shard: Shard) -> torch.Tensor:
            table = self.tables[shard.table]
            held: Any = collection.embedding_bags[table.name]
            whole: torch.Tensor = held.weight.detach()
            if whole.device.type == "meta":
                return initial_shard(table, shard.table, shard, seed)
            part = whole[slice(*shard.rows), slice(*shard.columns)]
            mine: torch.Tensor = self.bags_type.fresh(tuple(part.shape), part.dtype, part.device)
            return mine.copy_(part)

        self.groups = [
            make_group(
                group, self.tables, self.plan, (self.bags_type, self.key_value_type), self.fused_optimizer, weight_of
            )
            for group in self.rank_groups[self.rank]
        ]

    def _names(self) -> list[str]:
        return [table.name for table in self.tables]

    def _check_processed(self) -> None:
        kinds = {sharding.kind for sharding in self.plan}
        if self.feature_processors is not None and kinds - {"table_wise", "column_wise"}:
            raise ConfigError("feature processors need whole bags on one rank", got=sorted(kinds), where="plan")

    def _replicate(self, collection: Any, seed: int) -> None:
        """Parameters for the data-parallel tables."""
        self._dense = [i for i, sharding in enumerate(self.plan) if sharding.kind == "data_parallel"]
        self.embedding_bags = torch.nn.ModuleDict()
        for table in (self.tables[index] for index in self._dense):
            whole = collection.embedding_bags[table.name].weight.detach()
            if whole.device.type == "meta":
                shard = Shard(self.tables.index(table), 0, "", (0, table.num_embeddings), (0, table.embedding_dim))
                whole = initial_shard(table, shard.table, shard, seed)
            replica = table_module(table, "meta")
            replica.weight = torch.nn.Parameter(whole.clone())
            self.embedding_bags[table.name] = replica
            carry_over(collection.embedding_bags[table.name].weight, replica.weight)
        for table, sharding in zip(self.tables, self.plan, strict=True):
            if sharding.kind not in ("data_parallel", "key_value"):
                self.embedding_bags[table.name] = CutTable(self, table.name)

    def _optimizer_of(self, collection: Any, optimizer: FusedOptimizer | None) -> FusedOptimizer:
        """What was asked for: here, or by ``apply_optimizer_in_backward`` before."""
        carried = optimizer_in_backward([collection.embedding_bags[name].weight for name in self._names()])
        if carried is not None and optimizer is not None:
            raise ConfigError("an optimizer here, and another that the tables carry", got=(optimizer, carried))
        return optimizer or carried or FusedOptimizer()

    def create_context(self) -> ShardedContext:
        """A context for one batch."""
        return ShardedContext()

    @abstractmethod
    def input_dist(self, ctx: ShardedContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[list[Bags]]]:
        """Send ids to the ranks that look them up. The first ``wait`` ends the exchange of sizes, the second of ids.

        Returns the bags of each lookup of this rank, over all ranks' samples, feature-major and by rank.
        """

    def compute(self, ctx: ShardedContext, dist_input: list[Bags]) -> list[torch.Tensor]:
        """This rank's lookups: float32 [all ranks' samples, columns] each, then the data-parallel tables' own."""
        if self.feature_processors is not None:
            params = self.feature_processors.position_weights.values()
            # Gradients of samples were divided by W already, where they were sent.
            ctx.passing = Replicated.apply(self, 1, *params)  # type: ignore[no-untyped-call]
        if ctx.way_home is not None:
            dist_input = self._with_gradient(ctx, dist_input)
        outputs = [
            lookup(group.module, self._processed(ctx, group, bags))
            for group, bags in zip(self.groups, dist_input, strict=True)
        ]
        return [*outputs, *self._dense_outputs(ctx)]

    def output_dist(self, ctx: ShardedContext, output: list[torch.Tensor]) -> Awaitable[KeyedTensor]:
        """Pooled columns of all features for this rank's own samples."""
        count = len(self.groups)
        anchor = torch.zeros(0, requires_grad=True)
        exchanged = Exchange.apply(anchor, self, ctx, count, *output[:count], *ctx.passing)  # type: ignore[no-untyped-call]
        widths = {f: self.tables[t].embedding_dim for f, t in enumerate(self._feature_tables)}
        sent = [f for f, t in enumerate(self._feature_tables) if t not in self._dense]
        columns = dict(zip(sent, torch.split(exchanged, [widths[f] for f in sent], dim=1), strict=True))
        if self._dense:
            own = [f for f, t in enumerate(self._feature_tables) if t in self._dense]
            columns |= dict(zip(own, torch.split(output[count], [widths[f] for f in own], dim=1), strict=True))
        values = torch.cat([columns[f] for f in sorted(columns)], dim=1) if self._dense else exchanged
        return Ready(KeyedTensor(self._embedding_names, [widths[f] for f in sorted(widths)], values))

    def compute_and_output_dist(self, ctx: ShardedContext, dist_input: list[Bags]) -> Awaitable[KeyedTensor]:
        """Both, as torchrec names it."""
        return self.output_dist(ctx, self.compute(ctx, dist_input))

    @eagerly
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled rows of each feature for this rank's samples, float32 [B, D] side by side, by table, then feature."""
        ctx = self.create_context()
        dist_input = self.input_dist(ctx, features).wait().wait()
        return self.compute_and_output_dist(ctx, dist_input).wait()

    def owner_of(self, ids: torch.Tensor, table: int) -> torch.Tensor:
        """The rank of each id of a key-value table, int64 [n]: id -> bucket -> rank."""
        buckets = self.plan[table].buckets
        assert buckets is not None
        ends = [rank_buckets(buckets.total_count, self.world_size, rank)[1] for rank in range(self.world_size)]
        return torch.bucketize(bucket_of(ids, buckets), torch.tensor(ends), right=True)

    def _local_bags(self, features: KeyedJaggedTensor) -> Bags:
        """This rank's bags, checked before anything is sent."""
        bags = select(features, self.feature_names, weighted=self.is_weighted)
        bags = Bags(bags.indices.to(torch.int64), bags.offsets, bags.weights)
        kinds = [self.plan[table].kind for table in self._feature_tables]
        bounded = [f for f, kind in enumerate(kinds) if kind != "key_value"]
        if len(bounded) == len(kinds):
            counts = [self.tables[table].num_embeddings for table in self._feature_tables]
            names = [self.tables[table].name for table in self._feature_tables]
            return check_bounds(bags, counts, names, self.bounds_check, self.bags_type)
        return self._check_each(bags, bounded)

    def _check_each(self, bags: Bags, bounded: Sequence[int]) -> Bags:
        parts = [bags.feature(f, len(self._feature_tables)) for f in range(len(self._feature_tables))]
        for f in bounded:
            table = self.tables[self._feature_tables[f]]
            parts[f] = check_bounds(parts[f], [table.num_embeddings], [table.name], self.bounds_check, self.bags_type)
        return Bags(torch.cat([part.indices for part in parts]), bags.offsets, bags.weights)

    def _with_gradient(self, ctx: ShardedContext, received: Sequence[Bags]) -> list[Bags]:
        """The received bags, whose weights are those that the ranks sent, to autograd too."""
        anchor, weights = torch.zeros(0, requires_grad=True), [bags.weights for bags in received]
        token, *known = SentWeights.apply(anchor, self, ctx, ctx.bags.weights, *weights)  # type: ignore[no-untyped-call]
        ctx.passing = (token,)
        return [Bags(bags.indices, bags.offsets, own) for bags, own in zip(received, known, strict=True)]

    def _processed(self, ctx: ShardedContext, group: Any, bags: Bags) -> Bags:
        """The bags with the processors' weights."""
        if self.feature_processors is None:
            return bags
        params = dict(zip(self.feature_processors.position_weights, ctx.passing, strict=True))
        names = [self.feature_names[slot.feature] for slot in group.slots]
        weights = [
            position_weights_of(name, bags.feature(index, len(names)), params.get(name))
            for index, name in enumerate(names)
        ]
        return Bags(bags.indices, bags.offsets, torch.cat(weights))

    def _dense_outputs(self, ctx: ShardedContext) -> list[torch.Tensor]:
        if not self._dense:
            return []
        tables = [self.tables[index] for index in self._dense]
        features = [f for f, table in enumerate(self._feature_tables) if table in self._dense]
        params = [self.embedding_bags[table.name].weight for table in tables]
        weights = Replicated.apply(self, self.world_size, *params)  # type: ignore[no-untyped-call]
        bags = self._features_of(ctx.bags, features)
        return [Pooled.apply(self.bags_type, tables, bags, bags.weights, *weights)]  # type: ignore[no-untyped-call]

    def _features_of(self, bags: Bags, features: Sequence[int]) -> Bags:
        if len(features) == len(self._feature_tables):
            return bags
        return joined([bags.feature(f, len(self._feature_tables)) for f in features])

    @abstractmethod
    def _exchange(self, ctx: ShardedContext, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """``Columns.assemble`` of what all ranks looked up for this rank's samples."""

    @abstractmethod
    def _exchange_back(self, ctx: ShardedContext, grad: torch.Tensor) -> list[torch.Tensor]:
        """The gradient of each lookup's columns, over all ranks' samples: ``Columns.take_apart`` by W of every rank."""

    @abstractmethod
    def _exchange_weight_gradients(self, ctx: ShardedContext, grads: torch.Tensor) -> torch.Tensor:
        """Float32 [N] for the ids of this rank's batch, from those of each lookup's ids, one lookup after the other.

        An id that several shards look up gets the sum from +0, by rank, then slot.
        """

    @abstractmethod
    def _sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's value, from +0 in ascending rank."""
