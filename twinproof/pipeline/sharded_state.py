"""State dicts of sharded tables: every table and optimizer state whole under one name, whatever the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from twinproof.errors import MissingKeyError
from twinproof.pipeline.config import EmbeddingBagConfig, TableSharding
from twinproof.pipeline.shards import Shard
from twinproof.pipeline.state import TableShard, copy_into

__all__ = ["CutTable", "ShardedState"]

STEP = "fused_optimizer.step"


class CutTable(torch.nn.Module):
    """What stands under a cut table's name: ``weight`` is this rank's part of it, which is no parameter of torch's."""

    def __init__(self, owner: ShardedState, name: str) -> None:
        super().__init__()
        # Not by torch's own way, which would make the owner a child of its child.
        self.__dict__["_owner"], self.table = owner, name

    @property
    def weight(self) -> TableShard:
        """This rank's part, itself and not a copy."""
        return self.__dict__["_owner"]._views(states=False)[f"embedding_bags.{self.table}.weight"]  # type: ignore[no-any-return]


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
        self._cut_parameters: dict[str, torch.nn.Parameter] = {}
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

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Torch's parameters, then this rank's part of every cut table as ``embedding_bags.{table}.weight``.

        The parts never have a gradient, and carry ``fused_optimizer`` as what updates them. A model around this module
        does not list them: what waits for gradients of its parameters, as DDP does, would wait forever.
        """
        yield from super().named_parameters(prefix, recurse, remove_duplicate)
        for name, (_, weight, _) in self.local_shards().items() if recurse else ():
            known = self._cut_parameters.get(name)
            if known is None or known.data_ptr() != weight.data_ptr():
                known = self._cut_parameters[name] = torch.nn.Parameter(weight)
                known._in_backward_optimizers = [self.fused_optimizer]  # type: ignore[attr-defined]
            yield f"{prefix}.embedding_bags.{name}.weight" if prefix else f"embedding_bags.{name}.weight", known

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
                    (rows, table.embedding_dim), table.dtype, weight, (row, column)
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
