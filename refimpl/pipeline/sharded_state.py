"""State dicts of sharded tables: every table and optimizer state whole under one name, whatever the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from refimpl.errors import MissingKeyError
from refimpl.pipeline.config import EmbeddingBagConfig, TableSharding
from refimpl.pipeline.shards import Shard
from refimpl.pipeline.state import TableShard, copy_into

__all__ = ["ShardedState"]

STEP = "fused_optimizer.step"


class ShardedState(torch.nn.Module):
    """The state of ``ShardedEmbeddingBagCollection``."""

    tables: tuple[EmbeddingBagConfig, ...]
    plan: list[TableSharding]
    shards: list[Shard]
    groups: list[Any]
    fused_optimizer: Any
    process_group: Any
    _loaded: set[str]

    def __init__(self) -> None:
        super().__init__()
        # Tables that are cut are no parameters of any child, whose names torch would call unexpected.
        self.register_load_state_dict_post_hook(ShardedState._forget_loaded)  # type: ignore[no-untyped-call]

    def _forget_loaded(self, incompatible_keys: Any) -> None:
        names = incompatible_keys.unexpected_keys
        names[:] = [name for name in names if name not in self._loaded]

    def local_shards(self) -> dict[str, tuple[Shard, torch.Tensor, dict[str, torch.Tensor]]]:
        """Table -> this rank's shard, its weight [r, c] and its states [r, c] or [r, 1]: themselves, not copies."""
        found = {}
        for group in self.groups:
            for index, shard in enumerate(group.shards if group.shards[0].kind != "key_value" else ()):
                module = group.module
                found[self.tables[shard.table].name] = (shard, module.weight(index), module.states(index))
        return found

    def _views(self, *, states: bool) -> dict[str, TableShard]:
        """Name -> this rank's part of every table that is cut, or of its optimizer states."""
        local, views = self.local_shards(), {}
        for index, table in enumerate(self.tables):
            if self.plan[index].kind in ("data_parallel", "key_value"):
                continue
            shard, weight, held = local.get(table.name, (None, None, {}))
            row, column = (shard.rows[0], shard.columns[0]) if shard else (0, 0)
            name, rows = f"embedding_bags.{table.name}", table.num_embeddings
            if not states:
                views[f"{name}.weight"] = TableShard.make(
                    (rows, table.embedding_dim), table.data_type, weight, (row, column)
                )
                continue
            # An optimizer that keeps one value for a row keeps one for each column block.
            parts = max(each.part for each in self.shards if each.table == index) + 1
            for state, width in self.fused_optimizer.config.state_widths(table.embedding_dim).items():
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
        step = torch.tensor([self.fused_optimizer.step_count])
        return {**self._views(states=True), STEP: step}

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take states from parts at the same places, or from whole tensors.

        Raises:
            MissingKeyError: names that are absent; nothing was changed. ShapeError: see ``copy_into``.
        """
        views = self._views(states=True)
        missing = sorted({*views, STEP} - set(state))
        if missing:
            raise MissingKeyError("names are not in the state dict", got=missing, where="optimizer state")
        for name, view in views.items():
            copy_into(view, state[name], name)
        self.fused_optimizer.step_count = int(state[STEP])

    def key_value_state_dict(self, **options: Any) -> dict[str, Any]:
        """The key-value tables' rows, as ``KVStore.state_dict`` gives them; every rank calls this."""
        result: dict[str, Any] = {}
        for table, sharding in zip(self.tables, self.plan, strict=True):
            if sharding.kind == "key_value":
                found = sharding.store.state_dict(buckets=sharding.buckets, process_group=self.process_group, **options)
                result |= {
                    f"embedding_bags.{name}": value
                    for name, value in found.items()
                    if name.startswith(table.name + ".")
                }
        return result

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: view for name, view in self._views(states=False).items()})

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: Any, *rest: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *rest)
        self._loaded = set()
        for name, view in self._views(states=False).items():
            if prefix + name in state_dict:
                self._loaded.add(prefix + name)
                copy_into(view, state_dict[prefix + name], prefix + name)
            elif strict:
                missing_keys.append(prefix + name)
