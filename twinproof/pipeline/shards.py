"""Which part of which table is on which rank, and which pooled columns it makes: a pure function of the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from twinproof.kvstore.options import Initializer, initial_weights
from twinproof.pipeline.config import EmbeddingBagConfig, TableSharding, check_plan
from twinproof.pipeline.tables import UniformInit, initial_weight

__all__ = ["Shard", "Slot", "initial_shard", "shards_of", "slots_of"]

INIT_ROWS = 65536


@dataclass(frozen=True)
class Shard:
    """Rows and columns [begin, end) of one table on one rank; ``part`` counts the column blocks of the table."""

    table: int
    rank: int
    kind: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    part: int = 0

    @property
    def width(self) -> int:
        """Columns."""
        return self.columns[1] - self.columns[0]


@dataclass(frozen=True)
class Slot:
    """Pooled columns that one shard makes for one feature; ``feature`` counts by table, then as named there."""

    feature: int
    shard: Shard


def _blocks(size: int, count: int) -> list[tuple[int, int]]:
    """[0, size) in blocks of ceil(size / count); the empty ones at the end are left out."""
    block = -(-size // count)
    return [(begin, min(begin + block, size)) for begin in range(0, size, block)]


def shards_of(tables: Sequence[EmbeddingBagConfig], plan: Mapping[str, TableSharding], world_size: int) -> list[Shard]:
    """Every shard, by table, then column block or rank. Data-parallel tables have none. Raises ConfigError."""
    check_plan(tables, plan, world_size)
    result = []
    for index, table in enumerate(tables):
        sharding, rows, columns = plan[table.name], (0, table.num_embeddings), (0, table.embedding_dim)
        if sharding.kind == "table_wise":
            result.append(Shard(index, sharding.ranks[0], sharding.kind, rows, columns))
        elif sharding.kind == "column_wise":
            blocks = _blocks(table.embedding_dim, len(sharding.ranks))
            result += [
                Shard(index, rank, sharding.kind, rows, block, part)
                for part, (rank, block) in enumerate(zip(sharding.ranks, blocks, strict=False))
            ]
        elif sharding.kind == "row_wise":
            blocks = _blocks(table.num_embeddings, world_size)
            result += [Shard(index, rank, sharding.kind, block, columns) for rank, block in enumerate(blocks)]
        elif sharding.kind == "key_value":
            result += [Shard(index, rank, sharding.kind, (0, 0), columns) for rank in range(world_size)]
    return result


def slots_of(tables: Sequence[EmbeddingBagConfig], shards: Sequence[Shard]) -> list[Slot]:
    """Every slot, by shard, then feature of its table."""
    first = [sum(len(table.feature_names) for table in tables[:i]) for i in range(len(tables))]
    return [
        Slot(first[shard.table] + i, shard) for shard in shards for i in range(len(tables[shard.table].feature_names))
    ]


def initial_shard(table: EmbeddingBagConfig, index: int, shard: Shard, seed: int) -> torch.Tensor:
    """The shard's first weights, the same for every plan.

    Uniform ones follow the rule of ``kvstore.Initializer`` with the row as id. An ``init_fn`` of the user's fills the
    whole table on every rank, from torch's generator seeded by ``seed`` and the table's place; the rest is dropped.
    """
    if not isinstance(table.init_fn, UniformInit):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + index)
            whole = initial_weight(table)
        return whole[slice(*shard.rows), slice(*shard.columns)].contiguous()
    initializer = Initializer.uniform(table.init_fn.low, table.init_fn.high)
    weight = torch.empty(shard.rows[1] - shard.rows[0], shard.width, dtype=table.dtype)
    for begin in range(*shard.rows, INIT_ROWS):
        ids = torch.arange(begin, min(begin + INIT_ROWS, shard.rows[1]))
        rows = initial_weights(initializer, seed, index, ids, table.embedding_dim, table.dtype)
        weight[begin - shard.rows[0] :][: ids.numel()] = rows[:, slice(*shard.columns)]
    return weight
