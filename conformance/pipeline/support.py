"""What the requirements of embeddings share: random tables and batches, and a naive model in loops.

The model adds row by row and updates row by row; it uses nothing of what is under test but the optimizers' formulas,
which PIPE-014 holds against the textbook.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from conformance.harness import assert_same_tensor
from refimpl.optimizers import Hyper, update
from twinproof.optimizers import FUSED_OPTIMIZERS
from twinproof.optimizers import OPTIMIZERS as KINDS

OPTIMIZERS = FUSED_OPTIMIZERS
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def generator_of(seed: int) -> torch.Generator:
    """A generator of its own."""
    return torch.Generator().manual_seed(seed)


def values_of(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(tuple(shape), generator=generator_of(seed)).to(dtype)


@dataclass(frozen=True)
class Jagged:
    """Bags of several features as lists: ``bags[feature][sample]`` is a list of ids, ``weights`` likewise."""

    keys: list[str]
    bags: list[list[list[int]]]
    weights: list[list[list[float]]] | None = None

    @property
    def stride(self) -> int:
        """Samples."""
        return len(self.bags[0])

    def kjt(self, pipeline: Any, *, dtype: torch.dtype = torch.int64, by_offsets: bool = False) -> Any:
        """The batch as the implementation's class."""
        ids = torch.tensor([i for feature in self.bags for bag in feature for i in bag], dtype=dtype)
        lengths = torch.tensor([len(bag) for feature in self.bags for bag in feature], dtype=dtype)
        weights = None
        if self.weights is not None:
            weights = torch.tensor([w for feature in self.weights for bag in feature for w in bag])
        if by_offsets:
            offsets = torch.tensor([0, *lengths.tolist()]).cumsum(0).to(dtype)
            return pipeline.KeyedJaggedTensor(self.keys, ids, weights, offsets=offsets)
        return pipeline.KeyedJaggedTensor(self.keys, ids, weights, lengths=lengths, stride=self.stride)

    def flat(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Ids int64 [N], offsets int64 [F * B + 1] and weights, as a table-batched lookup takes them."""
        ids = torch.tensor([i for feature in self.bags for bag in feature for i in bag], dtype=torch.int64)
        offsets = torch.tensor([0, *(len(bag) for feature in self.bags for bag in feature)]).cumsum(0)
        if self.weights is None:
            return ids, offsets, None
        return ids, offsets, torch.tensor([w for feature in self.weights for bag in feature for w in bag])

    def picked(self, features: Sequence[str]) -> Jagged:
        """Some features, in this order."""
        order = [self.keys.index(name) for name in features]
        weights = None if self.weights is None else [self.weights[i] for i in order]
        return Jagged(list(features), [self.bags[i] for i in order], weights)


def joined(parts: Sequence[Jagged]) -> Jagged:
    """Samples of all parts, in this order."""

    def feature(every: list[Any]) -> list[Any]:
        return [[bag for part in every for bag in part[f]] for f in range(len(parts[0].keys))]

    weights = [part.weights for part in parts]
    return Jagged(parts[0].keys, feature([part.bags for part in parts]), None if None in weights else feature(weights))


def random_jagged(
    keys: Sequence[str], rows: Sequence[int], stride: int, seed: int, *, longest: int = 4, weighted: bool = False
) -> Jagged:
    """Bags of 0 to ``longest`` ids of 0 to ``rows[feature] - 1``, with duplicates; weights of both signs and zero."""
    generator = generator_of(seed)

    def bag(limit: int) -> list[int]:
        length = int(torch.randint(0, longest + 1, (1,), generator=generator))
        found: list[int] = torch.randint(0, limit, (length,), generator=generator).tolist()
        return found

    bags = [[bag(limit) for _ in range(stride)] for limit in rows]
    if not weighted:
        return Jagged(list(keys), bags)
    weights = [[(torch.randint(-4, 5, (len(b),), generator=generator) / 3).tolist() for b in f] for f in bags]
    return Jagged(list(keys), bags, weights)


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
    """Equal dtype, shape and bytes."""
    assert_same_tensor(got, expected, where=where)


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
