"""Tables cut among the ranks of a group: the lookups of this rank, replicated parameters, autograd and state dicts.

Gradients are means over ranks, as DDP's and torchrec's: each rank's is divided by W before it is sent. In a state dict
every table and optimizer state stands whole under one name, whatever the plan: each rank hands out its own rows and
columns, so that another plan, or another number of ranks, reads what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from traceback import walk_stack
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.optim.swa_utils import AveragedModel

from twinproof.engine import FirstDerivatives, eagerly
from twinproof.errors import (
    ConfigError,
    IdRangeError,
    MissingKeyError,
    ShapeError,
    UnsupportedError,
    check_kind,
)
from twinproof.kvstore.rows import Buckets
from twinproof.kvstore.statedict import check_rows_of_rank, rank_and_world
from twinproof.pipeline.batches import KeyedJaggedTensor, KeyedTensor, place_of, select
from twinproof.pipeline.config import (
    FusedOptimizer,
    PoolingType,
    carry_over,
    check_bounds_kind,
    optimizer_in_backward,
    own_step,
)
from twinproof.pipeline.jagged import Bags, divisor_on, of_tables
from twinproof.pipeline.modules import (
    EmbeddingBagCollection,
    FeatureProcessedEmbeddingBagCollection,
    HeldTable,
    InBackwardOptimizer,
    KeyValueBags,
    Lookup,
    Pooled,
    StoreRows,
    TableBatchedEmbeddingBags,
    lookup,
    position_processors,
    position_weights_of,
    settle_bounds,
    table_module,
)
from twinproof.pipeline.sharding import (
    Awaitable,
    Exchange,
    Group,
    LateBuckets,
    Layout,
    Ready,
    Shard,
    ShardedContext,
    TableSharding,
    check_seed,
    initial_shard,
    settle_buckets,
)
from twinproof.pipeline.stages import is_dtensor

__all__ = [
    "CutTable",
    "ShardedEmbeddingBagCollection",
    "TableParts",
    "TableShard",
    "check_part",
    "copy_into",
]


class TableShard(torch.Tensor):
    """This rank's part, [r, c] at (row, column), of a global [E, D] tensor. Its shape is the global one.

    ``to_local()`` is the part itself, not a copy, or None on a rank that has none. It can be cloned, cast or sent by
    ``to()``, and copied into the same part of another; other torch operations are refused, for they would need the
    whole. Save and load it through ``torch.distributed.checkpoint``, asynchronously too, or each rank its own by
    ``torch.save``. It has no storage: what writes safetensors itself refuses it by name.
    """

    _local: torch.Tensor | None
    _origin: tuple[int, int]

    @staticmethod
    def make(
        shape: tuple[int, int], dtype: torch.dtype, local: torch.Tensor | None, origin: tuple[int, int] = (0, 0)
    ) -> TableShard:
        """A part of a tensor of this global shape and dtype."""
        made: Any = torch.Tensor._make_wrapper_subclass(TableShard, shape, dtype=dtype, device=torch.device("cpu"))
        made._local, made._origin = local, origin
        result: TableShard = made
        return result

    def to_local(self) -> torch.Tensor | None:
        """The part, itself and not a copy."""
        return self._local

    @property
    def origin(self) -> tuple[int, int]:
        """Row and column at which the part begins."""
        return self._origin

    @property
    def _place(self) -> tuple[tuple[int, int], tuple[int, ...]] | None:
        """Where the part begins, and its shape; None where there is none."""
        return None if self._local is None else (self._origin, tuple(self._local.shape))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Torch's own way back for such a class takes no function as ``map_location``.
        return _made_anew, (tuple(self.shape), self.dtype, self._local, self._origin)

    def untyped_storage(self) -> Any:
        """Refused: the memory of a part is not that of its shape. Raises UnsupportedError."""
        expected = "to_local(), which has; or a save by torch.distributed.checkpoint or torch.save"
        raise UnsupportedError(
            "a part of a table has no storage", got=repr(self), expected=expected, where="untyped_storage"
        )

    def storage(self) -> Any:
        """As ``untyped_storage``."""
        return self.untyped_storage()

    def share_memory_(self) -> Any:
        """As ``untyped_storage``."""
        return self.untyped_storage()

    def __dlpack__(self, **options: Any) -> Any:
        """As ``untyped_storage``."""
        return self.untyped_storage()

    @property
    def data(self) -> Any:
        """As of any tensor."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, values: Any) -> None:
        """Refused: torch would keep the values beside the part, where nothing reads them. Raises UnsupportedError."""
        raise UnsupportedError(
            "a part is written in place",
            got="data =",
            expected="load_state_dict of the collection, or a copy into to_local()",
            where="TableShard",
        )

    def __deepcopy__(self, memo: Any) -> TableShard:
        return self._with_local(torch.Tensor.clone)

    def _with_local(
        self, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None
    ) -> TableShard:
        """This part of another tensor of the same shape, and of this dtype or the same."""
        local = None if self._local is None else change(self._local)
        return TableShard.make((self.shape[0], self.shape[1]), dtype or self.dtype, local, self._origin)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        local = None if self._local is None else tuple(self._local.shape)
        return f"TableShard(shape={tuple(self.shape)}, dtype={self.dtype}, local={local} at {self._origin})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten, options = torch.ops.aten, kwargs or {}
        if func in (aten.detach.default, aten.alias.default):
            return args[0]
        # What a copy for an asynchronous save is made by, and one that somebody keeps in memory.
        if func is aten.clone.default:
            return args[0].__deepcopy__({})
        keeps_dtype = options.get("dtype") in (None, getattr(args[0], "dtype", None))
        if func is aten.zeros_like.default and keeps_dtype:
            return args[0]._with_local(lambda part: torch.zeros_like(part, device=options.get("device")))
        if func is aten.new_empty.default and list(args[1]) == list(args[0].shape) and keeps_dtype:
            # Torch's stager gives it the attributes of what it stages, each copied.
            return TableShard.make((args[0].shape[0], args[0].shape[1]), args[0].dtype, None, args[0].origin)
        if func is aten.copy_.default and all(isinstance(each, TableShard) for each in args[:2]):
            check_part(args[0], args[1], "copy_")
            copy_into(args[0], args[1])
            return args[0]
        if func is aten._to_copy.default and options.keys() <= {"dtype", "device", "non_blocking"}:
            return args[0]._with_local(lambda part: part.to(**options), options.get("dtype"))
        expected = "an operation on its to_local()"
        raise UnsupportedError("a part of a table, not the table", got=str(func), expected=expected, where="TableShard")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if self._local is None:
            return []
        return [ChunkStorageMetadata(torch.Size(self._origin), torch.Size(self._local.shape))]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=torch.Size(self.shape)
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert self._local is not None
        return self._local


