"""Lookups in several tables at once, with the optimizer in the backward, and the seam below them.

One backward of tables with a fused optimizer is one step: duplicates are reduced first, then each row that was looked
up is updated once. The backward reads learning rate and step, so that an early or repeated lookup changes nothing.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, ParamSpec, Protocol, TypeVar

import torch

from twinproof.errors import ConfigError, IdRangeError, ShapeError
from twinproof.optimizers import Hyper
from twinproof.pipeline.config import (
    BOUNDS_CHECKS,
    EmbeddingBagConfig,
    FusedOptimizer,
    check_tables,
    initial_weight,
)
from twinproof.pipeline.jagged import Bags, check_ids

__all__ = [
    "BoundToLookup",
    "HeldTable",
    "InBackwardOptimizer",
    "KeyValueBags",
    "LateCheck",
    "Lookup",
    "StoreRows",
    "TableBatchedEmbeddingBags",
    "check_bounds",
    "eagerly",
    "lookup",
    "settle_bounds",
]

logger = logging.getLogger("twinproof.pipeline")

P = ParamSpec("P")
R = TypeVar("R")


class HeldTable(NamedTuple):
    """One table in memory: ``weight`` [E, D], whether bags are means, and float32 ``states`` [E, D] or [E, 1].

    Only ``Lookup.update`` is given states.
    """

    weight: torch.Tensor
    is_mean: bool = False
    states: Mapping[str, torch.Tensor] = MappingProxyType({})


class Lookup(Protocol):
    """How bags of several tables are pooled, and how their gradients step the tables.

    This is the seam because every bit of a table comes from here: one implementation is formulas over whole tensors,
    the other one pass of C++ or CUDA over all tables. Modules, autograd and state dicts above it are the same. An
    engine holds nothing: tables, batches and hyperparameters are arguments.

    ``tables`` are those of a module; ``feature_tables`` is the table of each feature, by table, then as named there;
    ``bags`` are feature-major, with ids inside of their tables.
    """

    def fresh(self, shape: tuple[int, int], dtype: torch.dtype, device: Any) -> torch.Tensor:
        """Memory for a table or a state, not initialised."""

    def outside(self, bags: Bags, row_counts: Sequence[int]) -> tuple[int, int]:
        """How many ids are outside of their feature's rows, and the position of the first, or -1."""

    def settled(self, bags: Bags, row_counts: Sequence[int]) -> tuple[Bags, torch.Tensor] | None:
        """Bags that lead nowhere else whatever was given, and int64 [2] on their device: what was wrong.

        The two are what ``outside`` returns, the position being the largest int64 where there is none; or -1 and which
        offset is wrong. None where nobody has to wait to know.
        """

    def mended(self, bags: Bags, row_counts: Sequence[int]) -> torch.Tensor:
        """The ids, those outside of their feature's rows as 0."""

    def pool(self, tables: Sequence[HeldTable], feature_tables: Sequence[int], bags: Bags) -> torch.Tensor:
        """Float32 [B, sum of D over features]: each bag's rows added from +0 in ascending position.

        A weighted row is multiplied before it is added, each rounded once; a mean is the sum divided by the number of
        ids of the bag, or by 1.
        """

    def spread(self, bags: Bags, grad: torch.Tensor, feature_count: int) -> torch.Tensor:
        """The gradient [N, D] of each id's row in one table of sums, from that of the bags, [B, features * D]."""

    def update(
        self,
        tables: Sequence[HeldTable],
        feature_tables: Sequence[int],
        bags: Bags,
        grad: torch.Tensor,
        optimizer: str,
        hyper: Hyper,
    ) -> None:
        """Step every row that was looked up once, in place, with the sum of its gradients by feature and position."""

    def weight_gradients(
        self, tables: Sequence[HeldTable], feature_tables: Sequence[int], bags: Bags, grad: torch.Tensor
    ) -> torch.Tensor:
        """Float32 [N]: the sum over the row of the bag's gradient, a mean's divided, times the row."""


