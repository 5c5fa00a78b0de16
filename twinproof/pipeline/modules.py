"""Lookups in several tables at once, and the modules that users see: torchrec's collections and weights by position.

One backward of tables with a fused optimizer is one step: duplicates are reduced first, then each row that was looked
up is updated once. The backward reads learning rate and step, so that an early or repeated lookup changes nothing.
Collections without a fused optimizer have dense gradients. ``Lookup`` is the seam that an implementation binds.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch

from twinproof.engine import FirstDerivatives, eagerly
from twinproof.errors import ConfigError, IdRangeError, MissingKeyError, ShapeError, UnsupportedError, check_flags
from twinproof.optimizers import Hyper
from twinproof.pipeline.batches import JaggedTensor, KeyedJaggedTensor, KeyedTensor, own_batch, select, select_each
from twinproof.pipeline.config import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    FusedOptimizer,
    InBackwardOptimizer,
    check_attributes,
    check_bounds_kind,
    check_given,
    check_names,
    check_tables,
    embedding_names,
    initial_weight,
    initialized,
    own_step,
    readable,
)
from twinproof.pipeline.jagged import Bags, as_many, check_ids, check_places, check_positions, of_tables, positions_in

__all__ = [
    "BoundToLookup",
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "FeatureProcessedEmbeddingBagCollection",
    "FeatureProcessor",
    "FeatureProcessorsCollection",
    "HeldTable",
    "InBackwardOptimizer",
    "KeyValueBags",
    "LateCheck",
    "Lookup",
    "Pooled",
    "PositionWeightedModule",
    "PositionWeightedModuleCollection",
    "StoreRows",
    "TableBatchedEmbeddingBags",
    "check_bounds",
    "check_each",
    "lookup",
    "position_processors",
    "position_weights_of",
    "settle_bounds",
    "table_module",
]

logger = logging.getLogger("twinproof.pipeline")


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
    ``bags`` are feature-major, with ids inside of their tables. ``row_counts`` are those of each feature's table, -1
    where rows are found by id, and no id is outside.
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


def _watch(ctx: Any, *tensors: torch.Tensor | None) -> None:
    """Batches are the caller's memory: torch is to see whether they are written over before the backward."""
    ctx.save_for_backward(*(tensor.detach() for tensor in tensors if tensor is not None))


def _check_watched(ctx: Any) -> None:
    """Raise torch's RuntimeError where they were, and for a second backward that ``retain_graph`` did not announce."""
    tuple(ctx.saved_tensors)


