"""Sharded, table-batched embeddings with the optimizer in the backward, in plain PyTorch.

The meaning of ``fastimpl.pipeline``: the same names, the same bits. First lookups, then what ranks exchange, then the
order of a step's stages. Batches, configuration, plans, modules, state dicts and pipelines are shared, and re-exported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from refimpl.optimizers import reduce_duplicates, row_sum, update
from twinproof.errors import ConfigError
from twinproof.kvstore.statedict import gathered
from twinproof.optimizers import Hyper
from twinproof.pipeline import driver, modules, sharded
from twinproof.pipeline.batches import (
    ComputeJTDictToKJT,
    ComputeKJTToJTDict,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    jt_is_equal,
    kjt_is_equal,
    permute_multi_embedding,
    regroup_kts,
)
from twinproof.pipeline.config import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    FusedOptimizer,
    PoolingType,
    apply_optimizer_in_backward,
)
from twinproof.pipeline.driver import In, LookupPipeline, Out, Pipeline
from twinproof.pipeline.jagged import Bags, divisor_on, joined, offsets_of
from twinproof.pipeline.modules import (
    FeatureProcessedEmbeddingBagCollection,
    FeatureProcessor,
    FeatureProcessorsCollection,
    HeldTable,
    InBackwardOptimizer,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from twinproof.pipeline.sharded import TableShard
from twinproof.pipeline.sharding import (
    Awaitable,
    Group,
    Layout,
    Ready,
    ShardedContext,
    Slot,
    TableSharding,
    column_wise,
    data_parallel,
    key_value,
    row_wise,
    table_wise,
)
from twinproof.pipeline.stages import BatchContext, Call, Options, looked_up, move_batch

# What the suite may ask beyond the contract.
CAPABILITIES: frozenset[str] = frozenset()

__all__ = [
    "Awaitable", "ComputeJTDictToKJT", "ComputeKJTToJTDict", "DataType", "EmbeddingBagCollection",
    "EmbeddingBagConfig", "EmbeddingCollection", "EmbeddingConfig", "EvalPipelineFusedSparseDist",
    "EvalPipelineSparseDist", "FeatureProcessedEmbeddingBagCollection", "FeatureProcessor",
    "FeatureProcessorsCollection", "FusedOptimizer", "InBackwardOptimizer", "JaggedTensor", "KeyedJaggedTensor",
    "KeyedTensor", "PoolingType", "PositionWeightedModule", "PositionWeightedModuleCollection",
    "PrefetchTrainPipelineSparseDist", "ShardedContext", "ShardedEmbeddingBagCollection",
    "TableBatchedEmbeddingBags", "TableShard", "TableSharding", "TrainPipelineBase", "TrainPipelineFusedSparseDist",
    "TrainPipelineSemiSync", "TrainPipelineSparseDist", "apply_optimizer_in_backward", "column_wise",
    "data_parallel", "fuse_input_dists", "jt_is_equal", "key_value", "kjt_is_equal", "permute_multi_embedding",
    "regroup_kts", "row_wise", "table_wise",
]  # fmt: skip


# Lookups: what a bag is, how its gradient reaches the rows, and what a step does to them.


def _bag_of_each(bags: Bags) -> torch.Tensor:
    """The bag of each id, int64 [N]."""
    ends, count = bags.offsets[1:], bags.indices.numel()
    return torch.searchsorted(ends, torch.arange(count, device=ends.device), right=True)


def pool(rows: torch.Tensor, bags: Bags, is_mean: bool) -> torch.Tensor:
    """Float32 [B, D] from the rows [N, D] of one feature's ids: added from +0 in ascending position.

    A weighted row is multiplied before it is added, each rounded once; a mean is the sum divided by the number of ids.
    """
    terms = rows.to(torch.float32)
    if bags.weights is not None:
        terms = bags.weights[:, None] * terms
    sums = terms.new_zeros(bags.offsets.numel() - 1, rows.shape[1]).index_add_(0, _bag_of_each(bags), terms)
    return sums / bags.lengths() if is_mean else sums


def spread(grad: torch.Tensor, bags: Bags, is_mean: bool) -> torch.Tensor:
    """``pool`` backwards: the gradient [N, D] of each id's row, from that of the bags [B, D]."""
    grads = (grad / bags.lengths() if is_mean else grad)[_bag_of_each(bags)]
    return grads if bags.weights is None else bags.weights[:, None] * grads


