"""Tables, states and batches that all contenders are given, and this project's module on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from conformance.harness import Mismatch
from fastimpl import ops
from fastimpl.pipeline import EmbeddingBagConfig, FusedOptimizer, TableBatchedEmbeddingBags
from refimpl.optimizers import Hyper, reduce_duplicates, update
from twinproof.errors import ConfigError

__all__ = ["BAG_COUNT", "EPS", "LR", "THREADS", "OurBags", "Plan", "make_batch", "make_tables"]

BAG_COUNT = 4096
THREADS = 2
LR, EPS = 0.0625, 1e-8
_SAMPLED_ROWS = 64
_ZIPF_EXPONENT = 1.05


@dataclass(frozen=True)
class Plan:
    """What distinguishes one job from another.

    Attributes:
        optimizer: one of refimpl.optimizers.
        dtype: of the tables.
        pooling: ids of every bag.
        is_zipf: whether frequencies of ids follow Zipf's law, exponent 1.05; else they are uniform.
    """

    optimizer: str
    dtype: torch.dtype = torch.float32
    pooling: int = 20
    is_zipf: bool = False


def make_tables(table_count: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """[table_count, rows, dim] in huge pages: multiples of 1/16 up to 1/2, whose sums are exact in any order.

    Raises:
        ConfigError: there is no built library, of which the kernels are measured here.
    """
    if not ops.available():
        raise ConfigError("nothing to measure", got="FASTIMPL_BUILD=none", expected="a built library", where="fastimpl")
    tables = torch.empty(table_count, *shape, dtype=dtype)
    ops.advise_huge_pages(tables)
    for table in tables:
        table.random_(0, 17, generator=torch.Generator().manual_seed(0)).sub_(8).div_(16)
    return tables


def make_batch(plan: Plan, table_count: int, row_count: int, generator: torch.Generator) -> torch.Tensor:
    """Ids int64 [table_count * BAG_COUNT * pooling]."""
    count = table_count * BAG_COUNT * plan.pooling
    if not plan.is_zipf:
        return torch.randint(0, row_count, (count,), generator=generator)
    share = torch.arange(1, row_count + 1, dtype=torch.float64).pow(-_ZIPF_EXPONENT).cumsum(0)
    drawn = torch.rand(count, generator=generator, dtype=torch.float64) * share[-1]
    return torch.searchsorted(share, drawn).clamp(max=row_count - 1)


class OurBags:
    """This project's public module over given tables, which stay where they are."""

    def __init__(self, tables: torch.Tensor, optimizer: str) -> None:
        count, rows, dim = tables.shape
        configs = [
            EmbeddingBagConfig(
                num_embeddings=rows, embedding_dim=dim, name=f"t{i}", feature_names=[f"f{i}"], data_type=tables.dtype
            )
            for i in range(count)
        ]
        chosen = FusedOptimizer(optimizer, lr=LR, eps=EPS)
        self._module = TableBatchedEmbeddingBags(configs, optimizer=chosen, weights=list(tables))
        self._optimizer = optimizer
        self.tables = [self._module.weight(index) for index in range(count)]

    def pool(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """[B, columns], with a graph; offsets of all tables, feature-major, [T * B + 1]."""
        pooled: torch.Tensor = self._module(indices, offsets)
        return pooled

    def step(self, pooled: torch.Tensor, grad: torch.Tensor) -> None:
        """Backward and update, which are one."""
        pooled.backward(grad)  # type: ignore[no-untyped-call]

    def expect(self, indices: torch.Tensor, grad: torch.Tensor, pooling: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Some rows of the first table that the batch names, and what a step has to make of them."""
        dim, first = self.tables[0].shape[1], indices[: BAG_COUNT * pooling]
        rows = torch.unique(first[:: first.numel() // _SAMPLED_ROWS])
        # Not isin, which sorts all ids.
        places = torch.searchsorted(rows, first).clamp(max=rows.numel() - 1)
        at = rows[places].eq(first).nonzero()[:, 0]
        ids, sums = reduce_duplicates(first[at], grad[at // pooling, :dim])
        states = {name: state[ids].reshape(ids.numel(), -1) for name, state in self._module.states(0).items()}
        return ids, update(self._optimizer, self.tables[0][ids], sums, states, Hyper(LR, 1, EPS))[0]

    def check(self, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
        """The rows are those, to the bit. Raises Mismatch."""
        if not torch.equal(self.tables[0][expected[0]].view(torch.uint8), expected[1].view(torch.uint8)):
            raise Mismatch("a step made other rows than the formula")
