"""What modules of embedding tables are told: the optimizer in their backward, and where each table lives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinproof.errors import ConfigError
from twinproof.kvstore.rows import Buckets
from twinproof.optimizers import FUSED_OPTIMIZERS, OPTIMIZERS, Hyper
from twinproof.pipeline.tables import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    check_tables,
    embedding_names,
)

__all__ = [
    "BOUNDS_CHECKS",
    "DataType",
    "EmbeddingBagConfig",
    "EmbeddingConfig",
    "FusedOptimizer",
    "PoolingType",
    "TableSharding",
    "check_tables",
    "column_wise",
    "data_parallel",
    "embedding_names",
    "key_value",
    "row_wise",
    "table_wise",
]

BOUNDS_CHECKS = ("fatal", "warning", "ignore")
_KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel", "key_value")


@dataclass(frozen=True)
class FusedOptimizer:
    """The optimizer that the backward runs; formulas in ``refimpl.optimizers``.

    Args:
        kind: "sgd", "adagrad", "rowwise_adagrad", "adam" or "partial_rowwise_adam".
        lr, eps, beta1, beta2: see ``Hyper``.

    Raises:
        ConfigError: a value outside these.
    """

    kind: str = "rowwise_adagrad"
    lr: float = 0.01
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999

    def __post_init__(self) -> None:
        if self.kind not in FUSED_OPTIMIZERS:
            raise ConfigError("not an optimizer", got=self.kind, expected=FUSED_OPTIMIZERS, where="kind")
        self.hyper(self.lr, 1)

    def hyper(self, lr: float, step: int) -> Hyper:
        """The hyperparameters of one step."""
        return Hyper(lr, step, self.eps, self.beta1, self.beta2)

    def state_widths(self, columns: int) -> dict[str, int]:
        """State name -> float32 values of a row of this many columns."""
        return OPTIMIZERS[self.kind].widths(columns)


@dataclass(frozen=True)
class TableSharding:
    """Where one table lives; made by ``table_wise`` and its siblings."""

    kind: str
    ranks: tuple[int, ...] = ()
    buckets: Buckets | None = None
    store: Any = None

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigError("not a kind of sharding", got=self.kind, expected=_KINDS, where="kind")


def table_wise(rank: int) -> TableSharding:
    """The whole table on one rank."""
    return TableSharding("table_wise", (rank,))


def row_wise() -> TableSharding:
    """Rows on all ranks in blocks of ceil(E / W), the last ones shorter or empty."""
    return TableSharding("row_wise")


def column_wise(ranks: Sequence[int]) -> TableSharding:
    """Columns in blocks of ceil(D / len(ranks)), one for each of these distinct ranks."""
    return TableSharding("column_wise", tuple(ranks))


def data_parallel() -> TableSharding:
    """The whole table on every rank, as a parameter of the dense optimizer; its gradient is the mean over ranks."""
    return TableSharding("data_parallel")


def key_value(store: Any, buckets: Buckets) -> TableSharding:
    """Rows in each rank's own ``KVStore``, dealt by bucket as ``rank_buckets`` says; the store has the table's name."""
    return TableSharding("key_value", (), buckets, store)


def check_plan(tables: Sequence[EmbeddingBagConfig], plan: Mapping[str, TableSharding], world_size: int) -> None:
    """Demand one sharding for each table and ranks of this world. Raises ConfigError."""
    names = [table.name for table in tables]
    if sorted(plan) != sorted(names):
        raise ConfigError("the plan does not name the tables", got=sorted(plan), expected=sorted(names), where="plan")
    for table in tables:
        ranks = plan[table.name].ranks
        if any(type(rank) is not int or not 0 <= rank < world_size for rank in ranks):
            raise ConfigError("not ranks of this group", got=ranks, expected=f"0 to {world_size - 1}", where=table.name)
        if plan[table.name].kind == "column_wise" and not (1 <= len(set(ranks)) == len(ranks) <= table.embedding_dim):
            raise ConfigError("columns need distinct ranks, at most D", got=ranks, where=table.name)
