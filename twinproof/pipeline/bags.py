"""Pooled lookups in several tables at once, with the optimizer in the backward.

One backward is one step: duplicates are reduced first, then each row that was looked up is updated once. Learning rate
and step are read in the backward, so that an early or repeated lookup changes nothing (torchrec reads them in the
forward: facts/pipeline.md 0.15).
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from refimpl.optimizers import Hyper, reduce_duplicates, row_sum, update
from twinproof.errors import ConfigError, IdRangeError, ShapeError
from twinproof.pipeline.config import BOUNDS_CHECKS, FusedOptimizer
from twinproof.pipeline.eager import eagerly
from twinproof.pipeline.jagged import Bags, check_ids, pool, spread
from twinproof.pipeline.tables import EmbeddingBagConfig, check_tables, initial_weight

__all__ = [
    "InBackwardOptimizer",
    "TableBatchedEmbeddingBags",
    "TableBatchedEmbeddingBagsBase",
    "check_bounds",
    "lookup",
]

logger = logging.getLogger("twinproof.pipeline")


class InBackwardOptimizer(torch.optim.Optimizer):
    """A handle on the optimizer in the backward, for schedulers: ``step()`` and ``zero_grad()`` do nothing.

    Attributes:
        config: what was asked for; the learning rate of the moment is ``param_groups[0]["lr"]``.
        step_count: backward passes so far; Adam's step.
    """

    def __init__(self, config: FusedOptimizer) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(0))], {"lr": config.lr})
        self.config, self.step_count = config, 0

    def __getstate__(self) -> dict[str, Any]:
        # An optimizer names what is copied and pickled; its own attributes are not among it.
        state: dict[str, Any] = super().__getstate__()
        return {**state, "config": self.config, "step_count": self.step_count}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The backward has taken it already."""
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """There are no gradients."""

    def count_step(self) -> None:
        """A backward is a step; schedulers, which may only follow one, are told."""
        self.step_count += 1
        self._opt_called = True

    def hyper(self) -> Hyper:
        """Hyperparameters of the step that is being taken."""
        return self.config.hyper(float(self.param_groups[0]["lr"]), self.step_count)