class _Lookup(FirstDerivatives):
    """Pooled rows; the backward takes the optimizer's step."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, weights: torch.Tensor | None, module: Any, bags: Bags) -> torch.Tensor:
        ctx.module, ctx.bags = module, bags
        _watch(ctx, bags.indices, bags.offsets, bags.weights)
        pooled: torch.Tensor = module._pool(bags)
        return pooled

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        _check_watched(ctx)
        grad, module = grads[0].contiguous(), ctx.module
        # From the rows before this step changes them; another backward since the lookup has changed them already.
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
        weights: [E, D] of each table, used as they are and where they are; None initialises them.
        in_backward: a handle that somebody else counts the steps of, in place of ``optimizer``.
        device: of the tables that are initialised.

    The tables are buffers, not parameters: nothing but the backward updates them. Optimizer states are float32 zeros
    at first, [E, D], or [E, 1] where the optimizer keeps one value for a row. A state dict has both, and the ``step``.

    Raises:
        ConfigError: see ``EmbeddingBagConfig`` and ``FusedOptimizer``; a loaded step that is none, before anything is
            changed. ShapeError: weights of another shape.
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
        self._engine = type(self)._make_engine()
        self.tables, self.bounds_check = check_tables(tables, EmbeddingBagConfig), check_bounds_kind(bounds_check)
        check_given(self.tables, optimizer=optimizer, in_backward=in_backward, weights=weights, device=device)
        self.feature_tables = [i for i, table in enumerate(self.tables) for _ in table.feature_names]
        self._counts = in_backward is None
        self.fused_optimizer = in_backward or InBackwardOptimizer(FusedOptimizer() if optimizer is None else optimizer)
        # Of every table alike, and asked for in every step.
        self._state_names = tuple(self.fused_optimizer.config.state_widths(1))
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

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Tables and states go where they are sent; what they are made of stays what their configuration says."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            found = fn(tensor)
            return found if found.dtype == tensor.dtype else tensor.to(found.device)

        return super()._apply(moved, recurse)  # type: ignore[no-untyped-call]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}step"] = torch.tensor([self.fused_optimizer.step_count], device="cpu")

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        name, buffers = f"{prefix}step", self.named_buffers(recurse=False, remove_duplicate=False)
        step, dtypes = own_step(state_dict.get(name, 0), name), {held: each.dtype for held, each in buffers}
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        # ``assign=True`` takes any tensor; one that is this table's already stays itself.
        for held, dtype in dtypes.items():
            self._buffers[held] = self._buffers[held].to(dtype).contiguous()  # type: ignore[union-attr]
        if name in state_dict:
            self.fused_optimizer.step_count = step
            unexpected[:] = [each for each in unexpected if each != name]
        elif strict:
            missing.append(name)

    def weight(self, index: int) -> torch.Tensor:
        """The weight [E, D] of one table, itself and not a copy."""
        # A step asks for every table several times, and torch's own get_buffer takes ten times as long.
        return self._buffers[f"weight_{index}"]  # type: ignore[return-value]

    def states(self, index: int) -> dict[str, torch.Tensor]:
        """State name -> float32 [E, D] or [E, 1] of one table, themselves and not copies."""
        return {name: self._buffers[f"{name}_{index}"] for name in self._state_names}  # type: ignore[misc]

    @eagerly
    def forward(
        self, indices: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Pooled rows, float32 [B, sum of D over features].

        Args:
            indices: int64 or int32 ids [N], by feature, sample and position.
            offsets: int64 or int32 [F * B + 1], where each bag begins.
            per_sample_weights: [N], which are rounded to float32, or None; get a gradient if they require one.

        The backward reduces duplicates in ascending position, then updates each row once.

        Raises:
            IdRangeError: an id outside its table, under "fatal"; nothing was changed.
            ShapeError: offsets that do not cut the ids into bags of all features, or another number of weights.
        """
        weights = None if per_sample_weights is None else per_sample_weights.to(torch.float32)
        bags = self.checked(Bags(indices, offsets.to(torch.int64), weights))
        return lookup(self, bags)

    def checked(self, bags: Bags) -> Bags:
        """The bags, ids outside their tables treated as configured. Raises what ``forward`` does."""
        self._check_offsets(bags)
        counts = [self.tables[table].num_embeddings for table in self.feature_tables]
        names = [self.tables[table].name for table in self.feature_tables]
        return check_bounds(bags, counts, names, self.bounds_check, self._engine)

    def _check_offsets(self, bags: Bags) -> None:
        count, found = len(self.feature_tables), bags.offsets.numel() - 1
        if found < 0 or found % count:
            expected = f"{count} * samples + 1"
            raise ShapeError("offsets are [features * samples + 1]", got=found + 1, expected=expected, where="offsets")
        check_ids(bags)
        if bags.offsets.device.type == "cpu":
            ends, whole = (int(bags.offsets[0]), int(bags.offsets[-1])), (0, bags.indices.numel())
            if ends != whole or bool((bags.offsets.diff() < 0).any()):
                raise ShapeError("offsets do not cut the ids", got=ends, expected=whole, where="offsets")

    def _held(self) -> list[HeldTable]:
        return [HeldTable(self.weight(index), table.is_mean) for index, table in enumerate(self.tables)]

    def _pool(self, bags: Bags) -> torch.Tensor:
        held = self._held()
        check_places(bags, [table.weight for table in held])
        return self._engine.pool(held, self.feature_tables, bags)

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
    return check_each([(bags, row_counts, names)], bounds_check, engine)[0]


def check_each(
    parts: Sequence[tuple[Bags, Sequence[int], Sequence[str]]], bounds_check: str, engine: Lookup
) -> list[Bags]:
    """``check_bounds`` of bags, row counts and names, one after the other; the host waits once for all answers.

    It waits for none under "ignore", where it knows that the offsets cut the ids.
    """
    found = [settle_bounds(*part, bounds_check, engine) for part in parts]
    wanted = [bounds_check != "ignore" or not bags.is_cut for bags, _, _ in parts]
    late = [check for (_, check), is_wanted in zip(found, wanted, strict=True) if is_wanted and check is not None]
    if late:
        answers = torch.stack([check.found for check in late]).tolist()
        told = (check.failure(*answer) for check, answer in zip(late, answers, strict=True))
        if failures := [failure for failure in told if failure is not None]:
            raise failures.pop(0)  # A frame that had its own exception would be kept by it.
    return [bags for bags, _ in found]


