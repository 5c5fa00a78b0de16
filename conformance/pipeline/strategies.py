"""Arguments of the operators under the embeddings, random, and what they have to give, in loops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from conformance.pipeline.batches import Jagged, generator_of
from conformance.pipeline.model import DTYPES, Naive
from refimpl.optimizers import Hyper
from twinproof.optimizers import OPTIMIZERS
from twinproof.pipeline.config import EmbeddingBagConfig, PoolingType

__all__ = ["Arguments", "draw_arguments"]

DIMS = (1, 3, 4, 8, 13, 16, 20, 33, 64, 100)
LR = 0.1


@dataclass
class Arguments:
    """As ``fastimpl.ops.step_bags`` takes them; see there."""

    tables: list[torch.Tensor]
    momentum1: list[torch.Tensor]
    momentum2: list[torch.Tensor]
    feature_tables: list[int]
    indices: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None
    means: list[bool]
    grad: torch.Tensor
    optimizer: str
    step_number: int

    @classmethod
    def of(
        cls,
        seed: int,
        dtypes: Sequence[torch.dtype],
        optimizer: str,
        *,
        is_weighted: bool,
        features: int = 3,
        bags: int = 4,
        longest: int = 4,
        rows: int = 6,
        ids: torch.dtype = torch.int64,
    ) -> Arguments:
        """One table for each dtype, of random dims; every bag but one has up to ``longest`` ids."""
        generator = generator_of(seed)

        def integers(low: int, high: int, count: int) -> list[int]:
            found: list[int] = torch.randint(low, high, (count,), generator=generator).tolist()
            return found

        dims = [DIMS[at] for at in integers(0, len(DIMS), len(dtypes))]
        tables = [
            torch.randn(rows, dim, generator=generator).to(dtype) for dim, dtype in zip(dims, dtypes, strict=True)
        ]
        used = integers(0, len(tables), features)
        lengths = torch.randint(0, longest + 1, (features * bags,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        count = int(offsets[-1])
        momenta = []
        for name in ("momentum1", "momentum2"):
            widths = [OPTIMIZERS[optimizer].widths(dim).get(name, 0) for dim in dims]
            is_row_wise = any(state.is_row_wise for state in OPTIMIZERS[optimizer].states if state.name == name)
            full = [torch.rand(rows, width, generator=generator) if width else torch.empty(0) for width in widths]
            one = [torch.rand(rows, generator=generator) for _ in dims]
            momenta.append(one if is_row_wise else full)
        return cls(
            tables,
            momenta[0],
            momenta[1],
            used,
            torch.randint(0, rows, (count,), generator=generator).to(ids),
            offsets,
            torch.randn(count, generator=generator) if is_weighted else None,
            [mean == 1 for mean in integers(0, 2, len(tables))],
            torch.randn(bags, sum(dims[table] for table in used), generator=generator),
            optimizer,
            integers(1, 4, 1)[0],
        )

    def lengths(self) -> torch.Tensor:
        """Of every bag, feature by feature."""
        return self.offsets.diff()

    def written(self) -> list[list[torch.Tensor]]:
        """What a step writes."""
        return [self.tables, self.momentum1, self.momentum2]

    def step(self, ops: Any, tables: list[torch.Tensor], *, isa: int = -1) -> None:
        """One step by the operator."""
        states, bags = (self.momentum1, self.momentum2), (self.feature_tables, self.indices, self.offsets)
        rest = (self.weights, self.means, self.grad, self.optimizer, LR)
        ops.step_bags(tables, *states, *bags, *rest, step=self.step_number, isa=isa)

    def occurrences(self) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """Of every position: table, row, the gradient of its bag, and that times its weight."""
        column, count = 0, self.grad.shape[0]
        for feature, table in enumerate(self.feature_tables):
            dim = self.tables[table].shape[1]
            for bag in range(count):
                first, last = self.offsets[feature * count + bag : feature * count + bag + 2].tolist()
                grad = self.grad[bag, column : column + dim]
                grad = grad / torch.tensor(float(last - first)) if self.means[table] and last > first else grad
                for at in range(first, last):
                    scaled = grad if self.weights is None else self.weights[at] * grad
                    yield table, int(self.indices[at]), grad, scaled
            column += dim

    def _naive(self) -> tuple[Naive, Jagged, torch.Tensor]:
        """The oracle with these tables and states, the batch, and where its columns, by table, stand in ``grad``."""
        names, count = [str(feature) for feature in range(len(self.feature_tables))], self.grad.shape[0]
        configs = [
            EmbeddingBagConfig(
                table.shape[0],
                table.shape[1],
                data_type=table.dtype,
                feature_names=[name for name, used in zip(names, self.feature_tables, strict=True) if used == index],
                pooling=PoolingType.MEAN if self.means[index] else PoolingType.SUM,
            )
            for index, table in enumerate(self.tables)
        ]
        naive = Naive(configs, self.tables, self.optimizer)
        for name, momenta in (("momentum1", self.momentum1), ("momentum2", self.momentum2)):
            for table, momentum in zip(naive.tables, momenta, strict=True):
                if momentum.numel():
                    table.states[name] = momentum.reshape(momentum.shape[0], -1).clone()

        def bags(values: torch.Tensor) -> list[list[Any]]:
            flat = [part.tolist() for part in torch.split(values, self.lengths().tolist())]
            return [flat[feature * count : (feature + 1) * count] for feature in range(len(names))]

        batch = Jagged(names, bags(self.indices), None if self.weights is None else bags(self.weights))
        widths = [self.tables[table].shape[1] for table in self.feature_tables]
        columns = torch.split(torch.arange(sum(widths)), widths)
        order = sorted(range(len(names)), key=self.feature_tables.__getitem__)
        return naive, batch, torch.cat([columns[feature] for feature in order])

    def pooled(self) -> torch.Tensor:
        """Sums from +0, one row after the other."""
        naive, batch, columns = self._naive()
        result = torch.empty_like(self.grad)
        result[:, columns] = naive.pooled(batch)
        return result

    def stepped(self) -> list[list[torch.Tensor]]:
        """What a step has to write."""
        naive, batch, columns = self._naive()
        naive.step(batch, self.grad[:, columns], Hyper(LR, self.step_number))
        after = [[table.weight for table in naive.tables]]
        for name, before in (("momentum1", self.momentum1), ("momentum2", self.momentum2)):
            pairs = zip(naive.tables, before, strict=True)
            after.append([table.states[name].reshape(b.shape) if b.numel() else b for table, b in pairs])
        return after


def draw_arguments(data: st.DataObject, optimizer: str = "sgd", *, is_filled: bool = False) -> Arguments:
    """Any arguments; ``is_filled``: at least one id."""
    arguments = Arguments.of(
        data.draw(st.integers(0, 2**32)),
        data.draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3)),
        optimizer,
        is_weighted=data.draw(st.booleans()),
        features=data.draw(st.integers(1, 4)),
        bags=data.draw(st.integers(1, 5)),
        longest=data.draw(st.sampled_from([1, 3, 12] if is_filled else [0, 1, 3, 12])),
        rows=data.draw(st.integers(1, 9)),
        ids=data.draw(st.sampled_from([torch.int32, torch.int64])),
    )
    if is_filled and arguments.indices.numel() == 0:
        return draw_arguments(data, optimizer, is_filled=is_filled)
    return arguments
