"""The lookups of one rank: whole tables and column blocks at once, row blocks at once, key-value tables one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from refimpl.optimizers import row_sum
from twinproof.errors import ConfigError
from twinproof.pipeline.bags import InBackwardOptimizer
from twinproof.pipeline.config import EmbeddingBagConfig, PoolingType, TableSharding
from twinproof.pipeline.jagged import Bags, pool, spread
from twinproof.pipeline.shards import Shard, Slot

__all__ = ["Group", "KeyValueBags", "groups_of", "is_partial", "make_group"]

_WHOLE = ("table_wise", "column_wise")


def is_partial(shard: Shard) -> bool:
    """Whether a bag's rows may lie on several ranks, whose sums are then added."""
    return shard.kind not in _WHOLE


@dataclass(frozen=True)
class Group:
    """One lookup: its shards, their slots in the order of its columns, and what looks up."""

    shards: tuple[Shard, ...]
    slots: tuple[Slot, ...]
    module: Any = None

    @property
    def width(self) -> int:
        """Columns of the result."""
        return sum(slot.shard.width for slot in self.slots)


def groups_of(shards: Sequence[Shard], slots: Sequence[Slot], rank: int) -> list[Group]:
    """The lookups of a rank, without modules: every rank knows every rank's."""
    mine = [shard for shard in shards if shard.rank == rank]
    kinds = [[shard for shard in mine if shard.kind in _WHOLE], [shard for shard in mine if shard.kind == "row_wise"]]
    kinds += [[shard] for shard in mine if shard.kind == "key_value"]
    return [Group(tuple(some), tuple(slot for slot in slots if slot.shard in some)) for some in kinds if some]


class KeyValueBags:
    """Pooled lookups of one table in a ``KVStore``; sums only, for a mean is taken over all ranks' rows."""

    def __init__(self, store: Any, table: EmbeddingBagConfig, optimizer: InBackwardOptimizer) -> None:
        layout = store.layout(table.name)
        found = (layout.embedding_dim, layout.weight_dtype, layout.optimizer)
        expected = (table.embedding_dim, table.dtype, optimizer.config.kind)
        if found != expected:
            raise ConfigError("the store's rows are not this table's", got=found, expected=expected, where=table.name)
        self.store, self.table, self.fused_optimizer = store, table, optimizer

    def _parts(self, bags: Bags) -> list[Bags]:
        count = len(self.table.feature_names)
        return [bags.feature(feature, count) for feature in range(count)]

    def _rows(self, bags: Bags) -> torch.Tensor:
        rows: torch.Tensor = self.store.get(self.table.name, bags.indices.contiguous())
        return rows.to(torch.float32)

    def _pool(self, bags: Bags) -> torch.Tensor:
        parts = self._parts(bags)
        rows = torch.split(self._rows(bags), [part.indices.numel() for part in parts])
        return torch.cat([pool(some, part, mean=False) for some, part in zip(rows, parts, strict=True)], dim=1)

    def _spread(self, bags: Bags, grad: torch.Tensor) -> torch.Tensor:
        columns = torch.split(grad, self.table.embedding_dim, dim=1)
        return torch.cat([spread(c, p, mean=False) for c, p in zip(columns, self._parts(bags), strict=True)])

    def _step(self, bags: Bags, grad: torch.Tensor) -> None:
        hyper, ids = self.fused_optimizer.hyper(), bags.indices.contiguous()
        betas = {"eps": hyper.eps, "beta1": hyper.beta1, "beta2": hyper.beta2}
        self.store.apply_gradients(self.table.name, ids, self._spread(bags, grad), hyper.lr, hyper.step, **betas)

    def _weight_gradients(self, bags: Bags, grad: torch.Tensor) -> torch.Tensor:
        grads = self._spread(Bags(bags.indices, bags.offsets), grad)
        return row_sum(grads * self._rows(bags))[:, 0]


def make_group(
    group: Group,
    tables: Sequence[EmbeddingBagConfig],
    plan: Sequence[TableSharding],
    module_types: tuple[Any, Any],
    optimizer: InBackwardOptimizer,
    weight_of: Callable[[Shard], torch.Tensor],
) -> Group:
    """The group with its module, of one of the types of bags and of key-value bags.

    ``weight_of`` gives each shard's weights, which the module then owns.
    """
    bags_type, key_value_type = module_types
    first = group.shards[0]
    if first.kind == "key_value":
        module: Any = key_value_type(plan[first.table].store, tables[first.table], optimizer)
        return replace(group, module=module)
    configs = [
        replace(
            tables[shard.table],
            num_embeddings=shard.rows[1] - shard.rows[0],
            embedding_dim=shard.width,
            pooling=PoolingType.SUM if is_partial(shard) else tables[shard.table].pooling,
        )
        for shard in group.shards
    ]
    weights = [weight_of(shard) for shard in group.shards]
    return replace(group, module=bags_type(configs, weights=weights, in_backward=optimizer))