def _check_now(bags: Bags, row_counts: Sequence[int], names: Sequence[str], bounds_check: str, engine: Lookup) -> Bags:
    count, first = engine.outside(bags, row_counts)
    if count == 0:
        return bags
    if bounds_check == "fatal":
        raise _outside_error(bags, row_counts, names, count, first)
    if bounds_check == "warning":
        _warn(_outside_error(bags, row_counts, names, count, first))
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
        return _check_now(bags, row_counts, names, bounds_check, engine), None
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
        """Take one step of the optimizer in the rows, from the gradient [n, D] of each id; see ``key_value``."""
        betas = {"eps": hyper.eps, "beta1": hyper.beta1, "beta2": hyper.beta2}
        step = max(hyper.step, self.store.step_count(self.table) + 1)
        self.store.apply_gradients(self.table, ids.contiguous(), grads, hyper.lr, step, **betas)


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
        layout, kind = rows.store.layout(table.name), optimizer.config.kind
        found = (layout.embedding_dim, layout.weight_dtype, layout.optimizer)
        if found != (table.embedding_dim, table.dtype, kind):
            expected = f"{(table.embedding_dim, table.dtype, kind)}, of a KVStore(..., optimizer_in_row=True)"
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


class Pooled(FirstDerivatives):
    """Pooled rows of several weights; the backward gives each a dense gradient."""

    @staticmethod
    def forward(ctx: Any, engine: Lookup, tables: Any, bags: Bags, watches: bool, weights: Any, *params: Any) -> Any:
        ctx.dtypes = [param.dtype for param in params]
        rows = [readable(param.detach()).contiguous() for param in params]
        ctx.held = [HeldTable(each, table.is_mean) for each, table in zip(rows, tables, strict=True)]
        ctx.features = [index for index, table in enumerate(tables) for _ in table.feature_names]
        ctx.engine, ctx.bags = engine, bags
        check_places(bags, rows)
        # The gradient of weights is made of rows as the lookup read them, but for schedules that are one update stale.
        _watch(ctx, bags.indices, bags.offsets, bags.weights, *(rows if watches and ctx.needs_input_grad[4] else ()))
        return engine.pool(ctx.held, ctx.features, bags)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        _check_watched(ctx)
        grad, held, engine = grads[0].contiguous(), ctx.held, ctx.engine
        weights = None
        if ctx.needs_input_grad[4]:
            weights = engine.weight_gradients(held, ctx.features, ctx.bags, grad)
        # Nothing is made for a table that nobody trains.
        kept = [index for index in range(len(held)) if ctx.needs_input_grad[5 + index]]
        dense: list[torch.Tensor | None] = [None] * len(held)
        if kept:
            # Duplicates are summed as in every lookup: one step of -1 from zero is the sum itself.
            widths = [held[table].weight.shape[1] for table in ctx.features]
            features, bags, grad = of_tables(kept, len(held), ctx.features, widths, ctx.bags, grad)
            zeros = [torch.zeros_like(held[index].weight, dtype=torch.float32) for index in kept]
            sums = [HeldTable(total, held[index].is_mean) for index, total in zip(kept, zeros, strict=True)]
            engine.update(sums, features, bags, grad, "sgd", Hyper(-1.0))
            for index, total in zip(kept, zeros, strict=True):
                dense[index] = total.to(ctx.dtypes[index])
        return None, None, None, None, weights, *dense


def _are_on_meta(features: KeyedJaggedTensor, weight: torch.Tensor, where: str) -> bool:
    """Whether a batch and the tables are. Raises ConfigError where one of both is."""
    if features.values().is_meta != weight.is_meta:
        found = (features.device(), weight.device)
        raise ConfigError("a batch and tables of which one is on meta", got=found, expected="all or none", where=where)
    return weight.is_meta


def table_module(table: EmbeddingBagConfig, device: Any) -> torch.nn.EmbeddingBag:
    """The table as torch's module, which torch's compilers know."""
    rows, columns = table.num_embeddings, table.embedding_dim
    weight, mode = initial_weight(table, device), "mean" if table.is_mean else "sum"
    return torch.nn.EmbeddingBag(rows, columns, mode=mode, include_last_offset=True, _weight=weight)