def eagerly(method: Callable[P, R]) -> Callable[P, R]:
    """The method, which ``torch.compile`` does not look into: one graph break, and no cost elsewhere.

    A traced lookup would fix shapes, steps and learning rates in a graph, and make a graph for each list of lengths.
    """

    @functools.wraps(method)
    def call(*args: P.args, **options: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            # Found here and not above: it imports the compiler, which an eager model never needs.
            disabled: Callable[P, R] = torch.compiler.disable(method)  # type: ignore[no-untyped-call]
            return disabled(*args, **options)
        return method(*args, **options)

    return call


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


class BoundToLookup(torch.nn.Module):
    """A module that a subclass binds to an implementation: ``class Mine(Module, engine=MyLookup)``."""

    _make_engine: ClassVar[Callable[[], Lookup]]

    def __init_subclass__(cls, *, engine: Callable[[], Lookup] | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if engine is not None:
            cls._make_engine = engine


class TableBatchedEmbeddingBags(BoundToLookup):
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
        self._engine = type(self)._make_engine()
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
            state = self._engine.fresh((table.num_embeddings, width), torch.float32, weight.device)
            self.register_buffer(f"{name}_{index}", state.zero_())

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
        return check_bounds(
            bags, counts, [self.tables[t].name for t in self.feature_tables], self.bounds_check, self._engine
        )

    def _check_offsets(self, bags: Bags) -> None:
        count, found = len(self.feature_tables), bags.offsets.numel() - 1
        if found < 0 or found % count:
            raise ShapeError("offsets are [features * samples + 1]", got=found + 1, expected=f"{count} * samples + 1")
        check_ids(bags)
        if bags.offsets.device.type == "cpu":
            ends = (int(bags.offsets[0]), int(bags.offsets[-1]))
            if ends != (0, bags.indices.numel()) or bool((bags.offsets.diff() < 0).any()):
                raise ShapeError("offsets do not cut the ids", got=ends, expected=(0, bags.indices.numel()))

    def _held(self) -> list[HeldTable]:
        return [HeldTable(self.weight(index), table.is_mean) for index, table in enumerate(self.tables)]

    def _pool(self, bags: Bags) -> torch.Tensor:
        return self._engine.pool(self._held(), self.feature_tables, bags)

    def _weight_gradients(self, bags: Bags, grad: torch.Tensor) -> torch.Tensor:
        return self._engine.weight_gradients(self._held(), self.feature_tables, bags, grad)

    def _step(self, bags: Bags, grad: torch.Tensor) -> None:
        if self._counts:
            self.fused_optimizer.count_step()
        handle, held = self.fused_optimizer, self._held()
        with_states = [table._replace(states=self.states(index)) for index, table in enumerate(held)]
        self._engine.update(with_states, self.feature_tables, bags, grad, handle.config.kind, handle.hyper())


def check_bounds(
    bags: Bags, row_counts: Sequence[int], names: Sequence[str], bounds_check: str, engine: Lookup
) -> Bags:
    """The bags with ids inside their tables, see ``TableBatchedEmbeddingBags``. Raises IdRangeError under "fatal"."""
    count, first = engine.outside(bags, row_counts)
    if count == 0:
        return bags
    error = _outside_error(bags, row_counts, names, count, first)
    if bounds_check == "fatal":
        raise error
    if bounds_check == "warning":
        _warn(error)
    return Bags(engine.mended(bags, row_counts), bags.offsets, bags.weights)


def _outside_error(bags: Bags, row_counts: Sequence[int], names: Sequence[str], count: int, first: int) -> IdRangeError:
    stride = (bags.offsets.numel() - 1) // len(row_counts)
    bag = int((bags.offsets[1:] <= first).sum())
    return IdRangeError(
        f"{count} ids outside of their tables",
        got=int(bags.indices[first]),
        expected=f"0 to {row_counts[bag // stride] - 1}",
        where=f"table {names[bag // stride]}, sample {bag % stride}, position {first}",
    )


def _warn(error: IdRangeError) -> None:
    logger.warning("%s; row 0 is taken instead", error)


class LateCheck:
    """A check of ids whose answer is still on the device, where the host waits for something else soon.

    Attributes:
        found: int64 [2], see ``Lookup.settled``; read it together with what is waited for, then ask ``failure``.
    """

    def __init__(
        self, bags: Bags, row_counts: Sequence[int], names: Sequence[str], bounds_check: str, found: torch.Tensor
    ) -> None:
        self._bags, self._row_counts, self._names, self._bounds_check = bags, row_counts, names, bounds_check
        self.found = found

    def has_failed(self) -> torch.Tensor:
        """On the device: whether ``failure`` will be an error, as int64."""
        count = self.found[0]
        return (count != 0 if self._bounds_check == "fatal" else count < 0).to(torch.int64)

    def failure(self, count: int, first: int) -> Exception | None:
        """What a check that waits would have raised: IdRangeError, ShapeError. Under "warning" it writes the log."""
        bags = self._bags
        if count == 0:
            return None
        if count < 0:
            got, expected = int(bags.offsets[first]), f"ascending from 0 to {bags.indices.numel()}"
            return ShapeError("offsets do not cut the ids", got=got, expected=expected, where=f"offsets[{first}]")
        if self._bounds_check == "ignore":
            return None
        error = _outside_error(bags, self._row_counts, self._names, count, first)
        if self._bounds_check == "fatal":
            return error
        _warn(error)
        return None


def settle_bounds(
    bags: Bags, row_counts: Sequence[int], names: Sequence[str], bounds_check: str, engine: Lookup
) -> tuple[Bags, LateCheck | None]:
    """``check_bounds`` for whoever reads the answer later: where it would wait, bags that are safe, and a check."""
    settled = engine.settled(bags, row_counts)
    if settled is None:
        return check_bounds(bags, row_counts, names, bounds_check, engine), None
    return settled[0], LateCheck(bags, row_counts, names, bounds_check, settled[1])


class StoreRows:
    """The rows of one table of a ``KVStore``: what a lookup reads and a step writes."""

    def __init__(self, store: Any, table: str) -> None:
        self.store, self.table = store, table

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """Float32 [n, D] of these ids, int64 [n]."""
        rows: torch.Tensor = self.store.get(self.table, ids.contiguous())
        return rows.to(torch.float32)

    def step(self, ids: torch.Tensor, grads: torch.Tensor, hyper: Hyper) -> None:
        """Take one step of the optimizer in the rows, from the gradient [n, D] of each id."""
        betas = {"eps": hyper.eps, "beta1": hyper.beta1, "beta2": hyper.beta2}
        self.store.apply_gradients(self.table, ids.contiguous(), grads, hyper.lr, hyper.step, **betas)


class KeyValueBags:
    """Pooled lookups of one table in a ``KVStore``; sums only, for a mean is taken over all ranks' rows.

    Args:
        rows: the table's rows in the store.
        table: its configuration.
        optimizer: the handle that somebody else counts the steps of.
        engine: looks up in the rows that were read, each of which is a row of a table of its own.

    Raises:
        ConfigError: a store whose rows are not this table's.
    """

    def __init__(
        self, rows: StoreRows, table: EmbeddingBagConfig, optimizer: InBackwardOptimizer, engine: Lookup
    ) -> None:
        layout = rows.store.layout(table.name)
        found = (layout.embedding_dim, layout.weight_dtype, layout.optimizer)
        expected = (table.embedding_dim, table.dtype, optimizer.config.kind)
        if found != expected:
            raise ConfigError("the store's rows are not this table's", got=found, expected=expected, where=table.name)
        self.rows, self.table, self.fused_optimizer, self._engine = rows, table, optimizer, engine

    def _read(self, bags: Bags) -> tuple[list[HeldTable], list[int], torch.Tensor]:
        """The rows of all ids as one table, its features, and the place of each id in it."""
        rows = self.rows.read(bags.indices)
        places = torch.arange(rows.shape[0], device=rows.device)
        return [HeldTable(rows)], [0] * len(self.table.feature_names), places

    def _pool(self, bags: Bags) -> torch.Tensor:
        tables, features, places = self._read(bags)
        return self._engine.pool(tables, features, Bags(places, bags.offsets, bags.weights))

    def _step(self, bags: Bags, grad: torch.Tensor) -> None:
        grads = self._engine.spread(bags, grad, len(self.table.feature_names))
        self.rows.step(bags.indices, grads, self.fused_optimizer.hyper())

    def _weight_gradients(self, bags: Bags, grad: torch.Tensor) -> torch.Tensor:
        tables, features, places = self._read(bags)
        return self._engine.weight_gradients(tables, features, Bags(places, bags.offsets), grad)
