"""The model of the figures of torchrec PR 2916, of any size, on any device; one model for all schedules.

Half of the tables are weighted. The optimizer of the tables is Adagrad, that of the dense part SGD; the over-arch is a
layer from all pooled columns to ``width`` and five from ``width`` to ``width``, each with a layer norm that gates it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch

from fastimpl import pipeline

__all__ = ["Batch", "SeedModel", "Sizes", "loader_of", "make_model"]

_DENSE_IN, _DENSE_OUT, _LAYERS = 10, 8, 5
_LR = 0.1
_DISTINCT_BATCHES = 4  # Made before anything is timed, and used in turn.


@dataclass(frozen=True)
class Sizes:
    """What a model and its batches are made of; ``pooling`` is the mean number of ids of a bag."""

    table_count: int
    rows: int
    dim: int
    batch: int
    pooling: int
    width: int


@dataclass
class Batch:
    """Dense features [B, 10], ids without and with weights, targets [B] of zeros and ones."""

    dense: torch.Tensor
    plain: Any
    weighted: Any
    target: torch.Tensor


class _Gated(torch.nn.Module):
    def __init__(self, width: int, device: Any) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width, device=device)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * torch.sigmoid(self.norm(value))


class SeedModel(torch.nn.Module):
    """Returns (loss [1], logits [B])."""

    def __init__(self, plain: torch.nn.Module, weighted: torch.nn.Module, sizes: Sizes, device: Any) -> None:
        super().__init__()
        self.plain, self.weighted = plain, weighted
        self.bottom = torch.nn.Linear(_DENSE_IN, _DENSE_OUT, device=device)
        layers: list[torch.nn.Module] = []
        width = _DENSE_OUT + sizes.table_count * sizes.dim
        for _ in range(1 + _LAYERS):
            layers += [torch.nn.Linear(width, sizes.width, device=device), _Gated(sizes.width, device)]
            width = sizes.width
        self.top = torch.nn.Sequential(*layers, torch.nn.Linear(width, 1, device=device))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Binary cross-entropy, so that gradients stay bounded however long it trains."""
        pooled = [self.plain(batch.plain).values(), self.weighted(batch.weighted).values()]
        logits = self.top(torch.cat([self.bottom(batch.dense), *pooled], dim=1))[:, 0]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.target)
        return loss.reshape(1), logits.detach()


def _collection(
    sizes: Sizes, first: int, count: int, world_size: int, device: Any, *, is_weighted: bool, is_mixed: bool
) -> Any:
    tables = [
        pipeline.EmbeddingBagConfig(sizes.rows, sizes.dim, f"t{i}", feature_names=[f"f{i}"])
        for i in range(first, first + count)
    ]
    whole = pipeline.EmbeddingBagCollection(tables, is_weighted=is_weighted, device=device)
    plan = {f"t{i}": pipeline.table_wise((i - first) * world_size // count) for i in range(first, first + count)}
    if is_mixed:
        others = cycle((pipeline.row_wise(), pipeline.data_parallel(), pipeline.column_wise(range(world_size))))
        plan |= {f"t{i}": next(others) for i in range(first + 1, first + count)}
    return pipeline.ShardedEmbeddingBagCollection(whole, plan, optimizer=pipeline.FusedOptimizer("adagrad", lr=_LR))


def make_model(
    sizes: Sizes, *, world_size: int = 1, device: Any = "cpu", is_mixed: bool = False
) -> tuple[SeedModel, torch.optim.Optimizer]:
    """The model and its dense optimizer, the same weights on every rank.

    Tables are table-wise, or, mixed, of every kind that lies in memory.
    """
    torch.manual_seed(0)
    half = sizes.table_count // 2
    plain = _collection(sizes, 0, half, world_size, device, is_weighted=False, is_mixed=is_mixed)
    rest = sizes.table_count - half
    weighted = _collection(sizes, half, rest, world_size, device, is_weighted=True, is_mixed=is_mixed)
    model = SeedModel(plain, weighted, sizes, device)
    return model, torch.optim.SGD(model.parameters(), lr=_LR)


def _ids(sizes: Sizes, first: int, count: int, generator: torch.Generator, *, is_weighted: bool) -> Any:
    lengths = torch.randint(0, 2 * sizes.pooling + 1, (count * sizes.batch,), generator=generator)
    values = torch.randint(0, sizes.rows, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(values.shape, generator=generator) if is_weighted else None
    names = [f"f{i}" for i in range(first, first + count)]
    return pipeline.KeyedJaggedTensor(names, values, weights, lengths=lengths)


def loader_of(sizes: Sizes, seed: int, *, is_pinned: bool = False) -> Iterator[Batch]:
    """Batches in host memory, without end; ranks give other seeds."""
    generator = torch.Generator().manual_seed(seed)
    half, made = sizes.table_count // 2, []
    for _ in range(_DISTINCT_BATCHES):
        dense = torch.randn(sizes.batch, _DENSE_IN, generator=generator)
        plain = _ids(sizes, 0, half, generator, is_weighted=False)
        weighted = _ids(sizes, half, sizes.table_count - half, generator, is_weighted=True)
        target = torch.randint(0, 2, (sizes.batch,), generator=generator).float()
        made.append(Batch(dense, plain, weighted, target))
    if is_pinned:
        made = [
            Batch(one.dense.pin_memory(), _pinned(one.plain), _pinned(one.weighted), one.target.pin_memory())
            for one in made
        ]
    return cycle(made)


def _pinned(ids: Any) -> Any:
    return ids._map(torch.Tensor.pin_memory)