def _made_anew(
    shape: tuple[int, int], dtype: torch.dtype, local: torch.Tensor | None, origin: tuple[int, int]
) -> TableShard:
    """What a saved part is read by: its values come as any tensor's."""
    return TableShard.make(shape, dtype, local, origin)


# ``torch.load`` reads by default only what was said to be data: a saved state dict of cut tables is.
torch.serialization.add_safe_globals([TableShard, _made_anew])


def check_part(target: TableShard, value: Any, where: str) -> None:
    """Demand a whole tensor, or a part at the same place.

    Raises:
        ShapeError: another shape, place or dtype. UnsupportedError: not a tensor, or one whose values are not at hand.
    """
    if not isinstance(value, torch.Tensor):
        raise UnsupportedError("not a tensor", got=type(value).__name__, expected="a tensor", where=where)
    held = value.to_local() if isinstance(value, TableShard) else value
    # A copy of such would raise when other tables are filled already. What is on meta itself takes no values.
    local = target.to_local()
    is_absent = held is not None and held.is_meta and not (local is not None and local.is_meta)
    if held is not None and (is_absent or held.layout is not torch.strided or is_dtensor(held)):
        seen = f"{type(held).__name__} of {held.dtype}, {held.layout}, on {held.device}"
        raise UnsupportedError("not values that can be copied", got=seen, expected="a dense tensor", where=where)
    if tuple(value.shape) != tuple(target.shape) or value.dtype != target.dtype:
        got, expected = (tuple(value.shape), value.dtype), (tuple(target.shape), target.dtype)
        raise ShapeError("not this table", got=got, expected=expected, where=where)
    if isinstance(value, TableShard):
        mine, theirs = target._place, value._place
        if mine != theirs:
            raise ShapeError("a part at another place", got=theirs, expected=mine, where=where)


def copy_into(target: TableShard, value: torch.Tensor) -> None:
    """Fill the part from what ``check_part`` has let pass, which may be the very same memory.

    The values are copied, not how they came about: a part is a leaf of no graph, whatever was loaded.
    """
    local, (row, column) = target.to_local(), target.origin
    if local is None:
        return
    if isinstance(value, TableShard):
        source = value.to_local()
    else:
        source = value[row : row + local.shape[0], column : column + local.shape[1]]
    if source is not None and source.data_ptr() != local.data_ptr():
        with torch.no_grad():
            local.copy_(source)


def fill(targets: Mapping[str, TableShard], values: Mapping[str, Any]) -> None:
    """Copy the value of each name into its part. Raises what ``check_part`` does; then nothing was changed."""
    for name, target in targets.items():
        check_part(target, values[name], name)
    for name, target in targets.items():
        copy_into(target, values[name])


def _flat(states: Mapping[Any, Mapping[Any, Any]]) -> dict[str, Any]:
    """Weight -> state -> value, as "weight: state" -> value."""
    return {f"{name}: {state}": value for name, held in states.items() for state, value in held.items()}


STEP = "fused_optimizer.step"


