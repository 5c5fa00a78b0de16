"""Modules over a store: embeddings whose optimizer runs in the row, during backward, and FBGEMM's ``KVTensorWrapper``.

Prevents gradients that a store never sees and optimizers that run twice: there is no dense parameter to hand to
``torch.optim``; the backward of a lookup is one step. The wrapper has the original's name, constructor and methods, and
not what it does to its callers: no input is changed, a key that is not the id is an error, a state is read in its own
dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch

from twinproof.engine import eagerly, locals_of_callers
from twinproof.errors import (
    ConfigError,
    CorruptionError,
    DetachedStoreError,
    ShapeError,
    UnsupportedError,
    check_flags,
    check_kind,
)
from twinproof.kvstore.options import (
    HEADER_BYTES,
    RowLayout,
    as_bytes,
    check_dense,
    check_ids,
    check_int,
    check_matrix,
    check_tensor,
    from_bytes,
)
from twinproof.kvstore.rows import (
    SOURCES,
    Buckets,
    RowSource,
    RowStore,
    check_row_range,
    check_trained,
    chosen_buckets,
    places_of,
    rank_buckets,
    table_of,
)
from twinproof.kvstore.statedict import rank_and_world
from twinproof.kvstore.store import KVStore
from twinproof.optimizers import Hyper

__all__ = ["KVEmbedding", "KVEmbeddingBag", "KVTensorWrapper"]


MODES = ("sum", "mean")


class _Lookup(torch.autograd.Function):
    """Rows of ids in float32; backward hands each occurrence's gradient to the module."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, module: _StoreRows, ids: torch.Tensor) -> torch.Tensor:
        # Ids are the caller's memory: torch refuses a backward whose ids were written over meanwhile.
        ctx.save_for_backward(ids)
        ctx.module = module
        return module.store.get(module.table, ids).to(torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        ctx.module._step(ids, grads[0].contiguous())
        return None, None, None


class _StoreRows(torch.nn.Module):
    """What both modules share; ``KVEmbeddingBag`` names the arguments."""

    def __init__(
        self,
        store: KVStore,
        *,
        table: str | None = None,
        lr: float = 0.01,
        eps: float = 1e-8,
        beta1: float = 0.9,
        beta2: float = 0.999,
        buckets: Buckets | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__()
        if not hasattr(store, "tables"):
            raise ConfigError("not a store", got=type(store).__name__, expected="a KVStore", where="store")
        self.store, self.table = store, table_of(store.tables, table)
        check_trained(store, self.table)
        # What the first step or the first state dict would refuse.
        Hyper(lr=lr, eps=eps, beta1=beta1, beta2=beta2)
        chosen_buckets(buckets)
        self.lr, self.eps, self.beta1, self.beta2 = lr, eps, beta1, beta2
        self.buckets, self.process_group = buckets, process_group
        # Autograd visits a function only when one of its inputs wants a gradient; this one never gets any.
        self._anchor = torch.zeros(0, requires_grad=True, device="cpu")

    @property
    def embedding_dim(self) -> int:
        """D."""
        return self.store.layout(self.table).embedding_dim

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Say whether a backward takes steps on the rows; and as of any module, of its parameters.

        What is called of a model comes to its parameters, and not to its modules: rows of this one are trained on.
        """
        self._anchor.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)

    @property
    def step_count(self) -> int:
        """Steps of the table so far: Adam's step. The store keeps it, and every form of save carries it."""
        return self.store.step_count(self.table)

    @step_count.setter
    def step_count(self, step: int) -> None:
        self.store.set_step_count(self.table, step)

    def _fields(self) -> tuple[str, ...]:
        return ("weight", "weight_id", "bucket", "metadata", "step", *self.store.layout(self.table).state_slots)

    def _check_names(self) -> None:
        """Refuse parameters and buffers of a subclass that have names of the table's. Raises ConfigError."""
        taken = sorted(set(self._fields()) & {*self._parameters, *self._buffers})
        if taken:
            raise ConfigError(
                "names of the table's own entries", got=taken, expected="other names", where=type(self).__name__
            )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._check_names()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not isinstance(self.store, KVStore):
            raise UnsupportedError(
                "this store gives no state dict", got=type(self.store).__name__, expected="a KVStore", where=prefix
            )
        self._check_rows_of_all(prefix)
        found = self.store.state_dict(buckets=self.buckets, process_group=self.process_group, tables=(self.table,))
        destination.update({prefix + name.removeprefix(self.table + "."): value for name, value in found.items()})

    def _check_rows_of_all(self, prefix: str) -> None:
        """Refuse torch's ``full_state_dict`` where rows are dealt to ranks. Raises UnsupportedError, on every rank.

        Torch gathers DTensors: of these tensors it would keep the first rank's rows, as if they were all.
        """
        _, world_size = rank_and_world(self.process_group)
        total_count = chosen_buckets(self.buckets).total_count
        if rank_buckets(total_count, world_size, 0) == (0, total_count):
            return
        # Options do not come to modules; the only place that names them is the call of torch's that wants the state.
        if any(getattr(each, "full_state_dict", False) is True for each in locals_of_callers("info")):
            raise UnsupportedError(
                "full_state_dict would keep the rows of one rank",
                got=f"rows of {total_count} buckets on {world_size} ranks",
                expected="full_state_dict=False, or kvstore.save",
                where=prefix + "weight",
            )

    def _check_all_rows(self, rows: Mapping[str, Any], prefix: str) -> None:
        """Refuse the rows of one rank of several to a module that is alone. Raises UnsupportedError."""
        weight = rows[f"{self.table}.weight"]
        count = getattr(weight, "global_row_count", None)
        if count is not None and count != weight.shape[0] and rank_and_world(self.process_group)[1] == 1:
            raise UnsupportedError(
                "these are the rows of one rank of several",
                got=f"{weight.shape[0]} of {count} rows",
                expected="all of them: kvstore.save by those ranks and kvstore.load, or as many ranks",
                where=prefix + "weight",
            )

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        self._check_names()
        # Of a subclass: its own parameters and buffers. Hooks may rename entries, also those of the table.
        strange: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, strange, error_msgs)
        own = {prefix + field: field for field in self._fields()}
        unexpected_keys += [name for name in strange if name not in own]
        given = {field: name for name, field in own.items() if name in state_dict}
        needed = [prefix + name for name in ("weight", "weight_id") if name not in given]
        if strict:
            missing_keys += needed
        if not needed:
            rows = {f"{self.table}.{field}": state_dict[name] for field, name in given.items()}
            self._check_all_rows(rows, prefix)
            self.store.load_state_dict(rows, tables=(self.table,), clear=True)

    def _fqn_modifiers(self) -> dict[str, str]:
        # Torch's get_model_state_dict follows each name of a state dict through the attributes of the modules.
        return dict.fromkeys(self._fields(), "_field_names")

    @property
    def _field_names(self) -> SimpleNamespace:
        return SimpleNamespace(**dict.fromkeys(self._fields()))

    def _lookup(self, ids: torch.Tensor) -> torch.Tensor:
        # A stand-in for a store may know of no places.
        places: tuple[str, ...] = getattr(self.store, "places", ("cpu",))
        checked = check_ids(check_dense(ids, "input").reshape(-1).contiguous(), "input", places)
        result: torch.Tensor = _Lookup.apply(self._anchor, self, checked)  # type: ignore[no-untyped-call]
        return result

    def _step(self, ids: torch.Tensor, grads: torch.Tensor) -> None:
        # A store numbers the steps of all threads that train a table; whoever stands in for one is asked by one.
        step = None if isinstance(self.store, KVStore) else self.step_count + 1
        self.store.apply_gradients(
            self.table, ids, grads, self.lr, step, eps=self.eps, beta1=self.beta1, beta2=self.beta2
        )


class KVEmbedding(_StoreRows):
    """One row for each id, as ``torch.nn.Embedding`` without a table size; arguments, steps: see ``KVEmbeddingBag``."""

    @eagerly
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Weights of ids of any shape, float32 [*shape, D]; a missing id has its initial weight.

        Raises ShapeError for nested and sparse ids.

        Backward reduces duplicates in ascending position, applies the optimizer and inserts missing ids.
        Torch refuses it where the ids were written over meanwhile, and a second one without ``retain_graph``.
        """
        return self._lookup(input).reshape(*input.shape, self.embedding_dim)


class KVEmbeddingBag(_StoreRows):
    """Sums or means of rows, as ``torch.nn.EmbeddingBag`` without a table size.

    Args:
        store: with ``optimizer_in_row`` and an optimizer for the table.
        table: needed when the store has several.
        mode: "sum" or "mean".
        lr, eps, beta1, beta2: see ``twinproof.optimizers.Hyper``; ``lr`` may be changed between steps.
        buckets, process_group: how rows are dealt to ranks, see ``KVStore.state_dict``, which ``state_dict()`` of the
            module is, for this table: ``weight``, ``weight_id``, ``step`` and so on, behind the module's name. Every
            rank of the group calls it. ``load_state_dict`` leaves the table with the rows of the state dict alone.
            With ``buckets`` each of any number of ranks loads its own of a checkpoint of training; without, one rank.

    The optimizer is the row's, and none that a ``GradScaler`` knows: the scaler neither unscales these gradients nor
    skips these steps, so that rows take scaled gradients, and infinite ones. Take the scale out in a hook of the
    output::

        out = bag(ids)
        out.register_hook(lambda grad: (grad / scaler.get_scale()).nan_to_num(0, 0, 0))

    A gradient of zeros is still a step: moments of Adam go on, and the step counts. bfloat16 needs no scaler.

    Every lookup takes a step of its own in the backward, as FBGEMM's tables do: a table that was looked up twice before
    one backward takes two, of which each sees the gradients of its lookup alone, the later lookup's first. Look all ids
    up at once for one step. ``requires_grad_(False)`` of the module freezes its rows. In a compiled model a lookup runs
    as it is, between graphs.

    Raises:
        ConfigError: a table without an optimizer in its row, another mode, or what no step or state dict would take.
    """

    def __init__(
        self,
        store: KVStore,
        *,
        mode: str = "mean",
        table: str | None = None,
        lr: float = 0.01,
        eps: float = 1e-8,
        beta1: float = 0.9,
        beta2: float = 0.999,
        buckets: Buckets | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__(
            store,
            table=table,
            lr=lr,
            eps=eps,
            beta1=beta1,
            beta2=beta2,
            buckets=buckets,
            process_group=process_group,
        )
        if mode not in MODES:
            raise ConfigError("not a mode", got=mode, expected=MODES, where="mode")
        self.mode = mode

    @eagerly
    def forward(self, input: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
        """Pooled weights, float32 [bags, D].

        Args:
            input: ids [bags, ids per bag], or [n] with ``offsets``; they may lie on the store's device.
            offsets: int64 [bags], where each bag begins; the first is 0, never descending. An empty bag gives zeros.

        Rows are added in float32 in the order of ``input``; a mean is the sum divided by the number of ids. Result and
        gradient lie where the ids do. There the host waits for nothing of ids [bags, ids per bag]; ``offsets`` are
        checked, and it waits for the answer.

        Raises:
            ShapeError: ids or offsets of another shape, nested or sparse, or offsets that do not cut ``input``.
        """
        ends = self._ends(input, offsets)
        sums = self._pool(self._lookup(input), ends)
        if self.mode == "sum":
            return sums
        return sums / ends.diff().clamp(min=1)[:, None].to(torch.float32)

    @staticmethod
    def _pool(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Sums [bags, D] of rows [n, D], in order from +0; bag b has those from ``ends[b]`` to ``ends[b + 1]``."""
        bag_count = ends.numel() - 1
        bags = torch.arange(bag_count, device=ends.device).repeat_interleave(ends.diff(), output_size=rows.shape[0])
        return rows.new_zeros(bag_count, rows.shape[1]).index_add(0, bags, rows)

    def _ends(self, input: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
        """Where bags begin, and where the last one ends, int64 [bags + 1]."""
        check_dense(input, "input")
        if offsets is None:
            if input.dim() != 2:
                got, expected = tuple(input.shape), "[bags, ids per bag]"
                raise ShapeError("ids without offsets", got=got, expected=expected, where="input")
            return torch.arange(input.shape[0] + 1, device=input.device) * input.shape[1]
        starts = check_ids(check_dense(offsets, "offsets").contiguous(), "offsets", places_of(input))
        if input.dim() != 1 or (starts.numel() == 0 and input.numel()):
            found = f"{tuple(input.shape)} in {starts.numel()} bags"
            raise ShapeError("ids with offsets", got=found, expected="[n] in at least one bag", where="input")
        ends = torch.cat([starts, starts.new_full((1,), input.numel())])
        # One answer to wait for.
        if starts.numel() and bool((starts[0] != 0) | (ends.diff() < 0).any()):
            expected = f"0, and then ascending to at most {input.numel()}"
            raise ShapeError(
                "offsets that do not cut the ids", got=offsets.tolist()[:10], expected=expected, where="offsets"
            )
        return ends


class KVTensorWrapper:
    """Rows of one table as a two-dimensional tensor that is read and written in ranges.

    Args:
        shape: [rows, width], the width in elements of ``dtype``.
        dtype: of what is read and written; need not be the weights'.
        row_offset: added to an id to give the store's.
        snapshot_handle: a snapshot of the store to read from; None reads the store.
        sorted_indices: int64 [rows] or [rows, 1], the id of each row; None is 0, 1, 2, and so on.
        width_offset: where the width begins, in elements of ``dtype``: in the whole row, header first, where the store
            returns whole rows, else behind the header.
        checkpoint_handle: only None; there are no hard-linked checkpoints here.
        read_only: writes do nothing.
        only_load_weight: of whole rows that are written, only the weight is taken.
        table: needed where the store has several.

    Give it the store with ``set_dram_db_wrapper`` before anything else; another one takes the first one's place.

    Raises:
        ConfigError, ShapeError, UnsupportedError: arguments that cannot be honoured, as soon as the store is known.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        row_offset: int,
        snapshot_handle: RowSource | None = None,
        sorted_indices: torch.Tensor | None = None,
        width_offset: int = 0,
        checkpoint_handle: None = None,
        read_only: bool = False,
        only_load_weight: bool = False,
        *,
        table: str | None = None,
    ) -> None:
        is_pair = isinstance(shape, Sequence) and len(shape) == 2
        if not is_pair or any(type(size) is not int or size < 0 for size in shape):
            raise ShapeError("not the shape of rows", got=shape, expected="[rows, width]", where="shape")
        if snapshot_handle is not None:
            check_kind(snapshot_handle, RowSource, "snapshot_handle", SOURCES)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError("not a dtype", got=dtype, expected="torch.dtype", where="dtype")
        if checkpoint_handle is not None:
            raise UnsupportedError(
                "there are no checkpoint handles here",
                got=checkpoint_handle,
                expected="SavedRows",
                where="checkpoint_handle",
            )
        if type(width_offset) is not int or width_offset < 0:
            raise ConfigError("not an offset", got=width_offset, expected="an int >= 0", where="width_offset")
        check_int(row_offset, "row_offset")
        check_flags(read_only=read_only, only_load_weight=only_load_weight)
        self._ids: torch.Tensor | None = None
        if sorted_indices is not None:
            flat = check_tensor(sorted_indices, "sorted_indices").reshape(-1)
            self._ids = check_ids(flat, "sorted_indices").clone()
        if self._ids is not None and self._ids.numel() != shape[0]:
            raise ShapeError("one id for each row", got=self._ids.numel(), expected=shape[0], where="sorted_indices")
        self.shape, self.dtype, self.read_only = tuple(shape), dtype, bool(read_only)
        self.only_load_weight = bool(only_load_weight)
        self._row_offset, self._width_offset, self._table = row_offset, width_offset, table
        self._snapshot, self._store = snapshot_handle, cast("RowStore | None", None)

    def set_dram_db_wrapper(self, db: RowStore) -> None:
        """Give it the store. Raises ConfigError: no such table, a range outside its rows, or a snapshot of others."""
        check_kind(db, RowStore, "db", "a KVStore")
        layout = db.layout(table_of(db.tables, self._table))
        snapped = layout if self._snapshot is None else self._snapshot.layout(table_of(db.tables, self._table))
        if snapped != layout:
            raise ConfigError("a snapshot of other rows", got=snapped, expected=layout, where="snapshot_handle")
        begin, end = self._range(db.return_whole_row)
        if end > layout.row_bytes:
            raise ConfigError(
                "columns outside the row",
                got=(begin, end),
                expected=f"within {layout.row_bytes} bytes",
                where="set_dram_db_wrapper",
            )
        if self.only_load_weight and not self._is_whole(layout, begin, end):
            raise ConfigError(
                "only_load_weight is for whole rows",
                got=(begin, end),
                expected=(0, layout.row_bytes),
                where="set_dram_db_wrapper",
            )
        self._store = db

    def set_embedding_rocks_dp_wrapper(self, db: RowStore) -> None:
        """The same: there is one kind of store."""
        self.set_dram_db_wrapper(db)

    def _range(self, whole: bool) -> tuple[int, int]:
        begin = self._width_offset * self.dtype.itemsize + (0 if whole else HEADER_BYTES)
        return begin, begin + self.shape[1] * self.dtype.itemsize

    @staticmethod
    def _is_whole(layout: RowLayout, begin: int, end: int) -> bool:
        return (begin, end) == (0, layout.row_bytes)

    def _opened(self) -> tuple[RowStore, str, int, int]:
        if self._store is None:
            raise DetachedStoreError(
                "no store was given", got=None, expected="set_dram_db_wrapper(store)", where="KVTensorWrapper"
            )
        table = table_of(self._store.tables, self._table)
        return self._store, table, *self._range(self._store.return_whole_row)

    def _global(self, dim: int, start: int, length: int) -> torch.Tensor:
        check_row_range(dim, start, length, self.shape[0])
        if self._ids is None:
            return torch.arange(start, start + length, device="cpu")
        return self._ids[start : start + length]

    def _stored(self, ids: torch.Tensor) -> torch.Tensor:
        """The store's ids, int64 [n]. Raises ConfigError for those that are no int64: others' rows would be theirs."""
        found = ids + self._row_offset
        outside = ids[(found < ids) != (self._row_offset < 0)]
        if outside.numel():
            expected = f"ids that stay within 64 bits with {self._row_offset}"
            raise ConfigError("ids that no store has", got=outside[:10].tolist(), expected=expected, where="row_offset")
        return found

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """Rows [start, start + length), fresh: [length, width]."""
        return self.get_weights_by_ids(self._global(dim, start, length))

    def get_weights_by_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """What is shown of any ids [n]; in whole rows the key is the id, without ``row_offset``."""
        store, table, begin, end = self._opened()
        source, checked = self._snapshot or store, check_ids(ids)
        raw = source.get_rows(table, self._stored(checked), offset_bytes=begin, width_bytes=end - begin)
        if self._is_whole(store.layout(table), begin, end):
            raw[:, :8] = as_bytes(checked.reshape(-1, 1))
        return from_bytes(raw, self.dtype)

    def set_range(self, dim: int, start: int, length: int, weights: torch.Tensor) -> None:
        """Write rows [start, start + length) from [length, width]."""
        self.set_weights_and_ids(weights, self._global(dim, start, length))

    def set_weights_and_ids(self, weights: torch.Tensor, ids: torch.Tensor) -> None:
        """Write what is shown of any ids; neither argument is changed.

        Raises:
            CorruptionError: whole rows whose keys are not ``ids``. ConfigError, ShapeError, UnsupportedError.
        """
        store, table, begin, end = self._opened()
        checked = check_ids(ids)
        raw = as_bytes(check_matrix(weights, checked.numel(), self.shape[1], self.dtype, "weights"))
        whole, layout = self._is_whole(store.layout(table), begin, end), store.layout(table)
        if whole and not torch.equal(from_bytes(raw[:, :8], torch.int64)[:, 0], checked):
            keys = from_bytes(raw[:, :8], torch.int64)[:, 0]
            at = int((keys != checked).nonzero()[0])
            got, expected, where = int(keys[at]), int(checked[at]), f"{table}: row {at}"
            raise CorruptionError("rows whose keys are not the ids", got=got, expected=expected, where=where)
        mine = self._stored(checked)
        if self.read_only:
            return
        if not whole:
            store.place(table, mine, raw, begin)
        elif self.only_load_weight:
            store.place(table, mine, raw[:, HEADER_BYTES : HEADER_BYTES + layout.weight_bytes], HEADER_BYTES)
        else:
            store.set_rows(table, torch.cat([as_bytes(mine.reshape(-1, 1)), raw[:, 8:]], dim=1))

    @property
    def strides(self) -> tuple[int, int]:
        """Of a dense tensor of this shape."""
        return self.shape[1], 1

    @property
    def dtype_str(self) -> str:
        """Name of the dtype."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def device_str(self) -> str:
        """``cpu``."""
        return "cpu"

    @property
    def layout_str(self) -> str:
        """``Strided``, as the original spells it."""
        return "Strided"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "a wrapper stays with its store", got=type(self).__name__, expected="KVTensor", where="pickle"
        )
