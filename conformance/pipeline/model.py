"""Tables looked up and trained in loops, the oracle of the lookups, and random tables for both.

The model adds row by row and updates row by row; it uses nothing of what is under test but the optimizers' formulas,
which PIPE-014 holds against the textbook.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from conformance.harness import assert_same_tensor
from conformance.kvstore.model import BETA1, BETA2, EPS, LR
from conformance.pipeline.batches import Jagged, generator_of, values_of
from refimpl.optimizers import Hyper, update
from twinproof.optimizers import FUSED_OPTIMIZERS
from twinproof.optimizers import OPTIMIZERS as KINDS

OPTIMIZERS = FUSED_OPTIMIZERS
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class NaiveTable:
    """One table: weight [E, D] and states as the optimizer keeps them."""

    config: Any
    optimizer: str
    weight: torch.Tensor
    states: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weight = self.weight.clone()
        rows, columns = self.weight.shape
        for name, width in KINDS[self.optimizer].widths(columns).items():
            self.states.setdefault(name, torch.zeros(rows, width))

    @property
    def mean(self) -> bool:
        """Whether bags are means."""
        return str(self.config.pooling.value) == "MEAN"


class Naive:
    """Tables looked up and trained in loops: the oracle of the lookups."""

    def __init__(self, configs: Sequence[Any], weights: Sequence[torch.Tensor], optimizer: str) -> None:
        self.tables = [NaiveTable(c, optimizer, w) for c, w in zip(configs, weights, strict=True)]
        self.step_count = 0

    def pooled(self, batch: Jagged) -> torch.Tensor:
        """Float32 [B, sum of D], by table, then feature."""
        columns = []
        for table in self.tables:
            for name in table.config.feature_names:
                columns.append(self._pool(table, batch.picked([name])))
        return torch.cat(columns, dim=1)

    def _pool(self, table: NaiveTable, feature: Jagged) -> torch.Tensor:
        result = torch.zeros(feature.stride, table.weight.shape[1])
        for sample, bag in enumerate(feature.bags[0]):
            total = torch.zeros(table.weight.shape[1])
            for position, row in enumerate(bag):
                term = table.weight[row].float()
                if feature.weights is not None:
                    term = torch.tensor(feature.weights[0][sample][position]) * term
                total = total + term
            result[sample] = total / len(bag) if table.mean and bag else total
        return result

    def step(self, batch: Jagged, grad: torch.Tensor, hyper: Hyper) -> None:
        """One backward: ``grad`` is that of ``pooled``, float32 [B, sum of D]."""
        self.step_count += 1
        at = 0
        for table in self.tables:
            sums: dict[int, torch.Tensor] = {}
            for name in table.config.feature_names:
                feature, width = batch.picked([name]), table.weight.shape[1]
                for sample, bag in enumerate(feature.bags[0]):
                    g = grad[sample, at : at + width]
                    g = g / len(bag) if table.mean and bag else g
                    for position, row in enumerate(bag):
                        term = g
                        if feature.weights is not None:
                            term = torch.tensor(feature.weights[0][sample][position]) * g
                        sums[row] = sums.get(row, torch.zeros(width)) + term
                at += width
            for row, total in sums.items():
                states = {name: state[row : row + 1] for name, state in table.states.items()}
                weight, states = update(table.optimizer, table.weight[row : row + 1], total[None], states, hyper)
                table.weight[row] = weight[0]
                for name, value in states.items():
                    table.states[name][row] = value[0]


def assert_bits(got: torch.Tensor, expected: torch.Tensor, where: str = "") -> None:
    """Equal dtype, shape and bytes, wherever they are."""
    assert_same_tensor(got.cpu(), expected.cpu(), where=where)


def assert_tables(lookups: Any, naive: Naive, where: str = "") -> None:
    """Weights and states of a ``TableBatchedEmbeddingBags`` are the model's, bit for bit."""
    for index, table in enumerate(naive.tables):
        assert_bits(lookups.weight(index), table.weight, f"{where} weight of {table.config.name}")
        for name, state in table.states.items():
            assert_bits(lookups.states(index)[name], state, f"{where} {name} of {table.config.name}")


def random_tables(
    pipeline: Any,
    seed: int,
    *,
    count: int = 3,
    dtypes: Sequence[torch.dtype] = DTYPES,
    rows: int = 9,
    dims: int = 12,
    multiple: int = 1,
) -> tuple[list[Any], list[torch.Tensor], list[str], list[int]]:
    """Configs, weights, and the features of a batch with their row limits; features are shared within and between.

    Dims are multiples of ``multiple``: of 4 where the dim is not the point, which is what other implementations take.
    """
    generator = generator_of(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    keys, limits = [f"f{i}" for i in range(count + 1)], [10**9] * (count + 1)
    configs, weights = [], []
    for index in range(count):
        # Every table has its own feature; some have the common last one too.
        names = [keys[index], keys[count]][: draw(1, 2)] if index else [keys[0], keys[count]]
        size, width, dtype = draw(1, rows), multiple * draw(1, dims // multiple), dtypes[draw(0, len(dtypes) - 1)]
        pooling = (pipeline.PoolingType.SUM, pipeline.PoolingType.MEAN)[draw(0, 1)]
        configs.append(pipeline.EmbeddingBagConfig(size, width, f"t{index}", dtype, names, pooling=pooling))
        weights.append(torch.randn(size, width, generator=generator).to(dtype))
        for name in names:
            limits[keys.index(name)] = min(limits[keys.index(name)], size)
    return configs, weights, keys, limits


def features_of(configs: Sequence[Any]) -> list[str]:
    """The features of a table-batched lookup, by table, then as named."""
    return [name for config in configs for name in config.feature_names]


def fused_of(pipeline: Any, optimizer: str) -> Any:
    """The optimizer in the backward."""
    return pipeline.FusedOptimizer(optimizer, lr=LR, eps=EPS, beta1=BETA1, beta2=BETA2)


def hyper_of(step: int) -> Hyper:
    """What ``fused_of`` has in one step."""
    return Hyper(LR, step, EPS, BETA1, BETA2)


def lookups_of(pipeline: Any, configs: Any, weights: Any, optimizer: str = "sgd", **options: Any) -> Any:
    """Table-batched lookups with their own copies of the weights."""
    fused = fused_of(pipeline, optimizer)
    copies = [weight.clone() for weight in weights]
    return pipeline.TableBatchedEmbeddingBags(configs, optimizer=fused, weights=copies, **options)


def train(lookups: Any, naive: Naive, batch: Jagged, seed: int, where: str = "") -> None:
    """One step of both; pooled rows and what the step leaves are the same bits."""
    flat = batch.picked(features_of([table.config for table in naive.tables])).flat()
    place = lookups.weight(0).device
    pooled = lookups(*(None if part is None else part.to(place) for part in flat))
    expected = naive.pooled(batch)
    assert_bits(pooled.detach(), expected, f"{where} pooled")
    grad = values_of(expected.shape, seed)
    pooled.backward(grad.to(place))
    naive.step(batch, grad, hyper_of(naive.step_count + 1))
    assert_tables(lookups, naive, where)