class EmbeddingBagCollection(BoundToLookup):
    """Several tables on one device, whose gradients are dense: torchrec's ``EmbeddingBagCollection``.

    Args:
        tables: their configurations, ours or torchrec's.
        is_weighted: batches carry per-sample weights, which get a gradient where they require one.
        device: of the tables; "meta" makes no memory, for a collection that will be sharded.
        bounds_check: see ``TableBatchedEmbeddingBags``.

    Parameters are named ``embedding_bags.{table}.weight``. A model that torch.fx or TorchScript has taken over looks up
    by torch's own kernels: the same sums, rounded in their order.
    """

    __jit_unused_properties__ = ("device",)

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: Any = None,
        *,
        bounds_check: str = "fatal",
    ) -> None:
        super().__init__()
        self._engine = type(self)._make_engine()
        check_flags(is_weighted=is_weighted)
        self._configs, self._is_weighted = check_tables(tables, EmbeddingBagConfig), is_weighted
        self.bounds_check = check_bounds_kind(bounds_check)
        check_names(self._configs)
        self.embedding_bags = torch.nn.ModuleDict({table.name: table_module(table, device) for table in self._configs})
        self.feature_names = [feature for table in self._configs for feature in table.feature_names]
        self._feature_tables = [table for table in self._configs for _ in table.feature_names]
        self._names_by_table = [list(table.feature_names) for table in self._configs]
        self._embedding_names = embedding_names(self._configs)
        self._widths = [table.embedding_dim for table in self._feature_tables]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables."""
        return list(self._configs)

    def embedding_names(self) -> list[str]:
        """The keys of the result."""
        return embedding_names(self._configs)

    def is_weighted(self) -> bool:
        """Whether batches carry weights."""
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return next(self.parameters()).device

    def reset_parameters(self) -> None:
        """Fill every table by its ``init_fn`` again; tables on "meta" have nothing to fill."""
        for table in self._configs:
            weight: Any = self.embedding_bags[table.name].weight
            if not weight.is_meta:
                initialized(table, weight)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled rows of each feature, float32 [B, D] side by side, by table, then feature.

        Args:
            features: a batch, ours or torchrec's, on the device of the tables.

        Raises:
            MissingKeyError: a feature that is not in the batch. ConfigError: no weights where they are due.
            IdRangeError: an id outside its table, under "fatal". ShapeError: values that are no ids.
        """
        if torch.jit.is_scripting():
            return self._by_torch(features)
        if torch.compiler.is_exporting():
            return self._by_torch(features)
        return self._looked_up(features)

    @eagerly
    def _looked_up(self, batch: Any) -> KeyedTensor:
        if isinstance(batch, torch.fx.Proxy):
            return self._by_torch(cast(KeyedJaggedTensor, batch))
        features = own_batch(batch)
        params: list[Any] = [self.embedding_bags[table.name].weight for table in self._configs]
        if _are_on_meta(features, params[0], "EmbeddingBagCollection"):
            return self._on_meta(features)
        bags = select(features, self.feature_names, weighted=self._is_weighted)
        counts, names = zip(*((table.num_embeddings, table.name) for table in self._feature_tables), strict=True)
        bags = check_bounds(bags, counts, names, self.bounds_check, self._engine)
        given = self._engine, self._configs, bags, True, bags.weights
        pooled = Pooled.apply(*given, *params)  # type: ignore[no-untyped-call]
        return KeyedTensor(list(self._embedding_names), list(self._widths), pooled)

    def _on_meta(self, features: KeyedJaggedTensor) -> KeyedTensor:
        pooled = torch.empty(features.stride(), sum(self._widths), dtype=torch.float32, device="meta")
        return KeyedTensor(list(self._embedding_names), list(self._widths), pooled)

    def _by_torch(self, features: KeyedJaggedTensor) -> KeyedTensor:
        parts = features.to_dict(compute_offsets=False)
        pooled: list[torch.Tensor] = []
        for i, table in enumerate(self.embedding_bags.values()):
            for name in self._names_by_table[i]:
                part = parts[name]
                weights = part.weights().to(table.weight.dtype) if self._is_weighted else None  # type: ignore[arg-type]
                if not torch.jit.is_scripting():
                    as_many(part.values(), weights)
                pooled.append(features._over_batch(name, table(part.values(), part.offsets(), weights).float()))
        return KeyedTensor(list(self._embedding_names), list(self._widths), torch.cat(pooled, dim=1))