class PlainLookup:
    """``Lookup``, one feature after the other."""

    def fresh(self, shape: tuple[int, int], dtype: torch.dtype, device: Any) -> torch.Tensor:
        """Memory for a table or a state, not initialised."""
        return torch.empty(shape, dtype=dtype, device=device)

    def outside(self, bags: Bags, row_counts: Sequence[int]) -> tuple[int, int]:
        """How many ids are outside of their feature's rows, and the position of the first, or -1."""
        bad = self._is_outside(bags, row_counts).nonzero()[:, 0]
        return bad.numel(), int(bad[0]) if bad.numel() else -1

    def settled(self, bags: Bags, row_counts: Sequence[int]) -> tuple[Bags, torch.Tensor] | None:
        """None: the host always waits to know."""
        return None

    def mended(self, bags: Bags, row_counts: Sequence[int]) -> torch.Tensor:
        """The ids, those outside of their feature's rows as 0."""
        return bags.indices.masked_fill(self._is_outside(bags, row_counts), 0)

    def _is_outside(self, bags: Bags, row_counts: Sequence[int]) -> torch.Tensor:
        features = [bags.feature(f, len(row_counts)).indices for f in range(len(row_counts))]
        pairs = zip(features, row_counts, strict=True)
        return torch.cat([((ids < 0) | (ids >= rows)) & (rows >= 0) for ids, rows in pairs])

    def pool(self, tables: Sequence[HeldTable], feature_tables: Sequence[int], bags: Bags) -> torch.Tensor:
        """Float32 [B, sum of D]: ``pool`` of each feature, side by side."""
        columns = []
        for feature, table in enumerate(feature_tables):
            mine = bags.feature(feature, len(feature_tables))
            columns.append(pool(tables[table].weight[mine.indices], mine, tables[table].is_mean))
        return torch.cat(columns, dim=1)

    def spread(self, bags: Bags, grad: torch.Tensor, feature_count: int) -> torch.Tensor:
        """Float32 [N, D]: ``spread`` of each feature of one table of sums, one after the other."""
        columns = torch.split(grad, grad.shape[1] // feature_count, dim=1)
        return torch.cat([spread(columns[f], bags.feature(f, feature_count), False) for f in range(feature_count)])

    def update(
        self,
        tables: Sequence[HeldTable],
        feature_tables: Sequence[int],
        bags: Bags,
        grad: torch.Tensor,
        optimizer: str,
        hyper: Hyper,
    ) -> None:
        """For each table, over its features in order: ``spread``, sum the gradients of each row, one step."""
        columns = torch.split(grad, [tables[table].weight.shape[1] for table in feature_tables], dim=1)
        for index, table in enumerate(tables):
            ids, grads = [], []
            for feature in (f for f, t in enumerate(feature_tables) if t == index):
                mine = bags.feature(feature, len(feature_tables))
                ids.append(mine.indices)
                grads.append(spread(columns[feature], mine, table.is_mean))
            rows, sums = reduce_duplicates(torch.cat(ids).to(torch.int64), torch.cat(grads))
            states = {name: state[rows] for name, state in table.states.items()}
            table.weight[rows], states = update(optimizer, table.weight[rows], sums, states, hyper)
            for name, state in states.items():
                table.states[name][rows] = state

    def weight_gradients(
        self, tables: Sequence[HeldTable], feature_tables: Sequence[int], bags: Bags, grad: torch.Tensor
    ) -> torch.Tensor:
        """Float32 [N]: the gradient of the id's unweighted row, times the row, summed over the row."""
        columns = torch.split(grad, [tables[table].weight.shape[1] for table in feature_tables], dim=1)
        found = []
        for feature, index in enumerate(feature_tables):
            mine, table = bags.feature(feature, len(feature_tables)), tables[index]
            grads = spread(columns[feature], Bags(mine.indices, mine.offsets), table.is_mean)
            found.append(row_sum(grads * table.weight[mine.indices].to(torch.float32))[:, 0])
        return torch.cat(found)


class TableBatchedEmbeddingBags(modules.TableBatchedEmbeddingBags, engine=PlainLookup): ...


class EmbeddingBagCollection(modules.EmbeddingBagCollection, engine=PlainLookup): ...


class EmbeddingCollection(modules.EmbeddingCollection, engine=PlainLookup): ...


# What ranks exchange: every rank is told everything, and takes what is its own.


class ToldEverything:
    """``Exchange`` by one collective: what every rank has, on every rank."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def _of_all_ranks(self, make: Callable[[], Any]) -> list[Any]:
        """``make()`` of every rank, by rank; a rank raises its own error, or DistributedError for another's."""
        return gathered(make, self.layout.process_group)

    def input_dist(self, ctx: ShardedContext, select: Callable[[], Bags]) -> Awaitable[Awaitable[list[Bags]]]:
        """The bags of all ranks, of which each lookup takes its own."""

        def make() -> tuple[Bags, bool]:
            ctx.bags = select()
            return ctx.bags.detached(), ctx.bags.wants_gradient()

        found = self._of_all_ranks(make)
        everyone = [bags for bags, _ in found]
        ctx.strides = [(bags.offsets.numel() - 1) // len(self.layout.feature_tables) for bags in everyone]
        if any(is_wanted for _, is_wanted in found):
            ctx.way_home = self._numbers(everyone)
        return Ready(Ready(self._parts(everyone, self.layout.groups)))

    def _parts(self, everyone: Sequence[Bags], groups: Sequence[Group]) -> list[Bags]:
        """What the groups look up of all ranks' bags."""
        count = len(self.layout.feature_tables)
        whole = [joined([bags.feature(feature, count) for bags in everyone]) for feature in range(count)]
        return [joined([self._part(whole[slot.feature], slot) for slot in group.slots]) for group in groups]

    def _part(self, bags: Bags, slot: Slot) -> Bags:
        """What one shard looks up of one feature's bags, rows counted from the shard's first."""
        shard = slot.shard
        if not slot.is_partial:
            return bags
        keep = self.layout.owners(bags.indices, shard.table) == shard.rank
        lengths = torch.bincount(_bag_of_each(bags)[keep], minlength=bags.offsets.numel() - 1)
        weights = None if bags.weights is None else bags.weights[keep]
        return Bags(bags.indices[keep] - shard.rows[0], offsets_of(lengths), weights)

    def _numbers(self, everyone: Sequence[Bags]) -> tuple[list[torch.Tensor], list[int]]:
        """Which ids each rank looks up, in its order, as numbers among all ranks' ids; and where each rank's begin."""
        begins: list[int] = offsets_of(torch.tensor([bags.indices.numel() for bags in everyone])).tolist()
        # A number takes the way of its id's weight.
        numbered = [
            Bags(bags.indices, bags.offsets, begin + torch.arange(bags.indices.numel(), device=bags.indices.device))
            for bags, begin in zip(everyone, begins, strict=False)
        ]
        none = everyone[0].indices.new_empty(0, dtype=torch.int64)
        found = [[part.weights for part in self._parts(numbered, groups)] for groups in self.layout.rank_groups]
        return [torch.cat([none, *(numbers for numbers in some if numbers is not None)]) for some in found], begins

    def columns(self, ctx: ShardedContext, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The lookups of all ranks, of which this rank's samples are taken."""
        none = torch.zeros(sum(ctx.strides), 0, dtype=torch.float32, device=ctx.bags.offsets.device)
        everyone = self._of_all_ranks(lambda: torch.cat([none, *outputs], dim=1))
        rank = self.layout.rank
        mine = slice(sum(ctx.strides[:rank]), sum(ctx.strides[: rank + 1]))
        return self.assembled([block[mine] for block in everyone], ctx.bags)

    def _slots(self, rank: int) -> list[tuple[Slot, slice, slice]]:
        """The slots of a rank: their columns in the result, and in the rank's block."""
        found, at = [], 0
        for slot in (slot for group in self.layout.rank_groups[rank] for slot in group.slots):
            begin, width = self.layout.begins[slot.feature] + slot.shard.columns[0], slot.shard.width
            found.append((slot, slice(begin, begin + width), slice(at, at + width)))
            at += width
        return found

    def assembled(self, blocks: Sequence[torch.Tensor], bags: Bags) -> torch.Tensor:
        """Float32 [B, width] from the ranks' blocks [B, columns of the rank] for this rank's own bags."""
        layout = self.layout
        count = len(layout.feature_tables)
        result = bags.offsets.new_zeros((bags.offsets.numel() - 1) // count, layout.width, dtype=torch.float32)
        for rank, block in enumerate(blocks):
            for slot, there, here in self._slots(rank):
                if slot.is_partial:
                    result[:, there] += block[:, here]
                else:
                    result[:, there] = block[:, here]
        for feature in layout.means():
            own = slice(layout.begins[feature], layout.begins[feature] + layout.table_of(feature).embedding_dim)
            result[:, own] /= bags.lengths_of(feature, count)
        return result

    def gradients(self, ctx: ShardedContext, grad: torch.Tensor) -> list[torch.Tensor]:
        """The blocks of gradients of all ranks, of which this rank's are taken."""
        everyone = self._of_all_ranks(lambda: self.taken_apart(grad, ctx.bags))
        mine = torch.cat([blocks[self.layout.rank] for blocks in everyone])
        return list(torch.split(mine, [group.width for group in self.layout.groups], dim=1))

    def taken_apart(self, grad: torch.Tensor, bags: Bags) -> list[torch.Tensor]:
        """``assembled`` backwards: each rank's block [B, columns of the rank] of the gradient over W."""
        layout = self.layout
        means, count = layout.means(), len(layout.feature_tables)
        blocks = []
        for rank in range(layout.world_size):
            columns = [grad.new_zeros(grad.shape[0], 0)]
            for slot, there, _ in self._slots(rank):
                part = grad[:, there] / divisor_on(grad, layout.world_size)
                columns.append(part / bags.lengths_of(slot.feature, count) if slot.feature in means else part)
            blocks.append(torch.cat(columns, dim=1))
        return blocks

    def weight_gradients(self, ctx: ShardedContext, grads: torch.Tensor) -> torch.Tensor:
        """The gradients of all ranks' lookups, added to the numbers of their ids."""
        numbers, begins = ctx.way_home
        total = grads.new_zeros(begins[-1])
        for number, found in zip(numbers, self._of_all_ranks(lambda: grads), strict=True):
            total.index_add_(0, number, found)
        return total[begins[self.layout.rank] : begins[self.layout.rank + 1]]

    def sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """From +0 in ascending rank."""
        total = torch.zeros_like(value)
        for part in self._of_all_ranks(lambda: value):
            total = total + part
        return total


class ShardedEmbeddingBagCollection(
    sharded.ShardedEmbeddingBagCollection, bags=TableBatchedEmbeddingBags, engine=PlainLookup, exchange=ToldEverything
): ...


def fuse_input_dists(dists: Sequence[Awaitable[Any]]) -> None:
    """Exchange the sizes of several modules, of each group at once: what ``input_dist`` returned, not waited for yet.

    Every rank calls this with the same modules in the same order. Here each module exchanged its own at once.
    """


# Schedules: which stage of a step follows which. H is the copy of a batch to the device, S and I its exchange of sizes
# and ids, L and O the lookup and the exchange of pooled columns, F the forward, B the backward, T the tables' update
# inside of it, P the dense optimizer.


class AtOnce:
    """``Stages`` that run when they are issued, one after the other. Raises ConfigError for an engine of streams."""

    def __init__(self, device: torch.device, options: Options) -> None:
        if options.engine is not None:
            raise ConfigError(
                "plain loops have no streams", got=type(options.engine).__name__, expected="None", where="engine"
            )
        self._device = device

    def copy(self, batch: Any) -> BatchContext:
        """H."""
        return BatchContext(move_batch(batch, lambda part: part.to(self._device, non_blocking=True), self._device))

    def adopt(self, batch: Any) -> BatchContext:
        """A batch that is on the device."""
        return BatchContext(batch)

    def send(self, batch: BatchContext, work: Callable[[], None]) -> None:
        """S."""
        work()

    def receive(self, work: Callable[[], None]) -> None:
        """I."""
        work()

    def look_up(self, batch: BatchContext, calls: list[Call], late: list[Call]) -> None:
        """L and O."""
        for call in calls:
            batch.results[call.name] = looked_up(call.module, batch.contexts[call.name], batch.inputs[call.name].wait())
            batch.dists.pop(call.name, None)

    def wait_for_lookup(self, batch: BatchContext) -> None:
        """It is over."""

    def forward(self, batch: BatchContext, work: Callable[[], Any]) -> Any:
        """F."""
        return work()

    def backward(self, work: Callable[[], None]) -> None:
        """B and T."""
        work()

    def tables_updated(self, calls: list[Call]) -> None:
        """They are."""

    def optimize(self, late: list[Call], work: Callable[[], None]) -> None:
        """P."""
        work()


def exact(p: Pipeline[Any, Any], _stages: AtOnce, batch: BatchContext) -> Any:
    """One batch after the other: what Base, SparseDist and Prefetch mean, and their evaluation."""
    p.pull()  # H, of all batches ahead
    trains = p.take(batch)
    p.look_up(batch)  # S I L O
    p.raise_failure(batch)
    losses, output = p.run_forward(batch)  # F
    p.pull_behind_forward()
    if trains:
        p.run_backward(batch, losses)  # B T
        p.run_optimizer()  # P
    return output


def exact_with_lookup(p: LookupPipeline[Any, Any], _stages: AtOnce, batch: BatchContext) -> Any:
    """What the Fused pipelines mean: the same order, with the lookup as stages that a subclass may override."""
    p.pull()  # H
    trains = p.take(batch)
    _look_up(p, batch)  # S I L O
    losses, output = p.run_forward(batch)  # F
    p.pull_behind_forward()
    if trains:
        p.run_backward(batch, losses)  # B T
        p.run_optimizer()  # P
    return output


def _look_up(p: LookupPipeline[Any, Any], batch: BatchContext) -> None:
    p.exchange(batch)
    p.raise_failure(batch)
    p.start_embedding_lookup(batch.batch, batch.context)
    p.wait_embedding_lookup()


def semi_sync(p: driver.TrainPipelineSemiSync[Any, Any], _stages: AtOnce, batch: BatchContext) -> Any:
    """SemiSync: from ``start_batch`` on a batch is looked up before the update of the one before it."""
    p.pull()  # H
    trains = p.take(batch)
    if p.needs_lookup(batch):
        _look_up(p, batch)  # S I L O, unless the step before did it
    if trains:
        p.cut(batch)
    losses, output = p.run_forward(batch)  # F
    following = p.following()
    if following is not None and p.is_semi_sync() and p.needs_lookup(following):
        p.exchange(following)  # S I of the next batch
        if following.failure is None:
            p.look_up_ahead(following)  # L O, before T
    if trains:
        p.run_backward(batch, losses)  # B, then T
        p.run_optimizer()  # P
    return output


class TrainPipelineBase(driver.TrainPipelineBase[In, Out], stages=AtOnce, schedule=exact): ...


class TrainPipelineSparseDist(driver.TrainPipelineSparseDist[In, Out], stages=AtOnce, schedule=exact): ...


class PrefetchTrainPipelineSparseDist(
    driver.PrefetchTrainPipelineSparseDist[In, Out], stages=AtOnce, schedule=exact
): ...


class TrainPipelineFusedSparseDist(
    driver.TrainPipelineFusedSparseDist[In, Out], stages=AtOnce, schedule=exact_with_lookup
): ...


class TrainPipelineSemiSync(driver.TrainPipelineSemiSync[In, Out], stages=AtOnce, schedule=semi_sync): ...


class EvalPipelineSparseDist(driver.EvalPipelineSparseDist[In, Out], stages=AtOnce, schedule=exact): ...


class EvalPipelineFusedSparseDist(
    driver.EvalPipelineFusedSparseDist[In, Out], stages=AtOnce, schedule=exact_with_lookup
): ...
