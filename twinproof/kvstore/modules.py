"""Embedding modules whose rows live in a store and whose optimizer runs in the row, during backward.

Prevents gradients that a store never sees and optimizers that run twice: there is no dense parameter to hand to
``torch.optim``; one backward is one step.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from twinproof.errors import ConfigError, ShapeError, UnsupportedError
from twinproof.kvstore.buckets import Buckets
from twinproof.kvstore.checks import check_ids
from twinproof.kvstore.store import KVStore

__all__ = ["KVEmbedding", "KVEmbeddingBag"]

MODES = ("sum", "mean")


class _Lookup(torch.autograd.Function):
    """Rows of ids in float32; backward hands each occurrence's gradient to the module."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, module: _Rows, ids: torch.Tensor) -> torch.Tensor:
        ctx.module, ctx.ids = module, ids
        return module.store.get(module.table, ids).to(torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        ctx.module._step(ctx.ids, grads[0].contiguous())
        return None, None, None


class _Rows(torch.nn.Module):
    """What both modules share.

    Args:
        store: with ``optimizer_in_row`` and an optimizer for the table.
        table: needed when the store has several.
        lr, eps, beta1, beta2: see ``refimpl.optimizers``; ``lr`` may be changed between steps.
        buckets, process_group: how rows are dealt to ranks, see ``KVStore.state_dict``, which ``state_dict()`` of the
            module is, for this table: ``weight``, ``weight_id``, ``step`` and so on, behind the module's name. Every
            rank of the group calls it. ``load_state_dict`` leaves the table with the rows of the state dict alone.

    Raises:
        ConfigError: a table without an optimizer in its row.
    """

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
        if table is None and len(store.tables) > 1:
            raise ConfigError("the store has several tables", got=None, expected=store.tables, where="table")
        self.store, self.table = store, store.tables[0] if table is None else table
        if store.layout(self.table).optimizer == "none":
            raise ConfigError("the rows of this table have no optimizer", where=self.table)
        self.lr, self.eps, self.beta1, self.beta2 = lr, eps, beta1, beta2
        self.buckets, self.process_group = buckets, process_group
        # Autograd visits a function only when one of its inputs wants a gradient; this one never gets any.
        self._anchor = torch.zeros(0, requires_grad=True)

    @property
    def embedding_dim(self) -> int:
        """D."""
        return self.store.layout(self.table).embedding_dim

    @property
    def step_count(self) -> int:
        """Steps of the table so far: Adam's step. The store keeps it, and every form of save carries it."""
        return self.store.step_count(self.table)

    @step_count.setter
    def step_count(self, step: int) -> None:
        self.store.set_step_count(self.table, step)

    def _fields(self) -> tuple[str, ...]:
        return ("weight", "weight_id", "bucket", "metadata", "step", *self.store.layout(self.table).state_slots)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not isinstance(self.store, KVStore):
            raise UnsupportedError("this store gives no state dict", got=type(self.store).__name__, where=prefix)
        found = self.store.state_dict(buckets=self.buckets, process_group=self.process_group, tables=(self.table,))
        destination.update({prefix + name.removeprefix(self.table + "."): value for name, value in found.items()})

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
        given = {name.removeprefix(prefix): name for name in state_dict if name.startswith(prefix)}
        needed = [prefix + name for name in ("weight", "weight_id") if name not in given]
        if strict:
            missing_keys += needed
            unexpected_keys += [name for field, name in given.items() if field not in self._fields()]
        if not needed:
            rows = {f"{self.table}.{field}": state_dict[name] for field, name in given.items()}
            self.store.load_state_dict(rows, tables=(self.table,), clear=True)

    def _fqn_modifiers(self) -> dict[str, str]:
        # Torch's get_model_state_dict follows each name of a state dict through the attributes of the modules.
        return dict.fromkeys(self._fields(), "_field_names")

    @property
    def _field_names(self) -> SimpleNamespace:
        return SimpleNamespace(**dict.fromkeys(self._fields()))

    def _lookup(self, ids: torch.Tensor) -> torch.Tensor:
        checked = check_ids(ids.reshape(-1).contiguous(), "input")
        result: torch.Tensor = _Lookup.apply(self._anchor, self, checked)  # type: ignore[no-untyped-call]
        return result

    def _step(self, ids: torch.Tensor, grads: torch.Tensor) -> None:
        # The store counts the step when it was taken.
        step = self.step_count + 1
        self.store.apply_gradients(
            self.table, ids, grads, self.lr, step, eps=self.eps, beta1=self.beta1, beta2=self.beta2
        )


class KVEmbedding(_Rows):
    __doc__ = f"""One row for each id, as ``torch.nn.Embedding`` without a table size.
    {_Rows.__doc__}"""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Weights of ids of any shape, float32 [*shape, D]; a missing id has its initial weight.

        Backward reduces duplicates in ascending position, applies the optimizer and inserts missing ids.
        """
        return self._lookup(input).reshape(*input.shape, self.embedding_dim)


class KVEmbeddingBag(_Rows):
    __doc__ = f"""Sums or means of rows, as ``torch.nn.EmbeddingBag`` without a table size.

    ``mode``: "sum" or "mean".
    {_Rows.__doc__}"""

    def __init__(self, store: KVStore, *, mode: str = "mean", **options: Any) -> None:
        super().__init__(store, **options)
        if mode not in MODES:
            raise ConfigError("not a mode", got=mode, expected=MODES, where="mode")
        self.mode = mode

    def forward(self, input: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
        """Pooled weights, float32 [bags, D].

        Args:
            input: ids [bags, ids per bag], or [n] with ``offsets``.
            offsets: int64 [bags], where each bag begins; the first is 0, never descending. An empty bag gives zeros.

        Rows are added in float32 in the order of ``input``; a mean is the sum divided by the number of ids.

        Raises:
            ShapeError: ids or offsets of another shape, or offsets that do not cut ``input``.
        """
        bags = self._bags(input, offsets)
        rows = self._lookup(input)
        bag_count = input.shape[0] if offsets is None else offsets.numel()
        sums = torch.zeros(bag_count, self.embedding_dim).index_add(0, bags, rows)
        if self.mode == "sum":
            return sums
        sizes = torch.bincount(bags, minlength=bag_count).clamp(min=1)
        return sums / sizes[:, None].to(torch.float32)

    def _bags(self, input: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
        """The bag of each id."""
        if offsets is None:
            if input.dim() != 2:
                raise ShapeError("ids without offsets are [bags, ids per bag]", got=tuple(input.shape), where="input")
            return torch.arange(input.shape[0]).repeat_interleave(input.shape[1])
        starts = check_ids(offsets.contiguous(), "offsets")
        ends = torch.cat([starts[1:], torch.tensor([input.numel()])])
        if input.dim() != 1 or (starts.numel() == 0 and input.numel()):
            raise ShapeError("ids with offsets are [n], in at least one bag", got=tuple(input.shape), where="input")
        if starts.numel() and (int(starts[0]) != 0 or bool((ends < starts).any())):
            raise ShapeError("offsets that do not cut the ids", got=offsets.tolist()[:10], where="offsets")
        return torch.arange(starts.numel()).repeat_interleave(ends - starts)
