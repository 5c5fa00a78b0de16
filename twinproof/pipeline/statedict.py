"""State dicts of sharded tables: every table and optimizer state whole under one name, whatever the plan.

Each rank hands out its own rows and columns, so that another plan, or another number of ranks, reads what it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from twinproof.errors import MissingKeyError, ShapeError, UnsupportedError
from twinproof.pipeline.lookups import InBackwardOptimizer
from twinproof.pipeline.sharding import Layout, Shard

__all__ = ["CutTable", "TableParts", "TableShard", "copy_into"]


class TableShard(torch.Tensor):
    """This rank's part, [r, c] at (row, column), of a global [E, D] tensor. Its shape is the global one.

    ``to_local()`` is the part itself, not a copy, or None on a rank that has none; other torch operations are refused,
    for they would need the whole. Save and load it through ``torch.distributed.checkpoint``.
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

    def __deepcopy__(self, memo: Any) -> TableShard:
        local = None if self._local is None else self._local.clone()
        return TableShard.make((self.shape[0], self.shape[1]), self.dtype, local, self._origin)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        local = None if self._local is None else tuple(self._local.shape)
        return f"TableShard(shape={tuple(self.shape)}, dtype={self.dtype}, local={local} at {self._origin})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        raise UnsupportedError("a part of a table, not the table: use to_local()", got=str(func), where="TableShard")

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


def copy_into(target: TableShard, value: Any, where: str) -> None:
    """Fill the part from a whole tensor, or from a part at the same place, which may be the very same memory.

    Raises:
        ShapeError: another shape, place or dtype. UnsupportedError: not a tensor.
    """
    if not isinstance(value, torch.Tensor):
        raise UnsupportedError("not a tensor", got=type(value).__name__, where=where)
    if tuple(value.shape) != tuple(target.shape) or value.dtype != target.dtype:
        got, expected = (tuple(value.shape), value.dtype), (tuple(target.shape), target.dtype)
        raise ShapeError("not this table", got=got, expected=expected, where=where)
    local, (row, column) = target.to_local(), target.origin
    if isinstance(value, TableShard):
        source = value.to_local()
        places = [
            None if part is None else (at, tuple(part.shape))
            for part, at in ((source, value.origin), (local, target.origin))
        ]
        if places[0] != places[1]:
            raise ShapeError("a part at another place", got=places[0], expected=places[1], where=where)
    elif local is not None:
        source = value[row : row + local.shape[0], column : column + local.shape[1]]
    if local is not None and source is not None and source.data_ptr() != local.data_ptr():
        local.copy_(source)


STEP = "fused_optimizer.step"


class TableParts:
    """This rank's parts of the tables of one ``Layout``: what a state dict saves and loads.

    Args:
        layout: of the tables.
        lookups: what looks up each of this rank's groups, whose memory the parts are.
        optimizer: the optimizer in the backward.
    """

    def __init__(self, layout: Layout, lookups: Sequence[Any], optimizer: InBackwardOptimizer) -> None:
        self._layout, self._lookups, self._optimizer = layout, lookups, optimizer

    def local_shards(self) -> dict[str, tuple[Shard, torch.Tensor, dict[str, torch.Tensor]]]:
        """Table -> this rank's shard, its weight [r, c] and its states [r, c] or [r, 1]: themselves, not copies."""
        layout, found = self._layout, {}
        for group, module in zip(layout.groups, self._lookups, strict=True):
            for index, shard in enumerate(group.shards):
                if not layout.shardings[shard.table].rule.is_cut:
                    continue
                found[layout.tables[shard.table].name] = (shard, module.weight(index), module.states(index))
        return found

    def views(self, *, states: bool) -> dict[str, TableShard]:
        """Name -> this rank's part of every table that is cut, or of its optimizer states."""
        local, views = self.local_shards(), {}
        for index, table in enumerate(self._layout.tables):
            if not self._layout.shardings[index].rule.is_cut:
                continue
            shard, weight, held = local.get(table.name, (None, None, {}))
            row, column = (shard.rows[0], shard.columns[0]) if shard else (0, 0)
            name, rows = f"embedding_bags.{table.name}", table.num_embeddings
            if not states:
                views[f"{name}.weight"] = TableShard.make(
                    (rows, table.embedding_dim), table.dtype, weight, (row, column)
                )
                continue
            # An optimizer that keeps one value for a row keeps one for each column block.
            parts = max(each.part for each in self._layout.shards if each.table == index) + 1
            for state, width in self._optimizer.config.state_widths(table.embedding_dim).items():
                wide = width == table.embedding_dim and width > 1
                place = (row, column if wide else shard.part if shard else 0)
                shape = (rows, table.embedding_dim if wide else max(parts, width))
                views[f"{name}.{state}"] = TableShard.make(shape, torch.float32, held.get(state), place)
        return views

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Name -> this rank's part of each optimizer state, and the step as int64 [1].

        ``embedding_bags.{table}.momentum1`` is [E, D], or [E, column blocks] where the optimizer keeps one value for a
        row. Together with ``state_dict()`` this is what a checkpoint needs, but for key-value tables.
        """
        step = torch.tensor([self._optimizer.step_count])
        return {**self.views(states=True), STEP: step}

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take states from parts at the same places, or from whole tensors.

        Raises:
            MissingKeyError: names that are absent; nothing was changed. ShapeError: see ``copy_into``.
        """
        views = self.views(states=True)
        missing = sorted({*views, STEP} - set(state))
        if missing:
            raise MissingKeyError("names are not in the state dict", got=missing, where="optimizer state")
        for name, view in views.items():
            copy_into(view, state[name], name)
        self._optimizer.step_count = int(state[STEP])

    def key_value_state_dict(self, **options: Any) -> dict[str, Any]:
        """The key-value tables' rows, as ``KVStore.state_dict`` gives them; every rank calls this."""
        result: dict[str, Any] = {}
        for table, sharding in zip(self._layout.tables, self._layout.shardings, strict=True):
            if sharding.rule.is_stored:
                found = sharding.store.state_dict(
                    buckets=sharding.buckets, process_group=self._layout.process_group, **options
                )
                result |= {
                    f"embedding_bags.{name}": value
                    for name, value in found.items()
                    if name.startswith(table.name + ".")
                }
        return result

    def load(self, state: Mapping[str, Any], prefix: str) -> tuple[list[str], list[str]]:
        """Take the parts of tables from a state dict; returns the names that were taken, and those that are missing.

        Raises:
            ShapeError: see ``copy_into``.
        """
        loaded, missing = list[str](), list[str]()
        for name, view in self.views(states=False).items():
            if prefix + name in state:
                loaded.append(prefix + name)
                copy_into(view, state[prefix + name], prefix + name)
            else:
                missing.append(prefix + name)
        return loaded, missing


class CutTable(torch.nn.Module):
    """What stands under a cut table's name: ``weight`` is this rank's part of it, which is no parameter of torch's."""

    def __init__(self, parts: TableParts, table: str) -> None:
        super().__init__()
        self._parts, self._table = parts, table

    @property
    def weight(self) -> TableShard:
        """This rank's part, itself and not a copy."""
        return self._parts.views(states=False)[f"embedding_bags.{self._table}.weight"]