class _Rows(FirstDerivatives):
    """The rows of ids, as float32 [N, D]; the backward gives the table a dense gradient."""

    @staticmethod
    def forward(ctx: Any, engine: Lookup, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.engine, ctx.ids, ctx.shape, ctx.dtype = engine, ids, tuple(weight.shape), weight.dtype
        _watch(ctx, ids)
        return weight.detach()[ids].to(torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        _check_watched(ctx)
        ids, grad = ctx.ids, grads[0].contiguous()
        # Each id is a bag of its own, and one step of -1 from zero is the sum: duplicates are added as in every lookup.
        sums = torch.zeros(ctx.shape, dtype=torch.float32, device=grad.device)
        bags = Bags(ids, torch.arange(ids.numel() + 1, device=ids.device))
        ctx.engine.update([HeldTable(sums)], [0], bags, grad, "sgd", Hyper(-1.0))
        return None, None, sums.to(ctx.dtype)


class EmbeddingCollection(BoundToLookup):
    """Several tables of one width on one device, looked up row by row, with dense gradients: torchrec's class.

    Args:
        tables: their configurations, ours or torchrec's, all of one ``embedding_dim``.
        device: of the tables; "meta" makes no memory.
        need_indices: results carry the looked up ids as their weights, with 0 for ids outside of the table.
        use_gather_select, use_gather_select_per_sharding: of sharded collections; taken at their defaults alone.
        bounds_check: see ``TableBatchedEmbeddingBags``.

    Parameters are named ``embeddings.{table}.weight``. A row's gradient is the sum over its occurrences by feature,
    sample and position. A model that torch.fx or TorchScript has taken over looks up by torch's own kernels.

    Raises:
        ConfigError: tables of different width, or that are to be pooled. UnsupportedError: what is refused.
    """

    __jit_unused_properties__ = ("device",)

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: Any = None,
        need_indices: bool = False,
        use_gather_select: bool = False,
        use_gather_select_per_sharding: Mapping[str, bool] | None = None,
        *,
        bounds_check: str = "fatal",
    ) -> None:
        super().__init__()
        check_flags(need_indices=need_indices, use_gather_select=use_gather_select)
        if use_gather_select or use_gather_select_per_sharding:
            where = "use_gather_select" if use_gather_select else "use_gather_select_per_sharding"
            got = use_gather_select or use_gather_select_per_sharding
            raise UnsupportedError("a setting of sharded collections", got=got, expected="its default", where=where)
        self._configs, self._need_indices = check_tables(tables, EmbeddingConfig), need_indices
        if any(hasattr(table, "pooling") for table in tables):
            raise ConfigError("rows are not pooled here", got="pooling", expected="EmbeddingConfig", where="tables")
        self._engine = type(self)._make_engine()
        self.bounds_check = check_bounds_kind(bounds_check)
        widths = sorted({table.embedding_dim for table in self._configs})
        if len(widths) > 1:
            raise ConfigError("tables of different embedding_dim", got=widths, expected="one for all", where="tables")
        self._embedding_dim = widths[0]
        check_names(self._configs)
        self.embeddings = torch.nn.ModuleDict({table.name: _rows_module(table, device) for table in self._configs})
        self.feature_names = [feature for table in self._configs for feature in table.feature_names]
        names = iter(embedding_names(self._configs))
        self._names_by_table = [list(table.feature_names) for table in self._configs]
        self._result_names = [[next(names) for _ in part] for part in self._names_by_table]

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables."""
        return list(self._configs)

    def embedding_names_by_table(self) -> list[list[str]]:
        """The keys of the result, by table."""
        return [list(names) for names in self._result_names]

    def embedding_dim(self) -> int:
        """The width of all tables."""
        return self._embedding_dim

    def need_indices(self) -> bool:
        """Whether results carry the ids."""
        return self._need_indices

    def use_gather_select(self) -> bool:
        """False: it is of sharded collections."""
        return False

    def use_gather_select_per_sharding(self) -> None:
        """None: it is of sharded collections."""
        return

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return next(self.parameters()).device

    def reset_parameters(self) -> None:
        """Fill every table by its ``init_fn`` again; tables on "meta" have nothing to fill."""
        for table in self._configs:
            weight: Any = self.embeddings[table.name].weight
            if not weight.is_meta:
                initialized(table, weight)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Feature -> its bags of rows: values float32 [N, D], with the lengths of the batch.

        Args:
            features: a batch, ours or torchrec's, on the device of the tables.

        Raises:
            MissingKeyError: a feature that is not in the batch. IdRangeError: an id outside its table, under "fatal".
            ShapeError: values that are no ids. ConfigError: a batch or tables on meta, of which the other is not.
        """
        if torch.jit.is_scripting():
            return self._by_torch(features)
        if torch.compiler.is_exporting():
            return self._by_torch(features)
        return self._looked_up(features)

    @eagerly
    def _looked_up(self, batch: Any) -> dict[str, JaggedTensor]:
        if isinstance(batch, torch.fx.Proxy):
            return self._by_torch(cast(KeyedJaggedTensor, batch))
        features = own_batch(batch)
        if min(_are_on_meta(features, param, "EmbeddingCollection") for param in self.parameters()):
            return self._by_torch(features)
        tables = [table for table in self._configs for _ in table.feature_names]
        given = zip(select_each(features, self.feature_names), tables, strict=True)
        each = [(bags, [table.num_embeddings], [table.name]) for bags, table in given]
        checked = iter(check_each(each, self.bounds_check, self._engine))
        found: dict[str, JaggedTensor] = {}
        for table, names, keys in zip(self._configs, self._names_by_table, self._result_names, strict=True):
            bags = [next(checked) for _ in names]
            ids, weight = torch.cat([part.indices for part in bags]).to(torch.int64), self.embeddings[table.name].weight
            rows = _Rows.apply(self._engine, ids, weight)  # type: ignore[no-untyped-call]
            parts = torch.split(rows, [part.indices.numel() for part in bags])
            for name, key, values, part in zip(names, keys, parts, bags, strict=True):
                looked_up = part.indices.to(features[name].values().dtype) if self._need_indices else None
                found[key] = JaggedTensor(values, looked_up, features[name].lengths())
        return found

    def _by_torch(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        parts = features.to_dict(compute_offsets=False)
        found: dict[str, JaggedTensor] = {}
        for i, table in enumerate(self.embeddings.values()):
            for j, name in enumerate(self._names_by_table[i]):
                part = parts[name]
                ids = part.values() if self._need_indices else None
                found[self._result_names[i][j]] = JaggedTensor(table(part.values()).float(), ids, part.lengths())
        return found


def _rows_module(table: EmbeddingConfig, device: Any) -> torch.nn.Embedding:
    """The table as torch's module, which torch's compilers know."""
    return torch.nn.Embedding(table.num_embeddings, table.embedding_dim, _weight=initial_weight(table, device))


def _too_long(weight: torch.Tensor, positions: torch.Tensor, name: str, longest: int | None) -> None:
    if torch.compiler.is_exporting():
        return  # There are no numbers to look at: torch's own error says so when the program runs.
    if longest is None:
        longest = int(positions.max()) + 1 if positions.numel() and not positions.is_meta else 0
    if longest > weight.numel():
        raise IdRangeError("a bag longer than its weights", got=longest, expected=weight.numel(), where=name)


def _of_positions(weight: torch.Tensor, positions: torch.Tensor, name: str, longest: int | None = None) -> torch.Tensor:
    """Float32 [N]: the weight of each position. Raises IdRangeError for a bag longer than the weights."""
    if not torch.jit.is_scripting():
        _too_long(weight, positions, name, longest)
    return weight.to(torch.float32).index_select(0, positions)


def position_weights_of(names: Sequence[str], bags: Bags, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Float32 [N] for the ids of these features, 1 where one has no weights; the host waits once, for their sizes.

    Raises IdRangeError for a bag longer than its weights.
    """
    begins, lengths, count = bags.offsets[:-1], bags.offsets.diff(), bags.indices.numel()
    by_feature = lengths.view(len(names), -1)
    longest = torch.nn.functional.pad(by_feature, (0, 1)).amax(1)
    sizes, most = torch.stack([by_feature.sum(1), longest]).tolist()
    # The offsets of bags that were received cut them.
    own = torch.arange(count, device=begins.device) - begins.repeat_interleave(lengths, output_size=count)
    found = []
    for name, positions, longest_bag in zip(names, torch.split(own, sizes), most, strict=True):
        weight = weights.get(name)
        if weight is None:
            found.append(torch.ones(positions.numel(), dtype=torch.float32, device=positions.device))
            continue
        found.append(_of_positions(weight, positions, name, longest_bag))
    return torch.cat(found)


@torch.fx.wrap
def _weighted_bags(features: JaggedTensor, weight: torch.Tensor, is_processed: bool) -> JaggedTensor:
    if is_processed:
        positions = features.weights().to(torch.int64)
    else:
        positions = positions_in(features.lengths(), features.values().size(0))
    weights = _of_positions(weight, positions, "position_weight")
    return JaggedTensor(features.values(), weights, features.lengths(), features.offsets_or_none())


@torch.fx.wrap
def _weighted_batch(
    features: KeyedJaggedTensor, position_weights: dict[str, torch.Tensor], is_processed: bool
) -> KeyedJaggedTensor:
    if is_processed:
        positions = features.weights().to(torch.int64)
    else:
        positions = positions_in(features.lengths(), features.values().size(0))
    ends = features.offset_per_key()
    parts: list[torch.Tensor] = []
    for i, key in enumerate(features.keys()):
        mine = positions[ends[i] : ends[i + 1]]
        if key in position_weights:
            parts.append(_of_positions(position_weights[key], mine, key))
        else:
            parts.append(torch.ones(mine.size(0), dtype=torch.float32, device=mine.device))
    return KeyedJaggedTensor(
        features.keys(),
        features.values(),
        torch.cat(parts) if len(parts) > 0 else features.weights_or_none(),
        features.lengths(),
        features.offsets_or_none(),
        features.stride(),
        features._stride_per_key_per_rank if features.variable_stride_per_key() else None,
        length_per_key=features.length_per_key(),
        inverse_indices=features.inverse_indices_or_none(),
    )


class FeatureProcessor(torch.nn.Module):
    """What makes the weights of one feature's bags."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """The bags with weights."""
        raise NotImplementedError("a feature processor says what it does")


class FeatureProcessorsCollection(torch.nn.Module):
    """What makes the weights of several features' bags."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The batch with weights."""
        raise NotImplementedError("a feature processor says what it does")


def _check_lengths(lengths: Mapping[str, int]) -> None:
    if not isinstance(lengths, Mapping):
        raise ConfigError("lengths come by feature", got=lengths, expected="a mapping", where="max_feature_lengths")
    if any(type(length) is not int or length < 1 for length in lengths.values()):
        raise ConfigError("not lengths of bags", got=dict(lengths), expected="ints >= 1", where="max_feature_lengths")


def _write_positions(features: Any) -> None:
    positions = positions_in(features.lengths(), features.values().shape[0])
    check_positions(positions, features.weights().dtype)
    with torch.no_grad():
        features.weights().copy_(positions)


class PositionWeightedModule(FeatureProcessor):
    """Weights of one feature's ids by position: the n-th id of a bag weighs ``position_weight[n]``, 1 at first.

    Args:
        max_feature_length: positions; a longer bag is refused.
    """

    def __init__(self, max_feature_length: int, device: Any = None) -> None:
        super().__init__()
        _check_lengths({"max_feature_length": max_feature_length})
        self.position_weight = torch.nn.Parameter(torch.ones(max_feature_length, device=device))
        self._pre_processed = False

    def reset_parameters(self) -> None:
        """All weights 1."""
        torch.nn.init.ones_(self.position_weight)

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """The bags with these weights. Raises IdRangeError for a bag longer than them."""
        return _weighted_bags(features, self.position_weight, self._pre_processed)

    def pre_process_input(self, features: JaggedTensor) -> None:
        """Write each id's position over its weight, taken for one from here on. Raises: see ``check_positions``."""
        _write_positions(features)
        self._pre_processed = True


class PositionWeightedModuleCollection(FeatureProcessorsCollection):
    """Weights of ids by position: the n-th id of a bag of feature f weighs ``position_weights.f[n]``, 1 at first.

    Args:
        max_feature_lengths: feature -> positions; a longer bag is refused. Ids of other features weigh 1.
    """

    def __init__(self, max_feature_lengths: Mapping[str, int], device: Any = None) -> None:
        super().__init__()
        _check_lengths(max_feature_lengths)
        self.max_feature_lengths = dict(max_feature_lengths)
        self._pre_processed = False
        sizes = max_feature_lengths.items()
        check_attributes(max_feature_lengths, torch.nn.ParameterDict(), "feature")
        weights = {name: torch.nn.Parameter(torch.ones(size, device=device)) for name, size in sizes}
        self.position_weights = torch.nn.ParameterDict(weights)

    @property
    def position_weights_dict(self) -> dict[str, torch.Tensor]:
        """Feature -> its weights, as they are now."""
        return dict(self.position_weights.items())

    def reset_parameters(self) -> None:
        """All weights 1."""
        for weight in self.position_weights.values():
            torch.nn.init.ones_(weight)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The batch with these weights. Raises IdRangeError for a bag longer than them."""
        return _weighted_batch(features, self.position_weights_dict, self._pre_processed)

    def pre_process_input(self, features: KeyedJaggedTensor) -> None:
        """Write each id's position over its weight, taken for one from here on. Raises: see ``check_positions``."""
        _write_positions(features)
        self._pre_processed = True

    def copy(self, device: Any) -> "PositionWeightedModuleCollection":
        """These weights on another device; returns self."""
        return self.to(device)


def position_processors(processors: Any) -> PositionWeightedModuleCollection:
    """The processors of cut tables, which only weigh by position, as one collection of the same parameters.

    Raises:
        ConfigError: another processor, or one that takes weights of batches for positions.
    """
    parts = list(processors.values()) if isinstance(processors, torch.nn.ModuleDict) else [processors]
    kinds = (PositionWeightedModule, PositionWeightedModuleCollection)
    if not all(type(part) in kinds and not part._pre_processed for part in parts):
        got = [type(part).__name__ for part in parts]
        raise ConfigError(
            "cut tables take processors by position, not processed before", got=got, expected=kinds, where="processors"
        )
    if not isinstance(processors, torch.nn.ModuleDict):
        found: PositionWeightedModuleCollection = processors
        return found
    made = PositionWeightedModuleCollection({})
    for name, part in processors.items():
        made.position_weights[name] = part.position_weight
    return made


class _Each(FeatureProcessorsCollection):
    """A processor for each feature; ids of other features weigh 1."""

    def __init__(self, processors: torch.nn.ModuleDict) -> None:
        super().__init__()
        self._feature_processors = processors

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        parts, keys = features.to_dict(compute_offsets=False), features.keys()
        found = {key: self._feature_processors[key](parts[key]) for key in keys if key in self._feature_processors}
        ones = torch.ones(features.values().shape[0], dtype=torch.float32, device=features.device())
        weights = [found[key].weights() if key in found else ones[: parts[key].values().shape[0]] for key in keys]
        whole: KeyedJaggedTensor = features._with_weights(torch.cat(weights))
        return whole


class FeatureProcessedEmbeddingBagCollection(torch.nn.Module):
    """A weighted collection whose weights feature processors make: torchrec's class.

    Args:
        embedding_bag_collection: the tables.
        feature_processors: one for all features, or one for each by name.

    Raises:
        ConfigError: a collection without weights; processors by name that are not the features.
    """

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection, feature_processors: Any) -> None:
        super().__init__()
        if not embedding_bag_collection.is_weighted():
            where = "embedding_bag_collection"
            raise ConfigError("feature processors need a weighted collection", got=False, expected=True, where=where)
        names = list(dict.fromkeys(embedding_bag_collection.feature_names))
        if isinstance(feature_processors, (Mapping, torch.nn.ModuleDict)):
            if set(feature_processors.keys()) != set(names):
                found = sorted(feature_processors.keys())
                raise ConfigError(
                    "processors are not the features", got=found, expected=sorted(names), where="feature_processors"
                )
            check_attributes(feature_processors, torch.nn.ModuleDict(), "feature")
            feature_processors = torch.nn.ModuleDict(dict(feature_processors.items()))
        self._embedding_bag_collection, self._feature_processors = embedding_bag_collection, feature_processors
        self._feature_names = names

    def is_weighted(self) -> bool:
        """Whether the collection is weighted, which it is."""
        return self._embedding_bag_collection.is_weighted()

    def embedding_bag_configs(self) -> list[Any]:
        """The tables."""
        return list(self._embedding_bag_collection.embedding_bag_configs())

    def split(self) -> tuple[FeatureProcessorsCollection, EmbeddingBagCollection]:
        """The processors as one, and the collection."""
        processors = self._feature_processors
        one = _Each(processors) if isinstance(processors, torch.nn.ModuleDict) else processors
        return one, self._embedding_bag_collection

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Weights by the processors, then the collection."""
        result: KeyedTensor = self._embedding_bag_collection(self._processed(features))
        return result

    def _processed(self, features: Any) -> Any:
        is_traced = isinstance(features, torch.fx.Proxy)
        batch = features if is_traced else own_batch(features)
        if not isinstance(self._feature_processors, torch.nn.ModuleDict):
            if not is_traced:
                # Only what is looked up; a trace takes the whole batch.
                batch = _picked(batch, self._feature_names)
            return self._feature_processors(batch)
        picked = batch if is_traced else _picked(batch, self._feature_names)
        parts = picked.to_dict(compute_offsets=is_traced)
        found = [self._feature_processors[name](parts[name]) for name in self._feature_names]
        values, weights, lengths = (
            torch.cat([getattr(part, name)() for part in found]) for name in ("values", "weights", "lengths")
        )
        sizes: dict[str, Any] = {}
        if not is_traced and batch.variable_stride_per_key():
            ranks = [[part.lengths().numel()] for part in found]
            sizes = {"stride_per_key_per_rank": ranks, "inverse_indices": batch.inverse_indices_or_none()}
        return KeyedJaggedTensor(list(self._feature_names), values, weights, lengths, **sizes)


def _picked(batch: KeyedJaggedTensor, names: list[str]) -> KeyedJaggedTensor:
    """These features of the batch. Raises MissingKeyError."""
    places = batch.index_per_key()
    missing = [name for name in names if name not in places]
    if missing:
        raise MissingKeyError("not features of this batch", got=missing, expected=batch.keys(), where="batch")
    picked = batch.permute([places[name] for name in names])
    picked._inverse_indices = batch.inverse_indices_or_none()
    return picked