class _Lookup(torch.autograd.Function):
    """Pooled rows; the backward takes the optimizer's step."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, weights: torch.Tensor | None, module: Any, bags: Bags) -> torch.Tensor:
        ctx.module, ctx.bags = module, bags
        pooled: torch.Tensor = module._pool(bags)
        return pooled

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        grad, module = grads[0].contiguous(), ctx.module
        # From the rows as they were looked up, before the step changes them.
        weights = module._weight_gradients(ctx.bags, grad) if ctx.needs_input_grad[1] else None
        module._step(ctx.bags, grad)
        return None, weights, None, None


def lookup(module: Any, bags: Bags) -> torch.Tensor:
    """``module._pool(bags)``, whose backward calls ``module._step(bags, grad)``."""
    # Autograd visits a function only when one of its inputs wants a gradient; this one never gets any.
    anchor = torch.zeros(0, requires_grad=True, device=bags.indices.device)
    pooled: torch.Tensor = _Lookup.apply(anchor, bags.weights, module, bags)  # type: ignore[no-untyped-call]
    return pooled


class TableBatchedEmbeddingBagsBase(torch.nn.Module):
    """Pooled lookups in T tables, with the optimizer in the backward: FBGEMM's table-batched embeddings.

    Args:
        tables: their features, by table and then as named, are the features of a batch.
        optimizer: what the backward runs.
        bounds_check: an id outside its table raises ("fatal"), or is row 0, with ("warning") or without ("ignore") a
            line in the log, as FBGEMM does.
        weights: [E, D] of each table, used as they are; None initialises them.
        in_backward: a handle that somebody else counts the steps of.
        device: of the tables.

    The tables are buffers, not parameters: nothing but the backward updates them. Optimizer states are float32 zeros
    at first, [E, D], or [E, 1] where the optimizer keeps one value for a row.

    Raises:
        ConfigError: see ``EmbeddingBagConfig`` and ``FusedOptimizer``. ShapeError: weights of another shape.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        *,
        optimizer: FusedOptimizer | None = None,
        bounds_check: str = "fatal",
        weights: Sequence[torch.Tensor] | None = None,
        in_backward: InBackwardOptimizer | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        if bounds_check not in BOUNDS_CHECKS:
            raise ConfigError("not a check", got=bounds_check, expected=BOUNDS_CHECKS, where="bounds_check")
        self.tables, self.bounds_check = check_tables(tables, EmbeddingBagConfig), bounds_check
        self.feature_tables = [i for i, table in enumerate(self.tables) for _ in table.feature_names]
        self._counts = in_backward is None
        self.fused_optimizer = in_backward or InBackwardOptimizer(optimizer or FusedOptimizer())
        for index, table in enumerate(self.tables):
            weight = initial_weight(table, device) if weights is None else weights[index]
            self._hold(index, table, weight)

    def _hold(self, index: int, table: EmbeddingBagConfig, weight: torch.Tensor) -> None:
        shape = (table.num_embeddings, table.embedding_dim)
        if tuple(weight.shape) != shape or weight.dtype != table.dtype or not weight.is_contiguous():
            got = (tuple(weight.shape), weight.dtype, weight.stride())
            raise ShapeError("not the weight of this table", got=got, expected=(shape, table.dtype), where=table.name)
        self.register_buffer(f"weight_{index}", weight.detach())
        for name, width in self.fused_optimizer.config.state_widths(table.embedding_dim).items():
            state = self.fresh((table.num_embeddings, width), torch.float32, weight.device)
            self.register_buffer(f"{name}_{index}", state.zero_())

    @staticmethod
    def fresh(shape: tuple[int, int], dtype: torch.dtype, device: Any) -> torch.Tensor:
        """Memory for a table or a state, not initialised."""
        return torch.empty(shape, dtype=dtype, device=device)

    def weight(self, index: int) -> torch.Tensor:
        """The weight [E, D] of one table, itself and not a copy."""
        return self.get_buffer(f"weight_{index}")

    def states(self, index: int) -> dict[str, torch.Tensor]:
        """State name -> float32 [E, D] or [E, 1] of one table, themselves and not copies."""
        widths = self.fused_optimizer.config.state_widths(self.tables[index].embedding_dim)
        return {name: self.get_buffer(f"{name}_{index}") for name in widths}

    @eagerly
    def forward(
        self, indices: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Pooled rows, float32 [B, sum of D over features].

        Args:
            indices: int64 or int32 ids [N], by feature, sample and position.
            offsets: int64 or int32 [F * B + 1], where each bag begins.
            per_sample_weights: float32 [N] or None; gets a gradient if it requires one.

        The backward reduces duplicates in ascending position, then updates each row once.

        Raises:
            IdRangeError: an id outside its table, under "fatal"; nothing was changed.
            ShapeError: offsets that do not cut the ids into bags of all features, or another number of weights.
        """
        bags = self.checked(Bags(indices, offsets.to(torch.int64), per_sample_weights))
        return lookup(self, bags)

    def checked(self, bags: Bags) -> Bags:
        """The bags, ids outside their tables treated as configured. Raises what ``forward`` does."""
        self._check_offsets(bags)
        counts = [self.tables[table].num_embeddings for table in self.feature_tables]
        return check_bounds(bags, counts, [self.tables[t].name for t in self.feature_tables], self.bounds_check, self)

    def _check_offsets(self, bags: Bags) -> None:
        count, found = len(self.feature_tables), bags.offsets.numel() - 1
        if found < 0 or found % count:
            raise ShapeError("offsets are [features * samples + 1]", got=found + 1, expected=f"{count} * samples + 1")
        check_ids(bags)
        if bags.offsets.device.type == "cpu":
            ends = (int(bags.offsets[0]), int(bags.offsets[-1]))
            if ends != (0, bags.indices.numel()) or bool((bags.offsets.diff() < 0).any()):
                raise ShapeError("offsets do not cut the ids", got=ends, expected=(0, bags.indices.numel()))

    def _mean(self, table: int) -> bool:
        return self.tables[table].is_mean

    def _step(self, bags: Bags, grad: torch.Tensor) -> None:
        if self._counts:
            self.fused_optimizer.count_step()
        self._update(bags, grad, self.fused_optimizer.hyper())

    @staticmethod
    @abstractmethod
    def outside(bags: Bags, row_counts: Sequence[int]) -> tuple[int, int]:
        """How many ids are outside of their feature's rows, and the position of the first, or -1."""

    @staticmethod
    @abstractmethod
    def mended(bags: Bags, row_counts: Sequence[int]) -> torch.Tensor:
        """The ids, those outside of their feature's rows as 0."""

    @abstractmethod
    def _pool(self, bags: Bags) -> torch.Tensor:
        """``pool`` of each feature, side by side."""

    @abstractmethod
    def _update(self, bags: Bags, grad: torch.Tensor, hyper: Hyper) -> None:
        """For each table, over its features in order: ``spread``, ``reduce_duplicates``, ``update``."""

    @abstractmethod
    def _weight_gradients(self, bags: Bags, grad: torch.Tensor) -> torch.Tensor:
        """Float32 [N]: ``row_sum`` of the bag's gradient (mean: divided) times the row."""


def check_bounds(bags: Bags, row_counts: Sequence[int], names: Sequence[str], bounds_check: str, kernels: Any) -> Bags:
    """The bags with ids inside their tables, see ``TableBatchedEmbeddingBags``. Raises IdRangeError under "fatal"."""
    count, first = kernels.outside(bags, row_counts)
    if count == 0:
        return bags
    stride = (bags.offsets.numel() - 1) // len(row_counts)
    bag = int((bags.offsets[1:] <= first).sum())
    error = IdRangeError(
        f"{count} ids outside of their tables",
        got=int(bags.indices[first]),
        expected=f"0 to {row_counts[bag // stride] - 1}",
        where=f"table {names[bag // stride]}, sample {bag % stride}, position {first}",
    )
    if bounds_check == "fatal":
        raise error
    if bounds_check == "warning":
        logger.warning("%s; row 0 is taken instead", error)
    return Bags(kernels.mended(bags, row_counts), bags.offsets, bags.weights)


class TableBatchedEmbeddingBags(TableBatchedEmbeddingBagsBase):
    __doc__ = TableBatchedEmbeddingBagsBase.__doc__

    @staticmethod
    def _rows_of_each(bags: Bags, row_counts: Sequence[int]) -> torch.Tensor:
        sizes = [bags.feature(f, len(row_counts)).indices.numel() for f in range(len(row_counts))]
        return torch.tensor(row_counts).repeat_interleave(torch.tensor(sizes))

    @staticmethod
    def outside(bags: Bags, row_counts: Sequence[int]) -> tuple[int, int]:
        limits = TableBatchedEmbeddingBags._rows_of_each(bags, row_counts)
        bad = ((bags.indices < 0) | (bags.indices >= limits)).nonzero()[:, 0]
        return bad.numel(), int(bad[0]) if bad.numel() else -1

    @staticmethod
    def mended(bags: Bags, row_counts: Sequence[int]) -> torch.Tensor:
        limits = TableBatchedEmbeddingBags._rows_of_each(bags, row_counts)
        bad = (bags.indices < 0) | (bags.indices >= limits)
        return bags.indices.masked_fill(bad, 0)

    def _parts(self, bags: Bags, grad: torch.Tensor | None = None) -> list[tuple[int, Bags, Any]]:
        """(table, bags, columns of the gradient) of each feature."""
        widths = [self.tables[table].embedding_dim for table in self.feature_tables]
        columns = [None] * len(widths) if grad is None else torch.split(grad, widths, dim=1)
        return [
            (table, bags.feature(feature, len(widths)), columns[feature])
            for feature, table in enumerate(self.feature_tables)
        ]

    def _pool(self, bags: Bags) -> torch.Tensor:
        pooled = [pool(self.weight(t)[part.indices], part, self._mean(t)) for t, part, _ in self._parts(bags)]
        return torch.cat(pooled, dim=1)

    def _update(self, bags: Bags, grad: torch.Tensor, hyper: Hyper) -> None:
        parts = self._parts(bags, grad)
        for table in range(len(self.tables)):
            mine = [(part, columns) for t, part, columns in parts if t == table]
            grads = torch.cat([spread(columns, part, self._mean(table)) for part, columns in mine])
            rows, sums = reduce_duplicates(torch.cat([part.indices for part, _ in mine]).to(torch.int64), grads)
            states = {name: state[rows] for name, state in self.states(table).items()}
            kind = self.fused_optimizer.config.kind
            weight, states = update(kind, self.weight(table)[rows], sums, states, hyper)
            self.weight(table)[rows] = weight
            for name, state in states.items():
                self.states(table)[name][rows] = state

    def _weight_gradients(self, bags: Bags, grad: torch.Tensor) -> torch.Tensor:
        result = []
        for table, part, columns in self._parts(bags, grad):
            unweighted = Bags(part.indices, part.offsets)
            rows = self.weight(table)[part.indices].to(torch.float32)
            result.append(row_sum(spread(columns, unweighted, self._mean(table)) * rows)[:, 0])
        return torch.cat(result)