class TableParts:
    """This rank's parts of the tables of one ``Layout``: what a state dict saves and loads.

    Args:
        layout: of the tables.
        lookups: what looks up each of this rank's groups, whose memory the parts are.
        optimizer: the optimizer in the backward.
    """

    def __init__(self, layout: Layout, lookups: Sequence[Any], optimizer: InBackwardOptimizer) -> None:
        self._layout, self._optimizer = layout, optimizer
        rules = [sharding.rule for sharding in layout.shardings]
        self._cut_tables = {table.name: at for at, table in enumerate(layout.tables) if rules[at].is_cut}
        # Of this rank's tables its shard, what looks it up, and which of its tables it is: the same in every step.
        self._own: dict[str, tuple[Shard, Any, int]] = {
            layout.tables[shard.table].name: (shard, lookup, index)
            for group, lookup in zip(layout.groups, lookups, strict=True)
            for index, shard in enumerate(group.shards)
            if rules[shard.table].is_cut
        }
        optimizer.bind(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copied optimizer is that of the copied tables.
        self.__dict__.update(state)
        self._optimizer.bind(self)

    def local_shards(self) -> dict[str, tuple[Shard, torch.Tensor, dict[str, torch.Tensor]]]:
        """Table -> this rank's shard, its weight [r, c] and its states [r, c] or [r, 1]: themselves, not copies."""
        return {name: (shard, lookup.weight(i), lookup.states(i)) for name, (shard, lookup, i) in self._own.items()}

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Table -> its weight [r, c], of ``local_shards``."""
        return ((name, lookup.weight(index)) for name, (_, lookup, index) in self._own.items())

    def view(self, name: str) -> TableShard:
        """This rank's part of one table that is cut."""
        table = self._layout.tables[self._cut_tables[name]]
        shard, lookup, index = self._own.get(name, (None, None, 0))
        place = (shard.rows[0], shard.columns[0]) if shard else (0, 0)
        weight = None if lookup is None else lookup.weight(index)
        return TableShard.make((table.num_embeddings, table.embedding_dim), table.dtype, weight, place)

    def views(self, *, states: bool) -> dict[str, TableShard]:
        """Name -> this rank's part of every table that is cut, or of its optimizer states."""
        if not states:
            return {f"embedding_bags.{name}.weight": self.view(name) for name in self._cut_tables}
        views, part_counts = dict[str, TableShard](), dict[int, int]()
        for each in self._layout.shards:
            part_counts[each.table] = max(part_counts.get(each.table, 0), each.part + 1)
        for table_name, at in self._cut_tables.items():
            shard, lookup, index = self._own.get(table_name, (None, None, 0))
            held = {} if lookup is None else lookup.states(index)
            row, column = (shard.rows[0], shard.columns[0]) if shard else (0, 0)
            table, name = self._layout.tables[at], f"embedding_bags.{table_name}"
            # An optimizer that keeps one value for a row keeps one for each column block.
            rows, parts = table.num_embeddings, part_counts[at]
            for state, width in self._optimizer.config.state_widths(table.embedding_dim).items():
                wide = width == table.embedding_dim and width > 1
                place = (row, column if wide else shard.part if shard else 0)
                shape = (rows, table.embedding_dim if wide else max(parts, width))
                views[f"{name}.{state}"] = TableShard.make(shape, torch.float32, held.get(state), place)
        return views

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Name -> this rank's part of each optimizer state, and the step as int64 [1].

        ``embedding_bags.{table}.momentum1`` is [E, D], or [E, column blocks] where the optimizer keeps one value for a
        row. Together with ``state_dict()`` this is what a checkpoint needs, but for key-value tables' rows.
        """
        step = torch.tensor([self._optimizer.step_count], device="cpu")
        return {**self.views(states=True), STEP: step}

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take states from parts at the same places, or from whole tensors.

        Raises:
            MissingKeyError: names that are absent. ConfigError: a step that is none. ShapeError, UnsupportedError: see
                ``check_part``. Then nothing was changed.
        """
        views = self.views(states=True)
        missing = sorted({*views, STEP} - set(state))
        if missing:
            expected = "each name of optimizer_state_dict()"
            raise MissingKeyError(
                "names are not in the state dict", got=missing, expected=expected, where="optimizer state"
            )
        step = own_step(state[STEP], STEP)
        fill(views, state)
        self._optimizer.step_count = step

    def named_states(self) -> dict[str, dict[str, TableShard]]:
        """``embedding_bags.{table}.weight`` -> ``{table}.{state}``, which are torchrec's names -> this rank's part."""
        found = dict[str, dict[str, TableShard]]()
        for name, view in self.views(states=True).items():
            table, _, state = name.removeprefix("embedding_bags.").rpartition(".")
            found.setdefault(f"embedding_bags.{table}.weight", {})[f"{table}.{state}"] = view
        return found

    def load_named_states(self, states: Mapping[Any, Any]) -> None:
        """Take what ``named_states`` has, from parts at the same places or from whole tensors.

        Raises:
            MissingKeyError: states that are absent. ConfigError: states that no cut table has here. ShapeError,
                UnsupportedError: see ``check_part``. Then nothing was changed.
        """
        views = _flat(self.named_states())
        for name, held in states.items():
            check_kind(held, Mapping, str(name), "state name -> tensor")
        given = _flat(states)
        missing, others = sorted(set(views) - set(given)), sorted(set(given) - set(views))
        if missing:
            expected = "the states of each cut table, as state_dict() of its optimizer has them"
            raise MissingKeyError("states are not in the state dict", got=missing, expected=expected, where="state")
        if others:
            raise ConfigError("states that no table has here", got=others, expected=sorted(views), where="state")
        fill(views, given)

    @property
    def key_value_tables(self) -> tuple[str, ...]:
        """Names of the tables whose rows stores have."""
        tables = zip(self._layout.tables, self._layout.shardings, strict=True)
        return tuple(table.name for table, sharding in tables if sharding.rule.is_stored)

    def key_value_state_dict(self, *, snapshot: bool = True, chunk_rows: int | None = None) -> dict[str, Any]:
        """The key-value tables' rows, as ``KVStore.state_dict`` gives them; every rank calls this."""
        result: dict[str, Any] = {}
        for table, sharding in zip(self._layout.tables, self._layout.shardings, strict=True):
            if sharding.rule.is_stored:
                found = sharding.store.state_dict(
                    buckets=sharding.buckets,
                    process_group=self._layout.process_group,
                    snapshot=snapshot,
                    chunk_rows=chunk_rows,
                    # The store's other tables may be dealt by other buckets, or by nobody.
                    tables=(table.name,),
                )
                result |= {f"embedding_bags.{name}": value for name, value in found.items()}
        return result

    def load_key_value_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's rows; each key-value table is left with these alone. Other names are passed over.

        Raises:
            ConfigError: rows that are not this rank's by the plan. What a store raises, see
                ``KVStore.load_state_dict``, as MissingKeyError for absent rows: its tables are then as they were.
        """
        start = "embedding_bags."
        rows = {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
        stores = dict[int, tuple[Any, list[str]]]()
        for table, sharding in zip(self._layout.tables, self._layout.shardings, strict=True):
            if sharding.rule.is_stored:
                check_rows_of_rank(rows, table.name, sharding.buckets, self._layout.process_group)
                stores.setdefault(id(sharding.store), (sharding.store, []))[1].append(table.name)
        for store, names in stores.values():
            store.load_state_dict(rows, tables=tuple(names), clear=True)

    def load(self, state: Mapping[str, Any], prefix: str) -> tuple[list[str], list[str]]:
        """Take the parts of tables from a state dict; returns the names that were taken, and those that are missing.

        Raises:
            ShapeError, UnsupportedError: see ``check_part``. Then nothing was changed.
        """
        views = {prefix + name: view for name, view in self.views(states=False).items()}
        loaded = {name: view for name, view in views.items() if name in state}
        fill(loaded, state)
        return list(loaded), [name for name in views if name not in loaded]


class CutTable(torch.nn.Module):
    """What stands under a cut table's name: ``weight`` is this rank's part of it, which is no parameter of torch's."""

    def __init__(self, parts: TableParts, table: str) -> None:
        super().__init__()
        self._parts, self._table = parts, table

    @property
    def weight(self) -> TableShard:
        """This rank's part, itself and not a copy."""
        return self._parts.view(self._table)


class _Exchanged(FirstDerivatives):
    """Pooled columns of all ranks' shards for this rank's samples; the backward sends gradients to the shards.

    What ``passing`` holds passes through without a gradient of its own, so that every rank's backward visits it: it
    exchanges gradients too, and a rank that looks nothing up would be missed by the others.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        exchange: Exchange,
        optimizer: InBackwardOptimizer,
        context: ShardedContext,
        count: int,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.exchange, ctx.optimizer, ctx.context, ctx.passing = exchange, optimizer, context, tensors[count:]
        # Of something: torch refuses a backward that ``retain_graph`` did not announce where what was saved has gone.
        ctx.save_for_backward(anchor)
        return exchange.columns(context, tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        # Before anything is counted or sent: the lookups behind it would refuse it when the others had done both.
        tuple(ctx.saved_tensors)
        ctx.optimizer.count_step()
        parts = ctx.exchange.gradients(ctx.context, grads[0].contiguous())
        return None, None, None, None, None, *parts, *(torch.zeros_like(each) for each in ctx.passing)


class _Replicated(FirstDerivatives):
    """Parameters that every rank holds; their gradient is the sum over ranks, each divided by ``divisor`` first."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, divisor: int, *params: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.divisor = exchange, divisor
        return tuple(param.view_as(param) for param in params)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        flat = torch.cat([grad.reshape(-1).to(torch.float32) for grad in grads])
        flat = flat / divisor_on(flat, ctx.divisor)
        parts = ctx.exchange.sum_over_ranks(flat).split([grad.numel() for grad in grads])
        return None, None, *(part.reshape(g.shape).to(g.dtype) for part, g in zip(parts, grads, strict=True))


class _SentWeights(FirstDerivatives):
    """The received weights of each lookup, as the weights of all ranks' batches; the backward sends gradients home.

    Gradients were divided by W where they were sent to the shards. A weight is one rank's own: what comes home is
    multiplied by W again, the gradient of that rank's loss, as that of every parameter before an average over ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        exchange: Exchange,
        world_size: int,
        context: ShardedContext,
        own: Any,
        *received: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.world_size, ctx.context = exchange, world_size, context
        return anchor.new_zeros(0), *(weights.view_as(weights) for weights in received)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        own = ctx.exchange.weight_gradients(ctx.context, torch.cat(grads)) * ctx.world_size
        return None, None, None, None, own if ctx.needs_input_grad[4] else None, *(None for _ in grads[1:])


class _Trained:
    """What a lookup's autograd sees of it: of its tables those are stepped that are trained when the backward comes.

    Args:
        lookup: of several tables, or of one in a store.
        names: of its tables.
        frozen: gives the names of those that are not trained.
    """

    def __init__(self, lookup: Any, names: Sequence[str], frozen: Callable[[], set[str]]) -> None:
        self._lookup, self._names, self._frozen = lookup, names, frozen

    def _pool(self, bags: Bags) -> torch.Tensor:
        pooled: torch.Tensor = self._lookup._pool(bags)
        return pooled

    def _weight_gradients(self, bags: Bags, grad: torch.Tensor) -> torch.Tensor:
        gradients: torch.Tensor = self._lookup._weight_gradients(bags, grad)
        return gradients

    def _step(self, bags: Bags, grad: torch.Tensor) -> None:
        frozen = self._frozen()
        kept = [index for index, name in enumerate(self._names) if name not in frozen]
        if len(kept) == len(self._names):
            self._lookup._step(bags, grad)
        elif kept:
            self._step_some(kept, bags, grad)

    def _step_some(self, kept: list[int], bags: Bags, grad: torch.Tensor) -> None:
        lookup, handle = self._lookup, self._lookup.fused_optimizer
        widths = [lookup.tables[table].embedding_dim for table in lookup.feature_tables]
        features, part, columns = of_tables(kept, len(self._names), lookup.feature_tables, widths, bags, grad)
        held = [HeldTable(lookup.weight(index), lookup.tables[index].is_mean, lookup.states(index)) for index in kept]
        lookup._engine.update(held, features, part, columns, handle.config.kind, handle.hyper())


class ShardedEmbeddingBagCollection(torch.nn.Module):
    """Tables cut among the ranks of a group, with the optimizer in the backward: torchrec's class, explicit plans only.

    Args:
        module: the collection to cut, the same on every rank; its weights are copied. On "meta" they are made here,
            the same for every plan. A feature-processed collection keeps its processors as dense parameters.
        plan: table -> ``table_wise(rank)``, ``row_wise()``, ``column_wise(ranks)``, ``data_parallel()`` or
            ``key_value(store, buckets)``.
        optimizer: what the backward runs on all but data-parallel tables, which are dense parameters. None is the one
            that ``apply_optimizer_in_backward`` gave the collection's parameters, or row-wise Adagrad.
        process_group: the ranks; None is all of them, or none where torch.distributed is not in use.
        bounds_check: see ``TableBatchedEmbeddingBags``; under "fatal" every rank raises.
        seed: of weights made here.

    Every rank makes the same calls in the same order. Ranks may have batches of different size, or none. One backward
    is one step; a row's gradient is the mean over ranks, its duplicates added by feature, rank, sample and position.
    Column-wise tables with an optimizer that keeps one value for a row keep one for each column block, and so differ
    from the uncut table by design. Weights of a batch that require a gradient get that of their own rank's loss, by one
    more exchange in every rank's backward; torchrec gives them none.

    A table whose parameter requires no gradient, when it is cut or when the backward comes (``requires_grad_(False)``
    of this module or of what it lists), is looked up and not stepped; a backward is a step all the same. A model around
    this module does not list cut tables, so that its own ``requires_grad_`` does not reach them. For the same reason
    torch's ``AveragedModel`` would never average them: it is refused, unless no table that is cut is trained.

    Attributes:
        fused_optimizer: a handle for schedulers on the optimizer in the backward; see ``InBackwardOptimizer``.

    Raises:
        ConfigError: a plan or an optimizer that does not fit; feature processors on other than table- and column-wise
            tables. UnsupportedError: not a collection of bags; ``AveragedModel`` of trained cut tables.
        IdRangeError: an id outside its table.
    """

    _bags_type: ClassVar[type[TableBatchedEmbeddingBags]]
    _make_engine: ClassVar[Callable[[], Lookup]]
    _make_exchange: ClassVar[Callable[[Layout], Exchange]]
    _make_rows: ClassVar[Callable[[Any, str], StoreRows]] = StoreRows

    def __init_subclass__(
        cls,
        *,
        bags: type[TableBatchedEmbeddingBags] | None = None,
        engine: Callable[[], Lookup] | None = None,
        exchange: Callable[[Layout], Exchange] | None = None,
        rows: Callable[[Any, str], StoreRows] | None = None,
        **options: Any,
    ) -> None:
        super().__init_subclass__(**options)
        given = {"_bags_type": bags, "_make_engine": engine, "_make_exchange": exchange, "_make_rows": rows}
        for name, value in given.items():
            if value is not None:
                setattr(cls, name, value)

    def __init__(
        self,
        module: Any,
        plan: Mapping[str, TableSharding],
        *,
        optimizer: FusedOptimizer | None = None,
        process_group: Any = None,
        bounds_check: str = "fatal",
        seed: int = 0,
    ) -> None:
        super().__init__()
        processed = isinstance(module, FeatureProcessedEmbeddingBagCollection)
        collection: Any = module._embedding_bag_collection if processed else module
        if not isinstance(collection, EmbeddingBagCollection):
            expected = "an EmbeddingBagCollection of ours, which takes torchrec's configurations"
            raise UnsupportedError(
                "not a collection that is cut here", got=type(module).__name__, expected=expected, where="module"
            )
        check_seed(seed)
        self.feature_processors = position_processors(module._feature_processors) if processed else None
        self.tables, self.bounds_check = tuple(collection.embedding_bag_configs()), check_bounds_kind(bounds_check)
        self.process_group = process_group
        self.rank, self.world_size = rank_and_world(process_group)
        self.layout = Layout(self.tables, plan, process_group, self.rank, self.world_size)
        self.plan = self.layout.shardings
        self._check_processed()
        self.is_weighted = collection.is_weighted() and not processed
        self.feature_names, self._embedding_names = list(collection.feature_names), collection.embedding_names()
        self.fused_optimizer = InBackwardOptimizer(_optimizer_of(collection, self.tables, optimizer))
        self._engine = type(self)._make_engine()
        self._exchange = type(self)._make_exchange(self.layout)
        self.lookups = [self._make_lookup(group, collection, seed) for group in self.layout.groups]
        self._parts = TableParts(self.layout, self.lookups, self.fused_optimizer)
        self.embedding_bags = self._make_tables(collection, seed)
        self._cut_parameters: dict[str, torch.nn.Parameter] = {}
        whole = {table.name: collection.embedding_bags[table.name].weight for table in self.tables}
        self._frozen = {name for name, weight in whole.items() if not weight.requires_grad}
        self._loaded: list[str] = []
        # Tables that are cut are no parameters of any child, whose names torch would call unexpected.
        self.register_load_state_dict_post_hook(
            ShardedEmbeddingBagCollection._forget_loaded  # type: ignore[no-untyped-call]
        )

    def _check_processed(self) -> None:
        unfit = [sharding.rule for sharding in self.plan if sharding.rule.is_partial or sharding.rule.is_replicated]
        if self.feature_processors is not None and unfit:
            got, expected = sorted({sharding.kind for sharding in self.plan}), "table_wise or column_wise"
            raise ConfigError(
                "feature processors need whole bags on one rank", got=got, expected=expected, where="plan"
            )

    def _make_tables(self, collection: Any, seed: int) -> torch.nn.ModuleDict:
        """What stands under each table's name: parameters of replicated tables, then this rank's parts of cut ones."""
        found = torch.nn.ModuleDict()
        for index in self.layout.replicated:
            table = self.tables[index]
            weight = collection.embedding_bags[table.name].weight
            whole = Shard(index, 0, "", (0, table.num_embeddings), (0, table.embedding_dim))
            made = initial_shard(table, index, whole, seed) if weight.is_meta else weight.detach()
            replica = table_module(table, "meta")
            replica.weight = torch.nn.Parameter(made.clone())
            found[table.name] = replica
            carry_over(weight, replica.weight)
            replica.weight.requires_grad_(weight.requires_grad)
        for table, sharding in zip(self.tables, self.plan, strict=True):
            if sharding.rule.is_cut:
                found[table.name] = CutTable(self._parts, table.name)
        return found

    def _make_lookup(self, group: Group, collection: Any, seed: int) -> Any:
        """What looks the shards of one group up, with weights of its own."""
        first = self.plan[group.shards[0].table]
        if first.rule.is_stored:
            table = self.tables[group.shards[0].table]
            return KeyValueBags(
                type(self)._make_rows(first.store, table.name), table, self.fused_optimizer, self._engine
            )
        configs = [
            replace(
                self.tables[shard.table],
                num_embeddings=shard.rows[1] - shard.rows[0],
                embedding_dim=shard.width,
                pooling=PoolingType.SUM if first.rule.is_partial else self.tables[shard.table].pooling,
            )
            for shard in group.shards
        ]
        weights = [self._weight_of(shard, collection, seed) for shard in group.shards]
        return self._bags_type(configs, weights=weights, in_backward=self.fused_optimizer)

    def _weight_of(self, shard: Shard, collection: Any, seed: int) -> torch.Tensor:
        table = self.tables[shard.table]
        whole: torch.Tensor = collection.embedding_bags[table.name].weight.detach()
        if whole.is_meta:
            return initial_shard(table, shard.table, shard, seed)
        part = whole[slice(*shard.rows), slice(*shard.columns)]
        return self._engine.fresh((part.shape[0], part.shape[1]), part.dtype, part.device).copy_(part)

    def __deepcopy__(self, memo: Any) -> Any:
        """Tables, states and optimizer of its own; the ranks are the same. Raises UnsupportedError: see the class."""
        self._check_averaged()
        memo[id(self.process_group)] = self.process_group
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(deepcopy(self.__getstate__(), memo))
        return made

    def _check_averaged(self) -> None:
        """Refuse a copy for torch's ``AveragedModel``, which averages what a model lists: not the tables cut here."""
        if all(frame.f_code is not AveragedModel.__init__.__code__ for frame, _ in walk_stack(None)):
            return
        cut = {table.name for table, own in zip(self.tables, self.plan, strict=True) if not own.rule.is_replicated}
        if trained := sorted(cut - self._frozen_now()):
            expected = "AveragedModel of the other modules, and local_weights() averaged beside it"
            message = "an averaged model would keep the tables of its first moment"
            raise UnsupportedError(message, got=trained, expected=expected, where="AveragedModel")

    def __getstate__(self) -> dict[str, Any]:
        # Parameters that were listed are this module's tables: a copy of them would be a second copy of its tables.
        return {**self.__dict__, "_cut_parameters": {}, "_frozen": set(self._frozen_now())}

    def _frozen_now(self) -> set[str]:
        """Names of cut tables that are not trained; whoever was given a parameter may have changed its flag."""
        for name, param in self._cut_parameters.items():
            (self._frozen.discard if param.requires_grad else self._frozen.add)(name)
        return self._frozen

    def create_context(self) -> ShardedContext:
        """A context for one batch."""
        return ShardedContext()

    def input_dist(self, ctx: ShardedContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[list[Bags]]]:
        """Send ids to the ranks that look them up. The first ``wait`` ends the exchange of sizes, the second of ids.

        Returns the bags of each lookup of this rank, over all ranks' samples, feature-major and by rank.
        """
        ctx.device = place_of(features)
        return self._exchange.input_dist(ctx, lambda: self._local_bags(ctx, features))

    def _failed_dist(self, ctx: ShardedContext, failure: Exception, device: Any) -> Awaitable[Awaitable[list[Bags]]]:
        """In place of ``input_dist`` where this rank has no features: every rank raises, the others DistributedError.

        As ``input_dist`` does for what it raises on one rank; ``device`` is where the batch is.
        """
        ctx.device, failures = torch.device(device), [failure]
        del failure

        def select() -> Bags:
            raise failures.pop()

        return self._exchange.input_dist(ctx, select)

    def compute(self, ctx: ShardedContext, dist_input: list[Bags]) -> list[torch.Tensor]:
        """This rank's lookups: float32 [all ranks' samples, columns] each, then the data-parallel tables' own."""
        if self.feature_processors is not None:
            params = [_whole(param, name) for name, param in self.feature_processors.position_weights.items()]
            # Gradients of samples were divided by W already, where they were sent.
            ctx.passing = _Replicated.apply(self._exchange, 1, *params)  # type: ignore[no-untyped-call]
        if ctx.way_home is not None:
            dist_input = self._with_gradient(ctx, dist_input)
        outputs = [
            lookup(self._trained(module, group), self._processed(ctx, group, bags))
            for module, group, bags in zip(self.lookups, self.layout.groups, dist_input, strict=True)
        ]
        return [*outputs, *self._replicated_outputs(ctx)]

    def _trained(self, module: Any, group: Group) -> _Trained:
        return _Trained(module, [self.tables[shard.table].name for shard in group.shards], self._frozen_now)

    def output_dist(self, ctx: ShardedContext, output: list[torch.Tensor]) -> Awaitable[KeyedTensor]:
        """Pooled columns of all features for this rank's own samples."""
        count, layout = len(self.lookups), self.layout
        anchor = torch.zeros(0, requires_grad=True, device=ctx.device)
        exchanged = _Exchanged.apply(  # type: ignore[no-untyped-call]
            anchor, self._exchange, self.fused_optimizer, ctx, count, *output[:count], *ctx.passing
        )
        widths = [layout.table_of(feature).embedding_dim for feature in range(len(layout.feature_tables))]
        if not layout.replicated:
            return Ready(KeyedTensor(list(self._embedding_names), widths, exchanged))
        replicated = set(layout.replicated)
        own = [f for f, table in enumerate(layout.feature_tables) if table in replicated]
        sent = [f for f, table in enumerate(layout.feature_tables) if table not in replicated]
        columns = dict(zip(sent, torch.split(exchanged, [widths[f] for f in sent], dim=1), strict=True))
        columns |= dict(zip(own, torch.split(output[count], [widths[f] for f in own], dim=1), strict=True))
        parts = [columns[f] for f in sorted(columns)]
        # Where nothing is sent, too, every backward visits the exchange, which counts it as a step.
        values = torch.cat(parts if sent else [exchanged, *parts], dim=1)
        return Ready(KeyedTensor(list(self._embedding_names), widths, values))

    def compute_and_output_dist(self, ctx: ShardedContext, dist_input: list[Bags]) -> Awaitable[KeyedTensor]:
        """Both, as torchrec names it."""
        return self.output_dist(ctx, self.compute(ctx, dist_input))

    @eagerly
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled rows of each feature for this rank's samples, float32 [B, D] side by side, by table, then feature."""
        ctx = self.create_context()
        dist_input = self.input_dist(ctx, features).wait().wait()
        return self.compute_and_output_dist(ctx, dist_input).wait()

    def owner_of(self, ids: torch.Tensor, table: int) -> torch.Tensor:
        """The rank of each id of a key-value table, int64 [n]: id -> bucket -> rank."""
        return self.layout.owners(ids, table)

    def _local_bags(self, ctx: ShardedContext, features: KeyedJaggedTensor) -> Bags:
        """This rank's bags, checked before anything is sent; on a device the answer is left to the exchange."""
        bags = select(features, self.feature_names, weighted=self.is_weighted)
        bags = Bags(bags.indices.to(torch.int64), bags.offsets, bags.weights)
        tables = self.layout.feature_tables
        counts = [-1 if self.plan[t].rule.is_stored else self.tables[t].num_embeddings for t in tables]
        names = [self.tables[table].name for table in tables]
        bags, late = settle_bounds(bags, counts, names, self.bounds_check, self._engine)
        if late is not None:
            ctx.late_checks = [late, *self._late_buckets(bags)]
        elif self.feature_processors is not None:
            self._check_positions(bags)
        return bags

    def _check_positions(self, bags: Bags) -> None:
        """Demand bags of this rank's that are no longer than their weights, while the others can be told.

        Raises IdRangeError. On a device the ranks that look up say so, which have to wait there anyway.
        """
        assert self.feature_processors is not None
        by_feature = bags.offsets.diff().view(len(self.feature_names), -1)
        longest = torch.nn.functional.pad(by_feature, (0, 1)).amax(1).tolist()
        weights = self.feature_processors.position_weights_dict
        for name, most in zip(self.feature_names, longest, strict=True):
            if name in weights and most > weights[name].numel():
                expected = weights[name].numel()
                raise IdRangeError("a bag longer than its weights", got=most, expected=expected, where=name)

    def _late_buckets(self, bags: Bags) -> list[LateBuckets]:
        """Checks that no id of a key-value table is outside of all its buckets."""
        features: dict[Buckets, list[int]] = {}
        for feature, table in enumerate(self.layout.feature_tables):
            buckets = self.plan[table].buckets
            if buckets is not None and buckets.hash_mode == "chunk":
                features.setdefault(buckets, []).append(feature)
        count = len(self.layout.feature_tables)
        found = [settle_buckets(bags, count, some, buckets, self._engine) for buckets, some in features.items()]
        return [check for check in found if check is not None]

    def _with_gradient(self, ctx: ShardedContext, received: Sequence[Bags]) -> list[Bags]:
        """The received bags, whose weights are those that the ranks sent, to autograd too."""
        anchor = torch.zeros(0, requires_grad=True, device=ctx.device)
        weights = [bags.weights for bags in received]
        token, *known = _SentWeights.apply(  # type: ignore[no-untyped-call]
            anchor, self._exchange, self.world_size, ctx, ctx.bags.weights, *weights
        )
        ctx.passing = (token,)
        return [Bags(bags.indices, bags.offsets, own) for bags, own in zip(received, known, strict=True)]

    def _processed(self, ctx: ShardedContext, group: Group, bags: Bags) -> Bags:
        """The bags with the processors' weights."""
        if self.feature_processors is None:
            return bags
        params = dict(zip(self.feature_processors.position_weights, ctx.passing, strict=True))
        names = [self.feature_names[slot.feature] for slot in group.slots]
        return Bags(bags.indices, bags.offsets, position_weights_of(names, bags, params))

    def _replicated_outputs(self, ctx: ShardedContext) -> list[torch.Tensor]:
        """Pooled columns of the replicated tables for this rank's samples, if there are such tables."""
        replicated = self.layout.replicated
        if not replicated:
            return []
        tables = [self.tables[index] for index in replicated]
        params = [_whole(self.embedding_bags[table.name].weight, table.name) for table in tables]
        # What nobody trains has no gradient to send.
        trained = [param for param in params if param.requires_grad]
        known: Any = iter(())
        if trained:
            known = iter(_Replicated.apply(self._exchange, self.world_size, *trained))  # type: ignore[no-untyped-call]
        weights = [next(known) if param.requires_grad else param for param in params]
        features = [f for f, table in enumerate(self.layout.feature_tables) if table in replicated]
        bags = self.layout.features(ctx.bags, features)
        return [Pooled.apply(self._engine, tables, bags, False, bags.weights, *weights)]  # type: ignore[no-untyped-call]

    def local_shards(self) -> dict[str, tuple[Shard, torch.Tensor, dict[str, torch.Tensor]]]:
        """Table -> this rank's shard, its weight [r, c] and its states [r, c] or [r, 1]: themselves, not copies."""
        return self._parts.local_shards()

    def local_weights(self) -> list[torch.Tensor]:
        """This rank's weights [r, c] of all cut tables: themselves, not copies."""
        return [weight for _, weight in self._parts.named_weights()]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Tables and states go where the parameters go, see ``TableBatchedEmbeddingBags``."""
        for module in self.lookups:
            if isinstance(module, torch.nn.Module):
                module._apply(fn)  # type: ignore[no-untyped-call]
        self._frozen_now()
        self._cut_parameters.clear()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Torch's parameters, then this rank's part of every cut table as ``embedding_bags.{table}.weight``.

        The parts never have a gradient, and carry ``fused_optimizer`` as what updates them. A model around this module
        does not list them: what waits for gradients of its parameters, as DDP does, would wait forever.
        """
        yield from super().named_parameters(prefix, recurse, remove_duplicate)
        for name, weight in self._parts.named_weights() if recurse else ():
            known = self._cut_parameters.get(name)
            if known is None or known.data_ptr() != weight.data_ptr():
                trained = name not in self._frozen_now()
                known = self._cut_parameters[name] = torch.nn.Parameter(weight, requires_grad=trained)
                known._in_backward_optimizers = [self.fused_optimizer]  # type: ignore[attr-defined]
            yield f"{prefix}.embedding_bags.{name}.weight" if prefix else f"embedding_bags.{name}.weight", known

    def listed_parameters(self) -> Iterator[torch.nn.Parameter]:
        """Parameters that somebody may hold: torch's, and of cut tables those that ``named_parameters`` gave.

        A step asks for them, which is why none is made for a table that nobody listed.
        """
        for part in self.modules():
            yield from (param for param in part._parameters.values() if param is not None)
        weights = dict(self._parts.named_weights()) if self._cut_parameters else {}
        for name, param in self._cut_parameters.items():
            if param.data_ptr() == weights[name].data_ptr():
                yield param

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Name -> this rank's part of each optimizer state, and the step as int64 [1].

        ``embedding_bags.{table}.momentum1`` is [E, D], or [E, column blocks] where the optimizer keeps one value for a
        row. Together with ``state_dict()`` this is what a checkpoint needs, but for key-value tables' rows.
        """
        return self._parts.optimizer_state_dict()

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take states from parts at the same places, or from whole tensors.

        Raises:
            MissingKeyError: names that are absent. ConfigError: a step that is none. ShapeError: another shape, place
                or dtype. UnsupportedError: no dense tensor, or one on meta. Then nothing was changed.
        """
        self._parts.load_optimizer_state_dict(state)

    @property
    def key_value_tables(self) -> tuple[str, ...]:
        """Names of the tables whose rows ``key_value_state_dict`` gives, and ``state_dict`` does not."""
        return self._parts.key_value_tables

    def key_value_state_dict(self, *, snapshot: bool = True, chunk_rows: int | None = None) -> dict[str, Any]:
        """The key-value tables' rows, as ``KVStore.state_dict`` gives them; every rank calls this."""
        return self._parts.key_value_state_dict(snapshot=snapshot, chunk_rows=chunk_rows)

    def load_key_value_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's rows; each key-value table is left with these alone. Other names are passed over.

        Raises:
            ConfigError: rows that are not this rank's by the plan. What a store raises, see
                ``KVStore.load_state_dict``, as MissingKeyError for absent rows: its tables are then as they were.
        """
        self._parts.load_key_value_state_dict(state)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: view for name, view in self._parts.views(states=False).items()})

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: Any, *rest: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *rest)
        self._loaded, missing = self._parts.load(state_dict, prefix)
        if strict:
            missing_keys += missing

    def _forget_loaded(self, incompatible_keys: Any) -> None:
        names = incompatible_keys.unexpected_keys
        names[:] = [name for name in names if name not in self._loaded]


def _whole(param: Any, name: str) -> torch.Tensor:
    """The parameter, which every rank holds whole. Raises UnsupportedError where ``fully_shard`` has cut it."""
    if is_dtensor(param):
        expected = "a whole parameter: name those of this module in fully_shard(ignored_params=)"
        raise UnsupportedError("a part of what a lookup reads", got=type(param).__name__, expected=expected, where=name)
    found: torch.Tensor = param
    return found


def _optimizer_of(collection: Any, tables: Sequence[Any], optimizer: FusedOptimizer | None) -> FusedOptimizer:
    """What was asked for: here, or by ``apply_optimizer_in_backward`` before."""
    carried = optimizer_in_backward([collection.embedding_bags[table.name].weight for table in tables])
    if carried is not None and optimizer is not None:
        raise ConfigError(
            "an optimizer here, and another that the tables carry",
            got=(optimizer, carried),
            expected="one of them",
            where="optimizer",
        )
    chosen = carried if optimizer is None else optimizer
    return FusedOptimizer() if chosen is None else chosen
